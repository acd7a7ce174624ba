//! What a step writes, piece by piece: the methods of a draft that the transitions are made of.

use std::collections::BTreeSet;
use std::rc::Rc;

use serde_json::Value;

use super::{ChildSettled, Settlement, Step};
use crate::error::{Code, Error, Result};
use crate::mutants::{self, Mutant};
use crate::protocol::END_STATE_LIMIT;
use crate::protocol::chunk::ChunkBody;
use crate::protocol::message::SessionStatus;
use crate::protocol::usage::{Tokens, UsageRollup};
use crate::session::patch::{CallWrites, reconcile};
use crate::session::{Draft, checkpoint_id, patch};
use crate::store::{
    CheckpointRecord, Failure, MessageRecord, RunRecord, StagedPatch, StepRecord, SubSessionRecord,
    Terminal, ToolCallRecord, ToolOutcome, UsageRecord, Write,
};

impl Draft {
    /// Makes sure that the step exists, here and in the store.
    pub(super) fn begin_step(&mut self) {
        if self.session.step.is_none() {
            let record = StepRecord {
                step: self.session.step_number(),
                start_sequence: self.session.record.last_sequence,
                answer: None,
            };
            self.write(Write::Step(record.clone()));
            self.session.step = Some(Step {
                record,
                calls: Vec::new(),
                working: self.session.checkpoint.state.clone(),
                ordinal: self.session.checkpoint.patch_ordinal,
            });
        }
    }

    pub(in crate::session) fn update_call(
        &mut self,
        id: &str,
        change: impl FnOnce(&mut ToolCallRecord),
    ) -> Result<ToolCallRecord> {
        let call = self
            .session
            .step
            .as_mut()
            .and_then(|step| step.calls.iter_mut().find(|call| call.call.id == id))
            .ok_or_else(|| Error::internal("the step has no such tool call"))?;
        change(call);
        let call = call.clone();
        self.write(Write::ToolCall(call.clone()));
        Ok(call)
    }

    /// Puts a patch on the stream and makes `state` the working document.
    pub(super) fn say_patch(
        &mut self,
        patches: Vec<crate::protocol::chunk::PatchOperation>,
        state: Value,
    ) -> Result<u64> {
        self.begin_step();
        let base = self.session.step.as_ref().map_or(0, |step| step.ordinal);
        let last = if mutants::lacks(Mutant::OrdinalsOnce) {
            base
        } else {
            self.session.record.last_ordinal
        };
        let ordinal = last.saturating_add(1);
        self.session.record.last_ordinal = ordinal;
        self.say(ChunkBody::StatePatch {
            patches,
            patch_ordinal: Some(ordinal),
            patch_base: Some(base),
        })?;
        if let Some(step) = self.session.step.as_mut() {
            step.working = Rc::new(state);
            step.ordinal = ordinal;
        }
        Ok(ordinal)
    }

    pub(in crate::session) fn say_discarded(&mut self, reason: &str) -> Result<()> {
        if let Some(from_sequence) = self
            .session
            .step
            .as_ref()
            .map(|step| step.record.start_sequence)
        {
            let step_count = self.session.step_number();
            self.say(ChunkBody::StepDiscarded {
                step_count,
                reason: reason.into(),
                from_sequence,
            })?;
        }
        Ok(())
    }

    /// Voids an attempt whose answer was not committed.
    pub(super) fn discard(&mut self, reason: &str, spent: Option<(String, Tokens)>) -> Result<()> {
        self.say_discarded(reason)?;
        self.session.step = None;
        self.write(Write::ClearStep);
        if let Some((model, tokens)) = spent {
            let at = self.now;
            self.write(Write::Usage(UsageRecord::Model { model, tokens, at }));
        }
        Ok(())
    }

