//! What every store promises, as tests that any store can be put through.
//!
//! Call [`run`] from a test of the crate that has the store. Each case begins on an empty database
//! and panics with its own words when a promise is broken. Section 5 of the contract (a commit is
//! all or nothing) and section 4 (sequences, exclusive cursors).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "the suite is made of assertions and runs in tests only"
)]

mod append;
mod checkpoints;
mod commits;
mod deletion;
mod log;
mod malformed;
mod rows;
mod trim;

use std::rc::Rc;

use serde_json::{Value, json};

use super::{
    Answer, CheckpointRecord, Commit, CommitError, Database, DueHook, Epoch, Failure,
    IdempotencyRecord, MessageRecord, PageLimit, RunRecord, SessionOrigin, SessionRecord, SqlValue,
    StagedPatch, StepRecord, Stop, StopKind, Store, SubLocation, SubRemote, SubSessionRecord,
    SubStatus, Terminal, ToolCall, ToolCallRecord, ToolOutcome, UsageRecord, Write,
};
use crate::error::{Code, Error};
use crate::protocol::chunk::PatchOperation;
use crate::protocol::ids::{AgentType, MAX_SAFE_INTEGER, RunId, Sequence, SessionId, StreamId};
use crate::protocol::message::{ParentRef, SessionStatus};
use crate::protocol::usage::{RollupOrigin, Tokens, UsageRollup};

/// A place where stores can be opened; empty at first.
pub struct Site {
    /// Opens a store there, which finds what an earlier one wrote.
    pub open: Box<dyn Fn() -> Rc<dyn Store>>,
    /// The SQL database of the place; `None` for a store without SQL.
    pub database: Option<Rc<dyn Database>>,
}

impl Site {
    /// A place over a SQL database.
    #[must_use]
    pub fn over(
        database: Rc<dyn Database>,
        open: impl Fn(Rc<dyn Database>) -> Rc<dyn Store> + 'static,
    ) -> Self {
        let below = database.clone();
        Self {
            open: Box::new(move || open(below.clone())),
            database: Some(database),
        }
    }

    /// The SQL database, for a case that needs one.
    fn sql(&self) -> &Rc<dyn Database> {
        self.database.as_ref().expect("the case needs SQL")
    }
}

/// The store under test.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// Makes an empty place.
    pub site: &'a dyn Fn() -> Site,
}

impl Subject<'_> {
    fn fresh(&self) -> (Site, Rc<dyn Store>) {
        let site = (self.site)();
        let store = (site.open)();
        (site, store)
    }
}

