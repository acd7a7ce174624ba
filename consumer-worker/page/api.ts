// What the page asks of the service besides the stream.

const AGENT = "/agents/writer";

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

  async #send(path: string, init: RequestInit): Promise<unknown> {
    const response = await fetch(path, { ...init, headers: { ...init.headers, ...this.headers() }, cache: "no-store", redirect: "error" });
    const answer = (await response.json().catch(() => ({}))) as { code?: string; error?: string };
    if (!response.ok) throw new Refusal(response.status, answer.code ?? "", answer.error ?? `The service answered with ${response.status}.`);
    return answer;
  }
}
