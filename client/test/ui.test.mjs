// The UI message stream as the package `ai` reads it: the parts that `src/protocol/ui.rs` makes (`tests/vectors/ui.json`
// holds them), and the transport for its chat, over a mount that is cut wherever it can be.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { describe, test } from "node:test";
import { AbstractChat, DefaultChatTransport, parseJsonEventStream, readUIMessageStream, uiMessageChunkSchema } from "ai";
import { chatTransport, chunkOf } from "../src/index.ts";

const { cases } = JSON.parse(readFileSync(new URL("../../tests/vectors/ui.json", import.meta.url), "utf8"));

for (const vector of cases) vector.all = vector.parts.flat();

/** The bytes of `/ui` for a case: of the parts of one frame, the last has the frame's place. */
function bytesOf({ frames, parts }) {
  const events = frames.map(({ sequence, caughtUp }, at) => {
    const place = sequence ?? caughtUp?.sequence;
    const last = parts[at].length - 1;
    return parts[at].map((part, n) => `${n === last && place !== undefined ? `id: ${place}\n` : ""}data: ${JSON.stringify(part)}\n\n`);
  });
  const isDropped = frames.some(({ error }) => error?.recoverable);
  return `: open\n\n${events.flat().join("")}${isDropped ? "" : "data: [DONE]\n\n"}`;
}

function body(text, cut) {
  const bytes = new TextEncoder().encode(text);
  return new ReadableStream({
    start(controller) {
      controller.enqueue(bytes.slice(0, cut));
      controller.close();
    },
  });
}

/** What the package makes of a stream of parts: the last message, and the errors. */
async function read(stream) {
  const errors = [];
  let message;
  for await (const next of readUIMessageStream({ stream, onError: (error) => errors.push(error.message) })) message = next;
  return { message: message ?? { parts: [] }, errors };
}

/** The parts as the package's own transport parses them; one that its schema refuses fails the test. */
function parsed(bytes) {
  const check = new TransformStream({
    transform(result, controller) {
      assert.ok(result.success, String(result.error));
      controller.enqueue(result.value);
    },
  });
  return parseJsonEventStream({ stream: bytes, schema: uiMessageChunkSchema }).pipeThrough(check);
}

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

describe("the package reads", () => {
  assert.ok(cases.length > 20);
  for (const vector of cases) {
    test(vector.name + (vector.name.includes(vector.discard) ? "" : ` (${vector.discard})`), async () => {
      const { text = [], reasoning = [], tools = {}, data = [], errors } = vector.reads;
      const { message, errors: told } = await read(parsed(body(bytesOf(vector))));
      assert.deepEqual(told, errors);
      const of = (type) => message.parts.filter((part) => part.type === type).map((part) => part.text);
      assert.deepEqual(of("text"), text);
      assert.deepEqual(of("reasoning"), reasoning);
      const calls = message.parts.filter((part) => part.type.startsWith("tool-"));
      assert.deepEqual(Object.fromEntries(calls.map(({ toolCallId, state }) => [toolCallId, state])), tools);
      assert.deepEqual(message.parts.flatMap(({ type }) => (type.startsWith("data-") ? [type] : [])), data);
    });
  }
});

test("a part of a document is the chunk that it was made of", () => {
  const documents = new Set(["state_patch", "step_committed", "step_discarded", "stream_resync"]);
  let count = 0;
  for (const { frames, all, session } of cases) {
    const isFound = (chunk) => documents.has(chunk.type) || ((chunk.remoteSource || chunk.agentId !== session) && !chunk.type.startsWith("subagent_"));
    const chunks = frames.filter(({ chunk }) => chunk && isFound(chunk));
    const back = all.map(chunkOf).filter((found) => found && isFound(found.chunk));
    assert.deepEqual(back, chunks);
    count += chunks.length;
  }
  assert.ok(count > 40, String(count));
});

/** A mount with one session. `cuts` are where its streams break off, in bytes, one after the other; then they are whole. */
function mount(text, cuts = [], { status = "running", refusals = {} } = {}) {
  const requests = [];
  const left = [...cuts];
  const fetch = async (url, { method = "GET", headers, body: sent } = {}) => {
    const { pathname, searchParams } = new URL(url);
    const action = pathname.split("/").at(-1);
    requests.push({ method, action, query: Object.fromEntries(searchParams), headers, body: sent && JSON.parse(sent) });
    const refusal = refusals[action]?.shift();
    if (refusal) return Response.json(refusal, { status: refusal.status });
    if (action === "status") return Response.json({ status });
    if (action !== "ui") return Response.json({});
    return new Response(body(text, left.shift()), { headers: { "content-type": "text/event-stream" } });
  };
  return { requests, options: { agentType: "writer", origin: "http://mount.test", headers: () => ({ authorization: "Bearer k" }), backoff: 0, fetch } };
}

