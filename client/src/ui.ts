// A session as the AI SDK's chat: the parts of `/ui`, and a transport for `useChat`. It needs nothing of the package
// `ai`; its types fit the package's own. A stream that breaks off is opened again and goes on behind the last part.

import { SourceError } from "./source.ts";
import { eventsOf } from "./sse.ts";
import type { Chunk, Json, PatchOperation } from "./wire.ts";

/** Where a chunk of a sub-agent stood in its own stream and in the one that was read. */
interface Stamps {
  agentId: string;
  agentType?: string;
  sequence: number;
  step?: number;
  timestamp?: number;
  remoteSource?: { childSessionId: string; childSequence: number; streamId: string };
  origin?: { sessionId: string; streamId: string; sequence: number };
}

/** A change of the state of the session `agentId`. Drop what is not of the document that you maintain. */
export interface StatePatchPartData extends Stamps {
  patches: PatchOperation[];
  patchOrdinal?: number;
  patchBase?: number;
}

/** What has become of a sub-agent; `agentId` is the session that called it. */
export interface SubagentPartData extends Stamps {
  subSessionId: string;
  subAgentType: string;
  toolCallId: string;
  remote?: boolean;
  status: "running" | "completed" | "failed";
  result?: Json;
  error?: string;
}

/** The data parts by name, for `UIMessage<UiMetadata, UiDataParts>`. */
export type UiDataParts = {
  "state-patch": StatePatchPartData;
  "step-committed": Stamps & { stepCount: number; checkpointId?: string; patchOrdinal?: number };
  "step-discarded": Stamps & { stepCount: number; reason: string; fromSequence: number };
  "stream-resync": Stamps & { reason: string };
  subagent: SubagentPartData;
  custom: Stamps & { eventName: string; data: Json };
  output: Stamps & { output: Json };
  /** Told, and no part of the message: a chunk without a part of its own, as `/sse` has it. */
  chunk: { sequence: number; chunk: Chunk };
  /** Told: the replay is over. */
  cursor: { sequence: number; streamId?: string };
  /** Told: the state at the end of the run, as the mount shows it. */
  state: { agentId: string; state: Json };
  /** Told: more about the `error` part that follows. */
  error: { code: string; error: string; recoverable: boolean; floor?: number; streamId?: string };
};

/** What is told of a message as a whole. */
export interface UiMetadata {
  sessionId?: string;
  streamId?: string;
  runId?: string;
  status?: "completed" | "paused" | "interrupted" | "failed";
  usage?: Json;
}

type DataPart = { [Name in keyof UiDataParts]: { type: `data-${Name}`; id?: string; data: UiDataParts[Name]; transient?: boolean } }[keyof UiDataParts];

/** One part of the stream. */
export type UiPart =
  | { type: "start"; messageId?: string; messageMetadata?: UiMetadata }
  | { type: "start-step" | "finish-step" | "reset-step" }
  | { type: "text-start" | "text-end" | "reasoning-start" | "reasoning-end"; id: string }
  | { type: "text-delta" | "reasoning-delta"; id: string; delta: string }
  | { type: "tool-input-start"; toolCallId: string; toolName: string; providerExecuted?: boolean }
  | { type: "tool-input-delta"; toolCallId: string; inputTextDelta: string }
  | { type: "tool-input-available"; toolCallId: string; toolName: string; input: unknown; providerExecuted?: boolean }
  | { type: "tool-input-error"; toolCallId: string; toolName: string; input: unknown; providerExecuted?: boolean; errorText: string }
  | { type: "tool-output-available"; toolCallId: string; output: unknown; providerExecuted?: boolean }
  | { type: "tool-output-error"; toolCallId: string; errorText: string; providerExecuted?: boolean }
  | DataPart
  | { type: "message-metadata"; messageMetadata: UiMetadata }
  | { type: "finish"; finishReason?: "stop" | "other"; messageMetadata?: UiMetadata }
  | { type: "abort"; reason?: string }
  | { type: "error"; errorText: string };

