// A Worker that stands between a parent and its children: it passes everything on, logs each chunk that goes by, and
// counts the children in flight. It is no part of either service; what it knows is lost when workerd is killed.

import { send } from "./http.mjs";

const script = (binding) => `
const open = new Map();
const seen = new Set();
let most = 0;
function enter(id) {
  seen.add(id);
  open.set(id, (open.get(id) ?? 0) + 1);
  most = Math.max(most, open.size);
}
function leave(id) {
  if (open.get(id) > 1) open.set(id, open.get(id) - 1);
  else open.delete(id);
}
/** Counts the occurrences of a line wherever the bytes are cut. */
function counter() {
  const decoder = new TextDecoder();
  let rest = "";
  return (bytes) => {
    const parts = (rest + decoder.decode(bytes, { stream: true })).split("event: chunk");
    rest = parts.at(-1).slice(-11);
    return parts.length - 1;
  };
}
export default {
  async fetch(request, env) {
    const { pathname, searchParams } = new URL(request.url);
    if (pathname === "/counts") return Response.json({ most, seen: seen.size, open: open.size });
    const isStart = pathname.endsWith("/start");
    const isStream = pathname.endsWith("/sse");
    const id = isStart ? JSON.parse(await request.clone().text()).sessionId : searchParams.get("sessionId");
    if (!isStart && !isStream) return env.${binding}.fetch(request);
    enter(id);
    const response = await env.${binding}.fetch(request);
    if (isStart || !response.body) {
      leave(id);
      return response;
    }
    const count = counter();
    const passing = new TransformStream({
      transform(bytes, controller) {
        for (let chunks = count(bytes); chunks > 0; chunks -= 1) console.log('{"event":"passed"}');
        controller.enqueue(bytes);
      },
      flush: () => leave(id),
      cancel: () => leave(id),
    });
    return new Response(response.body.pipeThrough(passing), response);
  },
};`;

/** The Worker, in front of the service `to`; parents bind to it by its name. */
export function between(to, { name = "between", props } = {}) {
  return { name, script: script("ON"), services: { ON: { to, props } } };
}

/** How many children were in flight at most, how many there were, and how many still are. */
export async function counts(workers, name = "between") {
  const { json } = await send(workers.urls[name], { path: "/counts" });
  return json;
}
