//! What a call does when its stream has not told the whole: status, then snapshot, then usage.
//!
//! Implements the recovery, liveness and lost-child rules of section 7. A fold that cannot be read
//! is skipped with a warning; it never fails the call.

use serde_json::Value;

use super::fold::{checked_output, rollup};
use super::machine::{Phase, Then, attach_instead, run_timeout};
use super::{CallOutcome, Dispatch, Effect};
use crate::error::Code;
use crate::protocol::ids::{Position, StreamId, Timestamp};
use crate::protocol::message::{
    SessionStatus, SnapshotResponse, StartResponse, StatusResponse, StopResponse, UsageResponse,
};
use crate::protocol::usage::{RollupOrigin, UsageRollup};
use crate::session::CallFailure;
use crate::store::SubStatus;
use crate::transport::TransportError;

/// A verdict with the folds that are still to be read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Draft {
    pub(super) verdict: Result<Value, CallFailure>,
    pub(super) state: Fold<Value>,
    pub(super) usage: Fold<(UsageRollup, RollupOrigin)>,
    /// The child may be at work and could not be told to stop.
    pub(super) untold: bool,
}

/// One fold.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Fold<T> {
    /// To be read.
    Wanted,
    /// There.
    Have(T),
    /// Not to be had, or not called for.
    Skipped,
}

impl<T> Fold<T> {
    fn into_option(self) -> Option<T> {
        match self {
            Self::Have(value) => Some(value),
            Self::Wanted | Self::Skipped => None,
        }
    }
}

impl Draft {
    /// A failure with nothing to fold.
    pub(super) fn failed(failure: CallFailure) -> Self {
        Self {
            verdict: Err(failure),
            state: Fold::Skipped,
            usage: Fold::Skipped,
            untold: false,
        }
    }

    /// A verdict about a child that has ended: its state and usage can be read.
    fn of_ended(verdict: Result<Value, CallFailure>) -> Self {
        Self {
            verdict,
            state: Fold::Wanted,
            usage: Fold::Wanted,
            untold: false,
        }
    }

    /// A failure of a call whose child can be reached: what it spent is counted.
    fn counted(failure: CallFailure) -> Self {
        Self {
            usage: Fold::Wanted,
            ..Self::failed(failure)
        }
    }
}

impl Dispatch {
    pub(super) fn on_status(
        &mut self,
        answer: Result<StatusResponse, TransportError>,
        now: Timestamp,
    ) {
        match answer {
            Ok(status) => self.judge(status, now),
            Err(error) => match lost_cause(&error) {
                Some(cause) => {
                    let mut draft = Draft::failed(CallFailure::lost(cause));
                    self.may_come(&mut draft);
                    self.settle(draft);
                }
                None if error.may_pass() => self.on_status_unreadable(&error, now),
                None => self.refuse(&error),
            },
        }
    }

    /// Nobody knows the child. If its start is not answered yet, it may be begun behind this, and has
    /// to be told then.
    fn may_come(&mut self, draft: &mut Draft) {
        if self.may_begin() {
            draft.untold = true;
            self.note("the child is not found, and its start may be on its way still");
        }
    }

    /// Nothing is known of the child now. That is no reason to give it up before the deadline,
    /// unless its stream has told a failure already.
    fn on_status_unreadable(&mut self, error: &TransportError, now: Timestamp) {
        if self.overdue && self.grace_over {
            self.note(format!("the child's status cannot be read: {error}"));
            return self.interrupt(Draft::failed(CallFailure::lost("status_unreachable")));
        }
        if let Some(frame) = &self.failure {
            self.attaches = self.attaches.saturating_sub(1);
            if self.attaches == 0 {
                let failure = CallFailure::of_child(
                    Some(&frame.code),
                    Some(&frame.error),
                    frame.detail.as_deref(),
                );
                return self.settle(Draft::failed(failure));
            }
        }
        self.note(format!("the child's status cannot be read: {error}"));
        self.pause(Then::Status, error.retry_after(), now);
    }

    fn judge(&mut self, status: StatusResponse, now: Timestamp) {
        if self.overdue && status.status == SessionStatus::Running {
            return self.interrupt(Draft::failed(run_timeout()));
        }
        if self.stream.is_none() {
            match status
                .stream_id
                .as_deref()
                .and_then(|id| StreamId::parse(id).ok())
            {
                Some(stream) => return self.adopt(stream),
                None if status.status == SessionStatus::Running => {
                    let error = TransportError::Malformed(
                        "neither start nor status names the stream".into(),
                    );
                    return self.refuse(&error);
                }
                None => {}
            }
        }
        match status.status {
            SessionStatus::Completed => self.on_ended_with_output(status.output),
            SessionStatus::Interrupted if status.output.is_some() => self.on_ended_with_output(status.output),
            SessionStatus::Interrupted => self.hear_out(Draft::counted(
                CallFailure::new(Code::RunInterrupted, "The sub-agent was interrupted.")
                    .with_cause("child_interrupted"),
            )),
            SessionStatus::Failed => self.hear_out(Draft::of_ended(Err(CallFailure::of_child(
                status.error_code.as_deref(),
                status.error.as_deref(),
                status.error_detail.as_deref(),
            )))),
            SessionStatus::Paused => self.hear_out(Draft::counted(
                CallFailure::new(
                    Code::ClientToolUnsupported,
                    "The sub-agent waits for a client tool or an approval, which cannot cross services.",
                )
                .with_cause("child_paused"),
            )),
            SessionStatus::Running if status.is_executing => {
                self.attaches = self.terms.policy.attach_attempts;
                self.pause(Then::Attach, None, now);
            }
            SessionStatus::Running => self.on_no_runner(now),
        }
    }

