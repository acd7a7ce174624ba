//! What the machine asks for and what it is told.
//!
//! The two enums are closed: a driver that handles every effect and reports what came of it has
//! implemented the dispatch of section 7, over whatever transport it likes.

use super::CallOutcome;
use crate::error::Code;
use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::Frame;
use crate::protocol::ids::{Position, Sequence, StreamId, Timestamp};
use crate::protocol::message::{
    SnapshotResponse, StartResponse, StatusResponse, StopResponse, UsageResponse,
};
use crate::transport::TransportError;

/// What must be done now. At most one effect at a time waits for an [`Event`]; the others are done
/// at once, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send `/start` with its derived key; answer with [`Event::Started`].
    Start,
    /// Store the child's stream with the ref.
    Identify {
        /// The child's stream.
        stream: StreamId,
    },
    /// Attach; answer with [`Event::Attached`] or [`Event::Dropped`].
    Attach {
        /// Read above this position.
        from: Position,
        /// The life of the child that is meant.
        stream: StreamId,
    },
    /// Wait for frames; answer with [`Event::Frames`] or [`Event::Dropped`].
    Next,
    /// Stamp these chunks and commit them with the cursor that covers them.
    Forward {
        /// The child's stream.
        stream: StreamId,
        /// The new cursor.
        through: Sequence,
        /// The chunks with their child sequences, in order.
        chunks: Vec<(Sequence, RawChunk)>,
    },
    /// Read the status; answer with [`Event::Status`].
    ReadStatus,
    /// Read the snapshot; answer with [`Event::Snapshot`].
    ReadSnapshot,
    /// Read the usage; answer with [`Event::Usage`].
    ReadUsage,
    /// Resume the child with mode `continue`; answer with [`Event::Resumed`].
    Resume {
        /// Counts the resumes of this call from 1; part of the idempotency key.
        number: u32,
    },
    /// Interrupt the child; answer with [`Event::Interrupted`].
    Interrupt {
        /// Why, as a stable code.
        reason: Code,
    },
    /// Wait; answer with [`Event::Slept`].
    Sleep {
        /// Until when.
        until: Timestamp,
    },
    /// Write a warning to the log.
    Note(String),
    /// The call is over. The last effect.
    Settle(Box<CallOutcome>),
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// `/start` was answered, or given up.
    Started(Result<StartResponse, TransportError>),
    /// The stream's headers are there.
    Attached,
    /// The attach failed, or the stream ended without a terminal frame.
    Dropped(TransportError),
    /// Frames came, in order.
    Frames(Vec<Frame>),
    /// The status was read.
    Status(Result<StatusResponse, TransportError>),
    /// The snapshot was read.
    Snapshot(Result<SnapshotResponse, TransportError>),
    /// The usage was read.
    Usage(Result<UsageResponse, TransportError>),
    /// The resume was answered.
    Resumed(Result<StartResponse, TransportError>),
    /// The interrupt was answered.
    Interrupted(Result<StopResponse, TransportError>),
    /// The wait is over.
    Slept,
}

/// What becomes of the effect under way when a stop or the deadline comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abandon {
    /// Drop it: there is something else to do.
    Yes,
    /// See it through: its answer still counts.
    No,
}
