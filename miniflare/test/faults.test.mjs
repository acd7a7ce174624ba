// One fault at every request of a call whose child has a child of its own, in workerd: a fault Worker stands between
// the services. Whatever strikes, the call has one result and its child was begun once.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { contract } from "./support/contract.mjs";
import { quotationsOf, research } from "./support/documents.mjs";
import { due, faultWorker, kinds, streamKinds } from "./support/faults.mjs";
import { Mount } from "./support/http.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { eventually, newSession, startWorld } from "./support/world.mjs";

/** Jobs at once. */
const AT_ONCE = 12;

/** What parents are told to call, which requests that makes on the upper hop, and the type of the child. */
const SCENES = [
  { call: "nest", child: "nester", actions: ["start", "sse"], hops: ["upper", "lower"] },
  { call: "endless", child: "nester", actions: ["status", "snapshot", "usage"], hops: ["upper"] },
  { call: "revived", child: "echo", actions: ["resume"], hops: ["upper"] },
  { call: "nest_slow", child: "slow_nester", actions: ["interrupt"], hops: ["upper", "lower"], isStopped: true },
];

let world;
let parents;
let children;
before(async () => {
  world = await startWorld({
    extra: [
      contract("near", "between"),
      contract("far", "between"),
      faultWorker("between", { FAR: { to: "far" }, PRODUCER: { to: "producer", props: { mount: "internal" } } }),
    ],
    producerVia: "between",
  });
  parents = new Mount(world.workers.urls.near, "/agents", "parent");
  children = (type) => new Mount(world.workers.urls.far, "/agents", type);
});
after(() => world?.stop());

/** The plan of a parent, or what became of it. */
async function plan(parent, put) {
  const init = put && { method: "PUT", body: JSON.stringify(put) };
  return (await fetch(`${world.workers.urls.between}/plan/${parent}`, init)).json();
}

/** The chunks of a session and its terminal frame. */
async function logOf(mount, id) {
  const { events } = await mount.read(id, { fromSequence: 0 });
  const chunks = chunksOf(events);
  assertGapless(chunks);
  return { chunks, end: terminalOf(events) };
}

/** A job of a scene with a fault, or without one. */
async function run({ call, child, isStopped }, point, due, { name, fault, hasty } = {}) {
  const parent = newSession("parent");
  if (fault) await plan(parent, { point, occurrence: 0, fault });
  const message = JSON.stringify([[hasty ? `${call}_hastily` : call, "deep"]]);
  const started = await parents.start({ sessionId: parent, message });
  assert.equal(started.status, 200, started.text);
  if (isStopped) {
    // The grandchild has begun to speak, so both hops have someone to tell.
    const speaks = ({ event, data }) => event === "chunk" && data.includes('"text_delta"');
    await parents.read(parent, { fromSequence: 0 }, { until: speaks });
    const stopped = await parents.post("interrupt", { sessionId: parent });
    assert.deepEqual([stopped.status, stopped.json?.accepted], [200, true], stopped.text);
  }
  const { chunks, end } = await logOf(parents, parent);
  assert.equal(end.data.status, isStopped ? "interrupted" : "completed", JSON.stringify(end.data));
  const own = (type) => ofType(chunks, type, parent).map(({ chunk }) => chunk);
  for (const type of ["subagent_start", "subagent_end", "tool_end"]) {
    assert.equal(own(type).length, 1, `${name}: one ${type}`);
  }
  assertForwarding(parent, chunks);
  const [{ subSessionId }] = own("subagent_start");
  const [result] = own("tool_end");
  const state = await parents.get("snapshot", { sessionId: parent });
  const outcome = {
    chunks,
    result: result.result,
    code: result.result?.metadata?.helixErrorDetail?.code,
    kept: state.json.state[Object.keys(state.json.state)[0]],
    spent: undefined,
    lower: undefined,
  };

  if (due === "untold") {
    // Nobody has told one of them to stop, and it would go on for seconds.
    for (const { chunk } of ofType(chunks, "subagent_start")) await children(chunk.subAgentType).abort(chunk.subSessionId);
  }
  const rest = await eventually(`${subSessionId} rests`, async () => {
    const { json } = await children(child).get("status", { sessionId: subSessionId });
    return json.status === "running" ? undefined : json;
  });
  outcome.rest = rest.status ?? rest.code;
  if (rest.code !== "NOT_FOUND") {
    const { chunks: said } = await logOf(children(child), subSessionId);
    assert.equal(ofType(said, "run_started", subSessionId).length, 1, `${name}: the child began once`);
    assertPairing(said);
    outcome.lower = ofType(said, "tool_end", subSessionId).at(-1)?.chunk.result;
    const [below] = ofType(said, "subagent_start", subSessionId);
    if (below) {
      const inner = children(below.chunk.subAgentType);
      const answer = await inner.get("status", { sessionId: below.chunk.subSessionId });
      outcome.innerRest = answer.json.status ?? answer.json.code;
      if (answer.status === 200) {
        const { events } = await inner.read(below.chunk.subSessionId, { fromSequence: 0 });
        assert.equal(ofType(chunksOf(events), "run_started").length, 1, `${name}: the grandchild began once`);
      }
    }
    const rollup = await children(child).get("usage", { sessionId: subSessionId });
    outcome.spent = rollup.json.rollup.tokens.total;
  }
  // At rest all that was spent is counted, once; a read of a child that took too long is made again.
  const usage = await eventually(`${name}: all ${outcome.spent ?? 0} tokens are counted`, async () => {
    const { rollup } = (await parents.get("usage", { sessionId: parent })).json;
    outcome.counted = rollup.tokens.total - rollup.own.tokens.total;
    assert.ok(outcome.counted <= (outcome.spent ?? 0), `${name}: counted ${outcome.counted} of ${outcome.spent}`);
    return outcome.counted === (outcome.spent ?? 0) ? rollup : undefined;
  });
  assert.ok(usage.subAgents.calls <= 2);
  if (fault) assert.equal((await plan(parent)).struck, 1, `${name} has struck`);
  return outcome;
}