const whole = cases[0];
const split = (parts) => [parts.filter(({ type }) => type === "data-cursor"), parts.filter(({ type }) => type !== "data-cursor")];
const message = (id, text) => ({ id, role: "user", parts: [{ type: "text", text }] });
const send = (transport, messages, more = {}) => transport.sendMessages({ trigger: "submit-message", chatId: "w-1", messageId: undefined, messages, abortSignal: undefined, ...more });

describe("the transport", () => {
  test("cut anywhere, once or twice, it gives the same parts", async () => {
    const text = bytesOf(whole);
    let cuts = 0;
    for (let cut = 0; cut < text.length; cut += 37) {
      for (const then of [[], [Math.floor((cut + text.length) / 2)], [Math.floor(cut / 2)]]) {
        const { options, requests } = mount(text, [cut, ...then]);
        const parts = await all(await send(chatTransport(options), [message("m-1", "Do it.")]));
        const [cursors, others] = split(parts);
        assert.deepEqual(others, split(whole.all)[1], `cut at ${cut}, then ${then}`);
        assert.ok(cursors.length >= 1, "it is told when it is caught up");
        assert.equal(requests.filter(({ action }) => action === "ui").length, 2 + then.length);
        cuts += 1;
      }
    }
    assert.ok(cuts > 200, String(cuts));
  });

  test("a stream that says itself that it was dropped is opened again", async () => {
    const dropped = cases.find(({ name }) => name.startsWith("a dropped stream"));
    const texts = [bytesOf(dropped), bytesOf(whole)];
    const { options } = mount("");
    const fetch = (url, init) => (new URL(url).pathname.endsWith("/ui") ? Promise.resolve(new Response(body(texts.shift()))) : options.fetch(url, init));
    const parts = await all(await send(chatTransport({ ...options, fetch }), [message("m-1", "Do it.")]));
    assert.ok(!parts.some(({ type }) => type === "error"));
    assert.equal(texts.length, 0);
  });

  test("the first message starts the session, with what the request adds; a later one resumes it", async () => {
    const running = { status: 409, code: "ALREADY_COMPLETED", error: "The session has ended." };
    const { options, requests } = mount(bytesOf(whole), [], { refusals: { start: [undefined, running] } });
    const transport = chatTransport(options);
    await all(await send(transport, [message("m-1", "Do it.")], { body: { state: { n: 1 } }, headers: { "x-more": "1" } }));
    await all(await send(transport, [message("m-1", "Do it."), message("a", "Done."), message("m-2", "Again.")]));
    await all(await send(transport, [], { trigger: "regenerate-message" }));
    const posts = requests.filter(({ method }) => method === "POST");
    assert.deepEqual(
      posts.map(({ action, headers, body }) => [action, headers["idempotency-key"], body]),
      [
        ["start", "start:m-1", { sessionId: "w-1", message: "Do it.", state: { n: 1 } }],
        ["start", "start:m-2", { sessionId: "w-1", message: "Again." }],
        ["resume", "resume:m-2", { sessionId: "w-1", mode: "with_message", message: "Again." }],
        ["resume", undefined, { sessionId: "w-1", mode: "continue" }],
      ],
    );
    for (const { headers } of requests) assert.equal(headers.authorization, "Bearer k");
    assert.equal(requests[0].headers["x-more"], "1");
    assert.equal(requests[1].query.discard, "reset");
  });

  test("a refusal is said with its sentence, and nothing is tried again", async () => {
    const refusal = { status: 401, code: "UNAUTHORIZED", error: "The credentials are missing or wrong." };
    const { options, requests } = mount("", [], { refusals: { start: [refusal], ui: [refusal] } });
    await assert.rejects(send(chatTransport(options), [message("m-1", "Do it.")]), { code: "UNAUTHORIZED", message: refusal.error });
    await assert.rejects(all(await send(chatTransport(options), [message("m-1", "Do it.")])), { message: refusal.error });
    assert.equal(requests.length, 3);
  });

  test("what breaks off without anything new is given up", async () => {
    const { options, requests } = mount(bytesOf(whole), Array(20).fill(50));
    await assert.rejects(all(await send(chatTransport({ ...options, attempts: 3 }), [message("m-1", "Do it.")])), { name: "SourceError" });
    assert.equal(requests.length, 1 + 4);
  });

  test("being caught up again is nothing new, and anything new gives it time", async () => {
    const text = bytesOf(whole);
    const caughtUp = text.indexOf("\n\n", text.indexOf("data-cursor")) + 2;
    const stuck = mount(text, Array(20).fill(caughtUp));
    await assert.rejects(all(await send(chatTransport({ ...stuck.options, attempts: 3 }), [message("m-1", "Do it.")])), { name: "SourceError" });
    assert.equal(stuck.requests.length, 1 + 4);
    const cuts = Array.from({ length: 12 }, (_, n) => Math.floor((text.length * (n + 1)) / 13));
    const slow = mount(text, cuts);
    const parts = await all(await send(chatTransport({ ...slow.options, attempts: 3 }), [message("m-1", "Do it.")]));
    assert.deepEqual(split(parts)[1], split(whole.all)[1]);
  });

  test("a run that is no longer there is not mixed with the next", async () => {
    const text = bytesOf(whole);
    const next = text.replaceAll(/id: (\d+)/g, (_, id) => `id: ${Number(id) + 100}`).replaceAll("run-1", "run-2");
    const texts = [text.slice(0, text.indexOf("Wait")), next];
    const { options } = mount("");
    const fetch = (url, init) => (new URL(url).pathname.endsWith("/ui") ? Promise.resolve(new Response(body(texts.shift()))) : options.fetch(url, init));
    const given = [];
    await assert.rejects(
      async () => {
        for await (const part of await send(chatTransport({ ...options, fetch }), [message("m-1", "Do it.")])) given.push(part);
      },
      { code: "TRUNCATED" },
    );
    assert.deepEqual(given, whole.all.slice(0, given.length));
  });

  test("a run under way is read again, one that has ended on demand, one that is not there not", async () => {
    const missing = { status: 404, code: "NOT_FOUND", error: "Not found." };
    const ended = mount(bytesOf(whole), [], { status: "completed" }).options;
    assert.equal(await chatTransport(ended).reconnectToStream({ chatId: "w-1" }), null);
    assert.deepEqual(await all(await chatTransport({ ...ended, reconnect: "always" }).reconnectToStream({ chatId: "w-1" })), whole.all);
    assert.deepEqual(await all(await chatTransport(mount(bytesOf(whole)).options).reconnectToStream({ chatId: "w-1" })), whole.all);
    assert.equal(await chatTransport(mount("", [], { refusals: { status: [missing] } }).options).reconnectToStream({ chatId: "w-1" }), null);
  });
});

