// The stories of transports in workerd: the same as natively, over a service binding and over an object stub.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { startWorkers } from "../harness.mjs";
import { contract } from "./support/contract.mjs";

let workers;
let names;
before(async () => {
  // Children behind the binding live in another Worker, and so do theirs.
  workers = await startWorkers({ extra: [contract("near", "far"), contract("far")] });
  names = await (await fetch(`${workers.urls.near}/stories`)).json();
  assert.ok(names.length > 20, `only ${names.length} stories`);
});
after(() => workers?.stop());

for (const way of ["binding", "stub"]) {
  describe(`over a ${way === "binding" ? "service binding" : "stub of the same Worker's objects"}`, { concurrency: true }, () => {
    test("every story holds", async (t) => {
      await Promise.all(
        names.map((name, number) =>
          t.test(name, async () => {
            const response = await fetch(`${workers.urls.near}/stories/${way}/${number}`);
            const text = await response.text();
            assert.equal(response.status, 200, `${text}\n${workers.logs.slice(-20).join("\n")}`);
            assert.equal(text, "held");
          }),
        ),
      );
    });
  });
}

test("there are no more stories than these", async () => {
  assert.equal((await fetch(`${workers.urls.near}/stories/stub/${names.length}`)).status, 404);
  assert.equal((await fetch(`${workers.urls.near}/stories/nowhere/0`)).status, 500);
});
