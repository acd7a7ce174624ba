//! The object's routes: what a mount forwards, answered for the one session that lives here.
//!
//! Requests come as `/{agentType}/{action}`. A session that is not here, and one of another agent
//! type, are the same 404. A refusal writes nothing.

use std::rc::Rc;

use bytes::Bytes;
use futures::future::LocalBoxFuture;
use http::Method;
use serde_json::{Map, Value, json};

use super::Producer;
use crate::agent::hooks::{changed, fields};
use crate::agent::{Agent, Entered, Entry};
use crate::error::{Code, Error, Result};
use crate::http::{Request, Response, json as json_answer, refusal};
use crate::platform::Level;
use crate::protocol::canonical;
use crate::protocol::header;
use crate::protocol::ids::{AgentType, RunId, SessionId, StreamId};
use crate::protocol::inside::Inside;
use crate::protocol::message::{ResumeMode, SessionStatus, StartResponse, StopResponse};
use crate::protocol::request::{
    MessagesQuery, SessionQuery, SseQuery, TreeQuery, idempotency_key, parameter, parse_resume,
    parse_start, parse_stop,
};
use crate::protocol::route::Action;
use crate::protocol::trace::TraceContext;
use crate::session::{Accepted, Begin, EntryIds, Healed, Reopen, Session, page};
use crate::store::{IdempotencyRecord, RunRecord, SessionOrigin, StopKind};

/// How a request came here: under which type, and what its mount says of it.
pub(super) struct Way {
    pub(super) agent_type: AgentType,
    pub(super) inside: Inside,
}

impl Producer {
    /// Answers one request. Every failure is an envelope.
    pub async fn handle(self: &Rc<Self>, request: Request) -> Response {
        match self.route(request).await {
            Ok(response) => response,
            Err(error) => {
                let level = if error.status() >= 500 {
                    Level::Error
                } else {
                    Level::Info
                };
                self.log(
                    level,
                    "refused",
                    &[
                        ("code", error.code.as_str()),
                        ("field", error.field.as_deref().unwrap_or_default()),
                    ],
                );
                refusal(&error)
            }
        }
    }

    async fn route(self: &Rc<Self>, request: Request) -> Result<Response> {
        let (parts, body) = request.into_parts();
        let mut segments = parts.uri.path().trim_start_matches('/').split('/');
        let (Some(agent_type), Some(action), None) =
            (segments.next(), segments.next(), segments.next())
        else {
            return Err(Error::not_found());
        };
        let way = &Way {
            agent_type: AgentType::parse(agent_type).map_err(|_| Error::not_found())?,
            inside: Inside::read(&parts.headers),
        };
        if action == "descendant" && parts.method == Method::GET {
            return self.descendant(way, parts.uri.query());
        }
        let action = Action::parse(action).ok_or_else(Error::not_found)?;
        if action.method() != parts.method {
            let mut error = Error::new(
                Code::MethodNotAllowed,
                "This path does not take this method.",
            );
            error.allow = Some(action.allow());
            return Err(error);
        }
        let query = parts.uri.query();
        match action {
            Action::Start => self.start(way, &body, &parts.headers).await,
            Action::Resume => self.resume(way, &body, &parts.headers).await,
            Action::Interrupt => self.stop(StopKind::Interrupt, way, &body).await,
            Action::Abort => self.stop(StopKind::Abort, way, &body).await,
            Action::Sse => {
                let last = parts
                    .headers
                    .get("last-event-id")
                    .and_then(|value| value.to_str().ok());
                let query = SseQuery::parse(query, last)?;
                self.expect(way, &query.session_id)?;
                let neighbours = parts.headers.contains_key(header::INTERNAL_NEIGHBOURS);
                self.sse(way, query, neighbours).await
            }
            Action::Status => {
                self.expect(way, &SessionQuery::parse(query)?.session_id)?;
                let executing = self.is_executing();
                self.read(|session| json_answer(200, &session.status(executing)))?
                    .ok_or_else(Error::not_found)
            }
            Action::Snapshot => {
                self.expect(way, &SessionQuery::parse(query)?.session_id)?;
                self.read(|session| json_answer(200, &session.snapshot()))?
                    .ok_or_else(Error::not_found)
            }
            Action::Usage => {
                let session_id = SessionQuery::parse(query)?.session_id;
                self.expect(way, &session_id)?;
                let rollup = self.usage_rollup(None).await?;
                self.expect(way, &session_id)?;
                Ok(json_answer(
                    200,
                    &json!({"sessionId": session_id, "rollup": rollup}),
                ))
            }
            Action::Tree => {
                let query = TreeQuery::parse(query)?;
                self.expect(way, &query.session_id)?;
                let tree = self.tree(query.bounds).await?;
                self.expect(way, &query.session_id)?;
                Ok(json_answer(200, &tree))
            }
            Action::Messages => {
                let query = MessagesQuery::parse(query)?;
                self.expect(way, &query.session_id)?;
                let snapshot = self.read(Session::snapshot)?.ok_or_else(Error::not_found)?;
                let behind = |index| self.store.message_behind(index);
                let page = page(snapshot, query.after, query.limit, behind)?;
                Ok(json_answer(200, &page))
            }
            // A mount asks for `/sse` and makes the parts of it.
            Action::Ui => {
                self.expect(way, &SessionQuery::parse(query)?.session_id)?;
                Err(Error::new(
                    Code::FeatureUnavailable,
                    "The UI message stream is served by mounts.",
                ))
            }
        }
    }

