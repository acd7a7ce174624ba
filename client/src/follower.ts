// The packaged subscriber: it gets the baselines, attaches, follows the tree, takes new snapshots when a document wants
// one, and reconnects. It holds a document for each session of the tree, and nothing else that grows.

import { Document } from "./document.ts";
import { SourceError, type Address, type Source } from "./source.ts";
import type { Frame } from "./sse.ts";
import type { Chunk, EndFrame, ErrorFrame, Reading } from "./wire.ts";

/** How often a snapshot is tried again before the document has to wait for its next boundary. */
const SNAPSHOT_RETRIES = 4;

/** The longest wait that doubling comes to, in milliseconds. */
const LONGEST_WAIT = 10_000;

/** One session of the tree. */
export interface Node {
  readonly session: string;
  readonly agentType: string;
  /** The session that called it; the root has none. */
  readonly parent: string | undefined;
  readonly toolCallId: string | undefined;
  readonly remote: boolean;
  /** How its call ended; `undefined` while it is open. */
  outcome: "success" | "failure" | undefined;
  readonly document: Document;
}

/** What a follower tells, in order. */
export type FollowerEvent =
  /** A chunk of the stream; its `agentId` says whose. */
  | { kind: "chunk"; sequence: number; chunk: Chunk }
  /** A document has another state or status. */
  | { kind: "document"; node: Node }
  /** A session was announced. */
  | { kind: "node"; node: Node }
  /** The replay is done. */
  | { kind: "caught_up" }
  /** The stream was dropped and is opened again after `wait` milliseconds. */
  | { kind: "reconnecting"; error: Error; wait: number }
  /** A snapshot could not be read; the document stays as it is until its next boundary. */
  | { kind: "no_snapshot"; node: Node; error: Error }
  /** The run has ended; nothing follows. */
  | { kind: "end"; end: EndFrame }
  | { kind: "failed"; error: ErrorFrame };

export interface FollowerOptions {
  /** Where the replay begins: with the whole log that is kept, or at the baseline. Default: `"log"`. */
  from?: "log" | "baseline";
  /** Milliseconds before the stream is opened again; doubled up to 10 s. Default: 500. */
  backoff?: number;
  /** Snapshots that are read at once. Default: 4. */
  snapshotsAtOnce?: number;
}

export class Follower {
  readonly root: Node;
  readonly #source: Source;
  readonly #options: Required<FollowerOptions>;
  readonly #nodes = new Map<string, Node>();
  #streamId: string | undefined;
  #cursor = -1;
  #reading = new Map<Node, Promise<() => FollowerEvent>>();

  constructor(source: Source, { session, agentType }: Address, options: FollowerOptions = {}) {
    this.#source = source;
    this.#options = { from: "log", backoff: 500, snapshotsAtOnce: 4, ...options };
    this.root = this.#add({ session, agentType, parent: undefined, toolCallId: undefined, remote: false });
  }

  /** The sessions of the tree, parents before children. */
  get nodes(): Node[] {
    return [...this.#nodes.values()];
  }

  node(session: string): Node | undefined {
    return this.#nodes.get(session);
  }

  /**
   * Follows until the run has ended or `signal` aborts.
   *
   * @throws {SourceError} when the session is refused for good: unknown, or no credentials.
   */
  async *follow(signal: AbortSignal): AsyncGenerator<FollowerEvent, void, void> {
    yield* this.#baseline(signal);
    let failures = 0;
    while (!signal.aborted) {
      const attached = new AbortController();
      const both = AbortSignal.any([signal, attached.signal]);
      try {
        const { streamId, frames } = await this.#source.stream(this.root, this.#cursor, this.#streamId, both);
        this.#streamId = streamId;
        for await (const event of this.#frames(frames, both)) {
          failures = 0;
          if (event === "reattach") break;
          yield event;
          if (event.kind === "end" || event.kind === "failed") return;
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof SourceError && !error.retryable) throw error;
        const told = error instanceof Error ? error : new Error(String(error));
        const wait = this.#wait(failures, error);
        failures += 1;
        yield { kind: "reconnecting", error: told, wait };
        await sleep(wait, signal);
      } finally {
        attached.abort();
      }
    }
  }

  /** The first baseline. Without it there is nothing to follow. */
  async *#baseline(signal: AbortSignal): AsyncGenerator<FollowerEvent, void, void> {
    const { document } = this.root;
    document.takeRequest();
    const { snapshot, ended } = await this.#snapshot(this.root, signal);
    document.baseline(snapshot, ended);
    this.#streamId = snapshot.streamId;
    // A document leaves alone what its baseline covers, so the log may be read from its floor on.
    const floor = Math.max(snapshot.oldestRetainedSequence - 1, 0);
    this.#cursor = this.#options.from === "log" ? floor : document.attachAt;
    yield { kind: "node", node: this.root };
    yield { kind: "document", node: this.root };
  }

