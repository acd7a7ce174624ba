//! The log: exclusive cursors, pages, sequences, announced children.

use super::*;

/// A log of 30 chunks in commits of many sizes.
pub(super) fn filled(store: &dyn Store) -> Vec<(Sequence, String)> {
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

pub(super) fn a_cursor_is_exclusive_at_every_sequence(subject: Subject<'_>) {
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

pub(super) fn pages_keep_to_their_limits(subject: Subject<'_>) {
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

pub(super) fn sequences_are_never_issued_twice(subject: Subject<'_>) {
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
    for bad in ["", "[]", "{\n}", "{\r}", "{\"a\":1}\n{\"b\":2}"] {
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

/// Chunks of many sizes in commits of many sizes, enough to fill and pack the stores' own
/// structures several times over. Deterministic.
pub(super) fn grown(
    store: &dyn Store,
    commits: u64,
    mut seen: impl FnMut(&[(Sequence, String)]),
) -> Vec<(Sequence, String)> {
    begun(store);
    let mut all: Vec<(Sequence, String)> = Vec::new();
    let mut state = 7u64;
    let mut below = |bound: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    for round in 0..commits {
        let count = [1, 1, 2, 10, 25][usize::try_from(below(5)).unwrap()];
        let first = all.len() as u64 + 1;
        let list: Vec<String> = (0..count)
            .map(|n| {
                let size = match below(40) {
                    0 => 3_000 + below(30_000),
                    1..=3 => 0,
                    _ => 40 + below(1_000),
                };
                text_chunk(&format!(
                    "{round}.{n} é\n{}",
                    "x".repeat(usize::try_from(size).unwrap())
                ))
            })
            .collect();
        let mut record = session(1, first + count - 1);
        record.updated_at = 1_000 + round;
        let chunks = list.clone();
        // Both ways of appending, in turns of several commits each.
        let writes = if round % 10 < 6 {
            let at = record.updated_at;
            vec![Write::Append { first, chunks, at }]
        } else {
            vec![Write::Session(record), Write::Chunks { first, chunks }]
        };
        write(store, writes);
        all.extend((first..).zip(list));
        seen(&all);
    }
    all
}

pub(super) fn a_log_of_any_shape_reads_back(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    let reader = store.clone();
    let mut followed: Vec<(Sequence, String)> = Vec::new();
    let all = grown(&*store, 900, |all| {
        // One reader follows the end, as live ones do.
        let after = followed.last().map_or(0, |(sequence, _)| *sequence);
        followed.extend(read(&*reader, after, 1 << 52, ALL));
        assert_eq!(followed.len(), all.len());
        // Another reads somewhere in what is old by now.
        if all.len() % 7 == 0 {
            let after = all.len() / 3;
            let few = PageLimit { chunks: 40, ..ALL };
            let page = read(&*reader, after as u64, 1 << 52, few);
            assert_eq!(page, all[after..all.len().min(after + 40)]);
        }
    });
    let size: usize = all.iter().map(|(_, chunk)| chunk.len()).sum();
    assert!(size > 4_000_000, "too little to pack: {size} bytes");
    assert!(followed == all, "the follower read something else");
    assert!(read(&*store, 0, 1 << 52, ALL) == all);
    let page = PageLimit {
        chunks: 500,
        bytes: 100_000,
    };
    let mut joined = Vec::new();
    while let Some(page) = next_page(&*store, &joined, page) {
        joined.extend(page);
    }
    assert!(joined == all, "pages joined are another log");
    for after in (0..all.len()).step_by(97) {
        let one = PageLimit { chunks: 1, ..ALL };
        assert_eq!(
            read(&*store, after as u64, 1 << 52, one),
            all[after..=after]
        );
    }
}

pub(super) fn announced_children_are_found(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    let start = |child: &str, kind: &str| json!({"type": "subagent_start", "subSessionId": child, "subAgentType": kind, "toolCallId": "t", "remote": true});
    let mut forwarded = start("grandchild", "reader");
    forwarded["remoteSource"] =
        json!({"childSessionId": "child", "childSequence": 2, "streamId": "st"});
    let nested = json!({"type": "custom", "eventName": "x", "data": start("fake", "reader")});
    let said = json!({"type": "text_delta", "delta": start("said", "reader").to_string()});
    let odd = json!({"type": "subagent_start", "subSessionId": 7});
    let mut ended = start("ended", "reader");
    ended["type"] = json!("subagent_end");
    ended["result"] = json!("subagent_start");
    let list = [
        start("child", "planner"),
        forwarded,
        nested,
        said,
        odd,
        ended,
        start("child", "planner"),
    ];
    write(
        &*store,
        vec![Write::Chunks {
            first: 1,
            chunks: list.iter().map(Value::to_string).collect(),
        }],
    );
    assert!(store.announced("child", Some("planner")).unwrap());
    assert!(store.announced("grandchild", Some("reader")).unwrap());
    assert!(!store.announced("child", Some("reader")).unwrap());
    assert!(store.announced("grandchild", None).unwrap());
    assert!(!store.announced("fake", None).unwrap());
    assert!(!store.announced("fake", Some("reader")).unwrap());
    assert!(!store.announced("said", Some("reader")).unwrap());
    assert!(!store.announced("ended", Some("reader")).unwrap());
    // Who announced it is known as well.
    assert!(store.announced_by("child", "grandchild").unwrap());
    assert!(store.announced_by("", "child").unwrap());
    assert!(!store.announced_by("other", "grandchild").unwrap());
    assert!(!store.announced_by("child", "child").unwrap());
    assert_eq!(read(&*store, 0, 100, ALL).len(), list.len());
}
