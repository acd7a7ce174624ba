//! How a consumer reaches a producer: [`Fetch`] moves one HTTP exchange, [`Transport`] speaks the
//! calls over it.
//!
//! Answers are validated here; a caller sees typed answers or a typed [`TransportError`].

mod frames;
mod http;
mod objects;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use futures::stream::LocalBoxStream;

pub use self::http::{HeaderFactory, HeaderSource, HttpTransport};
pub use self::objects::ObjectsFetch;
use crate::error::{Code, Error};
use crate::http::{Request, Response};
use crate::protocol::frame::Frame;
use crate::protocol::ids::{Position, SessionId, StreamId, Timestamp, millis};
use crate::protocol::message::{
    ErrorEnvelope, ResumeRequest, SnapshotResponse, StartRequest, StartResponse, StatusResponse,
    StopRequest, StopResponse, UsageResponse,
};
use crate::protocol::trace::TraceContext;
use crate::protocol::tree::{TreeBounds, TreeNode};

/// One HTTP exchange: a service binding, an object stub, global fetch, a native client.
pub trait Fetch {
    /// Sends a request and returns its answer once the headers are there.
    ///
    /// # Errors
    /// [`FetchError`] when there is no answer. The request may have taken effect all the same.
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>>;
}

/// No answer came.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no answer: {0}")]
pub struct FetchError(pub String);

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TransportError {
    /// The producer refused with an envelope.
    #[error("refused with {status} {}: {}", envelope.code, envelope.error)]
    Refused {
        /// The HTTP status.
        status: u16,
        /// What it said.
        envelope: Box<ErrorEnvelope>,
        /// Seconds of `Retry-After`.
        retry_after: Option<u32>,
    },
    /// There was no answer, or one without an envelope that says to try again (502, 503, 504, 5xx).
    #[error("unreachable: {0}")]
    Unreachable(String),
    /// The answer is not what the contract says.
    #[error("malformed answer: {0}")]
    Malformed(String),
    /// An event of a stream is larger than this many bytes. Where its producer made it, it
    /// comes again behind the same cursor, so a follower gives up; a dispatch has attempts to spend.
    #[error("an event of the stream is larger than {0} bytes")]
    TooLarge(usize),
    /// A refusal without an envelope: something between the two services spoke, not the producer.
    /// Whether the request took effect is not known.
    #[error("status {status} without an envelope")]
    Unexplained {
        /// The HTTP status, from 400 to 499.
        status: u16,
    },
    /// The call's deadline passed.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The answer is of a later major version of the contract.
    #[error(
        "the answer has version {theirs} of the protocol; this side knows {}",
        crate::protocol::VERSION
    )]
    VersionUnsupported {
        /// The answer's version.
        theirs: u32,
    },
    /// The mount is projected: an executor must use a raw one.
    #[error("the mount is projected; a dispatch needs a raw mount")]
    ProjectedMount,
}

impl TransportError {
    /// Whether the same request may be answered later.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Refused { status, .. } | Self::Unexplained { status } => {
                *status == 429 || *status >= 500
            }
            Self::Unreachable(_) | Self::Malformed(_) | Self::Timeout(_) => true,
            Self::ProjectedMount | Self::VersionUnsupported { .. } | Self::TooLarge(_) => false,
        }
    }

    /// When the producer asked to be tried again, in seconds from now.
    #[must_use]
    pub fn retry_after(&self) -> Option<u32> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// The frames of one attach. `Err` is a dropped stream.
pub type FrameStream = LocalBoxStream<'static, Result<Frame, TransportError>>;

/// A call's future.
pub type Call<'a, T> = LocalBoxFuture<'a, Result<T, TransportError>>;

