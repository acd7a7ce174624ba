//! The agents of the stories: a parent that calls what it is told to, and children of every kind.
//!
//! Each service hosts all of them. Their models are scripts over the conversation, and take a
//! millisecond of the runtime's clock for each event, as a provider takes its time.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use futures::stream;
use remote_agents::agent::model::{
    LanguageModel, ModelError, ModelErrorKind, ModelEvent, ModelRequest, ModelStream, StopReason,
};
use remote_agents::agent::{SubAgent, typed_tool};
use remote_agents::platform::Runtime;
use remote_agents::protocol::usage::Tokens;
use remote_agents::store::{MessageRecord, SubLocation};
use remote_agents::transport::{HttpTransport, RetryPolicy};
use remote_agents::{Agent, AgentType, Agents, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::mischief::{Mischief, Mischievous};
use super::paired;

/// How to reach the agents of a type where the children are.
pub type Way = Rc<dyn Fn(AgentType, Rc<dyn Runtime>) -> HttpTransport>;

/// What every parent in the stories is.
pub const PARENT: &str = "parent";

/// Bytes in the state of `big`: more than a fold takes.
pub const BIG: usize = 300_000;

/// Short waits, so that a story takes no longer than its agents.
pub fn policy() -> RetryPolicy {
    RetryPolicy {
        call_timeout: Duration::from_secs(60),
        silence: Duration::from_secs(10),
        post_timeout: Duration::from_secs(10),
        read_timeout: Duration::from_secs(10),
        retry_base: Duration::from_millis(10),
        reattach_wait: Duration::from_millis(160),
        ..RetryPolicy::default()
    }
}

/// As [`policy`], for calls of which one answer never comes.
pub fn hasty_policy() -> RetryPolicy {
    let soon = Duration::from_millis(1_500);
    RetryPolicy {
        silence: soon,
        post_timeout: soon,
        read_timeout: soon,
        ..policy()
    }
}

/// The agents of a service whose children are reached over `way`.
///
/// # Errors
/// `INTERNAL` when a name is taken twice.
pub fn agents(way: &Way, location: SubLocation, runtime: &Rc<dyn Runtime>) -> Result<Agents> {
    let host = Host {
        way,
        location,
        runtime,
    };
    Agents::new([
        host.echo()?,
        host.finder()?,
        host.nester("nester", "echo")?,
        host.nester("slow_nester", "slow")?,
        host.failing()?,
        host.slow()?,
        host.big()?,
        host.who()?,
        host.parent()?,
    ])
}

/// What a finder hands in.
#[derive(Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    finding: String,
    sources: u32,
}

#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Notes {
    notes: Vec<String>,
}

#[derive(Deserialize, JsonSchema)]
struct Note {
    note: String,
}

type Script = Rc<dyn Fn(&ModelRequest) -> Vec<Result<ModelEvent, ModelError>>>;

/// A model whose answers are a function of the conversation.
struct Scripted {
    script: Script,
    runtime: Rc<dyn Runtime>,
    pace: Duration,
}

impl LanguageModel for Scripted {
    fn name(&self) -> &str {
        "scripted"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        let events: VecDeque<_> = match paired::read(&request) {
            Ok(()) => (self.script)(&request).into(),
            Err(broken) => [Err(broken)].into(),
        };
        let (runtime, pace) = (self.runtime.clone(), self.pace);
        Box::pin(stream::unfold(events, move |mut events| {
            let wait = runtime.sleep(pace);
            async move {
                wait.await;
                events.pop_front().map(|event| (event, events))
            }
        }))
    }
}

struct Host<'a> {
    way: &'a Way,
    location: SubLocation,
    runtime: &'a Rc<dyn Runtime>,
}

