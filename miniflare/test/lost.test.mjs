// A sub-agent that its parent cannot find, in workerd: the parent in one Worker, its children in another, and between
// them a line with the test at its switch. "On a resume or a recovery" is a kill of workerd, with the same data after it.
//
// The titles are the sentences of the rules that the tests show. Nothing waits for a clock: what has to be in the past is
// moved there in the parent's database, while nothing runs.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { ACTIONS, ANSWER_LOST, HELD, LOST, Line, refused } from "./support/line.mjs";
import { change, forget, rowsOf } from "./support/rows.mjs";
import { assertForwarding, assertGapless, assertPairing, chunksOf, ofType, terminalOf } from "./support/stream.mjs";
import { CLASS, eventsOf, startStress, stressWorker } from "./support/stress.mjs";
import { eventually, newSession, settled } from "./support/world.mjs";

/** Reaches an object by the name of one session and asks it for another. */
const STRAY = `export default {
  fetch(request, env) {
    const { pathname, searchParams, search } = new URL(request.url);
    const object = env.OBJECTS.get(env.OBJECTS.idFromName(searchParams.get("object")));
    return object.fetch(new Request("http://object" + pathname + search));
  },
};`;

const line = new Line();
let world;
let workers;
let parents;
let children;
before(async () => {
  world = await startStress({
    extra: [
      stressWorker("near", { CHILD: { to: "line" } }),
      stressWorker("far", { CHILD: { to: "line" } }),
      line.worker("far"),
      { name: "stray", script: STRAY, objects: { OBJECTS: { of: "near", className: CLASS } } },
    ],
    outbound: line.outbound,
  });
  ({ workers } = world);
  parents = world.mount("near");
  children = world.mount("far");
});
after(() => {
  line.hangUp();
  return world?.stop();
});

const say = (every) => ({ say: { chunks: 2, per: 1, bytes: 8, every } });
/** A child that says at once what it has to say. */
const QUICK = say(0);
/** A child that is at work for longer than any test. */
const ENDLESS = say(600_000);
/** A child that is at work until the line to its own child is mended, see `below`. */
const DELEGATING = { call: [{ agent: "child", message: QUICK }] };

/** The children of a parent, and the children of its first child. */
const ofParent = (id) => `${id}-remote-`;
const below = (id) => new RegExp(`^${id}-remote-call_1-[a-z2-7]{16}-remote-`);

/** A parent that has called one child, which does this: `{id, child, streamId, runId}`. `befall` is told the parent's id. */
async function begin(doing, befall = () => {}) {
  const id = newSession("lost");
  befall(id);
  const message = JSON.stringify({ call: [{ agent: "child", message: doing }] });
  const started = await parents.start({ sessionId: id, message });
  assert.equal(started.status, 200, started.text);
  const missing = new Set(["subagent_start", "tool_end"]);
  let child;
  // The child is announced, and the note beside its call is taken.
  const isUnderWay = ({ event, data }) => {
    const chunk = event === "chunk" ? JSON.parse(data).chunk : {};
    child = chunk.subSessionId ?? child;
    if (chunk.agentId === id) missing.delete(chunk.type);
    return missing.size === 0;
  };
  await parents.read(id, { fromSequence: 0 }, { until: isUnderWay });
  await eventually("the child is there", async () => ((await children.status(child)).status === 200 ? true : undefined));
  return { ...started.json, id, child };
}

/** The same, once the parent knows that its child has begun. */
async function attached(doing, befall) {
  const job = await begin(doing, befall);
  await eventually("the parent attaches", async () => line.asked(job.child, "sse")[0]);
  return job;
}

/** The same; the parent hears nothing of its child. */
const unheard = (doing) => attached(doing, (id) => line.set(ofParent(id), ["sse", "status"], LOST));

/** The same; nothing has answered the `/start` of its child. */
const unanswered = (doing) => begin(doing, (id) => line.set(ofParent(id), ["start"], ANSWER_LOST));

