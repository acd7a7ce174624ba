// Whatever crosses the border of a Worker, numbered: each question to a model and each part of its answer, each request
// between the services, its answer, and each chunk of a stream. A test can have the world stand still at the n-th of a kind:
// it has not happened, and nothing after it does.

import { agentTypeOf, researchScript } from "../../providers/research.mjs";
import { BASE_URL, VARS, piecesOf } from "./gate.mjs";
import { startWorld } from "./world.mjs";

const HOST = "crossing.test";
/** Parts of a model's answer: its beginning, its middle and its end. */
const PARTS = 3;

/** Stands between the consumer and the producer, and asks before anything goes on. */
const script = `
async function cross(kind) {
  const answer = await fetch("http://${HOST}/", { method: "POST", body: JSON.stringify(kind) });
  if (!answer.ok) throw new Error("the connection broke");
}
/** Lets a stream through event by event. */
function byEvent(kind) {
  const decoder = new TextDecoder();
  const encoder = new TextEncoder();
  let rest = "";
  return new TransformStream({
    async transform(bytes, controller) {
      const events = (rest + decoder.decode(bytes, { stream: true })).split("\\n\\n");
      rest = events.pop();
      for (const event of events) {
        if (/^event: (chunk|end|error)$/m.test(event)) await cross(kind);
        controller.enqueue(encoder.encode(event + "\\n\\n"));
      }
    },
    flush: (controller) => controller.enqueue(encoder.encode(rest)),
  });
}
export default {
  async fetch(request, env) {
    const action = new URL(request.url).pathname.split("/").at(-1);
    await cross(action + " asked");
    const response = await env.ON.fetch(request);
    await cross(action + " answered");
    if (action !== "sse" || !response.body) return response;
    return new Response(response.body.pipeThrough(byEvent("sse event")), response);
  },
};`;

/** Both Workers with everything that crosses their borders numbered: as `startWorld`, with `crossings`. */
export async function startCrossings(options = {}) {
  const crossings = new Crossings();
  const props = { mount: "internal" };
  const world = await startWorld({
    ...options,
    vars: { producer: VARS, consumer: VARS },
    extra: [{ name: "crossing", script, services: { ON: { to: "producer", props } } }],
    producerVia: "crossing",
    outbound: crossings.outbound,
  });
  const stop = () => {
    crossings.breakOff();
    return world.stop();
  };
  return Object.assign(Object.create(world), { crossings, stop });
}

/** How many of a kind there are. */
export const countOf = (seen, kind) => seen.filter((one) => one === kind).length;

class Crossings {
  /** What has crossed since `count`, in order. */
  seen = [];
  #script = researchScript();
  #stop;
  #stands = false;
  #reached = Promise.withResolvers();
  #waiting = new Set();

  /** Counts anew; everything stands still at `stop`, the `number`-th of a `kind`. Completes when that is reached. */
  count(stop) {
    this.seen = [];
    this.#stop = stop;
    this.#reached = Promise.withResolvers();
    return this.#reached.promise;
  }

  /** Breaks off what stands still, and holds nothing any more. */
  breakOff() {
    this.#stop = undefined;
    this.#stands = false;
    for (const broken of this.#waiting) broken(new Error("the connection broke"));
    this.#waiting.clear();
  }

  outbound = async (request) => {
    if (request.url.startsWith(`http://${HOST}/`)) {
      const kind = await request.json();
      return this.#cross(kind).then(() => new Response(), () => new Response(null, { status: 502 }));
    }
    if (!request.url.startsWith(BASE_URL)) return new Response("requests to the outside are blocked", { status: 502 });
    const asked = await request.json();
    const agentType = agentTypeOf(asked);
    const broken = new Response(null, { status: 502 });
    return this.#cross(`model of ${agentType} asked`).then(() => new Response(this.#answer(asked, agentType), { headers: { "content-type": "text/event-stream" } }), () => broken);
  };

  #answer(asked, agentType) {
    // The same call has the same id, however often it is asked for.
    const earlier = asked.messages.flatMap(({ tool_calls: calls }) => calls ?? []).length;
    let number = earlier;
    const pieces = piecesOf(this.#script.answer(asked), () => `call_${(number += 1)}`);
    const size = Math.ceil(pieces.length / PARTS);
    const parts = Array.from({ length: PARTS }, (_, at) => pieces.slice(at * size, (at + 1) * size).join("")).filter((part) => part !== "");
    const encoder = new TextEncoder();
    const cross = () => this.#cross(`model of ${agentType} speaks`);
    return new ReadableStream({
      async pull(controller) {
        try {
          await cross();
          controller.enqueue(encoder.encode(parts.shift()));
          if (parts.length === 0) controller.close();
        } catch (error) {
          controller.error(error);
        }
      },
    });
  }

  async #cross(kind) {
    if (!this.#stands && kind === this.#stop?.kind && countOf(this.seen, kind) + 1 === this.#stop.number) {
      this.#stands = true;
      this.#reached.resolve();
    }
    if (this.#stands) {
      await new Promise((_, broken) => this.#waiting.add(broken));
    }
    this.seen.push(kind);
  }
}
