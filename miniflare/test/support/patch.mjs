// RFC 6902, written from the standard; it shares nothing with the library. And the law of the step over a stream.

import assert from "node:assert/strict";

/** The document after these operations; the one given stays as it is. Throws where the standard says it is an error. */
export function apply(document, operations) {
  const holder = { root: structuredClone(document) };
  for (const operation of operations) perform(holder, operation);
  return holder.root;
}

function perform(holder, { op, path, from, value }) {
  const target = locate(holder, path);
  switch (op) {
    case "add":
      return add(target, structuredClone(value));
    case "remove":
      return remove(target);
    case "replace":
      valueAt(target);
      target.parent[target.key] = structuredClone(value);
      return undefined;
    case "move": {
      const moved = remove(locate(holder, from));
      return add(locate(holder, path), moved);
    }
    case "copy":
      return add(target, structuredClone(valueAt(locate(holder, from))));
    case "test":
      return assert.deepEqual(valueAt(target), value, `test ${path}`);
    default:
      throw new Error(`no operation of the standard: ${op}`);
  }
}

/** The object or array that holds what a pointer names, and the key in it. */
function locate(holder, path) {
  assert.match(path, /^(\/|$)/, `no pointer: ${path}`);
  const tokens = path.split("/").map((token) => token.replaceAll("~1", "/").replaceAll("~0", "~"));
  const key = tokens.pop();
  if (path === "") return { parent: holder, key: "root" };
  tokens[0] = "root";
  return { parent: tokens.reduce((parent, token) => valueAt({ parent, key: token }), holder), key };
}

function valueAt({ parent, key }) {
  assert.ok(parent !== null && typeof parent === "object", `nothing at ${key}`);
  if (Array.isArray(parent)) index(key, parent.length - 1);
  assert.ok(Object.hasOwn(parent, key), `nothing at ${key}`);
  return parent[key];
}

function index(token, last) {
  assert.match(token, /^(0|[1-9]\d*)$/, `no index: ${token}`);
  assert.ok(Number(token) <= last, `index ${token} is out of range`);
  return Number(token);
}

function add({ parent, key }, value) {
  assert.ok(parent !== null && typeof parent === "object", `nothing to add ${key} to`);
  if (Array.isArray(parent)) parent.splice(key === "-" ? parent.length : index(key, parent.length), 0, value);
  else parent[key] = value;
}

function remove(target) {
  const removed = valueAt(target);
  if (Array.isArray(target.parent)) target.parent.splice(Number(target.key), 1);
  else delete target.parent[target.key];
  return removed;
}

/**
 * Follows the state of one session through the chunks of a stream, its own or one that it was forwarded to, from a
 * pinned snapshot on. Asserts the law of the step at each `step_committed`.
 *
 * @returns {{state: any, steps: number, patches: number}}  The state after the last chunk, and what it took.
 */
export function follow(snapshot, chunks) {
  assert.notEqual(snapshot.streamSequence, -1, "a baseline must be pinned");
  let committed = { state: snapshot.state, ordinal: snapshot.patchOrdinal };
  let { state, ordinal } = committed;
  let [steps, patches] = [0, 0];
  for (const { chunk, sequence } of chunks) {
    if (chunk.agentId !== snapshot.sessionId) continue;
    const own = chunk.origin?.sequence ?? sequence;
    if (own <= snapshot.streamSequence) continue;
    if (chunk.type === "step_discarded") ({ state, ordinal } = committed);
    if (chunk.type === "state_patch") {
      assert.equal(chunk.patchBase, ordinal, `chunk ${own} of ${chunk.agentId}: its base is the patch before it`);
      assert.ok(chunk.patchOrdinal > ordinal, "ordinals increase");
      [state, ordinal, patches] = [apply(state, chunk.patches), chunk.patchOrdinal, patches + 1];
    }
    if (chunk.type === "step_committed") {
      assert.equal(chunk.patchOrdinal, ordinal, `step ${chunk.stepCount} of ${chunk.agentId} stands on its last patch`);
      [committed, steps] = [{ state, ordinal }, steps + 1];
    }
  }
  return { state, steps, patches };
}
