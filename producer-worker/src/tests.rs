#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::rc::Rc;

use remote_agents::Agents;
use remote_agents::agent::OfflineModel;
use remote_agents::error::Code;
use serde_json::{Map, Value, json};

use crate::bench::{Memory, Nowhere, Outcome, Session};
use crate::state::Document;
use crate::{corpus, outline, passages, projection};

/// Numbers that are the same in every run, for texts that look like nothing in particular.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(sides).unwrap()).unwrap()
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.roll(from.len())]
    }
}

const SCRAPS: &[&str] = &[
    "harbour",
    "Gdańsk",
    "naïve",
    "船",
    "港口的船很大。",
    "👩‍👩‍👧",
    "e\u{301}",
    "\u{202e}rtl",
    "<b>bold</b>",
    "`code`",
    "\"quoted\"",
    "it's",
    "AND",
    "NEAR(",
    "*",
    "\\",
    "\u{0}",
    "\u{feff}",
    "1.5",
    "e.g.",
    "U.S.",
    "&amp;",
    "{\"json\": 1}",
    "ship",
    "sails",
    "cargo",
];
const JOINTS: &[&str] = &[
    " ",
    " ",
    " ",
    "  ",
    ". ",
    ". ",
    "? ",
    "!\r\n",
    ".\n\n",
    "\n",
    "\r\n\r\n",
    "\n- ",
    "\n| a | b |\n",
    "\t",
    "\u{a0}",
    "。",
    "\n# ",
];

fn wild_text(dice: &mut Dice, words: usize) -> String {
    let mut text = String::new();
    for _ in 0..words {
        let scrap = dice.pick(SCRAPS);
        text.push_str(scrap);
        // Now and then a sentence comes again, word for word.
        if dice.roll(20) == 0 {
            let again: String = text
                .chars()
                .rev()
                .take(60)
                .collect::<Vec<_>>()
                .into_iter()
                .rev()
                .collect();
            text.push_str(&again);
        }
        text.push_str(dice.pick(JOINTS));
    }
    text
}

fn wild_documents(seed: u64) -> Vec<Document> {
    let mut dice = Dice(seed);
    let mut documents: Vec<Document> = (0..6)
        .map(|i| Document {
            id: format!("doc/{i} é"),
            title: format!("CANARY-TITLE-{i}"),
            text: wild_text(&mut dice, 40 * (i + 1)),
        })
        .collect();
    documents.push(Document {
        id: "unbroken".into(),
        title: "CANARY-TITLE-u".into(),
        text: "ship".repeat(2000),
    });
    documents.push(Document {
        id: "cjk".into(),
        title: "CANARY-TITLE-c".into(),
        text: "港口的船很大船也很多".repeat(200),
    });
    documents.push(Document {
        id: "empty".into(),
        title: "CANARY-TITLE-e".into(),
        text: String::new(),
    });
    documents.push(Document {
        id: "blank".into(),
        title: "CANARY-TITLE-b".into(),
        text: " \r\n\t ".into(),
    });
    documents
}

fn agents() -> Agents {
    crate::agents::agents(Rc::new(OfflineModel::new()), Rc::new(Nowhere)).unwrap()
}

fn state_of(documents: &[Document]) -> Map<String, Value> {
    let state = json!({ "documents": documents });
    state.as_object().unwrap().clone()
}

fn no_child() -> impl FnMut(
    &remote_agents::agent::SubAgent,
    &Value,
    Map<String, Value>,
) -> (Result<Value, String>, Option<Value>) {
    |_, _, _| panic!("no child is expected")
}

/// Runs a thread researcher.
fn research(message: &str, state: Map<String, Value>) -> Outcome {
    let agent = agents().find("thread-researcher").unwrap();
    Session::start(agent, message, state)
        .unwrap()
        .run(&mut no_child())
}

/// Runs a planner's session with researchers of its own; what they said is part of what was said.
fn plan(session: &mut Session) -> Outcome {
    let mut said = String::new();
    let mut outcome = session.run(&mut |sub, arguments, state| {
        assert_eq!(sub.agent_type.as_str(), "thread-researcher");
        let child = research(&arguments.to_string(), state);
        said.push_str(&child.said);
        (
            child.output.ok_or("no output".to_owned()),
            Some(child.state),
        )
    });
    outcome.said.push_str(&said);
    outcome
}

fn planner(message: &str, state: Map<String, Value>) -> Outcome {
    plan(&mut Session::start(agents().find("planner").unwrap(), message, state).unwrap())
}

fn quotes(report: &Value) -> Vec<(&str, &str)> {
    let sections = report["sections"].as_array().unwrap().iter();
    let findings = sections.flat_map(|section| section["findings"].as_array().unwrap());
    findings
        .map(|finding| {
            (
                finding["documentId"].as_str().unwrap(),
                finding["quote"].as_str().unwrap(),
            )
        })
        .collect()
}

