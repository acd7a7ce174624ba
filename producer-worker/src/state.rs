//! The shapes of the research agents: their states, their reports, and the documents they read.
//!
//! What a state holds beyond these fields stays where it is and is never read out. A finding's
//! `note` is part of a state alone: no shape that crosses to a model or a caller has it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A document to research in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// Unique among the documents of a session.
    pub id: String,
    /// What it is called.
    pub title: String,
    /// All of its text; quotes are slices of it.
    pub text: String,
}

/// Where a planner stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The topic is not split yet.
    #[default]
    Planning,
    /// The threads are being researched.
    Researching,
    /// Every thread has settled; the report is being made.
    Writing,
    /// The report is made.
    Done,
}

impl Phase {
    /// The wire spelling.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Planning => "planning",
            Self::Researching => "researching",
            Self::Writing => "writing",
            Self::Done => "done",
        }
    }
}

/// The planner's state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlannerState {
    /// Where it stands.
    pub phase: Phase,
    /// What is researched.
    pub topic: String,
    /// The questions that the topic was split into.
    pub threads: Vec<Thread>,
    /// What the threads found.
    pub findings: Vec<Finding>,
}

/// One question of a topic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Thread {
    /// Unique within the session.
    pub id: String,
    /// The question.
    pub question: String,
    /// `pending`, `done` or `failed`.
    pub status: String,
}

/// A quotation that answers a question. Lives in a state only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// The thread it belongs to.
    pub thread_id: String,
    /// The document that is quoted.
    pub document_id: String,
    /// A verbatim slice of the document's text.
    pub quote: String,
    /// Why it was taken; for the service's own eyes.
    #[serde(default)]
    pub note: String,
}

/// The state of a thread researcher.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ResearcherState {
    /// The thread, as its planner names it; empty without one.
    pub thread_id: String,
    /// The question.
    pub question: String,
    /// How many documents there are to search.
    pub document_count: u64,
    /// What was searched for.
    pub searched: Vec<String>,
    /// What was found.
    pub findings: Vec<Finding>,
}

/// What a planner is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TopicInput {
    /// What to research.
    pub topic: String,
}

/// What a thread researcher is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ThreadInput {
    /// The thread's id.
    pub thread_id: String,
    /// The question to answer from the documents.
    pub question: String,
}

/// A quotation, as it leaves an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Quotation {
    /// The document that is quoted.
    pub document_id: String,
    /// A verbatim slice of its text.
    pub quote: String,
}

/// What a thread researcher hands in. Also one section of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ThreadReport {
    /// The thread's id; empty when there was none.
    #[serde(default)]
    pub thread_id: String,
    /// The question.
    pub question: String,
    /// The quotations that answer it; empty when nothing does.
    pub findings: Vec<Quotation>,
}

/// What a planner hands in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// What was researched.
    pub topic: String,
    /// What came out, in a few sentences.
    pub summary: String,
    /// One section for each thread.
    pub sections: Vec<ThreadReport>,
    /// The documents that are quoted, each once.
    pub sources: Vec<Source>,
}

/// A document that is quoted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// Its id.
    pub document_id: String,
}
