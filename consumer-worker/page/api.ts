// What the page asks of the service besides the stream.

import type { TreeNode } from "../../client/src/index.ts";

const AGENT = "/agents/writer";
/** Milliseconds before a request is tried again, one after the other. */
const WAITS = [250, 750, 2_000];

export interface Source {
  id: string;
  title: string;
  text: string;
}

/** A message of the conversation; fields that the page does not show are left out. */
export interface Said {
  index: number;
  role: string;
  text?: string;
  toolCalls?: { name: string }[];
}

/** A page of the conversation. */
export interface Page {
  streamId: string;
  messages: Said[];
  next?: number;
}

/** How a session stands. */
export interface Standing {
  status: string;
  runId?: string;
}

/** A refusal, as the service words it. */
export class Refusal extends Error {
  readonly status: number;
  readonly code: string;

  constructor(status: number, code: string, message: string) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  readonly #key: string;

  constructor(key: string) {
    this.#key = key;
  }

  headers(): Record<string, string> {
    return { authorization: `Bearer ${this.#key}` };
  }

  start(sessionId: string, message: string, documents: Source[]): Promise<unknown> {
    const state = documents.length > 0 ? { documents } : undefined;
    return this.#post("start", { sessionId, message, state });
  }

  resume(sessionId: string, message?: string): Promise<unknown> {
    return this.#post("resume", message === undefined ? { sessionId, mode: "continue" } : { sessionId, mode: "with_message", message });
  }

  interrupt(sessionId: string): Promise<unknown> {
    return this.#post("interrupt", { sessionId, reason: "stopped by a person" });
  }

  async usage(sessionId: string): Promise<unknown> {
    const answer = await this.#send(`${AGENT}/usage?${new URLSearchParams({ sessionId })}`, {});
    return (answer as { rollup?: unknown }).rollup;
  }

  async status(sessionId: string): Promise<Standing> {
    return (await this.#send(`${AGENT}/status?${new URLSearchParams({ sessionId })}`, {})) as Standing;
  }

  /** The sessions of the tree, each with its own status. */
  async tree(sessionId: string): Promise<TreeNode> {
    return (await this.#send(`${AGENT}/tree?${new URLSearchParams({ sessionId })}`, {})) as TreeNode;
  }

  /** The messages behind `after`, as many as come at once. */
  async messages(sessionId: string, after: number): Promise<Page> {
    const query = new URLSearchParams({ sessionId, after: String(after) });
    return (await this.#send(`${AGENT}/messages?${query}`, {})) as Page;
  }

  /** The documents that the job was started with. */
  async documents(sessionId: string): Promise<Source[]> {
    const answer = await this.#send(`/api/documents?${new URLSearchParams({ sessionId })}`, {});
    return (answer as { documents?: Source[] }).documents ?? [];
  }

  /** The key opens the service, or not. */
  async check(): Promise<void> {
    await this.#send("/agents", {});
  }

  #post(action: string, body: unknown): Promise<unknown> {
    const key = crypto.randomUUID();
    return this.#send(`${AGENT}/${action}`, {
      method: "POST",
      headers: { "content-type": "application/json", "idempotency-key": key },
      body: JSON.stringify(body),
    });
  }

  /** Sends, and tries a few times more what did not come or broke off: a request that changes something has a key. */
  async #send(path: string, init: RequestInit): Promise<unknown> {
    for (const wait of WAITS) {
      try {
        return await this.#once(path, init);
      } catch (error) {
        const isRefused = error instanceof Refusal && error.status < 500 && error.status !== 429;
        if (isRefused) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
    return this.#once(path, init);
  }

  async #once(path: string, init: RequestInit): Promise<unknown> {
    const response = await fetch(path, { ...init, headers: { ...init.headers, ...this.headers() }, cache: "no-store", redirect: "error" }).catch(() => {
      throw new Error("The service cannot be reached.");
    });
    const answer = (await response.json().catch(() => undefined)) as { code?: string; error?: string } | undefined;
    if (!response.ok) throw new Refusal(response.status, answer?.code ?? "", answer?.error ?? `The service answered with ${response.status}.`);
    if (answer === undefined) throw new Error("The service's answer broke off.");
    return answer;
  }
}
