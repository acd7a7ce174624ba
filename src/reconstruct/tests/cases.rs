//! Cases from the field that one document shows, by their numbers in `tests/coverage.md`.

use serde_json::{Value, json};

use super::sentences::{PARENT, append, chunk, committed, forwarded, snapshot};
use crate::protocol::frame::{EndFrame, Frame};
use crate::protocol::ids::Position;
use crate::protocol::message::SessionStatus;
use crate::reconstruct::{Document, PatchFilter, Reading, Status, Verdict};

const OWN: Reading<'static> = Reading {
    session: "s",
    stream: "st_s",
};

fn end(state: Option<Value>) -> Frame {
    Frame::End(EndFrame {
        run_id: None,
        status: SessionStatus::Completed,
        output: None,
        state,
        usage: None,
    })
}

#[test]
fn case_29_the_end_replaces_whatever_stale_document_a_rejoin_has_left() {
    // What makes a document stale, and what the end then says: the state, or nothing of it.
    let missed = append(9, 9, 8);
    let resumed = json!({
        "type": "run_resumed", "agentId": "s", "agentType": "t", "timestamp": 1, "step": 1,
        "runId": "r",
    });
    let resync = json!({
        "type": "stream_resync", "agentId": "s", "agentType": "t", "timestamp": 1, "step": 1,
        "reason": "child_gap",
    });
    for stale in [missed, committed(7, 7), resync, resumed] {
        for told in [true, false] {
            let mut document = Document::new("s");
            let last = json!({"list": [1, 2, 3]});
            let first = snapshot(json!({"list": []}), Position::At(1), 0, 0);
            assert!(document.take_request());
            document.baseline(&first, false);
            if stale["type"] == "run_resumed" {
                // It was over, and goes on.
                document.observe_end(&end(Some(json!({"list": [1]}))));
            }
            document.observe(OWN, 5, &chunk(stale.clone()));
            assert!(matches!(document.status(), Status::Stale(_)), "{stale}");
            assert_ne!(document.state(), &last);
            // A snapshot is under way when the end comes, and what it says is of before the end.
            assert!(document.take_request(), "{stale}");
            document.observe_end(&end(told.then(|| last.clone())));
            document.baseline(&first, false);
            if !told {
                assert!(document.take_request(), "{stale}");
                document.baseline(&snapshot(last.clone(), Position::None, 1, 0), true);
            }
            assert_eq!(
                (document.status(), document.state()),
                (&Status::Final, &last),
                "{stale} {told}"
            );
        }
    }
}

#[test]
fn case_31_no_patch_is_ever_applied_without_a_baseline() {
    // Patches that any document would take, `{}` and `null` included, and what else makes a stream.
    let patch = |ordinals: Option<(u64, u64)>| {
        let mut patch = append(0, 1, 0);
        patch["patches"] = json!([{"op": "add", "path": "", "value": {"x": 1}}]);
        let fields = patch.as_object_mut().unwrap();
        fields.shift_remove("patchOrdinal");
        fields.shift_remove("patchBase");
        if let Some((ordinal, base)) = ordinals {
            patch["patchOrdinal"] = ordinal.into();
            patch["patchBase"] = base.into();
        }
        patch
    };
    let other = |kind: &str| json!({"type": kind, "agentId": "s", "agentType": "t", "timestamp": 1, "step": 1, "runId": "r"});
    let chunks = [
        patch(None),
        patch(Some((0, 0))),
        patch(Some((1, 0))),
        patch(Some((2, 1))),
        committed(1, 1),
        committed(1, 0),
        other("run_started"),
        other("run_resumed"),
        other("stream_resync"),
    ];
    let unpinned = snapshot(json!({"kept": true}), Position::None, 3, 0);
    let mut count = 0;
    for (one, two, three) in triples(chunks.len()) {
        for is_forwarded in [false, true] {
            for baseline in [None, Some(&unpinned)] {
                let mut document = Document::new("s");
                let mut filter = PatchFilter::new();
                if let Some(baseline) = baseline {
                    document.baseline(baseline, false);
                    filter.baseline(baseline);
                }
                let before = document.state().clone();
                for (at, index) in (1..).zip([one, two, three]) {
                    let (reading, heard) = if is_forwarded {
                        (PARENT, forwarded(chunks[index].clone(), at))
                    } else {
                        (OWN, chunk(chunks[index].clone()))
                    };
                    document.observe(reading, at, &heard);
                    assert_ne!(filter.judge(reading, at, &heard), Verdict::Apply);
                }
                assert_eq!(document.state(), &before);
                assert!(!matches!(
                    document.status(),
                    Status::Exact { .. } | Status::InStep
                ));
                count += 1;
            }
        }
    }
    assert_eq!(count, 9 * 9 * 9 * 4);
    // With a baseline the same patch is applied: the test can fail.
    let mut document = Document::new("s");
    document.baseline(&snapshot(json!({}), Position::At(1), 0, 0), false);
    document.observe(OWN, 2, &chunk(patch(Some((1, 0)))));
    assert_eq!(document.state(), &json!({"x": 1}));
}

fn triples(n: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..n * n * n).map(move |number| (number / (n * n), number / n % n, number % n))
}
