//! What a mount shows of an answer: the projection of state and usage, and the filter of frames.
//!
//! Implements section 9. It may never let state pass beside the projection: the type that is
//! written on a projected stream has no `state_patch`, types of chunks and fields that this version
//! does not know are dropped, and a stream that cannot be read ends with an error. It buffers no
//! more than one event and one step's patches, and keeps the bytes of every chunk that it does not
//! have to change.

use std::rc::Rc;

use bytes::Bytes;
use futures::stream::{self, StreamExt as _};
use serde_json::{Map, Value};

use super::live;
use crate::error::{Code, Error, Result};
use crate::http::{Body, ByteStream};
use crate::mutants::{self, Mutant};
use crate::protocol::chunk::{PatchOperation, RawChunk};
use crate::protocol::frame::{EndFrame, ErrorFrame, Frame};
use crate::protocol::ids::{AgentType, Sequence, SessionId};
use crate::protocol::neighbours::{self, Neighbours};
use crate::protocol::sse::{self, ChunkEvent, DecodeError, Decoded, Event, EventDecoder, Item};

/// The state of a session as a mount shows it. Its presence makes a mount a projected one.
#[derive(Clone)]
pub struct Projection {
    /// Name and version, told in snapshots: another value is another view.
    pub name: String,
    /// From the session's agent type and its state to what is shown. It must be pure.
    pub map: StateMap,
}

/// From an agent type and a session's state to what is shown.
pub type StateMap = Rc<dyn Fn(&str, &Value) -> Value>;

/// The usage rollup as a mount shows it. It must be pure.
pub type UsageProjection = Rc<dyn Fn(&Value) -> Value>;

/// Which chunks a mount lets through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChunkDetail {
    /// All that are not state.
    #[default]
    Full,
    /// Text, output, and that something began or ended, without arguments, results and errors.
    Lifecycle,
}

/// What stands between an object's answer and a mount's reader, for one session.
pub(super) struct View {
    pub(super) session: SessionId,
    pub(super) agent_type: AgentType,
    pub(super) projection: Option<Projection>,
    pub(super) usage: Option<UsageProjection>,
    pub(super) chunks: ChunkDetail,
    /// Whether steps carry what they changed in the projection.
    pub(super) live: bool,
    /// What the next step changed, by its sequence.
    pub(super) next_step: Option<(Sequence, Vec<PatchOperation>)>,
}

/// One frame of a projected stream.
#[derive(Debug)]
enum ProjectedFrame {
    Chunk { sequence: Sequence, data: String },
    CaughtUp { sequence: Sequence },
    End(EndFrame),
    Error(ErrorFrame),
}

/// The types of chunks that a projected mount can show. There is none for state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PublicKind {
    TextDelta,
    Thinking,
    ToolArgs,
    ToolStart,
    ToolEnd,
    SubagentStart,
    SubagentEnd,
    Custom,
    Output,
    StepCommitted,
    StepDiscarded,
    StreamResync,
    Run,
    Error,
}

impl PublicKind {
    fn of(wire: &str) -> Option<Self> {
        Some(match wire {
            "text_delta" => Self::TextDelta,
            "thinking" => Self::Thinking,
            "tool_arg_stream_start" | "tool_arg_stream_delta" | "tool_arg_stream_end" => {
                Self::ToolArgs
            }
            "tool_start" => Self::ToolStart,
            "tool_end" => Self::ToolEnd,
            "subagent_start" => Self::SubagentStart,
            "subagent_end" => Self::SubagentEnd,
            "custom" => Self::Custom,
            "output" => Self::Output,
            "step_committed" => Self::StepCommitted,
            "step_discarded" => Self::StepDiscarded,
            "stream_resync" => Self::StreamResync,
            "run_started" | "run_resumed" | "run_paused" | "run_interrupted" => Self::Run,
            "error" => Self::Error,
            _ => return None,
        })
    }

    /// The fields that a chunk has beside [`COMMON`], as far as this version knows. What a step
    /// carries of live projected state is not among them: the mount writes it.
    fn fields(self) -> &'static [&'static str] {
        match self {
            Self::TextDelta => &["delta"],
            Self::Thinking => &["content", "isComplete"],
            Self::ToolArgs => &["toolCallId", "toolName", "delta"],
            Self::ToolStart => &["toolCallId", "toolName", "arguments"],
            Self::ToolEnd => &["toolCallId", "toolName", "result", "success", "error"],
            Self::SubagentStart => &["subSessionId", "subAgentType", "toolCallId", "remote"],
            Self::SubagentEnd => &[
                "subSessionId",
                "subAgentType",
                "toolCallId",
                "success",
                "result",
                "error",
            ],
            Self::Custom => &["eventName", "data"],
            Self::Output => &["output"],
            Self::StepCommitted => &["stepCount", "checkpointId", "patchOrdinal"],
            Self::StepDiscarded => &["stepCount", "reason", "fromSequence"],
            Self::StreamResync => &["reason"],
            Self::Run => &["runId", "reason"],
            Self::Error => &["code", "error", "detail"],
        }
    }

    /// Those of them that [`ChunkDetail::Lifecycle`] shows; none: not the chunk.
    fn lifecycle_fields(self) -> Option<&'static [&'static str]> {
        match self {
            Self::ToolStart => Some(&["toolCallId", "toolName"]),
            Self::ToolEnd => Some(&["toolCallId", "toolName", "success"]),
            Self::SubagentEnd => Some(&["subSessionId", "subAgentType", "toolCallId", "success"]),
            Self::Thinking | Self::ToolArgs | Self::Custom | Self::Error => None,
            Self::TextDelta
            | Self::Output
            | Self::SubagentStart
            | Self::StepCommitted
            | Self::StepDiscarded
            | Self::StreamResync
            | Self::Run => Some(self.fields()),
        }
    }
}

