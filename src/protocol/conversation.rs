//! The answer of `/messages`: a page of the conversation, and the state that it belongs to.
//!
//! Implements the messages of section 5.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ids::Position;

/// Messages of a page where a request does not say how many.
pub const PAGE_MESSAGES: usize = 50;

/// The most messages that a request may ask for.
pub const MOST_MESSAGES: usize = 200;

/// A page ends behind the message that takes it over this many bytes (1 MiB).
pub const PAGE_BYTES: usize = 1024 * 1024;

/// A page of the conversation, read at one commit together with the state and its position: what
/// the stream says above the position is in no message yet, and what it says up to it is in one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MessagesResponse {
    /// The session.
    pub session_id: String,
    /// The stream that the position belongs to.
    pub stream_id: String,
    /// As in a snapshot; none once the session has ended.
    pub stream_sequence: Position,
    /// The state as of that position; on a projected mount its projection.
    pub state: Value,
    /// Name and version of the projection; absent on a raw mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub projection: Option<String>,
    /// The messages, in order.
    pub messages: Vec<NumberedMessage>,
    /// What to send as `after` for the next page; absent where this is the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// A message and its place in the conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NumberedMessage {
    /// Its number, from 1, without a gap.
    pub index: u64,
    /// The message.
    #[serde(flatten)]
    pub message: Message,
}

/// A message of the conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "role",
    rename_all = "snake_case",
    rename_all_fields = "camelCase"
)]
pub enum Message {
    /// What a person, or the calling parent, said.
    User {
        /// The text.
        text: String,
    },
    /// What the agent answered.
    Assistant {
        /// The text; may be empty when there are calls.
        text: String,
        /// The calls that it made.
        tool_calls: Vec<MessageCall>,
        /// Whether the run was interrupted in the middle of it.
        #[serde(default, skip_serializing_if = "super::is_false")]
        cut: bool,
    },
    /// What a call came back with.
    Tool {
        /// The call.
        tool_call_id: String,
        /// The tool.
        tool_name: String,
        /// Whether it succeeded.
        success: bool,
        /// The result; absent where the mount shows none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        result: Option<Value>,
        /// The failure's sentence.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
}

/// A call in an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MessageCall {
    /// Unique in the session.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// The arguments; absent where the mount shows none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<Value>,
}

impl Message {
    /// Takes out what calls were given and came back with: what is left is who said what, and that
    /// something was called.
    pub fn keep_lifecycle(&mut self) {
        match self {
            Self::User { .. } => {}
            Self::Assistant { tool_calls, .. } => {
                for call in tool_calls {
                    call.arguments = None;
                }
            }
            Self::Tool { result, error, .. } => {
                *result = None;
                *error = None;
            }
        }
    }
}
