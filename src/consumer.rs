//! The driver of a call: carries out what [`Dispatch`] says over a [`Transport`](crate::transport::Transport).
//!
//! It decides nothing. It commits through [`CallHost`] before it goes on, so that the parent's log
//! is never behind what the machine knows, and it holds no more of a child's stream than one batch.
//! Implements the consumer's side of section 7.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use futures::future::{Either, FutureExt as _, LocalBoxFuture, select};
use futures::poll;
use futures::stream::StreamExt as _;
use serde_json::Value;

use crate::agent::{StopSignal, SubAgent};
use crate::dispatch::{Abandon, CallOutcome, Dispatch, Effect, Event, Forwarder, Terms, call_key};
use crate::error::{Error, Result};
use crate::platform::Runtime;
use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::Frame;
use crate::protocol::ids::{Sequence, SessionId, StreamId, Timestamp};
use crate::protocol::message::{ResumeMode, ResumeRequest, StartRequest, StopRequest};
use crate::store::{SubSessionRecord, SubStatus};
use crate::transport::{FrameStream, RetryPolicy, TransportError};

#[cfg(test)]
mod tests;

/// Frames that one commit takes at most.
const BATCH_FRAMES: usize = 64;

/// Bytes of chunks, roughly, after which a batch takes no further one.
const BATCH_BYTES: usize = 256 * 1024;

/// The parent's session as a call needs it. Each write is one commit, fenced by the run's epoch.
pub trait CallHost {
    /// The platform.
    fn runtime(&self) -> Rc<dyn Runtime>;

    /// Tells when the parent's run is asked to stop.
    fn stop(&self) -> StopSignal;

    /// The child's ref, if there is one.
    fn child(&self, id: &SessionId) -> Result<Option<SubSessionRecord>>;

    /// Stores a new ref, with its `subagent_start` chunk. Called before `/start` is sent.
    fn open(&self, record: SubSessionRecord) -> Result<()>;

    /// Stores the child's stream with its ref; the cursor is 0.
    fn attached(&self, id: &SessionId, stream: &StreamId) -> Result<()>;

    /// Appends stamped chunks, together with the cursor `(stream, through)` that covers them. The
    /// stream is another than the stored one when the child has begun another life.
    fn forward(
        &self,
        id: &SessionId,
        stream: &StreamId,
        through: Sequence,
        chunks: Vec<String>,
    ) -> Result<()>;

    /// Whether a `subagent_start` that was forwarded from this child announces this session.
    fn announced(&self, child: &SessionId, session_id: &str) -> Result<bool>;

    /// Writes a warning about a child to the log: ids and outcomes alone.
    fn note(&self, child: &SessionId, message: &str);
}

/// One call.
#[derive(Clone, Debug)]
pub struct CallSpec {
    /// The parent's tool call.
    pub tool_call_id: String,
    /// What `/start` is sent with: its `session_id` is the child's derived id, its `parent` names
    /// the call.
    pub request: StartRequest,
    /// When the call has to be settled. A stored ref's own deadline outranks it, so that a restart
    /// of the parent grants no second time.
    pub deadline: Timestamp,
}

/// Makes one call, or takes it up again where an earlier life of the parent left it.
///
/// The outcome is not stored here: commit it together with the call's result and the ref's status.
/// A call that was stopped before anything was sent has no ref; every other has one. A ref that is
/// marked as stopping is stopped, nothing else.
///
/// # Errors
/// What the host says when it cannot read or commit: then the call is not settled, and may be taken
/// up again. `INTERNAL` when the ref says that the call has settled already. A failure of the child or of the network is an outcome, not an error.
pub async fn run_call(
    host: Rc<dyn CallHost>,
    sub: Rc<SubAgent>,
    call: CallSpec,
) -> Result<CallOutcome> {
    let child = call.request.session_id.clone();
    let runtime = host.runtime();
    let stored = host.child(&child)?;
    let (deadline, stopping) = match stored.as_ref() {
        None => (call.deadline, false),
        Some(record) => match record.status {
            SubStatus::Running => (record.deadline, false),
            SubStatus::Stopping => (record.deadline, true),
            SubStatus::Completed | SubStatus::Failed => {
                return Err(Error::internal(format!(
                    "the call of {child} has settled already"
                )));
            }
        },
    };
    let terms = Terms::new(&sub, child.clone());
    let known = stored.is_some();
    let mut dispatch = Dispatch::new(terms, known, stored.and_then(|record| record.remote));
    let mut cuts = Cuts::new(&*host, deadline, &sub.policy);
    if stopping || host.stop().is_set() {
        dispatch.handle_stop();
    } else if !known {
        host.open(opening(&sub, &call, runtime.now()))?;
    }
    let mut forwarder = Forwarder::new(child.clone());
    let mut line = Line {
        host: host.clone(),
        sub,
        call,
        stream: None,
        dropped: None,
    };
    loop {
        match dispatch.poll_effect() {
            None => return Err(Error::internal("a call neither waits nor has settled")),
            Some(Effect::Settle(outcome)) => return Ok(*outcome),
            Some(Effect::Note(message)) => host.note(&child, &message),
            Some(Effect::Identify { stream }) => host.attached(&child, &stream)?,
            Some(Effect::Forward {
                stream,
                through,
                chunks,
            }) => {
                forward(&*host, &mut forwarder, &stream, through, chunks)?;
            }
            Some(effect) => {
                if let Some(event) = cuts.race(&mut dispatch, line.carry_out(effect)).await {
                    dispatch.handle(event, runtime.now());
                }
            }
        }
    }
}

