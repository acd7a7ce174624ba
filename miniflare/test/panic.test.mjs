// A panic stays small: who caused it has an answer soon, everybody else goes on, and a session that panics at every
// attempt comes to its end.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { follow } from "./support/patch.mjs";
import { assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { eventsOf, settledByItself, startStress } from "./support/stress.mjs";
import { eventually, newSession } from "./support/world.mjs";

/** How many executions in a row without progress a run has; the one after them settles it. */
const BUDGET = 10;

let world;
let mount;
before(async () => {
  world = await startStress();
  mount = world.mount();
});
let over = false;
after(() => {
  over = true;
  return world.stop();
});

const script = (message) => JSON.stringify(message);
const wakes = (id) => eventsOf(world.workers).filter((line) => line.event === "wake" && line.sessionId === id);
const settlements = (id) => eventsOf(world.workers).filter((line) => line.event === "settled" && line.sessionId === id);
const panics = () => world.workers.logs.filter((line) => line.startsWith("a test asked for a panic in a tool")).length;

/** Asks again when the very request was hit by a panic, as a client does; with a key, so that it is carried out once. */
async function asked(request) {
  const key = { "idempotency-key": newSession("key") };
  return eventually("an answer", async () => {
    const answer = await request(key);
    return [500, 503].includes(answer.status) ? undefined : answer;
  });
}

/** What the routes answer that change nothing here: a code, a status or 200 each. `resume` is sent where it is given. */
async function routes(id, resume) {
  const answers = {
    start: await asked((key) => mount.start({ sessionId: id, message: "again" }, key)),
    status: await asked(() => mount.status(id)),
    snapshot: await asked(() => mount.snapshot(id)),
    usage: await asked(() => mount.usage(id)),
    sse: await asked(() => mount.open(id, { fromSequence: 0 })),
    ...(resume && { resume: await asked((key) => mount.resume({ sessionId: id, ...resume }, key)) }),
  };
  const events = [];
  try {
    for await (const event of answers.sse.events) {
      if (event.event === "chunk") events.push(event);
      if (events.length === 3) break;
    }
  } catch {
    // A reader wakes a running session: the panic that follows ends the stream, and that is what it has to do.
  }
  assertGapless(chunksOf(events));
  return Object.fromEntries(Object.entries(answers).map(([route, { status, json }]) => [route, json?.code ?? json?.status ?? status]));
}

/** What a session at rest tells; each is asked for again when the very request was hit by a panic. */
async function atRest(id) {
  const answers = [];
  for (const route of ["status", "snapshot", "usage", "tree"]) answers.push((await asked(() => mount[route](id))).text);
  return answers;
}

/** Follows a session across every break to its terminal frame; each number must be the next one. */
async function followed(id) {
  const events = [];
  let breaks = 0;
  while (!over) {
    const last = chunksOf(events).at(-1)?.sequence ?? 0;
    try {
      const stream = await mount.open(id, { fromSequence: last });
      if (stream.status === 200) for await (const event of stream.events) events.push(event);
    } catch {
      // The connection broke: that is what it is to do when its object ends.
    }
    if (["end", "error"].includes(events.at(-1)?.event)) return { events, breaks };
    breaks += 1;
    // What was cut in the middle of an event is read again.
    if (events.at(-1)?.partial) events.pop();
  }
  throw new Error("the test is over");
}

test("case 19: a request that panics is answered with 500, and leaves nothing", async () => {
  const id = newSession("entry");
  const answer = await mount.start({ sessionId: id, message: "panic at the entry" });
  assert.equal(answer.status, 500, answer.text);
  assert.equal((await mount.status(id)).status, 404);
  assert.equal((await mount.start({ sessionId: id, message: script({ say: { chunks: 3, per: 1, bytes: 9 } }) })).status, 200);
  assert.equal((await settledByItself(world.workers, id)).status, "completed");
});

for (const [how, burns] of [["at once", 0], ["after a moment", 1]]) {
  test(`case 19: a session whose tool panics ${how} fails within its budget, and its neighbours go on`, async () => {
    const [poison, busy, alone, rest] = ["poison", "busy", "alone", "rest"].map(newSession);
    // Before: a session like any other.
    await mount.start({ sessionId: poison, message: script({ say: { chunks: 3, per: 1, bytes: 9 } }) });
    await settledByItself(world.workers, poison);
    const told = { start: "ALREADY_COMPLETED", status: "completed", snapshot: 200, usage: 200, sse: 200 };
    assert.deepEqual(await routes(poison), told);
    await mount.start({ sessionId: rest, message: script({ say: { chunks: 3, per: 1, bytes: 9 } }) });
    await settledByItself(world.workers, rest);
    const resting = { told: await atRest(rest), log: (await followed(rest)).events.map(({ raw }) => raw) };
    assert.equal((await mount.interrupt(poison)).json.code, "ALREADY_COMPLETED");
    assert.deepEqual((await mount.abort(poison)).json.accepted, false);

    // One neighbour has a reader; the other is asked for nothing, so that its alarm alone brings it back.
    const count = 30;
    for (const id of [busy, alone]) {
      assert.equal((await mount.start({ sessionId: id, message: script({ steps: { count, takes: 150 } }) })).status, 200);
    }
    const { json: baseline } = await mount.snapshot(busy);
    const reader = followed(busy);
    const before = panics();
    const resumed = await mount.resume({ sessionId: poison, message: script({ explode: { burns } }) });
    assert.equal(resumed.status, 200, resumed.text);

    // Meanwhile: right after a panic, and again later.
    for (const attempts of [1, 4]) {
      await eventually(`panic ${attempts}`, async () => (panics() - before >= attempts ? true : undefined));
      assert.deepEqual(await routes(poison, { mode: "continue" }), { start: "ALREADY_RUNNING", status: "running", snapshot: 200, usage: 200, sse: 200, resume: "ALREADY_RUNNING" });
      assert.deepEqual(await atRest(rest), resting.told, "who is at rest is as before at its next request");
    }

    // After: its run has failed, and so its stream says.
    await eventually("the run has settled", async () => (settlements(poison).length > 1 ? true : undefined), 120);
    assert.deepEqual(await routes(poison), { ...told, status: "failed" });
    const { json: status } = await mount.status(poison);
    assert.deepEqual([status.status, status.errorCode], ["failed", "run_attempts_exhausted"]);
    assert.equal(wakes(poison).length, BUDGET + 1, "each attempt was counted, and the last wake settled the run");
    const { events } = await followed(poison);
    assertGapless(chunksOf(events));
    const { event, data } = terminalOf(events);
    assert.deepEqual([event, data.code, data.recoverable], ["error", "run_attempts_exhausted", false]);
    assert.equal((await mount.interrupt(poison)).json.code, "ALREADY_COMPLETED");

    assert.deepEqual({ told: await atRest(rest), log: (await followed(rest)).events.map(({ raw }) => raw) }, resting);
    assert.equal(wakes(rest).length, 0, "and nothing woke it");

    // The neighbours were cut off each time, and are none the worse for it.
    for (const id of [busy, alone]) {
      assert.equal((await settledByItself(world.workers, id)).status, "completed");
      assert.ok(wakes(id).length > 0, `${id} was cut off and came back by itself`);
      const { events: all } = await followed(id);
      const chunks = chunksOf(all);
      assertGapless(chunks);
      assertPairing(chunks);
      assert.equal(ofType(chunks, "run_started").length, 1);
      assert.equal(ofType(chunks, "step_committed").length, count + 1);
      assert.equal(ofType(chunks, "tool_start").length, count);
      assert.equal(terminalOf(all).data.state.notes, count, "each note was taken once");
      if (id !== busy) continue;
      const { events: seen, breaks } = await reader;
      assert.ok(breaks > 0, "the reader's streams broke off, and none hung");
      assert.deepEqual(chunksOf(seen).map(({ bytes }) => bytes.toString()), chunks.map(({ bytes }) => bytes.toString()), "what was read across the panics is the log");
      assert.deepEqual(follow(baseline, chunks).state, terminalOf(all).data.state);
    }
  });
}

test("case 19: a session that panics at every attempt can be stopped", async () => {
  for (const [stop, status, code] of [["interrupt", "interrupted", undefined], ["abort", "failed", "run_aborted"]]) {
    const id = newSession(stop);
    const before = panics();
    await mount.start({ sessionId: id, message: script({ explode: { burns: 0 } }) });
    await eventually("a panic", async () => (panics() > before ? true : undefined));
    const answer = await asked(() => mount[stop](id));
    assert.deepEqual([answer.status, answer.json.accepted], [200, true]);
    assert.equal((await settledByItself(world.workers, id)).status, status);
    const { json } = await mount.status(id);
    assert.deepEqual([json.status, json.errorCode], [status, code]);
  }
});
