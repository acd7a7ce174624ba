//! The contract of section 6, explored exhaustively, and what goes wrong without each of its rules.

mod filtering;
mod history;
mod watching;

use std::sync::Arc;

use stateright::{Checker as _, Expectation, HasDiscoveries, Model as _};

use filtering::Filtering;
use history::{Do, Ends, Histories, Odd, Plan, Script};
use watching::{Look, Watching};

use crate::reconstruct::rules::Rule;

const ONE_KEY: &[(&str, &[Do])] = &[
    ("a", &[Do::Push(1), Do::Set("x", 1)]),
    ("b", &[Do::Set("x", 2)]),
];
const APPEND: &[(&str, &[Do])] = &[("c", &[Do::Push(2)])];
const CALL: &[(&str, &[Do])] = &[("child", &[]), ("beside", &[Do::Set("x", 3)])];
const TWICE: &[(&str, &[Do])] = &[
    ("a", &[Do::Set("x", 1), Do::Set("x", 3)]),
    ("b", &[Do::Set("x", 2)]),
];

fn alone(numbered: bool) -> Plan {
    let mut script = Script::new(&[ONE_KEY, APPEND]);
    script.discards = 1;
    Plan {
        scripts: vec![script],
        numbered,
        stamped: true,
        restarts: 0,
        resends: false,
        lag: 0,
    }
}

fn family(numbered: bool) -> Plan {
    let mut plan = alone(numbered);
    plan.scripts.insert(0, Script::new(&[&[("child", &[])]]));
    plan.stamped = numbered;
    plan.restarts = 1;
    plan.resends = true;
    plan
}

/// Three sessions of which the last alone has a state that changes.
fn deep(stamped: bool) -> Plan {
    let mut plan = family(true);
    plan.scripts = vec![
        Script::new(&[&[("child", &[])]]),
        Script::new(&[&[("child", &[])]]),
        Script::new(&[APPEND, APPEND]),
    ];
    plan.resends = false;
    plan.numbered = stamped;
    plan.stamped = stamped;
    plan
}