/** The same; its child is at work until the line `below` is mended. */
async function held() {
  const job = await attached(DELEGATING, (id) => line.set(below(id), ["start"], HELD));
  await eventually("the child calls", async () => line.asked(below(job.id), "start")[0]);
  return job;
}

/** Kills workerd, does what is to be done while nothing runs, and starts it again on the same data. */
async function crash(meanwhile = () => {}) {
  await workers.kill();
  line.hangUp();
  meanwhile();
  await workers.start();
}

/** The parent has been restarted too often. */
const spend = ({ id }) => change(workers, id, "UPDATE ra_session SET attempts = 100");

/** The time of its call has been over for this long, in milliseconds. */
const age = ({ id }, milliseconds) => change(workers, id, `UPDATE ra_sub_sessions SET deadline = ${Date.now() - milliseconds}`);

/** Its step is gone and the call with it; the ref of the child, made behind the latest checkpoint, is live. */
const loseCall = ({ id }) => change(workers, id, "DELETE FROM ra_tool_calls", "DELETE FROM ra_step");

/** Kills workerd so that the run of each of these parents has failed afterwards; its calls are open. */
async function failRuns(jobs, meanwhile = () => {}, besides = () => {}) {
  await crash(() => {
    for (const job of jobs) {
      spend(job);
      meanwhile(job);
    }
    besides();
  });
  for (const { id } of jobs) {
    const { end } = await logOf(id);
    assert.deepEqual([end.event, end.data.code], ["error", "run_attempts_exhausted"], JSON.stringify(end.data));
  }
}

const resume = ({ id }, body) => parents.resume({ sessionId: id, ...body });

async function resumed(job, body) {
  const { status, text } = await resume(job, body);
  assert.equal(status, 200, text);
}

/** What comes of `work`, which fails the test when it takes far longer than a slow machine needs. */
function within(seconds, what, work) {
  const { promise, reject } = Promise.withResolvers();
  const timer = setTimeout(() => reject(new Error(`after ${seconds} s still not: ${what}`)), seconds * 1000);
  return Promise.race([work, promise]).finally(() => clearTimeout(timer));
}

/** The whole log of a parent and its terminal frame, with what holds of every log. */
async function logOf(id) {
  const { events } = await within(60, `${id} ends`, parents.read(id, { fromSequence: 0 }));
  const chunks = chunksOf(events);
  assertGapless(chunks);
  assertForwarding(id, chunks);
  return { chunks, end: terminalOf(events) };
}

/** What came of a parent that has completed: its log, its output, and the result of the call. */
async function completed({ id }) {
  const { chunks, end } = await logOf(id);
  assert.deepEqual([end.event, end.data.status], ["end", "completed"], JSON.stringify(end.data));
  const result = ofType(chunks, "tool_end", id).find(({ chunk }) => chunk.toolCallId === "call_1")?.chunk;
  return { chunks, output: end.data.output, result };
}

/** What the model reads: `script`, `user …`, `assistant`, and `tool <call> <code of its failure, or ok>`. */
function conversation({ id }) {
  return rowsOf(workers, id, "SELECT body FROM ra_messages ORDER BY position").map(({ body }) => {
    const { role, text, toolCallId, outcome } = JSON.parse(body);
    if (role === "user") return text.startsWith("{") ? "script" : `user ${text}`;
    if (role === "assistant") return role;
    return `tool ${toolCallId} ${outcome.success ? "ok" : outcome.result.metadata.helixErrorDetail.code}`;
  });
}

/** What stands in the conversation when a call came to this and a message followed. */
const told = (came, ...then) => ["script", "assistant", "tool call_0 ok", `tool call_1 ${came}`, ...then];

/** The refs of a parent, each call with its status. */
const refs = ({ id }) =>
  rowsOf(workers, id, "SELECT tool_call_id, status FROM ra_sub_sessions ORDER BY position").map((row) => Object.values(row));

