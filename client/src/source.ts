// Where a follower reads: sessions behind a mount, over `fetch`.

import { framesOf, type Frame } from "./sse.ts";
import type { Snapshot, TreeNode } from "./wire.ts";

/** A session with its agent type, which a mount's paths need. */
export interface Address {
  session: string;
  agentType: string;
}

interface SourceErrorFields {
  status?: number;
  code?: string;
  retryAfter?: number | undefined;
  retryable?: boolean;
}

/** A reading that was refused or did not come, or whose answer cannot be taken (`event_too_large`). */
export class SourceError extends Error {
  override name = "SourceError";
  readonly status: number;
  readonly code: string;
  /** Whether the same reading may be answered later. */
  readonly retryable: boolean;
  /** When, in milliseconds from now, if the other side said so. */
  readonly retryAfter: number | undefined;

  constructor(message: string, { status = 0, code = "transport_error", retryAfter, retryable }: SourceErrorFields) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryable = retryable ?? (status === 0 || status === 429 || status >= 500);
    this.retryAfter = retryAfter;
  }
}

/** What a follower needs. */
export interface Source {
  /** Opens a session's stream behind `from`, exclusive; -1 begins at the present run. */
  stream(address: Address, from: number, streamId: string | undefined, signal: AbortSignal): Promise<{ streamId: string; frames: AsyncIterable<Frame> }>;
  /** Reads the snapshot of a session: the followed one or a descendant. */
  snapshot(address: Address, signal: AbortSignal): Promise<Snapshot>;
  /** Whether a session has completed or failed; `undefined` where nobody tells, and then the end of its call counts. Asked before a snapshot without a position is believed to be the last, and again behind one. */
  hasEnded(address: Address, signal: AbortSignal): Promise<boolean | undefined>;
  /** Reads the tree below and including the followed session, for what its log no longer announces. */
  tree?(address: Address, signal: AbortSignal): Promise<TreeNode>;
}

export interface HttpSourceOptions {
  /** Scheme and authority, e.g. `https://writer.example.com`. Default: where the page comes from. */
  origin?: string;
  /** The mount's path. Default: `/agents`. */
  basePath?: string;
  /** Headers of each request, made anew for each. */
  headers?: () => Record<string, string> | Promise<Record<string, string>>;
  /** The path that answers with a descendant's snapshot, where descendants live behind another mount. */
  childSnapshotPath?: string;
  /** Milliseconds for a reading. Default: 10 000. */
  readTimeout?: number;
  /** Milliseconds of silence after which a stream counts as dropped. Default: 45 000. */
  silence?: number;
  fetch?: typeof fetch;
}

/** A source over HTTP. `root` is the session that is followed: it alone is read at the mount when there is a proxy for others. */
export function httpSource(root: string, options: HttpSourceOptions = {}): Source {
  const { origin = "", basePath = "/agents", headers = () => ({}), childSnapshotPath, readTimeout = 10_000, silence } = options;
  const send = options.fetch ?? fetch;

  async function get(path: string, signal: AbortSignal): Promise<Response> {
    let response: Response;
    try {
      response = await send(`${origin}${path}`, { headers: await headers(), signal, redirect: "error", cache: "no-store" });
    } catch (error) {
      throw new SourceError(`no answer: ${error instanceof Error ? error.message : String(error)}`, {});
    }
    if (response.ok) return response;
    const envelope = (await response.json().catch(() => ({}))) as { code?: string; error?: string };
    const seconds = Number(response.headers.get("retry-after") ?? Number.NaN);
    throw new SourceError(envelope.error ?? `answered with ${response.status}`, {
      status: response.status,
      code: envelope.code ?? "transport_error",
      ...(Number.isFinite(seconds) ? { retryAfter: seconds * 1000 } : {}),
    });
  }

  const within = (signal: AbortSignal) => AbortSignal.any([signal, AbortSignal.timeout(readTimeout)]);
  const path = ({ agentType }: Address, action: string, query: Record<string, string>) =>
    `${basePath}/${encodeURIComponent(agentType)}/${action}?${new URLSearchParams(query)}`;

  async function json(where: string, signal: AbortSignal): Promise<unknown> {
    const response = await get(where, within(signal));
    return response.json().catch((error: unknown) => {
      throw new SourceError(`the answer cannot be read: ${String(error)}`, {});
    });
  }

  return {
    async stream(address, from, streamId, signal) {
      const query = { sessionId: address.session, fromSequence: String(from), ...(streamId === undefined ? {} : { streamId }) };
      const response = await get(path(address, "sse", query), signal);
      if (!response.body) throw new SourceError("the answer has no body", {});
      return { streamId: response.headers.get("x-remote-agents-stream") ?? streamId ?? "", frames: framesOf(response.body, silence) };
    },
    async snapshot(address, signal) {
      const proxied = childSnapshotPath !== undefined && address.session !== root;
      const query = { sessionId: address.session, agentType: address.agentType };
      const where = proxied ? `${childSnapshotPath}?${new URLSearchParams(query)}` : path(address, "snapshot", { sessionId: address.session });
      return (await json(where, signal)) as Snapshot;
    },
    async hasEnded(address, signal) {
      if (childSnapshotPath !== undefined && address.session !== root) return undefined;
      const { status } = (await json(path(address, "status", { sessionId: address.session }), signal)) as { status?: string };
      return status === "completed" || status === "failed";
    },
    async tree(address, signal) {
      return (await json(path(address, "tree", { sessionId: address.session }), signal)) as TreeNode;
    },
  };
}
