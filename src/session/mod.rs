//! One session's life, as a pure machine.
//!
//! A [`Session`] is what the store holds of a session's present. Every transition takes what
//! happened, the time and fresh randomness, and returns a [`Transition`]: the next session and the
//! one commit that makes it true. The driver commits first and swaps the session afterwards, so a
//! failed commit leaves the machine as it was. There is no I/O, clock or randomness here.
//!
//! Implements sections 1 (action × status) and 5 (steps, checkpoints, commits) of the contract.

mod children;
mod conversation;
mod entry;
mod failure;
pub mod patch;
mod repeats;
mod retention;
mod step;
#[cfg(test)]
mod tests;
pub mod usage;

use std::rc::Rc;

use serde_json::Value;

pub use children::{Healed, Orphaned, QUEUED_EVENT, UNTOLD_EVENT};
pub use conversation::page;
pub use entry::{Accepted, Begin, EntryIds, Reopen, StopOutcome};
pub use failure::CallFailure;
pub use repeats::{REPEATED_CALL, Repeats, repeated, repeats};
pub use retention::{Retention, SPANS_AT_ONCE, next_expiry, retention};
pub use step::{ChildSettled, ModelAnswer, RETRY_EVENT, Settlement, Step};

use crate::error::{Code, Error, Result};
use crate::mutants::{self, Mutant};
use crate::protocol::chunk::{Chunk, ChunkBody};
use crate::protocol::ids::{MAX_SAFE_INTEGER, Position, Sequence, Timestamp};
use crate::protocol::message::{SessionStatus, SnapshotResponse, StatusResponse};
use crate::store::{CheckpointRecord, Commit, SessionRecord, Store, Write};

/// The present of one session.
#[derive(Clone, Debug)]
pub struct Session {
    /// The session row.
    pub record: SessionRecord,
    /// The latest checkpoint. There always is one: the start commits checkpoint 0.
    pub checkpoint: CheckpointRecord,
    /// The step under way, if anything of it is stored or staged.
    pub step: Option<Step>,
}

/// A next session and the commit that makes it true.
#[derive(Clone, Debug)]
pub struct Transition {
    /// What the session is once the commit is done.
    pub next: Session,
    /// The one commit.
    pub commit: Commit,
}

/// What has to be done now for a running session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// A stop was asked for: settle it.
    Stop,
    /// Ask the model.
    Ask,
    /// Run the calls that have no result yet.
    Act,
    /// Every call has its result: promote the step.
    Promote,
    /// The session is not running.
    Rest,
}

impl Session {
    /// Reads the session of a store, if one was begun there.
    ///
    /// # Errors
    /// `invalid_stored_state` when a row cannot be read or the checkpoint is missing.
    pub fn load(store: &dyn Store) -> Result<Option<Self>> {
        let Some(record) = store.session()? else {
            return Ok(None);
        };
        let checkpoint = store.checkpoint()?.ok_or_else(|| {
            Error::new(Code::InvalidStoredState, "The session has no checkpoint.")
                .with_detail("ra_checkpoints is empty although a session row exists")
        })?;
        let step = match store.step()? {
            // Calls of an answer that was never committed are only there to keep their ids used.
            Some((step, _)) if step.answer.is_none() => {
                Some(Step::restore(step, Vec::new(), &checkpoint)?)
            }
            Some((step, calls)) => Some(Step::restore(step, calls, &checkpoint)?),
            None => None,
        };
        Ok(Some(Self {
            record,
            checkpoint,
            step,
        }))
    }

    /// What has to be done now.
    #[must_use]
    pub fn next(&self) -> Next {
        if self.record.status != SessionStatus::Running {
            return Next::Rest;
        }
        if self.record.stop.is_some() {
            return Next::Stop;
        }
        match &self.step {
            Some(step) if step.record.answer.is_some() => {
                if step.calls.iter().all(|call| call.outcome.is_some()) {
                    Next::Promote
                } else {
                    Next::Act
                }
            }
            _ => Next::Ask,
        }
    }

    /// The number of the step under way: the committed steps plus one.
    #[must_use]
    pub fn step_number(&self) -> u64 {
        self.record.step_count.saturating_add(1)
    }

    /// The working document: the checkpoint's state and everything staged since.
    #[must_use]
    pub fn working_state(&self) -> Rc<Value> {
        self.step.as_ref().map_or_else(
            || self.checkpoint.state.clone(),
            |step| step.working.clone(),
        )
    }

