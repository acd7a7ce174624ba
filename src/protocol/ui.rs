//! A session's stream as the AI SDK reads it: from frames to the parts of a UI message stream.
//!
//! A run is one message. What the session itself writes and calls becomes text, reasoning and tool
//! parts; what its sub-agents do becomes data parts with their `agentId`, and is never mixed in.
//! Every reader gets a stream that stands alone: what was open before its cursor is opened anew.
//! Nothing is kept but what is open in the step under way. Implements section 10 of the contract.

mod part;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::chunk::RawChunk;
use super::frame::{EndFrame, ErrorFrame, Frame};
use super::ids::Sequence;
use super::message::SessionStatus;
use crate::error::{Code, Error, Result};
pub use part::{UiChunk, UiCursor, UiError, UiMetadata, UiPart, UiState};

#[cfg(test)]
mod tests;

/// What a reader is told when the model's answer is discarded that it has read the beginning of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discard {
    /// What is open is closed, and the step with it. Versions of the package from 5 on read this.
    #[default]
    Close,
    /// `reset-step`: the package takes the parts back. Its versions before 7 do not know it.
    Reset,
}

impl Discard {
    /// Reads the parameter `discard` of a query: `close`, which is also its absence, or `reset`.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` for any other text.
    pub fn parse(text: Option<&str>) -> Result<Self> {
        match text {
            None | Some("close") => Ok(Self::Close),
            Some("reset") => Ok(Self::Reset),
            Some(_) => Err(Error::invalid("discard", "discard must be close or reset.")),
        }
    }
}

/// One reader's stream: frames in, parts out.
#[derive(Clone, Debug)]
pub struct UiStream {
    session: String,
    stream: Option<String>,
    discard: Discard,
    is_begun: bool,
    is_ended: bool,
    step: Option<Step>,
    text: Option<String>,
    reasoning: Option<String>,
    reason: Option<String>,
}

/// The step under way, as far as the reader knows it.
#[derive(Clone, Debug, Default)]
struct Step {
    /// The calls that the reader was told of.
    calls: BTreeMap<String, Call>,
    /// Whether a call was begun: then the answer is committed, and stays.
    is_answered: bool,
}

#[derive(Clone, Debug)]
enum Call {
    /// Its arguments come in.
    Streaming { tool: String },
    /// The reader has its arguments, or will not get them.
    Known,
}

impl UiStream {
    /// The stream of `session`, whose stream's id is `stream` where it is known.
    #[must_use]
    pub fn new(session: impl Into<String>, stream: Option<String>, discard: Discard) -> Self {
        Self {
            session: session.into(),
            stream,
            discard,
            is_begun: false,
            is_ended: false,
            step: None,
            text: None,
            reasoning: None,
            reason: None,
        }
    }

    /// Whether a terminal frame was taken: nothing follows.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// The parts that a frame makes. A frame after the terminal one makes none.
    pub fn take(&mut self, frame: Frame) -> Vec<UiPart> {
        let mut out = Vec::new();
        if self.is_ended {
            return out;
        }
        match frame {
            Frame::Chunk { sequence, chunk } => self.chunk(sequence, chunk, &mut out),
            Frame::CaughtUp { sequence } => {
                self.begin(None, &mut out);
                let stream_id = self.stream.clone();
                out.push(UiPart::DataCursor {
                    data: UiCursor {
                        sequence,
                        stream_id,
                    },
                    transient: true,
                });
            }
            Frame::End(end) => self.end(end, &mut out),
            Frame::Error(error) => self.error(error, &mut out),
        }
        out
    }

    /// The parts for a stream that broke off before its terminal frame.
    pub fn dropped(&mut self) -> Vec<UiPart> {
        self.take(Frame::Error(ErrorFrame {
            run_id: None,
            code: Code::TransportError.as_str().to_owned(),
            error: "The stream broke off; attach again.".to_owned(),
            detail: None,
            recoverable: true,
            floor: None,
            stream_id: None,
        }))
    }

