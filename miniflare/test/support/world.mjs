// Both Workers for one test file, with the three mounts at hand.

import { randomBytes } from "node:crypto";
import { internalCaller, startWorkers } from "../../harness.mjs";
import { ChildProxy, Mount } from "./http.mjs";

/**
 * @param {import("../../harness.mjs").Options} [options]
 * @returns the harness's `workers` and the mounts: `writer` (consumer, raw), `planner` (producer, projected), `raw` (the
 *          producer's internal mount, as the consumer's binding reaches it; planner, `.of(type)` for another); and `child`, the consumer's proxy.
 */
export async function startWorld(options = {}) {
  const workers = await startWorkers({ ...options, extra: [internalCaller(), ...(options.extra ?? [])] });
  return {
    workers,
    get writer() {
      return new Mount(workers.urls.consumer, "/agents", "writer", workers.authorization);
    },
    get planner() {
      return new Mount(workers.urls.producer, "/agents", "planner", workers.authorization);
    },
    get raw() {
      return new Mount(workers.urls.caller, "/internal/agents", "planner");
    },
    get child() {
      return new ChildProxy(workers.urls.consumer, workers.authorization);
    },
    stop: () => workers.stop(),
  };
}

/** A session id that no other test has. */
export function newSession(name) {
  return `${name}-${randomBytes(4).toString("hex")}`;
}

/**
 * Asks again and again until `check` gives something other than `undefined`, and gives that. The deadline is that of
 * the condition itself: it fails the test and is far beyond what a slow machine needs.
 */
export async function eventually(what, check, seconds = 60) {
  const deadline = performance.now() + seconds * 1000;
  for (;;) {
    const found = await check();
    if (found !== undefined) return found;
    if (performance.now() > deadline) throw new Error(`after ${seconds} s still not: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** The status once the session's run has ended, and that it did so with `expected`. */
export function settled(mount, id, expected) {
  return eventually(`${id} is ${expected}`, async () => {
    const { json } = await mount.status(id);
    if (json.status === "running") return undefined;
    if (json.status !== expected) throw new Error(`${id} is ${json.status}: ${JSON.stringify(json)}`);
    return json;
  });
}
