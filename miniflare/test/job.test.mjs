// One job from end to end: a writer in one Worker has the agents of another do its research.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { isDeepStrictEqual } from "node:util";
import { ROOT } from "../harness.mjs";
import { quotationsOf, research, slowResearch } from "./support/documents.mjs";
import { startGated } from "./support/gate.mjs";
import { follow } from "./support/patch.mjs";
import { send } from "./support/http.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { assertRecursiveSum, rollupsOf, untimed } from "./support/usage.mjs";
import { assertAreSnapshots, nodesOf } from "./support/tree.mjs";
import { eventually, newSession, startWorld } from "./support/world.mjs";

let world;
before(async () => {
  world = await startWorld();
});
after(() => world.stop());

/** Follows a job from its start on, and takes a pinned snapshot of every session as soon as it is announced; `taken` is told whose. */
async function runJob(id, { documents, topic }, { world: { writer, child } = world, taken = () => {} } = {}) {
  const state = documents && { documents };
  const started = await writer.start({ sessionId: id, message: topic, state });
  assert.equal(started.status, 200, started.text);
  const { json: first } = await writer.snapshot(id);
  taken("writer");
  const baselines = [Promise.resolve(first)];
  const stream = await writer.open(id, { streamId: started.json.streamId });
  assert.equal(stream.headers.get("x-remote-agents-stream"), started.json.streamId);
  const events = [];
  for await (const event of stream.events) {
    events.push(event);
    const chunk = event.event === "chunk" ? JSON.parse(event.data).chunk : {};
    if (chunk.type !== "subagent_start") continue;
    const { subSessionId, subAgentType } = chunk;
    baselines.push(childSnapshot(child, subSessionId, subAgentType).finally(() => taken(subAgentType)));
  }
  return { id, started: started.json, events, chunks: chunksOf(events), end: terminalOf(events), baselines: await Promise.all(baselines) };
}

/** Announced comes before begun, so the first answers may be those of an unknown session. */
function childSnapshot(child, sessionId, agentType) {
  return eventually(`${sessionId} has a snapshot`, async () => {
    const { status, json, text } = await child.snapshot(sessionId, agentType);
    assert.ok(status === 200 || status === 404, text);
    return status === 200 ? json : undefined;
  });
}

