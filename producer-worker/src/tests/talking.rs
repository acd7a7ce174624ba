//! Whole conversations of each agent.

use super::*;

#[test]
fn a_researcher_quotes_verbatim() {
    for seed in 1..6 {
        let documents = wild_documents(seed);
        for question in [
            "Which ships carry cargo?",
            "港口的船",
            "sails \"AND\" harbour",
            "🚢",
            "NEAR(",
        ] {
            let message = json!({ "threadId": "t9", "question": question }).to_string();
            let mut state = state_of(&documents);
            state.insert("extra".into(), json!("CANARY-EXTRA"));
            let outcome = research(&message, state);
            let output = outcome.output.expect("an output");
            assert_eq!(
                (&output["threadId"], &output["question"]),
                (&json!("t9"), &json!(question))
            );
            let report = json!({ "sections": [output] });
            assert_verbatim(&quotes(&report), &documents);
            assert!(!outcome.said.contains("CANARY"));
            assert_eq!(outcome.state["documentCount"], documents.len());
            assert_eq!(outcome.state["extra"], "CANARY-EXTRA");
            assert_eq!(outcome.state.get("documents"), None);
            let findings = outcome.state["findings"].as_array().unwrap();
            assert_eq!(findings.len(), quotes(&report).len());
            assert!(
                findings
                    .iter()
                    .all(|finding| finding["note"].as_str().unwrap().contains("CANARY-TITLE"))
            );
        }
    }
}

#[test]
fn a_researcher_that_finds_nothing_says_so() {
    let outcome = research("zebra quantum", state_of(&wild_documents(3)));
    assert_eq!(
        outcome.output,
        Some(json!({ "question": "zebra quantum", "findings": [] }))
    );
    assert_eq!(outcome.calls, [["search"], ["finish"]]);
}

#[test]
fn only_what_stands_in_the_document_is_recorded() {
    let documents = [Document {
        id: "a".into(),
        title: "t".into(),
        text: "The ship  sails.\r\nSlowly.".into(),
    }];
    let agent = agents().find("thread-researcher").unwrap();
    let session = Session::start(agent, "ship", state_of(&documents)).unwrap();
    let record = |id: &str, quote: &str| {
        session.call(
            "record_finding",
            json!({ "documentId": id, "quote": quote }),
        )
    };
    for (id, quote) in [
        ("a", "The ship sails."),
        ("a", "the ship"),
        ("a", "sails.\nSlowly"),
        ("b", "The ship"),
        ("a", ""),
        ("a", "  "),
        ("a", &"x".repeat(5000)),
    ] {
        assert!(record(id, quote).is_err(), "{quote:?}");
    }
    assert_eq!(session.state()["findings"], json!([]));
    for _ in 0..2 {
        let result = record("a", "ship  sails.\r\nSlowly").unwrap();
        assert_eq!(
            result,
            json!({ "documentId": "a", "quote": "ship  sails.\r\nSlowly" })
        );
    }
    assert_eq!(
        session.state()["findings"].as_array().unwrap().len(),
        1,
        "the same finding is recorded once"
    );
}

#[test]
fn a_planner_composes_a_report_of_verbatim_quotes() {
    for seed in 1..4 {
        let documents = wild_documents(seed);
        for message in [
            "Which ships carry cargo, and where is the harbour?",
            r#"{"topic": "ship"}"#,
            "港口的船",
            "🚢",
        ] {
            let outcome = planner(message, state_of(&documents));
            let report = outcome.output.expect("a report");
            assert_verbatim(&quotes(&report), &documents);
            assert_eq!(outcome.phases, ["researching", "writing", "done"]);
            let state = &outcome.state;
            assert_eq!(
                state.as_object().unwrap().keys().collect::<Vec<_>>(),
                ["phase", "topic", "threads", "findings"]
            );
            let threads = state["threads"].as_array().unwrap();
            assert!((2..=6).contains(&threads.len()));
            assert!(threads.iter().all(|thread| thread["status"] == "done"));
            assert_eq!(report["sections"].as_array().unwrap().len(), threads.len());
            assert_eq!(
                state["findings"].as_array().unwrap().len(),
                quotes(&report).len()
            );
            assert!(
                !outcome.said.contains("CANARY"),
                "titles and notes stay in the state"
            );
            assert_eq!(outcome.calls[0], ["plan"]);
            assert_eq!(
                outcome.calls[1],
                vec!["subagent__thread-researcher"; threads.len()]
            );
            assert_eq!(outcome.calls[2..], [["compose"], ["finish"]]);
            assert!(!outcome.texts.last().unwrap().is_empty());
        }
        let found = planner("harbour cargo", state_of(&documents));
        assert!(
            !quotes(&found.output.unwrap()).is_empty(),
            "what the documents hold is found"
        );
    }
}