/** Every row that the library keeps of a session. */
function everything({ id }) {
  const tables = rowsOf(workers, id, "SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB 'ra_*' ORDER BY name");
  return tables.map(({ name }) => [name, rowsOf(workers, id, `SELECT * FROM ${name} ORDER BY 1`)]);
}

/** What the library has logged at the level warn about a child. */
const warnings = ({ child }) =>
  eventsOf(workers).filter(({ level, subSessionId, note }) => level === "warn" && subSessionId === child && /status cannot be read/.test(note));

describe("A child the parent cannot find settles framework_subagent_lost", () => {
  const CAUSES = [
    {
      cause: "not_found",
      when: "the child's producer does not know the session",
      meanwhile: ({ child }) => forget(workers, child),
    },
    {
      cause: "refused:UNAUTHORIZED",
      when: "the producer refused the status read typed and non-retryable",
      meanwhile: ({ child }) => line.set(child, ["sse", "status"], refused(401, "UNAUTHORIZED")),
    },
    {
      cause: "status_unreachable",
      when: "the status stayed unreadable past the child's own timeout plus one minute of grace",
      meanwhile: (job) => {
        line.set(job.child, ACTIONS, LOST);
        age(job, 61_000);
      },
      // It may be at work all the same: it is told to stop as soon as it can be.
      ref: "stopping",
    },
  ];
  for (const { cause, when, meanwhile, ref = "failed" } of CAUSES) {
    describe(`${cause}: ${when}`, () => {
      let jobs;
      before(async () => {
        const [recovered, ...ended] = await Promise.all([1, 2, 3, 4].map(() => attached(ENDLESS)));
        await failRuns(ended, (job) => meanwhile(job), () => meanwhile(recovered));
        const [continued, withMessage, newTurn] = ended;
        jobs = { recovered, continued, withMessage, newTurn };
        await Promise.all([
          resumed(continued, { mode: "continue" }),
          resumed(withMessage, { mode: "with_message", message: "and?" }),
          resumed(newTurn, { mode: "new_turn", message: "and?" }),
        ]);
      });

      async function assertLost(job, ...then) {
        const { chunks, output, result } = await completed(job);
        assertPairing(chunks);
        const helixErrorDetail = { code: "framework_subagent_lost", category: "framework", retryable: false, cause };
        assert.equal(result.success, false, "a failed tool result");
        assert.deepEqual(result.result.metadata, { helixErrorDetail }, "and a typed one");
        assert.deepEqual(refs(job), [["call_1", ref]]);
        assert.deepEqual(conversation(job), told("framework_subagent_lost", ...then));
        return { output, result };
      }

      test("on a recovery; the model sees a failed tool result for the call and the run goes on", async () => {
        const { output, result } = await assertLost(jobs.recovered, "assistant");
        assert.deepEqual(JSON.parse(output), ["noted", result.result]);
      });

      test("on a resume; the model sees a failed tool result for the call and the run goes on", async () => {
        const { output, result } = await assertLost(jobs.continued, "assistant");
        assert.deepEqual(JSON.parse(output), ["noted", result.result]);
      });

      test("a child that is lost has its typed result committed before the message of a resume", async () => {
        await assertLost(jobs.withMessage, "user and?", "assistant");
      });

      test("a child that is lost has its typed result committed before the message of a new turn", async () => {
        await assertLost(jobs.newTurn, "user and?", "assistant");
      });
    });
  }

  test("not before that minute of grace is over", async () => {
    const job = await attached(ENDLESS);
    await failRuns([job], () => {
      line.set(job.child, ACTIONS, LOST);
      age(job, 30_000);
    });
    const { status, json } = await resume(job, { mode: "with_message", message: "and?" });
    assert.deepEqual([status, json.code], [409, "state_already_running"]);
    assert.deepEqual(refs(job), [["call_1", "running"]]);
  });

  test("any other failure is transient: it is logged at warn, and the next reconcile retries it", async () => {
    const jobs = await Promise.all([unheard(QUICK), unheard(QUICK)]);
    for (const { child } of jobs) await settled(children, child, "completed");
    const [called, orphaned] = jobs;
    await failRuns(jobs, (job) => {
      if (job === orphaned) loseCall(job);
    });
    line.set(called.child, ["status"], refused(503, "OVERLOADED"));
    const { status, json } = await resume(called, { message: "and?" });
    assert.deepEqual([status, json.code], [409, "state_already_running"]);
    await resumed(orphaned, { message: "and?" });
    await completed(orphaned);
    for (const job of jobs) {
      assert.ok(warnings(job).length > 0, "it is logged at warn");
      assert.deepEqual(refs(job), [["call_1", "running"]], "and nothing is settled");
      line.mend(ofParent(job.id));
      line.mend(job.child);
      await resumed(job, { message: "and?" });
      await completed(job);
      assert.deepEqual(refs(job), [["call_1", "completed"]]);
    }
  });
});

