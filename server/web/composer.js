// The box at the bottom: the question, the pictures to send, and every way to bring them here. Sends nothing itself.

import { byId, element } from "./dom.js";
import { count, counted } from "./format.js";
import { drawnPicture, forget, readPicture } from "./pictures.js";

const MIB = 1048576;
// Until the server has told its own.
const DEFAULT_LIMITS = { max_images: 8, max_image_bytes: 20 * MIB, max_image_pixels: 64e6, max_body_bytes: 64 * MIB };

export class Composer {
  limits = DEFAULT_LIMITS;
  /** Pictures that the conversation holds already: the server's limit is on all of them. */
  numSent = 0;

  #form = byId("composer");
  #question = byId("question");
  #tray = byId("tray");
  #notice = byId("notice");
  #files = byId("files");
  #pictures = [];
  #isBusy = false;
  #reading = Promise.resolve();

  /** `onAsk({text, pictures, temperature, maxTokens})`, `onStop()`. */
  constructor({ onAsk, onStop }) {
    this.#form.addEventListener("submit", async (event) => {
      event.preventDefault();
      await this.#reading;
      if (!this.#isBusy) this.#submit(onAsk);
    });
    this.#question.addEventListener("keydown", (event) => {
      // During composition Enter picks a word.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    this.#question.addEventListener("input", () => this.#fitHeight());
    byId("stop").addEventListener("click", onStop);
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this.#isBusy) onStop();
      byId("options").open = false;
    });
    for (const id of ["attach", "choose"]) byId(id).addEventListener("click", () => this.#files.click());
    byId("example").addEventListener("click", () => this.#example());
    this.#files.addEventListener("change", () => {
      this.add([...this.#files.files]);
      this.#files.value = "";
    });
    document.addEventListener("paste", (event) => this.#paste(event));
    this.#acceptDrops();
  }

  /** While an answer streams, Stop stands where Ask was. */
  set isBusy(value) {
    const hadFocus = document.activeElement === byId("send") || document.activeElement === byId("stop");
    this.#isBusy = value;
    byId("send").hidden = value;
    byId("stop").hidden = !value;
    if (hadFocus) byId(value ? "stop" : "question").focus();
  }

  /** Reads files and puts them into the tray, in their order. */
  add(files) {
    this.#reading = this.#reading.then(() => this.#read(files));
    return this.#reading;
  }

  /** Puts a question back that could not be answered, unless the reader has begun another. */
  restore({ text, pictures }) {
    if (this.#question.value.trim() === "") this.#question.value = text;
    this.#pictures = [...pictures, ...this.#pictures];
    this.#show();
    this.#fitHeight();
    this.#question.focus();
  }

  clear() {
    this.#pictures.forEach(forget);
    this.#pictures = [];
    this.#question.value = "";
    this.notice("");
    this.#show();
    this.#fitHeight();
    this.#question.focus();
  }

  /** Says what is wrong, above the question. */
  notice(text) {
    this.#notice.textContent = text;
    this.#notice.hidden = text === "";
  }

  #submit(onAsk) {
    const text = this.#question.value.trim();
    const pictures = this.#pictures;
    if (text === "" && pictures.length === 0) {
      this.#question.focus();
      return;
    }
    const number = (id) => (byId(id).value === "" || !byId(id).checkValidity() ? null : Number(byId(id).value));
    this.#pictures = [];
    this.#question.value = "";
    this.notice("");
    this.#show();
    this.#fitHeight();
    byId("options").open = false;
    onAsk({ text, pictures, temperature: number("temperature"), maxTokens: number("max-tokens") });
  }

  async #read(files) {
    const problems = [];
    for (const file of files) {
      if (this.numSent + this.#pictures.length >= this.limits.max_images) {
        problems.push(`This server takes ${counted(this.limits.max_images, "picture")} in one conversation.`);
        break;
      }
      try {
        this.#pictures.push(await readPicture(file, this.limits));
        this.#show();
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.notice(problems.join(" "));
  }

  async #example() {
    await this.add([await drawnPicture()]);
    if (this.#question.value === "") this.#question.value = "What is in the picture?";
    this.#fitHeight();
    this.#question.focus();
  }

  #paste(event) {
    const files = [...(event.clipboardData?.files ?? [])].filter((file) => file.type.startsWith("image/"));
    if (files.length === 0) return;
    event.preventDefault();
    this.add(files);
    this.#question.focus();
  }

  #acceptDrops() {
    const veil = byId("drop");
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    // Entering a child leaves its parent: count.
    let depth = 0;
    const leave = () => {
      depth = 0;
      veil.hidden = true;
    };
    document.addEventListener("dragenter", (event) => {
      if (!hasFiles(event)) return;
      depth += 1;
      veil.hidden = false;
    });
    document.addEventListener("dragleave", () => {
      depth -= 1;
      if (depth <= 0) leave();
    });
    document.addEventListener("dragover", (event) => {
      if (hasFiles(event)) event.preventDefault();
    });
    document.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      leave();
      this.add([...event.dataTransfer.files]);
      this.#question.focus();
    });
  }

  #show() {
    this.#tray.hidden = this.#pictures.length === 0;
    this.#tray.replaceChildren(...this.#pictures.map((picture, index) => this.#thumbnail(picture, index)));
  }

  #thumbnail(picture, index) {
    const size = `${count(picture.width)} × ${count(picture.height)}`;
    const title = picture.isReduced ? `${picture.name}, reduced to ${size}` : `${picture.name}, ${size}`;
    const remove = () => {
      this.#pictures.splice(index, 1);
      forget(picture);
      this.#show();
      (this.#tray.querySelectorAll("button")[index] ?? this.#question).focus();
    };
    return element(
      "li",
      { title },
      element("img", { src: picture.previewUrl, alt: title }),
      picture.isReduced ? element("span", { class: "reduced" }, "reduced") : "",
      element("button", { type: "button", "aria-label": `Remove ${picture.name}`, on: { click: remove } }, "×"),
    );
  }

  #fitHeight() {
    this.#question.style.height = "auto";
    this.#question.style.height = `${this.#question.scrollHeight}px`;
  }
}
