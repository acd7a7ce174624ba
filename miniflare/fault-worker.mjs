// A Worker for tests that stands between a consumer and a producer and does one thing wrong once.
//
// It holds the bindings itself, because the producer's raw mount opens for its props alone. A parent's plan is put to
// `/plan/<parent>` and read there again, with the requests that have crossed; a request without a plan passes as it is.

/** @type {Map<string, {plan?: object, seen: string[], struck: number}>} */
const jobs = new Map();

/** Longer than any deadline of the agents that meet these faults. */
const FOR_EVER = 60_000;
const LATE = 3_000;

export default {
  async fetch(request, env, context) {
    const url = new URL(request.url);
    if (url.pathname.startsWith("/plan/")) return control(request, url.pathname.slice("/plan/".length));
    const body = request.method === "POST" ? await request.text() : undefined;
    const session = url.searchParams.get("sessionId") ?? JSON.parse(body ?? "{}").sessionId;
    const [parent, ...below] = session.split("-remote-");
    const job = jobOf(parent);
    const action = url.pathname.split("/").at(-1);
    const point = `${below.length > 1 ? "lower" : "upper"} ${action}`;
    const occurrence = job.seen.filter((seen) => seen === point).length;
    job.seen.push(point);
    const forward = () => {
      const service = url.pathname.startsWith("/internal/") ? env.PRODUCER : env.FAR;
      return service.fetch(new Request(request.url, { method: request.method, headers: request.headers, body, redirect: "manual" }));
    };
    const { plan } = job;
    if (plan?.point !== point || plan.occurrence !== occurrence) return forward();
    job.struck += 1;
    return strike(plan.fault, forward, context);
  },
};

function jobOf(parent) {
  if (!jobs.has(parent)) jobs.set(parent, { seen: [], struck: 0 });
  return jobs.get(parent);
}

async function control(request, parent) {
  const job = jobOf(parent);
  if (request.method === "PUT") job.plan = await request.json();
  return Response.json(job);
}

async function strike(fault, forward, context) {
  switch (fault.kind) {
    case "request lost":
      throw new Error("the connection broke");
    case "response lost":
      await swallow(await forward());
      throw new Error("the connection broke");
    case "late":
      context.waitUntil(scheduler.wait(LATE).then(forward).then(swallow));
      await scheduler.wait(FOR_EVER);
      throw new Error("nobody waits any more");
    case "unanswered":
      await swallow(await forward());
      await scheduler.wait(FOR_EVER);
      throw new Error("nobody waits any more");
    case "cut":
      return withBody(await forward(), (body) => cut(body, fault));
    case "cut in the middle": {
      const response = await forward();
      const bytes = new Uint8Array(await response.arrayBuffer());
      return withBody(response, () => parts([bytes.slice(0, bytes.length / 2)], "reset"));
    }
    case "instead":
      if (fault.tookEffect) await swallow(await forward());
      return canned(fault);
    case "header": {
      const response = await forward();
      const headers = new Headers(response.headers);
      headers.set(fault.name, fault.value);
      return new Response(response.body, { status: response.status, headers });
    }
    default:
      throw new Error(`no such fault: ${fault.kind}`);
  }
}

/** Lets an answer go unread. A stream would otherwise hold its object. */
async function swallow(response) {
  await response.body?.cancel();
}

function canned({ status, contentType = "text/html", headers = {}, body = "<h1>It is not me.</h1>", huge = false }) {
  if ([204, 304].includes(status)) return new Response(null, { status });
  return new Response(huge ? endless() : body, { status, headers: { "content-type": contentType, ...headers } });
}

/** More bytes than anyone takes. */
function endless() {
  const part = new Uint8Array(1 << 20).fill(0x20);
  return new ReadableStream({ pull: (controller) => controller.enqueue(part) });
}

function withBody(response, change) {
  const headers = new Headers(response.headers);
  headers.delete("content-length");
  return new Response(change(response.body), { status: response.status, headers });
}

/** A body of these parts that ends as `ending` says. */
function parts(list, ending) {
  const queue = [...list];
  return new ReadableStream({
    async pull(controller) {
      if (queue.length > 0) controller.enqueue(queue.shift());
      else await end(controller, ending);
    },
  });
}

async function end(controller, ending) {
  if (ending === "silence") await scheduler.wait(FOR_EVER);
  if (ending === "clean") controller.close();
  else controller.error(new Error("the connection was reset"));
}

/** A stream up to the end of its `events`-th event, `more` bytes of the next, what is slipped in, and an ending. */
function cut(body, { events, more = 0, slip, ending }) {
  const reader = body.getReader();
  let [left, bytes, newline] = [events, more, false];
  return new ReadableStream({
    async pull(controller) {
      if (left === 0 && bytes === 0) {
        reader.cancel().catch(() => {});
        if (slip !== undefined) controller.enqueue(new TextEncoder().encode(slip));
        return end(controller, ending);
      }
      const { done, value } = await reader.read();
      if (done) return controller.close();
      let at = 0;
      for (; at < value.length && (left > 0 || bytes > 0); at += 1) {
        if (left === 0) {
          bytes -= 1;
          continue;
        }
        const isNewline = value[at] === 0x0a;
        if (isNewline && newline) left -= 1;
        newline = isNewline && !newline;
      }
      controller.enqueue(value.slice(0, at));
    },
    cancel: () => reader.cancel(),
  });
}
