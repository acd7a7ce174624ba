//! What the public mount shows of a session: how far it is, and what it costs.
//!
//! Both are pure mappers. Neither may ever pass on a text of the state.

use remote_agents::protocol::usage::UsageRollup;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::planner;
use crate::state::PlannerState;

/// Tokens that make one billing unit; a started unit counts.
pub const TOKENS_PER_UNIT: u64 = 1000;

/// A session's state as the public sees it: `{phase, threadCount, findingCount}`. What is not the
/// state of a planner is `unknown` with zeros.
#[must_use]
pub fn project_state(agent_type: &str, state: &Value) -> Value {
    let parsed = (agent_type == planner::AGENT_TYPE)
        .then(|| PlannerState::deserialize(state).ok())
        .flatten();
    let (phase, threads, findings) = match parsed {
        Some(state) => (
            state.phase.as_str(),
            state.threads.len(),
            state.findings.len(),
        ),
        None => ("unknown", 0, 0),
    };
    json!({ "phase": phase, "threadCount": threads, "findingCount": findings })
}

/// A usage rollup as the public sees it: `{billingUnits}`, one for every started thousand tokens
/// of the whole tree. What is no rollup counts nothing.
#[must_use]
pub fn project_usage(rollup: &Value) -> Value {
    let tokens = UsageRollup::deserialize(rollup).map_or(0, |rollup| rollup.tokens.total);
    json!({ "billingUnits": tokens.div_ceil(TOKENS_PER_UNIT) })
}