fn opening(sub: &SubAgent, call: &CallSpec, now: Timestamp) -> SubSessionRecord {
    SubSessionRecord {
        sub_session_id: call.request.session_id.clone(),
        agent_type: sub.agent_type.clone(),
        tool_call_id: call.tool_call_id.clone(),
        location: sub.location,
        status: SubStatus::Running,
        remote: None,
        deadline: call.deadline,
        created_at: now,
    }
}

fn forward(
    host: &dyn CallHost,
    forwarder: &mut Forwarder,
    stream: &StreamId,
    through: Sequence,
    chunks: Vec<(Sequence, RawChunk)>,
) -> Result<()> {
    let child = forwarder.child().clone();
    let earlier = |session: &str| host.announced(&child, session);
    let mut stamped = Vec::with_capacity(chunks.len());
    for (sequence, chunk) in chunks {
        let forwarded = forwarder.stamp(stream, sequence, chunk, &earlier)?;
        if let Some(session) = forwarded.removed_origin {
            host.note(
                &child,
                &format!("chunk {sequence} named {session} as its origin, which is no descendant"),
            );
        }
        stamped.push(forwarded.json);
    }
    host.forward(&child, stream, through, stamped)
}

/// What cuts a call short: the parent's stop and the call's deadline, each once; and what bounds
/// the wait for the end of a child that was told to stop.
struct Cuts {
    stop: Option<LocalBoxFuture<'static, ()>>,
    deadline: Option<LocalBoxFuture<'static, ()>>,
    /// The minute after the deadline; then, once more, as long as a read may take.
    grace: Option<LocalBoxFuture<'static, ()>>,
    grace_told: bool,
    drained: Option<LocalBoxFuture<'static, ()>>,
    runtime: Rc<dyn Runtime>,
    patience: Duration,
}

impl Cuts {
    fn new(host: &dyn CallHost, deadline: Timestamp, policy: &RetryPolicy) -> Self {
        let runtime = host.runtime();
        let from_now = |at: Timestamp| Duration::from_millis(at.saturating_sub(runtime.now()));
        let left = from_now(deadline);
        let grace = from_now(policy.end_of_grace(deadline));
        Self {
            stop: Some(host.stop().wait().boxed_local()),
            deadline: Some(runtime.sleep(left)),
            grace: Some(runtime.sleep(grace)),
            grace_told: false,
            drained: None,
            runtime,
            patience: policy.read_timeout,
        }
    }

    /// Waits for `work`, unless a cut comes first and the machine has something else to do.
    async fn race(
        &mut self,
        dispatch: &mut Dispatch,
        work: impl Future<Output = Event>,
    ) -> Option<Event> {
        let mut work = pin!(work);
        if dispatch.is_draining() && (self.drained.is_none() || dispatch.has_ended()) {
            self.drained = Some(self.runtime.sleep(self.patience));
        }
        loop {
            let cut = {
                let stop = pin!(waiting(&mut self.stop).map(|()| Cut::Stop));
                let deadline = pin!(waiting(&mut self.deadline).map(|()| Cut::Deadline));
                let grace = pin!(waiting(&mut self.grace).map(|()| Cut::Grace));
                let drained = pin!(waiting(&mut self.drained).map(|()| Cut::Drained));
                let sooner = select(stop, deadline).map(|cut| cut.factor_first().0);
                let later = select(grace, drained).map(|cut| cut.factor_first().0);
                let first = select(sooner, later).map(|cut| cut.factor_first().0);
                match select(work.as_mut(), first).await {
                    Either::Left((event, _)) => return Some(event),
                    Either::Right((cut, _)) => cut,
                }
            };
            let abandon = match cut {
                Cut::Stop => dispatch.handle_stop(),
                Cut::Deadline => dispatch.handle_deadline(),
                Cut::Grace => {
                    if !std::mem::replace(&mut self.grace_told, true) {
                        self.grace = Some(self.runtime.sleep(self.patience));
                    }
                    dispatch.handle_grace_over()
                }
                Cut::Drained => dispatch.handle_drained(self.runtime.now()),
            };
            if abandon == Abandon::Yes {
                return None;
            }
        }
    }
}

/// What comes between a call and what it waits for.
enum Cut {
    Stop,
    Deadline,
    Grace,
    Drained,
}

