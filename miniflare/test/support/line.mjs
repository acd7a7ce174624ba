// The line between a parent and its children, with the test at the switch: each request is shown to the test before it
// goes on, and the test says what becomes of it. It knows of no process, so what was set holds across a kill.

const HOST = "line.test";

const script = `
export default {
  async fetch(request, env) {
    const { pathname, searchParams } = new URL(request.url);
    const body = request.method === "POST" ? await request.text() : undefined;
    const seen = {
      action: pathname.split("/").at(-1),
      session: searchParams.get("sessionId") ?? JSON.parse(body).sessionId,
      from: searchParams.get("fromSequence"),
      key: request.headers.get("idempotency-key"),
    };
    const told = await fetch("http://${HOST}/", { method: "POST", body: JSON.stringify(seen) });
    const verdict = await told.json();
    if (verdict.kind === "lost") throw new Error("the connection broke");
    if (verdict.kind === "refused") return Response.json({ code: verdict.code, error: "No." }, { status: verdict.status });
    const { method, headers } = request;
    const response = await env.ON.fetch(new Request(request.url, { method, headers, body, redirect: "manual" }));
    if (verdict.kind !== "answer lost") return response;
    await response.body?.cancel();
    throw new Error("the connection broke");
  },
};`;

const WHOLE = { kind: "whole" };
/** The request never arrives. */
export const LOST = { kind: "lost" };
/** It arrives, and its answer does not. */
export const ANSWER_LOST = { kind: "answer lost" };
/** Nobody answers, until the line is mended. */
export const HELD = { kind: "held" };
/** The service answers with an envelope of this status and code. */
export const refused = (status, code) => ({ kind: "refused", status, code });

export const ACTIONS = ["start", "resume", "sse", "status", "snapshot", "usage", "interrupt", "abort"];

/**
 * Give `worker` to the harness among its extra Workers and `outbound` as what becomes of requests to the outside. Where
 * a method takes a session, it means each whose id begins so, or that a regular expression fits.
 */
export class Line {
  /** What has been asked for: `{action, session, from, key}` each. */
  requests = [];
  #rules = [];
  #held = new Set();

  /** The Worker, in front of the service `to`, which sees `props`. */
  worker(to, { name = "line", props } = {}) {
    return { name, script, services: { ON: { to, props } } };
  }

  outbound = async (request) => {
    if (new URL(request.url).host !== HOST) return new Response("requests to the outside are blocked", { status: 502 });
    const seen = await request.json();
    this.requests.push(seen);
    const rule = this.#rules.findLast(({ session, actions }) => actions.includes(seen.action) && fits(seen, session));
    if (rule?.verdict !== HELD) return Response.json(rule?.verdict ?? WHOLE);
    return Response.json(await new Promise((release) => this.#held.add({ seen, release })));
  };

  /** From now on, this befalls the requests for these actions. What is set later goes before. */
  set(session, actions, verdict) {
    this.#rules.push({ session, actions, verdict });
  }

  /** Takes back what was set for exactly this; what was held of it goes on. */
  mend(session) {
    this.#rules = this.#rules.filter((rule) => String(rule.session) !== String(session));
    this.#release(({ seen }) => fits(seen, session), WHOLE);
  }

  /** Whoever asked is gone. */
  hangUp() {
    this.#release(() => true, LOST);
  }

  /** What was asked for. */
  asked(session, action) {
    return this.requests.filter((seen) => fits(seen, session) && seen.action === action);
  }

  #release(which, verdict) {
    for (const held of [...this.#held].filter(which)) {
      this.#held.delete(held);
      held.release(verdict);
    }
  }
}

function fits(seen, session) {
  return session instanceof RegExp ? session.test(seen.session) : seen.session.startsWith(session);
}
