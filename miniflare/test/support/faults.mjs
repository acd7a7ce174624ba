// Every kind of fault between two services, and what a call makes of it.

import { readFileSync } from "node:fs";

/** The Worker that does one thing wrong once; `services` are its own bindings. */
export function faultWorker(name, services) {
  return { name, script: readFileSync(new URL("../../fault-worker.mjs", import.meta.url), "utf8"), services };
}

const REFUSALS = [
  [400, "VALIDATION_ERROR"],
  [401, "UNAUTHORIZED"],
  [404, "NOT_FOUND"],
  [404, "FEATURE_UNAVAILABLE"],
  [405, "METHOD_NOT_ALLOWED"],
  [409, "IDEMPOTENCY_CONFLICT"],
  [409, "state_already_running"],
  [409, "state_child_session_taken"],
  [413, "PAYLOAD_TOO_LARGE"],
  [418, "TEAPOT"],
];

const envelope = (status, code, headers) => {
  const body = JSON.stringify({ code, error: "No." });
  return { kind: "instead", status, contentType: "application/json", body, headers };
};
const bare = (status, headers) => ({ kind: "instead", status, headers });
const json = (body, status = 200) => ({ kind: "instead", status, contentType: "application/json", body });

const ELSEWHERE = JSON.stringify({
  ...{ sessionId: "elsewhere", streamId: "st_1", status: "completed", accepted: true, state: {}, streamSequence: 3 },
  ...{ oldestRetainedSequence: 0, stepCount: 1, rollup: {} },
});

/** Answers that take the place of the true one: name, fault and class. */
const ANSWERS = [
  ...REFUSALS.map(([status, code]) => [`${status} ${code}`, envelope(status, code), { refused: code }]),
  ["409 ALREADY_RUNNING", envelope(409, "ALREADY_RUNNING"), "attach"],
  ["409 ALREADY_COMPLETED", envelope(409, "ALREADY_COMPLETED"), "attach"],
  ["429", envelope(429, "RATE_LIMITED", { "retry-after": "1" }), "passing"],
  ["429 bare", bare(429), "passing"],
  ["500", envelope(500, "INTERNAL"), "passing"],
  ["500 bare", bare(500), "passing"],
  ["502 bare", bare(502), "passing"],
  ["503", envelope(503, "OVERLOADED", { "retry-after": "1" }), "passing"],
  ["504 bare", bare(504), "passing"],
  ["403 bare", bare(403), "unexplained"],
  ["202", json(ELSEWHERE, 202), "malformed"],
  ["204", bare(204), "malformed"],
  ["redirect", bare(307, { location: "http://elsewhere/agents" }), "malformed"],
  ["page of HTML", bare(200), "malformed"],
  ["garbage", json('{"sessionId": "'), "malformed"],
  ["nothing", json(""), "malformed"],
  ["another session's", json(ELSEWHERE), "malformed"],
  ["huge", { ...json(""), huge: true }, "malformed"],
];

/**
 * Every kind of fault at a request of this action: `{name, fault, class, hasty}` each. What is `hasty` ends by a
 * deadline alone, so it is for calls with a short one.
 */
export function kinds(action) {
  const kinds = [
    ["request lost", { kind: "request lost" }, "passing"],
    ["response lost", { kind: "response lost" }, "passing"],
    ["late", { kind: "late" }, "passing", true],
    ["unanswered", { kind: "unanswered" }, "passing", true],
    ["projected", { kind: "header", name: "x-remote-agents-mount", value: "projected" }, "projected"],
    ["later version", { kind: "header", name: "x-remote-agents-version", value: "2" }, "later"],
    ["wrong content type", { kind: "header", name: "content-type", value: "text/plain" }, "malformed"],
    ...(action === "sse" ? [] : [["body cut", { kind: "cut in the middle" }, "passing"]]),
    ...ANSWERS,
  ].map(([name, fault, of, hasty = false]) => ({ name, fault, class: of, hasty }));
  const tookEffect = ["429", "500", "502 bare", "400 VALIDATION_ERROR", "409 ALREADY_RUNNING", "garbage", "redirect", "huge"];
  const again = ["start", "resume", "interrupt"].includes(action)
    ? kinds
        .filter(({ name }) => tookEffect.includes(name))
        .map((kind) => ({ ...kind, name: `${kind.name}, took effect`, fault: { ...kind.fault, tookEffect: true } }))
    : [];
  return [...kinds, ...again];
}

/** Every kind of fault in a stream, at places by how many events are whole before it. */
export function streamKinds(places) {
  const error = (recoverable) => `event: error\ndata: ${JSON.stringify({ code: "INTERNAL", error: "Oops.", recoverable })}\n\n`;
  const at = (name, events, fault, hasty = false) => ({
    ...{ name: `${name}, at ${events}`, fault: { kind: "cut", events, ...fault }, class: "passing", hasty },
  });
  const [first, second = first] = places;
  return [
    ...places.map((events) => at("cut between events", events, { ending: "clean" })),
    ...places.map((events) => at("cut within an event", events, { more: 9, ending: "reset" })),
    at("silent", first, { ending: "silence" }, true),
    at("silent", second, { ending: "silence" }, true),
    at("garbage event", second, { slip: "event: chunk\nid: 1\ndata: {oops\n\n", ending: "clean" }),
    at("recoverable error", second, { slip: error(true), ending: "clean" }),
    at("final error", second, { slip: error(false), ending: "clean" }),
    at("rewound", second, { slip: "event: rewound\ndata: {}\n\n", ending: "clean" }),
    at("huge event", second, { slip: `event: chunk\ndata: ${"x".repeat(9 << 20)}`, ending: "clean" }),
  ];
}

/** What must come of it: `"same"`, `"unfolded"`, `"untold"`, or the code with which the call fails. */
export function due(action, { name, class: of, fault, hasty }) {
  const { refused } = of;
  if (action === "interrupt") {
    // Without a key, what a failing server has done is not known: it is not sent again.
    const isPassing = of === "passing" && !hasty && !["500", "500, took effect"].includes(name);
    const isTold = isPassing || (of === "attach" && fault.tookEffect);
    return isTold ? "same" : "untold";
  }
  if (of === "passing") return ["snapshot", "usage"].includes(action) && hasty ? "unfolded" : "same";
  // Under a key, an answer that cannot be read is asked for again.
  // (The true answer to this resume is a refusal, and one of another type is unexplained.)
  const isUnexplained = action === "resume" && name === "wrong content type";
  if (["start", "resume"].includes(action) && of === "malformed" && !isUnexplained) return "same";
  if (action === "start") {
    if (refused) return refused;
    if (of === "attach") return fault.tookEffect ? "same" : "framework_subagent_lost";
    if (of === "unexplained") return "transport_error";
  }
  if (action === "resume") {
    if (refused === "state_child_session_taken") return refused;
    return of === "attach" ? "same" : "producer-dead";
  }
  if (action === "status" && (refused || of === "attach" || of === "unexplained")) return "framework_subagent_lost";
  if (of === "projected") return "framework_not_supported";
  if (["snapshot", "usage"].includes(action)) return "unfolded";
  if (of === "later") return "VERSION_UNSUPPORTED";
  return "same";
}
