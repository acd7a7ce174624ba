//! The agents of a simulated tree: each does what its message says, and asks agents of the next
//! level for the rest.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use futures::stream;
use remote_agents::agent::SubAgent;
use remote_agents::agent::model::{
    LanguageModel, ModelError, ModelErrorKind, ModelEvent, ModelRequest, ModelStream, StopReason,
};
use remote_agents::mutants::{self, Mutant};
use remote_agents::native::LocalRuntime;
use remote_agents::protocol::usage::Tokens;
use remote_agents::store::{MessageRecord, SubLocation};
use remote_agents::transport::RetryPolicy;
use remote_agents::{Agent, AgentType, Result, ToolContext, ToolError, typed_tool};
use serde_json::{Map, Value, json};

use crate::gate::Invariant;
use crate::paired;
use crate::plan::{Fault, Kind, Side};
use crate::world::{CANARY, Shared};

/// The types of the levels: the root, and three of children.
pub const LEVELS: [&str; 4] = ["root", "planner", "researcher", "clerk"];

type State = Map<String, Value>;
type Answer = Vec<Result<ModelEvent, ModelError>>;

/// What an agent of this world is made of.
pub struct Making<'a> {
    /// What the run shares.
    pub shared: &'a Rc<Shared>,
    /// The service that hosts it.
    pub side: Side,
    /// Its object.
    pub runtime: &'a Rc<LocalRuntime>,
}

/// How calls of children are made.
#[must_use]
pub fn policy(hasty: bool) -> RetryPolicy {
    let short = Duration::from_secs(if hasty { 2 } else { 10 });
    RetryPolicy {
        call_timeout: Duration::from_secs(if hasty { 20 } else { 300 }),
        silence: Duration::from_secs(if hasty { 20 } else { 45 }),
        post_timeout: short,
        read_timeout: short,
        ..RetryPolicy::default()
    }
}

impl Making<'_> {
    /// The agent of a level, which calls those of the next over `way`.
    ///
    /// # Errors
    /// When a name is malformed.
    pub fn agent(
        &self,
        agent_type: &str,
        child: Option<(
            &str,
            SubLocation,
            Rc<dyn remote_agents::transport::Transport>,
        )>,
    ) -> Result<Agent> {
        let model = Scripted {
            shared: self.shared.clone(),
            side: self.side,
            runtime: self.runtime.clone(),
        };
        let mut agent = Agent::new(
            AgentType::parse(agent_type)?,
            "Follow the script.",
            Rc::new(model),
        )
        .with_state::<State>()
        .with_retention(self.shared.workload.keeps);
        for name in ["note", "fail", "slow"] {
            agent = agent.with_tool(self.tool(name));
        }
        if let Some((child_type, location, transport)) = child {
            let child_type = AgentType::parse(child_type)?;
            let mut sub = SubAgent::new("ask", "Asks.", child_type, location, transport);
            sub.policy = policy(self.shared.workload.hasty);
            agent = agent
                .with_sub_agent(sub)
                .with_after_sub_agent(|payload, context| {
                    context.update(|state: &mut State| {
                        let key = format!("child {}", context.tool_call_id);
                        state.insert(key, json!({"success": payload.success}));
                    })
                });
        }
        Ok(agent)
    }

    /// Notes something twice, and then returns, fails, or takes its time.
    fn tool(&self, name: &'static str) -> Rc<dyn remote_agents::Tool> {
        let (shared, side) = (self.shared.clone(), self.side);
        let runtime = Rc::downgrade(self.runtime);
        typed_tool(name, "Notes.", move |context: ToolContext, note: State| {
            let (shared, runtime) = (shared.clone(), runtime.upgrade());
            async move {
                let fault = shared.gate.pass(side, Kind::Tool, &context.tool_call_id);
                shared.strike(side, runtime.as_ref(), fault);
                if mutants::lacks(Mutant::NothingPanics) {
                    #[allow(clippy::panic)] // It is what the rule is taken away for.
                    std::panic::panic_any("a tool panics");
                }
                let call = context.tool_call_id.clone();
                context.update(|state: &mut State| {
                    state.insert(format!("{name} {call}"), json!("under way"));
                    state.insert("last".into(), json!(call));
                    state.insert("secret".into(), json!(CANARY));
                })?;
                let time = if name == "slow" { 40 } else { 1 };
                tokio::time::sleep(Duration::from_millis(time)).await;
                context.update(|state: &mut State| {
                    state.insert(format!("{name} {call}"), json!(note));
                })?;
                if name == "fail" {
                    return Err(ToolError::new("It failed, as it should."));
                }
                Ok(json!("noted"))
            }
        })
    }
}

