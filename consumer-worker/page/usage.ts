// What the tree has cost so far: read while it works, one reading at a time and not more often than it says anything new.

import type { Api } from "./api.ts";

/** The least time between two readings, in milliseconds. */
const SPACING = 2_000;

interface Rollup {
  tokens?: { total?: number };
  steps?: number;
  tools?: { calls?: number };
  subAgents?: { calls?: number };
}

export class Usage {
  readonly #api: Api;
  readonly #session: string;
  readonly #signal: AbortSignal;
  readonly #draw: (text: string) => void;
  #asked = false;
  #reading: Promise<void> | undefined;

  constructor(api: Api, session: string, signal: AbortSignal, draw: (text: string) => void) {
    this.#api = api;
    this.#session = session;
    this.#signal = signal;
    this.#draw = draw;
  }

  /** Reads soon; asked for during a reading, once more after it. A failure is told to whoever asked during the last. */
  ask(): Promise<void> {
    this.#asked = true;
    this.#reading ??= this.#read().finally(() => (this.#reading = undefined));
    return this.#reading;
  }

  async #read(): Promise<void> {
    let failure: unknown;
    while (this.#asked && !this.#signal.aborted) {
      this.#asked = false;
      failure = await this.#once();
      await new Promise((resolve) => setTimeout(resolve, SPACING));
    }
    if (failure !== undefined) throw failure;
  }

  async #once(): Promise<unknown> {
    try {
      const text = described((await this.#api.usage(this.#session)) as Rollup | undefined);
      if (!this.#signal.aborted) this.#draw(text);
      return undefined;
    } catch (error) {
      return error;
    }
  }
}

/** In words; what is not told is not said to be none. */
function described({ tokens, steps, tools, subAgents }: Rollup = {}): string {
  const counts: [number | undefined, string][] = [
    [tokens?.total, "tokens"],
    [steps, "steps"],
    [tools?.calls, "tool calls"],
    [subAgents?.calls, "calls of sub-agents"],
  ];
  const told = counts.filter(([count]) => typeof count === "number").map(([count, what]) => `${count} ${what}`);
  return told.length > 0 ? `${told.join(", ")}, in the whole tree` : "";
}
