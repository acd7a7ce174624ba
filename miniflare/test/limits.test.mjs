// What a mount sets for its callers, in workerd: the platform's rate limiter in front of the producer's public mount, and
// sessions that are bound to those who begin them, on a mount of the test Worker.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { after, before, test } from "node:test";
import { internalCaller, startWorkers } from "../harness.mjs";
import { contract } from "./support/contract.mjs";
import { Mount } from "./support/http.mjs";
import { newSession } from "./support/world.mjs";

const LIMIT = 3;

let workers;
before(async () => {
  const ratelimits = { producer: { RATE_LIMIT: { limit: LIMIT, period: 60 } } };
  workers = await startWorkers({ roles: ["producer"], ratelimits, extra: [internalCaller(), contract()] });
});
after(() => workers.stop());

test("an address that comes too often is a 429 with Retry-After, writes nothing, and reads on", async () => {
  const planner = new Mount(workers.urls.producer, "/agents", "planner", workers.authorization);
  const [ada, bob] = ["192.0.2.1", "192.0.2.2"].map((address) => planner.as({ ...workers.authorization, "cf-connecting-ip": address }));
  const inside = new Mount(workers.urls.caller, "/internal/agents", "planner");
  // Each start begins a run of a session of its own, unless its address comes too often; nobody needs what it comes to.
  const start = async (mount) => {
    const sessionId = newSession("flood");
    const answer = await mount.start({ sessionId, message: "What is promised?" });
    if (answer.status === 200) assert.equal((await inside.abort(sessionId)).status, 200);
    return { sessionId, ...answer };
  };
  // The limiter counts in whole minutes of the clock: two of them may be met here, and never a third.
  const begun = [];
  let refused;
  while (refused === undefined) {
    assert.ok(begun.length <= 2 * LIMIT, `nothing was refused: ${begun.length}`);
    const answer = await start(ada);
    if (answer.status === 429) refused = answer;
    else begun.push(answer);
  }
  assert.ok(begun.length >= LIMIT, `${begun.length}`);
  assert.deepEqual([refused.json.code, refused.json.retryable, refused.headers["retry-after"]], ["RATE_LIMITED", true, "60"]);
  assert.equal(refused.headers["x-remote-agents-mount"], "projected");
  // Nobody else is counted with it.
  begun.push(await start(bob));
  // Reading is not counted: it tells what was begun, and that nothing was by the start that was refused.
  for (const { sessionId, status, text } of begun) {
    assert.equal(status, 200, text);
    assert.equal((await ada.status(sessionId)).status, 200);
  }
  for (const mount of [ada, bob, inside]) assert.equal((await mount.status(refused.sessionId)).status, 404);
});

test("a session is unknown to all but its caller, forge what they may, and a mount's bound on readers reaches its object", async () => {
  const base = workers.urls.contract;
  const of = (account, more = {}) => new Mount(base, "/life/bound", "waiter", { "x-account": account, ...more });
  const [ada, bob, inside] = [of("ada"), of("bob"), new Mount(base, "/life/agents", "waiter")];
  const id = newSession("bound");
  assert.equal((await ada.start({ sessionId: id, message: "Wait." })).status, 200);

  const gets = ["sse", "status", "snapshot", "usage", "tree", "ui", "messages"];
  const posts = ["resume", "interrupt", "abort"];
  const told = ({ status, headers: { date, ...headers }, text }) => ({ status, headers, text });
  const ask = (mount, action, sessionId) => (gets.includes(action) ? mount.get(action, { sessionId }) : mount.post(action, { sessionId }));
  const digest = createHash("sha256").update("ada").digest("hex");
  for (const foreign of [bob, of("bob", { "x-remote-agents-internal-caller": digest }), of("bob", { "x-remote-agents-internal-limits": "9 9 9" })]) {
    for (const action of [...gets, ...posts]) {
      const [known, unknown] = [await ask(foreign, action, id), await ask(foreign, action, "never-begun")];
      assert.equal(known.status, 404, action);
      assert.deepEqual(told(known), told(unknown), action);
    }
    const began = await foreign.start({ sessionId: id, message: "Wait." });
    assert.deepEqual(told(began), told(await foreign.status("never-begun")));
  }
  const nobody = await new Mount(base, "/life/bound", "waiter").status(id);
  assert.deepEqual([nobody.status, nobody.json.code], [401, "UNAUTHORIZED"]);
  assert.equal((await ada.status(id)).json.status, "running", "nobody has stopped it");
  assert.equal((await inside.status(id)).status, 200, "a mount that binds nothing reaches it");

  const readers = [await ada.open(id), await ada.open(id)];
  const refused = await ada.get("sse", { sessionId: id });
  assert.deepEqual([refused.status, refused.json.code, refused.headers["retry-after"]], [429, "RATE_LIMITED", "5"]);
  readers.push(await inside.open(id));
  assert.deepEqual(readers.map(({ status }) => status), [200, 200, 200], "the agent itself takes three");
  assert.equal((await ada.abort(id)).json.accepted, true);
  for (const reader of readers) for await (const event of reader.events) assert.ok(event);
});
