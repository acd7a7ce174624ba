//! Databases as released versions wrote them, kept as SQL text in `tests/fixtures`.
//!
//! The newest file is what this code writes; `UPDATE_FIXTURES=1 cargo test fixtures` writes it
//! anew while its version is not released. An older one never changes.

use std::path::PathBuf;

use super::*;
use crate::protocol::ids::{AgentType, RunId, SessionId, StreamId};
use crate::protocol::message::SessionStatus;
use crate::store::{Answer, Failure, SubLocation, SubRemote, SubStatus, Terminal, ToolOutcome};

fn path(version: u64) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/schema-v{version}.sql"))
}

/// A session with at least one row in every table: what every fixture holds.
fn life() -> Vec<Commit> {
    let mut begun = crate::store::contract::sample_session();
    begun.origin = Rc::new(crate::store::SessionOrigin {
        user_id: Some("user-1".into()),
        tags: Some(vec!["a".into()]),
        ..Default::default()
    });
    let chunk = |n: u64| {
        json!({"type": "text_delta", "delta": format!("word {n} é"), "agentId": "s-1",
               "agentType": "planner", "timestamp": 1_000 + n, "step": 1})
        .to_string()
    };
    let announced = json!({"type": "subagent_start", "subSessionId": "s-1-remote-a", "subAgentType": "thread-researcher",
                           "toolCallId": "a", "remote": true});
    let mut now = begun.clone();
    now.last_sequence = 8;
    now.step_count = 1;
    now.epoch = 2;
    now.last_ordinal = 3;
    now.updated_at = 2_000;
    now.status = SessionStatus::Failed;
    now.failure = Some(Failure {
        code: "run_aborted".into(),
        error: "The run was aborted.".into(),
        detail: None,
    });
    // Above what the session row holds by itself: its parts are in a table of their own.
    now.output = Some(json!("o".repeat(5_000)));
    let call = |id: &str, index| ToolCallRecord {
        call: ToolCall {
            id: id.into(),
            name: "note".into(),
            arguments: json!({"text": "it's"}),
        },
        index,
        begun: 1,
        outcome: None,
        staged: Vec::new(),
    };
    vec![
        Commit {
            fence: None,
            writes: vec![
                Write::Session(begun),
                Write::Run(RunRecord {
                    run_id: RunId::parse("run_1").unwrap(),
                    start_sequence: 0,
                    start_step: 0,
                    started_at: 1_000,
                    terminal: Some(Terminal {
                        status: SessionStatus::Failed,
                        sequence: 8,
                        output: None,
                        state: Some(json!({"n": 1})),
                        usage: None,
                        failure: now.failure.clone(),
                    }),
                }),
                Write::Message(MessageRecord::User {
                    text: "Tell me about tides;\nplease.".into(),
                }),
                Write::Chunks {
                    first: 1,
                    chunks: vec![chunk(1), chunk(2), chunk(3)],
                },
            ],
        },
        Commit {
            fence: Some(1),
            writes: vec![
                Write::Session(now),
                Write::Chunks {
                    first: 4,
                    chunks: vec![chunk(4), announced.to_string()],
                },
                Write::Chunks {
                    first: 6,
                    chunks: vec![chunk(6), chunk(7), chunk(8)],
                },
                Write::Checkpoint(CheckpointRecord {
                    checkpoint_id: "cpv1-s-1-s1-t2000-abcdef".into(),
                    step_count: 1,
                    stream_sequence: 7,
                    patch_ordinal: 3,
                    state: Rc::new(json!({"n": 1, "list": ["x"]})),
                    created_at: 2_000,
                }),
                Write::Step(StepRecord {
                    step: 2,
                    start_sequence: 7,
                    answer: Some(Answer {
                        text: "I will look.".into(),
                        cut: false,
                        kept: None,
                        then: Vec::new(),
                    }),
                }),
                Write::ToolCall(call("a", 0)),
                Write::ToolCall(ToolCallRecord {
                    outcome: Some(ToolOutcome {
                        success: true,
                        result: json!([1]),
                        error: None,
                    }),
                    ..call("b", 1)
                }),
                Write::SubSession(SubSessionRecord {
                    sub_session_id: SessionId::parse("s-1-remote-a").unwrap(),
                    agent_type: AgentType::parse("thread-researcher").unwrap(),
                    tool_call_id: "a".into(),
                    location: SubLocation::Remote,
                    status: SubStatus::Running,
                    remote: Some(SubRemote {
                        stream_id: StreamId::parse("st_child").unwrap(),
                        last_sequence: 4,
                    }),
                    deadline: 9_000,
                    created_at: 1_500,
                }),
                Write::Usage(UsageRecord::Tool {
                    name: "note".into(),
                    success: true,
                    at: 1_700,
                }),
                Write::DueHook(DueHook {
                    run_id: RunId::parse("run_1").unwrap(),
                    status: SessionStatus::Failed,
                    attempts: 1,
                    due_at: 3_000,
                }),
                Write::Idempotency(IdempotencyRecord {
                    key: "start:s-1".into(),
                    digest: "00ff".into(),
                    answer: "{\"runId\":\"run_1\"}".into(),
                    at: 1_000,
                }),
            ],
        },
    ]
}