/// The fields of every chunk.
const COMMON: [&str; 7] = [
    "type",
    "agentId",
    "agentType",
    "timestamp",
    "step",
    "remoteSource",
    "origin",
];

/// The stamps of a forwarded chunk and their fields.
const STAMPS: [(&str, [&str; 3]); 2] = [
    (
        "remoteSource",
        ["childSessionId", "childSequence", "streamId"],
    ),
    ("origin", ["sessionId", "streamId", "sequence"]),
];

impl View {
    /// Whether chunks are filtered. Without that, only the usage in `end` is mapped.
    pub(super) fn filters(&self) -> bool {
        self.projection.is_some() || self.chunks == ChunkDetail::Lifecycle
    }

    /// The filtered stream. It ends after a terminal frame.
    pub(super) fn stream(self, body: Body) -> Body {
        let parts: ByteStream = match body {
            Body::Full(bytes) => Box::pin(stream::once(async { Ok(bytes) })),
            Body::Stream(parts) => parts,
        };
        let begin = Some((parts, EventDecoder::new(sse::EVENT_LIMIT), self));
        Body::Stream(Box::pin(stream::unfold(begin, |state| async move {
            let (mut parts, mut decoder, mut view) = state?;
            loop {
                match parts.next().await? {
                    Err(error) => return Some((Err(error), None)),
                    Ok(bytes) => {
                        decoder.push(&bytes);
                        let (text, ended) = view.pass(&mut decoder);
                        if !text.is_empty() {
                            let next = (!ended).then_some((parts, decoder, view));
                            return Some((Ok(Bytes::from(text)), next));
                        }
                        if ended {
                            return None;
                        }
                    }
                }
            }
        })))
    }

    /// Writes what may pass of all that has come, and whether the stream is over.
    fn pass(&mut self, decoder: &mut EventDecoder) -> (String, bool) {
        let mut out = String::new();
        let mut alive = false;
        loop {
            let step = match decoder.poll() {
                Ok(None) => break,
                Ok(Some(Item::Comment)) => {
                    out.push_str(&sse::encode_comment("ping"));
                    continue;
                }
                Ok(Some(Item::Event(event))) => self.event(&event, &mut out),
                Err(error) => Err(error),
            };
            match step {
                Ok(false) => alive = true,
                Ok(true) => return (out, true),
                Err(_) => {
                    // The reason could quote what was to be held back.
                    push_frame(&mut out, &ProjectedFrame::Error(unreadable()));
                    return (out, true);
                }
            }
        }
        if alive && out.is_empty() {
            // A reader takes a long silence for a dropped stream.
            out.push_str(&sse::encode_comment("ping"));
        }
        (out, false)
    }

    /// Writes one event, if it may pass, and tells whether it was the last.
    fn event(&mut self, event: &Event, out: &mut String) -> Result<bool, DecodeError> {
        if event.name == neighbours::EVENT {
            self.hear(event);
            return Ok(false);
        }
        if !self.filters() {
            return self.event_with_usage(event, out);
        }
        match self.frame(event)? {
            None => Ok(false),
            Some(frame) => {
                push_frame(out, &frame);
                Ok(matches!(
                    frame,
                    ProjectedFrame::End(_) | ProjectedFrame::Error(_)
                ))
            }
        }
    }

    /// Takes in what the object tells of the next step. What cannot be read was not told.
    fn hear(&mut self, event: &Event) {
        let told: Option<Neighbours> = serde_json::from_str(&event.data).ok();
        self.next_step = told.filter(|_| self.live).and_then(|told| {
            let patches = live::patches(&told, |state| self.state(state))?;
            Some((told.sequence, patches))
        });
    }

    /// The raw stream of a mount that maps the usage alone.
    fn event_with_usage(&self, event: &Event, out: &mut String) -> Result<bool, DecodeError> {
        let mut data = event.data.clone();
        if event.name == "end" {
            let unreadable = |_| DecodeError::Malformed("end: it is no object".to_owned());
            let mut fields: Map<String, Value> = serde_json::from_str(&data).map_err(unreadable)?;
            if let (Some(usage), Some(map)) = (fields.get_mut("usage"), &self.usage) {
                *usage = map(usage);
                data = Value::Object(fields).to_string();
            }
        }
        sse::encode_event(out, &event.name, event.id.as_deref(), &data);
        Ok(false)
    }

