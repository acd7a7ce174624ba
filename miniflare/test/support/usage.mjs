// Section 8: a rollup is the recursive sum of what its sessions spent by themselves.

import assert from "node:assert/strict";
import { placesOf } from "./history.mjs";

const ZERO = { prompt: 0, completion: 0, reasoning: 0, cached: 0, total: 0 };

/** Asserts that each number of a rollup is its own part plus its children's rollups, all the way down. */
export function assertRecursiveSum(rollup) {
  const children = rollup.subAgents.sessions.map(({ remoteRollup, settled, subSessionId }) => {
    assert.equal(settled, true, `${subSessionId} has settled`);
    assert.ok(remoteRollup, `the entry for ${subSessionId} embeds its rollup`);
    assert.equal(remoteRollup.sessionId, subSessionId);
    assertRecursiveSum(remoteRollup);
    return remoteRollup;
  });
  const ids = rollup.subAgents.sessions.map(({ subSessionId }) => subSessionId);
  assert.equal(new Set(ids).size, ids.length, "each child is listed once");
  const { own } = rollup;
  const name = rollup.sessionId;
  assert.deepEqual(rollup.tokens, [own.tokens, ...children.map(({ tokens }) => tokens)].reduce(add, ZERO), `tokens of ${name}`);
  assert.deepEqual(Object.values(rollup.byModel).reduce(add, ZERO), rollup.tokens, `tokens by model of ${name}`);
  assert.deepEqual(rollup.tools, [own.tools, ...children.map(({ tools }) => tools)].reduce(addTools), `tools of ${name}`);
  assert.equal(Object.values(rollup.tools.byTool).reduce((sum, count) => sum + count, 0), rollup.tools.calls);
  assert.equal(rollup.steps, own.steps + sum(children, ({ steps }) => steps), `steps of ${name}`);
  assert.equal(rollup.subAgents.calls, children.length + sum(children, ({ subAgents }) => subAgents.calls), `sub-agent calls of ${name}`);
  assert.equal(rollup.partial, false, `the rollup of ${name} is whole`);
  assert.equal(own.tokens.total, own.tokens.prompt + own.tokens.completion);
  assert.ok(own.tokens.prompt > 0 && own.tokens.completion > 0, `${name} has spent something`);
}

function add(left, right) {
  return Object.fromEntries(Object.keys(ZERO).map((key) => [key, left[key] + right[key]]));
}

function addTools(left, right) {
  const names = new Set([...Object.keys(left.byTool), ...Object.keys(right.byTool)]);
  const byTool = Object.fromEntries([...names].sort().map((name) => [name, (left.byTool[name] ?? 0) + (right.byTool[name] ?? 0)]));
  return { calls: left.calls + right.calls, failures: left.failures + right.failures, byTool };
}

function sum(items, of) {
  return items.reduce((total, item) => total + of(item), 0);
}

/** Every rollup in the tree by session id, with its agent type; `agentType` is the root's. */
export function rollupsOf(rollup, agentType) {
  const below = rollup.subAgents.sessions.flatMap((entry) => rollupsOf(entry.remoteRollup, entry.subAgentType));
  return [{ sessionId: rollup.sessionId, agentType, rollup }, ...below];
}

/** A rollup without the moment at which it was last written, here and in its children's: reading it later may move it. */
export function untimed({ updatedAt, ...rollup }) {
  assert.equal(typeof updatedAt, "number");
  const sessions = rollup.subAgents.sessions.map(({ remoteRollup, ...entry }) => ({ ...entry, remoteRollup: untimed(remoteRollup) }));
  return { ...rollup, subAgents: { ...rollup.subAgents, sessions } };
}

/** Bytes that count as one token of a prompt, for the offline model. */
const BYTES_PER_TOKEN = 4;
/** Where a call's id stands in a conversation: at the call and at its result. */
const MENTIONS = 2;

/**
 * What each session of a job has spent by itself, by its place in the tree, with the ids of its calls, step by step. Each
 * step that the session's log says was committed has one answer, and the ledger has as many.
 */
export function spentOf(root, chunks, rollup) {
  assertRecursiveSum(rollup);
  const own = new Map(rollupsOf(rollup).map(({ sessionId, rollup: { own } }) => [sessionId, own]));
  const places = placesOf(root, chunks);
  assert.deepEqual(places.map(({ id }) => id).sort(), [...own.keys()].sort(), "the log and the rollup have the same sessions");
  return Object.fromEntries(
    places.map(({ id, place, kept }) => {
      const { tokens, steps } = own.get(id);
      assert.equal(steps, kept.filter(({ type }) => type === "step_committed").length, `${place}: steps`);
      return [place, { tokens, steps: idsByStep(kept) }];
    }),
  );
}

/** The ids of a session's calls, for each step that was committed. */
function idsByStep(kept) {
  const steps = [new Set()];
  for (const { type, toolCallId } of kept) {
    if (type === "tool_start") steps.at(-1).add(toolCallId);
    if (type === "step_committed") steps.push(new Set());
  }
  return steps.slice(0, -1).map((ids) => [...ids]);
}

/**
 * Asserts that two jobs have paid for the same answers, each of them once: what was written is the same in every session,
 * and what was read is the same but for calls whose ids are longer, since a discarded attempt had used the shorter ones.
 * A killed process tells nobody what an attempt had cost, so a discarded one adds nothing.
 */
export function assertSameSpent(actual, expected, what) {
  assert.deepEqual(Object.keys(actual).sort(), Object.keys(expected).sort(), `${what}: who has spent`);
  for (const [place, { tokens, steps }] of Object.entries(expected)) {
    const name = `${what}: ${place}`;
    const spent = actual[place].tokens;
    const more = spent.prompt - tokens.prompt;
    const most = longerPrompts(actual[place].steps, steps);
    assert.ok(more >= 0 && more <= most, `${name}: ${more} more tokens of prompts, which longer ids explain up to ${most}`);
    assert.deepEqual(spent, { ...tokens, prompt: spent.prompt, total: tokens.total + more }, name);
  }
}

/** How many tokens more the prompts of a session's steps have at most, for the ids of the calls before. */
function longerPrompts(steps, expected) {
  assert.deepEqual(steps.map((ids) => ids.length), expected.map((ids) => ids.length), "as many calls in each step");
  const length = (ids) => ids.join("").length;
  let bytes = 0;
  let most = 0;
  for (const [at, ids] of steps.entries()) {
    most += Math.ceil(bytes / BYTES_PER_TOKEN);
    bytes += MENTIONS * (length(ids) - length(expected[at]));
  }
  return most;
}
