// What is in a state only must not appear in any byte of the projected mount.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Follower, httpSource } from "../../client/src/index.ts";
import { research } from "./support/documents.mjs";
import { startGated } from "./support/gate.mjs";
import { chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, settled } from "./support/world.mjs";

const CANARIES = {
  title: "canary-title-7c1f",
  note: "canary-note-09aa",
  quote: "canary-quote-e3d2",
  documentId: "canary-document-51b6",
  question: "canary-question-c840",
  extra: "canary-extra-2f97",
};

/** A start whose state holds every canary: those of the documents' titles come back in notes of findings. */
function startBody(sessionId, { documents, topic }) {
  return {
    sessionId,
    message: topic,
    state: {
      documents: documents.map((document) => ({ ...document, title: `${CANARIES.title} ${document.title}` })),
      findings: [{ threadId: "before", documentId: CANARIES.documentId, quote: CANARIES.quote, note: CANARIES.note }],
      threads: [{ id: "before", question: CANARIES.question, status: "done" }],
      extra: { deep: [CANARIES.extra] },
    },
  };
}

/** All that has been seen of a mount, as text: heads and bodies. */
class Seen {
  texts = [];

  answer(name, answer) {
    const { status, rawHeaders, headers, text, events } = answer;
    const head = JSON.stringify(rawHeaders ?? [...headers]);
    this.texts.push({ name, text: `${status} ${head} ${text ?? events.map(({ raw }) => raw).join("")}` });
    return answer;
  }

  /** Names of the answers that hold any of these texts. Canaries are spelled alike in JSON and in URLs. */
  holding(canaries) {
    return this.texts.filter(({ text }) => canaries.some((canary) => text.includes(canary))).map(({ name }) => name);
  }
}

let world;
before(async () => {
  world = await startGated();
});
after(() => world.stop());

