//! What the simulator is held to: the same seed is the same run, every rule that is taken away is
//! missed, and a budget of seeds is clean.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    missing_docs
)]

use std::sync::atomic::{AtomicU64, Ordering};

use sim::mutants::{self, Mutant};
use sim::plan::{Action, Fault, Kind, Planned};
use sim::shrink::{script, shrink};
use sim::table::Table;
use sim::{Broken, Invariant, Outcome, Plan, run};

/// How many seeds a run of the tests takes. `SIM_SEEDS` asks for more.
const BUDGET: u64 = 120;

/// Within how many seeds a rule that is taken away is missed.
const MISSED_WITHIN: u64 = 1_000;

/// Which invariant misses a rule.
fn missed_by(rule: Mutant) -> Invariant {
    match rule {
        Mutant::CursorIsExclusive => Invariant::Cursor,
        Mutant::CursorWithChunks | Mutant::TrimOnceDurable => Invariant::Forwarded,
        Mutant::WhenInDoubt => Invariant::Exact,
        Mutant::FinishedStays => Invariant::SettledOnce,
        Mutant::Watchdog | Mutant::BegunIsWatched => Invariant::Bounded,
        Mutant::StartKeepsItsChild => Invariant::StartedOnce,
        Mutant::CountedByAnswer => Invariant::CountedOnce,
        Mutant::SnapshotIsCommitted => Invariant::Promoted,
        Mutant::EndedStays => Invariant::Terminal,
        Mutant::StopPairs => Invariant::Paired,
        Mutant::ReadersCancelNothing => Invariant::Disconnect,
        Mutant::StopInterrupts => Invariant::Interrupt,
        Mutant::Projects => Invariant::Canary,
        Mutant::TakesBack | Mutant::OrdinalsOnce => Invariant::Law,
        Mutant::NothingPanics => Invariant::Panic,
        Mutant::SequenceFollowsLog | Mutant::PublishedOnceDurable | Mutant::StreamIsOneLife => {
            Invariant::Sequence
        }
        Mutant::TrimKeepsSnapshot => Invariant::Kept,
        Mutant::DeletionIsWhole => Invariant::Deletion,
    }
}

/// The first seed at which something does not hold without a rule.
fn first_without(rule: Mutant) -> Option<(u64, Broken)> {
    mutants::take(Some(rule));
    let broken = (0..MISSED_WITHIN).find_map(|seed| Some((seed, run(&Plan::of(seed)).broken?)));
    mutants::take(None);
    broken
}

#[test]
fn a_seed_is_the_same_run_twice() {
    for seed in [1, 6, 9, 35] {
        let plan = Plan::of(seed);
        let (once, again) = (run(&plan), run(&plan));
        assert!(once.trace.0 > 100, "{once:?}");
        assert_eq!(once, again);
    }
}

/// A seed that has found something. A change of the plan makes it another run, so each finding has a
/// test without a seed as well, which is named here.
fn found(seed: u64, is_what_it_was: impl Fn(&Plan, &Outcome) -> bool) {
    let plan = Plan::of(seed);
    let outcome = run(&plan);
    assert_eq!(outcome.broken, None);
    assert!(is_what_it_was(&plan, &outcome), "it is another run now");
}

fn has_struck(outcome: &Outcome, kind: Kind, fault: Fault) -> bool {
    let is_it = |struck: &Planned| (struck.kind, struck.fault) == (kind, fault);
    outcome.struck.iter().any(is_it)
}

/// `tests/it/settling/late.rs`
#[test]
fn seed_13324_a_start_that_arrives_behind_the_end_of_its_call() {
    found(13_324, |_, outcome| {
        has_struck(outcome, Kind::Request(Action::Start), Fault::Late)
    });
}

/// `tests/it/disk.rs`
#[test]
fn seed_30_a_trim_that_was_told_before_it_was_durable() {
    found(30, |plan, outcome| {
        plan.workload.keeps.max_chunks.is_some() && outcome.truncated > 0
    });
}

/// `tests/it/eviction.rs`
#[test]
fn seed_2241_a_run_that_nothing_looked_after() {
    found(2_241, |_, outcome| {
        has_struck(outcome, Kind::Arm, Fault::Storage)
    });
}

/// `tests/it/eviction.rs`
#[test]
fn seed_6990_a_child_that_nothing_looked_after_when_its_parent_was_gone() {
    found(6_990, |_, outcome| {
        outcome.deleted > 0 && has_struck(outcome, Kind::Arm, Fault::Storage)
    });
}

/// `tests/it/follower_script.rs`
#[test]
fn seed_539_a_session_that_ended_while_it_was_read() {
    found(539, |_, outcome| outcome.deleted > 0);
}

/// `tests/it/follower_script.rs`, `client/test/follower.test.mjs`
#[test]
fn seed_3360_a_call_that_was_over_before_its_session() {
    found(3_360, |plan, _| {
        plan.workload.keeps.hard_max_bytes.is_some()
    });
}

#[test]
fn every_rule_that_is_taken_away_is_missed() {
    let next = AtomicU64::new(0);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    let Some(rule) = Mutant::ALL.get(usize::try_from(place).unwrap()) else {
                        return;
                    };
                    let missed = first_without(*rule);
                    println!("without {rule:?}: {missed:?}");
                    let broken = missed.unwrap_or_else(|| panic!("nobody misses {rule:?}")).1;
                    assert_eq!(broken.invariant, missed_by(*rule), "{rule:?}: {broken}");
                }
            });
        }
    });
}

#[test]
fn a_failing_seed_is_shrunk_to_a_script() {
    mutants::take(Some(Mutant::FinishedStays));
    let failing = (0..MISSED_WITHIN)
        .map(Plan::of)
        .find(|plan| run(plan).broken.is_some())
        .unwrap();
    let (smallest, outcome) = shrink(failing.clone(), Invariant::SettledOnce);
    mutants::take(None);
    let told = script(&smallest, &outcome);
    assert!(smallest.faults.len() < failing.faults.len(), "{told}");
    assert!(told.contains(&format!("--seed {}", failing.seed)), "{told}");
    // What is left is what it takes.
    assert!(run(&smallest).broken.is_none(), "{told}");
}

#[test]
fn a_budget_of_seeds_is_clean() {
    let asked = std::env::var("SIM_SEEDS").ok().and_then(|n| n.parse().ok());
    let seeds: u64 = asked.unwrap_or(BUDGET);
    let tables = std::thread::scope(|threads| {
        let shards: Vec<_> = (0..2)
            .map(|shard| {
                threads.spawn(move || {
                    let mut table = Table::default();
                    for seed in (shard..seeds).step_by(2) {
                        let outcome = run(&Plan::of(seed));
                        table.add(&outcome);
                        if let Some(broken) = outcome.broken {
                            let (plan, outcome) = shrink(Plan::of(seed), broken.invariant);
                            panic!("{}", script(&plan, &outcome));
                        }
                    }
                    table
                })
            })
            .collect();
        let joined = shards.into_iter().map(|shard| shard.join().unwrap());
        joined.reduce(|mut all, one| {
            all.join(one);
            all
        })
    });
    let table = tables.unwrap();
    println!("{table}");
    let (trims, deletions) = table.trims_and_deletions();
    assert!(
        trims > 0 && deletions > 0,
        "{trims} trims, {deletions} deletions"
    );
    let (effects, faults) = table.medians();
    assert!(
        effects >= 20 && faults >= 2,
        "{effects} effects, {faults} faults"
    );
}
