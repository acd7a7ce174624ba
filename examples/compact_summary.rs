//! Rich data in tables of the agent's own and a compact summary in the state, folded into a parent:
//! `cargo run --example compact_summary`.
//!
//! The summary streams as patches, is in every snapshot and passes through projections; the data
//! stays where it was gathered, and the product serves it from there.

use std::rc::Rc;

use remote_agents::agent::{SubAgent, SubAgentPayload, model_by_name};
use remote_agents::native::{Host, block_on};
use remote_agents::protocol::ids::SessionId;
use remote_agents::store::{Database as _, SqlValue, SubLocation};
use remote_agents::transport::Transport;
use remote_agents::{Agent, AgentType, Agents, Result, ToolContext, ToolError, tool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// How far a survey is. This is all of it that leaves the object by itself.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
struct Summary {
    phase: String,
    reading_count: u64,
}

/// Takes the readings of a day, one for each second.
#[derive(Deserialize, JsonSchema)]
struct Survey {
    /// Where.
    message: String,
}

const TABLE: &str =
    "CREATE TABLE IF NOT EXISTS readings (second INTEGER PRIMARY KEY, place TEXT, height REAL)";

/// One statement for all of them; the table and its rows are the agent's own.
const FILL: &str = "
    WITH RECURSIVE seconds(second) AS (SELECT 0 UNION ALL SELECT second + 1 FROM seconds WHERE second < 86399)
    INSERT OR REPLACE INTO readings SELECT second, ?, (second % 44712) / 44712.0 FROM seconds";

async fn survey(context: ToolContext, survey: Survey) -> Result<Value, ToolError> {
    context.update(|summary: &mut Summary| summary.phase = "surveying".into())?;
    let database = context.database();
    database.query(TABLE, &[])?;
    database.query(FILL, &[SqlValue::Text(survey.message)])?;
    let counted = database.query("SELECT count(*) FROM readings", &[])?;
    let count = match counted.first().and_then(|row| row.first()) {
        Some(SqlValue::Integer(count)) => count.unsigned_abs(),
        _ => 0,
    };
    context.update(|summary: &mut Summary| {
        summary.phase = "surveyed".into();
        summary.reading_count = count;
    })?;
    Ok(json!({ "readings": count }))
}

/// Sets what came of one survey under the child's id. A hook may fire again after a restart: setting
/// twice is setting once, appending twice would not be.
fn fold(payload: &SubAgentPayload, context: &ToolContext) -> Result<()> {
    let Some(child) = payload.child_custom_state.clone() else {
        return Ok(());
    };
    context.update(|state: &mut Map<String, Value>| {
        let surveys = state.entry("surveys").or_insert_with(|| json!({}));
        if let Some(surveys) = surveys.as_object_mut() {
            surveys.insert(payload.sub_session_id.to_string(), child);
        }
    })
}

fn agents(surveyors: Rc<dyn Transport>) -> Result<Agents> {
    let surveyor = "1. Call `survey` with the message.\n2. Write how many readings there are.";
    let surveyor = Agent::new(
        AgentType::parse("surveyor")?,
        surveyor,
        model_by_name("offline")?,
    )
    .with_state::<Summary>()
    .with_tool(tool("survey", survey));
    let ask = SubAgent::new(
        "surveyor",
        "Surveys a place for a day.",
        AgentType::parse("surveyor")?,
        SubLocation::Local,
        surveyors,
    );
    let captain = "1. Call `subagent__surveyor` with the message.\n2. Write what it says.";
    let captain = Agent::new(
        AgentType::parse("captain")?,
        captain,
        model_by_name("offline")?,
    )
    .with_sub_agent(ask)
    .with_after_sub_agent(fold);
    Agents::new([captain, surveyor])
}

/// The captain's state, and how large the surveyor's data is in bytes.
pub async fn run() -> Result<(Value, u64)> {
    let host = Host::new(|here| agents(here.transport("surveyor")?));
    host.say("captain", "s-1", "the harbour of Brest").await?;
    let captain = SessionId::parse("s-1")?;
    let state = host.transport("captain")?.snapshot(&captain).await;
    let state = state
        .map_err(|error| remote_agents::Error::internal(error.to_string()))?
        .state;
    let mut bytes = 0;
    for session in host.objects().sessions() {
        let sum = "SELECT sum(8 + length(place) + 8) FROM readings";
        let database = host.objects().database(&session);
        let found = database.and_then(|database| database.query(sum, &[]).ok());
        if let Some(SqlValue::Integer(sum)) = found.iter().flatten().flatten().next() {
            bytes += sum.unsigned_abs();
        }
    }
    Ok((state, bytes))
}

fn main() -> Result<()> {
    let (state, bytes) = block_on(run())?;
    println!("{state}\nsurveyed: {bytes} bytes, which stayed where they are");
    Ok(())
}
