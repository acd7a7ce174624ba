// A reader of server-sent events for tests and tools. It is written from the specification of the format and shares
// nothing with the library, so that a mistake there cannot hide here.

const LF = 0x0a;
const CR = 0x0d;
const BOM = [0xef, 0xbb, 0xbf];

/**
 * Cuts a stream of byte chunks into blocks, each ended by an empty line, and yields one event per block:
 *
 * - `event`: the event's name, `"message"` where the block names none;
 * - `id`: the block's own `id` line, `undefined` where it has none;
 * - `data`: the data lines joined by newlines, `undefined` for a block of comments alone;
 * - `comments`: the comment lines without their colon;
 * - `bytes`: the block as it came over the wire, the empty line included;
 * - `raw`: the same as text.
 *
 * A block that the end of the stream cuts short is yielded last, with `partial: true`.
 *
 * @param {AsyncIterable<Uint8Array>} chunks
 */
export async function* parseEvents(chunks) {
  let pending = Buffer.alloc(0);
  let first = true;
  for await (const chunk of chunks) {
    pending = Buffer.concat([pending, chunk]);
    for (let end = blockEnd(pending); end > 0; end = blockEnd(pending)) {
      yield toEvent(pending.subarray(0, end), first);
      pending = pending.subarray(end);
      first = false;
    }
  }
  if (pending.length > 0) {
    const event = toEvent(pending, first);
    yield blockEnd(pending, true) === pending.length ? event : { ...event, partial: true };
  }
}

/** The length of the first whole block, 0 while there is none. A CR at the very end waits for a possible LF. */
function blockEnd(bytes, atEnd = false) {
  let lineStart = 0;
  for (let at = 0; at < bytes.length; at += 1) {
    if (bytes[at] !== LF && bytes[at] !== CR) continue;
    if (bytes[at] === CR && at + 1 === bytes.length && !atEnd) return 0;
    const next = bytes[at] === CR && bytes[at + 1] === LF ? at + 2 : at + 1;
    if (at === lineStart) return next;
    lineStart = next;
    at = next - 1;
  }
  return 0;
}

function toEvent(bytes, first) {
  const body = first && BOM.every((byte, at) => bytes[at] === byte) ? bytes.subarray(BOM.length) : bytes;
  const event = { event: "message", id: undefined, data: undefined, comments: [], bytes: Buffer.from(bytes) };
  for (const line of body.toString("utf8").split(/\r\n|\n|\r/)) {
    if (line === "") continue;
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "") event.comments.push(value);
    else if (field === "event") event.event = value;
    else if (field === "id") event.id = value;
    else if (field === "data") event.data = event.data === undefined ? value : `${event.data}\n${value}`;
  }
  event.raw = event.bytes.toString("utf8");
  return event;
}

/**
 * Opens a stream. The answer's `events` yields the events as they arrive; `close()` breaks the connection, as a
 * client that goes away does. Leaving a `for await` over `events` early does the same.
 *
 * @param {string | URL} url
 * @param {RequestInit} [init]
 */
export async function openEvents(url, init = {}) {
  const controller = new AbortController();
  const signal = init.signal ? AbortSignal.any([init.signal, controller.signal]) : controller.signal;
  const response = await fetch(url, { ...init, headers: { accept: "text/event-stream", ...init.headers }, signal });
  return {
    status: response.status,
    headers: response.headers,
    response,
    events: untilClosed(response, controller),
    close: () => controller.abort(),
  };
}

async function* untilClosed(response, controller) {
  try {
    if (response.body) yield* parseEvents(response.body);
  } catch (error) {
    if (!controller.signal.aborted) throw error;
  } finally {
    controller.abort();
  }
}

/**
 * Reads a stream to its end, or up to and including the first event for which `until` is true.
 *
 * @returns {Promise<{status: number, headers: Headers, events: object[], bytes: Buffer}>}
 */
export async function readEvents(url, init = {}, until = () => false) {
  const stream = await openEvents(url, init);
  const events = [];
  for await (const event of stream.events) {
    events.push(event);
    if (until(event)) break;
  }
  return { status: stream.status, headers: stream.headers, events, bytes: Buffer.concat(events.map((e) => e.bytes)) };
}
