//! A store without a database: for tests, simulations and sessions that need not outlive a process.
//!
//! It keeps every promise of the contract suite, transactions included; SQL alone it has none of,
//! and says so with a typed error. A commit costs what it writes: what it replaced is noted and put
//! back when it fails.

use std::borrow::Borrow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use super::rows::to_json;
use super::{
    CheckpointRecord, ChunkPage, Commit, CommitError, Database, DeleteHook, DueHook,
    IdempotencyRecord, LogSpan, LogStats, MessageRecord, PageLimit, RunRecord, SessionRecord,
    SqlValue, StepRecord, Store, SubSessionRecord, SubStatus, ToolCallRecord, UsageRecord, Write,
    checkpoints_kept, log,
};
use crate::error::{Code, Error, Result};
use crate::protocol::ids::{MAX_SAFE_INTEGER, Sequence, Timestamp};

/// A [`Store`] in memory. Clones are the same store.
#[derive(Clone, Default)]
pub struct MemoryStore(Rc<Memory>);

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

#[derive(Default)]
struct Memory {
    tables: RefCell<Tables>,
    /// How many transactions are open, one inside the other.
    depth: Cell<u32>,
}

#[derive(Default)]
struct Tables {
    session: Table<(), SessionRecord>,
    runs: Table<String, RunRecord>,
    chunks: Table<Sequence, ChunkRow>,
    checkpoints: Table<u64, CheckpointRecord>,
    messages: Table<u64, MessageRecord>,
    step: Table<(), StepRecord>,
    calls: Table<String, ToolCallRecord>,
    call_ids: Table<String, ()>,
    sub_sessions: Table<u64, SubSessionRecord>,
    announced: Table<(String, String, String), ()>,
    usage: Table<u64, UsageRecord>,
    idempotency: Table<String, IdempotencyRecord>,
    due_hooks: Table<(String, &'static str), DueHook>,
}

fn hook_key(hook: &DueHook) -> (String, &'static str) {
    (hook.run_id.as_str().to_owned(), hook.status.as_str())
}

/// One chunk, with the size of all log before it.
#[derive(Clone)]
struct ChunkRow {
    json: String,
    start_byte: u64,
    committed_at: Timestamp,
}

impl ChunkRow {
    fn end_byte(&self) -> u64 {
        let size = u64::try_from(self.json.len()).unwrap_or(u64::MAX);
        self.start_byte.saturating_add(size).saturating_add(1)
    }
}

/// Rows in order, and what has to be put back if the open transaction fails.
struct Table<K, V> {
    rows: BTreeMap<K, V>,
    undo: Vec<(K, Option<V>)>,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self {
            rows: BTreeMap::new(),
            undo: Vec::new(),
        }
    }
}

impl<K: Ord + Clone, V> Table<K, V> {
    fn put(&mut self, key: K, value: V) {
        let old = self.rows.insert(key.clone(), value);
        self.undo.push((key, old));
    }

    fn remove<Q: Ord + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        if let Some((key, old)) = self.rows.remove_entry(key) {
            self.undo.push((key, Some(old)));
        }
    }

    fn clear(&mut self) {
        while let Some((key, old)) = self.rows.pop_first() {
            self.undo.push((key, Some(old)));
        }
    }

    fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.rows.get(key)
    }

    fn roll_back(&mut self, mark: usize) {
        while self.undo.len() > mark {
            match self.undo.pop() {
                Some((key, Some(old))) => drop(self.rows.insert(key, old)),
                Some((key, None)) => drop(self.rows.remove(&key)),
                None => {}
            }
        }
    }
}

impl<V> Table<u64, V> {
    fn append(&mut self, value: V) {
        let next = self.rows.last_key_value().map_or(1, |(last, _)| last + 1);
        self.put(next, value);
    }
}

/// Does the same to every table.
macro_rules! each_table {
    ($tables:expr, $table:ident => $work:expr) => {{
        let Tables {
            session,
            runs,
            chunks,
            checkpoints,
            messages,
            step,
            calls,
            call_ids,
            sub_sessions,
            announced,
            usage,
            idempotency,
            due_hooks,
        } = $tables;
        [
            {
                let $table = session;
                $work
            },
            {
                let $table = runs;
                $work
            },
            {
                let $table = chunks;
                $work
            },
            {
                let $table = checkpoints;
                $work
            },
            {
                let $table = messages;
                $work
            },
            {
                let $table = step;
                $work
            },
            {
                let $table = calls;
                $work
            },
            {
                let $table = call_ids;
                $work
            },
            {
                let $table = sub_sessions;
                $work
            },
            {
                let $table = announced;
                $work
            },
            {
                let $table = usage;
                $work
            },
            {
                let $table = idempotency;
                $work
            },
            {
                let $table = due_hooks;
                $work
            },
        ]
    }};
}