/// Completes once when the cut comes, and never again.
async fn waiting(cut: &mut Option<LocalBoxFuture<'static, ()>>) {
    match cut {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
    *cut = None;
}

/// The line to the child: the transport, and the stream that is attached.
struct Line {
    host: Rc<dyn CallHost>,
    sub: Rc<SubAgent>,
    call: CallSpec,
    stream: Option<FrameStream>,
    /// How the stream ended, when that came right behind frames.
    dropped: Option<TransportError>,
}

impl Line {
    async fn carry_out(&mut self, effect: Effect) -> Event {
        if effect != Effect::Next {
            // Whatever comes next, the stream is done with: dropping it cancels the request.
            self.stream = None;
            self.dropped = None;
        }
        let transport = self.sub.transport.clone();
        let child = self.call.request.session_id.clone();
        let patience = self.sub.policy.read_timeout;
        match effect {
            Effect::Start => {
                let key = call_key("start", &child, None);
                Event::Started(transport.start(self.call.request.clone(), key).await)
            }
            Effect::Resume { number } => {
                let request = ResumeRequest {
                    session_id: child.clone(),
                    mode: Some(ResumeMode::Continue),
                    message: None,
                    parent: self.call.request.parent.clone(),
                };
                Event::Resumed(
                    transport
                        .resume(request, call_key("resume", &child, Some(number)))
                        .await,
                )
            }
            Effect::Attach { from, stream } => {
                match transport.stream(&child, from, Some(&stream)).await {
                    Ok(frames) => {
                        self.stream = Some(frames);
                        Event::Attached
                    }
                    Err(error) => Event::Dropped(error),
                }
            }
            Effect::Next => self.next().await,
            Effect::ReadStatus => {
                Event::Status(self.within(patience, transport.status(&child)).await)
            }
            Effect::ReadSnapshot => {
                Event::Snapshot(self.within(patience, transport.snapshot(&child)).await)
            }
            Effect::ReadUsage => Event::Usage(self.within(patience, transport.usage(&child)).await),
            Effect::Interrupt { reason } => {
                let request = StopRequest {
                    session_id: child,
                    reason: Some(reason.as_str().into()),
                };
                Event::Interrupted(self.within(patience, transport.interrupt(request)).await)
            }
            Effect::Sleep { until } => {
                self.sleep(until).await;
                Event::Slept
            }
            // These wait for nothing and are done by the loop.
            Effect::Identify { .. }
            | Effect::Forward { .. }
            | Effect::Note(_)
            | Effect::Settle(_) => Event::Slept,
        }
    }

    /// The frames that are there, or the next one: as many as one commit takes.
    async fn next(&mut self) -> Event {
        let ended =
            || TransportError::Unreachable("the stream ended without a terminal frame".into());
        let Some(stream) = &mut self.stream else {
            return Event::Dropped(self.dropped.take().unwrap_or_else(ended));
        };
        let mut frames = Vec::new();
        let mut bytes = 0;
        let mut coming = stream.next().await;
        loop {
            match coming {
                Some(Ok(frame)) => {
                    bytes += weight(&frame);
                    frames.push(frame);
                }
                gone => {
                    self.stream = None;
                    self.dropped = Some(gone.and_then(Result::err).unwrap_or_else(ended));
                    break;
                }
            }
            if frames.len() >= BATCH_FRAMES
                || bytes >= BATCH_BYTES
                || frames.last().is_some_and(Frame::is_terminal)
            {
                break;
            }
            // As this very task: what is asked by nobody wakes nobody.
            match poll!(stream.next()) {
                Poll::Ready(next) => coming = next,
                Poll::Pending => break,
            }
        }
        match self.dropped.take() {
            Some(error) if frames.is_empty() => Event::Dropped(error),
            later => {
                self.dropped = later;
                Event::Frames(frames)
            }
        }
    }

    async fn within<T>(
        &self,
        patience: Duration,
        read: impl Future<Output = Result<T, TransportError>>,
    ) -> Result<T, TransportError> {
        match select(pin!(read), self.host.runtime().sleep(patience)).await {
            Either::Left((answer, _)) => answer,
            Either::Right(_) => Err(TransportError::Timeout(patience)),
        }
    }

    /// Sleeps up to a tenth longer than asked, so that the children of one parent do not come back
    /// all at once.
    async fn sleep(&self, until: Timestamp) {
        let runtime = self.host.runtime();
        let wait = Duration::from_millis(until.saturating_sub(runtime.now()));
        let [chance, ..] = runtime.entropy();
        runtime
            .sleep(wait + wait / 10 * u32::from(chance) / 255)
            .await;
    }
}

/// How many bytes of text a frame holds, roughly.
fn weight(frame: &Frame) -> usize {
    fn of(value: &Value) -> usize {
        match value {
            Value::String(text) => text.len() + 8,
            Value::Array(items) => items.iter().map(of).sum(),
            Value::Object(fields) => fields
                .iter()
                .map(|(key, value)| key.len() + 8 + of(value))
                .sum(),
            Value::Null | Value::Bool(_) | Value::Number(_) => 8,
        }
    }
    match frame {
        Frame::Chunk { chunk, .. } => chunk.0.values().map(of).sum(),
        Frame::CaughtUp { .. } | Frame::End(_) | Frame::Error(_) => 0,
    }
}
