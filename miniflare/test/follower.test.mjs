// The JavaScript follower on a job of both Workers: from its start, late, and over a connection that breaks all the time.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Follower, httpSource } from "../../client/src/index.ts";
import { research } from "./support/documents.mjs";
import { newSession, startWorld } from "./support/world.mjs";

let world;
before(async () => {
  world = await startWorld();
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

/** The tree as plain values. */
function plain(follower) {
  const nodes = follower.nodes.map(({ session, agentType, parent, toolCallId, remote, outcome, document }) => {
    return [session, { agentType, parent, toolCallId, remote, outcome, status: document.status, state: document.state }];
  });
  return Object.fromEntries(nodes.sort(([a], [b]) => (a < b ? -1 : 1)));
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
    assert.equal((await world.writer.start({ sessionId: session, message: topic, state: { documents } })).status, 200);
    const runs = await Promise.all([follow(source(session), session), follow(shaky(source(session)), session), follow(shaky(source(session)), session)]);
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

  test("a session that is not there is said so at once", async () => {
    const session = newSession("unknown");
    await assert.rejects(follow(source(session), session), { name: "SourceError", status: 404, code: "NOT_FOUND" });
  });
});
