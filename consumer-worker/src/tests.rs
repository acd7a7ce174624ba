#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::rc::Rc;

use remote_agents::agent::OfflineModel;
use remote_agents::error::Code;
use remote_agents::store::SubLocation;
use remote_agents::{Agent, Error};
use serde_json::{Map, Value, json};

use crate::bench::{Nowhere, Outcome, Session};
use crate::documents;

fn writer() -> Rc<Agent> {
    let agents = crate::agents::agents(Rc::new(OfflineModel::new()), Rc::new(Nowhere)).unwrap();
    agents.find("writer").unwrap()
}

fn start(state: Value) -> Result<Session, Error> {
    Session::start(
        writer(),
        "Ships in the harbour",
        state.as_object().unwrap().clone(),
    )
}

fn report() -> Value {
    json!({
        "topic": "Ships in the harbour",
        "summary": "2 quotations from 1 of 2 documents on 1 of 2 questions.",
        "sections": [
            { "threadId": "t1", "question": "Ships", "findings": [
                { "documentId": "a", "quote": "The ship 船\r\nsails." },
                { "documentId": "a", "quote": "It is *red*." },
            ] },
            { "threadId": "t2", "question": "harbour", "findings": [] },
        ],
        "sources": [{ "documentId": "a" }],
    })
}

fn planner_state() -> Value {
    json!({ "phase": "done", "topic": "x", "threads": [1, 2], "findings": [1, 2, 3], "more": "CANARY" })
}

/// A call's arguments and the state that it handed down.
type Call = (Value, Map<String, Value>);

/// Runs a writer whose research says this; the arguments and states that the research was given.
fn write(session: &mut Session, result: Result<Value, &str>) -> (Outcome, Vec<Call>) {
    let mut given = Vec::new();
    let outcome = session.run(&mut |sub, arguments, state| {
        assert_eq!(
            (sub.agent_type.as_str(), sub.location),
            ("planner", SubLocation::Remote)
        );
        given.push((arguments.clone(), state));
        match &result {
            Ok(output) => (Ok(output.clone()), Some(planner_state())),
            Err(error) => (Err((*error).to_owned()), None),
        }
    });
    (outcome, given)
}

#[test]
fn a_writer_passes_on_the_report_and_tells_it() {
    let documents = json!([{ "id": "a", "title": "A", "text": "The ship 船\r\nsails. It is *red*." }, { "id": "b", "title": "", "text": "" }]);
    let mut session = start(json!({ "documents": documents, "extra": 1 })).unwrap();
    let (outcome, given) = write(&mut session, Ok(report()));
    assert_eq!(outcome.output, Some(report()));
    assert_eq!(given.len(), 1);
    assert_eq!(given[0].0, json!({ "message": "Ships in the harbour" }));
    assert_eq!(
        given[0].1["documents"], documents,
        "the documents are handed down as they came"
    );
    assert_eq!(
        outcome.state,
        json!({
            "phase": "researched",
            "topic": "Ships in the harbour",
            "research": { "phase": "done", "threadCount": 2, "findingCount": 3, "sessionId": "bench-child" },
            "extra": 1,
        })
    );
    assert!(
        !outcome.said.contains("CANARY"),
        "the research's state is folded, not told"
    );
    assert_eq!(outcome.calls, [["subagent__research"], ["finish"]]);
    assert_eq!(
        outcome.texts[1],
        "# Ships in the harbour\n\n2 quotations from 1 of 2 documents on 1 of 2 questions.\n\n\
         ## Ships\n\n> The ship 船\n> sails.\n> [a]\n\n> It is *red*.\n> [a]\n\n## harbour\n\nsources: a"
    );
}

#[test]
fn without_documents_none_are_handed_down() {
    for state in [json!({}), json!({ "documents": [] })] {
        let (_, given) = write(&mut start(state).unwrap(), Ok(report()));
        assert_eq!(given[0].1, Map::new());
    }
}

#[test]
fn a_failed_research_is_told_as_such() {
    let mut session = start(json!({})).unwrap();
    let (outcome, given) = write(&mut session, Err("the other service does not answer"));
    assert_eq!(given.len(), 2, "it is tried once more");
    let output = outcome.output.unwrap();
    assert_eq!(
        (&output["summary"], &output["sections"]),
        (&json!("the other service does not answer"), &json!([]))
    );
    assert_eq!(
        outcome.texts.last().unwrap(),
        "the other service does not answer"
    );
    assert_eq!(outcome.state["phase"], "failed");
    assert_eq!(outcome.state["research"]["phase"], "unknown");
}

#[test]
fn a_second_message_is_researched_with_the_same_documents() {
    let mut session =
        start(json!({ "documents": [{ "id": "a", "title": "A", "text": "x" }] })).unwrap();
    write(&mut session, Ok(report()));
    session.message("Sails");
    let mut second = report();
    second["topic"] = json!("Sails");
    let (outcome, given) = write(&mut session, Ok(second));
    assert_eq!(given[0].0, json!({ "message": "Sails" }));
    assert_eq!(given[0].1["documents"][0]["id"], "a");
    assert_eq!(outcome.state["topic"], "Sails");
}

#[test]
fn malformed_documents_are_refused_by_field() {
    let cases = [
        (json!(null), "state.documents"),
        (json!({}), "state.documents"),
        (json!(["x"]), "state.documents[0]"),
        (
            json!([{ "id": "", "title": "t", "text": "x" }]),
            "state.documents[0].id",
        ),
        (
            json!([{ "id": "a", "title": "t", "text": "x" }, { "id": "b", "text": "x" }]),
            "state.documents[1].title",
        ),
        (
            json!([{ "id": "a", "title": "t", "text": null }]),
            "state.documents[0].text",
        ),
        (
            json!([{ "id": "a", "title": "t", "text": "x" }, { "id": "a", "title": "t", "text": "x" }]),
            "state.documents[1].id",
        ),
    ];
    for (documents, field) in cases {
        let error = start(json!({ "documents": documents }))
            .err()
            .expect("a refusal");
        assert_eq!(
            (error.code, error.field.as_deref()),
            (Code::ValidationError, Some(field))
        );
    }
    let text = "x".repeat(documents::LIMIT);
    let error = start(json!({ "documents": [{ "id": "a", "title": "t", "text": text }] }))
        .err()
        .expect("a refusal");
    assert_eq!(
        (error.code, error.field.as_deref()),
        (Code::PayloadTooLarge, Some("state.documents"))
    );
}
