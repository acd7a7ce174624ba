#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use serde_json::json;

use super::*;
use crate::protocol::ids::{AgentType, SessionId};
use crate::protocol::message::{ResumeMode, SessionStatus};
use crate::session::tests::{answer, begin, chunks, failure, ids, kinds, ok, run};
use crate::session::{Next, Reopen, Settlement, patch};
use crate::store::{MessageRecord, SubLocation};

fn child(call: &str, status: SubStatus) -> SubSessionRecord {
    SubSessionRecord {
        sub_session_id: SessionId::parse(&format!("s1-remote-{call}")).unwrap(),
        agent_type: AgentType::parse("child").unwrap(),
        tool_call_id: call.into(),
        location: SubLocation::Remote,
        status,
        remote: None,
        deadline: 9_000,
        created_at: 1,
    }
}

fn reopen(mode: ResumeMode, message: Option<&str>, healed: Vec<Healed>) -> Reopen {
    Reopen {
        mode,
        message: message.map(Into::into),
        state: None,
        idempotency: None,
        healed,
        ids: ids(2),
    }
}

/// A session whose run failed with these calls open.
fn failed(calls: &[&str]) -> Session {
    let session = begin(json!({})).next;
    let session = session.answer(answer(calls), 1).unwrap().next;
    fail(&session)
}

fn fail(session: &Session) -> Session {
    let settlement = Settlement::Failed { failure: failure() };
    session
        .settle(settlement, run(), UsageRollup::default(), 5)
        .unwrap()
        .next
}

/// The messages that a commit writes, in short.
fn messages(transition: &Transition) -> Vec<String> {
    let writes = transition.commit.writes.iter();
    writes
        .filter_map(|write| match write {
            Write::Message(MessageRecord::User { text }) => Some(format!("user {text}")),
            Write::Message(MessageRecord::Assistant { .. }) => Some("assistant".into()),
            Write::Message(MessageRecord::Tool { tool_call_id, .. }) => {
                Some(format!("tool {tool_call_id}"))
            }
            _ => None,
        })
        .collect()
}

#[test]
fn a_failed_run_keeps_a_committed_answer_and_discards_another() {
    let kept = failed(&["a"]);
    assert_eq!(kept.record.status, SessionStatus::Failed);
    assert_eq!(kept.open_calls().count(), 1);
    assert_eq!(kept.next(), Next::Rest);

    let session = begin(json!({})).next;
    let delta = ChunkBody::TextDelta { delta: "x".into() };
    let streaming = session.stream(vec![delta], Vec::new(), 1).unwrap().next;
    let settlement = Settlement::Failed { failure: failure() };
    let settled = streaming
        .settle(settlement, run(), UsageRollup::default(), 5)
        .unwrap();
    assert_eq!(kinds(&settled), ["step_discarded"]);
    assert!(settled.next.step.is_none());
}

#[test]
fn a_message_stands_behind_the_results_of_the_calls_that_were_open() {
    let session = failed(&["a", "b"]);
    let opened = session
        .resume(reopen(ResumeMode::WithMessage, Some("one"), Vec::new()), 6)
        .unwrap();
    assert_eq!(kinds(&opened), ["run_resumed"]);
    assert_eq!(messages(&opened), Vec::<String>::new());
    assert_eq!(opened.next.next(), Next::Act);
    // It fails again before the calls have their results, and another message comes in.
    let again = fail(&opened.next);
    let opened = again
        .resume(reopen(ResumeMode::WithMessage, Some("two"), Vec::new()), 7)
        .unwrap();
    let mut session = opened.next;
    for id in ["a", "b"] {
        session = session
            .tool_finished(id, ok(json!(1)), None, 8)
            .unwrap()
            .next;
    }
    assert_eq!(session.next(), Next::Promote);
    let promoted = session.promote(None, None, [0; 16], 9).unwrap();
    assert_eq!(
        messages(&promoted),
        ["assistant", "tool a", "tool b", "user one", "user two"]
    );
    assert_eq!(promoted.next.next(), Next::Ask);
}

