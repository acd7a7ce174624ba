// The stream as the AI SDK reads it, with the package `ai` itself: a whole job of both Workers, live, late, and as a chat.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { AbstractChat, DefaultChatTransport, parseJsonEventStream, readUIMessageStream, uiMessageChunkSchema } from "ai";
import { chatTransport, chunkOf, Document } from "../../client/src/index.ts";
import { slowResearch } from "./support/documents.mjs";
import { HELD, Line } from "./support/line.mjs";
import { chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, startWorld } from "./support/world.mjs";

/** Between the writer and its planner, so that a job can be held. */
const line = new Line();
let world;
before(async () => {
  const props = { mount: "internal" };
  world = await startWorld({ extra: [line.worker("producer", { props })], producerVia: "line", outbound: line.outbound });
});
after(() => {
  line.hangUp();
  return world?.stop();
});

const address = (session, query = {}) => `${world.workers.urls.consumer}/agents/writer/ui?${new URLSearchParams({ sessionId: session, ...query })}`;

/** The package's own transport, told where the stream is. */
function defaultTransport() {
  return new DefaultChatTransport({
    headers: world.workers.authorization,
    prepareReconnectToStreamRequest: ({ id }) => ({ api: address(id), headers: world.workers.authorization }),
  });
}

/** Reads parts with the package; `watch` is told each before it is read. */
async function read(stream, watch = () => {}) {
  const parts = [];
  const errors = [];
  const seen = new TransformStream({
    async transform(part, controller) {
      parts.push(part);
      await watch(part);
      controller.enqueue(part);
    },
  });
  let message;
  for await (const next of readUIMessageStream({ stream: stream.pipeThrough(seen), onError: (error) => errors.push(error) })) message = next;
  assert.deepEqual(errors, []);
  return { message, parts };
}

/** Attaches at a cursor and checks each part with the package's schema. */
async function attach(session, query) {
  const response = await fetch(address(session, query), { headers: world.workers.authorization });
  assert.equal(response.status, 200);
  const check = new TransformStream({
    transform(result, controller) {
      assert.ok(result.success, String(result.error));
      controller.enqueue(result.value);
    },
  });
  return read(parseJsonEventStream({ stream: response.body, schema: uiMessageChunkSchema }).pipeThrough(check));
}

const texts = ({ parts }) => parts.flatMap(({ type, text }) => (type === "text" ? [text] : [])).join("");
const data = ({ parts }, name) => parts.flatMap((part) => (part.type === `data-${name}` ? [part.data] : []));

async function begin(name, seed) {
  const { documents, topic } = slowResearch(seed);
  const session = newSession(name);
  const started = await world.writer.start({ sessionId: session, message: topic, state: { documents } });
  assert.equal(started.status, 200, started.text);
  return { session, ...started.json };
}

test("a job is a message with the text, the calls and the state of its own session, live and late", async () => {
  line.set("message-", ["start"], HELD);
  const { session, runId, streamId } = await begin("message", 71);
  const snapshot = (await world.writer.snapshot(session)).json;
  const document = new Document(session);
  document.takeRequest();
  document.baseline(snapshot, false);
  line.mend("message-");

  const late = [];
  const cursors = [];
  let patched = 0;
  const live = await read(await defaultTransport().reconnectToStream({ chatId: session }), async (part) => {
    const found = chunkOf(part);
    if (!found) return;
    if (document.observe({ session, stream: streamId }, found.sequence, found.chunk) === "patched") patched += 1;
    // Others join in the middle, at the newest that this one has read: in texts, in arguments, between calls.
    const isNew = late.length < 12 && found.sequence % 40 === 0;
    if (isNew) cursors.push(found.sequence);
    if (isNew) late.push(attach(session, { fromSequence: found.sequence, discard: "reset" }));
  });
  assert.ok(late.length >= 3, `${late.length} joined late`);

  const { events } = await world.writer.read(session, { fromSequence: 0 });
  const chunks = chunksOf(events);
  const own = chunks.filter(({ chunk }) => chunk.agentId === session);
  const { message } = live;
  assert.equal(message.id, runId);
  assert.equal(message.role, "assistant");
  assert.equal(message.metadata.status, "completed");
  assert.equal(message.metadata.streamId, streamId);
  assert.deepEqual(message.metadata.usage, terminalOf(events).data.usage);
  assert.equal(texts(message), ofType(own, "text_delta").map(({ chunk }) => chunk.delta).join(""));
  assert.ok(texts(message).length > 100, "the writer wrote");

  const calls = message.parts.filter(({ type }) => type.startsWith("tool-"));
  for (const { chunk: call } of ofType(own, "tool_start")) {
    const part = calls.find(({ toolCallId }) => toolCallId === call.toolCallId);
    const { chunk: end } = ofType(own, "tool_end").find(({ chunk }) => chunk.toolCallId === call.toolCallId);
    assert.equal(part.type, `tool-${call.toolName}`);
    assert.equal(part.state, "output-available");
    assert.deepEqual([part.input, part.output], [call.arguments, end.result]);
  }
  assert.ok(calls.some(({ type }) => type === "tool-subagent__research"));

  // The patches of the session itself, and those of its descendants with where they came from.
  const patches = data(message, "state-patch");
  assert.equal(patches.length, ofType(chunks, "state_patch").length);
  for (const { agentId, remoteSource, origin } of patches) {
    assert.equal(remoteSource === undefined, agentId === session);
    assert.equal(origin?.sessionId, agentId === session ? undefined : agentId);
  }
  assert.ok(patches.some(({ remoteSource }) => remoteSource));
  assert.ok(patched > 0, "the document was patched");
  assert.deepEqual(document.state, (await world.writer.snapshot(session)).json.state);

  // Each descendant, as it ended; what they wrote was told, and is in no text.
  const subagents = message.parts.filter(({ type }) => type === "data-subagent");
  assert.deepEqual(new Set(subagents.map(({ id }) => id)), new Set(ofType(chunks, "subagent_start").map(({ chunk }) => chunk.subSessionId)));
  for (const { data } of subagents) assert.equal(data.status, "completed");
  const foreign = live.parts.filter((part) => part.type === "data-chunk" && part.data.chunk.type === "text_delta");
  assert.equal(foreign.length, ofType(chunks, "text_delta").length - ofType(own, "text_delta").length);

  // Whoever came later has what came after, and a replay is the same message.
  for (const [at, { message: rest }] of (await Promise.all(late)).entries()) {
    const behind = ofType(own, "text_delta").filter(({ sequence }) => sequence > cursors[at]);
    assert.equal(texts(rest), behind.map(({ chunk }) => chunk.delta).join(""), `behind ${cursors[at]}`);
    assert.equal(rest.metadata.status, "completed");
  }
  assert.deepEqual((await attach(session, {})).message, message);
});