    fn on_ended_with_output(&mut self, output: Option<Value>) {
        self.hear_out(Draft::of_ended(checked_output(
            output,
            self.terms.output.as_ref(),
        )));
    }

    /// The child says "running" and nothing executes it. An attach wakes a sleeping one, so that
    /// is tried first.
    fn on_no_runner(&mut self, now: Timestamp) {
        if let Some(left) = self.attaches.checked_sub(1) {
            self.attaches = left;
            self.pause(Then::Attach, None, now);
        } else if self.terms.resume_dead_producer && self.resumes == 0 {
            self.resumes = 1;
            self.go(
                Phase::Resuming,
                Effect::Resume {
                    number: self.resumes,
                },
            );
        } else {
            self.interrupt(Draft::failed(producer_dead()));
        }
    }

    pub(super) fn on_resumed(&mut self, answer: Result<StartResponse, TransportError>) {
        match answer {
            Err(error) if attach_instead(&error).is_none() => match &error {
                TransportError::Refused { envelope, .. }
                    if envelope.known_code() == Some(Code::ChildSessionTaken) =>
                {
                    self.refuse(&error);
                }
                _ => self.interrupt(Draft::failed(
                    producer_dead().with_detail(error.to_string()),
                )),
            },
            _ => {
                self.attaches = self.terms.policy.attach_attempts;
                self.failure = None;
                self.attach();
            }
        }
    }

    /// Reads what is still to be read, one after the other, and settles.
    pub(super) fn conclude(&mut self, draft: Draft) {
        if draft.state == Fold::Wanted {
            self.go(Phase::Snapshot(Box::new(draft)), Effect::ReadSnapshot);
        } else if draft.usage == Fold::Wanted {
            self.go(Phase::Usage(Box::new(draft)), Effect::ReadUsage);
        } else {
            self.settle(draft);
        }
    }

    pub(super) fn on_snapshot(
        &mut self,
        mut draft: Draft,
        answer: Result<SnapshotResponse, TransportError>,
    ) {
        draft.state = match answer {
            Ok(snapshot) => self.fold_state(snapshot.state),
            Err(TransportError::ProjectedMount) => return self.refuse_projected(),
            Err(error) => {
                self.note(format!("the child's state is not folded: {error}"));
                Fold::Skipped
            }
        };
        self.conclude(draft);
    }

    pub(super) fn on_usage(
        &mut self,
        mut draft: Draft,
        answer: Result<UsageResponse, TransportError>,
    ) {
        draft.usage = match answer.map(|usage| rollup(&usage.rollup)) {
            Ok(Ok(rollup)) => Fold::Have((rollup, RollupOrigin::Recovery)),
            Ok(Err(warning)) => {
                self.note(warning);
                Fold::Skipped
            }
            Err(TransportError::ProjectedMount) => return self.refuse_projected(),
            Err(error) => {
                self.note(format!("the child's usage is not folded: {error}"));
                Fold::Skipped
            }
        };
        self.conclude(draft);
    }

    /// A child that has ended needs no interrupt; what a projected mount says is not folded.
    fn refuse_projected(&mut self) {
        self.settle(Draft::failed(CallFailure::of_transport(
            &TransportError::ProjectedMount,
        )));
    }

    pub(super) fn on_interrupted(
        &mut self,
        mut draft: Draft,
        answer: Result<StopResponse, TransportError>,
    ) {
        match answer {
            Ok(_) => draft.usage = Fold::Wanted,
            Err(error) if attach_instead(&error).is_some() => draft.usage = Fold::Wanted,
            Err(TransportError::Refused { envelope, .. })
                if envelope.known_code() == Some(Code::NotFound) =>
            {
                self.may_come(&mut draft);
            }
            Err(error) => {
                draft.untold = true;
                self.note(format!("the child could not be told to stop: {error}"));
            }
        }
        let told = draft.usage == Fold::Wanted;
        match self.stream.clone().filter(|_| told) {
            // The child's last words are still to come: the ends of its own children, its last
            // step. Without them the parent's log would leave them open for ever.
            Some(stream) => {
                let from = Position::At(self.cursor);
                self.go(
                    Phase::Draining(Box::new(draft)),
                    Effect::Attach { from, stream },
                );
            }
            None => self.conclude(draft),
        }
    }

    pub(super) fn settle(&mut self, draft: Draft) {
        let mut outcome = CallOutcome::new(
            draft.verdict,
            draft.state.into_option(),
            draft.usage.into_option(),
        );
        if draft.untold {
            outcome.status = SubStatus::Stopping;
        }
        self.go(Phase::Settled, Effect::Settle(Box::new(outcome)));
    }
}

/// Why a child whose status was refused cannot be found any more; `None` when that is not said.
///
/// A 404 without an envelope counts as one with it: whoever answers in the producer's place does
/// not know the session either.
pub(crate) fn lost_cause(error: &TransportError) -> Option<String> {
    match error {
        TransportError::Refused { envelope, .. }
            if envelope.known_code() == Some(Code::NotFound) =>
        {
            Some("not_found".into())
        }
        TransportError::Unexplained { status: 404 } => Some("not_found".into()),
        TransportError::Refused { envelope, .. } if !error.may_pass() => {
            Some(format!("refused:{}", envelope.code))
        }
        TransportError::Unexplained { status } if !error.may_pass() => {
            Some(format!("refused:http_{status}"))
        }
        _ => None,
    }
}

fn producer_dead() -> CallFailure {
    CallFailure::new(
        Code::ProducerDead,
        "The sub-agent is marked as running, but nothing executes it.",
    )
    .with_cause("no_runner")
}
