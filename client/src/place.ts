// Where a chunk stands in the stream of the session that emitted it. A stamp that does not fit gives no place, and what
// has no place is never applied.

import type { Chunk, Json, Reading } from "./wire.ts";

/** A place in the emitting session's own stream. */
export interface Place {
  stream: string;
  sequence: number;
  /** Whether the chunk came through another session's log, where it may stand again later. */
  forwarded: boolean;
}

export function placeOf(reading: Reading, sequence: number, chunk: Chunk): Place | undefined {
  const agent = chunk.agentId;
  if (!Object.hasOwn(chunk, "remoteSource")) {
    const own = agent === reading.session && !Object.hasOwn(chunk, "origin");
    return own ? { stream: reading.stream, sequence, forwarded: false } : undefined;
  }
  const stamp = Object.hasOwn(chunk, "origin")
    ? read(chunk.origin, "sessionId", "sequence")
    : read(chunk.remoteSource, "childSessionId", "childSequence");
  if (stamp?.session !== agent) return undefined;
  return { stream: stamp.stream, sequence: stamp.sequence, forwarded: true };
}

function read(stamp: Json | undefined, session: string, sequence: string) {
  if (typeof stamp !== "object" || stamp === null || Array.isArray(stamp)) return undefined;
  const [who, at, stream] = [stamp[session], stamp[sequence], stamp.streamId];
  const fits = typeof who === "string" && typeof stream === "string" && typeof at === "number";
  return fits && Number.isSafeInteger(at) && at >= 0 ? { session: who, sequence: at, stream } : undefined;
}
