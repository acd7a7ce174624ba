// Objects and jobs that come and go leave nothing in the memory of the modules. `TRIALS=long` asks for a thousand of each.
//
// The platform frees the value of an evicted object when V8 collects its handle, and V8 sees nothing of what the value takes in
// the module: so what an object holds at rest is little, and once it is evicted and collected, nothing.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { research } from "./support/documents.mjs";
import { Mount } from "./support/http.mjs";
import { evicting, gone, measures } from "./support/measures.mjs";
import { settledByItself, stressWorker } from "./support/stress.mjs";
import { newSession, startWorld } from "./support/world.mjs";

const [OBJECTS, JOBS] = process.env.TRIALS === "long" ? [1000, 1000] : [80, 8];

/** Objects and jobs after which all are evicted: at no time is more there than so many, in no half of a trial. */
const OBJECTS_TOGETHER = 20;
const JOBS_TOGETHER = 2;

/**
 * By how much may rise from half to all what a module uses, in KiB, and what it has taken. It keeps up to 256 statements as
 * texts and forgets them all at once; and what it takes is the most that it needed at any moment, whatever ran side by side.
 */
const [USED_RISE_KIB, TAKEN_RISE_KIB] = [128, 512];

/** Readers that read a stream to its end, and by how much what the module uses may rise from half of them to all, in KiB. */
const [READERS, READERS_RISE_KIB] = [2000, 64];

/** Sessions at rest with a state each, in KiB, and by how much the memory may rise from a quarter of them to all. */
const [AT_REST, STATE_KIB, AT_REST_RISE_KIB] = [40, 200, 1024];

let world;
let stress;
before(async () => {
  world = await startWorld({ measured: true, extra: [stressWorker(), evicting] });
  stress = new Mount(world.workers.urls.stress, "/agents", "stress");
});
after(() => world.stop());

/** Does `work` for each number up to `count`, a few at once. */
async function each(count, work, atOnce = 5) {
  let next = 0;
  await Promise.all(Array.from({ length: Math.min(atOnce, count) }, async () => {
    while (next < count) await work((next += 1));
  }));
}

/** Begins a session and waits for its end. */
async function run(mount, body) {
  const answer = await mount.start(body);
  assert.equal(answer.status, 200, answer.text);
  assert.equal((await settledByItself(world.workers, body.sessionId)).status, "completed");
}

const talker = (state = {}) => ({ sessionId: newSession("talker"), message: JSON.stringify({ say: { chunks: 4, per: 4, bytes: 20 } }), state });

function job(seed) {
  const { documents, topic } = research(seed, { documents: 2, sentences: 6, questions: 2 });
  return { sessionId: newSession("job"), message: topic, state: { documents } };
}

/** Does `work` `count` times, and sees at half and at the end that the modules' memory is flat; all is evicted every few times. */
async function assertFlat(t, names, count, together, work) {
  const half = async () => {
    for (let done = 0; done < count / 2; done += together) {
      await each(together, work);
      await gone(world.workers, names);
    }
    return Promise.all(names.map((name) => measures(world.workers, name, "used")));
  };
  const [early, late] = [await half(), await half()];
  names.forEach((name, at) => {
    const said = ({ used, taken }) => `${used.toFixed(0)} KiB used of ${taken}`;
    const told = `${name}: ${said(early[at])} after half, ${said(late[at])} after all`;
    t.diagnostic(told);
    assert.ok(late[at].used - early[at].used <= USED_RISE_KIB, told);
    assert.ok(late[at].taken - early[at].taken <= TAKEN_RISE_KIB, told);
  });
}

test(`${OBJECTS} objects come and go, and the module's memory is flat`, (t) =>
  assertFlat(t, ["stress"], OBJECTS, OBJECTS_TOGETHER, () => run(stress, talker())));

test(`${JOBS} jobs come and go, and the memory of both modules is flat`, (t) =>
  assertFlat(t, ["consumer", "producer"], JOBS, JOBS_TOGETHER, (seed) => run(world.writer, job(seed))));

test(`${READERS} readers read to the end, and nothing of them stays in the module`, async (t) => {
  const session = talker();
  await run(stress, session);
  const half = async () => {
    await each(READERS / 2, async () => assert.equal((await stress.read(session.sessionId, { fromSequence: 0 })).events.at(-1).event, "end"), 20);
    await gone(world.workers, ["stress"]);
    return measures(world.workers, "stress", "used");
  };
  const [early, late] = [await half(), await half()];
  const told = `${early.used.toFixed(1)} KiB used after half, ${late.used.toFixed(1)} after all`;
  t.diagnostic(told);
  assert.ok(late.used - early.used <= READERS_RISE_KIB, told);
});

test("case 18: what sessions at rest take of the module's memory has nothing of their states", async (t) => {
  // Meanwhile nobody calls these; the next test looks for them.
  await run(world.writer, job(0));
  const state = { documents: ["x".repeat(STATE_KIB * 1024)] };
  const begin = (count) => each(count, () => run(stress, talker(state)), 1);
  await begin(AT_REST / 4);
  const few = await measures(world.workers, "stress");
  await begin((AT_REST * 3) / 4);
  const all = await measures(world.workers, "stress");
  t.diagnostic(`${few.taken} KiB with ${few.objects} objects, ${all.taken} KiB with ${all.objects}`);
  assert.ok(all.taken - few.taken <= AT_REST_RISE_KIB, `${few.taken} KiB became ${all.taken} KiB`);
});

test("case 18: what nobody calls is evicted by the runtime, and every object is freed", async () => {
  await gone(world.workers, ["stress", "consumer", "producer"], { byThemselves: true });
});
