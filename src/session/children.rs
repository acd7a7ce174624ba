//! Children whose calls outlived a run, or whose calls are gone: what becomes of them and of their
//! refs.
//!
//! An ended run may leave a step with open calls. An entry takes it up again, and a message that
//! came with it stands behind the step's results. A child without a call is an orphan. Implements
//! the consumer's rules on lost children, entries with a new message and orphans (section 7).

#[cfg(test)]
mod tests;

use serde_json::json;

use super::{CallFailure, ChildSettled, Draft, Session, Step, Transition};
use crate::error::{Code, Result};
use crate::protocol::chunk::ChunkBody;
use crate::protocol::ids::Timestamp;
use crate::protocol::usage::{RollupOrigin, UsageRollup};
use crate::store::{SubSessionRecord, SubStatus, ToolCallRecord, ToolOutcome, UsageRecord, Write};

/// The `eventName` of the `custom` chunk that says that a child could not be told to stop. Its data
/// has `subSessionId`, `subAgentType` and `toolCallId`.
pub const UNTOLD_EVENT: &str = "sub_agent_stop_undelivered";

/// The `eventName` of the `custom` chunk that says that a call waits until another child of the
/// session has ended. It stands once for each such call, in the commit of the model's answer. Its
/// data has `toolCallId` and `position`, from 1.
pub const QUEUED_EVENT: &str = "sub_agent_queued";

/// A call of an ended run that gets no result of its own any more.
#[derive(Clone, Debug)]
pub struct Healed {
    /// The call.
    pub tool_call_id: String,
    /// The ref of the child that it had begun: it is marked as stopping, to be told afterwards.
    pub child: Option<SubSessionRecord>,
}

/// What became of a child whose call is gone or has its result already.
#[derive(Clone, Debug)]
pub struct Orphaned {
    /// How its ref stands now, and what it has spent.
    pub settled: ChildSettled,
    /// Its end for the log; `None` where the log has it.
    pub end: Option<ToolOutcome>,
}

impl Session {
    /// The step under way, if its answer is committed: its calls survive the run.
    #[must_use]
    pub fn open_step(&self) -> Option<&Step> {
        self.step
            .as_ref()
            .filter(|step| step.record.answer.is_some())
    }

    /// The calls that survived and have no result yet, in call order.
    pub fn open_calls(&self) -> impl Iterator<Item = &ToolCallRecord> {
        self.open_step()
            .into_iter()
            .flat_map(|step| &step.calls)
            .filter(|call| call.outcome.is_none())
    }

    /// Settles the ref of a child without an open call.
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn child_orphaned(
        &self,
        mut child: SubSessionRecord,
        orphaned: Orphaned,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        if let Some(end) = orphaned.end {
            draft.say(ChunkBody::SubagentEnd {
                sub_session_id: child.sub_session_id.to_string(),
                sub_agent_type: child.agent_type.to_string(),
                tool_call_id: child.tool_call_id.clone(),
                success: end.success,
                result: end.success.then(|| end.result.clone()),
                error: end.error,
            })?;
        }
        if orphaned.settled.untold {
            draft.say_untold(&child)?;
        }
        draft.count_child(&child, orphaned.settled.usage);
        child.status = orphaned.settled.status;
        draft.write(Write::SubSession(child));
        Ok(draft.done())
    }

    /// Fails a ref that cannot be read, and the call that it belonged to: `call` is that call's id
    /// with its child's agent type.
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn child_spoiled(
        &self,
        sub_session_id: &str,
        call: Option<(&str, &str)>,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        if let Some((id, agent_type)) = call {
            let outcome = CallFailure::new(
                Code::InvalidStoredState,
                "What is stored of the sub-agent cannot be read.",
            )
            .with_cause("malformed_ref")
            .to_outcome();
            draft.say(ChunkBody::SubagentEnd {
                sub_session_id: sub_session_id.into(),
                sub_agent_type: agent_type.into(),
                tool_call_id: id.into(),
                success: false,
                result: None,
                error: outcome.error.clone(),
            })?;
            draft.finish_call(id, outcome, None)?;
        }
        draft.write(Write::SpoiledSubSession {
            sub_session_id: sub_session_id.into(),
        });
        Ok(draft.done())
    }
}

impl Draft {
    /// Takes the step of an ended run up again, behind the chunk that opens the new run.
    pub(super) fn reenter(&mut self, healed: Vec<Healed>, message: Option<String>) -> Result<()> {
        let staged = self
            .session
            .step
            .as_ref()
            .is_some_and(|step| step.calls.iter().any(|call| !call.staged.is_empty()));
        if staged {
            // The new run's checkpoint stands above the step's patches: a reader that attaches
            // there must meet them again.
            self.restage()?;
        }
        for call in healed {
            let child = call.child.map(|child| {
                let settled = ChildSettled {
                    status: SubStatus::Stopping,
                    usage: None,
                    untold: false,
                };
                (child, settled)
            });
            self.finish_call(&call.tool_call_id, unpaired(), child)?;
        }
        if let Some(message) = message
            && let Some(step) = self.session.step.as_mut()
            && let Some(answer) = step.record.answer.as_mut()
        {
            answer.then.push(message);
            let record = step.record.clone();
            self.write(Write::Step(record));
        }
        Ok(())
    }

    pub(super) fn say_untold(&mut self, child: &SubSessionRecord) -> Result<()> {
        self.say(ChunkBody::Custom {
            event_name: UNTOLD_EVENT.into(),
            data: json!({
                "subSessionId": child.sub_session_id,
                "subAgentType": child.agent_type,
                "toolCallId": child.tool_call_id,
            }),
        })
        .map(drop)
    }

    pub(super) fn say_queued(&mut self, tool_call_id: &str, position: u64) -> Result<()> {
        self.say(ChunkBody::Custom {
            event_name: QUEUED_EVENT.into(),
            data: json!({"toolCallId": tool_call_id, "position": position}),
        })
        .map(drop)
    }

    pub(super) fn count_child(
        &mut self,
        child: &SubSessionRecord,
        usage: Option<(UsageRollup, RollupOrigin)>,
    ) {
        let (rollup, origin) = match usage {
            Some((rollup, origin)) => (Some(Box::new(rollup)), origin),
            None => (None, RollupOrigin::End),
        };
        let at = self.now;
        self.write(Write::Usage(UsageRecord::SubAgent {
            sub_session_id: child.sub_session_id.to_string(),
            sub_agent_type: child.agent_type.to_string(),
            tool_call_id: child.tool_call_id.clone(),
            rollup,
            origin,
            at,
        }));
    }
}

/// The result of a call that a new message left behind.
fn unpaired() -> ToolOutcome {
    CallFailure::new(
        Code::UnpairedOnContinuation,
        "The call was not executed: the conversation went on without its result.",
    )
    .with_cause("new_message")
    .to_outcome()
}
