//! Entries and stops: start, resume, interrupt and abort over every stored status.
//!
//! Implements the action × status table of section 1. A refusal changes nothing.

use std::rc::Rc;

use serde_json::Value;

use super::{Draft, Healed, Session, Settlement, Step, Transition, checkpoint_id, patch};
use crate::error::{Code, Error, Result};
use crate::mutants::{self, Mutant};
use crate::protocol::chunk::ChunkBody;
use crate::protocol::ids::{AgentType, RunId, SessionId, StreamId, Timestamp};
use crate::protocol::message::{ParentRef, ResumeMode, SessionStatus};
use crate::store::{
    CheckpointRecord, Epoch, IdempotencyRecord, MessageRecord, RunRecord, SessionOrigin,
    SessionRecord, Stop, StopKind, SubSessionRecord, SubStatus, Write,
};

/// Fresh randomness for an entry.
#[derive(Clone, Debug)]
pub struct EntryIds {
    /// The new run.
    pub run_id: RunId,
    /// For the checkpoint's id.
    pub entropy: [u8; 16],
}

/// What a start brings.
#[derive(Clone, Debug)]
pub struct Begin {
    /// The session to begin.
    pub session_id: SessionId,
    /// Its agent type.
    pub agent_type: AgentType,
    /// The stream of this life of the id.
    pub stream_id: StreamId,
    /// The first message.
    pub message: String,
    /// The initial state, complete and checked.
    pub state: Value,
    /// Parent, user, labels, metadata.
    pub origin: SessionOrigin,
    /// The idempotency key with which it came; its answer is remembered in the same commit.
    pub idempotency: Option<IdempotencyRecord>,
    /// Fresh ids.
    pub ids: EntryIds,
}

/// What a resume brings.
#[derive(Clone, Debug)]
pub struct Reopen {
    /// How.
    pub mode: ResumeMode,
    /// The new message, for every mode but `continue`.
    pub message: Option<String>,
    /// The state as the entry made it; `None` where it made none.
    pub state: Option<Value>,
    /// The idempotency key with which it came.
    pub idempotency: Option<IdempotencyRecord>,
    /// Calls of a step that an ended run left open and that get no result of their own any more.
    /// Those that stay open are taken up again before the message.
    pub healed: Vec<Healed>,
    /// Fresh ids.
    pub ids: EntryIds,
}

/// Whether a stop changes something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// This call changes something.
    Yes,
    /// The session was there already.
    No,
}

/// What a stop does: a transition when it changes something.
#[derive(Clone, Debug)]
pub struct StopOutcome {
    /// The change, if there is one.
    pub transition: Option<Transition>,
    /// What the answer says.
    pub accepted: Accepted,
}

impl Session {
    /// Begins a session: checkpoint 0, the first message and `run_started` in one commit.
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn begin(begin: Begin, now: Timestamp) -> Result<Transition> {
        let record = SessionRecord {
            session_id: begin.session_id,
            agent_type: begin.agent_type,
            stream_id: begin.stream_id,
            status: SessionStatus::Running,
            run_id: begin.ids.run_id.clone(),
            epoch: first_epoch(begin.ids.entropy),
            step_count: 0,
            last_sequence: 0,
            floor: 0,
            last_ordinal: 0,
            attempts: 0,
            stop: None,
            output: None,
            failure: None,
            origin: Rc::new(begin.origin),
            created_at: now,
            updated_at: now,
        };
        let checkpoint = CheckpointRecord {
            checkpoint_id: checkpoint_id(&record, 0, now, begin.ids.entropy),
            step_count: 0,
            stream_sequence: 0,
            patch_ordinal: 0,
            state: Rc::new(begin.state),
            created_at: now,
        };
        let mut draft = Draft::new(
            &Self {
                record,
                checkpoint,
                step: None,
            },
            now,
        );
        draft.fence = None;
        draft.open_run(
            &begin.ids.run_id,
            Some(begin.message),
            begin.idempotency,
            false,
        )?;
        Ok(draft.done())
    }

    /// What a start meets on a session that exists.
    #[must_use]
    pub fn refuse_start(&self) -> Error {
        if self.record.status.is_terminal() {
            self.already_completed()
        } else {
            self.already_running()
        }
    }

