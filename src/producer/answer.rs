//! A model's answer as it streams in: what of it is committed together, and what it adds up to.
//!
//! A commit is made when a bound of the agent's flushing is met, and never waits for more than that;
//! a stop ends the wait at once, with what has come in so far.

use std::task::Poll;

use futures::future::{Either, select};
use futures::{StreamExt as _, poll};
use serde_json::Value;

use super::Producer;
use crate::agent::model::{ModelError, ModelEvent, ModelStream, StopReason};
use crate::agent::{Flush, StopSignal};
use crate::error::Result;
use crate::protocol::chunk::ChunkBody;
use crate::protocol::request::{DEPTH_LIMIT, too_deep};
use crate::protocol::usage::Tokens;
use crate::session::ModelAnswer;
use crate::store::ToolCall;

/// At most this many events of a model are committed together, whatever the agent's bounds are: a
/// model that never waits for anything must not hold the platform up.
const EVENTS_PER_COMMIT: usize = 64;

/// What is committed together of an answer that streams in.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) bodies: Vec<ChunkBody>,
    pub(super) ids: Vec<ToolCall>,
    bytes: usize,
    pub(super) end: Option<BatchEnd>,
}

/// Why no more of the answer follows.
pub(super) enum BatchEnd {
    Ended,
    Failed(ModelError),
    Stopped,
}

impl Producer {
    /// Gathers what the model says until a bound of the agent's flushing is met, the answer ends, or
    /// a stop is asked for.
    pub(super) async fn gather(
        &self,
        events: &mut ModelStream,
        answer: &mut Draft,
        flush: Flush,
        stop: &StopSignal,
    ) -> Result<Batch> {
        let mut batch = Batch::default();
        let mut due = None;
        while batch.end.is_none()
            && batch.bytes < flush.max_bytes
            && batch.bodies.len() < EVENTS_PER_COMMIT
        {
            let next = match &mut due {
                // Nothing waits yet that could be committed.
                _ if batch.bodies.is_empty() => {
                    match select(events.next(), Box::pin(stop.wait())).await {
                        Either::Left((event, _)) => event,
                        Either::Right(_) => {
                            batch.end = Some(BatchEnd::Stopped);
                            break;
                        }
                    }
                }
                // Looked at as this very task: a wait that remembers whoever asked first, as the
                // `worker` crate's delay does, would else never wake anybody.
                None => match poll!(events.next()) {
                    Poll::Ready(event) => event,
                    Poll::Pending => break,
                },
                Some(due) => {
                    let next = select(due, events.next());
                    match select(next, Box::pin(stop.wait())).await {
                        Either::Left((Either::Right((event, _)), _)) => event,
                        Either::Left((Either::Left(_), _)) => break,
                        Either::Right(_) => {
                            batch.end = Some(BatchEnd::Stopped);
                            break;
                        }
                    }
                }
            };
            match next {
                Some(Ok(event)) => {
                    batch.bytes = batch.bytes.saturating_add(size(&event));
                    let ended = answer.take(event, &mut batch.bodies, &mut batch.ids, |id| {
                        self.store.tool_call_id_used(id)
                    })?;
                    if ended {
                        batch.end = Some(BatchEnd::Ended);
                    }
                }
                Some(Err(error)) => batch.end = Some(BatchEnd::Failed(error)),
                None => batch.end = Some(BatchEnd::Ended),
            }
            if due.is_none() && !batch.bodies.is_empty() && !flush.max_delay.is_zero() {
                due = Some(self.runtime.sleep(flush.max_delay));
            }
        }
        Ok(batch)
    }
}

/// What an event counts towards the bytes of a commit.
fn size(event: &ModelEvent) -> usize {
    match event {
        ModelEvent::TextDelta(text)
        | ModelEvent::Reasoning { content: text, .. }
        | ModelEvent::ToolCallDelta { delta: text, .. } => text.len(),
        _ => 0,
    }
}

/// A model's answer as it comes in.
#[derive(Default)]
pub(super) struct Draft {
    pub(super) text: String,
    calls: Vec<DraftCall>,
    kept: Option<Value>,
    pub(super) usage: Option<Tokens>,
    pub(super) stop: Option<StopReason>,
}

