//! One conversation over many turns, with a policy that sends a summary in place of what is long ago:
//! `cargo run --example conversation`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use futures::StreamExt as _;
use futures::future::LocalBoxFuture;
use remote_agents::agent::model::{LanguageModel, ModelEvent, ModelRequest, ModelStream};
use remote_agents::agent::{Conversation, History, HistoryPolicy, Selected, model_by_name};
use remote_agents::native::{Host, block_on};
use remote_agents::protocol::usage::Tokens;
use remote_agents::store::MessageRecord;
use remote_agents::{Agent, AgentType, Agents, Result, ToolContext, ToolError, tool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What is remembered of all that was said: the state outlives what the model is sent.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Diary {
    entries: Vec<String>,
}

/// Writes what was said into the diary.
#[derive(Deserialize, JsonSchema)]
struct Write {
    /// What was said.
    message: String,
}

/// Sends a summary of all but the last turns. It asks a model for it, and asks again only when more
/// turns have left.
struct Summarise {
    model: Rc<dyn LanguageModel>,
    keep_turns: usize,
    /// By session: how many messages the latest summary is of, and the summary.
    made: RefCell<HashMap<String, (usize, String)>>,
}

impl HistoryPolicy for Summarise {
    fn select<'a>(
        &'a self,
        conversation: Conversation<'a>,
    ) -> LocalBoxFuture<'a, Result<Selected>> {
        Box::pin(async move {
            let messages = conversation.messages;
            // A turn begins with a user's message, so no call is parted from its result.
            let turns: Vec<usize> = (0..messages.len())
                .filter(|place| matches!(messages.get(*place), Some(MessageRecord::User { .. })))
                .collect();
            let kept = turns.len().saturating_sub(self.keep_turns);
            let from = turns.get(kept).copied().unwrap_or_default();
            let (old, recent) = messages.split_at(from);
            let session = conversation.identity.session_id.to_string();
            let known = self.made.borrow().get(&session).cloned();
            let mut selected = Selected::default();
            let summary = match known.filter(|(of, _)| *of == old.len()) {
                Some((_, summary)) => summary,
                None => {
                    let (summary, spent) = self.summary(old).await;
                    selected.spent.extend(spent);
                    let made = (old.len(), summary.clone());
                    self.made.borrow_mut().insert(session, made);
                    summary
                }
            };
            let text = format!("(What was said before: {summary})");
            selected.messages.push(MessageRecord::User { text });
            selected.messages.extend_from_slice(recent);
            Ok(selected)
        })
    }
}

impl Summarise {
    /// What the model makes of these messages, and what that cost.
    async fn summary(&self, messages: &[MessageRecord]) -> (String, Option<(String, Tokens)>) {
        let said = messages.iter().filter_map(|message| match message {
            MessageRecord::User { text } => Some(text.as_str()),
            _ => None,
        });
        let text = said.collect::<Vec<_>>().join(" ");
        let mut events = self.model.stream(ModelRequest {
            instructions: "1. Write what was said in a few words.".into(),
            output: None,
            messages: Rc::new([MessageRecord::User { text }]),
            tools: Rc::new([]),
        });
        let (mut summary, mut spent) = (String::new(), None);
        // A model that fails leaves the summary as it is: the conversation goes on without it.
        while let Some(Ok(event)) = events.next().await {
            match event {
                ModelEvent::TextDelta(delta) => summary.push_str(&delta),
                ModelEvent::Usage(tokens) => spent = Some((self.model.name().to_owned(), tokens)),
                _ => {}
            }
        }
        (summary, spent)
    }
}

/// The agent's model, which notes how much it is sent.
struct Noting {
    inner: Rc<dyn LanguageModel>,
    sent: Rc<RefCell<Vec<usize>>>,
}

impl LanguageModel for Noting {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        self.sent.borrow_mut().push(request.messages.len());
        self.inner.stream(request)
    }
}

fn agents(sent: &Rc<RefCell<Vec<usize>>>, policy: &Rc<Summarise>) -> Result<Agents> {
    let write = tool("write", async |context: ToolContext, write: Write| {
        context.update(|diary: &mut Diary| diary.entries.push(write.message))?;
        let diary: Diary = context.state()?;
        Ok::<_, ToolError>(format!("{} things were said", diary.entries.len()))
    });
    let model = Noting {
        inner: model_by_name("offline")?,
        sent: sent.clone(),
    };
    let instructions = "1. Call `write` with the message.\n2. Write how many things were said.";
    let listener = Agent::new(AgentType::parse("listener")?, instructions, Rc::new(model))
        .with_state::<Diary>()
        .with_tool(write)
        .with_history(History {
            budget: 150,
            policy: policy.clone(),
            ..History::default()
        });
    Agents::new([listener])
}

/// The answers to twelve messages, how many messages the model was sent at most, and the latest
/// summary.
pub async fn run() -> Result<(Vec<Value>, usize, String)> {
    let sent = Rc::new(RefCell::new(Vec::new()));
    let policy = Rc::new(Summarise {
        model: model_by_name("offline")?,
        keep_turns: 2,
        made: RefCell::default(),
    });
    let (noted, summaries) = (sent.clone(), policy.clone());
    let host = Host::new(move |_| agents(&noted, &policy));
    let mut answers = Vec::new();
    for tide in 1..=12 {
        let message = format!("Tide number {tide} came in.");
        answers.push(host.say("listener", "s-1", &message).await?);
    }
    let most = sent.borrow().iter().copied().max().unwrap_or_default();
    let summary = summaries.made.borrow().get("s-1").cloned();
    Ok((answers, most, summary.unwrap_or_default().1))
}

fn main() -> Result<()> {
    let (answers, most, summary) = block_on(run())?;
    for answer in answers {
        println!("{answer}");
    }
    println!("at most {most} messages were sent; before that: {summary}");
    Ok(())
}
