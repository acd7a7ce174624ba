// Requests that mean harm, against the built Workers: each gets its refusal, nothing is written, and a job that is under
// way beside them comes to the end that an undisturbed one has.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { ROOT } from "../harness.mjs";
import { research } from "./support/documents.mjs";
import { startGated } from "./support/gate.mjs";
import { Mount } from "./support/http.mjs";
import { connect, sendRaw } from "./support/raw.mjs";
import { rowsOf } from "./support/rows.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { eventually, newSession, settled } from "./support/world.mjs";

const read = (name) => JSON.parse(readFileSync(join(ROOT, "tests/vectors", name), "utf8"));
const { mounts } = read("routes.json");
const table = read("hostile.json");

/** What the job beside the hostile requests is given: words that stand in no other conversation. */
const canary = research(6006);

/** Starts at once: of one session, of one session under a key, and of sessions of their own. */
const STARTS = 100;
const SESSIONS = 100;
/** Readers of one session, of which the library's default takes so many; `TRIALS=long` asks for a thousand. */
const READERS = process.env.TRIALS === "long" ? 1000 : 300;
const MAX_READERS = 256;

/** Requests of a model in a conversation that a flood began. */
const isOfTheFlood = ({ messages }) => JSON.stringify(messages).includes("What is a session?");

let world;
let undisturbed;
before(async () => {
  world = await startGated();
  undisturbed = (await theJob()).told;
});
after(() => world?.stop());

/** The job, and what it told: with `held`, its researchers wait while that is under way. */
async function theJob(held) {
  const which = ({ messages }) => JSON.stringify(messages).includes(canary.topic.split(" ")[2].slice(0, -1));
  if (held) world.gate.hold("thread-researcher", { which, opens: true });
  const id = newSession("Canary");
  const started = await world.writer.start({ sessionId: id, message: canary.topic, state: { documents: canary.documents } });
  assert.equal(started.status, 200, started.text);
  const reading = world.writer.read(id, { fromSequence: 0 });
  if (held) {
    await world.writer.read(id, { fromSequence: 0 }, { until: ({ event, data }) => event === "chunk" && data.includes('"thread-researcher"') });
    await held();
    assert.equal((await world.writer.status(id)).json.status, "running", "it was at work all the time");
    world.gate.open();
  }
  const { events } = await reading;
  const chunks = chunksOf(events);
  assertGapless(chunks);
  assertForwarding(id, chunks);
  assertPairing(chunks);
  const { data } = terminalOf(events);
  assert.equal(data.status, "completed", JSON.stringify(data));
  for (const type of ["run_resumed", "step_discarded", "stream_resync"]) assert.equal(ofType(chunks, type).length, 0, type);
  return { id, told: { output: data.output, tokens: data.usage.tokens, steps: data.usage.steps, tools: data.usage.tools } };
}

/** Does this beside the job, which takes no harm. */
async function harmless(work) {
  const { told } = await theJob(work);
  assert.deepEqual(told, undisturbed);
}

/** A mount of the tables: its address, its type, and the key that it asks for. */
function targetOf(mount) {
  const { urls, apiKey } = world.workers;
  const { worker, base, agents, gated } = mounts[mount];
  const url = mount === "internal" ? urls.caller : urls[worker];
  const headers = gated ? { authorization: `Bearer ${apiKey}` } : {};
  return { url, base, type: agents[0], headers, client: new Mount(url, base, agents[0], headers) };
}

/** A session that has completed. */
async function standing(client) {
  const id = newSession("Standing");
  const started = await client.start({ sessionId: id, message: "What is a session?" });
  assert.equal(started.status, 200, started.text);
  await settled(client, id, "completed");
  return id;
}

