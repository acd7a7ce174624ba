// Sessions of the test Worker's `/life`: agents that wait, that expire, and that take three readers.

import { startWorkers } from "../../harness.mjs";
import { contract } from "./contract.mjs";
import { Mount, send } from "./http.mjs";

const LINE = "export default { fetch: (request, env) => env.LIFE.fetch(request) };";

/** @returns the harness's `workers`, a mount for each agent type, and what a host asks of an object. */
export async function startLife() {
  const line = { name: "line", script: LINE, services: { LIFE: { to: "contract" } } };
  const workers = await startWorkers({ extra: [contract(), line] });
  const base = workers.urls.contract;
  const own = (method, path, id) => send(base, { method, path: `/life/${path}?sessionId=${id}` });
  return {
    workers,
    agent: (type) => new Mount(base, "/life/agents", type),
    /** The same behind another Worker, which reaches it over a service binding. */
    agentBehind: (type) => new Mount(workers.urls.line, "/life/agents", type),
    remove: (id) => own("DELETE", "session", id),
    alarm: async (id) => (await own("GET", "alarm", id)).json,
    stop: () => workers.stop(),
  };
}
