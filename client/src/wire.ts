// What crosses the wire, as far as an observer reads it.

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

/** One operation of a JSON patch (RFC 6902). */
export interface PatchOperation {
  op: string;
  path: string;
  from?: string;
  value?: Json;
}

/** A chunk as it came; fields that are not named here are kept. */
export interface Chunk {
  type: string;
  agentId: string;
  [field: string]: Json | undefined;
}

/** The answer of `/snapshot`. A `streamSequence` of -1 means: no position. */
export interface Snapshot {
  sessionId: string;
  streamId: string;
  state: Json;
  streamSequence: number;
  oldestRetainedSequence: number;
  stepCount: number;
  checkpointId?: string;
  patchOrdinal?: number;
  projection?: string;
}

/** The data of an `end` event. */
export interface EndFrame {
  runId?: string;
  status: "completed" | "paused" | "interrupted";
  output?: Json;
  state?: Json;
  usage?: Json;
}

/** The data of an `error` event. */
export interface ErrorFrame {
  runId?: string;
  code: string;
  error: string;
  detail?: string;
  recoverable: boolean;
  floor?: number;
  streamId?: string;
}

/** The stream that is read: whose it is, and its id. */
export interface Reading {
  session: string;
  stream: string;
}

/** A session in the answer of the tree route, as far as a follower reads it. */
export interface TreeNode {
  sessionId: string;
  agentType: string;
  /** Absent where it is not known. */
  status?: string;
  toolCallId?: string;
  remote?: boolean;
  children?: TreeNode[];
}
