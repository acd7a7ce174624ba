// How sessions end in workerd: by their agent's policy at the instant that it says, and by their host at any time.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { startLife } from "./support/life.mjs";
import { terminalOf } from "./support/stream.mjs";
import { eventually, newSession, settled } from "./support/world.mjs";

let life;
before(async () => {
  life = await startLife();
});
after(() => life?.stop());

async function start(agent, id) {
  const started = await agent.start({ sessionId: id, message: "Tides arise because of the Moon." });
  assert.equal(started.status, 200, started.text);
  return started.json;
}

async function assertGone(agent, id) {
  for (const action of ["status", "snapshot", "usage", "sse"]) {
    const { status, json } = await agent.get(action, { sessionId: id });
    assert.deepEqual([status, json.code], [404, "NOT_FOUND"], action);
  }
  assert.equal(await life.alarm(id), null);
}

test("an object at rest has no alarm", async () => {
  const id = newSession("rest");
  const agent = life.agent("keeper");
  await start(agent, id);
  await settled(agent, id, "completed");
  await eventually("the alarm is cleared", async () => ((await life.alarm(id)) === null ? true : undefined));
  assert.equal((await agent.status(id)).status, 200);
});

test("where a session expires, the alarm is that instant, and then nothing is left", async () => {
  const id = newSession("expiry");
  const agent = life.agent("brief");
  const first = await start(agent, id);
  const { updatedAt } = await settled(agent, id, "completed");
  const due = updatedAt + 3_000;
  await eventually("the alarm is armed for the expiry", async () => ((await life.alarm(id)) === due ? true : undefined));
  const gone = await eventually("it has expired", async () => ((await agent.status(id)).status === 404 ? Date.now() : undefined));
  assert.ok(gone >= due, "not before its time");
  await assertGone(agent, id);
  const again = await start(agent, id);
  assert.notEqual(again.streamId, first.streamId);
  const { events } = await agent.open(id, { fromSequence: 0 });
  const seen = [];
  for await (const event of events) seen.push(event);
  assert.equal(JSON.parse(seen.find(({ event }) => event === "chunk").data).sequence, 1);
  assert.equal(terminalOf(seen).data.status, "completed");
});

test("a host deletes a session at work: its readers are told, and its id begins anew", async () => {
  const id = newSession("deleted");
  const agent = life.agent("waiter");
  const first = await start(agent, id);
  const stream = await agent.open(id, { fromSequence: 0 });
  const seen = [];
  let removed;
  for await (const event of stream.events) {
    seen.push(event);
    if (event.event === "chunk" && JSON.parse(event.data).chunk.type === "tool_start") {
      assert.equal((await agent.status(id)).json.isExecuting, true);
      removed ??= await life.remove(id);
      assert.equal(removed.status, 200, removed.text);
    }
  }
  assert.ok(removed, "the tool began");
  const last = seen.at(-1);
  assert.equal(last.event, "error");
  const { code, recoverable } = JSON.parse(last.data);
  assert.deepEqual([code, recoverable], ["NOT_FOUND", false]);
  await assertGone(agent, id);
  const again = await start(agent, id);
  assert.notEqual(again.streamId, first.streamId);
  assert.notEqual(again.runId, first.runId);
  assert.equal((await life.remove(id)).status, 200);
  await assertGone(agent, id);
});
