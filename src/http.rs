//! HTTP messages as values: the `http` crate's types with a body that may stream.
//!
//! Everything above a platform speaks these; the shells convert at their edge.

use std::fmt;
use std::pin::Pin;

use bytes::Bytes;
use futures::stream::Stream;

use crate::error::Error;
use crate::protocol::message::ErrorEnvelope;
use crate::protocol::{VERSION, header};

/// A stream of body parts, on one thread.
pub type ByteStream = Pin<Box<dyn Stream<Item = Result<Bytes, BodyError>>>>;

/// The body ended early; what was read so far may be cut anywhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the body ended early: {0}")]
pub struct BodyError(pub String);

/// A body: whole, or streaming.
pub enum Body {
    /// All of it.
    Full(Bytes),
    /// Part by part, as it comes.
    Stream(ByteStream),
}

impl Body {
    /// A body of nothing.
    #[must_use]
    pub fn empty() -> Self {
        Self::Full(Bytes::new())
    }

    /// Reads the whole body, at most `limit` bytes.
    ///
    /// # Errors
    /// [`BodyError`] when the body breaks off or is longer; it is dropped then.
    pub async fn collect(self, limit: usize) -> Result<Bytes, BodyError> {
        use futures::StreamExt as _;
        match self {
            Self::Full(bytes) if bytes.len() <= limit => Ok(bytes),
            Self::Full(_) => Err(BodyError(format!("longer than {limit} bytes"))),
            Self::Stream(mut stream) => {
                let mut all = Vec::new();
                while let Some(part) = stream.next().await {
                    let part = part?;
                    if all.len().saturating_add(part.len()) > limit {
                        return Err(BodyError(format!("longer than {limit} bytes")));
                    }
                    all.extend_from_slice(&part);
                }
                Ok(all.into())
            }
        }
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(bytes) => write!(f, "Full({} bytes)", bytes.len()),
            Self::Stream(_) => f.write_str("Stream"),
        }
    }
}

/// A request whose body is whole.
pub type Request = http::Request<Bytes>;

/// An answer.
pub type Response = http::Response<Body>;

/// A JSON answer. A value that cannot be written becomes a 500 envelope, never a panic.
#[must_use]
pub fn json(status: u16, value: &impl serde::Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => answer(status, "application/json", Body::Full(bytes.into())),
        Err(e) => refusal(&Error::internal(format!("answer: {e}"))),
    }
}

/// The envelope answer of an error, with `Allow` and `Retry-After` where it has them.
#[must_use]
pub fn refusal(error: &Error) -> Response {
    let body = serde_json::to_vec(&ErrorEnvelope::from(error)).unwrap_or_default();
    let mut response = answer(error.status(), "application/json", Body::Full(body.into()));
    if let Some(allow) = error.allow {
        response
            .headers_mut()
            .insert(http::header::ALLOW, http::HeaderValue::from_static(allow));
    }
    if let Some(seconds) = error.retry_after {
        response
            .headers_mut()
            .insert(http::header::RETRY_AFTER, seconds.into());
    }
    response
}

/// An answer with a content type and the contract's version.
#[must_use]
pub fn answer(status: u16, content_type: &'static str, body: Body) -> Response {
    let mut response = http::Response::new(body);
    *response.status_mut() =
        http::StatusCode::from_u16(status).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(
        http::header::CONTENT_TYPE,
        http::HeaderValue::from_static(content_type),
    );
    headers.insert(header::VERSION, VERSION.into());
    response
}
