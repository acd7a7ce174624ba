//! What a user may have called at the turns of a session's life.
//!
//! Four of the hooks are functions inside a transaction of the session: what they write to tables
//! of the agent's own stands exactly when what happened stands. The one after a settled run has
//! effects outside, waits for them, and is called at least once for each run and status. State can
//! be changed where a commit of state follows in the same transaction, and only be read elsewhere.

use std::rc::Rc;

use futures::future::LocalBoxFuture;
use serde_json::{Map, Value};

use super::{Identity, ToolContext};
use crate::error::{Code, Error, Result};
use crate::protocol::ids::{AgentType, RunId, SessionId};
use crate::protocol::message::SessionStatus;
use crate::protocol::usage::UsageRollup;
use crate::store::{Database, Failure};

/// A hook at the entry of a message, of a start or of a resume. It may change the incoming state
/// and write tables of the agent's own: both happen in one transaction with the entry's first
/// commit, or not at all. An error refuses the request; nothing is written.
pub type EntryHook = Rc<dyn Fn(&mut Entry<'_>) -> Result<()>>;

/// What comes in.
pub struct Entry<'a> {
    /// The session.
    pub session_id: &'a SessionId,
    /// Whether this begins the session; else it is a new message to it.
    pub is_start: bool,
    /// The message.
    pub message: &'a str,
    /// At a start the incoming state, before it is checked against the agent's shape. At a new
    /// message the session's state: what is changed in it is a `state_patch` right before the run's
    /// first chunk, and part of the checkpoint that opens the run.
    pub state: &'a mut Map<String, Value>,
    /// The object's database, inside the entry's transaction.
    pub database: &'a dyn Database,
}

/// A hook right after a run was opened, by a start or any resume: everything of it is written, and
/// the transaction is still open. An error undoes the entry and refuses the request.
pub type AfterEntryHook = Rc<dyn Fn(&Entered<'_>) -> Result<()>>;

/// What came in.
pub struct Entered<'a> {
    /// The session.
    pub session_id: &'a SessionId,
    /// The run.
    pub run_id: &'a RunId,
    /// Whether this began the session.
    pub is_start: bool,
    /// The message; a session that merely goes on has none.
    pub message: Option<&'a str>,
    /// The state with which the run begins.
    pub state: &'a Value,
    /// The object's database, inside the entry's transaction.
    pub database: &'a dyn Database,
}

/// A hook after a call of one of the agent's own tools has returned, failed or timed out, before its
/// result is committed; not after one that a stop cut off. As with [`SubAgentHook`], what it stages
/// stands also when the call failed, it fires again if the object ended before the result was
/// committed, and an error of its is logged and changes nothing.
pub type ToolHook = Rc<dyn Fn(&ToolPayload, &ToolContext) -> Result<()>>;

/// What a tool's call came to.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolPayload {
    /// The tool's name.
    pub name: String,
    /// The arguments.
    pub arguments: Value,
    /// Whether it succeeded.
    pub success: bool,
    /// The result, or for a failure what the model reads of it.
    pub result: Value,
}

/// A hook after a sub-agent's call, before its result is committed.
///
/// What it writes belongs to the step and is dropped with it if the parent ends before the result
/// is committed; then the hook fires again. So fold by setting, not by appending, and let what it
/// does outside of the state bear a repetition:
///
/// ```
/// # use remote_agents::agent::{Agent, model_by_name};
/// # use remote_agents::protocol::ids::AgentType;
/// # use serde_json::{Map, Value, json};
/// # fn build() -> remote_agents::error::Result<Agent> {
/// # let agent = Agent::new(AgentType::parse("writer")?, "Write.", model_by_name("offline")?);
/// let agent = agent.with_after_sub_agent(|payload, context| {
///     // Only a child that ended has a state to fold, and only within `max_fold_state_bytes`.
///     let Some(child) = payload.child_custom_state.clone() else {
///         return Ok(());
///     };
///     context.update(|state: &mut Map<String, Value>| {
///         // Under the child's id: the same call folded twice is folded once.
///         let research = state.entry("research").or_insert_with(|| json!({}));
///         if let Some(research) = research.as_object_mut() {
///             research.insert(payload.sub_session_id.to_string(), json!(child["phase"]));
///         }
///     })
/// });
/// # Ok(agent)
/// # }
/// # assert!(build().is_ok());
/// ```
pub type SubAgentHook = Rc<dyn Fn(&SubAgentPayload, &ToolContext) -> Result<()>>;

