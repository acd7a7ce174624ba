//! A mount: which sessions of a worker's objects its callers reach, and how much they are shown.
//!
//! Implements the rules of section 1 (order of checks, auth, allowlist, headers) and section 9. It
//! is pure: a request becomes an [`Admission`], which becomes a request to the object, whose answer
//! passes through [`Mount::answer`]. Nothing reaches an object before every check has passed, and
//! no answer reaches a platform that would fail on it.

mod auth;
mod headers;
mod limit;
mod live;
mod project;
mod rewrite;
mod ui;

use std::cell::Cell;
use std::rc::Rc;

use bytes::Bytes;
use http::{HeaderMap, Method, Uri};
use serde_json::{Value, json};

pub use crate::protocol::header::INTERNAL_CALLER;
pub use crate::protocol::inside::SessionLimits;
pub use auth::{Auth, CallerHook, Decision, Head, Hook};
pub use headers::{INTERNAL_MOUNT, INTERNAL_SESSION};
pub use limit::{LimitKey, Limiter, Verdict};
pub use project::{ChunkDetail, Projection, StateMap, UsageProjection};

use crate::error::{Code, Error, Result};
use crate::http::{Body, Request, Response, json as json_answer, refusal};
use crate::protocol::ids::{AgentType, SessionId};
use crate::protocol::inside::{Caller, Inside};
use crate::protocol::request::{
    MessagesQuery, SessionQuery, SseQuery, TreeQuery, check_version, idempotency_key,
    last_event_id, parameter, parse_resume, parse_start, parse_stop,
};
use crate::protocol::route::{Action, Route, agent_path, normalize_base, parse_path};
use crate::protocol::ui::Discard;
use crate::protocol::{BODY_LIMIT, DISPATCH_HEADROOM, VERSION};
use crate::transport::Fetch;
use auth::Guard;
use headers::Kind;

#[cfg(test)]
mod tests;

/// The largest JSON answer that a mount reads to rewrite it, in bytes (32 MiB).
pub const ANSWER_LIMIT: usize = 32 * 1024 * 1024;

/// A logger for the mount's one warning.
pub type Warn = Rc<dyn Fn(&str)>;

/// One mount of a worker's objects. Build it once; it warns once.
pub struct Mount {
    base_path: String,
    agents: Option<Vec<AgentType>>,
    registered: Vec<AgentType>,
    descendants: Vec<AgentType>,
    messages: bool,
    guard: Option<Guard>,
    unauthenticated: bool,
    warning: Option<Warn>,
    warned: Cell<bool>,
    projection: Option<Projection>,
    usage: Option<UsageProjection>,
    chunks: ChunkDetail,
    ui: bool,
    live: bool,
    body_limit: usize,
    session_limits: SessionLimits,
    callers: Option<CallerHook>,
    limiter: Option<(Rc<dyn Limiter>, LimitKey)>,
}

impl Mount {
    /// A raw mount of every agent type, without auth, under `base_path`.
    #[must_use]
    pub fn new(base_path: impl AsRef<str>) -> Self {
        Self {
            base_path: normalize_base(base_path.as_ref()),
            agents: None,
            registered: Vec::new(),
            descendants: Vec::new(),
            messages: false,
            guard: None,
            unauthenticated: false,
            warning: None,
            warned: Cell::new(false),
            projection: None,
            usage: None,
            chunks: ChunkDetail::Full,
            ui: false,
            live: false,
            body_limit: BODY_LIMIT,
            session_limits: SessionLimits::default(),
            callers: None,
            limiter: None,
        }
    }

    /// The only agent types that this mount serves. Default: all, and the object checks them.
    #[must_use]
    pub fn with_agents(mut self, agents: impl IntoIterator<Item = AgentType>) -> Self {
        self.agents = Some(agents.into_iter().collect());
        self
    }

    /// The agent types that the list route tells where there is no allowlist. Default: none.
    #[must_use]
    pub fn with_registered(mut self, types: impl IntoIterator<Item = AgentType>) -> Self {
        self.registered = types.into_iter().collect();
        self
    }

    /// Agent types that the tree shows beside those that the mount serves: sessions of other services
    /// that work for these. They are reached by no other route. Default: none.
    #[must_use]
    pub fn with_descendants(mut self, types: impl IntoIterator<Item = AgentType>) -> Self {
        self.descendants = types.into_iter().collect();
        self
    }

