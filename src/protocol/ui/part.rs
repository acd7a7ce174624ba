//! The parts of a UI message stream, as the npm package `ai` spells them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::protocol::ids::Sequence;

/// One part. Those that begin with `data-` are ours; the others are the package's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "type",
    rename_all = "kebab-case",
    rename_all_fields = "camelCase"
)]
pub enum UiPart {
    /// A message begins. A run is one message.
    Start {
        /// The run's id; absent where the stream begins in the middle of a run.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        message_id: Option<String>,
        /// Which session says it.
        message_metadata: UiMetadata,
    },
    /// A step begins.
    StartStep,
    /// A step was promoted, or an attempt at it was closed.
    FinishStep,
    /// All parts since the last `start-step` are void.
    ResetStep,
    /// A text begins.
    TextStart {
        /// The text, unique in the stream.
        id: String,
    },
    /// More of a text.
    TextDelta {
        /// The text.
        id: String,
        /// The piece.
        delta: String,
    },
    /// A text ends.
    TextEnd {
        /// The text.
        id: String,
    },
    /// Reasoning begins.
    ReasoningStart {
        /// The reasoning, unique in the stream.
        id: String,
    },
    /// More of it.
    ReasoningDelta {
        /// The reasoning.
        id: String,
        /// The piece.
        delta: String,
    },
    /// It ends.
    ReasoningEnd {
        /// The reasoning.
        id: String,
    },
    /// The model begins to write a call.
    ToolInputStart {
        /// The call, unique in the session.
        tool_call_id: String,
        /// The tool.
        tool_name: String,
        /// Always true: no client runs it.
        provider_executed: bool,
    },
    /// More of a call's arguments.
    ToolInputDelta {
        /// The call.
        tool_call_id: String,
        /// A piece of JSON text, cut anywhere.
        input_text_delta: String,
    },
    /// A call begins to be executed.
    ToolInputAvailable {
        /// The call.
        tool_call_id: String,
        /// The tool.
        tool_name: String,
        /// The arguments; `null` where they are not known or not shown.
        input: Value,
        /// Always true: no client runs it.
        provider_executed: bool,
    },
    /// A call will never be executed.
    ToolInputError {
        /// The call.
        tool_call_id: String,
        /// The tool.
        tool_name: String,
        /// The arguments; always `null`.
        input: Value,
        /// Always true: no client runs it.
        provider_executed: bool,
        /// Why.
        error_text: String,
    },
    /// A call has its result.
    ToolOutputAvailable {
        /// The call.
        tool_call_id: String,
        /// The result; `null` where it is not shown.
        output: Value,
        /// Always true: no client runs it.
        provider_executed: bool,
    },
    /// A call has failed.
    ToolOutputError {
        /// The call.
        tool_call_id: String,
        /// The failure's sentence.
        error_text: String,
        /// Always true: no client runs it.
        provider_executed: bool,
    },
    /// The state of the session `agentId` changed within a step: the chunk's fields and `sequence`.
    DataStatePatch {
        /// `{agentId, patches, patchOrdinal?, patchBase?, remoteSource?, origin?, sequence, …}`.
        data: Map<String, Value>,
    },
    /// A step of the session `agentId` was promoted: the chunk's fields and `sequence`.
    DataStepCommitted {
        /// `{agentId, stepCount, checkpointId, patchOrdinal?, sequence, …}`.
        data: Map<String, Value>,
    },
    /// Patches of the session `agentId` are void: the chunk's fields and `sequence`.
    DataStepDiscarded {
        /// `{agentId, stepCount, reason, fromSequence, sequence, …}`.
        data: Map<String, Value>,
    },
    /// A snapshot of the session `agentId` is needed: the chunk's fields and `sequence`.
    DataStreamResync {
        /// `{agentId, reason, sequence, …}`.
        data: Map<String, Value>,
    },
    /// What has become of a sub-agent at any depth. A later part takes the earlier one's place.
    DataSubagent {
        /// The sub-agent's session.
        id: String,
        /// `{agentId, subSessionId, subAgentType, toolCallId, status, result?, error?, sequence,
        /// …}`; `agentId` is the caller, `status` is `running`, `completed` or `failed`.
        data: Map<String, Value>,
    },
    /// What a tool of the session itself said: the chunk's fields and `sequence`.
    DataCustom {
        /// `{agentId, eventName, data, sequence, …}`.
        data: Map<String, Value>,
    },
    /// The output of the run: the chunk's fields and `sequence`.
    DataOutput {
        /// `{agentId, output, sequence, …}`.
        data: Map<String, Value>,
    },
    /// A chunk that has no part of its own, as `/sse` has it: what a sub-agent writes and calls.
    DataChunk {
        /// `{sequence, chunk}`.
        data: UiChunk,
        /// Always true: it is told, and is no part of the message.
        transient: bool,
    },
    /// The replay is over; what follows is live.
    DataCursor {
        /// `{sequence, streamId?}`.
        data: UiCursor,
        /// Always true.
        transient: bool,
    },
    /// The session's state at the end of its run, as the mount shows it.
    DataState {
        /// `{agentId, state}`.
        data: UiState,
        /// Always true.
        transient: bool,
    },
    /// More about the `error` part that follows.
    DataError {
        /// What a program can branch on.
        data: UiError,
        /// Always true.
        transient: bool,
    },
    /// More about the message.
    MessageMetadata {
        /// It is merged into what was said before.
        message_metadata: UiMetadata,
    },
    /// The run completed or paused.
    Finish {
        /// `stop` when it completed, else `other`.
        finish_reason: String,
        /// How it ended.
        message_metadata: UiMetadata,
    },
    /// The run was interrupted.
    Abort {
        /// Why, as the caller said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The run failed, or the stream cannot go on.
    Error {
        /// One sentence, safe to show.
        error_text: String,
    },
}

/// What is told of a message as a whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UiMetadata {
    /// The session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// Its stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_id: Option<String>,
    /// The run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// How the run ended: `completed`, `paused`, `interrupted` or `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// The recursive usage rollup, as the mount shows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Value>,
}

/// A chunk with its place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UiChunk {
    /// The place.
    pub sequence: Sequence,
    /// The chunk as it came.
    pub chunk: Map<String, Value>,
}

/// Up to where a reader has everything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UiCursor {
    /// What `fromSequence` takes.
    pub sequence: Sequence,
    /// What `streamId` takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_id: Option<String>,
}

/// A session's state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UiState {
    /// The session.
    pub agent_id: String,
    /// Its state.
    pub state: Value,
}

/// A failure, without what is for developers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UiError {
    /// The stable code.
    pub code: String,
    /// The sentence.
    pub error: String,
    /// Whether attaching again may go on: then the stream was dropped, and nothing has ended.
    pub recoverable: bool,
    /// The retention floor, for `TRUNCATED`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<Sequence>,
    /// The session's stream, for `TRUNCATED`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_id: Option<String>,
}
