//! The machine of one call: told what happened, it says what to do next.
//!
//! Implements the dispatch rules of section 7. It is pure: time comes in as an argument, and
//! nothing waits here. It never attaches to a child that belongs to someone else, never writes a
//! child's chunk twice, and settles exactly once. What happens after the stream is in
//! `recovery.rs`.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::fold::{bounded_state, checked_output, rollup};
use super::recovery::{Draft, Fold};
use super::{Abandon, Effect, Event};
use crate::agent::{Shape, SubAgent};
use crate::error::Code;
use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::{EndFrame, ErrorFrame, Frame};
use crate::protocol::ids::{AgentType, Position, Sequence, SessionId, StreamId, Timestamp, millis};
use crate::protocol::message::{SessionStatus, StartResponse};
use crate::protocol::usage::RollupOrigin;
use crate::session::CallFailure;
use crate::store::SubRemote;
use crate::transport::{RetryPolicy, TransportError};

/// What the machine has to know of a sub-agent.
#[derive(Clone)]
pub struct Terms {
    /// The child's session id.
    pub child: SessionId,
    /// The child's agent type.
    pub agent_type: AgentType,
    /// Budgets and waits.
    pub policy: RetryPolicy,
    /// The shape that a completed child's output must have.
    pub output: Option<Shape>,
    /// The largest child state that is folded, in bytes of JSON.
    pub max_fold_state_bytes: usize,
    /// Whether a child without a runner is resumed once.
    pub resume_dead_producer: bool,
}

impl Terms {
    /// The terms of a call of `sub` that makes `child`.
    #[must_use]
    pub fn new(sub: &SubAgent, child: SessionId) -> Self {
        Self {
            child,
            agent_type: sub.agent_type.clone(),
            policy: sub.policy.clone(),
            output: sub.output.clone(),
            max_fold_state_bytes: sub.max_fold_state_bytes,
            resume_dead_producer: sub.resume_dead_producer,
        }
    }
}

/// Where a call stands: what it waits for.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Phase {
    Starting,
    Attaching,
    Streaming,
    /// A pause before the stream is attached again, or the status read again.
    Pausing(Then),
    Status,
    Resuming,
    Interrupting(Box<Draft>),
    /// The child was told to stop: what it still says is forwarded, to its end if that comes soon.
    Draining(Box<Draft>),
    Snapshot(Box<Draft>),
    Usage(Box<Draft>),
    Settled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    Attach,
    Status,
    /// The start is sent again under its key: a stop waits for its answer.
    Start,
}

/// One call to one child. See [`Effect`] and [`Event`] for how it is driven.
pub struct Dispatch {
    pub(super) terms: Terms,
    pub(super) phase: Phase,
    effects: VecDeque<Effect>,
    /// The child's stream, once it is known.
    pub(super) stream: Option<StreamId>,
    /// The last child sequence that is forwarded.
    pub(super) cursor: Sequence,
    /// Where the next attach reads from when it is not the cursor.
    rewind: bool,
    /// Whether a `/start` may be on its way to the child, or was in an earlier life of the parent.
    start_sent: bool,
    /// Whether the ref was there before this life of the parent.
    restarted: bool,
    /// A stop that waits for the start's answer.
    stopping: bool,
    /// The deadline has passed, and what became of the child is still being found out.
    pub(super) overdue: bool,
    /// The minute after the deadline has passed as well.
    pub(super) grace_over: bool,
    /// The terminal frame was read: nothing of the child's log is missing here.
    heard_end: bool,
    /// The status said that the child has ended: what is left of its stream is finite.
    ended: bool,
    stream_retries: u32,
    pub(super) attaches: u32,
    pub(super) resumes: u32,
    /// Waits in a row without a new chunk.
    waits: u32,
    /// The terminal `error` frame, in case that the status cannot be read.
    pub(super) failure: Option<ErrorFrame>,
}

