// What the engine does now: running, waiting, KV cache in use, and the last minute of tokens a second.

import { byId, drawing, element, setText } from "./dom.js";
import { count, counted, percent, rate } from "./format.js";

const NUM_SAMPLES = 60;
const WIDTH = 240;
const HEIGHT = 36;

export class LoadPanel {
  #tiles = {};
  #meter = element("div", { class: "meter", role: "meter", "aria-label": "KV cache in use", "aria-valuemin": 0, "aria-valuemax": 100 }, element("i"));
  #line = drawing("polyline", { class: "line" });
  #area = drawing("polygon", { class: "area" });
  #rates = [];
  #last = null;

  constructor() {
    const names = { running: "running", waiting: "waiting", kv: "of KV in use", rate: "tokens/s" };
    const tiles = Object.entries(names).map(([key, label]) => {
      this.#tiles[key] = element("dd", { data: { load: key } }, "–");
      return element("div", {}, element("dt", {}, label), this.#tiles[key]);
    });
    const chart = drawing("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.#area, this.#line);
    byId("load").append(element("dl", { class: "tiles" }, ...tiles), this.#meter, chart);
  }

  show({ load, limits }) {
    const used = load.num_blocks ? load.num_blocks_used / load.num_blocks : 0;
    setText(this.#tiles.running, count(load.num_running));
    setText(this.#tiles.waiting, count(load.num_waiting));
    setText(this.#tiles.kv, percent(used));
    this.#tiles.running.title = `of ${limits.max_num_seqs} at the same time`;
    this.#tiles.waiting.title = `of ${limits.max_queue_len} at most`;
    this.#tiles.kv.title = `${counted(load.num_blocks_used, "block")} of ${count(load.num_blocks)}, ${load.block_size} tokens each`;
    this.#meter.setAttribute("aria-valuenow", (100 * used).toFixed(1));
    this.#meter.title = this.#tiles.kv.title;
    this.#meter.firstChild.style.width = `${100 * used}%`;
    this.#sample(load.num_generation_tokens);
  }

  /** The counter's growth since the last sample; a counter that fell is another engine's. */
  #sample(numTokens) {
    const now = performance.now();
    if (this.#last !== null && now - this.#last.time >= 900) {
      const growth = Math.max(0, numTokens - this.#last.numTokens) / ((now - this.#last.time) / 1000);
      this.#rates = [...this.#rates, growth].slice(-NUM_SAMPLES);
      setText(this.#tiles.rate, rate(growth));
      this.#draw();
      this.#last = { time: now, numTokens };
    }
    this.#last ??= { time: now, numTokens };
  }

  #draw() {
    const top = Math.max(1, ...this.#rates);
    const step = WIDTH / (NUM_SAMPLES - 1);
    const start = WIDTH - (this.#rates.length - 1) * step;
    const points = this.#rates.map((value, index) => `${(start + index * step).toFixed(1)},${(HEIGHT - 2 - (value / top) * (HEIGHT - 4)).toFixed(1)}`);
    this.#line.setAttribute("points", points.join(" "));
    this.#area.setAttribute("points", [`${start},${HEIGHT}`, ...points, `${WIDTH},${HEIGHT}`].join(" "));
  }
}
