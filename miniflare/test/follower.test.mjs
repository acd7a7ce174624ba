// The JavaScript follower on a job of both Workers: from its start, late, and over a connection that breaks all the time.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import fastJsonPatch from "fast-json-patch";
import { Follower, httpSource } from "../../client/src/index.ts";
import { research } from "./support/documents.mjs";
import { startGated } from "./support/gate.mjs";
import { newSession } from "./support/world.mjs";

let world;
before(async () => {
  world = await startGated();
});
after(() => world.stop());

function source(session) {
  const { urls, authorization } = world.workers;
  return httpSource(session, { origin: urls.consumer, headers: () => authorization, childSnapshotPath: "/api/child-snapshot" });
}

/** The same source, whose streams break after every few events. */
function shaky(source) {
  let number = 0;
  return {
    ...source,
    async stream(...attach) {
      const { streamId, frames } = await source.stream(...attach);
      number += 1;
      const cut = 1 + (number % 7);
      return {
        streamId,
        frames: (async function* () {
          let seen = 0;
          for await (const frame of frames) {
            yield frame;
            seen += 1;
            if (seen === cut && frame.kind === "chunk") throw new Error("cut");
          }
        })(),
      };
    },
  };
}

/** Follows to the end; `watch` is told each event. */
async function follow(source, session, watch = () => {}, options = {}) {
  const follower = new Follower(source, { session, agentType: "writer" }, { backoff: 0, ...options });
  const boundaries = new Map();
  let end;
  for await (const event of follower.follow(AbortSignal.timeout(120_000))) {
    watch(event, follower);
    if (event.kind === "document" && event.node.document.status.kind === "exact") {
      const { document } = event.node;
      const key = `${document.session} ${document.status.step}`;
      boundaries.set(key, [...(boundaries.get(key) ?? []), document.state]);
    }
    if (event.kind === "end" || event.kind === "failed") end = event;
  }
  return { follower, boundaries, end };
}

/** Holds the job until so many followers have the state of its writer, and of its planner; `watch` is for each of them. */
function held(followers) {
  const waiting = new Map(["writer", "planner"].map((agentType) => [agentType, new Set()]));
  for (const agentType of waiting.keys()) world.gate.hold(agentType);
  return (event, follower) => {
    for (const [agentType, joined] of waiting) {
      // Whoever asked for a planner before it had begun gets its state at the first step, and is not waited for.
      const isAnswered = (node) => node.document.status.kind === "exact" || (event.kind === "no_snapshot" && event.node === node);
      if (follower.nodes.some((node) => node.agentType === agentType && isAnswered(node))) joined.add(follower);
      if (joined.size === followers) world.gate.release(agentType);
    }
  };
}

/** The tree as plain values. */
function plain(follower) {
  const nodes = follower.nodes.map(({ session, agentType, parent, toolCallId, remote, outcome, document }) => {
    return [session, { agentType, parent, toolCallId, remote, outcome, status: document.status, state: document.state }];
  });
  return Object.fromEntries(nodes.sort(([a], [b]) => (a < b ? -1 : 1)));
}

/** The whole log of a session, as it is read by nobody's documents. */
async function logOf(session) {
  const { frames } = await source(session).stream({ session, agentType: "writer" }, 0, undefined, AbortSignal.timeout(60_000));
  const log = [];
  for await (const frame of frames) if (frame.kind === "chunk") log.push(frame.chunk);
  return log;
}

/** The committed states behind a snapshot, by step: each patch of the log as it comes, by another implementation. */
function judged(log, { sessionId, state, stepCount, patchOrdinal }) {
  const states = new Map([[stepCount, state]]);
  let folded = structuredClone(state);
  for (const chunk of log) {
    if (chunk.agentId !== sessionId || chunk.patchOrdinal <= patchOrdinal) continue;
    if (chunk.type === "state_patch") folded = fastJsonPatch.applyPatch(folded, structuredClone(chunk.patches), true).newDocument;
    if (chunk.type === "step_committed") states.set(chunk.stepCount, structuredClone(folded));
    assert.notEqual(chunk.type, "step_discarded", "nothing disturbs this job");
  }
  return { states, last: folded };
}

