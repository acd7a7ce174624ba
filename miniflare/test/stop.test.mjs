// Stopping and going on: interrupt, abort, resume, every status that HTTP can reach, keys, and a crash.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { quotationsOf, research } from "./support/documents.mjs";
import { startGated } from "./support/gate.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, settled } from "./support/world.mjs";

let world;
before(async () => {
  world = await startGated();
});
after(() => world.stop());

const mounts = [
  ["consumer", () => world.writer],
  ["producer, raw", () => world.raw],
  ["producer, projected", () => world.planner],
];

async function begin(mount, name, seed, headers) {
  const { documents, topic } = research(seed);
  world.gate.hold("thread-researcher");
  const body = { sessionId: newSession(name), message: topic, state: { documents } };
  const started = await mount.start(body, headers);
  assert.equal(started.status, 200, started.text);
  return { ...started.json, body, documents };
}

/** Reads until the first researcher is announced: there the job is held, in the middle of its longest step. */
function untilResearch(mount, id) {
  const isResearch = ({ event, data }) => event === "chunk" && JSON.parse(data).chunk.subAgentType === "thread-researcher";
  return mount.read(id, {}, { until: isResearch });
}

/** Asserts a refusal of the action × status table. */
function assertRefused({ status, json }, code, job) {
  assert.deepEqual([status, json.code, json.streamId], [409, code, job.streamId], JSON.stringify(json));
  assert.match(json.runId, /./);
}

function assertVerbatim(report, documents) {
  const quotations = quotationsOf(report);
  assert.ok(quotations.length > 0);
  for (const { documentId, quote } of quotations) assert.ok(documents.find(({ id }) => id === documentId).text.includes(quote), quote);
}

for (const [name, mountOf] of mounts) {
  describe(`interrupt: ${name}`, () => {
    let mount;
    let job;
    before(async () => {
      mount = mountOf();
      job = await begin(mount, "pause", 41);
      await untilResearch(mount, job.sessionId);
    });

    test("while it runs, it cannot be started or resumed", async () => {
      assertRefused(await mount.start(job.body), "ALREADY_RUNNING", job);
      assertRefused(await mount.resume({ sessionId: job.sessionId }), "ALREADY_RUNNING", job);
      assertRefused(await mount.resume({ sessionId: job.sessionId, message: "More." }), "ALREADY_RUNNING", job);
      assert.equal((await mount.status(job.sessionId)).json.status, "running", "and it still runs");
    });

    test("stops it at the next boundary, with a terminal frame of its own", async () => {
      const { status, json } = await mount.interrupt(job.sessionId, "a pause");
      assert.deepEqual([status, json.sessionId, json.accepted], [200, job.sessionId, true]);
      assert.ok(["running", "interrupted"].includes(json.status));
      world.gate.open();
      const { events } = await mount.read(job.sessionId, { fromSequence: 0 });
      const { event, data } = terminalOf(events);
      assert.deepEqual([event, data.status, data.runId, data.output], ["end", "interrupted", job.runId, undefined]);
      assert.ok(data.state && data.usage, "state and usage come along");
      const chunks = chunksOf(events);
      const [stop] = ofType(chunks, "run_interrupted", job.sessionId);
      assert.deepEqual([stop.chunk.runId, stop.chunk.reason], [job.runId, "a pause"]);
      assert.equal(stop, chunks.at(-1), "nothing is said after it");
      assertPairing(chunks.filter(({ chunk }) => chunk.agentId === job.sessionId));
      const { json: now } = await mount.status(job.sessionId);
      assert.deepEqual([now.status, now.isExecuting, now.output], ["interrupted", false, undefined]);
    });

    test("again is accepted by nobody; the snapshot is pinned", async () => {
      const { status, json } = await mount.interrupt(job.sessionId);
      assert.deepEqual([status, json], [200, { sessionId: job.sessionId, status: "interrupted", accepted: false }]);
      assertRefused(await mount.start(job.body), "ALREADY_RUNNING", job);
      const { json: snapshot } = await mount.snapshot(job.sessionId);
      assert.ok(snapshot.streamSequence > 0, "a session that is not terminal has a position");
    });

    test("resume goes on to a report", async () => {
      const resumed = await mount.resume({ sessionId: job.sessionId });
      assert.equal(resumed.status, 200, resumed.text);
      assert.equal(resumed.json.streamId, job.streamId);
      assert.notEqual(resumed.json.runId, job.runId);
      const { events } = await mount.read(job.sessionId, { fromSequence: 0 });
      const { data } = terminalOf(events);
      assert.deepEqual([data.status, data.runId], ["completed", resumed.json.runId], JSON.stringify(data));
      assertVerbatim(data.output, job.documents);
      const chunks = chunksOf(events);
      assertPairing(chunks.filter(({ chunk }) => chunk.agentId === job.sessionId));
      if (mount.agentType === "writer") assertForwarding(job.sessionId, chunks);
    });

    test("completed: nothing but a new message goes on", async () => {
      assertRefused(await mount.start(job.body), "ALREADY_COMPLETED", job);
      assertRefused(await mount.resume({ sessionId: job.sessionId }), "ALREADY_COMPLETED", job);
      assertRefused(await mount.interrupt(job.sessionId), "ALREADY_COMPLETED", job);
      const aborted = await mount.abort(job.sessionId);
      assert.deepEqual([aborted.status, aborted.json], [200, { sessionId: job.sessionId, status: "completed", accepted: false }]);
      const resumed = await mount.resume({ sessionId: job.sessionId, message: "And then?" });
      assert.equal(resumed.status, 200, resumed.text);
      assertVerbatim((await settled(mount, job.sessionId, "completed")).output, job.documents);
    });
  });

  describe(`abort: ${name}`, () => {
    test("of a running session is final", async () => {
      const mount = mountOf();
      const job = await begin(mount, "abort", 42);
      await untilResearch(mount, job.sessionId);
      const { status, json } = await mount.abort(job.sessionId, "no more");
      assert.deepEqual([status, json.accepted], [200, true], JSON.stringify(json));
      await assertAborted(mount, job);
    });

    test("of an interrupted session is final", async () => {
      const mount = mountOf();
      const job = await begin(mount, "abort-paused", 43);
      await untilResearch(mount, job.sessionId);
      assert.equal((await mount.interrupt(job.sessionId)).json.accepted, true);
      await settled(mount, job.sessionId, "interrupted");
      const { status, json } = await mount.abort(job.sessionId);
      assert.deepEqual([status, json], [200, { sessionId: job.sessionId, status: "failed", accepted: true }]);
      await assertAborted(mount, job);
    });
  });
}