    /// Serves the conversation: what people and agents said, and on a mount of [`ChunkDetail::Full`]
    /// the arguments and results of calls, which are no state. Default: `FEATURE_UNAVAILABLE`.
    #[must_use]
    pub fn with_messages(mut self) -> Self {
        self.messages = true;
        self
    }

    /// Who may use this mount. Default: everyone, with a warning.
    #[must_use]
    pub fn with_auth(mut self, auth: Auth) -> Self {
        self.guard = Some(auth.into());
        self
    }

    /// Says that a mount without auth is meant so, as behind a service binding.
    #[must_use]
    pub fn allow_unauthenticated(mut self) -> Self {
        self.unauthenticated = true;
        self
    }

    /// Where the warning goes when neither auth nor its absence was asked for. Default: nowhere.
    #[must_use]
    pub fn with_warning(mut self, warning: Warn) -> Self {
        self.warning = Some(warning);
        self
    }

    /// Shows state through a projection only. Default: a raw mount.
    #[must_use]
    pub fn with_projection(mut self, projection: Projection) -> Self {
        self.projection = Some(projection);
        self
    }

    /// Maps the usage rollup; alone it hides nothing else. Default: the rollup as it is.
    #[must_use]
    pub fn with_usage_projection(mut self, map: UsageProjection) -> Self {
        self.usage = Some(map);
        self
    }

    /// Which chunks pass. Default: [`ChunkDetail::Full`]. A mount that holds chunks back is no raw
    /// mount, with or without a projection.
    #[must_use]
    pub fn with_chunks(mut self, chunks: ChunkDetail) -> Self {
        self.chunks = chunks;
        self
    }

    /// Serves `/ui`, the stream as the AI SDK reads it, with what this mount shows of `/sse`.
    /// Default: it is 404 `FEATURE_UNAVAILABLE`.
    #[must_use]
    pub fn with_ui(mut self) -> Self {
        self.ui = true;
        self
    }

    /// Tells with each step of a session what it changed in the projection, so that a reader who
    /// has a snapshot needs no other. Default: readers take a new snapshot. Without a projection
    /// there is nothing to tell.
    #[must_use]
    pub fn with_live_state(mut self) -> Self {
        self.live = true;
        self
    }

    /// The largest request body, in bytes. Default: [`BODY_LIMIT`].
    #[must_use]
    pub fn with_body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// How much of one session callers of this mount may take; the session's object keeps to it.
    /// Default: what the agent allows.
    #[must_use]
    pub fn with_session_limits(mut self, limits: SessionLimits) -> Self {
        self.session_limits = limits;
        self
    }