/// The eight calls, and the tree.
pub trait Transport {
    /// Begins a session. `key` is the idempotency key.
    fn start(&self, request: StartRequest, key: String) -> Call<'_, StartResponse>;
    /// Resumes a session.
    fn resume(&self, request: ResumeRequest, key: String) -> Call<'_, StartResponse>;
    /// Interrupts a session.
    fn interrupt(&self, request: StopRequest) -> Call<'_, StopResponse>;
    /// Aborts a session.
    fn abort(&self, request: StopRequest) -> Call<'_, StopResponse>;
    /// Reads the status.
    fn status(&self, session: &SessionId) -> Call<'_, StatusResponse>;
    /// Reads the snapshot.
    fn snapshot(&self, session: &SessionId) -> Call<'_, SnapshotResponse>;
    /// Reads the usage.
    fn usage(&self, session: &SessionId) -> Call<'_, UsageResponse>;
    /// Reads the tree of snapshots below and including a session, within bounds. The answer may go
    /// beyond them all the same: whoever asks cuts it. Default: `FEATURE_UNAVAILABLE`, upon which the
    /// session's own snapshot is read.
    fn tree(&self, session: &SessionId, bounds: TreeBounds) -> Call<'_, TreeNode> {
        let _ = (session, bounds);
        Box::pin(async {
            let error = Error::new(Code::FeatureUnavailable, "This transport reads no trees.");
            Err(TransportError::Refused {
                status: error.status(),
                envelope: Box::new(ErrorEnvelope::from(&error)),
                retry_after: None,
            })
        })
    }
    /// The same transport, its requests part of this trace; `None` from one that sends no headers.
    /// Default: `None`.
    fn traced(&self, trace: &TraceContext) -> Option<Rc<dyn Transport>> {
        let _ = trace;
        None
    }
    /// Attaches to the stream above `from`. `stream` guards against another life of the id.
    fn stream(
        &self,
        session: &SessionId,
        from: Position,
        stream: Option<&StreamId>,
    ) -> Call<'_, FrameStream>;
}

/// Deadlines and retries of a dispatch; the contract's defaults (section 7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// From leaving the queue to settlement. Default 15 minutes.
    pub call_timeout: Duration,
    /// Silence after which a stream counts as dropped. Default 45 s.
    pub silence: Duration,
    /// Attaches in a row without a new chunk after a drop. Default 3.
    pub stream_retries: u32,
    /// Attach attempts in a row that met no runner. Default 3.
    pub attach_attempts: u32,
    /// Tries of a POST, or of a read, after the first. Default 3.
    pub post_retries: u32,
    /// Each try of a POST's own deadline. Default 30 s.
    pub post_timeout: Duration,
    /// The first wait between tries of a request; it doubles, with jitter. Also the wait before the
    /// first of several attaches in a row. Default 500 ms.
    pub retry_base: Duration,
    /// The wait before the second attach in a row; later ones wait twice that. All get up to a tenth
    /// on top, by chance. Default 8 s, so that three attaches span 24.5 s.
    pub reattach_wait: Duration,
    /// The longest wait between two tries, also where `Retry-After` asks for more. Default 60 s.
    pub longest_wait: Duration,
    /// How long beyond `call_timeout` a start that has to be stopped is sent again, and a child that
    /// may have ended in time is asked. Default 60 s.
    pub grace: Duration,
    /// Each recovery read's own deadline. Default 10 s.
    pub read_timeout: Duration,
}

impl RetryPolicy {
    /// When the grace of a call with this deadline is over.
    pub(crate) fn end_of_grace(&self, deadline: Timestamp) -> Timestamp {
        deadline.saturating_add(millis(self.grace))
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            call_timeout: Duration::from_secs(15 * 60),
            silence: Duration::from_secs(45),
            stream_retries: 3,
            attach_attempts: 3,
            post_retries: 3,
            post_timeout: Duration::from_secs(30),
            retry_base: Duration::from_millis(500),
            reattach_wait: Duration::from_secs(8),
            longest_wait: Duration::from_secs(60),
            grace: Duration::from_secs(60),
            read_timeout: Duration::from_secs(10),
        }
    }
}