const CHUNKS = new Set(["data-state-patch", "data-step-committed", "data-step-discarded", "data-stream-resync"]);

/** The chunk that a data part was made of, for `Document.observe`; `undefined` for a part that concerns no document. */
export function chunkOf(part: { type: string; data?: unknown }): { sequence: number; chunk: Chunk } | undefined {
  if (part.type === "data-chunk") return part.data as UiDataParts["chunk"];
  if (!CHUNKS.has(part.type)) return undefined;
  const { sequence, ...fields } = part.data as Stamps & { [field: string]: Json | undefined };
  return { sequence, chunk: { ...fields, type: part.type.slice(5).replaceAll("-", "_") } as Chunk };
}

export interface ChatTransportOptions {
  agentType: string;
  /** Scheme and authority. Default: where the page comes from. */
  origin?: string;
  /** The mount's path. Default: `/agents`. */
  basePath?: string;
  /** Headers of each request, made anew for each. */
  headers?: () => Record<string, string> | Promise<Record<string, string>>;
  /** Which runs `reconnectToStream` gives: one that is under way, or also one that has ended. Default: `"running"`. */
  reconnect?: "running" | "always";
  /** What is read of an answer that is discarded: `"close"` is for versions of `ai` before 7. Default: `"reset"`. */
  discard?: "reset" | "close";
  /** How often in a row a stream is opened again without anything new. Default: 5. */
  attempts?: number;
  /** Milliseconds before it is opened again; doubled up to 10 s. Default: 500. */
  backoff?: number;
  /** Milliseconds of silence after which a stream counts as dropped. Default: 45 000. */
  silence?: number;
  fetch?: typeof fetch;
}

/** A message of a chat, as far as it is read: the text parts are what is sent. */
interface Message {
  id: string;
  role: string;
  parts: readonly { type: string; text?: string }[];
}

interface RequestOptions {
  chatId: string;
  abortSignal?: AbortSignal | undefined;
  headers?: Record<string, string> | Headers | undefined;
  body?: object | undefined;
}

/**
 * A transport for `useChat` and `Chat`. The chat's id is the session's id. The first message starts the session, with the
 * fields of the request's `body` (such as `state`); a later one resumes it. To regenerate is to continue a run that failed
 * or was stopped. Stopping a chat stops the reading, not the run.
 */
export function chatTransport(options: ChatTransportOptions) {
  const { agentType, origin = "", basePath = "/agents", headers = () => ({}), reconnect = "running", discard = "reset" } = options;
  const base = `${origin}${basePath}/${encodeURIComponent(agentType)}`;

  async function ask(path: string, { headers: more, abortSignal }: RequestOptions, init: RequestInit & { headers?: Record<string, string> } = {}): Promise<Response> {
    const all = { ...(await headers()), ...Object.fromEntries(new Headers(more)), ...init.headers };
    const signal = abortSignal ? { signal: abortSignal } : {};
    const response = await (options.fetch ?? fetch)(`${base}/${path}`, { redirect: "error", cache: "no-store", ...init, ...signal, headers: all });
    if (response.ok) return response;
    const envelope = (await response.json().catch(() => ({}))) as { code?: string; error?: string };
    throw new SourceError(envelope.error ?? `answered with ${response.status}`, { status: response.status, code: envelope.code ?? "transport_error" });
  }

  const post = (action: string, request: RequestOptions, body: object, key?: string) => {
    const isKey = key !== undefined && /^[ -~]{1,128}$/.test(key);
    const headers = { "content-type": "application/json", ...(isKey ? { "idempotency-key": key } : {}) };
    return ask(action, request, { method: "POST", headers, body: JSON.stringify(body) });
  };

  const open = (request: RequestOptions) => ask(`ui?${new URLSearchParams({ sessionId: request.chatId, discard })}`, request);

  return {
    /** What is read again begins with the run. */
    resumeStreamIsReplay: true as const,

    async sendMessages(request: RequestOptions & { trigger: "submit-message" | "regenerate-message"; messages: readonly Message[] }) {
      const { chatId: sessionId, messages, trigger } = request;
      if (trigger === "regenerate-message") {
        await post("resume", request, { sessionId, mode: "continue" });
        return streamOf(request, options, open);
      }
      const last = messages.at(-1);
      const message = (last?.parts ?? []).map(({ type, text }) => (type === "text" ? text : "")).join("");
      try {
        await post("start", request, { ...request.body, sessionId, message }, last && `start:${last.id}`);
      } catch (error) {
        const goesOn = error instanceof SourceError && (error.code === "ALREADY_RUNNING" || error.code === "ALREADY_COMPLETED");
        if (!goesOn) throw error;
        await post("resume", request, { sessionId, mode: "with_message", message }, last && `resume:${last.id}`);
      }
      return streamOf(request, options, open);
    },

    async reconnectToStream(request: RequestOptions) {
      try {
        const status = await ask(`status?${new URLSearchParams({ sessionId: request.chatId })}`, request);
        const isRunning = ((await status.json()) as { status?: string }).status === "running";
        return isRunning || reconnect === "always" ? streamOf(request, options, open) : null;
      } catch (error) {
        if (error instanceof SourceError && error.status === 404) return null;
        throw error;
      }
    },
  };
}

