// What comes and goes leaves nothing behind: objects that are made and evicted, jobs, readers that attach and leave.
//
// `TRIALS=long` asks for 1,000 jobs in each wave and 10,000 readers, and for more waves. Whether an object is in memory is
// told by the databases that workerd has open: nobody is asked, so nobody is woken.

import assert from "node:assert/strict";
import { readdirSync, readlinkSync } from "node:fs";
import { after, before, test } from "node:test";
import { send } from "./support/http.mjs";
import { connect } from "./support/raw.mjs";
import { assertGapless, assertPairing, chunksOf, terminalOf } from "./support/stream.mjs";
import { residentMiB, settledByItself, startStress, stressWorker } from "./support/stress.mjs";
import { eventually, newSession, settled } from "./support/world.mjs";

const LONG = process.env.TRIALS === "long";
/** Jobs of a wave, each with a child: two objects. */
const JOBS = LONG ? 1000 : 100;
const WAVES = Number(process.env.W ?? (LONG ? 4 : 2));
const AT_ONCE = 20;
const READERS = LONG ? 10_000 : 1000;
/** By how much a module's memory may rise from the first wave to the last, in MiB: a page or two of its allocator. */
const RISE_MIB = 0.5;
/** By how much the process may rise for each object after the first wave, in MiB. A kept object would be above that. */
const PER_OBJECT_MIB = 0.1;

const SAY = JSON.stringify({ call: [{ agent: "child", message: { say: { chunks: 20, per: 4, bytes: 100 } } }] });

let world;
before(async () => {
  world = await startStress({ extra: [stressWorker("stress", { CHILD: { to: "children" } }), stressWorker("children")] });
});
after(() => world.stop());

/** How many objects are in memory; `undefined` where there is no /proc. */
function alive() {
  const [pid] = world.workers.workerdPids();
  const open = new Set();
  try {
    for (const fd of readdirSync(`/proc/${pid}/fd`)) {
      try {
        const path = readlinkSync(`/proc/${pid}/fd/${fd}`);
        if (path.endsWith(".sqlite") && !path.endsWith("metadata.sqlite")) open.add(path);
      } catch {
        // It was closed between the two reads.
      }
    }
    return open.size;
  } catch {
    return undefined;
  }
}

/** What both modules have taken, in MiB; they never give any back. */
async function modules() {
  const answers = await Promise.all(["stress", "children"].map((name) => send(world.workers.urls[name], { path: "/memory" })));
  return answers.map(({ text }) => Number(text) / 2 ** 20);
}

async function inParallel(count, work) {
  let next = 0;
  await Promise.all(
    Array.from({ length: AT_ONCE }, async () => {
      while (next < count) await work((next += 1));
    }),
  );
}

test(`${WAVES} waves of ${JOBS} jobs are done and their objects evicted, and memory is flat`, async (t) => {
  if (alive() === undefined) return t.skip("there is no /proc here to count open databases in");
  const mount = world.mount();
  const after = [];
  let last;
  for (let wave = 1; wave <= WAVES; wave += 1) {
    let most = 0;
    await inParallel(JOBS, async () => {
      last = newSession("wave");
      const id = last;
      const started = await mount.start({ sessionId: id, message: SAY });
      assert.equal(started.status, 200, started.text);
      assert.equal((await settledByItself(world.workers, id, 300)).status, "completed");
      most = Math.max(most, alive());
    });
    assert.ok(most > AT_ONCE, `${most} objects were in memory at once`);
    await eventually("all objects are evicted", async () => (alive() === 0 ? true : undefined), 120);
    after.push({ modules: await modules(), resident: residentMiB(world.workers) });
    const { modules: [parents, children], resident } = after.at(-1);
    t.diagnostic(`wave ${wave}: ${2 * JOBS} objects, at most ${most} at once; modules ${parents.toFixed(2)} and ${children.toFixed(2)} MiB, process ${resident.toFixed(0)} MiB`);
  }
  const [first, end] = [after[0], after.at(-1)];
  for (const at of [0, 1]) assert.ok(end.modules[at] - first.modules[at] <= RISE_MIB, `${first.modules[at]} MiB became ${end.modules[at]} MiB`);
  const objects = 2 * JOBS * (WAVES - 1);
  assert.ok((end.resident - first.resident) / objects < PER_OBJECT_MIB, `${first.resident} MiB became ${end.resident} MiB`);
  // Who was evicted is there for whoever asks.
  const { events } = await mount.read(last, { fromSequence: 0 });
  const chunks = chunksOf(events);
  assertGapless(chunks);
  assertPairing(chunks);
  assert.equal(terminalOf(events).data.status, "completed");
});

test(`${READERS} readers attach and leave, and memory is flat`, async (t) => {
  const mount = world.mount();
  const id = newSession("attach");
  // It speaks on, so that each reader finds something new, until it is stopped.
  await mount.start({ sessionId: id, message: JSON.stringify({ say: { chunks: 1_000_000, per: 1, bytes: 20, every: 200 } }) });
  const path = `/agents/stress/sse?sessionId=${id}&fromSequence=0`;
  const reader = () =>
    new Promise((resolve, reject) => {
      const { socket } = connect(world.workers.urls.stress, { path });
      socket.removeAllListeners("data").once("data", (bytes) => {
        socket.resetAndDestroy();
        resolve(bytes.toString("latin1"));
      });
      socket.once("close", reject);
    });
  const measured = [];
  for (const part of [0.2, 0.8]) {
    await inParallel(READERS * part, async () => assert.match(await reader(), /^HTTP\/1.1 200 /));
    measured.push({ modules: await modules(), resident: residentMiB(world.workers) });
  }
  const [early, late] = measured;
  t.diagnostic(`module ${early.modules[0].toFixed(2)} MiB after a fifth, ${late.modules[0].toFixed(2)} after all; process ${early.resident?.toFixed(0)} and ${late.resident?.toFixed(0)} MiB`);
  assert.ok(late.modules[0] - early.modules[0] <= RISE_MIB, `${early.modules[0]} MiB became ${late.modules[0]} MiB`);
  if (late.resident !== undefined) assert.ok((late.resident - early.resident) / READERS < 0.02, `${early.resident} MiB became ${late.resident} MiB`);
  assert.equal((await mount.status(id)).json.status, "running", "and it is at work as before");
  await mount.interrupt(id);
  await settled(mount, id, "interrupted");
  const chunks = chunksOf((await mount.read(id, { fromSequence: 0 })).events);
  assertGapless(chunks);
});
