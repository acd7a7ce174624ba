// Sessions of the test Worker's `/life`: agents that wait, that expire, and that take three readers.

import { startWorkers } from "../../harness.mjs";
import { contract } from "./contract.mjs";
import { Mount, send } from "./http.mjs";

/** @returns the harness's `workers`, a mount for each agent type, and what a host asks of an object. */
export async function startLife() {
  const workers = await startWorkers({ extra: [contract()] });
  const base = workers.urls.contract;
  const own = (method, path, id) => send(base, { method, path: `/life/${path}?sessionId=${id}` });
  return {
    workers,
    agent: (type) => new Mount(base, "/life/agents", type),
    remove: (id) => own("DELETE", "session", id),
    alarm: async (id) => (await own("GET", "alarm", id)).json,
    stop: () => workers.stop(),
  };
}
