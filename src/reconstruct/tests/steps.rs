//! A document of a projection, and everything that it may be told instead of its next step.

use serde_json::{Value, json};

use super::vectors::Recorded;
use crate::protocol::chunk::RawChunk;
use crate::protocol::ids::Position;
use crate::reconstruct::{Reading, Stale, Status};

/// A document at step 3 of a projection, which stands at 30 of the stream.
fn at_three() -> Recorded {
    let mut document = Recorded::new("s", true);
    assert!(document.take_request());
    baseline(&mut document, 30, 3, json!({"n": 3}));
    document
}

fn baseline(document: &mut Recorded, at: u64, step: u64, state: Value) {
    let snapshot = json!({"sessionId": "s", "streamId": "st_s", "state": state,
        "streamSequence": at, "oldestRetainedSequence": 0, "stepCount": step,
        "patchOrdinal": step, "projection": "numbers@1"});
    document.baseline(&serde_json::from_value(snapshot).unwrap(), false);
}

fn tell(document: &mut Recorded, at: u64, kind: &str, more: Value) {
    let mut chunk = json!({"type": kind, "agentId": "s", "agentType": "tester", "timestamp": 1,
        "step": 1});
    chunk
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    let reading = Reading {
        session: "s",
        stream: "st_s",
    };
    let chunk: RawChunk = serde_json::from_value(chunk).unwrap();
    document.observe(reading, at, &chunk);
}

/// What a mount with live state writes into the step that makes `n` of the state.
fn told(n: u64) -> Value {
    json!({"stepCount": n, "checkpointId": "c", "patchOrdinal": n, "projection": "numbers@1",
        "patches": [{"op": "replace", "path": "/n", "value": n}]})
}

fn with(mut value: Value, field: &str, other: Value) -> Value {
    value[field] = other;
    value
}

const STEP: &str = "step_committed";

/// Documents that were told something else than the next step of their projection, with what each
/// of them says afterwards.
fn doubtful() -> Vec<(&'static str, Recorded, Status)> {
    let stale = Status::Stale;
    let exact = |step| Status::Exact { step };
    let without = |mut value: Value, field: &str| {
        value.as_object_mut().unwrap().shift_remove(field);
        value
    };
    let forwarded = json!({"remoteSource": {"childSessionId": "s", "childSequence": 31,
        "streamId": "st_s"}, "origin": {"sessionId": "s", "streamId": "st_s", "sequence": 31}});
    let through_another = |value: Value| {
        let mut value = value;
        value
            .as_object_mut()
            .unwrap()
            .extend(forwarded.as_object().unwrap().clone());
        value
    };
    let bad = json!([{"op": "replace", "path": "/no", "value": 1}]);
    let raw = json!({"patches": [{"op": "add", "path": "/x", "value": 1}], "patchOrdinal": 4,
        "patchBase": 3});
    let unchanged = with(
        without(without(told(4), "projection"), "patches"),
        "patchOrdinal",
        json!(3),
    );
    let changed = without(without(told(4), "projection"), "patches");
    let cases = [
        ("the next step", STEP, told(4), exact(4)),
        ("a step too far", STEP, told(5), stale(Stale::Gap)),
        ("the same step again", STEP, told(3), stale(Stale::Gap)),
        (
            "another projection",
            STEP,
            with(told(4), "projection", json!("numbers@2")),
            stale(Stale::Resync),
        ),
        (
            "a resync",
            STEP,
            with(without(told(4), "patches"), "resync", json!(true)),
            stale(Stale::Resync),
        ),
        (
            "a resync with patches",
            STEP,
            with(told(4), "resync", json!(true)),
            stale(Stale::Resync),
        ),
        (
            "patches that are none",
            STEP,
            with(told(4), "patches", json!("x")),
            stale(Stale::Resync),
        ),
        (
            "patches that do not apply",
            STEP,
            with(told(4), "patches", bad),
            stale(Stale::Diverged),
        ),
        (
            "patches with a foreign member",
            STEP,
            with(told(4), "patches", json!([1])),
            stale(Stale::Diverged),
        ),
        (
            "a step through another log",
            STEP,
            through_another(told(4)),
            stale(Stale::Gap),
        ),
        ("a step that changed nothing", STEP, unchanged, exact(4)),
        (
            "a step that changed something",
            STEP,
            changed.clone(),
            stale(Stale::Gap),
        ),
        (
            "a step without an ordinal",
            STEP,
            without(changed, "patchOrdinal"),
            stale(Stale::Gap),
        ),
        (
            "a patch of the raw state",
            "state_patch",
            raw.clone(),
            stale(Stale::Gap),
        ),
        (
            "a custom streamer's patch",
            "state_patch",
            without(raw, "patchOrdinal"),
            exact(3),
        ),
        (
            "a discarded step",
            "step_discarded",
            json!({"fromSequence": 30}),
            exact(3),
        ),
        (
            "an entry",
            "run_resumed",
            json!({"runId": "r"}),
            stale(Stale::Reopened),
        ),
        (
            "a resync of the stream",
            "stream_resync",
            json!({"reason": "r"}),
            stale(Stale::Resync),
        ),
    ];
    let tell_one = |(name, kind, more, status)| {
        let mut document = at_three();
        tell(&mut document, 31, kind, more);
        (name, document, status)
    };
    cases.into_iter().map(tell_one).collect()
}

#[test]
fn a_projected_document_takes_the_next_step_of_its_projection_and_nothing_else() {
    for (name, mut document, status) in doubtful() {
        assert_eq!(*document.status(), status, "{name}");
        let n = if name == "the next step" { 4 } else { 3 };
        assert_eq!(*document.state(), json!({"n": n}), "{name}");
        let is_stale = matches!(status, Status::Stale(_));
        assert_eq!(document.take_request(), is_stale, "{name}");
        // Behind a new baseline it goes on.
        if is_stale {
            baseline(&mut document, 32, 4, json!({"n": 4}));
            tell(&mut document, 33, STEP, told(5));
            assert_eq!(*document.status(), Status::Exact { step: 5 }, "{name}");
            assert_eq!(*document.state(), json!({"n": 5}), "{name}");
        }
    }
    // A snapshot from before the entry that arrives behind it is gone on from where it stands.
    let late = late();
    assert_eq!(*late.status(), Status::Exact { step: 4 });
    assert_eq!(late.attach_at(), Position::At(32));
    // What the baseline covers is known.
    let mut document = at_three();
    tell(&mut document, 30, STEP, told(4));
    assert_eq!(*document.state(), json!({"n": 3}));
}

/// A document that hears of an entry while a snapshot from before is on its way.
fn late() -> Recorded {
    let mut document = at_three();
    document.boundary();
    assert!(document.take_request());
    tell(&mut document, 35, "run_resumed", json!({"runId": "r"}));
    baseline(&mut document, 32, 4, json!({"n": 4}));
    document
}

/// The same for other implementations.
pub(super) fn doubts() -> Vec<Value> {
    let script = |(name, document, _): (&str, Recorded, Status)| json!({"name": name, "session": "s", "events": document.script});
    let late = ("a late snapshot", late(), Status::Unpinned);
    doubtful().into_iter().chain([late]).map(script).collect()
}
