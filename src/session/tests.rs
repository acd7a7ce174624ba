//! The machine: the action × status table, the answer's own commit, and the law of the step.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use serde_json::{Value, json};

use super::step::not_executed;
use super::*;
use crate::protocol::ids::{AgentType, RunId, SessionId, StreamId};
use crate::protocol::message::ResumeMode;
use crate::protocol::usage::{Tokens, UsageRollup};
use crate::store::{
    Failure, MessageRecord, RunRecord, SessionOrigin, StopKind, ToolCall, ToolOutcome,
};

pub(super) fn ids(n: u8) -> EntryIds {
    EntryIds {
        run_id: RunId::from_entropy([n; 16]),
        entropy: [n; 16],
    }
}

pub(super) fn begin(state: Value) -> Transition {
    Session::begin(
        Begin {
            session_id: SessionId::parse("s1").unwrap(),
            agent_type: AgentType::parse("tester").unwrap(),
            stream_id: StreamId::parse("st_1").unwrap(),
            message: "hello".into(),
            state,
            origin: SessionOrigin::default(),
            idempotency: None,
            ids: ids(1),
        },
        1000,
    )
    .unwrap()
}

pub(super) fn run() -> RunRecord {
    RunRecord {
        run_id: RunId::from_entropy([1; 16]),
        start_sequence: 0,
        start_step: 0,
        started_at: 1000,
        terminal: None,
    }
}

pub(super) fn answer(calls: &[&str]) -> ModelAnswer {
    ModelAnswer {
        text: "so".into(),
        calls: calls
            .iter()
            .map(|id| ToolCall {
                id: (*id).into(),
                name: "t".into(),
                arguments: json!({}),
            })
            .collect(),
        queued: Vec::new(),
        cut: false,
        kept: None,
        model: "m".into(),
        tokens: Tokens::default(),
    }
}

pub(super) fn ok(result: Value) -> ToolOutcome {
    ToolOutcome {
        success: true,
        result,
        error: None,
    }
}

pub(super) fn failure() -> Failure {
    Failure {
        code: "provider_error".into(),
        error: "no".into(),
        detail: None,
    }
}

/// The chunks of a commit, decoded.
pub(super) fn chunks(transition: &Transition) -> Vec<Value> {
    transition
        .commit
        .writes
        .iter()
        .filter_map(Write::chunks)
        .flat_map(|(_, chunks)| chunks)
        .map(|text| serde_json::from_str(text).unwrap())
        .collect()
}