describe("a follower", () => {
  test("rebuilds the tree, whenever it joins and however often it is cut", async () => {
    const { documents, topic } = research(5);
    const session = newSession("followed");
    const started = await world.writer.start({ sessionId: session, message: topic, state: { documents } });
    assert.equal(started.status, 200, started.text);

    const late = [];
    const atOnce = await follow(source(session), session, (event, { nodes }) => {
      // Others join when the tree is half grown: with the whole log, at the baseline, and over a bad line.
      if (event.kind !== "chunk" || late.length > 0 || nodes.length < 4) return;
      late.push(follow(source(session), session), follow(source(session), session, undefined, { from: "baseline" }), follow(shaky(source(session)), session));
    });
    assert.equal(late.length, 3, "they joined in the middle");
    const [whole, atBaseline, cut] = await Promise.all(late);
    const afterwards = await follow(source(session), session);

    const tree = plain(atOnce.follower);
    assert.ok(Object.keys(tree).length >= 4, "writer, planner and its researchers");
    for (const { end } of [atOnce, whole, atBaseline, cut, afterwards]) assert.equal(end.end.status, "completed");
    for (const [name, { follower }] of Object.entries({ whole, cut, afterwards })) assert.deepEqual(plain(follower), tree, name);
    for (const [session, node] of Object.entries(tree)) {
      assert.deepEqual(node.status, { kind: "final" }, session);
      const snapshot = session === atOnce.follower.root.session ? await world.writer.snapshot(session) : await world.child.snapshot(session, node.agentType);
      assert.deepEqual(node.state, snapshot.json.state, session);
    }
    // A follower that begins at the baseline knows those that were announced afterwards.
    for (const [session, node] of Object.entries(plain(atBaseline.follower))) assert.deepEqual(node.state, tree[session].state, session);
  });

  test("an exact document is the same for every follower", async () => {
    const { documents, topic } = research(6);
    const session = newSession("followed");
    const watch = held(3);
    assert.equal((await world.writer.start({ sessionId: session, message: topic, state: { documents } })).status, 200);
    const runs = await Promise.all([source(session), shaky(source(session)), shaky(source(session))].map((one) => follow(one, session, watch)));
    const known = new Map();
    let compared = 0;
    for (const { boundaries } of runs) {
      for (const [key, states] of boundaries) {
        for (const state of states) {
          if (known.has(key)) {
            assert.deepEqual(state, known.get(key), key);
            compared += 1;
          }
          known.set(key, state);
        }
      }
    }
    assert.ok(compared > 3, `${compared} states were compared`);
  });

  test("every exact document is what an independent judge folds, and what each snapshot says", async () => {
    const { documents, topic } = research(4);
    const session = newSession("judged");
    const watch = held(1);
    world.gate.hold("thread-researcher");
    assert.equal((await world.writer.start({ sessionId: session, message: topic, state: { documents } })).status, 200);
    const snapshots = [];
    const plain = source(session);
    const read = async (...asked) => {
      const snapshot = await plain.snapshot(...asked);
      snapshots.push(structuredClone(snapshot));
      return snapshot;
    };
    // Beside those that the follower reads, one at each step of each session.
    const more = [];
    const { follower, boundaries, end } = await follow({ ...plain, snapshot: read }, session, (event, seen) => {
      watch(event, seen);
      if (event.kind !== "chunk" || event.chunk.type !== "step_committed") return;
      const node = seen.nodes.find(({ session }) => session === event.chunk.agentId);
      if (!node) return;
      more.push(read(node, AbortSignal.timeout(60_000)));
      // The planner's first step has been read while its session stands there.
      if (node.agentType === "planner") more.at(-1).finally(() => world.gate.release("thread-researcher"));
    });
    await Promise.all(more);
    assert.equal(end.end.status, "completed");

    const log = await logOf(session);
    let [exact, pinned] = [0, 0];
    for (const { session, document } of follower.nodes) {
      const own = snapshots.filter(({ sessionId }) => sessionId === session);
      const known = own.filter(({ streamSequence }) => streamSequence >= 0).sort((a, b) => a.patchOrdinal - b.patchOrdinal);
      if (known.length === 0) continue;
      const { states, last } = judged(log, known[0]);
      for (const { stepCount, state } of known) {
        assert.deepEqual(states.get(stepCount), state, `${session}: the snapshot at step ${stepCount}`);
        pinned += 1;
      }
      for (const [key, seen] of boundaries) {
        const [whose, step] = key.split(" ");
        if (whose !== session) continue;
        for (const state of seen) assert.deepEqual(state, states.get(Number(step)), `${session}: exact at step ${step}`);
        exact += seen.length;
      }
      assert.deepEqual(document.state, last, `${session}: at its end`);
    }
    assert.ok(exact >= 4, `${exact} exact states`);
    assert.ok(pinned >= 2, `${pinned} snapshots with a position`);
    console.log(`${exact} exact states, ${pinned} snapshots with a position of ${snapshots.length}`);
  });

  test("a session that is not there is said so at once", async () => {
    const session = newSession("unknown");
    await assert.rejects(follow(source(session), session), { name: "SourceError", status: 404, code: "NOT_FOUND" });
  });
});
