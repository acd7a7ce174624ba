//! Where a session lives: one store per object, one session per store.
//!
//! A store's only write is [`Store::commit`]: a list of writes that happens whole or not at all,
//! fenced by the run's epoch. Reads are synchronous and see the last commit. Stored JSON is read
//! through types; a malformed row is `invalid_stored_state` and names table, key and reason.

pub mod contract;
mod due;
mod log;
mod memory;
mod read;
mod records;
mod rows;
mod schema;
mod sql;
mod write;

pub use memory::MemoryStore;
pub use records::*;
pub use schema::{MIGRATIONS, Migration};
pub use sql::SqlStore;

use crate::error::Result;
use crate::protocol::ids::{Sequence, Timestamp};

/// One write of a commit.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // A commit has a handful of writes, each moved once.
pub enum Write {
    /// Inserts or replaces the one session row.
    Session(SessionRecord),
    /// Inserts or replaces a run.
    Run(RunRecord),
    /// Appends chunks, numbered on from `first` without a gap.
    Chunks {
        /// The sequence of the first chunk.
        first: Sequence,
        /// Each chunk's JSON text, in order.
        chunks: Vec<String>,
    },
    /// Appends chunks as [`Write::Chunks`] does, in a commit that changes nothing else of the
    /// session row: its `last_sequence` and `updated_at` follow the log. Alone in a commit it is
    /// the cheapest write there is.
    Append {
        /// The sequence of the first chunk.
        first: Sequence,
        /// Each chunk's JSON text, in order.
        chunks: Vec<String>,
        /// When, which becomes the session's `updated_at`.
        at: Timestamp,
    },
    /// Drops every chunk below this sequence, exactly. It must not be above the newest one. The
    /// session row's floor is written by a [`Write::Session`] of the same commit.
    Trim {
        /// The oldest sequence that stays.
        floor: Sequence,
    },
    /// Appends a checkpoint; it becomes the latest.
    Checkpoint(CheckpointRecord),
    /// Appends a message of the conversation.
    Message(MessageRecord),
    /// Inserts or replaces the one step that is under way.
    Step(StepRecord),
    /// Removes the step that was under way and its tool calls.
    ClearStep,
    /// Inserts or replaces a tool call of the step.
    ToolCall(ToolCallRecord),
    /// Inserts or replaces a child's ref.
    SubSession(SubSessionRecord),
    /// Marks a child's ref as failed whose row cannot be read, and forgets the child's stream. What
    /// else may be wrong with the row stays as it is.
    SpoiledSubSession {
        /// The ref's key.
        sub_session_id: String,
    },
    /// Appends a usage entry.
    Usage(UsageRecord),
    /// Remembers an idempotency key and its answer.
    Idempotency(IdempotencyRecord),
    /// Inserts or replaces a hook that a settled run is owed.
    DueHook(DueHook),
    /// Removes one: by its run and status.
    HookDone(DueHook),
}

impl Write {
    /// The chunks that this write appends to the log, with the sequence of the first.
    #[must_use]
    pub fn chunks(&self) -> Option<(Sequence, &[String])> {
        match self {
            Self::Chunks { first, chunks } | Self::Append { first, chunks, .. } => {
                Some((*first, chunks))
            }
            _ => None,
        }
    }
}

/// Writes that belong together.
#[derive(Clone, Debug, Default)]
pub struct Commit {
    /// The epoch that the stored session must have; `None` only for the commit that creates it.
    /// Another stored epoch refuses the commit: a later run owns the session now.
    pub fence: Option<Epoch>,
    /// The writes, in order.
    pub writes: Vec<Write>,
}

/// Why a commit did not happen. Nothing of it was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The session belongs to another epoch by now.
    #[error("the session is at another epoch than {expected}: a later run owns it")]
    Fenced {
        /// The epoch that the commit asked for.
        expected: Epoch,
    },
    /// The database refused.
    #[error("the store failed: {0}")]
    Failed(crate::error::Error),
}

impl From<CommitError> for crate::error::Error {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Fenced { .. } => Self::internal(error.to_string()),
            CommitError::Failed(error) => error,
        }
    }
}

