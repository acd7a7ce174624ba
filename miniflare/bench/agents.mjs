// The same object on the npm package `agents`: its streams, its SSE answer, and the packing of ten chunks into one stored
// segment that its own chat does and its documentation recommends.

import { Lifecycle } from "agents/lifecycle";
import { Streams, sseResponse } from "agents/streams";
import { DurableObject } from "cloudflare:workers";

const SEGMENT = 10;
const FILL_COMMITS = 200;
const ENVELOPE = 102;
const STREAM = "log";

export class Packed extends DurableObject {
  streams = new Streams();
  lifecycle = Lifecycle.install(this).use(this.streams);
  last = 0;
  held = [];

  async onRequest(request) {
    const url = new URL(request.url);
    const [, id, action] = url.pathname.split("/");
    const number = (name) => Number(url.searchParams.get(name) ?? 1);
    if (action === "status") return Response.json({ last: this.last });
    if (action === "sse") return sseResponse(this.streams, STREAM, { request });
    const writer = await this.streams.open(STREAM);
    const delta = "x".repeat(Math.max(1, number("bytes") - ENVELOPE - id.length));
    switch (action) {
      case "append":
        return Response.json(await this.appendAll(writer, id, number("commits"), number("per"), delta, 1));
      case "fill":
        return Response.json(await this.appendAll(writer, id, number("commits"), number("per"), delta, FILL_COMMITS));
      case "live":
        return Response.json(await this.live(writer, id, number("commits"), number("every"), delta));
      case "finish":
        writer.close();
        return Response.json({});
      default:
        return new Response(null, { status: 404 });
    }
  }

  async appendAll(writer, id, commits, per, delta, each) {
    const started = Date.now();
    for (let commit = 1; commit <= commits; commit += 1) {
      for (let left = per; left > 0; left -= SEGMENT) this.append(writer, this.chunks(id, Math.min(left, SEGMENT), delta));
      if (commit % each === 0) await this.ctx.storage.sync();
    }
    await this.ctx.storage.sync();
    return { ms: Date.now() - started, last: this.last };
  }

  async live(writer, id, ticks, every, delta) {
    const started = Date.now();
    const late = [];
    for (let tick = 0; tick < ticks; tick += 1) {
      const due = started + tick * every;
      if (Date.now() < due) await scheduler.wait(due - Date.now());
      late.push(Math.max(0, Date.now() - due));
      this.held.push(...this.chunks(id, 1, `${Date.now()}${delta}`));
      if (this.held.length >= SEGMENT) this.append(writer, this.held.splice(0, SEGMENT));
      await this.ctx.storage.sync();
    }
    if (this.held.length > 0) this.append(writer, this.held.splice(0));
    return { late };
  }

  append(writer, chunks) {
    writer.append(chunks);
    this.last += chunks.length;
  }

  chunks(id, count, delta) {
    return Array.from({ length: count }, () => ({ type: "text_delta", delta, agentId: id, agentType: "bench", timestamp: Date.now(), step: 1 }));
  }
}

export default {
  fetch(request, env) {
    if (env.UP) return env.UP.fetch(request);
    const id = new URL(request.url).pathname.split("/")[1];
    return env.OBJECTS.get(env.OBJECTS.idFromName(id)).fetch(request);
  },
};
