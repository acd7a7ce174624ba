//! The calls over HTTP, whatever moves the bytes.
//!
//! Every answer is held to the contract before a caller sees it: version, mount, status, content
//! type, size, and the body as a type. Of an incoming request nothing is ever sent on: a request
//! carries the configured headers, the trace, the version and the idempotency key, nothing else.
//! Implements the client's side of sections 1, 2 and 4, and what section 7 says is retried.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{Either, LocalBoxFuture, select};
use futures::stream::StreamExt as _;
use http::header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde::de::DeserializeOwned;

use super::frames::frames;
use super::{Call, Fetch, FrameStream, RetryPolicy, Transport, TransportError};
use crate::error::Code;
use crate::http::{Body, Request, Response};
use crate::platform::Runtime;
use crate::protocol::ids::{AgentType, Position, SessionId, StreamId};
use crate::protocol::message::{
    ErrorEnvelope, ResumeRequest, SnapshotResponse, StartRequest, StartResponse, StatusResponse,
    StopRequest, StopResponse, UsageResponse,
};
use crate::protocol::route::{Action, agent_path};
use crate::protocol::sse;
use crate::protocol::trace::TraceContext;
use crate::protocol::tree::{TreeBounds, TreeNode};
use crate::protocol::{VERSION, header};

/// The largest JSON answer, in bytes: a snapshot holds a whole state.
const ANSWER_LIMIT: usize = 8 * 1024 * 1024;

/// The largest error envelope, in bytes.
const ENVELOPE_LIMIT: usize = 64 * 1024;

/// Makes headers for one request; asked anew for each try, so that a short-lived token is fresh.
/// The error's text reaches logs: it must not hold a credential.
pub type HeaderFactory = Rc<dyn Fn() -> LocalBoxFuture<'static, Result<HeaderMap, String>>>;

/// Where the configured headers come from. Names that the contract uses are overwritten.
#[derive(Clone)]
pub enum HeaderSource {
    /// The same for every request.
    Static(HeaderMap),
    /// Made for each request.
    Factory(HeaderFactory),
}

/// The calls over any [`Fetch`], for the sessions of one agent type behind one mount.
#[derive(Clone)]
pub struct HttpTransport {
    fetch: Rc<dyn Fetch>,
    runtime: Rc<dyn Runtime>,
    base_url: String,
    base_path: String,
    agent_type: AgentType,
    headers: HeaderSource,
    trace: HeaderMap,
    policy: RetryPolicy,
    raw_only: bool,
}

impl HttpTransport {
    /// A transport to the mount at `base_path` (as `/agents`) of `base_url` (scheme and authority).
    ///
    /// It sends no headers of its own choice, has the contract's default policy, and takes answers
    /// of raw mounts only: see [`Self::any_mount`].
    #[must_use]
    pub fn new(
        fetch: Rc<dyn Fetch>,
        runtime: Rc<dyn Runtime>,
        base_url: impl Into<String>,
        base_path: impl Into<String>,
        agent_type: AgentType,
    ) -> Self {
        Self {
            fetch,
            runtime,
            base_url: base_url.into().trim_end_matches('/').to_owned(),
            base_path: base_path.into(),
            agent_type,
            headers: HeaderSource::Static(HeaderMap::new()),
            trace: HeaderMap::new(),
            policy: RetryPolicy::default(),
            raw_only: true,
        }
    }

    /// Sets the configured headers. Default: none.
    #[must_use]
    pub fn with_headers(mut self, headers: HeaderSource) -> Self {
        self.headers = headers;
        self
    }

    /// Sets the trace that requests continue. Default: none.
    #[must_use]
    pub fn with_trace(mut self, traceparent: HeaderValue, tracestate: Option<HeaderValue>) -> Self {
        self.trace = HeaderMap::new();
        self.trace
            .insert(HeaderName::from_static("traceparent"), traceparent);
        if let Some(tracestate) = tracestate {
            self.trace
                .insert(HeaderName::from_static("tracestate"), tracestate);
        }
        self
    }

