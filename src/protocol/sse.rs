//! The byte form of a stream: the encoder, and an incremental decoder.
//!
//! Implements the event table of section 4. The encoder is byte-stable: the same stored chunk
//! always gives the same bytes, whoever reads it and whenever. The decoder takes bytes cut at any
//! place, accepts the older and the newer dialect of the protocol, and never guesses: a chunk event
//! that is malformed is an error, an event that is cut off by the end of the body is no event.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::chunk::RawChunk;
use super::frame::{EndFrame, ErrorFrame, Frame};
use super::ids::{MAX_SAFE_INTEGER, Sequence};
use crate::error::{Code, Error, Result};

#[cfg(test)]
mod tests;

/// The content type of a stream.
pub const CONTENT_TYPE: &str = "text/event-stream";

/// The largest event that a decoder takes by default, in bytes (8 MiB).
pub const EVENT_LIMIT: usize = 8 * 1024 * 1024;

/// Appends a stored chunk's event. `chunk_json` is the chunk's JSON text as it is stored.
pub fn encode_chunk(out: &mut String, sequence: Sequence, chunk_json: &str) {
    // Writing to a `String` cannot fail.
    let _ = write!(
        out,
        "event: chunk\nid: {sequence}\ndata: {{\"sequence\":{sequence},\"chunk\":"
    );
    push_data(out, chunk_json);
    out.push_str("}\n\n");
}

/// As [`encode_chunk`], for chunks as a store hands them out: on one line, which is not looked for
/// again.
pub(crate) fn encode_line(out: &mut String, sequence: Sequence, chunk_json: &str) {
    let mut digits = [0; 20];
    let number = decimal(sequence, &mut digits);
    out.reserve(chunk_json.len().saturating_add(100));
    for part in [
        "event: chunk\nid: ",
        number,
        "\ndata: {\"sequence\":",
        number,
        ",\"chunk\":",
        chunk_json,
        "}\n\n",
    ] {
        out.push_str(part);
    }
}

/// The number as text, several times as fast as by the formatter; `digits` is where it is written.
fn decimal(mut number: u64, digits: &mut [u8; 20]) -> &str {
    let mut begin = digits.len();
    for digit in digits.iter_mut().rev() {
        // Below ten, so the cast is exact.
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
        begin = begin.saturating_sub(1);
        if number == 0 {
            break;
        }
    }
    let text = digits.get(begin..).unwrap_or_default();
    std::str::from_utf8(text).unwrap_or_default()
}

/// A frame's event.
///
/// # Errors
/// `INTERNAL` if a value cannot be written as JSON, which no value of ours does.
pub fn encode_frame(frame: &Frame) -> Result<String> {
    let mut out = String::new();
    match frame {
        Frame::Chunk { sequence, chunk } => encode_chunk(&mut out, *sequence, &text(chunk)?),
        Frame::CaughtUp { sequence } => {
            encode_event(
                &mut out,
                "caught-up",
                None,
                &format!("{{\"sequence\":{sequence}}}"),
            );
        }
        Frame::End(end) => encode_event(&mut out, "end", None, &text(end)?),
        Frame::Error(error) => encode_event(&mut out, "error", None, &text(error)?),
    }
    Ok(out)
}

/// A comment line, which readers skip. A line break in `comment` becomes a space.
#[must_use]
pub fn encode_comment(comment: &str) -> String {
    format!(": {}\n\n", comment.replace(['\r', '\n'], " "))
}

/// Appends any event. Line breaks in `data` are written as several data lines; `name` and `id` may
/// have none; without a name there is no name line.
pub(crate) fn encode_event(out: &mut String, name: &str, id: Option<&str>, data: &str) {
    if !name.is_empty() {
        let _ = writeln!(out, "event: {name}");
    }
    if let Some(id) = id {
        let _ = writeln!(out, "id: {id}");
    }
    out.push_str("data: ");
    push_data(out, data);
    out.push_str("\n\n");
}

fn text(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::internal(format!("frame: {e}")))
}

/// JSON text has line breaks only between its tokens; each goes on in a data line of its own.
fn push_data(out: &mut String, data: &str) {
    // Over bytes, which is several times as fast as over characters.
    let bytes = data.as_bytes();
    if !bytes.contains(&b'\n') && !bytes.contains(&b'\r') {
        out.push_str(data);
        return;
    }
    for (n, line) in data.replace("\r\n", "\n").split(['\r', '\n']).enumerate() {
        if n > 0 {
            out.push_str("\ndata: ");
        }
        out.push_str(line);
    }
}

/// Why a stream cannot be read on. It is a dropped stream, never an end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// An event is larger than the decoder's limit.
    #[error("an event is larger than {limit} bytes")]
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// An event is not what the contract says.
    #[error("malformed event: {0}")]
    Malformed(String),
}

/// What the decoder found. Each of them is a sign of life.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // It is looked at and taken apart at once, never kept.
pub enum Decoded {
    /// A frame.
    Frame(Frame),
    /// A comment, such as the keep-alive.
    Comment,
    /// The newer dialect's `rewound`: the peer took chunks back, so a state read before is stale.
    Rewound,
    /// An event of a kind that this version does not know.
    Skipped,
}