impl Host<'_> {
    fn agent(
        &self,
        agent_type: &str,
        script: impl Fn(&ModelRequest) -> Vec<Result<ModelEvent, ModelError>> + 'static,
    ) -> Result<Agent> {
        self.paced(agent_type, Duration::from_millis(1), script)
    }

    fn paced(
        &self,
        agent_type: &str,
        pace: Duration,
        script: impl Fn(&ModelRequest) -> Vec<Result<ModelEvent, ModelError>> + 'static,
    ) -> Result<Agent> {
        let model = Scripted {
            script: Rc::new(script),
            runtime: self.runtime.clone(),
            pace,
        };
        Ok(Agent::new(
            AgentType::parse(agent_type)?,
            "Follow the script.",
            Rc::new(model),
        ))
    }

    /// Notes what it was told, then repeats it.
    fn echo(&self) -> Result<Agent> {
        let agent = self.agent("echo", |request| match turn(request) {
            0 => calls(&[("note", json!({"note": said(request)}))]),
            _ => text(&format!("you said {}", said(request))),
        })?;
        Ok(agent.with_state::<Notes>().with_tool(typed_tool(
            "note",
            "Notes.",
            |context, note: Note| async move {
                context.update(|state: &mut Notes| state.notes.push(note.note))?;
                Ok(json!({"noted": true}))
            },
        )))
    }

    /// Hands in a [`Finding`].
    fn finder(&self) -> Result<Agent> {
        let agent = self.agent("finder", |request| {
            let finding = json!({"finding": said(request), "sources": 2});
            calls(&[("finish", finding)])
        })?;
        Ok(agent.with_output::<Finding>())
    }

    /// Has a child of its own, which it would resume if nothing executed it.
    fn nester(&self, agent_type: &str, child: &str) -> Result<Agent> {
        let agent = self.agent(agent_type, |request| match turn(request) {
            0 => {
                let message = format!("inner {}", said(request));
                calls(&[("subagent__inner", json!({"message": message}))])
            }
            _ => text("nested and done"),
        })?;
        let mut inner = self.sub("inner", child, None)?;
        inner.resume_dead_producer = true;
        Ok(agent.with_sub_agent(inner))
    }

    fn failing(&self) -> Result<Agent> {
        self.agent("failing", |_| {
            vec![Err(ModelError {
                kind: ModelErrorKind::Rejected,
                message: "The provider refused.".into(),
                retry_after: None,
            })]
        })
    }

    /// Speaks until it is stopped, or for ten seconds.
    fn slow(&self) -> Result<Agent> {
        self.paced("slow", Duration::from_millis(25), |_| {
            text(&"word ".repeat(400))
        })
    }

    /// Has a state that no fold takes.
    fn big(&self) -> Result<Agent> {
        let agent = self.agent("big", |request| match turn(request) {
            0 => calls(&[("grow", json!({}))]),
            _ => text("grown"),
        })?;
        Ok(agent
            .with_state::<Map<String, Value>>()
            .with_tool(typed_tool(
                "grow",
                "Grows the state.",
                |context, _: Map<String, Value>| async move {
                    context.update(|state: &mut Map<String, Value>| {
                        state.insert("blob".into(), json!("x".repeat(BIG)));
                    })?;
                    Ok(json!({}))
                },
            )))
    }

    /// Tells what it was begun with.
    fn who(&self) -> Result<Agent> {
        let agent = self.agent("who", |request| match request.messages.last() {
            Some(MessageRecord::Tool { outcome, .. }) => text(&outcome.result.to_string()),
            _ => calls(&[("whoami", json!({}))]),
        })?;
        Ok(agent.with_tool(typed_tool(
            "whoami",
            "Tells.",
            |context, _: Map<String, Value>| async move {
                let origin = &context.identity.origin;
                Ok(json!({
                    "userId": origin.user_id,
                    "tags": origin.tags,
                    "metadata": origin.metadata,
                    "parent": origin.parent.as_ref().map(|parent| parent.session_id.as_str()),
                }))
            },
        )))
    }

    /// Makes the calls that its latest message lists as `[[<sub-agent>, <message>], …]`, and keeps
    /// in its state what came of each.
    fn parent(&self) -> Result<Agent> {
        let agent = self.agent(PARENT, |request| match turn(request) {
            0 => {
                let list: Vec<(String, String)> =
                    serde_json::from_str(&said(request)).unwrap_or_default();
                let wanted: Vec<(String, Value)> = list
                    .into_iter()
                    .map(|(name, message)| {
                        (format!("subagent__{name}"), json!({"message": message}))
                    })
                    .collect();
                let wanted: Vec<(&str, Value)> = wanted
                    .iter()
                    .map(|(name, arguments)| (name.as_str(), arguments.clone()))
                    .collect();
                calls(&wanted)
            }
            _ => text("all calls have settled"),
        })?;
        let misbehaving = [
            ("cut", "echo", Mischief::Cuts),
            ("unheard", "echo", Mischief::StartUnheard),
            ("unheard_keyless", "echo", Mischief::StartUnheardKeyless),
            ("stolen", "slow", Mischief::Stolen),
            ("projected", "echo", Mischief::Projected),
            ("later_version", "echo", Mischief::LaterVersion),
            ("endless", "nester", Mischief::Endless),
            ("paused", "echo", Mischief::Paused),
            ("dead", "echo", Mischief::NoRunner),
        ];
        let hasty = [
            ("nest_hastily", "nester", None),
            ("endless_hastily", "nester", Some(Mischief::Endless)),
            ("revived_hastily", "echo", Some(Mischief::NoRunner)),
            ("nest_slow_hastily", "slow_nester", None),
        ];
        let mut agent = agent
            .with_state::<Map<String, Value>>()
            .with_sub_agent(self.sub("ask", "echo", None)?)
            .with_sub_agent(self.sub("nest", "nester", None)?)
            .with_sub_agent(self.sub("find", "finder", None)?.with_output::<Finding>())
            .with_sub_agent(self.sub("misfind", "echo", None)?.with_output::<Finding>())
            .with_sub_agent(self.sub("fail", "failing", None)?)
            .with_sub_agent(self.sub("slow", "slow", None)?)
            .with_sub_agent(self.sub("big", "big", None)?)
            .with_sub_agent(self.sub("who", "who", None)?);
        for (name, agent_type, mischief) in misbehaving {
            agent = agent.with_sub_agent(self.sub(name, agent_type, Some(mischief))?);
        }
        for (name, agent_type, mischief) in hasty {
            let mut sub = self.sub_with(name, agent_type, mischief, hasty_policy())?;
            sub.resume_dead_producer = true;
            agent = agent.with_sub_agent(sub);
        }
        let mut revived = self.sub("revived", "echo", Some(Mischief::NoRunner))?;
        revived.resume_dead_producer = true;
        let mut revivable = self.sub("nest_revivable", "nester", None)?;
        revivable.resume_dead_producer = true;
        Ok(agent
            .with_sub_agent(revived)
            .with_sub_agent(revivable)
            .with_sub_agent(self.sub("nest_slow", "slow_nester", None)?)
            .with_after_sub_agent(|payload, context| {
                context.update(|state: &mut Map<String, Value>| {
                    let told = json!({
                        "success": payload.success,
                        "output": payload.output,
                        "state": payload.child_custom_state,
                    });
                    state.insert(payload.name.clone(), told);
                })
            }))
    }

    fn sub(&self, name: &str, agent_type: &str, mischief: Option<Mischief>) -> Result<SubAgent> {
        self.sub_with(name, agent_type, mischief, policy())
    }

    fn sub_with(
        &self,
        name: &str,
        agent_type: &str,
        mischief: Option<Mischief>,
        policy: RetryPolicy,
    ) -> Result<SubAgent> {
        let agent_type = AgentType::parse(agent_type)?;
        let mut transport =
            (self.way)(agent_type.clone(), self.runtime.clone()).with_policy(policy.clone());
        if let Some(mischief) = mischief {
            transport = transport.through(|inner| Rc::new(Mischievous::new(inner, mischief)));
        }
        let mut sub = SubAgent::new(
            name,
            "A child of the story.",
            agent_type,
            self.location,
            Rc::new(transport),
        );
        sub.policy = policy;
        Ok(sub)
    }
}

