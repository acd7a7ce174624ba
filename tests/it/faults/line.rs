//! A line between two services on which one thing goes wrong once.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::LocalBoxFuture;
use futures::{StreamExt as _, stream};
use remote_agents::http::{Body, BodyError, ByteStream, Request, Response};
use remote_agents::transport::{Fetch, FetchError};
use serde_json::json;

use crate::stories::mischief::{Ending, action, cut, parts};

/// Longer than any deadline of one try.
const LATE: Duration = Duration::from_secs(12);

/// Which of the two calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hop {
    /// The parent's call of its child.
    Upper,
    /// The child's call of its own child.
    Lower,
}

/// One request of a job: the n-th of its action on its hop, from 0.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    pub hop: Hop,
    pub action: String,
    pub occurrence: usize,
}

/// What goes wrong.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The request never arrives.
    RequestLost,
    /// The request takes effect, its answer never arrives and the connection breaks.
    ResponseLost,
    /// The request arrives when nobody waits for its answer any more.
    Late,
    /// The request takes effect, and no answer ever comes.
    Unanswered,
    /// The answer's body ends before its time, after so many events and bytes.
    Cut {
        events: usize,
        more: usize,
        ending: Ending,
    },
    /// The answer's body breaks off in the middle of a JSON value.
    CutJson,
    /// An event is slipped in behind so many others.
    Event { events: usize, event: String },
    /// Another answer takes the place of the true one.
    Instead { answer: Canned, when: When },
    /// The true answer, with a header changed.
    Header(&'static str, &'static str),
}

/// Whether a request took effect before it was answered by something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// It did not.
    Before,
    /// It did.
    After,
}

/// An answer that nobody's service gave.
#[derive(Clone, Debug)]
pub struct Canned {
    pub status: u16,
    pub content_type: &'static str,
    pub header: Option<(&'static str, &'static str)>,
    pub body: Filling,
}

#[derive(Clone, Debug)]
pub enum Filling {
    Text(String),
    /// More bytes than anyone takes.
    Huge,
}

impl Canned {
    pub fn bare(status: u16) -> Self {
        Self {
            status,
            content_type: "text/html",
            header: None,
            body: Filling::Text("<h1>It is not me, it is you.</h1>".into()),
        }
    }

    pub fn envelope(status: u16, code: &str) -> Self {
        Self::json(status, &json!({"code": code, "error": "No."}).to_string())
    }

    pub fn json(status: u16, body: &str) -> Self {
        Self {
            content_type: "application/json",
            body: Filling::Text(body.to_owned()),
            ..Self::bare(status)
        }
    }

    pub fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.header = Some((name, value));
        self
    }

    fn answer(&self) -> Response {
        let body = match &self.body {
            Filling::Text(text) => Body::Full(text.clone().into()),
            Filling::Huge => {
                let part = Bytes::from(vec![b' '; 1 << 20]);
                Body::Stream(Box::pin(stream::repeat_with(move || Ok(part.clone()))))
            }
        };
        let mut answer = http::Response::builder()
            .status(self.status)
            .header("content-type", self.content_type);
        if let Some((name, value)) = self.header {
            answer = answer.header(name, value);
        }
        answer.body(body).unwrap()
    }
}

/// What is planned for one job, and what it has seen of it.
#[derive(Default)]
pub struct Line {
    plan: Option<(Point, Fault)>,
    seen: RefCell<Vec<Point>>,
    struck: Cell<bool>,
    /// How many events each stream of the job had.
    events: RefCell<Vec<(Point, Rc<Cell<usize>>)>>,
}

impl Line {
    /// A line without a fault.
    pub fn honest() -> Rc<Self> {
        Rc::default()
    }

    /// A line on which `fault` strikes at `point`.
    pub fn with(point: Point, fault: Fault) -> Rc<Self> {
        Rc::new(Self {
            plan: Some((point, fault)),
            ..Self::default()
        })
    }

    /// Whether the fault has struck.
    pub fn has_struck(&self) -> bool {
        self.struck.get()
    }

    /// Every request that crossed, in order.
    pub fn points(&self) -> Vec<Point> {
        self.seen.borrow().clone()
    }