impl Tables {
    fn apply(&mut self, write: &Write) -> Result<()> {
        match write {
            Write::Session(record) => self.write_session(record),
            Write::Run(record) => self
                .runs
                .put(record.run_id.as_str().to_owned(), record.clone()),
            Write::Chunks { first, chunks } => return self.append(*first, chunks),
            Write::Append { first, chunks, at } => {
                self.session_follows(*first, chunks, *at);
                return self.append(*first, chunks);
            }
            Write::Trim { floor } => return self.trim(*floor),
            Write::Checkpoint(record) => return self.write_checkpoint(record),
            Write::Message(record) => self.messages.append(record.clone()),
            Write::Step(record) => self.step.put((), record.clone()),
            Write::ClearStep => {
                self.step.clear();
                self.calls.clear();
            }
            Write::ToolCall(record) => {
                self.call_ids.put(record.call.id.clone(), ());
                self.calls.put(record.call.id.clone(), record.clone());
            }
            Write::SubSession(record) => {
                let known = self
                    .sub_sessions
                    .rows
                    .iter()
                    .find(|(_, known)| known.sub_session_id == record.sub_session_id)
                    .map(|(position, _)| *position);
                match known {
                    Some(position) => self.sub_sessions.put(position, record.clone()),
                    None => self.sub_sessions.append(record.clone()),
                }
            }
            Write::SpoiledSubSession { sub_session_id } => {
                let found = self
                    .sub_sessions
                    .rows
                    .iter()
                    .find(|(_, known)| known.sub_session_id.as_str() == sub_session_id)
                    .map(|(position, known)| (*position, known.clone()));
                if let Some((position, mut record)) = found {
                    record.status = SubStatus::Failed;
                    record.remote = None;
                    self.sub_sessions.put(position, record);
                }
            }
            Write::Usage(record) => self.usage.append(record.clone()),
            Write::Idempotency(record) => {
                if self.idempotency.get(&record.key).is_some() {
                    return Err(Error::internal("an idempotency key was stored already"));
                }
                self.idempotency.put(record.key.clone(), record.clone());
            }
            Write::DueHook(hook) => self.due_hooks.put(hook_key(hook), hook.clone()),
            Write::HookDone(hook) => self.due_hooks.remove(&hook_key(hook)),
        }
        Ok(())
    }

    fn write_checkpoint(&mut self, record: &CheckpointRecord) -> Result<()> {
        let size = u64::try_from(to_json(&*record.state)?.len()).unwrap_or(u64::MAX);
        self.checkpoints.append(record.clone());
        let kept = usize::try_from(checkpoints_kept(size)).unwrap_or(usize::MAX);
        let places = self.checkpoints.rows.keys().rev();
        for old in places.skip(kept).copied().collect::<Vec<_>>() {
            self.checkpoints.remove(&old);
        }
        Ok(())
    }

    /// The origin is fixed by the first write.
    fn write_session(&mut self, record: &SessionRecord) {
        let mut record = record.clone();
        if let Some(first) = self.session.get(&()) {
            record.origin = first.origin.clone();
        }
        self.session.put((), record);
    }

    /// The session's row follows a log that is appended to by itself.
    fn session_follows(&mut self, first: Sequence, chunks: &[String], at: Timestamp) {
        let Some(record) = self.session.get(&()).filter(|_| !chunks.is_empty()) else {
            return;
        };
        let mut record = record.clone();
        let count = u64::try_from(chunks.len()).unwrap_or(u64::MAX);
        record.last_sequence = first.saturating_add(count).saturating_sub(1);
        record.updated_at = record.updated_at.max(at);
        self.session.put((), record);
    }

    fn append(&mut self, first: Sequence, chunks: &[String]) -> Result<()> {
        if chunks.is_empty() {
            return Ok(());
        }
        log::check(chunks)?;
        let newest = self.chunks.rows.last_key_value();
        log::follows_on(newest.map(|(sequence, _)| *sequence), first)?;
        let mut start_byte = newest.map_or(0, |(_, row)| row.end_byte());
        let committed_at = self.session.get(&()).map_or(0, |record| record.updated_at);
        for (sequence, json) in (first..).zip(chunks) {
            if sequence > MAX_SAFE_INTEGER {
                return Err(Error::internal("a number to store is not below 2^53"));
            }
            if let Some(announced) = log::announcement(json)? {
                self.announced.put(announced, ());
            }
            let row = ChunkRow {
                json: json.clone(),
                start_byte,
                committed_at,
            };
            start_byte = row.end_byte();
            self.chunks.put(sequence, row);
        }
        Ok(())
    }

