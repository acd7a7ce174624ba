//! The sentences of section 6, each with a short script.

use serde_json::{Value, json};

use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::{EndFrame, ErrorFrame, Frame};
use crate::protocol::ids::Position;
use crate::protocol::message::{SessionStatus, SnapshotResponse};
use crate::reconstruct::{
    Document, Heard, PatchFilter, Reading, Stale, Status, Unalignable, Verdict,
};

const OWN: Reading<'static> = Reading {
    session: "s",
    stream: "st_s",
};
pub(super) const PARENT: Reading<'static> = Reading {
    session: "p",
    stream: "st_p",
};

pub(super) fn chunk(value: Value) -> RawChunk {
    serde_json::from_value(value).unwrap()
}

/// A patch that appends `value`, with its ordinal and the one below it.
pub(super) fn append(value: u64, ordinal: u64, base: u64) -> Value {
    json!({
        "type": "state_patch", "agentId": "s", "agentType": "t", "timestamp": 1, "step": 1,
        "patches": [{"op": "add", "path": "/list/-", "value": value}],
        "patchOrdinal": ordinal, "patchBase": base,
    })
}

pub(super) fn committed(step: u64, ordinal: u64) -> Value {
    json!({
        "type": "step_committed", "agentId": "s", "agentType": "t", "timestamp": 1, "step": step,
        "stepCount": step, "checkpointId": "c", "patchOrdinal": ordinal,
    })
}

fn discarded(from: u64) -> Value {
    json!({
        "type": "step_discarded", "agentId": "s", "agentType": "t", "timestamp": 1, "step": 1,
        "stepCount": 1, "reason": "r", "fromSequence": from,
    })
}

/// The chunk as it stands in the parent's log, forwarded from place `at` of the session's stream.
pub(super) fn forwarded(mut value: Value, at: u64) -> RawChunk {
    value["origin"] = json!({"sessionId": "s", "streamId": "st_s", "sequence": at});
    value["remoteSource"] = json!({"childSessionId": "s", "childSequence": at, "streamId": "st_s"});
    chunk(value)
}

pub(super) fn snapshot(state: Value, at: Position, step: u64, ordinal: u64) -> SnapshotResponse {
    SnapshotResponse {
        session_id: "s".into(),
        stream_id: "st_s".into(),
        state,
        stream_sequence: at,
        oldest_retained_sequence: 0,
        step_count: step,
        checkpoint_id: None,
        patch_ordinal: at.sequence().map(|_| ordinal),
        projection: None,
    }
}

/// A document at checkpoint `step`, position `at`, ordinal `ordinal`, with an empty list.
fn pinned(at: u64, step: u64, ordinal: u64) -> Document {
    let mut document = Document::new("s");
    assert!(document.take_request(), "it begins by asking");
    document.baseline(
        &snapshot(json!({"list": []}), Position::At(at), step, ordinal),
        false,
    );
    document
}

fn list(document: &Document) -> &Value {
    &document.state()["list"]
}

#[test]
fn patches_apply_in_order_and_the_step_makes_the_document_exact() {
    let mut document = pinned(1, 0, 0);
    assert_eq!(document.status(), &Status::Exact { step: 0 });
    assert_eq!(document.attach_at(), Position::At(1));
    assert_eq!(
        document.observe(OWN, 2, &chunk(append(1, 1, 0))),
        Heard::Patched
    );
    assert_eq!(document.status(), &Status::InStep);
    document.observe(OWN, 3, &chunk(append(2, 2, 1)));
    document.observe(OWN, 4, &chunk(committed(1, 2)));
    assert_eq!(document.status(), &Status::Exact { step: 1 });
    assert_eq!(list(&document), &json!([1, 2]));
    // What is read twice is applied once.
    document.observe(OWN, 3, &chunk(append(2, 2, 1)));
    assert_eq!(list(&document), &json!([1, 2]));
    assert!(!document.take_request());
}

