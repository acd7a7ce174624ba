#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::time::Duration;

use serde_json::{Value, json};

mod recovery;
mod stopping;

use super::*;
use crate::dispatch::CallOutcome;
use crate::protocol::message::{
    ErrorEnvelope, SnapshotResponse, StatusResponse, StopResponse, UsageResponse,
};
use crate::store::SubStatus;

/// A machine under test: events in, effects out, and a clock that only sleeps move.
struct Bench {
    dispatch: Dispatch,
    now: Timestamp,
    /// Every wait so far, in milliseconds.
    waits: Vec<u64>,
}

fn terms() -> Terms {
    Terms {
        child: SessionId::parse("c").unwrap(),
        agent_type: AgentType::parse("planner").unwrap(),
        policy: RetryPolicy::default(),
        output: None,
        max_fold_state_bytes: 262_144,
        resume_dead_producer: false,
    }
}

fn st(id: &str) -> StreamId {
    StreamId::parse(id).unwrap()
}

impl Bench {
    fn with(terms: Terms) -> Self {
        Self {
            dispatch: Dispatch::new(terms, false, None),
            now: 1000,
            waits: Vec::new(),
        }
    }

    fn restarted(known: bool, remote: Option<(&str, Sequence)>) -> Self {
        let remote = remote.map(|(stream, last_sequence)| SubRemote {
            stream_id: st(stream),
            last_sequence,
        });
        Self {
            dispatch: Dispatch::new(terms(), known, remote),
            now: 1000,
            waits: Vec::new(),
        }
    }

    /// A fresh call, attached to stream `st_1` from the beginning.
    fn streaming() -> Self {
        Self::streaming_with(terms())
    }

    fn streaming_with(terms: Terms) -> Self {
        let mut bench = Self::with(terms);
        assert_eq!(bench.effects(), [Effect::Start]);
        assert_eq!(
            bench.tell(started("st_1")),
            [Effect::Identify { stream: st("st_1") }, attach("st_1", 0)]
        );
        assert_eq!(bench.tell(Event::Attached), [Effect::Next]);
        bench
    }

    fn effects(&mut self) -> Vec<Effect> {
        std::iter::from_fn(|| self.dispatch.poll_effect()).collect()
    }

    fn tell(&mut self, event: Event) -> Vec<Effect> {
        self.dispatch.handle(event, self.now);
        self.effects()
    }

    fn frames(&mut self, frames: Vec<Frame>) -> Vec<Effect> {
        self.tell(Event::Frames(frames))
    }

    /// The interrupt is delivered, and the wait for the child's end comes to nothing.
    fn tell_interrupted(&mut self) -> Vec<Effect> {
        let effects = self.tell(interrupted());
        assert!(self.dispatch.is_draining(), "{effects:?}");
        self.fail_to_drain()
    }

    /// The rest of the stream cannot be had, and the log says so.
    fn fail_to_drain(&mut self) -> Vec<Effect> {
        let effects = self.drop_stream();
        let Some((Effect::Forward { chunks, .. }, rest)) = effects.split_first() else {
            panic!("nothing is said about the rest: {effects:?}")
        };
        assert_eq!(chunks[0].1.text("reason"), Some("child_incomplete"));
        rest.to_vec()
    }

    fn drop_stream(&mut self) -> Vec<Effect> {
        self.tell(Event::Dropped(unreachable()))
    }

    /// Expects a wait among the effects and lets it pass.
    fn sleep(&mut self, effects: &[Effect]) -> Vec<Effect> {
        let Some(Effect::Sleep { until }) = effects.last() else {
            panic!("no wait in {effects:?}")
        };
        self.waits.push(until - self.now);
        self.now = *until;
        self.tell(Event::Slept)
    }

    /// Drops the stream until the machine asks for the status.
    fn exhaust_stream(&mut self) {
        for _ in 0..3 {
            let effects = self.drop_stream();
            let attach = self.sleep(&effects);
            assert!(matches!(attach[..], [Effect::Attach { .. }]), "{attach:?}");
        }
        assert_eq!(self.drop_stream(), [Effect::ReadStatus]);
    }
}