describe("Reconcile reads the session's live refs", () => {
  test("so a child dispatched after the checkpoint is reconciled: one that is still at work is stopped, its ref failed", async () => {
    const job = await attached(ENDLESS);
    await failRuns([job], loseCall);
    await resumed(job, { message: "and?" });
    const { chunks } = await completed(job);
    assert.equal((await children.status(job.child)).json.status, "interrupted");
    assert.deepEqual(refs(job), [["call_1", "failed"]]);
    const ends = ofType(chunks, "subagent_end", job.id).map(({ chunk }) => [chunk.subSessionId, chunk.success]);
    assert.deepEqual(ends, [[job.child, false]]);
    assert.deepEqual(conversation(job), ["script", "user and?", "assistant"], "its call has no result: it is gone");
    const { json } = await parents.usage(job.id);
    const counted = json.rollup.subAgents.sessions.map((session) => [session.subSessionId, session.remoteRollupOrigin]);
    assert.deepEqual(counted, [[job.child, "recovery"]], "and what it spent is counted");
  });

  test("one that has ended is settled by what it came to, on a recovery too", async () => {
    const job = await unheard(QUICK);
    await settled(children, job.child, "completed");
    await crash(() => {
      loseCall(job);
      line.mend(ofParent(job.id));
    });
    const { chunks, output } = await completed(job);
    assert.deepEqual(refs(job)[0], ["call_1", "completed"]);
    const [first, again] = ofType(chunks, "subagent_end", job.id).map(({ chunk }) => chunk);
    assert.deepEqual([first.subSessionId, first.success], [job.child, true]);
    assert.notEqual(again.toolCallId, "call_1", "the model is asked again, and its call is another");
    assert.deepEqual(JSON.parse(output), ["noted", first.result]);
  });

  test("one that is lost is settled as well", async () => {
    const job = await attached(ENDLESS);
    await failRuns([job], (lost) => {
      loseCall(lost);
      forget(workers, lost.child);
    });
    await resumed(job, { message: "and?" });
    const { chunks } = await completed(job);
    assert.deepEqual(refs(job), [["call_1", "failed"]]);
    const ends = ofType(chunks, "subagent_end", job.id).map(({ chunk }) => [chunk.subSessionId, chunk.success, chunk.error]);
    assert.deepEqual(ends, [[job.child, false, "The sub-agent can no longer be found."]]);
  });

  describe("a child whose /start never answered is reconciled too", () => {
    let jobs;
    before(async () => {
      const [lost, orphan, finished, running] = await Promise.all([ENDLESS, ENDLESS, QUICK, ENDLESS].map(unanswered));
      await settled(children, finished.child, "completed");
      jobs = { lost, orphan, finished, running };
      await failRuns(Object.values(jobs), (job) => {
        const [ref] = rowsOf(workers, job.id, "SELECT location, remote_stream_id FROM ra_sub_sessions");
        assert.deepEqual(ref, { location: "remote", remote_stream_id: null }, "its stream's identity is not known");
        if (job === lost) {
          line.set(lost.child, ACTIONS, LOST);
          age(lost, 61_000);
        }
        if (job === orphan) loseCall(orphan);
      });
    });

    test("lost, it settles typed", async () => {
      await resumed(jobs.lost, { mode: "continue" });
      const { result } = await completed(jobs.lost);
      const { code, cause } = result.result.metadata.helixErrorDetail;
      assert.deepEqual([code, cause], ["framework_subagent_lost", "status_unreachable"]);
    });

    test("without its call, it is stopped", async () => {
      await resumed(jobs.orphan, { message: "and?" });
      await completed(jobs.orphan);
      assert.equal((await children.status(jobs.orphan.child)).json.status, "interrupted");
      assert.deepEqual(refs(jobs.orphan), [["call_1", "failed"]]);
    });

    test("finished, its result comes before a message", async () => {
      line.mend(ofParent(jobs.finished.id));
      await resumed(jobs.finished, { message: "and?" });
      const { result } = await completed(jobs.finished);
      assert.equal(result.success, true);
      assert.deepEqual(conversation(jobs.finished), told("ok", "user and?", "assistant"));
    });

    test("still running, it refuses a message", async () => {
      const { status, json } = await resume(jobs.running, { message: "and?" });
      assert.deepEqual([status, json.code], [409, "state_already_running"]);
    });
  });
});

