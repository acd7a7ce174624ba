//! The writer: has a topic researched by another service and writes what came out.
//!
//! Its output is the research service's report, checked against the shape declared here; its
//! answer is that report as text. The two services share the wire and no code.

use std::rc::Rc;

use remote_agents::agent::model::LanguageModel;
use remote_agents::agent::{Entry, SubAgent, SubAgentPayload, ToolContext};
use remote_agents::protocol::ids::AgentType;
use remote_agents::store::{Database, SubLocation};
use remote_agents::transport::Transport;
use remote_agents::{Agent, Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::documents;

/// The agent's type.
pub const AGENT_TYPE: &str = "writer";

/// The agent type that does the research, in the other service.
pub const RESEARCH_AGENT_TYPE: &str = "planner";

/// The agent type that the research delegates to in its turn.
pub const THREAD_AGENT_TYPE: &str = "thread-researcher";

/// A topic as it is kept, in characters.
const LONGEST_TOPIC: usize = 2000;

const INSTRUCTIONS: &str = "\
You write a report on a topic. The research is done by another service that quotes from a fixed \
set of documents. You add no knowledge of your own and you change no character of a quotation.

The message gives the topic.

Follow these steps:

1. Call `subagent__research` with the topic.
2. Write the report for the reader, in Markdown: the topic as the title, the summary, then for each section \
its question and its quotations, each with the id of the document it is from. Say so where nothing was found.
3. In the same answer, call `finish` with the report exactly as the research returned it.
";

/// Where a writer stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The research is under way.
    #[default]
    Researching,
    /// The research has come back.
    Researched,
    /// The research failed.
    Failed,
}

/// The writer's state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WriterState {
    /// Where it stands.
    pub phase: Phase,
    /// What it writes about.
    pub topic: String,
    /// How the research stands, once it has settled.
    pub research: Option<Research>,
}

/// What is kept of the research.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Research {
    /// The phase in which it ended; `unknown` when its state did not come along.
    pub phase: String,
    /// Its threads.
    pub thread_count: u64,
    /// Its findings.
    pub finding_count: u64,
    /// Its session.
    pub session_id: String,
}

/// What the research is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResearchInput {
    /// What to research. As the only field, and by this name, it is handed on as it stands.
    pub message: String,
}

/// The report, as the research hands it in and the writer passes it on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// What was researched.
    pub topic: String,
    /// What came out, in a few sentences.
    pub summary: String,
    /// One section for each thread of the research.
    pub sections: Vec<Section>,
    /// The documents that are quoted, each once.
    pub sources: Vec<Source>,
}

/// One question and what answers it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Section {
    /// The thread's id.
    #[serde(default)]
    pub thread_id: String,
    /// The question.
    pub question: String,
    /// The quotations; empty when nothing was found.
    pub findings: Vec<Quotation>,
}

/// A quotation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Quotation {
    /// The document that is quoted.
    pub document_id: String,
    /// A verbatim slice of its text.
    pub quote: String,
}

/// A document that is quoted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// Its id.
    pub document_id: String,
}

/// What the writer reads of the research's final state.
#[derive(Deserialize)]
struct ResearchState {
    phase: String,
    threads: Vec<Value>,
    findings: Vec<Value>,
}

/// The agent. `planner` must lead to the research service's raw mount.
///
/// # Errors
/// None in practice: its types are well formed.
pub fn agent(model: Rc<dyn LanguageModel>, planner: Rc<dyn Transport>) -> Result<Agent> {
    let research = SubAgent::new(
        "research",
        "Has a topic researched in the documents and comes back with a report that quotes them.",
        AgentType::parse(RESEARCH_AGENT_TYPE)?,
        SubLocation::Remote,
        planner,
    )
    .with_input::<ResearchInput>()
    .with_output::<Report>()
    .with_initial_state(hand_down);
    Ok(
        Agent::new(AgentType::parse(AGENT_TYPE)?, INSTRUCTIONS, model)
            .with_state::<WriterState>()
            .with_output::<Report>()
            .with_sub_agent(research)
            .with_before_entry(enter)
            .with_after_sub_agent(fold),
    )
}

/// Moves the documents into a table of the object and notes the topic.
fn enter(entry: &mut Entry<'_>) -> Result<()> {
    if !entry.is_start {
        return Ok(());
    }
    let documents = documents::take(entry.state)?;
    documents::store(entry.database, &documents)?;
    let topic: String = entry.message.trim().chars().take(LONGEST_TOPIC).collect();
    entry.state.entry("topic").or_insert_with(|| topic.into());
    Ok(())
}

/// The research begins with the documents that came along, if any did.
fn hand_down(
    _arguments: &Value,
    _state: &Value,
    database: &dyn Database,
) -> Result<Map<String, Value>> {
    let documents = documents::load(database)?;
    let mut state = Map::new();
    if !documents.is_empty() {
        let documents = serde_json::to_value(documents)
            .map_err(|e| Error::internal(format!("documents: {e}")))?;
        state.insert(documents::DOCUMENTS.into(), documents);
    }
    Ok(state)
}

/// Sets how the research came out. Doing it again changes nothing.
fn fold(payload: &SubAgentPayload, context: &ToolContext) -> Result<()> {
    let count = |items: Vec<Value>| u64::try_from(items.len()).unwrap_or(u64::MAX);
    let child = payload
        .child_custom_state
        .as_ref()
        .map(ResearchState::deserialize);
    let (phase, thread_count, finding_count) = match child {
        Some(Ok(child)) => (child.phase, count(child.threads), count(child.findings)),
        Some(Err(_)) | None => ("unknown".to_owned(), 0, 0),
    };
    // A later message brings another topic, which the entry hook cannot write.
    let topic = payload
        .output
        .as_ref()
        .and_then(|output| Some(output.get("topic")?.as_str()?.to_owned()));
    let session_id = payload.sub_session_id.to_string();
    let research = Research {
        phase,
        thread_count,
        finding_count,
        session_id,
    };
    context.update(|state: &mut WriterState| {
        state.phase = if payload.success {
            Phase::Researched
        } else {
            Phase::Failed
        };
        state.research = Some(research);
        if let Some(topic) = topic {
            state.topic = topic;
        }
    })
}
