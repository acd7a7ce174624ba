// One session's state as an observer rebuilds it. A document is told baselines, chunks and ends, and says what it is:
// exact at a step, within one, stale, or final. It never guesses: what cannot be aligned makes it stale, and it asks for a
// new snapshot at once, then at the session's next boundary, one at a time.
//
// The same machine as `src/reconstruct/document.rs`; `tests/vectors/reconstruct.json` holds both to the same answers.

import { applyPatch } from "./patch.ts";
import { placeOf, type Place } from "./place.ts";
import type { Chunk, EndFrame, ErrorFrame, Json, PatchOperation, Reading, Snapshot } from "./wire.ts";

/** Why a document is stale. */
export type Stale =
  | "discarded"
  | "resync"
  | "truncated"
  | "new_stream"
  | "gap"
  | "diverged"
  | "nested_descendant"
  | "reopened";

/**
 * `unpinned`: no baseline yet, or one without a position. `exact`: equals the committed state after `step` steps.
 * `in_step`: patches of a step under way are in it. `stale`: it stands still until a snapshot comes. `final`: the last one.
 */
export type Status =
  | { kind: "unpinned" | "in_step" | "final" }
  | { kind: "exact"; step: number }
  | { kind: "stale"; reason: Stale };

/** What a chunk did to a document. */
export type Heard = "nothing" | "patched" | "status";

type Request = "idle" | "wanted" | "under_way" | "under_way_again" | "spent";

const MISSING: ReadonlySet<Stale> = new Set(["gap", "diverged", "nested_descendant"]);
const OF_ANOTHER_LIFE = new Set(["run_started", "run_resumed", "state_patch", "step_committed", "stream_resync"]);

export class Document {
  readonly session: string;
  #stream: string | undefined;
  #state: Json = null;
  #status: Status = { kind: "unpinned" };
  /** The projection that the baseline came through; `undefined` for the session's own state. */
  #projection: string | undefined;
  #ordinal: number | undefined;
  #covered = 0;
  #highest = 0;
  #read = 0;
  #voided = 0;
  /** The baseline's own position. */
  #pinned = 0;
  /** The highest place of a resync: what lies before it may be missing. */
  #missing = 0;
  /** Another stream that a chunk was read of, until a snapshot tells which is the newer. */
  #foreign: string | undefined;
  /** The stream that is known to be over. */
  #past: string | undefined;
  #ended = false;
  #request: Request = "wanted";

  /** A document without a baseline; it wants one. */
  constructor(session: string) {
    this.session = session;
  }

  /** The state; `null` before the first baseline. It is replaced, never changed in place. */
  get state(): Json {
    return this.#state;
  }

  get status(): Status {
    return this.#status;
  }

  /** Where the session's own stream is to be attached, exclusive; -1 while there is no position. */
  get attachAt(): number {
    return this.#status.kind === "unpinned" || this.#status.kind === "final" ? -1 : this.#covered;
  }

  /** Whether it wants a snapshot now. */
  get wants(): boolean {
    return this.#request === "wanted";
  }

  /** As `wants`; the snapshot counts as under way from here on: give it to `baseline`, or say `noSnapshot`. */
  takeRequest(): boolean {
    if (!this.wants) return false;
    this.#request = "under_way";
    return true;
  }

