// Readers that attach and leave keep no memory of the module; that of the process is told, for it has what was not yet collected. `TRIALS=long` asks for ten thousand of them.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { send } from "./support/http.mjs";
import { connect } from "./support/raw.mjs";
import { assertGapless, chunksOf } from "./support/stream.mjs";
import { residentMiB, startStress } from "./support/stress.mjs";
import { newSession, settled } from "./support/world.mjs";

const READERS = process.env.TRIALS === "long" ? 10_000 : 1000;
const AT_ONCE = 20;
/** By how much the module's memory may rise from a fifth of the readers to all, in MiB: a page or two of its allocator. */
const RISE_MIB = 0.5;

let world;
before(async () => {
  world = await startStress();
});
after(() => world.stop());

/** What the module has taken, in MiB; it never gives any back. */
async function module() {
  const { text } = await send(world.workers.urls.stress, { path: "/memory" });
  return Number(text) / 2 ** 20;
}

async function inParallel(count, work) {
  let next = 0;
  await Promise.all(
    Array.from({ length: AT_ONCE }, async () => {
      while (next < count) await work((next += 1));
    }),
  );
}

test(`${READERS} readers attach and leave, and the module's memory is flat`, async (t) => {
  const mount = world.mount();
  const id = newSession("attach");
  // It speaks on, so that each reader finds something new, until it is stopped.
  await mount.start({ sessionId: id, message: JSON.stringify({ say: { chunks: 1_000_000, per: 1, bytes: 20, every: 2000 } }) });
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
    measured.push({ module: await module(), resident: residentMiB(world.workers) });
  }
  const [early, late] = measured;
  t.diagnostic(`module ${early.module.toFixed(2)} MiB after a fifth, ${late.module.toFixed(2)} after all; process ${early.resident?.toFixed(0)} and ${late.resident?.toFixed(0)} MiB`);
  assert.ok(late.module - early.module <= RISE_MIB, `${early.module} MiB became ${late.module} MiB`);
  assert.equal((await mount.status(id)).json.status, "running", "and it is at work as before");
  await mount.interrupt(id);
  await settled(mount, id, "interrupted");
  const chunks = chunksOf((await mount.read(id, { fromSequence: 0 })).events);
  assertGapless(chunks);
});
