// A worker that shouts: STREAMQ_GATEWAY=http://127.0.0.1:8470 node examples/shout.js
import { work } from "../index.js";

const options = { queue: process.env.STREAMQ_QUEUE ?? "default", slots: Number(process.env.SLOTS ?? 4) };
await work({ shout: (text) => text.toUpperCase() }, options);
