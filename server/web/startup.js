// The phases of the start as a waterfall: where the seconds went.

import { byId, element } from "./dom.js";
import { duration } from "./format.js";

export class StartupPanel {
  #panel = byId("startup");
  #drawn = "";

  show({ startup }) {
    this.#panel.hidden = startup.length === 0;
    const state = JSON.stringify(startup);
    if (startup.length === 0 || state === this.#drawn) return;
    this.#drawn = state;
    const total = startup.reduce((sum, phase) => sum + phase.seconds, 0);
    let before = 0;
    const rows = startup.map((phase) => {
      const bar = element("i");
      bar.style.marginLeft = `${(100 * before) / total}%`;
      bar.style.width = `${(100 * phase.seconds) / total}%`;
      before += phase.seconds;
      return element(
        "tr",
        {},
        element("th", { scope: "row" }, phase.name.replaceAll("_", " ")),
        element("td", { class: "span", "aria-hidden": "true" }, bar),
        element("td", { class: "number", data: { phase: phase.name } }, duration(phase.seconds)),
      );
    });
    const sum = element("tr", {}, element("th", { scope: "row" }, "In all"), element("td"), element("td", { class: "number" }, duration(total)));
    this.#panel.querySelector("table")?.remove();
    this.#panel.append(
      element("table", { class: "rows waterfall" }, element("caption", { class: "unseen" }, "Seconds of each phase"), element("tbody", {}, ...rows), element("tfoot", {}, sum)),
    );
  }
}