/** All that a mount tells of a session, and every row that is kept of it. */
async function everything(client, id) {
  const told = await Promise.all(["status", "snapshot", "usage", "tree"].map(async (route) => (await client[route](id)).text));
  const { events } = await client.read(id, { fromSequence: 0 });
  const tables = rowsOf(world.workers, id, "SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB 'ra_*' ORDER BY name");
  const rows = tables.map(({ name }) => [name, rowsOf(world.workers, id, `SELECT * FROM ${name}`)]);
  assert.ok(rows.length > 8, `${rows.length} tables`);
  return { told, log: events.map(({ raw }) => raw).join(""), rows };
}

/** A text of the table with its placeholders filled. */
function filler(target, own) {
  const { base, type } = target;
  const values = { base, BASE: base.toUpperCase(), type, TYPE: type.toUpperCase(), key: world.workers.apiKey, ...own };
  return (text) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all).replace(/\{(.)\*(\d+)\}/gu, (_, one, count) => one.repeat(count));
}

function bodyOf(body, fill) {
  if (body === undefined) return undefined;
  if ("json" in body) return fill(JSON.stringify(body.json));
  if ("text" in body) return fill(body.text);
  if ("hex" in body) return Buffer.from(body.hex, "hex");
  const { before: head, text, count, after: tail } = body.repeat;
  return fill(head) + text.repeat(count) + fill(tail);
}

/** The mount's own headers, and those of a row in the place of any of the same name. */
function headersOf(target, own, fill) {
  const names = own.map(([name]) => name.toLowerCase());
  return [...Object.entries(target.headers).filter(([name]) => !names.includes(name)), ...own.map(([name, value]) => [name, fill(value)])];
}

/** Why an answer is not the one that is expected; `undefined` where it is. */
function differs({ status, code, field, frame, lacks }, answer) {
  const terminal = /event: error\ndata: (.*)\n/.exec(answer?.text ?? "");
  const checks = [
    [status, answer?.status],
    [code ?? answer?.json?.code, answer?.json?.code],
    [field ?? answer?.json?.field, answer?.json?.field],
    [frame, frame && terminal && JSON.parse(terminal[1]).code],
    [false, lacks !== undefined && `${answer?.head}${answer?.text}`.includes(lacks)],
    [status >= 400 && "string", status >= 400 && typeof answer?.json?.error],
  ];
  const wrong = checks.filter(([expected, got]) => expected !== got);
  return wrong.length === 0 ? undefined : `${JSON.stringify(wrong)}: ${answer?.head.split("\r\n")[0]} ${answer?.text.slice(0, 300)}`;
}

for (const mount of Object.keys(mounts)) {
  describe(`on the mount ${mount}`, () => {
    const rows = table.rows.filter((row) => row.mounts === undefined || row.mounts.includes(mount));

    test(`each of ${rows.length} hostile requests is refused, and nothing is written`, async () => {
      assert.ok(rows.length > 100);
      const target = targetOf(mount);
      const session = await standing(target.client);
      const own = { session, SESSION: session.toUpperCase(), fresh: newSession("Fresh") };
      const before = await everything(target.client, session);
      const wrong = [];
      await harmless(async () => {
        const fill = filler(target, own);
        for (const { name, method, path, headers = [], body, expect, or } of rows) {
          const request = { method, path: fill(path), headers: headersOf(target, headers, fill) };
          const answer = await sendRaw(target.url, request, bodyOf(body, fill));
          const why = differs(expect, answer);
          if (why && !(or && differs(or, answer) === undefined)) wrong.push(`${name}: ${why}`);
        }
      });
      assert.equal(wrong.length, 0, `${wrong.length} of ${rows.length} answers differ:\n${wrong.slice(0, 40).join("\n")}`);
      assert.deepEqual(await everything(target.client, session), before);
      assert.equal((await target.client.status(own.fresh)).status, 404, "nothing was begun");
    });

    for (const { name, steps, runs } of table.replays) {
      test(`${name}: ${runs} runs`, async () => {
        const target = targetOf(mount);
        const own = newSession("Own");
        const fill = filler(target, { own });
        const answers = [];
        for (const { settle, action, body, headers = [], expect } of steps) {
          if (settle) {
            await settled(target.client, own, "completed");
            answers.push(undefined);
            continue;
          }
          const request = { method: "POST", path: `${target.base}/${target.type}/${action}`, headers: headersOf(target, headers, fill) };
          const answer = await sendRaw(target.url, request, bodyOf(body, fill));
          assert.equal(differs(expect, answer), undefined, `step ${answers.length}`);
          if (expect.same !== undefined) assert.deepEqual(answer.json, answers[expect.same].json, `step ${answers.length}`);
          answers.push(answer);
        }
        await settled(target.client, own, "completed");
        const chunks = chunksOf((await target.client.read(own, { fromSequence: 0 })).events);
        assert.equal(["run_started", "run_resumed"].flatMap((type) => ofType(chunks, type, own)).length, runs);
      });
    }
  });
}

