// Server-sent events, cut anywhere: the decoder of a stream's frames.

import type { Chunk, EndFrame, ErrorFrame } from "./wire.ts";

/** One event of `/sse`. */
export type Frame =
  | { kind: "chunk"; sequence: number; chunk: Chunk }
  | { kind: "caught_up"; sequence: number }
  | { kind: "end"; end: EndFrame }
  | { kind: "error"; error: ErrorFrame };

/** An event that is longer than this is no event of ours. In characters. */
const EVENT_LIMIT = 4 * 1024 * 1024;

/** One event as it stands in a body. */
export interface Event {
  name: string;
  id: string | undefined;
  data: string;
}

/**
 * The frames of a body, one after the other. Events and fields of unknown names are skipped. It ends after a terminal
 * frame. A body that ends without one, or that cannot be read, or that says nothing (not even a comment) for `silence` milliseconds, throws: then the stream was
 * dropped, and did not end.
 */
export async function* framesOf(body: ReadableStream<Uint8Array>, silence = 45_000): AsyncGenerator<Frame, void, void> {
  for await (const { name, data } of eventsOf(body, silence)) {
    const frame = frameOf(name, data);
    if (frame) yield frame;
    if (frame?.kind === "end" || frame?.kind === "error") return;
  }
  throw new Error("the stream ended without a terminal frame");
}

/** The events of a body that have data. One that the end of the body cuts off is none. Throws as `framesOf` does. */
export async function* eventsOf(body: ReadableStream<Uint8Array>, silence = 45_000): AsyncGenerator<Event, void, void> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const lines = new Lines();
  let name = "message";
  let id: string | undefined;
  let data: string[] = [];
  let size = 0;
  try {
    for (;;) {
      const { value, done } = await withSilence(reader.read(), silence);
      const text = done ? decoder.decode() : decoder.decode(value, { stream: true });
      for (const line of lines.take(text)) {
        size += line.length;
        if (size > EVENT_LIMIT) throw new Error(`an event is longer than ${EVENT_LIMIT} characters`);
        if (line === "") {
          const event = data.length > 0 ? { name, id, data: data.join("\n") } : undefined;
          name = "message";
          id = undefined;
          data = [];
          size = 0;
          if (event) yield event;
          continue;
        }
        const colon = line.indexOf(":");
        const field = colon < 0 ? line : line.slice(0, colon);
        const content = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (field === "event") name = content;
        else if (field === "id") id = content;
        else if (field === "data") data.push(content);
      }
      if (lines.length > EVENT_LIMIT) throw new Error(`a line is longer than ${EVENT_LIMIT} characters`);
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/** Whole lines of a text that comes in pieces; CR, LF and CRLF end one. */
class Lines {
  #rest = "";
  #afterCr = false;

  get length(): number {
    return this.#rest.length;
  }

  *take(text: string): Generator<string> {
    if (text === "") return;
    let from = this.#afterCr && text.startsWith("\n") ? 1 : 0;
    this.#afterCr = false;
    for (let at = from; at < text.length; at += 1) {
      const code = text.charCodeAt(at);
      if (code !== 10 && code !== 13) continue;
      const line = this.#rest + text.slice(from, at);
      this.#rest = "";
      if (code === 13) {
        if (at + 1 === text.length) this.#afterCr = true;
        else if (text.charCodeAt(at + 1) === 10) at += 1;
      }
      from = at + 1;
      yield line;
    }
    this.#rest += text.slice(from);
  }
}

function frameOf(event: string, data: string): Frame | undefined {
  switch (event) {
    case "chunk": {
      const { sequence, chunk } = JSON.parse(data);
      if (!Number.isSafeInteger(sequence) || typeof chunk?.type !== "string") throw new Error("a chunk cannot be read");
      return { kind: "chunk", sequence, chunk };
    }
    case "caught-up":
      return { kind: "caught_up", sequence: JSON.parse(data).sequence };
    case "end":
      return { kind: "end", end: JSON.parse(data) };
    case "error":
    case "fail":
      return { kind: "error", error: { code: "INTERNAL", recoverable: false, ...JSON.parse(data) } };
    case "truncated":
      return { kind: "error", error: { error: "The log no longer holds this.", ...JSON.parse(data), code: "TRUNCATED", recoverable: false } };
    default:
      return undefined;
  }
}

/** What was waited for, or an error once nothing has come for too long. */
function withSilence<T>(next: Promise<T>, milliseconds: number): Promise<T> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`nothing came for ${milliseconds} ms`)), milliseconds);
    next.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}
