//! The store over any SQL database: Durable Object SQLite and rusqlite share this one.
//!
//! A commit is one transaction that begins with the fence; a refused or failed one leaves no trace,
//! not even the tables. A read on an empty database finds nothing and makes nothing.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::schema::{self, MIGRATIONS, Stage};
use super::{
    CheckpointRecord, ChunkPage, Commit, CommitError, Database, DeleteHook, DueHook, Epoch,
    IdempotencyRecord, LogStats, MessageRecord, PageLimit, RunRecord, SessionRecord, StepRecord,
    Store, SubSessionRecord, ToolCallRecord, UsageRecord, Write, due, log, read, write,
};
use crate::error::{Code, Error, Result};
use crate::protocol::ids::Sequence;

/// A [`Store`] over one object's database.
pub struct SqlStore {
    database: Rc<dyn Database>,
    /// Whether the schema was seen to be current. Only a hint: an outer transaction that was
    /// rolled back may have taken the tables away again.
    current: Cell<bool>,
    /// What the last page left of its last row. Rows are told apart by their sequences, which a
    /// later life of the database issues again: a deletion forgets it.
    rest: RefCell<Option<log::Rest>>,
    /// Where the log ends, as far as the last append knows.
    end: Cell<Option<log::Hint>>,
}

impl SqlStore {
    /// A store over `database`, which it neither reads nor changes yet.
    #[must_use]
    pub fn new(database: Rc<dyn Database>) -> Self {
        Self {
            database,
            current: Cell::new(false),
            rest: RefCell::new(None),
            end: Cell::new(None),
        }
    }

    /// A commit that only appends, in the one statement that it needs where nothing is in its way.
    /// False, with nothing written, where something is: the ordinary commit tells what.
    fn append_alone(&self, commit: &Commit) -> bool {
        let (Some(epoch), [Write::Append { first, chunks, at }]) =
            (commit.fence, commit.writes.as_slice())
        else {
            return false;
        };
        let Some(hint) = self.end.get().filter(|_| self.current.get()) else {
            return false;
        };
        let appended = hint.append(&*self.database, epoch, *first, chunks, *at);
        let end = appended.ok().flatten();
        self.end.set(end);
        end.is_some()
    }

    /// Reads, or gives the empty answer while nothing was ever stored.
    fn read<T: Default>(&self, work: impl Fn(&dyn Database) -> Result<T>) -> Result<T> {
        let hinted = self.current.get();
        if !self.can_read()? {
            return Ok(T::default());
        }
        match work(&*self.database) {
            Err(error) if hinted && error.code == Code::Internal => {
                self.current.set(false);
                if self.can_read()? {
                    Err(error)
                } else {
                    Ok(T::default())
                }
            }
            other => other,
        }
    }

    /// Whether there are tables to read; older ones are brought up to date first.
    fn can_read(&self) -> Result<bool> {
        if self.current.get() {
            return Ok(true);
        }
        match schema::inspect(&*self.database, MIGRATIONS)? {
            Stage::Absent => return Ok(false),
            Stage::Current => {}
            stage @ Stage::At(_) => {
                let database = &*self.database;
                database.transaction(&mut || schema::migrate(database, MIGRATIONS, stage))?;
            }
        }
        self.current.set(true);
        Ok(true)
    }

    /// The stored epoch, after whatever the schema lacks was made. Inside the transaction only.
    fn epoch_for_writing(&self) -> Result<Option<Epoch>> {
        if self.current.get() {
            match read::epoch(&*self.database) {
                Err(error) if error.code == Code::Internal => self.current.set(false),
                other => return other,
            }
        }
        let stage = schema::inspect(&*self.database, MIGRATIONS)?;
        schema::migrate(&*self.database, MIGRATIONS, stage)?;
        read::epoch(&*self.database)
    }
}

impl Store for SqlStore {
    fn commit(&self, commit: &Commit) -> Result<(), CommitError> {
        if self.append_alone(commit) {
            return Ok(());
        }
        let mut fenced = false;
        let outcome = self.database.transaction(&mut || {
            fenced = self.epoch_for_writing()? != commit.fence;
            if fenced {
                return Err(Error::internal("the session is at another epoch"));
            }
            commit
                .writes
                .iter()
                .try_for_each(|one| write::apply(&*self.database, &self.end, one))
        });
        match outcome {
            Ok(()) => {
                self.current.set(true);
                Ok(())
            }
            Err(_) if fenced => Err(CommitError::Fenced {
                expected: commit.fence.unwrap_or_default(),
            }),
            Err(error) => Err(CommitError::Failed(error)),
        }
    }

