// A stream that is cut anywhere and attached to again with the last cursor is the stream as if it had never been cut.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { research } from "./support/documents.mjs";
import { startGated } from "./support/gate.mjs";
import { assertGapless, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, settled } from "./support/world.mjs";

let world;
before(async () => {
  world = await startGated();
});
after(() => world.stop());

async function begin(mount, name, { documents, topic }) {
  const id = newSession(name);
  const started = await mount.start({ sessionId: id, message: topic, state: { documents } });
  assert.equal(started.status, 200, started.text);
  return { id, ...started.json };
}

/** The bytes of the chunk frames, and those of the terminal frame. */
function wire(events) {
  return { chunks: Buffer.concat(chunksOf(events).map(({ bytes }) => bytes)).toString(), end: terminalOf(events).bytes.toString() };
}

/** True at the nth chunk. */
function nthChunk(n) {
  let left = n;
  return ({ event }) => event === "chunk" && (left -= 1) === 0;
}

async function inParallel(items, work) {
  const queue = [...items];
  await Promise.all(Array.from({ length: 4 }, async () => {
    while (queue.length > 0) await work(queue.shift());
  }));
}

describe("a session that has ended", () => {
  let job;
  let uncut;
  before(async () => {
    job = await begin(world.writer, "ended", research(11));
    await settled(world.writer, job.id, "completed");
    uncut = (await world.writer.read(job.id, { fromSequence: 0, streamId: job.streamId })).events;
  });

  test("an uncut read is whole", () => {
    const chunks = chunksOf(uncut);
    assertGapless(chunks);
    assert.ok(chunks.length > 100, `${chunks.length} chunks`);
    assert.equal(terminalOf(uncut).event, "end");
  });

  test("cut at every chunk, it goes on with the next", async () => {
    const whole = wire(uncut);
    const count = chunksOf(uncut).length;
    await inParallel(Array.from({ length: count }, (_, at) => at + 1), async (cut) => {
      const head = await world.writer.read(job.id, { fromSequence: 0 }, { until: nthChunk(cut) });
      const last = head.events.at(-1).id;
      const tail = await world.writer.read(job.id, { fromSequence: last, streamId: job.streamId });
      const both = { chunks: chunkBytes(head.events) + chunkBytes(tail.events), end: wire(tail.events).end };
      assert.deepEqual(both, whole, `cut after chunk ${cut}`);
    });
  });

  test("Last-Event-ID does the same where fromSequence is absent, and nothing where it is there", async () => {
    const chunks = chunksOf(uncut);
    await inParallel([1, 2, Math.floor(chunks.length / 2), chunks.length - 1, chunks.length], async (cut) => {
      const { sequence } = chunks[cut - 1];
      const byHeader = await world.writer.read(job.id, {}, { headers: { "last-event-id": String(sequence) } });
      const byQuery = await world.writer.read(job.id, { fromSequence: sequence });
      assert.deepEqual(wire(byHeader.events), wire(byQuery.events), `from ${sequence}`);
      assert.equal(chunksOf(byHeader.events).length, chunks.length - cut);
      const both = await world.writer.read(job.id, { fromSequence: 0 }, { headers: { "last-event-id": String(sequence) } });
      assert.deepEqual(wire(both.events), wire(uncut));
    });
  });

  test("without a cursor, or with -1, it begins at the run's start", async () => {
    for (const query of [{}, { fromSequence: -1 }, { fromSequence: 0 }]) {
      assert.deepEqual(wire((await world.writer.read(job.id, query)).events), wire(uncut), JSON.stringify(query));
    }
  });

  test("the newest cursor gives the terminal frame alone", async () => {
    const newest = chunksOf(uncut).length;
    const { events } = await world.writer.read(job.id, { fromSequence: newest });
    assert.deepEqual([chunksOf(events).length, wire(events).end], [0, wire(uncut).end]);
  });

  test("a cursor above the newest, and another stream, are TRUNCATED", async () => {
    const newest = chunksOf(uncut).length;
    const foreign = await begin(world.writer, "foreign", research(12));
    const queries = [
      { fromSequence: newest + 1 },
      { fromSequence: 2 ** 53 - 1 },
      { fromSequence: 0, streamId: foreign.streamId },
      { fromSequence: newest, streamId: `${job.streamId}x` },
      { streamId: foreign.streamId },
    ];
    for (const query of queries) {
      const { status, events } = await world.writer.read(job.id, query);
      assert.equal(status, 200);
      const { event, data } = terminalOf(events);
      assert.equal(event, "error", JSON.stringify(query));
      assert.deepEqual([data.code, data.recoverable, data.floor, data.streamId], ["TRUNCATED", false, 0, job.streamId]);
      assert.equal(chunksOf(events).length, 0, "no silent gap");
    }
    await settled(world.writer, foreign.id, "completed");
  });

  test("anything else is no cursor: 400", async () => {
    for (const junk of ["", "x", "-2", "+1", "1.5", "1e3", " 1", "1 ", "0x10", "-0", "9007199254740992", "٣", "null"]) {
      const { status, json } = await world.writer.get("sse", { sessionId: job.id, fromSequence: junk });
      assert.deepEqual([status, json?.code, json?.field], [400, "VALIDATION_ERROR", "fromSequence"], JSON.stringify(junk));
    }
    for (const junk of ["x", "-2", "1.5", "9007199254740992"]) {
      const { status, json } = await world.writer.get("sse", { sessionId: job.id }, { "last-event-id": junk });
      assert.deepEqual([status, json?.code, json?.field], [400, "VALIDATION_ERROR", "Last-Event-ID"], JSON.stringify(junk));
    }
  });

  test("a later run goes on in the same stream, and an earlier cursor is carried on through it", async () => {
    const newest = chunksOf(uncut).length;
    const resumed = await world.writer.resume({ sessionId: job.id, message: "And what else?" });
    assert.equal(resumed.status, 200, resumed.text);
    assert.equal(resumed.json.streamId, job.streamId);
    assert.notEqual(resumed.json.runId, job.runId);
    await settled(world.writer, job.id, "completed");
    const all = (await world.writer.read(job.id, { fromSequence: 0 })).events;
    const chunks = chunksOf(all);
    assertGapless(chunks);
    assert.equal(chunkBytes(all).slice(0, wire(uncut).chunks.length), wire(uncut).chunks, "the first run's chunks are as they were");
    assert.equal(terminalOf(all).data.runId, resumed.json.runId, "one terminal frame, of the latest run");
    const [border] = ofType(chunks, "run_resumed", job.id);
    assert.deepEqual([border.sequence, border.chunk.runId], [newest + 1, resumed.json.runId]);
    const { events } = await world.writer.read(job.id);
    assert.equal(chunksOf(events)[0].sequence, newest + 1, "without a cursor: the current run");
    assert.equal(wire(events).end, wire(all).end);
  });
});

