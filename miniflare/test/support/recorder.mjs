// A Worker that stands between the consumer and its binding to the producer and remembers every request it passes on.

import { send } from "./http.mjs";

const SCRIPT = `
const requests = [];
const RECORDED = "/recorded";
export default {
  async fetch(request, env) {
    const { pathname, search } = new URL(request.url);
    if (pathname === RECORDED) return Response.json(requests);
    const body = request.body === null ? "" : await request.clone().text();
    const entry = { method: request.method, path: pathname + search, url: request.url, headers: [...request.headers], body };
    requests.push(entry);
    const response = await env.PRODUCER.fetch(request);
    entry.status = response.status;
    return response;
  },
};
`;

/** The options that put the recorder there; spread them into those of `startWorld`. */
export const RECORDING = {
  extra: [{ name: "recorder", script: SCRIPT, services: { PRODUCER: { to: "producer", props: { mount: "internal" } } } }],
  producerVia: "recorder",
};

/** What has passed since workerd was started: `{method, path, url, headers, body, status}` each. No object is touched. */
export async function recorded(world) {
  const { json } = await send(world.workers.urls.recorder, { path: "/recorded" });
  return json;
}
