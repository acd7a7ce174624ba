//! Deletion: all of it, or nothing.

use super::*;

/// A session with something in every table.
fn full(store: &dyn Store) {
    begun(store);
    let big = "x".repeat(1_600_000);
    write(
        store,
        vec![
            chunks(1, &["one", &big, "three"]),
            Write::Run(RunRecord {
                run_id: run_id(1),
                start_sequence: 0,
                start_step: 0,
                started_at: 1,
                terminal: None,
            }),
            Write::Checkpoint(checkpoint(1, json!({"big": big}))),
            Write::Message(MessageRecord::User { text: "x".into() }),
            Write::Step(step(1)),
            Write::ToolCall(call("a", 0, json!({}))),
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
            Write::Chunks {
                first: 4,
                chunks: vec![
                    json!({"type": "subagent_start", "subSessionId": "c", "subAgentType": "t"})
                        .to_string(),
                ],
            },
        ],
    );
}

pub(super) fn a_deleted_session_leaves_nothing(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    if let Some(database) = &site.database {
        for statement in [
            "CREATE TABLE notes (body TEXT)",
            "CREATE TABLE raw (body TEXT)",
            "INSERT INTO raw VALUES ('kept')",
        ] {
            database.query(statement, &[]).unwrap();
        }
    }
    full(&*store);
    let late = fenced(1, vec![chunks(5, &["late"])]);
    let mut own = |database: &dyn Database| {
        if site.database.is_some() {
            database.query("DROP TABLE notes", &[])?;
        }
        Ok(())
    };
    store.delete_all(&mut own).unwrap();
    assert_finds_nothing(&*store);
    assert_finds_nothing(&*(site.open)());
    if site.database.is_some() {
        let left: Vec<_> = tables(&site)
            .into_iter()
            .map(|row| row[1].clone())
            .collect();
        assert_eq!(
            left,
            [SqlValue::Text("raw".into())],
            "what the hook left alone is there still"
        );
    }
    assert!(
        matches!(store.commit(&late), Err(CommitError::Fenced { .. })),
        "a late commit brought something back"
    );
    assert_finds_nothing(&*store);
    // Deleting nothing is no error, and the id can begin another life.
    store.delete_all(&mut |_| Ok(())).unwrap();
    begun(&*store);
    write(&*store, vec![chunks(1, &["again"])]);
    assert_eq!(read(&*store, 0, 100, ALL), [(1, text_chunk("again"))]);
    assert!(!store.tool_call_id_used("a").unwrap());
}

pub(super) fn a_deletion_that_fails_deletes_nothing(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    full(&*store);
    let before = (store.session().unwrap(), read(&*store, 0, 100, ALL));
    let shape = tables(&site);
    let refused = store.delete_all(&mut |_| Err(Error::internal("not now")));
    assert_eq!(refused, Err(Error::internal("not now")));
    // Undone with what is around it, too.
    let outcome = store.database().transaction(&mut || {
        store.delete_all(&mut |_| Ok(()))?;
        assert_finds_nothing(&*store);
        Err(Error::internal("undo"))
    });
    assert!(outcome.is_err());
    assert_eq!(
        (store.session().unwrap(), read(&*store, 0, 100, ALL)),
        before
    );
    assert_eq!(tables(&site), shape);
    write(&*store, vec![chunks(5, &["on"])]);
}
