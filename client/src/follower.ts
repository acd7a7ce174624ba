// The packaged subscriber: it gets the baselines, attaches, follows the tree, takes new snapshots when a document wants
// one, and reconnects. It holds a document for each session of the tree, and nothing else that grows.

import { Document } from "./document.ts";
import { SourceError, type Address, type Source } from "./source.ts";
import type { Frame } from "./sse.ts";
import type { Chunk, EndFrame, ErrorFrame, Reading, Snapshot, TreeNode } from "./wire.ts";

/** Sessions of a tree that are followed at most; chunks of others are passed on all the same. */
const MOST_NODES = 1024;

/** How often a snapshot is tried again before the document has to wait for its next boundary. */
const SNAPSHOT_RETRIES = 4;

/** The longest wait that doubling comes to, in milliseconds. */
const LONGEST_WAIT = 10_000;

/** The `streamSequence` of a snapshot without a position. */
const NO_POSITION = -1;

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
  /** The session's id has begun another life: the root alone is left of the tree, and the new stream is read from what it holds. */
  | { kind: "restarted" }
  /** The replay is done. */
  | { kind: "caught_up" }
  /** The stream was dropped and is opened again after `wait` milliseconds. */
  | { kind: "reconnecting"; error: Error; wait: number }
  /** The tree could not be read: sessions announced in a part of the log that is no longer kept are missing until they are heard of. */
  | { kind: "no_tree"; error: Error }
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

/** A snapshot that was read, and whether the session had ended before. */
interface Read {
  snapshot: Snapshot;
  ended: boolean;
}

/** What comes to a follower: a frame or the loss of an attached stream, a snapshot or its failure, or the caller's abort. */
type Arrival =
  | { kind: "frame"; of: AsyncIterator<Frame>; result: IteratorResult<Frame> }
  | { kind: "dropped"; of: AsyncIterator<Frame>; error: unknown }
  | { kind: "read"; node: Node; number: number; read: Read }
  | { kind: "unread"; node: Node; number: number; error: unknown }
  | { kind: "tree"; number: number; tree: TreeNode }
  | { kind: "treeless"; number: number; error: unknown }
  | { kind: "aborted" };

export class Follower {
  readonly root: Node;
  readonly #source: Source;
  readonly #options: Required<FollowerOptions>;
  readonly #nodes = new Map<string, Node>();
  #streamId: string | undefined;
  /** The stream of the root's baselines. */
  #life: string | undefined;
  #cursor = -1;
  #failures = 0;
  /** The reads under way, each by its number: another number's arrival is of a read that no longer counts. */
  readonly #reading = new Map<Node, number>();
  #reads = 0;
  /** Whether the log may have announced sessions in what it no longer holds. */
  #wantsTree = false;
  /** The number of the tree's read under way. */
  #readingTree: number | undefined;

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
    // Snapshots are read for as long as this goes on, whatever becomes of the streams meanwhile.
    const over = new AbortController();
    const reads = AbortSignal.any([signal, over.signal]);
    const inbox = new Inbox<Arrival>();
    const aborted = () => inbox.put({ kind: "aborted" });
    signal.addEventListener("abort", aborted);
    try {
      while (!signal.aborted) {
        const attached = new AbortController();
        try {
          const both = AbortSignal.any([signal, attached.signal]);
          const { streamId, frames } = await this.#source.stream(this.root, this.#cursor, this.#streamId, both);
          this.#streamId = streamId;
          for await (const event of this.#frames(frames, inbox, reads)) {
            if (event === "reattach") break;
            yield event;
            if (event.kind === "end" || event.kind === "failed") return;
          }
        } catch (error) {
          if (signal.aborted) return;
          if (error instanceof SourceError && !error.retryable) throw error;
          const wait = this.#wait(this.#failures, error);
          this.#failures += 1;
          yield { kind: "reconnecting", error: asError(error), wait };
          await sleep(wait, signal);
        } finally {
          attached.abort();
        }
      }
    } finally {
      signal.removeEventListener("abort", aborted);
      over.abort();
      for (const node of this.#reading.keys()) this.#forgetRead(node);
    }
  }

  /** The first baseline. Without it there is nothing to follow. */
  async *#baseline(signal: AbortSignal): AsyncGenerator<FollowerEvent, void, void> {
    const { document } = this.root;
    const { snapshot, ended } = await this.#snapshot(this.root, signal);
    document.takeRequest();
    document.baseline(snapshot, ended);
    if (this.#isAnotherLife(snapshot)) yield this.#restart();
    this.#streamId = snapshot.streamId;
    this.#life = snapshot.streamId;
    this.#cursor = document.attachAt;
    if (this.#options.from === "log") {
      this.#readFromFloor(snapshot.oldestRetainedSequence);
      this.#mindHole(snapshot);
    }
    yield { kind: "node", node: this.root };
    yield { kind: "document", node: this.root };
  }