describe("An entry with a new message settles its remote children first", () => {
  for (const mode of ["with_message", "new_turn"]) {
    test(`a child that finished (completed, failed) has its real result committed before the message: ${mode}`, async () => {
      const [whole, aborted] = await Promise.all([unheard(QUICK), unheard(ENDLESS)]);
      assert.equal((await children.abort(aborted.child)).status, 200);
      const { output } = await settled(children, whole.child, "completed");
      await settled(children, aborted.child, "failed");
      await failRuns([whole, aborted]);
      for (const job of [whole, aborted]) {
        assert.deepEqual(conversation(job), ["script"], "the call is unpaired at the end of the transcript");
        line.mend(ofParent(job.id));
        await resumed(job, { mode, message: "and?" });
      }
      const { chunks, result } = await completed(whole);
      assertPairing(chunks);
      assert.deepEqual([result.success, result.result], [true, output]);
      assert.deepEqual(conversation(whole), told("ok", "user and?", "assistant"));
      assert.deepEqual(refs(whole), [["call_1", "completed"]]);
      const { result: failure } = await completed(aborted);
      assert.deepEqual([failure.success, failure.result.metadata.helixErrorDetail.code], [false, "run_aborted"]);
      assert.deepEqual(conversation(aborted), told("run_aborted", "user and?", "assistant"));
      assert.deepEqual(refs(aborted), [["call_1", "failed"]]);
    });
  }

  test("a child that is still running: on a resume with a message the entry is refused busy and writes nothing", async () => {
    const job = await held();
    await failRuns([job]);
    const before = { log: await logOf(job.id), rows: everything(job) };
    assert.ok(before.rows.length > 5);
    const { status, json } = await resume(job, { mode: "with_message", message: "and?" });
    assert.deepEqual([status, json.code], [409, "state_already_running"]);
    assert.deepEqual({ log: await logOf(job.id), rows: everything(job) }, before);
    assert.equal((await children.status(job.child)).json.status, "running", "and the child goes on");
    // Hold the message and send it again once the child has finished.
    line.mend(below(job.id));
    await settled(children, job.child, "completed");
    await resumed(job, { mode: "with_message", message: "and?" });
    const { result } = await completed(job);
    assert.equal(result.success, true);
    assert.deepEqual(conversation(job), told("ok", "user and?", "assistant"));
  });

  test("a child that is still running: on a new turn it is stopped and its call keeps the unpaired_on_continuation result", async () => {
    const job = await attached(ENDLESS);
    await failRuns([job]);
    await resumed(job, { mode: "new_turn", message: "something else" });
    const { chunks, result } = await completed(job);
    assertPairing(chunks);
    const helixErrorDetail = { code: "unpaired_on_continuation", category: "framework", retryable: false, cause: "new_message" };
    assert.equal(result.success, false);
    assert.deepEqual(result.result.metadata, { helixErrorDetail });
    assert.deepEqual(conversation(job), told("unpaired_on_continuation", "user something else", "assistant"));
    await settled(children, job.child, "interrupted");
    await eventually("its ref is failed", async () => (refs(job)[0][1] === "failed" ? true : undefined));
  });

  test("that stop is best-effort: a child that cannot be told keeps no turn from going on", async () => {
    const job = await attached(ENDLESS);
    await failRuns([job]);
    line.set(job.child, ["interrupt"], refused(403, "FORBIDDEN"));
    await resumed(job, { mode: "new_turn", message: "something else" });
    await completed(job);
    assert.deepEqual(conversation(job), told("unpaired_on_continuation", "user something else", "assistant"));
    assert.equal((await children.status(job.child)).json.status, "running");
    assert.deepEqual(refs(job), [["call_1", "stopping"]], "it is told again by the next execution");
    line.mend(job.child);
    await resumed(job, { message: "and?" });
    await settled(children, job.child, "interrupted");
  });

  test("on an entry with no new message nothing changes, and the run re-attaches to the child", async () => {
    const job = await held();
    await failRuns([job]);
    await resumed(job, { mode: "continue" });
    line.mend(below(job.id));
    const { chunks, result } = await completed(job);
    assertPairing(chunks);
    assert.equal(result.success, true);
    assert.equal(line.asked(new RegExp(`^${job.child}$`), "start").length, 1, "nothing is begun again");
    assert.deepEqual(conversation(job), told("ok", "assistant"));
  });
});