#[test]
fn a_patch_of_another_agent_never_touches_the_document() {
    let mut document = pinned(1, 0, 0);
    let mut child = append(1, 1, 0);
    child["agentId"] = json!("s-remote-call");
    assert_eq!(document.observe(OWN, 2, &chunk(child)), Heard::Nothing);
    let mut streamer = append(1, 1, 0);
    streamer["agentId"] = json!("s~progress");
    assert_eq!(document.observe(OWN, 3, &chunk(streamer)), Heard::Nothing);
    // A streamer that uses the session's id after all numbers no patches.
    let mut streamer = append(1, 1, 0);
    streamer
        .as_object_mut()
        .unwrap()
        .retain(|key, _| !key.starts_with("patchO") && key != "patchBase");
    assert_eq!(document.observe(OWN, 4, &chunk(streamer)), Heard::Nothing);
    assert_eq!(document.status(), &Status::Exact { step: 0 });
}

#[test]
fn a_forged_origin_is_not_believed() {
    for (field, value) in [
        ("sessionId", json!("x")),
        ("streamId", json!("st_x")),
        ("sequence", json!("2")),
    ] {
        let mut document = pinned(1, 0, 0);
        let mut forged = forwarded(append(1, 1, 0), 2);
        forged.0["origin"][field] = value;
        document.observe(PARENT, 7, &forged);
        assert_eq!(list(&document), &json!([]), "{field}");
        assert_ne!(document.status(), &Status::InStep, "{field}");
    }
    // The same without the forger's hand, so that the three above can fail.
    let mut document = pinned(1, 0, 0);
    document.observe(PARENT, 7, &forwarded(append(1, 1, 0), 2));
    assert_eq!(list(&document), &json!([1]));
}

#[test]
fn two_discards_in_a_row_with_a_late_join_between() {
    let mut document = pinned(1, 0, 0);
    document.observe(OWN, 2, &chunk(append(1, 1, 0)));
    document.observe(OWN, 3, &chunk(discarded(1)));
    assert_eq!(document.status(), &Status::Stale(Stale::Discarded));
    assert!(document.take_request());
    document.observe(OWN, 4, &chunk(append(2, 2, 0)));
    document.baseline(&snapshot(json!({"list": []}), Position::At(1), 0, 0), false);
    assert_eq!(
        document.attach_at(),
        Position::At(3),
        "what a trigger voided is not read again"
    );

    // Somebody joins here: the snapshot is of before both discards.
    let mut late = pinned(1, 0, 0);
    for document in [&mut document, &mut late] {
        document.observe(OWN, 4, &chunk(append(2, 2, 0)));
        document.observe(OWN, 5, &chunk(discarded(1)));
        assert!(document.take_request());
        document.baseline(&snapshot(json!({"list": []}), Position::At(1), 0, 0), false);
        document.observe(OWN, 6, &chunk(append(3, 3, 0)));
        document.observe(OWN, 7, &chunk(committed(1, 3)));
        assert_eq!(document.status(), &Status::Exact { step: 1 });
        assert_eq!(list(document), &json!([3]));
    }
}

#[test]
fn a_dead_patch_replayed_from_the_parents_log_is_covered_by_the_baseline() {
    // The child discarded 2 at 3 and committed at 5; the baseline is of 5.
    let mut document = pinned(5, 1, 2);
    for (at, value) in [
        (2, append(1, 1, 0)),
        (3, discarded(1)),
        (4, append(2, 2, 0)),
        (5, committed(1, 2)),
    ] {
        assert_eq!(
            document.observe(PARENT, 10 + at, &forwarded(value, at)),
            Heard::Nothing
        );
    }
    assert_eq!(document.status(), &Status::Exact { step: 1 });
    assert!(!document.take_request());
}

#[test]
fn a_patch_whose_ordinal_is_in_the_baseline_is_dropped_wherever_it_stands() {
    let mut document = pinned(5, 1, 2);
    let known = forwarded(append(1, 1, 0), 9);
    assert_eq!(document.observe(PARENT, 20, &known), Heard::Nothing);
    assert_eq!(document.status(), &Status::Exact { step: 1 });
}