struct DraftCall {
    index: usize,
    id: String,
    name: String,
    arguments: String,
}

impl Draft {
    /// Takes one event in; says what it means on the stream, and whether it ends the answer.
    fn take(
        &mut self,
        event: ModelEvent,
        bodies: &mut Vec<ChunkBody>,
        ids: &mut Vec<ToolCall>,
        used: impl Fn(&str) -> Result<bool>,
    ) -> Result<bool> {
        match event {
            ModelEvent::TextDelta(delta) => {
                self.text.push_str(&delta);
                bodies.push(ChunkBody::TextDelta { delta });
            }
            ModelEvent::Reasoning {
                content,
                is_complete,
            } => {
                bodies.push(ChunkBody::Thinking {
                    content,
                    is_complete,
                });
            }
            ModelEvent::ToolCallStart { index, id, name } => {
                let id = self.unique_id(id, used)?;
                ids.push(ToolCall {
                    id: id.clone(),
                    name: name.clone(),
                    arguments: Value::Null,
                });
                bodies.push(ChunkBody::ToolArgStreamStart {
                    tool_call_id: id.clone(),
                    tool_name: name.clone(),
                });
                self.calls.push(DraftCall {
                    index,
                    id,
                    name,
                    arguments: String::new(),
                });
            }
            ModelEvent::ToolCallDelta { index, delta } => {
                if let Some(call) = self.call(index) {
                    call.arguments.push_str(&delta);
                    bodies.push(ChunkBody::ToolArgStreamDelta {
                        tool_call_id: call.id.clone(),
                        delta,
                    });
                }
            }
            ModelEvent::ToolCallEnd { index } => {
                if let Some(call) = self.call(index) {
                    bodies.push(ChunkBody::ToolArgStreamEnd {
                        tool_call_id: call.id.clone(),
                    });
                }
            }
            ModelEvent::Kept(value) => self.kept = Some(value),
            ModelEvent::Usage(tokens) => self.usage = Some(tokens),
            ModelEvent::Stop(reason) => {
                self.stop = Some(reason);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The latest call at this place; pieces for a place that never began are skipped.
    fn call(&mut self, index: usize) -> Option<&mut DraftCall> {
        self.calls.iter_mut().rev().find(|call| call.index == index)
    }

    /// An id that the session has not used yet: a repeat becomes `<id>_<n>`.
    fn unique_id(&self, id: String, used: impl Fn(&str) -> Result<bool>) -> Result<String> {
        let base = if id.is_empty() { "call".to_owned() } else { id };
        let taken = |id: &str| -> Result<bool> {
            Ok(self.calls.iter().any(|call| call.id == id) || used(id)?)
        };
        if !taken(&base)? {
            return Ok(base);
        }
        let mut n = 2u64;
        loop {
            let candidate = format!("{base}_{n}");
            if !taken(&candidate)? {
                return Ok(candidate);
            }
            n = n.saturating_add(1);
        }
    }

    /// Whether nothing was said that could be kept: no text and no call.
    pub(super) fn is_empty(&self) -> bool {
        self.text.trim().is_empty() && self.calls.is_empty()
    }

    pub(super) fn finish(self, model: &str) -> ModelAnswer {
        let calls = self
            .calls
            .into_iter()
            .map(|call| {
                // Arguments that are not JSON, or nested too deeply, are kept as the text that the model wrote: the tool's
                // own check refuses them with a result that the model can read.
                let arguments = if call.arguments.trim().is_empty() {
                    Value::Object(serde_json::Map::new())
                } else {
                    serde_json::from_str(&call.arguments)
                        .ok()
                        .filter(|value| !too_deep(value, DEPTH_LIMIT))
                        .unwrap_or(Value::String(call.arguments))
                };
                ToolCall {
                    id: call.id,
                    name: call.name,
                    arguments,
                }
            })
            .collect();
        ModelAnswer {
            text: self.text,
            calls,
            queued: Vec::new(),
            cut: false,
            kept: self.kept,
            model: model.into(),
            tokens: self.usage.unwrap_or_default(),
        }
    }
}
