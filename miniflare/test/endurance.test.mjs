// What is long costs no memory, and what is many keeps to its bound.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { between, counts } from "./support/between.mjs";
import { send } from "./support/http.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { residentMiB, settledByItself, startStress, stressWorker } from "./support/stress.mjs";
import { newSession } from "./support/world.mjs";

const CHUNKS = 100_000;
/** Texts that many, a commit for every 64; each is about 200 bytes in the log. */
const LONG = { say: { chunks: CHUNKS, per: 64, bytes: 12 } };
/** Readers that hardly read. What they leave unread is above 20 MB each. */
const SLOW = 16;
/** What one of them may cost, in MiB; the buffers of its connection are most of it. About four are usual. */
const PER_READER_MIB = 6;
/** By how much their cost may rise while others read all of it, in MiB for each. Kept, what passes would be above 20. */
const PER_READER_RISE_MIB = 1;
/** By how much a module's memory may rise from a tenth of the chunks to all, in MiB. Kept, they would be above 40. */
const RISE_MIB = 4;
/** The library's default. */
const CHILDREN_AT_ONCE = 4;

let world;
before(async () => {
  const parents = [stressWorker("stress", { CHILD: { to: "children" } }), stressWorker("counted", { CHILD: { to: "between" } })];
  world = await startStress({ extra: [...parents, stressWorker("children"), between("children")] });
});
after(() => world.stop());

/** Reads a whole stream and keeps nothing of it but its numbers. */
async function through(mount, id, from = 0) {
  const stream = await mount.open(id, { fromSequence: from });
  let [last, terminal] = [from, undefined];
  for await (const event of stream.events) {
    if (event.event === "chunk") {
      assert.equal(Number(event.id), last + 1, "no gap");
      last += 1;
    }
    if (event.event === "end" || event.event === "error") terminal = event.event;
  }
  return { last, terminal };
}

test(`${CHUNKS} chunks replayed to readers that hardly read leave memory flat`, async (t) => {
  const mount = world.mount();
  const id = newSession("long");
  await mount.start({ sessionId: id, message: JSON.stringify(LONG) });
  await settledByItself(world.workers, id);
  // Once as fast as it goes, so that what a replay needs is there before anything is measured.
  const whole = await through(mount, id);
  assert.equal(whole.terminal, "end");
  assert.ok(whole.last > CHUNKS, `${whole.last} chunks`);
  const before = residentMiB(world.workers);
  if (before === undefined) return t.skip("there is no /proc here to read memory from");

  const slow = [];
  for (let reader = 0; reader < SLOW; reader += 1) {
    const stream = await mount.open(id, { fromSequence: 0 });
    slow.push({ stream, events: stream.events, last: 0 });
  }
  let [attached, most] = [undefined, 0];
  for (let turn = 0; turn < 3; turn += 1) {
    for (const reader of slow) {
      let event;
      do ({ value: event } = await reader.events.next());
      while (event.event !== "chunk");
      assert.equal(Number(event.id), (reader.last += 1));
    }
    // Somebody else reads all of it meanwhile.
    assert.deepEqual(await through(mount, id), whole);
    most = Math.max(most, residentMiB(world.workers));
    attached ??= most;
  }
  t.diagnostic(`${before.toFixed(0)} MiB before, ${most.toFixed(0)} MiB with ${SLOW} replays unread`);
  assert.ok(most - before < SLOW * PER_READER_MIB, `${before} MiB became ${most} MiB`);
  assert.ok(most - attached < SLOW * PER_READER_RISE_MIB, `${attached} MiB with all attached became ${most} MiB`);
  // A slow reader loses nothing: it goes on where it is.
  const [one, ...others] = slow;
  for (const { stream } of others) stream.close();
  let terminal;
  for await (const event of one.events) {
    if (event.event === "chunk") assert.equal(Number(event.id), (one.last += 1));
    else terminal = event.event;
  }
  assert.deepEqual([one.last, terminal], [whole.last, "end"]);
});

test(`${CHUNKS} forwarded chunks leave the memory of parent and child flat`, async (t) => {
  const mount = world.mount();
  /** Has a child reason that long; the most memory that the modules of both Workers have needed so far, in MiB. */
  async function needed(chunks) {
    const id = newSession("parent");
    const message = { say: { ...LONG.say, chunks, reasoning: true } };
    await mount.start({ sessionId: id, message: JSON.stringify({ call: [{ agent: "child", message }] }) });
    assert.equal((await settledByItself(world.workers, id, 400)).status, "completed");
    const { last, terminal } = await through(mount, id);
    assert.equal(terminal, "end");
    assert.ok(last > chunks, `${last} chunks, the child's among them`);
    const modules = await Promise.all(["stress", "children"].map((name) => send(world.workers.urls[name], { path: "/memory" })));
    return modules.map(({ text }) => Number(text) / 2 ** 20);
  }
  const short = await needed(CHUNKS / 10);
  const whole = await needed(CHUNKS);
  t.diagnostic(`parent and child: ${short.map((mib) => mib.toFixed(1))} MiB after a tenth, ${whole.map((mib) => mib.toFixed(1))} MiB after all`);
  for (const at of [0, 1]) assert.ok(whole[at] - short[at] < RISE_MIB, `${short[at]} MiB became ${whole[at]} MiB`);
});

test("case 20: of twenty remote children at once no more than the bound are in flight, and all complete", async () => {
  const mount = world.mount("counted");
  const id = newSession("crowd");
  const earlier = await counts(world.workers);
  const message = { say: { chunks: 10, per: 1, bytes: 9, every: 10 } };
  await mount.start({ sessionId: id, message: JSON.stringify({ call: Array.from({ length: 20 }, () => ({ agent: "child", message })) }) });
  assert.equal((await settledByItself(world.workers, id)).status, "completed");
  const { most, seen, open } = await counts(world.workers);
  assert.deepEqual([most, seen - earlier.seen, open], [CHILDREN_AT_ONCE, 20, 0], "the bound is reached and never passed");
  const { events } = await mount.read(id, { fromSequence: 0 });
  const chunks = chunksOf(events);
  assertGapless(chunks);
  assertForwarding(id, chunks);
  const starts = assertPairing(chunks);
  assert.equal(starts.length, 20);
  assert.ok(ofType(chunks, "subagent_end", id).every(({ chunk }) => chunk.success));
  assert.deepEqual(Object.keys(terminalOf(events).data.state.children).length, 20, "the result of each was folded");
});