function chunkBytes(events) {
  return Buffer.concat(chunksOf(events).map(({ bytes }) => bytes)).toString();
}

/** The last of the cuts that are made while the researchers are held; each is one chunk longer than the one before. */
const HELD_CUTS = 5;

for (const [name, mountOf] of [["consumer", () => world.writer], ["producer, projected", () => world.planner]]) {
  test(`a session at work, cut again and again: ${name}`, async () => {
    const mount = mountOf();
    world.gate.hold("thread-researcher");
    const job = await begin(mount, "live", research(13));
    const uncut = mount.read(job.id, { fromSequence: 0 });
    const events = [];
    let running = 0;
    for (let cut = 0; !isEnd(events.at(-1)); cut += 1) {
      const last = events.findLast(({ id }) => id !== undefined)?.id ?? "0";
      const how = cut % 2 === 0 ? [{ fromSequence: last, streamId: job.streamId }, {}] : [{}, { "last-event-id": last }];
      const part = await mount.read(job.id, how[0], { headers: how[1], until: nthChunk(1 + (cut % 9)) });
      if (cut <= HELD_CUTS && (await mount.status(job.id)).json.status === "running") running += 1;
      if (cut === HELD_CUTS) world.gate.open();
      events.push(...part.events);
    }
    assert.equal(running, HELD_CUTS + 1, "these cuts were made while the session was at work");
    assert.deepEqual(wire(events), wire((await uncut).events));
    assert.equal(terminalOf(events).data.status, "completed");
    if (mount === world.writer) assertGapless(chunksOf(events));
  });
}

function isEnd(event) {
  return event?.event === "end" || event?.event === "error";
}

test("many readers at once: each has the whole stream", async () => {
  const job = await begin(world.writer, "readers", research(14));
  const reads = await Promise.all(Array.from({ length: 12 }, () => world.writer.read(job.id, { fromSequence: 0 })));
  const [first, ...others] = reads.map(({ events }) => wire(events));
  for (const other of others) assert.deepEqual(other, first);
  assert.equal(terminalOf(reads[0].events).data.status, "completed");
});
