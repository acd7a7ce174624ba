// Model providers on loopback for the tests: aimock, with scripted answers in each dialect, and beside it a server of our
// own for what aimock does not do: bytes that are cut, garbage, silence. The last message of the user names the scene.
//
// As a program it prints `{aimock, raw}` on one line and serves until its standard input ends.

import { once } from "node:events";
import { createServer, request as send } from "node:http";
import { setImmediate as turn } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { LLMock } from "@copilotkit/aimock";
import { violationsOf } from "./histories.mjs";

/** Stands where a provider could repeat a secret or a prompt; no error of a client may hold it. */
const CANARY = "canary-of-the-provider";

const CALLS = [
  { id: "call_a", name: "search", arguments: '{"query":"Größe 日本 and tides"}' },
  { id: "call_b", name: "look", arguments: '{"n":1}' },
];

const STATUSES = [400, 401, 402, 403, 404, 408, 413, 422, 429, 500, 502, 503, 504, 529];

/**
 * @param {(request: object) => object} [answer]  What aimock answers to a request, as chat completions have it, that is
 *        no scene of the suite.
 * @param {{latency?: number, chunkSize?: number}} [pace]  How such an answer streams.
 */
export async function startEndpoints(answer, pace = {}) {
  const mock = new LLMock({ port: 0, host: "127.0.0.1" });
  const usage = { prompt_tokens: 11, completion_tokens: 7, total_tokens: 18 };
  const scene = (name) => new RegExp(`^${name}$`);
  mock.onMessage(scene("text"), { content: "The sea rises twice a day.", usage }, { chunkSize: 4 });
  mock.onMessage(scene("reasoning"), { content: "Yes.", reasoning: "Let me think about tides." }, { chunkSize: 4 });
  mock.onMessage(scene("call"), { toolCalls: [CALLS[0]], usage }, { chunkSize: 3 });
  mock.onMessage(scene("calls"), { content: "Both.", toolCalls: CALLS }, { chunkSize: 5 });
  mock.onMessage(scene("long"), { content: "Half of it", finishReason: "length" });
  mock.onMessage(scene("cut"), { content: "one two three four" }, { chunkSize: 4, truncateAfterChunks: 3, latency: 20 });
  mock.onMessage(scene("overflow"), {
    error: { message: `This model's maximum context length is 10 tokens ${CANARY}`, type: "invalid_request_error", code: "context_length_exceeded" },
    status: 400,
  });
  mock.onMessage(scene("slow down"), { error: { message: CANARY, type: "rate_limit_error" }, status: 429, retryAfter: 7 });
  for (const status of STATUSES) mock.onMessage(scene(`status ${status}`), { error: { message: CANARY, type: CANARY }, status });
  if (answer) mock.on({ predicate: () => true }, answer, pace);
  const behind = await mock.start();

  const bodies = [];
  /** The conversation of a request, as its client wrote it: aimock's own journal has it translated. */
  const taken = async (request) => {
    let text = "";
    for await (const part of request) text += part;
    bodies.push(JSON.parse(text));
    return { text, body: bodies.at(-1) };
  };
  let held;
  const front = createServer(async (request, response) => {
    const { text, body } = await taken(request);
    if (held?.which(body)) await held.released;
    const { method, headers, url: path } = request;
    const asked = send(new URL(path, behind), { method, headers }, (answer) => {
      response.writeHead(answer.statusCode, answer.headers);
      response.flushHeaders();
      answer.on("data", (part) => response.write(part)).on("end", () => response.end());
      answer.on("error", () => response.destroy());
    });
    asked.on("error", () => response.destroy());
    response.on("close", () => asked.destroy());
    asked.end(text);
  });
  const raw = createServer(async (request, response) => {
    if (request.url === "/histories") {
      return response.end(JSON.stringify({ requests: bodies.length, violations: bodies.flatMap(violationsOf) }));
    }
    const { body } = await taken(request);
    const dialect = request.url.endsWith("/messages") ? ANTHROPIC : CHAT;
    const play = SCENES[lastWords(body)];
    if (!play) return response.writeHead(404).end();
    await play({ request, response, dialect, body }).catch(() => response.destroy());
  });
  for (const server of [front, raw]) {
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
  }
  const [aimock, url] = [front, raw].map((server) => `http://127.0.0.1:${server.address().port}`);
  return {
    aimock,
    raw: url,
    /** From now on, what aimock is asked waits where `which` is true of the body; what this gives lets it go on. */
    hold(which) {
      const { promise: released, resolve } = Promise.withResolvers();
      held = { which, released };
      return () => {
        held = undefined;
        resolve();
      };
    },
    /** How many conversations came in, and what is wrong with them. */
    histories: async () => (await fetch(`${url}/histories`)).json(),
    async stop() {
      for (const server of [front, raw]) {
        server.close();
        server.closeAllConnections();
      }
      await mock.stop();
    },
  };
}

