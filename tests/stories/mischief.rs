//! What may go wrong between two services, each as a layer over a transport's `Fetch`.

use std::cell::Cell;
use std::rc::Rc;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::future::LocalBoxFuture;
use futures::stream;
use remote_agents::http::{Body, BodyError, ByteStream, Request, Response};
use remote_agents::transport::{Fetch, FetchError};
use serde_json::{Value, json};

/// The largest body that is read whole here.
const LIMIT: usize = 16 << 20;

/// One way to misbehave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mischief {
    /// The first three attaches break off, each a little later than the one before.
    Cuts,
    /// The first start takes effect and its answer is lost.
    StartUnheard,
    /// As before, without a key, and the child has ended when the start comes again.
    StartUnheardKeyless,
    /// Somebody else begins a session of the child's id first.
    Stolen,
    /// Answers say that they come from a projected mount.
    Projected,
    /// Answers say that they are of a later version.
    LaterVersion,
    /// No stream ever tells its end.
    Endless,
    /// The child says that it waits for its client.
    Paused,
    /// The child says that it runs and that nothing executes it, until it is resumed.
    NoRunner,
}

/// How a body that is cut ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// As if it were complete.
    Clean,
    /// With an error of the connection.
    Reset,
    /// Not at all: nothing more comes.
    Silence,
}

/// A [`Fetch`] that misbehaves. It counts for itself, so each call needs one of its own.
pub struct Mischievous {
    inner: Rc<dyn Fetch>,
    mischief: Mischief,
    seen: Rc<Cell<usize>>,
}

impl Mischievous {
    /// Puts `mischief` over `inner`.
    pub fn new(inner: Rc<dyn Fetch>, mischief: Mischief) -> Self {
        Self {
            inner,
            mischief,
            seen: Rc::default(),
        }
    }
}

impl Fetch for Mischievous {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let (inner, seen) = (self.inner.clone(), self.seen.clone());
        match self.mischief {
            Mischief::Cuts => Box::pin(cuts(inner, seen, request)),
            Mischief::StartUnheard => Box::pin(unheard(inner, seen, request)),
            Mischief::StartUnheardKeyless => Box::pin(unheard_keyless(inner, seen, request)),
            Mischief::Stolen => Box::pin(stolen(inner, seen, request)),
            Mischief::Projected => Box::pin(stamped(
                inner,
                request,
                "x-remote-agents-mount",
                "projected",
            )),
            Mischief::LaterVersion => {
                Box::pin(stamped(inner, request, "x-remote-agents-version", "2"))
            }
            Mischief::Endless => Box::pin(endless(inner, request)),
            Mischief::Paused => Box::pin(paused(inner, request)),
            Mischief::NoRunner => Box::pin(no_runner(inner, seen, request)),
        }
    }
}

type Answer = Result<Response, FetchError>;

/// The action that a request asks for.
pub fn action(request: &Request) -> String {
    let path = request.uri().path();
    path.rsplit('/').next().unwrap_or_default().to_owned()
}

fn count(seen: &Cell<usize>) -> usize {
    seen.set(seen.get() + 1);
    seen.get()
}

async fn cuts(inner: Rc<dyn Fetch>, seen: Rc<Cell<usize>>, request: Request) -> Answer {
    if action(&request) != "sse" {
        return inner.fetch(request).await;
    }
    let at = count(&seen);
    let answer = inner.fetch(request).await?;
    Ok(match at {
        1 => answer.map(|body| cut(body, 3, 0, Ending::Clean)),
        2 => answer.map(|body| cut(body, 5, 7, Ending::Reset)),
        3 => answer.map(|body| cut(body, 4, 1, Ending::Clean)),
        _ => answer,
    })
}

async fn unheard(inner: Rc<dyn Fetch>, seen: Rc<Cell<usize>>, request: Request) -> Answer {
    if action(&request) != "start" || count(&seen) > 1 {
        return inner.fetch(request).await;
    }
    inner.fetch(request).await?;
    Err(FetchError("the answer was lost".into()))
}

async fn unheard_keyless(
    inner: Rc<dyn Fetch>,
    seen: Rc<Cell<usize>>,
    mut request: Request,
) -> Answer {
    if action(&request) != "start" {
        return inner.fetch(request).await;
    }
    request.headers_mut().remove("idempotency-key");
    if count(&seen) > 1 {
        return inner.fetch(request).await;
    }
    let uri = request.uri().to_string().replace("/start", "/sse");
    let session = body_of(&request)["sessionId"].as_str().map(str::to_owned);
    inner.fetch(request).await?;
    let attach = http::Request::get(format!("{uri}?sessionId={}", session.unwrap_or_default()))
        .body(Bytes::new())
        .map_err(|e| FetchError(e.to_string()))?;
    // Reading to the end of the stream is waiting for the end of the child.
    drop(inner.fetch(attach).await?.into_body().collect(LIMIT).await);
    Err(FetchError("the answer was lost".into()))
}

async fn stolen(inner: Rc<dyn Fetch>, seen: Rc<Cell<usize>>, request: Request) -> Answer {
    if action(&request) == "start" && count(&seen) == 1 {
        let mut body = body_of(&request);
        if let Some(fields) = body.as_object_mut() {
            fields.remove("parent");
        }
        let mut thief = http::Request::post(request.uri().clone())
            .body(Bytes::from(body.to_string()))
            .map_err(|e| FetchError(e.to_string()))?;
        thief.headers_mut().insert(
            "content-type",
            http::HeaderValue::from_static("application/json"),
        );
        inner.fetch(thief).await?;
    }
    inner.fetch(request).await
}

