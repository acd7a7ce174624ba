#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

mod costs;
mod fixtures;

use serde_json::json;

use super::super::contract::{CASES, Site, Subject, run};
use super::super::schema::{Migration, inspect, migrate};
use super::super::{SqlValue, ToolCall, Write};
use super::*;
use crate::native::RusqliteDatabase;

fn memory() -> Rc<dyn Database> {
    Rc::new(RusqliteDatabase::in_memory().unwrap())
}

fn open(database: Rc<dyn Database>) -> Rc<dyn Store> {
    Rc::new(SqlStore::new(database))
}

#[test]
fn the_store_keeps_every_promise() {
    let done = run(Subject {
        site: &|| Site::over(memory(), open),
    });
    assert_eq!(done, CASES.len());
}

#[test]
fn the_store_without_a_database_keeps_every_promise_but_those_about_sql() {
    let done = run(Subject {
        site: &|| {
            let store = crate::store::MemoryStore::new();
            Site {
                open: Box::new(move || Rc::new(store.clone())),
                database: None,
            }
        },
    });
    let about_sql = CASES.iter().filter(|case| case.needs_sql).count();
    assert_eq!(done, CASES.len() - about_sql);
    assert!(about_sql < 6, "hardly anything may hang on SQL");
}

/// Binds numbers as the bare platform would: as floating point. The store's casts must cope.
struct PlatformNumbers(Rc<dyn Database>);

impl Database for PlatformNumbers {
    fn query(&self, sql: &str, parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        let bound: Vec<SqlValue> = parameters
            .iter()
            .map(|value| match value {
                #[allow(clippy::cast_precision_loss)]
                SqlValue::Integer(number) => SqlValue::Real(*number as f64),
                other => other.clone(),
            })
            .collect();
        self.0.query(sql, &bound)
    }

    fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.0.transaction(work)
    }
}

#[test]
fn the_promises_hold_where_numbers_are_bound_as_floating_point() {
    run(Subject {
        site: &|| Site::over(Rc::new(PlatformNumbers(memory())), open),
    });
}

/// Counts the bytes that queries return.
struct Metered {
    inner: Rc<dyn Database>,
    bytes: Cell<usize>,
    queries: Cell<usize>,
}

impl Database for Metered {
    fn query(&self, sql: &str, parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        let rows = self.inner.query(sql, parameters)?;
        let bytes = rows.iter().flatten().map(|cell| match cell {
            SqlValue::Text(text) => text.len(),
            _ => 8,
        });
        self.bytes.set(self.bytes.get() + bytes.sum::<usize>());
        self.queries.set(self.queries.get() + 1);
        Ok(rows)
    }

    fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.inner.transaction(work)
    }
}

#[test]
fn a_page_near_the_tail_reads_a_page_and_not_the_log() {
    let metered = Rc::new(Metered {
        inner: memory(),
        bytes: Cell::new(0),
        queries: Cell::new(0),
    });
    let store = open(metered.clone());
    let record = crate::store::contract::sample_session();
    let first = Commit {
        fence: None,
        writes: vec![Write::Session(record)],
    };
    store.commit(&first).unwrap();
    let chunk = json!({"type": "text_delta", "delta": "x".repeat(160)}).to_string();
    let mut next = 1;
    for _ in 0..2_000u64 {
        let commit = Commit {
            fence: Some(1),
            writes: vec![Write::Chunks {
                first: next,
                chunks: vec![chunk.clone(); 10],
            }],
        };
        store.commit(&commit).unwrap();
        next += 10;
    }
    let limit = PageLimit {
        chunks: 500,
        bytes: 100_000,
    };
    // A packed row is read whole by the first page that needs it, and not again by the next.
    let packed = 130_000;
    for after in [0, 10_005, 19_800] {
        metered.bytes.set(0);
        metered.queries.set(0);
        let page = store.chunks(after, next, limit).unwrap();
        let size: usize = page.chunks.iter().map(|(_, chunk)| chunk.len()).sum();
        assert!(!page.chunks.is_empty());
        assert!(
            metered.bytes.get() < size + 2 * packed,
            "{} read for {size}",
            metered.bytes.get()
        );
        assert!(metered.queries.get() <= 4);
    }
    metered.bytes.set(0);
    let (mut after, mut size) = (0, 0);
    loop {
        let page = store.chunks(after, next, limit).unwrap();
        let Some((last, _)) = page.chunks.last() else {
            break;
        };
        after = *last;
        size += page
            .chunks
            .iter()
            .map(|(_, chunk)| chunk.len())
            .sum::<usize>();
    }
    assert!(
        metered.bytes.get() < size + size / 5,
        "{} read for {size}",
        metered.bytes.get()
    );
}

