// The stories of transports in workerd: the same as natively, over a service binding, an object stub and the network.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { startWorkers } from "../harness.mjs";
import { contract } from "./support/contract.mjs";

const WAYS = {
  binding: "a service binding",
  stub: "stubs of the same Worker's objects",
  http: "the network",
};

let workers;
let names;

/** Where requests to the outside lead: what calls itself `far.test` is the Worker `far`, on a socket of this machine. */
function outbound(request) {
  const url = new URL(request.url);
  assert.equal(url.host, "far.test");
  const { method, headers, body } = request;
  return fetch(`${workers.urls.far}${url.pathname}${url.search}`, { method, headers, body, duplex: "half", redirect: "manual" });
}

before(async () => {
  // Children behind the binding live in another Worker, and so do theirs.
  workers = await startWorkers({ extra: [contract("near", "far"), contract("far")], outbound });
  names = await (await fetch(`${workers.urls.near}/stories`)).json();
  assert.ok(names.length > 20, `only ${names.length} stories`);
});
after(() => workers?.stop());

for (const [way, what] of Object.entries(WAYS)) {
  describe(`over ${what}`, () => {
    test("every story holds", { concurrency: true }, async (t) => {
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