/// The most checkpoints that are kept.
pub const MOST_CHECKPOINTS: u64 = 32;

/// About how many bytes of states the kept checkpoints have, beside the latest two.
pub const CHECKPOINT_BYTES: u64 = 256 * 1024;

/// How many of the newest checkpoints stay when one with a state of so many bytes is written: the
/// latest and its neighbour, and more where states are small. Readers of live projected state
/// compare neighbours; nobody else needs any but the latest.
#[must_use]
pub fn checkpoints_kept(state_bytes: u64) -> u64 {
    (CHECKPOINT_BYTES / state_bytes.max(1)).clamp(2, MOST_CHECKPOINTS)
}

/// Bounds of one page of the log.
#[derive(Clone, Copy, Debug)]
pub struct PageLimit {
    /// At most this many chunks.
    pub chunks: usize,
    /// Stop after the chunk that takes the page over this many bytes.
    pub bytes: usize,
}

/// A page of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkPage {
    /// Sequence and JSON text, in order, without a gap.
    pub chunks: Vec<(Sequence, String)>,
}

/// What the log holds, known without reading it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogStats {
    /// The oldest sequence that is kept; 0 while there is none.
    pub oldest: Sequence,
    /// The newest sequence; 0 while there is none.
    pub newest: Sequence,
    /// The size of all chunks that are kept, a line end after each included.
    pub bytes: u64,
    /// The oldest stretches that can be dropped cheaply, in order, as many as were asked for.
    pub front: Vec<LogSpan>,
}

/// A stretch of the log that is stored together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSpan {
    /// Its first sequence.
    pub first: Sequence,
    /// Its last sequence.
    pub last: Sequence,
    /// Its size, a line end after each chunk included.
    pub bytes: u64,
    /// When its newest chunk was committed, by the `updated_at` of the session row.
    pub committed_at: Timestamp,
}

/// Removes what an agent keeps of a session in tables of its own, inside the deletion's
/// transaction.
pub type DeleteHook<'a> = &'a mut dyn FnMut(&dyn Database) -> Result<()>;

/// One session's storage. See the module's text for what every store promises.
pub trait Store {
    /// Does all of the writes or none.
    ///
    /// # Errors
    /// [`CommitError::Fenced`] when a later run owns the session, else what the database said.
    fn commit(&self, commit: &Commit) -> Result<(), CommitError>;

    /// The session, if one was begun here. Never creates anything.
    fn session(&self) -> Result<Option<SessionRecord>>;

    /// A run.
    fn run(&self, run_id: &str) -> Result<Option<RunRecord>>;

    /// The latest checkpoint.
    fn checkpoint(&self) -> Result<Option<CheckpointRecord>>;

    /// The newest checkpoint at or below this sequence that is kept: what is before the latest ones
    /// goes, by [`checkpoints_kept`].
    fn checkpoint_up_to(&self, sequence: Sequence) -> Result<Option<CheckpointRecord>>;

    /// The sequence of the oldest kept checkpoint above this one.
    fn checkpoint_after(&self, sequence: Sequence) -> Result<Option<Sequence>>;

    /// Whether a run was opened with the chunk of this sequence.
    fn run_opened_at(&self, sequence: Sequence) -> Result<bool>;

    /// The chunks above `after`, up to and including `until`, from the lowest on.
    fn chunks(&self, after: Sequence, until: Sequence, limit: PageLimit) -> Result<ChunkPage>;

    /// As [`Store::chunks`], but hands each chunk on where it lies, in order: whoever copies them
    /// anyway saves a copy of each. After an error what was handed on is no page.
    fn each_chunk(
        &self,
        after: Sequence,
        until: Sequence,
        limit: PageLimit,
        each: &mut dyn FnMut(Sequence, &str),
    ) -> Result<()> {
        for (sequence, chunk) in self.chunks(after, until, limit)?.chunks {
            each(sequence, &chunk);
        }
        Ok(())
    }

    /// What the log holds, with `spans` of its oldest stretches at most.
    fn log_stats(&self, spans: usize) -> Result<LogStats>;

