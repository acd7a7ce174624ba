//! Malformed rows: each is a typed error that names table, column, key and reason, never the
//! content; whatever does not need the row goes on.

use super::*;

type Probe = fn(&dyn Store) -> Result<(), Error>;

/// Everything that reads, by name.
const PROBES: [(&str, Probe); 14] = [
    ("session", |store| store.session().map(drop)),
    ("run", |store| store.run("run_1").map(drop)),
    ("checkpoint", |store| store.checkpoint().map(drop)),
    ("earlier checkpoint", |store| {
        store.checkpoint_up_to(100).map(drop)
    }),
    ("log", |store| store.chunks(0, 100, ALL).map(drop)),
    ("messages", |store| store.messages().map(drop)),
    ("message", |store| store.message_behind(0).map(drop)),
    ("step", |store| store.step().map(drop)),
    ("ids", |store| store.tool_call_id_used("a").map(drop)),
    ("children", |store| store.sub_sessions().map(drop)),
    ("child", |store| store.sub_session("c").map(drop)),
    ("usage", |store| store.usage().map(drop)),
    ("idempotency", |store| store.idempotency("k").map(drop)),
    ("hooks", |store| store.due_hooks().map(drop)),
];

/// A table, its column, what is put there, the key that is told, and who must notice.
type Malformed = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static [&'static str],
);

const SESSION: &[&str] = &["session"];
const LOG: &[&str] = &["log"];
const CHECKPOINTS: &[&str] = &["checkpoint", "earlier checkpoint"];
const HOOKS: &[&str] = &["hooks"];
const CHILDREN: &[&str] = &["children", "child"];

#[rustfmt::skip]
const TABLE: &[Malformed] = &[
    ("ra_session", "session_id", "'not an id: secret'", "1", SESSION),
    ("ra_session", "agent_type", "'not a type: secret'", "1", SESSION),
    ("ra_session", "stream_id", "''", "1", SESSION),
    ("ra_session", "status", "'secret'", "1", SESSION),
    ("ra_session", "run_id", "''", "1", SESSION),
    ("ra_session", "epoch", "'secret'", "1", SESSION),
    ("ra_session", "step_count", "-1", "1", SESSION),
    ("ra_session", "last_sequence", "9007199254740993", "1", SESSION),
    ("ra_session", "floor", "0.5", "1", SESSION),
    ("ra_session", "last_ordinal", "'secret'", "1", SESSION),
    ("ra_session", "attempts", "4294967296", "1", SESSION),
    ("ra_session", "stop", "'{\"kind\":\"secret\"}'", "1", SESSION),
    ("ra_session", "output", "'{secret'", "1", SESSION),
    ("ra_session", "output", "'@2'", "1", SESSION),
    ("ra_session", "failure", "'[]'", "1", SESSION),
    ("ra_session", "origin", "'{\"tags\":\"secret\"}'", "1", SESSION),
    ("ra_session", "created_at", "-7", "1", SESSION),
    ("ra_session", "updated_at", "'secret'", "1", SESSION),
    ("ra_runs", "start_sequence", "'secret'", "run_1", &["run"]),
    ("ra_runs", "start_step", "-1", "run_1", &["run"]),
    ("ra_runs", "started_at", "0.25", "run_1", &["run"]),
    ("ra_runs", "terminal", "'secret'", "run_1", &["run"]),
    ("ra_chunks", "last_sequence", "0", "3", LOG),
    ("ra_chunks", "bytes", "'secret'", "3", LOG),
    ("ra_chunks", "body", "'secret'", "3", LOG),
    ("ra_chunks", "body", "'@1'", "3", LOG),
    ("ra_tail_0", "last_sequence", "'secret'", "1", LOG),
    ("ra_tail_0", "body", "'{}' || char(10) || 'secret'", "1", LOG),
    ("ra_tail_0", "body", "'{}'", "1", LOG),
    ("ra_tail_0", "bytes", "-1", "1", LOG),
    ("ra_tail_1", "body", "'[\"secret\"]'", "4", LOG),
    ("ra_checkpoints", "step_count", "'secret'", "1", CHECKPOINTS),
    ("ra_checkpoints", "stream_sequence", "-1", "1", CHECKPOINTS),
    ("ra_checkpoints", "patch_ordinal", "1.5", "1", CHECKPOINTS),
    ("ra_checkpoints", "created_at", "'secret'", "1", CHECKPOINTS),
    ("ra_checkpoints", "state", "'[\"secret\"]'", "1", CHECKPOINTS),
    ("ra_checkpoints", "state", "'{secret'", "1", CHECKPOINTS),
    ("ra_messages", "body", "'{\"role\":\"secret\"}'", "1", &["messages", "message"]),
    ("ra_step", "step", "'secret'", "1", &["step"]),
    ("ra_step", "start_sequence", "-1", "1", &["step"]),
    ("ra_step", "answer", "'1'", "1", &["step"]),
    ("ra_tool_calls", "call_index", "'secret'", "a", &["step"]),
    ("ra_tool_calls", "started", "'secret'", "a", &["step"]),
    ("ra_tool_calls", "body", "'{\"call\":\"secret\"}'", "a", &["step"]),
    ("ra_tool_calls", "body", "replace(body, '\"id\":\"a\"', '\"id\":\"secret\"')", "a", &["step"]),
    ("ra_sub_sessions", "agent_type", "'not a type: secret'", "c", CHILDREN),
    ("ra_sub_sessions", "location", "'secret'", "c", CHILDREN),
    ("ra_sub_sessions", "status", "'secret'", "c", CHILDREN),
    ("ra_sub_sessions", "remote_last_sequence", "3", "c", CHILDREN),
    ("ra_sub_sessions", "deadline", "'secret'", "c", CHILDREN),
    ("ra_sub_sessions", "created_at", "-1", "c", CHILDREN),
    ("ra_usage", "body", "'{}'", "1", &["usage"]),
    ("ra_idempotency", "at", "'secret'", "k", &["idempotency"]),
    ("ra_due_hooks", "status", "'secret'", "run_1", HOOKS),
    ("ra_due_hooks", "attempts", "4294967296", "run_1", HOOKS),
    ("ra_due_hooks", "due_at", "'secret'", "run_1", HOOKS),
];