describe("a planner behind the projected mount", () => {
  const seen = new Seen();
  const id = newSession("canary");
  let live;

  before(async () => {
    const { planner } = world;
    world.gate.hold("thread-researcher");
    const body = startBody(id, research(99));
    const started = seen.answer("start", await planner.start(body, { "idempotency-key": "k" }));
    assert.equal(started.status, 200, started.text);
    const stream = await planner.open(id, { streamId: started.json.streamId });
    const events = [];
    let asked = 0;
    for await (const event of stream.events) {
      events.push(event);
      if (event.event !== "chunk" || JSON.parse(event.data).chunk.type !== "subagent_start") continue;
      // In the middle of the job, several times: whatever can be asked.
      asked += 1;
      if (asked <= 2) await ask(`running ${asked}`);
      if (asked === 2) world.gate.open();
    }
    live = events;
    seen.answer("live", { status: stream.status, headers: stream.headers, events });
    await settled(planner, id, "completed");
    await ask("completed");
    seen.answer("start again", await planner.start(body));
    seen.answer("start with its key", await planner.start(body, { "idempotency-key": "k" }));
    seen.answer("start with its key and another body", await planner.start({ ...body, message: "other" }, { "idempotency-key": "k" }));
    seen.answer("interrupt", await planner.interrupt(id));
    seen.answer("abort", await planner.abort(id));
    seen.answer("resume, refused", await planner.resume({ sessionId: id }));
    seen.answer("resume", await planner.resume({ sessionId: id, message: "What else is there?" }));
    await settled(planner, id, "completed");
    await ask("completed again");
  });

  async function ask(when) {
    const { planner } = world;
    for (const action of ["status", "snapshot", "usage", "tree", "messages"]) {
      seen.answer(`${action}, ${when}`, await planner[action](id));
    }
    seen.answer(`list, ${when}`, await planner.list());
    const until = ({ event, data }) => event === "caught-up" || (event === "chunk" && JSON.parse(data).chunk.type === "output");
    seen.answer(`replay, ${when}`, await planner.read(id, { fromSequence: 0 }, when.startsWith("running") ? { until } : {}));
  }

  test("shows no canary in any byte of any route", () => {
    assert.ok(seen.texts.length >= 25, `${seen.texts.length} answers`);
    assert.deepEqual(seen.holding(Object.values(CANARIES)), []);
  });

  test("while the raw mount shows every one of them", async () => {
    const raw = new Seen();
    raw.answer("snapshot", await world.raw.snapshot(id));
    raw.answer("replay", await world.raw.read(id, { fromSequence: 0 }));
    for (const [name, canary] of Object.entries(CANARIES)) {
      const where = name === "question" ? [] : ["snapshot"];
      assert.deepEqual(raw.holding([canary]).filter((at) => at === "snapshot"), where, name);
    }
    assert.deepEqual(raw.holding([CANARIES.title]), ["snapshot", "replay"], "notes of findings name the titles, in patches too");
  });

  test("shows how far it is and what it costs, and nothing else", async () => {
    const { json: snapshot } = await world.planner.snapshot(id);
    const { json: raw } = await world.raw.snapshot(id);
    assert.deepEqual(snapshot.state, { phase: "done", threadCount: raw.state.threads.length, findingCount: raw.state.findings.length });
    assert.ok(snapshot.state.findingCount > 1);
    assert.equal(typeof snapshot.projection, "string");
    const { json: usage } = await world.planner.usage(id);
    const { json: rawUsage } = await world.raw.usage(id);
    assert.deepEqual(usage, { sessionId: id, rollup: { billingUnits: Math.ceil(rawUsage.rollup.tokens.total / 1000) } });
    const { data: end } = terminalOf(live);
    assert.deepEqual(Object.keys(end.state).sort(), ["findingCount", "phase", "threadCount"]);
    assert.deepEqual(Object.keys(end.usage), ["billingUnits"]);
    assert.ok(end.usage.billingUnits > 0);
  });

  /** Whether the session itself says that a step is committed. */
  const isOwnStep = ({ chunk }) => chunk.type === "step_committed" && chunk.agentId === id;

  test("lets all other frames pass with their numbers, and no patch of the state", async () => {
    const raw = chunksOf((await world.raw.read(id, { fromSequence: 0 })).events);
    const projected = chunksOf((await world.planner.read(id, { fromSequence: 0 })).events);
    assert.ok(ofType(raw, "state_patch").length > 0);
    const expected = raw.filter(({ chunk }) => chunk.type !== "state_patch");
    const bytes = (chunks) => chunks.filter((one) => !isOwnStep(one)).map(({ bytes }) => bytes.toString());
    assert.deepEqual(bytes(projected), bytes(expected));
    // A step of the session has its own fields, and what it changed in the projection.
    const steps = projected.filter(isOwnStep).map(({ sequence, chunk: { projection, patches, ...chunk } }) => ({ sequence, chunk }));
    assert.deepEqual(steps, expected.filter(isOwnStep).map(({ sequence, chunk }) => ({ sequence, chunk })));
    assert.ok(steps.length > 3, `${steps.length} steps`);
  });

  test("tells with each step what it changed, and whoever comes back reads the same bytes", async () => {
    const { projection } = (await world.planner.snapshot(id)).json;
    const { events } = await world.planner.read(id, { fromSequence: 0 });
    const all = chunksOf(events);
    for (const { chunk } of all.filter(isOwnStep)) {
      assert.deepEqual([chunk.projection, Array.isArray(chunk.patches), chunk.resync], [projection, true, undefined]);
    }
    // The first run was followed live; what it showed is what the log shows now.
    const text = (chunks) => chunks.map(({ bytes }) => bytes.toString());
    const seen = chunksOf(live);
    assert.deepEqual(text(all.slice(0, seen.length)), text(seen));
    for (const { sequence } of all.filter(isOwnStep)) {
      const again = chunksOf((await world.planner.read(id, { fromSequence: sequence - 1 })).events);
      assert.deepEqual(text(again), text(all.filter((one) => one.sequence >= sequence)), `from ${sequence}`);
    }
  });

  test("is followed from one snapshot to its end", async () => {
    world.gate.hold("planner");
    const session = newSession("canary-followed");
    assert.equal((await world.planner.start(startBody(session, research(98)))).status, 200);
    const { urls, authorization } = world.workers;
    const source = httpSource(session, { origin: urls.producer, headers: () => authorization });
    let snapshots = 0;
    const counted = { ...source, snapshot: (node, signal) => ((snapshots += node.session === session), source.snapshot(node, signal)) };
    const follower = new Follower(counted, { session, agentType: "planner" }, { backoff: 0 });
    const steps = new Map();
    for await (const event of follower.follow(AbortSignal.timeout(120_000))) {
      const { status, state } = follower.root.document;
      if (status.kind === "exact") world.gate.open();
      if (event.kind === "document" && event.node === follower.root && status.kind === "exact") steps.set(status.step, state);
    }
    const { document } = follower.root;
    const { json: last } = await world.planner.snapshot(session);
    assert.deepEqual([document.status.kind, document.state], ["final", last.state]);
    const known = [...steps.keys()];
    assert.deepEqual(known, Array.from({ length: last.stepCount - known[0] + 1 }, (_, at) => known[0] + at), "every step from the baseline on");
    assert.ok(known.length > 2, `${known}`);
    assert.equal(snapshots, 1);
  });

  test("hides the researchers, which it does not serve", async () => {
    const { subSessionId } = ofType(chunksOf(live), "subagent_start")[0].chunk;
    const unknown = await world.planner.status("no-such-session");
    for (const mount of [world.planner, world.planner.of("thread-researcher")]) {
      for (const action of ["status", "snapshot", "usage"]) {
        const { status, text } = await mount[action](subSessionId);
        assert.deepEqual([status, text], [404, unknown.text], `${mount.agentType} ${action}`);
      }
    }
    assert.equal((await world.raw.of("thread-researcher").status(subSessionId)).status, 200);
  });
});

test("a run that is stopped shows no canary either", async () => {
  const seen = new Seen();
  world.gate.hold("thread-researcher");
  const id = newSession("canary-stopped");
  assert.equal((await world.planner.start(startBody(id, research(5)))).status, 200);
  await world.planner.read(id, {}, { until: ({ event, data }) => event === "chunk" && JSON.parse(data).chunk.type === "subagent_start" });
  const stopped = seen.answer("interrupt", await world.planner.interrupt(id, "enough"));
  assert.equal(stopped.json.accepted, true, stopped.text);
  const { events } = seen.answer("replay", await world.planner.read(id, { fromSequence: 0 }));
  assert.equal(terminalOf(events).data.status, "interrupted");
  assert.deepEqual(Object.keys(terminalOf(events).data.state).sort(), ["findingCount", "phase", "threadCount"]);
  seen.answer("abort", await world.planner.abort(id));
  seen.answer("replay of the aborted", await world.planner.read(id, { fromSequence: 0 }));
  for (const action of ["status", "snapshot", "usage", "tree"]) seen.answer(action, await world.planner[action](id));
  assert.deepEqual(seen.holding(Object.values(CANARIES)), []);
});
