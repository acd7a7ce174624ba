//! The object class and its one agent.

#![allow(missing_docs)] // `durable_object` writes methods without documentation.

use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::{Entry, Limits, SubAgentPayload, Tool};
use remote_agents::cloudflare::{ObjectHost, service_binding_transport};
use remote_agents::platform::Runtime;
use remote_agents::store::{Database, SubLocation};
use remote_agents::{
    Agent, AgentType, Agents, Result, SubAgent, ToolContext, ToolError, typed_tool,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use worker::{Delay, DurableObject, Env, Request, Response, State, durable_object};

use crate::script::Follower;

const AGENT: &str = "stress";

/// The message on which the entry hook panics, in the middle of the request that brings it.
const PANIC_AT_ENTRY: &str = "panic at the entry";

/// One session.
#[durable_object(alarm)]
pub struct StressAgents(ObjectHost);

impl DurableObject for StressAgents {
    fn new(state: State, env: Env) -> Self {
        Self(ObjectHost::new(state, &env, agents))
    }

    async fn fetch(&self, request: Request) -> worker::Result<Response> {
        Ok(self.0.fetch(request).await)
    }

    async fn alarm(&self) -> worker::Result<Response> {
        self.0.alarm().await
    }
}

/// What a session remembers.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Memory {
    /// What its planners read.
    documents: Vec<Value>,
    /// What was noted.
    notes: u64,
    /// How each child's call came out, by the call's place in the answer.
    children: Map<String, Value>,
}

#[derive(Deserialize, JsonSchema)]
struct Note {
    /// How long it takes to write it down, in milliseconds.
    takes: u64,
}

/// What a child is asked. As the only field, and by this name, it is handed on as it stands.
#[derive(Deserialize, JsonSchema)]
#[allow(dead_code)] // The schema is what it is for.
struct Asked {
    message: String,
}

#[derive(Deserialize, JsonSchema)]
struct Fuse {
    /// How long it takes, in milliseconds; without any, the panic comes in the event that began
    /// the execution.
    burns: u64,
}

#[derive(Deserialize, JsonSchema)]
struct Key {
    key: String,
    value: String,
}

/// Tells the variable `GREETING`, and what the namespace `NOTES` holds of what is put there: both are
/// bindings that the tool has captured.
fn bound(env: &Env) -> Rc<dyn Tool> {
    let env = env.clone();
    typed_tool(
        "bound",
        "Reads the bindings.",
        move |_: ToolContext, note: Key| {
            let env = env.clone();
            async move {
                let greeting = env.var("GREETING").map_err(missing)?.to_string();
                let notes = env.kv("NOTES").map_err(missing)?;
                let put = notes.put(&note.key, note.value).map_err(missing)?;
                put.execute().await.map_err(missing)?;
                let held = notes.get(&note.key).text().await.map_err(missing)?;
                Ok(json!({ "greeting": greeting, "held": held }))
            }
        },
    )
}

fn missing<E>(_: E) -> ToolError {
    ToolError::new("The binding is not there.")
}

fn agents(env: &Env, runtime: Rc<dyn Runtime>) -> Result<Agents> {
    let note = typed_tool(
        "note",
        "Writes something down.",
        |context: ToolContext, note: Note| async move {
            pause(note.takes).await;
            context
                .update(|memory: &mut Memory| memory.notes = memory.notes.saturating_add(1))
                .map_err(ToolError::from)?;
            Ok("noted")
        },
    );
    let explode = typed_tool(
        "explode",
        "Panics.",
        async |_: ToolContext, fuse: Fuse| -> Result<(), ToolError> {
            if fuse.burns > 0 {
                pause(fuse.burns).await;
            }
            explode("in a tool");
            Ok(())
        },
    );
    let limits = Limits {
        max_steps: 100_000,
        // A script may well ask for the same note again and again.
        max_repeats: u32::MAX,
        ..Limits::default()
    };
    let mut agent = Agent::new(
        AgentType::parse(AGENT)?,
        "Do as the script says.",
        Rc::new(Follower),
    )
    .with_state::<Memory>()
    .with_tool(note)
    .with_tool(explode)
    .with_tool(bound(env))
    .with_limits(limits)
    .with_before_entry(enter)
    .with_after_sub_agent(fold);
    if let Ok(binding) = env.service("CHILD") {
        let transport = service_binding_transport(
            binding,
            crate::MOUNT,
            AgentType::parse(AGENT)?,
            Rc::clone(&runtime),
        );
        agent = agent.with_sub_agent(
            SubAgent::new(
                "child",
                "Does as its script says.",
                AgentType::parse(AGENT)?,
                SubLocation::Remote,
                Rc::new(transport),
            )
            .with_input::<Asked>(),
        );
    }
    if let Ok(binding) = env.service("PRODUCER") {
        let planner = AgentType::parse("planner")?;
        let transport =
            service_binding_transport(binding, "/internal/agents", planner.clone(), runtime);
        agent = agent.with_sub_agent(
            SubAgent::new(
                "research",
                "Researches a topic.",
                planner,
                SubLocation::Remote,
                Rc::new(transport),
            )
            .with_input::<Asked>()
            .with_initial_state(hand_down),
        );
    }
    Agents::new([agent])
}

fn enter(entry: &mut Entry<'_>) -> Result<()> {
    if entry.message == PANIC_AT_ENTRY {
        explode("at the entry");
    }
    Ok(())
}

/// The one thing that no other code of this project may do.
#[allow(clippy::panic)]
fn explode(place: &str) {
    panic!("a test asked for a panic {place}")
}

/// A planner reads what its parent holds.
fn hand_down(_: &Value, state: &Value, _: &dyn Database) -> Result<Map<String, Value>> {
    let mut own = Map::new();
    if let Some(documents) = state.get("documents") {
        own.insert("documents".to_owned(), documents.clone());
    }
    Ok(own)
}

/// Sets how a child's call came out. Doing it again changes nothing.
fn fold(payload: &SubAgentPayload, context: &ToolContext) -> Result<()> {
    // A call's id may have got a number behind it; its place in the answer has not.
    let place: String = context.tool_call_id.split('_').take(2).collect();
    let told = payload.output.clone().unwrap_or(Value::Null);
    context.update(|memory: &mut Memory| {
        memory.children.insert(place, told);
    })
}

async fn pause(milliseconds: u64) {
    Delay::from(Duration::from_millis(milliseconds)).await;
}