describe("a job on documents that nobody has seen before", () => {
  const given = slowResearch(20261130);
  const texts = new Map(given.documents.map(({ id, text }) => [id, text]));
  let job;
  before(async () => {
    job = await runJob(newSession("job"), given);
  });

  test("ends with a report, the state and the usage", () => {
    const { event, data } = job.end;
    assert.equal(event, "end", JSON.stringify(data));
    assert.equal(data.status, "completed");
    assert.equal(data.runId, job.started.runId);
    assert.equal(data.output.topic, given.topic);
    assert.ok(data.output.summary.length > 0);
    assert.ok(data.output.sections.length >= 2, "a section for each thread");
    assert.equal(data.state.phase, "researched");
    assert.equal(data.usage.sessionId, job.id);
  });

  test("quotes verbatim, and names the document", () => {
    const quotations = quotationsOf(job.end.data.output);
    assert.ok(quotations.length >= 4, `${quotations.length} quotations`);
    assert.ok(new Set(quotations.map(({ documentId }) => documentId)).size >= 2, "from several documents");
    for (const { documentId, quote } of quotations) {
      assert.ok(quote.trim().length > 0);
      assert.ok(texts.get(documentId)?.includes(quote), `${documentId} does not hold ${JSON.stringify(quote)}`);
    }
    const cited = new Set(quotations.map(({ documentId }) => documentId));
    assert.deepEqual(new Set(job.end.data.output.sources.map(({ documentId }) => documentId)), cited);
  });

  test("shows the whole tree at work", () => {
    assertGapless(job.chunks);
    const starts = assertPairing(job.chunks);
    assertForwarding(job.id, job.chunks);
    const [planner, ...researchers] = starts;
    assert.deepEqual([planner.agentId, planner.subAgentType, planner.remote], [job.id, "planner", true]);
    assert.match(planner.subSessionId, new RegExp(`^${job.id}-remote-${planner.toolCallId}-[a-z2-7]{16}$`));
    assert.equal(researchers.length, job.end.data.output.sections.length);
    for (const { agentId, subAgentType, subSessionId, toolCallId, remote } of researchers) {
      assert.deepEqual([agentId, subAgentType, remote], [planner.subSessionId, "thread-researcher", false]);
      assert.match(subSessionId, new RegExp(`^${planner.subSessionId}-sub-${toolCallId}-[a-z2-7]{16}$`));
    }
    for (const id of [job.id, planner.subSessionId, ...researchers.map(({ subSessionId }) => subSessionId)]) {
      for (const type of ["run_started", "tool_start", "tool_end", "tool_arg_stream_delta", "state_patch", "text_delta", "output", "step_committed"]) {
        assert.ok(ofType(job.chunks, type, id).length > 0, `${type} of ${id}`);
      }
      for (const { chunk } of ofType(job.chunks, "state_patch", id)) {
        assert.ok(chunk.patchOrdinal > 0 && chunk.patchBase >= 0 && chunk.patches.length > 0);
      }
    }
    assert.deepEqual(ofType(job.chunks, "output", job.id).map(({ chunk }) => chunk.output), [job.end.data.output]);
    assert.ok(ofType(job.chunks, "text_delta", job.id).length >= 2, "the writer's answer streams in pieces");
  });

  test("runs at most four researchers at once", () => {
    let [open, most] = [0, 0];
    for (const { chunk } of job.chunks.filter(({ chunk }) => chunk.agentId !== job.id)) {
      if (chunk.type === "subagent_start") most = Math.max(most, (open += 1));
      if (chunk.type === "subagent_end") open -= 1;
    }
    assert.ok(most >= 2 && most <= 4, `${most} at once`);
  });

  test("patches add up to the state at each step, for every session that was read while it ran", async () => {
    assertFolds(job, await finalStates(job, world));
  });

  test("usage is the recursive sum, and the same wherever it is asked for", async () => {
    const { json } = await world.writer.usage(job.id);
    assertRecursiveSum(json.rollup);
    assert.deepEqual(untimed(job.end.data.usage), untimed(json.rollup), "the usage of the end is the usage route's");
    const sessions = rollupsOf(json.rollup, "writer");
    const starts = assertPairing(job.chunks);
    assert.deepEqual(new Set(sessions.map(({ sessionId }) => sessionId)), new Set([job.id, ...starts.map(({ subSessionId }) => subSessionId)]));
    for (const { sessionId, agentType, rollup } of sessions.slice(1)) {
      const asked = await world.child.usage(sessionId, agentType);
      assert.equal(asked.json.sessionId, sessionId);
      assert.deepEqual(untimed(asked.json.rollup), untimed(rollup), `the usage of ${sessionId}`);
    }
    for (const { sessionId, rollup } of sessions) {
      assert.equal(rollup.own.steps, ofType(job.chunks, "step_committed", sessionId).length, `steps of ${sessionId}`);
      const ends = ofType(job.chunks, "tool_end", sessionId).map(({ chunk }) => chunk);
      assert.equal(rollup.own.tools.calls, ends.length, `calls of ${sessionId}`);
      assert.equal(rollup.own.tools.failures, ends.filter(({ success }) => !success).length);
    }
  });

  test("folds the child's final state into the parent's", async () => {
    const [planner] = assertPairing(job.chunks);
    const { json } = await world.child.snapshot(planner.subSessionId, "planner");
    assert.deepEqual(job.end.data.state.research, {
      phase: "done",
      threadCount: json.state.threads.length,
      findingCount: json.state.findings.length,
      sessionId: planner.subSessionId,
    });
    assert.equal(json.state.findings.length, quotationsOf(job.end.data.output).length);
    assert.ok(json.state.findings.every(({ note }) => note.length > 0), "findings have notes");
    assert.ok(!("documents" in json.state) && !("documents" in job.end.data.state), "documents don't stay in a state");
  });

  test("status and snapshot tell the same end", async () => {
    const [{ json: status }, { json: snapshot }] = await Promise.all([world.writer.status(job.id), world.writer.snapshot(job.id)]);
    assert.equal(typeof status.updatedAt, "number");
    assert.deepEqual({ ...status, updatedAt: 0 }, {
      sessionId: job.id,
      agentType: "writer",
      status: "completed",
      isExecuting: false,
      streamId: job.started.streamId,
      runId: job.started.runId,
      stepCount: ofType(job.chunks, "step_committed", job.id).length,
      output: job.end.data.output,
      updatedAt: 0,
    });
    assert.deepEqual([snapshot.sessionId, snapshot.streamId, snapshot.streamSequence, snapshot.oldestRetainedSequence, snapshot.stepCount], [
      job.id,
      job.started.streamId,
      -1,
      0,
      status.stepCount,
    ]);
    assert.deepEqual(snapshot.state, job.end.data.state);
    assert.match(snapshot.checkpointId, new RegExp(`^cpv1-${job.id}-s${status.stepCount}-t\\d{13}-[0-9a-f]{6}$`));
  });
});