fn unreachable() -> TransportError {
    TransportError::Unreachable("reset".into())
}

fn refused(status: u16, code: &str) -> TransportError {
    refused_with(status, code, None)
}

fn refused_with(status: u16, code: &str, stream_id: Option<&str>) -> TransportError {
    TransportError::Refused {
        status,
        envelope: Box::new(ErrorEnvelope {
            code: code.into(),
            error: "No.".into(),
            detail: None,
            retryable: None,
            stream_id: stream_id.map(Into::into),
            run_id: None,
            field: None,
        }),
        retry_after: None,
    }
}

fn start_answer(stream: &str) -> StartResponse {
    StartResponse {
        session_id: "c".into(),
        stream_id: stream.into(),
        run_id: None,
    }
}

fn started(stream: &str) -> Event {
    Event::Started(Ok(start_answer(stream)))
}

fn attach(stream: &str, from: Sequence) -> Effect {
    Effect::Attach {
        from: Position::At(from),
        stream: st(stream),
    }
}

fn text(sequence: Sequence) -> (Sequence, RawChunk) {
    let fields = json!({"type": "text_delta", "agentId": "c", "n": sequence});
    (sequence, serde_json::from_value(fields).unwrap())
}

fn chunk(sequence: Sequence) -> Frame {
    let (sequence, chunk) = text(sequence);
    Frame::Chunk { sequence, chunk }
}

fn forward(stream: &str, sequences: &[Sequence]) -> Effect {
    Effect::Forward {
        stream: st(stream),
        through: *sequences.last().unwrap(),
        chunks: sequences.iter().map(|n| text(*n)).collect(),
    }
}

fn end(status: SessionStatus) -> EndFrame {
    EndFrame {
        run_id: None,
        status,
        output: None,
        state: None,
        usage: None,
    }
}

fn completed() -> EndFrame {
    EndFrame {
        output: Some(json!({"text": "done"})),
        state: Some(json!({"phase": "done"})),
        usage: Some(json!({"sessionId": "c", "steps": 3})),
        ..end(SessionStatus::Completed)
    }
}

fn error(code: &str, recoverable: bool) -> ErrorFrame {
    ErrorFrame {
        run_id: None,
        code: code.into(),
        error: "It broke.".into(),
        detail: Some("why".into()),
        recoverable,
        floor: None,
        stream_id: None,
    }
}

fn truncated(floor: Option<Sequence>, stream: &str) -> Frame {
    Frame::Error(ErrorFrame {
        floor,
        stream_id: Some(stream.into()),
        ..error("TRUNCATED", false)
    })
}

fn status(status: SessionStatus, is_executing: bool) -> StatusResponse {
    StatusResponse {
        session_id: "c".into(),
        agent_type: None,
        status,
        is_executing,
        stream_id: Some("st_1".into()),
        run_id: None,
        step_count: 0,
        output: None,
        error: None,
        error_code: None,
        error_detail: None,
        updated_at: 0,
    }
}

fn snapshot(state: Value) -> Event {
    Event::Snapshot(Ok(SnapshotResponse {
        session_id: "c".into(),
        stream_id: "st_1".into(),
        state,
        stream_sequence: Position::None,
        oldest_retained_sequence: 0,
        step_count: 1,
        checkpoint_id: None,
        patch_ordinal: None,
        projection: None,
    }))
}

fn usage(steps: u64) -> Event {
    Event::Usage(Ok(UsageResponse {
        session_id: "c".into(),
        rollup: json!({"sessionId": "c", "steps": steps}),
    }))
}

fn interrupted() -> Event {
    let answer = StopResponse {
        session_id: "c".into(),
        status: SessionStatus::Interrupted,
        accepted: true,
    };
    Event::Interrupted(Ok(answer))
}