    /// Sets deadlines and retries. Default: [`RetryPolicy::default`].
    #[must_use]
    pub fn with_policy(mut self, policy: RetryPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Puts something between the calls and what moves their bytes: what records requests, signs
    /// them, or makes faults. It gets every request of this transport, retries included.
    #[must_use]
    pub fn through(mut self, layer: impl FnOnce(Rc<dyn Fetch>) -> Rc<dyn Fetch>) -> Self {
        self.fetch = layer(self.fetch);
        self
    }

    /// Refuses answers of a projected mount. The default: what a projected mount tells is lossy,
    /// and a dispatch would fold it as if it were the child's state.
    #[must_use]
    pub fn raw_only(mut self) -> Self {
        self.raw_only = true;
        self
    }

    /// Takes answers of projected mounts too, for a reader that folds nothing.
    #[must_use]
    pub fn any_mount(mut self) -> Self {
        self.raw_only = false;
        self
    }

    /// A JSON call with its retries.
    async fn call<T: DeserializeOwned>(
        &self,
        wire: Wire,
        check: impl Fn(&T) -> Result<(), String>,
    ) -> Result<T, TransportError> {
        let deadline = if wire.action.is_post() {
            self.policy.post_timeout
        } else {
            self.policy.read_timeout
        };
        let mut tries = 0;
        loop {
            let attempt = async {
                let response = self.exchange(&wire, "application/json").await?;
                let value = read_json(response, wire.limit).await?;
                check(&value).map_err(TransportError::Malformed)?;
                Ok(value)
            };
            let failed = match self.within(deadline, attempt).await {
                Ok(value) => return Ok(value),
                Err(failed) => failed,
            };
            if tries >= self.policy.post_retries || !wire.is_retried(&failed.error) {
                return Err(failed.error);
            }
            self.runtime
                .sleep(self.backoff(tries, failed.retry_after))
                .await;
            tries += 1;
        }
    }

    /// One request, until the answer's headers are there and say what they must.
    async fn exchange(&self, wire: &Wire, accept: &'static str) -> Result<Response, Failed> {
        let request = self.request(wire, accept).await?;
        let response = self
            .fetch
            .fetch(request)
            .await
            .map_err(|e| TransportError::Unreachable(e.to_string()))?;
        check_version(response.headers())?;
        if self.raw_only
            && response
                .headers()
                .get(header::MOUNT)
                .is_some_and(|mount| mount == "projected")
        {
            return Err(TransportError::ProjectedMount.into());
        }
        match response.status().as_u16() {
            200 if is_type(response.headers(), accept) => Ok(response),
            200 => {
                Err(TransportError::Malformed(format!("the content type is not {accept}")).into())
            }
            status @ 300..=399 => Err(TransportError::Malformed(format!(
                "a redirect ({status}), which is not followed"
            ))
            .into()),
            status @ 400..=599 => Err(refusal(status, response).await),
            status => Err(TransportError::Malformed(format!("status {status}")).into()),
        }
    }

    async fn request(&self, wire: &Wire, accept: &'static str) -> Result<Request, TransportError> {
        let mut headers = match &self.headers {
            HeaderSource::Static(headers) => headers.clone(),
            HeaderSource::Factory(make) => make().await.map_err(|e| {
                TransportError::Unreachable(format!("the request's headers could not be made: {e}"))
            })?,
        };
        headers.extend(self.trace.clone());
        headers.insert(ACCEPT, HeaderValue::from_static(accept));
        headers.insert(header::VERSION, VERSION.into());
        if wire.body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(key) = &wire.key {
            let value = HeaderValue::from_str(key).map_err(|_| {
                TransportError::Malformed("the idempotency key is not a header value".into())
            })?;
            headers.insert(header::IDEMPOTENCY_KEY, value);
        }
        let query: Vec<_> = wire
            .query
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        let path = agent_path(&self.base_path, &self.agent_type, wire.action, &query);
        let mut request = Request::new(wire.body.clone().unwrap_or_default());
        *request.method_mut() = wire.action.method();
        *request.uri_mut() = format!("{}{path}", self.base_url)
            .parse()
            .map_err(|e| TransportError::Malformed(format!("the transport's URL: {e}")))?;
        *request.headers_mut() = headers;
        Ok(request)
    }

    async fn within<T>(
        &self,
        deadline: Duration,
        attempt: impl Future<Output = Result<T, Failed>>,
    ) -> Result<T, Failed> {
        match select(pin!(attempt), self.runtime.sleep(deadline)).await {
            Either::Left((result, _)) => result,
            Either::Right(_) => Err(TransportError::Timeout(deadline).into()),
        }
    }

    /// The wait before the next try: the doubled base, of which half is chance, and no less than
    /// what the peer asked for.
    fn backoff(&self, tries: u32, retry_after: Option<u32>) -> Duration {
        let doubled = 1_u32.checked_shl(tries).unwrap_or(u32::MAX);
        let longest = self.policy.longest_wait;
        let full = self.policy.retry_base.saturating_mul(doubled).min(longest);
        let [chance, ..] = self.runtime.entropy();
        let wait = full / 2 + full / 2 * u32::from(chance) / 255;
        let asked = Duration::from_secs(retry_after.unwrap_or(0).into()).min(longest);
        wait.max(asked)
    }

    async fn stop(
        &self,
        action: Action,
        request: StopRequest,
    ) -> Result<StopResponse, TransportError> {
        let session = request.session_id.clone();
        let wire = Wire::post(action, &request, None)?;
        self.call(wire, move |answer: &StopResponse| {
            same(&session, &answer.session_id)
        })
        .await
    }

    async fn begin(
        &self,
        action: Action,
        session: SessionId,
        request: &impl serde::Serialize,
        key: String,
    ) -> Result<StartResponse, TransportError> {
        let wire = Wire::post(action, request, Some(key))?;
        self.call(wire, move |answer: &StartResponse| {
            StreamId::parse(&answer.stream_id).map_err(|e| e.to_string())?;
            same(&session, &answer.session_id)
        })
        .await
    }
}

impl Transport for HttpTransport {
    fn start(&self, request: StartRequest, key: String) -> Call<'_, StartResponse> {
        Box::pin(async move {
            self.begin(Action::Start, request.session_id.clone(), &request, key)
                .await
        })
    }