    fn chunk(&mut self, sequence: Sequence, chunk: RawChunk, out: &mut Vec<UiPart>) {
        // The session's own chunks are those that nobody forwarded.
        let is_own = !chunk.0.contains_key("remoteSource")
            && chunk.agent_id() == Some(self.session.as_str());
        let opens_run = matches!(chunk.kind(), "run_started" | "run_resumed");
        if is_own && opens_run {
            return self.run(&chunk, out);
        }
        self.begin(None, out);
        if is_own && self.own(sequence, &chunk, out) {
            return;
        }
        let kind = chunk.kind().to_owned();
        let data = |chunk| placed(sequence, chunk);
        out.push(match kind.as_str() {
            "state_patch" => UiPart::DataStatePatch { data: data(chunk) },
            "step_committed" => UiPart::DataStepCommitted { data: data(chunk) },
            "step_discarded" => UiPart::DataStepDiscarded { data: data(chunk) },
            "stream_resync" => UiPart::DataStreamResync { data: data(chunk) },
            "custom" if is_own => UiPart::DataCustom { data: data(chunk) },
            "output" if is_own => UiPart::DataOutput { data: data(chunk) },
            "subagent_start" | "subagent_end" if chunk.text("subSessionId").is_some() => {
                subagent(sequence, chunk)
            }
            _ => UiPart::DataChunk {
                data: UiChunk {
                    sequence,
                    chunk: chunk.0,
                },
                transient: true,
            },
        });
        if is_own && kind == "step_committed" {
            self.finish_step(out);
        } else if is_own && kind == "step_discarded" && self.discard == Discard::Close {
            self.finish_attempt(out);
        }
    }

    /// What the session itself writes and calls; whether that is all there is to say of the chunk.
    fn own(&mut self, sequence: Sequence, chunk: &RawChunk, out: &mut Vec<UiPart>) -> bool {
        let call = chunk.text("toolCallId");
        match (chunk.kind(), call) {
            ("text_delta", _) => {
                let Some(delta) = chunk.text("delta") else {
                    return false;
                };
                self.write_text(sequence, delta, out);
            }
            ("thinking", _) => {
                let Some(content) = chunk.text("content") else {
                    return false;
                };
                let is_complete = chunk.0.get("isComplete").and_then(Value::as_bool) == Some(true);
                self.think(sequence, content, is_complete, out);
            }
            ("tool_arg_stream_start", Some(call)) => {
                self.close(out);
                let tool = chunk.text("toolName").unwrap_or_default().to_owned();
                let streaming = Call::Streaming { tool: tool.clone() };
                self.step(out).calls.insert(call.to_owned(), streaming);
                out.push(UiPart::ToolInputStart {
                    tool_call_id: call.to_owned(),
                    tool_name: tool,
                    provider_executed: true,
                });
            }
            ("tool_arg_stream_delta", Some(call)) => {
                // The rest of arguments whose beginning is not known says nothing.
                let known = self.step.as_ref().and_then(|step| step.calls.get(call));
                if let (Some(Call::Streaming { .. }), Some(delta)) = (known, chunk.text("delta")) {
                    out.push(UiPart::ToolInputDelta {
                        tool_call_id: call.to_owned(),
                        input_text_delta: delta.to_owned(),
                    });
                }
            }
            ("tool_arg_stream_end", Some(_)) | ("run_paused", _) => {}
            ("run_interrupted", _) => self.reason = chunk.text("reason").map(str::to_owned),
            ("tool_start", Some(call)) => {
                self.close(out);
                let input = chunk.0.get("arguments").cloned().unwrap_or_default();
                self.call_known(call, chunk, input, out);
            }
            ("tool_end", Some(call)) => self.call_ended(call, chunk, out),
            ("step_discarded", _) => {
                self.discard_attempt(out);
                return false;
            }
            ("step_committed", _) => {
                self.close(out);
                return false;
            }
            _ => return false,
        }
        true
    }

