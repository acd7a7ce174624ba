// Credentials of a caller go no further than the mount that checks them: not to the other service, not into a log, not
// into a database.

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { research } from "./support/documents.mjs";
import { startGated } from "./support/gate.mjs";
import { RECORDING, recorded } from "./support/recorder.mjs";
import { chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, settled } from "./support/world.mjs";

const PLANTED = {
  cookie: "session=canary-cookie-1b7e",
  "x-api-key": "canary-api-key-93d0",
  "x-auth-token": "canary-token-6a4f",
  "x-authorization": "Bearer canary-bearer-c2c8",
  "proxy-authorization": "Basic canary-proxy-50fe",
  "x-remote-agents-internal-session": "canary-internal-8d21",
  "x-forwarded-authorization": "Bearer canary-forwarded-e77b",
  "x-amz-security-token": "canary-cloud-04ac",
};
const MARKER = "marker-that-is-stored-2c9d";
const KEY = "key-of-this-test-f3b1c2";

/** What a request to the producer may consist of. */
const READ = ["accept", "x-remote-agents-version"];
const POST = ["accept", "content-length", "content-type", "x-remote-agents-version"];

let data;
let world;
let requests;
let job;
let secrets;

before(async () => {
  data = mkdtempSync(join(tmpdir(), "remote-agents-"));
  world = await startGated({ ...RECORDING, persist: data, apiKey: KEY });
  secrets = [KEY, Buffer.from(KEY).toString("base64"), ...Object.values(PLANTED).map((value) => /canary-[\w-]+/.exec(value)[0])];
  const writer = world.writer.as({ ...world.workers.authorization, ...PLANTED });
  const planner = world.planner.as({ ...world.workers.authorization, ...PLANTED });
  job = await everything(writer, "held");
  await everything(planner, "held-too");
  requests = await recorded(world);
  await world.stop();
});
after(() => rmSync(data, { recursive: true, force: true }));

/** A job with each route and each refusal in it, every request with every credential. */
async function everything(mount, name) {
  const id = newSession(name);
  const { documents, topic } = research(31);
  world.gate.hold("thread-researcher");
  documents[0].text += ` ${MARKER}.`;
  const body = { sessionId: id, message: topic, state: { documents }, userId: "u", tags: ["t"], metadata: { m: 1 } };
  assert.equal((await mount.start(body, { "idempotency-key": "own-key" })).status, 200);
  const first = await mount.read(id, {}, { until: ({ event, data }) => event === "chunk" && JSON.parse(data).chunk.type === "subagent_start" });
  const { subSessionId, subAgentType } = ofType(chunksOf(first.events), "subagent_start")[0].chunk;
  for (const read of ["status", "snapshot", "usage", "tree"]) await mount[read](id);
  if (mount.agentType === "writer") {
    const child = world.child.as(mount.headers);
    for (const read of ["snapshot", "usage"]) assert.equal((await child[read](subSessionId, subAgentType)).status, 200);
  }
  await mount.interrupt(id, "a pause");
  await settled(mount, id, "interrupted");
  world.gate.open();
  assert.equal((await mount.resume({ sessionId: id })).status, 200);
  const { events } = await mount.read(id, { fromSequence: 0 });
  assert.equal(terminalOf(events).data.status, "completed");
  const refused = [await mount.start(body), await mount.interrupt(id), await mount.post("start", "{"), await mount.as({ ...PLANTED, authorization: `Bearer ${KEY}x` }).status(id)];
  assert.deepEqual(refused.map(({ status }) => status), [409, 409, 400, 401]);
  return { id, events, answers: refused.map(({ text }) => text) };
}

describe("credentials in the requests of a job", () => {
  test("cross to the producer in no request", () => {
    assert.ok(requests.length >= 4, `${requests.length} requests`);
    for (const request of requests) {
      const text = JSON.stringify(request);
      for (const secret of secrets) assert.ok(!text.includes(secret), `${request.method} ${request.path} holds ${secret}`);
    }
    const start = requests.find(({ path }) => path === "/internal/agents/planner/start");
    assert.ok(start.body.includes(MARKER), "the recorder sees bodies");
  });

  test("requests to the producer have the contract's headers and no other", () => {
    const actions = new Set();
    for (const { method, path, headers, body } of requests) {
      const [, , , agentType, action] = path.split("?")[0].split("/");
      actions.add(action);
      const names = headers.map(([name]) => name.toLowerCase()).sort();
      const expected = method === "GET" ? READ : action === "start" || action === "resume" ? [...POST, "idempotency-key"].sort() : POST;
      assert.deepEqual(names, expected, `${method} ${path}`);
      const value = Object.fromEntries(headers);
      assert.equal(value["x-remote-agents-version"], "1");
      assert.equal(value.accept, action === "sse" ? "text/event-stream" : "application/json");
      if (action === "start") {
        const { sessionId, parent, userId, tags, metadata, ...rest } = JSON.parse(body);
        assert.equal(agentType, "planner");
        assert.match(value["idempotency-key"], /^start:/);
        assert.notEqual(value["idempotency-key"], "own-key");
        assert.deepEqual(Object.keys(parent).sort(), ["sessionId", "streamId", "toolCallId"]);
        assert.deepEqual([parent.sessionId, userId, tags, metadata], [job.id, "u", ["t"], { m: 1 }]);
        assert.ok(sessionId.startsWith(`${job.id}-remote-`));
        assert.deepEqual(Object.keys(rest).sort(), ["agentType", "message", "state"]);
      }
    }
    for (const action of ["start", "sse", "snapshot", "usage", "interrupt"]) assert.ok(actions.has(action), `${action} was recorded`);
  });

  test("stand in no line of a log", () => {
    const { logs } = world.workers;
    assert.ok(logs.some((line) => line.includes(job.id)), "the job is in the log");
    for (const line of logs) {
      for (const secret of secrets) assert.ok(!line.includes(secret), `a log line holds ${secret}: ${line.slice(0, 300)}`);
    }
  });

  test("stand in neither database", () => {
    const files = world.workers.dataFiles().map((path) => ({ path, bytes: readFileSync(path) }));
    for (const role of ["producer", "consumer"]) {
      const folders = world.workers.databases().filter((database) => database.role === role);
      assert.ok(folders.length > 0, `${role} has databases`);
      const holds = folders.some(({ path }) => files.some((file) => file.path.startsWith(path) && file.bytes.includes(MARKER)));
      assert.ok(holds, `the scan finds what ${role} does store`);
    }
    for (const { path, bytes } of files) {
      for (const secret of secrets) assert.ok(!bytes.includes(secret), `${path} holds ${secret}`);
    }
  });

  test("stand in no answer", () => {
    const said = [...job.answers, ...job.events.map(({ raw }) => raw)].join("\n");
    for (const secret of secrets) assert.ok(!said.includes(secret), secret);
  });
});
