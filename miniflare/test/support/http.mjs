// Requests exactly as a test writes them. `fetch` cleans paths up and forbids headers; here neither happens.

import http from "node:http";
import { openEvents } from "../../sse.mjs";

/**
 * Sends one request on a connection of its own.
 *
 * @param {string} base  Scheme and authority.
 * @param {{method?: string, path: string, headers?: Record<string, string | string[]>, body?: string | Buffer}} request
 * @returns {Promise<{status: number, headers: http.IncomingHttpHeaders, rawHeaders: string[], bytes: Buffer, text: string, json: any}>}
 *          `json` is `undefined` where the body is none.
 */
export function send(base, { method = "GET", path, headers = {}, body }) {
  const { hostname, port } = new URL(base);
  const length = body === undefined ? {} : { "content-length": String(Buffer.byteLength(body)) };
  return new Promise((resolve, reject) => {
    const request = http.request({ hostname, port, method, path, agent: false, headers: { ...length, ...headers } }, (response) => {
      const parts = [];
      response.on("data", (part) => parts.push(part));
      response.on("error", reject);
      response.on("end", () => {
        const bytes = Buffer.concat(parts);
        const text = bytes.toString("utf8");
        resolve({ status: response.statusCode, headers: response.headers, rawHeaders: response.rawHeaders, bytes, text, json: parse(text) });
      });
    });
    request.on("error", reject);
    request.end(body);
  });
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** One agent type behind one mount. `headers` go with every request; each call may add its own. */
export class Mount {
  constructor(base, basePath, agentType, headers = {}) {
    Object.assign(this, { base, basePath, agentType, headers });
  }

  /** The same mount for another agent type. */
  of(agentType) {
    return new Mount(this.base, this.basePath, agentType, this.headers);
  }

  /** The same mount with other headers. */
  as(headers) {
    return new Mount(this.base, this.basePath, this.agentType, headers);
  }

  list() {
    return send(this.base, { path: this.basePath, headers: this.headers });
  }

  post(action, body, headers = {}) {
    return send(this.base, {
      method: "POST",
      path: this.#path(action),
      headers: { "content-type": "application/json", ...this.headers, ...headers },
      body: typeof body === "string" ? body : JSON.stringify(body),
    });
  }

  get(action, query, headers = {}) {
    return send(this.base, { path: `${this.#path(action)}?${new URLSearchParams(query)}`, headers: { ...this.headers, ...headers } });
  }

  start(body, headers) {
    return this.post("start", body, headers);
  }

  resume(body, headers) {
    return this.post("resume", body, headers);
  }

  interrupt(sessionId, reason) {
    return this.post("interrupt", { sessionId, reason });
  }

  abort(sessionId, reason) {
    return this.post("abort", { sessionId, reason });
  }

  status(sessionId) {
    return this.get("status", { sessionId });
  }

  snapshot(sessionId) {
    return this.get("snapshot", { sessionId });
  }

  usage(sessionId) {
    return this.get("usage", { sessionId });
  }

  tree(sessionId, bounds = {}) {
    return this.get("tree", { sessionId, ...bounds });
  }

  messages(sessionId, query = {}) {
    return this.get("messages", { sessionId, ...query });
  }

  /** Opens the stream; see `openEvents`. `query` may hold `fromSequence` and `streamId`. */
  open(sessionId, query = {}, headers = {}) {
    const url = `${this.base}${this.#path("sse")}?${new URLSearchParams({ sessionId, ...query })}`;
    return openEvents(url, { headers: { ...this.headers, ...headers } });
  }

  /** Reads the stream to its end, or up to and including the first event for which `until` is true. */
  async read(sessionId, query = {}, { headers = {}, until = () => false } = {}) {
    const stream = await this.open(sessionId, query, headers);
    const events = [];
    for await (const event of stream.events) {
      events.push(event);
      if (until(event)) break;
    }
    return { status: stream.status, headers: stream.headers, events };
  }

  #path(action) {
    return `${this.basePath}/${encodeURIComponent(this.agentType)}/${action}`;
  }
}

/** The consumer's routes for the sessions below its own. */
export class ChildProxy {
  constructor(base, headers = {}) {
    Object.assign(this, { base, headers });
  }

  as(headers) {
    return new ChildProxy(this.base, headers);
  }

  /** `query` may be text, to be sent as it is. */
  send(route, query, request = {}) {
    const text = typeof query === "string" ? query : String(new URLSearchParams(query));
    return send(this.base, { path: `/api/child-${route}?${text}`, ...request, headers: { ...this.headers, ...request.headers } });
  }

  snapshot(sessionId, agentType) {
    return this.send("snapshot", { sessionId, agentType });
  }

  usage(sessionId, agentType) {
    return this.send("usage", { sessionId, agentType });
  }
}