/** A chat without a framework. */
class Chat extends AbstractChat {
  constructor(init) {
    const state = {
      status: "ready",
      error: undefined,
      messages: [],
      pushMessage: (message) => state.messages.push(message),
      popMessage: () => state.messages.pop(),
      replaceMessage: (at, message) => (state.messages[at] = message),
      snapshot: (value) => structuredClone(value),
    };
    super({ ...init, state });
  }
}

describe("the client's transport", () => {
  test("makes a job a chat: started, read over a line that breaks, reloaded, gone on with", async () => {
    const { documents, topic } = slowResearch(72);
    const id = newSession("chat");
    let opened = 0;
    // Each of the first streams breaks off after some bytes.
    const shaky = async (url, init) => {
      const response = await fetch(url, init);
      if (!String(url).includes("/ui?")) return response;
      opened += 1;
      let left = opened < 6 ? 3000 * opened : Number.POSITIVE_INFINITY;
      const cut = new TransformStream({
        transform(bytes, controller) {
          controller.enqueue(bytes.slice(0, left));
          left -= bytes.length;
          if (left <= 0) controller.terminate();
        },
      });
      return new Response(response.body.pipeThrough(cut), response);
    };
    const options = { agentType: "writer", origin: world.workers.urls.consumer, headers: () => world.workers.authorization, backoff: 0 };
    const chat = new Chat({ id, transport: chatTransport({ ...options, fetch: shaky }) });
    const reloaded = new Chat({ id, transport: chatTransport({ ...options, reconnect: "always" }) });
    await chat.sendMessage({ text: topic }, { body: { state: { documents } } });
    assert.deepEqual([chat.status, chat.error], ["ready", undefined]);
    assert.ok(opened >= 6, `${opened} streams`);
    await reloaded.resumeStream();
    assert.deepEqual(reloaded.messages, chat.messages.slice(1));
    const [, first] = chat.messages;
    assert.equal(first.metadata.status, "completed");
    assert.deepEqual((await attach(id, { discard: "reset" })).message, first);

    await chat.sendMessage({ text: "What else is there?" });
    assert.deepEqual([chat.status, chat.error], ["ready", undefined]);
    assert.deepEqual(chat.messages.map(({ role }) => role), ["user", "assistant", "user", "assistant"]);
    assert.notEqual(chat.messages[3].id, first.id);
  });
});

describe("what is asked for", () => {
  test("is refused without the key, and where a mount does not serve it", async () => {
    const { session } = await begin("refused", 73);
    assert.equal((await fetch(address(session))).status, 401);
    for (const mount of [world.planner, world.raw]) {
      const refused = await mount.get("ui", { sessionId: session });
      assert.deepEqual([refused.status, refused.json.code], [404, "FEATURE_UNAVAILABLE"]);
    }
    assert.equal((await world.writer.abort(session)).status, 200);
  });

  test("begins at once, and says which stream it is", async () => {
    line.set("headers-", ["start"], HELD);
    const { session, streamId } = await begin("headers", 74);
    const response = await fetch(address(session), { headers: world.workers.authorization });
    assert.equal(response.headers.get("x-vercel-ai-ui-message-stream"), "v1");
    assert.match(response.headers.get("content-type"), /^text\/event-stream\b/);
    assert.equal(response.headers.get("cache-control"), "no-cache, no-transform");
    assert.equal(response.headers.get("x-remote-agents-stream"), streamId);
    const reader = response.body.getReader();
    assert.match(Buffer.from((await reader.read()).value).toString(), /^:[^\n]*\n\n/);
    assert.equal((await world.writer.status(session)).json.status, "running");
    line.mend("headers-");
    await reader.cancel();
    assert.equal((await world.writer.abort(session)).status, 200);
  });
});