    fn trim(&mut self, floor: Sequence) -> Result<()> {
        match self.chunks.rows.last_key_value() {
            Some((newest, _)) if floor <= *newest => {}
            _ => {
                return Err(Error::internal(format!(
                    "the log cannot be trimmed up to {floor}: its newest chunk stays"
                )));
            }
        }
        while let Some(sequence) = self.chunks.rows.keys().next().copied()
            && sequence < floor
        {
            self.chunks.remove(&sequence);
        }
        Ok(())
    }
}

impl Store for MemoryStore {
    fn commit(&self, commit: &Commit) -> Result<(), CommitError> {
        let fence = |tables: &Tables| tables.session.get(&()).map(|record| record.epoch);
        if fence(&self.0.tables.borrow()) != commit.fence {
            return Err(CommitError::Fenced {
                expected: commit.fence.unwrap_or_default(),
            });
        }
        self.0
            .transaction(&mut || {
                commit
                    .writes
                    .iter()
                    .try_for_each(|write| self.0.tables.borrow_mut().apply(write))
            })
            .map_err(CommitError::Failed)
    }

    fn session(&self) -> Result<Option<SessionRecord>> {
        Ok(self.0.tables.borrow().session.get(&()).cloned())
    }

    fn run(&self, run_id: &str) -> Result<Option<RunRecord>> {
        Ok(self.0.tables.borrow().runs.get(run_id).cloned())
    }

    fn checkpoint(&self) -> Result<Option<CheckpointRecord>> {
        let tables = self.0.tables.borrow();
        Ok(tables.checkpoints.rows.values().next_back().cloned())
    }

    fn checkpoint_up_to(&self, sequence: Sequence) -> Result<Option<CheckpointRecord>> {
        let tables = self.0.tables.borrow();
        let mut newest_first = tables.checkpoints.rows.values().rev();
        Ok(newest_first
            .find(|record| record.stream_sequence <= sequence)
            .cloned())
    }

    fn checkpoint_after(&self, sequence: Sequence) -> Result<Option<Sequence>> {
        let tables = self.0.tables.borrow();
        let mut places = tables.checkpoints.rows.values();
        Ok(places
            .find(|record| record.stream_sequence > sequence)
            .map(|record| record.stream_sequence))
    }

    fn run_opened_at(&self, sequence: Sequence) -> Result<bool> {
        let tables = self.0.tables.borrow();
        let mut runs = tables.runs.rows.values();
        Ok(runs.any(|run| run.start_sequence.checked_add(1) == Some(sequence)))
    }

    fn chunks(&self, after: Sequence, until: Sequence, limit: PageLimit) -> Result<ChunkPage> {
        let mut page = ChunkPage::default();
        if after >= until {
            return Ok(page);
        }
        let tables = self.0.tables.borrow();
        let mut bytes = 0usize;
        for (sequence, row) in tables.chunks.rows.range(after.saturating_add(1)..=until) {
            if page.chunks.len() >= limit.chunks || bytes > limit.bytes {
                break;
            }
            bytes = bytes.saturating_add(row.json.len());
            page.chunks.push((*sequence, row.json.clone()));
        }
        Ok(page)
    }

    fn log_stats(&self, spans: usize) -> Result<LogStats> {
        let tables = self.0.tables.borrow();
        let rows = &tables.chunks.rows;
        let (Some((oldest, begin)), Some((newest, end))) =
            (rows.first_key_value(), rows.last_key_value())
        else {
            return Ok(LogStats::default());
        };
        let front = rows.iter().take(spans).map(|(sequence, row)| LogSpan {
            first: *sequence,
            last: *sequence,
            bytes: row.end_byte().saturating_sub(row.start_byte),
            committed_at: row.committed_at,
        });
        Ok(LogStats {
            oldest: *oldest,
            newest: *newest,
            bytes: end.end_byte().saturating_sub(begin.start_byte),
            front: front.collect(),
        })
    }

    fn delete_all(&self, own: DeleteHook<'_>) -> Result<()> {
        self.0.transaction(&mut || {
            own(&*self.0)?;
            each_table!(&mut *self.0.tables.borrow_mut(), table => table.clear());
            Ok(())
        })
    }

