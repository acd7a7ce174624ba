#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use serde_json::json;

use super::*;

fn tokens(count: u64) -> Tokens {
    Tokens {
        prompt: count,
        completion: 2 * count,
        reasoning: 1,
        cached: 0,
        total: 3 * count,
    }
}

fn model(name: &str, count: u64) -> UsageRecord {
    UsageRecord::Model {
        model: name.into(),
        tokens: tokens(count),
        at: 1,
    }
}

fn tool(name: &str, success: bool) -> UsageRecord {
    UsageRecord::Tool {
        name: name.into(),
        success,
        at: 1,
    }
}

fn embedded(
    child: &str,
    rollup: Option<UsageRollup>,
    origin: RollupOrigin,
    at: u64,
) -> UsageRecord {
    UsageRecord::SubAgent {
        sub_session_id: child.into(),
        sub_agent_type: "reader".into(),
        tool_call_id: format!("call-{child}"),
        rollup: rollup.map(Box::new),
        origin,
        at,
    }
}

fn child(name: &str, settled: bool, live: Option<UsageRollup>) -> ChildUsage {
    ChildUsage {
        sub_session_id: name.into(),
        agent_type: "reader".into(),
        tool_call_id: format!("call-{name}"),
        settled,
        live,
        created_at: 5,
    }
}

fn of(id: &str, steps: u64, entries: &[UsageRecord], children: &[ChildUsage]) -> UsageRollup {
    rollup(
        &SessionId::parse(id).unwrap(),
        10,
        20,
        steps,
        entries,
        children,
    )
}

/// A leaf's rollup with `count` prompt tokens.
fn leaf(id: &str, count: u64) -> UsageRollup {
    of(id, 1, &[model("small", count)], &[])
}

#[test]
fn a_tree_of_three_levels_adds_up() {
    let grandchild = of("g", 2, &[model("small", 5), tool("search", false)], &[]);
    let middle = of(
        "m",
        3,
        &[
            model("large", 7),
            tool("subagent__read", true),
            tool("note", true),
        ],
        &[child("g", true, Some(grandchild.clone()))],
    );
    let top = of(
        "t",
        4,
        &[
            model("large", 11),
            model("large", 1),
            tool("subagent__plan", true),
            embedded("m", Some(middle.clone()), RollupOrigin::End, 9),
        ],
        &[child("m", true, None)],
    );
    assert_eq!(top.tokens.prompt, 5 + 7 + 11 + 1);
    assert_eq!(top.tokens.total, 3 * 24);
    assert_eq!(top.tokens.reasoning, 4);
    assert_eq!(top.by_model["large"].prompt, 19);
    assert_eq!(top.by_model["small"].prompt, 5);
    assert_eq!((top.tools.calls, top.tools.failures), (4, 1));
    assert_eq!(top.tools.by_tool["subagent__plan"], 1);
    assert_eq!(
        top.sub_agents.calls, 2,
        "a sub-agent call counts here as well as among the tools"
    );
    assert_eq!(top.steps, 9);
    assert!(!top.partial);
    let own = top.own.unwrap();
    assert_eq!((own.tokens.prompt, own.tools.calls, own.steps), (12, 1, 4));
    assert_eq!(top.sub_agents.sessions.len(), 1);
    let session = &top.sub_agents.sessions[0];
    assert_eq!(session.remote_rollup.as_deref(), Some(&middle));
    assert_eq!(session.remote_rollup_origin, Some(RollupOrigin::End));
    assert_eq!(
        (top.session_id.as_str(), top.started_at, top.updated_at),
        ("t", 10, 20)
    );
}

#[test]
fn one_rollup_counts_for_a_child_and_the_best_one() {
    let known = [child("c", true, None)];
    let sum = |entries: &[UsageRecord]| of("p", 0, entries, &known).tokens.prompt;
    let end = |count, at| embedded("c", Some(leaf("c", count)), RollupOrigin::End, at);
    let recovery = |count, at| embedded("c", Some(leaf("c", count)), RollupOrigin::Recovery, at);
    let empty = embedded("c", None, RollupOrigin::Recovery, 99);
    assert_eq!(
        sum(&[recovery(1, 1), end(2, 9)]),
        1,
        "recovery outranks a later end"
    );
    assert_eq!(sum(&[end(2, 9), recovery(1, 1)]), 1, "in any order");
    assert_eq!(sum(&[end(1, 9), end(2, 3)]), 1, "then the later timestamp");
    assert_eq!(sum(&[end(1, 3), end(2, 3)]), 2, "then the later entry");
    assert_eq!(
        sum(&[end(1, 3), empty]),
        1,
        "a pointer without a rollup outranks nothing"
    );
    let read = [child("c", true, Some(leaf("c", 7)))];
    let both = of("p", 0, &[recovery(1, 1), end(2, 9)], &read);
    assert_eq!(both.tokens.prompt, 7, "a read is preferred to all of them");
    let origin = both.sub_agents.sessions[0].remote_rollup_origin;
    assert_eq!(origin, Some(RollupOrigin::Recovery), "as of a recovery");
    let live = [child("c", false, Some(leaf("c", 7)))];
    let under_way = of("p", 0, &[end(2, 9)], &live);
    assert_eq!(under_way.sub_agents.sessions[0].remote_rollup_origin, None);
}