/// Bytes in, cut anywhere; frames out.
#[derive(Debug)]
pub struct Decoder(EventDecoder);

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// A decoder at the beginning of a body, with [`EVENT_LIMIT`].
    #[must_use]
    pub fn new() -> Self {
        Self::with_limit(EVENT_LIMIT)
    }

    /// A decoder that refuses events of more than `limit` bytes.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self(EventDecoder::new(limit))
    }

    /// Takes the next bytes of the body. Call [`Self::poll`] until it has nothing more.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.push(bytes);
    }

    /// The next finding, or none until more bytes come. What is incomplete when the body ends is
    /// no event: drop the decoder.
    ///
    /// # Errors
    /// [`DecodeError`]; from then on every call gives the same one.
    pub fn poll(&mut self) -> Result<Option<Decoded>, DecodeError> {
        match self.0.poll()? {
            None => Ok(None),
            Some(Item::Comment) => Ok(Some(Decoded::Comment)),
            Some(Item::Event(event)) => match interpret(&event) {
                Ok(decoded) => Ok(Some(decoded)),
                Err(error) => Err(self.0.fail(error)),
            },
        }
    }
}

/// An event as it stands in the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) name: String,
    pub(crate) id: Option<String>,
    pub(crate) data: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Event(Event),
    Comment,
}

/// The line grammar of `text/event-stream`, without any meaning.
#[derive(Debug)]
pub(crate) struct EventDecoder {
    buffer: Vec<u8>,
    /// Where the unfinished line begins in `buffer`.
    line: usize,
    /// Up to where `buffer` was searched for a line break.
    scanned: usize,
    limit: usize,
    first_line: bool,
    /// The line before ended with CR: a LF that follows belongs to it.
    after_cr: bool,
    name: String,
    id: Option<String>,
    data: Option<String>,
    failed: Option<DecodeError>,
}

impl EventDecoder {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            line: 0,
            scanned: 0,
            limit,
            first_line: true,
            after_cr: false,
            name: String::new(),
            id: None,
            data: None,
            failed: None,
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.failed.is_some() {
            return;
        }
        self.buffer.drain(..self.line);
        self.scanned -= self.line;
        self.line = 0;
        self.buffer.extend_from_slice(bytes);
    }

    pub(crate) fn poll(&mut self) -> Result<Option<Item>, DecodeError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        while let Some(line) = self.next_line()? {
            match self.take_line(&line) {
                Ok(None) => {}
                Ok(item) => return Ok(item),
                Err(error) => return Err(self.fail(error)),
            }
        }
        Ok(None)
    }

    /// Ends the decoder with `error`.
    pub(crate) fn fail(&mut self, error: DecodeError) -> DecodeError {
        self.buffer = Vec::new();
        self.line = 0;
        self.scanned = 0;
        self.data = None;
        self.failed = Some(error.clone());
        error
    }

    fn next_line(&mut self) -> Result<Option<Vec<u8>>, DecodeError> {
        if self.after_cr && self.line < self.buffer.len() {
            self.after_cr = false;
            if self.buffer.get(self.line) == Some(&b'\n') {
                self.line += 1;
                self.scanned = self.line;
            }
        }
        let rest = self.buffer.get(self.scanned..).unwrap_or_default();
        let found = rest.iter().position(|b| matches!(b, b'\r' | b'\n'));
        let end = self.scanned + found.unwrap_or(rest.len());
        let held = self.data.as_ref().map_or(0, String::len);
        if (end - self.line).saturating_add(held) > self.limit {
            return Err(self.fail(DecodeError::TooLarge { limit: self.limit }));
        }
        if found.is_none() {
            self.scanned = end;
            return Ok(None);
        }
        let line = self.buffer.get(self.line..end).unwrap_or_default().to_vec();
        self.after_cr = self.buffer.get(end) == Some(&b'\r');
        self.line = end + 1;
        self.scanned = self.line;
        Ok(Some(line))
    }

    fn take_line(&mut self, line: &[u8]) -> Result<Option<Item>, DecodeError> {
        let first = std::mem::replace(&mut self.first_line, false);
        let line = match line.strip_prefix(b"\xef\xbb\xbf") {
            Some(rest) if first => rest,
            _ => line,
        };
        if line.is_empty() {
            let name = std::mem::take(&mut self.name);
            let id = self.id.take();
            let data = self.data.take();
            if name.is_empty() && data.is_none() {
                return Ok(None);
            }
            let data = data.unwrap_or_default();
            return Ok(Some(Item::Event(Event { name, id, data })));
        }
        if line.first() == Some(&b':') {
            return Ok(Some(Item::Comment));
        }
        let colon = line.iter().position(|b| *b == b':').unwrap_or(line.len());
        let (field, rest) = line.split_at(colon);
        let value = rest.strip_prefix(b":").unwrap_or(rest);
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"event" => self.name = utf8(value)?.to_owned(),
            b"id" if !value.contains(&0) => self.id = Some(utf8(value)?.to_owned()),
            b"data" => {
                let value = utf8(value)?;
                match &mut self.data {
                    None => self.data = Some(value.to_owned()),
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                }
            }
            _ => {}
        }
        Ok(None)
    }
}