#[test]
fn migrations_apply_in_order_and_only_what_is_missing() {
    const CHAIN: &[Migration] = &[
        Migration {
            version: 1,
            statements: &[
                "CREATE TABLE ra_a (x INTEGER)",
                "INSERT INTO ra_a VALUES (1)",
            ],
        },
        Migration {
            version: 2,
            statements: &["ALTER TABLE ra_a ADD COLUMN y INTEGER NOT NULL DEFAULT 5"],
        },
    ];
    let database = memory();
    let stage = |migrations| inspect(&*database, migrations);
    assert_eq!(stage(CHAIN), Ok(Stage::Absent));
    migrate(&*database, &CHAIN[..1], Stage::Absent).unwrap();
    assert_eq!(stage(&CHAIN[..1]), Ok(Stage::Current));
    assert_eq!(stage(CHAIN), Ok(Stage::At(1)));
    migrate(&*database, CHAIN, Stage::At(1)).unwrap();
    migrate(&*database, CHAIN, Stage::Current).unwrap();
    assert_eq!(stage(CHAIN), Ok(Stage::Current));
    assert_eq!(
        stage(&CHAIN[..1]).unwrap_err().code,
        Code::InvalidStoredState
    );
    let rows = database.query("SELECT x, y FROM ra_a", &[]).unwrap();
    assert_eq!(rows, [[SqlValue::Integer(1), SqlValue::Integer(5)]]);
    let applied = database
        .query(
            "SELECT version FROM ra_migrations WHERE applied_at > 0 ORDER BY version",
            &[],
        )
        .unwrap();
    assert_eq!(applied, [[SqlValue::Integer(1)], [SqlValue::Integer(2)]]);
}

#[test]
fn published_migrations_are_numbered_without_a_gap() {
    let numbers: Vec<u64> = MIGRATIONS
        .iter()
        .map(|migration| migration.version)
        .collect();
    let expected: Vec<u64> = (1..).take(MIGRATIONS.len()).collect();
    assert_eq!(numbers, expected);
}

#[test]
fn what_is_replaced_leaves_no_parts_behind() {
    let database = memory();
    let store = open(database.clone());
    let mut record = crate::store::contract::sample_session();
    record.output = Some(json!("x".repeat(3_000_000)));
    let big = |n: u64| {
        Write::Checkpoint(CheckpointRecord {
            checkpoint_id: format!("c{n}"),
            step_count: n,
            stream_sequence: n,
            patch_ordinal: 0,
            state: Rc::new(json!({"x": "x".repeat(3_000_000)})),
            created_at: n,
        })
    };
    let call = Write::ToolCall(ToolCallRecord {
        call: ToolCall {
            id: "a".into(),
            name: "note".into(),
            arguments: json!("x".repeat(3_000_000)),
        },
        index: 0,
        begun: 1,
        outcome: None,
        staged: Vec::new(),
    });
    let first = Commit {
        fence: None,
        writes: vec![
            Write::Session(record.clone()),
            big(1),
            big(2),
            big(3),
            big(4),
            call.clone(),
        ],
    };
    store.commit(&first).unwrap();
    let again = Commit {
        fence: Some(1),
        writes: vec![Write::Session(record.clone()), call],
    };
    store.commit(&again).unwrap();
    record.output = None;
    let last = Commit {
        fence: Some(1),
        writes: vec![Write::Session(record), Write::ClearStep],
    };
    store.commit(&last).unwrap();
    let owners = database
        .query("SELECT DISTINCT owner FROM ra_parts ORDER BY owner", &[])
        .unwrap();
    assert_eq!(
        owners.len(),
        2,
        "the two kept checkpoints alone: {owners:?}"
    );
}
