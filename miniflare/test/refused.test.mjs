// The other service refuses: the call fails typed, nothing is made up in place of its result, and once the service
// answers again the session goes on.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { quotationsOf, research } from "./support/documents.mjs";
import { send } from "./support/http.mjs";
import { assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, settled, startWorld } from "./support/world.mjs";

// Stands between the consumer and the producer, and refuses everything while it is told to.
const BREAKER = `
let broken = false;
export default {
  async fetch(request, env) {
    const { pathname } = new URL(request.url);
    if (pathname.startsWith("/breaker/")) {
      broken = pathname === "/breaker/broken";
      return new Response(null, { status: 204 });
    }
    if (!broken) return env.PRODUCER.fetch(request);
    return Response.json({ code: "VALIDATION_ERROR", error: "Not today.", field: "today" }, { status: 400 });
  },
};
`;

let world;
let job;
const { documents, topic } = research(71);

before(async () => {
  world = await startWorld({
    extra: [{ name: "breaker", script: BREAKER, services: { PRODUCER: { to: "producer", props: { mount: "internal" } } } }],
    producerVia: "breaker",
  });
  await become("broken");
  const body = { sessionId: newSession("failed"), message: topic, state: { documents } };
  const started = await world.writer.start(body);
  assert.equal(started.status, 200, started.text);
  job = { ...started.json, body };
});
after(() => world.stop());

function become(state) {
  return send(world.workers.urls.breaker, { path: `/breaker/${state}` });
}

describe("the other service refuses every call", () => {
  test("each call fails typed, and its child is paired", async () => {
    await settled(world.writer, job.sessionId, "completed");
    const { events } = await world.writer.read(job.sessionId, { fromSequence: 0 });
    const chunks = chunksOf(events);
    assertGapless(chunks);
    const starts = assertPairing(chunks);
    assert.equal(starts.length, 2, "the writer tries twice, with a child of its own each time");
    assert.notEqual(starts[0].subSessionId, starts[1].subSessionId);
    for (const { toolCallId } of starts) {
      const [end, result] = ["subagent_end", "tool_end"].map((type) => ofType(chunks, type).find(({ chunk }) => chunk.toolCallId === toolCallId).chunk);
      assert.deepEqual([end.success, result.success, end.error, end.result], [false, false, result.error, undefined]);
      const { code, category, retryable } = result.result.metadata.helixErrorDetail;
      assert.deepEqual([typeof code, typeof category, retryable], ["string", "string", false], "a failed result says why");
    }
    const { json: usage } = await world.writer.usage(job.sessionId);
    assert.equal(usage.rollup.tools.failures, 2);
    assert.equal(usage.rollup.subAgents.calls, 2);
  });

  test("nothing is quoted, and the state says that the research failed", async () => {
    const { json: status } = await world.writer.status(job.sessionId);
    assert.deepEqual([status.output.sections, status.output.sources], [[], []]);
    const { json: snapshot } = await world.writer.snapshot(job.sessionId);
    assert.deepEqual([snapshot.state.phase, snapshot.state.research.findingCount], ["failed", 0]);
  });

  test("a read of the refused child is the 404 of an unknown session or the other service's failure, never a 200", async () => {
    const { events } = await world.writer.read(job.sessionId, { fromSequence: 0 });
    const [{ subSessionId }] = assertPairing(chunksOf(events));
    const broken = await world.child.snapshot(subSessionId, "planner");
    assert.deepEqual([broken.status, broken.json.code], [502, "transport_error"]);
    await become("mended");
    const unknown = await world.child.snapshot(subSessionId, "planner");
    assert.deepEqual([unknown.status, unknown.json.code], [404, "NOT_FOUND"], "it was never begun");
  });

  test("once it answers again, a new message brings the report", async () => {
    await become("mended");
    const resumed = await world.writer.resume({ sessionId: job.sessionId, message: topic });
    assert.equal(resumed.status, 200, resumed.text);
    const { output } = await settled(world.writer, job.sessionId, "completed");
    const quotations = quotationsOf(output);
    assert.ok(quotations.length > 0);
    for (const { documentId, quote } of quotations) assert.ok(documents.find(({ id }) => id === documentId).text.includes(quote), quote);
    const { json: snapshot } = await world.writer.snapshot(job.sessionId);
    assert.deepEqual([snapshot.state.phase, snapshot.state.research.phase], ["researched", "done"]);
    const { events } = await world.writer.read(job.sessionId, { fromSequence: 0 });
    assertGapless(chunksOf(events));
    assert.equal(terminalOf(events).data.runId, resumed.json.runId);
  });
});
