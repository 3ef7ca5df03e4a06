// BullMQ on node: addBulk by 1,000, 200 jobs at once; a flow with a parent.
const fs = require('fs');
const path = require('path');
const { Queue, Worker, FlowProducer } = require('bullmq');
const IORedis = require('ioredis');

const connection = () => new IORedis(process.env.BENCH_URL, { maxRetriesPerRequest: null });
const PAYLOAD = 'x'.repeat(100);
const KEEP = { removeOnComplete: true };
const FOLDER = process.env.BENCH_TALLY;
const now = () => process.hrtime.bigint();

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

function read() {
  const found = fs.readdirSync(FOLDER).map((name) => fs.readFileSync(path.join(FOLDER, name)));
  let jobs = 0n, last = 0n, called = 0n;
  for (const each of found) {
    jobs += each.readBigInt64LE(0);
    if (each.readBigInt64LE(8) > last) last = each.readBigInt64LE(8);
    if (each.readBigInt64LE(16) > called) called = each.readBigInt64LE(16);
  }
  return [jobs, last, called];
}

function work() {
  const row = Buffer.alloc(24);
  const name = path.join(FOLDER, String(process.pid));
  fs.writeFileSync(`${FOLDER}-${process.pid}`, row);  // Whoever reads it sees a whole row.
  fs.renameSync(`${FOLDER}-${process.pid}`, name);
  const file = fs.openSync(name, 'r+');
  let count = 0n;
  new Worker('bench', async (job) => {
    if (job.name === 'callback') {
      row.writeBigInt64LE(now(), 16);
    } else {
      count += 1n;
      row.writeBigInt64LE(count, 0);
      row.writeBigInt64LE(now(), 8);
    }
    fs.writeSync(file, row, 0, 24, 0);
  }, { connection: connection(), concurrency: 200 });
}

async function add(queue, n) {
  for (let start = 0; start < n; start += 1000) {
    const many = Array.from({ length: Math.min(1000, n - start) },
      () => ({ name: 'job', data: PAYLOAD, opts: KEEP }));
    await queue.addBulk(many);
  }
}

const spent = (before) => { const c = process.cpuUsage(before); return (c.user + c.system) / 1e6; };

const actions = {
  async enqueue(n) {
    const queue = new Queue('bench', { connection: connection() });
    await add(queue, 1);
    const begun = now(), cpu = process.cpuUsage();
    await add(queue, n);
    return { s: Number(now() - begun) / 1e9, cpu_s: spent(cpu) };
  },
  async latency(times) {
    const queue = new Queue('bench', { connection: connection() });
    const waits = [];
    for (let i = 0; i < times + 10; i++) {
      const before = read()[0], begun = now();
      await queue.add('job', PAYLOAD, KEEP);
      while (read()[0] === before) await sleep(0.5);
      waits.push(Number(read()[1] - begun) / 1e6);
      await sleep(4);
    }
    return { ms: waits.slice(10) };
  },
  async batch(n) {
    const flows = new FlowProducer({ connection: connection() });
    const before = read()[2], begun = now();
    const children = Array.from({ length: n },
      () => ({ name: 'job', queueName: 'bench', data: PAYLOAD }));
    await flows.add({ name: 'callback', queueName: 'bench', data: '', children });
    while (read()[2] === before) await sleep(1);
    return { s: Number(read()[2] - begun) / 1e9 };
  },
};

if (process.argv[2] === 'work') {
  work();
} else {
  actions[process.argv[2]](Number(process.argv[3])).then((found) => {
    console.log(JSON.stringify(found));
    process.exit(0);
  });
}
