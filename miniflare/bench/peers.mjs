// Two hand-written objects that do the least that a log of chunks with live readers must do, as well as it can be done in
// JavaScript: a row per chunk (B) and a row per commit (B2). Frames, cursors and the order of things are ours: a chunk is
// published only after its commit is durable, a replay is read in pages as the reader pulls, and readers at the tail share
// one encoded buffer.

const PAGE_BYTES = 128 * 1024;
const KEEP_ALIVE_MS = 15_000;
const FILL_COMMITS = 200;
const ENVELOPE = 102;
const encoder = new TextEncoder();
const OPEN = encoder.encode(": open\n\n");
const PING = encoder.encode(": ping\n\n");

const frame = (sequence, chunk) => `event: chunk\nid: ${sequence}\ndata: {"sequence":${sequence},"chunk":${chunk}}\n\n`;

class Log {
  constructor(ctx) {
    this.ctx = ctx;
    this.sql = ctx.storage.sql;
    this.last = this.prepare();
    this.durable = this.last;
    this.finished = false;
    /** Readers that have all there is and wait for more. */
    this.tail = new Set();
  }

  async fetch(request) {
    const url = new URL(request.url);
    const [, id, action] = url.pathname.split("/");
    const number = (name) => Number(url.searchParams.get(name) ?? 1);
    switch (action) {
      case "append":
        return Response.json(await this.appendAll(id, number("commits"), number("per"), text(id, number("bytes")), 1));
      case "fill":
        return Response.json(await this.appendAll(id, number("commits"), number("per"), text(id, number("bytes")), FILL_COMMITS));
      case "live":
        return Response.json(await this.live(id, number("commits"), number("every"), text(id, number("bytes"))));
      case "finish":
        this.finished = true;
        for (const reader of this.tail) this.serve(reader);
        return Response.json({});
      case "status":
        return Response.json({ last: this.last });
      case "sse":
        return this.open(Number(url.searchParams.get("from") ?? 0), request.signal);
      default:
        return new Response(null, { status: 404 });
    }
  }

  async appendAll(id, commits, per, delta, each) {
    const started = Date.now();
    for (let commit = 1; commit <= commits; commit += 1) {
      this.append(id, per, delta);
      if (commit % each === 0) await this.publish();
    }
    await this.publish();
    return { ms: Date.now() - started, last: this.last };
  }

  /** Says a text every few milliseconds, each stamped with its time; tells how late each was. */
  async live(id, ticks, every, delta) {
    const started = Date.now();
    const late = [];
    for (let tick = 0; tick < ticks; tick += 1) {
      const due = started + tick * every;
      if (Date.now() < due) await scheduler.wait(due - Date.now());
      late.push(Math.max(0, Date.now() - due));
      this.append(id, 1, `${Date.now()}${delta}`);
      await this.publish();
    }
    return { late };
  }

  append(id, count, delta) {
    const chunks = [];
    for (let n = 0; n < count; n += 1) {
      chunks.push(JSON.stringify({ type: "text_delta", delta, agentId: id, agentType: "bench", timestamp: Date.now(), step: 1 }));
    }
    this.write(this.last + 1, chunks);
    this.last += count;
  }

  async publish() {
    const covered = this.last;
    await this.ctx.storage.sync();
    const from = this.durable;
    this.durable = Math.max(from, covered);
    if (this.tail.size === 0 || this.durable === from) return;
    const page = this.page(from);
    const bytes = encoder.encode(page.text);
    for (const reader of this.tail) {
      if (reader.cursor === from) this.send(reader, bytes, page.last);
      else this.serve(reader);
    }
  }

  open(from, signal) {
    const reader = { cursor: from, controller: undefined, pulled: undefined, caughtUp: false };
    const forget = () => {
      this.tail.delete(reader);
      reader.pulled?.();
    };
    signal?.addEventListener("abort", forget, { once: true });
    const body = new ReadableStream({
      start: (controller) => {
        reader.controller = controller;
        controller.enqueue(OPEN);
      },
      pull: () => this.pull(reader),
      cancel: forget,
    });
    return new Response(body, { headers: { "content-type": "text/event-stream", "cache-control": "no-cache, no-transform" } });
  }