fn interrupt(reason: Code) -> Vec<Effect> {
    vec![Effect::Interrupt { reason }]
}

/// The outcome, when it is the last of some effects.
fn settled(effects: &[Effect]) -> CallOutcome {
    match effects.last() {
        Some(Effect::Settle(outcome)) => (**outcome).clone(),
        other => panic!("not settled: {other:?}"),
    }
}

fn failure(effects: &[Effect]) -> (String, Option<String>) {
    let outcome = settled(effects);
    assert!(!outcome.success && outcome.status != SubStatus::Completed);
    let failure = outcome.error.unwrap();
    assert_eq!(
        outcome.result["metadata"]["helixErrorDetail"]["code"],
        json!(failure.code)
    );
    (failure.code, failure.cause)
}

/// Whether the call has settled with a child that could not be told to stop.
fn is_untold(effects: &[Effect]) -> bool {
    settled(effects).status == SubStatus::Stopping
}

/// What stands in the log where the rest of the child's stream cannot be had.
fn unheard(stream: &str, at: Sequence, now: Timestamp) -> Effect {
    resync(stream, at, "child_incomplete", now)
}

fn has_note(effects: &[Effect]) -> bool {
    effects
        .iter()
        .any(|effect| matches!(effect, Effect::Note(_)))
}

// The straight way.

#[test]
fn a_completed_end_is_folded_without_a_read() {
    let mut bench = Bench::streaming();
    let effects = bench.frames(vec![chunk(1), chunk(2), Frame::CaughtUp { sequence: 2 }]);
    assert_eq!(effects, [forward("st_1", &[1, 2]), Effect::Next]);
    let effects = bench.frames(vec![chunk(3), Frame::End(completed())]);
    assert_eq!(effects.len(), 2);
    assert_eq!(effects[0], forward("st_1", &[3]));
    let outcome = settled(&effects);
    assert_eq!(
        (outcome.success, outcome.status),
        (true, SubStatus::Completed)
    );
    assert_eq!(
        (outcome.result, outcome.output),
        (json!({"text": "done"}), Some(json!({"text": "done"})))
    );
    assert_eq!(outcome.child_state, Some(json!({"phase": "done"})));
    let (rollup, origin) = outcome.usage.unwrap();
    assert_eq!((rollup.steps, origin), (3, RollupOrigin::End));
    assert!(bench.dispatch.is_settled());
}

#[test]
fn what_an_end_leaves_out_is_read() {
    let mut bench = Bench::streaming();
    let effects = bench.frames(vec![Frame::End(EndFrame {
        state: None,
        usage: None,
        ..completed()
    })]);
    assert_eq!(effects, [Effect::ReadSnapshot]);
    assert_eq!(bench.tell(snapshot(json!({"a": 1}))), [Effect::ReadUsage]);
    let outcome = settled(&bench.tell(usage(5)));
    assert_eq!(outcome.child_state, Some(json!({"a": 1})));
    assert_eq!(
        outcome.usage.map(|(rollup, origin)| (rollup.steps, origin)),
        Some((5, RollupOrigin::Recovery))
    );
}

#[test]
fn nothing_behind_a_terminal_frame_counts() {
    let mut bench = Bench::streaming();
    let effects = bench.frames(vec![Frame::End(completed()), chunk(9)]);
    assert!(settled(&effects).success);
    assert_eq!(effects.len(), 1);
    assert_eq!(bench.tell(started("st_2")), []);
    assert_eq!(
        (
            bench.dispatch.handle_stop(),
            bench.dispatch.handle_deadline()
        ),
        (Abandon::No, Abandon::No)
    );
    assert_eq!(bench.effects(), []);
}

#[test]
fn an_event_that_is_not_awaited_changes_nothing() {
    let mut bench = Bench::streaming();
    for stray in [
        started("st_9"),
        Event::Attached,
        Event::Slept,
        usage(1),
        snapshot(json!({})),
        interrupted(),
    ] {
        assert_eq!(bench.tell(stray), []);
    }
    assert_eq!(
        bench.frames(vec![chunk(1)]),
        [forward("st_1", &[1]), Effect::Next]
    );
}

