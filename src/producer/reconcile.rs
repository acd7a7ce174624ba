//! What becomes of children whose calls are gone, and of open calls when a new message comes in.
//!
//! Each is decided from the live refs, at the start of every execution and before every entry with
//! a message. A child that can be read is settled by what it says; one that cannot be found is
//! lost, typed; a failure that may pass is warned about and left to the next time. A message never
//! comes between a call and its result. Implements the rules on lost children, entries with a new
//! message and orphans (section 7).

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;

use futures::StreamExt as _;
use futures::future::{Either, select};
use futures::stream;

use super::{Halt, Producer};
use crate::agent::{Agent, SubAgent};
use crate::dispatch::{attach_instead, child_id, lost_cause, rollup};
use crate::error::{Code, Error, Result};
use crate::platform::Level;
use crate::protocol::ids::{SessionId, Timestamp};
use crate::protocol::message::{ResumeMode, SessionStatus, StopRequest};
use crate::protocol::usage::{RollupOrigin, UsageRollup};
use crate::session::{CallFailure, ChildSettled, Healed, Orphaned};
use crate::store::{Epoch, SubSessionRecord, SubStatus, ToolCallRecord, ToolOutcome};
use crate::transport::TransportError;

/// The refs of a session.
#[derive(Default)]
pub(super) struct Refs {
    /// Those that can be read, in the order in which they were made.
    pub(super) readable: Vec<SubSessionRecord>,
    /// The keys of those that cannot, and why.
    pub(super) malformed: Vec<(String, Error)>,
}

/// What is known of a child whose call is open when a message comes in.
enum Fate {
    /// It has ended or is lost: the call gets its result before the message.
    Settles,
    /// It is at work, or nothing can be learned of it now.
    AtWork,
}

