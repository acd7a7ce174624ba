// Events arrive as they are written: the tests rest on what is true at the moment of an arrival, never on clocks.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { slowResearch } from "./support/documents.mjs";
import { chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, settled, startWorld } from "./support/world.mjs";

let world;
before(async () => {
  world = await startWorld();
});
after(() => world.stop());

async function begin(mount, name, seed) {
  const { documents, topic } = slowResearch(seed);
  const id = newSession(name);
  const started = await mount.start({ sessionId: id, message: topic, state: { documents } });
  assert.equal(started.status, 200, started.text);
  return id;
}

describe("a stream that is attached to right after the start", () => {
  for (const [name, mountOf] of [["consumer", () => world.writer], ["producer, projected", () => world.planner], ["producer, raw", () => world.raw]]) {
    test(`${name}: the first bytes come before the first token, in a part of their own`, async () => {
      const mount = mountOf();
      const id = await begin(mount, "first", 21);
      const { response } = await mount.open(id, { fromSequence: 0 });
      assert.equal(response.status, 200);
      assert.match(response.headers.get("content-type"), /^text\/event-stream\b/);
      assert.equal(response.headers.get("cache-control"), "no-cache, no-transform");
      assert.equal(response.headers.get("content-encoding"), null);
      const reader = response.body.getReader();
      const parts = [];
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const text = Buffer.from(part.value).toString();
        parts.push(text);
        // The job is still under way when the first parts are here.
        if (parts.length <= 2) assert.equal((await mount.status(id)).json.status, "running", `at part ${parts.length}`);
      }
      assert.match(parts[0], /^:[^\n]*\n\n$/, "the first part is a comment and nothing else");
      assert.ok(parts.length > 10, `${parts.length} parts`);
      assert.match(parts.at(-1), /event: end\n/);
    });
  }
});

describe("events arrive as they are written", () => {
  test("what a researcher two services away says is here while all of them are at work", async () => {
    const id = await begin(world.writer, "tokens", 22);
    const stream = await world.writer.open(id);
    const seen = [];
    const events = [];
    let caughtUp;
    for await (const event of stream.events) {
      events.push(event);
      if (event.event === "caught-up") caughtUp ??= JSON.parse(event.data).sequence;
      if (event.event !== "chunk") continue;
      const { sequence, chunk } = JSON.parse(event.data);
      const isFirst = chunk.type === "text_delta" && !seen.some(({ type }) => type === chunk.type);
      const isNews = isFirst || chunk.type === "subagent_start" || (chunk.type === "step_committed" && chunk.agentType === "planner");
      if (isNews && chunk.agentType !== "writer") {
        const [{ json: status }, { json: snapshot }] = await Promise.all([world.writer.status(id), world.writer.snapshot(id)]);
        seen.push({ type: chunk.type, agentType: chunk.agentType, sequence, status, snapshot });
      }
    }
    assert.equal(terminalOf(events).data.status, "completed");
    const token = seen.find(({ type }) => type === "text_delta");
    assert.equal(token.agentType, "thread-researcher", "the first words are a researcher's");
    assert.deepEqual([token.status.status, token.status.isExecuting, token.status.output], ["running", true, undefined]);
    assert.ok(token.snapshot.streamSequence < token.sequence, "the writer's step is open: its research has not come back");
    assert.equal(token.snapshot.state.research, null);
    const starts = seen.filter(({ type }) => type === "subagent_start");
    assert.ok(starts.length >= 6 && starts.every(({ status }) => status.status === "running"));
    const chunks = chunksOf(events);
    assert.ok(caughtUp < chunks.at(-1).sequence, "most of the stream came after the replay was done");
    assert.ok(chunks.filter(({ sequence }) => sequence > caughtUp).length > chunks.length / 2);
  });

  test("a step's end is here before the next step is made, on the projected mount", async () => {
    const id = await begin(world.planner, "steps", 23);
    const stream = await world.planner.open(id);
    const phases = [];
    const events = [];
    for await (const event of stream.events) {
      events.push(event);
      const chunk = event.event === "chunk" ? JSON.parse(event.data).chunk : {};
      if (chunk.agentType === "planner" && chunk.type === "step_committed" && chunk.stepCount === 1) phases.push((await world.planner.snapshot(id)).json);
    }
    assert.equal(terminalOf(events).data.status, "completed");
    assert.equal(phases.length, 1);
    assert.equal(phases[0].state.phase, "researching", "the snapshot is of that step, not of the end");
    assert.equal(phases[0].stepCount, 1);
  });
});

describe("a reader that goes away", () => {
  for (const [name, mountOf] of [["consumer", () => world.writer], ["producer, projected", () => world.planner]]) {
    test(`${name}: cancels nothing`, async () => {
      const mount = mountOf();
      const id = await begin(mount, "gone", 24);
      const { events } = await mount.read(id, {}, { until: ({ event, data }) => event === "chunk" && JSON.parse(data).chunk.type === "subagent_start" });
      assert.equal((await mount.status(id)).json.status, "running");
      // The only reader has left, and nobody asks for anything but the status.
      const status = await settled(mount, id, "completed");
      assert.ok(status.output.sections.length > 0);
      const rest = await mount.read(id, { fromSequence: events.at(-1).id });
      assert.equal(terminalOf(rest.events).data.status, "completed");
      const chunks = chunksOf([...events, ...rest.events]);
      assert.equal(ofType(chunks, "run_started", id).length, 1, "one run, uninterrupted");
      for (const type of ["run_resumed", "step_discarded", "stream_resync"]) assert.equal(ofType(chunks, type).length, 0, type);
    });
  }

  test("before a single byte was read: cancels nothing", async () => {
    const id = await begin(world.writer, "unread", 25);
    const streams = await Promise.all(Array.from({ length: 8 }, () => world.writer.open(id)));
    for (const stream of streams) stream.close();
    await settled(world.writer, id, "completed");
  });
});