    fn frame(&mut self, event: &Event) -> Result<Option<ProjectedFrame>, DecodeError> {
        if event.name == "chunk" {
            return self.chunk(event);
        }
        Ok(match sse::interpret(event)? {
            Decoded::Frame(Frame::CaughtUp { sequence }) => {
                Some(ProjectedFrame::CaughtUp { sequence })
            }
            Decoded::Frame(Frame::End(mut end)) => {
                end.state = end.state.as_ref().map(|state| self.state(state));
                end.usage = end.usage.as_ref().map(|usage| self.usage(usage));
                Some(ProjectedFrame::End(end))
            }
            Decoded::Frame(Frame::Error(error)) => Some(ProjectedFrame::Error(error)),
            Decoded::Frame(Frame::Chunk { .. })
            | Decoded::Comment
            | Decoded::Rewound
            | Decoded::Skipped => None,
        })
    }

    fn chunk(&mut self, event: &Event) -> Result<Option<ProjectedFrame>, DecodeError> {
        let ChunkEvent {
            sequence,
            mut chunk,
            extra,
        } = ChunkEvent::read(event)?;
        let Some(kind) = PublicKind::of(chunk.kind()) else {
            return Ok(None);
        };
        let fields = match self.chunks {
            ChunkDetail::Full => Some(kind.fields()),
            ChunkDetail::Lifecycle => kind.lifecycle_fields(),
        };
        let Some(fields) = fields else {
            return Ok(None);
        };
        let mut changed = keep_known(&mut chunk, fields) || extra;
        if kind == PublicKind::StepCommitted && self.live && self.is_own(&chunk) {
            self.tell_step(sequence, &mut chunk);
            changed = true;
        }
        let data = if changed {
            let chunk = Value::Object(chunk.0);
            format!("{{\"sequence\":{sequence},\"chunk\":{chunk}}}")
        } else {
            event.data.clone()
        };
        Ok(Some(ProjectedFrame::Chunk { sequence, data }))
    }

    /// Whether the session itself said it, and no child under its name.
    fn is_own(&self, chunk: &RawChunk) -> bool {
        chunk.agent_id() == Some(self.session.as_str())
            && STAMPS
                .iter()
                .all(|(stamp, _)| !chunk.0.contains_key(*stamp))
    }

    /// Writes what a step changed in the projection into its chunk.
    fn tell_step(&mut self, sequence: Sequence, chunk: &mut RawChunk) {
        let Some(projection) = &self.projection else {
            return;
        };
        let name = Value::from(projection.name.as_str());
        chunk.0.insert("projection".to_owned(), name);
        let told = self.next_step.take().filter(|(at, _)| *at == sequence);
        match told.and_then(|(_, patches)| serde_json::to_value(patches).ok()) {
            Some(patches) => chunk.0.insert("patches".to_owned(), patches),
            None => chunk.0.insert("resync".to_owned(), Value::Bool(true)),
        };
    }

    /// The state as this mount shows it.
    pub(super) fn state(&self, state: &Value) -> Value {
        match &self.projection {
            Some(_) if mutants::lacks(Mutant::Projects) => state.clone(),
            Some(projection) => (projection.map)(self.agent_type.as_str(), state),
            None => state.clone(),
        }
    }

    /// The usage rollup as this mount shows it.
    pub(super) fn usage(&self, usage: &Value) -> Value {
        match &self.usage {
            Some(map) => map(usage),
            None => usage.clone(),
        }
    }
}

/// Removes the fields that are not to be shown, those within the stamps included, and tells whether
/// there were any.
fn keep_known(chunk: &mut RawChunk, fields: &[&str]) -> bool {
    let known = |name: &str| COMMON.contains(&name) || fields.contains(&name);
    let mut changed = retain(&mut chunk.0, known);
    for (stamp, fields) in STAMPS {
        if let Some(Value::Object(stamp)) = chunk.0.get_mut(stamp) {
            changed |= retain(stamp, |name| fields.contains(&name));
        }
    }
    changed
}

fn retain(map: &mut Map<String, Value>, known: impl Fn(&str) -> bool) -> bool {
    let before = map.len();
    map.retain(|name, _| known(name));
    map.len() != before
}

fn unreadable() -> ErrorFrame {
    let error = Error::internal("");
    ErrorFrame {
        run_id: None,
        code: Code::Internal.as_str().to_owned(),
        error: error.message.into_owned(),
        detail: None,
        recoverable: false,
        floor: None,
        stream_id: None,
    }
}

fn push_frame(out: &mut String, frame: &ProjectedFrame) {
    let written = match frame {
        ProjectedFrame::Chunk { sequence, data } => {
            sse::encode_event(out, "chunk", Some(&sequence.to_string()), data);
            return;
        }
        ProjectedFrame::CaughtUp { sequence } => sse::encode_frame(&Frame::CaughtUp {
            sequence: *sequence,
        }),
        ProjectedFrame::End(end) => sse::encode_frame(&Frame::End(end.clone())),
        ProjectedFrame::Error(error) => sse::encode_frame(&Frame::Error(error.clone())),
    };
    // Every frame here can be written; a stream without its end would count as dropped.
    out.push_str(&written.unwrap_or_default());
}
