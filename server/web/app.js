// Puts the page together: who tells whom. Each part knows only its own.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { byId, element, setText } from "./dom.js";
import { EngineView } from "./engine.js";
import { KeyDialog } from "./key.js";
import { Poll } from "./poll.js";
import { Transcript } from "./transcript.js";

const api = new Api();
const engine = new EngineView();
const composer = new Composer({ onAsk: (question) => chat.ask(question), onStop: () => chat.stop() });
const key = new KeyDialog((value) => {
  api.key = value;
  loadModels();
  poll.now();
});
const poll = new Poll(api, {
  onStatus: (status) => {
    composer.limits = status.limits;
    engine.show(status);
    if (!chat.model) loadModels();
  },
  onError: (error) => {
    engine.fail(error);
    if (error.status === 401) key.ask();
  },
});
const chat = new Chat({
  api,
  transcript: new Transcript(),
  composer,
  onBusy: (isBusy) => (poll.isBusy = isBusy),
  onUnauthorized: () => key.ask(),
});

async function loadModels() {
  let names;
  try {
    names = (await api.get("v1/models")).data.map((card) => card.id);
  } catch {
    // The poll tells, and asks again.
    return;
  }
  chat.model = names[0];
  setText(byId("model"), names[0]);
  document.title = `${names[0]} · Fovea`;
  byId("models").replaceChildren(...names.map((name) => element("option", {}, name)));
  byId("models").hidden = names.length < 2;
  byId("model").hidden = names.length > 1;
}

function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", String(button.dataset.show === view));
  }
}

byId("models").addEventListener("change", (event) => (chat.model = event.target.value));
byId("new-chat").addEventListener("click", () => chat.clear());
for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => show(button.dataset.show));
}
poll.now();
// On a phone the keyboard would cover the page before it was seen.
if (matchMedia("(min-width: 60rem)").matches) byId("question").focus();
