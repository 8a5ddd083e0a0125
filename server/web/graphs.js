// The graph ladders: each family's hits, misses, reserved memory, and the replays of each bucket as they happen.

import { byId, element, setText } from "./dom.js";
import { count, mib, percent } from "./format.js";

const FAMILIES = { encoder: "Vision encoder", decoder: "Decoder" };
const ITEMS = { encoder: "pictures", decoder: "sequences" };
const BACKENDS = { cuda: "CUDA graphs", emulated: "emulated", none: "off" };
const REASONS = {
  too_large: "too large",
  too_many_items: "too many pictures at once",
  disabled: "graphs are off",
  capture_failed: "capture failed",
  self_test_failed: "self-test failed",
  mixed_step: "mixed steps",
  busy: "beside a replay",
};
const STATES = { captured: "captured", capture_failed: "capture failed, runs eager", self_test_failed: "self-test failed, runs eager" };

export class GraphsPanel {
  #panel = byId("graphs");
  #families = new Map();

  show({ graphs }) {
    this.#panel.hidden = graphs.length === 0;
    for (const family of graphs) {
      let ladder = this.#families.get(family.family);
      if (ladder === undefined) {
        ladder = new Ladder(family.family);
        this.#families.set(family.family, ladder);
        this.#panel.append(ladder.node);
      }
      ladder.show(family);
    }
  }
}

class Ladder {
  #family;
  #backend = element("span", { class: "badge" });
  #numbers = {};
  #reasons = element("p", { class: "reasons" });
  #rungs = element("ol", { class: "rungs" });
  #known = new Map();

  constructor(family) {
    this.#family = family;
    const titles = {
      hits: `${ITEMS[family]} served by a replay`,
      misses: `${ITEMS[family]} that ran eager`,
      ratio: "hits of all",
      reserved: "subtracted from the KV cache when memory was planned",
    };
    const labels = { hits: "hits", misses: "misses", ratio: "hit ratio", reserved: "MiB reserved" };
    const numbers = Object.entries(labels).map(([key, label]) => {
      this.#numbers[key] = element("dd", { data: { graph: `${family}-${key}` } }, "–");
      return element("div", { title: titles[key] }, element("dt", {}, label), this.#numbers[key]);
    });
    const name = FAMILIES[family] ?? family;
    this.#rungs.setAttribute("aria-label", `${name}: replays by bucket`);
    this.node = element(
      "div",
      { class: "family", data: { family } },
      element("h3", {}, name, this.#backend),
      element("dl", { class: "tiles small" }, ...numbers),
      this.#rungs,
      this.#reasons,
    );
  }

  show(family) {
    const numMisses = Object.values(family.misses).reduce((sum, value) => sum + value, 0);
    const numItems = family.hits + numMisses;
    setText(this.#backend, BACKENDS[family.backend] ?? family.backend);
    setText(this.#numbers.hits, count(family.hits));
    setText(this.#numbers.misses, count(numMisses));
    setText(this.#numbers.ratio, numItems ? percent(family.hits / numItems) : "–");
    setText(this.#numbers.reserved, mib(family.reserved_bytes));
    this.#numbers.reserved.title = `measured ${mib(family.measured_bytes)}, captured ${mib(family.captured_bytes)} MiB`;
    const reasons = Object.entries(family.misses).filter(([, value]) => value > 0);
    const words = reasons.map(([reason, value]) => `${count(value)} ${REASONS[reason] ?? reason}`);
    setText(this.#reasons, words.length ? `Missed: ${words.join(", ")}.` : "");
    this.#climb(family.buckets);
  }

  #climb(buckets) {
    const most = Math.max(1, ...buckets.map((bucket) => bucket.replays));
    for (const bucket of buckets) {
      const rung = this.#known.get(bucket.name) ?? this.#rung(bucket);
      const isNew = bucket.replays > rung.replays;
      rung.replays = bucket.replays;
      setText(rung.count, count(bucket.replays));
      rung.node.style.setProperty("--share", String(bucket.replays / most));
      rung.node.dataset.state = bucket.replays > 0 ? "used" : bucket.state;
      if (isNew) blink(rung.node);
    }
  }

  #rung(bucket) {
    const unit = this.#family === "encoder" ? "tokens" : "wide";
    const title = `${bucket.name}: up to ${count(bucket.tokens)} tokens, ${count(bucket.max_items)} ${ITEMS[this.#family]}; ${STATES[bucket.state]}, ${mib(bucket.num_bytes)} MiB`;
    const counter = element("span", { class: "replays", data: { bucket: `${this.#family}-${bucket.name}` } });
    const node = element(
      "li",
      { title },
      element("span", { class: "bucket" }, bucket.name, element("span", { class: "unseen" }, ` ${unit}, replays: `)),
      counter,
    );
    const rung = { node, count: counter, replays: bucket.replays };
    this.#known.set(bucket.name, rung);
    this.#rungs.append(node);
    return rung;
  }
}

/** Lights a rung for a moment. */
function blink(node) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  node.animate([{ filter: "brightness(1.35) saturate(1.4)" }, { filter: "none" }], { duration: 700, easing: "ease-out" });
}
