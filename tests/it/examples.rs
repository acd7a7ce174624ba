//! The examples, run: each does what it says.

use remote_agents::native::Host;
use serde_json::json;

use crate::support::in_world;

#[path = "../../examples/compact_summary.rs"]
mod compact_summary;
#[path = "../../examples/conversation.rs"]
mod conversation;
#[path = "../../examples/minimal.rs"]
mod minimal;
#[path = "../../examples/parallel_tools.rs"]
mod parallel_tools;
#[path = "../../examples/remote_sub_agent.rs"]
mod remote_sub_agent;

#[test]
fn the_minimal_agent_calls_its_tool_and_answers() {
    in_world(|| async {
        let host = Host::new(|_| minimal::agents());
        let answer = host.say("crier", "s-1", "the tide is in").await.unwrap();
        assert_eq!(answer, "THE TIDE IS IN");
    });
    let source = include_str!("../../examples/minimal.rs");
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    let lines = source.lines().filter(is_code).count();
    assert!(lines <= 20, "{lines} lines");
}

#[test]
fn a_remote_sub_agent_is_heard_on_its_parent_s_stream_and_its_output_is_typed() {
    in_world(|| async {
        let (answer, said) = remote_sub_agent::run().await.unwrap();
        assert!(answer.answer.contains("full moon"), "{answer:?}");
        assert_eq!(answer.book, "The Almanac");
        let is_heard = |agent: &str, kind: &str| {
            let mut said = said.iter();
            said.any(|(of, what)| of == agent && what == kind)
        };
        assert!(is_heard("librarian", "tool_end") && is_heard("clerk", "subagent_end"));
    });
}

#[test]
fn parallel_tools_run_at_once_and_the_serial_one_alone() {
    in_world(|| async {
        let seen = parallel_tools::run().await.unwrap();
        assert_eq!(seen.most_at_once.get(), 3);
        let wanted = ["Brest", "Kiel", "Rotterdam"]
            .into_iter()
            .flat_map(|name| [format!("open {name}"), format!("shut {name}")]);
        assert_eq!(*seen.logbook.borrow(), wanted.collect::<Vec<_>>());
    });
}

#[test]
fn a_conversation_of_many_turns_stays_short_for_the_model_and_forgets_nothing() {
    in_world(|| async {
        let (answers, most, summary) = conversation::run().await.unwrap();
        let wanted: Vec<_> = (1..=12)
            .map(|n| json!(format!("{n} things were said")))
            .collect();
        assert_eq!(answers, wanted);
        assert!(most <= 12, "{most} messages of 48");
        assert!(summary.contains("Tide number 1 came in."), "{summary}");
    });
}

#[test]
fn a_compact_summary_crosses_to_the_parent_and_the_data_does_not() {
    in_world(|| async {
        let (state, bytes) = compact_summary::run().await.unwrap();
        let surveys = state["surveys"].as_object().unwrap();
        assert_eq!(surveys.len(), 1);
        let summary = surveys.values().next().unwrap();
        assert_eq!(
            summary,
            &json!({"phase": "surveyed", "readingCount": 86_400})
        );
        assert!(
            bytes > 1_000_000 && state.to_string().len() < 200,
            "{bytes}"
        );
    });
}