    /// Binds each session that is begun over this mount to its caller. For everyone else it is the
    /// 404 of an unknown session here, on every route, and so is every session that was not begun by
    /// them over a mount that binds. The hook is asked behind [`Self::with_auth`]; a request of
    /// nobody is a 401. What is kept of an identity is a digest. Default: whoever may use the mount
    /// reaches every session.
    ///
    /// A mount without this reaches bound sessions too: it is for operators and for other services
    /// of one's own. An id that somebody else has cannot be begun, so whoever guesses it learns that
    /// it is taken: where that matters, ids are random.
    #[must_use]
    pub fn with_callers(mut self, hook: impl Fn(&Head<'_>) -> Option<String> + 'static) -> Self {
        self.callers = Some(Rc::new(hook));
        self
    }

    /// Asks a limiter about each request that passed every check but those of body and query, under
    /// the key that the hook makes of it; one without a key is not counted. A refusal is a 429
    /// `RATE_LIMITED` with `Retry-After`. Default: no limiter.
    #[must_use]
    pub fn with_limiter(
        mut self,
        limiter: Rc<dyn Limiter>,
        key: impl Fn(&Head<'_>) -> Option<String> + 'static,
    ) -> Self {
        self.limiter = Some((limiter, Rc::new(key)));
        self
    }

    /// Whether callers see less than what the object says, so that a dispatch may not use it.
    #[must_use]
    pub fn is_projected(&self) -> bool {
        self.projection.is_some() || self.chunks == ChunkDetail::Lifecycle
    }

    /// Whether the body of a successful answer has to pass through [`Self::answer`]. Otherwise a
    /// platform may hand it on as it is; only its headers need [`Self::stamp`].
    #[must_use]
    pub fn rewrites(&self, action: Action) -> bool {
        match action {
            Action::Sse => self.is_projected() || self.usage.is_some(),
            Action::Ui => true,
            Action::Snapshot => self.projection.is_some(),
            Action::Tree => self.projection.is_some() || self.agents.is_some(),
            Action::Messages => self.is_projected(),
            Action::Usage => self.usage.is_some(),
            Action::Start | Action::Resume | Action::Status | Action::Interrupt | Action::Abort => {
                false
            }
        }
    }

    /// Sets the headers that every answer of this mount carries, and removes those of one hop.
    pub fn stamp(&self, headers: &mut HeaderMap) {
        headers::strip(headers);
        headers::stamp(headers, self.is_projected());
    }

    /// Checks what can be checked before the body is read: path, method, auth, allowlist, version
    /// and announced length, in this order.
    ///
    /// # Errors
    /// The answer that refuses the request.
    #[allow(clippy::result_large_err)] // The answer goes out as it is; it is not passed up far.
    pub fn admit(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Admission, Response> {
        self.check(method, uri, headers)
            .map_err(|response| self.finished(*response))
    }

    /// As [`Self::admit`], and asks the limiter, if the mount has one.
    ///
    /// # Errors
    /// The answer that refuses the request.
    pub async fn admit_within_limits(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Admission, Response> {
        let admission = self.admit(method, uri, headers)?;
        if let (Some((limiter, _)), Some(key)) = (&self.limiter, &admission.limit_key) {
            limit::ask(&**limiter, key)
                .await
                .map_err(|error| self.finished(refusal(&error)))?;
        }
        Ok(admission)
    }

    fn check(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Admission, Box<Response>> {
        let refuse = |error: Error| Box::new(refusal(&error));
        let Some(route) = parse_path(&self.base_path, uri.path()) else {
            return Err(refuse(Error::not_found()));
        };
        if *method != route.method() {
            let mut error = Error::new(
                Code::MethodNotAllowed,
                "This path does not take this method.",
            );
            error.allow = Some(route.allow());
            return Err(refuse(error));
        }
        let head = Head {
            method,
            uri,
            headers,
            route: &route,
        };
        self.authorize(&head)?;
        let caller = match &self.callers {
            None => None,
            Some(hook) => {
                let identity = hook(&head).filter(|identity| !identity.is_empty());
                let identity = identity.ok_or_else(|| Box::new(auth::unauthorized()))?;
                Some(Caller::of(&identity))
            }
        };
        let (agent_type, action) = match &route {
            Route::List => {
                check_version(headers).map_err(refuse)?;
                return Ok(self.admission(&head, Next::List(self.list()), caller));
            }
            Route::Agent { agent_type, action } => (agent_type, *action),
        };
        if self
            .agents
            .as_ref()
            .is_some_and(|all| !all.contains(agent_type))
        {
            return Err(refuse(Error::not_found()));
        }
        check_version(headers).map_err(refuse)?;
        let readable = readable(self.body_limit, action);
        if action.is_post() && headers::content_length(headers) > readable as u64 {
            return Err(refuse(too_large(self.body_limit)));
        }
        let next = Next::Agent {
            agent_type: agent_type.clone(),
            action,
            query: uri.query().map(str::to_owned),
            headers: headers.clone(),
        };
        Ok(self.admission(&head, next, caller))
    }

    fn authorize(&self, head: &Head<'_>) -> Result<(), Box<Response>> {
        match &self.guard {
            Some(guard) => guard.check(head),
            None => {
                let silent = self.unauthenticated || self.warned.replace(true);
                if let (false, Some(warn)) = (silent, &self.warning) {
                    let base = if self.base_path.is_empty() {
                        "/"
                    } else {
                        &self.base_path
                    };
                    warn(&format!(
                        "the mount {base} has no auth: anyone who reaches it can use it"
                    ));
                }
                Ok(())
            }
        }
    }

    fn list(&self) -> Value {
        let agents = self.agents.as_ref().unwrap_or(&self.registered);
        json!({ "agents": agents, "version": VERSION })
    }

    fn admission(&self, head: &Head<'_>, next: Next, caller: Option<Caller>) -> Admission {
        Admission {
            next,
            limit_key: self.limiter.as_ref().and_then(|(_, key)| key(head)),
            inside: Inside {
                caller,
                limits: self.session_limits,
            },
            kind: Kind {
                projected: self.is_projected(),
                live: self.live && self.projection.is_some(),
            },
            messages: self.messages,
            ui: self.ui,
            body_limit: self.body_limit,
        }
    }

    /// The answer to the caller, made of the object's. The body of a JSON answer that this
    /// mount [rewrites](Self::rewrites) must be whole; [`Self::finish`] sees to that.
    #[must_use]
    pub fn answer(&self, asked: &Asked, response: Response) -> Response {
        let response = if self.rewrites(asked.action) && response.status().as_u16() < 400 {
            self.rewrite(asked, response)
        } else {
            response
        };
        self.finished(response)
    }

    /// As [`Self::answer`], for a body that may still be on its way.
    pub async fn finish(&self, asked: &Asked, response: Response) -> Response {
        let streams = matches!(asked.action, Action::Sse | Action::Ui);
        let whole = self.rewrites(asked.action) && !streams;
        let (parts, body) = response.into_parts();
        let body = match body {
            Body::Stream(_) if whole => match body.collect(ANSWER_LIMIT).await {
                Ok(bytes) => Body::Full(bytes),
                Err(_) => return self.unreachable(),
            },
            body => body,
        };
        self.answer(asked, Response::from_parts(parts, body))
    }

    /// The answer for an object that threw, was reset, is overloaded or cannot be reached.
    #[must_use]
    pub fn unreachable(&self) -> Response {
        self.finished(refusal(&Error::new(
            Code::TransportError,
            "The session cannot be reached right now; try again.",
        )))
    }

    /// What every answer passes last.
    fn finished(&self, response: Response) -> Response {
        finished(response, self.is_projected())
    }
}

/// A request that passed every check that needs no body.
pub struct Admission {
    next: Next,
    limit_key: Option<String>,
    inside: Inside,
    kind: Kind,
    messages: bool,
    ui: bool,
    body_limit: usize,
}

enum Next {
    List(Value),
    Agent {
        agent_type: AgentType,
        action: Action,
        query: Option<String>,
        headers: HeaderMap,
    },
}

impl Admission {
    /// Whether the request's body is to be read: at most one byte more than [`Self::body_limit`].
    #[must_use]
    pub fn takes_body(&self) -> bool {
        matches!(&self.next, Next::Agent { action, .. } if action.is_post())
    }

    /// The largest body that is worth reading, in bytes: the mount's limit, and for a start what a
    /// dispatch may add.
    #[must_use]
    pub fn body_limit(&self) -> usize {
        match &self.next {
            Next::Agent { action, .. } => readable(self.body_limit, *action),
            Next::List(_) => self.body_limit,
        }
    }

    /// Checks body and query and makes the object's request. `body` is empty where none is taken;
    /// one that was found to be too long may be handed in cut, as long as it is over the limit.
    ///
    /// # Errors
    /// The answer to send instead: a refusal, or the list of agent types.
    #[allow(clippy::result_large_err)] // The answer goes out as it is; it is not passed up far.
    pub fn forward(self, body: Bytes) -> Result<Forward, Response> {
        let (kind, projected, ui) = (self.kind, self.kind.projected, self.ui);
        let messages = self.messages;
        let inside = self.inside;
        let (agent_type, action, query, headers) = match self.next {
            Next::List(list) => return Err(finished(json_answer(200, &list), projected)),
            Next::Agent {
                agent_type,
                action,
                query,
                headers,
            } => (agent_type, action, query, headers),
        };
        let body = if action.is_post() { body } else { Bytes::new() };
        let over = body.len() > self.body_limit;
        let made = if over
            && !(body.len() <= readable(self.body_limit, action) && is_dispatch(action, &body))
        {
            Err(too_large(self.body_limit))
        } else {
            session_of(action, query.as_deref(), &headers, &body).and_then(|session_id| {
                if action == Action::Messages && !messages {
                    return Err(Error::new(
                        Code::FeatureUnavailable,
                        "This mount does not serve the conversation.",
                    ));
                }
                let discard = if action == Action::Ui {
                    discard_of(query.as_deref(), ui)?
                } else {
                    Discard::default()
                };
                let asked = Asked {
                    session_id,
                    agent_type,
                    action,
                    discard,
                };
                let request =
                    object_request(&asked, query.as_deref(), headers, body, (kind, &inside))?;
                Ok(Forward { asked, request })
            })
        };
        made.map_err(|error| finished(refusal(&error), projected))
    }
}

/// The largest body that a mount with this limit may have to take.
fn readable(limit: usize, action: Action) -> usize {
    match action {
        Action::Start => limit.saturating_add(DISPATCH_HEADROOM),
        _ => limit,
    }
}

/// Whether a start comes from a dispatch: it names its parent.
fn is_dispatch(action: Action, body: &[u8]) -> bool {
    action == Action::Start && parse_start(body).is_ok_and(|request| request.parent.is_some())
}

/// What a request asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The session, also the object's name.
    pub session_id: SessionId,
    /// The agent type of the path.
    pub agent_type: AgentType,
    /// The action.
    pub action: Action,
    /// For `/ui`: what its reader is told of a discarded answer.
    pub discard: Discard,
}

/// What goes to the object.
#[derive(Debug)]
pub struct Forward {
    /// What was asked for; the mount has to know it of the answer.
    pub asked: Asked,
    /// The request, as `http://object/{agentType}/{action}?{query}`.
    pub request: Request,
}

/// The objects behind a mount.
pub trait Objects {
    /// The object of a session; it need not exist yet.
    fn object(&self, session: &SessionId) -> Rc<dyn Fetch>;
}

/// Serves one request, from its admission to the answer. A platform that can hand bodies on
/// natively does the same steps itself.
pub async fn serve(mount: &Mount, objects: &dyn Objects, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let forward = mount
        .admit_within_limits(&parts.method, &parts.uri, &parts.headers)
        .await
        .and_then(|admission| admission.forward(body));
    let forward = match forward {
        Ok(forward) => forward,
        Err(response) => return response,
    };
    let object = objects.object(&forward.asked.session_id);
    match object.fetch(forward.request).await {
        Ok(response) => mount.finish(&forward.asked, response).await,
        Err(_) => mount.unreachable(),
    }
}

/// Reads all of a request that the contract speaks of, and tells the session.
fn session_of(
    action: Action,
    query: Option<&str>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<SessionId> {
    match action {
        Action::Start => {
            let request = parse_start(body)?;
            idempotency_key(headers)?;
            Ok(request.session_id)
        }
        Action::Resume => {
            let request = parse_resume(body)?;
            idempotency_key(headers)?;
            Ok(request.session_id)
        }
        Action::Interrupt | Action::Abort => Ok(parse_stop(body)?.session_id),
        Action::Sse | Action::Ui => Ok(SseQuery::parse(query, last_event_id(headers)?)?.session_id),
        Action::Status | Action::Snapshot | Action::Usage => {
            Ok(SessionQuery::parse(query)?.session_id)
        }
        Action::Tree => Ok(TreeQuery::parse(query)?.session_id),
        Action::Messages => Ok(MessagesQuery::parse(query)?.session_id),
    }
}

/// Reads what `/ui` takes beside the query of `/sse`, where the mount serves it.
fn discard_of(query: Option<&str>, is_served: bool) -> Result<Discard> {
    let discard = Discard::parse(parameter(query, "discard")?.as_deref())?;
    if is_served {
        Ok(discard)
    } else {
        Err(Error::new(
            Code::FeatureUnavailable,
            "This mount does not serve the UI message stream.",
        ))
    }
}

fn object_request(
    asked: &Asked,
    query: Option<&str>,
    mut headers: HeaderMap,
    body: Bytes,
    (kind, inside): (Kind, &Inside),
) -> Result<Request> {
    headers::strip(&mut headers);
    headers::body_changes(&mut headers);
    let kind = Kind {
        live: kind.live && matches!(asked.action, Action::Sse | Action::Ui),
        ..kind
    };
    headers::mark_internal(&mut headers, &asked.session_id, kind, inside)?;
    // The parts are made of the session's own stream.
    let action = match asked.action {
        Action::Ui => Action::Sse,
        action => action,
    };
    let path = agent_path("", &asked.agent_type, action, &[]);
    let mut uri = format!("http://object{path}");
    if let Some(query) = query {
        uri.push('?');
        uri.push_str(query);
    }
    let uri = uri
        .parse::<Uri>()
        .map_err(|e| Error::internal(format!("the object's address: {e}")))?;
    let mut request = Request::new(body);
    *request.method_mut() = action.method();
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    Ok(request)
}

fn too_large(limit: usize) -> Error {
    Error::new(Code::PayloadTooLarge, "The body is too large.")
        .with_detail(format!("the limit is {limit} bytes"))
}

/// Platforms fail on answers that HTTP does not know, so none of them leaves a mount.
fn finished(response: Response, projected: bool) -> Response {
    let mut response = match response.status().as_u16() {
        204 | 205 | 304 => {
            let (mut parts, _) = response.into_parts();
            headers::body_changes(&mut parts.headers);
            Response::from_parts(parts, Body::empty())
        }
        200..=599 => response,
        status => refusal(&Error::internal(format!("an answer with status {status}"))),
    };
    headers::strip(response.headers_mut());
    headers::stamp(response.headers_mut(), projected);
    response
}