    /// Makes sure that this object hosts the session under this type, for this caller. To be asked
    /// again behind each wait: a life that is over may have been followed by somebody else's.
    pub(super) fn expect(&self, way: &Way, session_id: &SessionId) -> Result<()> {
        let found = self.read(|session| {
            let record = &session.record;
            (
                record.session_id == *session_id,
                record.agent_type == way.agent_type
                    && way.inside.reaches(record.origin.owner.as_deref()),
            )
        })?;
        if let Some((false, _)) = found {
            // Objects are found by their session's id: whoever asked took a wrong way here.
            let asked = [("askedSessionId", session_id.as_str())];
            self.log(Level::Warn, "foreign_session", &asked);
        }
        if found == Some((true, true)) {
            Ok(())
        } else {
            Err(Error::not_found())
        }
    }

    /// Refuses to go on with a session whose log is as large as it may be.
    fn expect_log_below(&self, most: u64) -> Result<()> {
        if most == u64::MAX || self.log_bytes()? < most {
            return Ok(());
        }
        let sentence = "The session's log is as large as it may be; begin another session.";
        Err(Error::new(Code::PayloadTooLarge, sentence)
            .with_detail(format!("the limit is {most} bytes")))
    }

    pub(super) fn log_bytes(&self) -> Result<u64> {
        Ok(self.store.log_stats(0)?.bytes)
    }

    fn entropy_ids(&self) -> EntryIds {
        EntryIds {
            run_id: RunId::from_entropy(self.runtime.entropy()),
            entropy: self.runtime.entropy(),
        }
    }

