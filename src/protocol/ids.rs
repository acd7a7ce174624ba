//! Identifiers and positions: parsed once at the edge, trusted everywhere behind it.
//!
//! Implements the id rules of section 1 and the position rules of sections 4 and 5.
//! `-1` exists in this file alone: inside the library "no position" is [`Position::None`].

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result};

/// Sequences, ordinals and timestamps stay below this, so that every JSON reader keeps them exact.
pub const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Rc<str>);

        impl $name {
            /// The text of the id.
            #[must_use]
            pub fn as_str(&self) -> &str { &self.0 }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { fmt::Debug::fmt(&self.0, f) }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(&self.0) }
        }
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> { s.serialize_str(&self.0) }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let text = String::deserialize(d)?;
                Self::parse(&text).map_err(serde::de::Error::custom)
            }
        }
    };
}

text_id! {
    /// A session's id: 1–256 characters of `[A-Za-z0-9._:~-]`. The object is found by this name.
    SessionId
}
text_id! {
    /// An agent type: 1–64 characters of `[A-Za-z0-9._-]`, neither `.` nor `..`.
    AgentType
}
text_id! {
    /// The name of one sequence space: random, new for each life of a session id.
    StreamId
}
text_id! {
    /// One run of a session: a start or a resume, until it settles.
    RunId
}

fn all_of(text: &str, more: &str, max: usize) -> bool {
    !text.is_empty()
        && text.len() <= max
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || more.as_bytes().contains(&b))
}

impl SessionId {
    /// Parses an id.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` for field `sessionId` when it is empty, too long or has other characters.
    pub fn parse(text: &str) -> Result<Self> {
        if all_of(text, "._:~-", 256) {
            Ok(Self(text.into()))
        } else {
            Err(Error::invalid(
                "sessionId",
                "sessionId must be 1 to 256 characters of A-Z a-z 0-9 . _ : ~ -",
            ))
        }
    }
}

text_id! {
    /// The `agentId` of a live document's patches: `<session>/<name>`, with a name of 1–64 characters
    /// of `[A-Za-z0-9._-]`. A session id has no `/`, so it never equals one.
    DocumentId
}

impl DocumentId {
    /// The id of a session's live document of this name.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` for field `document` when the name is empty, too long or has other
    /// characters.
    pub fn new(session: &SessionId, name: &str) -> Result<Self> {
        if all_of(name, "._-", 64) {
            Ok(Self(format!("{session}/{name}").into()))
        } else {
            Err(Self::malformed())
        }
    }

    /// Parses an id.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` for field `document` when it is not a session id, `/` and a name.
    pub fn parse(text: &str) -> Result<Self> {
        let (session, name) = text.split_once('/').ok_or_else(Self::malformed)?;
        Self::new(&SessionId::parse(session)?, name)
    }

    fn malformed() -> Error {
        Error::invalid(
            "document",
            "A document's name must be 1 to 64 characters of A-Z a-z 0-9 . _ -",
        )
    }
}

impl AgentType {
    /// Parses an agent type.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` for field `agentType`.
    pub fn parse(text: &str) -> Result<Self> {
        if all_of(text, "._-", 64) && text != "." && text != ".." {
            Ok(Self(text.into()))
        } else {
            Err(Error::invalid(
                "agentType",
                "agentType must be 1 to 64 characters of A-Z a-z 0-9 . _ -",
            ))
        }
    }
}

impl StreamId {
    /// Parses a stream id: 1–128 characters of `[A-Za-z0-9._:~-]`.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` for field `streamId`.
    pub fn parse(text: &str) -> Result<Self> {
        if all_of(text, "._:~-", 128) {
            Ok(Self(text.into()))
        } else {
            Err(Error::invalid("streamId", "streamId is malformed"))
        }
    }

    /// A new stream id from 128 random bits.
    #[must_use]
    pub fn from_entropy(bits: [u8; 16]) -> Self {
        Self(format!("st_{}", hex(&bits)).into())
    }
}

impl RunId {
    /// Parses a run id: 1–128 characters of `[A-Za-z0-9._:~-]`.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` for field `runId`.
    pub fn parse(text: &str) -> Result<Self> {
        if all_of(text, "._:~-", 128) {
            Ok(Self(text.into()))
        } else {
            Err(Error::invalid("runId", "runId is malformed"))
        }
    }

    /// A new run id from 128 random bits.
    #[must_use]
    pub fn from_entropy(bits: [u8; 16]) -> Self {
        Self(format!("run_{}", hex(&bits)).into())
    }
}

/// Lower-case hexadecimal of some bytes.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|b| [b >> 4, b & 15])
        .filter_map(|n| char::from_digit(u32::from(n), 16))
        .collect()
}

/// The number of a stored chunk: at least 1, below 2^53, strictly increasing within one stream.
pub type Sequence = u64;

/// Milliseconds since the Unix epoch.
pub type Timestamp = u64;

/// A span of time as timestamps count it: whole milliseconds.
#[must_use]
pub fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// A place in a stream, or none. The wire writes [`Position::None`] as `-1`.
///
/// A position is a cursor: reading from it yields what is strictly above it. `At(0)` is the very
/// beginning; it is a position, unlike `None`, which pins nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Position {
    /// No position: the state pins a moment, not a place in the stream.
    #[default]
    None,
    /// Everything up to and including this sequence is covered.
    At(Sequence),
}

impl Position {
    /// The sequence, if there is a position.
    #[must_use]
    pub fn sequence(self) -> Option<Sequence> {
        match self {
            Self::None => None,
            Self::At(sequence) => Some(sequence),
        }
    }

    /// Parses the text of a `fromSequence` parameter or a `Last-Event-ID`.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` for `field` unless it is `-1` or a plain decimal integer below 2^53.
    pub fn parse(field: &str, text: &str) -> Result<Self> {
        if text == "-1" {
            return Ok(Self::None);
        }
        let digits =
            !text.is_empty() && text.len() <= 16 && text.bytes().all(|b| b.is_ascii_digit());
        match text.parse::<u64>() {
            Ok(n) if digits && n <= MAX_SAFE_INTEGER => Ok(Self::At(n)),
            _ => Err(Error::invalid(
                field,
                format!("{field} must be -1 or a non-negative integer below 2^53"),
            )),
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("-1"),
            Self::At(sequence) => write!(f, "{sequence}"),
        }
    }
}

impl Serialize for Position {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => s.serialize_i64(-1),
            Self::At(sequence) => s.serialize_u64(*sequence),
        }
    }
}

impl<'de> Deserialize<'de> for Position {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let number = i64::deserialize(d)?;
        match u64::try_from(number) {
            Ok(n) if n <= MAX_SAFE_INTEGER => Ok(Self::At(n)),
            Err(_) if number == -1 => Ok(Self::None),
            _ => Err(serde::de::Error::custom(
                "a position must be -1 or a non-negative integer below 2^53",
            )),
        }
    }
}