  /** The events of one attached stream, snapshots that arrive meanwhile included. */
  async *#frames(frames: AsyncIterable<Frame>, signal: AbortSignal): AsyncGenerator<FollowerEvent | "reattach", void, void> {
    const iterator = frames[Symbol.asyncIterator]();
    let next: Promise<IteratorResult<Frame>> | undefined;
    let last: FollowerEvent | undefined;
    try {
      for (;;) {
        this.#readSnapshots(signal);
        if (last && this.#reading.size === 0) {
          yield last;
          return;
        }
        if (!last) next ??= iterator.next();
        const arrived = await Promise.race([...(next && !last ? [next] : []), ...this.#reading.values()]);
        if (typeof arrived === "function") {
          const event = arrived();
          yield event;
          const { attachAt } = this.root.document;
          const isRoot = event.kind === "document" && event.node === this.root;
          if (!last && isRoot && attachAt >= 0 && attachAt < this.#cursor) {
            // What came while the document was stale is read again, behind the new baseline.
            this.#cursor = attachAt;
            yield "reattach";
            return;
          }
          continue;
        }
        next = undefined;
        if (arrived.done) throw new Error("the stream ended without a terminal frame");
        const frame = arrived.value;
        if (frame.kind === "error" && frame.error.recoverable) throw new Error(frame.error.error);
        if (frame.kind === "error" && frame.error.code === "TRUNCATED") {
          yield* this.#truncated(frame.error);
          yield "reattach";
          return;
        }
        for (const event of this.#take(frame)) {
          if (event.kind === "end" || event.kind === "failed") last = event;
          else yield event;
        }
      }
    } finally {
      // Not waited for: a read that is under way ends only when the caller aborts the request.
      iterator.return?.()?.catch(() => undefined);
    }
  }

  /** The cursor is not in the log any more: a new baseline, and on from what the log still holds. */
  async *#truncated(error: ErrorFrame): AsyncGenerator<FollowerEvent, void, void> {
    this.root.document.observeError(error);
    this.#streamId = undefined;
    yield { kind: "document", node: this.root };
    const signal = AbortSignal.timeout(60_000);
    this.root.document.takeRequest();
    const { snapshot, ended } = await this.#snapshot(this.root, signal);
    this.root.document.baseline(snapshot, ended);
    this.#streamId = snapshot.streamId;
    const { attachAt } = this.root.document;
    this.#cursor = attachAt >= 0 ? attachAt : -1;
    yield { kind: "document", node: this.root };
  }

  *#take(frame: Frame): Generator<FollowerEvent> {
    switch (frame.kind) {
      case "caught_up":
        return void (yield { kind: "caught_up" });
      case "end":
        this.root.document.observeEnd(frame.end);
        for (const node of this.#nodes.values()) if (node !== this.root) this.#settled(node);
        yield { kind: "document", node: this.root };
        return void (yield { kind: "end", end: frame.end });
      case "error":
        this.root.document.observeError(frame.error);
        for (const node of this.#nodes.values()) if (node !== this.root) this.#settled(node);
        yield { kind: "document", node: this.root };
        return void (yield { kind: "failed", error: frame.error });
      case "chunk":
        yield* this.#chunk(frame.sequence, frame.chunk);
    }
  }

  #settled({ document }: Node): void {
    if (document.status.kind !== "final") document.boundary();
  }

  *#chunk(sequence: number, chunk: Chunk): Generator<FollowerEvent> {
    if (sequence > this.#cursor) this.#cursor = sequence;
    yield { kind: "chunk", sequence, chunk };
    const child = chunk.subSessionId;
    if (chunk.type === "subagent_start" && typeof child === "string" && typeof chunk.subAgentType === "string" && !this.#nodes.has(child)) {
      const { agentId: parent, subAgentType: agentType, toolCallId, remote } = chunk;
      const call = typeof toolCallId === "string" ? toolCallId : undefined;
      yield { kind: "node", node: this.#add({ session: child, agentType, parent, toolCallId: call, remote: remote === true }) };
    }
    if (chunk.type === "subagent_end" && typeof child === "string") {
      const node = this.#nodes.get(child);
      if (node) node.outcome = chunk.success === true ? "success" : "failure";
    }
    const reading: Reading = { session: this.root.session, stream: this.#streamId ?? "" };
    for (const agent of new Set([chunk.agentId, child])) {
      const node = typeof agent === "string" ? this.#nodes.get(agent) : undefined;
      if (node && node.document.observe(reading, sequence, chunk) !== "nothing") yield { kind: "document", node };
    }
  }

  #add(node: Omit<Node, "document" | "outcome">): Node {
    const added: Node = { ...node, outcome: undefined, document: new Document(node.session) };
    this.#nodes.set(node.session, added);
    return added;
  }

  /** Begins to read the snapshots that are wanted, a few at once. */
  #readSnapshots(signal: AbortSignal): void {
    for (const node of this.#nodes.values()) {
      if (this.#reading.size >= this.#options.snapshotsAtOnce) return;
      if (this.#reading.has(node) || !node.document.takeRequest()) continue;
      const reading = this.#snapshot(node, signal).then(
        ({ snapshot, ended }) => (): FollowerEvent => {
          this.#reading.delete(node);
          node.document.baseline(snapshot, ended);
          return { kind: "document", node };
        },
        (error: unknown) => (): FollowerEvent => {
          this.#reading.delete(node);
          node.document.noSnapshot();
          return { kind: "no_snapshot", node, error: error instanceof Error ? error : new Error(String(error)) };
        },
      );
      this.#reading.set(node, reading);
    }
  }

  async #snapshot(node: Node, signal: AbortSignal) {
    for (let failures = 0; ; failures += 1) {
      try {
        // In this order: a session that goes on in between is read with a position.
        const ended = node.outcome !== undefined || (await this.#source.hasEnded(node, signal));
        return { snapshot: await this.#source.snapshot(node, signal), ended };
      } catch (error) {
        const mayPass = !(error instanceof SourceError) || error.retryable;
        if (!mayPass || signal.aborted || failures === SNAPSHOT_RETRIES) throw error;
        await sleep(this.#wait(failures, error), signal);
      }
    }
  }

  /** Milliseconds before the next try, after so many failures before this one. */
  #wait(failures: number, error: unknown): number {
    const asked = error instanceof SourceError ? (error.retryAfter ?? 0) : 0;
    return Math.max(Math.min(this.#options.backoff * 2 ** failures, LONGEST_WAIT), asked);
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
