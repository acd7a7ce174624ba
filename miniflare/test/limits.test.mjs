// What a mount sets for its callers, in workerd: the platform's rate limiter in front of the producer's public mount, and
// sessions that are bound to those who begin them, on a mount of the test Worker.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { after, before, test } from "node:test";
import { startWorkers } from "../harness.mjs";
import { contract } from "./support/contract.mjs";
import { Mount } from "./support/http.mjs";
import { newSession } from "./support/world.mjs";

const LIMIT = 3;

let workers;
before(async () => {
  const ratelimits = { producer: { RATE_LIMIT: { limit: LIMIT, period: 60 } } };
  workers = await startWorkers({ roles: ["producer"], ratelimits, extra: [contract()] });
});
after(() => workers.stop());

test("an address that comes too often is a 429 with Retry-After, writes nothing, and reads on", async () => {
  const planner = new Mount(workers.urls.producer, "/agents", "planner", workers.authorization);
  const [ada, bob] = ["192.0.2.1", "192.0.2.2"].map((address) => planner.as({ ...workers.authorization, "cf-connecting-ip": address }));
  // The limiter counts in whole minutes of the clock: two of them may be met here, and never a third.
  let refused;
  let session;
  const statuses = [];
  while (refused === undefined) {
    assert.ok(statuses.length <= 2 * LIMIT, `nothing was refused: ${statuses}`);
    session = newSession("flood");
    const answer = await ada.start({ sessionId: session, message: "" });
    statuses.push(answer.status);
    if (answer.status === 429) refused = answer;
  }
  assert.ok(statuses.length > LIMIT, `${statuses}`);
  assert.ok(statuses.slice(0, -1).every((status) => status === 400), `${statuses}`);
  assert.deepEqual([refused.json.code, refused.json.retryable, refused.headers["retry-after"]], ["RATE_LIMITED", true, "60"]);
  assert.equal(refused.headers["x-remote-agents-mount"], "projected");
  // Reading is not counted, and nobody else is.
  assert.equal((await ada.status(session)).status, 404);
  assert.equal((await bob.start({ sessionId: session, message: "" })).status, 400);
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
