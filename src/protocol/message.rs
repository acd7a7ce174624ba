//! Request and answer bodies of the routes.
//!
//! Implements the tables of sections 1, 2, 3, 5 and 8.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ids::{AgentType, Position, Sequence, SessionId, StreamId, Timestamp};
use crate::error::{Code, Error};

/// A session's status as the wire tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionStatus {
    /// A run is under way, in a live object or not.
    #[serde(alias = "active")]
    Running,
    /// The run waits for its client.
    Paused,
    /// The run was interrupted and can be resumed.
    Interrupted,
    /// The latest run completed.
    Completed,
    /// The latest run failed.
    Failed,
}

impl SessionStatus {
    /// The wire spelling.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Interrupted => "interrupted",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }

    /// The status with this spelling; `active` is `running`.
    #[must_use]
    pub fn from_wire(text: &str) -> Option<Self> {
        Some(match text {
            "running" | "active" => Self::Running,
            "paused" => Self::Paused,
            "interrupted" => Self::Interrupted,
            "completed" => Self::Completed,
            "failed" => Self::Failed,
            _ => return None,
        })
    }

    /// Whether the session has ended its turn: `completed` or `failed`.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }
}

/// Who called: the parent's session, its life and the call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParentRef {
    /// The parent's session id.
    pub session_id: SessionId,
    /// The parent's stream: one life of that id.
    pub stream_id: StreamId,
    /// The parent's tool call.
    pub tool_call_id: String,
}

/// Body of `POST …/start`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartRequest {
    /// The session to begin.
    pub session_id: SessionId,
    /// The agent type; on a mount the path's is the one that counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_type: Option<AgentType>,
    /// The message that begins the conversation.
    pub message: String,
    /// The initial state, an object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<Map<String, Value>>,
    /// Free for products; handed down to children.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Map<String, Value>>,
    /// The end user; handed down to children.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
    /// Labels; handed down to children.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tags: Option<Vec<String>>,
    /// Set by a dispatch alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentRef>,
}

/// How a session is resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResumeMode {
    /// Go on without a new message.
    Continue,
    /// Go on with a new message, after every open call has its result.
    WithMessage,
    /// A new turn over a run that ended; an open child is stopped.
    NewTurn,
}

/// Body of `POST …/resume`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResumeRequest {
    /// The session.
    pub session_id: SessionId,
    /// Absent: `with_message` when there is a message, else `continue`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<ResumeMode>,
    /// The new message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Set by a dispatch alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentRef>,
}

/// Body of `POST …/interrupt` and `POST …/abort`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StopRequest {
    /// The session.
    pub session_id: SessionId,
    /// Why, for the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Answer of start and resume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartResponse {
    /// The session.
    pub session_id: String,
    /// The stream to attach to.
    pub stream_id: String,
    /// The run. Old peers may leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
}

/// Answer of interrupt and abort.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StopResponse {
    /// The session.
    pub session_id: String,
    /// Its status after the call.
    pub status: SessionStatus,
    /// Whether this call changes something.
    pub accepted: bool,
}

/// Answer of status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusResponse {
    /// The session.
    pub session_id: String,
    /// Its agent type. Old peers may leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_type: Option<String>,
    /// Where it stands.
    pub status: SessionStatus,
    /// Whether its object is at work on it right now; a sleeping one says `false`. Default `false`.
    #[serde(default)]
    pub is_executing: bool,
    /// The stream to attach to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_id: Option<String>,
    /// The latest run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// Committed steps. Default 0.
    #[serde(default)]
    pub step_count: u64,
    /// The latest run's output, when it completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<Value>,
    /// The latest run's failure, as a sentence that is safe to show.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The failure's stable code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
    /// More about the failure for developers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_detail: Option<String>,
    /// When the session last changed, in milliseconds since the Unix epoch. Default 0.
    #[serde(default)]
    pub updated_at: Timestamp,
}

/// Answer of snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotResponse {
    /// The session.
    pub session_id: String,
    /// The stream that the position belongs to.
    pub stream_id: String,
    /// The state as of that position; on a projected mount its projection.
    pub state: Value,
    /// The sequence to attach at, exclusive; none once the session has ended.
    pub stream_sequence: Position,
    /// The retention floor; 0 when the whole log is kept.
    pub oldest_retained_sequence: Sequence,
    /// Committed steps.
    pub step_count: u64,
    /// The checkpoint that the state is of. Old peers may leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_id: Option<String>,
    /// The ordinal of the last patch in the state; absent without a position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch_ordinal: Option<u64>,
    /// Name and version of the projection; absent on a raw mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub projection: Option<String>,
}

/// Answer of usage. The rollup is [`crate::protocol::usage::UsageRollup`] on a raw mount, and
/// whatever the mount's usage projection made of it elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageResponse {
    /// The session.
    pub session_id: String,
    /// The rollup.
    pub rollup: Value,
}

/// The error envelope.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorEnvelope {
    /// The stable code, also one that this version does not know.
    pub code: String,
    /// One short sentence, safe to show to an end user.
    pub error: String,
    /// More for developers; never a secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Whether the same request may succeed when it is sent again unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retryable: Option<bool>,
    /// The stream to attach to, where the code says to attach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_id: Option<String>,
    /// The run to attach to, where the code says to attach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// The request field that is at fault, as a dotted path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}

impl ErrorEnvelope {
    /// The code, if this version knows it.
    #[must_use]
    pub fn known_code(&self) -> Option<Code> {
        Code::from_wire(&self.code)
    }
}

impl From<&Error> for ErrorEnvelope {
    fn from(error: &Error) -> Self {
        Self {
            code: error.code.as_str().into(),
            error: error.message.to_string(),
            detail: error.detail.clone(),
            retryable: Some(error.code.retryable()),
            stream_id: error.stream_id.clone(),
            run_id: error.run_id.clone(),
            field: error.field.clone(),
        }
    }
}
