//! The planner: splits a topic into threads, has each researched, and composes a report.
//!
//! Every quote of its report stands verbatim in the document that it names. Notes of findings and
//! titles of documents never reach a model or a caller: they are in the state and the table alone.

use std::collections::HashSet;
use std::rc::Rc;

use remote_agents::agent::model::LanguageModel;
use remote_agents::agent::{
    Entry, SubAgent, SubAgentPayload, Tool, ToolContext, ToolError, typed_tool,
};
use remote_agents::protocol::ids::AgentType;
use remote_agents::store::{Database, SubLocation};
use remote_agents::transport::Transport;
use remote_agents::{Agent, Code, Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::state::{
    Finding, Phase, PlannerState, Quotation, Report, Source, Thread, ThreadInput, ThreadReport,
    TopicInput,
};
use crate::{corpus, outline, researcher};

/// The agent's type.
pub const AGENT_TYPE: &str = "planner";

/// A topic as it is kept, in characters.
const LONGEST_TOPIC: usize = 2000;

/// A quotation inside of the summary, in characters.
const SUMMARY_QUOTE: usize = 200;

/// Quotations in the summary.
const SUMMARY_QUOTES: usize = 3;

const PENDING: &str = "pending";
const DONE: &str = "done";
const FAILED: &str = "failed";

const INSTRUCTIONS: &str = "\
You plan a piece of research and compose its report. The research itself is done by researchers, \
one for each thread, who quote from a fixed set of documents. You add no knowledge of your own and \
you change no character of a quotation.

The message gives the topic, as JSON with `topic` or as plain text.

Follow these steps:

1. Call `plan` with the topic. It splits the topic into threads.
2. For each item of `threads`, call `subagent__thread-researcher` with its thread id and its question. \
Make all of these calls in one answer. If a call fails, make it once more, then go on without it.
3. Call `compose`. It builds the report from what the researchers found and has no arguments.
4. Write the report for the reader in a few lines, and in the same answer call `finish` with the report \
exactly as `compose` returned it.
";

/// The agent. `researcher` must lead to a raw mount, or the objects themselves.
///
/// # Errors
/// None in practice: its types are well formed.
pub fn agent(model: Rc<dyn LanguageModel>, researcher: Rc<dyn Transport>) -> Result<Agent> {
    let researcher = SubAgent::new(
        "thread-researcher",
        "Researches one thread in the documents and comes back with quotations.",
        AgentType::parse(researcher::AGENT_TYPE)?,
        SubLocation::Local,
        researcher,
    )
    .with_input::<ThreadInput>()
    .with_output::<ThreadReport>()
    .with_initial_state(hand_down);
    Ok(
        Agent::new(AgentType::parse(AGENT_TYPE)?, INSTRUCTIONS, model)
            .with_state::<PlannerState>()
            .with_output::<Report>()
            .with_tool(plan())
            .with_tool(compose())
            .with_sub_agent(researcher)
            .with_before_entry(enter)
            .with_after_sub_agent(fold),
    )
}

/// Moves the documents into a table of the object.
fn enter(entry: &mut Entry<'_>) -> Result<()> {
    if !entry.is_start {
        return Ok(());
    }
    let documents = corpus::take(entry.state)?;
    corpus::store(entry.database, &documents)
}

/// A researcher begins with its thread and all documents.
fn hand_down(
    arguments: &Value,
    _state: &Value,
    database: &dyn Database,
) -> Result<Map<String, Value>> {
    let input = ThreadInput::deserialize(arguments).map_err(|e| {
        Error::new(Code::ToolExecutionFailed, "The thread cannot be read.")
            .with_detail(e.to_string())
    })?;
    let documents = serde_json::to_value(corpus::load(database)?)
        .map_err(|e| Error::internal(format!("documents: {e}")))?;
    let mut state = Map::new();
    state.insert("threadId".into(), input.thread_id.into());
    state.insert("question".into(), input.question.into());
    state.insert(corpus::DOCUMENTS.into(), documents);
    Ok(state)
}

/// Sets a thread's status and findings. Doing it again changes nothing.
fn fold(payload: &SubAgentPayload, context: &ToolContext) -> Result<()> {
    let report = payload
        .output
        .as_ref()
        .filter(|_| payload.success)
        .map(ThreadReport::deserialize);
    let Some(Ok(report)) = report else {
        // A failed call does not name its thread; `compose` closes the threads that stay open.
        return Ok(());
    };
    let mut findings = payload
        .child_custom_state
        .as_ref()
        .and_then(researcher::findings_of)
        .unwrap_or_default();
    findings.retain(|finding| {
        let is_same = |quotation: &&Quotation| {
            quotation.document_id == finding.document_id && quotation.quote == finding.quote
        };
        report.findings.iter().any(|quotation| is_same(&quotation))
    });
    let mut taken = Vec::new();
    for quotation in report.findings {
        if !corpus::is_verbatim(context.database(), &quotation.document_id, &quotation.quote)? {
            continue;
        }
        let note = findings
            .iter()
            .find(|finding| {
                finding.document_id == quotation.document_id && finding.quote == quotation.quote
            })
            .map(|finding| finding.note.clone());
        taken.push(Finding {
            thread_id: report.thread_id.clone(),
            document_id: quotation.document_id,
            quote: quotation.quote,
            note: note.unwrap_or_default(),
        });
    }
    context.update(|state: &mut PlannerState| {
        let Some(thread) = state
            .threads
            .iter_mut()
            .find(|thread| thread.id == report.thread_id)
        else {
            return;
        };
        thread.status = DONE.to_owned();
        let held: Vec<&Finding> = state
            .findings
            .iter()
            .filter(|finding| finding.thread_id == report.thread_id)
            .collect();
        if !held.iter().copied().eq(&taken) {
            state
                .findings
                .retain(|finding| finding.thread_id != report.thread_id);
            state.findings.extend(taken);
        }
        if state.phase == Phase::Researching
            && !state.threads.iter().any(|thread| thread.status == PENDING)
        {
            state.phase = Phase::Writing;
        }
    })
}

#[derive(Serialize)]
struct Plan {
    topic: String,
    threads: Vec<ThreadInput>,
}

fn plan() -> Rc<dyn Tool> {
    typed_tool(
        "plan",
        "Splits the topic into two to six threads, guided by what the documents hold, and opens them.",
        async |context: ToolContext, input: TopicInput| -> Result<Plan, ToolError> {
            let topic: String = input.topic.trim().chars().take(LONGEST_TOPIC).collect();
            let documents = corpus::load(context.database())?;
            let texts: Vec<&str> = documents
                .iter()
                .map(|document| document.text.as_str())
                .collect();
            let questions = outline::questions(&topic, &texts);
            let state: PlannerState = context.state()?;
            let threads = open_threads(&state, questions);
            let plan = Plan {
                topic: topic.clone(),
                threads: threads
                    .iter()
                    .map(|thread| ThreadInput {
                        thread_id: thread.id.clone(),
                        question: thread.question.clone(),
                    })
                    .collect(),
            };
            context.update(|state: &mut PlannerState| {
                state.phase = Phase::Researching;
                state.topic = topic;
                state.threads = threads;
            })?;
            Ok(plan)
        },
    )
}

/// Threads with ids that nothing in the state has: what it held before is no part of this plan.
fn open_threads(state: &PlannerState, questions: Vec<String>) -> Vec<Thread> {
    let held: HashSet<&str> = state
        .threads
        .iter()
        .map(|thread| thread.id.as_str())
        .chain(
            state
                .findings
                .iter()
                .map(|finding| finding.thread_id.as_str()),
        )
        .collect();
    let free = (1_u64..)
        .map(|n| format!("t{n}"))
        .filter(|id| !held.contains(id.as_str()));
    let open = |(question, id)| Thread {
        id,
        question,
        status: PENDING.to_owned(),
    };
    questions.into_iter().zip(free).map(open).collect()
}

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn compose() -> Rc<dyn Tool> {
    typed_tool(
        "compose",
        "Builds the report from the findings of all threads. Quotations that are not verbatim are left out.",
        async |context: ToolContext, _: Nothing| -> Result<Report, ToolError> {
            context.update(|state: &mut PlannerState| {
                state.phase = Phase::Writing;
                for thread in state
                    .threads
                    .iter_mut()
                    .filter(|thread| thread.status == PENDING)
                {
                    thread.status = FAILED.to_owned();
                }
            })?;
            let report = report(&context.state()?, context.database())?;
            context.update(|state: &mut PlannerState| state.phase = Phase::Done)?;
            Ok(report)
        },
    )
}

/// The report: one section for each thread, with those of its findings that are verbatim.
fn report(state: &PlannerState, database: &dyn Database) -> Result<Report> {
    let documents = corpus::load(database)?;
    let is_verbatim = |finding: &&Finding| {
        let document = documents
            .iter()
            .find(|document| document.id == finding.document_id);
        !finding.quote.trim().is_empty()
            && document.is_some_and(|document| document.text.contains(&finding.quote))
    };
    let section = |thread: &Thread| ThreadReport {
        thread_id: thread.id.clone(),
        question: thread.question.clone(),
        findings: state
            .findings
            .iter()
            .filter(|finding| finding.thread_id == thread.id)
            .filter(is_verbatim)
            .map(|finding| Quotation {
                document_id: finding.document_id.clone(),
                quote: finding.quote.clone(),
            })
            .collect(),
    };
    let sections: Vec<ThreadReport> = state.threads.iter().map(section).collect();
    let mut sources: Vec<Source> = Vec::new();
    for quotation in sections.iter().flat_map(|section| &section.findings) {
        let source = Source {
            document_id: quotation.document_id.clone(),
        };
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    Ok(Report {
        topic: state.topic.clone(),
        summary: summary(&sections, sources.len(), documents.len()),
        sections,
        sources,
    })
}

fn summary(sections: &[ThreadReport], sources: usize, documents: usize) -> String {
    let quotations: usize = sections.iter().map(|section| section.findings.len()).sum();
    let answered = sections
        .iter()
        .filter(|section| !section.findings.is_empty())
        .count();
    if quotations == 0 {
        return format!(
            "Nothing in the {} answers the {}.",
            count(documents, "document"),
            count(sections.len(), "question")
        );
    }
    let mut summary = format!(
        "{} from {} of {} on {} of {}.",
        count(quotations, "quotation"),
        sources,
        count(documents, "document"),
        answered,
        count(sections.len(), "question"),
    );
    // What stands in quotation marks is verbatim: a quotation that is too long to be repeated here
    // is left to its section.
    let mut leading: Vec<&str> = Vec::new();
    for quote in sections
        .iter()
        .filter_map(|section| section.findings.first())
        .map(|finding| finding.quote.as_str())
        .filter(|quote| quote.chars().count() <= SUMMARY_QUOTE)
    {
        if !leading.contains(&quote) && leading.len() < SUMMARY_QUOTES {
            leading.push(quote);
            summary.push_str(&format!(" “{quote}”"));
        }
    }
    summary
}

fn count(n: usize, noun: &str) -> String {
    if n == 1 {
        format!("{n} {noun}")
    } else {
        format!("{n} {noun}s")
    }
}
