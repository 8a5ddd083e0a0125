// The memory ledger: one bar, one row a component, and their sum, which is what was requested.

import { byId, element, setText } from "./dom.js";
import { count, mib, mibDigits, mibParts, percent } from "./format.js";

const LABELS = {
  context: "Context",
  weights: "Weights",
  attention_workspace: "Attention workspace",
  static_buffers: "Static buffers",
  embedding_store: "Picture embeddings",
  requests: "Requests",
  transient: "Transient peak",
  encoder_graphs: "Encoder graphs",
  decoder_graphs: "Decoder graphs",
  graph_driver: "Graphs, in the driver",
  margin: "Margin",
  rounding: "Rounding",
  kv: "KV cache",
};

export class LedgerPanel {
  #panel = byId("ledger");
  #bar = element("div", { class: "bar", role: "img" });
  #rows = element("tbody");
  #total = element("td", { class: "number", data: { ledger: "requested" } });
  #claim = element("p", { class: "claim" });
  #kvUsed = null;
  #drawn = "";

  constructor() {
    const head = element("caption", { class: "unseen" }, "Memory by component in MiB");
    const sum = element("tr", {}, element("th", { scope: "row" }, "Requested"), this.#total);
    this.#panel.append(this.#bar, element("table", { class: "rows" }, head, this.#rows, element("tfoot", {}, sum)), this.#claim);
    for (const event of ["mouseover", "mouseout"]) this.#panel.addEventListener(event, (e) => this.#point(e));
  }

  show({ memory, load }) {
    this.#panel.hidden = memory === null;
    if (memory === null) return;
    const plan = JSON.stringify(memory.rows);
    if (plan !== this.#drawn) this.#draw(memory);
    this.#drawn = plan;
    const used = load.num_blocks ? load.num_blocks_used / load.num_blocks : 0;
    if (this.#kvUsed) this.#kvUsed.style.width = `${100 * used}%`;
    const isKept = memory.unplanned_bytes <= 0;
    const distance = `${mib(Math.abs(memory.unplanned_bytes))} MiB`;
    this.#claim.dataset.kept = String(isKept);
    setText(this.#claim, isKept ? `Within the plan, ${distance} to spare.` : `${distance} beyond the plan.`);
  }

  #draw({ rows, requested_bytes: requested }) {
    const texts = mibParts(rows.map((row) => row.num_bytes), requested);
    const label = (row) => LABELS[row.component] ?? row.component;
    this.#kvUsed = null;
    this.#bar.replaceChildren(
      ...rows.filter((row) => row.num_bytes > 0).map((row) => {
        const part = element("i", { data: { component: row.component }, title: `${label(row)}, ${mib(row.num_bytes)} MiB` });
        part.style.flexGrow = String(row.num_bytes / requested);
        if (row.component === "kv") part.append((this.#kvUsed = element("b")));
        return part;
      }),
    );
    this.#bar.setAttribute("aria-label", `${mib(requested)} MiB requested; the table below has the parts`);
    this.#rows.replaceChildren(
      ...rows.map((row, index) =>
        element(
          "tr",
          { data: { component: row.component }, class: row.num_bytes === 0 ? "nothing" : "", title: `${count(row.num_bytes)} bytes, ${percent(row.num_bytes / requested)}` },
          element("th", { scope: "row" }, element("i", { class: "swatch" }), label(row)),
          element("td", { class: "number", data: { ledger: row.component } }, texts[index]),
        ),
      ),
    );
    setText(this.#total, mib(requested, mibDigits(requested)));
    this.#total.title = `${count(requested)} bytes`;
  }

  /** What the mouse is on stands out in bar and table. */
  #point(event) {
    const component = event.type === "mouseover" ? event.target.closest("[data-component]")?.dataset.component : undefined;
    for (const node of this.#panel.querySelectorAll("[data-component]")) node.classList.toggle("pointed", node.dataset.component === component);
  }
}