describe("on the consumer's way to the sessions below its own", () => {
  // What is asked for in the right way is in `proxy.test.mjs`, with every id that is nobody's child.
  const PATHS = [
    "//api/child-{route}", "/api//child-{route}", "/api/child-{route}/", "/api/child-{route}/x", "/API/child-{route}", "/api/Child-{route}",
    "/api%2fchild-{route}", "/api/child%2d{route}", "/api/child-{route}%00", "/api/child-{route};x", "/api/child-{route}%20", "/%61pi/child-{route}",
    "/api/child-{route}.json", "/api/child-", "/api/child-{x*5000}", "/api{/*5000}child-{route}", "/agents/writer/../../api/child-{route}x",
  ];
  const QUERIES = [
    ["", "sessionId"],
    ["sessionId={child}%00&agentType=planner", "sessionId"],
    ["sessionId=..%2f{child}&agentType=planner", "sessionId"],
    ["sessionId={child}%0d%0a&agentType=planner", "sessionId"],
    ["sessionId={x*8000}&agentType=planner", "sessionId"],
    ["sessionId[]={child}&agentType=planner", "sessionId"],
    ["sessionId={child}&session%49d={child}&agentType=planner", "sessionId"],
    ["sessionId={child}&agentType=planner&agent%54ype=planner", "agentType"],
  ];
  const HEADERS = [
    [["x-filler", "{x*8000}"]],
    [["x-filler", "\u00e9\u00ff"]],
    [["x-remote-agents-internal-session", "{fresh}"], ["x-remote-agents-internal-mount", "raw"]],
    [["x-original-url", "/internal/agents"], ["x-forwarded-host", "elsewhere"], ["x-http-method-override", "DELETE"]],
    [["content-type", "application/json"], ["content-type", "text/html"]],
  ];

  for (const route of ["snapshot", "usage"]) {
    test(`/api/child-${route}: paths, queries and headers that mean harm`, async () => {
      const { id } = await theJob();
      const { events } = await world.writer.read(id, { fromSequence: 0 });
      const child = ofType(chunksOf(events), "subagent_start", id)[0].chunk.subSessionId;
      const { urls, apiKey } = world.workers;
      const fill = filler(targetOf("consumer"), { route, child, fresh: newSession("Fresh") });
      const ask = (path, headers = []) => {
        const own = [["authorization", `Bearer ${apiKey}`], ...headers.map(([name, value]) => [name, fill(value)])];
        return sendRaw(urls.consumer, { path: fill(path), headers: own });
      };
      const right = `/api/child-{route}?sessionId={child}&agentType=planner`;
      const before = await everything(world.raw, child);
      const plain = await ask(right);
      assert.equal(plain.status, 200, plain.text);
      await harmless(async () => {
        for (const path of PATHS) {
          const answer = await ask(`${path}?sessionId={child}&agentType=planner`);
          assert.equal(differs({ status: 404, code: "NOT_FOUND" }, answer), undefined, path);
        }
        for (const [query, field] of QUERIES) {
          const answer = await ask(`/api/child-{route}?${query}`);
          assert.equal(differs({ status: 400, code: "VALIDATION_ERROR", field }, answer), undefined, query);
        }
        for (const headers of HEADERS) assert.deepEqual((await ask(right, headers)).text, plain.text, JSON.stringify(headers).slice(0, 80));
        for (const keys of [[`Bearer ${apiKey}`, "Bearer wrong"], ["Bearer wrong", `Bearer ${apiKey}`], [`Bearer ${apiKey}`, `Bearer ${apiKey}`]]) {
          const answer = await sendRaw(urls.consumer, { path: fill(right), headers: keys.map((key) => ["authorization", key]) });
          assert.equal(differs({ status: 401, code: "UNAUTHORIZED" }, answer), undefined, "two credentials are none");
        }
        const large = await sendRaw(urls.consumer, { method: "POST", path: fill(right), headers: [["authorization", `Bearer ${apiKey}`]] }, "x".repeat(10 << 20));
        assert.equal(differs({ status: 405, code: "METHOD_NOT_ALLOWED" }, large), undefined, "10 MB");
      });
      assert.deepEqual(await everything(world.raw, child), before);
    });
  }
});

