//! From rows to records.
//!
//! Every cell goes through a type; what does not fit is `invalid_stored_state`.

use std::rc::Rc;

use serde::Deserialize;
use serde_json::Value;

use super::rows::{Row, integer, text};
use super::{
    CheckpointRecord, Database, Epoch, IdempotencyRecord, MessageRecord, RunRecord, SessionRecord,
    SqlValue, StagedPatch, StepRecord, SubLocation, SubRemote, SubSessionRecord, SubStatus,
    ToolCall, ToolCallRecord, ToolOutcome, UsageRecord, log,
};
use crate::error::Result;
use crate::mutants::{self, Mutant};
use crate::protocol::ids::{AgentType, RunId, Sequence, SessionId, StreamId};
use crate::protocol::message::SessionStatus;

/// The epoch of the stored session.
pub(super) fn epoch(database: &dyn Database) -> Result<Option<Epoch>> {
    let rows = database.query("SELECT id, epoch FROM ra_session", &[])?;
    rows.into_iter()
        .next()
        .map(|cells| Row::new("ra_session", cells).whole("epoch"))
        .transpose()
}

pub(super) fn session(database: &dyn Database) -> Result<Option<SessionRecord>> {
    let rows = database.query(
        "SELECT id, session_id, agent_type, stream_id, status, run_id, epoch, step_count,
            last_sequence, floor, last_ordinal, attempts, stop, output, failure, origin,
            created_at, updated_at
         FROM ra_session",
        &[],
    )?;
    let Some(cells) = rows.into_iter().next() else {
        return Ok(None);
    };
    let mut row = Row::new("ra_session", cells);
    let mut record = SessionRecord {
        session_id: row.parsed("session_id", SessionId::parse)?,
        agent_type: row.parsed("agent_type", AgentType::parse)?,
        stream_id: row.parsed("stream_id", StreamId::parse)?,
        status: row.one_of("status", SessionStatus::from_wire)?,
        run_id: row.parsed("run_id", RunId::parse)?,
        epoch: row.whole("epoch")?,
        step_count: row.whole("step_count")?,
        last_sequence: row.whole("last_sequence")?,
        floor: row.whole("floor")?,
        last_ordinal: row.whole("last_ordinal")?,
        attempts: u32::try_from(row.whole("attempts")?)
            .map_err(|_| row.malformed("attempts", "out of range"))?,
        stop: row.optional_json(database, "stop")?,
        output: row.optional_json(database, "output")?,
        failure: row.optional_json(database, "failure")?,
        origin: Rc::new(row.json(database, "origin")?),
        created_at: row.whole("created_at")?,
        updated_at: row.whole("updated_at")?,
    };
    // A commit that only appends leaves the row as it is: the log knows.
    if !mutants::lacks(Mutant::SequenceFollowsLog)
        && let Some((sequence, at)) = log::last(database)?
    {
        record.last_sequence = record.last_sequence.max(sequence);
        record.updated_at = record.updated_at.max(at);
    }
    Ok(Some(record))
}

pub(super) fn run(database: &dyn Database, run_id: &str) -> Result<Option<RunRecord>> {
    let rows = database.query(
        "SELECT run_id, start_sequence, start_step, started_at, terminal FROM ra_runs WHERE run_id = ?",
        &[text(run_id)],
    )?;
    let Some(cells) = rows.into_iter().next() else {
        return Ok(None);
    };
    let mut row = Row::new("ra_runs", cells);
    Ok(Some(RunRecord {
        run_id: row.key_parsed("run_id", RunId::parse)?,
        start_sequence: row.whole("start_sequence")?,
        start_step: row.whole("start_step")?,
        started_at: row.whole("started_at")?,
        terminal: row.optional_json(database, "terminal")?,
    }))
}

pub(super) fn checkpoint(database: &dyn Database) -> Result<Option<CheckpointRecord>> {
    let newest = "SELECT position, checkpoint_id, step_count, stream_sequence, patch_ordinal,
            created_at, state
         FROM ra_checkpoints ORDER BY position DESC LIMIT 1";
    checkpoint_of(database, database.query(newest, &[])?)
}

pub(super) fn checkpoint_up_to(
    database: &dyn Database,
    sequence: Sequence,
) -> Result<Option<CheckpointRecord>> {
    let newest = "SELECT position, checkpoint_id, step_count, stream_sequence, patch_ordinal,
            created_at, state
         FROM ra_checkpoints WHERE stream_sequence <= CAST(? AS INTEGER)
         ORDER BY position DESC LIMIT 1";
    checkpoint_of(database, database.query(newest, &[integer(sequence)?])?)
}

