// Events arrive as they are written: the tests rest on what is true at the moment of an arrival, and whoever would change
// it meanwhile is held until that has been looked at.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { research } from "./support/documents.mjs";
import { startGated } from "./support/gate.mjs";
import { chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, settled } from "./support/world.mjs";

/** As many researchers as a planner has at work at once. */
const QUESTIONS = 4;

let world;
before(async () => {
  world = await startGated();
});
after(() => world.stop());

async function begin(mount, name, seed) {
  const { documents, topic } = research(seed, { questions: QUESTIONS });
  const id = newSession(name);
  const started = await mount.start({ sessionId: id, message: topic, state: { documents } });
  assert.equal(started.status, 200, started.text);
  return id;
}

describe("a stream that is attached to right after the start", () => {
  for (const [name, mountOf] of [["consumer", () => world.writer], ["producer, projected", () => world.planner], ["producer, raw", () => world.raw]]) {
    test(`case 21: ${name}: the first bytes come before the first token`, async () => {
      const mount = mountOf();
      world.gate.hold(mount.agentType);
      const id = await begin(mount, "first", 21);
      const { response } = await mount.open(id, { fromSequence: 0 });
      assert.equal(response.status, 200);
      assert.match(response.headers.get("content-type"), /^text\/event-stream\b/);
      assert.equal(response.headers.get("cache-control"), "no-cache, no-transform");
      assert.equal(response.headers.get("content-encoding"), null);
      const reader = response.body.getReader();
      const parts = [];
      let first;
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const text = Buffer.from(part.value).toString();
        parts.push(text);
        // All of this is here while the model has said nothing.
        if (!parts.join("").includes("event: caught-up\n")) continue;
        first ??= parts.join("");
        world.gate.open();
      }
      assert.match(first, /^:[^\n]*\n\nevent: chunk\n/, "a comment comes before everything else");
      assert.equal(first.split("event: chunk\n").length, 2, `the start of the run: ${first}`);
      assert.match(parts.at(-1), /event: end\n/);
    });
  }
});

describe("events arrive as they are written", () => {
  test("what a researcher two services away says is here while all of them are at work", async () => {
    world.gate.hold("writer");
    world.gate.hold("thread-researcher", { opens: true });
    const id = await begin(world.writer, "tokens", 22);
    const stream = await world.writer.open(id);
    const seen = [];
    const of = (type) => seen.filter((one) => one.type === type);
    const events = [];
    let caughtUp;
    for await (const event of stream.events) {
      events.push(event);
      if (event.event === "caught-up") {
        caughtUp ??= JSON.parse(event.data).sequence;
        world.gate.release("writer");
      }
      if (event.event !== "chunk") continue;
      const { sequence, chunk } = JSON.parse(event.data);
      const isFirst = chunk.type === "text_delta" && of("text_delta").length === 0;
      const isNews = isFirst || chunk.type === "subagent_start" || (chunk.type === "step_committed" && chunk.agentType === "planner");
      if (isNews && chunk.agentType !== "writer") {
        const [{ json: status }, { json: snapshot }] = await Promise.all([world.writer.status(id), world.writer.snapshot(id)]);
        seen.push({ type: chunk.type, agentType: chunk.agentType, sequence, status, snapshot });
        // All are announced, and one has been heard: they may go on.
        if (of("subagent_start").length === QUESTIONS && of("text_delta").length > 0) world.gate.open();
      }
    }
    assert.equal(terminalOf(events).data.status, "completed");
    const [token] = of("text_delta");
    assert.equal(token.agentType, "thread-researcher", "the first words are a researcher's");
    assert.deepEqual([token.status.status, token.status.isExecuting, token.status.output], ["running", true, undefined]);
    assert.ok(token.snapshot.streamSequence < token.sequence, "the writer's step is open: its research has not come back");
    assert.equal(token.snapshot.state.research, null);
    const starts = of("subagent_start");
    assert.ok(starts.length === QUESTIONS && starts.every(({ status }) => status.status === "running"));
    const chunks = chunksOf(events);
    assert.ok(caughtUp < chunks.at(-1).sequence, "most of the stream came after the replay was done");
    assert.ok(chunks.filter(({ sequence }) => sequence > caughtUp).length > chunks.length / 2);
  });

  test("a step's end is here before the next step is made, on the projected mount", async () => {
    world.gate.hold("planner", { which: ({ messages }) => messages.some(({ role }) => role === "tool") });
    const id = await begin(world.planner, "steps", 23);
    const stream = await world.planner.open(id);
    const phases = [];
    const events = [];
    for await (const event of stream.events) {
      events.push(event);
      const chunk = event.event === "chunk" ? JSON.parse(event.data).chunk : {};
      if (chunk.agentType === "planner" && chunk.type === "step_committed" && chunk.stepCount === 1) {
        phases.push((await world.planner.snapshot(id)).json);
        world.gate.open();
      }
    }
    assert.equal(terminalOf(events).data.status, "completed");
    assert.equal(phases.length, 1);
    assert.equal(phases[0].state.phase, "researching", "the snapshot is of that step, not of the end");
    assert.equal(phases[0].stepCount, 1);
  });
});

describe("a reader that goes away", () => {
  for (const [name, mountOf] of [["consumer", () => world.writer], ["producer, projected", () => world.planner]]) {
    test(`case 26: ${name}: cancels nothing`, async () => {
      const mount = mountOf();
      world.gate.hold("thread-researcher");
      const id = await begin(mount, "gone", 24);
      const { events } = await mount.read(id, {}, { until: ({ event, data }) => event === "chunk" && JSON.parse(data).chunk.type === "subagent_start" });
      assert.equal((await mount.status(id)).json.status, "running");
      world.gate.open();
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

  test("case 26: before a single byte was read: cancels nothing", async () => {
    const id = await begin(world.writer, "unread", 25);
    const streams = await Promise.all(Array.from({ length: 8 }, () => world.writer.open(id)));
    for (const stream of streams) stream.close();
    await settled(world.writer, id, "completed");
  });
});
