//! A line between two services: it drops, doubles, delays, reorders and cuts, as the plan says, and
//! takes a little time for everything.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{LocalBoxFuture, pending};
use futures::{StreamExt as _, stream};
use remote_agents::http::{Body, BodyError, ByteStream, Request, Response, json as answer};
use remote_agents::mutants::{self, Mutant};
use remote_agents::native::LocalRuntime;
use remote_agents::platform::ObjectRuntime as _;
use remote_agents::transport::{Fetch, FetchError};
use serde_json::{Value, json};

use crate::plan::{Action, Fault, Kind, Side};
use crate::world::Shared;

/// Longer than any deadline of one try.
const LATE: Duration = Duration::from_secs(40);

/// Longer than most answers take.
const BEHIND: Duration = Duration::from_millis(700);

/// The longest answer that is read whole.
const LIMIT: usize = 32 << 20;

/// One end of a line: who sends, and what answers.
pub struct Link {
    /// What the requests reach.
    pub inner: Rc<dyn Fetch>,
    /// Who sends them.
    pub side: Side,
    /// The object that does; a user has none. One that has ended sends and hears nothing.
    pub of: Option<Rc<LocalRuntime>>,
    /// What the run shares.
    pub shared: Rc<Shared>,
}

fn broke() -> FetchError {
    FetchError("the connection broke".into())
}

async fn wait(time: Duration) {
    tokio::time::sleep(time).await;
}

impl Fetch for Link {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let crossing = Crossing {
            inner: self.inner.clone(),
            side: self.side,
            of: self.of.clone(),
            shared: self.shared.clone(),
        };
        Box::pin(crossing.cross(request))
    }
}

/// Interrupts when it is dropped.
struct Canceller(Rc<dyn Fetch>, Option<Request>);

impl Drop for Canceller {
    fn drop(&mut self) {
        if let Some(request) = self.1.take() {
            let interrupt = self.0.fetch(request);
            tokio::task::spawn_local(async move { drop(interrupt.await) });
        }
    }
}

fn guarded(body: Body, guard: Option<Canceller>) -> Body {
    match (body, guard) {
        (Body::Stream(parts), Some(guard)) => Body::Stream(Box::pin(parts.inspect(move |_| {
            let _held = &guard;
        }))),
        (body, _) => body,
    }
}

/// The answer to an interrupt that was never delivered.
fn told(request: &Request) -> Value {
    let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
    json!({"sessionId": body["sessionId"], "status": "interrupted", "accepted": true})
}

/// A request that is sent again, as it is. With the rule taken away that a start begins the same
/// child then, it is for another.
fn again(request: Request) -> Request {
    if !mutants::lacks(Mutant::StartKeepsItsChild) || !request.uri().path().ends_with("/start") {
        return request;
    }
    request.map(|body| {
        let text = String::from_utf8_lossy(&body);
        let is_of_a_dispatch = text.contains("\"parent\"");
        let prefix = if is_of_a_dispatch { "again-" } else { "" };
        let other = format!("\"sessionId\":\"{prefix}");
        text.replacen("\"sessionId\":\"", &other, 1).into()
    })
}

/// One request on its way.
#[derive(Clone)]
struct Crossing {
    inner: Rc<dyn Fetch>,
    side: Side,
    of: Option<Rc<LocalRuntime>>,
    shared: Rc<Shared>,
}

impl Crossing {
    fn has_ended(&self) -> bool {
        self.of.as_ref().is_some_and(|of| of.is_ended())
    }

    /// An effect of the sender; what is left to the line of what strikes.
    fn pass(&self, kind: Kind, who: &str) -> Option<Fault> {
        let fault = self.shared.gate.pass(self.side, kind, &who);
        self.shared.strike(self.side, self.of.as_ref(), fault)
    }

    fn note_stop(&self, request: &Request) {
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let session = body["sessionId"].as_str().unwrap_or_default().to_owned();
        self.shared.told_to_stop.borrow_mut().insert(session);
    }

    async fn cross(self, request: Request) -> Result<Response, FetchError> {
        if self.has_ended() {
            return pending().await;
        }
        // As the platform holds a request back until what it may tell of is durable.
        if let Some(of) = &self.of
            && of.sync().await.is_err()
        {
            return pending().await;
        }
        let path = request.uri().to_string();
        let action = Action::of(request.uri().path());
        let fault = action.and_then(|action| self.pass(Kind::Request(action), &path));
        if self.has_ended() {
            return pending().await;
        }
        let stops = matches!(action, Some(Action::Interrupt | Action::Abort));
        if stops && self.side != Side::Observer {
            self.note_stop(&request);
        }
        wait(self.shared.hop()).await;
        let answer = self.struck(request, fault).await?;
        wait(self.shared.hop()).await;
        if self.has_ended() {
            return pending().await;
        }
        self.pass(Kind::Answer, &path);
        if self.has_ended() {
            return pending().await;
        }
        let is_stream = matches!(answer.body(), Body::Stream(_));
        if is_stream && action == Some(Action::Sse) {
            let guard = self.canceller(&path);
            return Ok(answer.map(|body| guarded(self.parted(body, path), guard)));
        }
        Ok(answer)
    }

