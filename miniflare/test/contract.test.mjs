// The store's contract suite on the platform's own SQLite, each case in an object of its own.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { startWorkers } from "../harness.mjs";
import { contract } from "./support/contract.mjs";

let workers;
before(async () => {
  workers = await startWorkers({ extra: [contract()] });
});
after(() => workers?.stop());

test("Durable Object SQLite keeps every promise of a store", async (t) => {
  const names = await (await fetch(`${workers.urls.contract}/store`)).json();
  assert.ok(names.length > 20, `only ${names.length} cases`);
  for (const [number, name] of names.entries()) {
    await t.test(name, async () => {
      const response = await fetch(`${workers.urls.contract}/store/${number}`);
      const text = await response.text();
      const words = workers.logs.slice(-20).join("\n");
      assert.equal(response.status, 200, `${text}\n${words}`);
      assert.equal(text, "kept");
    });
  }
  const missing = await fetch(`${workers.urls.contract}/store/${names.length}`);
  assert.equal(missing.status, 404);
});
