//! Chunks: what a session says on its stream.
//!
//! Implements the chunk table of section 4. [`Chunk`] is what our own sessions write; [`RawChunk`]
//! is any chunk as it came, with fields and types that this version does not know kept as they are,
//! because a forwarder may not lose them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ids::{Sequence, Timestamp};
use crate::error::{Error, Result};

/// One chunk of a session's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Chunk {
    /// What is said.
    #[serde(flatten)]
    pub body: ChunkBody,
    /// The emitting session's id; never rewritten on its way up.
    pub agent_id: String,
    /// The emitting session's agent type.
    pub agent_type: String,
    /// When, in milliseconds since the Unix epoch.
    pub timestamp: Timestamp,
    /// The step that was under way: 1 is the first; 0 before it.
    pub step: u64,
}

/// The types of chunks and their fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "type",
    rename_all = "snake_case",
    rename_all_fields = "camelCase"
)]
pub enum ChunkBody {
    /// More of the model's text.
    TextDelta {
        /// The piece.
        delta: String,
    },
    /// More of the model's reasoning.
    Thinking {
        /// The piece.
        content: String,
        /// Whether this ends it.
        is_complete: bool,
    },
    /// The model begins to write a call.
    ToolArgStreamStart {
        /// The call, unique in the session.
        tool_call_id: String,
        /// The tool.
        tool_name: String,
    },
    /// More of a call's arguments.
    ToolArgStreamDelta {
        /// The call.
        tool_call_id: String,
        /// A piece of JSON text, cut anywhere.
        delta: String,
    },
    /// The model has written a call's arguments.
    ToolArgStreamEnd {
        /// The call.
        tool_call_id: String,
    },
    /// A tool begins.
    ToolStart {
        /// The call.
        tool_call_id: String,
        /// The tool.
        tool_name: String,
        /// What it is called with.
        arguments: Value,
    },
    /// A call has its result.
    ToolEnd {
        /// The call.
        tool_call_id: String,
        /// The tool.
        tool_name: String,
        /// The result, or for a failure what the model may read of it.
        result: Value,
        /// Whether it succeeded.
        success: bool,
        /// The failure's sentence.
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// A child is announced, before its start is sent.
    SubagentStart {
        /// The child's session.
        sub_session_id: String,
        /// The child's agent type.
        sub_agent_type: String,
        /// The call that made it.
        tool_call_id: String,
        /// Whether it lives in another service.
        remote: bool,
    },
    /// A child's call is over; the call's `tool_end` follows at once.
    SubagentEnd {
        /// The child's session.
        sub_session_id: String,
        /// The child's agent type.
        sub_agent_type: String,
        /// The call that made it.
        tool_call_id: String,
        /// Whether it completed with a valid output.
        success: bool,
        /// The output, when it succeeded.
        #[serde(skip_serializing_if = "Option::is_none")]
        result: Option<Value>,
        /// The failure's sentence.
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// The state was changed within the step under way.
    StatePatch {
        /// The change (RFC 6902).
        patches: Vec<PatchOperation>,
        /// Its number: strictly increasing, never used twice, discarded patches included.
        #[serde(skip_serializing_if = "Option::is_none")]
        patch_ordinal: Option<u64>,
        /// The ordinal of the patch that it was made on top of; 0 is the initial state.
        #[serde(skip_serializing_if = "Option::is_none")]
        patch_base: Option<u64>,
    },
    /// Something that a tool said.
    Custom {
        /// What it is called.
        event_name: String,
        /// What it says.
        data: Value,
    },
    /// The output of the run.
    Output {
        /// The output.
        output: Value,
    },
    /// A step was promoted: its state is visible from here on.
    StepCommitted {
        /// Committed steps, this one included.
        step_count: u64,
        /// The checkpoint that was written with it.
        checkpoint_id: String,
        /// The last promoted patch ordinal; 0 when there was none. Old peers leave it out.
        #[serde(skip_serializing_if = "Option::is_none")]
        patch_ordinal: Option<u64>,
    },
    /// The session's own state patches since `from_sequence` are void.
    StepDiscarded {
        /// The step's number.
        step_count: u64,
        /// Why.
        reason: String,
        /// The newest sequence that stays valid; patches between it and this chunk do not.
        from_sequence: Sequence,
    },
    /// A reader has to take a new snapshot.
    StreamResync {
        /// Why.
        reason: String,
    },
    /// The first run of a session begins.
    RunStarted {
        /// The run.
        run_id: String,
        /// Why, where there is a reason.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A later run begins.
    RunResumed {
        /// The run.
        run_id: String,
        /// Why, where there is a reason.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The run waits for its client.
    RunPaused {
        /// The run.
        run_id: String,
        /// Why, where there is a reason.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The run was interrupted and can be resumed.
    RunInterrupted {
        /// The run.
        run_id: String,
        /// Why, as the caller said.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// Something went wrong that the stream should tell.
    Error {
        /// The stable code.
        code: String,
        /// One short sentence, safe to show.
        error: String,
        /// More for developers.
        #[serde(skip_serializing_if = "Option::is_none")]
        detail: Option<String>,
    },
}

/// One operation of a JSON patch (RFC 6902). Ours are `add`, `remove` and `replace`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PatchOperation {
    /// `add`, `remove`, `replace`, and from other producers `move`, `copy`, `test`.
    pub op: String,
    /// A JSON pointer; `/key/-` appends to an array.
    pub path: String,
    /// The source pointer of `move` and `copy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The value of `add`, `replace` and `test`; `null` is a value, so its absence is told apart.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "present"
    )]
    pub value: Option<Value>,
}

fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(d).map(Some)
}

/// Where a forwarded chunk stood in the stream that the forwarder read: its direct child's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoteSource {
    /// The direct child's session id.
    pub child_session_id: String,
    /// The chunk's sequence in the direct child's stream.
    pub child_sequence: Sequence,
    /// The direct child's stream.
    pub stream_id: String,
}

/// Where a forwarded chunk was first written: the emitting session's own stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Origin {
    /// The emitting session.
    pub session_id: String,
    /// The emitting session's stream.
    pub stream_id: String,
    /// The chunk's sequence there.
    pub sequence: Sequence,
}

