// The crash matrix: workerd is killed at numbered effects of a job, each time started again on the same data, and nobody
// asks for anything. The job comes to the end that an undisturbed one has.
//
// An effect is what crosses the border of a Worker (`support/crossings.mjs`). The world stands still when the effect is due,
// the n-th of its kind, so that where a kill strikes is no matter of time. By default some effects of each kind are taken,
// `EFFECTS=<n>` takes others of each kind, and `EFFECTS=all` takes every one that an undisturbed job has. Each that was
// taken is struck, or this job came to its end before it. What lies between two effects is hit by `kill.test.mjs`, and
// natively at each commit by `consumer-worker/tests/job/crash.rs`.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { countOf, startCrossings } from "./support/crossings.mjs";
import { quotationsOf, research } from "./support/documents.mjs";
import { assertSameHistories, historiesOf } from "./support/history.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { eventsOf, settledByItself } from "./support/stress.mjs";
import { assertSameSpent, spentOf } from "./support/usage.mjs";
import { newSession } from "./support/world.mjs";

/** How many effects of a kind a sample has. */
const SAMPLE = 2;
const { EFFECTS = "0" } = process.env;
/** Jobs that run side by side, each in a workerd of its own: most of a job's time after a kill is waiting for alarms. */
const LANES = 3;

const given = research(77, { documents: 3, sentences: 8, questions: 2 });

let over = false;
const lanes = [];
before(async () => {
  for (let lane = 0; lane < LANES; lane += 1) lanes.push(await startCrossings({ persist: mkdtempSync(join(tmpdir(), "remote-agents-")) }));
});
after(async () => {
  over = true;
  for (const lane of lanes) {
    await lane.stop();
    rmSync(lane.workers.data, { recursive: true, force: true });
  }
});

async function begin(lane) {
  const sessionId = newSession("matrix");
  const started = await lane.writer.start({ sessionId, message: given.topic, state: { documents: given.documents } });
  assert.equal(started.status, 200, started.text);
  return started.json;
}

/** What a job came to by itself, with what must hold of every log. */
async function outcome(lane, { sessionId, streamId, runId }) {
  assert.equal((await settledByItself(lane.workers, sessionId)).status, "completed");
  const { events } = await lane.writer.read(sessionId, { fromSequence: 0, streamId });
  const chunks = chunksOf(events);
  const { event, data } = terminalOf(events);
  assert.deepEqual([event, data.status, data.runId], ["end", "completed", runId], JSON.stringify(data));
  assertGapless(chunks);
  assertForwarding(sessionId, chunks);
  const starts = assertPairing(chunks);
  assert.equal(new Set(starts.map(({ subSessionId }) => subSessionId)).size, starts.length, "each child is announced once");
  for (const id of [sessionId, ...starts.map(({ subSessionId }) => subSessionId)]) {
    assert.equal(ofType(chunks, "run_started", id).length, 1, `one run of ${id}`);
  }
  assert.equal(ofType(chunks, "run_resumed").length, 0);
  const { json } = await lane.writer.usage(sessionId);
  const { rollup } = json;
  const spent = spentOf(sessionId, chunks, rollup);
  return { chunks, output: data.output, state: data.state, histories: historiesOf(sessionId, chunks), rollup, spent };
}

/** What no crash may change: each answer of this model costs the same, so all tokens are. */
function assertSame(name, actual, expected) {
  assert.deepEqual(actual.output, expected.output, `${name}: the report`);
  assert.deepEqual({ ...actual.state, research: 0 }, { ...expected.state, research: 0 }, `${name}: the state`);
  assertSameHistories(actual.histories, expected.histories, name);
  for (const part of ["tools", "steps", "partial"]) assert.deepEqual(actual.rollup[part], expected.rollup[part], `${name}: ${part}`);
  assert.equal(actual.rollup.subAgents.calls, expected.rollup.subAgents.calls, name);
  assertSameSpent(actual.spent, expected.spent, name);
  assert.deepEqual(actual.rollup.tokens, expected.rollup.tokens, `${name}: tokens`);
}

/** Reads what a reader gets before the kill breaks its stream. */
async function readUntilCut(lane, id) {
  const events = [];
  try {
    const stream = await lane.writer.open(id, { fromSequence: 0 });
    for await (const event of stream.events) events.push(event);
  } catch {
    // The kill broke the connection.
  }
  return chunksOf(events.filter(({ partial }) => !partial));
}

