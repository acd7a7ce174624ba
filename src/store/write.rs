//! What each write of a commit does to the tables.
//!
//! Runs inside the commit's transaction only, so an error half-way undoes everything. Integers go
//! through `CAST(? AS INTEGER)`, because the platform binds numbers as floating point.

use std::cell::Cell;

use serde::Serialize;

use super::rows::{INLINE_BYTES, Place, Row, clear_table, integer, optional, text, to_json};
use super::{
    CheckpointRecord, Database, IdempotencyRecord, MessageRecord, RunRecord, SessionRecord,
    SqlValue, StagedPatch, StepRecord, SubSessionRecord, SubStatus, ToolCall, ToolCallRecord,
    ToolOutcome, UsageRecord, Write, checkpoints_kept, due, log, read,
};
use crate::error::{Error, Result};

/// The session row is rewritten by nearly every commit: what is larger than this stays out of it.
const SESSION_INLINE_BYTES: usize = 4 * 1024;

/// Does one write. `hint` is told where the log ends.
pub(super) fn apply(
    database: &dyn Database,
    hint: &Cell<Option<log::Hint>>,
    write: &Write,
) -> Result<()> {
    match write {
        Write::Session(record) => session(database, record),
        Write::Run(record) => run(database, record),
        Write::Chunks { first, chunks } => log::append(database, hint, *first, chunks, None),
        Write::Append { first, chunks, at } => {
            log::append(database, hint, *first, chunks, Some(*at))
        }
        Write::Trim { floor } => log::trim(database, *floor),
        Write::Checkpoint(record) => checkpoint(database, record),
        Write::Message(record) => message(database, record),
        Write::Step(record) => step(database, record),
        Write::ClearStep => clear_step(database),
        Write::ToolCall(record) => tool_call(database, record),
        Write::SubSession(record) => sub_session(database, record),
        Write::SpoiledSubSession { sub_session_id } => {
            spoiled_sub_session(database, sub_session_id)
        }
        Write::Usage(record) => usage(database, record),
        Write::Idempotency(record) => idempotency(database, record),
        Write::DueHook(hook) => due::put(database, hook),
        Write::HookDone(hook) => due::remove(database, hook),
    }
}

/// A tool call's body as it is stored.
#[derive(Serialize)]
struct ToolCallBody<'a> {
    call: &'a ToolCall,
    outcome: &'a Option<ToolOutcome>,
    staged: &'a [StagedPatch],
}

fn session(database: &dyn Database, record: &SessionRecord) -> Result<()> {
    let place = |column| Place {
        table: "ra_session",
        key: "1",
        column,
    };
    let output = match &record.output {
        Some(output) => place("output").keep(database, to_json(output)?, SESSION_INLINE_BYTES)?,
        None => {
            place("output").clear(database)?;
            SqlValue::Null
        }
    };
    let failure = record.failure.as_ref().map(to_json).transpose()?;
    let mut values = vec![
        text(record.session_id.as_str()),
        text(record.agent_type.as_str()),
        text(record.stream_id.as_str()),
        text(record.status.as_str()),
        text(record.run_id.as_str()),
        integer(record.epoch)?,
        integer(record.step_count)?,
        integer(record.last_sequence)?,
        integer(record.floor)?,
        integer(record.last_ordinal)?,
        integer(record.attempts.into())?,
        optional(record.stop.as_ref().map(to_json).transpose()?),
        output,
        match failure {
            Some(failure) => place("failure").keep(database, failure, INLINE_BYTES)?,
            None => SqlValue::Null,
        },
        integer(record.created_at)?,
        integer(record.updated_at)?,
    ];
    // The origin is fixed at the start; it may be large, so it is not written again.
    let existed = database.write(
        "UPDATE ra_session SET
            session_id = ?, agent_type = ?, stream_id = ?, status = ?, run_id = ?,
            epoch = CAST(? AS INTEGER), step_count = CAST(? AS INTEGER),
            last_sequence = CAST(? AS INTEGER), floor = CAST(? AS INTEGER),
            last_ordinal = CAST(? AS INTEGER), attempts = CAST(? AS INTEGER),
            stop = ?, output = ?, failure = ?,
            created_at = CAST(? AS INTEGER), updated_at = CAST(? AS INTEGER)
         WHERE id = 1",
        &values,
    )?;
    if existed {
        return Ok(());
    }
    let origin = to_json(&*record.origin)?;
    values.push(place("origin").keep(database, origin, SESSION_INLINE_BYTES)?);
    database
        .query(
            "INSERT INTO ra_session (
                id, session_id, agent_type, stream_id, status, run_id, epoch, step_count,
                last_sequence, floor, last_ordinal, attempts, stop, output, failure,
                created_at, updated_at, origin)
             VALUES (1, ?, ?, ?, ?, ?, CAST(? AS INTEGER), CAST(? AS INTEGER),
                CAST(? AS INTEGER), CAST(? AS INTEGER), CAST(? AS INTEGER), CAST(? AS INTEGER),
                ?, ?, ?, CAST(? AS INTEGER), CAST(? AS INTEGER), ?)",
            &values,
        )
        .map(drop)
}

