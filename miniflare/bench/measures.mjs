// What is measured. Each measure runs once for one contestant and gives numbers; the runner repeats and alternates.

import { startWorld, residentMiB, bytesWritten } from "./runtime.mjs";
import { call, ownAgent, post, Reader } from "./http.mjs";

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export function quantile(values, q) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  return sorted.length % 2 === 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Chunks that one request appends, so that no request lasts for ever. */
const FILLED_AT_ONCE = 20_000;

/** One contestant in one running world. */
export class Site {
  constructor(contestant, world) {
    Object.assign(this, { contestant, world, name: contestant.name, base: world.urls[contestant.name], hop: world.hops[contestant.name] });
  }

  post(id, action, query, body) {
    return post(this.base, this.contestant.act(id, action, query), body);
  }

  status(id, agent) {
    return call(this.base, this.contestant.status(id), { agent });
  }

  reader(id, from, base = this.base) {
    return new Reader(base, this.contestant.sse(id, from));
  }

  /** Fills a log with `chunks` chunks of 200 bytes, ten to a commit; gives its newest sequence. */
  async fill(id, chunks) {
    let last = 0;
    for (let left = chunks; left > 0; left -= FILLED_AT_ONCE) {
      const commits = Math.ceil(Math.min(left, FILLED_AT_ONCE) / 10);
      ({ last } = await this.post(id, "fill", { commits, per: 10, bytes: 200 }));
    }
    return last;
  }
}

let fresh = 0;
/** The name of an object that nobody has used. */
const freshId = (what) => `${what}-${(fresh += 1)}`;

/** Chunks per second of commits one after the other, each durable before the next. */
export async function append(site, { per, bytes, commits }) {
  const id = freshId("append");
  await site.post(id, "append", { commits: Math.ceil(commits / 10), per, bytes });
  const { ms } = await site.post(id, "append", { commits, per, bytes });
  await site.post(id, "finish");
  return { chunksPerSecond: (commits * per * 1000) / Math.max(1, ms) };
}

/**
 * From the moment in which a writer has a text to the chunk at each reader; the writer has one every few milliseconds.
 * Its clock counts whole milliseconds, so half of one is taken off.
 */
export async function live(site, { readers, ticks, everyMs, base = site.base }) {
  const id = freshId("live");
  const { last } = await site.post(id, "append", { commits: 1, per: site.contestant.perFrame, bytes: 200 });
  const latencies = [];
  const all = [];
  for (let n = 0; n < readers; n += 1) {
    const reader = await site.reader(id, last, base).read((stamp, now) => latencies.push(now - stamp - 0.5));
    all.push(reader);
    await reader.until(reader.caughtUp);
  }
  latencies.length = 0;
  const { late } = await site.post(id, "live", { commits: ticks, every: everyMs, bytes: 200 });
  const deadline = performance.now() + 5000;
  while (latencies.length < readers * ticks && performance.now() < deadline) await sleep(5);
  for (const reader of all) reader.close();
  await site.post(id, "finish");
  if (latencies.length !== readers * ticks) throw new Error(`${site.name}: ${latencies.length} of ${readers * ticks} chunks arrived`);
  return { p50: quantile(latencies, 0.5), p99: quantile(latencies, 0.99), writerLate: quantile(late, 0.99) };
}

/** A whole log to a reader that reads as fast as it can, while somebody else asks for the status. */
export async function replay(site, { id, last, base = site.base }) {
  const agent = ownAgent();
  await site.status(id, agent);
  let running = true;
  let worst = 0;
  const asking = (async () => {
    while (running) {
      const began = performance.now();
      await site.status(id, agent);
      worst = Math.max(worst, performance.now() - began);
    }
  })();
  await sleep(5);
  const reader = await site.reader(id, 0, base).read();
  const target = await reader.until(reader.caughtUp);
  running = false;
  reader.close();
  await asking;
  agent.destroy();
  const expected = site.contestant.perFrame === 1 ? last : Math.floor(last / site.contestant.perFrame) - 1;
  if (reader.last !== expected) throw new Error(`${site.name}: the replay ended at ${reader.last}, not ${expected}`);
  const total = target - reader.sent;
  return { total, firstByte: reader.firstChunkAt - reader.sent, mbPerSecond: reader.bytes / 1000 / total, worstWait: worst };
}

/** From the request to being caught up, ten chunks before the end of a log. */
export async function attach(site, { id, last, times, base = site.base }) {
  const took = [];
  for (let n = 0; n < times; n += 1) {
    const reader = await site.reader(id, last - 10, base).read();
    took.push((await reader.until(reader.caughtUp)) - reader.sent);
    reader.close();
  }
  return { attach: median(took) };
}

/** The first chunk of an object that is not in memory, in a workerd that has just started. */
export async function cold(contestant, { data, objects }) {
  let world = await startWorld([contestant], { data });
  const lasts = [];
  try {
    const site = new Site(contestant, world);
    for (let n = 0; n <= objects; n += 1) {
      lasts.push(await site.fill(`cold-${n}`, 1000));
      await site.post(`cold-${n}`, "finish");
    }
    await sleep(200);
  } finally {
    await world.stop();
  }
  world = await startWorld([contestant], { data });
  try {
    const site = new Site(contestant, world);
    const took = [];
    for (let n = 0; n <= objects; n += 1) {
      const reader = await site.reader(`cold-${n}`, lasts[n] - 10).read();
      took.push((await reader.until(reader.firstByte)) - reader.sent);
      reader.close();
    }
    // The first of all pays for the isolate as well.
    return { firstByte: median(took.slice(1)), withIsolate: took[0] };
  } finally {
    await world.stop();
  }
}

