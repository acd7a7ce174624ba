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

  /** Reads on; `onId` is told every id with its time. */
  async read(onId) {
    await this.headers;
    let rest = Buffer.from("\n");
    this.response.on("data", (part) => {
      const now = performance.now();
      const joined = rest.length === 0 ? part : Buffer.concat([rest, part]);
      this.bytes += part.length;
      if (onId) {
        for (let at = joined.indexOf(ID); at >= 0; at = joined.indexOf(ID, at + 5)) this.#saw(joined, at, now, onId);
      } else {
        this.#saw(joined, joined.lastIndexOf(ID), now);
      }
      if (this.caughtUpAt === undefined && CAUGHT_UP.some((mark) => joined.includes(mark))) this.onCaughtUp((this.caughtUpAt = now));
      if (ENDED.some((mark) => joined.includes(mark))) this.onEnd((this.endedAt = now));
      rest = Buffer.from(joined.subarray(Math.max(0, joined.length - 24)));
    });
    return this;
  }

  #saw(bytes, at, now, onId) {
    if (at < 0) return;
    const end = bytes.indexOf(0x0a, at + 1);
    if (end < 0) return;
    const id = Number(bytes.toString("latin1", at + 5, end));
    if (id < this.last) return;
    if (this.firstChunkAt === undefined) this.onFirst((this.firstChunkAt = now));
    if (id > this.last || this.last === 0) {
      this.last = id;
      onId?.(id, now);
    }
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

/** A request whose body is written byte by byte. */
export class Ticker {
  constructor(base, path) {
    this.answer = new Promise((resolve, reject) => {
      this.request = http.request(base + path, { method: "POST", agent: false }, (response) => {
        const parts = [];
        response.on("data", (part) => parts.push(part));
        response.on("end", () => {
          const text = Buffer.concat(parts).toString("utf8");
          if (response.statusCode === 200) resolve(JSON.parse(text));
          else reject(new Error(`${path}: ${response.statusCode} ${text.slice(0, 300)}`));
        });
      });
      this.request.on("error", reject);
      this.request.on("socket", (socket) => socket.setNoDelay(true));
      this.request.flushHeaders();
    });
  }

  /** One tick; its time. */
  tick() {
    const now = performance.now();
    this.request.write(".");
    return now;
  }

  end() {
    this.request.end();
    return this.answer;
  }
}
