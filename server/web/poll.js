// Asks the server how it is, every second while somebody looks, more often while an answer streams.

const IDLE_MS = 1000;
const BUSY_MS = 300;
const MAX_PAUSE_MS = 8000;

export class Poll {
  #api;
  #onStatus;
  #onError;
  #timer = null;
  #isAsking = false;
  #pause = IDLE_MS;
  #isBusy = false;

  /** `onStatus(status)` gets each answer, `onError(error)` each failure. */
  constructor(api, { onStatus, onError }) {
    this.#api = api;
    this.#onStatus = onStatus;
    this.#onError = onError;
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(this.#timer) : this.now()));
  }

  set isBusy(value) {
    this.#isBusy = value;
    this.now();
  }

  /** Asks at once, and goes on from there. */
  async now() {
    if (this.#isAsking) return;
    clearTimeout(this.#timer);
    this.#isAsking = true;
    try {
      this.#onStatus(await this.#api.get("web/status"));
      this.#pause = IDLE_MS;
    } catch (error) {
      this.#onError(error);
      this.#pause = Math.min(2 * this.#pause, MAX_PAUSE_MS);
    } finally {
      this.#isAsking = false;
    }
    const pause = this.#isBusy ? Math.min(this.#pause, BUSY_MS) : this.#pause;
    if (!document.hidden) this.#timer = setTimeout(() => this.now(), pause);
  }
}