  pull(reader) {
    if (this.next(reader)) return undefined;
    this.tail.add(reader);
    this.timer ??= setInterval(() => this.keepAlive(), KEEP_ALIVE_MS);
    return new Promise((resolve) => {
      reader.pulled = resolve;
    });
  }

  /** Gives a reader what is next for it, if there is anything. */
  next(reader) {
    if (reader.cursor < this.durable) {
      const page = this.page(reader.cursor);
      reader.cursor = page.last;
      reader.controller.enqueue(encoder.encode(page.text));
    } else if (!reader.caughtUp) {
      reader.caughtUp = true;
      reader.controller.enqueue(encoder.encode(`event: caught-up\ndata: {"sequence":${reader.cursor}}\n\n`));
    } else if (this.finished) {
      reader.controller.enqueue(encoder.encode('event: end\ndata: {"status":"completed"}\n\n'));
      reader.controller.close();
    } else {
      return false;
    }
    return true;
  }

  serve(reader) {
    this.tail.delete(reader);
    this.next(reader);
    reader.pulled();
  }

  send(reader, bytes, last) {
    this.tail.delete(reader);
    reader.cursor = last;
    reader.controller.enqueue(bytes);
    reader.pulled();
  }

  keepAlive() {
    for (const reader of this.tail) this.send(reader, PING, reader.cursor);
    if (this.tail.size === 0) {
      clearInterval(this.timer);
      this.timer = undefined;
    }
  }
}

/** A row per chunk. */
export class B extends Log {
  prepare() {
    this.sql.exec("CREATE TABLE IF NOT EXISTS chunks (sequence INTEGER PRIMARY KEY, body TEXT NOT NULL)");
    return this.sql.exec("SELECT coalesce(max(sequence), 0) AS last FROM chunks").one().last;
  }

  write(first, chunks) {
    let sequence = first;
    for (const chunk of chunks) this.sql.exec("INSERT INTO chunks (sequence, body) VALUES (?, ?)", sequence++, chunk);
  }

  page(after) {
    let text = "";
    let last = after;
    for (const [sequence, body] of this.sql.exec("SELECT sequence, body FROM chunks WHERE sequence > ? AND sequence <= ? ORDER BY sequence", after, this.durable).raw()) {
      text += frame(sequence, body);
      last = sequence;
      if (text.length > PAGE_BYTES) break;
    }
    return { text, last };
  }
}

/** A row per commit. */
export class B2 extends Log {
  prepare() {
    this.sql.exec("CREATE TABLE IF NOT EXISTS commits (first INTEGER PRIMARY KEY, last INTEGER NOT NULL, body TEXT NOT NULL)");
    return this.sql.exec("SELECT coalesce(max(last), 0) AS last FROM (SELECT last FROM commits ORDER BY first DESC LIMIT 1)").one().last;
  }

  write(first, chunks) {
    this.sql.exec("INSERT INTO commits (first, last, body) VALUES (?, ?, ?)", first, first + chunks.length - 1, chunks.join("\n"));
  }

  page(after) {
    let text = "";
    let last = after;
    const rows = this.sql.exec(
      "SELECT first, body FROM commits WHERE first >= coalesce((SELECT max(first) FROM commits WHERE first <= ?1 + 1), 0) AND first <= ?2 ORDER BY first",
      after,
      this.durable,
    );
    for (const [first, body] of rows.raw()) {
      let sequence = first;
      for (const chunk of body.split("\n")) {
        if (sequence > after && sequence <= this.durable) {
          text += frame(sequence, chunk);
          last = sequence;
        }
        sequence += 1;
      }
      if (text.length > PAGE_BYTES) break;
    }
    return { text, last };
  }
}

function text(id, bytes) {
  return "x".repeat(Math.max(1, bytes - ENVELOPE - id.length));
}

/** `/{session}/{action}`; with a binding `UP` a hop that passes everything on. */
export default {
  fetch(request, env) {
    if (env.UP) return env.UP.fetch(request);
    const id = new URL(request.url).pathname.split("/")[1];
    return env.OBJECTS.get(env.OBJECTS.idFromName(id)).fetch(request);
  },
};