/** What one turn of 400 chunks, ten to a commit, writes. */
export async function rows(contestant, { data }) {
  const world = await startWorld([contestant], { data, counted: true });
  try {
    const site = new Site(contestant, world);
    const id = freshId("rows");
    await site.post(id, "append", { commits: 1, per: 10, bytes: 200 });
    await call(site.base, contestant.act(id, "counter"));
    await site.post(id, "append", { commits: 40, per: 10, bytes: 200 });
    const turn = await call(site.base, contestant.act(id, "counter"));
    const log = Object.entries(turn.rows).filter(([name]) => /(chunks|commits|blocks|ra_tail_\d)$/.test(name));
    const sum = (entries) => entries.reduce((total, [, count]) => total + count, 0);
    const filled = freshId("size");
    await site.fill(filled, 100_000);
    const full = await call(site.base, contestant.act(filled, "counter"));
    const large = freshId("packed");
    await site.post(large, "append", { commits: 1000, per: 100, bytes: 200 });
    const ratios = [full, await call(site.base, contestant.act(large, "counter"))].map(({ rows }) => compaction(rows));
    return {
      rows: turn.rows,
      logRows: sum(log),
      allRows: sum(Object.entries(turn.rows)),
      sizeRatio: full.databaseBytes / (100_000 * 200),
      extraRows: ratios.includes(undefined) ? undefined : Math.max(...ratios),
    };
  } finally {
    await world.stop();
  }
}

/** Rows written by packing for each that was appended, tables that are made anew included; missing where nothing is packed. */
function compaction(rows) {
  const sum = (pattern) => Object.entries(rows).reduce((total, [what, count]) => total + (pattern.test(what) ? count : 0), 0);
  const packed = sum(/^insert ra_chunks$/);
  return packed === 0 ? undefined : (packed + sum(/^(?:create|drop) ra_tail_\d$/)) / sum(/^insert ra_tail_\d$/);
}

/** Bytes that reach the storage for a turn of 400 chunks, ten to a commit. */
export async function written(site, { turns }) {
  const id = freshId("written");
  await site.fill(id, 1000);
  const before = bytesWritten(site.world.pid);
  await site.post(id, "append", { commits: 40 * turns, per: 10, bytes: 200 });
  await site.post(id, "finish");
  return { kbPerTurn: (bytesWritten(site.world.pid) - before) / turns / 1000 };
}

/** Memory that a replay costs whose reader does not read. */
export async function unread(contestant, { data, chunks }) {
  let world = await startWorld([contestant], { data });
  try {
    await new Site(contestant, world).fill("unread", chunks);
    await new Site(contestant, world).post("unread", "finish");
    await sleep(200);
  } finally {
    await world.stop();
  }
  world = await startWorld([contestant], { data });
  try {
    const site = new Site(contestant, world);
    const last = await site.fill("other", 1000);
    for (let n = 0; n < 20; n += 1) await attach(site, { id: "other", last, times: 1 });
    await site.status("unread");
    await sleep(500);
    const before = residentMiB(world.pid);
    const reader = site.reader("unread", 0);
    await reader.headers;
    let most = before;
    for (let n = 0; n < 30; n += 1) {
      await sleep(100);
      most = Math.max(most, residentMiB(world.pid));
    }
    reader.close();
    return { mib: most - before };
  } finally {
    await world.stop();
  }
}

/** Memory after readers have come and gone. */
export async function churn(contestant, { data, times }) {
  const world = await startWorld([contestant], { data });
  try {
    const site = new Site(contestant, world);
    const last = await site.fill("churn", 1000);
    await attach(site, { id: "churn", last, times: Math.min(1000, times) });
    await sleep(1000);
    const before = residentMiB(world.pid);
    await attach(site, { id: "churn", last, times });
    await sleep(1000);
    return { mib: residentMiB(world.pid) - before };
  } finally {
    await world.stop();
  }
}

/** What only ours has: whole steps, and a turn of the loop that runs them. */
export async function loop(site, { steps }) {
  const run = async (message) => {
    const id = freshId("loop");
    const began = performance.now();
    await post(site.base, "/agents/bench/start", JSON.stringify({ sessionId: id, message: JSON.stringify(message) }));
    const reader = await site.reader(id, 0).read();
    const ended = await reader.until(reader.ended);
    reader.close();
    return ended - began;
  };
  await run({ steps: 5 });
  const none = await run({ steps: 0 });
  const many = await run({ steps });
  const turn = await run({ turn: { chunks: 4000, per: 10, bytes: 95 } });
  return { perStep: (many - none) / steps, turnPerSecond: 4000 / ((turn - none) / 1000) };
}

/** The round trip of a status, directly and through a hop. */
export async function hop(site, { id, last, times }) {
  const agents = [ownAgent(), ownAgent()];
  const took = [[], []];
  for (let n = 0; n < times; n += 1) {
    for (const [way, base] of [site.base, site.hop].entries()) {
      const began = performance.now();
      await call(base, site.contestant.status(id), { agent: agents[way] });
      took[way].push(performance.now() - began);
    }
  }
  for (const agent of agents) agent.destroy();
  const direct = await attach(site, { id, last, times });
  const relayed = await attach(site, { id, last, times, base: site.hop });
  return { status: median(took[1]) - median(took[0]), attach: relayed.attach - direct.attach };
}