    fn session(&self) -> Result<Option<SessionRecord>> {
        self.read(read::session)
    }

    fn run(&self, run_id: &str) -> Result<Option<RunRecord>> {
        self.read(|database| read::run(database, run_id))
    }

    fn checkpoint(&self) -> Result<Option<CheckpointRecord>> {
        self.read(read::checkpoint)
    }

    fn checkpoint_up_to(&self, sequence: Sequence) -> Result<Option<CheckpointRecord>> {
        self.read(|database| read::checkpoint_up_to(database, sequence))
    }

    fn checkpoint_after(&self, sequence: Sequence) -> Result<Option<Sequence>> {
        self.read(|database| read::checkpoint_after(database, sequence))
    }

    fn run_opened_at(&self, sequence: Sequence) -> Result<bool> {
        self.read(|database| read::run_opened_at(database, sequence))
    }

    fn chunks(&self, after: Sequence, until: Sequence, limit: PageLimit) -> Result<ChunkPage> {
        let mut page = ChunkPage::default();
        self.each_chunk(after, until, limit, &mut |sequence, chunk| {
            page.chunks.push((sequence, chunk.to_owned()));
        })?;
        Ok(page)
    }

    fn each_chunk(
        &self,
        after: Sequence,
        until: Sequence,
        limit: PageLimit,
        each: &mut dyn FnMut(Sequence, &str),
    ) -> Result<()> {
        let each = RefCell::new(each);
        self.read(|database| {
            let each = &mut **each.borrow_mut();
            log::page(database, &self.rest, after, until, limit, each)
        })
    }

    fn log_stats(&self, spans: usize) -> Result<LogStats> {
        self.read(|database| log::stats(database, spans))
    }

    fn delete_all(&self, own: DeleteHook<'_>) -> Result<()> {
        let database = &*self.database;
        self.rest.take();
        self.end.take();
        database.transaction(&mut || {
            // A database of a later version is not ours to delete.
            schema::inspect(database, MIGRATIONS)?;
            own(database)?;
            schema::drop_all(database)
        })?;
        self.current.set(false);
        Ok(())
    }

    fn messages(&self) -> Result<Vec<MessageRecord>> {
        self.read(read::messages)
    }

    fn message_behind(&self, index: u64) -> Result<Option<(u64, MessageRecord)>> {
        self.read(|database| read::message_behind(database, index))
    }

    fn step(&self) -> Result<Option<(StepRecord, Vec<ToolCallRecord>)>> {
        self.read(read::step)
    }

    fn tool_call_id_used(&self, id: &str) -> Result<bool> {
        self.read(|database| read::tool_call_id_used(database, id))
    }

    fn sub_sessions(&self) -> Result<Vec<SubSessionRecord>> {
        self.read(read::sub_sessions)
    }

    fn sub_session_ids(&self) -> Result<Vec<String>> {
        self.read(read::sub_session_ids)
    }

    fn sub_session(&self, id: &str) -> Result<Option<SubSessionRecord>> {
        self.read(|database| read::sub_session(database, id))
    }

    fn announced(&self, sub_session_id: &str, agent_type: Option<&str>) -> Result<bool> {
        self.read(|database| log::announced(database, sub_session_id, agent_type))
    }

    fn announced_by(&self, via: &str, sub_session_id: &str) -> Result<bool> {
        self.read(|database| log::announced_by(database, via, sub_session_id))
    }

    fn usage(&self) -> Result<Vec<UsageRecord>> {
        self.read(read::usage)
    }

    fn idempotency(&self, key: &str) -> Result<Option<IdempotencyRecord>> {
        self.read(|database| read::idempotency(database, key))
    }

    fn due_hooks(&self) -> Result<Vec<DueHook>> {
        self.read(due::all)
    }

    fn database(&self) -> &dyn Database {
        &*self.database
    }
}

#[cfg(test)]
mod tests;