#[test]
fn a_step_discarded_ten_times_costs_one_snapshot_each_and_ends_exact() {
    let mut document = pinned(1, 0, 0);
    let (mut at, mut taken) = (1, 0);
    for n in 1..=10 {
        at += 1;
        document.observe(OWN, at, &chunk(append(n, n, 0)));
        at += 1;
        document.observe(OWN, at, &chunk(discarded(1)));
        if document.take_request() {
            taken += 1;
            document.baseline(&snapshot(json!({"list": []}), Position::At(1), 0, 0), false);
        }
        assert!(!document.take_request(), "one for each");
    }
    assert_eq!(taken, 10);
    document.observe(OWN, at + 1, &chunk(append(11, 11, 0)));
    document.observe(OWN, at + 2, &chunk(committed(1, 11)));
    assert_eq!(
        (document.status(), list(&document)),
        (&Status::Exact { step: 1 }, &json!([11]))
    );
}

#[test]
fn a_missed_patch_makes_it_stale_and_one_snapshot_is_asked_for_until_the_next_boundary() {
    let mut document = pinned(1, 0, 0);
    document.observe(PARENT, 5, &forwarded(committed(1, 0), 2));
    document.observe(PARENT, 7, &forwarded(append(2, 2, 1), 4));
    assert_eq!(document.status(), &Status::Stale(Stale::Gap));
    assert!(document.take_request());
    document.baseline(&snapshot(json!({"list": []}), Position::At(2), 1, 0), false);
    document.observe(PARENT, 8, &forwarded(append(3, 3, 2), 5));
    assert_eq!(document.status(), &Status::Stale(Stale::Gap));
    assert!(!document.take_request(), "not per patch");
    document.observe(PARENT, 9, &forwarded(committed(2, 3), 6));
    assert!(document.take_request(), "at the boundary");
    document.baseline(
        &snapshot(json!({"list": [1, 2, 3]}), Position::At(6), 2, 3),
        false,
    );
    assert_eq!(document.status(), &Status::Exact { step: 2 });
}

#[test]
fn a_step_longer_than_the_log_ends_exact_after_its_promote() {
    let mut document = pinned(1, 0, 0);
    let truncated = Frame::Error(ErrorFrame {
        run_id: None,
        code: "TRUNCATED".into(),
        error: "gone".into(),
        detail: None,
        recoverable: false,
        floor: Some(40),
        stream_id: Some("st_s".into()),
    });
    document.observe_end(&truncated);
    assert_eq!(document.status(), &Status::Stale(Stale::Truncated));
    assert!(document.take_request());
    // The log begins above the checkpoint: no position.
    document.baseline(&snapshot(json!({"list": []}), Position::None, 0, 0), false);
    assert_eq!(document.status(), &Status::Unpinned);
    assert_eq!(
        document.observe(OWN, 50, &chunk(append(9, 9, 8))),
        Heard::Nothing
    );
    assert!(!document.take_request());
    document.observe(OWN, 51, &chunk(committed(1, 9)));
    assert!(document.take_request());
    document.baseline(
        &snapshot(json!({"list": [9]}), Position::At(51), 1, 9),
        false,
    );
    assert_eq!(
        (document.status(), document.attach_at()),
        (&Status::Exact { step: 1 }, Position::At(51))
    );
}

#[test]
fn a_patch_that_does_not_apply_changes_nothing() {
    let mut document = pinned(1, 0, 0);
    let mut bad = append(1, 1, 0);
    bad["patches"] = json!([
        {"op": "add", "path": "/list/-", "value": 1},
        {"op": "remove", "path": "/no/such"},
    ]);
    document.observe(OWN, 2, &chunk(bad));
    assert_eq!(document.status(), &Status::Stale(Stale::Diverged));
    assert_eq!(list(&document), &json!([]), "never half-changed");
    assert!(document.take_request());
}

#[test]
fn a_new_stream_voids_the_baseline() {
    let mut document = pinned(5, 1, 2);
    let other = Reading {
        session: "s",
        stream: "st_other",
    };
    document.observe(other, 1, &chunk(append(1, 1, 0)));
    assert_eq!(document.status(), &Status::Stale(Stale::NewStream));
    assert!(document.take_request());
    let mut fresh = snapshot(json!({"list": [1]}), Position::At(1), 0, 1);
    fresh.stream_id = "st_other".into();
    document.baseline(&fresh, false);
    assert_eq!(
        document.observe(other, 2, &chunk(append(2, 2, 1))),
        Heard::Patched
    );
}

