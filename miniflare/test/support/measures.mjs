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

/**
 * What a Worker's module has taken, in KiB, and how many of its objects are not freed. It may `collect` JavaScript's garbage
 * first, whose finalizers come a moment later; or tell how much of the memory is `used`, for which it takes a page more.
 *
 * @param {"" | "collect" | "used"} [also]
 */
export async function measures({ urls }, name, also = "") {
  const { json } = await send(urls[name], { path: `/measures?${also}` });
  return { objects: json.objects, taken: json.taken / 1024, used: json.used / 1024 };
}

/**
 * Waits until no object of these Workers is left and every one is freed; `byThemselves`, as the runtime evicts objects
 * that nobody calls, and else at once.
 */
export function gone(workers, names, { byThemselves = false } = {}) {
  return eventually(`every object of ${names.join(" and ")} is freed`, async () => {
    if (!byThemselves) await send(workers.urls.evicting, { path: "/" });
    const told = await Promise.all(names.map((name) => measures(workers, name, "collect")));
    return told.every(({ objects }) => objects === 0) ? true : undefined;
  });
}
