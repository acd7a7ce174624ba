// The observer of remote agents for browsers and Node: what `src/reconstruct/` is for Rust.

export { Document, type Heard, type Stale, type Status } from "./document.ts";
export { PatchFilter, type Unalignable, type Verdict } from "./filter.ts";
export { applyPatch, PatchError } from "./patch.ts";
export type { Chunk, EndFrame, ErrorFrame, Json, PatchOperation, Reading, Snapshot } from "./wire.ts";