/// A model whose answers are what the conversation's latest script says.
struct Scripted {
    shared: Rc<Shared>,
    side: Side,
    runtime: Rc<LocalRuntime>,
}

impl LanguageModel for Scripted {
    fn name(&self) -> &str {
        "scripted"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        let (shared, side) = (self.shared.clone(), self.side);
        if let Err(broken) = paired::read(&request) {
            shared.gate.broken(Invariant::Paired, &*broken.message);
        }
        let runtime = self.runtime.clone();
        let fault = shared.gate.pass(side, Kind::Asks, &runtime_name(&request));
        let fault = shared.strike(side, Some(&runtime), fault);
        let (mut answer, pause) = answer(&request, &shared);
        if fault == Some(Fault::Model) {
            answer = vec![Err(unavailable())];
        }
        let events: VecDeque<_> = answer.into();
        Box::pin(stream::unfold(
            (events, shared, runtime),
            move |(mut events, shared, runtime)| async move {
                let paced = 1 + shared.random.below(shared.workload.pace);
                tokio::time::sleep(Duration::from_millis(paced.max(pause))).await;
                let mut event = events.pop_front()?;
                let fault = shared.gate.pass(side, Kind::Hears, &"");
                if shared.strike(side, Some(&runtime), fault) == Some(Fault::Model) {
                    event = Err(unavailable());
                    events.clear();
                }
                Some((event, (events, shared, runtime)))
            },
        ))
    }
}

fn runtime_name(request: &ModelRequest) -> String {
    format!("with {} messages", request.messages.len())
}

fn unavailable() -> ModelError {
    ModelError {
        kind: ModelErrorKind::Unavailable,
        message: "The provider is down.".into(),
        retry_after: None,
    }
}

/// The answer to a conversation, and the pause before each of its events.
fn answer(request: &ModelRequest, shared: &Shared) -> (Answer, u64) {
    let script = said(request);
    let turn = turn(request);
    let step = script["steps"].get(turn).and_then(Value::as_array);
    let mut events = Answer::new();
    let mut pause = 0;
    let reason = if let Some(calls) = step {
        events.push(Ok(ModelEvent::TextDelta("So: ".into())));
        for (index, call) in calls.iter().enumerate() {
            let name = call[0].as_str().unwrap_or_default();
            let name = match name {
                "ask" => "subagent__ask",
                other => other,
            };
            events.push(Ok(ModelEvent::ToolCallStart {
                index,
                id: format!("c{turn}_{index}"),
                name: name.to_owned(),
            }));
            events.push(Ok(ModelEvent::ToolCallDelta {
                index,
                delta: call[1].to_string(),
            }));
            events.push(Ok(ModelEvent::ToolCallEnd { index }));
        }
        StopReason::ToolUse
    } else {
        let words = script["words"][0].as_u64().unwrap_or(1);
        pause = script["words"][1].as_u64().unwrap_or(0);
        for word in 0..words {
            events.push(Ok(ModelEvent::TextDelta(format!("word {word} "))));
        }
        StopReason::EndTurn
    };
    // No two answers cost the same: what is counted twice shows.
    let prompt = shared.price();
    events.push(Ok(ModelEvent::Usage(Tokens {
        prompt,
        completion: 1,
        total: prompt.saturating_add(1),
        ..Tokens::default()
    })));
    events.push(Ok(ModelEvent::Stop(reason)));
    (events, pause)
}

/// How many answers stand since the latest message.
fn turn(request: &ModelRequest) -> usize {
    let behind = request.messages.iter().rev();
    behind
        .take_while(|message| !matches!(message, MessageRecord::User { .. }))
        .filter(|message| matches!(message, MessageRecord::Assistant { .. }))
        .count()
}

/// The script that the latest message is.
fn said(request: &ModelRequest) -> Value {
    let of_user = |message: &MessageRecord| match message {
        MessageRecord::User { text } => serde_json::from_str(text).ok(),
        _ => None,
    };
    let latest = request.messages.iter().rev().find_map(of_user);
    latest.unwrap_or_default()
}