    fn resume(&self, request: ResumeRequest, key: String) -> Call<'_, StartResponse> {
        Box::pin(async move {
            self.begin(Action::Resume, request.session_id.clone(), &request, key)
                .await
        })
    }

    fn interrupt(&self, request: StopRequest) -> Call<'_, StopResponse> {
        Box::pin(self.stop(Action::Interrupt, request))
    }

    fn abort(&self, request: StopRequest) -> Call<'_, StopResponse> {
        Box::pin(self.stop(Action::Abort, request))
    }

    fn status(&self, session: &SessionId) -> Call<'_, StatusResponse> {
        let session = session.clone();
        let wire = Wire::read(Action::Status, &session);
        Box::pin(self.call(wire, move |answer: &StatusResponse| {
            same(&session, &answer.session_id)
        }))
    }

    fn snapshot(&self, session: &SessionId) -> Call<'_, SnapshotResponse> {
        let session = session.clone();
        let wire = Wire::read(Action::Snapshot, &session);
        Box::pin(self.call(wire, move |answer: &SnapshotResponse| {
            if !answer.state.is_object() {
                return Err("the state is not an object".into());
            }
            same(&session, &answer.session_id)
        }))
    }

    fn usage(&self, session: &SessionId) -> Call<'_, UsageResponse> {
        let session = session.clone();
        let wire = Wire::read(Action::Usage, &session);
        Box::pin(self.call(wire, move |answer: &UsageResponse| {
            same(&session, &answer.session_id)
        }))
    }

    fn tree(&self, session: &SessionId, bounds: TreeBounds) -> Call<'_, TreeNode> {
        let session = session.clone();
        let mut wire = Wire::read(Action::Tree, &session);
        wire.query.extend([
            ("depth", bounds.depth.to_string()),
            ("nodes", bounds.nodes.to_string()),
            ("bytes", bounds.bytes.to_string()),
        ]);
        wire.limit = bounds.bytes;
        Box::pin(self.call(wire, move |answer: &TreeNode| {
            answer.check()?;
            same(&session, answer.session_id.as_str())
        }))
    }

    fn traced(&self, trace: &TraceContext) -> Option<Rc<dyn Transport>> {
        let (traceparent, tracestate) = trace.headers()?;
        Some(Rc::new(self.clone().with_trace(traceparent, tracestate)))
    }

    fn stream(
        &self,
        session: &SessionId,
        from: Position,
        stream: Option<&StreamId>,
    ) -> Call<'_, FrameStream> {
        let mut wire = Wire::read(Action::Sse, session);
        if let Position::At(sequence) = from {
            wire.query.push(("fromSequence", sequence.to_string()));
        }
        if let Some(stream) = stream {
            wire.query.push(("streamId", stream.to_string()));
        }
        Box::pin(async move {
            let attach = self.exchange(&wire, sse::CONTENT_TYPE);
            let response = self
                .within(self.policy.read_timeout, attach)
                .await
                .map_err(|failed| failed.error)?;
            Ok(frames(
                response.into_body(),
                self.runtime.clone(),
                self.policy.silence,
            ))
        })
    }
}

/// One call as it goes out.
struct Wire {
    action: Action,
    query: Vec<(&'static str, String)>,
    body: Option<Bytes>,
    key: Option<String>,
    /// The largest answer, in bytes.
    limit: usize,
}

impl Wire {
    fn read(action: Action, session: &SessionId) -> Self {
        Self {
            action,
            query: vec![("sessionId", session.to_string())],
            body: None,
            key: None,
            limit: ANSWER_LIMIT,
        }
    }

    fn post(
        action: Action,
        body: &impl serde::Serialize,
        key: Option<String>,
    ) -> Result<Self, TransportError> {
        let body = serde_json::to_vec(body)
            .map_err(|e| TransportError::Malformed(format!("the request is not JSON: {e}")))?;
        Ok(Self {
            action,
            query: Vec::new(),
            body: Some(body.into()),
            key,
            limit: ANSWER_LIMIT,
        })
    }

