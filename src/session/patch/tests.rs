#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use serde::Deserialize as _;
use serde_json::json;

use super::*;
use crate::store::StagedPatch;

/// A small deterministic generator (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(limit).unwrap()).unwrap()
    }

    fn key(&mut self) -> &'static str {
        ["a", "b", "", "x/y", "~", "~1", "-", "0", "1", "é\n", "list"][self.below(11)]
    }

    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 5 } else { 9 }) {
            0 => Value::Null,
            1 => json!(self.below(3)),
            2 => json!(1.5),
            3 => json!(self.key()),
            4 => json!(self.below(2) == 0),
            5 | 6 => (0..self.below(5)).map(|_| self.value(depth - 1)).collect(),
            _ => self.object(depth - 1),
        }
    }

    fn object(&mut self, depth: usize) -> Value {
        let members = (0..self.below(5)).map(|_| (self.key().to_owned(), self.value(depth)));
        Value::Object(members.collect())
    }

    /// Another document that differs in a few places.
    fn mutated(&mut self, value: &Value) -> Value {
        match value {
            Value::Object(members) => {
                let mut members = members.clone();
                for _ in 0..=self.below(2) {
                    let key = self.key();
                    match (self.below(4), members.get(key).cloned()) {
                        (0, _) => drop(members.remove(key)),
                        (1 | 2, Some(old)) => drop(members.insert(key.into(), self.mutated(&old))),
                        _ => drop(members.insert(key.into(), self.value(2))),
                    }
                }
                Value::Object(members)
            }
            Value::Array(elements) => {
                let mut elements = elements.clone();
                let at = self.below(elements.len() + 1);
                match self.below(7) {
                    0 | 1 => (0..=self.below(2)).for_each(|_| elements.push(self.value(1))),
                    2 => elements.truncate(at),
                    3 => drop(elements.drain(..at)),
                    4 => elements.insert(at, self.value(1)),
                    _ => {
                        if let Some(element) = elements.get_mut(at) {
                            *element = self.mutated(element);
                        }
                    }
                }
                Value::Array(elements)
            }
            _ => self.value(1),
        }
    }
}

fn op(op: &str, path: &str, value: Option<Value>) -> PatchOperation {
    PatchOperation {
        op: op.into(),
        path: path.into(),
        from: None,
        value,
    }
}

#[test]
fn a_diff_applied_to_the_old_document_gives_the_new_one() {
    for seed in 0..4_000 {
        let mut random = Random(seed);
        let before = random.object(3);
        let after = if seed % 3 == 0 {
            random.object(3)
        } else {
            let once = random.mutated(&before);
            random.mutated(&once)
        };
        let operations = diff(&before, &after);
        let applied = apply(&before, &operations);
        assert_eq!(
            applied.as_ref(),
            Ok(&after),
            "seed {seed}: {before} by {operations:?}"
        );
        assert!(
            before != after || operations.is_empty(),
            "seed {seed}: a change of nothing"
        );
        let wire = serde_json::to_string(&operations).unwrap();
        let read: Vec<PatchOperation> = serde_json::from_str(&wire).unwrap();
        assert_eq!(
            read, operations,
            "seed {seed}: the wire form keeps null values"
        );
    }
}

#[test]
fn operations_take_the_form_that_the_stream_promises() {
    let case = |before: Value, after: Value| diff(&before, &after);
    assert_eq!(
        case(json!({"list": [1]}), json!({"list": [1, null, {"a": 1}]})),
        [
            op("add", "/list/-", Some(Value::Null)),
            op("add", "/list/-", Some(json!({"a": 1}))),
        ]
    );
    assert_eq!(
        case(
            json!({"t": [{"s": "new"}, {"s": "new"}]}),
            json!({"t": [{"s": "new"}, {"s": "done"}]})
        ),
        [op("replace", "/t/1/s", Some(json!("done")))]
    );
    assert_eq!(
        case(json!({"l": [1, 2, 3, 4, 5]}), json!({"l": [1, 2, 3]})),
        [op("remove", "/l/4", None), op("remove", "/l/3", None)]
    );
    assert_eq!(
        case(json!({"l": [1, 2, 3, 4, 5]}), json!({"l": [3, 4, 5]})),
        [op("remove", "/l/0", None), op("remove", "/l/0", None)]
    );
    assert_eq!(
        case(json!({"l": [1, 2, 3]}), json!({"l": []})),
        [op("replace", "/l", Some(json!([])))]
    );
    assert_eq!(
        case(json!({"l": [1, 2, 3]}), json!({"l": [1, 9, 2, 3]})),
        [op("replace", "/l", Some(json!([1, 9, 2, 3])))]
    );
    assert_eq!(
        case(json!({"a/b": 1, "gone": 1}), json!({"a/b": 2, "~": null})),
        [
            op("remove", "/gone", None),
            op("replace", "/a~1b", Some(json!(2))),
            op("add", "/~0", Some(Value::Null)),
        ]
    );
    assert_eq!(case(json!({"x": [1]}), json!({"x": {"0": 1}})).len(), 1);
}