async fn stamped(
    inner: Rc<dyn Fetch>,
    request: Request,
    name: &'static str,
    value: &'static str,
) -> Answer {
    let mut answer = inner.fetch(request).await?;
    let value = http::HeaderValue::from_static(value);
    answer.headers_mut().insert(name, value);
    Ok(answer)
}

async fn endless(inner: Rc<dyn Fetch>, request: Request) -> Answer {
    let is_stream = action(&request) == "sse";
    let answer = inner.fetch(request).await?;
    Ok(if is_stream {
        answer.map(without_end)
    } else {
        answer
    })
}

async fn paused(inner: Rc<dyn Fetch>, request: Request) -> Answer {
    let action = action(&request);
    let answer = inner.fetch(request).await?;
    Ok(match action.as_str() {
        "sse" => {
            rewritten(answer, |text| {
                let (chunks, _) = text.split_once("event: end").unwrap_or((text, ""));
                format!("{chunks}event: end\ndata: {{\"status\":\"paused\"}}\n\n")
            })
            .await
        }
        "status" => rewritten(answer, |text| with_status(text, "paused", true)).await,
        _ => answer,
    })
}

async fn no_runner(inner: Rc<dyn Fetch>, seen: Rc<Cell<usize>>, request: Request) -> Answer {
    let action = action(&request);
    if action == "resume" {
        count(&seen);
    }
    let answer = inner.fetch(request).await?;
    Ok(match action.as_str() {
        "sse" if seen.get() == 0 => answer.map(|_| Body::empty()),
        "status" if seen.get() == 0 => {
            rewritten(answer, |text| with_status(text, "running", false)).await
        }
        _ => answer,
    })
}

fn with_status(text: &str, status: &str, is_executing: bool) -> String {
    let mut body: Value = serde_json::from_str(text).unwrap_or_default();
    if let Some(fields) = body.as_object_mut() {
        fields.insert("status".into(), json!(status));
        fields.insert("isExecuting".into(), json!(is_executing));
    }
    body.to_string()
}

fn body_of(request: &Request) -> Value {
    serde_json::from_slice(request.body()).unwrap_or_default()
}

/// An answer with a successful body as `change` makes it.
async fn rewritten(answer: Response, change: impl FnOnce(&str) -> String) -> Response {
    let (head, body) = answer.into_parts();
    let bytes = body.collect(LIMIT).await.unwrap_or_default();
    let body = if head.status.is_success() {
        change(&String::from_utf8_lossy(&bytes)).into()
    } else {
        bytes
    };
    Response::from_parts(head, Body::Full(body))
}

/// A body's parts.
pub fn parts(body: Body) -> ByteStream {
    match body {
        Body::Full(bytes) => Box::pin(stream::iter([Ok(bytes)])),
        Body::Stream(parts) => parts,
    }
}

/// A stream's body up to the end of its `events`-th event, and `more` bytes of what follows. A
/// body that is shorter ends as it does.
pub fn cut(body: Body, events: usize, more: usize, ending: Ending) -> Body {
    struct Cut {
        body: Option<ByteStream>,
        events: usize,
        more: usize,
        after_newline: bool,
    }
    let state = Cut {
        body: Some(parts(body)),
        events,
        more,
        after_newline: false,
    };
    let next = move |mut state: Cut| async move {
        let body = state.body.as_mut()?;
        let whole = state.events == 0 && state.more == 0;
        if !whole {
            match body.next().await {
                Some(Ok(part)) => {
                    let mut end = 0;
                    for byte in &part {
                        if state.events == 0 {
                            if state.more == 0 {
                                break;
                            }
                            state.more -= 1;
                        } else if *byte == b'\n' {
                            if state.after_newline {
                                state.events -= 1;
                            }
                            state.after_newline = !state.after_newline;
                        } else {
                            state.after_newline = false;
                        }
                        end += 1;
                    }
                    return Some((Ok(part.slice(..end)), state));
                }
                other => {
                    state.body = None;
                    return other.map(|error| (error, state));
                }
            }
        }
        // Gone: the other end is to see that.
        state.body = None;
        match ending {
            Ending::Clean => None,
            Ending::Reset => Some((Err(BodyError("the connection was reset".into())), state)),
            Ending::Silence => std::future::pending().await,
        }
    };
    Body::Stream(Box::pin(stream::unfold(state, next)))
}

/// A stream's body without its terminal event: it ends there as if it were complete.
pub fn without_end(body: Body) -> Body {
    struct Held {
        body: Option<ByteStream>,
        pending: Vec<u8>,
    }
    let state = Held {
        body: Some(parts(body)),
        pending: Vec::new(),
    };
    let next = |mut state: Held| async move {
        loop {
            let boundary = state.pending.windows(2).position(|pair| pair == b"\n\n");
            if let Some(at) = boundary {
                let rest = state.pending.split_off(at + 2);
                let event = std::mem::replace(&mut state.pending, rest);
                let is_end = event.starts_with(b"event: end") || event.starts_with(b"event: error");
                if is_end {
                    return None;
                }
                return Some((Ok(Bytes::from(event)), state));
            }
            match state.body.as_mut()?.next().await {
                Some(Ok(part)) => state.pending.extend_from_slice(&part),
                other => {
                    state.body = None;
                    return other.map(|error| (error, state));
                }
            }
        }
    };
    Body::Stream(Box::pin(stream::unfold(state, next)))
}
