//! The step: model answer → tools → promote, and how a run settles.
//!
//! The answer is a commit of its own; tools stage their writes on the step's one working document
//! and their patches are in the log at once; promoting writes state, checkpoint and
//! `step_committed` in one commit. Implements section 5, the law of the step included.

mod draft;

use std::rc::Rc;

use serde_json::{Value, json};

use super::failure::CallFailure;
use super::{Draft, Session, Transition, patch};
use crate::error::{Code, Error, Result};
use crate::mutants::{self, Mutant};
use crate::protocol::chunk::{ChunkBody, PatchOperation};
use crate::protocol::ids::{DocumentId, Sequence, StreamId, Timestamp};
use crate::protocol::usage::{RollupOrigin, Tokens, UsageRollup};
use crate::store::{
    Answer, CheckpointRecord, Failure, MessageRecord, RunRecord, StagedPatch, StepRecord, Stop,
    StopKind, SubRemote, SubSessionRecord, SubStatus, ToolCall, ToolCallRecord, ToolOutcome,
    UsageRecord, Write,
};
use draft::final_state;

/// The event that tells that a model is asked again, as `{retry, at}`: the number of the attempt
/// after the first one of the step, and the time before which it is not made.
pub const RETRY_EVENT: &str = "model_retry";

/// The step under way.
#[derive(Clone, Debug)]
pub struct Step {
    /// What is stored of it.
    pub record: StepRecord,
    /// Its calls, in the order of the answer.
    pub calls: Vec<ToolCallRecord>,
    /// The working document.
    pub working: Rc<Value>,
    /// The ordinal of the patch on which the working document stands.
    pub ordinal: u64,
}

/// The model's answer, its calls with their final ids.
#[derive(Clone, Debug)]
pub struct ModelAnswer {
    /// The text.
    pub text: String,
    /// The calls.
    pub calls: Vec<ToolCall>,
    /// The calls of children that must wait for others to end first, in call order.
    pub queued: Vec<String>,
    /// Set when the run was interrupted in the middle of it; such an answer has no calls.
    pub cut: bool,
    /// What its provider wants back with it.
    pub kept: Option<Value>,
    /// The model's name.
    pub model: String,
    /// What the call cost.
    pub tokens: Tokens,
}

/// How a child's call ended, committed together with the call's result.
#[derive(Clone, Debug)]
pub struct ChildSettled {
    /// The ref's final status.
    pub status: SubStatus,
    /// The child's rollup, where it is known.
    pub usage: Option<(UsageRollup, RollupOrigin)>,
    /// Whether the child may be at work and could not be told to stop: the stream says so.
    pub untold: bool,
}

/// How a run settles.
#[derive(Clone, Debug, PartialEq)]
pub enum Settlement {
    /// With an output.
    Completed {
        /// The output.
        output: Value,
    },
    /// With a failure.
    Failed {
        /// Why.
        failure: Failure,
    },
    /// Stopped so that it can be resumed.
    Interrupted {
        /// Why, as the caller said.
        reason: Option<String>,
    },
    /// Stopped for good.
    Aborted {
        /// Why, as the caller said.
        reason: Option<String>,
    },
}

impl From<Stop> for Settlement {
    fn from(stop: Stop) -> Self {
        let reason = stop.reason;
        match stop.kind {
            StopKind::Interrupt => Self::Interrupted { reason },
            StopKind::Abort => Self::Aborted { reason },
        }
    }
}

impl Step {
    /// The step as the store has it, its working document rebuilt from the checkpoint.
    pub(super) fn restore(
        record: StepRecord,
        calls: Vec<ToolCallRecord>,
        checkpoint: &CheckpointRecord,
    ) -> Result<Self> {
        let mut step = Self {
            record,
            calls,
            working: checkpoint.state.clone(),
            ordinal: checkpoint.patch_ordinal,
        };
        let mut staged: Vec<&StagedPatch> =
            step.calls.iter().flat_map(|call| &call.staged).collect();
        staged.sort_by_key(|patch| patch.ordinal);
        let mut working = (*step.working).clone();
        for patch in staged {
            working = patch::apply(&working, &patch.patches).map_err(|e| {
                Error::new(
                    Code::InvalidStoredState,
                    "A staged patch of the step cannot be applied.",
                )
                .with_detail(format!("ra_tool_calls, ordinal {}: {e}", patch.ordinal))
            })?;
            step.ordinal = patch.ordinal;
        }
        step.working = Rc::new(working);
        Ok(step)
    }

    /// The call with this id.
    #[must_use]
    pub fn call(&self, id: &str) -> Option<&ToolCallRecord> {
        self.calls.iter().find(|call| call.call.id == id)
    }
}

