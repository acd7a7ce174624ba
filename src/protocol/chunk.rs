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
#[allow(missing_docs)] // The contract's table documents the fields under the same names.
pub enum ChunkBody {
    TextDelta {
        delta: String,
    },
    Thinking {
        content: String,
        is_complete: bool,
    },
    ToolArgStreamStart {
        tool_call_id: String,
        tool_name: String,
    },
    ToolArgStreamDelta {
        tool_call_id: String,
        delta: String,
    },
    ToolArgStreamEnd {
        tool_call_id: String,
    },
    ToolStart {
        tool_call_id: String,
        tool_name: String,
        arguments: Value,
    },
    ToolEnd {
        tool_call_id: String,
        tool_name: String,
        result: Value,
        success: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    SubagentStart {
        sub_session_id: String,
        sub_agent_type: String,
        tool_call_id: String,
        remote: bool,
    },
    SubagentEnd {
        sub_session_id: String,
        sub_agent_type: String,
        tool_call_id: String,
        success: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        result: Option<Value>,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    StatePatch {
        patches: Vec<PatchOperation>,
        #[serde(skip_serializing_if = "Option::is_none")]
        patch_ordinal: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        patch_base: Option<u64>,
    },
    Custom {
        event_name: String,
        data: Value,
    },
    Output {
        output: Value,
    },
    StepCommitted {
        step_count: u64,
        checkpoint_id: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        patch_ordinal: Option<u64>,
    },
    StepDiscarded {
        step_count: u64,
        reason: String,
        from_sequence: Sequence,
    },
    StreamResync {
        reason: String,
    },
    RunStarted {
        run_id: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    RunResumed {
        run_id: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    RunPaused {
        run_id: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    RunInterrupted {
        run_id: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    Error {
        code: String,
        error: String,
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
        serde_json::to_string(self).map_err(|e| Error::internal(format!("chunk: {e}")))
    }
}
