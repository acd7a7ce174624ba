// The observer of remote agents for browsers and Node: what `src/reconstruct/` is for Rust.

export { Document, type Heard, type Stale, type Status } from "./document.ts";
export { PatchFilter, type Unalignable, type Verdict } from "./filter.ts";
export { applyPatch, PatchError } from "./patch.ts";
export type { Chunk, EndFrame, ErrorFrame, Json, PatchOperation, Reading, Snapshot, TreeNode } from "./wire.ts";
export { Follower, type FollowerEvent, type FollowerOptions, type Node } from "./follower.ts";
export { httpSource, SourceError, type Address, type HttpSourceOptions, type Source } from "./source.ts";
export { framesOf, type Frame } from "./sse.ts";
export { chatTransport, chunkOf, type ChatTransportOptions, type StatePatchPartData, type SubagentPartData, type UiDataParts, type UiMetadata, type UiPart } from "./ui.ts";