/// The grammar would put replacement characters; here they would be silent corruption.
fn utf8(bytes: &[u8]) -> Result<&str, DecodeError> {
    std::str::from_utf8(bytes).map_err(|_| malformed("it is not UTF-8"))
}

fn malformed(why: impl Into<String>) -> DecodeError {
    DecodeError::Malformed(why.into())
}

/// Where a text is no JSON of the wanted form. The reader's own message could quote the content.
fn place(what: &str, error: &serde_json::Error) -> DecodeError {
    malformed(format!(
        "{what}: {:?} error at column {}",
        error.classify(),
        error.column()
    ))
}

pub(crate) fn interpret(event: &Event) -> Result<Decoded, DecodeError> {
    let frame = match event.name.as_str() {
        "chunk" => {
            let ChunkEvent {
                sequence, chunk, ..
            } = ChunkEvent::read(event)?;
            Frame::Chunk { sequence, chunk }
        }
        "caught-up" => {
            let data = object(event)?;
            let sequence = data
                .get("sequence")
                .and_then(Value::as_u64)
                .filter(|n| *n <= MAX_SAFE_INTEGER);
            let sequence = sequence.ok_or_else(|| malformed("caught-up without a sequence"))?;
            Frame::CaughtUp { sequence }
        }
        "end" => Frame::End(
            EndFrame::deserialize(Value::Object(object(event)?)).map_err(|e| place("end", &e))?,
        ),
        "error" | "fail" | "truncated" => Frame::Error(read_error(event)?),
        "rewound" => return Ok(Decoded::Rewound),
        _ => return Ok(Decoded::Skipped),
    };
    Ok(Decoded::Frame(frame))
}

fn object(event: &Event) -> Result<Map<String, Value>, DecodeError> {
    serde_json::from_str(&event.data).map_err(|e| place(&event.name, &e))
}

/// All three spellings of a failure. Of the fields only the sentence is needed, for `truncated`
/// not even that.
fn read_error(event: &Event) -> Result<ErrorFrame, DecodeError> {
    let data = object(event)?;
    let field = |name: &str| data.get(name).and_then(Value::as_str).map(str::to_owned);
    let (code, error) = match event.name.as_str() {
        "truncated" => (
            Code::Truncated.as_str().to_owned(),
            field("error")
                .unwrap_or_else(|| "The stream no longer holds what was asked for.".to_owned()),
        ),
        name => {
            let error =
                field("error").ok_or_else(|| malformed(format!("{name} without a sentence")))?;
            let code = field("code").or_else(|| field("errorCode"));
            (
                code.unwrap_or_else(|| Code::Internal.as_str().to_owned()),
                error,
            )
        }
    };
    let detail = data
        .get("detail")
        .or_else(|| data.get("errorDetail"))
        .and_then(|d| match d {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        });
    Ok(ErrorFrame {
        run_id: field("runId"),
        recoverable: event.name != "truncated"
            && data.get("recoverable").and_then(Value::as_bool) == Some(true),
        floor: data
            .get("floor")
            .and_then(Value::as_u64)
            .filter(|n| *n <= MAX_SAFE_INTEGER),
        stream_id: field("streamId"),
        code,
        error,
        detail,
    })
}

/// The data of a chunk event, read strictly.
pub(crate) struct ChunkEvent {
    pub(crate) sequence: Sequence,
    pub(crate) chunk: RawChunk,
    /// Whether the data has fields beside `sequence` and `chunk`.
    pub(crate) extra: bool,
}

impl ChunkEvent {
    pub(crate) fn read(event: &Event) -> Result<Self, DecodeError> {
        let data: ChunkData = serde_json::from_str(&event.data).map_err(|e| place("chunk", &e))?;
        if data.sequence == 0 || data.sequence > MAX_SAFE_INTEGER {
            return Err(malformed("chunk: the sequence is out of range"));
        }
        if event
            .id
            .as_ref()
            .is_some_and(|id| *id != data.sequence.to_string())
        {
            return Err(malformed("chunk: the event id is not the sequence"));
        }
        Ok(Self {
            sequence: data.sequence,
            chunk: RawChunk(data.chunk.0),
            extra: !data.extra.is_empty(),
        })
    }
}

#[derive(serde::Deserialize)]
struct ChunkData {
    sequence: Sequence,
    chunk: UniqueMap,
    #[serde(flatten)]
    extra: BTreeMap<String, IgnoredAny>,
}

/// A JSON object in which no key stands twice: two readers could otherwise see two chunks.
struct UniqueMap(Map<String, Value>);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = UniqueMap;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<UniqueMap, A::Error> {
                let mut map = Map::new();
                while let Some((key, value)) = access.next_entry::<String, Value>()? {
                    if map.insert(key, value).is_some() {
                        return Err(de::Error::custom("a field stands twice"));
                    }
                }
                Ok(UniqueMap(map))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