    /// Voids the step's patches and stages anew what its finished calls had staged.
    pub(in crate::session) fn restage(&mut self) -> Result<()> {
        self.say_discarded("restarted")?;
        let Some(step) = self.session.step.as_mut() else {
            return Ok(());
        };
        step.working = self.session.checkpoint.state.clone();
        step.ordinal = self.session.checkpoint.patch_ordinal;
        let mut kept: Vec<(u64, String, StagedPatch)> = Vec::new();
        let mut changed: BTreeSet<String> = BTreeSet::new();
        for call in &mut step.calls {
            if !call.staged.is_empty() {
                changed.insert(call.call.id.clone());
            }
            let staged = std::mem::take(&mut call.staged);
            if let Some(outcome) = &call.outcome {
                kept.extend(
                    staged
                        .into_iter()
                        .filter(|patch| outcome.success || patch.by_hook)
                        .map(|patch| (patch.ordinal, call.call.id.clone(), patch)),
                );
            }
        }
        kept.sort_by_key(|(ordinal, ..)| *ordinal);
        for id in &changed {
            self.update_call(id, |_| {})?;
        }
        for (_, id, patch) in kept {
            // A patch that stood on a dropped one may not apply any more; its call keeps its result
            // and loses that write, as in a promote.
            let working = self.session.working_state();
            if let Ok(state) = patch::apply(&working, &patch.patches) {
                let ordinal = self.say_patch(patch.patches.clone(), state)?;
                self.update_call(&id, |call| {
                    call.staged.push(StagedPatch { ordinal, ..patch });
                })?;
            }
        }
        Ok(())
    }

    pub(in crate::session) fn finish_call(
        &mut self,
        id: &str,
        outcome: ToolOutcome,
        child: Option<(SubSessionRecord, ChildSettled)>,
    ) -> Result<()> {
        let known = self.session.step.as_ref().and_then(|step| step.call(id));
        let finished = known.is_some_and(|call| call.outcome.is_some());
        if finished && !mutants::lacks(Mutant::FinishedStays) {
            return Err(Error::internal("the tool call has a result already"));
        }
        let call = self.update_call(id, |call| call.outcome = Some(outcome.clone()))?;
        self.session.record.attempts = 0;
        if let Some((mut record, settled)) = child {
            // What could not be told is said first: the call's end follows the child's at once.
            if settled.untold {
                self.say_untold(&record)?;
            }
            self.say(ChunkBody::SubagentEnd {
                sub_session_id: record.sub_session_id.to_string(),
                sub_agent_type: record.agent_type.to_string(),
                tool_call_id: id.into(),
                success: outcome.success,
                result: outcome.success.then(|| outcome.result.clone()),
                error: outcome.error.clone(),
            })?;
            self.count_child(&record, settled.usage);
            record.status = settled.status;
            self.write(Write::SubSession(record));
        }
        self.write(Write::Usage(UsageRecord::Tool {
            name: call.call.name.clone(),
            success: outcome.success,
            at: self.now,
        }));
        self.say(ChunkBody::ToolEnd {
            tool_call_id: id.into(),
            tool_name: call.call.name,
            result: outcome.result,
            success: outcome.success,
            error: outcome.error,
        })?;
        Ok(())
    }

    pub(super) fn promote(&mut self, state: Option<Value>, entropy: [u8; 16]) -> Result<()> {
        let Some(step) = self.session.step.clone() else {
            return Err(Error::internal("there is no step to promote"));
        };
        let Some(answer) = step.record.answer.clone() else {
            return Err(Error::internal("the step has no answer to promote"));
        };
        let state = match state {
            Some(state) => state,
            None => final_state(&self.session.checkpoint.state, &step)?,
        };
        let reconciling = patch::diff(&step.working, &state);
        if mutants::lacks(Mutant::TakesBack) {
            if let Some(step) = self.session.step.as_mut() {
                step.working = Rc::new(state);
            }
        } else if !reconciling.is_empty() {
            self.say_patch(reconciling, state)?;
        }
        let (working, ordinal) = match &self.session.step {
            Some(step) => (step.working.clone(), step.ordinal),
            None => return Err(Error::internal("there is no step to promote")),
        };

        self.write(Write::Message(MessageRecord::Assistant {
            text: answer.text,
            tool_calls: step.calls.iter().map(|call| call.call.clone()).collect(),
            cut: answer.cut,
            kept: answer.kept,
        }));
        for call in step.calls {
            if call.outcome.is_none() && mutants::lacks(Mutant::StopPairs) {
                continue;
            }
            let outcome = call
                .outcome
                .ok_or_else(|| Error::internal("a tool call has no result yet"))?;
            self.write(Write::Message(MessageRecord::Tool {
                tool_call_id: call.call.id,
                tool_name: call.call.name,
                outcome,
            }));
        }
        for text in answer.then {
            self.write(Write::Message(MessageRecord::User { text }));
        }
        let step_count = self.session.step_number();
        let id = checkpoint_id(&self.session.record, step_count, self.now, entropy);
        let stream_sequence = self.say(ChunkBody::StepCommitted {
            step_count,
            checkpoint_id: id.clone(),
            patch_ordinal: Some(ordinal),
        })?;
        self.session.record.step_count = step_count;
        self.session.record.attempts = 0;
        self.session.step = None;
        self.session.checkpoint = CheckpointRecord {
            checkpoint_id: id,
            step_count,
            stream_sequence,
            patch_ordinal: ordinal,
            state: working,
            created_at: self.now,
        };
        let checkpoint = self.session.checkpoint.clone();
        self.write(Write::Checkpoint(checkpoint));
        self.write(Write::ClearStep);
        Ok(())
    }

