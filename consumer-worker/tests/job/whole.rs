//! The undisturbed job.

use std::collections::BTreeSet;

use consumer_worker::writer::Report;
use remote_agents::protocol::frame::Frame;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::checks::{
    child_ends_are_followed_by_their_calls, count, hold, nothing_is_lost_on_the_way, of,
    quotes_are_verbatim, writer_log,
};
use crate::library::{documents, topic};
use crate::paired;
use crate::world::{Side, WRITER, World, in_world};

async fn ends_well(world: &World) -> (Value, Value, Value) {
    let (log, end) = world.follow_writer().await;
    let Frame::End(end) = end else {
        panic!("{end:?}")
    };
    assert_eq!(log, writer_log(world), "what was read is what is stored");
    (end.output.unwrap(), end.state.unwrap(), end.usage.unwrap())
}

#[test]
fn random_documents_are_researched_and_quoted_verbatim() {
    for seed in 1..=6 {
        in_world(move |world| async move {
            let documents = documents(seed, 9);
            world.start(&topic(), &documents).await;
            let (output, state, usage) = ends_well(&world).await;
            assert!(paired::count() > 20, "{} histories", paired::count());
            let report = Report::deserialize(&output).expect("the output has its declared shape");
            assert_eq!(serde_json::to_value(&report).unwrap(), output);
            let quotes = quotes_are_verbatim(&output, &documents);
            assert!(quotes >= 6, "seed {seed}: {quotes} quotes");
            assert_eq!(report.sections.len(), 6);

            hold(&world);
            nothing_is_lost_on_the_way(&world);
            let log = writer_log(&world);
            child_ends_are_followed_by_their_calls(&own(&log, WRITER));

            // The sections are the planner's threads, each with its own finding or none.
            let (planner, _) = world.sessions()[1].clone();
            let path = format!("/api/child-snapshot?sessionId={planner}");
            let (status, snapshot) = world.get(Side::Consumer, &path).await;
            assert_eq!(status, 200);
            let threads: Vec<&str> = snapshot["state"]["threads"]
                .as_array()
                .unwrap()
                .iter()
                .map(|thread| thread["id"].as_str().unwrap())
                .collect();
            let sections: Vec<&str> = report
                .sections
                .iter()
                .map(|section| section.thread_id.as_str())
                .collect();
            assert_eq!(sections, threads);
            for section in &report.sections {
                assert!(
                    !section.findings.is_empty(),
                    "seed {seed}: {}",
                    section.question
                );
            }

            let findings = snapshot["state"]["findings"].as_array().unwrap().len();
            assert_eq!(
                state["research"],
                json!({ "phase": "done", "threadCount": 6, "findingCount": findings, "sessionId": planner })
            );
            assert_eq!(
                (&state["phase"], &state["topic"]),
                (&json!("researched"), &json!(topic()))
            );
            assert_eq!(
                state.get("documents"),
                None,
                "the documents do not stay in the state"
            );

            assert_four_at_once(&own(&log, planner.as_str()));
            child_ends_are_followed_by_their_calls(&own(&log, planner.as_str()));
            assert_usage_is_the_sum(&world, &usage).await;
        });
    }
}

fn own(log: &crate::world::Log, session: &str) -> crate::world::Log {
    (1..).zip(of(log, session).cloned()).collect()
}

fn assert_four_at_once(planner: &crate::world::Log) {
    let mut open = BTreeSet::new();
    let mut most = 0;
    for (_, chunk) in planner {
        let child = chunk["subSessionId"].to_string();
        match chunk["type"].as_str().unwrap() {
            "subagent_start" => drop(open.insert(child)),
            "subagent_end" => drop(open.remove(&child)),
            _ => {}
        }
        most = most.max(open.len());
    }
    assert_eq!((most, count(planner, "subagent_start")), (4, 6));
}

async fn assert_usage_is_the_sum(world: &World, end: &Value) {
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{value}"));
    let mut sum = [0; 5];
    let mut whole = Value::Null;
    let sessions = world.sessions();
    assert_eq!(sessions.len(), 8);
    for (session, agent_type) in &sessions {
        let rollup = world.usage(session, agent_type).await;
        let own = &rollup["own"];
        for (sum, of) in sum.iter_mut().zip([
            &own["tokens"]["prompt"],
            &own["tokens"]["completion"],
            &own["tokens"]["total"],
            &own["tools"]["calls"],
            &own["steps"],
        ]) {
            assert!(number(of) > 0, "{session} {own}");
            *sum += number(of);
        }
        assert_eq!(rollup["partial"], false, "{session}");
        if *agent_type == "writer" {
            whole = rollup;
        }
    }
    for rollup in [&whole, end] {
        let told = [
            &rollup["tokens"]["prompt"],
            &rollup["tokens"]["completion"],
            &rollup["tokens"]["total"],
            &rollup["tools"]["calls"],
            &rollup["steps"],
        ];
        assert_eq!(told.map(number), sum);
        assert_eq!(rollup["subAgents"]["calls"], 7);
        assert_eq!(
            rollup["byModel"]["offline"]["total"],
            rollup["tokens"]["total"]
        );
    }
}

#[test]
fn without_documents_the_projects_own_documentation_is_quoted() {
    in_world(|world| async move {
        world.start("architecture and changelog", &[]).await;
        let (output, _, _) = ends_well(&world).await;
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let corpus: Vec<Value> = [
            "README.md",
            "ARCHITECTURE.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
        ]
        .into_iter()
        .map(|name| {
            let text = std::fs::read_to_string(format!("{root}/{name}")).unwrap();
            json!({ "id": name, "text": text })
        })
        .collect();
        assert!(quotes_are_verbatim(&output, &corpus) > 0, "{output}");
        hold(&world);
        nothing_is_lost_on_the_way(&world);
    });
}