fn run(database: &dyn Database, record: &RunRecord) -> Result<()> {
    let place = Place {
        table: "ra_runs",
        key: record.run_id.as_str(),
        column: "terminal",
    };
    let terminal = match &record.terminal {
        Some(terminal) => place.keep_json(database, terminal)?,
        None => {
            place.clear(database)?;
            SqlValue::Null
        }
    };
    let values = [
        text(record.run_id.as_str()),
        integer(record.start_sequence)?,
        integer(record.start_step)?,
        integer(record.started_at)?,
        terminal,
    ];
    database
        .query(
            "INSERT INTO ra_runs (run_id, start_sequence, start_step, started_at, terminal)
             VALUES (?, CAST(? AS INTEGER), CAST(? AS INTEGER), CAST(? AS INTEGER), ?)
             ON CONFLICT (run_id) DO UPDATE SET
                start_sequence = excluded.start_sequence, start_step = excluded.start_step,
                started_at = excluded.started_at, terminal = excluded.terminal",
            &values,
        )
        .map(drop)
}

/// Where the state of a checkpoint is kept.
fn state_place(key: &str) -> Place<'_> {
    Place {
        table: "ra_checkpoints",
        key,
        column: "state",
    }
}

fn checkpoint(database: &dyn Database, record: &CheckpointRecord) -> Result<()> {
    let position = next_position(database, "SELECT MAX(position) FROM ra_checkpoints")?;
    let key = position.to_string();
    let state = to_json(&*record.state)?;
    let kept = checkpoints_kept(u64::try_from(state.len()).unwrap_or(u64::MAX));
    let values = [
        integer(position)?,
        text(record.checkpoint_id.as_str()),
        integer(record.step_count)?,
        integer(record.stream_sequence)?,
        integer(record.patch_ordinal)?,
        integer(record.created_at)?,
        state_place(&key).keep(database, state, INLINE_BYTES)?,
    ];
    database.query(
        "INSERT INTO ra_checkpoints (
            position, checkpoint_id, step_count, stream_sequence, patch_ordinal, created_at, state)
         VALUES (CAST(? AS INTEGER), ?, CAST(? AS INTEGER), CAST(? AS INTEGER),
            CAST(? AS INTEGER), CAST(? AS INTEGER), ?)",
        &values,
    )?;
    let old = [integer(position.saturating_sub(kept))?];
    let gone = "SELECT position FROM ra_checkpoints WHERE position <= CAST(? AS INTEGER)";
    let gone = database.query(gone, &old)?;
    for cells in &gone {
        let gone = Row::new("ra_checkpoints", cells.clone()).key_number("position")?;
        state_place(&gone.to_string()).clear(database)?;
    }
    if !gone.is_empty() {
        let delete = "DELETE FROM ra_checkpoints WHERE position <= CAST(? AS INTEGER)";
        database.query(delete, &old)?;
    }
    Ok(())
}

fn message(database: &dyn Database, record: &MessageRecord) -> Result<()> {
    let position = next_position(database, "SELECT MAX(position) FROM ra_messages")?;
    let place = Place {
        table: "ra_messages",
        key: &position.to_string(),
        column: "body",
    };
    let values = [integer(position)?, place.keep_json(database, record)?];
    database
        .query(
            "INSERT INTO ra_messages (position, body) VALUES (CAST(? AS INTEGER), ?)",
            &values,
        )
        .map(drop)
}

fn step(database: &dyn Database, record: &StepRecord) -> Result<()> {
    let place = Place {
        table: "ra_step",
        key: "1",
        column: "answer",
    };
    let answer = match &record.answer {
        Some(answer) => place.keep_json(database, answer)?,
        None => {
            place.clear(database)?;
            SqlValue::Null
        }
    };
    let values = [
        integer(record.step)?,
        integer(record.start_sequence)?,
        answer,
    ];
    database
        .query(
            "INSERT OR REPLACE INTO ra_step (id, step, start_sequence, answer)
             VALUES (1, CAST(? AS INTEGER), CAST(? AS INTEGER), ?)",
            &values,
        )
        .map(drop)
}