    async fn start(
        self: &Rc<Self>,
        way: &Way,
        body: &Bytes,
        headers: &http::HeaderMap,
    ) -> Result<Response> {
        let agent_type = &way.agent_type;
        let agent = self
            .agents
            .find(agent_type.as_str())
            .ok_or_else(Error::not_found)?;
        let request = parse_start(body)?;
        if request
            .agent_type
            .as_ref()
            .is_some_and(|named| named != agent_type)
        {
            return Err(Error::invalid(
                "agentType",
                "agentType differs from the one in the path",
            ));
        }
        let key = Key::read(Action::Start, &request, headers)?;
        if self.read(|_| ())?.is_some() {
            self.expect(way, &request.session_id)?;
            if let Some(answer) = self.replay(key.as_ref())? {
                // The answer is asked for again, so the first one may have been lost with the object.
                self.kick().await?;
                return Ok(answer);
            }
            self.read(|session| session.check_parent(request.parent.as_ref()))?
                .ok_or_else(Error::not_found)??;
            let refused = self
                .read(Session::refuse_start)?
                .ok_or_else(Error::not_found)?;
            self.look_after_running().await?;
            return Err(refused);
        }

        let ids = self.entropy_ids();
        let stream_id = StreamId::from_entropy(self.runtime.entropy());
        let answer = StartResponse {
            session_id: request.session_id.to_string(),
            stream_id: stream_id.to_string(),
            run_id: Some(ids.run_id.to_string()),
        };
        let idempotency = key.map(|key| key.record(&answer, self.now())).transpose()?;
        let mut incoming = request.state.unwrap_or_default();
        // The hook's own writes and the first commit are one transaction: a start that is refused
        // here, or fails half way, leaves nothing.
        let (mut committed, mut armed) = (None, None);
        let now = self.now();
        let database = self.store.database();
        database.transaction(&mut || {
            if let Some(hook) = &agent.before_entry {
                hook(&mut Entry {
                    session_id: &request.session_id,
                    is_start: true,
                    message: &request.message,
                    state: &mut incoming,
                    database,
                })?;
            }
            let state = initial_state(&agent, std::mem::take(&mut incoming))?;
            let most = way.inside.limits.max_state_bytes;
            agent.limits.check_state(&state, most)?;
            let transition = Session::begin(
                Begin {
                    session_id: request.session_id.clone(),
                    agent_type: agent_type.clone(),
                    stream_id: stream_id.clone(),
                    message: request.message.clone(),
                    state,
                    origin: SessionOrigin {
                        parent: request.parent.clone(),
                        user_id: request.user_id.clone(),
                        tags: request.tags.clone(),
                        metadata: request.metadata.clone(),
                        owner: way.inside.caller.as_ref().map(|c| c.as_str().to_owned()),
                        trace: TraceContext::from_headers(headers),
                    },
                    idempotency: idempotency.clone(),
                    ids: ids.clone(),
                },
                now,
            )?;
            self.store.commit(&transition.commit)?;
            let message = Some(request.message.as_str());
            self.entered(&agent, &transition.next, true, message)?;
            armed = Some(self.watch()?);
            committed = Some(transition.next);
            Ok(())
        })?;
        if let Some(session) = committed {
            self.adopt(session);
        }
        self.begin_execution("start", armed).await?;
        Ok(json_answer(200, &answer))
    }

    async fn resume(
        self: &Rc<Self>,
        way: &Way,
        body: &Bytes,
        headers: &http::HeaderMap,
    ) -> Result<Response> {
        let request = parse_resume(body)?;
        self.expect(way, &request.session_id)?;
        let agent = self
            .agents
            .find(way.agent_type.as_str())
            .ok_or_else(Error::not_found)?;
        let key = Key::read(Action::Resume, &request, headers)?;
        if let Some(answer) = self.replay(key.as_ref())? {
            self.kick().await?;
            return Ok(answer);
        }
        self.read(|session| session.check_parent(request.parent.as_ref()))?
            .ok_or_else(Error::not_found)??;
        let mode = request.mode.unwrap_or(if request.message.is_some() {
            ResumeMode::WithMessage
        } else {
            ResumeMode::Continue
        });
        let healed = self.healed(&agent, mode).await?;
        self.expect(way, &request.session_id)?;
        // Reading children has taken its time: the same key may have come in meanwhile.
        if let Some(answer) = self.replay(key.as_ref())? {
            self.kick().await?;
            return Ok(answer);
        }
        let ids = self.entropy_ids();
        let stream_id = self
            .read(|session| session.record.stream_id.to_string())?
            .ok_or_else(Error::not_found)?;
        let answer = StartResponse {
            session_id: request.session_id.to_string(),
            stream_id,
            run_id: Some(ids.run_id.to_string()),
        };
        let now = self.now();
        let idempotency = key.map(|key| key.record(&answer, now)).transpose()?;
        let reopen = Reopen {
            mode,
            message: request.message.clone(),
            state: None,
            idempotency,
            healed,
            ids,
        };
        // What is refused anyway does not come to the hook.
        let refused = self
            .read(|session| session.resume(reopen.clone(), now).err())?
            .ok_or_else(Error::not_found)?;
        if let Some(refused) = refused {
            self.look_after_running().await?;
            return Err(refused);
        }
        let most = way.inside.limits.max_log_bytes;
        self.expect_log_below(agent.limits.max_log_bytes.unwrap_or(u64::MAX).min(most))?;
        let database = self.store.database();
        let (mut committed, mut armed) = (None, None);
        let outcome = database.transaction(&mut || {
            let mut reopen = reopen.clone();
            if let (Some(hook), Some(message)) = (&agent.before_entry, &request.message) {
                let live = self
                    .read(|session| session.checkpoint.state.clone())?
                    .ok_or_else(Error::not_found)?;
                let mut state = fields(&live);
                hook(&mut Entry {
                    session_id: &request.session_id,
                    is_start: false,
                    message,
                    state: &mut state,
                    database,
                })?;
                reopen.state = changed(&agent, &live, state)?;
            }
            let transition = self
                .read(|session| session.resume(reopen, now))?
                .ok_or_else(Error::not_found)??;
            self.store.commit(&transition.commit)?;
            self.entered(&agent, &transition.next, false, request.message.as_deref())?;
            armed = Some(self.watch()?);
            committed = Some(transition.next);
            Ok(())
        });
        if outcome.is_err() {
            // As in `commit`: the cache may be behind the store, the next read loads it anew.
            *self.session.borrow_mut() = None;
        }
        outcome?;
        if let Some(session) = committed {
            self.adopt(session);
        }
        self.begin_execution("resume", armed).await?;
        Ok(json_answer(200, &answer))
    }

