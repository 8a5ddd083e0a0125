// The live side: hands each status to the panels, and says in the header where the service stands.

import { byId, setText } from "./dom.js";
import { count } from "./format.js";
import { GraphsPanel } from "./graphs.js";
import { LedgerPanel } from "./ledger.js";
import { LoadPanel } from "./load.js";
import { StartupPanel } from "./startup.js";

const PHASES = { starting: "loading the model", ready: "ready", draining: "shutting down", dead: "the engine has stopped" };

export class EngineView {
  #panels = [new LoadPanel(), new LedgerPanel(), new GraphsPanel(), new StartupPanel()];

  show(status) {
    this.#phase(status.phase, PHASES[status.phase] ?? status.phase);
    byId("waiting").hidden = status.engine !== null;
    setText(byId("waiting"), PHASES[status.phase] === "ready" ? "" : "The memory plan and the graphs appear when the engine is ready.");
    for (const panel of this.#panels) panel.show(status);
    const { engine, version } = status;
    const facts = engine
      ? [engine.device, engine.dtype, `attention ${engine.attention_backend}`, `encoder ${engine.encoder_attention_backend}`, `${count(engine.max_model_len)} tokens at most`]
      : [];
    setText(byId("facts"), [...facts, `fovea ${version}`].join(" · "));
  }

  fail(error) {
    if (error.status === 401) this.#phase("locked", "needs a key");
    else this.#phase("offline", "not reached");
  }

  #phase(phase, words) {
    byId("state").dataset.phase = phase;
    setText(byId("state"), words);
  }
}