#[test]
fn a_patch_applies_whole_or_not_at_all() {
    let document = json!({"a": 1, "l": []});
    let error = apply(
        &document,
        &[
            op("replace", "/a", Some(json!(2))),
            op("remove", "/gone", None),
        ],
    )
    .unwrap_err();
    assert_eq!((error.operation, error.path.as_str()), (1, "/gone"));
    for bad in [
        op("remove", "/l/0", None),
        op("remove", "/l/-", None),
        op("add", "/l/01", Some(json!(1))),
        op("add", "/l", None),
        op("add", "no pointer", Some(json!(1))),
        op("shrink", "/a", None),
    ] {
        let error = apply(&document, std::slice::from_ref(&bad)).unwrap_err();
        assert_eq!(error.operation, 0, "{bad:?}");
    }
    let mut from_a_peer = op("copy", "/l/-", None);
    from_a_peer.from = Some("/a".into());
    let applied = apply(&document, &[op("test", "/a", Some(json!(1))), from_a_peer]);
    assert_eq!(applied, Ok(json!({"a": 1, "l": [1]})));
}

/// Stages changes as a step does: each is a diff against the shared working document.
struct Step {
    base: Value,
    working: Value,
    calls: Vec<(Vec<StagedPatch>, bool)>,
    ordinal: u64,
}

impl Step {
    fn new(base: Value, calls: usize) -> Self {
        Self {
            working: base.clone(),
            base,
            calls: vec![(Vec::new(), false); calls],
            ordinal: 0,
        }
    }

    fn write(&mut self, call: usize, change: impl FnOnce(&mut Value)) {
        let mut after = self.working.clone();
        change(&mut after);
        let patches = diff(&self.working, &after);
        self.ordinal += 1;
        self.calls[call].0.push(StagedPatch {
            by_hook: false,
            ordinal: self.ordinal,
            patches,
        });
        self.working = after;
    }

    fn drop_call(&mut self, call: usize) {
        self.calls[call].1 = true;
    }

    fn outcome(&self) -> Reconciled {
        let calls: Vec<CallWrites<'_>> = (0..)
            .zip(&self.calls)
            .map(|(index, (staged, dropped))| CallWrites {
                index,
                staged,
                dropped: *dropped,
            })
            .collect();
        reconcile(&self.base, &calls).unwrap()
    }
}

fn push(list: &'static str, value: Value) -> impl FnOnce(&mut Value) {
    move |state| state[list].as_array_mut().unwrap().push(value)
}

#[test]
fn of_two_writes_to_one_key_the_later_in_call_order_wins() {
    let mut step = Step::new(json!({"k": 0, "other": 0}), 2);
    step.write(1, |state| state["k"] = json!("second call, first to write"));
    step.write(0, |state| state["k"] = json!("first call"));
    step.write(0, |state| state["other"] = json!("kept"));
    let outcome = step.outcome();
    assert_eq!(
        outcome.state,
        json!({"k": "second call, first to write", "other": "kept"})
    );
    assert!(outcome.skipped.is_empty());

    // Staged in call order already, the working document stands.
    let mut step = Step::new(json!({}), 2);
    step.write(0, |state| state["k"] = json!({"a": 1}));
    step.write(1, |state| state["k"]["a"] = json!(2));
    assert_eq!(step.outcome().state, step.working);

    // The earlier call wrote inside what the later call set.
    let mut step = Step::new(json!({"k": {"a": 0}}), 2);
    step.write(1, |state| state["k"] = json!("flat"));
    step.write(0, |state| state["k"] = json!({"a": 1, "b": 2}));
    assert_eq!(step.outcome().state, json!({"k": "flat"}));
}

#[test]
fn appends_of_two_calls_are_both_kept_in_the_order_of_staging() {
    let mut step = Step::new(json!({"l": [0]}), 2);
    step.write(1, push("l", json!("b")));
    step.write(0, push("l", json!("a")));
    step.write(1, push("l", json!("c")));
    let outcome = step.outcome();
    assert_eq!(outcome.state, json!({"l": [0, "b", "a", "c"]}));
    assert_eq!(outcome.state, step.working);
}

