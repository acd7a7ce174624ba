// The tree of agents, live: one card each, redrawn at most once per frame.

import type { Chunk, Follower, Json, Node as Agent, TreeNode } from "../../client/src/index.ts";
import { el, setText } from "./dom.ts";

/** How much of what an agent says is shown, in characters. */
const SHOWN_TEXT = 4_000;
const SHOWN_CALLS = 12;

interface Call {
  tool: string;
  outcome: "open" | "success" | "failure";
  error: string;
}

/** What the stream says of an agent besides its state. */
interface Said {
  text: string;
  steps: number;
  discards: number;
  /** The agent's own status, which is another thing than how its call ended. */
  run: string;
  calls: Map<string, Call>;
  before: Json;
}

export class Tree {
  readonly #root: HTMLElement;
  readonly #cards = new Map<string, Card>();
  readonly #said = new Map<string, Said>();
  #follower: Follower | undefined;
  #dirty = new Set<string>();
  #frame = 0;

  constructor(root: HTMLElement) {
    this.#root = root;
  }

  reset(follower: Follower): void {
    this.#follower = follower;
    this.#root.replaceChildren();
    this.#cards.clear();
    this.#said.clear();
  }

  node(agent: Agent): void {
    if (this.#cards.has(agent.session)) return;
    const card = new Card(agent);
    this.#cards.set(agent.session, card);
    const parent = agent.parent === undefined ? undefined : this.#cards.get(agent.parent);
    (parent?.children ?? this.#root).append(card.element);
    this.touch(agent.session);
  }

  chunk(chunk: Chunk): void {
    const said = this.#of(chunk.agentId);
    const text = (field: string) => (typeof chunk[field] === "string" ? (chunk[field] as string) : "");
    const call = said.calls.get(text("toolCallId"));
    switch (chunk.type) {
      case "run_started":
      case "run_resumed":
        said.run = "running";
        said.text = "";
        break;
      case "run_interrupted":
        said.run = "interrupted";
        break;
      case "text_delta":
        said.text = (said.text + text("delta")).slice(-SHOWN_TEXT);
        break;
      case "tool_start":
        said.calls.set(text("toolCallId"), { tool: text("toolName"), outcome: "open", error: "" });
        if (said.calls.size > SHOWN_CALLS) said.calls.delete(said.calls.keys().next().value as string);
        break;
      case "subagent_start":
        said.calls.set(text("toolCallId"), { tool: `calls ${text("subAgentType")}`, outcome: "open", error: "" });
        break;
      case "subagent_end": {
        const child = this.#of(text("subSessionId"));
        // Whether a failed call's agent failed, was stopped or is at work yet, it says itself.
        if (chunk.success === true) child.run = "completed";
        this.touch(text("subSessionId"));
        return;
      }
      case "tool_end":
        if (call) Object.assign(call, { outcome: chunk.success === true ? "success" : "failure", error: text("error") });
        break;
      case "step_committed":
        said.steps = typeof chunk.stepCount === "number" ? chunk.stepCount : said.steps + 1;
        said.text = said.text && `${said.text}\n`;
        break;
      case "step_discarded":
        said.discards += 1;
        said.text = "";
        break;
      case "output":
        said.run = "completed";
        break;
      default:
        return;
    }
    this.touch(chunk.agentId);
  }

  /** The root's run is over. */
  ended(run: "completed" | "interrupted" | "failed"): void {
    const root = this.#follower?.root.session;
    if (root === undefined) return;
    this.#of(root).run = run;
    this.touch(root);
  }

  /** What the service says of each agent; `false` while some of them still come to their end. */
  statuses({ sessionId, status, children = [] }: TreeNode): boolean {
    if (status !== undefined) this.#of(sessionId).run = status;
    this.touch(sessionId);
    return children.map((child) => this.statuses(child)).every(Boolean) && status !== "running";
  }

  touch(session: string): void {
    this.#dirty.add(session);
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      for (const name of this.#dirty) {
        const agent = this.#follower?.node(name);
        if (agent) this.#cards.get(name)?.draw(agent, this.#of(name));
      }
      this.#dirty.clear();
    });
  }

