//! The usage rollup: what a session and everything below it has spent.
//!
//! Implements section 8. A rollup is recursive: its sums include every descendant that is listed,
//! each counted once.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ids::Timestamp;

/// Token counts of one or many model calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Tokens {
    /// Tokens of the prompts.
    pub prompt: u64,
    /// Tokens of the answers, reasoning included.
    pub completion: u64,
    /// Of the completion: reasoning.
    pub reasoning: u64,
    /// Of the prompt: read from the provider's cache.
    pub cached: u64,
    /// Prompt and completion.
    pub total: u64,
}

impl Tokens {
    /// Adds other counts, saturating.
    pub fn add(&mut self, other: &Self) {
        self.prompt = self.prompt.saturating_add(other.prompt);
        self.completion = self.completion.saturating_add(other.completion);
        self.reasoning = self.reasoning.saturating_add(other.reasoning);
        self.cached = self.cached.saturating_add(other.cached);
        self.total = self.total.saturating_add(other.total);
    }
}

/// Tool calls.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ToolUsage {
    /// Calls made.
    pub calls: u64,
    /// Calls that failed.
    pub failures: u64,
    /// Calls by tool name.
    pub by_tool: BTreeMap<String, u64>,
}

impl ToolUsage {
    /// Adds other counts.
    pub fn add(&mut self, other: &Self) {
        self.calls = self.calls.saturating_add(other.calls);
        self.failures = self.failures.saturating_add(other.failures);
        for (name, count) in &other.by_tool {
            let sum = self.by_tool.entry(name.clone()).or_default();
            *sum = sum.saturating_add(*count);
        }
    }
}

/// Where an embedded rollup came from. `recovery` outranks `end`: it is a superset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RollupOrigin {
    /// The child's terminal frame.
    End,
    /// A usage read after it.
    Recovery,
}

/// A parent's entry for one child session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SubAgentUsage {
    /// The child's session id.
    pub sub_session_id: String,
    /// The child's agent type.
    pub sub_agent_type: String,
    /// The call that made it.
    pub tool_call_id: String,
    /// Whether the child has settled: its numbers will not change any more.
    pub settled: bool,
    /// The child's own recursive rollup, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_rollup: Option<Box<UsageRollup>>,
    /// Where that rollup came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_rollup_origin: Option<RollupOrigin>,
    /// When the entry was made.
    #[serde(default)]
    pub timestamp: Timestamp,
}

/// The children of a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SubAgents {
    /// Sub-agent calls in the whole tree.
    pub calls: u64,
    /// This session's direct children.
    pub sessions: Vec<SubAgentUsage>,
}

/// What one session spent by itself, its descendants left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnUsage {
    /// Tokens of its own model calls.
    pub tokens: Tokens,
    /// Its own tool calls.
    pub tools: ToolUsage,
    /// Its own committed steps.
    pub steps: u64,
}

/// The rollup. Unknown fields of a peer are ignored, missing ones are zero.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UsageRollup {
    /// The session.
    pub session_id: String,
    /// Tokens of the whole tree.
    pub tokens: Tokens,
    /// Tokens of the whole tree by model name.
    pub by_model: BTreeMap<String, Tokens>,
    /// Tool calls of the whole tree.
    pub tools: ToolUsage,
    /// The children.
    pub sub_agents: SubAgents,
    /// Committed steps of the whole tree.
    pub steps: u64,
    /// Counters that agents add themselves.
    pub custom: BTreeMap<String, Value>,
    /// Whether something below is not settled or could not be read.
    pub partial: bool,
    /// What this session spent by itself. Peers of other make leave it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own: Option<OwnUsage>,
    /// When the session began.
    pub started_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}
