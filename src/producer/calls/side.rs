//! What a tool, a hook or a dispatch may do to the session of its call: the driver's side of both
//! seams. Nothing is said or staged once the call has its result.

use std::rc::Rc;

use serde_json::Value;

use super::CallSide;
use crate::agent::tool::call_key;
use crate::agent::{StepHandle, StopSignal, Tool, ToolContext};
use crate::consumer::CallHost;
use crate::error::{Code, Error, Result};
use crate::platform::{Level, Runtime};
use crate::producer::{Halt, Producer};
use crate::protocol::chunk::PatchOperation;
use crate::protocol::ids::{DocumentId, Sequence, SessionId, StreamId, Timestamp};
use crate::protocol::request::{DEPTH_LIMIT, too_deep};
use crate::store::{Database, SubRemote, SubSessionRecord, ToolCallRecord};

impl CallSide {
    pub(super) fn context(
        self: &Rc<Self>,
        tool: &dyn Tool,
        call: &ToolCallRecord,
    ) -> Result<ToolContext> {
        let attempt = call.begun.saturating_add(1);
        self.context_for(attempt, tool.idempotency_key(&call.call.arguments))
    }

    pub(super) fn context_for(
        self: &Rc<Self>,
        attempt: u32,
        key: Option<String>,
    ) -> Result<ToolContext> {
        let producer = &self.producer;
        let identity = producer.identity()?;
        let stream_id = producer
            .read(|session| session.record.stream_id.clone())?
            .ok_or_else(Error::not_found)?;
        Ok(ToolContext {
            identity,
            idempotency_key: key.unwrap_or_else(|| call_key(&stream_id, &self.tool_call_id)),
            tool_call_id: self.tool_call_id.clone(),
            attempt,
            stop: self.stop.clone(),
            handle: self.clone(),
        })
    }

    /// Refuses what comes after the call's end: a tool may have left its context with a task that
    /// outlives it, and nothing may be said behind the end of a run.
    fn expect_open(&self) -> Result<()> {
        let open = self.producer.read(|session| {
            let call = session
                .step
                .as_ref()
                .and_then(|step| step.call(&self.tool_call_id));
            call.is_some_and(|call| call.outcome.is_none())
        })?;
        if open == Some(true) {
            Ok(())
        } else {
            Err(Error::new(
                Code::RunInterrupted,
                "The tool call has ended already.",
            ))
        }
    }

    /// As [`Producer::apply_in`], for those who only see the crate's error.
    fn apply(
        &self,
        change: impl FnOnce(&crate::session::Session, Timestamp) -> Result<crate::session::Transition>,
    ) -> Result<()> {
        self.producer
            .apply_in(self.epoch, change)
            .map_err(|halt| match halt {
                Halt::Failed(error) => error,
                Halt::Superseded => Error::new(
                    Code::RunInterrupted,
                    "Another execution owns the session now.",
                ),
            })
    }

    fn stored_child(&self, id: &SessionId) -> Result<SubSessionRecord> {
        self.producer
            .store
            .sub_session(id.as_str())?
            .ok_or_else(|| Producer::stored_missing("sub-session", id))
    }
}

impl StepHandle for CallSide {
    fn state(&self) -> Rc<Value> {
        match self.producer.read(crate::session::Session::working_state) {
            Ok(Some(state)) => state,
            _ => Rc::new(Value::Null),
        }
    }

    fn stage(&self, tool_call_id: &str, state: Value) -> Result<()> {
        if too_deep(&state, DEPTH_LIMIT) {
            return Err(Error::invalid("state", "The state is nested too deeply."));
        }
        let agent = self
            .producer
            .read(|session| session.record.agent_type.clone())?
            .and_then(|agent_type| self.producer.agents.find(agent_type.as_str()));
        if let Some(agent) = agent {
            agent.limits.check_state(&state, usize::MAX)?;
            agent.state.check(&state).map_err(|reason| {
                Error::invalid("state", "The state does not have the agent's shape.")
                    .with_detail(reason)
            })?;
        }
        self.expect_open()?;
        self.apply(|session, now| {
            if self.by_hook.get() {
                session.stage_by_hook(tool_call_id, state, now)
            } else {
                session.stage(tool_call_id, state, now)
            }
        })
    }

    fn emit(&self, event_name: &str, data: Value) -> Result<()> {
        if too_deep(&data, DEPTH_LIMIT) {
            return Err(Error::invalid("data", "The data is nested too deeply."));
        }
        self.expect_open()?;
        self.apply(|session, now| session.emit(event_name, data, now))
    }

    fn patch_document(&self, id: &DocumentId, patches: Vec<PatchOperation>) -> Result<()> {
        self.expect_open()?;
        self.apply(|session, now| session.document_patched(id, patches, now))
    }

    fn database(&self) -> &dyn Database {
        self.producer.store.database()
    }

    fn now(&self) -> Timestamp {
        self.producer.now()
    }
}

impl CallHost for CallSide {
    fn runtime(&self) -> Rc<dyn Runtime> {
        self.producer.runtime.clone()
    }

    fn stop(&self) -> StopSignal {
        self.stop.clone()
    }

    fn child(&self, id: &SessionId) -> Result<Option<SubSessionRecord>> {
        self.producer.store.sub_session(id.as_str())
    }

    fn open(&self, record: SubSessionRecord) -> Result<()> {
        self.apply(|session, now| session.child_opened(record, now))
    }

    fn attached(&self, id: &SessionId, stream: &StreamId) -> Result<()> {
        let mut child = self.stored_child(id)?;
        if child
            .remote
            .as_ref()
            .is_some_and(|remote| remote.stream_id == *stream)
        {
            return Ok(());
        }
        child.remote = Some(SubRemote {
            stream_id: stream.clone(),
            last_sequence: 0,
        });
        self.apply(|session, now| session.forwarded(child, stream.clone(), 0, Vec::new(), now))
    }

    fn forward(
        &self,
        id: &SessionId,
        stream: &StreamId,
        through: Sequence,
        chunks: Vec<String>,
    ) -> Result<()> {
        let child = self.stored_child(id)?;
        self.apply(|session, now| session.forwarded(child, stream.clone(), through, chunks, now))
    }

    fn announced(&self, child: &SessionId, session_id: &str) -> Result<bool> {
        self.producer.store.announced_by(child.as_str(), session_id)
    }

    fn note(&self, child: &SessionId, message: &str) {
        self.producer.log(
            Level::Warn,
            "sub_agent",
            &[("subSessionId", child.as_str()), ("note", message)],
        );
    }
}
