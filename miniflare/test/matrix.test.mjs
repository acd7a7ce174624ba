// The crash matrix: workerd is killed at numbered effects of a job, each time started again on the same data, and nobody
// asks for anything. The job comes to the end that an undisturbed one has.
//
// An effect is what crosses the border of a Worker (`support/crossings.mjs`). The world stands still when the effect with
// the number is due, so that where a kill strikes is no matter of time. By default some effects of each kind are taken,
// `EFFECTS=<n>` takes others of each kind, and `EFFECTS=all` takes every one. What lies between two effects is hit by
// `kill.test.mjs`, and natively at each commit by `consumer-worker/tests/job/crash.rs`.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { startCrossings } from "./support/crossings.mjs";
import { quotationsOf, research } from "./support/documents.mjs";
import { assertSameHistories, historiesOf } from "./support/history.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { settledByItself } from "./support/stress.mjs";
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
  return { chunks, output: data.output, state: data.state, histories: historiesOf(sessionId, chunks), rollup: json.rollup };
}

/** What no crash may change. What was asked of a model again is spent again, so tokens may be more, never fewer. */
function assertSame(name, actual, expected) {
  assert.deepEqual(actual.output, expected.output, `${name}: the report`);
  assert.deepEqual({ ...actual.state, research: 0 }, { ...expected.state, research: 0 }, `${name}: the state`);
  assertSameHistories(actual.histories, expected.histories, name);
  for (const part of ["tools", "steps", "partial"]) assert.deepEqual(actual.rollup[part], expected.rollup[part], `${name}: ${part}`);
  assert.equal(actual.rollup.subAgents.calls, expected.rollup.subAgents.calls, name);
  assert.ok(actual.rollup.tokens.total >= expected.rollup.tokens.total, `${name}: tokens`);
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

/** The numbers of the effects at which to kill. */
function chosen() {
  const all = effects.map((_, at) => at + 1);
  if (EFFECTS === "all") return all;
  return [...new Set(effects)].flatMap((kind) => {
    const own = all.filter((number) => effects[number - 1] === kind);
    const places = Array.from({ length: Math.min(SAMPLE, own.length) }, (_, at) => Math.floor((at * own.length) / SAMPLE));
    return places.map((place) => own[(place + Number(EFFECTS)) % own.length]);
  });
}

test(`killed at numbered effects, the job comes to the same end by itself: ${EFFECTS}`, async (t) => {
  assert.ok(plain, "the undisturbed job is what others are compared with");
  const numbers = chosen();
  const struck = new Map();
  const queue = [...numbers];
  async function lane(world) {
    while (queue.length > 0 && !over) {
      const number = queue.shift();
      const reached = world.crossings.count(number);
      const job = await begin(world);
      const reading = readUntilCut(world, job.sessionId);
      const settled = settledByItself(world.workers, job.sessionId).then(() => undefined);
      const kind = await Promise.race([reached, settled]);
      // A job may have some effects fewer than the one that was counted: chunks go by in other parts.
      const name = `effect ${number} of ${effects.length}, ${kind}`;
      await world.workers.kill();
      world.crossings.breakOff();
      const before = await reading;
      await world.workers.start();
      const came = await outcome(world, job);
      assertSame(name, came, plain);
      const { events } = await world.writer.read(job.sessionId, { fromSequence: before.at(-1)?.sequence ?? 0, streamId: job.streamId });
      const bytes = (chunks) => chunks.map((chunk) => chunk.bytes.toString());
      assert.deepEqual(bytes([...before, ...chunksOf(events)]), bytes(came.chunks), `${name}: what was read across the kill is the log`);
      struck.set(kind ?? "none was left", [...(struck.get(kind ?? "none was left") ?? []), number]);
    }
  }
  await Promise.all(
    lanes.map((world) =>
      lane(world).catch((error) => {
        over = true;
        throw error;
      }),
    ),
  );
  for (const [kind, at] of [...struck].sort(([a], [b]) => (a < b ? -1 : 1))) t.diagnostic(`${String(at.length).padStart(4)} × ${kind}: ${at.join(" ")}`);
  const kills = [...struck.values()].flat().length;
  t.diagnostic(`${kills} kills, of ${effects.length} effects`);
  assert.equal(kills, numbers.length);
  assert.ok((struck.get("none was left") ?? []).length < kills / 4, "most kills strike");
});