/// All that a store tells of a session.
fn told(store: &dyn Store) -> String {
    let limit = PageLimit {
        chunks: 1_000,
        bytes: usize::MAX,
    };
    format!(
        "{:#?}",
        (
            store.session().unwrap(),
            store.run("run_1").unwrap(),
            store.checkpoint().unwrap(),
            store.chunks(0, 100, limit).unwrap(),
            store.messages().unwrap(),
            store.step().unwrap(),
            (
                store.tool_call_id_used("b").unwrap(),
                store.announced("s-1-remote-a", None).unwrap()
            ),
            store.sub_sessions().unwrap(),
            store.usage().unwrap(),
            store.idempotency("start:s-1").unwrap(),
        )
    )
}

fn lived() -> (Rc<dyn Database>, Rc<dyn Store>) {
    let database = memory();
    let store = open(database.clone());
    for commit in life() {
        store.commit(&commit).unwrap();
    }
    (database, store)
}

/// The database as SQL text, one statement after another; times of migrations are levelled.
fn dump(database: &dyn Database) -> String {
    database
        .query("UPDATE ra_migrations SET applied_at = 1000", &[])
        .unwrap();
    let text = |cell: &SqlValue| match cell {
        SqlValue::Text(text) => text.clone(),
        other => panic!("not a text: {other:?}"),
    };
    let mut dump = String::new();
    let tables = database
        .query(
            "SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name",
            &[],
        )
        .unwrap();
    for table in &tables {
        let name = text(&table[0]);
        dump.push_str(&format!("{};\n", text(&table[1])));
        let columns = database
            .query(&format!("SELECT group_concat('quote(' || name || ')', ' || '', '' || ') FROM pragma_table_info('{name}')"), &[])
            .unwrap();
        let rows = format!("SELECT {} FROM {name} ORDER BY 1", text(&columns[0][0]));
        for row in database.query(&rows, &[]).unwrap() {
            dump.push_str(&format!("INSERT INTO {name} VALUES ({});\n", text(&row[0])));
        }
    }
    dump
}

/// A database as the fixture of `version` has it.
fn restored(version: u64) -> Rc<dyn Database> {
    let dump = std::fs::read_to_string(path(version))
        .unwrap_or_else(|error| panic!("no fixture of schema version {version}: {error}"));
    let database = memory();
    for statement in statements(&dump) {
        database.query(&statement, &[]).unwrap();
    }
    database
}

/// The statements of a dump: a `;` at the end of a line ends one, unless it is inside a literal.
fn statements(dump: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut one = String::new();
    for line in dump.lines() {
        one.push_str(line);
        if line.ends_with(';') && one.matches('\'').count().is_multiple_of(2) {
            all.push(std::mem::take(&mut one));
        } else {
            one.push('\n');
        }
    }
    all
}

#[test]
fn the_newest_fixture_is_what_this_code_writes() {
    let newest = MIGRATIONS.last().unwrap().version;
    let (database, _) = lived();
    let dump = dump(&*database);
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        std::fs::write(path(newest), &dump).unwrap();
    }
    let kept = std::fs::read_to_string(path(newest)).unwrap();
    assert!(
        kept == dump,
        "schema version {newest} is written otherwise than its fixture says: a released schema does not change"
    );
}

#[test]
fn every_released_schema_is_upgraded_with_all_that_it_holds() {
    let (fresh, store) = lived();
    let expected = told(&*store);
    let shape = |database: &dyn Database| {
        database
            .query(
                "SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name",
                &[],
            )
            .unwrap()
    };
    for migration in MIGRATIONS {
        let version = migration.version;
        let database = restored(version);
        let store = open(database.clone());
        assert_eq!(
            told(&*store),
            expected,
            "from version {version}, by reading"
        );
        assert_eq!(shape(&*database), shape(&*fresh), "from version {version}");

        // A write may be the first access as well, and the session goes on from there.
        let database = restored(version);
        let store = open(database.clone());
        let more = Commit {
            fence: Some(2),
            writes: vec![Write::Chunks {
                first: 9,
                chunks: vec!["{\"type\":\"text_delta\"}".into()],
            }],
        };
        store.commit(&more).unwrap();
        let limit = PageLimit {
            chunks: 100,
            bytes: usize::MAX,
        };
        let log = store.chunks(0, 100, limit).unwrap().chunks;
        let numbers: Vec<u64> = log.iter().map(|(sequence, _)| *sequence).collect();
        assert_eq!(
            numbers,
            (1..=9).collect::<Vec<u64>>(),
            "from version {version}"
        );
        assert_eq!(shape(&*database), shape(&*fresh), "from version {version}");
    }
}
