// A session at rest costs nothing: no alarm, no line in the log, no request. One that runs has exactly one alarm.

import assert from "node:assert/strict";
import { copyFileSync, existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { after, before, test } from "node:test";
import { research } from "./support/documents.mjs";
import { RECORDING, recorded } from "./support/recorder.mjs";
import { ofType, chunksOf } from "./support/stream.mjs";
import { eventsOf, settledByItself, stressWorker } from "./support/stress.mjs";
import { Mount } from "./support/http.mjs";
import { eventually, newSession, startWorld } from "./support/world.mjs";

let world;
let stress;
before(async () => {
  world = await startWorld({ ...RECORDING, extra: [...RECORDING.extra, stressWorker()] });
  stress = new Mount(world.workers.urls.stress, "/agents", "stress");
});
after(() => world.stop());

/**
 * The ids of the sessions that have an alarm, as the runtime keeps them on disk: one database for each class. They are
 * read from copies; a copy that was taken in the middle of a write is none, and is taken again.
 */
function alarms() {
  return eventually("the alarms can be read", async () => {
    const folder = mkdtempSync(join(tmpdir(), "remote-agents-alarms-"));
    try {
      return world.workers.dataFiles().filter((path) => path.endsWith("metadata.sqlite")).flatMap((path) => {
        const copy = join(folder, `${dirname(path).split("/").at(-1)}.sqlite`);
        for (const end of ["", "-wal"]) if (existsSync(path + end)) copyFileSync(path + end, copy + end);
        const database = new DatabaseSync(copy);
        try {
          return database.prepare("SELECT actor_name FROM _cf_ALARM").all().map((row) => row.actor_name);
        } finally {
          database.close();
        }
      });
    } catch {
      return undefined;
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  });
}

const say = (chunks, every) => JSON.stringify({ say: { chunks, per: 1, bytes: 9, every } });

test("sessions at rest have no alarm and nothing pending, however they came to rest", async () => {
  const [completed, interrupted, aborted, job, running] = ["completed", "interrupted", "aborted", "job", "running"].map(newSession);
  for (const id of [completed, interrupted, aborted]) await stress.start({ sessionId: id, message: say(id === completed ? 3 : 1000, 50) });
  const { documents, topic } = research(5);
  await world.writer.start({ sessionId: job, message: topic, state: { documents } });
  await stress.interrupt(interrupted);
  await stress.abort(aborted);
  for (const [id, status] of [[completed, "completed"], [interrupted, "interrupted"], [aborted, "failed"], [job, "completed"]]) {
    assert.equal((await settledByItself(world.workers, id)).status, status);
  }
  await eventually("all are at rest", async () => ((await alarms()).length === 0 ? true : undefined));

  const lines = eventsOf(world.workers).length;
  const requests = (await recorded(world)).length;
  // It goes on until it is stopped.
  await stress.start({ sessionId: running, message: say(100_000, 400) });
  // By its own pace this takes more than two periods of the watchdog.
  await stress.read(running, { fromSequence: 0 }, { until: (event) => event.event === "chunk" && ofType(chunksOf([event]), "text_delta").some(({ chunk }) => chunk.delta.startsWith("13")) });
  assert.deepEqual(await alarms(), [running], "the one that runs has an alarm, and nobody else");
  await stress.interrupt(running);
  await settledByItself(world.workers, running);
  await eventually("it is at rest as well", async () => ((await alarms()).length === 0 ? true : undefined));
  const said = eventsOf(world.workers).slice(lines).filter((line) => line.sessionId !== running);
  assert.deepEqual(said, [], "nobody else had anything to say");
  assert.equal((await recorded(world)).length, requests, "and nothing was sent");

  // What is at rest stays at rest after a crash.
  const before = eventsOf(world.workers).length;
  await world.workers.restart();
  assert.deepEqual(await alarms(), []);
  const last = newSession("last");
  stress = new Mount(world.workers.urls.stress, "/agents", "stress");
  await stress.start({ sessionId: last, message: say(8, 400) });
  await settledByItself(world.workers, last);
  assert.deepEqual(eventsOf(world.workers).slice(before).filter((line) => line.sessionId !== last), []);
});
