// The answer of the tree route.

import assert from "node:assert/strict";

/** Every node of a tree, the root first, each with its parent's id and without its children. */
export function nodesOf({ children, ...node }, parent) {
  return [{ ...node, ...(parent === undefined ? {} : { parent }) }, ...children.flatMap((child) => nodesOf(child, node.sessionId))];
}

/** Each node of a writer's tree is what its session's own snapshot is. */
export async function assertAreSnapshots(world, nodes) {
  for (const { agentType, status, toolCallId, remote, parent, ...snapshot } of nodes) {
    const { json } = agentType === "writer" ? await world.writer.snapshot(snapshot.sessionId) : await world.child.snapshot(snapshot.sessionId, agentType);
    assert.deepEqual(snapshot, json, snapshot.sessionId);
  }
}