/// A plan with a change, and who looks.
type Case = (&'static str, Arc<Histories>, Vec<Look>);

fn with(mut plan: Plan, session: usize, change: impl Fn(&mut Script)) -> Plan {
    change(&mut plan.scripts[session]);
    plan
}

fn cases() -> Vec<Case> {
    let own = || {
        vec![Look {
            breaks: 1,
            ..Look::at(0)
        }]
    };
    let once = |mut plan: Plan| {
        plan.resends = false;
        plan
    };
    let calm = || vec![Look::at(0)];
    let short = |script: &mut Script| {
        script.steps = &[APPEND, APPEND];
        script.discards = 0;
    };
    let odd = |plan, session, odd| {
        with(plan, session, |script| {
            script.odd = odd;
            script.discards = 0;
        })
    };
    let ends = |ends| {
        with(alone(true), 0, |script| {
            script.pauses = &[0];
            script.ends = ends;
            script.discards = 0;
        })
    };
    let reset = |plan, session| {
        with(plan, session, |script| {
            script.resets = 1;
            script.discards = 0;
        })
    };
    let cut = |plan, session| {
        with(plan, session, |script| {
            script.cuts = 1;
            script.discards = 0;
        })
    };
    let plans = vec![
        ("own", alone(true), own()),
        ("own, unnumbered", alone(false), own()),
        ("own, reset", reset(alone(true), 0), own()),
        ("own, cut", cut(alone(true), 0), own()),
        ("own, unnumbered, cut", cut(alone(false), 0), own()),
        (
            "own, resumed",
            ends(Ends::Completed { with_state: true }),
            own(),
        ),
        (
            "own, resumed without state",
            ends(Ends::Completed { with_state: false }),
            own(),
        ),
        ("own, interrupted", ends(Ends::Interrupted), own()),
        ("own, failed", ends(Ends::Failed), own()),
        (
            "own, a streamer",
            odd(alone(true), 0, &[Odd::Streamer, Odd::Twice]),
            own(),
        ),
        ("own, broken", odd(alone(true), 0, &[Odd::Broken]), own()),
        ("own, lost", odd(alone(true), 0, &[Odd::Lost]), own()),
        (
            "own, unnumbered, lost",
            odd(alone(false), 0, &[Odd::Lost]),
            own(),
        ),
        ("child", family(true), calm()),
        ("child, unnumbered", family(false), calm()),
        ("child, cut", cut(with(family(true), 1, short), 1), calm()),
        (
            "child, unnumbered, cut",
            cut(with(family(false), 1, short), 1),
            calm(),
        ),
        (
            "child, reset",
            once(reset(with(family(true), 1, short), 1)),
            calm(),
        ),
        (
            "child, forged",
            odd(with(family(true), 1, short), 1, &[Odd::Forged]),
            calm(),
        ),
        (
            "child, a visitor",
            odd(with(family(true), 1, short), 0, &[Odd::Visitor]),
            calm(),
        ),
        (
            "child, an impostor",
            odd(with(family(true), 1, short), 0, &[Odd::Impostor]),
            calm(),
        ),
        ("grandchild", deep(true), calm()),
        ("grandchild, unstamped", deep(false), calm()),
        (
            "child, beside a parent that writes",
            with(with(family(true), 1, short), 0, |script| {
                script.steps = &[CALL];
            }),
            calm(),
        ),
        ("child, cut off", with(family(true), 1, short), own()),
        (
            "child, unnumbered, cut off",
            with(family(false), 1, short),
            own(),
        ),
        (
            "astray",
            with(family(true), 1, short),
            vec![Look {
                astray: true,
                ..Look::at(0)
            }],
        ),
        (
            "failing",
            with(family(true), 1, short),
            vec![Look {
                failures: 1,
                ..Look::at(0)
            }],
        ),
    ];
    let made = plans
        .into_iter()
        .map(|(name, plan, looks)| (name, Arc::new(Histories::of(plan)), looks));
    made.collect()
}

/// Everything that the contract is about, for an observer of the parent and one of the child.
fn together() -> Case {
    let mut plan = family(true);
    plan.scripts[1].steps = &[TWICE, APPEND];
    plan.scripts[1].resets = 1;
    plan.resends = false;
    let looks = vec![Look::at(0), Look::at(1)];
    ("together", Arc::new(Histories::of(plan)), looks)
}

/// The same two, at once, in a smaller family.
fn at_once() -> Case {
    let mut plan = family(true);
    plan.scripts[1].steps = &[APPEND, APPEND];
    plan.scripts[1].discards = 0;
    let looks = vec![Look::at(0), Look::at(1)];
    ("at once", Arc::new(Histories::of(plan)), looks)
}

/// What is wrong in a case: counterexamples, and what should be possible and is not.
fn explore(case: &Case, without: Option<Rule>) -> Vec<String> {
    let (name, histories, looks) = case;
    let mut model = Watching::new(histories, looks, without);
    model.turns = *name == "together";
    let checker = model
        .checker()
        .threads(2)
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    if without.is_none() {
        println!(
            "{name}: {} moments, {} states, depth {}",
            histories.moments.len(),
            checker.unique_state_count(),
            checker.max_depth()
        );
    }
    let mut found = Vec::new();
    for property in checker.model().properties() {
        let path = checker.discovery(property.name);
        match (property.expectation, path) {
            (Expectation::Sometimes, None) if found.is_empty() => {
                found.push(format!("never: {}", property.name));
            }
            (Expectation::Sometimes, _) | (_, None) => {}
            (_, Some(path)) => {
                let path = path.into_vec();
                let tales = path.windows(2).map(|pair| {
                    checker
                        .model()
                        .tale(&pair[0].0, pair[0].1.unwrap(), &pair[1].0)
                });
                let tales: Vec<String> = tales.collect();
                found.insert(0, format!("{}\n{}", property.name, tales.join("\n")));
            }
        }
    }
    found
}

/// The cases that the filter is put through.
fn filter_cases() -> Vec<(&'static str, Arc<Histories>)> {
    let short = |mut plan: Plan, session: usize| {
        plan.scripts[session].steps = &[APPEND, APPEND];
        plan.scripts[session].discards = 0;
        plan
    };
    let mut reset = short(family(false), 1);
    reset.scripts[1].resets = 1;
    let mut cut = short(alone(false), 0);
    cut.scripts[0].cuts = 1;
    let plans = [
        ("filter, own, cut", cut),
        ("filter, child", short(family(false), 1)),
        ("filter, child, reset", reset),
        ("filter, grandchild", deep(true)),
        ("filter, grandchild, unstamped", deep(false)),
    ];
    let made = plans.map(|(name, plan)| (name, Arc::new(Histories::of(plan))));
    made.into()
}

fn filter(name: &str, histories: &Arc<Histories>, without: Option<Rule>) -> Vec<String> {
    let checker = Filtering::new(histories, 0, without)
        .checker()
        .threads(2)
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    if without.is_none() {
        println!("{name}: {} states", checker.unique_state_count());
    }
    let found = checker.discoveries().into_iter();
    found
        .map(|(name, path)| format!("{name}: {:?}", path.into_actions()))
        .collect()
}

#[test]
fn whatever_happens_an_exact_document_is_a_committed_boundary() {
    for case in cases() {
        let wrong = explore(&case, None);
        assert!(wrong.is_empty(), "{}: {}", case.0, wrong.join("\n"));
    }
}

#[test]
fn so_it_is_with_everything_at_once_and_two_observers() {
    for case in [together(), at_once()] {
        let wrong = explore(&case, None);
        assert!(wrong.is_empty(), "{}: {}", case.0, wrong.join("\n"));
    }
}

#[test]
fn the_filter_says_of_each_patch_what_it_is() {
    for (name, histories) in filter_cases() {
        let wrong = filter(name, &histories, None);
        assert!(wrong.is_empty(), "{name}: {}", wrong.join("\n"));
    }
}

/// The case that misses the rule.
fn shown_by(rule: Rule) -> &'static str {
    match rule {
        Rule::OwnStream => "child, an impostor",
        Rule::OriginFirst => "grandchild",
        Rule::Emitter => "child, forged",
        Rule::UnplacedStreamer => "child, a visitor",
        Rule::OwnOnce | Rule::Unpinned | Rule::FinalStays | Rule::StaleCommit | Rule::Voided => {
            "own"
        }
        Rule::Discarded | Rule::StaleDrops => "own, unnumbered",
        Rule::Resync | Rule::ResyncHole => "own, unnumbered, lost",
        Rule::SameStream | Rule::NewStream | Rule::PastStream | Rule::FreshPlaces => "child, reset",
        Rule::FinalEnded | Rule::Truncated | Rule::UnpinnedBoundary => "own, cut",
        Rule::Reopened => "own, resumed",
        Rule::Unplaced => "grandchild, unstamped",
        Rule::Streamer | Rule::Ordinal => "own, a streamer",
        Rule::Applies => "own, broken",
        Rule::EndBoundary => "own, interrupted",
        Rule::OwnBaseline => "astray",
        Rule::Agent
        | Rule::Covered
        | Rule::FinalCalm
        | Rule::Base
        | Rule::CommitOrdinal
        | Rule::AskAgain
        | Rule::CallBoundary => "child, cut off",
        Rule::NoHole => "child, unnumbered, cut off",
        Rule::ForwardedOnce
        | Rule::TriggerAsks
        | Rule::AskOnce
        | Rule::StepBoundary
        | Rule::AskAnew => "child",
        Rule::FilterBaseline | Rule::FilterCovered | Rule::FilterOnce | Rule::FilterRearm => {
            "filter, child"
        }
        Rule::FilterPosition => "filter, own, cut",
        Rule::FilterStream => "filter, child, reset",
        Rule::FilterPlace | Rule::FilterLatch => "filter, grandchild, unstamped",
    }
}

#[test]
fn without_any_one_rule_something_goes_wrong() {
    let (cases, filter_cases) = (cases(), filter_cases());
    let mut silent = Vec::new();
    for rule in Rule::ALL {
        let by = shown_by(rule);
        let begun = std::time::Instant::now();
        let shown = cases
            .iter()
            .filter(|case| case.0 == by)
            .flat_map(|case| explore(case, Some(rule)));
        let filtered = filter_cases.iter().filter(|case| case.0 == by);
        let filtered = filtered.flat_map(|(name, histories)| filter(name, histories, Some(rule)));
        let wrong: Vec<String> = shown.chain(filtered).collect();
        match wrong.first().and_then(|wrong| wrong.lines().next()) {
            Some(wrong) => println!("without {rule:?} ({by}, {:?}): {wrong}", begun.elapsed()),
            None => {
                println!("NONE {rule:?} {:?}", begun.elapsed());
                silent.push(rule)
            }
        }
    }
    assert!(silent.is_empty(), "nothing needs {silent:?}");
}