    fn messages(&self) -> Result<Vec<MessageRecord>> {
        let tables = self.0.tables.borrow();
        Ok(tables.messages.rows.values().cloned().collect())
    }

    fn message_behind(&self, index: u64) -> Result<Option<(u64, MessageRecord)>> {
        let tables = self.0.tables.borrow();
        let mut rows = tables.messages.rows.range(index.saturating_add(1)..);
        Ok(rows.next().map(|(index, record)| (*index, record.clone())))
    }

    fn step(&self) -> Result<Option<(StepRecord, Vec<ToolCallRecord>)>> {
        let tables = self.0.tables.borrow();
        let Some(step) = tables.step.get(&()) else {
            return Ok(None);
        };
        let mut calls: Vec<ToolCallRecord> = tables.calls.rows.values().cloned().collect();
        calls.sort_by_key(|call| call.index);
        Ok(Some((step.clone(), calls)))
    }

    fn tool_call_id_used(&self, id: &str) -> Result<bool> {
        Ok(self.0.tables.borrow().call_ids.get(id).is_some())
    }

    fn sub_sessions(&self) -> Result<Vec<SubSessionRecord>> {
        let tables = self.0.tables.borrow();
        Ok(tables.sub_sessions.rows.values().cloned().collect())
    }

    fn sub_session_ids(&self) -> Result<Vec<String>> {
        let tables = self.0.tables.borrow();
        let all = tables.sub_sessions.rows.values();
        Ok(all
            .map(|record| record.sub_session_id.to_string())
            .collect())
    }

    fn sub_session(&self, id: &str) -> Result<Option<SubSessionRecord>> {
        let tables = self.0.tables.borrow();
        let mut all = tables.sub_sessions.rows.values();
        Ok(all
            .find(|record| record.sub_session_id.as_str() == id)
            .cloned())
    }

    fn announced(&self, sub_session_id: &str, agent_type: Option<&str>) -> Result<bool> {
        let tables = self.0.tables.borrow();
        let mut all = tables.announced.rows.keys();
        Ok(all.any(|(id, kind, _)| {
            id == sub_session_id && agent_type.is_none_or(|wanted| wanted == kind)
        }))
    }

    fn announced_by(&self, via: &str, sub_session_id: &str) -> Result<bool> {
        let tables = self.0.tables.borrow();
        let mut all = tables.announced.rows.keys();
        Ok(all.any(|(id, _, by)| id == sub_session_id && by == via))
    }

    fn usage(&self) -> Result<Vec<UsageRecord>> {
        Ok(self
            .0
            .tables
            .borrow()
            .usage
            .rows
            .values()
            .cloned()
            .collect())
    }

    fn idempotency(&self, key: &str) -> Result<Option<IdempotencyRecord>> {
        Ok(self.0.tables.borrow().idempotency.get(key).cloned())
    }

    fn due_hooks(&self) -> Result<Vec<DueHook>> {
        let tables = self.0.tables.borrow();
        let mut hooks: Vec<DueHook> = tables.due_hooks.rows.values().cloned().collect();
        hooks.sort_by_key(|hook| hook.due_at);
        Ok(hooks)
    }

    fn database(&self) -> &dyn Database {
        &*self.0
    }
}

/// Transactions alone: there is no SQL here.
impl Database for Memory {
    fn query(&self, _sql: &str, _parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        Err(
            Error::new(Code::NotSupported, "This store has no SQL database.").with_detail(
                "a MemoryStore holds a session's rows alone: an agent with tables of its own needs a store over SQL",
            ),
        )
    }

    fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let marks = each_table!(&*self.tables.borrow(), table => table.undo.len());
        let open = Open {
            memory: self,
            marks,
            kept: false,
        };
        self.depth.set(self.depth.get().saturating_add(1));
        open.run(work)
    }
}

/// An open transaction. Dropped without having succeeded, it puts everything back, also when its
/// work panicked.
struct Open<'a> {
    memory: &'a Memory,
    marks: [usize; 13],
    kept: bool,
}

impl Open<'_> {
    fn run(mut self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        work()?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let depth = self.memory.depth.get().saturating_sub(1);
        self.memory.depth.set(depth);
        let Ok(mut tables) = self.memory.tables.try_borrow_mut() else {
            return;
        };
        if !self.kept {
            let mut marks = self.marks.into_iter();
            each_table!(&mut *tables, table => table.roll_back(marks.next().unwrap_or(0)));
        }
        if depth == 0 {
            each_table!(&mut *tables, table => table.undo.clear());
        }
    }
}
