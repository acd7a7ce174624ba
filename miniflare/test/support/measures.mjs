// What Workers that are `measured` tell, and how objects are evicted at once.

import { send } from "./http.mjs";
import { eventually } from "./world.mjs";

/** An extra Worker that evicts every object of every Worker. */
export const evicting = {
  name: "evicting",
  script: `import unsafe from "workerd:unsafe";
export default { async fetch() { await unsafe.abortAllDurableObjects(); return new Response(); } };`,
  flags: ["unsafe_module"],
};

async function measures(workers, name, query) {
  const { json } = await send(workers.urls[name], { path: `/measures${query}` });
  return { objects: json.objects, memory: json.memory / 1024 };
}

/** What a Worker's module has taken, in KiB, and how many of its objects are not freed; nothing is collected for it. */
export function kept(workers, name) {
  return measures(workers, name, "?kept");
}

/**
 * Waits until no object of these Workers is left and every one is freed; `byThemselves`, as the runtime evicts objects
 * that nobody calls, and else at once. Gives what each module has taken, in KiB.
 */
export function gone(workers, names, { byThemselves = false } = {}) {
  return eventually(`every object of ${names.join(" and ")} is freed`, async () => {
    if (!byThemselves) await send(workers.urls.evicting, { path: "/" });
    const told = await Promise.all(names.map((name) => measures(workers, name, "")));
    return told.every(({ objects }) => objects === 0) ? told.map(({ memory }) => memory) : undefined;
  });
}
