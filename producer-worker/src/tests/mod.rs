#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

mod reading;
mod talking;

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

#[allow(clippy::type_complexity)] // Named once; an alias for it would be no clearer.
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
