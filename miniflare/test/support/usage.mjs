// Section 8: a rollup is the recursive sum of what its sessions spent by themselves.

import assert from "node:assert/strict";

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
