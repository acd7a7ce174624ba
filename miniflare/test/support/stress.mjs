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

/** `extra` alone, unless `roles` names others, with the mounts of the stress Worker at hand. */
export async function startStress({ extra = [stressWorker()], roles = [], ...options } = {}) {
  const workers = await startWorkers({ ...options, roles, extra });
  return {
    workers,
    mount: (name = "stress") => new Mount(workers.urls[name], "/agents", "stress"),
    stop: () => workers.stop(),
  };
}

/** By the list of lines: how many of them were read, and the events among those. */
const read = new WeakMap();

/** What the library and the Workers have logged as JSON, over all restarts. */
export function eventsOf({ logs }) {
  const known = read.get(logs) ?? { lines: 0, events: [] };
  for (; known.lines < logs.length; known.lines += 1) {
    const line = logs[known.lines];
    if (!line.startsWith("{")) continue;
    try {
      known.events.push(JSON.parse(line));
    } catch {
      // A line that was cut off by a crash.
    }
  }
  read.set(logs, known);
  return known.events;
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