    /// A run opens a message. One that follows another in the same stream opens the next.
    fn run(&mut self, chunk: &RawChunk, out: &mut Vec<UiPart>) {
        self.finish_step(out);
        self.is_begun = false;
        self.reason = None;
        self.begin(chunk.text("runId"), out);
    }

    fn begin(&mut self, run: Option<&str>, out: &mut Vec<UiPart>) {
        if std::mem::replace(&mut self.is_begun, true) {
            return;
        }
        out.push(UiPart::Start {
            message_id: run.map(str::to_owned),
            message_metadata: UiMetadata {
                session_id: Some(self.session.clone()),
                stream_id: self.stream.clone(),
                run_id: run.map(str::to_owned),
                ..UiMetadata::default()
            },
        });
    }

    /// The step under way; it begins with what is first said in it.
    fn step(&mut self, out: &mut Vec<UiPart>) -> &mut Step {
        self.step.get_or_insert_with(|| {
            out.push(UiPart::StartStep);
            Step::default()
        })
    }

    fn write_text(&mut self, sequence: Sequence, delta: &str, out: &mut Vec<UiPart>) {
        self.step(out);
        self.close_reasoning(out);
        let id = self.text.get_or_insert_with(|| {
            let id = format!("text-{sequence}");
            out.push(UiPart::TextStart { id: id.clone() });
            id
        });
        out.push(UiPart::TextDelta {
            id: id.clone(),
            delta: delta.to_owned(),
        });
    }

    fn think(
        &mut self,
        sequence: Sequence,
        content: &str,
        is_complete: bool,
        out: &mut Vec<UiPart>,
    ) {
        self.step(out);
        self.close_text(out);
        if !content.is_empty() {
            let id = self.reasoning.get_or_insert_with(|| {
                let id = format!("reasoning-{sequence}");
                out.push(UiPart::ReasoningStart { id: id.clone() });
                id
            });
            out.push(UiPart::ReasoningDelta {
                id: id.clone(),
                delta: content.to_owned(),
            });
        }
        if is_complete {
            self.close_reasoning(out);
        }
    }

    fn call_known(&mut self, call: &str, chunk: &RawChunk, input: Value, out: &mut Vec<UiPart>) {
        let step = self.step(out);
        step.is_answered = true;
        step.calls.insert(call.to_owned(), Call::Known);
        out.push(UiPart::ToolInputAvailable {
            tool_call_id: call.to_owned(),
            tool_name: chunk.text("toolName").unwrap_or_default().to_owned(),
            input,
            provider_executed: true,
        });
    }

    fn call_ended(&mut self, call: &str, chunk: &RawChunk, out: &mut Vec<UiPart>) {
        self.close(out);
        let step = self.step(out);
        step.is_answered = true;
        if !step.calls.contains_key(call) {
            // It was begun before the cursor, or in an earlier run.
            self.call_known(call, chunk, Value::Null, out);
        }
        let tool_call_id = call.to_owned();
        let failed = chunk.0.get("success").and_then(Value::as_bool) != Some(true);
        out.push(if failed {
            UiPart::ToolOutputError {
                tool_call_id,
                error_text: chunk.text("error").unwrap_or("The call failed.").to_owned(),
                provider_executed: true,
            }
        } else {
            UiPart::ToolOutputAvailable {
                tool_call_id,
                output: chunk.0.get("result").cloned().unwrap_or_default(),
                provider_executed: true,
            }
        });
    }

    /// An answer that was not committed is void; where calls were begun, it is patches alone.
    fn discard_attempt(&mut self, out: &mut Vec<UiPart>) {
        let Some(step) = self.step.as_mut().filter(|step| !step.is_answered) else {
            return;
        };
        if self.discard == Discard::Reset {
            step.calls.clear();
            self.text = None;
            self.reasoning = None;
            out.push(UiPart::ResetStep);
            return;
        }
        for (tool_call_id, call) in std::mem::take(&mut step.calls) {
            if let Call::Streaming { tool } = call {
                out.push(UiPart::ToolInputError {
                    tool_call_id,
                    tool_name: tool,
                    input: Value::Null,
                    provider_executed: true,
                    error_text: "The answer was discarded; the model is asked again.".to_owned(),
                });
            }
        }
        self.close(out);
    }