    /// Refuses a dispatch that is not of the session's own parent.
    ///
    /// # Errors
    /// `state_child_session_taken`.
    pub fn check_parent(&self, parent: Option<&ParentRef>) -> Result<()> {
        let stored = self.record.origin.parent.as_ref();
        // A caller without a parent block is a person or a program that knows the id; one with a
        // block claims to be the parent and must be the one that began the session.
        if parent.is_none() || parent == stored {
            Ok(())
        } else {
            Err(Error::new(
                Code::ChildSessionTaken,
                "This session belongs to another parent.",
            ))
        }
    }

    /// Resumes the session in a new run.
    ///
    /// A message never stands between a call and its result: where the ended run left a step open,
    /// the message is kept with the step and stands behind its results.
    ///
    /// # Errors
    /// The refusals of the action × status table.
    pub fn resume(&self, reopen: Reopen, now: Timestamp) -> Result<Transition> {
        let with_message = reopen.mode != ResumeMode::Continue;
        match self.record.status {
            SessionStatus::Running => return Err(self.already_running()),
            SessionStatus::Failed if self.is_aborted() => return Err(self.already_completed()),
            SessionStatus::Completed if !with_message => return Err(self.already_completed()),
            _ => {}
        }
        let mut draft = Draft::new(self, now);
        let kept = self.open_step().is_some();
        let record = &mut draft.session.record;
        record.epoch = record.epoch.saturating_add(1);
        record.status = SessionStatus::Running;
        record.run_id = reopen.ids.run_id.clone();
        record.attempts = 0;
        record.stop = None;
        record.output = None;
        record.failure = None;
        let checkpoint = checkpoint_id(record, record.step_count, now, reopen.ids.entropy);
        draft.session.checkpoint.checkpoint_id = checkpoint;
        draft.session.checkpoint.created_at = now;
        if let Some(state) = reopen.state {
            draft.change_at_entry(state)?;
        }
        let (first, later) = if kept {
            (None, reopen.message)
        } else {
            (reopen.message, None)
        };
        draft.open_run(&reopen.ids.run_id, first, reopen.idempotency, true)?;
        if kept {
            draft.reenter(reopen.healed, later)?;
        }
        Ok(draft.done())
    }

    /// Asks a run to stop so that it can be resumed. `run` is the latest run's stored row,
    /// `children` are the refs of the calls that are open: they are marked in the same commit.
    ///
    /// # Errors
    /// ALREADY_COMPLETED on a session that has ended.
    pub fn interrupt(
        &self,
        reason: Option<String>,
        run: RunRecord,
        children: Vec<SubSessionRecord>,
        now: Timestamp,
    ) -> Result<StopOutcome> {
        match self.record.status {
            SessionStatus::Completed if mutants::lacks(Mutant::EndedStays) => {
                Ok(StopOutcome::changed(self.settle_at_rest(
                    Settlement::Interrupted { reason },
                    run,
                    now,
                )?))
            }
            SessionStatus::Completed | SessionStatus::Failed => Err(self.already_completed()),
            SessionStatus::Interrupted => Ok(StopOutcome {
                transition: None,
                accepted: Accepted::No,
            }),
            SessionStatus::Paused => Ok(StopOutcome::changed(self.settle_at_rest(
                Settlement::Interrupted { reason },
                run,
                now,
            )?)),
            SessionStatus::Running if self.record.stop.is_some() => Ok(StopOutcome {
                transition: None,
                accepted: Accepted::No,
            }),
            SessionStatus::Running => Ok(StopOutcome::changed(self.ask_stop(
                StopKind::Interrupt,
                reason,
                children,
                now,
            ))),
        }
    }

    /// Ends the session for good. `run` and `children` as for [`Self::interrupt`].
    ///
    /// # Errors
    /// `INTERNAL` if a chunk cannot be written as JSON.
    pub fn abort(
        &self,
        reason: Option<String>,
        run: RunRecord,
        children: Vec<SubSessionRecord>,
        now: Timestamp,
    ) -> Result<StopOutcome> {
        match self.record.status {
            SessionStatus::Completed | SessionStatus::Failed => Ok(StopOutcome {
                transition: None,
                accepted: Accepted::No,
            }),
            SessionStatus::Paused | SessionStatus::Interrupted => Ok(StopOutcome::changed(
                self.settle_at_rest(Settlement::Aborted { reason }, run, now)?,
            )),
            SessionStatus::Running
                if self
                    .record
                    .stop
                    .as_ref()
                    .is_some_and(|stop| stop.kind == StopKind::Abort) =>
            {
                Ok(StopOutcome {
                    transition: None,
                    accepted: Accepted::No,
                })
            }
            // An abort outranks an interrupt that has not been carried out yet.
            SessionStatus::Running => Ok(StopOutcome::changed(self.ask_stop(
                StopKind::Abort,
                reason,
                children,
                now,
            ))),
        }
    }

