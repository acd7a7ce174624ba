//! The frames of an answer's body.
//!
//! A body that ends without a terminal frame is a dropped stream, never an end; so are a recoverable
//! error, a silence, and bytes that cannot be read. Implements the reader's side of section 4.

use std::rc::Rc;
use std::time::Duration;

use futures::future::{Either, select};
use futures::stream::{self, StreamExt as _};

use super::{FrameStream, TransportError};
use crate::http::{Body, ByteStream};
use crate::platform::Runtime;
use crate::protocol::frame::Frame;
use crate::protocol::sse::{DecodeError, Decoded, Decoder};

/// The frames of a body. It ends after a terminal frame, or with one `Err`, which is a dropped
/// stream: the body ended or broke off, was silent, or holds what cannot be read.
pub(super) fn frames(body: Body, runtime: Rc<dyn Runtime>, silence: Duration) -> FrameStream {
    let body: ByteStream = match body {
        Body::Full(bytes) => Box::pin(stream::iter([Ok(bytes)])),
        Body::Stream(parts) => parts,
    };
    let reader = Reader {
        body,
        decoder: Decoder::new(),
        runtime,
        silence,
    };
    let next = |reader: Option<Reader>| async move {
        let mut reader = reader?;
        match reader.next().await {
            Ok(frame) => {
                let rest = if frame.is_terminal() {
                    None
                } else {
                    Some(reader)
                };
                Some((Ok(frame), rest))
            }
            Err(error) => Some((Err(error), None)),
        }
    };
    Box::pin(stream::unfold(Some(reader), next))
}

struct Reader {
    body: ByteStream,
    decoder: Decoder,
    runtime: Rc<dyn Runtime>,
    silence: Duration,
}

impl Reader {
    async fn next(&mut self) -> Result<Frame, TransportError> {
        loop {
            if let Some(frame) = self.decoded()? {
                return Ok(frame);
            }
            let part = match select(self.body.next(), self.runtime.sleep(self.silence)).await {
                Either::Left((part, _)) => part,
                Either::Right(_) => return Err(TransportError::Timeout(self.silence)),
            };
            match part {
                Some(Ok(bytes)) => self.decoder.push(&bytes),
                Some(Err(error)) => return Err(TransportError::Unreachable(error.to_string())),
                None => {
                    return Err(TransportError::Unreachable(
                        "the stream ended without a terminal frame".into(),
                    ));
                }
            }
        }
    }

    fn decoded(&mut self) -> Result<Option<Frame>, TransportError> {
        while let Some(found) = self.decoder.poll().map_err(undecodable)? {
            match found {
                Decoded::Frame(Frame::Error(error)) if error.recoverable => {
                    return Err(TransportError::Unreachable(format!(
                        "the producer dropped the stream: {}",
                        error.code
                    )));
                }
                Decoded::Frame(frame) => return Ok(Some(frame)),
                // The peer took chunks back. What was forwarded stays; reading on from the cursor
                // is all that a forwarder can do.
                Decoded::Rewound => {
                    return Err(TransportError::Unreachable("the stream was rewound".into()));
                }
                Decoded::Comment | Decoded::Skipped => {}
            }
        }
        Ok(None)
    }
}

fn undecodable(error: DecodeError) -> TransportError {
    match error {
        DecodeError::TooLarge { limit } => TransportError::TooLarge(limit),
        DecodeError::Malformed(_) => TransportError::Malformed(error.to_string()),
    }
}
