#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::rc::Rc;

use serde_json::json;

use super::*;
use crate::protocol::ids::Position;
use crate::protocol::message::SessionStatus;
use crate::store::CheckpointRecord;
use crate::store::contract::sample_session;

/// A session whose latest checkpoint is at `position`.
fn session(status: SessionStatus, position: Sequence) -> Session {
    let mut record = sample_session();
    record.status = status;
    record.last_sequence = 100;
    Session {
        record,
        checkpoint: CheckpointRecord {
            checkpoint_id: "c".into(),
            step_count: 1,
            stream_sequence: position,
            patch_ordinal: 0,
            state: Rc::new(json!({})),
            created_at: 1,
        },
        step: None,
    }
}

/// A hundred chunks of ten bytes in stretches of ten, committed at 1000, 2000, ... 10000.
fn stats() -> LogStats {
    LogStats {
        oldest: 1,
        newest: 100,
        bytes: 1_000,
        front: (0..10)
            .map(|n| LogSpan {
                first: n * 10 + 1,
                last: n * 10 + 10,
                bytes: 100,
                committed_at: (n + 1) * 1_000,
            })
            .collect(),
    }
}

fn floor(policy: Retention, session: &Session) -> Option<Sequence> {
    retention(&policy, session, &stats(), 10_000)
}

#[test]
fn at_least_what_was_promised_is_kept() {
    let done = session(SessionStatus::Completed, 3);
    let keep = Retention::default();
    let cases = [
        (keep, None),
        (keep.with_max_chunks(100), None),
        (keep.with_max_chunks(91), None),
        (keep.with_max_chunks(90), Some(11)),
        (keep.with_max_chunks(35), Some(61)),
        (keep.with_max_chunks(10), Some(91)),
        // The newest stretch is kept, whatever the policy says.
        (keep.with_max_chunks(0), Some(91)),
        (keep.with_max_bytes(901), None),
        (keep.with_max_bytes(900), Some(11)),
        (keep.with_max_bytes(250), Some(71)),
        (keep.with_max_age(Duration::from_millis(9_001)), None),
        (keep.with_max_age(Duration::from_millis(9_000)), Some(11)),
        (keep.with_max_age(Duration::from_millis(4_500)), Some(51)),
        (keep.with_max_age(Duration::ZERO), Some(91)),
        // What one of them allows goes.
        (keep.with_max_chunks(50).with_max_bytes(900), Some(51)),
        (keep.with_hard_max_bytes(1_000), None),
        (keep.with_hard_max_bytes(999), Some(11)),
        (keep.with_hard_max_bytes(1), Some(91)),
        (keep.with_max_chunks(90).with_hard_max_bytes(400), Some(61)),
    ];
    for (policy, expected) in cases {
        assert_eq!(floor(policy, &done), expected, "{policy:?}");
        assert_eq!(policy.keeps_all(), policy == keep);
    }
}

#[test]
fn the_floor_stays_at_the_checkpoint_until_the_session_is_terminal() {
    let keep = Retention::default().with_max_chunks(10);
    for status in [
        SessionStatus::Running,
        SessionStatus::Paused,
        SessionStatus::Interrupted,
    ] {
        for (position, expected) in [
            (1, None),
            (10, None),
            (11, Some(11)),
            (55, Some(51)),
            (61, Some(61)),
            (100, Some(91)),
        ] {
            let open = session(status, position);
            assert_eq!(floor(keep, &open), expected, "{status:?} at {position}");
            // What stays pinned can be attached to: the chunk of the checkpoint is still there.
            let next = open.trim(expected.unwrap_or(0)).next;
            assert_eq!(next.snapshot().stream_sequence, Position::At(position));
        }
    }
    for status in [SessionStatus::Completed, SessionStatus::Failed] {
        assert_eq!(floor(keep, &session(status, 1)), Some(91));
    }
}

#[test]
fn a_hard_cap_takes_the_snapshots_position_until_the_next_promote() {
    let keep = Retention::default().with_hard_max_bytes(300);
    let open = session(SessionStatus::Running, 15);
    assert_eq!(floor(keep, &open), Some(71));
    let next = open.trim(71).next;
    assert_eq!(next.snapshot().stream_sequence, Position::None);
    assert_eq!(next.snapshot().patch_ordinal, None);
    assert_eq!(next.snapshot().oldest_retained_sequence, 71);
    let mut promoted = next;
    promoted.checkpoint.stream_sequence = 100;
    assert_eq!(
        promoted.snapshot().stream_sequence,
        Position::At(100),
        "the next checkpoint is above the floor again"
    );
}

#[test]
fn a_floor_that_is_reached_is_not_raised_again() {
    let keep = Retention::default().with_max_chunks(50);
    let mut done = session(SessionStatus::Completed, 100);
    done.record.floor = 51;
    let mut rest = stats();
    rest.front.drain(..5);
    rest.oldest = 51;
    rest.bytes = 500;
    assert_eq!(retention(&keep, &done, &rest, 10_000), None);
    assert_eq!(
        retention(&keep, &done, &LogStats::default(), 10_000),
        None,
        "an empty log has no floor"
    );
}

#[test]
fn the_next_expiry_is_known() {
    let keep = Retention::default();
    let done = session(SessionStatus::Completed, 100);
    assert_eq!(next_expiry(&keep, &done, &stats()), None);
    let aged = keep.with_max_age(Duration::from_millis(500));
    assert_eq!(next_expiry(&aged, &done, &stats()), Some(1_500));
    let pinned = session(SessionStatus::Interrupted, 10);
    assert_eq!(next_expiry(&aged, &pinned, &stats()), None);
    let mut last = stats();
    last.front.drain(..9);
    assert_eq!(next_expiry(&aged, &done, &last), None);
}

#[test]
fn a_transition_takes_the_trim_into_its_commit() {
    let open = session(SessionStatus::Running, 15);
    let said = open.emit("x", json!(1), 5).unwrap();
    let afterwards = said.log_afterwards(stats());
    assert_eq!(afterwards.newest, 101);
    assert!(afterwards.bytes > 1_050);
    assert!(!said.is_boundary());
    let trimmed = said.trimmed(11);
    assert_eq!(trimmed.next.record.floor, 11);
    let floors: Vec<Sequence> = trimmed
        .commit
        .writes
        .iter()
        .filter_map(|write| match write {
            Write::Session(record) => Some(record.floor),
            Write::Trim { floor } => Some(*floor),
            _ => None,
        })
        .collect();
    assert_eq!(floors, [11, 11]);
    assert_eq!(open.record.floor, 0);
}
