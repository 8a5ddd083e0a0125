// Asks for the API key when the server wants one.

import { byId } from "./dom.js";

export class KeyDialog {
  #dialog = byId("key");
  #input = byId("key-value");
  #button = byId("key-button");
  #isDismissed = false;

  /** `onKey(key)` is called with what was entered. */
  constructor(onKey) {
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#isDismissed = false;
      this.#dialog.close();
      onKey(this.#input.value);
    });
    byId("key-cancel").addEventListener("click", () => {
      this.#isDismissed = true;
      this.#dialog.close();
    });
    this.#dialog.addEventListener("cancel", () => (this.#isDismissed = true));
    this.#dialog.addEventListener("close", () => (this.#input.value = ""));
    this.#button.addEventListener("click", () => this.#open());
  }

  /** The server said 401. Asks once; who closes the dialog finds the button instead. */
  ask() {
    this.#button.hidden = false;
    if (!this.#isDismissed) this.#open();
  }

  #open() {
    if (!this.#dialog.open) this.#dialog.showModal();
  }
}
