// A follower over a source that is told what to answer: cuts, slow snapshots, trimmed logs and new lives.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Follower } from "../src/index.ts";

const SESSION = "s";

/** A chunk of the followed session itself. */
function said(sequence, chunk) {
  return { kind: "chunk", sequence, chunk: { agentId: SESSION, agentType: "t", ...chunk } };
}

const patch = (sequence, ordinal) =>
  said(sequence, { type: "state_patch", patches: [{ op: "add", path: "/n", value: ordinal }], patchOrdinal: ordinal, patchBase: ordinal - 1 });
const committed = (sequence, stepCount, patchOrdinal) => said(sequence, { type: "step_committed", stepCount, patchOrdinal });
const announced = (sequence, child) => said(sequence, { type: "subagent_start", subSessionId: child, subAgentType: "t", toolCallId: child });

function snapshotAt(streamSequence, rest = {}) {
  return { sessionId: SESSION, streamId: "st_1", state: {}, streamSequence, oldestRetainedSequence: 0, stepCount: 0, patchOrdinal: 0, ...rest };
}

/** The promise of an abort, for answers that never come. */
const aborted = (signal) => new Promise((_, reject) => signal.addEventListener("abort", () => reject(new Error("aborted"))));

/** Follows until the end or until `until` says so; gives what was told. */
async function follow(source, until = () => false) {
  const follower = new Follower({ hasEnded: async () => false, ...source }, { session: SESSION, agentType: "t" }, { backoff: 1 });
  const stop = new AbortController();
  const events = [];
  for await (const event of follower.follow(AbortSignal.any([stop.signal, AbortSignal.timeout(5_000)]))) {
    events.push(event.kind === "document" ? { ...event, status: event.node.document.status } : event);
    if (until(event, follower)) stop.abort();
  }
  return { follower, events };
}

test("a snapshot that is being read outlives the stream that is cut meanwhile", async () => {
  const log = [said(1, { type: "run_started" }), patch(2, 1), said(3, { type: "step_discarded", stepCount: 1, fromSequence: 1 })];
  const isAnswered = Promise.withResolvers();
  let [attached, snapshots] = [0, 0];
  const { follower, events } = await follow(
    {
      async stream(_, from, streamId, signal) {
        attached += 1;
        const isFirst = attached === 1;
        if (!isFirst) isAnswered.resolve();
        return {
          streamId,
          frames: (async function* () {
            yield* log.filter(({ sequence }) => sequence > from);
            if (isFirst) throw new Error("cut");
            await aborted(signal);
          })(),
        };
      },
      async snapshot(_, signal) {
        snapshots += 1;
        if (snapshots > 1) await Promise.race([isAnswered.promise, aborted(signal)]);
        return snapshotAt(1);
      },
    },
    (event) => event.kind === "document" && attached > 1,
  );
  assert.deepEqual(follower.root.document.status, { kind: "exact", step: 0 });
  assert.deepEqual([attached, snapshots], [2, 2]);
  assert.equal(events.filter(({ kind }) => kind === "no_snapshot").length, 0);
});

test("the snapshots of children are read on while the root's stream is opened again behind its own", async () => {
  // Something is missing before the second one.
  const log = [announced(1, "child"), patch(2, 3)];
  const isAttachedAgain = Promise.withResolvers();
  let [attached, children] = [0, 0];
  const { follower, events } = await follow(
    {
      async stream(_, from, streamId, signal) {
        attached += 1;
        if (attached > 1) isAttachedAgain.resolve();
        return {
          streamId,
          frames: (async function* () {
            yield* log.filter(({ sequence }) => sequence > from);
            await aborted(signal);
          })(),
        };
      },
      async snapshot({ session }, signal) {
        if (session === SESSION) return snapshotAt(1);
        children += 1;
        await Promise.race([isAttachedAgain.promise, aborted(signal)]);
        return snapshotAt(4, { sessionId: session, streamId: "st_c", stepCount: 3 });
      },
    },
    (event) => (event.kind === "document" || event.kind === "no_snapshot") && event.node.session === "child",
  );
  assert.deepEqual(follower.node("child").document.status, { kind: "exact", step: 3 });
  assert.equal(children, 1);
  assert.ok(attached > 1, "the root's stream was opened again");
  assert.equal(events.filter(({ kind }) => kind === "no_snapshot").length, 0);
});

test("a tree has a bound", async () => {
  const frames = (async function* () {
    for (let sequence = 1; sequence <= 2_000; sequence += 1) yield announced(sequence, `c${sequence}`);
    yield { kind: "end", end: { status: "completed", state: {} } };
  })();
  const { follower, events } = await follow({
    stream: async (_, __, streamId) => ({ streamId, frames }),
    snapshot: async ({ session }) => snapshotAt(1, { sessionId: session }),
  });
  assert.equal(follower.nodes.length, 1024);
  assert.equal(events.filter(({ kind }) => kind === "chunk").length, 2_000);
});
