// The research job with a real language model behind both Workers. Nothing here depends on what the model says, since its
// words may differ from one processor to the next: the test is about what holds for any model.

import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { after, before, describe, test } from "node:test";
import { quotationsOf } from "../test/support/documents.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "../test/support/stream.mjs";
import { newSession, startWorld } from "../test/support/world.mjs";
import { startEndpoint } from "./endpoint.mjs";
import { loadModel } from "./llama.mjs";
import { nextOfResearch } from "./research.mjs";
import { transcriptOf } from "./transcript.mjs";

const NAME = "smollm2-135m";
const DOCUMENTS = [
  { id: "tides", title: "Tides", text: "The tide rises and falls twice a day. The moon pulls the water of the sea toward it. When sun and moon pull together, the tide is highest." },
  { id: "harbour", title: "Harbours", text: "A ship enters the harbour at high tide. A pilot reads the tide in a table. Fog keeps every ship at its place." },
];
const TOPIC = "Why does the tide rise, and when does a ship enter the harbour?";

describe("the research job with a real model", () => {
  const id = newSession("real");
  let model, endpoint, world, events, chunks, end;
  before(async () => {
    model = await loadModel(process.env.MODEL_FILE);
    endpoint = await startEndpoint(model, nextOfResearch);
    const vars = { MODEL_PROVIDER: "openai", MODEL_NAME: NAME, OPENAI_BASE_URL: endpoint.url, OPENAI_API_KEY: "none" };
    world = await startWorld({ vars: { producer: vars, consumer: vars }, outbound: "allow" });
    const started = await world.writer.start({ sessionId: id, message: TOPIC, state: { documents: DOCUMENTS } });
    assert.equal(started.status, 200, started.text);
    ({ events } = await world.writer.read(id, { fromSequence: -1 }));
    chunks = chunksOf(events);
    end = terminalOf(events);
    const to = process.env.MODEL_TRANSCRIPT;
    if (to) writeFileSync(to, transcriptOf({ topic: TOPIC, answers: endpoint.answers, output: end.data.output }));
  });
  after(async () => {
    await world?.stop();
    await endpoint?.stop();
    await model?.stop();
  });

  test("completes, with a report of the declared type", () => {
    assert.deepEqual(endpoint.answers.flatMap(({ error }) => error ?? []), []);
    assert.deepEqual([end.event, end.data.status], ["end", "completed"], `${JSON.stringify(end.data)}\n${world.workers.logs.slice(-10).join("\n")}`);
    const { topic, summary, sections, sources } = end.data.output;
    assert.ok([topic, summary].every((text) => typeof text === "string"));
    assert.ok(sections.length >= 2, "a section for each thread");
    for (const { threadId, question, findings } of sections) {
      assert.ok([threadId, question].every((text) => typeof text === "string"));
      assert.ok(Array.isArray(findings));
    }
    assert.ok(Array.isArray(sources));
  });

  test("quotes verbatim", () => {
    for (const { documentId, quote } of quotationsOf(end.data.output)) {
      assert.ok(DOCUMENTS.find((document) => document.id === documentId)?.text.includes(quote), `${documentId} does not hold ${quote}`);
    }
  });

  test("asks the model in every agent, and each conversation has one result for each call", () => {
    assert.deepEqual(endpoint.answers.flatMap(({ violations }) => violations), []);
    assert.deepEqual(endpoint.answers.filter(({ isCut }) => isCut), []);
    const called = new Set(endpoint.answers.flatMap(({ calls }) => calls).map(({ name }) => name));
    for (const name of ["subagent__research", "plan", "subagent__thread-researcher", "search", "compose", "finish"]) assert.ok(called.has(name), name);
  });

  test("shows on the stream what the model wrote, as it wrote it", () => {
    assertGapless(chunks);
    assertForwarding(id, chunks);
    const starts = assertPairing(chunks);
    assert.ok(starts.length >= 3, "the planner and its researchers");
    const texts = endpoint.answers.map(({ text }) => text).filter((text) => text !== "");
    const said = Map.groupBy(ofType(chunks, "text_delta"), ({ chunk }) => chunk.agentId);
    assert.deepEqual([...said.values()].map((list) => list.map(({ chunk }) => chunk.delta).join("")).sort(), texts.sort());
    assert.ok(ofType(chunks, "tool_arg_stream_delta").length > endpoint.answers.length, "arguments come in pieces");
    assert.equal(ofType(chunks, "tool_start").length, endpoint.answers.flatMap(({ calls }) => calls).length);
  });

  test("counts the tokens that the model counted", async () => {
    const { json } = await world.writer.usage(id);
    const sum = (read) => endpoint.answers.reduce((total, { usage }) => total + read(usage), 0);
    const counted = json.rollup.byModel[NAME];
    assert.deepEqual(Object.keys(json.rollup.byModel), [NAME]);
    assert.deepEqual(
      [json.rollup.tokens.prompt, json.rollup.tokens.completion, json.rollup.tokens.total, json.rollup.tokens.cached],
      [sum((usage) => usage.prompt_tokens), sum((usage) => usage.completion_tokens), sum((usage) => usage.total_tokens), sum((usage) => usage.prompt_tokens_details.cached_tokens)],
      JSON.stringify(counted),
    );
    assert.ok(sum((usage) => usage.completion_tokens) > 0);
  });
});