    /// Section 7, "Retried". A 500 with an envelope may have taken effect, and so may what is behind
    /// an answer that cannot be read: it is tried again only where that does no harm. A read that
    /// cannot be read is its caller's to ask again.
    fn is_retried(&self, error: &TransportError) -> bool {
        match error {
            TransportError::Unreachable(_) | TransportError::Timeout(_) => true,
            TransportError::Refused { status, .. } => match status {
                429 | 502 | 503 | 504 => true,
                500 => !self.action.is_post() || self.key.is_some(),
                _ => false,
            },
            TransportError::Malformed(_) => self.key.is_some(),
            TransportError::TooLarge(_)
            | TransportError::Unexplained { .. }
            | TransportError::VersionUnsupported { .. }
            | TransportError::ProjectedMount => false,
        }
    }
}

/// A failed try.
struct Failed {
    error: TransportError,
    retry_after: Option<u32>,
}

impl From<TransportError> for Failed {
    fn from(error: TransportError) -> Self {
        let retry_after = match &error {
            TransportError::Refused { retry_after, .. } => *retry_after,
            _ => None,
        };
        Self { error, retry_after }
    }
}

fn same(asked: &SessionId, answered: &str) -> Result<(), String> {
    if asked.as_str() == answered {
        Ok(())
    } else {
        Err("the answer is about another session".into())
    }
}

fn check_version(headers: &HeaderMap) -> Result<(), TransportError> {
    let Some(value) = headers.get(header::VERSION) else {
        return Ok(());
    };
    match value
        .to_str()
        .ok()
        .and_then(|text| text.trim().parse::<u32>().ok())
    {
        Some(theirs) if theirs > VERSION => Err(TransportError::VersionUnsupported { theirs }),
        Some(_) => Ok(()),
        None => Err(TransportError::Malformed(
            "the version header is not a number".into(),
        )),
    }
}

fn is_type(headers: &HeaderMap, wanted: &str) -> bool {
    let value = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    value
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .eq_ignore_ascii_case(wanted)
}

async fn read_json<T: DeserializeOwned>(response: Response, limit: usize) -> Result<T, Failed> {
    let body = read_body(response.into_body(), limit).await?;
    // The reader's own message could quote the content, and this one reaches logs.
    serde_json::from_slice(&body).map_err(|e| {
        let place = format!(
            "{:?} error at line {} column {}",
            e.classify(),
            e.line(),
            e.column()
        );
        TransportError::Malformed(place).into()
    })
}

/// Reads a body. One that breaks off is a failure of the network; one that is too large is not what
/// the contract says, and is dropped unread.
async fn read_body(body: Body, limit: usize) -> Result<Bytes, TransportError> {
    let too_large =
        || TransportError::Malformed(format!("the answer is larger than {limit} bytes"));
    let mut parts = match body {
        Body::Full(bytes) if bytes.len() <= limit => return Ok(bytes),
        Body::Full(_) => return Err(too_large()),
        Body::Stream(parts) => parts,
    };
    let mut all = Vec::new();
    while let Some(part) = parts.next().await {
        let part = part.map_err(|e| TransportError::Unreachable(e.to_string()))?;
        if all.len().saturating_add(part.len()) > limit {
            return Err(too_large());
        }
        all.extend_from_slice(&part);
    }
    Ok(all.into())
}

/// What an answer of 400 and above means. Without an envelope it was not the producer who spoke.
async fn refusal(status: u16, response: Response) -> Failed {
    let retry_after = response
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.trim().parse::<u32>().ok());
    let mut envelope = None;
    if is_type(response.headers(), "application/json") {
        match read_body(response.into_body(), ENVELOPE_LIMIT).await {
            Ok(body) => envelope = serde_json::from_slice::<ErrorEnvelope>(&body).ok(),
            // The peer may have refused for good or not: what it said did not come through.
            Err(error @ TransportError::Unreachable(_)) => return Failed { error, retry_after },
            Err(_) => {}
        }
    }
    if envelope.is_none() && status == 429 {
        envelope = Some(ErrorEnvelope {
            code: Code::RateLimited.as_str().into(),
            error: "Too many requests.".into(),
            detail: None,
            retryable: Some(true),
            stream_id: None,
            run_id: None,
            field: None,
        });
    }
    let error = match envelope {
        Some(envelope) => TransportError::Refused {
            status,
            envelope: Box::new(envelope),
            retry_after,
        },
        None if status >= 500 => {
            TransportError::Unreachable(format!("status {status} without an envelope"))
        }
        None => TransportError::Unexplained { status },
    };
    Failed { error, retry_after }
}