    /// The end of an attempt that was closed rather than taken back.
    fn finish_attempt(&mut self, out: &mut Vec<UiPart>) {
        if self.step.as_ref().is_some_and(|step| !step.is_answered) {
            self.finish_step(out);
        }
    }

    fn finish_step(&mut self, out: &mut Vec<UiPart>) {
        self.close(out);
        if self.step.take().is_some() {
            out.push(UiPart::FinishStep);
        }
    }

    fn close(&mut self, out: &mut Vec<UiPart>) {
        self.close_text(out);
        self.close_reasoning(out);
    }

    fn close_text(&mut self, out: &mut Vec<UiPart>) {
        out.extend(self.text.take().map(|id| UiPart::TextEnd { id }));
    }

    fn close_reasoning(&mut self, out: &mut Vec<UiPart>) {
        out.extend(self.reasoning.take().map(|id| UiPart::ReasoningEnd { id }));
    }

    fn end(&mut self, end: EndFrame, out: &mut Vec<UiPart>) {
        self.is_ended = true;
        self.begin(end.run_id.as_deref(), out);
        self.finish_step(out);
        if let Some(state) = end.state {
            out.push(UiPart::DataState {
                data: UiState {
                    agent_id: self.session.clone(),
                    state,
                },
                transient: true,
            });
        }
        let message_metadata = UiMetadata {
            run_id: end.run_id,
            status: Some(end.status.as_str().to_owned()),
            usage: end.usage,
            ..UiMetadata::default()
        };
        if end.status == SessionStatus::Interrupted {
            out.push(UiPart::MessageMetadata { message_metadata });
            out.push(UiPart::Abort {
                reason: self.reason.take(),
            });
            return;
        }
        let is_completed = end.status == SessionStatus::Completed;
        out.push(UiPart::Finish {
            finish_reason: if is_completed { "stop" } else { "other" }.to_owned(),
            message_metadata,
        });
    }

    /// A dropped stream leaves its message open: it may go on.
    fn error(&mut self, error: ErrorFrame, out: &mut Vec<UiPart>) {
        self.is_ended = true;
        if let Some(run_id) = error.run_id {
            self.begin(Some(&run_id), out);
            self.finish_step(out);
            out.push(UiPart::MessageMetadata {
                message_metadata: UiMetadata {
                    run_id: Some(run_id),
                    status: Some("failed".to_owned()),
                    ..UiMetadata::default()
                },
            });
        } else if !error.recoverable {
            self.close(out);
        }
        out.push(UiPart::DataError {
            data: UiError {
                code: error.code,
                error: error.error.clone(),
                recoverable: error.recoverable,
                floor: error.floor,
                stream_id: error.stream_id,
            },
            transient: true,
        });
        out.push(UiPart::Error {
            error_text: error.error,
        });
    }
}

/// The fields of a chunk with its place, without its type: the part has that.
fn placed(sequence: Sequence, chunk: RawChunk) -> Map<String, Value> {
    let mut data = chunk.0;
    data.shift_remove("type");
    data.insert("sequence".to_owned(), sequence.into());
    data
}

fn subagent(sequence: Sequence, chunk: RawChunk) -> UiPart {
    let success = chunk.0.get("success").and_then(Value::as_bool);
    let status = match (chunk.kind(), success) {
        ("subagent_start", _) => "running",
        (_, Some(true)) => "completed",
        _ => "failed",
    };
    let id = chunk.text("subSessionId").unwrap_or_default().to_owned();
    let mut data = placed(sequence, chunk);
    data.shift_remove("success");
    data.insert("status".to_owned(), status.into());
    UiPart::DataSubagent { id, data }
}