fn clear_step(database: &dyn Database) -> Result<()> {
    clear_table(database, "ra_step")?;
    clear_table(database, "ra_tool_calls")?;
    database.query("DELETE FROM ra_step", &[])?;
    database.query("DELETE FROM ra_tool_calls", &[]).map(drop)
}

fn tool_call(database: &dyn Database, record: &ToolCallRecord) -> Result<()> {
    let body = ToolCallBody {
        call: &record.call,
        outcome: &record.outcome,
        staged: &record.staged,
    };
    let place = Place {
        table: "ra_tool_calls",
        key: &record.call.id,
        column: "body",
    };
    let values = [
        text(record.call.id.as_str()),
        integer(record.index)?,
        integer(record.begun.into())?,
        place.keep_json(database, &body)?,
    ];
    database.query(
        "INSERT OR REPLACE INTO ra_tool_calls (tool_call_id, call_index, started, body)
         VALUES (?, CAST(? AS INTEGER), CAST(? AS INTEGER), ?)",
        &values,
    )?;
    database
        .query(
            "INSERT OR IGNORE INTO ra_tool_call_ids (tool_call_id) VALUES (?)",
            &[text(record.call.id.as_str())],
        )
        .map(drop)
}

fn sub_session(database: &dyn Database, record: &SubSessionRecord) -> Result<()> {
    let remote = record.remote.as_ref();
    let values = [
        text(record.sub_session_id.as_str()),
        text(record.agent_type.as_str()),
        text(record.tool_call_id.as_str()),
        text(read::location_text(record.location)),
        text(read::sub_status_text(record.status)),
        optional(remote.map(|remote| remote.stream_id.as_str().to_owned())),
        match remote {
            Some(remote) => integer(remote.last_sequence)?,
            None => SqlValue::Null,
        },
        integer(record.deadline)?,
        integer(record.created_at)?,
    ];
    // An update keeps the position: the order is the one in which the refs were made.
    database
        .query(
            "INSERT INTO ra_sub_sessions (
                sub_session_id, agent_type, tool_call_id, location, status,
                remote_stream_id, remote_last_sequence, deadline, created_at)
             VALUES (?, ?, ?, ?, ?, ?, CAST(? AS INTEGER), CAST(? AS INTEGER), CAST(? AS INTEGER))
             ON CONFLICT (sub_session_id) DO UPDATE SET
                agent_type = excluded.agent_type, tool_call_id = excluded.tool_call_id,
                location = excluded.location, status = excluded.status,
                remote_stream_id = excluded.remote_stream_id,
                remote_last_sequence = excluded.remote_last_sequence,
                deadline = excluded.deadline, created_at = excluded.created_at",
            &values,
        )
        .map(drop)
}

fn spoiled_sub_session(database: &dyn Database, id: &str) -> Result<()> {
    database
        .query(
            "UPDATE ra_sub_sessions SET
                status = ?, remote_stream_id = NULL, remote_last_sequence = NULL
             WHERE sub_session_id = ?",
            &[text(read::sub_status_text(SubStatus::Failed)), text(id)],
        )
        .map(drop)
}

fn usage(database: &dyn Database, record: &UsageRecord) -> Result<()> {
    let position = next_position(database, "SELECT MAX(position) FROM ra_usage")?;
    let place = Place {
        table: "ra_usage",
        key: &position.to_string(),
        column: "body",
    };
    let values = [integer(position)?, place.keep_json(database, record)?];
    database
        .query(
            "INSERT INTO ra_usage (position, body) VALUES (CAST(? AS INTEGER), ?)",
            &values,
        )
        .map(drop)
}

fn idempotency(database: &dyn Database, record: &IdempotencyRecord) -> Result<()> {
    // A key is never used twice: the machine looked it up in this very turn. A second insert is a
    // defect and fails the commit.
    let values = [
        text(record.key.as_str()),
        text(record.digest.as_str()),
        text(record.answer.as_str()),
        integer(record.at)?,
    ];
    database
        .query(
            "INSERT INTO ra_idempotency (key, digest, answer, at)
             VALUES (?, ?, ?, CAST(? AS INTEGER))",
            &values,
        )
        .map(drop)
}

fn next_position(database: &dyn Database, newest: &str) -> Result<u64> {
    let rows = database.query(newest, &[])?;
    match rows
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next())
    {
        Some(SqlValue::Integer(newest)) => u64::try_from(newest)
            .map(|newest| newest.saturating_add(1))
            .map_err(|_| Error::internal("a position is negative")),
        _ => Ok(1),
    }
}
