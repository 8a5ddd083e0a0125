// Draws the conversation: questions with their pictures, answers as they grow, and what each answer took.

import { byId, element, setText } from "./dom.js";
import { count, duration, rate } from "./format.js";

// How far from its end the reader may have scrolled and still follow.
const FOLLOW_PX = 80;

export class Transcript {
  #scroller = byId("transcript");
  #turns = byId("turns");
  #welcome = byId("welcome");
  #isAtEnd = true;

  constructor() {
    // A keyboard that opens takes half of a phone: who read the end goes on reading it.
    this.#scroller.addEventListener("scroll", () => (this.#isAtEnd = this.#rest() < FOLLOW_PX));
    new ResizeObserver(() => {
      if (this.#isAtEnd) this.#toEnd();
    }).observe(this.#scroller);
  }

  /** Adds a question and gives the answer to come. */
  add({ text, pictures }) {
    this.#welcome.hidden = true;
    const thumbnails = pictures.map((picture) => element("img", { src: picture.previewUrl, alt: picture.name }));
    const question = element(
      "div",
      { class: "question" },
      element("h3", { class: "unseen" }, "You"),
      pictures.length ? element("div", { class: "pictures" }, ...thumbnails) : "",
      text ? element("p", {}, text) : "",
    );
    const answer = new Answer(() => this.#follow());
    const turn = element("li", { class: "turn" }, question, answer.node);
    answer.remove = () => {
      turn.remove();
      this.#welcome.hidden = this.#turns.childElementCount > 0;
    };
    this.#turns.append(turn);
    this.#toEnd();
    return answer;
  }

  clear() {
    this.#turns.replaceChildren();
    this.#welcome.hidden = false;
  }

  /** Call it before a change, and what it gives after. */
  #follow() {
    const isFollowing = this.#rest() < FOLLOW_PX;
    return () => {
      if (isFollowing) this.#toEnd();
    };
  }

  #rest() {
    return this.#scroller.scrollHeight - this.#scroller.scrollTop - this.#scroller.clientHeight;
  }

  #toEnd() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }
}

/** One answer. Screen readers hear it once it is whole: until then it is busy. */
class Answer {
  remove = () => {};
  #measure;
  #text = element("p", { class: "text" });
  #facts = new Facts();

  constructor(measure) {
    this.#measure = measure;
    this.node = element(
      "div",
      { class: "answer", "aria-busy": "true" },
      element("h3", { class: "unseen" }, "Answer"),
      this.#text,
      this.#facts.node,
    );
  }

  get text() {
    return this.#text.textContent;
  }

  append(text) {
    const follow = this.#measure();
    this.#text.append(text);
    follow();
  }

  /** `took` has seconds (`ttft`, `total`, `decode`) and the server's `usage`, each if it is known. */
  show({ ttft, total, decode, usage }) {
    const follow = this.#measure();
    const facts = this.#facts;
    if (ttft !== undefined) facts.set("ttft", duration(ttft));
    if (total !== undefined) facts.set("total", duration(total));
    if (usage) {
      const details = usage.prompt_tokens_details;
      facts.set("prompt", count(usage.prompt_tokens));
      if (details?.image_tokens) facts.set("image", count(details.image_tokens));
      if (details?.cached_tokens) facts.set("cached", count(details.cached_tokens));
      facts.set("completion", count(usage.completion_tokens));
      if (decode > 0 && usage.completion_tokens > 1) facts.set("rate", rate((usage.completion_tokens - 1) / decode));
    }
    follow();
  }

  /** `ending`: stop, length, stopped (by the reader), or error. */
  end(ending) {
    this.node.setAttribute("aria-busy", "false");
    this.node.dataset.ending = ending;
    const words = { length: "token limit reached", stopped: "stopped", error: "cut off" }[ending];
    if (words) this.#facts.set("ending", words);
  }
}

// In the order in which they stand: what it is, before or after the value, and the longer words for it.
const FACTS = {
  ttft: { before: "TTFT", title: "from sending the question to the first text, seen from here" },
  prompt: { after: "tokens in", title: "tokens of the whole conversation" },
  image: { after: "from pictures", title: "tokens in that came from pictures" },
  cached: { after: "cached", title: "tokens in that were not computed again" },
  completion: { after: "out", title: "tokens of this answer" },
  rate: { after: "tokens/s", title: "after the first token" },
  total: { before: "in all", title: "seconds from sending the question to the end" },
  ending: { after: "", title: "how the answer ended" },
};

/** What one answer took; each fact appears when it is known. */
class Facts {
  node = element("dl", { class: "facts" });
  #values = {};

  constructor() {
    for (const [key, { before, after, title }] of Object.entries(FACTS)) {
      const value = element("dd", { data: { fact: key } });
      const label = element("dt", {}, before ?? after);
      this.#values[key] = value;
      this.node.append(element("div", { title, hidden: true, class: before ? "" : "after" }, label, value));
    }
  }

  set(key, text) {
    setText(this.#values[key], text);
    this.#values[key].parentElement.hidden = false;
  }
}