#[test]
fn the_state_that_comes_in_stays_in_the_state() {
    let documents = wild_documents(4);
    let mut state = state_of(&documents);
    let held = json!([{ "threadId": "t1", "documentId": "CANARY-ID", "quote": "CANARY-QUOTE", "note": "CANARY-NOTE" }]);
    state.insert("findings".into(), held.clone());
    state.insert("secret".into(), json!({ "deep": ["CANARY-SECRET"] }));
    state.insert(
        "threads".into(),
        json!([{ "id": "t2", "question": "CANARY-OLD", "status": "done" }]),
    );
    state.insert("topic".into(), json!("CANARY-TOPIC"));
    let outcome = planner("ships and cargo", state);
    assert!(!outcome.said.contains("CANARY"));
    assert_eq!(
        outcome.state["secret"],
        json!({ "deep": ["CANARY-SECRET"] })
    );
    assert_eq!(outcome.state["findings"][0], held[0]);
    let ids: Vec<&Value> = outcome.state["threads"]
        .as_array()
        .unwrap()
        .iter()
        .map(|thread| &thread["id"])
        .collect();
    assert_eq!(ids, ["t3", "t4"], "new threads are told from old ones");
    let projected = projection::project_state("planner", &outcome.state);
    assert!(!projected.to_string().contains("CANARY"));
    assert_eq!(projected["phase"], "done");
}

#[test]
fn a_second_message_begins_a_new_plan() {
    let documents = wild_documents(5);
    let mut session = Session::start(
        agents().find("planner").unwrap(),
        "ships",
        state_of(&documents),
    )
    .unwrap();
    let first = plan(&mut session);
    session.message("cargo and harbour");
    let second = plan(&mut session);
    let report = second.output.unwrap();
    assert_eq!(report["topic"], "cargo and harbour");
    assert_verbatim(&quotes(&report), &documents);
    let before = first.state["findings"].as_array().unwrap().len();
    assert_eq!(
        second.state["findings"].as_array().unwrap().len(),
        before + quotes(&report).len()
    );
}

#[test]
fn a_researcher_that_fails_is_tried_again_and_left_out() {
    let mut session = Session::start(
        agents().find("planner").unwrap(),
        "ships, cargo, sails",
        state_of(&wild_documents(6)),
    )
    .unwrap();
    let mut starts = 0;
    let outcome = session.run(&mut |_, arguments, state| {
        if arguments["question"] == "cargo" {
            starts += 1;
            return (Err("unreachable".into()), None);
        }
        let child = research(&arguments.to_string(), state);
        (child.output.ok_or(String::new()), Some(child.state))
    });
    assert_eq!(starts, 2);
    let report = outcome.output.unwrap();
    assert_eq!(
        report["sections"][1],
        json!({ "threadId": "t2", "question": "cargo", "findings": [] })
    );
    assert!(
        !report["sections"][0]["findings"]
            .as_array()
            .unwrap()
            .is_empty()
    );
    let statuses: Vec<&Value> = outcome.state["threads"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| &t["status"])
        .collect();
    assert_eq!(statuses, ["done", "failed", "done"]);
}

#[test]
fn what_a_researcher_makes_up_is_dropped() {
    let documents = [Document {
        id: "a".into(),
        title: "t".into(),
        text: "A ship sails.".into(),
    }];
    let mut session = Session::start(
        agents().find("planner").unwrap(),
        "ship",
        state_of(&documents),
    )
    .unwrap();
    let outcome = session.run(&mut |_, arguments, _| {
        let findings = json!([
            { "documentId": "a", "quote": "A ship sinks." },
            { "documentId": "b", "quote": "A ship sails." },
            { "documentId": "a", "quote": "ship sails" },
        ]);
        let output = json!({ "threadId": arguments["threadId"], "question": arguments["question"], "findings": findings });
        (Ok(output), None)
    });
    let report = outcome.output.unwrap();
    assert!(
        quotes(&report)
            .iter()
            .all(|quote| *quote == ("a", "ship sails"))
    );
    assert_eq!(report["sources"], json!([{ "documentId": "a" }]));
}

#[test]
fn without_documents_the_project_itself_is_researched() {
    let own = corpus::take(&mut Map::new()).unwrap();
    let topic = passages::split(&own[0].text)[0].to_owned();
    for state in [Map::new(), state_of(&[])] {
        let report = planner(&topic, state.clone()).output.unwrap();
        assert!(!quotes(&report).is_empty());
        assert_verbatim(&quotes(&report), &own);
        assert!(
            !quotes(&json!({ "sections": [research(&topic, state).output.unwrap()] })).is_empty()
        );
    }
}

#[test]
fn a_run_is_the_same_each_time() {
    let run = || {
        planner(
            "Which ships carry cargo, and where is the harbour?",
            state_of(&wild_documents(2)),
        )
    };
    let (first, second) = (run(), run());
    assert_eq!(first.said, second.said);
    assert_eq!(first.state, second.state);
}