#[test]
fn without_an_open_step_a_message_is_part_of_the_entry() {
    let session = fail(&begin(json!({})).next);
    let opened = session
        .resume(reopen(ResumeMode::WithMessage, Some("one"), Vec::new()), 6)
        .unwrap();
    assert_eq!(messages(&opened), ["user one"]);
}

#[test]
fn a_healed_call_ends_in_the_entry_s_own_commit_and_its_child_is_still_to_be_told() {
    let session = failed(&["a", "b"]);
    let healed = vec![
        Healed {
            tool_call_id: "a".into(),
            child: Some(child("a", SubStatus::Running)),
        },
        Healed {
            tool_call_id: "b".into(),
            child: None,
        },
    ];
    let opened = session
        .resume(reopen(ResumeMode::NewTurn, Some("next"), healed), 6)
        .unwrap();
    assert_eq!(
        kinds(&opened),
        ["run_resumed", "subagent_end", "tool_end", "tool_end"]
    );
    let detail = &chunks(&opened)[2]["result"]["metadata"]["helixErrorDetail"];
    assert_eq!(detail["code"], "unpaired_on_continuation");
    let told: Vec<_> = opened
        .commit
        .writes
        .iter()
        .filter_map(|write| match write {
            Write::SubSession(record) => Some(record.status),
            _ => None,
        })
        .collect();
    assert_eq!(told, [SubStatus::Stopping]);
    assert_eq!(opened.next.next(), Next::Promote);
}

#[test]
fn a_step_that_is_taken_up_again_adds_up_from_the_new_run_s_checkpoint() {
    let session = begin(json!({"x": 0})).next;
    let session = session.answer(answer(&["a", "b"]), 1).unwrap().next;
    let session = session.stage("a", json!({"x": 0, "a": 1}), 2).unwrap().next;
    let session = session.stage("b", json!({"x": 9, "a": 1}), 3).unwrap().next;
    let session = session
        .tool_finished("a", ok(json!(1)), None, 4)
        .unwrap()
        .next;
    // What was staged is void for those who have applied it.
    let settlement = Settlement::Failed { failure: failure() };
    let settled = session
        .settle(settlement, run(), UsageRollup::default(), 5)
        .unwrap();
    assert_eq!(kinds(&settled), ["step_discarded"]);
    let session = settled.next;
    let opened = session
        .resume(reopen(ResumeMode::Continue, None, Vec::new()), 6)
        .unwrap();
    assert_eq!(
        kinds(&opened),
        ["run_resumed", "step_discarded", "state_patch"]
    );
    // What a reader that attaches at the snapshot gets from there on.
    let base = opened.next.snapshot().state;
    let mut seen = chunks(&opened);
    let session = opened.next;
    let session = session
        .tool_finished("b", ok(json!(2)), None, 7)
        .unwrap()
        .next;
    let promoted = session.promote(None, None, [0; 16], 8).unwrap();
    seen.extend(chunks(&promoted));
    let mut state = base;
    for chunk in seen.iter().filter(|chunk| chunk["type"] == "state_patch") {
        let patches: Vec<_> = serde_json::from_value(chunk["patches"].clone()).unwrap();
        state = patch::apply(&state, &patches).unwrap();
    }
    assert_eq!(state, json!({"x": 0, "a": 1}));
    assert_eq!(state, *promoted.next.checkpoint.state);
}

#[test]
fn a_stop_marks_the_open_refs_in_its_own_commit() {
    let session = begin(json!({})).next;
    let session = session.answer(answer(&["a", "b"]), 1).unwrap().next;
    let children = vec![
        child("a", SubStatus::Running),
        child("b", SubStatus::Stopping),
    ];
    let stop = session.interrupt(None, run(), children, 5).unwrap();
    let marked: Vec<_> = stop
        .transition
        .unwrap()
        .commit
        .writes
        .into_iter()
        .filter_map(|write| match write {
            Write::SubSession(record) => Some((record.tool_call_id, record.status)),
            _ => None,
        })
        .collect();
    assert_eq!(marked, [("a".into(), SubStatus::Stopping)]);
}