function lastWords({ messages }) {
  const { content } = messages.findLast(({ role }) => role === "user");
  return typeof content === "string" ? content : content.findLast(({ type }) => type === "text").text;
}

const data = (value) => `data: ${JSON.stringify(value)}\n\n`;
const event = (value) => `event: ${value.type}\ndata: ${JSON.stringify(value)}\n\n`;

const CHAT = {
  usage: { prompt_tokens: 30, completion_tokens: 9, total_tokens: 39, prompt_tokens_details: { cached_tokens: 20 }, completion_tokens_details: { reasoning_tokens: 4 } },
  /** How an answer is held to an output: as OpenAI has it, who wants a key, or as Workers AI, which neither streams such an answer nor has tools beside. */
  holds({ response_format: format, stream, tools, tool_choice: choice }, { authorization: key }) {
    const { type, json_schema: given } = format ?? {};
    if (key) return type === "json_schema" && given.name && given.schema.properties.depth && stream ? "streamed" : undefined;
    if (format) return type === "json_schema" && given.properties?.depth && !stream && !tools ? "whole" : undefined;
    return choice === "required" && stream && tools.some((tool) => tool.function.name === "finish") ? "by tool" : undefined;
  },
  text: (content) => data({ choices: [{ index: 0, delta: { content }, finish_reason: null }] }),
  whole: (content, finish = "stop") =>
    [
      data({ choices: [{ index: 0, delta: { reasoning: "Größer 🤔" }, finish_reason: null }] }),
      CHAT.text(content),
      data({ choices: [{ index: 0, delta: {}, finish_reason: finish }] }),
      data({ choices: [], usage: CHAT.usage }),
      "data: [DONE]\n\n",
    ].join(""),
  overloaded: () => data({ error: { message: CANARY, type: "server_error", code: 503 } }),
  refusal: "content_filter",
};

/** What a schema of Anthropic's may hold here; it refuses others. */
const WORDS_OF_SCHEMA = new Set(["type", "properties", "required", "additionalProperties", "description", "title"]);

const ANTHROPIC = {
  holds({ output_config: config, stream }) {
    const { type, schema } = config?.format ?? {};
    const isSaid = (part) => Object.keys(part).every((word) => WORDS_OF_SCHEMA.has(word)) && Object.values(part.properties ?? {}).every(isSaid);
    return type === "json_schema" && schema.properties.depth && schema.additionalProperties === false && isSaid(schema) && stream ? "streamed" : undefined;
  },
  text: (text) => event({ type: "content_block_delta", index: 0, delta: { type: "text_delta", text } }),
  whole: (text, reason = "end_turn") =>
    [
      { type: "message_start", message: { usage: { input_tokens: 6, cache_creation_input_tokens: 4, cache_read_input_tokens: 20, output_tokens: 1 } } },
      { type: "content_block_start", index: 0, content_block: { type: "thinking", thinking: "" } },
      { type: "ping" },
      { type: "content_block_delta", index: 0, delta: { type: "thinking_delta", thinking: "Größer 🤔" } },
      { type: "content_block_stop", index: 0 },
      { type: "content_block_start", index: 1, content_block: { type: "text", text: "" } },
      { type: "content_block_delta", index: 1, delta: { type: "text_delta", text } },
      { type: "content_block_stop", index: 1 },
      { type: "message_delta", delta: { stop_reason: reason }, usage: { output_tokens: 9 } },
      { type: "message_stop" },
    ]
      .map(event)
      .join(""),
  overloaded: () => event({ type: "error", error: { type: "overloaded_error", message: CANARY } }),
  refusal: "refusal",
};

const WORDS = "Größe 日本語 👩‍👩‍👧‍👦 naïve";

function streaming(response) {
  response.writeHead(200, { "content-type": "text/event-stream" });
  response.socket.setNoDelay(true);
}

async function byByte(response, bytes) {
  for (const byte of bytes) {
    response.write(Buffer.from([byte]));
    await turn();
  }
  response.end();
}