impl Producer {
    /// Every ref. One that cannot be read does not keep the others from being read.
    pub(super) fn refs(&self) -> Result<Refs> {
        let mut refs = Refs::default();
        match self.store.sub_sessions() {
            Ok(readable) => return Ok(Refs { readable, ..refs }),
            Err(error) if error.code == Code::InvalidStoredState => {}
            Err(error) => return Err(error),
        }
        for id in self.store.sub_session_ids()? {
            match self.store.sub_session(&id) {
                Ok(Some(record)) => refs.readable.push(record),
                Ok(None) => {}
                Err(error) if error.code == Code::InvalidStoredState => {
                    refs.malformed.push((id, error));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(refs)
    }

    /// The refs that have no outcome yet.
    pub(super) fn open_children(&self) -> Result<Vec<SubSessionRecord>> {
        let mut children = self.refs()?.readable;
        children.retain(|child| matches!(child.status, SubStatus::Running | SubStatus::Stopping));
        Ok(children)
    }

    /// The refs whose calls are open.
    pub(super) fn called_children(&self) -> Result<Vec<SubSessionRecord>> {
        let mut children = self.open_children()?;
        let open = self.open_calls()?;
        children.retain(|child| open.iter().any(|call| call.call.id == child.tool_call_id));
        Ok(children)
    }

    fn open_calls(&self) -> Result<Vec<ToolCallRecord>> {
        Ok(self
            .read(|session| session.open_calls().cloned().collect())?
            .unwrap_or_default())
    }

    /// Before an entry with a message: the calls of the ended run that get no result of their own
    /// any more. Writes nothing.
    ///
    /// # Errors
    /// `state_already_running` when a child is still at work and the entry is no new turn.
    pub(super) async fn calls_left_behind(
        self: &Rc<Self>,
        agent: &Rc<Agent>,
        mode: ResumeMode,
    ) -> Result<Vec<Healed>> {
        let open = self.open_calls()?;
        if mode == ResumeMode::Continue || open.is_empty() {
            return Ok(Vec::new());
        }
        let refs = self.refs()?;
        let malformed: Vec<&str> = refs.malformed.iter().map(|(id, _)| id.as_str()).collect();
        let fates = stream::iter(open)
            .map(|call| {
                let child = refs.readable.iter().find(|child| {
                    child.tool_call_id == call.call.id
                        && matches!(child.status, SubStatus::Running | SubStatus::Stopping)
                });
                let spoiled = self
                    .child_of_call(agent, &call)
                    .is_some_and(|(_, id)| malformed.contains(&id.as_str()));
                let child = child.cloned();
                async move {
                    let fate = match &child {
                        Some(child) => Some(self.fate(agent, child).await),
                        // The next execution fails such a call typed.
                        None if spoiled => Some(Fate::Settles),
                        None => None,
                    };
                    (call.call.id, child, fate)
                }
            })
            .buffered(agent.limits.max_children.clamp(1, MOST_AT_ONCE))
            .collect::<Vec<_>>()
            .await;
        let mut healed = Vec::new();
        for (tool_call_id, child, fate) in fates {
            match fate {
                Some(Fate::Settles) => continue,
                Some(Fate::AtWork) if mode == ResumeMode::WithMessage => {
                    return Err(Error::new(
                        Code::StateAlreadyRunning,
                        "A sub-agent is still at work; send the message again when it has finished.",
                    )
                    .with_detail(format!("call {tool_call_id}")));
                }
                Some(Fate::AtWork) | None => {}
            }
            healed.push(Healed {
                tool_call_id,
                child,
            });
        }
        Ok(healed)
    }

    async fn fate(&self, agent: &Agent, child: &SubSessionRecord) -> Fate {
        let Some(sub) = sub_of(agent, child) else {
            return Fate::AtWork;
        };
        let error = match self
            .bounded(sub, sub.transport.status(&child.sub_session_id))
            .await
        {
            Ok(status) if status.status == SessionStatus::Running => return Fate::AtWork,
            Ok(_) => return Fate::Settles,
            Err(error) => error,
        };
        if lost_cause(&error).is_some() || self.is_past_grace(sub, child) {
            return Fate::Settles;
        }
        self.warn_of(child, &format!("its status cannot be read: {error}"));
        Fate::AtWork
    }

    /// At the start of an execution: fails the refs that cannot be read, settles the children whose
    /// calls are gone, and tells those again that could not be told to stop.
    pub(super) async fn reconcile(
        self: &Rc<Self>,
        epoch: Epoch,
        agent: &Rc<Agent>,
    ) -> Result<(), Halt> {
        let refs = self.refs()?;
        for (id, error) in refs.malformed {
            self.spoil(epoch, agent, &id, &error)?;
        }
        let open = self.open_calls()?;
        let called =
            |child: &SubSessionRecord| open.iter().any(|call| call.call.id == child.tool_call_id);
        let (mut orphans, mut untold) = (Vec::new(), Vec::new());
        for child in refs.readable {
            match child.status {
                SubStatus::Running if !called(&child) => orphans.push(child),
                SubStatus::Stopping if !called(&child) => untold.push(child),
                _ => {}
            }
        }
        if !untold.is_empty() {
            // Nothing is said about them any more, so the run need not wait for them.
            let (this, agent) = (self.clone(), agent.clone());
            self.runtime.spawn(Box::pin(async move {
                for child in untold {
                    if let Err(Halt::Failed(error)) = this.tell(epoch, &agent, child).await {
                        let fields = [("error", error.message.as_ref())];
                        this.log(Level::Warn, "reconcile", &fields);
                    }
                }
            }));
        }
        let settled = stream::iter(orphans)
            .map(|child| self.settle_orphan(epoch, agent, child))
            .buffered(agent.limits.max_children.clamp(1, MOST_AT_ONCE))
            .collect::<Vec<_>>()
            .await;
        settled.into_iter().collect()
    }

    /// Looks after a session at rest: children that could not be told to stop are told again, and
    /// children of a failed run that are past their call's time are stopped.
    pub(super) async fn rest(self: &Rc<Self>) -> Result<()> {
        let Some((epoch, agent_type)) =
            self.read(|session| (session.record.epoch, session.record.agent_type.clone()))?
        else {
            return Ok(());
        };
        let mut looked_at = Vec::new();
        if let Some(agent) = self.agents.find(agent_type.as_str()) {
            for child in self.untold_children()? {
                match self.tell(epoch, &agent, child).await {
                    Ok(()) => {}
                    // An entry came meanwhile: its execution has its own alarm.
                    Err(Halt::Superseded) => return Ok(()),
                    Err(Halt::Failed(error)) => return Err(error),
                }
            }
            for child in self.called_children()? {
                if child.deadline <= self.now() && self.is_stopped_late(&agent, &child).await {
                    looked_at.push(child.sub_session_id);
                }
            }
        }
        match self.read(|session| session.record.status)? {
            Some(SessionStatus::Running) => Ok(()),
            _ => self.arm_at_rest(&looked_at).await,
        }
    }

    /// Whether a child of an ended run needs no stop any more. Its call is not settled here: an
    /// entry does that, by what the child's status says then.
    async fn is_stopped_late(&self, agent: &Agent, child: &SubSessionRecord) -> bool {
        let Some(sub) = sub_of(agent, child) else {
            return true;
        };
        let status = self
            .bounded(sub, sub.transport.status(&child.sub_session_id))
            .await;
        match status {
            Ok(status) if status.status == SessionStatus::Running => {
                self.interrupt_child(sub, child).await
            }
            Ok(_) => true,
            Err(error) => lost_cause(&error).is_some() && !self.may_begin(child),
        }
    }

    /// When the next child of a session at rest has to be looked at. Of the calls that are open,
    /// those of the children in `done` need no more.
    pub(super) fn next_child(&self, done: &[SessionId]) -> Result<Option<Timestamp>> {
        let now = self.now();
        let again = |child: &SubSessionRecord| {
            let wait = now.saturating_sub(child.created_at) / 2;
            now.saturating_add(wait.clamp(TELL_AGAIN_MS, TELL_AT_LEAST_MS))
        };
        let untold = self.untold_children()?;
        let untold = untold.iter().map(again);
        let called = self.called_children()?;
        let called = called
            .iter()
            .filter(|child| self.is_due(child) && !done.contains(&child.sub_session_id))
            .map(|child| {
                if child.deadline > now {
                    child.deadline
                } else {
                    again(child)
                }
            });
        Ok(untold.chain(called).min())
    }

    fn untold_children(&self) -> Result<Vec<SubSessionRecord>> {
        let open = self.open_calls()?;
        let mut children = self.open_children()?;
        children.retain(|child| {
            child.status == SubStatus::Stopping
                && self.is_due(child)
                && !open.iter().any(|call| call.call.id == child.tool_call_id)
        });
        Ok(children)
    }

    /// Whether a session at rest still looks after the child.
    fn is_due(&self, child: &SubSessionRecord) -> bool {
        self.now().saturating_sub(child.deadline) < TELL_UNTIL_MS
    }

    /// Fails one ref that cannot be read, with the call that it belonged to.
    fn spoil(&self, epoch: Epoch, agent: &Agent, id: &str, error: &Error) -> Result<(), Halt> {
        let fields = [("subSessionId", id), ("error", error.message.as_ref())];
        self.log(Level::Warn, "sub_agent_malformed", &fields);
        let call = self.open_calls()?.into_iter().find_map(|call| {
            let (sub, child) = self.child_of_call(agent, &call)?;
            (child.as_str() == id).then(|| (call.call.id, sub.agent_type.clone()))
        });
        self.apply_in(epoch, |session, now| {
            let call = call
                .as_ref()
                .map(|(call, agent_type)| (call.as_str(), agent_type.as_str()));
            session.child_spoiled(id, call, now)
        })
    }

    /// Settles a child whose call is gone: by its result when it has ended, else it is stopped.
    async fn settle_orphan(
        &self,
        epoch: Epoch,
        agent: &Agent,
        child: SubSessionRecord,
    ) -> Result<(), Halt> {
        let Some(sub) = sub_of(agent, &child) else {
            self.warn_of(&child, "the agent has no such sub-agent any more");
            return Ok(());
        };
        let id = &child.sub_session_id;
        let mut told = true;
        let end = match self.bounded(sub, sub.transport.status(id)).await {
            Ok(status) => match status.status {
                SessionStatus::Completed => ToolOutcome {
                    success: true,
                    result: status.output.unwrap_or_default(),
                    error: None,
                },
                SessionStatus::Failed => CallFailure::of_child(
                    status.error_code.as_deref(),
                    status.error.as_deref(),
                    status.error_detail.as_deref(),
                )
                .to_outcome(),
                SessionStatus::Running | SessionStatus::Paused | SessionStatus::Interrupted => {
                    if status.status != SessionStatus::Interrupted {
                        told = self.interrupt_child(sub, &child).await;
                    }
                    CallFailure::new(
                        Code::RunInterrupted,
                        "The sub-agent was stopped: its call is gone.",
                    )
                    .with_cause("orphan")
                    .to_outcome()
                }
            },
            Err(error) => {
                let cause = match lost_cause(&error) {
                    Some(cause) => {
                        told = !self.may_begin(&child);
                        cause
                    }
                    None if self.is_past_grace(sub, &child) => {
                        told = self.interrupt_child(sub, &child).await;
                        "status_unreachable".into()
                    }
                    None => {
                        self.warn_of(&child, &format!("its status cannot be read: {error}"));
                        return Ok(());
                    }
                };
                CallFailure::lost(cause).to_outcome()
            }
        };
        let status = match (told, end.success) {
            (false, _) => SubStatus::Stopping,
            (true, true) => SubStatus::Completed,
            (true, false) => SubStatus::Failed,
        };
        let settled = ChildSettled {
            status,
            usage: self.usage_of(sub, id).await,
            untold: !told,
        };
        self.settle_ref(epoch, child, settled, Some(end))
    }

    /// Tells a child again that could not be told to stop.
    async fn tell(&self, epoch: Epoch, agent: &Agent, child: SubSessionRecord) -> Result<(), Halt> {
        let Some(sub) = sub_of(agent, &child) else {
            self.warn_of(&child, "the agent has no such sub-agent any more");
            return Ok(());
        };
        if !self.interrupt_child(sub, &child).await {
            return Ok(());
        }
        let settled = ChildSettled {
            status: SubStatus::Failed,
            usage: self.usage_of(sub, &child.sub_session_id).await,
            untold: false,
        };
        self.settle_ref(epoch, child, settled, None)
    }

    /// Commits what became of a ref, unless it has been settled meanwhile.
    fn settle_ref(
        &self,
        epoch: Epoch,
        child: SubSessionRecord,
        settled: ChildSettled,
        end: Option<ToolOutcome>,
    ) -> Result<(), Halt> {
        let present = self.store.sub_session(child.sub_session_id.as_str())?;
        match present {
            Some(present) if present.status == child.status => self
                .apply_in(epoch, |session, now| {
                    session.child_orphaned(present, Orphaned { settled, end }, now)
                }),
            _ => Ok(()),
        }
    }

    /// Whether the child has been told to stop, or is not there to be told.
    async fn interrupt_child(&self, sub: &SubAgent, child: &SubSessionRecord) -> bool {
        let request = StopRequest {
            session_id: child.sub_session_id.clone(),
            reason: Some(Code::RunInterrupted.as_str().into()),
        };
        match self.bounded(sub, sub.transport.interrupt(request)).await {
            Ok(_) => true,
            Err(error) if attach_instead(&error).is_some() => true,
            Err(error)
                if lost_cause(&error).as_deref() == Some("not_found") && !self.may_begin(child) =>
            {
                true
            }
            Err(error) => {
                self.warn_of(child, &format!("it could not be told to stop: {error}"));
                false
            }
        }
    }

    async fn usage_of(
        &self,
        sub: &SubAgent,
        child: &SessionId,
    ) -> Option<(UsageRollup, RollupOrigin)> {
        let answer = self.bounded(sub, sub.transport.usage(child)).await.ok()?;
        let rollup = rollup(&answer.rollup).ok()?;
        Some((rollup, RollupOrigin::Recovery))
    }

    /// A call of a transport, for no longer than a read may take.
    async fn bounded<T>(
        &self,
        sub: &SubAgent,
        call: impl Future<Output = Result<T, TransportError>>,
    ) -> Result<T, TransportError> {
        let patience = sub.policy.read_timeout;
        match select(pin!(call), self.runtime.sleep(patience)).await {
            Either::Left((answer, _)) => answer,
            Either::Right(_) => Err(TransportError::Timeout(patience)),
        }
    }

    /// The child that an open call makes, if it is a call of a sub-agent.
    fn child_of_call(
        &self,
        agent: &Agent,
        call: &ToolCallRecord,
    ) -> Option<(Rc<SubAgent>, SessionId)> {
        let name = &call.call.name;
        let sub = agent
            .sub_agents
            .iter()
            .find(|sub| sub.tool_name() == *name)?;
        let id = self
            .read(|session| {
                let record = &session.record;
                child_id(
                    &record.session_id,
                    &record.stream_id,
                    &call.call.id,
                    sub.location,
                )
            })
            .ok()??
            .ok()?;
        Some((sub.clone(), id))
    }

    fn is_past_grace(&self, sub: &SubAgent, child: &SubSessionRecord) -> bool {
        self.now() > sub.policy.end_of_grace(child.deadline)
    }

    /// Whether a start that was never answered may still begin the child: then it is not there to be
    /// told now, and may be later.
    fn may_begin(&self, child: &SubSessionRecord) -> bool {
        child.remote.is_none() && self.now().saturating_sub(child.deadline) < MAY_BEGIN_MS
    }

    fn warn_of(&self, child: &SubSessionRecord, note: &str) {
        let fields = [
            ("subSessionId", child.sub_session_id.as_str()),
            ("note", note),
        ];
        self.log(Level::Warn, "sub_agent", &fields);
    }
}

/// How long behind a call's deadline a start that was never answered may be on its way, in
/// milliseconds.
const MAY_BEGIN_MS: u64 = 60 * 60_000;

/// The first wait before a child is told again, in milliseconds; it grows with the ref's age.
const TELL_AGAIN_MS: u64 = 60_000;

/// The longest wait before a child is told again, in milliseconds.
const TELL_AT_LEAST_MS: u64 = 60 * 60_000;

/// How long behind a call's deadline a session at rest goes on telling its child, in milliseconds.
/// Later entries try again all the same.
const TELL_UNTIL_MS: u64 = 24 * 60 * 60_000;

/// Reads of children at once, where children themselves have no bound.
const MOST_AT_ONCE: usize = 16;

fn sub_of<'a>(agent: &'a Agent, child: &SubSessionRecord) -> Option<&'a Rc<SubAgent>> {
    agent
        .sub_agents
        .iter()
        .find(|sub| sub.agent_type == child.agent_type && sub.location == child.location)
}