    /// Ends the run: status, output, terminal frame. Without a usage the one of the run's earlier
    /// terminal frame stays: a session at rest has spent nothing since.
    pub(super) fn settle(
        &mut self,
        settlement: Settlement,
        run: RunRecord,
        usage: Option<UsageRollup>,
    ) -> Result<()> {
        let run_id = self.session.record.run_id.clone();
        let (status, output, failure) = match settlement {
            Settlement::Completed { output } => (SessionStatus::Completed, Some(output), None),
            Settlement::Failed { failure } => (SessionStatus::Failed, None, Some(failure)),
            Settlement::Interrupted { reason } => {
                self.say(ChunkBody::RunInterrupted {
                    run_id: run_id.to_string(),
                    reason,
                })?;
                (SessionStatus::Interrupted, None, None)
            }
            Settlement::Aborted { reason } => {
                let failure = Failure {
                    code: Code::RunAborted.as_str().into(),
                    error: "The run was aborted.".into(),
                    detail: reason,
                };
                (SessionStatus::Failed, None, Some(failure))
            }
        };
        let record = &mut self.session.record;
        record.status = status;
        record.stop = None;
        record.output.clone_from(&output);
        record.failure.clone_from(&failure);
        let state = (*self.session.checkpoint.state).clone();
        let fits = serde_json::to_string(&state).is_ok_and(|text| text.len() <= END_STATE_LIMIT);
        let terminal = Terminal {
            status,
            sequence: record.last_sequence,
            output,
            state: fits.then_some(state),
            usage: usage.or_else(|| {
                run.terminal
                    .as_ref()
                    .and_then(|terminal| terminal.usage.clone())
            }),
            failure,
        };
        self.write(Write::Run(RunRecord {
            terminal: Some(terminal),
            ..run
        }));
        Ok(())
    }
}

/// The state that the step's calls add up to: failed calls' writes are dropped, and of two calls
/// that wrote the same place the later in call order wins. What the hook after a call wrote stands
/// right behind the call, whatever became of it.
pub(super) fn final_state(base: &Value, step: &Step) -> Result<Value> {
    let staged: Vec<(u64, bool, Vec<StagedPatch>)> = step
        .calls
        .iter()
        .flat_map(|call| {
            let failed = !call.outcome.as_ref().is_some_and(|outcome| outcome.success);
            let (by_hook, own): (Vec<_>, Vec<_>) =
                call.staged.iter().cloned().partition(|patch| patch.by_hook);
            let place = call.index.saturating_mul(2);
            [
                (place, failed, own),
                (place.saturating_add(1), false, by_hook),
            ]
        })
        .collect();
    let calls: Vec<CallWrites<'_>> = staged
        .iter()
        .map(|(index, dropped, staged)| CallWrites {
            index: *index,
            staged,
            dropped: *dropped,
        })
        .collect();
    let reconciled = reconcile(base, &calls).map_err(|e| {
        Error::new(
            Code::InvalidStoredState,
            "What the step staged cannot be applied.",
        )
        .with_detail(e.to_string())
    })?;
    Ok(reconciled.state)
}