  /** The events of one attached stream, snapshots that arrive meanwhile included. */
  async *#frames(frames: AsyncIterable<Frame>, inbox: Inbox<Arrival>, reads: AbortSignal): AsyncGenerator<FollowerEvent | "reattach", void, void> {
    const iterator = frames[Symbol.asyncIterator]();
    let isAsked = false;
    let last: FollowerEvent | undefined;
    try {
      for (;;) {
        if (reads.aborted) return;
        this.#readTree(inbox, reads);
        this.#readSnapshots(inbox, reads);
        if (last && this.#reading.size === 0 && this.#readingTree === undefined) {
          yield last;
          return;
        }
        if (!last && !isAsked) {
          isAsked = true;
          iterator.next().then(
            (result) => inbox.put({ kind: "frame", of: iterator, result }),
            (error: unknown) => inbox.put({ kind: "dropped", of: iterator, error }),
          );
        }
        const arrived = await inbox.take();
        if (arrived.kind === "aborted") return;
        if (arrived.kind === "tree" || arrived.kind === "treeless") {
          if (this.#readingTree !== arrived.number) continue;
          this.#readingTree = undefined;
          if (arrived.kind === "tree") yield* this.#grown(arrived.tree);
          else yield { kind: "no_tree", error: asError(arrived.error) };
          continue;
        }
        if (arrived.kind === "read" || arrived.kind === "unread") {
          if (this.#reading.get(arrived.node) !== arrived.number) continue;
          this.#reading.delete(arrived.node);
          yield this.#arrived(arrived);
          if (arrived.kind === "unread" || arrived.node !== this.root || last) continue;
          const cursor = this.#cursor;
          const isRestarted = this.#isAnotherLife(arrived.read.snapshot);
          yield* this.#rebased(arrived.read.snapshot);
          if (isRestarted || this.#cursor < cursor) {
            yield "reattach";
            return;
          }
          continue;
        }
        // A stream that was left may still say something.
        if (arrived.of !== iterator) continue;
        isAsked = false;
        if (arrived.kind === "dropped") throw arrived.error;
        if (arrived.result.done) throw new Error("the stream ended without a terminal frame");
        const frame = arrived.result.value;
        if (frame.kind === "error" && frame.error.recoverable) throw new Error(frame.error.error);
        if (frame.kind === "error" && frame.error.code === "TRUNCATED") {
          yield* this.#truncated(frame.error, reads);
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

  #arrived(arrived: Extract<Arrival, { kind: "read" | "unread" }>): FollowerEvent {
    const { node } = arrived;
    if (arrived.kind === "read") {
      node.document.baseline(arrived.read.snapshot, arrived.read.ended);
      return { kind: "document", node };
    }
    node.document.noSnapshot();
    return { kind: "no_snapshot", node, error: asError(arrived.error) };
  }

  /** The root has a new baseline while its stream is read. */
  *#rebased(snapshot: Snapshot): Generator<FollowerEvent> {
    if (this.#isAnotherLife(snapshot)) {
      yield this.#restart();
      this.#life = this.#streamId = snapshot.streamId;
      this.#readFromFloor(snapshot.oldestRetainedSequence);
    }
    const isHoled = this.#isHoled(snapshot);
    if (this.#mindHole(snapshot)) yield { kind: "document", node: this.root };
    const { attachAt } = this.root.document;
    // What came while the document was stale is read again, behind the new baseline.
    if (!isHoled && attachAt >= 0 && attachAt < this.#cursor) this.#cursor = attachAt;
  }

  /**
   * The cursor is not in the log any more: a new baseline, and on from what the log still holds, which may announce
   * sessions. A document leaves alone what it has or what is void.
   */
  async *#truncated(error: ErrorFrame, signal: AbortSignal): AsyncGenerator<FollowerEvent, void, void> {
    const { document } = this.root;
    // One that was under way may be older than what is told here.
    this.#forgetRead(this.root);
    document.observeError(error);
    yield { kind: "document", node: this.root };
    if (this.#failures > 0) await sleep(this.#wait(this.#failures - 1, error), signal);
    this.#failures += 1;
    const { snapshot, ended } = await this.#snapshot(this.root, signal);
    document.takeRequest();
    document.baseline(snapshot, ended);
    if (this.#isAnotherLife(snapshot)) yield this.#restart();
    this.#life = this.#streamId = snapshot.streamId;
    const told = error.streamId === snapshot.streamId ? (error.floor ?? 0) : 0;
    this.#readFromFloor(Math.max(told, snapshot.oldestRetainedSequence));
    this.#mindHole(snapshot);
    yield { kind: "document", node: this.root };
  }

  #isAnotherLife({ streamId }: Snapshot): boolean {
    return this.#life !== undefined && this.#life !== streamId;
  }

  /** Nothing but the root is left of the life before; its snapshots may still come. */
  #restart(): FollowerEvent {
    for (const [session, node] of this.#nodes) {
      if (node === this.root) continue;
      this.#nodes.delete(session);
      this.#reading.delete(node);
    }
    this.#readingTree = undefined;
    return { kind: "restarted" };
  }

  /** The log is read from its first chunk that is kept; before that it may have announced sessions. */
  #readFromFloor(floor: number): void {
    this.#cursor = Math.max(floor - 1, 0);
    if (floor > 1) this.#wantsTree = true;
  }

  /** Whether the log no longer holds all that follows the root's baseline. */
  #isHoled({ oldestRetainedSequence }: Snapshot): boolean {
    const { attachAt } = this.root.document;
    return attachAt >= 0 && attachAt + 1 < oldestRetainedSequence;
  }

  /** Where it does not, ordinals tell what is missing. Without them the document waits for its next boundary. */
  #mindHole(snapshot: Snapshot): boolean {
    const { document } = this.root;
    if (snapshot.patchOrdinal !== undefined || !this.#isHoled(snapshot)) return false;
    document.observeError({ code: "TRUNCATED", error: "What follows the baseline is not in the log.", recoverable: false });
    document.takeRequest();
    document.noSnapshot();
    return true;
  }

  *#take(frame: Frame): Generator<FollowerEvent> {
    switch (frame.kind) {
      case "caught_up":
        this.#failures = 0;
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
    this.#failures = 0;
    if (sequence > this.#cursor) this.#cursor = sequence;
    yield { kind: "chunk", sequence, chunk };
    const child = chunk.subSessionId;
    const isNews = typeof child === "string" && !this.#nodes.has(child) && this.#nodes.size < MOST_NODES;
    if (chunk.type === "subagent_start" && isNews && typeof chunk.subAgentType === "string") {
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
  #readSnapshots(inbox: Inbox<Arrival>, signal: AbortSignal): void {
    for (const node of this.#nodes.values()) {
      if (this.#reading.size >= this.#options.snapshotsAtOnce) return;
      if (this.#reading.has(node) || !node.document.takeRequest()) continue;
      const number = (this.#reads += 1);
      this.#reading.set(node, number);
      this.#snapshot(node, signal).then(
        (read) => inbox.put({ kind: "read", node, number, read }),
        (error: unknown) => inbox.put({ kind: "unread", node, number, error }),
      );
    }
  }

  /** Begins to read the tree where the log is not enough. */
  #readTree(inbox: Inbox<Arrival>, signal: AbortSignal): void {
    const read = this.#source.tree?.bind(this.#source);
    if (!this.#wantsTree || !read) return;
    this.#wantsTree = false;
    const number = (this.#reads += 1);
    this.#readingTree = number;
    this.#retrying(() => read(this.root, signal), signal).then(
      (tree) => inbox.put({ kind: "tree", number, tree }),
      (error: unknown) => inbox.put({ kind: "treeless", number, error }),
    );
  }

  /** Opens a document for each session of the tree that is not followed yet, parents first. */
  *#grown({ sessionId: parent, children = [] }: TreeNode): Generator<FollowerEvent> {
    for (const child of children) {
      const { sessionId: session, agentType, toolCallId, remote, status } = child;
      if (!this.#nodes.has(session) && this.#nodes.size < MOST_NODES) {
        const node = this.#add({ session, agentType, parent, toolCallId, remote: remote === true });
        if (status === "completed" || status === "failed") node.outcome = status === "completed" ? "success" : "failure";
        node.document.boundary();
        yield { kind: "node", node };
      }
      yield* this.#grown(child);
    }
  }

  /** A read that is under way does not count any more; its document wants another. */
  #forgetRead(node: Node): void {
    if (!this.#reading.delete(node)) return;
    node.document.boundary();
    node.document.noSnapshot();
  }

  #snapshot(node: Node, signal: AbortSignal): Promise<Read> {
    return this.#retrying(async () => {
      // In this order: a session that goes on in between is read with a position. One that ends in between has none,
      // as one whose log is cut inside a step: its status is read again then, and behind an end its snapshot.
      // A call may be over before its session has ended; its end tells where nobody knows the status.
      const hasEnded = async () => (await this.#source.hasEnded(node, signal)) ?? node.outcome !== undefined;
      const ended = await hasEnded();
      const snapshot = await this.#source.snapshot(node, signal);
      if (ended || snapshot.streamSequence !== NO_POSITION || !(await hasEnded())) return { snapshot, ended };
      return { snapshot: await this.#source.snapshot(node, signal), ended: true };
    }, signal);
  }

  async #retrying<T>(read: () => Promise<T>, signal: AbortSignal): Promise<T> {
    for (let failures = 0; ; failures += 1) {
      try {
        return await read();
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

/** What has arrived, in order. Whoever waits is woken, and nothing is held of those who waited before. */
class Inbox<T> {
  readonly #arrived: T[] = [];
  #wake: (() => void) | undefined;

  put(item: T): void {
    this.#arrived.push(item);
    this.#wake?.();
  }

  /** For one reader at a time. */
  async take(): Promise<T> {
    for (;;) {
      const item = this.#arrived.shift();
      if (item !== undefined) return item;
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }
}

function asError(error: unknown): Error {
  return error instanceof Error ? error : new Error(String(error));
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
