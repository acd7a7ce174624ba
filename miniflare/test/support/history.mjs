// What a log says once everything is taken away that may differ between two runs of one job: ids, times, numbers, and
// what was discarded.

import assert from "node:assert/strict";

/** Of one attempt at an answer: what is void when the answer is discarded. */
const OF_AN_ANSWER = new Set(["text_delta", "thinking", "tool_arg_stream_start", "tool_arg_stream_delta", "tool_arg_stream_end"]);
/** What differs between runs: the order of parallel writes shows in the patches, whose sum is checked elsewhere. */
const LEFT_OUT = new Set(["state_patch", "step_discarded"]);
const UNSTABLE = ["agentId", "timestamp", "runId", "remoteSource", "origin", "checkpointId", "patchOrdinal", "subSessionId", "toolCallId"];

/**
 * The histories in the log of `root`: by place in the tree (`"root"`, `"root/1"`: the child of the call with the index 1)
 * and, within it, by call. What runs at the same time may be told in any order; what belongs to one call may not.
 *
 * @returns {Record<string, object[]>}
 */
export function historiesOf(root, chunks) {
  const histories = {};
  for (const { place, kept, calls } of placesOf(root, chunks)) {
    for (const chunk of kept) {
      const call = calls.get(chunk.toolCallId);
      const key = call === undefined ? place : `${place} call ${call}`;
      const told = Object.fromEntries(Object.entries(chunk).filter(([field]) => !UNSTABLE.includes(field)));
      (histories[key] ??= []).push(told);
    }
  }
  return histories;
}

/**
 * The sessions in the log of `root`, each with its place in the tree, the chunks of it that stand, and its calls with their
 * indexes.
 *
 * @returns {{ id: string, place: string, kept: object[], calls: Map<string, number> }[]}
 */
export function placesOf(root, chunks) {
  const own = new Map();
  for (const { sequence, chunk } of chunks) {
    if (!own.has(chunk.agentId)) own.set(chunk.agentId, []);
    own.get(chunk.agentId).push({ chunk, sequence: chunk.origin?.sequence ?? sequence });
  }
  const tell = (id, place) => {
    const kept = withoutDiscarded(own.get(id) ?? []);
    const calls = new Map();
    for (const { toolCallId } of kept) {
      if (toolCallId !== undefined && !calls.has(toolCallId)) calls.set(toolCallId, calls.size);
    }
    const starts = kept.filter(({ type }) => type === "subagent_start");
    return [{ id, place, kept, calls }, ...starts.flatMap((start) => tell(start.subSessionId, `${place}/${calls.get(start.toolCallId)}`))];
  };
  return tell(root, "root");
}

/** One session's chunks that stand: an answer that was discarded before it was committed said nothing. */
function withoutDiscarded(chunks) {
  let kept = [];
  for (const { chunk, sequence } of chunks) {
    if (chunk.type === "step_discarded") {
      const isAnswered = kept.some((one) => one.sequence > chunk.fromSequence && one.chunk.type === "tool_start");
      if (!isAnswered) kept = kept.filter((one) => one.sequence <= chunk.fromSequence || !OF_AN_ANSWER.has(one.chunk.type));
    }
    if (!LEFT_OUT.has(chunk.type)) kept.push({ chunk, sequence });
  }
  return kept.map(({ chunk }) => chunk);
}

/** Asserts that two jobs have the same histories, and says where they differ. */
export function assertSameHistories(actual, expected, what) {
  assert.deepEqual(Object.keys(actual).sort(), Object.keys(expected).sort(), `${what}: the calls`);
  for (const [key, history] of Object.entries(expected)) assert.deepEqual(actual[key], history, `${what}: ${key}`);
}
