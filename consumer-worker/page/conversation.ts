// What a person and the agent said to each other, read from the service: a tab that comes late shows it, too.

import type { Api, Said } from "./api.ts";
import { el } from "./dom.ts";

export class Conversation {
  readonly #section: HTMLElement;
  readonly #list: HTMLElement;
  #api: Api | undefined;
  #session = "";
  #stream = "";
  #after = 0;
  /** Counts what is begun anew: what was asked for before is not drawn. */
  #beginning = 0;
  #reading: Promise<void> | undefined;
  #again = false;

  constructor(section: HTMLElement, list: HTMLElement) {
    this.#section = section;
    this.#list = list;
  }

  reset(api: Api, session: string): void {
    this.#api = api;
    this.#session = session;
    this.#clear("");
  }

  /** Reads on behind the last message that is shown; asked for meanwhile, once more afterwards. */
  async readOn(): Promise<void> {
    this.#again = true;
    this.#reading ??= this.#pages().finally(() => (this.#reading = undefined));
    await this.#reading;
  }

  async #pages(): Promise<void> {
    while (this.#again) {
      this.#again = false;
      for (let more = true; more; ) {
        const beginning = this.#beginning;
        const page = await this.#api?.messages(this.#session, this.#after);
        if (!page) return;
        if (beginning !== this.#beginning) {
          this.#again = true;
          break;
        }
        if (this.#stream !== "" && page.streamId !== this.#stream) {
          // Another life of the id: what was shown is of the one before.
          this.#clear(page.streamId);
          continue;
        }
        this.#stream = page.streamId;
        for (const message of page.messages) {
          this.#after = message.index;
          this.#draw(message);
        }
        more = page.next !== undefined;
      }
    }
  }

  #clear(stream: string): void {
    this.#stream = stream;
    this.#after = 0;
    this.#beginning += 1;
    this.#list.replaceChildren();
    this.#section.hidden = true;
  }

  #draw(message: Said): void {
    const { role, text = "", toolCalls = [] } = message;
    // What a call came back with is on the agent's card.
    if (role !== "user" && role !== "assistant") return;
    const calls = toolCalls.length > 0 && `calls ${toolCalls.map(({ name }) => name.replace(/^subagent__/, "")).join(", ")}`;
    this.#list.append(
      el(
        "li",
        { class: role },
        el("strong", {}, role === "user" ? "You" : "Writer"),
        text.trim() !== "" && el("p", { class: "said" }, text.trim()),
        calls && el("p", { class: "quiet" }, calls),
      ),
    );
    this.#section.hidden = false;
  }
}
