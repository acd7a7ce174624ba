//! Commits: whole or not at all, fenced, and part of what is around them.

use super::*;

pub(super) fn reads_leave_an_empty_database_empty(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    assert_finds_nothing(&*store);
    let fence = store.commit(&fenced(1, vec![Write::Session(session(1, 0))]));
    assert_eq!(fence, Err(CommitError::Fenced { expected: 1 }));
    assert_finds_nothing(&*store);
    assert!(tables(&site).is_empty(), "a read or a refusal made a table");
}

pub(super) fn a_commit_that_fails_half_way_writes_nothing(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    // The very first commit: not even the tables stay.
    let mut broken = create();
    broken.writes.push(chunks(0, &["no sequence is 0"]));
    assert!(matches!(store.commit(&broken), Err(CommitError::Failed(_))));
    assert!(
        tables(&site).is_empty(),
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
            Write::DueHook(due_hook(1, SessionStatus::Completed)),
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
    assert_eq!(store.due_hooks().unwrap(), []);
    // The store is as usable as before.
    write(&*store, vec![chunks(2, &["two"])]);
    assert_eq!(read(&*store, 1, 100, ALL), [(2, text_chunk("two"))]);
}

pub(super) fn the_fence_keeps_an_earlier_epoch_out(subject: Subject<'_>) {
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

pub(super) fn a_reopened_store_goes_on(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    let all = log::filled(&*store);
    let before = store.session().unwrap();
    drop(store);
    let again = (site.open)();
    assert_eq!(again.session().unwrap(), before);
    assert_eq!(read(&*again, 0, 100, ALL), all);
    let first_write = (site.open)();
    assert!(
        first_write.commit(&create()).is_err(),
        "the session is there already"
    );
    write(&*first_write, vec![chunks(31, &["more"])]);
    assert_eq!(read(&*again, 30, 100, ALL), [(31, text_chunk("more"))]);
}

pub(super) fn a_commit_is_part_of_an_outer_transaction(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
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
    assert!(tables(&site).is_empty());
    assert_finds_nothing(&*store);
    let outcome = store.database().transaction(&mut || {
        begun(&*store);
        undo()
    });
    assert_eq!(outcome, undo());

    // No read has told the store that its tables are gone again.
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

pub(super) fn an_agents_own_tables_share_the_transaction(subject: Subject<'_>) {
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

pub(super) fn a_database_of_a_later_version_is_refused(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    let database = site.sql();
    begun(&*store);
    database
        .query(
            "INSERT INTO ra_migrations (version, applied_at) VALUES (9999, 1)",
            &[],
        )
        .unwrap();
    database.query("DROP TABLE ra_usage", &[]).unwrap();
    let before = tables(&site);
    let older = (site.open)();
    assert_eq!(older.session().unwrap_err().code, Code::InvalidStoredState);
    match older.commit(&fenced(1, vec![chunks(1, &["x"])])) {
        Err(CommitError::Failed(error)) => assert_eq!(error.code, Code::InvalidStoredState),
        other => panic!("a later version's database was written to: {other:?}"),
    }
    assert_eq!(
        tables(&site),
        before,
        "the later version's tables are as they were"
    );
    let deleted = older.delete_all(&mut |_| panic!("nothing of it may be deleted"));
    assert_eq!(deleted.unwrap_err().code, Code::InvalidStoredState);
    let rows = database
        .query(
            "SELECT (SELECT COUNT(*) FROM ra_chunks) + (SELECT COUNT(*) FROM ra_tail_0), COUNT(*) FROM ra_session",
            &[],
        )
        .unwrap();
    assert_eq!(rows, [[SqlValue::Integer(0), SqlValue::Integer(1)]]);
}

pub(super) fn sql_is_there_or_refused(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    let answer = store.database().query("SELECT 1", &[]);
    match &site.database {
        Some(_) => assert_eq!(answer.unwrap(), [[SqlValue::Integer(1)]]),
        None => assert_eq!(answer.unwrap_err().code, Code::NotSupported),
    }
}
