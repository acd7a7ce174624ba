//! SQLite through rusqlite, with the rules of a Durable Object's SQLite.
//!
//! The limits on rows, parameters, statement text and patterns are the platform's. A transaction
//! is opened by [`Database::transaction`] alone: statements that open or close one are refused, as
//! they are there. A whole floating-point number comes back as an integer, as it does there.

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use rusqlite::limits::Limit;
use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, ToSql, params_from_iter};

use crate::error::{Error, Result};
use crate::protocol::ids::MAX_SAFE_INTEGER;
use crate::store::{Database, SqlValue};

/// The platform's limits, so that a statement which works here works there.
const LIMITS: [(Limit, i32); 9] = [
    (Limit::SQLITE_LIMIT_LENGTH, 2_000_000),
    (Limit::SQLITE_LIMIT_SQL_LENGTH, 100_000),
    (Limit::SQLITE_LIMIT_COLUMN, 100),
    (Limit::SQLITE_LIMIT_VARIABLE_NUMBER, 100),
    (Limit::SQLITE_LIMIT_EXPR_DEPTH, 100),
    (Limit::SQLITE_LIMIT_COMPOUND_SELECT, 5),
    (Limit::SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 50),
    (Limit::SQLITE_LIMIT_TRIGGER_DEPTH, 10),
    (Limit::SQLITE_LIMIT_ATTACHED, 0),
];

/// One object's SQLite, in a file or in memory.
#[derive(Debug)]
pub struct RusqliteDatabase {
    connection: Connection,
    depth: Cell<u32>,
}

impl RusqliteDatabase {
    /// A database in memory; it is gone when it is dropped.
    ///
    /// # Errors
    /// `INTERNAL` with SQLite's words as detail.
    pub fn in_memory() -> Result<Self> {
        Connection::open_in_memory()
            .and_then(Self::with_platform_rules)
            .map_err(failed)
    }

    /// A database in memory with what [`Self::image`] has taken.
    ///
    /// # Errors
    /// `INTERNAL` with SQLite's words as detail.
    pub(super) fn of_image(image: &[u8]) -> Result<Self> {
        let open = |mut connection: Connection| {
            connection.deserialize_read_exact("main", image, image.len(), false)?;
            Self::with_platform_rules(connection)
        };
        Connection::open_in_memory().and_then(open).map_err(failed)
    }

    /// All that the database holds, as the bytes of a database's file.
    ///
    /// # Errors
    /// `INTERNAL` with SQLite's words as detail.
    pub(super) fn image(&self) -> Result<Vec<u8>> {
        let image = self.connection.serialize("main").map_err(failed)?;
        Ok(image.to_vec())
    }

    /// The database in the file at `path`, made when it is missing. A commit that returned has
    /// been synced to the disk.
    ///
    /// # Errors
    /// `INTERNAL` with SQLite's words as detail.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let open = |connection: Connection| {
            connection.pragma_update(None, "journal_mode", "WAL")?;
            connection.pragma_update(None, "synchronous", "FULL")?;
            Self::with_platform_rules(connection)
        };
        Connection::open(path).and_then(open).map_err(failed)
    }

    fn with_platform_rules(connection: Connection) -> rusqlite::Result<Self> {
        connection.busy_timeout(Duration::from_secs(5))?;
        connection.pragma_update(None, "foreign_keys", "ON")?;
        connection.set_prepared_statement_cache_capacity(128);
        for (limit, value) in LIMITS {
            connection.set_limit(limit, value)?;
        }
        Ok(Self {
            connection,
            depth: Cell::new(0),
        })
    }

    fn rows(
        &self,
        sql: &str,
        parameters: &[SqlValue],
    ) -> rusqlite::Result<Vec<Vec<Result<SqlValue>>>> {
        let mut statement = self.connection.prepare_cached(sql)?;
        let columns = statement.column_count();
        let mut rows = statement.query(params_from_iter(parameters.iter().map(Bound)))?;
        let mut all = Vec::new();
        while let Some(row) = rows.next()? {
            all.push(
                (0..columns)
                    .map(|column| row.get_ref(column).map(read))
                    .collect::<rusqlite::Result<Vec<_>>>()?,
            );
        }
        Ok(all)
    }
}

impl Database for RusqliteDatabase {
    fn query(&self, sql: &str, parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        refuse(sql, parameters)?;
        self.rows(sql, parameters)
            .map_err(failed)?
            .into_iter()
            .map(|row| row.into_iter().collect())
            .collect()
    }

    fn write(&self, sql: &str, parameters: &[SqlValue]) -> Result<bool> {
        refuse(sql, parameters)?;
        self.connection
            .prepare_cached(sql)
            .and_then(|mut statement| {
                statement.execute(params_from_iter(parameters.iter().map(Bound)))
            })
            .map(|rows| rows > 0)
            .map_err(failed)
    }

    fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let open = Open::begin(self)?;
        match work().and_then(|()| open.commit()) {
            Ok(()) => Ok(()),
            Err(error) => match open.roll_back() {
                Ok(()) => Err(error),
                Err(second) => Err(Error::internal(format!(
                    "a transaction failed ({error}) and could not be rolled back ({})",
                    second.detail.unwrap_or_default()
                ))),
            },
        }
    }
}

/// A transaction or savepoint that is open. Dropped without an end, it is rolled back: a panic in
/// the work may not leave half of it for the next commit.
struct Open<'a> {
    database: &'a RusqliteDatabase,
    depth: u32,
    ended: Cell<bool>,
}

impl<'a> Open<'a> {
    fn begin(database: &'a RusqliteDatabase) -> Result<Self> {
        let depth = database.depth.get();
        // The write lock is taken at once: a fence that was read stays true until the commit.
        database.run(depth, "BEGIN IMMEDIATE", "SAVEPOINT")?;
        database.depth.set(depth.saturating_add(1));
        Ok(Self {
            database,
            depth,
            ended: Cell::new(false),
        })
    }

    fn commit(&self) -> Result<()> {
        self.database.run(self.depth, "COMMIT", "RELEASE")?;
        self.end();
        Ok(())
    }

    fn roll_back(&self) -> Result<()> {
        self.end();
        // A grave error (a full disk) has made SQLite roll everything back already.
        if self.database.connection.is_autocommit() {
            return Ok(());
        }
        self.database.run(self.depth, "ROLLBACK", "ROLLBACK TO")?;
        if self.depth > 0 {
            self.database.run(self.depth, "", "RELEASE")?;
        }
        Ok(())
    }

    fn end(&self) {
        self.ended.set(true);
        self.database.depth.set(self.depth);
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.ended.get() {
            // The panic that leads here is the error to report; a failure to roll back shows at
            // the next statement.
            drop(self.roll_back());
        }
    }
}

impl RusqliteDatabase {
    fn run(&self, depth: u32, outermost: &str, nested: &str) -> Result<()> {
        let done = if depth == 0 {
            self.connection.execute_batch(outermost)
        } else {
            self.connection
                .execute_batch(&format!("{nested} nested_{depth}"))
        };
        done.map_err(failed)
    }
}

struct Bound<'a>(&'a SqlValue);

impl ToSql for Bound<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self.0 {
            SqlValue::Null => ValueRef::Null,
            SqlValue::Integer(number) => ValueRef::Integer(*number),
            SqlValue::Real(number) => ValueRef::Real(*number),
            SqlValue::Text(text) => ValueRef::Text(text.as_bytes()),
        }))
    }
}

fn read(value: ValueRef<'_>) -> Result<SqlValue> {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    // The platform reads every number as a double; so does this twin.
    Ok(match value {
        ValueRef::Null => SqlValue::Null,
        ValueRef::Integer(number) if number.unsigned_abs() > MAX_SAFE_INTEGER => {
            SqlValue::Real(number as f64)
        }
        ValueRef::Integer(number) => SqlValue::Integer(number),
        ValueRef::Real(number)
            if number.fract() == 0.0 && number.abs() <= MAX_SAFE_INTEGER as f64 =>
        {
            SqlValue::Integer(number as i64)
        }
        ValueRef::Real(number) => SqlValue::Real(number),
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => SqlValue::Text(text.to_owned()),
            Err(_) => {
                return Err(Error::internal(
                    "a cell is not UTF-8: store text, or read a blob as hex(column)",
                ));
            }
        },
    })
}

/// Refuses what the platform would refuse.
fn refuse(sql: &str, parameters: &[SqlValue]) -> Result<()> {
    refuse_transaction_text(sql)?;
    let is_too_large = |value: &SqlValue| matches!(value, SqlValue::Integer(number) if number.unsigned_abs() > MAX_SAFE_INTEGER);
    if parameters.iter().any(is_too_large) {
        return Err(Error::internal(
            "an integer parameter is not below 2^53: store it as text",
        ));
    }
    Ok(())
}

fn refuse_transaction_text(sql: &str) -> Result<()> {
    let word = sql
        .trim_start()
        .split(|c: char| !c.is_ascii_alphabetic())
        .next()
        .unwrap_or_default();
    let refused = [
        "BEGIN",
        "COMMIT",
        "END",
        "ROLLBACK",
        "SAVEPOINT",
        "RELEASE",
        "ATTACH",
        "DETACH",
    ];
    if refused.iter().any(|other| word.eq_ignore_ascii_case(other)) {
        return Err(Error::internal(format!(
            "{} is not allowed as a statement: use Database::transaction",
            word.to_ascii_uppercase()
        )));
    }
    Ok(())
}

fn failed(error: rusqlite::Error) -> Error {
    Error::internal(error.to_string())
}

#[cfg(test)]
mod tests;
