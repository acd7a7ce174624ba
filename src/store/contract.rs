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

use std::rc::Rc;

use serde_json::{Value, json};

use super::{
    Answer, CheckpointRecord, Commit, CommitError, Database, Epoch, Failure, IdempotencyRecord,
    MessageRecord, PageLimit, RunRecord, SessionOrigin, SessionRecord, SqlValue, StagedPatch,
    StepRecord, Stop, StopKind, Store, SubLocation, SubRemote, SubSessionRecord, SubStatus,
    Terminal, ToolCall, ToolCallRecord, ToolOutcome, UsageRecord, Write,
};
use crate::error::{Code, Error};
use crate::protocol::chunk::PatchOperation;
use crate::protocol::ids::{AgentType, RunId, Sequence, SessionId, StreamId};
use crate::protocol::message::{ParentRef, SessionStatus};
use crate::protocol::usage::{RollupOrigin, Tokens, UsageRollup};

/// The store under test.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// Makes an empty database.
    pub database: &'a dyn Fn() -> Rc<dyn Database>,
    /// Opens a store over a database, which may hold what an earlier store wrote.
    pub open: &'a dyn Fn(Rc<dyn Database>) -> Rc<dyn Store>,
}

impl Subject<'_> {
    fn fresh(&self) -> (Rc<dyn Database>, Rc<dyn Store>) {
        let database = (self.database)();
        (database.clone(), (self.open)(database))
    }
}