#[test]
fn the_writes_of_a_dropped_call_vanish_and_leave_the_others_whole() {
    let mut step = Step::new(json!({"l": [{"n": 1}, {"n": 2}], "k": 1}), 3);
    step.write(0, push("l", json!({"n": "failed"})));
    step.write(1, push("l", json!({"n": "kept"})));
    step.write(0, |state| state["k"] = json!("failed"));
    // Its own element stands at another index once the failed one is gone.
    step.write(1, |state| state["l"][3]["note"] = json!("mine"));
    step.write(2, |state| state["k"] = json!("set over the failed write"));
    step.drop_call(0);
    let outcome = step.outcome();
    assert_eq!(
        outcome.state,
        json!({
            "l": [{"n": 1}, {"n": 2}, {"n": "kept", "note": "mine"}],
            "k": "set over the failed write"
        })
    );
    assert!(outcome.skipped.is_empty());
}

#[test]
fn a_dropped_removal_does_not_shift_what_others_meant() {
    let mut step = Step::new(json!({"l": [{"n": 0}, {"n": 1}, {"n": 2}]}), 2);
    step.write(0, |state| {
        drop(state["l"].as_array_mut().unwrap().remove(0))
    });
    step.write(1, |state| state["l"][0]["seen"] = json!(true));
    step.drop_call(0);
    assert_eq!(
        step.outcome().state,
        json!({"l": [{"n": 0}, {"n": 1, "seen": true}, {"n": 2}]})
    );
}

#[test]
fn what_has_lost_its_place_is_skipped_and_reported() {
    let mut step = Step::new(json!({"l": []}), 2);
    step.write(0, push("l", json!({"n": "failed"})));
    step.write(0, |state| state["made"] = json!({"by": 0}));
    step.write(1, |state| {
        state["l"][0]["note"] = json!("on the failed one")
    });
    step.write(1, |state| state["made"]["more"] = json!(1));
    step.write(1, |state| state["own"] = json!(1));
    step.drop_call(0);
    let outcome = step.outcome();
    assert_eq!(outcome.state, json!({"l": [], "own": 1}));
    let skipped: Vec<_> = outcome
        .skipped
        .iter()
        .map(|skipped| (skipped.index, skipped.ordinal, skipped.path.as_str()))
        .collect();
    assert_eq!(skipped, [(1, 3, "/l/0/note"), (1, 4, "/made/more")]);
}

#[test]
fn a_member_that_only_a_dropped_call_had_made_is_made_by_who_replaced_it() {
    let mut step = Step::new(json!({}), 2);
    step.write(0, |state| state["k"] = json!("failed"));
    step.write(1, |state| state["k"] = json!("kept"));
    step.drop_call(0);
    assert_eq!(step.outcome().state, json!({"k": "kept"}));
}

#[test]
fn patches_that_were_never_staged_are_refused() {
    let staged = |operation| {
        vec![StagedPatch {
            by_hook: false,
            ordinal: 1,
            patches: vec![operation],
        }]
    };
    for bad in [
        op("remove", "/gone", None),
        op("replace", "/gone", Some(json!(1))),
        op("add", "/l/2", Some(json!(1))),
        op("replace", "/l/-", Some(json!(1))),
        op("remove", "", None),
        op("add", "/x", None),
        op("move", "/l", None),
        op("add", "x", Some(json!(1))),
    ] {
        let staged = staged(bad.clone());
        let calls = [CallWrites {
            index: 0,
            staged: &staged,
            dropped: false,
        }];
        assert!(reconcile(&json!({"l": [1]}), &calls).is_err(), "{bad:?}");
    }
}

#[test]
fn random_steps_reconcile_to_what_is_left_of_them() {
    for seed in 0..1_000 {
        let mut random = Random(seed);
        // One key of its own for each call: no two calls collide.
        let base =
            json!({"0": random.object(2), "1": random.object(2), "2": random.object(2), "l": []});
        let mut step = Step::new(base.clone(), 3);
        let mut alone = [Step::new(base.clone(), 3), Step::new(base, 3)];
        for _ in 0..8 {
            let call = random.below(3);
            let key = call.to_string();
            let before = step.working[&key].clone();
            let after = random.mutated(&before);
            let appends = random.below(3) == 0;
            let change = |state: &mut Value| {
                state[&key] = after.clone();
                if appends {
                    push("l", json!(call))(state);
                }
            };
            step.write(call, change);
            if call != 1 {
                alone[0].write(call, change);
            }
            alone[1].write(call, change);
        }
        assert_eq!(
            step.outcome().state,
            step.working,
            "seed {seed}: nothing was dropped"
        );
        step.drop_call(1);
        let outcome = step.outcome();
        assert_eq!(
            outcome.state, alone[0].working,
            "seed {seed}: call 1 never was"
        );
        assert!(outcome.skipped.is_empty(), "seed {seed}");
        step.drop_call(0);
        step.drop_call(2);
        assert_eq!(
            step.outcome().state,
            step.base,
            "seed {seed}: all was dropped"
        );
        alone[1].drop_call(1);
        assert_eq!(
            alone[1].outcome(),
            outcome,
            "seed {seed}: the outcome is a function"
        );
    }
}