pub(super) fn checkpoint_after(
    database: &dyn Database,
    sequence: Sequence,
) -> Result<Option<Sequence>> {
    let oldest = "SELECT position, stream_sequence FROM ra_checkpoints
         WHERE stream_sequence > CAST(? AS INTEGER) ORDER BY position LIMIT 1";
    let rows = database.query(oldest, &[integer(sequence)?])?;
    rows.into_iter()
        .next()
        .map(|cells| Row::new("ra_checkpoints", cells).whole("stream_sequence"))
        .transpose()
}

pub(super) fn run_opened_at(database: &dyn Database, sequence: Sequence) -> Result<bool> {
    let Some(start) = sequence.checked_sub(1) else {
        return Ok(false);
    };
    let opened = "SELECT 1 FROM ra_runs WHERE start_sequence = CAST(? AS INTEGER)";
    Ok(!database.query(opened, &[integer(start)?])?.is_empty())
}

fn checkpoint_of(
    database: &dyn Database,
    rows: Vec<Vec<SqlValue>>,
) -> Result<Option<CheckpointRecord>> {
    let Some(cells) = rows.into_iter().next() else {
        return Ok(None);
    };
    let mut row = Row::new("ra_checkpoints", cells);
    let record = CheckpointRecord {
        checkpoint_id: row.text("checkpoint_id")?,
        step_count: row.whole("step_count")?,
        stream_sequence: row.whole("stream_sequence")?,
        patch_ordinal: row.whole("patch_ordinal")?,
        created_at: row.whole("created_at")?,
        state: Rc::new(row.json::<Value>(database, "state")?),
    };
    if record.state.is_object() {
        Ok(Some(record))
    } else {
        Err(row.malformed("state", "not an object"))
    }
}

pub(super) fn messages(database: &dyn Database) -> Result<Vec<MessageRecord>> {
    database
        .query(
            "SELECT position, body FROM ra_messages ORDER BY position",
            &[],
        )?
        .into_iter()
        .map(|cells| Row::new("ra_messages", cells).json(database, "body"))
        .collect()
}

pub(super) fn message_behind(
    database: &dyn Database,
    index: u64,
) -> Result<Option<(u64, MessageRecord)>> {
    let rows = database.query(
        "SELECT position, body FROM ra_messages WHERE position > ? ORDER BY position LIMIT 1",
        &[integer(index)?],
    )?;
    let Some(cells) = rows.into_iter().next() else {
        return Ok(None);
    };
    let mut row = Row::new("ra_messages", cells);
    let position = row.key_number("position")?;
    Ok(Some((position, row.json(database, "body")?)))
}

/// A tool call's body as it is read.
#[derive(Deserialize)]
struct ToolCallBody {
    call: ToolCall,
    outcome: Option<ToolOutcome>,
    staged: Vec<StagedPatch>,
}

pub(super) fn step(database: &dyn Database) -> Result<Option<(StepRecord, Vec<ToolCallRecord>)>> {
    let rows = database.query("SELECT id, step, start_sequence, answer FROM ra_step", &[])?;
    let Some(cells) = rows.into_iter().next() else {
        return Ok(None);
    };
    let mut row = Row::new("ra_step", cells);
    let step = StepRecord {
        step: row.whole("step")?,
        start_sequence: row.whole("start_sequence")?,
        answer: row.optional_json(database, "answer")?,
    };
    let calls = database
        .query(
            "SELECT tool_call_id, call_index, started, body FROM ra_tool_calls
             ORDER BY call_index, tool_call_id",
            &[],
        )?
        .into_iter()
        .map(|cells| tool_call(database, Row::new("ra_tool_calls", cells)))
        .collect::<Result<Vec<_>>>()?;
    Ok(Some((step, calls)))
}

fn tool_call(database: &dyn Database, mut row: Row) -> Result<ToolCallRecord> {
    let index = row.whole("call_index")?;
    let begun = u32::try_from(row.whole("started")?)
        .map_err(|_| row.malformed("started", "out of range"))?;
    let body: ToolCallBody = row.json(database, "body")?;
    if body.call.id != row.key() {
        return Err(row.malformed("body", "of another call"));
    }
    Ok(ToolCallRecord {
        call: body.call,
        index,
        begun,
        outcome: body.outcome,
        staged: body.staged,
    })
}

