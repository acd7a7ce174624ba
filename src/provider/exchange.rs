//! One question to a provider: the request, its deadlines, and its answer as events.
//!
//! A body that ends before the answer does is a failed attempt, and so is a silence. Once a provider
//! has said why its answer ended, nothing that befalls the rest of the body takes that back.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use futures::future::{Either, LocalBoxFuture, select};
use futures::stream::{self, StreamExt as _};
use http::header::CONTENT_TYPE;

use super::halves::Halves;
use super::refusal::{self, Refusal};
use crate::agent::model::{ModelError, ModelErrorKind, ModelEvent, ModelPolicy, ModelStream};
use crate::http::{Body, ByteStream, Request, Response};
use crate::platform::Runtime;
use crate::protocol::sse::{Event, EventDecoder, Item};
use crate::transport::Fetch;

/// The largest event of an answer, in bytes.
const EVENT_LIMIT: usize = 4 * 1024 * 1024;

/// The largest answer, in bytes: far more than any model writes.
const ANSWER_LIMIT: usize = 64 * 1024 * 1024;

/// How much of a refusal is read, in bytes.
const REFUSAL_LIMIT: usize = 64 * 1024;

/// What reads the events of one answer.
pub(super) trait Reader {
    /// Takes the next event of the body; what it says goes to `said`.
    fn take(&mut self, event: &Event, said: &mut VecDeque<ModelEvent>) -> Result<(), ModelError>;

    /// Whether the answer was asked for as one document, which is then its only event.
    fn is_whole(&self) -> bool {
        false
    }

    /// Whether the provider has said why its answer ended.
    fn is_answered(&self) -> bool;

    /// Whether nothing more can follow.
    fn is_over(&self) -> bool;

    /// The end of a whole answer, [`ModelEvent::Stop`] included.
    fn finish(&mut self, said: &mut VecDeque<ModelEvent>);
}

/// How a provider is reached, and how long it may take.
#[derive(Clone)]
pub(super) struct Line {
    pub(super) fetch: Rc<dyn Fetch>,
    pub(super) runtime: Rc<dyn Runtime>,
    pub(super) policy: ModelPolicy,
}

/// Sends the request and reads its answer. Dropping the stream cancels either.
pub(super) fn ask(
    line: &Line,
    request: Result<Request, ModelError>,
    reader: Box<dyn Reader>,
) -> ModelStream {
    let request = match request {
        Ok(request) => request,
        Err(error) => return Box::pin(stream::iter([Err(error)])),
    };
    let exchange = Exchange {
        stage: Stage::Asking(Box::new(request)),
        total: line.runtime.sleep(line.policy.total_timeout),
        line: line.clone(),
        decoder: EventDecoder::new(EVENT_LIMIT),
        reader,
        said: VecDeque::new(),
        halves: Halves::default(),
        bytes: 0,
        is_document: false,
    };
    Box::pin(stream::unfold(exchange, |mut exchange| async move {
        let event = exchange.next().await?;
        Some((event, exchange))
    }))
}

struct Exchange {
    stage: Stage,
    line: Line,
    /// Ends the attempt, whatever it is waiting for.
    total: LocalBoxFuture<'static, ()>,
    decoder: EventDecoder,
    reader: Box<dyn Reader>,
    said: VecDeque<ModelEvent>,
    halves: Halves,
    bytes: usize,
    /// Whether the answer came whole and not as a stream.
    is_document: bool,
}

enum Stage {
    Asking(Box<Request>),
    Reading(ByteStream),
    Failed(ModelError),
    Over,
}