// Starting.

#[test]
fn running_and_completed_both_mean_attach() {
    for code in ["ALREADY_RUNNING", "ALREADY_COMPLETED"] {
        let mut bench = Bench::with(terms());
        bench.effects();
        let effects = bench.tell(Event::Started(Err(refused_with(409, code, Some("st_1")))));
        assert_eq!(
            effects,
            [Effect::Identify { stream: st("st_1") }, attach("st_1", 0)]
        );
        // Without the stream's name the status is asked for it, and the end is read all the same.
        let mut bench = Bench::with(terms());
        bench.effects();
        assert_eq!(
            bench.tell(Event::Started(Err(refused(409, code)))),
            [Effect::ReadStatus]
        );
        let effects = bench.tell(Event::Status(Ok(status(SessionStatus::Completed, false))));
        assert_eq!(
            effects,
            [Effect::Identify { stream: st("st_1") }, attach("st_1", 0)]
        );
    }
}

#[test]
fn a_child_of_someone_else_is_never_attached_to() {
    let mut bench = Bench::with(terms());
    bench.effects();
    let effects = bench.tell(Event::Started(Err(refused_with(
        409,
        "state_child_session_taken",
        Some("st_1"),
    ))));
    assert_eq!(effects.len(), 1);
    assert_eq!(failure(&effects).0, "state_child_session_taken");
}

#[test]
fn a_refused_start_fails_typed_and_leaves_no_child_at_work() {
    for (answer, code, may_have_begun) in [
        (refused(400, "VALIDATION_ERROR"), "VALIDATION_ERROR", false),
        (refused(401, "UNAUTHORIZED"), "UNAUTHORIZED", false),
        (refused(404, "NOT_FOUND"), "NOT_FOUND", false),
        (refused(429, "RATE_LIMITED"), "RATE_LIMITED", false),
        (refused(409, "something_new"), "something_new", false),
        (refused(500, "INTERNAL"), "INTERNAL", true),
        (unreachable(), "transport_error", true),
        (
            TransportError::Timeout(Duration::from_secs(30)),
            "transport_error",
            true,
        ),
        (
            TransportError::Malformed("x".into()),
            "transport_error",
            true,
        ),
        (
            TransportError::Unexplained { status: 403 },
            "transport_error",
            true,
        ),
        (
            TransportError::VersionUnsupported { theirs: 2 },
            "VERSION_UNSUPPORTED",
            true,
        ),
        (
            TransportError::ProjectedMount,
            "framework_not_supported",
            true,
        ),
    ] {
        let mut bench = Bench::with(terms());
        bench.effects();
        let mut effects = bench.tell(Event::Started(Err(answer.clone())));
        if may_have_begun {
            assert!(
                matches!(effects[..], [Effect::Interrupt { .. }]),
                "{answer}"
            );
            effects = bench.tell(Event::Interrupted(Err(unreachable())));
            assert!(has_note(&effects), "{answer}");
        }
        assert_eq!(failure(&effects).0, code, "{answer}");
        assert_eq!(is_untold(&effects), may_have_begun, "{answer}");
    }
}

#[test]
fn case_07_a_restarted_parent_goes_on_where_it_was() {
    // Answered before: no second start, and the stored cursor.
    let mut bench = Bench::restarted(true, Some(("st_1", 41)));
    assert_eq!(bench.effects(), [attach("st_1", 41)]);
    bench.tell(Event::Attached);
    assert_eq!(
        bench.frames(vec![chunk(40), chunk(41), chunk(42)]),
        [forward("st_1", &[42]), Effect::Next]
    );
    // Not answered before: the start is sent again, under its key.
    assert_eq!(Bench::restarted(true, None).effects(), [Effect::Start]);
}

// The stream.