#[test]
fn orphans_count() {
    let sum = of(
        "p",
        0,
        &[
            embedded("lost", Some(leaf("lost", 3)), RollupOrigin::End, 1),
            embedded("c", Some(leaf("c", 4)), RollupOrigin::End, 1),
        ],
        &[child("c", true, None)],
    );
    assert_eq!(sum.tokens.prompt, 7);
    assert_eq!(sum.sub_agents.calls, 2);
    assert!(!sum.partial);
}

#[test]
fn partial_unless_all_is_settled_and_known_and_whole() {
    let partial =
        |entries: &[UsageRecord], children: &[ChildUsage]| of("p", 0, entries, children).partial;
    let whole = leaf("c", 1);
    let half = UsageRollup {
        partial: true,
        ..leaf("c", 1)
    };
    let entry =
        |rollup: Option<&UsageRollup>| [embedded("c", rollup.cloned(), RollupOrigin::End, 1)];
    assert!(!partial(&[model("m", 1)], &[]));
    assert!(!partial(&entry(Some(&whole)), &[child("c", true, None)]));
    assert!(!partial(&[], &[child("c", true, Some(whole.clone()))]));
    assert!(
        partial(&[], &[child("c", false, Some(whole.clone()))]),
        "still running"
    );
    assert!(
        partial(&entry(Some(&whole)), &[child("c", false, None)]),
        "the last known"
    );
    assert!(
        partial(&[], &[child("c", true, None)]),
        "settled but unknown"
    );
    assert!(
        partial(&entry(None), &[]),
        "an orphan of which nothing is known"
    );
    assert!(
        partial(&entry(Some(&half)), &[child("c", true, None)]),
        "known in part"
    );
    assert!(partial(
        &[],
        &[child("c", true, Some(whole)), child("d", false, None)]
    ));
}

#[test]
fn a_child_of_several_calls_is_one_session() {
    let mut again = child("c", false, None);
    again.tool_call_id = "call-2".into();
    let sum = of("p", 0, &[], &[child("c", true, Some(leaf("c", 3))), again]);
    assert_eq!(sum.sub_agents.sessions.len(), 1);
    assert_eq!((sum.sub_agents.calls, sum.tokens.prompt), (2, 3));
    assert!(sum.partial, "its second call is open");
}

#[test]
fn counters_of_agents_add_up() {
    let counted = |custom: Value| UsageRollup {
        custom: custom
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
        ..UsageRollup::default()
    };
    let children = [
        child(
            "a",
            true,
            Some(counted(json!({"pages": 2, "cost": 0.5, "note": "x"}))),
        ),
        child("b", true, Some(counted(json!({"pages": 3, "cost": 1})))),
    ];
    let sum = of("p", 0, &[], &children);
    assert_eq!(json!(sum.custom), json!({"pages": 5, "cost": 1.5}));
}

#[test]
fn sums_do_not_overflow() {
    let huge = of("c", u64::MAX, &[model("m", u64::MAX / 3)], &[]);
    let sum = of(
        "p",
        1,
        &[model("m", u64::MAX / 3)],
        &[child("c", true, Some(huge))],
    );
    assert_eq!(sum.steps, u64::MAX);
    assert_eq!(sum.tokens.total, u64::MAX);
}

/// Every ledger over these entries, with any of its child entries repeated anywhere behind.
#[test]
fn duplicates_never_change_the_sum() {
    let entries = [
        model("m", 1),
        embedded("a", Some(leaf("a", 10)), RollupOrigin::End, 3),
        embedded("b", None, RollupOrigin::End, 4),
        embedded("a", Some(leaf("a", 100)), RollupOrigin::Recovery, 2),
        embedded("lost", Some(leaf("lost", 1_000)), RollupOrigin::End, 1),
    ];
    for known in [
        vec![],
        vec![child("a", true, None)],
        vec![
            child("a", true, Some(leaf("a", 7))),
            child("b", false, None),
        ],
    ] {
        let expected = of("p", 2, &entries, &known);
        for repeated in 1..entries.len() {
            for at in repeated..=entries.len() {
                let mut ledger = entries.to_vec();
                ledger.insert(at, entries[repeated].clone());
                assert_eq!(
                    of("p", 2, &ledger, &known),
                    expected,
                    "{repeated} again at {at}"
                );
                ledger.insert(at, entries[repeated].clone());
                assert_eq!(of("p", 2, &ledger, &known), expected);
            }
        }
        let mut twice = known.clone();
        twice.extend(known);
        assert_eq!(
            of("p", 2, &entries, &twice),
            expected,
            "refs that are told twice"
        );
    }
}
