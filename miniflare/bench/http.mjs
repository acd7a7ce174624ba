// Requests and readers over plain connections, cheap enough not to be what is measured.

import http from "node:http";

const keepAlive = new http.Agent({ keepAlive: true, maxSockets: 1 });

/** One request on a connection of its own that is kept. Rejects unless it succeeds. */
export function call(base, path, { method = "GET", body, agent = keepAlive } = {}) {
  return new Promise((resolve, reject) => {
    const request = http.request(base + path, { method, agent }, (response) => {
      const parts = [];
      response.on("data", (part) => parts.push(part));
      response.on("error", reject);
      response.on("end", () => {
        const text = Buffer.concat(parts).toString("utf8");
        if (response.statusCode !== 200) reject(new Error(`${method} ${path}: ${response.statusCode} ${text.slice(0, 300)}`));
        else resolve(text === "" ? undefined : JSON.parse(text));
      });
    });
    request.on("error", reject);
    request.end(body);
  });
}

export const post = (base, path, body) => call(base, path, { method: "POST", body });

/** A connection of its own for whoever asks often. */
export const ownAgent = () => new http.Agent({ keepAlive: true, maxSockets: 1 });

const ID = Buffer.from("\nid: ");
const TEXT = Buffer.from('"delta":"');
const CAUGHT_UP = [Buffer.from("event: caught-up"), Buffer.from("event: up-to-date")];
const ENDED = [Buffer.from("event: end"), Buffer.from("event: done")];

/** A reader of a stream of events. */
export class Reader {
  constructor(base, path) {
    this.bytes = 0;
    /** The newest id seen. */
    this.last = 0;
    this.sent = performance.now();
    this.firstByte = new Promise((resolve) => (this.onFirst = resolve));
    this.caughtUp = new Promise((resolve) => (this.onCaughtUp = resolve));
    this.ended = new Promise((resolve) => (this.onEnd = resolve));
    this.failed = new Promise((_, reject) => (this.onFailure = reject));
    this.failed.catch(() => {});
    this.headers = new Promise((resolve, reject) => {
      this.request = http.request(base + path, { agent: false }, (response) => {
        this.response = response;
        if (response.statusCode !== 200) reject(new Error(`${path}: ${response.statusCode}`));
        response.on("error", () => {});
        resolve();
      });
      this.request.on("error", (error) => {
        if (!this.closed) this.onFailure(error), reject(error);
      });
      this.request.on("socket", (socket) => socket.setNoDelay(true));
      this.request.end();
    });
    this.headers.catch(() => {});
  }

  /** Reads on; `onText` is told the stamp of every chunk's text and when it came. */
  async read(onText) {
    await this.headers;
    let rest = Buffer.from("\n");
    this.response.on("data", (part) => {
      const now = performance.now();
      const joined = rest.length === 0 ? part : Buffer.concat([rest, part]);
      this.bytes += part.length;
      this.#saw(joined, joined.lastIndexOf(ID), now);
      if (onText) {
        for (let at = joined.indexOf(TEXT); at >= 0; at = joined.indexOf(TEXT, at + TEXT.length)) {
          const stamp = joined.toString("latin1", at + TEXT.length, at + TEXT.length + 13);
          if (stamp.length === 13) onText(Number(stamp), performance.timeOrigin + now);
        }
      }
      if (this.caughtUpAt === undefined && CAUGHT_UP.some((mark) => joined.includes(mark))) this.onCaughtUp((this.caughtUpAt = now));
      if (ENDED.some((mark) => joined.includes(mark))) this.onEnd((this.endedAt = now));
      rest = Buffer.from(joined.subarray(Math.max(0, joined.length - 24)));
    });
    return this;
  }

  #saw(bytes, at, now) {
    if (at < 0) return;
    const end = bytes.indexOf(0x0a, at + 1);
    if (end < 0) return;
    const id = Number(bytes.toString("latin1", at + 5, end));
    if (id < this.last) return;
    if (this.firstChunkAt === undefined) this.onFirst((this.firstChunkAt = now));
    this.last = id;
  }

  /** Completes when `promise` does, or fails with the connection. */
  until(promise) {
    return Promise.race([promise, this.failed]);
  }

  close() {
    this.closed = true;
    this.request.destroy();
  }
}