#[test]
fn case_04_chunks_at_or_below_the_cursor_are_not_written() {
    let mut bench = Bench::streaming();
    bench.frames(vec![chunk(1), chunk(2)]);
    let effects = bench.drop_stream();
    assert_eq!(bench.sleep(&effects), [attach("st_1", 2)]);
    bench.tell(Event::Attached);
    assert_eq!(bench.frames(vec![chunk(1), chunk(2)]), [Effect::Next]);
    assert_eq!(
        bench.frames(vec![chunk(2), chunk(3), chunk(3)]),
        [forward("st_1", &[3]), Effect::Next]
    );
}

#[test]
fn three_attaches_in_a_row_span_twenty_seconds_and_then_the_status_is_read() {
    let mut bench = Bench::streaming();
    bench.exhaust_stream();
    assert_eq!(bench.waits, [500, 8000, 16_000]);
    assert!(bench.waits.iter().sum::<u64>() >= 20_000);
}

#[test]
fn a_new_chunk_refills_the_budget_and_an_old_one_does_not() {
    let mut bench = Bench::streaming();
    bench.frames(vec![chunk(1)]);
    for _ in 0..2 {
        let effects = bench.drop_stream();
        bench.sleep(&effects);
        bench.tell(Event::Attached);
    }
    bench.frames(vec![chunk(2)]);
    bench.waits.clear();
    for _ in 0..3 {
        let effects = bench.drop_stream();
        bench.sleep(&effects);
        bench.tell(Event::Attached);
        bench.frames(vec![chunk(2)]);
    }
    assert_eq!(bench.waits, [500, 8000, 16_000]);
    assert_eq!(bench.drop_stream(), [Effect::ReadStatus]);
}

#[test]
fn a_recoverable_error_is_a_dropped_stream() {
    let mut bench = Bench::streaming();
    let effects = bench.frames(vec![chunk(1), Frame::Error(error("OVERLOADED", true))]);
    assert_eq!(effects[0], forward("st_1", &[1]));
    assert_eq!(bench.sleep(&effects), [attach("st_1", 1)]);
}

#[test]
fn retry_after_of_a_refused_attach_is_honoured_and_capped() {
    for (asked, wait) in [(7, 7000), (86_400, 60_000)] {
        let mut bench = Bench::streaming();
        let mut refusal = refused(429, "RATE_LIMITED");
        if let TransportError::Refused { retry_after, .. } = &mut refusal {
            *retry_after = Some(asked);
        }
        let effects = bench.tell(Event::Dropped(refusal));
        bench.sleep(&effects);
        assert_eq!(bench.waits, [wait]);
    }
}

#[test]
fn a_refused_attach_is_looked_into_at_once() {
    let mut bench = Bench::streaming();
    assert_eq!(
        bench.tell(Event::Dropped(refused(404, "NOT_FOUND"))),
        [Effect::ReadStatus]
    );
}

#[test]
fn a_projected_mount_or_a_later_version_is_never_folded() {
    for (cause, code) in [
        (TransportError::ProjectedMount, "framework_not_supported"),
        (
            TransportError::VersionUnsupported { theirs: 2 },
            "VERSION_UNSUPPORTED",
        ),
    ] {
        let mut bench = Bench::streaming();
        let effects = bench.tell(Event::Dropped(cause.clone()));
        assert!(matches!(effects[..], [Effect::Interrupt { .. }]));
        assert_eq!(failure(&bench.tell(Event::Interrupted(Err(cause)))).0, code);
    }
    let mut bench = Bench::streaming();
    bench.frames(vec![Frame::End(EndFrame {
        state: None,
        ..completed()
    })]);
    let effects = bench.tell(Event::Snapshot(Err(TransportError::ProjectedMount)));
    assert_eq!(
        failure(&effects),
        (
            "framework_not_supported".into(),
            Some("projected_mount".into())
        )
    );
}

// Truncation.

