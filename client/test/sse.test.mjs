// The decoder of a stream: cut anywhere, with each kind of line end, and what is not a clean end.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Follower, framesOf } from "../src/index.ts";

const chunk = (sequence, delta) => ({ sequence, chunk: { type: "text_delta", agentId: "s", delta } });
const event = (name, data, end, id) => `event: ${name}${end}${id === undefined ? "" : `id: ${id}${end}`}data: ${JSON.stringify(data)}${end}${end}`;

function stream(end, last = event("end", { status: "completed", runId: "r" }, end)) {
  return [
    `: ping${end}${end}`,
    event("chunk", chunk(1, "grün \u2028 🙂"), end, 1),
    event("something-new", { x: 1 }, end),
    `event: chunk${end}data: {"sequence": 2,${end}data: "chunk": {"type": "later", "agentId": "s"}}${end}${end}`,
    event("caught-up", { sequence: 2 }, end),
    last,
  ].join("");
}

/** A body that comes in the given parts; it stays open when `open`. */
function body(parts, open = false) {
  return new ReadableStream({
    start(controller) {
      for (const part of parts) controller.enqueue(part);
      if (!open) controller.close();
    },
  });
}

async function all(frames) {
  const read = [];
  for await (const frame of frames) read.push(frame);
  return read;
}

for (const [name, end] of Object.entries({ LF: "\n", CR: "\r", CRLF: "\r\n" })) {
  test(`${name}: cut at every byte it gives the same frames`, async () => {
    const bytes = new TextEncoder().encode(stream(end));
    const expected = await all(framesOf(body([bytes])));
    assert.deepEqual(
      expected.map(({ kind }) => kind),
      ["chunk", "chunk", "caught_up", "end"],
    );
    assert.equal(expected[0].chunk.delta, "grün \u2028 🙂");
    assert.equal(expected[1].chunk.type, "later");
    for (let cut = 1; cut < bytes.length; cut += 1) {
      assert.deepEqual(await all(framesOf(body([bytes.slice(0, cut), bytes.slice(cut)]))), expected, `cut at ${cut}`);
    }
  });
}

test("a body that ends without a terminal event was dropped", async () => {
  const bytes = new TextEncoder().encode(stream("\n", ""));
  await assert.rejects(all(framesOf(body([bytes]))), /without a terminal frame/);
});

test("the newer dialect is understood", async () => {
  for (const [name, data, expected] of [
    ["fail", { error: "no", recoverable: true }, { code: "INTERNAL", error: "no", recoverable: true }],
    ["truncated", { floor: 7 }, { code: "TRUNCATED", error: "The log no longer holds this.", recoverable: false, floor: 7 }],
  ]) {
    const [frame] = await all(framesOf(body([new TextEncoder().encode(event(name, data, "\n"))])));
    assert.deepEqual(frame, { kind: "error", error: expected });
  }
});

test("garbage is an error, never a frame", async () => {
  for (const text of ["event: chunk\ndata: {\n\n", 'event: chunk\ndata: {"sequence": "1", "chunk": {}}\n\n', "event: end\ndata: x\n\n"]) {
    await assert.rejects(all(framesOf(body([new TextEncoder().encode(text)]))), Error, text);
  }
});

const LIMIT = 8 * 1024 * 1024;
/** An event whose data is so many bytes long, with characters of one to four bytes. */
function large(bytes) {
  const wide = "aü\u2028🙂".repeat(100_000);
  const data = JSON.stringify(chunk(1, wide));
  const missing = bytes - new TextEncoder().encode(data).length;
  return `event: chunk\ndata:${JSON.stringify(chunk(1, wide + "x".repeat(missing)))}\n\n`;
}

test("an event may have 8 MiB, counted in bytes as in Rust", async () => {
  const bytes = new TextEncoder().encode(large(LIMIT - "data:".length) + event("end", { status: "completed" }, "\n"));
  const parts = [];
  for (let at = 0; at < bytes.length; at += 65_536) parts.push(bytes.slice(at, at + 65_536));
  assert.deepEqual((await all(framesOf(body(parts)))).map(({ kind }) => kind), ["chunk", "end"]);
  const over = new TextEncoder().encode(large(LIMIT - "data:".length + 1));
  const refused = { name: "SourceError", code: "event_too_large", retryable: false };
  await assert.rejects(all(framesOf(body([over]))), refused);
  // What is not whole yet counts too, and so do the lines before it.
  await assert.rejects(all(framesOf(body([over.slice(0, -2)], true))), refused);
  const lines = new TextEncoder().encode(`data: ${"x".repeat(LIMIT / 2)}\ndata: ${"x".repeat(LIMIT / 2)}\n\n`);
  await assert.rejects(all(framesOf(body([lines]))), refused);
});

test("an event over the limit ends a follower, which would only be sent it again", async () => {
  const over = new TextEncoder().encode(large(LIMIT));
  let attached = 0;
  const source = {
    stream: async (_, __, streamId) => ((attached += 1), { streamId, frames: framesOf(body([over], true)) }),
    snapshot: async () => ({ sessionId: "s", streamId: "st", state: {}, streamSequence: 0, oldestRetainedSequence: 0, stepCount: 0 }),
    hasEnded: async () => false,
  };
  const follower = new Follower(source, { session: "s", agentType: "t" }, { backoff: 1 });
  await assert.rejects(all(follower.follow(AbortSignal.timeout(10_000))), { name: "SourceError", code: "event_too_large" });
  assert.equal(attached, 1);
});