let plain;
let effects;
test("undisturbed, the job is the same each time, and its effects are counted", async () => {
  const outcomes = [];
  const counts = [];
  for (let at = 0; at < 2; at += 1) {
    lanes[0].crossings.count();
    outcomes.push(await outcome(lanes[0], await begin(lanes[0])));
    counts.push(lanes[0].crossings.seen);
  }
  [plain] = outcomes;
  assertSame("the second", outcomes[1], plain);
  assert.ok(quotationsOf(plain.output).length > 0);
  [effects] = counts;
  assert.ok(effects.length > 80, `${effects.length} effects`);
  for (const kind of ["model of writer asked", "model of planner speaks", "model of thread-researcher asked", "start asked", "start answered", "sse asked", "sse answered", "sse event"]) {
    assert.ok(counts.every((seen) => seen.includes(kind)), `${kind} is an effect`);
  }
});

/** The effects at which to kill: a kind of them and a number within it each. */
function chosen() {
  return kindsOf(effects).flatMap((kind) => {
    const count = countOf(effects, kind);
    const all = Array.from({ length: count }, (_, at) => ({ kind, number: at + 1 }));
    if (EFFECTS === "all") return all;
    const places = Array.from({ length: Math.min(SAMPLE, count) }, (_, at) => Math.floor((at * count) / SAMPLE));
    return places.map((place) => all[(place + Number(EFFECTS)) % count]);
  });
}

const kindsOf = (seen) => [...new Set(seen)].sort();
const hasSettled = (world, id) => eventsOf(world.workers).some((line) => line.event === "settled" && line.sessionId === id);

/** Kills workerd at an effect of a job and starts it again; what a reader has read before, or nothing if the job ended first. */
async function strike(world, job, reached) {
  const reading = readUntilCut(world, job.sessionId);
  const settled = settledByItself(world.workers, job.sessionId);
  const isReached = await Promise.race([reached.then(() => true), settled.then(() => false)]);
  if (!isReached) return undefined;
  assert.ok(!hasSettled(world, job.sessionId), "the job that is killed has not ended");
  await world.workers.kill();
  world.crossings.breakOff();
  const before = await reading;
  await world.workers.start();
  return before;
}

test(`killed at numbered effects, the job comes to the same end by itself: ${EFFECTS}`, async (t) => {
  assert.ok(plain, "the undisturbed job is what others are compared with");
  const aims = chosen();
  const struck = [];
  const behind = [];
  const met = new Set(effects);
  const queue = [...aims];
  async function lane(world) {
    while (queue.length > 0 && !over) {
      const aim = queue.shift();
      const name = `${aim.kind} ${aim.number}`;
      const reached = world.crossings.count(aim);
      const job = await begin(world);
      const before = await strike(world, job, reached);
      const came = await outcome(world, job);
      assertSame(name, came, plain);
      const { seen } = world.crossings;
      for (const kind of seen) met.add(kind);
      if (before === undefined) {
        behind.push({ ...aim, count: countOf(seen, aim.kind) });
        continue;
      }
      const { events } = await world.writer.read(job.sessionId, { fromSequence: before.at(-1)?.sequence ?? 0, streamId: job.streamId });
      const bytes = (chunks) => chunks.map((chunk) => chunk.bytes.toString());
      assert.deepEqual(bytes([...before, ...chunksOf(events)]), bytes(came.chunks), `${name}: what was read across the kill is the log`);
      struck.push(aim);
    }
  }
  // Of a failure the others hear, and end before their workerds are stopped.
  const ends = await Promise.allSettled(
    lanes.map((world) =>
      lane(world).catch((error) => {
        over = true;
        throw error;
      }),
    ),
  );
  for (const { status, reason } of ends) if (status === "rejected") throw reason;
  for (const kind of kindsOf(struck.map((aim) => aim.kind))) {
    const numbers = struck.filter((aim) => aim.kind === kind).map(({ number }) => number);
    t.diagnostic(`${String(numbers.length).padStart(4)} of ${countOf(effects, kind)} × ${kind}: ${numbers.sort((a, b) => a - b).join(" ")}`);
  }
  for (const { kind, number, count } of behind) t.diagnostic(`not struck: ${kind} ${number}, in a job that had ${count} of them`);
  t.diagnostic(`${struck.length} kills, of ${effects.length} effects`);
  assertCovered(aims, struck, behind, met);
});

/** Each effect was struck, or lies behind the end of its job, which only the number of a stream's events can move. */
function assertCovered(aims, struck, behind, met) {
  const names = (list) => list.map(({ kind, number }) => `${kind} ${number}`).sort();
  assert.deepEqual(names([...struck, ...behind]), names(aims), "each was aimed at once");
  for (const { kind, number, count } of behind) {
    assert.equal(kind, "sse event", "a job has as many answers and requests each time");
    assert.ok(number > count, `${kind} ${number} went by and was not struck`);
  }
  // Every one includes the kinds that only a job has which goes on after a kill: there must be none, or it is to be aimed at.
  const kinds = kindsOf(EFFECTS === "all" ? met : effects);
  assert.deepEqual(kindsOf(struck.map(({ kind }) => kind)), kinds, "every kind is struck");
}
