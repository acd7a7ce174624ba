// workerd is killed in the middle of a job and started again on the same data. Nobody asks for anything, and the job
// comes to its end: nothing lost, nothing doubled.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { quotationsOf, research } from "./support/documents.mjs";
import { startGated } from "./support/gate.mjs";
import { RECORDING, recorded } from "./support/recorder.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { eventually, newSession, settled } from "./support/world.mjs";

let data;
let world;
before(async () => {
  data = mkdtempSync(join(tmpdir(), "remote-agents-"));
  world = await startGated({ ...RECORDING, persist: data });
});
after(async () => {
  await world.stop();
  rmSync(data, { recursive: true, force: true });
});

async function begin(mount, name, seed) {
  const { documents, topic } = research(seed);
  const sessionId = newSession(name);
  const started = await mount.start({ sessionId, message: topic, state: { documents } });
  assert.equal(started.status, 200, started.text);
  return { ...started.json, documents };
}

/** Reads until `isMoment`, where the job is held, and kills workerd right there. What was read is what a reader has seen for certain. */
async function killAt(mount, id, isMoment) {
  const stream = await mount.open(id, { fromSequence: 0 });
  const events = [];
  for await (const event of stream.events) {
    events.push(event);
    if (event.event === "chunk" && isMoment(JSON.parse(event.data).chunk)) break;
  }
  await world.workers.kill();
  world.gate.open();
  assert.ok(events.some(({ event }) => event === "chunk") && !events.some(({ event }) => event === "end"), "killed in the middle");
  return events;
}

/** What must be true of the log after the crash, for a reader who saw `before` and one who reads it all. */
function assertWhole(before, all, job) {
  const [seen, chunks] = [chunksOf(before), chunksOf(all)];
  assertGapless(chunks);
  assert.deepEqual(chunks.slice(0, seen.length).map(({ bytes }) => bytes.toString()), seen.map(({ bytes }) => bytes.toString()), "what was seen stands as it was");
  const { event, data } = terminalOf(all);
  assert.deepEqual([event, data.status, data.runId], ["end", "completed", job.runId], JSON.stringify(data));
  assert.equal(ofType(chunks, "run_started", job.sessionId).length, 1, "the same run went on");
  assert.equal(ofType(chunks, "run_resumed", job.sessionId).length, 0);
  assertPairing(chunks);
  const quotations = quotationsOf(data.output);
  assert.ok(quotations.length > 0);
  for (const { documentId, quote } of quotations) assert.ok(job.documents.find(({ id }) => id === documentId).text.includes(quote), quote);
  return chunks;
}

/** Of a topic's threads all but the first. */
const isLater = ({ messages }) => !JSON.stringify(messages).includes('\\"threadId\\":\\"t1\\"');
const moments = [
  ["a researcher is announced", (chunk) => chunk.subAgentType === "thread-researcher", ["thread-researcher"]],
  ["a researcher has ended", (chunk) => chunk.type === "subagent_end", ["thread-researcher", { which: isLater }]],
  ["the planner is announced", (chunk) => chunk.subAgentType === "planner", ["planner"]],
];
for (const [at, [moment, isMoment, held]] of moments.entries()) {
  test(`the consumer's job goes on by itself: killed when ${moment}`, async () => {
    world.gate.hold(...held);
    const job = await begin(world.writer, "crash", 51 + at);
    const seen = await killAt(world.writer, job.sessionId, isMoment);
    await world.workers.start();
    // The recorder is no part of either service: asking it wakes nobody. It sees the consumer take up its call again.
    const path = `/internal/agents/planner/`;
    await eventually("the consumer takes up its call again by itself", async () => ((await recorded(world)).some((request) => request.path.startsWith(path)) ? true : undefined));
    await settled(world.writer, job.sessionId, "completed");
    const { events } = await world.writer.read(job.sessionId, { fromSequence: 0 });
    const chunks = assertWhole(seen, events, job);
    assertForwarding(job.sessionId, chunks);
    assert.equal(ofType(chunks, "subagent_start", job.sessionId).length, 1, "one child, begun once");
    const starts = (await recorded(world)).filter((request) => request.path.endsWith("/start"));
    assert.ok(starts.every(({ headers, body }) => new Map(headers).get("idempotency-key") === `start:${JSON.parse(body).sessionId}`), "a start that is sent again has its key");
  });
}

test("the producer's job goes on by itself", async () => {
  world.gate.hold("thread-researcher");
  const job = await begin(world.raw, "crash-planner", 57);
  const seen = await killAt(world.raw, job.sessionId, (chunk) => chunk.subAgentType === "thread-researcher");
  await world.workers.start();
  // By contract a status starts, wakes and changes nothing.
  await settled(world.raw, job.sessionId, "completed");
  const { events } = await world.raw.read(job.sessionId, { fromSequence: 0 });
  assertWhole(seen, events, job);
});

test("a session that had ended is the same afterwards, byte for byte", async () => {
  const job = await begin(world.writer, "rest", 58);
  await settled(world.writer, job.sessionId, "completed");
  const look = async () => {
    const [replay, status, snapshot, usage] = await Promise.all([
      world.writer.read(job.sessionId, { fromSequence: 0 }),
      world.writer.status(job.sessionId),
      world.writer.snapshot(job.sessionId),
      world.writer.usage(job.sessionId),
    ]);
    const frames = replay.events.filter(({ event }) => ["chunk", "end"].includes(event)).map(({ raw }) => raw).join("");
    return [frames, status.text, snapshot.text, usage.text];
  };
  const seen = await look();
  await world.workers.restart();
  assert.deepEqual(await look(), seen);
});