fn assert_verbatim(quotes: &[(&str, &str)], documents: &[Document]) {
    for (id, quote) in quotes {
        let document = documents
            .iter()
            .find(|document| document.id == *id)
            .expect("a document that was sent");
        assert!(
            !quote.trim().is_empty() && document.text.contains(quote),
            "{quote:?} stands not in {id}"
        );
    }
}

#[test]
fn passages_are_slices_that_leave_out_no_word() {
    for seed in 1..20 {
        for document in wild_documents(seed) {
            let text = document.text.as_str();
            let mut behind = 0;
            for piece in passages::split(text) {
                assert!(piece.chars().count() <= passages::LONGEST);
                assert_eq!(piece.trim(), piece);
                let at = piece.as_ptr() as usize - text.as_ptr() as usize;
                assert_eq!(
                    &text[at..at + piece.len()],
                    piece,
                    "a passage is a slice of its text"
                );
                let skipped = &text[behind..at];
                let is_heading = skipped.contains("# ");
                assert!(
                    is_heading || !skipped.chars().any(char::is_alphanumeric),
                    "{skipped:?} was lost"
                );
                behind = at + piece.len();
            }
        }
    }
}

#[test]
fn sentences_stay_whole() {
    let text = "# Boats\n\nThe first boat is red and was built in the year of the flood, by hand. The second boat, \
                \"the blue one.\" is younger and much faster than any other boat in the harbour! Version 1.5 is old.\n\n- a list item\n- another\n";
    assert_eq!(
        passages::split(text),
        [
            "The first boat is red and was built in the year of the flood, by hand.\u{20}The second boat, \
             \"the blue one.\" is younger and much faster than any other boat in the harbour!",
            "Version 1.5 is old.",
            "- a list item",
            "- another",
        ]
    );
    assert_eq!(passages::split("# Only a heading"), ["# Only a heading"]);
    assert_eq!(passages::split(""), Vec::<&str>::new());
}

#[test]
fn any_text_can_be_searched_for() {
    let database = Memory::new();
    let documents = wild_documents(7);
    corpus::store(&database, &documents).unwrap();
    passages::index(&database, &documents).unwrap();
    let long = "word ".repeat(5000) + &"x".repeat(5000);
    let queries = [
        "",
        " ",
        "\"",
        "\"\"\"",
        "'",
        "a AND",
        "OR",
        "NOT",
        "NEAR(a b, 2)",
        "NEAR",
        "text : ship",
        "document: cjk",
        "{text pairs}: x",
        "^ship",
        "ship*",
        "*",
        "(",
        ")",
        "((((",
        "-",
        "--",
        "; DROP TABLE passages",
        "ship\" OR \"x",
        "\u{0}",
        "🚢",
        "👩‍👩‍👧",
        "e\u{301}",
        "\u{301}",
        "港",
        "港口",
        "ﬁ",
        "ß",
        "İ",
        "²",
        "\u{202e}",
        "+",
        "a+b",
        "%",
        "_",
        "\\",
        "`",
        "[]",
        "?",
        "?1",
        ":x",
        "@x",
        "$x",
        &long,
    ];
    for query in queries {
        let found =
            passages::search(&database, query, 5).unwrap_or_else(|e| panic!("{query:?}: {e:?}"));
        assert!(found.len() <= 5);
        for quotation in &found {
            assert_verbatim(&[(&quotation.document_id, &quotation.quote)], &documents);
        }
        if passages::match_query(query).is_none() {
            assert_eq!(found, []);
        }
    }
    let ids = |query| -> Vec<String> {
        passages::search(&database, query, 3)
            .unwrap()
            .into_iter()
            .map(|found| found.document_id)
            .collect()
    };
    assert!(
        ids("的船很").contains(&"cjk".to_owned()),
        "scripts without spaces are searched by pairs"
    );
    assert!(!ids("港").is_empty(), "and by a lone character");
    assert!(!ids("sail").is_empty(), "and words by their stem");
    assert_eq!(ids("zebra quantum"), Vec::<String>::new());
}

#[test]
fn what_matches_best_comes_first_and_once() {
    let text = |id: &str, text: &str| Document {
        id: id.into(),
        title: "t".into(),
        text: text.into(),
    };
    let documents = [
        text("a", "The harbour is old."),
        text(
            "b",
            "Cargo ships in the harbour carry grain.\n\nCargo ships in the harbour carry grain.",
        ),
        text("c", "Nothing to see."),
    ];
    let database = Memory::new();
    corpus::store(&database, &documents).unwrap();
    passages::index(&database, &documents).unwrap();
    let found =
        passages::search(&database, "Which cargo do ships in the harbour carry?", 5).unwrap();
    let ids: Vec<&str> = found
        .iter()
        .map(|quotation| quotation.document_id.as_str())
        .collect();
    assert_eq!(ids, ["b", "a"]);
    assert_eq!(found[0].quote, "Cargo ships in the harbour carry grain.");
}

