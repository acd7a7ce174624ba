//! Requests, read once at the edge: bodies, queries and the headers of the contract.
//!
//! Implements the request column and the rules of section 1. What is refused names the field by its
//! dotted path. Unknown fields are ignored, `null` for an optional field is its absence, and
//! nothing is taken that a later reader could understand differently.

use std::fmt;

use http::HeaderMap;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::conversation::{MOST_MESSAGES, PAGE_MESSAGES};
use super::ids::{AgentType, MAX_SAFE_INTEGER, Position, SessionId, StreamId};
use super::message::{ParentRef, ResumeMode, ResumeRequest, StartRequest, StopRequest};
use super::tree::TreeBounds;
use super::{VERSION, header};
use crate::error::{Code, Error, Result};

#[cfg(test)]
mod tests;

/// How deep a body may nest. What is taken in here is wrapped into chunks, frames and results
/// later, and those must stay below the depth at which a JSON reader gives up (128).
pub const DEPTH_LIMIT: usize = 96;

/// The longest `streamId` of a query, in bytes.
const STREAM_ID_LIMIT: usize = 128;

/// The longest idempotency key, in characters.
const KEY_LIMIT: usize = 128;

/// Reads the body of a start.
///
/// # Errors
/// `VALIDATION_ERROR` naming the field.
pub fn parse_start(body: &[u8]) -> Result<StartRequest> {
    let body = Fields::of_body(body)?;
    Ok(StartRequest {
        session_id: body.session_id()?,
        agent_type: body
            .text("agentType")?
            .map(|t| AgentType::parse(&t))
            .transpose()?,
        message: body
            .message()?
            .ok_or_else(|| Error::invalid("message", "A start needs a message."))?,
        state: body.object("state")?,
        metadata: body.object("metadata")?,
        user_id: body.text("userId")?,
        tags: body.texts("tags")?,
        parent: body.parent()?,
    })
}

/// Reads the body of a resume. `mode` is always set in what is returned.
///
/// # Errors
/// `VALIDATION_ERROR` naming the field.
pub fn parse_resume(body: &[u8]) -> Result<ResumeRequest> {
    let body = Fields::of_body(body)?;
    let session_id = body.session_id()?;
    let mode = match body.text("mode")?.as_deref() {
        None => None,
        Some("continue") => Some(ResumeMode::Continue),
        Some("with_message") => Some(ResumeMode::WithMessage),
        Some("new_turn") => Some(ResumeMode::NewTurn),
        Some(_) => {
            return Err(Error::invalid(
                "mode",
                "mode must be continue, with_message or new_turn.",
            ));
        }
    };
    let message = body.message()?;
    let mode = match (mode, &message) {
        (None, None) => ResumeMode::Continue,
        (None, Some(_)) => ResumeMode::WithMessage,
        (Some(ResumeMode::Continue), Some(_)) => {
            return Err(Error::invalid("mode", "continue takes no message."));
        }
        (Some(ResumeMode::WithMessage | ResumeMode::NewTurn), None) => {
            return Err(Error::invalid("message", "This mode needs a message."));
        }
        (Some(mode), _) => mode,
    };
    Ok(ResumeRequest {
        session_id,
        mode: Some(mode),
        message,
        parent: body.parent()?,
    })
}

/// The longest reason of an interrupt or an abort, in bytes of UTF-8.
pub const MAX_REASON: usize = 4096;

/// Reads the body of an interrupt or an abort.
///
/// # Errors
/// `VALIDATION_ERROR` naming the field.
pub fn parse_stop(body: &[u8]) -> Result<StopRequest> {
    let body = Fields::of_body(body)?;
    let reason = body.text("reason")?;
    if reason.as_ref().is_some_and(|text| text.len() > MAX_REASON) {
        return Err(body.wrong("reason", &format!("at most {MAX_REASON} bytes long")));
    }
    Ok(StopRequest {
        session_id: body.session_id()?,
        reason,
    })
}

/// The query of status, snapshot and usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionQuery {
    /// The session.
    pub session_id: SessionId,
}

