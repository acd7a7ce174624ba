//! Commits that only append: the session follows its log, and nothing else is easier for them.

use super::*;

fn appended(first: Sequence, texts: &[&str], at: u64) -> Write {
    Write::Append {
        first,
        chunks: texts.iter().map(|text| text_chunk(text)).collect(),
        at,
    }
}

/// Where the session stands: its newest sequence and when it changed last.
fn stands(store: &dyn Store) -> (Sequence, u64) {
    let record = store.session().unwrap().unwrap();
    (record.last_sequence, record.updated_at)
}

fn refused(store: &dyn Store, epoch: Epoch, write: Write) -> CommitError {
    store.commit(&fenced(epoch, vec![write])).unwrap_err()
}

pub(super) fn the_session_follows_its_log(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    begun(&*store);
    for n in 1..=50u64 {
        write(&*store, vec![appended(n, &["x"], 2_000 + n)]);
        assert_eq!(stands(&*store), (n, 2_000 + n));
    }
    write(&*store, vec![appended(51, &["y", "z"], 3_000)]);
    assert_eq!(stands(&*(site.open)()), (52, 3_000), "opened again");
    // Everything else of the row is as it was, and as it is written next.
    let mut expected = session(1, 52);
    expected.updated_at = 3_000;
    assert_eq!(store.session().unwrap(), Some(expected.clone()));
    expected.last_sequence = 53;
    expected.updated_at = 4_000;
    expected.step_count = 7;
    write(
        &*store,
        vec![Write::Session(expected.clone()), chunks(53, &["settled"])],
    );
    assert_eq!(store.session().unwrap(), Some(expected));
    write(&*store, vec![appended(54, &["on"], 5_000)]);
    assert_eq!(stands(&*store), (54, 5_000));
    let stats = store.log_stats(100).unwrap();
    assert_eq!(stats.newest, 54);
    assert_eq!(stats.front.last().unwrap().committed_at, 5_000);
    assert_eq!(read(&*store, 0, 100, ALL).len(), 54);
}

pub(super) fn an_append_is_fenced_and_numbered(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    let early = refused(&*store, 1, appended(1, &["x"], 1));
    assert_eq!(early, CommitError::Fenced { expected: 1 });
    begun(&*store);
    for n in 1..=3u64 {
        write(&*store, vec![appended(n, &["x"], 2_000)]);
    }
    for epoch in [0, 2] {
        let fenced = refused(&*store, epoch, appended(4, &["late"], 2_001));
        assert_eq!(fenced, CommitError::Fenced { expected: epoch });
    }
    for first in [0, 1, 3, 5, 100] {
        let failed = refused(&*store, 1, appended(first, &["x"], 2_001));
        assert!(matches!(failed, CommitError::Failed(_)), "from {first}");
    }
    for bad in ["", "[]", "{\n}", "{\r}", "{\"a\":1}\n{\"b\":2}"] {
        let write = Write::Append {
            first: 4,
            chunks: vec![bad.into()],
            at: 2_001,
        };
        let failed = refused(&*store, 1, write);
        assert!(matches!(failed, CommitError::Failed(_)), "{bad:?}");
    }
    assert_eq!(stands(&*store), (3, 2_000), "a refusal writes nothing");
    write(&*store, vec![appended(4, &[], 2_001)]);
    write(&*store, vec![appended(4, &["four"], 2_002)]);
    // A later run owns the session, and the earlier one's next append is refused.
    write(&*store, vec![Write::Session(session(2, 4))]);
    let late = refused(&*store, 1, appended(5, &["late"], 2_003));
    assert_eq!(late, CommitError::Fenced { expected: 1 });
    store
        .commit(&fenced(2, vec![appended(5, &["five"], 2_004)]))
        .unwrap();
    assert_eq!(read(&*store, 3, 100, ALL).len(), 2);
}

pub(super) fn an_append_trusts_no_memory(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    begun(&*store);
    write(&*store, vec![appended(1, &["one"], 2_000)]);
    write(&*store, vec![appended(2, &["two"], 2_000)]);
    let undo = || Err(Error::internal("undo"));
    let outcome = store.database().transaction(&mut || {
        write(&*store, vec![appended(3, &["undone"], 2_001)]);
        assert_eq!(stands(&*store), (3, 2_001));
        undo()
    });
    assert_eq!(outcome, undo());
    let failed = refused(&*store, 1, appended(4, &["x"], 2_001));
    assert!(matches!(failed, CommitError::Failed(_)));
    write(&*store, vec![appended(3, &["three"], 2_002)]);
    // Another instance over the same place went on meanwhile.
    let other = (site.open)();
    write(&*other, vec![appended(4, &["four"], 2_003)]);
    let failed = refused(&*store, 1, appended(4, &["four again"], 2_003));
    assert!(matches!(failed, CommitError::Failed(_)));
    write(&*store, vec![appended(5, &["five"], 2_004)]);
    // So it did with a long chunk, which lies elsewhere.
    let long = "l".repeat(100_000);
    write(&*other, vec![appended(6, &[&long], 2_004)]);
    let failed = refused(&*store, 1, appended(6, &["six again"], 2_004));
    assert!(matches!(failed, CommitError::Failed(_)));
    write(&*store, vec![appended(7, &["seven"], 2_004)]);
    // A long chunk, a short one after it, a trim, an announcement.
    write(&*store, vec![appended(8, &[&long], 2_005)]);
    write(&*store, vec![appended(9, &["nine"], 2_006)]);
    let mut record = store.session().unwrap().unwrap();
    record.floor = 9;
    write(
        &*store,
        vec![Write::Session(record), Write::Trim { floor: 9 }],
    );
    let announces = json!({"type": "subagent_start", "subSessionId": "c-1",
                           "subAgentType": "thread-researcher"});
    write(
        &*store,
        vec![Write::Append {
            first: 10,
            chunks: vec![text_chunk("x"), announces.to_string()],
            at: 2_007,
        }],
    );
    assert!(store.announced("c-1", Some("thread-researcher")).unwrap());
    assert_eq!(stands(&*store), (11, 2_007));
    assert_eq!(read(&*store, 0, 100, ALL).len(), 3);
    store.delete_all(&mut |_| Ok(())).unwrap();
    begun(&*store);
    write(&*store, vec![appended(1, &["of another life"], 3_000)]);
    assert_eq!(stands(&*store), (1, 3_000));
    assert_eq!(read(&*store, 0, 100, ALL).len(), 1);
}