for (const mount of Object.keys(mounts)) {
  test(`bodies that come slowly or not at all, on the mount ${mount}`, async () => {
    const target = targetOf(mount);
    const session = await standing(target.client);
    const before = await everything(target.client, session);
    const headers = Object.entries(target.headers);
    const actions = ["start", "resume", "interrupt", "abort"];
    const path = (action) => `${target.base}/${target.type}/${action}`;
    const [slow, ...never] = ["slow", "half", "none", "chunked"].map((name) => newSession(name));
    const body = (sessionId) => JSON.stringify({ sessionId, message: "What is a session?" });
    await harmless(async () => {
      const open = [];
      for (const action of actions) {
        for (const id of [session, never[0]]) {
          const half = connect(target.url, { method: "POST", path: path(action), headers, length: body(id).length });
          half.socket.write(body(id).slice(0, -1));
          open.push(half);
        }
        open.push(connect(target.url, { method: "POST", path: path(action), headers, length: 1000 }));
      }
      const chunked = connect(target.url, { method: "POST", path: path("start"), headers: [...headers, ["transfer-encoding", "chunked"]] });
      chunked.socket.write(`${body(never[2]).length.toString(16)}\r\n${body(never[2])}\r\n`);
      open.push(chunked);
      // Byte by byte, and whole: that is no harm.
      const bytes = body(slow);
      const whole = connect(target.url, { method: "POST", path: path("start"), headers, length: bytes.length });
      whole.socket.setNoDelay(true);
      for (const byte of bytes) await new Promise((written) => whole.socket.write(byte, written));
      assert.equal((await whole.answer).status, 200);
      // Whoever waits for those that are silent waits in vain, and nobody else waits for them.
      assert.equal((await target.client.status(session)).status, 200);
      for (const { socket } of open) socket.resetAndDestroy();
      for (const { answer } of open) assert.equal(await answer, undefined, "what is not whole has no answer");
      await settled(target.client, slow, "completed");
    });
    assert.deepEqual(await everything(target.client, session), before);
    for (const id of never) assert.equal((await target.client.status(id)).status, 404, "nothing was begun");
  });

  test(`starts in a flood, on the mount ${mount}`, async () => {
    const { client } = targetOf(mount);
    const [one, keyed] = [newSession("One"), newSession("Keyed")];
    const ids = Array.from({ length: SESSIONS }, (_, at) => newSession(`Flood-${at}`));
    const body = (sessionId) => ({ sessionId, message: "What is a session?" });
    const many = (times, ask) => Promise.all(Array.from({ length: times }, (_, at) => ask(at)));
    const by = (answers) => answers.reduce((counts, { status, json }) => ({ ...counts, [json.code ?? status]: (counts[json.code ?? status] ?? 0) + 1 }), {});
    await harmless(async () => {
      // Whatever is begun here is held, so that it is at work under every other start.
      world.gate.hold(client.agentType, { which: isOfTheFlood });
      const [same, again, own] = await Promise.all([
        many(STARTS, () => client.start(body(one))),
        many(STARTS, () => client.start(body(keyed), { "idempotency-key": "the-same" })),
        many(SESSIONS, (at) => client.start(body(ids[at]))),
      ]);
      assert.deepEqual(by(same), { 200: 1, ALREADY_RUNNING: STARTS - 1 }, "one run");
      assert.deepEqual(by(again), { 200: STARTS }, "each is told of it");
      assert.equal(new Set(again.map(({ json }) => json.runId)).size, 1, "and it is the same run");
      assert.deepEqual(by(own), { 200: SESSIONS });
      assert.equal(new Set(own.map(({ json }) => json.runId)).size, SESSIONS);
      const aborted = await Promise.all([one, keyed, ...ids].map((id) => client.abort(id)));
      assert.ok(aborted.every(({ json }) => json.accepted));
      world.gate.release(client.agentType);
    });
    for (const id of [one, keyed, ids[0], ids.at(-1)]) {
      const chunks = chunksOf((await client.read(id, { fromSequence: 0 })).events);
      assertGapless(chunks);
      assert.equal(ofType(chunks, "run_started", id).length, 1);
    }
  });

  test(`${READERS} readers that never read, on the mount ${mount}`, async () => {
    const target = targetOf(mount);
    const { client } = target;
    const id = newSession("Read");
    world.gate.hold(client.agentType, { which: isOfTheFlood });
    assert.equal((await client.start({ sessionId: id, message: "What is a session?" })).status, 200);
    const before = chunksOf((await client.read(id, { fromSequence: 0 }, { until: ({ event }) => event === "caught-up" })).events);
    await harmless(async () => {
      const readers = [];
      const path = `${target.base}/${target.type}/sse?sessionId=${id}&fromSequence=0`;
      // A hundred at once: a system takes no more waiting connections than its backlog.
      for (let at = 0; at < READERS; at += 100) {
        readers.push(...(await Promise.all(Array.from({ length: 100 }, () => silentReader(target, path)))));
      }
      const taken = readers.filter(({ status }) => status === 200).length;
      assert.deepEqual([taken, readers.filter(({ status }) => status === 429).length], [MAX_READERS, READERS - MAX_READERS]);
      const over = await client.get("sse", { sessionId: id });
      assert.deepEqual([over.status, over.json.code, over.headers["retry-after"]], [429, "RATE_LIMITED", "5"]);
      // The session is at work, for whoever asks it anything else.
      assert.equal((await client.status(id)).json.status, "running");
      assert.equal((await client.interrupt(id)).json.accepted, true);
      await settled(client, id, "interrupted");
      world.gate.release(client.agentType);
      for (const { leave } of readers) leave();
      const { events } = await eventually("there is room again", async () => {
        const read = await client.read(id, { fromSequence: 0 });
        return read.status === 200 ? read : undefined;
      });
      const chunks = chunksOf(events);
      assertGapless(chunks);
      assert.equal(terminalOf(events).data.status, "interrupted");
      assert.deepEqual(chunks.slice(0, before.length).map(({ bytes }) => bytes.toString()), before.map(({ bytes }) => bytes.toString()));
    });
  });
}

/** Reads the first bytes of an answer and not one more. */
function silentReader({ url, headers }, path) {
  return new Promise((resolve, reject) => {
    const { socket } = connect(url, { path, headers: Object.entries(headers) });
    socket.once("error", reject);
    socket.removeAllListeners("data").once("data", (bytes) => {
      socket.pause();
      resolve({ status: Number(bytes.toString("latin1").split(" ")[1]), leave: () => socket.resetAndDestroy() });
    });
  });
}