#[test]
fn a_spoiled_ref_ends_its_call_typed_and_one_without_a_call_is_only_marked() {
    let session = begin(json!({})).next;
    let session = session.answer(answer(&["a"]), 1).unwrap().next;
    let spoiled = session
        .child_spoiled("s1-remote-a", Some(("a", "child")), 2)
        .unwrap();
    assert_eq!(kinds(&spoiled), ["subagent_end", "tool_end"]);
    let detail = &chunks(&spoiled)[1]["result"]["metadata"]["helixErrorDetail"];
    assert_eq!(
        (&detail["code"], &detail["cause"]),
        (&json!("invalid_stored_state"), &json!("malformed_ref"))
    );
    let spoiled = session.child_spoiled("s1-remote-z", None, 2).unwrap();
    assert_eq!(kinds(&spoiled), Vec::<String>::new());
    assert!(spoiled.commit.writes.iter().any(
        |write| matches!(write, Write::SpoiledSubSession { sub_session_id } if sub_session_id == "s1-remote-z")
    ));
}

#[test]
fn calls_that_must_wait_are_told_in_the_answer_s_commit() {
    let session = begin(json!({})).next;
    let mut said = answer(&["a", "b", "c"]);
    said.queued = vec!["b".into(), "c".into()];
    let answered = session.answer(said, 1).unwrap();
    let told: Vec<_> = chunks(&answered)
        .into_iter()
        .map(|chunk| (chunk["eventName"].clone(), chunk["data"].clone()))
        .collect();
    assert_eq!(
        told,
        [
            (
                json!(QUEUED_EVENT),
                json!({"toolCallId": "b", "position": 1})
            ),
            (
                json!(QUEUED_EVENT),
                json!({"toolCallId": "c", "position": 2})
            )
        ]
    );
}

#[test]
fn a_state_that_an_entry_changes_stands_below_what_the_kept_step_has_staged() {
    let session = begin(json!({"n": 0})).next;
    let session = session.answer(answer(&["a", "b"]), 1).unwrap().next;
    let session = session.stage("a", json!({"n": 1}), 2).unwrap().next;
    let session = session.tool_finished("a", ok(json!(1)), None, 3).unwrap();
    let failed = fail(&session.next);
    let mut entry = reopen(ResumeMode::WithMessage, Some("one"), Vec::new());
    entry.state = Some(json!({"n": 0, "said": "one"}));
    let opened = failed.resume(entry, 6).unwrap();
    assert_eq!(
        kinds(&opened),
        [
            "step_discarded",
            "state_patch",
            "run_resumed",
            "step_discarded",
            "state_patch"
        ]
    );
    let said = chunks(&opened);
    let changed = failed.record.last_sequence + 2;
    // The change is void by neither discard, and the staged patch stands on it.
    assert!(said[0]["fromSequence"].as_u64().unwrap() < failed.record.last_sequence);
    assert!(said[3]["fromSequence"].as_u64().unwrap() >= changed);
    assert_eq!(said[1]["patchBase"], failed.checkpoint.patch_ordinal);
    assert_eq!(said[4]["patchBase"], said[1]["patchOrdinal"]);
    let present = &opened.next;
    assert_eq!(*present.checkpoint.state, json!({"n": 0, "said": "one"}));
    assert_eq!(present.checkpoint.stream_sequence, changed + 1);
    assert_eq!(*present.working_state(), json!({"n": 1, "said": "one"}));
    let done = present.tool_finished("b", ok(json!(1)), None, 7).unwrap();
    let promoted = done.next.promote(None, None, [2; 16], 8).unwrap();
    assert_eq!(kinds(&promoted), ["step_committed"]);
    assert_eq!(
        *promoted.next.checkpoint.state,
        json!({"n": 1, "said": "one"})
    );
}
