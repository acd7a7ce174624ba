// The Worker whose agents do what a test's message says (miniflare/stress-worker), and what the tests of endurance need
// beside it.

import { readFileSync } from "node:fs";
import { startWorkers } from "../../harness.mjs";
import { Mount } from "./http.mjs";
import { eventually } from "./world.mjs";

export const CLASS = "StressAgents";

/** The Worker as an extra one of the harness; `services` may bind `CHILD` and `PRODUCER`. */
export function stressWorker(name = "stress", services = {}) {
  return { name, built: "miniflare/stress-worker", objects: { OBJECTS: CLASS }, services };
}

/** Both Workers and `extra`, with the mounts of the stress Worker at hand. */
export async function startStress({ extra = [stressWorker()], ...options } = {}) {
  const workers = await startWorkers({ ...options, extra });
  return {
    workers,
    mount: (name = "stress") => new Mount(workers.urls[name], "/agents", "stress"),
    stop: () => workers.stop(),
  };
}

/** What the library and the Workers have logged as JSON, over all restarts. */
export function eventsOf(workers) {
  return workers.logs.flatMap((line) => {
    if (!line.startsWith("{")) return [];
    try {
      return [JSON.parse(line)];
    } catch {
      return []; // A line that was cut off by a crash.
    }
  });
}

/** Waits until a session's run has settled, by the log alone: nothing is asked, nothing is woken. */
export function settledByItself(workers, sessionId, seconds = 120) {
  return eventually(
    `${sessionId} has settled`,
    async () => eventsOf(workers).findLast((line) => line.event === "settled" && line.sessionId === sessionId),
    seconds,
  );
}

/** The resident memory of workerd, in MiB; `undefined` where there is no /proc. */
export function residentMiB(workers) {
  const [pid] = workers.workerdPids();
  try {
    const [, kilobytes] = /^VmRSS:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"));
    return Number(kilobytes) / 1024;
  } catch {
    return undefined;
  }
}