describe("On a Durable Object", () => {
  test("one with no session answers the status route with the typed 404 envelope", async () => {
    const { status, headers, json } = await children.status(newSession("nobody"));
    assert.deepEqual([status, json.code], [404, "NOT_FOUND"]);
    assert.match(headers["content-type"], /^application\/json/);
    assert.equal(typeof json.error, "string");
  });

  test("a recovered parent re-attaches from the stored last sequence and sends no second start", async () => {
    const job = await held();
    const alone = new RegExp(`^${job.child}$`);
    await crash();
    const attaches = line.asked(alone, "sse").length;
    const [{ remote_last_sequence: stored }] = rowsOf(workers, job.id, "SELECT remote_last_sequence FROM ra_sub_sessions");
    line.mend(below(job.id));
    const { chunks, result } = await completed(job);
    assertPairing(chunks);
    assert.equal(result.success, true);
    assert.ok(stored > 0);
    assert.equal(line.asked(alone, "sse")[attaches].from, String(stored));
    assert.equal(line.asked(alone, "start").length, 1);
  });

  test("a malformed row is a typed InvalidStoredState", async () => {
    const job = await attached(ENDLESS);
    await crash(() => change(workers, job.id, "UPDATE ra_sub_sessions SET remote_last_sequence = NULL"));
    const { result } = await completed(job);
    assert.deepEqual([result.success, result.result.metadata.helixErrorDetail.code], [false, "invalid_stored_state"]);
    assert.deepEqual(refs(job), [["call_1", "failed"]]);
  });

  test("a read of a session id that is not the object's own logs both ids", async () => {
    const [own, other] = [newSession("own"), newSession("other")];
    for (const sessionId of [own, other]) assert.equal((await parents.start({ sessionId, message: "hello" })).status, 200);
    const stray = (object, sessionId) => fetch(`${workers.urls.stray}/stress/status?${new URLSearchParams({ object, sessionId })}`);
    const told = () => eventsOf(workers).filter(({ event }) => event === "foreign_session");
    assert.equal((await stray(own, own)).status, 200);
    assert.deepEqual(told(), []);
    const answer = await stray(own, other);
    assert.deepEqual([answer.status, (await answer.json()).code], [404, "NOT_FOUND"]);
    const [logged] = await eventually("it is logged", async () => (told().length > 0 ? told() : undefined));
    assert.deepEqual([logged.level, logged.sessionId, logged.askedSessionId], ["warn", own, other]);
  });
});
