// Calls of a gateway. A call that gets no answer is made again, word for word: to the gateway it is
// the same call, so nothing is lost and nothing is counted twice.
import { setTimeout as sleep } from "node:timers/promises";

// Answers that mean "not now": the gateway or its server is away, full, or asked too often.
const NOT_NOW = new Set([408, 429, 502, 503, 504, 507]);
// Calls wait for up to 50 s at the gateway. Without an answer for so long, the connection is dead.
const SILENCE_MS = 75_000;
const LONGEST_PAUSE_MS = 5_000;

/** A gateway refused a call. `code` is a word to act on, such as EXISTS or TICKET. */
export class GatewayError extends Error {
  constructor(status, problem) {
    super(`${status} ${problem.code ?? ""}: ${problem.detail ?? problem.title ?? "no reason given"}`);
    this.name = "GatewayError";
    this.status = status;
    this.code = problem.code ?? "";
    this.problem = problem;
  }
}

export class Gateway {
  constructor(url = process.env.STREAMQ_GATEWAY, key = process.env.STREAMQ_KEY) {
    this.url = (url || "http://127.0.0.1:8470").replace(/\/+$/, "");
    this.key = key;
    this.headers = { "Content-Type": "application/json" };
    if (key) this.headers.Authorization = `Bearer ${key}`;
  }

  /**
   * Make a call and return the answer's JSON, or null if there is none. The call is repeated until
   * the gateway answers. `signal` ends the call at once, `giveUp()` before the next try. Pauses grow
   * up to `longestPauseMs`. `read` may read the Response in another way.
   */
  async call(method, path, body, { signal, giveUp, longestPauseMs = LONGEST_PAUSE_MS, read = readJson } = {}) {
    const said = body === undefined ? undefined : JSON.stringify(body);
    for (let tries = 0; ; tries++) {
      let response;
      let problem;
      try {
        const silence = AbortSignal.timeout(SILENCE_MS);
        response = await fetch(this.url + path, {
          method,
          body: said,
          headers: this.headers,
          signal: signal ? AbortSignal.any([signal, silence]) : silence,
        });
        if (response.ok) return await read(response);
        problem = await response.json().catch(() => ({}));
      } catch (error) {
        signal?.throwIfAborted();
        if (giveUp?.()) throw error;
      }
      if (problem && (!NOT_NOW.has(response.status) || giveUp?.()))
        throw new GatewayError(response.status, problem);
      await sleep(pauseMs(tries, longestPauseMs, response?.headers.get("Retry-After")), undefined, { signal });
    }
  }
}

async function readJson(response) {
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

// Pauses grow, and a part of each is random, so that a fleet does not come back all at once.
function pauseMs(tries, longest, retryAfter) {
  const asked = retryAfter ? Number(retryAfter) * 1000 : 0;
  const grown = Math.min(100 * 2 ** Math.min(tries, 10), longest);
  return Math.max(asked || 0, grown) * (0.75 + Math.random() / 2);
}
