//! `/ui`: the bytes of a stream as the AI SDK reads it.
//!
//! Takes what the mount shows of `/sse`, event by event, and holds no more than one event. Of a
//! chunk's parts the last one carries the chunk's sequence as its id, so that a reader that was cut
//! between them takes none of them for read. Implements section 10.

use bytes::Bytes;
use futures::stream::{self, StreamExt as _};
use http::{HeaderMap, HeaderValue};

use crate::error::Error;
use crate::http::{Body, BodyError, ByteStream};
use crate::protocol::frame::{ErrorFrame, Frame};
use crate::protocol::header;
use crate::protocol::sse::{self, DecodeError, Decoded, EventDecoder, Item};
use crate::protocol::ui::{UiPart, UiStream};

/// What the package waits for behind the last part.
const DONE: &str = "data: [DONE]\n\n";

/// Sets the headers of the stream; tells the id of the session's stream.
pub(super) fn announce(headers: &mut HeaderMap) -> Option<String> {
    headers.insert(header::UI_STREAM, HeaderValue::from_static("v1"));
    let id = headers.get(header::STREAM)?;
    id.to_str().ok().map(str::to_owned)
}

/// A stream of frames on its way to becoming one of parts.
struct Reading {
    parts: ByteStream,
    decoder: EventDecoder,
    ui: UiStream,
    /// Why the body broke off, still to be handed on.
    broken: Option<BodyError>,
}

/// The stream of parts. It ends after a terminal frame; one that breaks off says so first.
pub(super) fn stream(body: Body, ui: UiStream) -> Body {
    let parts: ByteStream = match body {
        Body::Full(bytes) => Box::pin(stream::once(async { Ok(bytes) })),
        Body::Stream(parts) => parts,
    };
    let begin = Reading {
        parts,
        decoder: EventDecoder::new(sse::EVENT_LIMIT),
        ui,
        broken: None,
    };
    Body::Stream(Box::pin(stream::unfold(begin, |mut reading| async move {
        let part = reading.next().await?;
        Some((part, reading))
    })))
}

impl Reading {
    async fn next(&mut self) -> Option<Result<Bytes, BodyError>> {
        loop {
            if let Some(error) = self.broken.take() {
                return Some(Err(error));
            }
            if self.ui.is_ended() {
                return None;
            }
            let text = match self.parts.next().await {
                Some(Ok(bytes)) => {
                    self.decoder.push(&bytes);
                    self.pass()
                }
                Some(Err(error)) => {
                    self.broken = Some(error);
                    written(None, &self.ui.dropped())
                }
                None => written(None, &self.ui.dropped()),
            };
            if !text.is_empty() {
                return Some(Ok(text.into()));
            }
        }
    }

    /// The parts of all that has come.
    fn pass(&mut self) -> String {
        let mut out = String::new();
        let mut is_alive = false;
        loop {
            match self.decoder.poll() {
                Ok(None) => break,
                Ok(Some(Item::Comment)) => out.push_str(&sse::encode_comment("ping")),
                Ok(Some(Item::Event(event))) => {
                    is_alive = true;
                    match sse::interpret(&event) {
                        Ok(Decoded::Frame(frame)) => out.push_str(&self.frame(frame)),
                        Ok(Decoded::Comment | Decoded::Rewound | Decoded::Skipped) => {}
                        Err(error) => out.push_str(&self.unreadable(&error)),
                    }
                }
                Err(error) => {
                    out.push_str(&self.unreadable(&error));
                    break;
                }
            }
            if self.ui.is_ended() {
                break;
            }
        }
        if is_alive && out.is_empty() {
            // A reader takes a long silence for a dropped stream.
            out.push_str(&sse::encode_comment("ping"));
        }
        out
    }

    fn frame(&mut self, frame: Frame) -> String {
        let id = match &frame {
            Frame::Chunk { sequence, .. } | Frame::CaughtUp { sequence } => {
                Some(sequence.to_string())
            }
            Frame::End(_) | Frame::Error(_) => None,
        };
        let is_end = match &frame {
            Frame::End(_) => true,
            Frame::Error(error) => !error.recoverable,
            Frame::Chunk { .. } | Frame::CaughtUp { .. } => false,
        };
        let mut text = written(id.as_deref(), &self.ui.take(frame));
        if is_end {
            text.push_str(DONE);
        }
        text
    }

    /// The reason could quote what came, so it is not told.
    fn unreadable(&mut self, _: &DecodeError) -> String {
        let error = Error::internal("");
        self.frame(Frame::Error(ErrorFrame {
            run_id: None,
            code: error.code.as_str().to_owned(),
            error: error.message.into_owned(),
            detail: None,
            recoverable: false,
            floor: None,
            stream_id: None,
        }))
    }
}

/// The parts of one frame; the last carries the id.
fn written(id: Option<&str>, parts: &[UiPart]) -> String {
    let mut out = String::new();
    for (left, part) in (0..parts.len()).rev().zip(parts) {
        // A part is texts and JSON that was read before: it can be written.
        let data = serde_json::to_string(part).unwrap_or_default();
        sse::encode_event(&mut out, "", id.filter(|_| left == 0), &data);
    }
    out
}

#[cfg(test)]
mod tests;
