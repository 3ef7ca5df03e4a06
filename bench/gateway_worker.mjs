// The node worker of bench/gateway.py: empty parts, and parts that tell when they began.
import { Gateway, work } from "../clients/node/index.js";

const handlers = {
  job: () => null,
  // The clock that Python's time.monotonic_ns reads, too.
  first_line: () => String(process.hrtime.bigint()),
};
await work(handlers, {
  gateway: new Gateway(process.env.STREAMQ_GATEWAY),
  slots: Number(process.env.BENCH_SLOTS),
  most: Number(process.env.BENCH_MOST),
});