impl Dispatch {
    /// A call whose ref is stored. `known` says that the ref was there before this life of the
    /// parent: a start may have been sent then. With `remote` the child has answered its start
    /// already, and the stream goes on at the stored cursor.
    #[must_use]
    pub fn new(terms: Terms, known: bool, remote: Option<SubRemote>) -> Self {
        let mut dispatch = Self {
            stream_retries: terms.policy.stream_retries,
            attaches: terms.policy.attach_attempts,
            terms,
            phase: Phase::Starting,
            effects: VecDeque::new(),
            stream: None,
            cursor: 0,
            rewind: false,
            start_sent: known,
            restarted: known,
            stopping: false,
            overdue: false,
            grace_over: false,
            heard_end: false,
            ended: false,
            resumes: 0,
            waits: 0,
            failure: None,
        };
        match remote {
            Some(remote) => {
                dispatch.cursor = remote.last_sequence;
                dispatch.stream = Some(remote.stream_id);
                dispatch.attach();
            }
            None => dispatch.effects.push_back(Effect::Start),
        }
        dispatch
    }

    /// Whether the call has settled: its last effect is, or was, [`Effect::Settle`].
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.phase == Phase::Settled
    }

    /// What must be done now; `None` while an effect's answer is awaited.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        let effect = self.effects.pop_front();
        self.start_sent |= matches!(effect, Some(Effect::Start));
        effect
    }

    /// Something happened. An event that the call does not wait for changes nothing.
    pub fn handle(&mut self, event: Event, now: Timestamp) {
        match (std::mem::replace(&mut self.phase, Phase::Settled), event) {
            (Phase::Starting, Event::Started(answer)) => self.on_started(answer, now),
            (Phase::Attaching, Event::Attached) => self.go(Phase::Streaming, Effect::Next),
            (Phase::Attaching | Phase::Streaming, Event::Dropped(error)) => {
                self.on_dropped(&error, now)
            }
            (Phase::Streaming, Event::Frames(frames)) => self.on_frames(frames, now),
            (Phase::Pausing(Then::Attach), Event::Slept) => self.attach(),
            (Phase::Pausing(Then::Status), Event::Slept) => self.read_status(),
            (Phase::Pausing(Then::Start), Event::Slept) => {
                self.go(Phase::Starting, Effect::Start);
            }
            (Phase::Status, Event::Status(answer)) => self.on_status(answer, now),
            (Phase::Resuming, Event::Resumed(answer)) => self.on_resumed(answer),
            (Phase::Snapshot(draft), Event::Snapshot(answer)) => self.on_snapshot(*draft, answer),
            (Phase::Usage(draft), Event::Usage(answer)) => self.on_usage(*draft, answer),
            (Phase::Interrupting(draft), Event::Interrupted(answer)) => {
                self.on_interrupted(*draft, answer)
            }
            (Phase::Draining(draft), Event::Attached) => {
                self.go(Phase::Draining(draft), Effect::Next)
            }
            (Phase::Draining(draft), Event::Frames(frames)) => {
                self.on_drained(draft, frames, now);
            }
            (Phase::Draining(draft), Event::Dropped(_)) => self.conclude_unheard(*draft, now),
            (phase, _) => self.phase = phase,
        }
    }

    /// The parent is asked to stop: the child is interrupted, and the call settles interrupted.
    ///
    /// A start that is under way is settled first, and sent again under its key as long as it is
    /// not answered. A call that was never sent settles at once. A child whose end is known
    /// already keeps it.
    pub fn handle_stop(&mut self) -> Abandon {
        let failure = interrupted();
        match self.phase {
            _ if self.stopping => Abandon::No,
            Phase::Starting if self.start_sent => {
                self.stopping = true;
                Abandon::No
            }
            Phase::Starting => {
                self.effects.clear();
                self.settle(Draft::failed(failure.with_cause("not_started")));
                Abandon::Yes
            }
            _ => self.cut(failure),
        }
    }

    /// The call's time is over: the child is interrupted, and the call settles `run_timeout`.
    ///
    /// Where the child is not being heard, its status is read first: it may have ended while the
    /// parent was away, and then its result counts. [`Self::handle_grace_over`] bounds that.
    pub fn handle_deadline(&mut self) -> Abandon {
        match self.phase {
            Phase::Interrupting(_)
            | Phase::Draining(_)
            | Phase::Snapshot(_)
            | Phase::Usage(_)
            | Phase::Settled => Abandon::No,
            _ if self.stopping => Abandon::No,
            Phase::Streaming => self.cut(run_timeout()),
            Phase::Starting if !self.restarted => self.cut(run_timeout()),
            Phase::Status => {
                self.overdue = true;
                Abandon::No
            }
            _ => {
                self.overdue = true;
                self.keep_done_effects();
                self.read_status();
                Abandon::Yes
            }
        }
    }

    /// The minute after the deadline is over as well: a start that was to be stopped has not been
    /// answered, or the status stayed unreadable. Neither is waited for any longer, but what is on
    /// its way may still arrive: a parent that was away for long asks at least once. The driver says
    /// it a second time when it has waited for that as long as for a read.
    pub fn handle_grace_over(&mut self) -> Abandon {
        let first = !std::mem::replace(&mut self.grace_over, true);
        match self.phase {
            Phase::Starting if self.stopping && self.restarted && first => Abandon::No,
            _ if self.stopping => self.cut(interrupted()),
            Phase::Pausing(Then::Status) if self.overdue => {
                self.cut(CallFailure::lost("status_unreachable"))
            }
            _ => Abandon::No,
        }
    }

    /// Whether the call only waits for the last words of a child that was told to stop or that has
    /// ended. The driver bounds this wait and then says [`Self::handle_drained`].
    #[must_use]
    pub fn is_draining(&self) -> bool {
        matches!(self.phase, Phase::Draining(_))
    }

    /// Whether what is still to be heard is known to be finite: then each part may take as long as
    /// a read may, not all of it together.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The wait for the child's end has taken long enough.
    pub fn handle_drained(&mut self, now: Timestamp) -> Abandon {
        match std::mem::replace(&mut self.phase, Phase::Settled) {
            Phase::Draining(draft) => {
                self.keep_done_effects();
                self.conclude_unheard(*draft, now);
                Abandon::Yes
            }
            phase => {
                self.phase = phase;
                Abandon::No
            }
        }
    }

    /// Ends a call whose child may be at work.
    fn cut(&mut self, failure: CallFailure) -> Abandon {
        match self.phase {
            Phase::Interrupting(_)
            | Phase::Draining(_)
            | Phase::Snapshot(_)
            | Phase::Usage(_)
            | Phase::Settled => Abandon::No,
            _ => {
                self.keep_done_effects();
                self.interrupt(Draft::failed(failure));
                Abandon::Yes
            }
        }
    }

    /// Drops what is queued and not yet done: it belongs to the effect that is dropped now. Not so
    /// chunks: those have been taken from the stream and are written all the same.
    fn keep_done_effects(&mut self) {
        self.effects.retain(|effect| {
            matches!(
                effect,
                Effect::Identify { .. } | Effect::Forward { .. } | Effect::Note(_)
            )
        });
    }

    pub(super) fn go(&mut self, phase: Phase, effect: Effect) {
        self.phase = phase;
        self.effects.push_back(effect);
    }

    pub(super) fn note(&mut self, text: impl Into<String>) {
        self.effects.push_back(Effect::Note(text.into()));
    }

    pub(super) fn attach(&mut self) {
        match self.stream.clone() {
            Some(stream) => {
                let from = if self.rewind {
                    Position::None
                } else {
                    Position::At(self.cursor)
                };
                self.go(Phase::Attaching, Effect::Attach { from, stream });
            }
            None => self.read_status(),
        }
    }

    /// Whether a start may be on its way still: that nobody knows the child now is no word on
    /// whether it will be begun.
    pub(super) fn may_begin(&self) -> bool {
        self.start_sent && self.stream.is_none()
    }

    pub(super) fn read_status(&mut self) {
        self.go(Phase::Status, Effect::ReadStatus);
    }

    /// Interrupts the child before the call settles as `draft` says.
    pub(super) fn interrupt(&mut self, draft: Draft) {
        let reason = match &draft.verdict {
            Err(failure) => Code::from_wire(&failure.code).unwrap_or(Code::RunInterrupted),
            Ok(_) => Code::RunInterrupted,
        };
        self.go(
            Phase::Interrupting(Box::new(draft)),
            Effect::Interrupt { reason },
        );
    }

    /// Waits before the next attempt. Of attempts in a row the first is quick.
    pub(super) fn pause(&mut self, then: Then, at_least: Option<u32>, now: Timestamp) {
        let policy = &self.terms.policy;
        let wait = match self.waits {
            0 => policy.retry_base,
            1 => policy.reattach_wait,
            _ => policy.reattach_wait.saturating_mul(2),
        };
        self.waits = self.waits.saturating_add(1);
        let asked = Duration::from_secs(at_least.unwrap_or(0).into());
        let until = now.saturating_add(millis(wait.max(asked).min(policy.longest_wait)));
        self.go(Phase::Pausing(then), Effect::Sleep { until });
    }

    pub(super) fn adopt(&mut self, stream: StreamId) {
        self.identify(stream);
        self.attach();
    }

    /// The child's stream is known from here on.
    fn identify(&mut self, stream: StreamId) {
        self.stream = Some(stream.clone());
        self.effects.push_back(Effect::Identify { stream });
    }

    fn on_started(&mut self, answer: Result<StartResponse, TransportError>, now: Timestamp) {
        let known = match &answer {
            Ok(started) => Some(StreamId::parse(&started.stream_id).ok()),
            Err(error) => attach_instead(error),
        };
        if self.stopping {
            return match answer {
                Err(error) if never_begun(&error) => self.settle(Draft::failed(interrupted())),
                Err(error) if known.is_none() && error.may_pass() && !self.grace_over => {
                    self.note(format!(
                        "a start that is to be stopped is not answered: {error}"
                    ));
                    self.pause(Then::Start, error.retry_after(), now);
                }
                _ => {
                    self.stopping = false;
                    // What the child has said by then is heard after the interrupt.
                    known
                        .flatten()
                        .into_iter()
                        .for_each(|stream| self.identify(stream));
                    self.interrupt(Draft::failed(interrupted()));
                }
            };
        }
        match (known, answer) {
            (Some(Some(stream)), _) => self.adopt(stream),
            // The refusal does not name the stream, or names it oddly: the status does.
            (Some(None), _) => self.read_status(),
            (None, Err(error)) => self.refuse(&error),
            (None, Ok(_)) => self.read_status(),
        }
    }

    /// A call of the transport failed for good: the call fails with it, and a child that may be at
    /// work all the same is interrupted first.
    pub(super) fn refuse(&mut self, error: &TransportError) {
        let draft = Draft::failed(CallFailure::of_transport(error));
        if never_begun(error) {
            self.settle(draft);
        } else {
            self.interrupt(draft);
        }
    }

    fn on_dropped(&mut self, error: &TransportError, now: Timestamp) {
        match error {
            TransportError::ProjectedMount | TransportError::VersionUnsupported { .. } => {
                self.refuse(error);
            }
            // What stands between the two services may have made it. If not, no new chunk comes, and
            // the attempts run out.
            TransportError::TooLarge(_) => self.reattach(None, now),
            _ if !error.may_pass() => self.read_status(),
            _ => self.reattach(error.retry_after(), now),
        }
    }

    /// Attaches again after a wait, or asks for the status when that was tried often enough.
    fn reattach(&mut self, at_least: Option<u32>, now: Timestamp) {
        match self.stream_retries.checked_sub(1) {
            Some(left) => {
                self.stream_retries = left;
                self.pause(Then::Attach, at_least, now);
            }
            None => self.read_status(),
        }
    }

    /// Forwards the chunks that are new; the terminal frame, if it came.
    fn take_chunks(&mut self, frames: Vec<Frame>, now: Timestamp) -> Option<Frame> {
        let mut chunks = Vec::new();
        let mut last = None;
        for frame in frames {
            match frame {
                Frame::Chunk { sequence, chunk } if sequence > self.cursor => {
                    // The child's own log has no such hole. The number below the chunk is one that
                    // is missing, so nothing else will ever stand under it.
                    let before = sequence.saturating_sub(1);
                    if before > self.cursor {
                        chunks.push((before, self.resync_chunk("child_gap", now)));
                    }
                    self.cursor = sequence;
                    chunks.push((sequence, chunk));
                }
                Frame::Chunk { .. } | Frame::CaughtUp { .. } => {}
                Frame::End(_) | Frame::Error(_) => {
                    last = Some(frame);
                    break;
                }
            }
        }
        if !chunks.is_empty() {
            self.stream_retries = self.terms.policy.stream_retries;
            self.attaches = self.terms.policy.attach_attempts;
            self.waits = 0;
            self.rewind = false;
            self.forward(chunks);
        }
        last
    }

    /// Forwards what a child still says that was told to stop or has ended, up to its end.
    fn on_drained(&mut self, draft: Box<Draft>, frames: Vec<Frame>, now: Timestamp) {
        match self.take_chunks(frames, now) {
            None => self.go(Phase::Draining(draft), Effect::Next),
            Some(last) if tells_the_end(&last) => self.conclude(*draft),
            Some(_) => self.conclude_unheard(*draft, now),
        }
    }

    /// The child has ended and its stream was not read to the end: what is left of it is forwarded
    /// before the call settles.
    pub(super) fn hear_out(&mut self, draft: Draft) {
        match self.stream.clone().filter(|_| !self.heard_end) {
            Some(stream) => {
                self.ended = true;
                let from = Position::At(self.cursor);
                self.go(
                    Phase::Draining(Box::new(draft)),
                    Effect::Attach { from, stream },
                );
            }
            None => self.conclude(draft),
        }
    }

    /// What is left of the child's stream cannot be had. The log says so in the child's name, under
    /// a number that is above all that was forwarded.
    fn conclude_unheard(&mut self, draft: Draft, now: Timestamp) {
        self.cursor = self.cursor.saturating_add(1);
        let chunk = self.resync_chunk("child_incomplete", now);
        self.forward(vec![(self.cursor, chunk)]);
        self.conclude(draft);
    }

    fn on_frames(&mut self, frames: Vec<Frame>, now: Timestamp) {
        let last = self.take_chunks(frames, now);
        self.heard_end = last.as_ref().is_some_and(tells_the_end);
        match last {
            None => self.go(Phase::Streaming, Effect::Next),
            Some(Frame::End(end)) if end.status == SessionStatus::Completed => {
                self.on_completed(end)
            }
            Some(Frame::Error(error)) if error.code == Code::Truncated.as_str() => {
                self.on_truncated(&error, now)
            }
            Some(Frame::Error(error)) if error.recoverable => self.reattach(None, now),
            Some(Frame::Error(error)) => {
                self.failure = Some(error);
                self.read_status();
            }
            Some(_) => self.read_status(),
        }
    }

    fn forward(&mut self, chunks: Vec<(Sequence, RawChunk)>) {
        if let Some(stream) = self.stream.clone() {
            self.effects.push_back(Effect::Forward {
                stream,
                through: self.cursor,
                chunks,
            });
        }
    }

    fn on_completed(&mut self, end: EndFrame) {
        let state = end
            .state
            .map_or(Fold::Wanted, |state| self.fold_state(state));
        let usage = match end.usage.as_ref().map(rollup) {
            Some(Ok(rollup)) => Fold::Have((rollup, RollupOrigin::End)),
            Some(Err(warning)) => {
                self.note(warning);
                Fold::Wanted
            }
            None => Fold::Wanted,
        };
        let verdict = checked_output(end.output, self.terms.output.as_ref());
        self.conclude(Draft {
            verdict,
            state,
            usage,
            untold: false,
        });
    }

    pub(super) fn fold_state(&mut self, state: Value) -> Fold<Value> {
        match bounded_state(state, self.terms.max_fold_state_bytes) {
            Ok(state) => Fold::Have(state),
            Err(warning) => {
                self.note(warning);
                Fold::Skipped
            }
        }
    }

    /// The child's log no longer holds what follows the cursor. The call goes on just before what
    /// it does hold, and says so on the stream in the child's name; the child is left alone.
    fn on_truncated(&mut self, error: &ErrorFrame, now: Timestamp) {
        let Some(left) = self.stream_retries.checked_sub(1) else {
            return self.read_status();
        };
        self.stream_retries = left;
        let told = error
            .stream_id
            .as_deref()
            .and_then(|id| StreamId::parse(id).ok());
        let another_life = told.is_some() && told != self.stream;
        // The floor is the oldest chunk that is kept, and a position is exclusive.
        let before_floor = error.floor.map(|floor| floor.saturating_sub(1));
        let target = if another_life {
            Some(before_floor.unwrap_or(0))
        } else {
            before_floor
        };
        match target {
            Some(target) if another_life || target > self.cursor => {
                self.stream = told.or_else(|| self.stream.take());
                self.cursor = target;
                self.rewind = false;
                let chunk = self.resync_chunk("child_truncated", now);
                self.forward(vec![(target, chunk)]);
                self.attach();
            }
            _ if !self.rewind => {
                // The cursor is above all that the child still knows. Nothing is to be skipped, so
                // the child is read from where it likes to begin; known chunks are not written.
                self.note("the child's log ends before the cursor");
                self.rewind = true;
                self.attach();
            }
            _ => self.read_status(),
        }
    }

    fn resync_chunk(&self, reason: &str, now: Timestamp) -> RawChunk {
        let mut fields = Map::new();
        fields.insert("type".into(), json!("stream_resync"));
        fields.insert("reason".into(), json!(reason));
        fields.insert("agentId".into(), json!(self.terms.child.as_str()));
        fields.insert("agentType".into(), json!(self.terms.agent_type.as_str()));
        fields.insert("timestamp".into(), json!(now));
        fields.insert("step".into(), json!(0));
        RawChunk(fields)
    }
}

