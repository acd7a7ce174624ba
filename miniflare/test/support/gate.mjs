// A model at whose switch the test is: both Workers ask it for every answer, and the agents that the test holds have none
// until it lets them go on. So what has to be seen "while it works" is there for as long as the test needs.
//
// What it answers is scripted (`miniflare/providers/research.mjs`): the report quotes what was searched.

import { agentTypeOf, researchScript } from "../../providers/research.mjs";
import { startWorld } from "./world.mjs";

export const BASE_URL = "http://model.test/v1";
/** The variables of a Worker that asks the model there. */
export const VARS = { MODEL_PROVIDER: "openai", MODEL_NAME: "gated-1", OPENAI_BASE_URL: BASE_URL, OPENAI_API_KEY: "unused" };
/** What an agent says before it is held, where the test wants to hear something of it. */
export const OPENING = "Let me see. ";
/** Characters of a piece in which the model streams. */
const PIECE = 32;

/** Both Workers behind the gate: as `startWorld`, with `gate`. */
export async function startGated(options = {}) {
  const gate = new Gate();
  const world = await startWorld({ ...options, vars: { producer: VARS, consumer: VARS }, outbound: gate.outbound });
  const stop = () => {
    gate.open();
    return world.stop();
  };
  return Object.assign(Object.create(world), { gate, stop });
}

export class Gate {
  #script = researchScript();
  #held = new Map();
  #calls = 0;

  outbound = async (request) => {
    if (!request.url.startsWith(BASE_URL)) return new Response("requests to the outside are blocked", { status: 502 });
    const asked = await request.json();
    const held = this.#held.get(agentTypeOf(asked));
    const isHeld = held !== undefined && held.which(asked);
    const answer = async () => {
      if (isHeld) await held.released;
      return piecesOf(this.#script.answer(asked), () => `call_${(this.#calls += 1)}`);
    };
    return new Response(streamed(isHeld && held.opens, answer), { headers: { "content-type": "text/event-stream" } });
  };

  /**
   * From now on, agents of this type get no answer, those alone whose request `which` is true of; with `opens` they say
   * `OPENING` and no more.
   */
  hold(agentType, { which = () => true, opens = false } = {}) {
    this.release(agentType);
    const { promise: released, resolve: release } = Promise.withResolvers();
    this.#held.set(agentType, { which, opens, released, release });
  }

  /** Agents of this type get their answers, those that wait and those that come. */
  release(agentType) {
    this.#held.get(agentType)?.release();
    this.#held.delete(agentType);
  }

  /** Nobody is held any more. */
  open() {
    for (const agentType of [...this.#held.keys()]) this.release(agentType);
  }
}

/** An answer of the script as the stream of a model: a line of it each. `nextId` names its calls. */
export function piecesOf({ content, toolCalls = [], usage }, nextId) {
  const choice = (delta, finish = null) => event({ choices: [{ index: 0, delta, finish_reason: finish }] });
  const calls = toolCalls.flatMap(({ name, arguments: text }, index) => {
    const call = (more) => choice({ tool_calls: [{ index, ...more }] });
    const start = { id: nextId(), type: "function", function: { name, arguments: "" } };
    return [call(start), ...cut(text).map((piece) => call({ function: { arguments: piece } }))];
  });
  return [
    ...cut(content ?? "").map((piece) => choice({ content: piece })),
    ...calls,
    choice({}, toolCalls.length > 0 ? "tool_calls" : "stop"),
    event({ choices: [], usage }),
    "data: [DONE]\n\n",
  ];
}

const event = (value) => `data: ${JSON.stringify(value)}\n\n`;

/** A text in pieces of whole characters. */
function cut(text) {
  const characters = [...text];
  return Array.from({ length: Math.ceil(characters.length / PIECE) }, (_, at) => characters.slice(at * PIECE, (at + 1) * PIECE).join(""));
}

/** A body that opens, if it does, and goes on once the answer is there. */
function streamed(opens, answer) {
  const encoder = new TextEncoder();
  return new ReadableStream({
    async start(controller) {
      if (opens) controller.enqueue(encoder.encode(event({ choices: [{ index: 0, delta: { content: OPENING }, finish_reason: null }] })));
      for (const piece of await answer()) controller.enqueue(encoder.encode(piece));
      controller.close();
    },
  });
}
