//! The tables of a session and how they came about.
//!
//! Migrations are constants, numbered from 1, applied in order inside the transaction of the first
//! write; a read never creates anything. A database that a later version wrote is refused and left
//! as it is. Every table begins with `ra_`; the others in the object belong to its agents.

use super::rows::{self, Row};
use super::{Database, SqlValue};
use crate::error::{Code, Error, Result};
use crate::mutants::{self, Mutant};

/// One step of the schema. A published one never changes; the next has the next number.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// Its number.
    pub version: u64,
    /// Its statements, one SQL statement each.
    pub statements: &'static [&'static str],
}

/// All migrations, in order.
///
/// A column that holds JSON of any size holds either the text itself or, above a limit, `@` and the
/// number of parts that `ra_parts` keeps for its owner (`<table>/<column>/<key>`): the platform
/// takes no row of 2 MB.
pub const MIGRATIONS: &[Migration] = &[FIRST, LOG_IN_TAILS, ANNOUNCED_BY, DUE_HOOKS];

const FIRST: Migration = Migration {
    version: 1,
    statements: &[
        "CREATE TABLE ra_session (
            id INTEGER PRIMARY KEY CHECK (id = 1),
            session_id TEXT NOT NULL, agent_type TEXT NOT NULL, stream_id TEXT NOT NULL,
            status TEXT NOT NULL, run_id TEXT NOT NULL, epoch INTEGER NOT NULL,
            step_count INTEGER NOT NULL, last_sequence INTEGER NOT NULL, floor INTEGER NOT NULL,
            last_ordinal INTEGER NOT NULL, attempts INTEGER NOT NULL,
            stop TEXT, output TEXT, failure TEXT, origin TEXT NOT NULL,
            created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL)",
        "CREATE TABLE ra_runs (
            run_id TEXT PRIMARY KEY, start_sequence INTEGER NOT NULL,
            start_step INTEGER NOT NULL, started_at INTEGER NOT NULL, terminal TEXT)",
        // One row holds the chunks of one commit, one JSON text a line.
        "CREATE TABLE ra_chunks (
            first_sequence INTEGER PRIMARY KEY, last_sequence INTEGER NOT NULL,
            bytes INTEGER NOT NULL, body TEXT NOT NULL)",
        "CREATE TABLE ra_checkpoints (
            position INTEGER PRIMARY KEY, checkpoint_id TEXT NOT NULL,
            step_count INTEGER NOT NULL, stream_sequence INTEGER NOT NULL,
            patch_ordinal INTEGER NOT NULL, created_at INTEGER NOT NULL, state TEXT NOT NULL)",
        "CREATE TABLE ra_messages (position INTEGER PRIMARY KEY, body TEXT NOT NULL)",
        "CREATE TABLE ra_step (
            id INTEGER PRIMARY KEY CHECK (id = 1), step INTEGER NOT NULL,
            start_sequence INTEGER NOT NULL, answer TEXT)",
        "CREATE TABLE ra_tool_calls (
            tool_call_id TEXT PRIMARY KEY, call_index INTEGER NOT NULL,
            started INTEGER NOT NULL, body TEXT NOT NULL)",
        // Ids stay used when the step and its calls are gone.
        "CREATE TABLE ra_tool_call_ids (tool_call_id TEXT PRIMARY KEY) WITHOUT ROWID",
        "CREATE TABLE ra_sub_sessions (
            position INTEGER PRIMARY KEY, sub_session_id TEXT NOT NULL UNIQUE,
            agent_type TEXT NOT NULL, tool_call_id TEXT NOT NULL, location TEXT NOT NULL,
            status TEXT NOT NULL, remote_stream_id TEXT, remote_last_sequence INTEGER,
            deadline INTEGER NOT NULL, created_at INTEGER NOT NULL)",
        "CREATE TABLE ra_announced (
            sub_session_id TEXT NOT NULL, agent_type TEXT NOT NULL,
            PRIMARY KEY (sub_session_id, agent_type)) WITHOUT ROWID",
        "CREATE TABLE ra_usage (position INTEGER PRIMARY KEY, body TEXT NOT NULL)",
        "CREATE TABLE ra_idempotency (
            key TEXT PRIMARY KEY, digest TEXT NOT NULL, answer TEXT NOT NULL,
            at INTEGER NOT NULL) WITHOUT ROWID",
        "CREATE TABLE ra_parts (
            owner TEXT NOT NULL, part INTEGER NOT NULL, body TEXT NOT NULL,
            PRIMARY KEY (owner, part))",
    ],
};

