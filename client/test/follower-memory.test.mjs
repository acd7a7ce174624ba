// A follower holds its documents, and neither memory nor requests grow with the length of the stream.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { Follower } from "../src/index.ts";

setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc");

const STEP = 100;

/** The chunk at `sequence` of the parent's stream: text, patches of the parent and its child, steps of both. */
function said(sequence) {
  const [step, at] = [Math.floor(sequence / STEP), sequence % STEP];
  const own = (agentId, chunk) => ({ agentId, agentType: "t", timestamp: 1, step: step + 1, ...chunk });
  const patch = (ordinal) => ({
    type: "state_patch",
    patches: [{ op: "replace", path: "/n", value: ordinal }],
    patchOrdinal: ordinal,
    patchBase: ordinal - 1,
  });
  const committed = (patchOrdinal) => ({ type: "step_committed", stepCount: step + 1, checkpointId: "c", patchOrdinal });
  const forwarded = (chunk) => ({
    ...own("child", chunk),
    origin: { sessionId: "child", streamId: "st_c", sequence },
    remoteSource: { childSessionId: "child", childSequence: sequence, streamId: "st_c" },
  });
  if (sequence === 2) return own("s", { type: "subagent_start", subSessionId: "child", subAgentType: "t", toolCallId: "c", remote: true });
  if (at === 98) return forwarded(committed(step * 4 + 4));
  if (at === 99) return own("s", committed(step * 5 + 5));
  if (at % 20 === 10) return own("s", patch(step * 5 + (at + 10) / 20));
  if (at > 0 && at % 20 === 0) return forwarded(patch(step * 4 + at / 20));
  const text = { type: "text_delta", delta: "word " };
  return at % 2 ? forwarded(text) : own("s", text);
}

/** Follows so many chunks; a child's snapshot comes after `late` of them. */
async function followed(chunks, late = 0) {
  let requests = 0;
  const isLate = Promise.withResolvers();
  async function* frames(from) {
    for (let sequence = Math.max(from, 0) + 1; sequence <= chunks; sequence += 1) {
      if (sequence >= late) isLate.resolve();
      yield { kind: "chunk", sequence, chunk: said(sequence) };
    }
    yield { kind: "end", end: { status: "completed", state: { n: 0 } } };
  }
  const source = {
    stream: async (_, from) => ((requests += 1), { streamId: "st_s", frames: frames(from) }),
    snapshot: async ({ session }) => {
      requests += 1;
      if (session === "child") await isLate.promise;
      const state = { n: 0, text: "x".repeat(10_000) };
      const streamId = session === "s" ? "st_s" : "st_c";
      return { sessionId: session, streamId, state, streamSequence: 1, oldestRetainedSequence: 0, stepCount: 0, patchOrdinal: 0 };
    },
    hasEnded: async () => ((requests += 1), false),
  };
  const follower = new Follower(source, { session: "s", agentType: "t" });
  let [heard, exact, held] = [0, 0, 0];
  let first;
  collect();
  const before = process.memoryUsage().heapUsed;
  for await (const event of follower.follow(new AbortController().signal)) {
    if (event.kind === "document" && event.node.document.status.kind === "exact") exact += 1;
    if (event.kind !== "chunk") continue;
    heard += 1;
    if (heard % (chunks / 10) === 0) {
      collect();
      const now = process.memoryUsage().heapUsed - before;
      first ??= now;
      held = Math.max(held, now);
    }
  }
  assert.equal(heard, chunks, "every chunk once");
  assert.ok(exact >= (late > 0 ? 1 : 2) * (chunks / STEP), `${exact} times exact`);
  return { held, grown: held - first, requests };
}

test("a follower holds its documents and asks for no more, however long the stream", async () => {
  await followed(1_000);
  const short = await followed(10_000);
  const long = await followed(100_000);
  console.log(`${short.held} bytes for 10 000 chunks, ${long.held} for 100 000; ${long.requests} requests`);
  assert.ok(long.held < short.held + 256 * 1024, `${long.held} bytes, ${short.held} for a tenth`);
  assert.equal(long.requests, short.requests);
  assert.ok(long.requests <= 9, `${long.requests} requests`);
});

test("nor does it hold more while a snapshot is long in coming", async () => {
  await followed(10_000, 10_000);
  const { grown } = await followed(100_000, 100_000);
  console.log(`${grown} bytes more behind 100 000 chunks than behind 10 000`);
  assert.ok(grown < 1024 * 1024, `${grown} bytes`);
});
