// The bound on a session's readers in workerd, and that one that leaves makes room.

import assert from "node:assert/strict";
import http from "node:http";
import { after, before, test } from "node:test";
import { startLife } from "./support/life.mjs";
import { eventually, newSession } from "./support/world.mjs";

let life;
before(async () => {
  life = await startLife();
});
after(() => life?.stop());

/**
 * A reader that leaves as a closed tab does, whose stream is reset. A connection that is merely closed on the client's
 * side (`close`) may still be read from, so workerd notices it with the next thing that it writes.
 */
function attach(agent, sessionId) {
  const url = `${agent.base}/life/agents/waiter/sse?sessionId=${sessionId}`;
  return new Promise((resolve, reject) => {
    const request = http.get(url, { agent: false }, (response) => {
      response.on("error", () => {});
      resolve({ status: response.statusCode, leave: () => response.socket.resetAndDestroy(), close: () => response.destroy() });
    });
    request.on("error", reject);
  });
}

test("case 17: a reader over the bound is a 429 with Retry-After, until one leaves", async () => {
  const agent = life.agent("waiter");
  const id = newSession("readers");
  const started = await agent.start({ sessionId: id, message: "Wait." });
  assert.equal(started.status, 200, started.text);
  const readers = [];
  for (let n = 0; n < 3; n++) {
    const reader = await attach(agent, id);
    assert.equal(reader.status, 200);
    readers.push(reader);
  }
  const refused = await agent.get("sse", { sessionId: id });
  assert.equal(refused.status, 429);
  assert.equal(refused.headers["retry-after"], "5");
  assert.deepEqual([refused.json.code, refused.json.retryable], ["RATE_LIMITED", true]);
  // Whoever only asks is no reader.
  assert.equal((await agent.status(id)).json.status, "running");

  // Nothing is written in the meantime: the first comment would come after fifteen seconds.
  readers.pop().leave();
  const next = await eventually("the place is free", async () => {
    const reader = await attach(agent, id);
    if (reader.status === 200) return reader;
    reader.leave();
  }, 10);
  assert.equal((await agent.get("sse", { sessionId: id })).status, 429);
  for (const reader of [next, ...readers]) reader.leave();
  assert.equal((await life.remove(id)).status, 200);
});

test("case 15: readers that only close their connection are noticed before another is refused", async () => {
  const agent = life.agent("waiter");
  const id = newSession("closing");
  assert.equal((await agent.start({ sessionId: id, message: "Wait." })).status, 200);
  // Many times the bound, one after the other, and none of them says that it leaves.
  for (let n = 0; n < 60; n++) {
    const reader = await attach(agent, id);
    assert.equal(reader.status, 200, `reader ${n}`);
    reader.close();
  }
  assert.equal((await life.remove(id)).status, 200);
});

test("case 15: over a service binding too, readers that leave in either way make room", async () => {
  const agent = life.agentBehind("waiter");
  const id = newSession("binding");
  assert.equal((await agent.start({ sessionId: id, message: "Wait." })).status, 200);
  const room = () =>
    eventually("there is room", async () => {
      const reader = await attach(agent, id);
      if (reader.status === 200) return reader;
      reader.leave();
    });
  // Ten times the bound of three; what is kept of one that left would be in the way of the fourth behind it.
  for (let n = 0; n < 30; n++) {
    const reader = await room();
    if (n % 2) reader.leave();
    else reader.close();
  }
  // The bound is still there: these stay.
  const readers = [await room(), await room(), await room()];
  assert.equal((await agent.get("sse", { sessionId: id })).status, 429);
  for (const reader of readers) reader.leave();
  assert.equal((await life.remove(id)).status, 200);
});