#[test]
fn an_ended_session_is_final_until_it_goes_on() {
    let mut document = pinned(1, 0, 0);
    let end = |status, state| {
        Frame::End(EndFrame {
            run_id: None,
            status,
            output: None,
            state,
            usage: None,
        })
    };
    document.observe_end(&end(SessionStatus::Completed, Some(json!({"list": [1]}))));
    assert_eq!(
        (document.status(), list(&document)),
        (&Status::Final, &json!([1]))
    );
    assert!(!document.take_request(), "the frame told it");

    let resumed = json!({"type": "run_resumed", "agentId": "s", "agentType": "t", "timestamp": 1, "step": 1, "runId": "r"});
    document.observe(OWN, 9, &chunk(resumed));
    assert_eq!(document.status(), &Status::Stale(Stale::Reopened));
    assert!(document.take_request());
    document.baseline(
        &snapshot(json!({"list": [1]}), Position::At(9), 1, 0),
        false,
    );
    assert_eq!(document.status(), &Status::Exact { step: 1 });

    // An end without a state is asked for.
    document.observe_end(&end(SessionStatus::Completed, None));
    assert!(document.take_request());
    document.baseline(
        &snapshot(json!({"list": [1, 2]}), Position::None, 2, 0),
        false,
    );
    assert_eq!(
        (document.status(), list(&document)),
        (&Status::Final, &json!([1, 2]))
    );
}

#[test]
fn a_snapshot_that_fails_is_tried_at_the_next_boundary() {
    let mut document = Document::new("s");
    assert!(document.take_request());
    document.no_snapshot();
    assert!(!document.take_request());
    document.observe(PARENT, 5, &forwarded(append(1, 1, 0), 2));
    assert_eq!(
        document.state(),
        &Value::Null,
        "nothing is applied without a baseline"
    );
    let end = json!({
        "type": "subagent_end", "agentId": "p", "agentType": "t", "timestamp": 1, "step": 1,
        "subSessionId": "s", "subAgentType": "t", "toolCallId": "c", "success": true,
    });
    document.observe(PARENT, 6, &chunk(end));
    assert!(document.take_request());
}

#[test]
fn the_filter_admits_what_lies_above_the_baseline_once() {
    let mut filter = PatchFilter::new();
    assert_eq!(
        filter.judge(PARENT, 1, &forwarded(append(1, 1, 0), 5)),
        Verdict::Pass,
        "no baseline"
    );
    filter.baseline(&snapshot(json!({}), Position::At(4), 1, 0));
    let strip = |mut chunk: RawChunk| {
        chunk.0.shift_remove("origin");
        chunk
    };
    assert_eq!(
        filter.judge(PARENT, 2, &strip(forwarded(append(1, 1, 0), 4))),
        Verdict::Known
    );
    assert_eq!(
        filter.judge(PARENT, 3, &strip(forwarded(append(1, 1, 0), 5))),
        Verdict::Apply
    );
    assert_eq!(
        filter.judge(PARENT, 4, &strip(forwarded(append(1, 1, 0), 5))),
        Verdict::Known
    );
    assert_eq!(
        filter.judge(PARENT, 5, &forwarded(committed(1, 1), 6)),
        Verdict::Pass
    );
    assert_eq!(
        filter.judge(OWN, 7, &chunk(append(2, 2, 1))),
        Verdict::Apply
    );
}

#[test]
fn the_filter_latches_a_nested_descendant_and_rearms_an_unpinned_baseline() {
    let mut filter = PatchFilter::new();
    filter.baseline(&snapshot(json!({}), Position::None, 1, 0));
    let unpinned = |first| Verdict::Suppress {
        why: Unalignable::UnpinnedBaseline,
        first,
    };
    let patch = forwarded(append(1, 1, 0), 5);
    assert_eq!(filter.judge(PARENT, 1, &patch), unpinned(true));
    assert_eq!(filter.judge(PARENT, 2, &patch), unpinned(false));
    filter.baseline(&snapshot(json!({}), Position::At(4), 1, 0));
    assert_eq!(filter.judge(PARENT, 3, &patch), Verdict::Apply);

    let mut nested = forwarded(append(1, 1, 0), 6);
    nested.0.shift_remove("origin");
    nested.0["remoteSource"]["childSessionId"] = json!("between");
    let latched = |first| Verdict::Suppress {
        why: Unalignable::NestedDescendant,
        first,
    };
    assert_eq!(filter.judge(PARENT, 4, &nested), latched(true));
    filter.baseline(&snapshot(json!({}), Position::At(5), 1, 0));
    assert_eq!(
        filter.judge(PARENT, 5, &nested),
        latched(false),
        "no snapshot mends it"
    );
}

