// The platform's rate limiter in front of the producer's public mount, through its binding.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { startWorkers } from "../harness.mjs";
import { Mount } from "./support/http.mjs";
import { newSession } from "./support/world.mjs";

const LIMIT = 3;

let workers;
before(async () => {
  workers = await startWorkers({ roles: ["producer"], ratelimits: { producer: { RATE_LIMIT: { limit: LIMIT, period: 60 } } } });
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