impl Exchange {
    async fn next(&mut self) -> Option<Result<ModelEvent, ModelError>> {
        loop {
            while let Some(event) = self.said.pop_front() {
                if let Some(event) = self.halves.join(event) {
                    return Some(Ok(event));
                }
            }
            let advanced = match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Over => return None,
                // What had been said before the failure is out by now.
                Stage::Failed(error) => return Some(Err(error)),
                Stage::Asking(request) => self.open(*request).await,
                Stage::Reading(body) => self.read(body).await,
            };
            self.stage = advanced.unwrap_or_else(Stage::Failed);
        }
    }

    async fn open(&mut self, request: Request) -> Result<Stage, ModelError> {
        let asked = self.line.fetch.fetch(request);
        // What is not streamed begins when it ends.
        let connect = if self.reader.is_whole() {
            self.line.policy.idle_timeout
        } else {
            self.line.policy.connect_timeout
        };
        let response = match self.within(connect, asked).await? {
            Some(Ok(response)) => response,
            // The platform's words may hold the address, and an address may hold a key.
            Some(Err(_)) => return Err(unavailable("The model provider could not be reached.")),
            None => {
                return Err(unavailable(format!(
                    "The model provider did not answer within {} s.",
                    connect.as_secs_f64()
                )));
            }
        };
        if response.status() != http::StatusCode::OK {
            return Err(self.refused(response).await);
        }
        if is_document(&response) {
            if !self.reader.is_whole() {
                let said = "The model provider answered with a document in place of a stream.";
                return Err(ModelError::new(ModelErrorKind::Malformed, said));
            }
            // It is read as the data of the one event that a stream would be.
            self.is_document = true;
            self.decoder.push(b"data:");
        }
        Ok(Stage::Reading(match response.into_body() {
            Body::Full(bytes) => Box::pin(stream::iter([Ok(bytes)])),
            Body::Stream(parts) => parts,
        }))
    }

    async fn refused(&mut self, response: Response) -> ModelError {
        let (head, body) = response.into_parts();
        let wait = self.line.policy.connect_timeout;
        // A refusal whose reason does not come through is told by its status.
        let body = match self.within(wait, body.collect(REFUSAL_LIMIT)).await {
            Ok(Some(Ok(body))) => serde_json::from_slice(&body).unwrap_or_default(),
            _ => serde_json::Value::Null,
        };
        let now = self.line.runtime.now();
        Refusal::of_body(&body).to_error(
            Some(head.status.as_u16()),
            refusal::retry_after(&head.headers, now),
        )
    }

    async fn read(&mut self, mut body: ByteStream) -> Result<Stage, ModelError> {
        let idle = self.line.policy.idle_timeout;
        let ended = match self.within(idle, body.next()).await {
            Ok(Some(Some(Ok(part)))) => {
                self.bytes = self.bytes.saturating_add(part.len());
                if self.is_document {
                    // JSON has no line's end but between its words.
                    let line = part.iter().map(|byte| match byte {
                        b'\n' | b'\r' => b' ',
                        other => *other,
                    });
                    self.decoder.push(&line.collect::<Vec<u8>>());
                } else {
                    self.decoder.push(&part);
                }
                None
            }
            Ok(Some(None)) if self.is_document => {
                self.decoder.push(b"\n\n");
                self.events()?;
                if self.said.is_empty() {
                    return Err(malformed("says nothing"));
                }
                self.reader.finish(&mut self.said);
                return Ok(Stage::Over);
            }
            Ok(Some(Some(Err(_)) | None)) => Some("The model's answer broke off.".to_owned()),
            Ok(None) => Some(format!(
                "The model said nothing for {} s in the middle of its answer.",
                idle.as_secs_f64()
            )),
            Err(error) => Some(error.message),
        };
        if let Some(how) = ended {
            if !self.reader.is_answered() {
                return Err(unavailable(how));
            }
            self.reader.finish(&mut self.said);
            return Ok(Stage::Over);
        }
        match self.events() {
            Ok(false) => return Ok(Stage::Reading(body)),
            // An answer that has its reason is whole, whatever stands behind it.
            Err(error) if !self.reader.is_answered() => return Err(error),
            Ok(true) | Err(_) => {}
        }
        self.reader.finish(&mut self.said);
        Ok(Stage::Over)
    }

    /// Takes the events that are there; whether the answer is over.
    fn events(&mut self) -> Result<bool, ModelError> {
        if self.bytes > ANSWER_LIMIT {
            return Err(malformed("is longer than any answer may be"));
        }
        loop {
            match self.decoder.poll() {
                Err(_) => return Err(malformed("holds an event that cannot be read")),
                Ok(None) => return Ok(false),
                Ok(Some(Item::Comment)) => {}
                Ok(Some(Item::Event(event))) => {
                    self.reader.take(&event, &mut self.said)?;
                    if self.reader.is_over() {
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// What `work` comes to; `None` when it takes longer than `limit`.
    async fn within<T>(
        &mut self,
        limit: Duration,
        work: impl Future<Output = T>,
    ) -> Result<Option<T>, ModelError> {
        let waits = select(self.line.runtime.sleep(limit), &mut self.total);
        match select(Box::pin(work), waits).await {
            Either::Left((done, _)) => Ok(Some(done)),
            Either::Right((Either::Left(_), _)) => Ok(None),
            Either::Right((Either::Right(_), _)) => Err(unavailable(format!(
                "The model's answer took longer than {} s.",
                self.line.policy.total_timeout.as_secs_f64()
            ))),
        }
    }
}

/// Whether an answer says itself that it is no stream.
fn is_document(response: &Response) -> bool {
    let kind = response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
        .trim_start()
        .to_ascii_lowercase();
    ["application/json", "text/html"]
        .iter()
        .any(|document| kind.starts_with(document))
}

fn unavailable(message: impl Into<String>) -> ModelError {
    ModelError::new(ModelErrorKind::Unavailable, message)
}

/// An answer that cannot be read, and why; never what stood there.
pub(super) fn malformed(why: &str) -> ModelError {
    ModelError::new(
        ModelErrorKind::Malformed,
        format!("The model provider's answer {why}."),
    )
}