fn resync(stream: &str, at: Sequence, reason: &str, now: Timestamp) -> Effect {
    let fields = json!({"type": "stream_resync", "reason": reason, "agentId": "c", "agentType": "planner",
        "timestamp": now, "step": 0});
    let chunk = serde_json::from_value(fields).unwrap();
    Effect::Forward {
        stream: st(stream),
        through: at,
        chunks: vec![(at, chunk)],
    }
}

#[test]
fn truncated_goes_on_just_before_the_floor_and_says_so() {
    let mut bench = Bench::streaming();
    bench.frames(vec![chunk(3)]);
    let effects = bench.frames(vec![truncated(Some(50), "st_1")]);
    assert_eq!(
        effects,
        [
            resync("st_1", 49, "child_truncated", bench.now),
            attach("st_1", 49)
        ]
    );
    bench.tell(Event::Attached);
    assert_eq!(
        bench.frames(vec![chunk(50)]),
        [forward("st_1", &[50]), Effect::Next]
    );
}

#[test]
fn another_life_of_the_child_is_read_from_its_floor() {
    let mut bench = Bench::streaming();
    bench.frames(vec![chunk(70)]);
    let effects = bench.frames(vec![truncated(Some(0), "st_2")]);
    assert_eq!(
        effects,
        [
            resync("st_2", 0, "child_truncated", bench.now),
            attach("st_2", 0)
        ]
    );
    bench.tell(Event::Attached);
    assert_eq!(
        bench.frames(vec![chunk(1)]),
        [forward("st_2", &[1]), Effect::Next]
    );
}

#[test]
fn a_cursor_above_all_that_the_child_knows_writes_nothing_twice() {
    for floor in [None, Some(1), Some(71)] {
        let mut bench = Bench::streaming();
        bench.frames(vec![chunk(70)]);
        let effects = bench.frames(vec![truncated(floor, "st_1")]);
        assert!(has_note(&effects));
        assert_eq!(
            effects.last(),
            Some(&Effect::Attach {
                from: Position::None,
                stream: st("st_1")
            })
        );
        bench.tell(Event::Attached);
        assert_eq!(bench.frames(vec![chunk(69), chunk(70)]), [Effect::Next]);
        assert!(settled(&bench.frames(vec![Frame::End(completed())])).success);
    }
}

#[test]
fn a_gap_in_the_child_s_stream_is_told_in_the_log() {
    let mut bench = Bench::streaming();
    bench.frames(vec![chunk(1)]);
    let effects = bench.frames(vec![chunk(2), chunk(5), chunk(6)]);
    let Some(Effect::Forward {
        through, chunks, ..
    }) = effects.first()
    else {
        panic!("{effects:?}")
    };
    assert_eq!(*through, 6);
    let told: Vec<_> = chunks.iter().map(|(n, chunk)| (*n, chunk.kind())).collect();
    assert_eq!(
        told,
        [
            (2, "text_delta"),
            (4, "stream_resync"),
            (5, "text_delta"),
            (6, "text_delta")
        ]
    );
    assert_eq!(chunks[1].1.text("reason"), Some("child_gap"));
}

#[test]
fn endless_truncation_ends_in_a_status_read() {
    let mut bench = Bench::streaming();
    for floor in [10, 20, 30] {
        assert_eq!(
            bench.frames(vec![truncated(Some(floor), "st_1")]).last(),
            Some(&attach("st_1", floor - 1))
        );
        bench.tell(Event::Attached);
    }
    assert_eq!(
        bench.frames(vec![truncated(Some(40), "st_1")]),
        [Effect::ReadStatus]
    );
}

/// Says "running, not executing" until the attach attempts are used up.
fn exhaust_attaches(bench: &mut Bench) -> Vec<Effect> {
    for _ in 0..3 {
        let effects = bench.tell(Event::Status(Ok(status(SessionStatus::Running, false))));
        assert_eq!(bench.sleep(&effects), [attach("st_1", 0)]);
        assert_eq!(bench.drop_stream(), [Effect::ReadStatus]);
    }
    bench.tell(Event::Status(Ok(status(SessionStatus::Running, false))))
}
