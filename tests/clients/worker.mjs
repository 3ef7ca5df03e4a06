// The worker of the tests: shouts, slowly if PAUSE_MS says so. With HANG it hangs in its first part.
import { appendFileSync, mkdirSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { work } from "../../clients/node/index.js";

const { HANG, NOTES, PAUSE_MS, SLOTS, STREAMQ_QUEUE, WORKER } = process.env;

// A line for the start and the end of each part, as tests/support/fleet.py reads them.
function note(word, { request, part }) {
  if (NOTES) appendFileSync(NOTES, `${word} ${Date.now() / 1e3} ${WORKER} ${request} ${part}\n`);
}

async function shout(text, context) {
  note("S", context);
  if (HANG) {
    mkdirSync(`${HANG}/node`);
    await sleep(1e9);
  }
  if (PAUSE_MS) await sleep(Number(PAUSE_MS));
  note("E", context);
  return text.toUpperCase();
}

await work({ shout }, { queue: STREAMQ_QUEUE, slots: Number(SLOTS ?? 1) });
