// A worker: takes parts, runs them, reports what became of them.
import { hostname } from "node:os";
import { Beats } from "./beats.js";
import { Gateway } from "./gateway.js";

// A body may have 16 MiB, and a result 4 MiB. A report goes out when it has this many characters.
const FULL = 8 * 2 ** 20;
const MOST_RESULT = 4 * 2 ** 20;
// A lease stands so long after the last beat. If this process dies, its parts run elsewhere 9 s later.
const LEASE_S = 4;
// After an outage a worker that holds parts has to be heard within about as long.
const LONGEST_PAUSE_MS = 1_500;

/**
 * Run parts until SIGTERM or SIGINT, or until `signal` says so. Then running parts are finished and
 * reported, and the others go back to be run elsewhere.
 *
 *     await work({ shout: (text) => text.toUpperCase() }, { slots: 4 });
 *
 * A handler gets the payload (a JSON value, text, or a Buffer) and { part, attempt, request, signal },
 * and may be async. It returns text, bytes, a JSON value, or nothing. If it throws, the part is run
 * again later. The error may have `kind` ("snooze", "hold" or "abandon") and `afterMs`.
 */
export async function work(handlers, options = {}) {
  const stop = options.signal ?? stopSignal();
  const worker = new Worker(handlers, options, stop);
  try {
    await Promise.all(Array.from({ length: worker.slots }, (_, slot) => worker.runSlot(slot)));
  } finally {
    await worker.beats.end();
  }
}

function stopSignal() {
  const controller = new AbortController();
  for (const name of ["SIGTERM", "SIGINT"]) process.once(name, () => controller.abort());
  return controller.signal;
}

class Worker {
  constructor(handlers, options, stop) {
    const { gateway = new Gateway(), queue = "default", slots = 1, leaseS = LEASE_S } = options;
    const most = Math.min(options.most ?? 200, 400); // a report may tell of 400 failures
    this.gateway = gateway;
    this.handlers = handlers;
    this.slots = slots;
    this.stop = stop;
    this.held = new Map(); // ticket -> AbortController of each slot that runs parts
    this.beats = new Beats(gateway, slots, Math.min(leaseS * 250, 3_000), (ticket) => this.held.get(ticket)?.abort());
    const name = `${hostname()}.${process.pid}`.slice(-64);
    this.ask = { queue, handlers: Object.keys(handlers), most, lease_s: leaseS, wait_s: 25, name, slots };
    // A stopping worker does not wait for ever for a gateway that is away.
    let until = Infinity;
    stop.addEventListener("abort", () => (until = Date.now() + (options.graceS ?? 20) * 1000));
    this.giveUp = () => Date.now() > until;
  }

  /** Take, run and report until the worker stops. One slot holds one ticket at a time. */
  async runSlot(slot) {
    let granted = null;
    while (true) {
      if (granted?.ticket) {
        granted = await this.report(granted, await this.runParts(granted, slot));
        // Not before: the lease is to stand until the report is heard. A new ticket takes its place.
        if (!granted?.ticket) this.beats.hold(slot, null);
      } else if (this.stop.aborted) return;
      else granted = await this.take();
    }
  }

  async take() {
    try {
      return await this.gateway.call("POST", "/v1/take", this.ask, { signal: this.stop });
    } catch (error) {
      if (this.stop.aborted) return null;
      throw error; // a wrong key, a wrong queue: somebody has to look
    }
  }

  async report(granted, outcome) {
    const said = { ticket: granted.ticket, ...outcome };
    // A short wait: a report cannot be broken off, as the wait of a take can.
    if (!this.stop.aborted) said.next = { ...this.ask, wait_s: 1 };
    const options = { giveUp: this.giveUp, longestPauseMs: LONGEST_PAUSE_MS };
    try {
      const next = await this.gateway.call("POST", "/v1/report", said, options);
      if (!this.stop.aborted || !next?.ticket) return next;
      await this.gateway.call("POST", "/v1/leave", { tickets: [next.ticket] }, options);
    } catch (error) {
      if ([400, 413].includes(error.status) && outcome.done) {
        // Nothing was recorded: a result cannot be told.
        const told = Object.assign(error, { name: "ReportRefused" });
        return this.report(granted, { failed: granted.parts.map(({ number }) => failure(number, told)) });
      }
      if ([400, 401, 403, 413].includes(error.status)) throw error; // somebody has to look
      // The ticket is of no use any more, or nobody answered in the time of grace. Either way the
      // server has the parts run again.
      console.error(`report of ${granted.request}: ${error.message}`);
    }
    return null;
  }

  /** Run parts one after another. Parts that the outcome does not name go back to the server. */
  async runParts(granted, slot) {
    const done = [];
    const failed = [];
    const unwanted = new AbortController();
    this.held.set(granted.ticket, unwanted);
    this.beats.hold(slot, granted.ticket);
    try {
      for (let size = 0, i = 0; i < granted.parts.length && size < FULL; i++) {
        const part = granted.parts[i];
        if (unwanted.signal.aborted || (i > 0 && this.stop.aborted)) break;
        this.beats.parts[slot] = part.number;
        try {
          let value = this.runPart(granted, part, unwanted.signal);
          if (value instanceof Promise) value = await value; // awaiting costs more than a short handler
          const result = encode(value);
          size += Object.values(result ?? {})[0]?.length ?? 100;
          done.push({ part: part.number, result });
        } catch (error) {
          if (!unwanted.signal.aborted) failed.push(failure(part.number, error));
        }
      }
    } finally {
      this.held.delete(granted.ticket);
      this.beats.parts[slot] = 0;
    }
    return { done, failed };
  }

  runPart(granted, part, unwanted) {
    const { number, attempt = 1 } = part;
    const limit = granted.timeout_ms ? AbortSignal.timeout(granted.timeout_ms) : null;
    const signal = limit ? AbortSignal.any([unwanted, limit]) : unwanted;
    const context = { part: number, attempt, request: granted.request, signal };
    const running = this.handlers[granted.handler](payload(part), context);
    if (!limit || !(running instanceof Promise)) return running;
    const late = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
    return Promise.race([running, late]);
  }
}

function payload(part) {
  if ("json" in part) return part.json;
  return "text" in part ? part.text : Buffer.from(part.base64, "base64");
}

function encode(value) {
  if (value === undefined || value === null) return null;
  if (typeof value === "string") return fitting({ text: value }, value.length);
  if (value instanceof Uint8Array) return fitting({ base64: Buffer.from(value).toString("base64") }, value.length);
  return fitting({ json: value }, JSON.stringify(value).length);
}

function fitting(result, length) {
  if (length <= MOST_RESULT) return result;
  const error = new Error(`a result has ${length} characters, and may have ${MOST_RESULT}`);
  throw Object.assign(error, { name: "ResultTooLarge", kind: "abandon" });
}

function failure(part, error) {
  const { name = "Error", message = String(error), stack = "", kind = "retry", afterMs } = error ?? {};
  return { part, kind, error: name.slice(0, 200) || "Error", message, traceback: stack, after_ms: afterMs };
}
