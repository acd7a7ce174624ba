// The whole job with each provider, against a scripted model: the report is the one that the script implies.

import assert from "node:assert/strict";
import { after, afterEach, describe, test } from "node:test";
import { startEndpoints } from "../providers/endpoints.mjs";
import { COST, agentTypeOf, expectedSections, researchScript } from "../providers/research.mjs";
import { quotationsOf, research } from "./support/documents.mjs";
import { assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { newSession, settled, startWorld } from "./support/world.mjs";

const KEY = "key-canary-7f3a";
// With characters of two units of UTF-16, between which aimock cuts.
const given = research(42, { questions: 3 });

const SETTINGS = {
  openai: ({ aimock }) => ({ OPENAI_BASE_URL: `${aimock}/v1`, OPENAI_API_KEY: KEY }),
  anthropic: ({ aimock }) => ({ ANTHROPIC_BASE_URL: aimock, ANTHROPIC_API_KEY: KEY }),
  "workers-ai": () => ({}),
};

let open = [];
afterEach(async () => {
  for (const one of open.reverse()) await one.stop();
  open = [];
});

/** Both Workers with a provider whose models follow the script. */
async function scripted(provider, pace, settings = SETTINGS[provider]) {
  const script = researchScript();
  const endpoints = await startEndpoints(script.answer, pace);
  open.push(endpoints);
  const vars = { MODEL_PROVIDER: provider, MODEL_NAME: "scripted-1", ...settings(endpoints) };
  const workersAi = provider === "workers-ai" ? `${endpoints.aimock}/v1` : undefined;
  const world = await startWorld({ vars: { producer: vars, consumer: vars }, outbound: "allow", workersAi });
  open.push(world);
  return { script, endpoints, world };
}

async function started(world, id) {
  const answer = await world.writer.start({ sessionId: id, message: given.topic, state: { documents: given.documents } });
  assert.equal(answer.status, 200, answer.text);
}

/** The report of a completed job is what the script made of the searches, and every conversation that was sent is whole. */
async function assertScripted(output, { script, endpoints, world }) {
  const sections = expectedSections(script.searches);
  assert.ok(sections.length >= 2 && sections.every(({ findings }) => findings.length > 0), JSON.stringify(sections));
  assert.deepEqual(output.sections, sections);
  for (const { documentId, quote } of quotationsOf(output)) {
    assert.ok(given.documents.find(({ id }) => id === documentId).text.includes(quote), quote);
  }
  const { requests, violations } = await endpoints.histories();
  assert.ok(requests >= 6 + 3 * sections.length, `${requests} conversations`);
  assert.deepEqual(violations, []);
  assert.ok(!world.workers.logs.join("\n").includes(KEY), "the key stands in no log");
  return output;
}

describe("with a scripted model of each provider", () => {
  const reports = [];
  for (const provider of Object.keys(SETTINGS)) {
    test(`the job gives the report that the script implies: ${provider}`, async () => {
      const job = await scripted(provider);
      const id = newSession(`job-${provider}`);
      await started(job.world, id);
      const { events } = await job.world.writer.read(id, { fromSequence: -1 });
      const { event, data } = terminalOf(events);
      assert.equal(event, "end", `${JSON.stringify(data)}\n${job.world.workers.logs.slice(-10).join("\n")}`);
      assert.equal(data.status, "completed", JSON.stringify(data));
      const chunks = chunksOf(events);
      assertGapless(chunks);
      assertPairing(chunks);
      assert.ok(ofType(chunks, "tool_arg_stream_delta").length > 10, "arguments came in pieces");
      reports.push(await assertScripted(data.output, job));
      const { json } = await job.world.writer.usage(id);
      const { requests } = await job.endpoints.histories();
      assert.equal(json.rollup.tokens.total, COST * requests, "each answer is counted once");
      assert.deepEqual(Object.keys(json.rollup.byModel), ["scripted-1"]);
    });
  }

  after(() => {
    assert.equal(reports.length, 3);
    for (const report of reports) assert.deepEqual(report, reports[0]);
  });
});

test("a job whose Workers are killed and whose run is interrupted still sends whole conversations", async () => {
  const job = await scripted("openai", { latency: 8, chunkSize: 16 });
  const id = newSession("cut");
  const { writer } = job.world;
  // The writer hears of no research before its run has been interrupted.
  const release = job.endpoints.hold((asked) => agentTypeOf(asked) === "writer" && asked.messages.some(({ role }) => role === "tool"));
  await started(job.world, id);
  await writer.read(id, { fromSequence: -1 }, { until: isOf("text_delta", "tool_arg_stream_delta", "thread-researcher") });
  await job.world.workers.restart();
  await job.world.writer.read(id, { fromSequence: -1 }, { until: isOf("tool_end", "tool_start", "thread-researcher") });
  const { status, text } = await job.world.writer.interrupt(id);
  assert.equal(status, 200, text);
  release();
  await settled(job.world.writer, id, "interrupted");
  const resumed = await job.world.writer.resume({ sessionId: id, message: given.topic });
  assert.equal(resumed.status, 200, resumed.text);
  const { output } = await settled(job.world.writer, id, "completed");
  const { violations, requests } = await job.endpoints.histories();
  assert.deepEqual(violations, []);
  assert.ok(requests > 12, `${requests} conversations`);
  assert.ok(output.sections.length > 0);
});

/** Whether an event is a chunk of one of these types, said by an agent of this type. */
function isOf(...wanted) {
  const agentType = wanted.pop();
  return ({ event, data }) => {
    if (event !== "chunk") return false;
    const { chunk } = JSON.parse(data);
    return chunk.agentType === agentType && wanted.includes(chunk.type);
  };
}

test("a setting that is missing is named, and no other is repeated", async () => {
  const job = await scripted("anthropic", {}, () => ({ ANTHROPIC_API_KEY: " ", OPENAI_API_KEY: KEY }));
  const answer = await job.world.writer.start({ sessionId: newSession("unset"), message: "x" });
  assert.deepEqual([answer.status, answer.json.code], [500, "INTERNAL"]);
  const said = `${answer.text}\n${job.world.workers.logs.join("\n")}`;
  assert.ok(said.includes("ANTHROPIC_API_KEY"), said);
  assert.ok(!said.includes(KEY), said);
});

test("a provider that refuses the key fails the run with a sentence of ours", async () => {
  const refusing = () => ({ error: { message: `Incorrect API key: ${KEY}`, type: "authentication_error" }, status: 401 });
  const endpoints = await startEndpoints(refusing);
  open.push(endpoints);
  const vars = { MODEL_PROVIDER: "openai", MODEL_NAME: "m", ...SETTINGS.openai(endpoints) };
  const world = await startWorld({ vars: { producer: vars, consumer: vars }, outbound: "allow" });
  open.push(world);
  const id = newSession("refused");
  await started(world, id);
  const status = await settled(world.writer, id, "failed");
  assert.deepEqual([status.errorCode, status.error], ["provider_error", "The model provider refused the key (status 401)."]);
  const { events } = await world.writer.read(id, { fromSequence: -1 });
  assert.ok(!JSON.stringify([events, status, world.workers.logs]).includes(KEY));
});
