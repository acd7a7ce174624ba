// The guide's filter: which patches of a stream belong on which baseline. It holds one small record for each session that
// it was given a baseline of, and nothing for any other.

import { placeOf } from "./place.ts";
import type { Chunk, Reading, Snapshot } from "./wire.ts";

/**
 * `nested_descendant`: the patch came through a stream between, stamped in another sequence space; no snapshot mends that.
 * `unpinned_baseline`: the baseline has no position (or is of another stream); a later one with a position mends it.
 */
export type Unalignable = "nested_descendant" | "unpinned_baseline";

/**
 * `apply` it to the document of its `agentId`; `pass`: no patch, or of a session without a baseline; `known`: the baseline
 * contains it, or it was applied; `suppress`: leave the document as it is. `first`: told for the first time.
 */
export type Verdict = { kind: "apply" | "pass" | "known" } | { kind: "suppress"; why: Unalignable; first: boolean };

interface Tracked {
  stream: string;
  position: number;
  applied: number;
  nested: boolean;
  unpinnedTold: boolean;
}

export class PatchFilter {
  readonly #sessions = new Map<string, Tracked>();

  /** Sets a session's baseline. Of the session whose stream is read, attach at the baseline's own position. */
  baseline(snapshot: Snapshot): void {
    const before = this.#sessions.get(snapshot.sessionId);
    this.#sessions.set(snapshot.sessionId, {
      stream: snapshot.streamId,
      position: snapshot.streamSequence,
      applied: before?.stream === snapshot.streamId ? before.applied : 0,
      nested: before?.nested ?? false,
      unpinnedTold: false,
    });
  }

  forget(session: string): void {
    this.#sessions.delete(session);
  }

  /** Whether the chunk that was read at `sequence` is a patch to be applied. */
  judge(reading: Reading, sequence: number, chunk: Chunk): Verdict {
    const tracked = chunk.type === "state_patch" ? this.#sessions.get(chunk.agentId) : undefined;
    if (!tracked) return { kind: "pass" };
    const place = placeOf(reading, sequence, chunk);
    if (!place) {
      const first = !tracked.nested;
      tracked.nested = true;
      return { kind: "suppress", why: "nested_descendant", first };
    }
    if (tracked.position < 0 || place.stream !== tracked.stream) {
      const first = !tracked.unpinnedTold;
      tracked.unpinnedTold = true;
      return { kind: "suppress", why: "unpinned_baseline", first };
    }
    if (place.sequence <= tracked.position || (place.forwarded && place.sequence <= tracked.applied)) return { kind: "known" };
    tracked.applied = Math.max(tracked.applied, place.sequence);
    return { kind: "apply" };
  }
}