/// A chunk as it came, unknown fields included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RawChunk(pub Map<String, Value>);

impl RawChunk {
    /// The chunk's type, or the empty string where it has none.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.text("type").unwrap_or_default()
    }

    /// A text field.
    #[must_use]
    pub fn text(&self, field: &str) -> Option<&str> {
        self.0.get(field).and_then(Value::as_str)
    }

    /// The emitting session's id.
    #[must_use]
    pub fn agent_id(&self) -> Option<&str> {
        self.text("agentId")
    }

    /// The forwarding stamp, if there is a well-formed one.
    #[must_use]
    pub fn remote_source(&self) -> Option<RemoteSource> {
        self.0
            .get("remoteSource")
            .and_then(|v| RemoteSource::deserialize(v).ok())
    }

    /// The origin, if there is a well-formed one.
    #[must_use]
    pub fn origin(&self) -> Option<Origin> {
        self.0
            .get("origin")
            .and_then(|v| Origin::deserialize(v).ok())
    }

    /// Reads the chunk as one of the known types.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` when the type is unknown or a field is malformed.
    pub fn decode(&self) -> Result<Chunk> {
        Chunk::deserialize(Value::Object(self.0.clone())).map_err(|e| {
            Error::invalid("chunk", "The chunk is malformed.").with_detail(e.to_string())
        })
    }
}

impl Chunk {
    /// The chunk as JSON text, in the form in which it is stored and sent.
    ///
    /// # Errors
    /// `INTERNAL` if a value cannot be written as JSON, which no value of ours does.
    pub fn to_json(&self) -> Result<String> {
        written(|out| {
            let ChunkBody::TextDelta { delta } = &self.body else {
                return serde_json::to_writer(out, self);
            };
            // Nearly all chunks are texts: this form costs half of what the general one does.
            out.reserve(delta.len() + self.agent_id.len() + self.agent_type.len() + 112);
            out.extend_from_slice(b"{\"type\":\"text_delta\",\"delta\":");
            serde_json::to_writer(&mut *out, delta)?;
            out.extend_from_slice(b",\"agentId\":");
            serde_json::to_writer(&mut *out, &self.agent_id)?;
            out.extend_from_slice(b",\"agentType\":");
            serde_json::to_writer(&mut *out, &self.agent_type)?;
            out.extend_from_slice(b",\"timestamp\":");
            serde_json::to_writer(&mut *out, &self.timestamp)?;
            out.extend_from_slice(b",\"step\":");
            serde_json::to_writer(&mut *out, &self.step)?;
            out.push(b'}');
            Ok(())
        })
    }
}

/// What `write` writes, as text.
fn written(write: impl FnOnce(&mut Vec<u8>) -> serde_json::Result<()>) -> Result<String> {
    let mut out = Vec::new();
    write(&mut out).map_err(|e| Error::internal(format!("chunk: {e}")))?;
    String::from_utf8(out).map_err(|_| Error::internal("chunk: a text is not UTF-8"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_text_is_written_as_every_other_chunk_is() {
        for delta in [
            "",
            "plain",
            "é \"quoted\" \\ and\nbroken\r\u{1}",
            "{\"type\":\"x\"}",
        ] {
            let chunk = Chunk {
                body: ChunkBody::TextDelta {
                    delta: delta.to_owned(),
                },
                agent_id: "s-1".into(),
                agent_type: "plan\"ner".into(),
                timestamp: 1_700_000_000_000,
                step: 3,
            };
            let text = chunk.to_json().unwrap();
            assert_eq!(text, serde_json::to_string(&chunk).unwrap());
            assert!(!text.contains(['\n', '\r']));
        }
    }
}