/// What a sub-agent's call came to.
#[derive(Clone, Debug, PartialEq)]
pub struct SubAgentPayload {
    /// The sub-agent's name in this agent's definition.
    pub name: String,
    /// The child's session id.
    pub sub_session_id: SessionId,
    /// The child's agent type.
    pub agent_type: AgentType,
    /// Whether it completed with a valid output.
    pub success: bool,
    /// The output, when it succeeded.
    pub output: Option<Value>,
    /// The child's final state, when it ended and is not over the fold limit.
    pub child_custom_state: Option<Value>,
}

/// A hook right before a run completes, in the transaction of its last commit. An error makes the
/// run fail with its code instead; nothing of the hook stands then.
pub type CompletingHook = Rc<dyn Fn(&mut Completing<'_>) -> Result<()>>;

/// What a run is about to complete with.
pub struct Completing<'a> {
    /// The session.
    pub session_id: &'a SessionId,
    /// The run.
    pub run_id: &'a RunId,
    /// The output.
    pub output: &'a Value,
    /// The final state. What is changed in it is staged and promoted with the run's last step.
    pub state: &'a mut Map<String, Value>,
    /// The object's database, inside the transaction.
    pub database: &'a dyn Database,
}

/// A hook after a run has settled, for effects outside: at least once for each run and status, also
/// when the object ended in between. While it has not come to its end, the session does not expire.
/// One that fails or takes longer than a tool may is called again later, ten times in all.
pub type SettledHook = Rc<dyn Fn(Settled) -> LocalBoxFuture<'static, Result<()>>>;

/// What a run has settled with.
#[derive(Clone, Debug)]
pub struct Settled {
    /// The session.
    pub identity: Identity,
    /// The run.
    pub run_id: RunId,
    /// The status: completed, failed or interrupted. A run that was interrupted and is aborted
    /// later settles with both, one after the other.
    pub status: SessionStatus,
    /// What it came to; `None` where the run has settled with another status since.
    pub outcome: Option<SettledOutcome>,
    /// Which call of the hook for this run and status this is, from 1.
    pub attempt: u32,
    /// The same for every call for this run and status, and for no other: for the outside to tell
    /// a repeat by.
    pub idempotency_key: String,
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct SettledOutcome {
    /// The output, when it completed.
    pub output: Option<Value>,
    /// The failure, when it failed.
    pub failure: Option<Failure>,
    /// The final state, unless it is above the limit of a terminal frame.
    pub state: Option<Value>,
    /// The recursive usage as of the end.
    pub usage: Option<UsageRollup>,
}

/// A document's top level, for a hook to change.
pub(crate) fn fields(state: &Value) -> Map<String, Value> {
    state.as_object().cloned().unwrap_or_default()
}

/// The state if a hook has changed it, checked against the agent's shape and bound. One that it left
/// alone is not checked: it may be of an earlier shape.
pub(crate) fn changed(
    agent: &super::Agent,
    before: &Value,
    state: Map<String, Value>,
) -> Result<Option<Value>> {
    let state = Value::Object(state);
    if state == *before {
        return Ok(None);
    }
    agent.limits.check_state(&state, usize::MAX)?;
    agent.state.check(&state).map_err(|reason| {
        let sentence = "A hook made a state that does not have the agent's shape.";
        Error::new(Code::ToolExecutionFailed, sentence).with_detail(reason)
    })?;
    Ok(Some(state))
}