/** The state of each session of a job that has ended. */
async function finalStates({ id, end, chunks }, { child }) {
  const final = new Map([[id, end.data.state]]);
  for (const { subSessionId, subAgentType } of assertPairing(chunks)) {
    const { json } = await child.snapshot(subSessionId, subAgentType);
    assert.equal(json.streamSequence, -1, "a session that has ended has no position");
    final.set(subSessionId, json.state);
  }
  return final;
}

/** From each snapshot with a position, the patches lead to the final state. Returns how many steps and patches there were. */
function assertFolds({ baselines, chunks }, final) {
  const followed = new Map();
  for (const baseline of baselines.filter(({ streamSequence }) => streamSequence >= 0)) {
    const { state, steps, patches } = follow(baseline, chunks);
    assert.deepEqual(state, final.get(baseline.sessionId), `the state of ${baseline.sessionId}`);
    followed.set(baseline.sessionId, { steps, patches });
  }
  return followed;
}

describe("a job whose model waits", () => {
  const given = research(20261201, { documents: 10 });
  let gated;
  before(async () => {
    gated = await startGated();
  });
  after(() => gated.stop());

  test("patches add up to the state at each step, for every session from its beginning", async () => {
    const missing = { writer: 1, planner: 1, "thread-researcher": 2 };
    for (const agentType of Object.keys(missing)) gated.gate.hold(agentType);
    const taken = (agentType) => {
      missing[agentType] -= 1;
      if (missing[agentType] === 0) gated.gate.release(agentType);
    };
    const job = await runJob(newSession("followed"), given, { world: gated, taken });
    const followed = assertFolds(job, await finalStates(job, gated));
    assert.deepEqual([followed.size, missing], [4, { writer: 0, planner: 0, "thread-researcher": 0 }]);
    for (const [id, { steps, patches }] of followed) assert.ok(steps > 0 && patches > 0, `${id} was followed from a pinned snapshot`);
  });

  test("reads the tree of a running job, each node pinned by itself", async () => {
    gated.gate.hold("thread-researcher");
    const id = newSession("running");
    const started = await gated.writer.start({ sessionId: id, message: given.topic, state: { documents: given.documents } });
    assert.equal(started.status, 200, started.text);
    const nodes = await eventually("the tree has both researchers at work", async () => {
      const { status, json, text } = await gated.writer.tree(id);
      assert.equal(status, 200, text);
      const nodes = nodesOf(json);
      return nodes.length === 4 && nodes.every(({ status }) => status === "running") ? nodes : undefined;
    });
    for (const { sessionId, state, streamSequence, reason, streamId } of nodes) {
      assert.ok(reason === undefined && streamSequence > 0 && typeof state === "object" && streamId !== undefined, sessionId);
    }
    assert.deepEqual(nodes.map(({ agentType }) => agentType), ["writer", "planner", "thread-researcher", "thread-researcher"]);
    gated.gate.open();
    await gated.writer.read(id);
  });
});

