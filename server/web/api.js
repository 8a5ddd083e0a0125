// Speaks to the server that sent this page: models, status, and answers as they stream. Knows the key, draws nothing.

const KEY = "fovea-api-key";
// The page may be served under a prefix.
const ROOT = new URL("..", import.meta.url);

/** What the server answered instead of success. `status` 0: it was not reached. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  #key = recall();

  get hasKey() {
    return this.#key !== "";
  }

  /** Kept for this tab only. */
  set key(value) {
    this.#key = value.trim();
    try {
      if (this.#key) sessionStorage.setItem(KEY, this.#key);
      else sessionStorage.removeItem(KEY);
    } catch {
      // Storage is off: the key lives as long as the page.
    }
  }

  /** The JSON behind a path, which is relative to the root of the service. Throws ApiError. */
  async get(path) {
    const response = await this.#fetch(path, { cache: "no-store" });
    return response.json();
  }

  /** The chunks of a chat completion as they come. Throws ApiError, and AbortError when `signal` ends it. */
  async *chat(body, signal) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    });
    let isDone = false;
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        isDone = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, { status: response.status, code: chunk.error.code });
      yield chunk;
    }
    if (!isDone) throw new ApiError("The answer ended too soon.");
  }

  async #fetch(path, options) {
    const headers = { ...options.headers, ...(this.#key ? { authorization: `Bearer ${this.#key}` } : {}) };
    let response;
    try {
      response = await fetch(new URL(path, ROOT), { ...options, headers, credentials: "same-origin", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached.");
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

function recall() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

async function refusal(response) {
  const error = await response.json().then((body) => body.error, () => null);
  const message = error?.message ?? `The server answered ${response.status}.`;
  return new ApiError(message, { status: response.status, code: error?.code ?? null });
}

function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError("The connection broke before the answer ended.");
}

/** The data of each server-sent event. Several lines of data are one event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) return;
      const blocks = (pending + value).replaceAll("\r\n", "\n").split("\n\n");
      pending = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