    /// Deletes all that is stored of the session, and what `own` deletes of an agent's own tables:
    /// whole or not at all. Afterwards the store is as if nothing had ever been stored. Rows are not
    /// read, so malformed ones are no obstacle.
    ///
    /// The next session here begins at an epoch of its own, which is random: an execution of the
    /// deleted one is refused there as well.
    ///
    /// # Errors
    /// The error of `own`, the database's, or `invalid_stored_state` when a later version than this
    /// one wrote the database. Nothing is deleted then.
    fn delete_all(&self, own: DeleteHook<'_>) -> Result<()>;

    /// The whole conversation, in order.
    fn messages(&self) -> Result<Vec<MessageRecord>>;

    /// The message right behind this index, and its own. Messages are numbered from 1, so 0 begins.
    fn message_behind(&self, index: u64) -> Result<Option<(u64, MessageRecord)>>;

    /// The step under way and its tool calls in call order.
    fn step(&self) -> Result<Option<(StepRecord, Vec<ToolCallRecord>)>>;

    /// Every tool-call id that the session has used, ids of discarded answers included.
    fn tool_call_id_used(&self, id: &str) -> Result<bool>;

    /// The refs of all children, in the order in which they were made.
    fn sub_sessions(&self) -> Result<Vec<SubSessionRecord>>;

    /// The keys of all refs, in the order in which they were made, also of those that cannot be
    /// read.
    fn sub_session_ids(&self) -> Result<Vec<String>>;

    /// One child's ref.
    fn sub_session(&self, id: &str) -> Result<Option<SubSessionRecord>>;

    /// Whether the log holds a `subagent_start` that announces this child, with this type where one
    /// is given.
    fn announced(&self, sub_session_id: &str, agent_type: Option<&str>) -> Result<bool>;

    /// Whether the log holds a `subagent_start` that came from the child `via` and announces this
    /// session.
    fn announced_by(&self, via: &str, sub_session_id: &str) -> Result<bool>;

    /// All usage entries, in order.
    fn usage(&self) -> Result<Vec<UsageRecord>>;

    /// What was answered under an idempotency key.
    fn idempotency(&self, key: &str) -> Result<Option<IdempotencyRecord>>;

    /// The hooks that settled runs are owed, the first due first.
    fn due_hooks(&self) -> Result<Vec<DueHook>>;

    /// The database below, for tables of an agent's own.
    fn database(&self) -> &dyn Database;
}

/// A value in a statement or a row. Booleans do not exist here: bind 0 or 1.
#[derive(Clone, Debug, PartialEq)]
pub enum SqlValue {
    /// NULL.
    Null,
    /// An integer; its magnitude must stay below 2^53.
    Integer(i64),
    /// A floating-point number. A whole REAL may come back as an integer.
    Real(f64),
    /// Text. A BLOB that is UTF-8 comes back as text as well: for a long one
    /// `CAST(column AS BLOB)` is the cheapest way out of a Durable Object.
    Text(String),
}

/// SQL on one object's SQLite. Tables of an agent's own must not begin with `ra_`.
pub trait Database {
    /// Runs one statement with at most 100 parameters and returns its rows.
    ///
    /// A Durable Object binds numbers as REAL. A whole one is an integer again in a column of INTEGER
    /// affinity and equal to one in a comparison; where an expression looks at the type itself
    /// (`json_object`, `||`, `typeof`, division), write `CAST(? AS INTEGER)`.
    ///
    /// # Errors
    /// `INTERNAL` with the database's words as detail.
    fn query(&self, sql: &str, parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>>;

    /// Runs one statement that returns no rows and says whether it wrote any.
    ///
    /// # Errors
    /// As [`Database::query`].
    fn write(&self, sql: &str, parameters: &[SqlValue]) -> Result<bool> {
        self.query(sql, parameters)?;
        let changes = self.query("SELECT changes()", &[])?;
        Ok(!matches!(
            changes.first().map(Vec::as_slice),
            Some([SqlValue::Integer(0)])
        ))
    }

    /// Runs `work` in a transaction (a savepoint when one is open): its error undoes all of it.
    ///
    /// # Errors
    /// The error of `work`, or the database's.
    fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()>;
}
