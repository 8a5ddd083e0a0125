// One conversation: what was said, asking the next question, stopping it. Draws through the transcript.

import { byId } from "./dom.js";
import { counted } from "./format.js";
import { forget } from "./pictures.js";

export class Chat {
  model = "";
  #api;
  #transcript;
  #composer;
  #onBusy;
  #onUnauthorized;
  #turns = [];
  #controller = null;

  /** `onBusy(isBusy)` as answers begin and end; `onUnauthorized()` when the key is missing or wrong. */
  constructor({ api, transcript, composer, onBusy, onUnauthorized }) {
    this.#api = api;
    this.#transcript = transcript;
    this.#composer = composer;
    this.#onBusy = onBusy;
    this.#onUnauthorized = onUnauthorized;
  }

  stop() {
    this.#controller?.abort();
  }

  /** Forgets the conversation. */
  clear() {
    this.stop();
    this.#turns.flatMap((turn) => turn.question.pictures).forEach(forget);
    this.#turns = [];
    this.#transcript.clear();
    this.#composer.clear();
    this.#settle();
  }

  /** Asks, and streams the answer. A question that got no answer goes back into the box: nothing is lost. */
  async ask(question) {
    const controller = (this.#controller = new AbortController());
    const answer = this.#transcript.add(question);
    const turn = { question, answer: "" };
    this.#turns.push(turn);
    this.#settle();
    this.#begin();
    const watch = new StopWatch();
    let ending = "stop";
    let failure = null;
    try {
      for await (const chunk of this.#api.chat(this.#body(question), controller.signal)) {
        const choice = chunk.choices[0];
        const text = choice?.delta.content ?? "";
        if (text) {
          watch.tick();
          answer.append(text);
        }
        ending = choice?.finish_reason ?? ending;
        answer.show({ ttft: watch.ttft, decode: watch.decode, usage: chunk.usage ?? undefined });
      }
    } catch (error) {
      failure = error;
      ending = error.name === "AbortError" ? "stopped" : "error";
    }
    if (this.#controller === controller) this.#controller = null;
    if (!this.#turns.includes(turn)) return;
    turn.answer = answer.text;
    if (turn.answer === "" && failure !== null) {
      this.#takeBack(turn, answer);
    } else {
      answer.show({ total: watch.total });
      answer.end(ending);
    }
    this.#finish(ending, failure, turn.answer);
  }

  #begin() {
    this.#composer.isBusy = true;
    this.#onBusy(true);
    announce("Looking.");
  }

  #finish(ending, failure, text) {
    this.#settle();
    this.#composer.isBusy = false;
    this.#onBusy(false);
    if (ending === "error") {
      if (failure.status === 401) this.#onUnauthorized();
      this.#composer.notice(failure.message);
    }
    announce(ending === "stopped" ? "Stopped." : ending === "error" ? "" : `Answered with ${counted(text.length, "character")}.`);
  }

  #takeBack(turn, answer) {
    this.#turns = this.#turns.filter((other) => other !== turn);
    answer.remove();
    this.#settle();
    this.#composer.restore(turn.question);
  }

  #settle() {
    this.#composer.numSent = this.#turns.reduce((sum, turn) => sum + turn.question.pictures.length, 0);
    byId("new-chat").hidden = this.#turns.length === 0;
  }

  #body({ temperature, maxTokens }) {
    return {
      model: this.model,
      messages: this.#turns.flatMap(messages),
      ...(temperature === null ? {} : { temperature }),
      ...(maxTokens === null ? {} : { max_completion_tokens: maxTokens }),
    };
  }
}

/** A turn as the API wants it: pictures before the words about them. */
function messages({ question, answer }) {
  const pictures = question.pictures.map((picture) => ({ type: "image_url", image_url: { url: picture.dataUrl } }));
  const words = question.text ? [{ type: "text", text: question.text }] : [];
  const asked = { role: "user", content: [...pictures, ...words] };
  return answer ? [asked, { role: "assistant", content: answer }] : [asked];
}

/** Times an answer from here, in seconds. */
class StopWatch {
  #start = performance.now();
  #first = null;
  #last = null;

  tick() {
    this.#last = performance.now();
    this.#first ??= this.#last;
  }

  get ttft() {
    return this.#first === null ? undefined : (this.#first - this.#start) / 1000;
  }

  get decode() {
    return this.#first === null ? 0 : (this.#last - this.#first) / 1000;
  }

  get total() {
    return (performance.now() - this.#start) / 1000;
  }
}

function announce(text) {
  byId("announcer").textContent = text;
}
