#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

fn memory() -> RusqliteDatabase {
    let database = RusqliteDatabase::in_memory().unwrap();
    database
        .query("CREATE TABLE t (k INTEGER PRIMARY KEY, v)", &[])
        .unwrap();
    database
}

fn insert(database: &RusqliteDatabase, key: i64) -> Result<()> {
    database
        .query("INSERT INTO t (k) VALUES (?)", &[SqlValue::Integer(key)])
        .map(drop)
}

fn keys(database: &RusqliteDatabase) -> Vec<i64> {
    let rows = database.query("SELECT k FROM t ORDER BY k", &[]).unwrap();
    rows.into_iter()
        .map(|row| match row[0] {
            SqlValue::Integer(key) => key,
            _ => panic!("a key must be an integer"),
        })
        .collect()
}

#[test]
fn integers_stay_integers_and_whole_reals_read_as_integers() {
    let database = memory();
    let text = |sql: &str, value: SqlValue| database.query(sql, &[value]).unwrap()[0][0].clone();
    assert_eq!(
        text("SELECT typeof(?)", SqlValue::Integer(42)),
        SqlValue::Text("integer".into())
    );
    assert_eq!(
        text("SELECT json_object('n', ?)", SqlValue::Integer(42)),
        SqlValue::Text(r#"{"n":42}"#.into())
    );
    assert_eq!(text("SELECT ?", SqlValue::Real(3.0)), SqlValue::Integer(3));
    assert_eq!(text("SELECT ?", SqlValue::Real(2.5)), SqlValue::Real(2.5));
    let largest = (1 << 53) - 1;
    assert_eq!(
        text("SELECT ?", SqlValue::Integer(-largest)),
        SqlValue::Integer(-largest)
    );
    assert!(
        database
            .query("SELECT ?", &[SqlValue::Integer(largest + 1)])
            .is_err()
    );
    assert!(database.query("SELECT x'ff'", &[]).is_err());
    assert_eq!(
        database
            .query("SELECT CAST('é' AS BLOB), typeof(CAST('é' AS BLOB))", &[])
            .unwrap(),
        [[SqlValue::Text("é".into()), SqlValue::Text("blob".into())]],
        "a blob that is text reads as text"
    );
}

#[test]
fn the_platforms_limits_hold() {
    let database = memory();
    let store =
        |text: String| database.query("INSERT INTO t (v) VALUES (?)", &[SqlValue::Text(text)]);
    assert!(store("x".repeat(1_900_000)).is_ok());
    assert!(store("x".repeat(2_000_001)).is_err());
    let marks = vec!["?"; 101].join(",");
    let numbers = vec![SqlValue::Integer(1); 101];
    assert!(
        database
            .query(&format!("SELECT max({marks})"), &numbers)
            .is_err()
    );
    for sql in ["BEGIN", " savepoint x", "COMMIT;", "ATTACH ':memory:' AS o"] {
        assert!(database.query(sql, &[]).is_err(), "{sql}");
    }
    let two = database.query("SELECT 1; SELECT 2", &[]);
    assert!(two.is_err(), "two statements in one are refused");
}

#[test]
fn a_failed_transaction_leaves_nothing_and_a_nested_one_only_itself() {
    let database = memory();
    let outcome = database.transaction(&mut || {
        insert(&database, 1)?;
        insert(&database, 1)
    });
    let error = outcome.unwrap_err();
    assert_eq!(error.code, crate::error::Code::Internal);
    assert!(error.detail.unwrap().contains("UNIQUE constraint failed"));
    assert!(keys(&database).is_empty());

    database
        .transaction(&mut || {
            insert(&database, 1)?;
            let inner = database.transaction(&mut || {
                insert(&database, 2)?;
                database.transaction(&mut || insert(&database, 3))?;
                Err(Error::internal("no"))
            });
            assert_eq!(inner, Err(Error::internal("no")));
            database.transaction(&mut || insert(&database, 4))
        })
        .unwrap();
    assert_eq!(keys(&database), [1, 4]);
}

#[test]
fn a_panic_in_a_transaction_rolls_it_back() {
    let database = memory();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        database.transaction(&mut || {
            insert(&database, 1)?;
            database.transaction(&mut || {
                insert(&database, 2)?;
                panic!("in the middle")
            })
        })
    }));
    assert!(panicked.is_err());
    assert!(keys(&database).is_empty());
    database.transaction(&mut || insert(&database, 3)).unwrap();
    assert_eq!(keys(&database), [3]);
}

#[test]
fn full_text_search_is_there() {
    let database = memory();
    let run = |sql: &str| database.query(sql, &[]).unwrap();
    run("CREATE VIRTUAL TABLE doc USING fts5(title, body)");
    run(
        "INSERT INTO doc VALUES ('tides', 'the moon pulls the sea'), ('wind', 'the sun warms the air')",
    );
    let found = database
        .query(
            "SELECT title FROM doc WHERE doc MATCH ? ORDER BY bm25(doc)",
            &[SqlValue::Text("moon OR sea".into())],
        )
        .unwrap();
    assert_eq!(found, [[SqlValue::Text("tides".into())]]);
}

#[test]
fn a_file_keeps_its_rows() {
    let directory = std::env::temp_dir().join(format!("ra-database-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("object.sqlite");
    let database = RusqliteDatabase::open(&path).unwrap();
    database
        .query("CREATE TABLE t (k INTEGER PRIMARY KEY, v)", &[])
        .unwrap();
    database.transaction(&mut || insert(&database, 7)).unwrap();
    drop(database);
    let again = RusqliteDatabase::open(&path).unwrap();
    let found = keys(&again);
    drop(again);
    std::fs::remove_dir_all(&directory).unwrap();
    assert_eq!(found, [7]);
}

#[test]
fn a_write_says_whether_it_wrote() {
    /// The same database with what every database does by itself.
    struct Plain(RusqliteDatabase);
    impl Database for Plain {
        fn query(&self, sql: &str, parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
            self.0.query(sql, parameters)
        }
        fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
            self.0.transaction(work)
        }
    }
    for database in [
        Box::new(memory()) as Box<dyn Database>,
        Box::new(Plain(memory())),
    ] {
        let seven = [SqlValue::Integer(7)];
        let insert = "INSERT OR IGNORE INTO t (k) VALUES (?)";
        assert_eq!(database.write(insert, &seven), Ok(true));
        assert_eq!(database.write(insert, &seven), Ok(false));
        assert_eq!(
            database.write("DELETE FROM t WHERE k > ?", &seven),
            Ok(false)
        );
        assert_eq!(
            database.write("DELETE FROM t WHERE k = ?", &seven),
            Ok(true)
        );
        assert!(database.write("COMMIT", &[]).is_err());
        assert!(
            database
                .write("INSERT INTO missing VALUES (1)", &[])
                .is_err()
        );
    }
}