    /// Calls the hook after an entry, inside the entry's transaction.
    fn entered(
        &self,
        agent: &Agent,
        session: &Session,
        is_start: bool,
        message: Option<&str>,
    ) -> Result<()> {
        let Some(hook) = &agent.after_entry else {
            return Ok(());
        };
        hook(&Entered {
            session_id: &session.record.session_id,
            run_id: &session.record.run_id,
            is_start,
            message,
            state: &session.checkpoint.state,
            database: self.store.database(),
        })
    }

    /// The calls that the entry leaves behind. A session that is entered by someone else while its
    /// children are read is looked at again.
    async fn healed(self: &Rc<Self>, agent: &Rc<Agent>, mode: ResumeMode) -> Result<Vec<Healed>> {
        loop {
            let before = self.read(|session| (session.record.epoch, session.record.status))?;
            if matches!(before, Some((_, SessionStatus::Running))) {
                // Refused by the machine.
                return Ok(Vec::new());
            }
            let healed = self.calls_left_behind(agent, mode).await?;
            if self.read(|session| (session.record.epoch, session.record.status))? == before {
                return Ok(healed);
            }
        }
    }

    /// Begins to execute a run that is committed.
    async fn begin_execution(
        self: &Rc<Self>,
        event: &str,
        armed: Option<LocalBoxFuture<'static, Result<()>>>,
    ) -> Result<()> {
        self.launch()?;
        self.log(Level::Info, event, &[]);
        let Some(armed) = armed else { return Ok(()) };
        // The run is under way, but nothing wakes it if this object ends: whoever asks again arms the
        // watchdog.
        armed.await.map_err(|error| {
            self.not_armed(&error);
            Error::internal("the run has begun and nothing looks after it yet; ask again")
        })
    }

    async fn stop(self: &Rc<Self>, kind: StopKind, way: &Way, body: &Bytes) -> Result<Response> {
        let request = parse_stop(body)?;
        self.expect(way, &request.session_id)?;
        let run = self.latest_run()?;
        let children = self.called_children()?;
        let now = self.now();
        let outcome = self
            .read(|session| match kind {
                StopKind::Interrupt => {
                    session.interrupt(request.reason.clone(), run, children, now)
                }
                StopKind::Abort => session.abort(request.reason.clone(), run, children, now),
            })?
            .ok_or_else(Error::not_found)??;
        if let Some(transition) = outcome.transition {
            // Behind an end at rest a hook may be owed, and no execution has a watchdog. An alarm too
            // many finds nothing to do.
            let at_rest = transition.next.record.status != SessionStatus::Running;
            let armed = at_rest.then(|| self.watch()).transpose()?;
            self.commit(transition)?;
            if let Some(armed) = armed {
                armed.await?;
            }
        }
        self.signal_stop();
        // A running session that nothing executes must still reach its boundary.
        self.kick().await?;
        let status = self
            .read(|session| session.record.status)?
            .ok_or_else(Error::not_found)?;
        Ok(json_answer(
            200,
            &StopResponse {
                session_id: request.session_id.to_string(),
                status,
                accepted: outcome.accepted == Accepted::Yes,
            },
        ))
    }