fn filled(store: &dyn Store) {
    begun(store);
    let whole = "w".repeat(30_000);
    write(
        store,
        vec![
            chunks(1, &["one", "two"]),
            chunks(3, &[&whole]),
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
            Write::DueHook(due_hook(1, SessionStatus::Completed)),
            Write::Idempotency(IdempotencyRecord {
                key: "k".into(),
                digest: "d".into(),
                answer: "{}".into(),
                at: 1,
            }),
        ],
    );
}

pub(super) fn malformed_rows_are_typed_errors(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    let database = site.sql();
    filled(&*store);
    // The second tail is empty as yet: a row of it as the store would write it.
    database
        .query(
            "INSERT INTO ra_tail_1 SELECT 4, 4, 2, start_byte + bytes + 1, 1000, 66, '{}'
             FROM ra_chunks",
            &[],
        )
        .unwrap();
    for (name, probe) in PROBES {
        assert_eq!(
            probe(&*store),
            Ok(()),
            "{name} before anything is malformed"
        );
    }
    for &(table, column, value, key, noticed) in TABLE {
        let outcome = database.transaction(&mut || {
            database.query(&format!("UPDATE {table} SET {column} = {value}"), &[])?;
            for (name, probe) in PROBES {
                let case = format!("{name} with {table}.{column} = {value}");
                let answer = probe(&*store);
                if !noticed.contains(&name) {
                    assert_eq!(answer, Ok(()), "{case}: it does not need the row");
                    continue;
                }
                let Err(error) = answer else {
                    panic!("{case} was read");
                };
                assert_eq!(error.code, Code::InvalidStoredState, "{case}: {error:?}");
                let at = format!("({table}.{column}, key {key}): ");
                let (_, reason) = error
                    .message
                    .split_once(&at)
                    .unwrap_or_else(|| panic!("{case}: {error} does not name {at}"));
                assert!(reason.len() > 5, "{case}: no reason in {error}");
                assert!(
                    !format!("{error:?}").contains("secret"),
                    "{case}: {error:?}"
                );
            }
            Err(Error::internal("undo"))
        });
        assert_eq!(outcome, Err(Error::internal("undo")));
    }
    let covered = |table: &str| TABLE.iter().any(|(of, ..)| *of == table);
    for row in tables(&site) {
        let SqlValue::Text(name) = &row[1] else {
            panic!("a table without a name");
        };
        // These hold keys alone, or parts of what other rows hold; the versions follow below.
        let keys = [
            "ra_tool_call_ids",
            "ra_announced",
            "ra_parts",
            "ra_migrations",
        ];
        let ours = row[0] == SqlValue::Text("table".into()) && name.starts_with("ra_");
        assert!(
            !ours || covered(name) || keys.contains(&name.as_str()),
            "{name} is not covered"
        );
    }
    let outcome = database.transaction(&mut || {
        database.query("DELETE FROM ra_chunks WHERE first_sequence = 3", &[])?;
        let error = store.chunks(0, 100, ALL).unwrap_err();
        assert_eq!(error.code, Code::InvalidStoredState, "a gap was read over");
        assert!(
            error.message.contains("(ra_tail_1.first_sequence, key 4)"),
            "{error}"
        );
        Err(Error::internal("undo"))
    });
    assert!(outcome.is_err());

    // Without a version nothing of this database can be trusted; another one is not concerned.
    database.query("DELETE FROM ra_migrations", &[]).unwrap();
    let again = (site.open)();
    for (name, probe) in PROBES {
        let error = probe(&*again).expect_err(name);
        assert_eq!(error.code, Code::InvalidStoredState, "{name}");
        assert!(error.message.contains("ra_migrations"), "{name}: {error}");
    }
    assert!(again.commit(&fenced(1, vec![chunks(4, &["x"])])).is_err());
    let (_, other) = subject.fresh();
    filled(&*other);
    assert_eq!(other.chunks(0, 100, ALL).unwrap().chunks.len(), 3);
}

