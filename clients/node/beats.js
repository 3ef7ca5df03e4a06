// Beats come from a thread of their own: a handler that keeps the event loop busy does not make its
// worker look dead.
import { Worker, isMainThread, parentPort, workerData } from "node:worker_threads";
import { Gateway } from "./gateway.js";

/** Says that a worker lives, and which part each of its slots runs. */
export class Beats {
  /** `unwanted` is called with each ticket whose parts nobody wants any more. */
  constructor(gateway, slots, everyMs, unwanted) {
    // Numbers of the parts that run, by slot, for both threads.
    this.parts = new Float64Array(new SharedArrayBuffer(8 * slots));
    const { url, key } = gateway;
    const data = { isBeats: true, url, key, everyMs, parts: this.parts };
    this.thread = new Worker(new URL(import.meta.url), { workerData: data });
    this.thread.on("message", unwanted);
    // Nothing to wait for when the worker ends. An error in the thread ends the program.
    this.thread.unref();
  }

  /** Note the ticket that a slot holds; null for none. */
  hold(slot, ticket) {
    this.parts[slot] = 0;
    this.thread.postMessage({ slot, ticket });
  }

  end() {
    return this.thread.terminate();
  }
}

function run({ url, key, everyMs, parts }) {
  const gateway = new Gateway(url, key);
  const held = new Map(); // slot -> ticket
  let isBeating = false;
  parentPort.on("message", ({ slot, ticket }) => (ticket ? held.set(slot, ticket) : held.delete(slot)));
  setInterval(async () => {
    if (!held.size || isBeating) return;
    isBeating = true;
    const tickets = [...held].map(([slot, ticket]) => (parts[slot] ? { ticket, part: parts[slot] } : { ticket }));
    try {
      const signal = AbortSignal.timeout(2 * everyMs);
      const { unwanted } = await gateway.call("POST", "/v1/beat", { tickets }, { signal });
      for (const ticket of unwanted) parentPort.postMessage(ticket);
    } catch {
      // The next beat tries again. If none comes through, the lease ends and others run the parts.
    } finally {
      isBeating = false;
    }
  }, everyMs);
}

if (!isMainThread && workerData?.isBeats) run(workerData);