impl SessionQuery {
    /// Reads a query, without its question mark.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` for `sessionId` when it is missing, malformed or there twice.
    pub fn parse(query: Option<&str>) -> Result<Self> {
        Ok(Self {
            session_id: query_session(query)?,
        })
    }
}

/// The query of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeQuery {
    /// The session.
    pub session_id: SessionId,
    /// How much of the tree is told: `depth`, `nodes` and `bytes`, each [`TreeBounds::MOST`] where it
    /// is not given.
    pub bounds: TreeBounds,
}

impl TreeQuery {
    /// Reads a query, without its question mark.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` naming the parameter; a bound can be lowered, not raised.
    pub fn parse(query: Option<&str>) -> Result<Self> {
        let TreeBounds {
            depth,
            nodes,
            bytes,
        } = TreeBounds::MOST;
        Ok(Self {
            session_id: query_session(query)?,
            bounds: TreeBounds {
                depth: count(query, "depth", 1, depth)?.unwrap_or(depth),
                nodes: count(query, "nodes", 1, nodes)?.unwrap_or(nodes),
                bytes: count(query, "bytes", TreeBounds::FEWEST_BYTES, bytes)?.unwrap_or(bytes),
            },
        })
    }
}

/// The query of the messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessagesQuery {
    /// The session.
    pub session_id: SessionId,
    /// The index of the last message that the reader has, exclusive. Default 0: none.
    pub after: u64,
    /// How many messages at most. Default [`PAGE_MESSAGES`], at most [`MOST_MESSAGES`].
    pub limit: usize,
}

impl MessagesQuery {
    /// Reads a query, without its question mark.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` naming the parameter.
    pub fn parse(query: Option<&str>) -> Result<Self> {
        Ok(Self {
            session_id: query_session(query)?,
            after: number(query, "after", 0, MAX_SAFE_INTEGER)?.unwrap_or(0),
            limit: count(query, "limit", 1, MOST_MESSAGES)?.unwrap_or(PAGE_MESSAGES),
        })
    }
}

/// The query of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SseQuery {
    /// The session.
    pub session_id: SessionId,
    /// The cursor, exclusive.
    pub from: Position,
    /// The stream that the reader expects, as it came: any text that is not the session's own
    /// stream id is another stream.
    pub stream_id: Option<String>,
}

impl SseQuery {
    /// Reads a query, without its question mark. `last_event_id` counts only where `fromSequence`
    /// is absent.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` naming the parameter, or `Last-Event-ID`.
    pub fn parse(query: Option<&str>, last_event_id: Option<&str>) -> Result<Self> {
        let session_id = query_session(query)?;
        let from = match parameter(query, "fromSequence")? {
            Some(text) => Position::parse("fromSequence", &text)?,
            None => match last_event_id.filter(|text| !text.is_empty()) {
                Some(text) => Position::parse("Last-Event-ID", text)?,
                None => Position::None,
            },
        };
        let stream_id = parameter(query, "streamId")?;
        if stream_id
            .as_ref()
            .is_some_and(|s| s.len() > STREAM_ID_LIMIT)
        {
            return Err(Error::invalid("streamId", "streamId is too long."));
        }
        Ok(Self {
            session_id,
            from,
            stream_id,
        })
    }
}

/// The `Last-Event-ID` of a request.
///
/// # Errors
/// `VALIDATION_ERROR` for `Last-Event-ID` when it is not text or there twice.
pub fn last_event_id(headers: &HeaderMap) -> Result<Option<&str>> {
    let mut values = headers.get_all("last-event-id").iter();
    let (first, second) = (values.next(), values.next());
    match first.map(http::HeaderValue::to_str) {
        None => Ok(None),
        Some(Ok(text)) if second.is_none() => Ok(Some(text)),
        _ => Err(Error::invalid(
            "Last-Event-ID",
            "Last-Event-ID is not a sequence.",
        )),
    }
}