#[test]
fn a_topic_becomes_two_to_six_questions() {
    let corpus = "Ships carry grain to Riga. Ships carry coal to Malta. Old sails rot. Ships need anchors, and anchors rust.";
    let long = "word ".repeat(3000);
    let many = "one, two, three, four, five, six, seven, eight";
    let topics = [
        "",
        " ",
        "🚢",
        "ships",
        "Ships and sails",
        "How do ships carry grain, and why do sails rot?",
        "zebra",
        "船",
        "港口的船，谷物。",
        "?!",
        "the of and",
        "\"quoted\" 'it'",
        "a\r\nb\tc",
        "\u{0}",
        many,
        &long,
    ];
    for texts in [
        vec![corpus],
        vec![],
        vec![""],
        vec!["港口的船很大。船很多。"],
    ] {
        for topic in topics {
            let questions = outline::questions(topic, &texts);
            assert!(
                (2..=6).contains(&questions.len()),
                "{topic:?} → {questions:?}"
            );
            assert!(
                questions
                    .iter()
                    .all(|question| !question.trim().is_empty() && question.chars().count() <= 300)
            );
            let distinct: std::collections::HashSet<_> = questions.iter().collect();
            assert_eq!(distinct.len(), questions.len(), "{questions:?}");
        }
    }
    assert_eq!(
        outline::questions("How do ships carry grain, and why do sails rot?", &[corpus]),
        ["How do ships carry grain", "why do sails rot"]
    );
    assert_eq!(
        outline::questions("ships", &[corpus])[..2],
        ["ships", "ships: carry"]
    );
    assert_eq!(
        outline::questions("zebra", &[corpus]),
        ["zebra", "More about zebra"]
    );
    assert!(
        outline::questions(many, &[])[5].contains("eight"),
        "nothing of a long topic is lost"
    );
}

#[test]
fn malformed_documents_are_refused_by_field() {
    let cases = [
        (json!("text"), "state.documents"),
        (json!(null), "state.documents"),
        (json!({ "id": "a" }), "state.documents"),
        (json!([1]), "state.documents[0]"),
        (
            json!([{ "title": "t", "text": "x" }]),
            "state.documents[0].id",
        ),
        (
            json!([{ "id": "", "title": "t", "text": "x" }]),
            "state.documents[0].id",
        ),
        (
            json!([{ "id": 5, "title": "t", "text": "x" }]),
            "state.documents[0].id",
        ),
        (
            json!([{ "id": "x".repeat(201), "title": "t", "text": "x" }]),
            "state.documents[0].id",
        ),
        (
            json!([{ "id": "a", "text": "x" }]),
            "state.documents[0].title",
        ),
        (
            json!([{ "id": "a", "title": "t" }]),
            "state.documents[0].text",
        ),
        (
            json!([{ "id": "a", "title": "t", "text": "x" }, { "id": "a", "title": "t", "text": "y" }]),
            "state.documents[1].id",
        ),
    ];
    for agent in ["planner", "thread-researcher"] {
        for (documents, field) in &cases {
            let state = json!({ "documents": documents })
                .as_object()
                .unwrap()
                .clone();
            let error = Session::start(agents().find(agent).unwrap(), "ships", state)
                .err()
                .expect("a refusal");
            assert_eq!(
                (error.code, error.field.as_deref()),
                (Code::ValidationError, Some(*field))
            );
        }
    }
}

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
    for state in [Map::new(), state_of(&[])] {
        let agent = agents().find("planner").unwrap();
        let mut session = Session::start(agent, "architecture", state).unwrap();
        let outcome = plan(&mut session);
        let sources = outcome.output.unwrap()["sources"].clone();
        assert!(
            sources
                .as_array()
                .unwrap()
                .iter()
                .any(|source| source["documentId"] == "ARCHITECTURE.md"),
            "{sources}"
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

#[test]
fn the_public_sees_counts_and_units() {
    let state = json!({
        "phase": "researching", "topic": "x", "extra": 1,
        "threads": [{ "id": "t1", "question": "q", "status": "done" }],
        "findings": [{ "threadId": "t1", "documentId": "a", "quote": "q", "note": "n" }, { "threadId": "t1", "documentId": "a", "quote": "r" }],
    });
    assert_eq!(
        projection::project_state("planner", &state),
        json!({ "phase": "researching", "threadCount": 1, "findingCount": 2 })
    );
    let unknown = json!({ "phase": "unknown", "threadCount": 0, "findingCount": 0 });
    for other in [
        json!(null),
        json!({}),
        json!({ "phase": "x" }),
        json!([]),
        json!({ "phase": "done", "topic": 1 }),
    ] {
        assert_eq!(projection::project_state("planner", &other), unknown);
    }
    assert_eq!(
        projection::project_state("thread-researcher", &state),
        unknown
    );
    for (total, units) in [(0, 0), (1, 1), (1000, 1), (1001, 2)] {
        let rollup = json!({ "sessionId": "s", "tokens": { "total": total }, "byModel": { "m": { "total": total } } });
        assert_eq!(
            projection::project_usage(&rollup),
            json!({ "billingUnits": units })
        );
    }
    assert_eq!(
        projection::project_usage(&json!("x")),
        json!({ "billingUnits": 0 })
    );
}