    /// The stored row of the latest run.
    pub(super) fn latest_run(&self) -> Result<RunRecord> {
        let run_id = self
            .read(|session| session.record.run_id.clone())?
            .ok_or_else(Error::not_found)?;
        self.store
            .run(run_id.as_str())?
            .ok_or_else(|| Self::stored_missing("run", &run_id))
    }

    /// What was answered under this key, if it was used for the same request.
    fn replay(&self, key: Option<&Key>) -> Result<Option<Response>> {
        let Some(key) = key else { return Ok(None) };
        let Some(record) = self.store.idempotency(&key.key)? else {
            return Ok(None);
        };
        if record.digest != key.digest {
            return Err(Error::new(
                Code::IdempotencyConflict,
                "This idempotency key was used with another request; use a new key.",
            ));
        }
        let answer: StartResponse = serde_json::from_str(&record.answer).map_err(|e| {
            Error::new(Code::InvalidStoredState, "A stored answer cannot be read.")
                .with_detail(format!("idempotency: {e}"))
        })?;
        Ok(Some(json_answer(200, &answer)))
    }

    /// Whether a session is a descendant of the one here: 200 or the 404 of an unknown session.
    fn descendant(&self, way: &Way, query: Option<&str>) -> Result<Response> {
        self.expect(way, &SessionQuery::parse(query)?.session_id)?;
        let (Some(sub), Some(sub_type)) = (
            parameter(query, "subSessionId")?,
            parameter(query, "subAgentType")?,
        ) else {
            return Err(Error::not_found());
        };
        let id = SessionId::parse(&sub).map_err(|_| Error::not_found())?;
        let direct = self
            .store
            .sub_session(id.as_str())?
            .is_some_and(|child| child.agent_type.as_str() == sub_type);
        if direct || self.store.announced(&sub, Some(&sub_type))? {
            Ok(json_answer(200, &json!({})))
        } else {
            Err(Error::not_found())
        }
    }
}

/// The agent's initial state, overlaid by what came in and checked against its shape.
fn initial_state(agent: &Agent, incoming: Map<String, Value>) -> Result<Value> {
    let mut state = agent
        .state
        .initial()
        .as_object()
        .cloned()
        .unwrap_or_default();
    state.extend(incoming);
    let state = Value::Object(state);
    agent.state.check(&state).map_err(|reason| {
        Error::invalid("state", "The state does not have the agent's shape.").with_detail(reason)
    })?;
    Ok(state)
}

/// An idempotency key with the digest of the request that it came with.
struct Key {
    key: String,
    digest: String,
}

impl Key {
    /// The key of a request. The digest is over what was understood of the body, so that a field
    /// given as `null` equals one that is left out.
    fn read(
        action: Action,
        request: &impl serde::Serialize,
        headers: &http::HeaderMap,
    ) -> Result<Option<Self>> {
        let Some(key) = idempotency_key(headers)? else {
            return Ok(None);
        };
        let value =
            serde_json::to_value(request).map_err(|e| Error::internal(format!("request: {e}")))?;
        Ok(Some(Self {
            key,
            digest: canonical::digest(action, &value),
        }))
    }

    fn record(self, answer: &StartResponse, at: u64) -> Result<IdempotencyRecord> {
        let answer =
            serde_json::to_string(answer).map_err(|e| Error::internal(format!("answer: {e}")))?;
        Ok(IdempotencyRecord {
            key: self.key,
            digest: self.digest,
            answer,
            at,
        })
    }
}