/// One case.
pub type Case = fn(Subject<'_>);

/// All cases by name.
pub const CASES: &[(&str, Case)] = &[
    (
        "reads leave an empty database empty",
        reads_leave_an_empty_database_empty,
    ),
    (
        "every record reads back as written",
        every_record_reads_back_as_written,
    ),
    (
        "a later write of a record replaces it",
        a_later_write_replaces,
    ),
    (
        "a commit that fails half-way writes nothing",
        a_commit_that_fails_half_way_writes_nothing,
    ),
    (
        "the fence keeps an earlier epoch out",
        the_fence_keeps_an_earlier_epoch_out,
    ),
    (
        "a cursor is exclusive at every sequence",
        a_cursor_is_exclusive_at_every_sequence,
    ),
    (
        "pages keep to their limits and join without a gap",
        pages_keep_to_their_limits,
    ),
    (
        "sequences are never issued twice nor skipped",
        sequences_are_never_issued_twice,
    ),
    (
        "rows above the platform's limit are kept",
        rows_above_the_limit_are_kept,
    ),
    (
        "a cleared step keeps its ids used",
        a_cleared_step_keeps_its_ids_used,
    ),
    ("announced children are found", announced_children_are_found),
    ("a reopened store goes on", a_reopened_store_goes_on),
    (
        "a commit is part of an outer transaction",
        a_commit_is_part_of_an_outer_transaction,
    ),
    (
        "an agent's own tables share the transaction",
        an_agents_own_tables_share_the_transaction,
    ),
    (
        "a database of a later version is refused",
        a_database_of_a_later_version_is_refused,
    ),
    (
        "malformed rows are typed errors",
        malformed_rows_are_typed_errors,
    ),
];

/// Puts a store through every case.
///
/// # Panics
/// When the store breaks a promise.
pub fn run(subject: Subject<'_>) {
    for (_, case) in CASES {
        case(subject);
    }
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

fn tables(database: &dyn Database) -> Vec<Vec<SqlValue>> {
    database
        .query(
            "SELECT type, name, sql FROM sqlite_master ORDER BY name",
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
        started: false,
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
    assert!(!store.announced("c", "t").unwrap());
    assert!(store.usage().unwrap().is_empty());
    assert_eq!(store.idempotency("k").unwrap(), None);
}

fn reads_leave_an_empty_database_empty(subject: Subject<'_>) {
    let (database, store) = subject.fresh();
    assert_finds_nothing(&*store);
    let fence = store.commit(&fenced(1, vec![Write::Session(session(1, 0))]));
    assert_eq!(fence, Err(CommitError::Fenced { expected: 1 }));
    assert_finds_nothing(&*store);
    assert!(
        tables(&*database).is_empty(),
        "a read or a refusal made a table"
    );
}

fn every_record_reads_back_as_written(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    let mut full = session(2, 7);
    full.status = SessionStatus::Failed;
    full.step_count = 3;
    full.floor = 2;
    full.last_ordinal = (1 << 53) - 1;
    full.attempts = 4;
    full.stop = Some(Stop {
        kind: StopKind::Abort,
        reason: Some("enough".into()),
    });
    full.output = Some(json!({"report": ["é", null, 1.5, 9_007_199_254_740_991u64]}));
    full.failure = Some(Failure {
        code: "run_aborted".into(),
        error: "Stopped.".into(),
        detail: None,
    });
    let run = RunRecord {
        run_id: run_id(2),
        start_sequence: 5,
        start_step: 3,
        started_at: 1_500,
        terminal: Some(Terminal {
            status: SessionStatus::Completed,
            sequence: 7,
            output: Some(json!("done")),
            state: Some(json!({"phase": "done"})),
            usage: Some(UsageRollup::default()),
            failure: None,
        }),
    };
    let saved = checkpoint(3, json!({"b": 1, "a": [true, {"deep": null}]}));
    let messages = vec![
        MessageRecord::User {
            text: "hello\nworld".into(),
        },
        MessageRecord::Assistant {
            text: String::new(),
            tool_calls: vec![call("a", 0, json!({"q": 1})).call],
            cut: true,
        },
        MessageRecord::Tool {
            tool_call_id: "a".into(),
            tool_name: "note".into(),
            outcome: ToolOutcome {
                success: false,
                result: Value::Null,
                error: Some("no".into()),
            },
        },
    ];
    let mut answered = step(4);
    answered.start_sequence = 6;
    answered.answer = Some(Answer {
        text: "I will look.".into(),
        cut: false,
    });
    let mut done = call("b", 1, json!({}));
    done.started = true;
    done.outcome = Some(ToolOutcome {
        success: true,
        result: json!([1]),
        error: None,
    });
    done.staged = vec![StagedPatch {
        ordinal: 9,
        patches: vec![PatchOperation {
            op: "add".into(),
            path: "/a/-".into(),
            from: None,
            value: Some(Value::Null),
        }],
    }];
    let calls = vec![
        call("z", 0, json!("not an object")),
        done,
        call("a", 2, json!({})),
    ];
    let mut forwarded = child("c-2");
    forwarded.remote = Some(SubRemote {
        stream_id: StreamId::parse("st_child").unwrap(),
        last_sequence: 12,
    });
    forwarded.status = SubStatus::Stopping;
    let mut local = child("c-1");
    local.location = SubLocation::Local;
    let usage = vec![
        UsageRecord::Model {
            model: "offline".into(),
            tokens: Tokens {
                prompt: 1,
                completion: 2,
                reasoning: 0,
                cached: 0,
                total: 3,
            },
            at: 1,
        },
        UsageRecord::Tool {
            name: "note".into(),
            success: true,
            at: 2,
        },
        UsageRecord::SubAgent {
            sub_session_id: "c-1".into(),
            sub_agent_type: "thread-researcher".into(),
            tool_call_id: "a".into(),
            rollup: Some(Box::default()),
            origin: RollupOrigin::Recovery,
            at: 3,
        },
    ];
    let answer = IdempotencyRecord {
        key: "start:s-1".into(),
        digest: "00ff".into(),
        answer: "{\"runId\":\"run_1\"}".into(),
        at: 4,
    };
    let mut writes = vec![
        Write::Session(full.clone()),
        Write::Run(run.clone()),
        Write::Checkpoint(saved.clone()),
        Write::Step(answered.clone()),
        Write::SubSession(forwarded.clone()),
        Write::SubSession(local.clone()),
        Write::Idempotency(answer.clone()),
    ];
    writes.extend(messages.iter().cloned().map(Write::Message));
    // Stored in another order than that of the calls.
    writes.extend(calls.iter().rev().cloned().map(Write::ToolCall));
    writes.extend(usage.iter().cloned().map(Write::Usage));
    write(&*store, writes);

    assert_eq!(store.session().unwrap(), Some(full));
    assert_eq!(store.run("run_2").unwrap(), Some(run));
    assert_eq!(store.checkpoint().unwrap(), Some(saved));
    assert_eq!(store.messages().unwrap(), messages);
    assert_eq!(store.step().unwrap(), Some((answered, calls)));
    assert_eq!(store.sub_sessions().unwrap(), [forwarded, local.clone()]);
    assert_eq!(store.sub_session("c-1").unwrap(), Some(local));
    assert_eq!(store.usage().unwrap(), usage);
    assert_eq!(store.idempotency("start:s-1").unwrap(), Some(answer));
    assert_eq!(store.idempotency("start:s").unwrap(), None);

    let (_, other) = subject.fresh();
    let mut handed_down = session(1, 0);
    handed_down.origin = Rc::new(SessionOrigin {
        parent: Some(ParentRef {
            session_id: id(),
            stream_id: StreamId::parse("st_0").unwrap(),
            tool_call_id: "call".into(),
        }),
        user_id: Some("u".into()),
        tags: Some(vec!["t".into()]),
        metadata: json!({"m": [1]}).as_object().cloned(),
    });
    let first = Commit {
        fence: None,
        writes: vec![Write::Session(handed_down.clone())],
    };
    other.commit(&first).unwrap();
    assert_eq!(other.session().unwrap(), Some(handed_down.clone()));
    handed_down.last_sequence = 1;
    write(&*other, vec![Write::Session(handed_down.clone())]);
    assert_eq!(
        other.session().unwrap(),
        Some(handed_down),
        "the origin stays"
    );
}

fn a_later_write_replaces(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    let open = RunRecord {
        run_id: run_id(1),
        start_sequence: 0,
        start_step: 0,
        started_at: 1,
        terminal: None,
    };
    write(
        &*store,
        vec![
            Write::Run(open.clone()),
            Write::Step(step(1)),
            Write::ToolCall(call("a", 0, json!({}))),
            Write::SubSession(child("c-1")),
            Write::SubSession(child("c-2")),
        ],
    );
    let mut first = child("c-1");
    first.status = SubStatus::Completed;
    let mut started = call("a", 0, json!({}));
    started.started = true;
    let mut answered = step(1);
    answered.answer = Some(answer("yes"));
    for number in 1..=4 {
        write(
            &*store,
            vec![Write::Checkpoint(checkpoint(number, json!({"n": number})))],
        );
        let latest = store.checkpoint().unwrap().unwrap();
        assert_eq!(
            latest.step_count, number,
            "the last written checkpoint is the latest"
        );
        assert_eq!(*latest.state, json!({"n": number}));
    }
    write(
        &*store,
        vec![
            Write::SubSession(first.clone()),
            Write::ToolCall(started.clone()),
            Write::Step(answered.clone()),
        ],
    );
    assert_eq!(
        store.sub_sessions().unwrap(),
        [first, child("c-2")],
        "the order is that of making"
    );
    assert_eq!(store.step().unwrap(), Some((answered, vec![started])));
    assert_eq!(store.run("run_1").unwrap(), Some(open));
}

fn answer(text: &str) -> Answer {
    Answer {
        text: text.into(),
        cut: false,
    }
}

fn a_commit_that_fails_half_way_writes_nothing(subject: Subject<'_>) {
    let (database, store) = subject.fresh();
    // The very first commit: not even the tables stay.
    let mut broken = create();
    broken.writes.push(chunks(0, &["no sequence is 0"]));
    assert!(matches!(store.commit(&broken), Err(CommitError::Failed(_))));
    assert!(
        tables(&*database).is_empty(),
        "a failed first commit left tables"
    );
    assert_finds_nothing(&*store);

    begun(&*store);
    write(
        &*store,
        vec![Write::Session(session(1, 1)), chunks(1, &["one"])],
    );
    let before = store.session().unwrap();
    // Every kind of write comes before the one that fails: a sequence that was issued already.
    let outcome = store.commit(&fenced(
        1,
        vec![
            Write::Session(session(5, 2)),
            Write::Run(RunRecord {
                run_id: run_id(1),
                start_sequence: 0,
                start_step: 0,
                started_at: 1,
                terminal: None,
            }),
            chunks(2, &["two"]),
            Write::Checkpoint(checkpoint(1, json!({}))),
            Write::Message(MessageRecord::User { text: "x".into() }),
            Write::Step(step(1)),
            Write::ToolCall(call("a", 0, json!({"big": "x".repeat(2_000_000)}))),
            Write::SubSession(child("c")),
            Write::Usage(UsageRecord::Tool {
                name: "n".into(),
                success: true,
                at: 1,
            }),
            Write::Idempotency(IdempotencyRecord {
                key: "k".into(),
                digest: String::new(),
                answer: String::new(),
                at: 1,
            }),
            chunks(1, &["again"]),
        ],
    ));
    assert!(
        matches!(outcome, Err(CommitError::Failed(_))),
        "{outcome:?}"
    );
    assert_eq!(store.session().unwrap(), before);
    assert_eq!(read(&*store, 0, 100, ALL), [(1, text_chunk("one"))]);
    assert_eq!(store.run("run_1").unwrap(), None);
    assert_eq!(store.checkpoint().unwrap(), None);
    assert!(store.messages().unwrap().is_empty());
    assert_eq!(store.step().unwrap(), None);
    assert!(!store.tool_call_id_used("a").unwrap());
    assert!(store.sub_sessions().unwrap().is_empty());
    assert!(store.usage().unwrap().is_empty());
    assert_eq!(store.idempotency("k").unwrap(), None);
    // The store is as usable as before.
    write(&*store, vec![chunks(2, &["two"])]);
    assert_eq!(read(&*store, 1, 100, ALL), [(2, text_chunk("two"))]);
}

fn the_fence_keeps_an_earlier_epoch_out(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    assert!(
        matches!(store.commit(&create()), Err(CommitError::Fenced { .. })),
        "a session cannot be begun twice"
    );
    store
        .commit(&fenced(1, vec![Write::Session(session(2, 0))]))
        .unwrap();
    let late = fenced(1, vec![chunks(1, &["late"]), Write::Session(session(1, 1))]);
    assert_eq!(
        store.commit(&late),
        Err(CommitError::Fenced { expected: 1 })
    );
    let early = fenced(3, vec![chunks(1, &["early"])]);
    assert_eq!(
        store.commit(&early),
        Err(CommitError::Fenced { expected: 3 })
    );
    assert!(read(&*store, 0, 100, ALL).is_empty());
    assert_eq!(
        store.session().unwrap().map(|session| session.epoch),
        Some(2)
    );
    store
        .commit(&fenced(2, vec![chunks(1, &["in time"])]))
        .unwrap();
}

/// A log of 30 chunks in commits of many sizes.
fn filled(store: &dyn Store) -> Vec<(Sequence, String)> {
    begun(store);
    let mut all = Vec::new();
    let mut next = 1;
    for size in [1, 2, 1, 7, 3, 1, 10, 5] {
        let texts: Vec<String> = (0..size)
            .map(|n| format!("{n} of {size}: \"é\"\n"))
            .collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        write(store, vec![chunks(next, &texts)]);
        for text in texts {
            all.push((next, text_chunk(text)));
            next += 1;
        }
    }
    assert_eq!(all.len(), 30);
    all
}

fn a_cursor_is_exclusive_at_every_sequence(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    let all = filled(&*store);
    for after in 0..=31u64 {
        for until in [after, after + 1, after + 3, 30, 1 << 52] {
            let expected: Vec<_> = all
                .iter()
                .filter(|(sequence, _)| *sequence > after && *sequence <= until)
                .cloned()
                .collect();
            let found = read(&*store, after, until, ALL);
            assert_eq!(found, expected, "above {after} up to {until}");
        }
    }
}

fn pages_keep_to_their_limits(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    let all = filled(&*store);
    for chunks in [1, 2, 3, 7, 29, 30, 31] {
        let limit = PageLimit { chunks, ..ALL };
        let mut joined = Vec::new();
        while let Some(page) = next_page(&*store, &joined, limit) {
            let left = all.len() - joined.len();
            assert_eq!(
                page.len(),
                chunks.min(left),
                "a page is as full as it may be"
            );
            joined.extend(page);
        }
        assert_eq!(joined, all);
    }
    for bytes in [0, 1, 50, 100, 150, 333, 5_000] {
        let limit = PageLimit { bytes, ..ALL };
        let mut joined = Vec::new();
        while let Some(page) = next_page(&*store, &joined, limit) {
            let sizes: Vec<usize> = page.iter().map(|(_, chunk)| chunk.len()).collect();
            let without_last: usize = sizes[..sizes.len() - 1].iter().sum();
            let total: usize = sizes.iter().sum();
            assert!(without_last <= bytes, "the page went on over its limit");
            let complete = joined.len() + page.len() == all.len();
            assert!(
                total > bytes || complete,
                "the page stopped before its limit"
            );
            joined.extend(page);
        }
        assert_eq!(joined, all);
    }
    let nothing = PageLimit { chunks: 0, ..ALL };
    assert!(read(&*store, 0, 30, nothing).is_empty());
}

fn next_page(
    store: &dyn Store,
    so_far: &[(Sequence, String)],
    limit: PageLimit,
) -> Option<Vec<(Sequence, String)>> {
    let after = so_far.last().map_or(0, |(sequence, _)| *sequence);
    Some(read(store, after, 1 << 52, limit)).filter(|page| !page.is_empty())
}

fn sequences_are_never_issued_twice(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    write(&*store, vec![chunks(1, &["one", "two"])]);
    for first in [0, 1, 2, 4, 9] {
        let outcome = store.commit(&fenced(1, vec![chunks(first, &["x"])]));
        assert!(
            matches!(outcome, Err(CommitError::Failed(_))),
            "from {first}"
        );
    }
    for bad in ["", "[]", "{\n}", "{\"a\":1}\n{\"b\":2}"] {
        let write = Write::Chunks {
            first: 3,
            chunks: vec![bad.into()],
        };
        let outcome = store.commit(&fenced(1, vec![write]));
        assert!(matches!(outcome, Err(CommitError::Failed(_))), "{bad:?}");
    }
    write(&*store, vec![chunks(3, &[])]);
    write(&*store, vec![chunks(3, &["three"]), chunks(4, &["four"])]);
    assert_eq!(read(&*store, 2, 100, ALL).len(), 2);
}

fn rows_above_the_limit_are_kept(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    // Three bytes a character: no part may be cut inside one.
    let huge = "日本語".repeat(500_000);
    let medium = "m".repeat(200_000);
    let log: Vec<String> = [&medium, &medium, &huge, "small", &medium, &medium, &medium]
        .into_iter()
        .map(text_chunk)
        .collect();
    let state = json!({"text": huge, "list": vec![medium.clone(); 3]});
    let mut big_call = call("a/b", 0, json!({"q": medium}));
    big_call.outcome = Some(ToolOutcome {
        success: true,
        result: json!(huge),
        error: None,
    });
    let mut big_session = session(1, 7);
    big_session.output = Some(json!(huge));
    let big_message = MessageRecord::User { text: huge.clone() };
    let mut big_step = step(1);
    big_step.answer = Some(answer(&huge));
    let terminal = Terminal {
        status: SessionStatus::Completed,
        sequence: 7,
        output: Some(json!(huge)),
        state: None,
        usage: None,
        failure: None,
    };
    let mut ended = RunRecord {
        run_id: run_id(1),
        start_sequence: 0,
        start_step: 0,
        started_at: 1,
        terminal: Some(terminal),
    };
    write(
        &*store,
        vec![
            Write::Chunks {
                first: 1,
                chunks: log.clone(),
            },
            Write::Checkpoint(checkpoint(1, state.clone())),
            Write::Step(big_step.clone()),
            Write::ToolCall(big_call.clone()),
            Write::Session(big_session.clone()),
            Write::Message(big_message.clone()),
            Write::Message(MessageRecord::User {
                text: "next".into(),
            }),
            Write::Run(ended.clone()),
        ],
    );
    let expected: Vec<(Sequence, String)> = (1..).zip(log.iter().cloned()).collect();
    assert_eq!(read(&*store, 0, 100, ALL), expected);
    for after in 0..7 {
        let one = PageLimit { chunks: 1, ..ALL };
        let index = usize::try_from(after).unwrap();
        assert_eq!(read(&*store, after, 100, one), expected[index..=index]);
    }
    let few = PageLimit {
        bytes: 300_000,
        ..ALL
    };
    assert_eq!(read(&*store, 0, 100, few), expected[..2]);
    assert_eq!(
        store.checkpoint().unwrap().map(|c| (*c.state).clone()),
        Some(state)
    );
    assert_eq!(
        store.step().unwrap(),
        Some((big_step, vec![big_call.clone()]))
    );
    assert_eq!(store.session().unwrap(), Some(big_session.clone()));
    assert_eq!(store.messages().unwrap()[0], big_message);
    assert_eq!(store.run("run_1").unwrap(), Some(ended.clone()));

    // Written again smaller, or cleared, nothing of the large text comes back.
    big_call.outcome = None;
    big_session.output = None;
    ended.terminal = None;
    write(
        &*store,
        vec![
            Write::ToolCall(big_call.clone()),
            Write::Step(step(1)),
            Write::Session(big_session.clone()),
            Write::Run(ended.clone()),
        ],
    );
    assert_eq!(store.step().unwrap(), Some((step(1), vec![big_call])));
    assert_eq!(store.session().unwrap(), Some(big_session));
    assert_eq!(store.run("run_1").unwrap(), Some(ended));
}

fn a_cleared_step_keeps_its_ids_used(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    let big = json!({"x": "x".repeat(2_000_000)});
    write(
        &*store,
        vec![Write::Step(step(1)), Write::ToolCall(call("a", 0, big))],
    );
    write(&*store, vec![Write::ClearStep]);
    assert_eq!(store.step().unwrap(), None);
    write(
        &*store,
        vec![
            Write::Step(step(2)),
            Write::ToolCall(call("b", 0, json!({}))),
        ],
    );
    let (_, calls) = store.step().unwrap().unwrap();
    assert_eq!(
        calls,
        [call("b", 0, json!({}))],
        "calls of a cleared step are gone"
    );
    assert!(store.tool_call_id_used("a").unwrap());
    assert!(store.tool_call_id_used("b").unwrap());
    assert!(!store.tool_call_id_used("A").unwrap());
}

fn announced_children_are_found(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    let start = |child: &str, kind: &str| json!({"type": "subagent_start", "subSessionId": child, "subAgentType": kind, "toolCallId": "t", "remote": true});
    let mut forwarded = start("grandchild", "reader");
    forwarded["remoteSource"] =
        json!({"childSessionId": "child", "childSequence": 2, "streamId": "st"});
    let nested = json!({"type": "custom", "eventName": "x", "data": start("fake", "reader")});
    let said = json!({"type": "text_delta", "delta": start("said", "reader").to_string()});
    let odd = json!({"type": "subagent_start", "subSessionId": 7});
    let list = [
        start("child", "planner"),
        forwarded,
        nested,
        said,
        odd,
        start("child", "planner"),
    ];
    write(
        &*store,
        vec![Write::Chunks {
            first: 1,
            chunks: list.iter().map(Value::to_string).collect(),
        }],
    );
    assert!(store.announced("child", "planner").unwrap());
    assert!(store.announced("grandchild", "reader").unwrap());
    assert!(!store.announced("child", "reader").unwrap());
    assert!(!store.announced("fake", "reader").unwrap());
    assert!(!store.announced("said", "reader").unwrap());
    assert_eq!(read(&*store, 0, 100, ALL).len(), list.len());
}

fn a_reopened_store_goes_on(subject: Subject<'_>) {
    let (database, store) = subject.fresh();
    let all = filled(&*store);
    let before = store.session().unwrap();
    drop(store);
    let again = (subject.open)(database.clone());
    assert_eq!(again.session().unwrap(), before);
    assert_eq!(read(&*again, 0, 100, ALL), all);
    let first_write = (subject.open)(database);
    assert!(
        first_write.commit(&create()).is_err(),
        "the session is there already"
    );
    write(&*first_write, vec![chunks(31, &["more"])]);
    assert_eq!(read(&*again, 30, 100, ALL), [(31, text_chunk("more"))]);
}

fn a_commit_is_part_of_an_outer_transaction(subject: Subject<'_>) {
    let (database, store) = subject.fresh();
    let undo = || Err(Error::internal("undo"));
    // The first commit with its tables is undone with the rest.
    let outcome = store.database().transaction(&mut || {
        begun(&*store);
        write(&*store, vec![chunks(1, &["one"])]);
        assert_eq!(
            read(&*store, 0, 100, ALL).len(),
            1,
            "the transaction reads its own writes"
        );
        undo()
    });
    assert_eq!(outcome, undo());
    assert!(tables(&*database).is_empty());
    assert_finds_nothing(&*store);

    begun(&*store);
    let outcome = store.database().transaction(&mut || {
        write(&*store, vec![chunks(1, &["kept"])]);
        let refused = store.commit(&fenced(1, vec![chunks(2, &["x"]), chunks(2, &["x"])]));
        assert!(refused.is_err());
        Ok(())
    });
    assert_eq!(outcome, Ok(()));
    assert_eq!(
        read(&*store, 0, 100, ALL),
        [(1, text_chunk("kept"))],
        "a refused commit undoes itself alone"
    );
    let outcome = store.database().transaction(&mut || {
        write(&*store, vec![chunks(2, &["gone"])]);
        undo()
    });
    assert_eq!(outcome, undo());
    write(&*store, vec![chunks(2, &["two"])]);
    assert_eq!(read(&*store, 1, 100, ALL), [(2, text_chunk("two"))]);
}

fn an_agents_own_tables_share_the_transaction(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    let database = store.database();
    database
        .query("CREATE TABLE notes (body TEXT)", &[])
        .unwrap();
    assert_finds_nothing(&*store);
    begun(&*store);
    let outcome = database.transaction(&mut || {
        database.query("INSERT INTO notes VALUES ('lost')", &[])?;
        store
            .commit(&fenced(7, vec![chunks(1, &["lost"])]))
            .map_err(Error::from)
    });
    assert!(outcome.is_err());
    database
        .transaction(&mut || {
            database.query("INSERT INTO notes VALUES ('kept')", &[])?;
            store
                .commit(&fenced(1, vec![chunks(1, &["kept"])]))
                .map_err(Error::from)
        })
        .unwrap();
    let notes = database.query("SELECT body FROM notes", &[]).unwrap();
    assert_eq!(notes, [[SqlValue::Text("kept".into())]]);
    assert_eq!(read(&*store, 0, 100, ALL).len(), 1);
}

fn a_database_of_a_later_version_is_refused(subject: Subject<'_>) {
    let (database, store) = subject.fresh();
    begun(&*store);
    database
        .query(
            "INSERT INTO ra_migrations (version, applied_at) VALUES (9999, 1)",
            &[],
        )
        .unwrap();
    database.query("DROP TABLE ra_usage", &[]).unwrap();
    let before = tables(&*database);
    let older = (subject.open)(database.clone());
    assert_eq!(older.session().unwrap_err().code, Code::InvalidStoredState);
    match older.commit(&fenced(1, vec![chunks(1, &["x"])])) {
        Err(CommitError::Failed(error)) => assert_eq!(error.code, Code::InvalidStoredState),
        other => panic!("a later version's database was written to: {other:?}"),
    }
    assert_eq!(
        tables(&*database),
        before,
        "the later version's tables are as they were"
    );
    let rows = database
        .query("SELECT COUNT(*) FROM ra_chunks", &[])
        .unwrap();
    assert_eq!(rows, [[SqlValue::Integer(0)]]);
}

fn malformed_rows_are_typed_errors(subject: Subject<'_>) {
    let (database, store) = subject.fresh();
    begun(&*store);
    write(
        &*store,
        vec![
            chunks(1, &["one", "two"]),
            chunks(3, &["three"]),
            chunks(4, &["four"]),
            Write::Checkpoint(checkpoint(1, json!({}))),
            Write::Message(MessageRecord::User { text: "x".into() }),
            Write::Step(step(1)),
            Write::ToolCall(call("a", 0, json!({}))),
            Write::SubSession(child("c")),
            Write::Usage(UsageRecord::Tool {
                name: "n".into(),
                success: true,
                at: 1,
            }),
            Write::Run(RunRecord {
                run_id: run_id(1),
                start_sequence: 0,
                start_step: 0,
                started_at: 1,
                terminal: None,
            }),
        ],
    );
    type Probe = fn(&dyn Store) -> Option<Error>;
    let session: Probe = |store| store.session().err();
    let log: Probe = |store| store.chunks(0, 100, ALL).err();
    let latest: Probe = |store| store.checkpoint().err();
    let step: Probe = |store| store.step().err();
    let sub: Probe = |store| store.sub_session("c").err();
    let cases: [(&str, &str, Probe); 18] = [
        ("ra_session", "status = 'secret'", session),
        ("ra_session", "agent_type = 'not a type'", session),
        ("ra_session", "epoch = 'secret'", session),
        ("ra_session", "last_sequence = -1", session),
        ("ra_session", "origin = '{\"tags\":\"secret\"}'", session),
        ("ra_session", "output = '@2'", session),
        ("ra_chunks", "last_sequence = 9", log),
        ("ra_chunks", "body = 'secret'", log),
        ("ra_chunks", "body = '{}' || char(10) || 'secret'", log),
        ("ra_checkpoints", "state = '[\"secret\"]'", latest),
        ("ra_checkpoints", "state = '{secret'", latest),
        ("ra_messages", "body = '{\"role\":\"secret\"}'", |store| {
            store.messages().err()
        }),
        ("ra_step", "answer = '1'", step),
        ("ra_tool_calls", "body = '{\"call\":\"secret\"}'", step),
        ("ra_sub_sessions", "status = 'secret'", sub),
        ("ra_sub_sessions", "remote_last_sequence = 3", sub),
        ("ra_usage", "body = '{}'", |store| store.usage().err()),
        ("ra_runs", "terminal = 'secret'", |store| {
            store.run("run_1").err()
        }),
    ];
    for (table, change, probe) in cases {
        assert_eq!(probe(&*store), None, "{table} before {change}");
        let outcome = database.transaction(&mut || {
            database.query(&format!("UPDATE {table} SET {change}"), &[])?;
            let error = probe(&*store).unwrap_or_else(|| panic!("{table} with {change} was read"));
            assert_eq!(
                error.code,
                Code::InvalidStoredState,
                "{table} {change}: {error:?}"
            );
            assert!(
                error.message.contains(table),
                "{table} is not named: {error}"
            );
            assert!(
                !format!("{error:?}").contains("secret"),
                "content was told: {error:?}"
            );
            Err(Error::internal("undo"))
        });
        assert!(outcome.is_err());
    }
    let outcome = database.transaction(&mut || {
        database.query("DELETE FROM ra_chunks WHERE first_sequence = 3", &[])?;
        let error = log(&*store).expect("a gap in the log was read over");
        assert_eq!(error.code, Code::InvalidStoredState);
        Err(Error::internal("undo"))
    });
    assert!(outcome.is_err());
}
