// The table of routes, run against the built Workers: path × method × auth × body on all three mounts.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { ROOT } from "../harness.mjs";
import { send } from "./support/http.mjs";
import { newSession, startWorld } from "./support/world.mjs";

const table = JSON.parse(readFileSync(join(ROOT, "tests/vectors/routes.json"), "utf8"));

// A caller whose binding to the producer carries no props, or others than the mount asks for.
const PASS_ON = "export default { fetch(request, env) { return env.PRODUCER.fetch(request); } };";
const strangers = [undefined, {}, { mount: "public" }, { mount: "INTERNAL" }, { mount: ["internal"] }].map((props, at) => ({
  name: `stranger-${at}`,
  script: PASS_ON,
  services: { PRODUCER: { to: "producer", props } },
}));

let world;
before(async () => {
  world = await startWorld({ extra: strangers });
});
after(() => world.stop());

describe("the table of routes", () => {
  assert.ok(table.rows.length > 0);
  for (const mount of Object.keys(table.mounts)) {
    const rows = table.rows.filter((row) => row.mount === mount);
    test(`${mount}: ${rows.length} requests`, async () => {
      assert.ok(rows.length > 0, "the table has rows for this mount");
      const wrong = [];
      for (const row of rows) {
        const problems = judge(row, await send(baseOf(mount), requestOf(row)));
        if (problems.length > 0) wrong.push(`${JSON.stringify(row).slice(0, 400)}\n    ${problems.join("\n    ")}`);
      }
      assert.equal(wrong.length, 0, `${wrong.length} of ${rows.length} answers differ:\n${wrong.slice(0, 40).join("\n")}`);
    });
  }
});

function baseOf(mount) {
  const { urls } = world.workers;
  return mount === "internal" ? urls.caller : urls[table.mounts[mount].worker];
}

function requestOf({ method, path, auth, body, headers = {} }) {
  const authorization = {
    none: {},
    wrong: { authorization: "Bearer not-the-key" },
    empty: { authorization: "Bearer " },
    right: world.workers.authorization,
  }[auth];
  assert.ok(authorization, `auth ${auth} is known`);
  return { method, path, headers: { ...authorization, ...headers }, body: bodyOf(body) };
}

function bodyOf(body) {
  if (body === undefined) return undefined;
  if ("json" in body) return JSON.stringify(body.json);
  if ("text" in body) return body.text;
  if ("hex" in body) return Buffer.from(body.hex, "hex");
  const { before: head, text, count, after: tail } = body.repeat;
  return head + text.repeat(count) + tail;
}

function judge({ mount, method, path, expect }, { status, headers, bytes, json }) {
  const { base, projected } = table.mounts[mount];
  const problems = [];
  const same = (what, got, expected) => {
    if (JSON.stringify(got) !== JSON.stringify(expected)) problems.push(`${what}: ${JSON.stringify(got)}, not ${JSON.stringify(expected)}`);
  };
  same("status", status, expect.status);
  if (method !== "HEAD") {
    if (expect.code) same("code", json?.code, expect.code);
    if (expect.status >= 400) {
      same("error is a sentence", typeof json?.error, "string");
      same("content type", headers["content-type"], "application/json");
    }
    if (expect.field) same("field", json?.field, expect.field);
    if (expect.agents) same("list", json, { agents: expect.agents, version: 1 });
  } else {
    same("body of HEAD", bytes.length, 0);
  }
  if (expect.allow) same("Allow", headers.allow, expect.allow);
  const [pathname] = path.split("?");
  if (pathname === base || pathname.startsWith(`${base}/`)) {
    same("X-Remote-Agents-Version", headers["x-remote-agents-version"], "1");
    same("X-Remote-Agents-Mount", headers["x-remote-agents-mount"], projected ? "projected" : "raw");
  }
  return problems;
}

describe("a body that nobody wants", () => {
  // Ten times what a mount takes: far more than fits in the buffers between the sender and the Worker.
  const body = "x".repeat(10 * 1024 * 1024);

  for (const mount of Object.keys(table.mounts)) {
    test(`${mount}: is taken off the sender, so that the refusal arrives`, async () => {
      const { base } = table.mounts[mount];
      const type = table.mounts[mount].projected || mount === "internal" ? "planner" : "writer";
      const right = world.workers.authorization;
      const cases = [
        [404, "NOT_FOUND", { method: "POST", path: "/no/such/path", headers: right }],
        [404, "NOT_FOUND", { method: "POST", path: `${base}/unknown/start`, headers: right }],
        [405, "METHOD_NOT_ALLOWED", { method: "POST", path: `${base}/${type}/status?sessionId=s`, headers: right }],
        [413, "PAYLOAD_TOO_LARGE", { method: "POST", path: `${base}/${type}/start`, headers: right }],
      ];
      if (mount !== "internal") cases.push([401, "UNAUTHORIZED", { method: "POST", path: `${base}/${type}/start` }]);
      if (mount === "consumer") cases.push([405, "METHOD_NOT_ALLOWED", { method: "POST", path: "/api/child-snapshot?sessionId=s", headers: right }]);
      for (const [status, code, request] of cases) {
        const answer = await send(baseOf(mount), { ...request, body });
        assert.deepEqual([answer.status, answer.json?.code], [status, code], request.path);
      }
    });
  }
});