#[test]
fn a_snapshot_that_was_under_way_when_the_end_came_changes_no_last_state() {
    let mut document = pinned(1, 0, 0);
    document.observe(OWN, 2, &chunk(append(1, 1, 0)));
    document.observe(OWN, 3, &chunk(discarded(1)));
    assert!(document.take_request());
    let before = snapshot(json!({"list": []}), Position::At(1), 0, 0);
    let end = EndFrame {
        run_id: None,
        status: SessionStatus::Completed,
        output: None,
        state: Some(json!({"list": [2]})),
        usage: None,
    };
    document.observe_end(&Frame::End(end));
    document.baseline(&before, false);
    assert_eq!(
        (document.status(), list(&document)),
        (&Status::Final, &json!([2]))
    );
}

#[test]
fn the_steps_that_led_to_a_last_state_ask_for_nothing_when_they_are_replayed() {
    let mut document = pinned(1, 0, 0);
    document.baseline(&snapshot(json!({"list": [1]}), Position::None, 1, 0), true);
    assert_eq!(document.status(), &Status::Final);
    document.observe(OWN, 2, &chunk(append(1, 1, 0)));
    document.observe(OWN, 3, &chunk(committed(1, 1)));
    assert!(!document.take_request());
    assert_eq!(document.status(), &Status::Final);
}

fn unnumbered(mut value: Value) -> Value {
    value
        .as_object_mut()
        .unwrap()
        .retain(|key, _| !key.starts_with("patchO") && key != "patchBase");
    value
}

#[test]
fn without_ordinals_what_a_resync_skipped_is_missing_from_every_baseline_below_it() {
    let at = |position, state| {
        let mut snapshot = snapshot(state, Position::At(position), 0, 0);
        snapshot.patch_ordinal = None;
        snapshot
    };
    let mut document = Document::new("s");
    assert!(document.take_request());
    document.baseline(&at(1, json!({"list": []})), false);
    let resync = json!({"type": "stream_resync", "agentId": "s", "agentType": "t", "timestamp": 1, "step": 1, "reason": "lost"});
    document.observe(OWN, 3, &chunk(resync));
    assert!(document.take_request());
    document.baseline(&at(1, json!({"list": []})), false);
    assert_eq!(document.status(), &Status::Exact { step: 0 });
    document.observe(OWN, 4, &chunk(unnumbered(append(2, 2, 1))));
    assert_eq!(document.status(), &Status::Stale(Stale::Gap));
    assert_eq!(list(&document), &json!([]));
    document.observe(OWN, 5, &chunk(unnumbered(committed(1, 2))));
    assert!(document.take_request(), "at the boundary");
    document.baseline(&at(5, json!({"list": [1, 2]})), false);
    document.observe(OWN, 6, &chunk(unnumbered(append(3, 3, 2))));
    assert_eq!(
        (document.status(), list(&document)),
        (&Status::InStep, &json!([1, 2, 3]))
    );
}

#[test]
fn a_stream_that_a_snapshot_left_behind_triggers_nothing_more() {
    let mut document = Document::new("s");
    assert!(document.take_request());
    let mut second = snapshot(json!({"list": [1]}), Position::At(1), 0, 1);
    second.stream_id = "st_second".into();
    document.baseline(&second, false);
    document.observe(PARENT, 7, &forwarded(append(1, 1, 0), 2));
    assert_eq!(document.status(), &Status::Stale(Stale::NewStream));
    assert!(
        document.take_request(),
        "which is newer only a snapshot tells"
    );
    document.baseline(&second, false);
    document.observe(PARENT, 8, &forwarded(append(2, 2, 1), 3));
    assert_eq!(document.status(), &Status::Exact { step: 0 });
    assert!(!document.take_request());
}
