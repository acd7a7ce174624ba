//! A parent that delegates to an agent of another service: `cargo run --example remote_sub_agent`.
//!
//! The other service is here in this process too, behind a mount of its own, as it is behind a
//! service binding on Workers. Over a network `native::http_transport` takes the place of the
//! transport, and nothing else changes.

use std::rc::Rc;

use remote_agents::agent::{SubAgent, model_by_name};
use remote_agents::native::{Host, LocalRuntime, MountFetch, block_on};
use remote_agents::store::SubLocation;
use remote_agents::transport::{HttpTransport, Transport};
use remote_agents::{Agent, AgentType, Agents, Mount, Result, ToolContext, ToolError, tool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the two services agree on: what is asked, and what is answered.
#[derive(Serialize, Deserialize, JsonSchema)]
pub struct Question {
    /// What is asked. As the only field, and by this name, it is the child's message as it stands.
    pub message: String,
}

/// An answer and where it is from.
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Answer {
    /// The answer.
    pub answer: String,
    /// The book that it is from.
    pub book: String,
}

/// Looks something up in the almanac.
#[derive(Deserialize, JsonSchema)]
struct Lookup {
    /// What to look up.
    message: String,
}

/// The other service: a librarian with an almanac.
fn library() -> Result<Agents> {
    let lookup = tool("look_up", async |_: ToolContext, lookup: Lookup| {
        let answer = if lookup.message.contains("spring tide") {
            "A spring tide comes at new moon and at full moon."
        } else {
            "The almanac says nothing about it."
        };
        let book = "The Almanac".to_owned();
        let answer = answer.to_owned();
        Ok::<_, ToolError>(Answer { answer, book })
    });
    let instructions = "1. Call `look_up` with the message.\n2. Call `finish` with what it says.";
    let librarian = Agent::new(
        AgentType::parse("librarian")?,
        instructions,
        model_by_name("offline")?,
    )
    .with_output::<Answer>()
    .with_tool(lookup);
    Agents::new([librarian])
}

/// This service: a clerk who asks the library.
fn desk(library: Rc<dyn Transport>) -> Result<Agents> {
    let ask = SubAgent::new(
        "library",
        "Knows what stands in the almanac.",
        AgentType::parse("librarian")?,
        SubLocation::Remote,
        library,
    )
    .with_input::<Question>()
    .with_output::<Answer>();
    let instructions =
        "1. Call `subagent__library` with the message.\n2. Call `finish` with its answer.";
    let clerk = Agent::new(
        AgentType::parse("clerk")?,
        instructions,
        model_by_name("offline")?,
    )
    .with_output::<Answer>()
    .with_sub_agent(ask);
    Agents::new([clerk])
}

/// The clerk's answer, and what was said on the clerk's stream: by whom, and what kind of chunk.
pub async fn run() -> Result<(Answer, Vec<(String, String)>)> {
    let library = Host::new(|_| library());
    // A mount without credentials, as behind a service binding; a public one has `with_auth`.
    let mount = Rc::new(Mount::new("/internal/agents").allow_unauthenticated());
    let fetch = Rc::new(MountFetch::new(mount, library.objects().clone()));
    let librarian = AgentType::parse("librarian")?;
    let desk = Host::new(move |_| {
        let runtime = LocalRuntime::new(0, Rc::new(|_, _| {}));
        let transport = HttpTransport::new(
            fetch.clone(),
            runtime,
            "http://library",
            "/internal/agents",
            librarian.clone(),
        );
        desk(Rc::new(transport))
    });
    let mut said = Vec::new();
    let tell = |chunk: &serde_json::Value| {
        let text = |field: &str| chunk[field].as_str().unwrap_or_default().to_owned();
        said.push((text("agentType"), text("type")));
    };
    let answer = desk
        .follow("clerk", "s-1", "When is a spring tide?", tell)
        .await?;
    let answer = Answer::deserialize(answer)
        .map_err(|error| remote_agents::Error::internal(error.to_string()))?;
    Ok((answer, said))
}

fn main() -> Result<()> {
    let (answer, said) = block_on(run())?;
    for (agent, kind) in said {
        println!("{agent:>10} {kind}");
    }
    println!("{} ({})", answer.answer, answer.book);
    Ok(())
}
