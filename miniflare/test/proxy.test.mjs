// The consumer's way to the sessions below its own: descendants alone, and everything else is the 404 of an unknown one.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { research } from "./support/documents.mjs";
import { chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, settled, startWorld } from "./support/world.mjs";

const ROUTES = ["snapshot", "usage"];

let world;
let job;
let other;
before(async () => {
  world = await startWorld();
  [job, other] = await Promise.all([runJob("mine", 61), runJob("other", 62)]);
});
after(() => world.stop());

async function runJob(name, seed) {
  const { documents, topic } = research(seed);
  const id = newSession(name);
  const started = await world.writer.start({ sessionId: id, message: topic, state: { documents } });
  assert.equal(started.status, 200, started.text);
  const { events } = await world.writer.read(id);
  assert.equal(terminalOf(events).data.status, "completed");
  const [planner, ...researchers] = ofType(chunksOf(events), "subagent_start").map(({ chunk }) => chunk.subSessionId);
  return { id, planner, researchers };
}

/** All that tells two answers apart, but the date. */
function visible({ status, rawHeaders, text }) {
  const headers = rawHeaders.flatMap((name, at) => (at % 2 === 0 && name.toLowerCase() !== "date" ? [[name, rawHeaders[at + 1]]] : []));
  return { status, headers, text };
}

for (const route of ROUTES) {
  describe(`/api/child-${route}`, () => {
    test("tells of the child and the grandchildren what the producer tells", async () => {
      for (const [id, agentType] of [[job.planner, "planner"], ...job.researchers.map((id) => [id, "thread-researcher"])]) {
        const { status, json, text } = await world.child[route](id, agentType);
        assert.equal(status, 200, `${id}: ${text}`);
        assert.equal(json.sessionId, id);
        assert.deepEqual(json, (await world.raw.of(agentType)[route](id)).json);
      }
      assert.ok(job.researchers.length >= 2);
      const unnamed = await world.child.send(route, { sessionId: job.planner });
      assert.equal(unnamed.json.sessionId, job.planner, "without a type it is the child that the writer calls");
    });

    test("is gated by the bearer key, before anything else", async () => {
      for (const authorization of [undefined, "Bearer wrong", "Bearer ", `Basic ${world.workers.apiKey}`]) {
        const stranger = world.child.as(authorization === undefined ? {} : { authorization });
        for (const query of [{ sessionId: job.planner, agentType: "planner" }, { sessionId: "no-such-remote-child", agentType: "planner" }, {}]) {
          const { status, json } = await stranger.send(route, query);
          assert.deepEqual([status, json?.code], [401, "UNAUTHORIZED"], JSON.stringify(query));
        }
      }
    });

    test("takes GET alone", async () => {
      for (const method of ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"]) {
        const { status, json, headers } = await world.child.send(route, { sessionId: job.planner, agentType: "planner" }, { method });
        assert.deepEqual([status, json?.code, headers.allow], [405, "METHOD_NOT_ALLOWED", "GET"], method);
      }
    });

    test("names the field that is wrong", async () => {
      const cases = [
        ["", "sessionId"],
        ["agentType=planner", "sessionId"],
        ["sessionId=&agentType=planner", "sessionId"],
        [`sessionId=${"x".repeat(257)}&agentType=planner`, "sessionId"],
        ["sessionId=a%2Fb-remote-c&agentType=planner", "sessionId"],
        ["sessionId=a%20b&agentType=planner", "sessionId"],
        [`sessionId=${job.planner}&agentType=planner&agentType=planner`, "agentType"],
        [`sessionId=${job.planner}&sessionId=${other.planner}&agentType=planner`, "sessionId"],
      ];
      for (const [query, field] of cases) {
        const { status, json } = await world.child.send(route, query);
        assert.deepEqual([status, json?.code, json?.field], [400, "VALIDATION_ERROR", field], query.slice(0, 120));
      }
    });

    test("everything else is the 404 of an unknown session, byte for byte", async () => {
      const unknown = visible(await world.child[route]("no-such-remote-child", "planner"));
      assert.equal(unknown.status, 404);
      assert.equal(JSON.parse(unknown.text).code, "NOT_FOUND");
      const direct = newSession("direct");
      assert.equal((await world.raw.start({ sessionId: direct, message: "What is a session?" })).status, 200);
      const disguised = `${job.id}-remote-${newSession("disguised")}`;
      assert.equal((await world.raw.start({ sessionId: disguised, message: "What is a session?" })).status, 200);
      const [call] = /-remote-(.+)$/.exec(job.planner).slice(1);
      const cases = {
        "the wrong agent type": [job.planner, "thread-researcher"],
        "the wrong agent type of a grandchild": [job.researchers[0], "planner"],
        "an agent type that nobody has": [job.planner, "nobody"],
        "the type in other case": [job.planner, "Planner"],
        "no type at all": [job.planner, ""],
        "what cannot be a type": [job.planner, "../planner"],
        "the consumer's own session": [job.id, "writer"],
        "the consumer's own session as a planner": [job.id, "planner"],
        "an id that extends no session here": [`nobody-remote-${call}`, "planner"],
        "another session's child under this one's id": [`${job.id}-remote-${/-remote-(.+)$/.exec(other.planner)[1]}`, "planner"],
        "this session's child under another's id": [`${other.id}-remote-${call}`, "planner"],
        "the child, cut short": [job.planner.slice(0, -1), "planner"],
        "the child, longer": [`${job.planner}x`, "planner"],
        "the child in other case": [job.planner.toUpperCase(), "planner"],
        "the child with another separator": [job.planner.replace("-remote-", "-sub-"), "planner"],
        "a session of the producer that is nobody's child": [direct, "planner"],
        "one that only calls itself a child": [disguised, "planner"],
        "a grandchild that nobody announced": [`${job.planner}-sub-call_9-aaaaaaaaaaaaaaaa`, "thread-researcher"],
        "nothing but the separator": ["-remote-", "planner"],
      };
      for (const [name, [id, agentType]] of Object.entries(cases)) {
        assert.deepEqual(visible(await world.child[route](id, agentType)), unknown, `${name}: ${id}`);
      }
      const elsewhere = await world.writer.status("no-such-session");
      assert.equal(elsewhere.text, unknown.text, "it is the very envelope of the routes");
      await settled(world.raw, direct, "completed");
      await settled(world.raw, disguised, "completed");
    });
  });
}

