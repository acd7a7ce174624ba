// The clients of model providers in workerd: the same suite as natively, over the open network and a binding of Workers AI.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { startWorkers } from "../harness.mjs";
import { startEndpoints } from "../providers/endpoints.mjs";
import { violationsOf } from "../providers/histories.mjs";
import { contract } from "./support/contract.mjs";

let endpoints;
let workers;
let names;

before(async () => {
  endpoints = await startEndpoints();
  const vars = { AIMOCK: endpoints.aimock, RAW: endpoints.raw };
  workers = await startWorkers({
    roles: [],
    extra: [contract("contract", "contract", vars)],
    outbound: "allow",
    workersAi: `${endpoints.aimock}/v1`,
  });
  names = await (await fetch(`${workers.urls.contract}/providers`)).json();
  assert.ok(names.length > 30, `only ${names.length} cases`);
});
after(async () => {
  await workers?.stop();
  await endpoints?.stop();
});

for (const client of ["openai", "anthropic", "workers-ai"]) {
  describe(`the client ${client}`, () => {
    test("holds every case", { concurrency: true }, async (t) => {
      await Promise.all(
        names.map((name, number) =>
          t.test(name, async () => {
            const response = await fetch(`${workers.urls.contract}/providers/${client}/${number}`);
            assert.equal(await response.text(), "held");
          }),
        ),
      );
    });
  });
}

test("each conversation that was sent has one result for each call", async () => {
  const { requests, violations } = await endpoints.histories();
  assert.ok(requests >= 3 * names.length, `${requests} conversations`);
  assert.deepEqual(violations, []);
});

test("a call without a result, with two, or with one in the wrong place is seen", () => {
  const call = { role: "assistant", content: null, tool_calls: [{ id: "a" }, { id: "b" }] };
  const result = (id) => ({ role: "tool", tool_call_id: id, content: "" });
  const user = { role: "user", content: "on" };
  assert.deepEqual(violationsOf({ messages: [user, call, result("a"), result("b"), user] }), []);
  for (const messages of [
    [call, result("a")],
    [call, result("a"), user, result("b")],
    [call, result("a"), result("b"), result("b")],
    [call, result("a"), result("c"), result("b")],
    [result("a")],
    [call, result("a"), result("b"), call, result("a"), result("b")],
  ]) {
    assert.notDeepEqual(violationsOf({ messages }), [], JSON.stringify(messages));
  }
  const use = { role: "assistant", content: [{ type: "text", text: "x" }, { type: "tool_use", id: "a" }] };
  const answer = (...blocks) => ({ role: "user", content: blocks });
  const used = { type: "tool_result", tool_use_id: "a" };
  assert.deepEqual(violationsOf({ messages: [use, answer(used, { type: "text", text: "on" })] }), []);
  assert.notDeepEqual(violationsOf({ messages: [use, answer({ type: "text", text: "on" })] }), []);
  assert.notDeepEqual(violationsOf({ messages: [use, answer(used, used)] }), []);
});