impl Session {
    /// A new execution takes the session over after an eviction or a crash.
    ///
    /// An unfinished answer is discarded visibly. A committed one is kept; if one of its unfinished
    /// tools had staged something, the step is discarded visibly and what the finished tools staged
    /// is staged anew.
    ///
    /// # Errors
    /// `invalid_stored_state` when recorded patches cannot be applied.
    pub fn wake(&self, now: Timestamp) -> Result<Transition> {
        self.taken_over(self.record.attempts.saturating_add(1), now)
    }

    /// As [`Self::wake`], when the execution before was ended by the fault of another object: that
    /// was no attempt of this run.
    ///
    /// # Errors
    /// As [`Self::wake`].
    pub fn wake_uncharged(&self, now: Timestamp) -> Result<Transition> {
        self.taken_over(self.record.attempts, now)
    }

    fn taken_over(&self, attempts: u32, now: Timestamp) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        let record = &mut draft.session.record;
        record.epoch = record.epoch.saturating_add(1);
        record.attempts = attempts;
        match self.step.as_ref() {
            Some(step) if step.record.answer.is_none() => draft.discard("restarted", None)?,
            Some(step) => {
                let broken = step
                    .calls
                    .iter()
                    .any(|call| call.outcome.is_none() && !call.staged.is_empty());
                if broken {
                    draft.restage()?;
                }
            }
            None => {}
        }
        Ok(draft.done())
    }

    /// Appends what the model streams. `ids` are the tool-call ids that appear for the first time.
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn stream(
        &self,
        bodies: Vec<ChunkBody>,
        ids: Vec<ToolCall>,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        draft.begin_step();
        for body in bodies {
            draft.say(body)?;
        }
        // A used id stays used when the answer is discarded, so it is stored with its first chunk.
        for call in ids {
            draft.write(Write::ToolCall(ToolCallRecord {
                call,
                index: 0,
                begun: 0,
                outcome: None,
                staged: Vec::new(),
            }));
        }
        Ok(draft.appended())
    }

    /// Commits the model's answer: from here on its calls survive.
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn answer(&self, answer: ModelAnswer, now: Timestamp) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        draft.begin_step();
        let calls: Vec<ToolCallRecord> = (0..)
            .zip(answer.calls)
            .map(|(index, call)| ToolCallRecord {
                call,
                index,
                begun: 0,
                outcome: None,
                staged: Vec::new(),
            })
            .collect();
        if let Some(step) = draft.session.step.as_mut() {
            step.record.answer = Some(Answer {
                text: answer.text,
                cut: answer.cut,
                kept: answer.kept,
                then: Vec::new(),
            });
            step.calls.clone_from(&calls);
            let record = step.record.clone();
            draft.session.record.attempts = 0;
            // Calls that were streamed and are not part of the answer, as of a cut one, go.
            draft.write(Write::ClearStep);
            draft.write(Write::Step(record));
        }
        for (position, id) in (1_u64..).zip(answer.queued) {
            draft.say_queued(&id, position)?;
        }
        draft.writes.extend(calls.into_iter().map(Write::ToolCall));
        let spent = Write::Usage(UsageRecord::Model {
            model: answer.model,
            tokens: answer.tokens,
            at: now,
        });
        if mutants::lacks(Mutant::CountedByAnswer) {
            draft.write(spent.clone());
        }
        draft.write(spent);
        Ok(draft.done())
    }

    /// Discards a model attempt visibly; what it is known to have cost still counts.
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn discard(
        &self,
        reason: &str,
        spent: Option<(String, Tokens)>,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        draft.discard(reason, spent)?;
        Ok(draft.done())
    }

    /// Counts what was spent on a model beside the step's own answer.
    #[must_use]
    pub fn spent(&self, model: String, tokens: Tokens, now: Timestamp) -> Transition {
        let mut draft = Draft::new(self, now);
        let at = draft.now;
        draft.write(Write::Usage(UsageRecord::Model { model, tokens, at }));
        draft.done()
    }

    /// Voids a failed attempt at an answer, if it had said anything, and says that there will be
    /// another: the `made`-th after the first, not before `at`.
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn retry(
        &self,
        spent: Option<(String, Tokens)>,
        made: u32,
        at: Timestamp,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        if spent.is_some() || self.step.is_some() {
            draft.discard("model_failed", spent)?;
        }
        draft.say(ChunkBody::Custom {
            event_name: RETRY_EVENT.into(),
            data: json!({"retry": made, "at": at}),
        })?;
        Ok(draft.done())
    }

    /// A call's execution begins.
    ///
    /// # Errors
    /// `INTERNAL` when the step has no such call.
    pub fn tool_started(&self, id: &str, now: Timestamp) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        let call = draft.update_call(id, |call| {
            call.begun = call.begun.saturating_add(1);
        })?;
        // A repeated execution was announced before the restart.
        if call.begun == 1 {
            draft.say(ChunkBody::ToolStart {
                tool_call_id: call.call.id,
                tool_name: call.call.name,
                arguments: call.call.arguments,
            })?;
        }
        Ok(draft.done())
    }

    /// Stages a change of the working document in the name of a call. No change, no patch.
    ///
    /// # Errors
    /// `INTERNAL` when the step has no such call.
    pub fn stage(&self, id: &str, state: Value, now: Timestamp) -> Result<Transition> {
        self.stage_for(id, state, false, now)
    }

    /// As [`Self::stage`], for the hook after the call: what it writes stands also when the call
    /// itself has failed.
    ///
    /// # Errors
    /// As [`Self::stage`].
    pub fn stage_by_hook(&self, id: &str, state: Value, now: Timestamp) -> Result<Transition> {
        self.stage_for(id, state, true, now)
    }

    fn stage_for(
        &self,
        id: &str,
        state: Value,
        by_hook: bool,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        let patches = patch::diff(&self.working_state(), &state);
        if !patches.is_empty() {
            let ordinal = draft.say_patch(patches.clone(), state)?;
            draft.update_call(id, |call| {
                call.staged.push(StagedPatch {
                    ordinal,
                    patches,
                    by_hook,
                });
            })?;
        }
        Ok(draft.done())
    }

    /// Says something of a tool's own.
    ///
    /// # Errors
    /// `INTERNAL` if the chunk cannot be written as JSON.
    pub fn emit(&self, event_name: &str, data: Value, now: Timestamp) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        draft.say(ChunkBody::Custom {
            event_name: event_name.into(),
            data,
        })?;
        Ok(draft.done())
    }

    /// Says a change of a live document, which is no part of the state.
    ///
    /// # Errors
    /// `INTERNAL` if the chunk cannot be written as JSON.
    pub fn document_patched(
        &self,
        id: &DocumentId,
        patches: Vec<PatchOperation>,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        let body = ChunkBody::StatePatch {
            patches,
            patch_ordinal: None,
            patch_base: None,
        };
        draft.say_as(id.to_string(), body)?;
        Ok(draft.done())
    }

    /// Stores a child's ref and announces the child, before its `/start` is sent.
    ///
    /// # Errors
    /// `INTERNAL` if the chunk cannot be written as JSON.
    pub fn child_opened(&self, record: SubSessionRecord, now: Timestamp) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        draft.say(ChunkBody::SubagentStart {
            sub_session_id: record.sub_session_id.to_string(),
            sub_agent_type: record.agent_type.to_string(),
            tool_call_id: record.tool_call_id.clone(),
            remote: record.location == crate::store::SubLocation::Remote,
        })?;
        draft.write(Write::SubSession(record));
        Ok(draft.done())
    }

    /// Appends forwarded chunks together with the cursor that covers them. `child` is the stored
    /// ref; chunks that the cursor covers already must not be among `chunks`.
    ///
    /// # Errors
    /// `INTERNAL` when the stream's numbers are used up.
    pub fn forwarded(
        &self,
        mut child: SubSessionRecord,
        stream_id: StreamId,
        through: Sequence,
        chunks: Vec<String>,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        if !chunks.is_empty() {
            draft.session.record.attempts = 0;
        }
        for chunk in chunks {
            draft.say_json(chunk)?;
        }
        let before = child.remote.as_ref().map(|remote| remote.last_sequence);
        child.remote = Some(SubRemote {
            stream_id,
            last_sequence: match before {
                Some(before) if mutants::lacks(Mutant::CursorWithChunks) => before,
                _ => through,
            },
        });
        draft.write(Write::SubSession(child));
        Ok(draft.done())
    }

    /// Commits a call's result; for a child together with its settled ref and usage.
    ///
    /// # Errors
    /// `INTERNAL` when the step has no such call or it has a result already.
    pub fn tool_finished(
        &self,
        id: &str,
        outcome: ToolOutcome,
        child: Option<(SubSessionRecord, ChildSettled)>,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        draft.finish_call(id, outcome, child)?;
        Ok(draft.done())
    }

    /// Promotes the step: its writes become the state. With a settlement the run ends in the very
    /// same commit; `usage` is the recursive rollup as of that end, `run` the run's stored row. With
    /// a nudge, the model finds it as the next message.
    ///
    /// # Errors
    /// `INTERNAL` when a call has no result yet.
    pub fn promote(
        &self,
        settlement: Option<(Settlement, RunRecord, UsageRollup)>,
        nudge: Option<String>,
        entropy: [u8; 16],
        now: Timestamp,
    ) -> Result<Transition> {
        self.promote_with(settlement, nudge, None, entropy, now)
    }

    /// As [`Self::promote`] at a run's end, with `state`, where there is one, in place of what the
    /// step adds up to.
    ///
    /// # Errors
    /// As [`Self::promote`].
    pub fn promote_as(
        &self,
        end: (Settlement, RunRecord, UsageRollup),
        state: Option<Value>,
        entropy: [u8; 16],
        now: Timestamp,
    ) -> Result<Transition> {
        self.promote_with(Some(end), None, state, entropy, now)
    }

    fn promote_with(
        &self,
        settlement: Option<(Settlement, RunRecord, UsageRollup)>,
        nudge: Option<String>,
        state: Option<Value>,
        entropy: [u8; 16],
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        if let Some((Settlement::Completed { output }, ..)) = &settlement {
            draft.say(ChunkBody::Output {
                output: output.clone(),
            })?;
        }
        draft.promote(state, entropy)?;
        draft
            .writes
            .extend(nudge.map(|text| Write::Message(MessageRecord::User { text })));
        if let Some((settlement, run, usage)) = settlement {
            draft.settle(settlement, run, Some(usage))?;
        }
        Ok(draft.done())
    }

    /// The state that the step under way adds up to; the checkpoint's where there is none.
    ///
    /// # Errors
    /// `invalid_stored_state` when what the step staged cannot be applied.
    pub fn final_state(&self) -> Result<Value> {
        match &self.step {
            Some(step) => final_state(&self.checkpoint.state, step),
            None => Ok((*self.checkpoint.state).clone()),
        }
    }

    /// Stores what becomes of a hook that a settled run is owed. Nothing of the session changes.
    #[must_use]
    pub fn hook(&self, write: Write) -> Transition {
        let mut draft = Draft::new(self, self.record.updated_at);
        draft.write(write);
        draft.done()
    }

    /// Carries out a stop: what has finished is promoted, what has not is paired with a
    /// not-executed result and its writes are reconciled away; then the run settles.
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn stopped(
        &self,
        settlement: Settlement,
        run: RunRecord,
        usage: UsageRollup,
        children: Vec<SubSessionRecord>,
        entropy: [u8; 16],
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        match &self.step {
            Some(step) if step.record.answer.is_some() => {
                let open: Vec<_> = step
                    .calls
                    .iter()
                    .filter(|call| call.outcome.is_none())
                    .map(|call| call.call.id.clone())
                    .collect();
                let code = if matches!(settlement, Settlement::Aborted { .. }) {
                    Code::RunAborted
                } else {
                    Code::RunInterrupted
                };
                for id in open {
                    if mutants::lacks(Mutant::StopPairs) {
                        continue;
                    }
                    let child =
                        children
                            .iter()
                            .find(|child| child.tool_call_id == id)
                            .map(|child| {
                                (
                                    child.clone(),
                                    // The driver had no way to tell it: it is told later.
                                    ChildSettled {
                                        status: SubStatus::Stopping,
                                        usage: None,
                                        untold: true,
                                    },
                                )
                            });
                    draft.finish_call(&id, not_executed(code), child)?;
                }
                draft.promote(None, entropy)?;
            }
            Some(_) => draft.discard("stopped", None)?,
            None => {}
        }
        draft.settle(settlement, run, Some(usage))?;
        Ok(draft.done())
    }

    /// Settles a run between two steps.
    ///
    /// A step under way whose answer is committed is kept: its calls survive, and a child of an
    /// open one stays at work. The next entry settles them, or takes them up again. An answer that
    /// was never committed is discarded.
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn settle(
        &self,
        settlement: Settlement,
        run: RunRecord,
        usage: UsageRollup,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        match (&self.step, self.open_step()) {
            (Some(_), None) => draft.discard("failed", None)?,
            // Nobody must hold on to what was staged: the session's state is its checkpoint's. An
            // entry that takes the step up again stages it anew.
            (_, Some(step)) if step.calls.iter().any(|call| !call.staged.is_empty()) => {
                draft.say_discarded("failed")?;
            }
            _ => {}
        }
        draft.settle(settlement, run, Some(usage))?;
        Ok(draft.done())
    }

    pub(super) fn settle_at_rest(
        &self,
        settlement: Settlement,
        run: RunRecord,
        now: Timestamp,
    ) -> Result<Transition> {
        let mut draft = Draft::new(self, now);
        draft.settle(settlement, run, None)?;
        Ok(draft.done())
    }
}

/// The result of a call that was not executed.
#[must_use]
pub(super) fn not_executed(code: Code) -> ToolOutcome {
    CallFailure::new(code, "The call was not executed: the run was stopped.").to_outcome()
}