pub(super) fn tool_call_id_used(database: &dyn Database, id: &str) -> Result<bool> {
    let found = database.query(
        "SELECT 1 FROM ra_tool_call_ids WHERE tool_call_id = ?",
        &[text(id)],
    )?;
    Ok(!found.is_empty())
}

const SUB_SESSIONS: &str = "SELECT sub_session_id, agent_type, tool_call_id, location, status,
        remote_stream_id, remote_last_sequence, deadline, created_at
     FROM ra_sub_sessions";

pub(super) fn sub_sessions(database: &dyn Database) -> Result<Vec<SubSessionRecord>> {
    database
        .query(&format!("{SUB_SESSIONS} ORDER BY position"), &[])?
        .into_iter()
        .map(|cells| sub_session_of(Row::new("ra_sub_sessions", cells)))
        .collect()
}

pub(super) fn sub_session_ids(database: &dyn Database) -> Result<Vec<String>> {
    database
        .query(
            "SELECT sub_session_id FROM ra_sub_sessions ORDER BY position",
            &[],
        )?
        .into_iter()
        .map(|cells| Ok(Row::new("ra_sub_sessions", cells).key().to_owned()))
        .collect()
}

pub(super) fn sub_session(database: &dyn Database, id: &str) -> Result<Option<SubSessionRecord>> {
    database
        .query(
            &format!("{SUB_SESSIONS} WHERE sub_session_id = ?"),
            &[text(id)],
        )?
        .into_iter()
        .next()
        .map(|cells| sub_session_of(Row::new("ra_sub_sessions", cells)))
        .transpose()
}

fn sub_session_of(mut row: Row) -> Result<SubSessionRecord> {
    Ok(SubSessionRecord {
        sub_session_id: row.key_parsed("sub_session_id", SessionId::parse)?,
        agent_type: row.parsed("agent_type", AgentType::parse)?,
        tool_call_id: row.text("tool_call_id")?,
        location: row.one_of("location", |text| {
            [SubLocation::Local, SubLocation::Remote]
                .into_iter()
                .find(|location| location_text(*location) == text)
        })?,
        status: row.one_of("status", |text| {
            [
                SubStatus::Running,
                SubStatus::Stopping,
                SubStatus::Completed,
                SubStatus::Failed,
            ]
            .into_iter()
            .find(|status| sub_status_text(*status) == text)
        })?,
        remote: sub_remote(&mut row)?,
        deadline: row.whole("deadline")?,
        created_at: row.whole("created_at")?,
    })
}

fn sub_remote(row: &mut Row) -> Result<Option<SubRemote>> {
    let stream = row.optional_text("remote_stream_id")?;
    let last_sequence = row.optional_whole("remote_last_sequence")?;
    match (stream, last_sequence) {
        (None, None) => Ok(None),
        (Some(stream), Some(last_sequence)) => Ok(Some(SubRemote {
            stream_id: StreamId::parse(&stream)
                .map_err(|error| row.malformed("remote_stream_id", &error.message))?,
            last_sequence,
        })),
        _ => Err(row.malformed(
            "remote_last_sequence",
            "stream and sequence belong together",
        )),
    }
}

pub(super) fn location_text(location: SubLocation) -> &'static str {
    match location {
        SubLocation::Local => "local",
        SubLocation::Remote => "remote",
    }
}

pub(super) fn sub_status_text(status: SubStatus) -> &'static str {
    match status {
        SubStatus::Running => "running",
        SubStatus::Stopping => "stopping",
        SubStatus::Completed => "completed",
        SubStatus::Failed => "failed",
    }
}

pub(super) fn usage(database: &dyn Database) -> Result<Vec<UsageRecord>> {
    database
        .query("SELECT position, body FROM ra_usage ORDER BY position", &[])?
        .into_iter()
        .map(|cells| Row::new("ra_usage", cells).json(database, "body"))
        .collect()
}

pub(super) fn idempotency(database: &dyn Database, key: &str) -> Result<Option<IdempotencyRecord>> {
    let rows = database.query(
        "SELECT key, digest, answer, at FROM ra_idempotency WHERE key = ?",
        &[text(key)],
    )?;
    let Some(cells) = rows.into_iter().next() else {
        return Ok(None);
    };
    let mut row = Row::new("ra_idempotency", cells);
    Ok(Some(IdempotencyRecord {
        key: row.key().to_owned(),
        digest: row.text("digest")?,
        answer: row.text("answer")?,
        at: row.whole("at")?,
    }))
}