  #of(session: string): Said {
    const known = this.#said.get(session);
    if (known) return known;
    const said: Said = { text: "", steps: 0, discards: 0, run: "", calls: new Map(), before: null };
    this.#said.set(session, said);
    return said;
  }
}

class Card {
  readonly element: HTMLElement;
  readonly children = el("div", { class: "children" });
  readonly #status = el("span", { class: "pill" });
  readonly #exact = el("span", { class: "pill" });
  readonly #steps = el("span", { class: "quiet" });
  readonly #text = el("p", { class: "said" });
  readonly #calls = el("ul", { class: "calls" });
  readonly #state = el("tbody");
  readonly #details = el("details", {}, el("summary", {}, "State"), el("table", {}, this.#state));

  constructor(agent: Agent) {
    const title = el("h3", {}, agent.agentType);
    const where = agent.remote ? el("span", { class: "pill" }, "in the other service") : undefined;
    this.element = el(
      "article",
      { class: "card", "data-session": agent.session },
      el("div", { class: "bar" }, title, this.#status, this.#exact, where, el("span", { class: "spacer" }), this.#steps),
      el("div", { class: "session" }, agent.session),
      this.#text,
      this.#calls,
      this.#details,
      this.children,
    );
    // What is at the top is looked at first; the many below are opened by who wants to see them.
    this.#details.open = agent.parent === undefined || agent.remote;
  }

  draw(agent: Agent, said: Said): void {
    const isLost = agent.outcome === "failure" && (said.run === "" || said.run === "running");
    const run = isLost ? "call failed" : said.run || "waiting";
    setText(this.#status, run);
    const colours: Record<string, string> = { running: "running", completed: "good", failed: "bad", "call failed": "bad", interrupted: "warm", paused: "warm" };
    this.#status.className = `pill ${colours[run] ?? ""}`;
    const { status, state } = agent.document;
    const names = { unpinned: "state not pinned", exact: "exact", in_step: "in a step", stale: "state catching up", final: "final" };
    setText(this.#exact, status.kind === "exact" ? `exact at step ${status.step}` : names[status.kind]);
    this.#exact.className = `pill ${status.kind === "stale" || status.kind === "unpinned" ? "warm" : ""}`;
    const discards = said.discards > 0 ? `, ${said.discards} discarded` : "";
    setText(this.#steps, `${said.steps} ${said.steps === 1 ? "step" : "steps"}${discards}`);
    setText(this.#text, said.text.trim());
    this.#text.hidden = said.text.trim() === "";
    this.#text.scrollTop = this.#text.scrollHeight;
    this.#calls.replaceChildren(
      ...[...said.calls.values()].map(({ tool, outcome, error }) => el("li", {}, `${tool}: ${outcome}${error && ` (${error})`}`)),
    );
    this.#drawState(state, said);
  }

  #drawState(state: Json, said: Said): void {
    this.#details.hidden = state === null;
    if (state === said.before && this.#state.childElementCount > 0) return;
    const entries = typeof state === "object" && state !== null && !Array.isArray(state) ? Object.entries(state) : [["state", state] as [string, Json]];
    const before = said.before as { [key: string]: Json } | null;
    this.#state.replaceChildren(
      ...entries.map(([key, value]) => {
        // Patches share what they did not touch, so another value is a change.
        const isChanged = before !== null && typeof before === "object" && before[key] !== value;
        const text = typeof value === "string" ? value : JSON.stringify(value, null, 1);
        return el("tr", { class: isChanged ? "changed" : undefined }, el("th", { scope: "row" }, key), el("td", {}, el("pre", {}, text)));
      }),
    );
    said.before = state;
  }
}