#[test]
fn colliding_steps_are_those_of_the_calls_one_after_the_other() {
    for seed in 0..1_000 {
        let mut random = Random(seed);
        let base = json!({"k": 0, "m": {}, "l": [1]});
        let mut step = Step::new(base, 3);
        let mut last_by_key = std::collections::BTreeMap::new();
        for turn in 0..6 {
            let call = random.below(3);
            let key = ["k", "m"][random.below(2)];
            let value = json!(format!("{call} in turn {turn}"));
            step.write(call, |state| state[key] = value.clone());
            let winner = last_by_key.entry(key).or_insert((call, value.clone()));
            if call >= winner.0 {
                *winner = (call, value);
            }
        }
        let outcome = step.outcome();
        for (key, (_, value)) in last_by_key {
            assert_eq!(outcome.state[key], value, "seed {seed}: {key}");
        }
        assert!(outcome.skipped.is_empty(), "seed {seed}");
    }
}

#[test]
fn the_published_cases_of_rfc_6902_are_applied_as_they_say() {
    let vectors: Value =
        serde_json::from_str(include_str!("../../../tests/vectors/rfc6902.json")).unwrap();
    let cases = vectors["cases"].as_array().unwrap();
    assert!(cases.len() > 80, "{} cases", cases.len());
    for case in cases {
        let patch = case["patch"].as_array().unwrap();
        // What is no operation at all is refused before it comes to the document.
        let operations: Result<Vec<PatchOperation>, _> =
            patch.iter().map(PatchOperation::deserialize).collect();
        let after = operations
            .map_err(|error| error.to_string())
            .and_then(|operations| {
                apply(&case["doc"], &operations).map_err(|error| error.to_string())
            });
        match case.get("error") {
            Some(_) => assert!(after.is_err(), "{case} gave {after:?}"),
            None => {
                let after = after.unwrap_or_else(|error| panic!("{case}: {error}"));
                if let Some(expected) = case.get("expected") {
                    assert_eq!(&after, expected, "{case}");
                }
            }
        }
    }
}

fn operations(value: Value) -> Vec<PatchOperation> {
    serde_json::from_value(value).unwrap()
}

#[test]
fn a_patch_that_nests_too_deeply_does_not_apply() {
    let deep = |levels: usize| -> Vec<Value> {
        (1..=levels)
            .map(|n| json!({"op": "add", "path": "/a".repeat(n), "value": {}}))
            .collect()
    };
    let deepest = apply(&json!({}), &operations(deep(DEEPEST - 1).into())).unwrap();
    assert!(!too_deep(&deepest, DEEPEST) && too_deep(&deepest, DEEPEST - 1));
    let error = apply(&json!({}), &operations(deep(200).into())).unwrap_err();
    assert_eq!(error.operation, DEEPEST - 1);
    assert!(error.reason.contains("too deeply"), "{error}");
    let moved = json!([{"op": "move", "from": "/deep", "path": "/a/a/a"}]);
    let mut document = json!({"a": {"a": {}}});
    document["deep"] = deepest["a"].clone();
    assert!(
        apply(&document, &operations(moved))
            .unwrap_err()
            .reason
            .contains("too deeply")
    );
}

#[test]
fn a_patch_that_copies_copies_does_not_fill_the_memory() {
    let bomb = vec![json!({"op": "copy", "from": "", "path": "/a/-"}); 40];
    let error = apply(&json!({"a": []}), &operations(bomb.into())).unwrap_err();
    assert!(error.reason.contains("too large"), "{error}");
    assert!((10..30).contains(&error.operation), "{error}");
    let wide = vec![json!({"op": "copy", "from": "/a/0", "path": "/a/-"}); 10_000];
    let document = json!({"a": ["x".repeat(1000)]});
    let error = apply(&document, &operations(wide.into())).unwrap_err();
    assert!(error.reason.contains("too large"), "{error}");
    // A document that is large by itself is no matter of a patch that copies nothing.
    let large = json!({"a": "x".repeat(MOST_COPIED)});
    let small = json!([{"op": "add", "path": "/b", "value": 1}]);
    assert!(apply(&large, &operations(small)).is_ok());
    let copy = json!([{"op": "add", "path": "/b", "value": 1}, {"op": "copy", "from": "/b", "path": "/c"}]);
    assert!(apply(&large, &operations(copy)).is_err());
}
