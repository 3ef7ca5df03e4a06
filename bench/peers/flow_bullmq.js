// BullMQ on node: a flow of a parent with 10,000 children of three jobs each, one below the other.
const { FlowProducer, QueueEvents, Worker } = require('bullmq');
const IORedis = require('ioredis');

const connection = () => new IORedis(process.env.BENCH_URL, { maxRetriesPerRequest: null });
const STEPS = { two: (n) => n * 2, three: (n) => n + 3 };

async function run(job) {
  if (job.name === 'one') return job.data + 1;
  const found = Object.values(await job.getChildrenValues());
  if (job.name === 'total') return found.reduce((sum, each) => sum + each, 0);
  return STEPS[job.name](found[0]);
}

function work() {
  new Worker('flow', run, { connection: connection(), concurrency: 200 });
}

async function flow(n) {
  const queueName = 'flow';
  const item = (i) => ({
    name: 'three', queueName, children: [
      { name: 'two', queueName, children: [{ name: 'one', queueName, data: i }] },
    ],
  });
  const events = new QueueEvents(queueName, { connection: connection() });
  await events.waitUntilReady();
  const children = Array.from({ length: n }, (_, i) => item(i));
  const flows = new FlowProducer({ connection: connection() });
  const { job } = await flows.add({ name: 'total', queueName, children });
  return job.waitUntilFinished(events, 240000);
}

if (process.argv[2] === 'work') {
  work();
} else {
  const begun = process.hrtime.bigint();
  flow(Number(process.argv[3])).then((sum) => {
    console.log(JSON.stringify({ s: Number(process.hrtime.bigint() - begun) / 1e9, sum }));
    process.exit(0);
  });
}
