// What happens to a job after its run has ended: somebody may go on with it, here or in another tab.

import { Refusal, type Api, type Standing } from "./api.ts";

/** How often a job at rest is looked at, in milliseconds, by a tab that is seen. */
const EVERY = 3_000;

/** Waits until the job has another run than `runId`, or until `signal` aborts. */
export async function anotherRun(api: Api, session: string, runId: string | undefined, signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    await aWhile(signal);
    const standing = signal.aborted ? undefined : await look(api, session);
    if (standing && (standing.runId !== runId || standing.status === "running")) return;
  }
}

/** What cannot be read now is read at the next look; a refusal is for good. */
async function look(api: Api, session: string): Promise<Standing | undefined> {
  try {
    return await api.status(session);
  } catch (error) {
    if (error instanceof Refusal && error.status < 500 && error.status !== 429) throw error;
    return undefined;
  }
}

/** The time between two looks; one that is due while the tab is hidden is made when it comes to the front. */
function aWhile(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(due, EVERY);
    function due() {
      if (!document.hidden || signal.aborted) done();
    }
    function done() {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
      removeEventListener("focus", done);
      signal.removeEventListener("abort", done);
      resolve();
    }
    function shown() {
      if (!document.hidden) done();
    }
    document.addEventListener("visibilitychange", shown);
    addEventListener("focus", done);
    signal.addEventListener("abort", done);
  });
}