pub(super) fn kinds(transition: &Transition) -> Vec<String> {
    chunks(transition)
        .iter()
        .map(|chunk| chunk["type"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_start_commits_run_message_and_checkpoint_at_its_first_chunk() {
    let start = begin(json!({"n": 1}));
    assert_eq!(start.commit.fence, None);
    assert_eq!(kinds(&start), ["run_started"]);
    let snapshot = start.next.snapshot();
    assert_eq!(snapshot.stream_sequence, Position::At(1));
    assert_eq!(snapshot.state, json!({"n": 1}));
    assert_eq!(snapshot.patch_ordinal, Some(0));
    assert!(
        snapshot
            .checkpoint_id
            .unwrap()
            .starts_with("cpv1-s1-s0-t1000-")
    );
    assert!(
        start
            .commit
            .writes
            .iter()
            .any(|w| matches!(w, Write::Message(MessageRecord::User { text }) if text == "hello"))
    );
}

#[test]
fn the_answer_is_a_commit_of_its_own_and_staged_state_is_not_served() {
    let session = begin(json!({"list": []})).next;
    assert_eq!(session.next(), Next::Ask);
    let answered = session.answer(answer(&["a"]), 1).unwrap();
    assert_eq!(answered.next.next(), Next::Act);
    let staged = answered.next.stage("a", json!({"list": [1]}), 2).unwrap();
    assert_eq!(kinds(&staged), ["state_patch"]);
    assert_eq!(
        chunks(&staged)[0]["patches"],
        json!([{"op": "add", "path": "/list/-", "value": 1}])
    );
    assert_eq!(staged.next.snapshot().state, json!({"list": []}));
    let done = staged
        .next
        .tool_finished("a", ok(json!(1)), None, 3)
        .unwrap();
    assert_eq!(done.next.next(), Next::Promote);
    let promoted = done.next.promote(None, None, [2; 16], 4).unwrap();
    assert_eq!(kinds(&promoted), ["step_committed"]);
    let snapshot = promoted.next.snapshot();
    assert_eq!(snapshot.state, json!({"list": [1]}));
    assert_eq!(
        snapshot.stream_sequence,
        Position::At(promoted.next.record.last_sequence)
    );
    assert_eq!(snapshot.patch_ordinal, Some(1));
}

#[test]
fn a_call_has_one_result_and_an_unfinished_step_is_not_promoted() {
    let session = begin(json!({}))
        .next
        .answer(answer(&["a"]), 1)
        .unwrap()
        .next;
    assert!(session.promote(None, None, [0; 16], 2).is_err());
    let done = session
        .tool_finished("a", ok(json!(1)), None, 2)
        .unwrap()
        .next;
    assert!(done.tool_finished("a", ok(json!(2)), None, 3).is_err());
}

#[test]
fn the_last_step_and_its_settlement_are_one_commit() {
    let session = begin(json!({})).next.answer(answer(&[]), 1).unwrap().next;
    let settlement = Settlement::Completed {
        output: json!("out"),
    };
    let end = session
        .promote(
            Some((settlement, run(), UsageRollup::default())),
            None,
            [0; 16],
            2,
        )
        .unwrap();
    assert_eq!(kinds(&end), ["output", "step_committed"]);
    assert_eq!(end.next.record.status, SessionStatus::Completed);
    assert_eq!(end.next.snapshot().stream_sequence, Position::None);
    let stored = end.commit.writes.iter().find_map(|write| match write {
        Write::Run(run) => run.terminal.clone(),
        _ => None,
    });
    let terminal = stored.unwrap();
    assert_eq!(terminal.sequence, end.next.record.last_sequence);
    assert_eq!(terminal.output, Some(json!("out")));
    assert_eq!(terminal.state, Some(json!({})));
}

#[test]
fn a_stop_pairs_what_is_open_and_reconciles_its_writes_away() {
    let session = begin(json!({"x": 0, "y": 0}))
        .next
        .answer(answer(&["a", "b"]), 1)
        .unwrap()
        .next;
    let session = session.stage("a", json!({"x": 1, "y": 0}), 2).unwrap().next;
    let session = session
        .tool_finished("a", ok(json!(1)), None, 3)
        .unwrap()
        .next;
    let session = session.stage("b", json!({"x": 1, "y": 9}), 4).unwrap().next;
    let stop = session
        .interrupt(Some("enough".into()), run(), Vec::new(), 5)
        .unwrap();
    assert_eq!(stop.accepted, Accepted::Yes);
    let session = stop.transition.unwrap().next;
    assert_eq!(session.next(), Next::Stop);
    let settled = session
        .stopped(
            Settlement::Interrupted {
                reason: Some("enough".into()),
            },
            run(),
            UsageRollup::default(),
            Vec::new(),
            [0; 16],
            6,
        )
        .unwrap();
    assert_eq!(
        kinds(&settled),
        [
            "tool_end",
            "state_patch",
            "step_committed",
            "run_interrupted"
        ]
    );
    assert_eq!(
        chunks(&settled)[0]["result"]["metadata"]["helixErrorDetail"]["code"],
        "run_interrupted"
    );
    assert_eq!(settled.next.snapshot().state, json!({"x": 1, "y": 0}));
    assert_eq!(settled.next.record.status, SessionStatus::Interrupted);
    assert!(settled.next.record.stop.is_none());
}

#[test]
fn a_wake_discards_an_unfinished_answer_visibly_and_keeps_a_committed_one() {
    let session = begin(json!({})).next;
    let streaming = session
        .stream(
            vec![ChunkBody::TextDelta {
                delta: "par".into(),
            }],
            Vec::new(),
            1,
        )
        .unwrap()
        .next;
    let woken = streaming.wake(2).unwrap();
    assert_eq!(kinds(&woken), ["step_discarded"]);
    assert_eq!(chunks(&woken)[0]["fromSequence"], 1);
    assert_eq!(woken.next.next(), Next::Ask);
    assert_eq!(woken.next.record.epoch, session.record.epoch + 1);
    assert_eq!(woken.commit.fence, Some(session.record.epoch));

    let answered = session.answer(answer(&["a", "b"]), 1).unwrap().next;
    let finished = answered
        .tool_finished("a", ok(json!(1)), None, 2)
        .unwrap()
        .next;
    let woken = finished.wake(3).unwrap();
    assert!(kinds(&woken).is_empty());
    assert_eq!(woken.next.next(), Next::Act);
    assert!(
        woken
            .next
            .step
            .unwrap()
            .call("a")
            .unwrap()
            .outcome
            .is_some()
    );
}

#[test]
fn what_another_object_broke_is_no_attempt_of_the_run() {
    let session = begin(json!({})).next;
    let charged = session.wake(1).unwrap().next;
    assert_eq!(charged.record.attempts, 1);
    let uncharged = charged.wake_uncharged(2).unwrap();
    assert_eq!(uncharged.next.record.attempts, 1);
    assert_eq!(uncharged.next.record.epoch, charged.record.epoch + 1);
    assert_eq!(uncharged.commit.fence, Some(charged.record.epoch));
}

#[test]
fn a_wake_over_a_half_staged_tool_restages_what_the_finished_ones_wrote() {
    let session = begin(json!({"x": 0, "y": 0}))
        .next
        .answer(answer(&["a", "b"]), 1)
        .unwrap()
        .next;
    let session = session.stage("b", json!({"x": 0, "y": 5}), 2).unwrap().next;
    let session = session.stage("a", json!({"x": 7, "y": 5}), 3).unwrap().next;
    let session = session
        .tool_finished("a", ok(json!(1)), None, 4)
        .unwrap()
        .next;
    let woken = session.wake(5).unwrap();
    assert_eq!(kinds(&woken), ["step_discarded", "state_patch"]);
    let patch = &chunks(&woken)[1];
    assert_eq!(patch["patchBase"], 0);
    assert_eq!(patch["patchOrdinal"], 3);
    assert_eq!(*woken.next.working_state(), json!({"x": 7, "y": 0}));
}

/// The action × status table, cell by cell.
#[test]
fn every_action_meets_every_status() {
    let running = begin(json!({})).next;
    let with_status = |status| {
        let mut session = running.clone();
        session.record.status = status;
        session
    };
    let mut aborted = with_status(SessionStatus::Failed);
    aborted.record.failure = Some(Failure {
        code: "run_aborted".into(),
        ..failure()
    });
    let mut failed = with_status(SessionStatus::Failed);
    failed.record.failure = Some(failure());
    let table = [
        // stored, start, continue, with_message, interrupt, abort
        ("running", running.clone(), "R", "R", "R", "yes", "yes"),
        (
            "paused",
            with_status(SessionStatus::Paused),
            "R",
            "ok",
            "ok",
            "yes",
            "yes",
        ),
        (
            "interrupted",
            with_status(SessionStatus::Interrupted),
            "R",
            "ok",
            "ok",
            "no",
            "yes",
        ),
        (
            "completed",
            with_status(SessionStatus::Completed),
            "C",
            "C",
            "ok",
            "C",
            "no",
        ),
        ("failed", failed, "C", "ok", "ok", "C", "no"),
        ("aborted", aborted, "C", "C", "C", "C", "no"),
    ];
    let code = |error: &Error| match error.code {
        Code::AlreadyRunning => "R",
        Code::AlreadyCompleted => "C",
        _ => "?",
    };
    for (name, session, start, cont, message, interrupt, abort) in table {
        let refused = session.refuse_start();
        assert_eq!(code(&refused), start, "{name} × start");
        assert_eq!(
            refused.stream_id.as_deref(),
            Some("st_1"),
            "{name}: a refusal says what to attach to"
        );
        let resume = |mode, message: Option<&str>| {
            let reopen = Reopen {
                mode,
                message: message.map(Into::into),
                state: None,
                idempotency: None,
                healed: Vec::new(),
                ids: ids(2),
            };
            match session.resume(reopen, 5) {
                Ok(transition) => {
                    assert_eq!(transition.next.record.status, SessionStatus::Running);
                    assert_eq!(transition.next.record.epoch, session.record.epoch + 1);
                    assert_eq!(kinds(&transition), ["run_resumed"]);
                    "ok"
                }
                Err(error) => code(&error),
            }
        };
        assert_eq!(
            resume(ResumeMode::Continue, None),
            cont,
            "{name} × continue"
        );
        assert_eq!(
            resume(ResumeMode::WithMessage, Some("m")),
            message,
            "{name} × with_message"
        );
        assert_eq!(
            resume(ResumeMode::NewTurn, Some("m")),
            message,
            "{name} × new_turn"
        );
        let stop = |outcome: Result<StopOutcome>| match outcome {
            Ok(outcome) if outcome.accepted == Accepted::Yes => "yes",
            Ok(outcome) => {
                assert!(outcome.transition.is_none());
                "no"
            }
            Err(error) => code(&error),
        };
        assert_eq!(
            stop(session.interrupt(None, run(), Vec::new(), 5)),
            interrupt,
            "{name} × interrupt"
        );
        assert_eq!(
            stop(session.abort(None, run(), Vec::new(), 5)),
            abort,
            "{name} × abort"
        );
    }
}

#[test]
fn a_reopened_session_is_pinned_at_its_runs_first_chunk() {
    let session = begin(json!({"n": 1}))
        .next
        .answer(answer(&[]), 1)
        .unwrap()
        .next;
    let settlement = Settlement::Completed {
        output: json!("out"),
    };
    let done = session
        .promote(
            Some((settlement, run(), UsageRollup::default())),
            None,
            [0; 16],
            2,
        )
        .unwrap()
        .next;
    assert_eq!(done.snapshot().stream_sequence, Position::None);
    let reopen = Reopen {
        mode: ResumeMode::WithMessage,
        message: Some("more".into()),
        state: None,
        idempotency: None,
        healed: Vec::new(),
        ids: ids(9),
    };
    let reopened = done.resume(reopen, 3).unwrap();
    let position = reopened.next.snapshot().stream_sequence;
    assert_eq!(position, Position::At(done.record.last_sequence + 1));
    assert!(
        reopened
            .commit
            .writes
            .iter()
            .any(|w| matches!(w, Write::Checkpoint(_)))
    );
}

#[test]
fn an_abort_outranks_an_interrupt_that_is_still_pending() {
    let session = begin(json!({})).next;
    let session = session
        .interrupt(None, run(), Vec::new(), 1)
        .unwrap()
        .transition
        .unwrap()
        .next;
    let aborted = session.abort(None, run(), Vec::new(), 2).unwrap();
    assert_eq!(aborted.accepted, Accepted::Yes);
    let session = aborted.transition.unwrap().next;
    assert_eq!(session.record.stop.as_ref().unwrap().kind, StopKind::Abort);
    assert_eq!(
        session
            .interrupt(None, run(), Vec::new(), 3)
            .unwrap()
            .accepted,
        Accepted::No
    );
}

/// A small generator: the same seed gives the same script.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Random steps with parallel tools, conflicts, failing and timed-out tools, hooks after a call,
/// stops, wakes and discards: the state at each checkpoint is the one before it plus the step's
/// patches in ordinal order, and what a hook wrote stands whatever became of its call.
#[test]
fn the_law_of_the_step_holds_at_every_commit() {
    for seed in 1..=400u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut observer = Observer::default();
        let mut session = observer.see(begin(
            json!({"list": [], "a": 0, "b": {"c": 0}, "hooks": {}}),
        ));
        let mut hooked = Vec::new();
        for round in 0..8u64 {
            let calls: Vec<String> = (0..=random.below(3))
                .map(|n| format!("c{round}-{n}"))
                .collect();
            let names: Vec<&str> = calls.iter().map(String::as_str).collect();
            if random.below(4) == 0 {
                let body = vec![ChunkBody::TextDelta { delta: "x".into() }];
                session = observer.see(session.stream(body, Vec::new(), round).unwrap());
                session = observer.see(session.wake(round).unwrap());
            }
            session = observer.see(session.answer(answer(&names), round).unwrap());
            let mut open = calls.clone();
            while !open.is_empty() {
                let at = usize::try_from(random.below(open.len() as u64)).unwrap();
                let call = open[at].clone();
                let mut state = (*session.working_state()).clone();
                match random.below(6) {
                    0 => state["a"] = json!(random.below(100)),
                    1 => state["b"]["c"] = json!(random.below(100)),
                    2 => state["list"]
                        .as_array_mut()
                        .unwrap()
                        .push(json!(random.below(9))),
                    3 => {
                        state["list"].as_array_mut().unwrap().pop();
                    }
                    4 => {
                        let outcome = match random.below(5) {
                            0 => CallFailure::new(Code::ToolExecutionFailed, "no").to_outcome(),
                            1 => CallFailure::new(Code::RunTimeout, "too long").to_outcome(),
                            2 => not_executed(Code::RunInterrupted),
                            _ => ok(json!(1)),
                        };
                        if random.below(3) == 0 {
                            state["hooks"][&call] = json!(round);
                            state["a"] = json!("hook");
                            session =
                                observer.see(session.stage_by_hook(&call, state, round).unwrap());
                            hooked.push(call.clone());
                        }
                        session = observer
                            .see(session.tool_finished(&call, outcome, None, round).unwrap());
                        open.remove(at);
                        continue;
                    }
                    _ => {
                        session = observer.see(session.wake(round).unwrap());
                        continue;
                    }
                }
                session = observer.see(session.stage(&call, state, round).unwrap());
            }
            session = observer.see(session.promote(None, None, [0; 16], round).unwrap());
            let stands = session.checkpoint.state["hooks"].as_object().unwrap();
            assert!(
                hooked.iter().all(|call| stands.contains_key(call)),
                "seed {seed}"
            );
        }
        assert_eq!(observer.boundaries, 8, "seed {seed}");
    }
}

/// Rebuilds the state from checkpoint and patches as section 6 says.
#[derive(Default)]
struct Observer {
    document: Value,
    ordinal: u64,
    checkpoint: (Value, u64),
    sequence: u64,
    boundaries: u64,
}

impl Observer {
    fn see(&mut self, transition: Transition) -> Session {
        let first = transition
            .commit
            .writes
            .iter()
            .find_map(|write| write.chunks().map(|(first, _)| first));
        if let Some(first) = first {
            assert_eq!(first, self.sequence + 1, "sequences go on without a gap");
        }
        for chunk in chunks(&transition) {
            self.sequence += 1;
            match chunk["type"].as_str().unwrap() {
                "run_started" => {
                    self.document = (*transition.next.checkpoint.state).clone();
                    self.checkpoint = (self.document.clone(), 0);
                }
                "state_patch" => {
                    assert_eq!(chunk["patchBase"], json!(self.ordinal));
                    self.ordinal = chunk["patchOrdinal"].as_u64().unwrap();
                    let patches: json_patch::Patch =
                        serde_json::from_value(chunk["patches"].clone()).unwrap();
                    json_patch::patch(&mut self.document, &patches).unwrap();
                }
                "step_discarded" => (self.document, self.ordinal) = self.checkpoint.clone(),
                "step_committed" => {
                    assert_eq!(chunk["patchOrdinal"], json!(self.ordinal));
                    assert_eq!(self.document, *transition.next.checkpoint.state);
                    assert_eq!(transition.next.checkpoint.stream_sequence, self.sequence);
                    self.checkpoint = (self.document.clone(), self.ordinal);
                    self.boundaries += 1;
                }
                _ => {}
            }
        }
        assert_eq!(transition.next.record.last_sequence, self.sequence);
        transition.next
    }
}