test("a session id may itself hold the separator", async () => {
  const tricky = await runJob("a-remote-b-sub-c", 63);
  for (const route of ROUTES) {
    for (const [id, agentType] of [[tricky.planner, "planner"], [tricky.researchers[0], "thread-researcher"]]) {
      const { status, text } = await world.child[route](id, agentType);
      assert.equal(status, 200, `${id}: ${text}`);
    }
  }
});

test("a long id has children with the short form of id", async () => {
  const { documents, topic } = research(64);
  const id = newSession("l".repeat(190));
  assert.equal((await world.writer.start({ sessionId: id, message: topic, state: { documents } })).status, 200);
  const { events } = await world.writer.read(id);
  assert.equal(terminalOf(events).data.status, "completed", JSON.stringify(terminalOf(events).data));
  const starts = ofType(chunksOf(events), "subagent_start").map(({ chunk }) => chunk);
  const [planner] = starts;
  assert.match(planner.subSessionId, new RegExp(`^l{120}-remote-[a-z2-7]{52}$`), "the contract's short form");
  assert.equal((await world.raw.snapshot(planner.subSessionId)).status, 200);
});

test("other paths below /api are unknown", async () => {
  const unknown = visible(await world.child.as({}).send("nothing", {}));
  assert.equal(unknown.status, 404);
  for (const path of ["snapshots", "snapshot/", "tree", "start", ""]) {
    assert.equal((await world.child.send(path, { sessionId: job.planner, agentType: "planner" })).status, 404, path);
  }
});
