//! What the log costs: rows written and the size of the database.

use super::*;
use crate::protocol::chunk::ChunkBody;
use crate::protocol::ids::{AgentType, RunId, SessionId, StreamId};
use crate::session::{Begin, EntryIds, ModelAnswer, Session, Transition};

/// Counts the rows that are written to each table of the log, as the platform counts them: a row
/// that a statement removes counts, a dropped table does not.
const COUNTERS: [&str; 3] = [
    "CREATE TABLE written (place TEXT PRIMARY KEY, n INTEGER NOT NULL)",
    "INSERT INTO written VALUES ('chunks', 0), ('tails', 0)",
    "CREATE TRIGGER chunks_in AFTER INSERT ON ra_chunks BEGIN
        UPDATE written SET n = n + 1 WHERE place = 'chunks'; END",
];

/// The tails are made anew when they are packed, so their triggers are, too.
fn watch_tails(database: &dyn Database) {
    for tail in ["ra_tail_0", "ra_tail_1"] {
        for event in ["INSERT", "UPDATE", "DELETE"] {
            let trigger = format!(
                "CREATE TRIGGER IF NOT EXISTS {tail}_{event} AFTER {event} ON {tail} BEGIN
                    UPDATE written SET n = n + 1 WHERE place = 'tails'; END"
            );
            database.query(&trigger, &[]).unwrap();
        }
    }
}

fn written(database: &dyn Database, place: &str) -> i64 {
    let rows = database
        .query(
            "SELECT n FROM written WHERE place = ?",
            &[SqlValue::Text(place.into())],
        )
        .unwrap();
    let [SqlValue::Integer(n)] = rows[0][..] else {
        panic!("{rows:?}");
    };
    n
}

fn number(database: &dyn Database, sql: &str) -> u64 {
    let rows = database.query(sql, &[]).unwrap();
    let [SqlValue::Integer(n)] = rows[0][..] else {
        panic!("{rows:?}");
    };
    u64::try_from(n).unwrap()
}

#[test]
fn case_11_a_turn_of_400_chunks_at_ten_a_commit_writes_42_rows_of_log_at_most() {
    let database = memory();
    let store = open(database.clone());
    let commit = |transition: Transition| {
        store.commit(&transition.commit).unwrap();
        transition.next
    };
    let mut session = commit(
        Session::begin(
            Begin {
                session_id: SessionId::parse("s-1").unwrap(),
                agent_type: AgentType::parse("planner").unwrap(),
                stream_id: StreamId::parse("st_1").unwrap(),
                message: "go".into(),
                state: json!({}),
                origin: crate::store::SessionOrigin::default(),
                idempotency: None,
                ids: EntryIds {
                    run_id: RunId::parse("run_1").unwrap(),
                    entropy: [0; 16],
                },
            },
            1_000,
        )
        .unwrap(),
    );
    for statement in COUNTERS {
        database.query(statement, &[]).unwrap();
    }
    watch_tails(&*database);
    for n in 0..40u64 {
        let bodies = (0..10).map(|_| ChunkBody::TextDelta {
            delta: "word ".repeat(20),
        });
        let next = session.stream(bodies.collect(), Vec::new(), 1_000 + n);
        session = commit(next.unwrap());
    }
    let answer = ModelAnswer {
        text: "all of it".into(),
        calls: Vec::new(),
        queued: Vec::new(),
        cut: false,
        kept: None,
        model: "offline".into(),
        tokens: Default::default(),
    };
    session = commit(session.answer(answer, 2_000).unwrap());
    session = commit(session.promote(None, None, [1; 16], 2_000).unwrap());
    let (tails, chunks) = (written(&*database, "tails"), written(&*database, "chunks"));
    println!(
        "a turn of 400 chunks, ten a commit: {tails} rows appended, {chunks} rows packed, {} chunks in the log",
        session.record.last_sequence
    );
    assert!(tails + chunks <= 42, "{tails} + {chunks}");
}

/// A log of `commits` commits with `chunks` chunks of about `size` bytes each: rows appended, extra
/// rows written by packing, bytes of JSON, bytes of the database.
fn grow(commits: u64, chunks: u64, size: usize) -> (u64, u64, u64, u64) {
    let database = memory();
    let store = open(database.clone());
    let first = Commit {
        fence: None,
        writes: vec![Write::Session(crate::store::contract::sample_session())],
    };
    store.commit(&first).unwrap();
    let chunk = json!({"type": "text_delta", "delta": "x".repeat(size - 120), "agentId": "s-1",
                       "agentType": "planner", "timestamp": 1_700_000_000_000u64, "step": 1})
    .to_string();
    let mut next = 1;
    for _ in 0..commits {
        let list = vec![chunk.clone(); usize::try_from(chunks).unwrap()];
        let commit = Commit {
            fence: Some(1),
            writes: vec![Write::Chunks {
                first: next,
                chunks: list,
            }],
        };
        store.commit(&commit).unwrap();
        next += chunks;
    }
    let rows = number(&*database, "SELECT COUNT(*) FROM ra_chunks");
    // Large commits went to their place at once.
    let packed = number(
        &*database,
        &format!("SELECT COUNT(*) FROM ra_chunks WHERE last_sequence - first_sequence >= {chunks}"),
    );
    assert!(packed == rows || packed == 0, "{packed} of {rows}");
    // Making a packed tail anew counts two, and it was packed into eight.
    let extra = packed + packed.div_ceil(8) * 2;
    let pages =
        number(&*database, "PRAGMA page_count") - number(&*database, "PRAGMA freelist_count");
    let json = u64::try_from(chunk.len()).unwrap() * (next - 1);
    (
        commits,
        extra,
        json,
        pages * number(&*database, "PRAGMA page_size"),
    )
}

#[test]
fn packing_costs_few_rows_and_the_database_stays_near_the_size_of_its_json() {
    for (commits, chunks, size, extra_allowed) in [
        (20_000, 1, 200, 0.01),
        (10_000, 10, 200, 0.03),
        (2_000, 100, 200, 0.25),
        (6_000, 1, 4_000, 0.05),
        (1_000, 10, 4_000, 0.0),
    ] {
        let (appended, extra, json, database) = grow(commits, chunks, size);
        let extra = extra as f64 / appended as f64;
        let ratio = database as f64 / json as f64;
        println!(
            "{commits} commits of {chunks} x {size} B: {extra:.3} extra rows a row, {ratio:.3} bytes a byte of JSON"
        );
        assert!(extra <= extra_allowed, "{extra} extra rows a row");
        assert!(ratio <= 1.1, "{ratio} times the JSON");
    }
}