const refused = (status, headers) => async ({ response }) =>
  response.writeHead(status, { "content-type": "application/json", ...headers }).end(JSON.stringify({ error: { message: CANARY } }));

/** Plays `answer` where the request asks to be held to an output in a way that its provider has, else refuses it. */
const held = (answer) => async (asked) => {
  const { request, response, dialect, body } = asked;
  const how = dialect.holds(body, request.headers);
  if (!how) return response.writeHead(400, { "content-type": "application/json" }).end(JSON.stringify({ error: { message: CANARY } }));
  await answer(asked, how);
};

const OUTPUT = { depth: 3 };

/** @type {Record<string, (play: {request: object, response: import("node:http").ServerResponse, dialect: typeof CHAT, body: object}) => Promise<unknown>>} */
const SCENES = {
  "split": async ({ response, dialect }) => {
    streaming(response);
    await byByte(response, Buffer.from(dialect.whole(WORDS)));
  },
  "split CRLF": async ({ response, dialect }) => {
    streaming(response);
    await byByte(response, Buffer.from(`: hello\n\n${dialect.whole(WORDS)}`.replaceAll("\n", "\r\n")));
  },
  "refusal": async ({ response, dialect }) => {
    streaming(response);
    response.end(dialect.whole("I", dialect.refusal));
  },
  "garbage": async ({ response, dialect }) => {
    streaming(response);
    response.end(`${dialect.text("kept")}data: {"choices": [${CANARY}\n\n${dialect.whole("lost")}`);
  },
  "garbage lines": async ({ response, dialect }) => {
    streaming(response);
    response.end(`:\n\ngarbage\nretry: 5\n\nevent: unheard\ndata: {"type":"unheard"}\n\n${dialect.whole(WORDS)}`);
  },
  "bytes": async ({ response, dialect }) => {
    streaming(response);
    response.end(Buffer.concat([Buffer.from(dialect.text("kept")), Buffer.from([0x64, 0x61, 0x74, 0x61, 0x3a, 0xff, 0xfe, 0x0a, 0x0a])]));
  },
  "page": async ({ response }) => response.writeHead(200, { "content-type": "text/html" }).end(`<html>${CANARY}</html>`),
  "cut": async ({ response, dialect }) => {
    streaming(response);
    response.write(dialect.text("kept"), () => setTimeout(() => response.destroy(), 50));
  },
  "short": async ({ response, dialect }) => {
    streaming(response);
    response.end(dialect.text("kept"));
  },
  "stall": async ({ response, dialect }) => {
    streaming(response);
    response.write(dialect.text("kept"));
  },
  "silence": async () => {},
  "late end": async ({ response, dialect }) => {
    streaming(response);
    // All but the closing event, and then nothing.
    const whole = dialect.whole(WORDS);
    response.write(whole.slice(0, whole.lastIndexOf(dialect === CHAT ? "data: [DONE]" : "event: message_stop")));
  },
  "overloaded": async ({ response, dialect }) => {
    streaming(response);
    response.end(dialect.text("kept") + dialect.overloaded());
  },
  "held": held(async ({ response, dialect }, how) => {
    if (how === "whole") return response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify({ response: OUTPUT, usage: CHAT.usage }));
    streaming(response);
    response.end(dialect.whole(JSON.stringify(OUTPUT)));
  }),
  "held with tools": held(async ({ response, dialect }, how) => {
    streaming(response);
    if (how !== "by tool") return response.end(dialect.whole(JSON.stringify(OUTPUT)));
    const call = { index: 0, id: "c3", type: "function", function: { name: "finish", arguments: JSON.stringify(OUTPUT) } };
    response.end(data({ choices: [{ index: 0, delta: { tool_calls: [call] }, finish_reason: "tool_calls" }], usage: CHAT.usage }) + "data: [DONE]\n\n");
  }),
  "held in vain": held(async ({ response }) =>
    response.writeHead(400, { "content-type": "application/json" }).end(JSON.stringify({ errors: [{ code: 5025, message: `${CANARY}: JSON Mode couldn't be met` }] })),
  ),
  "date": refused(503, { "retry-after": new Date(Date.now() + 3600_000).toUTCString() }),
  "moved": refused(302, { location: "http://127.0.0.1:9/v1" }),
};

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const endpoints = await startEndpoints();
  console.log(JSON.stringify({ aimock: endpoints.aimock, raw: endpoints.raw }));
  process.stdin.resume();
  await once(process.stdin, "end");
  process.exit(0);
}