    fn ask_stop(
        &self,
        kind: StopKind,
        reason: Option<String>,
        children: Vec<SubSessionRecord>,
        now: Timestamp,
    ) -> Transition {
        let mut draft = Draft::new(self, now);
        draft.session.record.stop = Some(Stop { kind, reason });
        for child in children {
            if child.status == SubStatus::Running {
                draft.write(Write::SubSession(SubSessionRecord {
                    status: SubStatus::Stopping,
                    ..child
                }));
            }
        }
        draft.done()
    }

    fn already_running(&self) -> Error {
        Error::new(
            Code::AlreadyRunning,
            "The session has a run already; attach to its stream.",
        )
        .with_run(
            self.record.stream_id.as_str(),
            Some(self.record.run_id.to_string()),
        )
    }

    fn already_completed(&self) -> Error {
        Error::new(
            Code::AlreadyCompleted,
            "The session has ended already; attach to read its end.",
        )
        .with_run(
            self.record.stream_id.as_str(),
            Some(self.record.run_id.to_string()),
        )
    }
}

/// Where a life's epochs begin: at a random number, so that no execution of an earlier life of the
/// same id finds its own number again. 48 bits leave room to count on below 2^53.
fn first_epoch(entropy: [u8; 16]) -> Epoch {
    let bits = entropy.last_chunk::<8>().copied().unwrap_or_default();
    (u64::from_be_bytes(bits) >> 16).max(1)
}

impl StopOutcome {
    fn changed(transition: Transition) -> Self {
        Self {
            transition: Some(transition),
            accepted: Accepted::Yes,
        }
    }
}

impl Draft {
    /// Changes the live state before the run's first chunk, so that the checkpoint there has it.
    fn change_at_entry(&mut self, state: Value) -> Result<()> {
        let patches = patch::diff(&self.session.checkpoint.state, &state);
        if patches.is_empty() {
            return Ok(());
        }
        let staged = |step: &Step| step.calls.iter().any(|call| !call.staged.is_empty());
        if self.session.step.as_ref().is_some_and(staged) {
            // The change stands below what the kept step has staged, which is staged anew upon it.
            self.say_discarded("entered")?;
        }
        let ordinal = self.session.record.last_ordinal.saturating_add(1);
        self.session.record.last_ordinal = ordinal;
        self.say(ChunkBody::StatePatch {
            patches,
            patch_ordinal: Some(ordinal),
            patch_base: Some(self.session.checkpoint.patch_ordinal),
        })?;
        self.session.checkpoint.patch_ordinal = ordinal;
        self.session.checkpoint.state = Rc::new(state);
        if let Some(step) = self.session.step.as_mut() {
            step.working = self.session.checkpoint.state.clone();
            step.ordinal = ordinal;
            // Whatever is discarded of the step from here on, the change is not part of it.
            step.record.start_sequence = self.session.record.last_sequence;
            let record = step.record.clone();
            self.write(Write::Step(record));
        }
        Ok(())
    }

    /// Opens a run: its first chunk, and a checkpoint of the live state at that chunk.
    fn open_run(
        &mut self,
        run_id: &RunId,
        message: Option<String>,
        idempotency: Option<IdempotencyRecord>,
        resumed: bool,
    ) -> Result<()> {
        let start_sequence = self.session.record.last_sequence;
        let run_id_text = run_id.to_string();
        let opening = if resumed {
            ChunkBody::RunResumed {
                run_id: run_id_text,
                reason: None,
            }
        } else {
            ChunkBody::RunStarted {
                run_id: run_id_text,
                reason: None,
            }
        };
        let sequence = self.say(opening)?;
        self.session.checkpoint.stream_sequence = sequence;
        self.session.checkpoint.step_count = self.session.record.step_count;
        self.write(Write::Run(RunRecord {
            run_id: run_id.clone(),
            start_sequence,
            start_step: self.session.record.step_count,
            started_at: self.now,
            terminal: None,
        }));
        self.write(Write::Checkpoint(self.session.checkpoint.clone()));
        if let Some(text) = message {
            self.write(Write::Message(MessageRecord::User { text }));
        }
        if let Some(record) = idempotency {
            self.write(Write::Idempotency(record));
        }
        Ok(())
    }
}
