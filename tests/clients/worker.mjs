// The worker of the tests: shouts, slowly if PAUSE_MS says so. With HANG it hangs in its first part.
import { mkdirSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { work } from "../../clients/node/index.js";

const { HANG, PAUSE_MS, SLOTS, STREAMQ_QUEUE } = process.env;

async function shout(text) {
  if (HANG) {
    mkdirSync(`${HANG}/node`);
    await sleep(1e9);
  }
  if (PAUSE_MS) await sleep(Number(PAUSE_MS));
  return text.toUpperCase();
}

await work({ shout }, { queue: STREAMQ_QUEUE, slots: Number(SLOTS ?? 1) });
