// Chat completions on loopback, streamed, whose answers a language model of this machine writes. Which tools may be called
// next is a script; what their arguments say and every other word is the model's.

import { once } from "node:events";
import { createServer } from "node:http";
import { violationsOf } from "../providers/histories.mjs";
import { choices, grounded } from "./grounded.mjs";

/** A line of prose, and nothing that looks like a call. */
const PROSE = "root ::= [^\\n<>{}\\[\\]]{20,160}";
/** Tokens of one text, and of the arguments of one call, whose grammar is done before that. */
const MOST_TEXT = 40;
const MOST_ARGUMENTS = 1500;
const BEGIN = "<tool_call>\n";
const END = "}\n</tool_call>\n";
/** How often a comment says that the endpoint lives, in milliseconds. */
const ALIVE = 10_000;

/**
 * @typedef {object} Next  What an answer may be.
 * @property {string[]} of       The model chooses one of these tools.
 * @property {number} [most]     Calls of it, each with arguments of its own where they are given; one by default.
 * @property {boolean} [speaks]  Whether the model says something before.
 *
 * @param {Awaited<ReturnType<import("./llama.mjs").loadModel>>} model
 * @param {(conversation: {tools: string[], results: (name: string) => object[]}) => Next} next
 */
export async function startEndpoint(model, next) {
  /** One entry for each answer: what was asked and said, and the usage that was told, or the error. */
  const answers = [];
  let turn = Promise.resolve();
  const server = createServer((request, response) => {
    answer(request, response).catch((error) => {
      answers.push({ error });
      response.destroy();
    });
  });

  async function answer(request, response) {
    let text = "";
    for await (const part of request) text += part;
    const asked = JSON.parse(text);
    const tokens = prompt(model, asked);
    if (tokens.length + MOST_TEXT > model.longest) return refuse(response, tokens.length);
    // The answer begins at once, also while it waits for another one.
    response.writeHead(200, { "content-type": "text/event-stream" }).flushHeaders();
    const alive = setInterval(() => response.write(": at work\n\n"), ALIVE);
    const stopped = new AbortController();
    response.on("close", () => stopped.abort());
    try {
      const done = turn.then(() => write(asked, tokens, stopped.signal, (chunk) => response.write(`data: ${JSON.stringify(chunk)}\n\n`)));
      turn = done.catch(() => {});
      answers.push(await done);
      response.end("data: [DONE]\n\n");
    } finally {
      clearInterval(alive);
    }
  }

  async function write(asked, tokens, signal, send) {
    const conversation = read(asked);
    const entry = { asked, violations: violationsOf(asked), text: "", calls: [], isCut: false };
    const name = JSON.stringify(asked.messages.slice(0, 2));
    const usage = { prompt_tokens: tokens.length, completion_tokens: 0, evaluated: 0 };
    const say = (delta, finish = null) => send({ model: asked.model, choices: [{ index: 0, delta, finish_reason: finish }] });
    /** Lets the model go on behind all that stands; what the endpoint writes itself counts as asked. */
    const goOn = async (frame, options) => {
      const framed = model.tokens(frame, { markers: true });
      tokens.push(...framed);
      const done = await model.write(name, tokens, { signal, ...options });
      tokens.push(...model.tokens(done.text));
      usage.prompt_tokens += framed.length;
      usage.completion_tokens += done.written;
      usage.evaluated += done.evaluated;
      entry.isCut ||= done.isCut && options.schema !== undefined;
      return done.text;
    };

    const { of, most = 1, speaks = false } = next(conversation);
    if (speaks) entry.text = await goOn("", { grammar: PROSE, most: MOST_TEXT, onText: (content) => say({ content }) });
    const chosen = JSON.parse(await goOn(`${BEGIN}{"name": `, { schema: { enum: of }, most: MOST_ARGUMENTS }));
    const different = Math.max(1, Math.min(most, choices(parameters(asked, chosen), conversation.said)));
    for (let index = 0; index < different; index++) {
      const id = `call_${answers.length}_${index}`;
      say({ tool_calls: [{ index, id, type: "function", function: { name: chosen, arguments: "" } }] });
      const schema = grounded(parameters(asked, chosen), conversation.said, entry.calls.map((call) => call.arguments));
      const onText = (piece) => say({ tool_calls: [{ index, function: { arguments: piece } }] });
      const frame = index === 0 ? "" : `${END}${BEGIN}{"name": ${JSON.stringify(chosen)}`;
      const written = await goOn(`${frame}, "arguments": `, { schema, most: MOST_ARGUMENTS, onText });
      entry.calls.push({ name: chosen, arguments: JSON.parse(written) });
    }
    say({}, entry.isCut ? "length" : "tool_calls");
    const { evaluated, ...told } = usage;
    told.total_tokens = told.prompt_tokens + told.completion_tokens;
    told.prompt_tokens_details = { cached_tokens: Math.max(0, told.prompt_tokens - evaluated) };
    send({ model: asked.model, choices: [], usage: told });
    return { ...entry, usage: told };
  }

  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return {
    url: `http://127.0.0.1:${server.address().port}/v1`,
    answers,
    stop() {
      server.close();
      server.closeAllConnections();
    },
  };
}

function refuse(response, tokens) {
  const error = { message: `${tokens} tokens are too many.`, type: "invalid_request_error", code: "context_length_exceeded" };
  response.writeHead(400, { "content-type": "application/json" }).end(JSON.stringify({ error }));
}

function parameters({ tools }, name) {
  return tools.find((tool) => tool.function.name === name).function.parameters;
}

/** What stands in a conversation: the names of the tools, the results of each, and all that was said, the latest first. */
function read({ messages, tools }) {
  const names = new Map(messages.flatMap(({ tool_calls: calls }) => calls ?? []).map((call) => [call.id, call.function.name]));
  const results = [];
  const said = [];
  let answered;
  for (const { role, content, tool_call_id: id } of messages) {
    if (role === "tool") {
      const value = parse(content);
      results.push({ name: names.get(id), value });
      // The results of one answer are one saying.
      if (!answered) said.unshift((answered = []));
      answered.push(value);
    } else {
      answered = undefined;
      if (role === "user") said.unshift(parse(content));
    }
  }
  const ofTool = (name) => results.filter((result) => result.name === name).map(({ value }) => value);
  return { tools: tools.map((tool) => tool.function.name), said, results: ofTool };
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** The conversation as the model was taught to read one. */
function prompt(model, { messages, tools }) {
  const described = tools.map((tool) => `- ${tool.function.name}: ${tool.function.description}`).join("\n");
  const texts = messages.map(({ role, content, tool_calls: calls = [] }) => {
    const called = calls.map((call) => `${BEGIN}{"name": "${call.function.name}", "arguments": ${call.function.arguments}${END}`);
    const system = role === "system" ? `\n\nTools:\n${described}` : "";
    return [role, `${content ?? ""}${called.join("")}${system}`];
  });
  const marked = (text) => model.tokens(text, { markers: true });
  return [...texts.flatMap(([role, text]) => [...marked(`<|im_start|>${role}\n`), ...model.tokens(text), ...marked("<|im_end|>\n")]), ...marked("<|im_start|>assistant\n")];
}