    /// Whether the session was aborted: then nothing continues it.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.record.status == SessionStatus::Failed
            && self
                .record
                .failure
                .as_ref()
                .is_some_and(|f| f.code == Code::RunAborted.as_str())
    }

    /// The answer of `/status`.
    #[must_use]
    pub fn status(&self, is_executing: bool) -> StatusResponse {
        let failure = self.record.failure.as_ref();
        StatusResponse {
            session_id: self.record.session_id.to_string(),
            agent_type: Some(self.record.agent_type.to_string()),
            status: self.record.status,
            is_executing,
            stream_id: Some(self.record.stream_id.to_string()),
            run_id: Some(self.record.run_id.to_string()),
            step_count: self.record.step_count,
            output: self.record.output.clone(),
            error: failure.map(|f| f.error.clone()),
            error_code: failure.map(|f| f.code.clone()),
            error_detail: failure.and_then(|f| f.detail.clone()),
            updated_at: self.record.updated_at,
        }
    }

    /// The answer of `/snapshot`: the latest checkpoint while the session is not terminal, else the
    /// live state without a position. Without one, too, while the log begins above the checkpoint. State that was only staged is never served.
    #[must_use]
    pub fn snapshot(&self) -> SnapshotResponse {
        // A hard cap on the log's size may have taken the position from it.
        let pinned = !self.record.status.is_terminal()
            && self.record.floor <= self.checkpoint.stream_sequence;
        SnapshotResponse {
            session_id: self.record.session_id.to_string(),
            stream_id: self.record.stream_id.to_string(),
            state: if mutants::lacks(Mutant::SnapshotIsCommitted) {
                (*self.working_state()).clone()
            } else {
                (*self.checkpoint.state).clone()
            },
            stream_sequence: if pinned {
                Position::At(self.checkpoint.stream_sequence)
            } else {
                Position::None
            },
            oldest_retained_sequence: self.record.floor,
            step_count: self.checkpoint.step_count,
            checkpoint_id: Some(self.checkpoint.checkpoint_id.clone()),
            patch_ordinal: pinned.then_some(self.checkpoint.patch_ordinal),
            projection: None,
        }
    }
}

/// `cpv1-{sessionId}-s{step}-t{ms}-{6 hex}`.
fn checkpoint_id(record: &SessionRecord, step: u64, now: Timestamp, entropy: [u8; 16]) -> String {
    let hex = crate::protocol::ids::hex(entropy.first_chunk::<3>().unwrap_or(&[0; 3]));
    format!("cpv1-{}-s{step}-t{now}-{hex}", record.session_id)
}

/// A transition in the making: it numbers chunks and gathers writes.
struct Draft {
    session: Session,
    now: Timestamp,
    fence: Option<u64>,
    first: Option<Sequence>,
    chunks: Vec<String>,
    writes: Vec<Write>,
}

impl Draft {
    fn new(session: &Session, now: Timestamp) -> Self {
        Self {
            fence: Some(session.record.epoch),
            session: session.clone(),
            now,
            first: None,
            chunks: Vec::new(),
            writes: Vec::new(),
        }
    }

    /// Says something in the session's own name.
    fn say(&mut self, body: ChunkBody) -> Result<Sequence> {
        let agent_id = self.session.record.session_id.to_string();
        self.say_as(agent_id, body)
    }

    fn say_as(&mut self, agent_id: String, body: ChunkBody) -> Result<Sequence> {
        let record = &self.session.record;
        let step = if self.session.step.is_some() {
            self.session.step_number()
        } else {
            record.step_count
        };
        let chunk = Chunk {
            body,
            agent_id,
            agent_type: record.agent_type.to_string(),
            timestamp: self.now,
            step,
        };
        self.say_json(chunk.to_json()?)
    }

    /// Appends a chunk that is JSON text already: one that is forwarded.
    fn say_json(&mut self, json: String) -> Result<Sequence> {
        let record = &mut self.session.record;
        if record.last_sequence >= MAX_SAFE_INTEGER {
            return Err(Error::internal(
                "the stream has used up its sequence numbers",
            ));
        }
        record.last_sequence += 1;
        self.first.get_or_insert(record.last_sequence);
        self.chunks.push(json);
        Ok(record.last_sequence)
    }

    fn write(&mut self, write: Write) {
        self.writes.push(write);
    }

    /// As [`Self::done`] where nothing of the session changed but its log: the cheapest commit.
    fn appended(mut self) -> Transition {
        let Some(first) = self.first.filter(|_| self.writes.is_empty()) else {
            return self.done();
        };
        self.session.record.updated_at = self.now;
        Transition {
            next: self.session,
            commit: Commit {
                fence: self.fence,
                writes: vec![Write::Append {
                    first,
                    chunks: self.chunks,
                    at: self.now,
                }],
            },
        }
    }

    fn done(mut self) -> Transition {
        self.session.record.updated_at = self.now;
        let mut writes = vec![Write::Session(self.session.record.clone())];
        if let Some(first) = self.first {
            writes.push(Write::Chunks {
                first,
                chunks: self.chunks,
            });
        }
        writes.append(&mut self.writes);
        Transition {
            next: self.session,
            commit: Commit {
                fence: self.fence,
                writes,
            },
        }
    }
}
