// Server-sent events, cut anywhere: the decoder of a stream's frames.

import { SourceError } from "./source.ts";
import type { Chunk, EndFrame, ErrorFrame } from "./wire.ts";

/** One event of `/sse`. */
export type Frame =
  | { kind: "chunk"; sequence: number; chunk: Chunk }
  | { kind: "caught_up"; sequence: number }
  | { kind: "end"; end: EndFrame }
  | { kind: "error"; error: ErrorFrame };

/** The largest event that is taken, in bytes (8 MiB): what Rust's readers take too. */
const EVENT_LIMIT = 8 * 1024 * 1024;

/** One event as it stands in a body. */
export interface Event {
  name: string;
  id: string | undefined;
  data: string;
}

/**
 * The frames of a body, one after the other. Events and fields of unknown names are skipped. It ends after a terminal
 * frame. A body that ends without one, or that cannot be read, or that says nothing (not even a comment) for `silence`
 * milliseconds, throws: then the stream was dropped, and did not end.
 *
 * @throws {SourceError} `event_too_large`, not retryable, at an event of more than 8 MiB: it would only come again.
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
      for (const { line, bytes } of lines.take(text)) {
        if (size + bytes > EVENT_LIMIT) throw tooLarge();
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
        else if (field === "data") {
          size += bytes - (line.length - content.length) + (data.length > 0 ? 1 : 0);
          data.push(content);
        }
      }
      if (size + lines.bytes > EVENT_LIMIT) throw tooLarge();
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/** Whole lines of a text that comes in pieces; CR, LF and CRLF end one. */
class Lines {
  #rest = "";
  /** Bytes of the line that is not whole yet. */
  bytes = 0;
  #afterCr = false;

  *take(text: string): Generator<{ line: string; bytes: number }> {
    if (text === "") return;
    let from = this.#afterCr && text.startsWith("\n") ? 1 : 0;
    this.#afterCr = false;
    for (let at = from; at < text.length; at += 1) {
      const code = text.charCodeAt(at);
      if (code !== 10 && code !== 13) continue;
      const end = text.slice(from, at);
      const line = this.#rest + end;
      const bytes = this.bytes + bytesOf(end);
      this.#rest = "";
      this.bytes = 0;
      if (code === 13) {
        if (at + 1 === text.length) this.#afterCr = true;
        else if (text.charCodeAt(at + 1) === 10) at += 1;
      }
      from = at + 1;
      yield { line, bytes };
    }
    const rest = text.slice(from);
    this.#rest += rest;
    this.bytes += bytesOf(rest);
  }
}

/** How long a text is in UTF-8. */
function bytesOf(text: string): number {
  let bytes = text.length;
  for (let at = 0; at < text.length; at += 1) {
    const code = text.charCodeAt(at);
    // The halves of a pair are two bytes each.
    if (code >= 0x80) bytes += code < 0x800 || (code >= 0xd800 && code < 0xe000) ? 1 : 2;
  }
  return bytes;
}

function tooLarge(): SourceError {
  return new SourceError(`an event of the stream is larger than ${EVENT_LIMIT} bytes`, { code: "event_too_large", retryable: false });
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
