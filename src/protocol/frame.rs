//! Frames: the events of `/sse`.
//!
//! Implements the event table of section 4. The byte form is in `sse.rs`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::chunk::RawChunk;
use super::ids::Sequence;
use super::message::SessionStatus;

/// One event of a stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// A stored chunk.
    Chunk {
        /// Its sequence, also the event id.
        sequence: Sequence,
        /// The chunk as stored.
        chunk: RawChunk,
    },
    /// The replay is done; what follows is live.
    CaughtUp {
        /// The sequence up to which was replayed.
        sequence: Sequence,
    },
    /// The run ended, paused or was interrupted.
    End(EndFrame),
    /// The run failed, or the stream cannot go on.
    Error(ErrorFrame),
}

impl Frame {
    /// Whether nothing follows this frame.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::End(_) | Self::Error(_))
    }
}

/// The terminal frame of a run that did not fail.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndFrame {
    /// The run that ended. Old peers may leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// `completed`, `paused` or `interrupted`.
    pub status: SessionStatus,
    /// The run's output, when it completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<Value>,
    /// The session's final state; left out above 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<Value>,
    /// The recursive usage rollup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Value>,
}

/// The terminal frame of a failed run or of a stream that cannot go on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorFrame {
    /// The run that failed, where the frame is about a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// The stable code.
    pub code: String,
    /// One short sentence, safe to show.
    pub error: String,
    /// More for developers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Whether attaching again may go on: then this is a dropped stream, not an end.
    pub recoverable: bool,
    /// The retention floor, for `TRUNCATED`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<Sequence>,
    /// The session's stream, for `TRUNCATED`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_id: Option<String>,
}