pub(super) fn a_malformed_row_stays_alone(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    let database = site.sql();
    let reader = store.clone();
    let tampered = std::cell::Cell::new(0);
    let all = log::grown(&*store, 1_500, |all| {
        if tampered.get() == 0 && all.len() > 200 {
            let place = database
                .query("SELECT first_sequence, last_sequence FROM ra_tail_0 WHERE first_sequence > 100 LIMIT 1", &[])
                .unwrap();
            let [SqlValue::Integer(first), SqlValue::Integer(_)] = place[0][..] else {
                panic!("no row to tamper with: {place:?}");
            };
            let change =
                format!("UPDATE ra_tail_0 SET body = 'torn' WHERE first_sequence = {first}");
            database.query(&change, &[]).unwrap();
            tampered.set(u64::try_from(first).unwrap());
        }
    });
    let tampered = tampered.get();
    let packed = database
        .query(
            &format!("SELECT last_sequence FROM ra_chunks WHERE first_sequence = {tampered}"),
            &[],
        )
        .unwrap();
    let [SqlValue::Integer(last)] = packed[0][..] else {
        panic!("the row was not packed by itself: {packed:?}");
    };
    let last = u64::try_from(last).unwrap();
    assert!(last - tampered < 25, "it took its neighbours with it");
    let before = read(&*reader, 0, tampered - 1, ALL);
    assert!(before == all[..usize::try_from(tampered - 1).unwrap()]);
    let after = read(&*reader, last, 1 << 52, ALL);
    assert!(after == all[usize::try_from(last).unwrap()..]);
    let error = store.chunks(0, 1 << 52, ALL).unwrap_err();
    assert_eq!(error.code, Code::InvalidStoredState);
    assert!(
        error.message.contains(&format!("key {tampered}")),
        "{error}"
    );
}