describe("the internal mount from outside", () => {
  const paths = [
    { path: "/internal/agents" },
    { method: "POST", path: "/internal/agents" },
    { path: "/internal/agents/planner/status?sessionId=SESSION" },
    { path: "/internal/agents/planner/snapshot?sessionId=SESSION" },
    { path: "/internal/agents/planner/sse?sessionId=SESSION" },
    { method: "DELETE", path: "/internal/agents/planner/status?sessionId=SESSION" },
    { method: "POST", path: "/internal/agents/planner/start", body: '{"sessionId": "new-one", "message": "m"}' },
    { method: "POST", path: "/internal/agents/thread-researcher/start", body: "{" },
  ];

  test("is the 404 of an unknown path, byte for byte, also for a session that exists", async () => {
    const id = newSession("inside");
    assert.equal((await world.raw.start({ sessionId: id, message: "What is a session?" })).status, 200);
    const { urls, authorization } = world.workers;
    const outsiders = [
      { base: urls.producer, headers: {} },
      { base: urls.producer, headers: authorization },
      { base: urls.producer, headers: { ...authorization, "x-remote-agents-internal-mount": "raw", "x-mount": "internal" } },
      ...strangers.map(({ name }) => ({ base: urls[name], headers: authorization })),
    ];
    for (const { base, headers } of outsiders) {
      for (const { path, ...request } of paths) {
        const [inside, unknown] = await Promise.all(
          [path.replace("SESSION", id), "/no/such/path"].map((path) => send(base, { ...request, path, headers })),
        );
        assert.deepEqual(visible(inside), visible(unknown), `${base} ${request.method ?? "GET"} ${path}`);
        assert.equal(inside.status, 404);
        assert.equal(inside.json.code, "NOT_FOUND");
      }
    }
    assert.equal((await world.raw.status("new-one")).status, 404, "nothing was begun");
    assert.equal((await world.raw.status(id)).status, 200, "the caller with the right props sees the session");
  });
});

/** All that a caller can tell answers apart by; the date is no part of the answer. */
function visible({ status, rawHeaders, text }) {
  const headers = rawHeaders.flatMap((name, at) => (at % 2 === 0 && name.toLowerCase() !== "date" ? [[name, rawHeaders[at + 1]]] : []));
  return { status, headers, text };
}

describe("a key that is not set", () => {
  for (const apiKey of [null, ""]) {
    test(`${apiKey === null ? "unset" : "empty"}: everything is refused`, async () => {
      const closed = await startWorld({ apiKey });
      try {
        for (const mount of [closed.writer, closed.planner]) {
          for (const authorization of [undefined, "Bearer ", "Bearer", "Bearer null", "Bearer undefined"]) {
            const headers = authorization === undefined ? {} : { authorization };
            assert.equal((await mount.as(headers).list()).status, 401);
            const started = await mount.as(headers).start({ sessionId: "s", message: "m" });
            assert.deepEqual([started.status, started.json.code], [401, "UNAUTHORIZED"]);
          }
        }
        assert.equal((await closed.child.as({ authorization: "Bearer " }).snapshot("a-remote-b", "planner")).status, 401);
        assert.equal((await closed.raw.list()).status, 200, "the internal mount needs no key");
      } finally {
        await closed.stop();
      }
    });
  }
});

describe("sizes", () => {
  test("a body of exactly 1 MiB is taken, one byte more is not", async () => {
    const body = (sessionId, size) => {
      const empty = JSON.stringify({ sessionId, message: "What is a limit?", metadata: { filler: "" } });
      return empty.replace('""', `"${"x".repeat(size - empty.length)}"`);
    };
    const id = newSession("large");
    const over = await world.planner.start(body(id, 1024 * 1024 + 1));
    assert.deepEqual([over.status, over.json.code], [413, "PAYLOAD_TOO_LARGE"]);
    assert.equal((await world.planner.status(id)).status, 404, "nothing was written");
    const fits = await world.planner.start(body(id, 1024 * 1024));
    assert.equal(fits.status, 200, fits.text);
  });
});