/// The log in three tables: `ra_chunks` keeps rows of a good size for ever, the two tails take the
/// small ones in turn. When a tail is full the other one is packed into `ra_chunks` and dropped:
/// dropping a table is the one way of removing rows that the platform does not count row by row.
///
/// `start_byte` is the size of all log before the row since the stream began, a line end after each
/// chunk included, so that the size of any stretch is known from its two ends. `filled` is what the
/// tail holds up to and including the row. The bodies stand last: nothing before them is read
/// through them. A commit that only appends leaves `ra_session` as it is, so its `last_sequence` and
/// `updated_at` may be behind the newest row here. Rows of version 1 count as written when their session last changed.
const LOG_IN_TAILS: Migration = Migration {
    version: 2,
    statements: &[
        "CREATE TABLE ra_chunks_2 (
            first_sequence INTEGER PRIMARY KEY, last_sequence INTEGER NOT NULL,
            bytes INTEGER NOT NULL, start_byte INTEGER NOT NULL,
            committed_at INTEGER NOT NULL, body TEXT NOT NULL)",
        "INSERT INTO ra_chunks_2
         SELECT first_sequence, last_sequence, bytes,
            SUM(bytes + 1) OVER (ORDER BY first_sequence) - bytes - 1,
            COALESCE((SELECT updated_at FROM ra_session), 0), body
         FROM ra_chunks",
        "DROP TABLE ra_chunks",
        "ALTER TABLE ra_chunks_2 RENAME TO ra_chunks",
        TAIL_0,
        TAIL_1,
    ],
};

/// `via` is the child on whose stream a descendant was announced; empty for the session's own
/// children, and `*` in rows of earlier versions, which did not know.
const ANNOUNCED_BY: Migration = Migration {
    version: 3,
    statements: &[
        "CREATE TABLE ra_announced_3 (
            sub_session_id TEXT NOT NULL, agent_type TEXT NOT NULL, via TEXT NOT NULL,
            PRIMARY KEY (sub_session_id, agent_type, via)) WITHOUT ROWID",
        "INSERT INTO ra_announced_3 SELECT sub_session_id, agent_type, '*' FROM ra_announced",
        "DROP TABLE ra_announced",
        "ALTER TABLE ra_announced_3 RENAME TO ra_announced",
    ],
};

/// What settled runs are owed.
const DUE_HOOKS: Migration = Migration {
    version: 4,
    statements: &["CREATE TABLE ra_due_hooks (
            run_id TEXT NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL,
            due_at INTEGER NOT NULL, PRIMARY KEY (run_id, status)) WITHOUT ROWID"],
};

macro_rules! tail {
    ($name:literal) => {
        concat!(
            "CREATE TABLE ",
            $name,
            " (first_sequence INTEGER PRIMARY KEY, last_sequence INTEGER NOT NULL,
            bytes INTEGER NOT NULL, start_byte INTEGER NOT NULL,
            committed_at INTEGER NOT NULL, filled INTEGER NOT NULL, body TEXT NOT NULL)"
        )
    };
}

/// Makes the first tail, at first and whenever it was packed.
pub(super) const TAIL_0: &str = tail!("ra_tail_0");

/// Makes the second tail.
pub(super) const TAIL_1: &str = tail!("ra_tail_1");

/// How the stored schema stands to the code's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing was ever stored.
    Absent,
    /// An earlier version stored it.
    At(u64),
    /// It is what the code expects.
    Current,
}

/// Looks at the stored schema, creating nothing.
///
/// # Errors
/// `invalid_stored_state` when a later version than this one wrote the database.
pub(super) fn inspect(database: &dyn Database, migrations: &[Migration]) -> Result<Stage> {
    let table = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'ra_migrations'";
    if database.query(table, &[])?.is_empty() {
        return Ok(Stage::Absent);
    }
    let newest = "SELECT 'newest', MAX(version) FROM ra_migrations";
    let mut row = Row::one("ra_migrations", database.query(newest, &[])?)?;
    let stored = row.whole("version")?;
    let known = migrations.last().map_or(0, |newest| newest.version);
    if stored > known {
        return Err(Error::new(
            Code::InvalidStoredState,
            "This session was stored by a later version of this service.",
        )
        .with_detail(format!(
            "ra_migrations is at version {stored}, this code knows up to {known}: deploy the later version again"
        )));
    }
    Ok(if stored == known {
        Stage::Current
    } else {
        Stage::At(stored)
    })
}

/// Applies what is missing. The caller has a transaction open.
pub(super) fn migrate(
    database: &dyn Database,
    migrations: &[Migration],
    stage: Stage,
) -> Result<()> {
    let stored = match stage {
        Stage::Current => return Ok(()),
        Stage::At(version) => version,
        Stage::Absent => {
            database.query(
                "CREATE TABLE ra_migrations (version INTEGER PRIMARY KEY, applied_at INTEGER NOT NULL)",
                &[],
            )?;
            0
        }
    };
    for migration in migrations.iter().filter(|m| m.version > stored) {
        for statement in migration.statements {
            database.query(statement, &[])?;
        }
        let applied: [SqlValue; 1] = [rows::integer(migration.version)?];
        database.query(
            "INSERT INTO ra_migrations (version, applied_at)
             VALUES (CAST(? AS INTEGER), CAST(strftime('%s', 'now') AS INTEGER) * 1000)",
            &applied,
        )?;
    }
    Ok(())
}

/// Drops every table of ours. The caller has a transaction open.
pub(super) fn drop_all(database: &dyn Database) -> Result<()> {
    let tables = database.query(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND substr(name, 1, 3) = 'ra_'",
        &[],
    )?;
    for cells in tables {
        let name = Row::new("sqlite_master", cells);
        // The name is one of ours: no quote can be in it, and none is let through.
        let name = name.key().replace('"', "");
        if mutants::lacks(Mutant::DeletionIsWhole) && name == "ra_messages" {
            continue;
        }
        database.query(&format!("DROP TABLE \"{name}\""), &[])?;
    }
    Ok(())
}