/// How many answers stand since the latest message.
fn turn(request: &ModelRequest) -> usize {
    request
        .messages
        .iter()
        .rev()
        .take_while(|message| !matches!(message, MessageRecord::User { .. }))
        .filter(|message| matches!(message, MessageRecord::Assistant { .. }))
        .count()
}

/// The latest message.
fn said(request: &ModelRequest) -> String {
    let of_user = |message: &MessageRecord| match message {
        MessageRecord::User { text } => Some(text.clone()),
        _ => None,
    };
    let latest = request.messages.iter().rev().find_map(of_user);
    latest.unwrap_or_default()
}

fn text(words: &str) -> Vec<Result<ModelEvent, ModelError>> {
    let mut events: Vec<_> = words
        .split_inclusive(' ')
        .map(|word| Ok(ModelEvent::TextDelta(word.to_owned())))
        .collect();
    events.extend(ending(StopReason::EndTurn));
    events
}

fn calls(wanted: &[(&str, Value)]) -> Vec<Result<ModelEvent, ModelError>> {
    let mut events = Vec::new();
    for (index, (name, arguments)) in wanted.iter().enumerate() {
        events.push(Ok(ModelEvent::ToolCallStart {
            index,
            id: format!("c{index}"),
            name: (*name).to_owned(),
        }));
        events.push(Ok(ModelEvent::ToolCallDelta {
            index,
            delta: arguments.to_string(),
        }));
        events.push(Ok(ModelEvent::ToolCallEnd { index }));
    }
    events.extend(ending(StopReason::ToolUse));
    events
}

fn ending(reason: StopReason) -> [Result<ModelEvent, ModelError>; 2] {
    let tokens = Tokens {
        prompt: 10,
        completion: 5,
        total: 15,
        ..Tokens::default()
    };
    [Ok(ModelEvent::Usage(tokens)), Ok(ModelEvent::Stop(reason))]
}