  /** A snapshot could not be taken: the next one is asked for at a boundary. */
  noSnapshot(): void {
    if (this.#request === "under_way") this.#request = "spent";
    else if (this.#request === "under_way_again") this.#request = "wanted";
  }

  /** Takes a snapshot as the new baseline. `ended`: the session was completed or failed before it was read. */
  baseline(snapshot: Snapshot, ended: boolean): void {
    if (snapshot.sessionId !== this.session) return;
    const missing = this.#status.kind === "stale" && MISSING.has(this.#status.reason);
    const again = this.#request === "under_way_again";
    this.#request = again ? "wanted" : missing ? "spent" : "idle";
    // It was read before the end came, or says the same.
    if (this.#stream === snapshot.streamId && this.#status.kind === "final") return;
    if (!again) {
      // It was asked for after the other stream's chunk was read, so it tells which is the newer.
      if (this.#foreign !== undefined && this.#foreign !== snapshot.streamId) this.#past = this.#foreign;
      this.#foreign = undefined;
    }
    if (this.#stream !== snapshot.streamId) {
      this.#past = this.#stream ?? this.#past;
      this.#stream = snapshot.streamId;
      this.#highest = 0;
      this.#read = 0;
      this.#voided = 0;
      this.#missing = 0;
    }
    this.#state = snapshot.state;
    this.#projection = snapshot.projection ?? undefined;
    this.#ordinal = snapshot.patchOrdinal;
    if (snapshot.streamSequence >= 0) {
      this.#ended = false;
      this.#pinned = snapshot.streamSequence;
      this.#covered = Math.max(snapshot.streamSequence, this.#voided);
      this.#read = this.#covered;
      this.#status = { kind: "exact", step: snapshot.stepCount };
    } else {
      // One that was under way when the end came may be older.
      this.#status = { kind: ended || (this.#ended && !again) ? "final" : "unpinned" };
    }
  }

  /** Takes a chunk in that was read at `sequence` of a stream: the session's own or an ancestor's. */
  observe(reading: Reading, sequence: number, chunk: Chunk): Heard {
    if (chunk.type === "subagent_end" && chunk.subSessionId === this.session) return this.boundary();
    if (chunk.agentId !== this.session) return "nothing";
    const place = placeOf(reading, sequence, chunk);
    if (!place) return this.#observeUnplaced(chunk);
    if (place.stream !== this.#stream) return this.#observePlaced(place, chunk);
    if (!place.forwarded) {
      if (place.sequence <= this.#read) return "nothing";
      this.#read = place.sequence;
      return this.#observePlaced(place, chunk);
    }
    if (place.sequence <= this.#highest) return "nothing";
    this.#highest = place.sequence;
    const follows = this.#status.kind === "exact" || this.#status.kind === "in_step";
    if (this.#ordinal === undefined && follows && place.sequence > this.#covered) {
      if (place.sequence > this.#read + 1) this.#stale("gap");
      else this.#read = place.sequence;
    }
    return this.#observePlaced(place, chunk);
  }

  /** Takes the `end` event of the session's own stream in. */
  observeEnd(end: EndFrame): Heard {
    if (end.status !== "completed") return this.boundary();
    this.#ended = true;
    if (end.state === undefined) return this.#ask();
    this.#state = end.state;
    this.#status = { kind: "final" };
    this.#request = "spent";
    return "status";
  }

  /** Takes an `error` event of the session's own stream in. */
  observeError(error: ErrorFrame): Heard {
    if (error.code === "TRUNCATED") return this.#trigger("truncated", 0);
    if (error.recoverable) return "nothing";
    this.#ended = true;
    return this.#ask();
  }

  /** The stream that was read is over, or the session's call is: a snapshot is asked for. */
  boundary(): Heard {
    if (this.#request === "under_way") this.#request = "under_way_again";
    else if (this.#request !== "under_way_again") this.#request = "wanted";
    return "nothing";
  }

  #observePlaced(place: Place, chunk: Chunk): Heard {
    if (place.stream !== this.#stream) {
      if (place.stream === this.#past) return "nothing";
      const isStale = this.#status.kind === "stale" && this.#status.reason === "new_stream";
      const isNews = this.#stream !== undefined && OF_ANOTHER_LIFE.has(chunk.type) && !isStale;
      if (!isNews) return "nothing";
      this.#foreign = place.stream;
      return this.#trigger("new_stream", 0);
    }
    if (this.#status.kind === "unpinned" || this.#status.kind === "final") return this.#observeUnpinned(place, chunk);
    if (place.sequence <= this.#covered) return "nothing";
    // Ordinals tell what a resync skipped. Without them, what came before it may be missing from every baseline of before it.
    const follows = this.#status.kind === "exact" || this.#status.kind === "in_step";
    const isWhole = this.#ordinal === undefined && this.#projection === undefined;
    if (isWhole && follows && this.#pinned < this.#missing) {
      if (chunk.type === "state_patch") return this.#stale("gap");
      if (chunk.type === "step_committed") {
        this.#stale("gap");
        return this.#ask();
      }
    }
    switch (chunk.type) {
      case "state_patch":
        return this.#patch(chunk);
      case "step_committed":
        return this.#committed(place, chunk);
      case "run_resumed":
        // What an entry has changed of the state, a projected stream does not tell.
        return this.#projection === undefined ? "nothing" : this.#trigger("reopened", place.sequence);
      case "step_discarded":
        // Through a projection nothing of a step is seen before its end.
        if (this.#projection !== undefined) return "nothing";
        return this.#trigger("discarded", place.sequence);
      case "stream_resync":
        this.#missing = Math.max(this.#missing, place.sequence);
        return this.#trigger("resync", place.sequence);
      default:
        return "nothing";
    }
  }

  #observeUnpinned(place: Place, { type }: Chunk): Heard {
    const runs = type === "run_started" || type === "run_resumed";
    if (runs && this.#status.kind === "final") {
      this.#ended = false;
      return this.#trigger("reopened", place.sequence);
    }
    // What led to a last state is read in every replay.
    const isStep = type === "step_committed" && this.#status.kind === "unpinned";
    return runs || isStep ? this.boundary() : "nothing";
  }

  #observeUnplaced(chunk: Chunk): Heard {
    const status = this.#status;
    if (status.kind === "unpinned" || status.kind === "final") return "nothing";
    const isPatch = chunk.type === "state_patch";
    if (isPatch && this.#ordinal !== undefined && !Object.hasOwn(chunk, "patchOrdinal")) return "nothing";
    const concerns = isPatch || chunk.type === "step_discarded" || chunk.type === "stream_resync";
    if (concerns && !(status.kind === "stale" && status.reason === "nested_descendant")) {
      this.#status = { kind: "stale", reason: "nested_descendant" };
      return "status";
    }
    return chunk.type === "step_committed" && status.kind === "stale" ? this.boundary() : "nothing";
  }

  #patch(chunk: Chunk): Heard {
    if (this.#status.kind === "stale") return "nothing";
    const { patches, patchOrdinal: ordinal, patchBase: base } = chunk;
    if (!Array.isArray(patches)) return this.#stale("diverged");
    const operations = patches as unknown as PatchOperation[];
    const numbers = this.#ordinal !== undefined;
    if (numbers && typeof ordinal !== "number") return "nothing";
    // It is of the session's own state, and a projection is another view of it.
    if (this.#projection !== undefined) return this.#stale("gap");
    if (this.#ordinal === undefined || typeof ordinal !== "number") return this.#apply(operations, undefined);
    if (ordinal <= this.#ordinal) return "nothing";
    return base === this.#ordinal ? this.#apply(operations, ordinal) : this.#stale("gap");
  }

  #apply(operations: PatchOperation[], ordinal: number | undefined): Heard {
    try {
      this.#state = applyPatch(this.#state, operations);
    } catch {
      return this.#stale("diverged");
    }
    this.#ordinal = ordinal ?? this.#ordinal;
    this.#status = { kind: "in_step" };
    return "patched";
  }

  #committed(place: Place, chunk: Chunk): Heard {
    const { stepCount, patchOrdinal } = chunk;
    if (this.#status.kind === "stale") return this.boundary();
    if (this.#request === "spent") this.#request = "idle";
    const step = typeof stepCount === "number" ? stepCount : 0;
    if (this.#projection !== undefined) {
      // Only the mount of the session itself tells what a step changed.
      if (!place.forwarded && Object.hasOwn(chunk, "projection")) return this.#live(place, chunk, step);
      // Without that, a step that changed nothing is known by its ordinal alone.
      if (typeof patchOrdinal !== "number" || patchOrdinal !== this.#ordinal) return this.#stale("gap");
    } else if (this.#ordinal !== undefined && typeof patchOrdinal === "number" && patchOrdinal !== this.#ordinal) {
      return this.#stale("gap");
    }
    this.#status = { kind: "exact", step };
    return "status";
  }

  /** A step that tells what it changed in the projection. */
  #live(place: Place, { projection, resync, patches, patchOrdinal }: Chunk, step: number): Heard {
    const told = projection === this.#projection && resync === undefined && Array.isArray(patches);
    if (!told) return this.#trigger("resync", place.sequence);
    const follows = step > 0 && this.#status.kind === "exact" && this.#status.step === step - 1;
    if (!follows) return this.#stale("gap");
    try {
      this.#state = applyPatch(this.#state, patches as unknown as PatchOperation[]);
    } catch {
      return this.#stale("diverged");
    }
    this.#ordinal = typeof patchOrdinal === "number" ? patchOrdinal : undefined;
    this.#status = { kind: "exact", step };
    return "patched";
  }

  /** A trigger voids what was applied: a snapshot is wanted at once, whatever was asked before. */
  #trigger(reason: Stale, at: number): Heard {
    // Through a projection only whole steps are applied, and a step is never void: an earlier snapshot that arrives now is
    // gone on from where it stands.
    if (this.#projection === undefined) this.#voided = Math.max(this.#voided, at);
    this.#status = { kind: "stale", reason };
    return this.#ask();
  }

  #ask(): Heard {
    this.boundary();
    return "status";
  }

  /** Something is missing: a snapshot is wanted, but not a second one before the next boundary. */
  #stale(reason: Stale): Heard {
    this.#status = { kind: "stale", reason };
    if (this.#request === "idle") this.#request = "wanted";
    return "status";
  }
}