describe("who comes late", () => {
  const given = slowResearch(20261201);
  const id = newSession("late");
  before(async () => {
    const started = await world.writer.start({ sessionId: id, message: given.topic, state: { documents: given.documents } });
    assert.equal(started.status, 200, started.text);
    await world.writer.read(id);
  });

  test("reads the tree of an ended job: writer, planner and researchers as their snapshots are", async () => {
    const { json } = await world.writer.tree(id);
    const nodes = nodesOf(json);
    assert.deepEqual([nodes[0].sessionId, nodes[1].remote, nodes[2].remote], [id, true, false]);
    assert.ok(nodes.length >= 4, `${nodes.length} nodes`);
    assert.ok(nodes.every(({ status, reason }) => status === "completed" && reason === undefined));
    await assertAreSnapshots(world, nodes);
    const [planner] = json.children;
    assert.deepEqual(planner.children, (await world.raw.tree(planner.sessionId)).json.children, "the planner tells the same of them");
    const cut = (await world.writer.tree(id, { depth: 2 })).json;
    assert.deepEqual([nodesOf(cut).length, cut.truncated, cut.children[0].truncated], [2, true, true]);
  });

  test("sees the planner behind the projected mount as it is projected, and of its researchers that they are there", async () => {
    const planner = nodesOf((await world.writer.tree(id)).json)[1].sessionId;
    const { json } = await world.planner.tree(planner);
    const snapshot = (await world.planner.snapshot(planner)).json;
    assert.deepEqual([json.state, json.projection], [snapshot.state, snapshot.projection]);
    assert.ok(json.children.length > 1);
    for (const child of json.children) {
      assert.deepEqual(Object.keys(child).sort(), ["agentType", "children", "reason", "remote", "sessionId", "status", "toolCallId"]);
      assert.equal(child.reason, "not_served");
    }
    assert.deepEqual((await world.planner.messages(planner)).json.code, "FEATURE_UNAVAILABLE");
  });

  test("reads the conversation with the state that it belongs to, page by page", async () => {
    const { json: whole } = await world.writer.messages(id);
    const { json: snapshot } = await world.writer.snapshot(id);
    assert.deepEqual([whole.streamId, whole.streamSequence, whole.state], [snapshot.streamId, -1, snapshot.state]);
    assert.deepEqual(whole.messages[0], { index: 1, role: "user", text: given.topic });
    assert.ok(whole.messages.at(-1).role === "tool" || whole.messages.at(-1).role === "assistant");
    const pages = [];
    for (let after = 0; after !== undefined; ) {
      const { json } = await world.writer.messages(id, { after, limit: 2 });
      pages.push(...json.messages);
      after = json.next;
    }
    assert.deepEqual(pages, whole.messages);
    assert.deepEqual(pages.map(({ index }) => index), pages.map((_, at) => at + 1));
  });

  test("reads the documents that the job was started with", async () => {
    const { urls, authorization } = world.workers;
    const ask = (session, headers) => send(urls.consumer, { path: `/api/documents?sessionId=${session}`, headers });
    assert.deepEqual((await ask(id, authorization)).json, { documents: given.documents });
    assert.deepEqual((await ask(id, {})).status, 401);
    assert.deepEqual((await ask("nobody", authorization)).json.code, "NOT_FOUND");
    for (const path of ["/documents", `/agents/writer/documents?sessionId=${id}`]) {
      assert.equal((await send(urls.consumer, { path, headers: authorization })).status, 404, path);
    }
  });
});

test("the same documents in another order of seeds: every quote of many small jobs is verbatim", async () => {
  for (const seed of [1, 2, 3, 4, 5]) {
    const given = research(seed);
    const job = await runJob(newSession(`small-${seed}`), given);
    assert.equal(job.end.data.status, "completed", JSON.stringify(job.end.data));
    const quotations = quotationsOf(job.end.data.output);
    assert.ok(quotations.length > 0);
    for (const { documentId, quote } of quotations) {
      const { text } = given.documents.find(({ id }) => id === documentId);
      assert.ok(text.includes(quote), `seed ${seed}: ${documentId} does not hold ${JSON.stringify(quote)}`);
    }
  }
});

test("without documents, the project's own documentation is read", async () => {
  const topic = "How does a parent agent delegate work, and what does a checkpoint hold?";
  const job = await runJob(newSession("own"), { topic });
  assert.equal(job.end.data.status, "completed", JSON.stringify(job.end.data));
  const quotations = quotationsOf(job.end.data.output);
  assert.ok(quotations.length > 0, "something was found");
  for (const { documentId, quote } of quotations) {
    const text = readFileSync(join(ROOT, documentId), "utf8");
    assert.ok(text.includes(quote), `${documentId} does not hold ${JSON.stringify(quote)}`);
  }
});

test("the generator of documents is deterministic, and no two seeds give the same", () => {
  assert.ok(isDeepStrictEqual(research(7), research(7)));
  assert.ok(!isDeepStrictEqual(research(7).documents[0].text, research(8).documents[0].text));
});
