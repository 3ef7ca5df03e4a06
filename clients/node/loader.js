// A loader: makes a request, adds its parts in chunks, waits, and reads results in input order.
import { setTimeout as sleep } from "node:timers/promises";
import { Gateway } from "./gateway.js";

// What one call carries, at most.
const CHUNK_PARTS = 500;
const CHUNK_CHARACTERS = 2 ** 20;

/**
 * Submit payloads as a request, wait for it, and yield { part, result } in input order as results
 * come. Parts that failed have no result.
 *
 *     for await (const { part, result } of load(lines, { id: "words", handler: "shout" }))
 *       console.log(part, result);
 */
export async function* load(payloads, request, gateway = new Gateway()) {
  await submit(payloads, request, gateway);
  yield* results(request.id, gateway);
}

/**
 * Submit payloads (an iterable, also an async one) as a request, and return its status. Parts run
 * while later ones are still being sent. The same call again after a crash goes on where the first
 * one ended, if `payloads` are the same; so the request needs an `id`.
 */
export async function submit(payloads, request, gateway = new Gateway()) {
  let status = await gateway.call("POST", "/v1/requests", { ...request, state: "loading" });
  if (status.state !== "loading") return status;
  const path = `/v1/requests/${encodeURIComponent(status.id)}`;
  const there = status.parts.total;
  let total = 0;
  for await (const parts of chunks(payloads)) {
    const first = total + 1;
    total += parts.length;
    const missing = parts.slice(Math.max(0, there - first + 1));
    if (!missing.length) continue;
    await gateway.call("POST", `${path}/parts`, { first: total - missing.length + 1, parts: missing });
  }
  return gateway.call("POST", `${path}/seal`, { total });
}

async function* chunks(payloads) {
  let parts = [];
  let size = 0;
  for await (const payload of payloads) {
    const part = encode(payload);
    const length = JSON.stringify(part).length;
    if (parts.length === CHUNK_PARTS || (parts.length && size + length > CHUNK_CHARACTERS)) {
      yield parts;
      parts = [];
      size = 0;
    }
    parts.push(part);
    size += length;
  }
  if (parts.length) yield parts;
}

// Text and bytes are sent as they are, anything else as JSON.
function encode(payload) {
  if (typeof payload === "string") return { text: payload };
  if (payload instanceof Uint8Array) return { base64: Buffer.from(payload).toString("base64") };
  return payload ?? null;
}

/** Wait until a request has ended, and return its status. */
export async function wait(id, gateway = new Gateway()) {
  while (true) {
    const status = await gateway.call("GET", `/v1/requests/${encodeURIComponent(id)}/wait?wait_s=25`);
    if (!["loading", "open"].includes(status.state)) return status;
  }
}

/** Yield { part, result } in input order until the request has ended. */
export async function* results(id, gateway = new Gateway()) {
  let from = 1;
  while (true) {
    const path = `/v1/requests/${encodeURIComponent(id)}/results?follow=1&from=${from}`;
    const body = await gateway.call("GET", path, undefined, { read: (response) => response.body });
    try {
      for await (const line of lines(body)) {
        const said = JSON.parse(line);
        if (said.is_over) return;
        from = said.next ?? said.part + 1;
        if (said.part) yield { part: said.part, result: decode(said) };
      }
    } catch {
      await sleep(200); // the connection broke: go on behind the last result
    }
  }
}

async function* lines(body) {
  let rest = "";
  for await (const text of body.pipeThrough(new TextDecoderStream())) {
    const found = (rest + text).split("\n");
    rest = found.pop();
    yield* found;
  }
}

function decode({ result, results: several }) {
  if (several) return several.map((each) => decode({ result: each }));
  if (!result) return null;
  if ("json" in result) return result.json;
  return result.text ?? result.lines ?? Buffer.from(result.base64, "base64");
}
