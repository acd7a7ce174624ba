//! Trims: exact at every place, and sizes that are known all the while.

use super::log::{filled, grown};
use super::*;

fn trimmed(store: &dyn Store, floor: Sequence) -> Result<(), CommitError> {
    let mut record = store.session().unwrap().unwrap();
    record.floor = floor;
    store.commit(&fenced(
        1,
        vec![Write::Session(record), Write::Trim { floor }],
    ))
}

fn size(chunks: &[(Sequence, String)]) -> u64 {
    chunks.iter().map(|(_, chunk)| chunk.len() as u64 + 1).sum()
}

pub(super) fn a_trim_is_exact(subject: Subject<'_>) {
    // At every sequence of a log with commits of many sizes, in one go and step by step.
    for floor in 0..=30u64 {
        let (site, store) = subject.fresh();
        let all = filled(&*store);
        trimmed(&*store, floor).unwrap();
        let left: Vec<_> = all
            .iter()
            .filter(|(sequence, _)| *sequence >= floor)
            .cloned()
            .collect();
        assert_eq!(store.session().unwrap().unwrap().floor, floor);
        assert_eq!(read(&*store, 0, 100, ALL), left, "floor {floor}");
        let at_floor = floor.saturating_sub(1);
        assert_eq!(
            read(&*store, at_floor, 100, ALL),
            left,
            "a cursor at {floor}"
        );
        let stats = store.log_stats(1).unwrap();
        assert_eq!(
            (stats.oldest, stats.newest, stats.bytes),
            (floor.max(1), 30, size(&left))
        );
        drop(store);
        let again = (site.open)();
        write(&*again, vec![chunks(31, &["more"])]);
        assert_eq!(read(&*again, 29, 100, ALL).len(), 2);
    }
    let (_, store) = subject.fresh();
    let all = filled(&*store);
    for floor in 1..=30u64 {
        trimmed(&*store, floor).unwrap();
        let from = usize::try_from(floor).unwrap() - 1;
        assert_eq!(read(&*store, 0, 100, ALL), all[from..]);
    }
    // A log that was packed, and one chunk that takes more than a row.
    let (_, store) = subject.fresh();
    let mut all = grown(&*store, 700, |_| {});
    let huge = text_chunk(&"h".repeat(3_000_000));
    let next = all.len() as Sequence + 1;
    write(
        &*store,
        vec![
            Write::Chunks {
                first: next,
                chunks: vec![huge.clone()],
            },
            chunks(next + 1, &["after"]),
        ],
    );
    all.push((next, huge));
    all.push((next + 1, text_chunk("after")));
    let count = all.len();
    for from in [
        1,
        count / 9,
        count / 9 + 1,
        count / 2,
        count - 20,
        count - 2,
        count - 1,
    ] {
        let floor = all[from].0;
        trimmed(&*store, floor).unwrap();
        assert!(
            read(&*store, 0, 1 << 52, ALL) == all[from..],
            "floor {floor}"
        );
        assert_eq!(store.log_stats(0).unwrap().bytes, size(&all[from..]));
    }
}

pub(super) fn a_trim_frees_no_number(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    assert!(trimmed(&*store, 1).is_err(), "there is nothing to trim");
    write(&*store, vec![chunks(1, &["one", "two", "three"])]);
    for floor in [4, 5, 1 << 52] {
        assert!(trimmed(&*store, floor).is_err(), "floor {floor}");
        assert_eq!(read(&*store, 0, 100, ALL).len(), 3);
        assert_eq!(store.session().unwrap().unwrap().floor, 0);
    }
    trimmed(&*store, 3).unwrap();
    for first in [1, 2, 3, 5] {
        let outcome = store.commit(&fenced(1, vec![chunks(first, &["x"])]));
        assert!(outcome.is_err(), "from {first}");
    }
    write(
        &*store,
        vec![chunks(4, &["four"]), Write::Trim { floor: 4 }],
    );
    assert_eq!(read(&*store, 0, 100, ALL), [(4, text_chunk("four"))]);
    // What is below is not there to be dropped again.
    trimmed(&*store, 2).unwrap();
    assert_eq!(read(&*store, 0, 100, ALL).len(), 1);
    // A trim in a commit that fails is undone with it.
    write(&*store, vec![chunks(5, &["five", "six"])]);
    let outcome = store.commit(&fenced(
        1,
        vec![Write::Trim { floor: 6 }, chunks(1, &["again"])],
    ));
    assert!(outcome.is_err());
    assert_eq!(read(&*store, 0, 100, ALL).len(), 3);
}

pub(super) fn sizes_are_known(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    assert_eq!(
        store.log_stats(5).unwrap(),
        super::super::LogStats::default()
    );
    let watched = store.clone();
    let all = grown(&*store, 400, |all| {
        let stats = watched.log_stats(0).unwrap();
        assert_eq!(stats.newest, all.len() as u64);
        assert!(stats.front.is_empty());
        if all.len() % 5 == 0 {
            assert_eq!(stats.bytes, size(all));
        }
    });
    let stats = store.log_stats(100_000).unwrap();
    assert_eq!((stats.oldest, stats.newest), (1, all.len() as u64));
    assert_eq!(stats.bytes, size(&all));
    let mut next = 1;
    let mut at = 0;
    for span in &stats.front {
        assert_eq!(span.first, next, "stretches follow on each other");
        assert!(span.last >= span.first && span.committed_at >= at);
        let from = usize::try_from(span.first).unwrap() - 1;
        let to = usize::try_from(span.last).unwrap();
        assert_eq!(span.bytes, size(&all[from..to]));
        next = span.last + 1;
        at = span.committed_at;
    }
    assert_eq!(next, stats.newest + 1);
    assert_eq!(at, 1_399, "the time of the newest commit");
    assert_eq!(store.log_stats(3).unwrap().front, stats.front[..3]);
}