/** A chat without a framework. */
class Chat extends AbstractChat {
  constructor({ messages = [], ...init }) {
    const state = {
      status: "ready",
      error: undefined,
      messages,
      pushMessage: (message) => state.messages.push(message),
      popMessage: () => state.messages.pop(),
      replaceMessage: (at, message) => (state.messages[at] = message),
      snapshot: (value) => structuredClone(value),
    };
    super({ ...init, state });
  }
}

describe("the package's chat", () => {
  test("sends, reads over a line that breaks, and is told what is no part of the message", async () => {
    const text = bytesOf(whole);
    const told = [];
    const { options } = mount(text, [text.indexOf("Done."), text.length - 30]);
    const chat = new Chat({ id: "w-1", transport: chatTransport(options), onData: (part) => told.push(part.type) });
    await chat.sendMessage({ text: "Do it." });
    assert.deepEqual([chat.status, chat.error], ["ready", undefined]);
    assert.deepEqual(chat.messages.map(({ role }) => role), ["user", "assistant"]);
    const { id, parts, metadata } = chat.messages[1];
    assert.equal(id, "run-1");
    assert.deepEqual(metadata, { sessionId: "w-1", streamId: "st-w", runId: "run-1", status: "completed", usage: { tokens: { total: 3 } } });
    assert.deepEqual(parts.filter(({ type }) => type === "text").map(({ text }) => text), whole.reads.text);
    assert.ok(told.includes("data-cursor") && told.includes("data-state"));
  });

  test("resumed, it takes the place of what it had read of the run", async () => {
    const { options } = mount(bytesOf(whole));
    for (const transport of [
      chatTransport(options),
      new DefaultChatTransport({ fetch: options.fetch, prepareReconnectToStreamRequest: ({ id }) => ({ api: `http://mount.test/agents/writer/ui?sessionId=${id}` }) }),
    ]) {
      const half = { id: "run-1", role: "assistant", parts: [{ type: "text", text: "Wai", state: "streaming" }] };
      const chat = new Chat({ id: "w-1", transport, messages: [{ id: "m-1", role: "user", parts: [] }, half] });
      await chat.resumeStream();
      assert.equal(chat.error, undefined);
      assert.equal(chat.messages.length, 2);
      assert.deepEqual(chat.messages[1].parts.filter(({ type }) => type === "text").map(({ text }) => text), whole.reads.text);
    }
  });

  test("a failed run is the chat's error, with the sentence", async () => {
    const failed = cases.find(({ name }) => name.startsWith("a failed run"));
    const { options } = mount(bytesOf(failed));
    const chat = new Chat({ id: "w-1", transport: chatTransport(options), onError: () => {} });
    await chat.sendMessage({ text: "Do it." });
    assert.deepEqual([chat.status, chat.error.message], ["error", "The model failed."]);
  });
});

test("the README's example is what is compiled", () => {
  const read = (path) => readFileSync(new URL(path, import.meta.url), "utf8");
  const [, example] = read("../README.md").match(/```ts\n(import \{ chatTransport[^]*?)```/);
  const compiled = read("types.ts");
  const blocks = example.split("\n\n").filter((block) => !/^(import|\/\/) /.test(block));
  assert.equal(blocks.length, 3);
  for (const block of blocks) assert.ok(compiled.includes(block.trim()), block);
});
