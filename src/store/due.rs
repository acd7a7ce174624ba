//! The hooks that settled runs are owed: a row from the run's last commit until its hook is done.

use super::rows::{Row, integer, text};
use super::{Database, DueHook};
use crate::error::Result;
use crate::protocol::ids::RunId;
use crate::protocol::message::SessionStatus;

/// Inserts or replaces one.
pub(super) fn put(database: &dyn Database, hook: &DueHook) -> Result<()> {
    let values = [
        text(hook.run_id.as_str()),
        text(hook.status.as_str()),
        integer(hook.attempts.into())?,
        integer(hook.due_at)?,
    ];
    database
        .query(
            "INSERT INTO ra_due_hooks (run_id, status, attempts, due_at)
             VALUES (?, ?, CAST(? AS INTEGER), CAST(? AS INTEGER))
             ON CONFLICT (run_id, status) DO UPDATE SET
                attempts = excluded.attempts, due_at = excluded.due_at",
            &values,
        )
        .map(drop)
}

/// Removes one.
pub(super) fn remove(database: &dyn Database, hook: &DueHook) -> Result<()> {
    let values = [text(hook.run_id.as_str()), text(hook.status.as_str())];
    database
        .query(
            "DELETE FROM ra_due_hooks WHERE run_id = ? AND status = ?",
            &values,
        )
        .map(drop)
}

/// All of them, the first due first.
pub(super) fn all(database: &dyn Database) -> Result<Vec<DueHook>> {
    let rows = database.query(
        "SELECT run_id, run_id, status, attempts, due_at FROM ra_due_hooks
         ORDER BY due_at, run_id, status",
        &[],
    )?;
    let hook = |cells| {
        let mut row = Row::new("ra_due_hooks", cells);
        Ok(DueHook {
            run_id: row.parsed("run_id", RunId::parse)?,
            status: row.one_of("status", SessionStatus::from_wire)?,
            attempts: u32::try_from(row.whole("attempts")?)
                .map_err(|_| row.malformed("attempts", "out of range"))?,
            due_at: row.whole("due_at")?,
        })
    };
    rows.into_iter().map(hook).collect()
}
