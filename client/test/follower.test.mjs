// A follower over a source that is told what to answer: cuts, slow snapshots, trimmed logs and new lives.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Follower, SourceError } from "../src/index.ts";

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

/** Follows until the end, until `until` says so, or for so long; gives what was told. */
async function follow(source, until = () => false, milliseconds = 5_000) {
  const follower = new Follower({ hasEnded: async () => false, ...source }, { session: SESSION, agentType: "t" }, { backoff: 1 });
  const stop = new AbortController();
  const events = [];
  for await (const event of follower.follow(AbortSignal.any([stop.signal, AbortSignal.timeout(milliseconds)]))) {
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

/** A source of answers that are written down: its streams and snapshots in order, the last one again and again. */
function script(streams, snapshots, tree) {
  const attached = [];
  let read = 0;
  return {
    attached,
    ...(tree && { tree }),
    get read() {
      return read;
    },
    async stream(_, from, streamId, signal) {
      attached.push(`${from}@${streamId}`);
      const told = streams[Math.min(attached.length, streams.length) - 1];
      return {
        streamId,
        frames: (async function* () {
          yield* told;
          await aborted(signal);
        })(),
      };
    },
    async snapshot({ session }) {
      if (session !== SESSION) return snapshotAt(0, { sessionId: session, streamId: "st_child" });
      read += 1;
      return snapshots[Math.min(read, snapshots.length) - 1];
    },
  };
}

const dropped = { kind: "error", error: { code: "INTERNAL", error: "x", recoverable: true } };
const truncated = (floor, streamId) => ({ kind: "error", error: { code: "TRUNCATED", error: "gone", recoverable: false, floor, streamId } });
const caughtUp = { kind: "caught_up", sequence: 9 };
const isCaughtUp = ({ kind }) => kind === "caught_up";
const sequences = (events) => events.filter(({ kind }) => kind === "chunk").map(({ sequence }) => sequence);
const sessions = ({ nodes }) => nodes.map(({ session }) => session);

test("behind a trimmed log what it still holds is read", async () => {
  const patched = (sequence, base, ordinal) =>
    said(sequence, { type: "state_patch", patches: [{ op: "add", path: "/n", value: sequence }], patchBase: base, patchOrdinal: ordinal });
  const source = script(
    [[announced(1, "a"), dropped], [truncated(5, "st_1")], [announced(5, "b"), patched(6, 1, 2), patched(9, 3, 4), caughtUp]],
    [snapshotAt(0), snapshotAt(8, { oldestRetainedSequence: 5, patchOrdinal: 3, stepCount: 1 })],
  );
  const { follower, events } = await follow(source, isCaughtUp);
  assert.deepEqual(sequences(events), [1, 5, 6, 9]);
  assert.deepEqual(source.attached, ["0@st_1", "1@st_1", "4@st_1"]);
  assert.deepEqual(sessions(follower), ["s", "a", "b"]);
  // What the baseline covers is left alone, what follows it is applied.
  assert.deepEqual([follower.root.document.status, follower.root.document.state], [{ kind: "in_step" }, { n: 9 }]);
});

test("what a trimmed log no longer announces the tree tells", async () => {
  const node = (sessionId, status, children) => ({ sessionId, agentType: "t", status, children });
  const below = [node("a", "completed", [node("a1", "running")]), node("b", "failed", [])];
  const join = (tree) =>
    script([[announced(5, "b"), announced(6, "c"), caughtUp]], [snapshotAt(4, { oldestRetainedSequence: 5, patchOrdinal: 3, stepCount: 1 })], tree);
  let reads = 0;
  const { follower } = await follow(
    join(async () => {
      if (++reads === 1) throw new SourceError("busy", { status: 503 });
      return node(SESSION, "running", below);
    }),
    (_, { nodes }) => nodes.length === 5,
  );
  assert.equal(reads, 2, "it is read again");
  assert.deepEqual(sessions(follower).sort(), ["a", "a1", "b", "c", SESSION]);
  const [a, a1] = ["a", "a1"].map((id) => follower.node(id));
  assert.deepEqual([a.parent, a.outcome, a1.parent, a1.outcome], [SESSION, "success", "a", undefined]);

  const none = async () => {
    throw new SourceError("none", { status: 404 });
  };
  const { events, follower: without } = await follow(join(none), ({ kind }) => kind === "no_tree");
  assert.equal(events.at(-1).error.status, 404);
  assert.ok(!sessions(without).includes("a"));
});

test("the end waits for the sessions of the tree", async () => {
  const tree = Promise.withResolvers();
  const end = { kind: "end", end: { status: "completed", state: {} } };
  const source = script([[caughtUp, end]], [snapshotAt(4, { oldestRetainedSequence: 5 })], () => tree.promise);
  const told = follow(source, ({ kind }) => {
    if (kind === "caught_up") setTimeout(() => tree.resolve({ sessionId: SESSION, children: [{ sessionId: "a", agentType: "t" }] }));
    return false;
  });
  const { follower, events } = await told;
  assert.equal(events.at(-1).kind, "end");
  assert.deepEqual(sessions(follower), [SESSION, "a"]);
  assert.equal(follower.node("a").document.status.kind, "exact");
});

test("what a discard voided stays void when it is read again behind a trimmed log", async () => {
  const discarded = said(7, { type: "step_discarded", stepCount: 1, fromSequence: 4 });
  const after = said(8, { type: "state_patch", patches: [{ op: "add", path: "/after", value: 8 }], patchBase: 0, patchOrdinal: 3 });
  const source = script(
    [[patch(5, 1), patch(6, 2), discarded, dropped], [truncated(5, "st_1")], [patch(5, 1), patch(6, 2), discarded, after, caughtUp]],
    [snapshotAt(4), snapshotAt(4, { oldestRetainedSequence: 5 })],
  );
  const { follower } = await follow(source, isCaughtUp);
  assert.equal(source.attached.at(-1), "4@st_1");
  assert.deepEqual([follower.root.document.status, follower.root.document.state], [{ kind: "in_step" }, { after: 8 }]);
});

test("a snapshot of the life before that comes late is none", async () => {
  const isCaught = Promise.withResolvers();
  const source = script(
    [[announced(1, "a"), said(3, { type: "step_discarded", stepCount: 1, fromSequence: 1 }), dropped], [truncated(0, "st_2")], [announced(1, "b"), caughtUp, announced(2, "c")]],
    [snapshotAt(0), snapshotAt(2), snapshotAt(1, { streamId: "st_2", stepCount: 1 })],
  );
  const { snapshot } = source;
  source.snapshot = async (address, signal) => {
    const answer = await snapshot(address);
    // The one that the discard asked for.
    if (address.session === SESSION && source.read === 2) await Promise.race([isCaught.promise, aborted(signal)]);
    return answer;
  };
  const { follower } = await follow(source, (event) => {
    if (isCaughtUp(event)) isCaught.resolve();
    return event.kind === "document" && event.node.session === "c";
  });
  assert.deepEqual(follower.root.document.status, { kind: "exact", step: 1 });
  assert.deepEqual(sessions(follower), ["s", "b", "c"]);
});

for (const [how, second] of Object.entries({
  "told by the stream": [truncated(0, "st_2")],
  // It is told by a snapshot that is read for another reason.
  "found in a snapshot": [said(3, { type: "step_discarded", stepCount: 1, fromSequence: 1 })],
})) {
  test(`another life of the session has a tree of its own and is read from its beginning: ${how}`, async () => {
    const source = script(
      [[announced(1, "a"), announced(2, "b"), dropped], second, [announced(1, "b"), announced(2, "c"), caughtUp]],
      [snapshotAt(0), snapshotAt(2, { streamId: "st_2", stepCount: 1 })],
    );
    const left = [];
    const { follower, events } = await follow(source, (event, follower) => {
      if (event.kind === "restarted") left.push(sessions(follower));
      return isCaughtUp(event);
    });
    assert.deepEqual(left, [["s"]]);
    assert.deepEqual(sequences(events).slice(-2), [1, 2]);
    assert.equal(source.attached.at(-1), "0@st_2");
    assert.deepEqual(sessions(follower), ["s", "b", "c"]);
    assert.deepEqual(follower.root.document.status, { kind: "exact", step: 1 });
  });
}

for (const ends of [true, false]) {
  test(`a session that has no position ${ends ? "has ended while it was read, and is read to its end" : "and goes on is read once"}`, async () => {
    let [asked, read] = [0, 0];
    const { follower } = await follow(
      {
        async hasEnded() {
          asked += 1;
          return ends && asked > 1;
        },
        async stream(_, __, streamId, signal) {
          return {
            streamId,
            frames: (async function* () {
              yield caughtUp;
              await aborted(signal);
            })(),
          };
        },
        async snapshot() {
          read += 1;
          return snapshotAt(-1, { state: { read } });
        },
      },
      isCaughtUp,
    );
    const { status, state } = follower.root.document;
    assert.deepEqual([status.kind, state, asked, read], ends ? ["final", { read: 2 }, 2, 2] : ["unpinned", { read: 1 }, 2, 1]);
  });
}

test("a session whose call is over and that goes on has not ended, unless nobody tells its status", async () => {
  for (const told of [false, undefined]) {
    let read = 0;
    const end = said(2, { type: "subagent_end", subSessionId: "child", toolCallId: "child", success: false });
    const { follower } = await follow(
      {
        hasEnded: async ({ session }) => (session === "child" ? told : false),
        async stream(_, __, streamId, signal) {
          return {
            streamId,
            frames: (async function* () {
              yield* [announced(1, "child"), end, caughtUp];
              await aborted(signal);
            })(),
          };
        },
        async snapshot({ session }) {
          if (session === SESSION) return snapshotAt(0);
          read += 1;
          return snapshotAt(-1, { sessionId: session, streamId: "st_child" });
        },
      },
      // Once when it is announced, and once at the end of its call.
      (event) => event.kind === "document" && event.node.session === "child" && read > 1,
    );
    const child = follower.nodes.find(({ session }) => session === "child");
    assert.equal(child.document.status.kind, told === false ? "unpinned" : "final");
  }
});

test("a step longer than the log is no reason to ask again and again", async () => {
  for (const ordinals of [true, false]) {
    const numbered = (n) => (ordinals ? { patchBase: n, patchOrdinal: n + 1 } : {});
    const long = Array.from({ length: 40 }, (_, n) =>
      said(50 + n, { type: "state_patch", patches: [{ op: "add", path: "/n", value: n }], ...numbered(50 + n) }),
    );
    const source = script([[truncated(50, "st_1")], [...long, caughtUp]], [snapshotAt(1, { oldestRetainedSequence: 50, patchOrdinal: ordinals ? 0 : undefined })]);
    // For as long as it takes to ask many times more.
    const { follower } = await follow(source, undefined, 200);
    const { status, state } = follower.root.document;
    assert.equal(status.kind, "stale");
    assert.deepEqual(state, {}, "nothing on a baseline with a hole");
    assert.equal(source.attached.length, 2, `with ordinals: ${ordinals}`);
    assert.ok(source.read <= 3, `${source.read} snapshots`);
  }
});
