//! The smallest agent with a tool: `cargo run --example minimal`.
use remote_agents::native::{Host, block_on};
use remote_agents::{Agent, AgentType, Agents, Result, ToolContext, ToolError, agent, tool};

/// Says something louder.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Shout {
    message: String,
}
async fn shout(_: ToolContext, shout: Shout) -> Result<String, ToolError> {
    Ok(shout.message.to_uppercase())
}
/// The agents of this program: one.
pub fn agents() -> Result<Agents> {
    let (name, model) = (AgentType::parse("crier")?, agent::model_by_name("offline")?);
    let crier = Agent::new(name, "1. Call `shout` with the message.", model);
    Agents::new([crier.with_tool(tool("shout", shout))])
}
fn main() -> Result<()> {
    let host = Host::new(|_| agents());
    let answer = block_on(host.say("crier", "s-1", "the tide is in"))?;
    println!("{answer}");
    Ok(())
}
