//! Which checkpoints are kept, and how they are found.

use super::super::{CHECKPOINT_BYTES, MOST_CHECKPOINTS};
use super::*;

pub(super) fn they_stay_while_few_and_small(subject: Subject<'_>) {
    let (site, store) = subject.fresh();
    begun(&*store);
    assert_eq!(store.checkpoint_up_to(10_000).unwrap(), None);
    assert_eq!(store.checkpoint_after(0).unwrap(), None);
    let keep = |number: u64, state: Value| {
        write(&*store, vec![Write::Checkpoint(checkpoint(number, state))]);
    };
    let oldest = || store.checkpoint_after(0).unwrap().unwrap() / 10;
    for number in 1..=MOST_CHECKPOINTS + 3 {
        keep(number, json!({"n": number}));
        assert_eq!(oldest(), number.saturating_sub(MOST_CHECKPOINTS - 1).max(1));
    }
    // Each is found by its own place, by every later one up to the next, and not before.
    for number in 4..=MOST_CHECKPOINTS + 3 {
        for place in number * 10..number * 10 + 10 {
            let found = store.checkpoint_up_to(place).unwrap().unwrap();
            assert_eq!(found, checkpoint(number, json!({"n": number})));
        }
        let above = store.checkpoint_after(number * 10 - 1).unwrap();
        assert_eq!(above, Some(number * 10));
    }
    assert_eq!(store.checkpoint_up_to(39).unwrap(), None, "it is gone");
    let newest = (MOST_CHECKPOINTS + 3) * 10;
    assert_eq!(store.checkpoint_after(newest).unwrap(), None);
    // A large state leaves room for fewer, and its neighbour stays whatever the size.
    let large = |part: u64| "x".repeat(usize::try_from(CHECKPOINT_BYTES / part).unwrap());
    for (number, part, kept) in [(100, 5, 4), (101, 1, 2), (102, 1, 2)] {
        keep(number, json!({"large": large(part)}));
        assert_eq!(store.checkpoint().unwrap().unwrap().step_count, number);
        let mut places = Vec::new();
        while let Some(next) = store
            .checkpoint_after(places.last().copied().unwrap_or(0))
            .unwrap()
        {
            places.push(next);
        }
        assert_eq!(places.len(), kept, "{places:?}");
    }
    // Of what is gone no part is left behind, also of states that are kept in parts.
    let huge = "y".repeat(2_000_000);
    for number in 103..=106 {
        keep(number, json!({"huge": huge.as_str(), "n": number}));
    }
    for number in 107..=140 {
        keep(number, json!({}));
    }
    assert_eq!(oldest(), 109);
    if let Some(database) = &site.database {
        let parts = database.query("SELECT owner FROM ra_parts", &[]).unwrap();
        assert!(parts.is_empty(), "{parts:?}");
    }
    // A run is found by the place of its first chunk.
    let second = RunRecord {
        run_id: run_id(2),
        start_sequence: 70,
        start_step: 3,
        started_at: 1,
        terminal: None,
    };
    write(&*store, vec![Write::Run(second)]);
    let opened = |sequence| store.run_opened_at(sequence).unwrap();
    assert!(opened(71) && !opened(70) && !opened(72) && !opened(0));
}