    /// With the rule taken away that readers cancel nothing: what a user's reader that leaves does.
    fn canceller(&self, path: &str) -> Option<Canceller> {
        if self.side != Side::Observer || !mutants::lacks(Mutant::ReadersCancelNothing) {
            return None;
        }
        let (uri, query) = path.split_once('?')?;
        let session = query
            .split('&')
            .find_map(|pair| pair.strip_prefix("sessionId="))?;
        let request = http::Request::post(uri.replace("/sse", "/interrupt"))
            .header("content-type", "application/json")
            .body(Bytes::from(format!("{{\"sessionId\": \"{session}\"}}")));
        Some(Canceller(self.inner.clone(), request.ok()))
    }

    /// With the rule taken away that a stop interrupts the child: the child never hears of it.
    fn tells_nobody(&self, request: &Request) -> bool {
        mutants::lacks(Mutant::StopInterrupts)
            && self.side != Side::Observer
            && Action::of(request.uri().path()) == Some(Action::Interrupt)
    }

    async fn struck(&self, request: Request, fault: Option<Fault>) -> Result<Response, FetchError> {
        let inner = &self.inner;
        match fault {
            _ if self.tells_nobody(&request) => Ok(answer(200, &told(&request))),
            Some(Fault::Lost) => Err(broke()),
            Some(Fault::Unheard) => {
                drop(inner.fetch(request).await);
                Err(broke())
            }
            Some(Fault::Silent) => {
                drop(inner.fetch(request).await);
                pending().await
            }
            Some(Fault::Twice) => {
                let first = inner.fetch(request.clone()).await;
                let request = again(request);
                let second = inner.fetch(request).await;
                if self.shared.random.chance(50) {
                    drop(first);
                    second
                } else {
                    drop(second);
                    first
                }
            }
            Some(Fault::Late) => {
                let inner = inner.clone();
                tokio::task::spawn_local(async move {
                    wait(LATE).await;
                    drop(inner.fetch(request).await);
                });
                pending().await
            }
            Some(Fault::Reordered) => {
                let answer = inner.fetch(request).await;
                wait(BEHIND).await;
                answer
            }
            Some(Fault::Cut) => {
                let (head, body) = inner.fetch(request).await?.into_parts();
                let bytes = body.collect(LIMIT).await.map_err(|_| broke())?;
                let half: Bytes = bytes.slice(..bytes.len() / 2);
                let parts = [Ok(half), Err(BodyError("the connection broke".into()))];
                let parts: ByteStream = Box::pin(stream::iter(parts));
                Ok(Response::from_parts(head, Body::Stream(parts)))
            }
            _ => inner.fetch(request).await,
        }
    }

    /// A stream's body in parts as they come over the line, cut anywhere.
    fn parted(self, body: Body, path: String) -> Body {
        let parts = match body {
            Body::Full(bytes) => Box::pin(stream::iter([Ok(bytes)])) as ByteStream,
            Body::Stream(parts) => parts,
        };
        let state = (self, Some(parts), path);
        Body::Stream(Box::pin(stream::unfold(
            state,
            |(crossing, mut parts, path)| async move {
                let part = parts.as_mut()?.next().await;
                if crossing.has_ended() {
                    return pending().await;
                }
                let part = match part {
                    Some(Ok(part)) => part,
                    other => return other.map(|error| (error, (crossing, None, path))),
                };
                wait(crossing.shared.hop()).await;
                let fault = crossing.pass(Kind::Part, &path);
                if crossing.has_ended() {
                    return pending().await;
                }
                let half = || part.slice(..crossing.shared.within(part.len()));
                match fault {
                    Some(Fault::Cut) => {
                        let parts = [Ok(half()), Err(BodyError("the connection broke".into()))];
                        let rest: ByteStream = Box::pin(stream::iter(parts));
                        Some((Ok(Bytes::new()), (crossing, Some(rest), path)))
                    }
                    Some(Fault::Short) => Some((Ok(half()), (crossing, None, path))),
                    Some(Fault::Silent) => {
                        let rest: ByteStream = Box::pin(stream::pending());
                        Some((Ok(half()), (crossing, Some(rest), path)))
                    }
                    _ => Some((Ok(part), (crossing, parts, path))),
                }
            },
        )))
    }
}
