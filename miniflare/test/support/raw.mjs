// Requests as they stand: heads with the bytes that a test writes, names that stand twice, bodies that come slowly or
// never end. What `http.mjs` sends has passed Node's own checks.

import net from "node:net";

/**
 * Opens a connection and writes the head of a request, each character of which is a byte.
 *
 * @param {string} base  Scheme and authority.
 * @param {{method?: string, path: string, headers?: [string, string][], length?: number}} request  `length` is the one
 *        that is announced of the body.
 * @returns the `socket`, and its `answer` once the other side has ended it: `{status, head, text, json}`, or `undefined`
 *          where none came.
 */
export function connect(base, { method = "GET", path, headers = [], length }) {
  const { hostname, port, host } = new URL(base);
  const announced = length === undefined ? [] : [["content-length", length]];
  const lines = [["host", host], ...headers, ["connection", "close"], ...announced].map(([name, value]) => `${name}: ${value}\r\n`);
  const socket = net.connect({ host: hostname, port: Number(port) });
  socket.write(Buffer.from(`${method} ${path} HTTP/1.1\r\n${lines.join("")}\r\n`, "latin1"));
  const parts = [];
  socket.on("data", (part) => parts.push(part));
  // A refusal may come while the body is still being sent.
  socket.on("error", () => {});
  const answer = new Promise((resolve) => socket.on("close", () => resolve(parse(Buffer.concat(parts)))));
  return { socket, answer };
}

/** One request with its whole body, and its answer. */
export function sendRaw(base, request, body) {
  const bytes = body === undefined ? undefined : Buffer.from(body);
  const { socket, answer } = connect(base, { ...request, length: bytes?.length });
  if (bytes) socket.write(bytes);
  return answer;
}

function parse(bytes) {
  const end = bytes.indexOf("\r\n\r\n");
  if (end < 0) return undefined;
  const head = bytes.toString("latin1", 0, end);
  const isChunked = /^transfer-encoding: *chunked/im.test(head);
  const body = isChunked ? unchunked(bytes.subarray(end + 4)) : bytes.subarray(end + 4);
  const text = body.toString("utf8");
  return { status: Number(head.split(" ")[1]), head, text, json: json(text) };
}

function unchunked(bytes) {
  const parts = [];
  for (let at = 0; at < bytes.length; ) {
    const line = bytes.indexOf("\r\n", at);
    const size = Number.parseInt(bytes.toString("latin1", at, line), 16);
    if (!(size > 0)) break;
    parts.push(bytes.subarray(line + 2, line + 2 + size));
    at = line + 2 + size + 2;
  }
  return Buffer.concat(parts);
}

function json(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
