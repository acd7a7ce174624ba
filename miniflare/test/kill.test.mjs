// workerd is killed with SIGKILL a hundred times, spread over jobs with two remote children, and started again on the
// same data. Nobody asks for anything meanwhile, and each job comes to the end that an undisturbed one has.
//
// Where a kill strikes is chosen by what was seen of the job, never by the clock; where it struck is read from the
// databases that it left. `KILLS=<n>` asks for another number of them.

import assert from "node:assert/strict";
import { copyFileSync, existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { after, before, test } from "node:test";
import { between } from "./support/between.mjs";
import { random, research } from "./support/documents.mjs";
import { assertSameHistories, historiesOf } from "./support/history.mjs";
import { follow } from "./support/patch.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { eventsOf, settledByItself, startStress, stressWorker } from "./support/stress.mjs";
import { assertSameSpent, spentOf } from "./support/usage.mjs";
import { newSession } from "./support/world.mjs";

const KILLS = Number(process.env.KILLS ?? 100);
/** Jobs that run side by side, each in a workerd of its own: most of a job's time after a kill is waiting for alarms. */
const LANES = 3;
/** Kills that one job takes at most: fewer than a run has executions in a row without progress. */
const KILLS_OF_A_JOB = 8;

const given = research(77, { documents: 3, sentences: 8, questions: 2 });
const message = JSON.stringify({ call: [1, 2].map(() => ({ agent: "research", message: given.topic })) });

/** Set when the test is over, so that what runs side by side with a failure ends as well. */
let over = false;
const lanes = [];
before(async () => {
  for (let lane = 0; lane < LANES; lane += 1) {
    lanes.push(
      await startStress({
        roles: ["producer"],
        persist: mkdtempSync(join(tmpdir(), "remote-agents-")),
        extra: [stressWorker("stress", { PRODUCER: { to: "between" } }), between("producer", { props: { mount: "internal" } })],
      }),
    );
  }
});
after(async () => {
  over = true;
  for (const lane of lanes) {
    await lane.stop();
    rmSync(lane.workers.data, { recursive: true, force: true });
  }
});

/** Everything that is logged as JSON is a sign of progress: a step, a word of the model, a chunk that goes by. */
const signs = (lane) => eventsOf(lane.workers).length;

async function begin(lane) {
  const id = newSession("killed");
  const started = await lane.mount().start({ sessionId: id, message, state: { documents: given.documents } });
  assert.equal(started.status, 200, started.text);
  const { json: baseline } = await lane.mount().snapshot(id);
  return { id, ...started.json, baseline };
}

/** Completes after `count` more signs of progress, or when the job has settled. */
function progress(lane, id, count) {
  const from = signs(lane);
  return new Promise((done) => {
    const timer = setInterval(() => {
      const isSettled = eventsOf(lane.workers).some((line) => line.event === "settled" && line.sessionId === id);
      if (signs(lane) - from < count && !isSettled && !over) return;
      clearInterval(timer);
      done();
    }, 1);
  });
}

/** What the databases say that a kill has left: read from copies, so that what is started again is what was left. */
function left(lane, id) {
  const folder = mkdtempSync(join(tmpdir(), "remote-agents-left-"));
  try {
    const found = { sessions: {}, root: undefined };
    for (const { path } of lane.workers.databases()) {
      const copy = join(folder, basename(path));
      for (const end of ["", "-wal"]) if (existsSync(path + end)) copyFileSync(path + end, copy + end);
      const database = new DatabaseSync(copy);
      try {
        const has = database.prepare("SELECT 1 FROM sqlite_master WHERE name = 'ra_session'").get();
        const session = has && database.prepare("SELECT session_id, status, step_count, last_sequence FROM ra_session").get();
        if (session?.session_id.startsWith(id)) found.sessions[session.session_id] = session;
      } finally {
        database.close();
      }
    }
    found.root = found.sessions[id];
    return found;
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

/** What a finished job came to. */
async function outcome(lane, job) {
  const { events } = await lane.mount().read(job.id, { fromSequence: 0, streamId: job.streamId });
  const chunks = chunksOf(events);
  const { event, data } = terminalOf(events);
  assert.deepEqual([event, data.status, data.runId], ["end", "completed", job.runId], JSON.stringify(data));
  const { json: usage } = await lane.mount().usage(job.id);
  const { rollup } = usage;
  return { chunks, data, histories: historiesOf(job.id, chunks), rollup, spent: spentOf(job.id, chunks, rollup) };
}

/** What must hold of every job's log, whatever happened to it. */
function assertWhole(job, { chunks, data }) {
  assertGapless(chunks);
  assertForwarding(job.id, chunks);
  const starts = assertPairing(chunks);
  assert.equal(new Set(starts.map(({ subSessionId }) => subSessionId)).size, starts.length, "each child is announced once");
  assert.equal(starts.filter(({ agentId }) => agentId === job.id).length, 2);
  for (const id of [job.id, ...starts.map(({ subSessionId }) => subSessionId)]) {
    assert.equal(ofType(chunks, "run_started", id).length, 1, `one run of ${id}`);
  }
  assert.equal(ofType(chunks, "run_resumed").length, 0);
  assert.deepEqual(follow(job.baseline, chunks).state, data.state, "the patches add up to the state");
}

/** What no crash may change. */
function assertSame(name, actual, expected) {
  assert.deepEqual(actual.data.output, expected.data.output, `${name}: the report`);
  assert.deepEqual(actual.data.state, expected.data.state, `${name}: the state`);
  assertSameHistories(actual.histories, expected.histories, name);
  for (const part of ["tools", "steps", "partial"]) assert.deepEqual(actual.rollup[part], expected.rollup[part], `${name}: ${part}`);
  assert.equal(actual.rollup.subAgents.calls, expected.rollup.subAgents.calls);
  assertSameSpent(actual.spent, expected.spent, name);
}

let plain;
let signsOfAJob;
test("undisturbed, the job is the same each time", async () => {
  const outcomes = [];
  for (let at = 0; at < 2; at += 1) {
    const before = signs(lanes[0]);
    const job = await begin(lanes[0]);
    await settledByItself(lanes[0].workers, job.id);
    signsOfAJob = signs(lanes[0]) - before;
    outcomes.push(await outcome(lanes[0], job));
    assertWhole(job, outcomes[at]);
    assert.equal(ofType(outcomes[at].chunks, "step_discarded").length, 0);
  }
  [plain] = outcomes;
  assertSame("the second", outcomes[1], plain);
  assert.ok(plain.chunks.length > 200, `${plain.chunks.length} chunks`);
  assert.ok(Object.keys(plain.histories).filter((place) => place.includes("/") && !place.includes(" ")).length >= 6, "children and their children");
});

/** Reads what a reader gets before the first kill breaks its stream. */
async function readUntilCut(lane, id) {
  const events = [];
  try {
    const stream = await lane.mount().open(id, { fromSequence: 0 });
    for await (const event of stream.events) events.push(event);
  } catch {
    // The kill broke the connection.
  }
  return events.filter(({ partial }) => !partial);
}

test(`killed ${KILLS} times, the jobs come to the same end by themselves`, async (t) => {
  assert.ok(plain, "the undisturbed job is what others are compared with");
  const points = [];
  const aims = random(4711);
  let jobs = 0;
  async function lane(world) {
    while (points.length < KILLS && !over) {
      const name = `job ${(jobs += 1)}`;
      const job = await begin(world);
      const reading = readUntilCut(world, job.id);
      let seen;
      let stillRuns = true;
      const own = [];
      for (let kills = 0; kills < KILLS_OF_A_JOB && !over; kills += 1) {
        // The kills of a job share it; every other job is hit anywhere first, so that ends are hit as often.
        const share = kills === 0 && jobs % 2 === 0 ? 1 : 3 / KILLS_OF_A_JOB;
        await progress(world, job.id, 1 + Math.floor(aims() * share * signsOfAJob));
        await world.workers.kill();
        seen ??= await reading;
        const at = left(world, job.id);
        await world.workers.start();
        stillRuns = at.root.status === "running";
        if (!stillRuns) break;
        points.push(at);
        own.push(at);
      }
      if (stillRuns) assert.equal((await settledByItself(world.workers, job.id)).status, "completed", name);
      const came = await outcome(world, job);
      // A job whose answers were discarded has a longer log.
      for (const at of own) at.share = at.root.last_sequence / came.chunks.length;
      assertWhole(job, came);
      assertSame(name, came, plain);
      // The reader goes on from its cursor: what it saw stands as it was, and nothing of the rest is missing.
      const before = chunksOf(seen);
      const { events: rest } = await world.mount().read(job.id, { fromSequence: before.at(-1)?.sequence ?? 0, streamId: job.streamId });
      const bytes = (chunks) => chunks.map((chunk) => chunk.bytes.toString());
      assert.deepEqual(bytes([...before, ...chunksOf(rest)]), bytes(came.chunks), `${name}: what was read across the kill is the log`);
      t.diagnostic(`${name}: ${points.length} kills`);
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
  assert.ok(points.length >= KILLS);
  // Spread over the whole job, as the parent's log tells it.
  const fifths = points.map(({ share }) => Math.min(4, Math.floor(share * 5)));
  const spread = Array.from({ length: 5 }, (_, fifth) => fifths.filter((at) => at === fifth).length);
  t.diagnostic(`${points.length} kills in ${jobs} jobs; by fifth of the parent's log: ${spread.join(" ")}`);
  if (KILLS >= 100) assert.ok(spread.every((kills) => kills > 0), `by fifth: ${spread}`);
  const distinct = new Set(points.map(({ sessions }) => Object.values(sessions).map(({ last_sequence: last }) => last).sort().join(" ")));
  t.diagnostic(`${distinct.size} different places`);
});