/// The idempotency key of a request, under either of its two names.
///
/// # Errors
/// `VALIDATION_ERROR` naming the header when a key is not 1 to 128 printable ASCII characters, or
/// there are two different ones.
pub fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>> {
    let mut found: Option<&str> = None;
    for (name, field) in [
        (header::IDEMPOTENCY_KEY, "Idempotency-Key"),
        (header::IDEMPOTENCY_KEY_OTHER, "X-Helix-Request-Key"),
    ] {
        for value in headers.get_all(name) {
            let key = value.to_str().ok().filter(|key| {
                (1..=KEY_LIMIT).contains(&key.len())
                    && key.bytes().all(|b| (b' '..=b'~').contains(&b))
            });
            let Some(key) = key else {
                return Err(Error::invalid(
                    field,
                    "An idempotency key must be 1 to 128 printable ASCII characters.",
                ));
            };
            if found.is_some_and(|other| other != key) {
                return Err(Error::invalid(field, "There are two idempotency keys."));
            }
            found = Some(key);
        }
    }
    Ok(found.map(str::to_owned))
}

/// Checks the contract version of a request; without the header it is 1.
///
/// # Errors
/// `VERSION_UNSUPPORTED` for a later major version, `VALIDATION_ERROR` when it is no version.
pub fn check_version(headers: &HeaderMap) -> Result<()> {
    for value in headers.get_all(header::VERSION) {
        let text = value.to_str().unwrap_or_default();
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        // A number that is too large to be read is a later version all the same.
        match text.parse::<u32>() {
            Ok(0) => return Err(bad_version()),
            Ok(version) if digits && version <= VERSION => {}
            _ if digits => {
                let mut error = Error::new(
                    Code::VersionUnsupported,
                    "This version of the protocol is not supported.",
                )
                .with_detail(format!("supported: {VERSION}"));
                error.field = Some(VERSION_FIELD.to_owned());
                return Err(error);
            }
            _ => return Err(bad_version()),
        }
    }
    Ok(())
}

const VERSION_FIELD: &str = "X-Remote-Agents-Version";

fn bad_version() -> Error {
    Error::invalid(VERSION_FIELD, "The version must be a positive integer.")
}

fn query_session(query: Option<&str>) -> Result<SessionId> {
    match parameter(query, "sessionId")? {
        Some(text) => SessionId::parse(&text),
        None => Err(Error::invalid("sessionId", "sessionId is missing.")),
    }
}

/// A whole number within its bounds, in plain decimal digits.
fn number(query: Option<&str>, name: &str, least: u64, most: u64) -> Result<Option<u64>> {
    let Some(text) = parameter(query, name)? else {
        return Ok(None);
    };
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse::<u64>() {
        Ok(number) if digits && (least..=most).contains(&number) => Ok(Some(number)),
        _ => Err(Error::invalid(
            name,
            format!("{name} must be a whole number from {least} to {most}."),
        )),
    }
}

/// As [`number`], for what is counted in memory.
fn count(query: Option<&str>, name: &str, least: usize, most: usize) -> Result<Option<usize>> {
    let wide = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let number = number(query, name, wide(least), wide(most))?;
    Ok(number.map(|number| usize::try_from(number).unwrap_or(most)))
}

/// A parameter's decoded value. One that is there twice is refused: two readers could take two
/// different ones.
pub fn parameter(query: Option<&str>, name: &str) -> Result<Option<String>> {
    let mut values = form_urlencoded::parse(query.unwrap_or_default().as_bytes())
        .filter(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned());
    let first = values.next();
    if values.next().is_some() {
        return Err(Error::invalid(name, format!("{name} must be given once.")));
    }
    Ok(first)
}

/// An object of the body, and the dotted path at which it stands.
struct Fields {
    map: Map<String, Value>,
    prefix: &'static str,
}

impl Fields {
    fn of_body(body: &[u8]) -> Result<Self> {
        let wrong = || {
            let message = "The body must be a JSON object in which no field stands twice.";
            Error::invalid("body", message)
        };
        let read = serde_json::from_slice(body);
        let Once(Value::Object(map)) = read.map_err(|e| wrong().with_detail(e.to_string()))? else {
            return Err(wrong());
        };
        if map.values().any(|value| too_deep(value, DEPTH_LIMIT - 1)) {
            return Err(Error::invalid("body", "The body is nested too deeply."));
        }
        Ok(Self { map, prefix: "" })
    }

    fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn value(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn wrong(&self, name: &str, what: &str) -> Error {
        let path = self.path(name);
        let message = format!("{path} must be {what}.");
        Error::invalid(path, message)
    }

    fn text(&self, name: &str) -> Result<Option<String>> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(self.wrong(name, "a string")),
        }
    }

    fn required(&self, name: &str) -> Result<String> {
        match self.text(name)? {
            Some(text) if !text.is_empty() => Ok(text),
            _ => Err(self.wrong(name, "a string that is not empty")),
        }
    }

    fn session_id(&self) -> Result<SessionId> {
        SessionId::parse(&self.required("sessionId")?).map_err(|e| self.at(e, "sessionId"))
    }

    fn at(&self, mut error: Error, name: &str) -> Error {
        error.field = Some(self.path(name));
        error
    }

    fn message(&self) -> Result<Option<String>> {
        match self.text("message")? {
            Some(text) if text.is_empty() => {
                Err(self.wrong("message", "a string that is not empty"))
            }
            other => Ok(other),
        }
    }

    fn object(&self, name: &str) -> Result<Option<Map<String, Value>>> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map.clone())),
            Some(_) => Err(self.wrong(name, "an object")),
        }
    }

    fn texts(&self, name: &str) -> Result<Option<Vec<String>>> {
        let items = match self.value(name) {
            None => return Ok(None),
            Some(Value::Array(items)) => items,
            Some(_) => return Err(self.wrong(name, "an array of strings")),
        };
        let text = |(n, item): (usize, &Value)| match item {
            Value::String(text) => Ok(text.clone()),
            _ => Err(self.wrong(&format!("{name}.{n}"), "a string")),
        };
        items
            .iter()
            .enumerate()
            .map(text)
            .collect::<Result<_>>()
            .map(Some)
    }

    fn parent(&self) -> Result<Option<ParentRef>> {
        let Some(map) = self.object("parent")? else {
            return Ok(None);
        };
        let parent = Self {
            map,
            prefix: "parent.",
        };
        let stream_id = StreamId::parse(&parent.required("streamId")?);
        Ok(Some(ParentRef {
            session_id: parent.session_id()?,
            stream_id: stream_id.map_err(|e| parent.at(e, "streamId"))?,
            tool_call_id: parent.required("toolCallId")?,
        }))
    }
}

/// A value in which no object has a field twice, at any depth: of two, two readers could take two
/// different ones.
struct Once(Value);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OnceReader)
    }
}

struct OnceReader;

impl<'de> Visitor<'de> for OnceReader {
    type Value = Once;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Once, E> {
        Ok(Once(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Once, E> {
        Ok(Once(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Once, E> {
        Ok(Once(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Once, E> {
        Ok(Once(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Once, E> {
        Ok(Once(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Once, E> {
        Ok(Once(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Once, A::Error> {
        let mut all = Vec::new();
        while let Some(Once(item)) = items.next_element()? {
            all.push(item);
        }
        Ok(Once(Value::Array(all)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Once, A::Error> {
        let mut map = Map::new();
        while let Some((name, Once(value))) = fields.next_entry()? {
            if map.insert(name, value).is_some() {
                return Err(A::Error::custom("a field stands there twice"));
            }
        }
        Ok(Once(Value::Object(map)))
    }
}

/// Whether a value nests deeper than `left` levels. The reader's own limit bounds the recursion.
pub(crate) fn too_deep(value: &Value, left: usize) -> bool {
    let Some(next) = left.checked_sub(1) else {
        return value.is_object() || value.is_array();
    };
    match value {
        Value::Object(map) => map.values().any(|value| too_deep(value, next)),
        Value::Array(items) => items.iter().any(|value| too_deep(value, next)),
        _ => false,
    }
}
