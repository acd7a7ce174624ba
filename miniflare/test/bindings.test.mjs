// A tool on Workers reads the bindings of its Worker, which it captured when its agent was made.

import assert from "node:assert/strict";
import { test } from "node:test";
import { chunksOf, ofType } from "./support/stream.mjs";
import { startStress, stressWorker } from "./support/stress.mjs";
import { newSession, settled } from "./support/world.mjs";

const script = { bound: { key: "tide", value: "rises, Größe 日本" } };

/** What an agent says whose tool reads the bindings. */
async function said(binding) {
  const world = await startStress({ extra: [{ ...stressWorker(), ...binding }] });
  try {
    const id = newSession("bound");
    const started = await world.mount().start({ sessionId: id, message: JSON.stringify(script) });
    assert.equal(started.status, 200, started.text);
    const { output } = await settled(world.mount(), id, "completed");
    const { events } = await world.mount().read(id, { fromSequence: 0 });
    const [{ chunk: end }] = ofType(chunksOf(events), "tool_end");
    return { output, end, logs: world.workers.logs };
  } finally {
    await world.stop();
  }
}

test("a tool reads a variable, and writes and reads a namespace", async () => {
  const { output } = await said({ vars: { GREETING: "hello" }, kv: ["NOTES"] });
  assert.ok(output.includes('"greeting":"hello"') && output.includes(`"held":"${script.bound.value}"`), output);
});

test("a binding that is not there is a failed result that the model reads", async () => {
  const { end, logs } = await said({ kv: ["NOTES"] });
  assert.deepEqual([end.success, end.error], [false, "The binding is not there."]);
  assert.deepEqual(logs.filter((line) => line.includes("panic")), []);
});
