//! The thread researcher: answers one question with quotations from the documents it was given.
//!
//! It may never report what does not stand verbatim in a document. Notes are made here and go into
//! the state alone.

use std::rc::Rc;

use remote_agents::agent::model::LanguageModel;
use remote_agents::agent::{Entry, Tool, ToolContext, ToolError, typed_tool};
use remote_agents::protocol::ids::AgentType;
use remote_agents::{Agent, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::state::{Finding, Quotation, ResearcherState, ThreadInput, ThreadReport};
use crate::{corpus, passages};

/// The agent's type.
pub const AGENT_TYPE: &str = "thread-researcher";

/// Passages that one search comes back with.
const MOST_PASSAGES: usize = 4;

/// Findings of one thread.
const MOST_FINDINGS: usize = 12;

/// The longest quotation that is recorded, in characters.
const LONGEST_QUOTE: usize = 1200;

/// A query as it is remembered, in characters.
const REMEMBERED: usize = 300;

const INSTRUCTIONS: &str = "\
You research one question in a fixed set of documents. You report quotations from these documents \
and nothing else: you add no knowledge of your own and you change no character of a quotation.

The message gives the question, as JSON with `threadId` and `question` or as plain text.

Follow these steps:

1. Call `search` with the question as the query. If the passages do not help, search again with other words.
2. For each item of `passages` that answers the question, call `record_finding` with its document id and its quote. \
Make these calls in one answer.
3. Write what you found as a list of quotations, and in the same answer call `finish` with the thread id, \
the question and the recorded findings. If nothing was found, hand in an empty list: that is a good answer.
";

/// The agent.
///
/// # Errors
/// None in practice: its type is well formed.
pub fn agent(model: Rc<dyn LanguageModel>) -> Result<Agent> {
    Ok(
        Agent::new(AgentType::parse(AGENT_TYPE)?, INSTRUCTIONS, model)
            .with_state::<ResearcherState>()
            .with_output::<ThreadReport>()
            .with_tool(search())
            .with_tool(record_finding())
            .with_before_entry(enter),
    )
}

/// Moves the documents into tables of the object and notes the question.
fn enter(entry: &mut Entry<'_>) -> Result<()> {
    if !entry.is_start {
        return Ok(());
    }
    let documents = corpus::take(entry.state)?;
    corpus::store(entry.database, &documents)?;
    passages::index(entry.database, &documents)?;
    let input = serde_json::from_str::<ThreadInput>(entry.message).ok();
    let question = input
        .as_ref()
        .map_or(entry.message, |input| input.question.as_str());
    if !entry.state.contains_key("question") {
        entry.state.insert("question".into(), question.into());
    }
    if let (false, Some(input)) = (entry.state.contains_key("threadId"), input) {
        entry
            .state
            .insert("threadId".into(), input.thread_id.into());
    }
    entry
        .state
        .insert("documentCount".into(), documents.len().into());
    Ok(())
}

#[derive(Deserialize, JsonSchema)]
struct SearchInput {
    /// Words to look for; any text will do.
    query: String,
}

#[derive(Serialize)]
struct Passages {
    passages: Vec<Quotation>,
}

fn search() -> Rc<dyn Tool> {
    typed_tool(
        "search",
        "Searches the documents. Comes back with the passages that match best, the best first; none when nothing matches.",
        async |context: ToolContext, input: SearchInput| -> Result<Passages, ToolError> {
            let passages = passages::search(context.database(), &input.query, MOST_PASSAGES)?;
            let query: String = input.query.chars().take(REMEMBERED).collect();
            context.update(|state: &mut ResearcherState| {
                if !state.searched.contains(&query) {
                    state.searched.push(query);
                }
            })?;
            Ok(Passages { passages })
        },
    )
}

fn record_finding() -> Rc<dyn Tool> {
    typed_tool(
        "record_finding",
        "Records a quotation that answers the question. The quote must stand verbatim in the document.",
        async |context: ToolContext, quotation: Quotation| -> Result<Quotation, ToolError> {
            if quotation.quote.trim().is_empty() || quotation.quote.chars().count() > LONGEST_QUOTE
            {
                return Err(ToolError::new(format!(
                    "A quote must have 1 to {LONGEST_QUOTE} characters."
                )));
            }
            let Some(document) = corpus::find(context.database(), &quotation.document_id)? else {
                return Err(ToolError::new(
                    "There is no document with this id; take it from a search.",
                ));
            };
            if !document.text.contains(&quotation.quote) {
                return Err(ToolError::new(
                    "The quote does not stand in this document word for word; copy a passage of a search.",
                ));
            }
            let state: ResearcherState = context.state()?;
            let is_same = |finding: &Finding| {
                finding.document_id == quotation.document_id && finding.quote == quotation.quote
            };
            if state.findings.iter().any(is_same) {
                return Ok(quotation);
            }
            if state.findings.len() >= MOST_FINDINGS {
                return Err(ToolError::new(format!(
                    "There are {MOST_FINDINGS} findings already; hand them in."
                )));
            }
            let finding = Finding {
                thread_id: state.thread_id,
                document_id: quotation.document_id.clone(),
                quote: quotation.quote.clone(),
                note: note(&document.title, &state.question, &quotation.quote),
            };
            context.update(|state: &mut ResearcherState| state.findings.push(finding))?;
            Ok(quotation)
        },
    )
}

/// Why a quotation was taken: the document's title and the words that it shares with the question.
fn note(title: &str, question: &str, quote: &str) -> String {
    let wanted = passages::terms(question);
    let shared: Vec<String> = passages::terms(quote)
        .into_iter()
        .filter(|term| wanted.contains(term))
        .collect();
    match shared.as_slice() {
        [] => format!("From “{title}”."),
        shared => format!("From “{title}”; it speaks of {}.", shared.join(", ")),
    }
}

/// The findings of a researcher's final state, if it is one.
#[must_use]
pub fn findings_of(state: &Value) -> Option<Vec<Finding>> {
    ResearcherState::deserialize(state)
        .ok()
        .map(|state| state.findings)
}