async function assertAborted(mount, job) {
  const { sessionId } = job;
  const { events } = await mount.read(sessionId, { fromSequence: 0 });
  const { event, data } = terminalOf(events);
  assert.deepEqual([event, data.code, data.recoverable, data.runId], ["error", "run_aborted", false, job.runId]);
  const { json } = await mount.status(sessionId);
  assert.deepEqual([json.status, json.errorCode, json.isExecuting, json.output], ["failed", "run_aborted", false, undefined]);
  assert.equal(typeof json.error, "string");
  assertPairing(chunksOf(events).filter(({ chunk }) => chunk.agentId === sessionId));
  assertRefused(await mount.start(job.body), "ALREADY_COMPLETED", job);
  assertRefused(await mount.resume({ sessionId }), "ALREADY_COMPLETED", job);
  assertRefused(await mount.resume({ sessionId, message: "More." }), "ALREADY_COMPLETED", job);
  assertRefused(await mount.interrupt(sessionId), "ALREADY_COMPLETED", job);
  const again = await mount.abort(sessionId);
  assert.deepEqual([again.status, again.json], [200, { sessionId, status: "failed", accepted: false }]);
}

test("a stop of the parent reaches the child in the other service", async () => {
  for (const stop of ["interrupt", "abort"]) {
    const job = await begin(world.writer, `reach-${stop}`, 44);
    const { events } = await untilResearch(world.writer, job.sessionId);
    const { subSessionId } = ofType(chunksOf(events), "subagent_start", job.sessionId)[0].chunk;
    assert.equal((await world.writer[stop](job.sessionId)).json.accepted, true);
    await settled(world.raw, subSessionId, "interrupted");
  }
});

describe("idempotency keys", () => {
  test("a known key answers with the same run, also when it is over", async () => {
    world.gate.open();
    for (const [name, mountOf] of mounts) {
      const mount = mountOf();
      const { topic } = research(45);
      const body = { sessionId: newSession("key"), message: topic, metadata: { a: 1, b: [1, 2] } };
      const refused = await mount.start({ ...body, message: 7 }, { "idempotency-key": "k 1" });
      assert.equal(refused.status, 400, "a refused request stores nothing");
      const first = await mount.start(body, { "idempotency-key": "k 1" });
      assert.equal(first.status, 200, first.text);
      const reordered = JSON.stringify({ metadata: { b: [1, 2], a: 1 }, message: topic, sessionId: body.sessionId });
      for (const again of [body, reordered]) {
        const { status, text } = await mount.start(again, { "x-helix-request-key": "k 1" });
        assert.deepEqual([status, text], [200, first.text], name);
      }
      await settled(mount, body.sessionId, "completed");
      assert.equal((await mount.start(body, { "idempotency-key": "k 1" })).text, first.text, "also when it is over");
      const other = await mount.start({ ...body, message: `${topic}!` }, { "idempotency-key": "k 1" });
      assert.deepEqual([other.status, other.json.code], [409, "IDEMPOTENCY_CONFLICT"]);
      assert.deepEqual([(await mount.start(body, { "idempotency-key": "k 2" })).status], [409], "an unknown key meets the status");
      const resume = { sessionId: body.sessionId, message: "And then?" };
      const resumed = await mount.resume(resume, { "idempotency-key": "k 3" });
      assert.equal(resumed.status, 200, resumed.text);
      assert.equal((await mount.resume(resume, { "idempotency-key": "k 3" })).text, resumed.text);
      await settled(mount, body.sessionId, "completed");
      assert.equal((await mount.resume(resume, { "idempotency-key": "k 3" })).text, resumed.text);
      const { events } = await mount.read(body.sessionId, { fromSequence: 0 });
      const runs = chunksOf(events).filter(({ chunk }) => chunk.agentId === body.sessionId && /^run_(started|resumed)$/.test(chunk.type));
      assert.deepEqual(runs.map(({ chunk }) => chunk.runId), [first.json.runId, resumed.json.runId], "each key began one run");
    }
  });
});

test("reading a session that nobody began begins none", async () => {
  for (const [, mountOf] of mounts) {
    const mount = mountOf();
    const id = newSession("nobody");
    for (const action of ["status", "snapshot", "usage", "tree"]) assert.deepEqual((await mount[action](id)).status, 404, action);
    assert.equal((await mount.resume({ sessionId: id, message: "m" })).status, 404);
    assert.equal((await mount.interrupt(id)).status, 404);
    assert.equal((await mount.abort(id)).status, 404);
    assert.equal((await mount.status(id)).status, 404);
  }
});