    /// How many events a stream had.
    pub fn events(&self, point: &Point) -> usize {
        let events = self.events.borrow();
        events
            .iter()
            .find(|(at, _)| at == point)
            .map_or(0, |(_, events)| events.get())
    }

    fn pass(&self, hop: Hop, request: &Request) -> (Point, Option<Fault>) {
        let action = action(request);
        let mut seen = self.seen.borrow_mut();
        let earlier = |at: &&Point| at.hop == hop && at.action == action;
        let point = Point {
            hop,
            occurrence: seen.iter().filter(earlier).count(),
            action: action.clone(),
        };
        seen.push(point.clone());
        let fault = match &self.plan {
            Some((at, fault)) if *at == point => {
                self.struck.set(true);
                Some(fault.clone())
            }
            _ => None,
        };
        (point, fault)
    }

    /// Counts the events of an honest stream.
    fn counted(&self, point: Point, answer: Response) -> Response {
        let count: Rc<Cell<usize>> = Rc::default();
        self.events.borrow_mut().push((point, count.clone()));
        answer.map(|body| {
            let mut newline = false;
            Body::Stream(Box::pin(parts(body).inspect(move |part| {
                for byte in part.as_deref().unwrap_or_default() {
                    if *byte == b'\n' && newline {
                        count.set(count.get() + 1);
                    }
                    newline = *byte == b'\n' && !newline;
                }
            })))
        })
    }
}

/// One hop of a line.
pub struct Faulty {
    pub inner: Rc<dyn Fetch>,
    pub hop: Hop,
    pub line: Rc<Line>,
}

impl Fetch for Faulty {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let (inner, line) = (self.inner.clone(), self.line.clone());
        let (point, fault) = line.pass(self.hop, &request);
        Box::pin(async move {
            let Some(fault) = fault else {
                let answer = inner.fetch(request).await?;
                return Ok(if point.action == "sse" && answer.status() == 200 {
                    line.counted(point, answer)
                } else {
                    answer
                });
            };
            strike(inner, request, fault).await
        })
    }
}

async fn strike(
    inner: Rc<dyn Fetch>,
    request: Request,
    fault: Fault,
) -> Result<Response, FetchError> {
    let broken = || FetchError("the connection broke".into());
    match fault {
        Fault::RequestLost => Err(broken()),
        Fault::ResponseLost => {
            drop(inner.fetch(request).await);
            Err(broken())
        }
        Fault::Late => {
            tokio::task::spawn_local(async move {
                tokio::time::sleep(LATE).await;
                drop(inner.fetch(request).await);
            });
            std::future::pending().await
        }
        Fault::Unanswered => {
            drop(inner.fetch(request).await);
            std::future::pending().await
        }
        Fault::Cut {
            events,
            more,
            ending,
        } => Ok(inner
            .fetch(request)
            .await?
            .map(|body| cut(body, events, more, ending))),
        Fault::CutJson => {
            let answer = inner.fetch(request).await?;
            let (head, body) = answer.into_parts();
            let bytes = body.collect(16 << 20).await.unwrap();
            let half = Ok(bytes.slice(..bytes.len() / 2));
            let reset = Err(BodyError("the connection was reset".into()));
            let parts: ByteStream = Box::pin(stream::iter([half, reset]));
            Ok(Response::from_parts(head, Body::Stream(parts)))
        }
        Fault::Event { events, event } => Ok(inner.fetch(request).await?.map(|body| {
            let before = parts(cut(body, events, 0, Ending::Clean));
            let slipped = stream::iter([Ok(Bytes::from(event))]).chain(stream::pending());
            Body::Stream(Box::pin(before.chain(slipped)))
        })),
        Fault::Instead { answer, when } => {
            if when == When::After {
                drop(inner.fetch(request).await);
            }
            Ok(answer.answer())
        }
        Fault::Header(name, value) => {
            let mut answer = inner.fetch(request).await?;
            let value = http::HeaderValue::from_static(value);
            answer.headers_mut().insert(name, value);
            Ok(answer)
        }
    }
}