/// What a case does with a store; it panics when a promise is broken.
pub type Check = fn(Subject<'_>);

/// One case.
#[derive(Clone, Copy)]
pub struct Case {
    /// What is promised.
    pub name: &'static str,
    /// Whether the promise concerns stores over SQL alone.
    pub needs_sql: bool,
    /// The case itself.
    pub check: Check,
}

const fn any(name: &'static str, check: Check) -> Case {
    Case {
        name,
        needs_sql: false,
        check,
    }
}

const fn sql(name: &'static str, check: Check) -> Case {
    Case {
        name,
        needs_sql: true,
        check,
    }
}

/// All cases by name.
pub const CASES: &[Case] = &[
    any(
        "reads leave an empty database empty",
        commits::reads_leave_an_empty_database_empty,
    ),
    any(
        "every record reads back as written",
        rows::every_record_reads_back_as_written,
    ),
    any(
        "a later write of a record replaces it",
        rows::a_later_write_replaces,
    ),
    any(
        "checkpoints stay while they are few and small, and are found by their place",
        checkpoints::they_stay_while_few_and_small,
    ),
    any(
        "a commit that fails half-way writes nothing",
        commits::a_commit_that_fails_half_way_writes_nothing,
    ),
    any(
        "the fence keeps an earlier epoch out",
        commits::the_fence_keeps_an_earlier_epoch_out,
    ),
    any(
        "a cursor is exclusive at every sequence",
        log::a_cursor_is_exclusive_at_every_sequence,
    ),
    any(
        "pages keep to their limits and join without a gap",
        log::pages_keep_to_their_limits,
    ),
    any(
        "sequences are never issued twice nor skipped",
        log::sequences_are_never_issued_twice,
    ),
    any(
        "a session follows a log that is appended to by itself",
        append::the_session_follows_its_log,
    ),
    any(
        "an append by itself is fenced and numbered",
        append::an_append_is_fenced_and_numbered,
    ),
    any(
        "an append by itself trusts no memory of the log",
        append::an_append_trusts_no_memory,
    ),
    any(
        "a log of any shape reads back byte for byte as it grows",
        log::a_log_of_any_shape_reads_back,
    ),
    any(
        "a trim is exact and a cursor at the floor goes on",
        trim::a_trim_is_exact,
    ),
    any(
        "a trim never frees a number, and never the newest chunk",
        trim::a_trim_frees_no_number,
    ),
    any(
        "sizes are known without reading the log",
        trim::sizes_are_known,
    ),
    any(
        "rows above the platform's limit are kept",
        rows::rows_above_the_limit_are_kept,
    ),
    any(
        "a cleared step keeps its ids used",
        rows::a_cleared_step_keeps_its_ids_used,
    ),
    any(
        "due hooks stand until they are done",
        rows::due_hooks_stand_until_they_are_done,
    ),
    any(
        "announced children are found",
        log::announced_children_are_found,
    ),
    any(
        "a reopened store goes on",
        commits::a_reopened_store_goes_on,
    ),
    any(
        "a commit is part of an outer transaction",
        commits::a_commit_is_part_of_an_outer_transaction,
    ),
    any(
        "SQL is there or refused with a typed error",
        commits::sql_is_there_or_refused,
    ),
    any(
        "a deleted session leaves nothing",
        deletion::a_deleted_session_leaves_nothing,
    ),
    any(
        "a deletion that fails deletes nothing",
        deletion::a_deletion_that_fails_deletes_nothing,
    ),
    sql(
        "an agent's own tables share the transaction",
        commits::an_agents_own_tables_share_the_transaction,
    ),
    sql(
        "a database of a later version is refused",
        commits::a_database_of_a_later_version_is_refused,
    ),
    sql(
        "malformed rows are typed errors and touch nothing else",
        malformed::malformed_rows_are_typed_errors,
    ),
    sql(
        "a malformed row of the log stays alone when it is packed",
        malformed::a_malformed_row_stays_alone,
    ),
];

/// Puts a store through every case that concerns it and says how many those were.
///
/// # Panics
/// When the store breaks a promise.
pub fn run(subject: Subject<'_>) -> usize {
    let has_sql = (subject.site)().database.is_some();
    let concerned = CASES.iter().filter(|case| has_sql || !case.needs_sql);
    concerned.map(|case| (case.check)(subject)).count()
}

/// A session as a first commit may store it: running, at epoch 1, with an empty log.
#[must_use]
pub fn sample_session() -> SessionRecord {
    session(1, 0)
}

fn id() -> SessionId {
    SessionId::parse("s-1").unwrap()
}

fn run_id(number: u64) -> RunId {
    RunId::parse(&format!("run_{number}")).unwrap()
}

fn session(epoch: Epoch, last_sequence: Sequence) -> SessionRecord {
    SessionRecord {
        session_id: id(),
        agent_type: AgentType::parse("planner").unwrap(),
        stream_id: StreamId::parse("st_1").unwrap(),
        status: SessionStatus::Running,
        run_id: run_id(1),
        epoch,
        step_count: 0,
        last_sequence,
        floor: 0,
        last_ordinal: 0,
        attempts: 0,
        stop: None,
        output: None,
        failure: None,
        origin: Rc::new(SessionOrigin::default()),
        created_at: 1_000,
        updated_at: 1_000,
    }
}

fn create() -> Commit {
    Commit {
        fence: None,
        writes: vec![Write::Session(session(1, 0))],
    }
}

fn begun(store: &dyn Store) {
    store.commit(&create()).unwrap();
}

fn write(store: &dyn Store, writes: Vec<Write>) {
    store.commit(&fenced(1, writes)).unwrap();
}

fn due_hook(run: u64, status: SessionStatus) -> DueHook {
    DueHook {
        run_id: run_id(run),
        status,
        attempts: 0,
        due_at: 1_000,
    }
}

fn fenced(epoch: Epoch, writes: Vec<Write>) -> Commit {
    Commit {
        fence: Some(epoch),
        writes,
    }
}

fn text_chunk(text: &str) -> String {
    json!({"type": "text_delta", "delta": text, "agentId": "s-1"}).to_string()
}

fn chunks(first: Sequence, texts: &[&str]) -> Write {
    Write::Chunks {
        first,
        chunks: texts.iter().map(|text| text_chunk(text)).collect(),
    }
}

const ALL: PageLimit = PageLimit {
    chunks: 1_000_000,
    bytes: usize::MAX,
};

fn read(
    store: &dyn Store,
    after: Sequence,
    until: Sequence,
    limit: PageLimit,
) -> Vec<(Sequence, String)> {
    store.chunks(after, until, limit).unwrap().chunks
}

/// The tables of a place; none where there is no SQL.
fn tables(site: &Site) -> Vec<Vec<SqlValue>> {
    let Some(database) = &site.database else {
        return Vec::new();
    };
    database
        .query(
            "SELECT type, name, sql FROM sqlite_master
             WHERE substr(name, 1, 4) <> '_cf_' ORDER BY name",
            &[],
        )
        .unwrap()
}

fn call(id: &str, index: u64, arguments: Value) -> ToolCallRecord {
    ToolCallRecord {
        call: ToolCall {
            id: id.into(),
            name: "note".into(),
            arguments,
        },
        index,
        begun: 0,
        outcome: None,
        staged: Vec::new(),
    }
}

fn step(number: u64) -> StepRecord {
    StepRecord {
        step: number,
        start_sequence: 0,
        answer: None,
    }
}

fn checkpoint(number: u64, state: Value) -> CheckpointRecord {
    CheckpointRecord {
        checkpoint_id: format!("cpv1-s-1-s{number}-t1-abcdef"),
        step_count: number,
        stream_sequence: number * 10,
        patch_ordinal: number,
        state: Rc::new(state),
        created_at: 1_000 + number,
    }
}

fn child(name: &str) -> SubSessionRecord {
    SubSessionRecord {
        sub_session_id: SessionId::parse(name).unwrap(),
        agent_type: AgentType::parse("thread-researcher").unwrap(),
        tool_call_id: format!("call-{name}"),
        location: SubLocation::Remote,
        status: SubStatus::Running,
        remote: None,
        deadline: 9_000,
        created_at: 1_000,
    }
}

fn assert_finds_nothing(store: &dyn Store) {
    assert_eq!(store.session().unwrap(), None);
    assert_eq!(store.run("run_1").unwrap(), None);
    assert_eq!(store.checkpoint().unwrap(), None);
    assert!(read(store, 0, 100, ALL).is_empty());
    assert!(store.messages().unwrap().is_empty());
    assert_eq!(store.step().unwrap(), None);
    assert!(!store.tool_call_id_used("a").unwrap());
    assert!(store.sub_sessions().unwrap().is_empty());
    assert_eq!(store.sub_session("c").unwrap(), None);
    assert!(!store.announced("c", Some("t")).unwrap());
    assert!(store.usage().unwrap().is_empty());
    assert_eq!(store.idempotency("k").unwrap(), None);
}

fn answer(text: &str) -> Answer {
    Answer {
        text: text.into(),
        cut: false,
        kept: None,
        then: Vec::new(),
    }
}
