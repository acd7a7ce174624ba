// What the events of a stream say, and whether they keep the promises that hold for every stream.

import assert from "node:assert/strict";

/** The chunk events: `{sequence, chunk, bytes}` each. An event's id must be its chunk's sequence. */
export function chunksOf(events) {
  return events
    .filter((event) => event.event === "chunk")
    .map((event) => {
      const { sequence, chunk } = JSON.parse(event.data);
      assert.equal(event.id, String(sequence), "an event's id is its chunk's sequence");
      return { sequence, chunk, bytes: event.bytes };
    });
}

/** The terminal frame, which must be the last event and the only one of its kind: `{event, data, bytes}`. */
export function terminalOf(events) {
  const isTerminal = ({ event }) => event === "end" || event === "error";
  assert.deepEqual(events.filter(isTerminal).length, 1, "one terminal frame");
  const last = events.at(-1);
  assert.ok(isTerminal(last), `the last event is terminal, not ${last?.event}`);
  return { event: last.event, data: JSON.parse(last.data), bytes: last.bytes };
}

/** Chunks of one type, of one agent where it is named. */
export function ofType(chunks, type, agentId) {
  return chunks.filter(({ chunk }) => chunk.type === type && (agentId === undefined || chunk.agentId === agentId));
}

/** Sequences go from `first` on without a gap. */
export function assertGapless(chunks, first = 1) {
  assert.deepEqual(chunks.map(({ sequence }) => sequence), chunks.map((_, at) => first + at), "sequences have no gap");
}

/**
 * What section 4 and 7 of the contract promise for forwarded chunks in the log of `sessionId`. Returns the sequences
 * that came of each direct child, in order.
 */
export function assertForwarding(sessionId, chunks) {
  const announced = new Map([[sessionId, undefined]]);
  const byChild = new Map();
  const byOrigin = new Map();
  for (const { chunk, sequence } of chunks) {
    const { agentId, remoteSource, origin } = chunk;
    assert.ok(announced.has(agentId), `chunk ${sequence}: its agent ${agentId} was announced before`);
    if (chunk.type === "subagent_start") announced.set(chunk.subSessionId, agentId);
    if (agentId === sessionId) {
      assert.equal(remoteSource, undefined, `chunk ${sequence}: an own chunk has no remoteSource`);
      assert.equal(origin, undefined, `chunk ${sequence}: an own chunk has no origin`);
      continue;
    }
    let child = agentId;
    while (announced.get(child) !== sessionId) child = announced.get(child);
    assert.equal(remoteSource.childSessionId, child, `chunk ${sequence}: remoteSource names the direct child`);
    assert.equal(origin.sessionId, agentId, `chunk ${sequence}: origin names the session that said it`);
    const from = append(byChild, child, remoteSource);
    assert.equal(remoteSource.childSequence, from.length, `chunk ${sequence}: each of the child's sequences once, in order`);
    assert.equal(remoteSource.streamId, from[0].streamId, `chunk ${sequence}: one stream for each child`);
    const said = append(byOrigin, agentId, origin);
    assert.ok(origin.sequence > (said.at(-2)?.sequence ?? 0), `chunk ${sequence}: the origin's sequences increase`);
    assert.equal(origin.streamId, said[0].streamId, `chunk ${sequence}: one stream for each origin`);
    if (agentId === child) {
      assert.equal(origin.sequence, remoteSource.childSequence, "a direct child's chunk stands where it came from");
      assert.equal(origin.streamId, remoteSource.streamId);
    }
  }
  for (const [agentId, said] of byOrigin) {
    // What stands between the chunks of a session with children of its own is what it forwarded itself.
    if ([...announced.values()].includes(agentId)) continue;
    assert.deepEqual(said.map(({ sequence }) => sequence), said.map((_, at) => at + 1), `nothing of ${agentId} is missing`);
  }
  return byChild;
}

function append(map, key, value) {
  if (!map.has(key)) map.set(key, []);
  map.get(key).push(value);
  return map.get(key);
}

/** Each sub-agent that was announced ends once, and the end of its call comes directly after. Returns the starts. */
export function assertPairing(chunks) {
  const starts = ofType(chunks, "subagent_start");
  for (const { chunk: start } of starts) {
    const own = chunks.filter(({ chunk }) => chunk.agentId === start.agentId);
    const ends = own.filter(({ chunk }) => chunk.type === "subagent_end" && chunk.subSessionId === start.subSessionId);
    assert.equal(ends.length, 1, `${start.subSessionId} ends once`);
    const after = own[own.indexOf(ends[0]) + 1]?.chunk;
    assert.equal(after?.type, "tool_end", `the call's end follows the end of ${start.subSessionId}`);
    assert.equal(after.toolCallId, start.toolCallId);
    assert.equal(ends[0].chunk.toolCallId, start.toolCallId);
    assert.equal(after.success, ends[0].chunk.success);
  }
  const calls = ofType(chunks, "tool_end").map(({ chunk }) => `${chunk.agentId} ${chunk.toolCallId}`);
  assert.equal(new Set(calls).size, calls.length, "one result for each call");
  return starts.map(({ chunk }) => chunk);
}
