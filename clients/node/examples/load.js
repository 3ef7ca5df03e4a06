// Put the lines of standard input through a handler, and print the results in input order:
//   node examples/load.js ID HANDLER < lines.txt > results.txt
import { createInterface } from "node:readline";
import { load } from "../index.js";

const [id, handler] = process.argv.slice(2);
if (!handler) {
  console.error("usage: node examples/load.js ID HANDLER < lines.txt > results.txt");
  process.exit(2);
}
// A generator, because a readline interface that is not read at once loses its first lines.
async function* lines() {
  yield* createInterface({ input: process.stdin, crlfDelay: Infinity });
}
const request = { id, handler, queue: process.env.STREAMQ_QUEUE ?? "default" };
for await (const { result } of load(lines(), request))
  console.log(typeof result === "string" ? result : JSON.stringify(result));
