//! Scripts of what a filter was told and what it said, in a file that the other implementation is
//! put through as well.

use serde::Deserialize as _;
use serde_json::{Value, json};

use super::world::Random;
use crate::protocol::chunk::RawChunk;
use crate::protocol::message::SnapshotResponse;
use crate::reconstruct::{PatchFilter, Reading, Unalignable, Verdict};

fn said(verdict: Verdict) -> Value {
    match verdict {
        Verdict::Apply => json!({"kind": "apply"}),
        Verdict::Pass => json!({"kind": "pass"}),
        Verdict::Known => json!({"kind": "known"}),
        Verdict::Suppress { why, first } => {
            let why = match why {
                Unalignable::NestedDescendant => "nested_descendant",
                Unalignable::UnpinnedBaseline => "unpinned_baseline",
            };
            json!({"kind": "suppress", "why": why, "first": first})
        }
    }
}

/// Gives a filter one event; a chunk has an answer.
fn tell(filter: &mut PatchFilter, event: &Value) -> Option<Value> {
    match event["op"].as_str().unwrap() {
        "baseline" => filter.baseline(&SnapshotResponse::deserialize(&event["snapshot"]).unwrap()),
        "forget" => filter.forget(event["session"].as_str().unwrap()),
        _ => {
            let reading = Reading {
                session: event["reading"]["session"].as_str().unwrap(),
                stream: event["reading"]["stream"].as_str().unwrap(),
            };
            let chunk = RawChunk::deserialize(&event["chunk"]).unwrap();
            let sequence = event["sequence"].as_u64().unwrap();
            return Some(said(filter.judge(reading, sequence, &chunk)));
        }
    }
    None
}

fn stream(session: &str, random: &mut Random) -> String {
    let life = if random.chance(6) { "2" } else { "1" };
    format!("st_{session}{life}")
}

/// Anything that a filter of a parent's stream may be told of the parent, a child and a grandchild.
fn event(sequence: u64, random: &mut Random) -> Value {
    let session = ["p", "c", "g"][usize::try_from(random.below(3)).unwrap()];
    if random.chance(6) {
        let at = i64::try_from(random.below(8)).unwrap() - 1;
        // Also one of long ago, behind which is said again what was applied.
        let from = if random.chance(2) { 0 } else { sequence / 3 };
        let at = if at < 0 {
            at
        } else {
            at + i64::try_from(from).unwrap()
        };
        return json!({"op": "baseline", "snapshot": {"sessionId": session, "streamId": stream(session, random),
            "state": {}, "streamSequence": at, "oldestRetainedSequence": 0, "stepCount": 0}});
    }
    if random.chance(40) {
        return json!({"op": "forget", "session": session});
    }
    let kind = if random.chance(8) {
        "step_committed"
    } else {
        "state_patch"
    };
    let mut chunk =
        json!({"type": kind, "agentId": session, "agentType": "t", "timestamp": 1, "step": 1});
    if kind == "state_patch" {
        chunk["patches"] = json!([]);
    }
    let place = (sequence / 3 + random.below(4)).saturating_sub(1);
    if session != "p" || random.chance(12) {
        let through = if session == "g" && random.chance(3) {
            "c"
        } else {
            session
        };
        chunk["remoteSource"] = json!({"childSessionId": through, "childSequence": place, "streamId": stream(through, random)});
    }
    if random.chance(3) {
        let named = if random.chance(8) { "x" } else { session };
        chunk["origin"] =
            json!({"sessionId": named, "sequence": place, "streamId": stream(named, random)});
    }
    if random.chance(30) {
        chunk["origin"] =
            json!([json!("origin"), Value::Null][usize::try_from(random.below(2)).unwrap()]);
    }
    let reading = json!({"session": "p", "stream": "st_p1"});
    json!({"op": "chunk", "reading": reading, "sequence": sequence, "chunk": chunk})
}

fn scripts() -> Value {
    let scripts: Vec<Value> = (1..=12)
        .map(|seed| {
            let mut random = Random::new(seed);
            let mut filter = PatchFilter::new();
            let events = (1..=60).map(|sequence| {
                let mut event = event(sequence, &mut random);
                if let Some(verdict) = tell(&mut filter, &event) {
                    event["then"] = verdict;
                }
                event
            });
            json!({"name": format!("stream {seed}"), "events": events.collect::<Vec<_>>()})
        })
        .collect();
    json!({
        "about": "What a patch filter is told, and what it says of each chunk.",
        "scripts": scripts,
    })
}

#[test]
fn the_vectors_are_what_a_filter_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/filter.json");
    if std::env::var_os("WRITE_VECTORS").is_some() {
        std::fs::write(path, scripts().to_string() + "\n").unwrap();
    }
    let vectors: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut verdicts = std::collections::BTreeMap::new();
    for script in vectors["scripts"].as_array().unwrap() {
        let mut filter = PatchFilter::new();
        for (at, event) in script["events"].as_array().unwrap().iter().enumerate() {
            let verdict = tell(&mut filter, event);
            assert_eq!(
                verdict.as_ref(),
                event.get("then"),
                "{} event {at}: {event}",
                script["name"]
            );
            if let Some(verdict) = verdict {
                *verdicts.entry(verdict.to_string()).or_insert(0) += 1;
            }
        }
    }
    assert_eq!(verdicts.len(), 7, "each verdict there is: {verdicts:?}");
    assert!(verdicts.values().all(|count| *count >= 5), "{verdicts:?}");
}