fn interrupted() -> CallFailure {
    CallFailure::new(Code::RunInterrupted, "The call was interrupted.")
}

pub(super) fn run_timeout() -> CallFailure {
    CallFailure::new(Code::RunTimeout, "The sub-agent did not finish in time.")
        .with_cause("deadline")
}

/// Whether nothing of the run follows this frame.
fn tells_the_end(frame: &Frame) -> bool {
    match frame {
        Frame::End(_) => true,
        Frame::Error(error) => !error.recoverable && error.code != Code::Truncated.as_str(),
        Frame::Chunk { .. } | Frame::CaughtUp { .. } => false,
    }
}

/// For a refusal that means "attach": the stream that it names, if it names one.
pub(crate) fn attach_instead(error: &TransportError) -> Option<Option<StreamId>> {
    match error {
        TransportError::Refused { envelope, .. } => match envelope.known_code() {
            Some(Code::AlreadyRunning | Code::AlreadyCompleted) => Some(
                envelope
                    .stream_id
                    .as_deref()
                    .and_then(|id| StreamId::parse(id).ok()),
            ),
            _ => None,
        },
        _ => None,
    }
}

/// Whether the refusal proves that the request began nothing: the contract writes nothing on a
/// refusal. A fault of the server proves nothing.
fn never_begun(error: &TransportError) -> bool {
    match error {
        TransportError::Refused { status, .. } => *status < 500 && attach_instead(error).is_none(),
        _ => false,
    }
}