/** Holds a job on which a fault has struck to one on which none has. */
function hold(hop, expected, base, seen, { name, hasty }) {
  const said = JSON.stringify({ ...seen, chunks: undefined });
  const [of, without] = hop === "upper" ? [seen.result, base.result] : [seen.lower, base.lower];
  switch (expected) {
    case "same":
      assert.deepEqual(of, without, `${name}: ${said}`);
      if (hop === "upper") assert.deepEqual(seen.result, base.result, `${name}: ${said}`);
      if (hasty) break; // On a slow machine a short deadline may pass without a fault, and a fold be skipped.
      assert.deepEqual(seen.kept, base.kept, `${name}: ${said}`);
      assert.deepEqual([seen.rest, seen.innerRest], [base.rest, base.innerRest], `${name}: ${said}`);
      break;
    case "unfolded":
    case "untold":
      assert.deepEqual(of, without, `${name}: ${said}`);
      break;
    default:
      assert.equal(of?.metadata?.helixErrorDetail?.code, expected, `${name}: ${said}`);
      if (hop === "lower") assert.deepEqual(seen.result, base.result, `${name}: ${said}`);
  }
}

for (const scene of SCENES) {
  describe(`a parent that calls ${scene.call}`, () => {
    let base;
    before(async () => {
      base = await run(scene);
      assert.equal(base.counted, base.spent);
    });

    for (const action of scene.actions) {
      for (const hop of scene.hops) {
        test(`settles once, whatever befalls the ${hop} ${action}`, { concurrency: AT_ONCE }, async (t) => {
          const found = kinds(action);
          if (action === "sse") found.push(...streamKinds([1, 3, 8, 9, 15]));
          const cell = async (kind) => {
            const expected = due(action, kind);
            hold(hop, expected, base, await run(scene, `${hop} ${action}`, expected, kind), kind);
          };
          await Promise.all(found.map((kind) => t.test(kind.name, () => cell(kind))));
        });
      }
    }
  });
}

describe("the deployed pair", () => {
  const { documents, topic } = research(23, { documents: 2, sentences: 6 });
  const faults = [
    ...["request lost", "response lost", "500", "503"].flatMap((wanted) =>
      ["start", "sse"].map((action) => ({ action, ...kinds(action).find(({ name }) => name === wanted) })),
    ),
    ...streamKinds([2, 15, 60]).filter(({ hasty }) => !hasty).map((kind) => ({ action: "sse", ...kind })),
  ];

  test("its job completes with the same report, whatever strikes once", { concurrency: AT_ONCE }, async (t) => {
    const job = async (action, kind) => {
      const id = newSession("writer");
      if (kind) await plan(id, { point: `upper ${action}`, occurrence: 0, fault: kind.fault });
      const started = await world.writer.start({ sessionId: id, message: topic, state: { documents } });
      assert.equal(started.status, 200, started.text);
      const { chunks, end } = await logOf(world.writer, id);
      assert.equal(end.event, "end", JSON.stringify(end.data));
      assertPairing(chunks);
      assertForwarding(id, chunks);
      const planners = ofType(chunks, "subagent_start", id).map(({ chunk }) => chunk.subSessionId);
      for (const planner of planners) {
        assert.equal(ofType(chunks, "run_started", planner).length, 1, `${planner} began once`);
      }
      if (kind) assert.equal((await plan(id)).struck, 1);
      return { output: end.data.output, tokens: end.data.usage.tokens, planners: planners.length };
    };
    const undisturbed = await job();
    assert.ok(quotationsOf(undisturbed.output).length > 0);
    await Promise.all(
      faults.map((kind) =>
        t.test(`${kind.action}: ${kind.name}`, async () => {
          assert.deepEqual(await job(kind.action, kind), undisturbed);
        }),
      ),
    );
  });
});