/** The parts of one run. */
function streamOf(request: RequestOptions, options: ChatTransportOptions, open: (request: RequestOptions) => Promise<Response>): ReadableStream<UiPart> {
  const stopped = new AbortController();
  const { abortSignal } = request;
  const signal = abortSignal ? AbortSignal.any([abortSignal, stopped.signal]) : stopped.signal;
  const parts = partsOf(() => open({ ...request, abortSignal: signal }), signal, options);
  return new ReadableStream<UiPart>({
    async pull(controller) {
      const { value, done } = await parts.next();
      if (done) controller.close();
      else controller.enqueue(value);
    },
    cancel() {
      stopped.abort();
    },
  });
}

/** The parts, over as many streams as it takes. */
async function* partsOf(open: () => Promise<Response>, signal: AbortSignal, { attempts = 5, backoff = 500, silence }: ChatTransportOptions): AsyncGenerator<UiPart, void, void> {
  let seen = -1;
  let failures = 0;
  for (;;) {
    try {
      const { body } = await open();
      if (!body) throw new SourceError("the answer has no body", {});
      const again = seen;
      for await (const { id, parts } of batchesOf(body, silence)) {
        // A stream that is opened again is a replay: what was read before is the same as it was. It is caught up anew.
        if (id !== undefined && id <= again && parts[0]?.type !== "data-cursor") continue;
        if (again >= 0 && parts.some(({ type }) => type === "start")) {
          throw new SourceError("The run that was read is no longer there to be read on.", { status: 410, code: "TRUNCATED" });
        }
        yield* parts;
        if (id === undefined) return;
        if (id > seen) failures = 0;
        seen = Math.max(seen, id);
      }
      throw new SourceError("the stream broke off", {});
    } catch (error) {
      const isFinal = error instanceof SourceError && !error.retryable;
      if (isFinal || signal.aborted || failures >= attempts) throw error;
      await sleep(Math.min(backoff * 2 ** failures, 10_000), signal);
      failures += 1;
    }
  }
}

/** The parts that belong together: those of one chunk, with its place; those of the end, without one. */
async function* batchesOf(body: ReadableStream<Uint8Array>, silence?: number): AsyncGenerator<{ id: number | undefined; parts: UiPart[] }, void, void> {
  let parts: UiPart[] = [];
  for await (const { id, data } of eventsOf(body, silence)) {
    if (data === "[DONE]") return void (yield { id: undefined, parts });
    parts.push(JSON.parse(data) as UiPart);
    if (id === undefined) continue;
    yield { id: Number(id), parts };
    parts = [];
  }
}

function sleep(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    }
    signal.addEventListener("abort", done);
  });
}
