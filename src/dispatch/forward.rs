//! The stamps of a forwarded chunk: where the forwarder read it, and where it was first written.
//!
//! Implements the forwarding rules of section 4. It never touches `agentId`, and it never loses a
//! field or a type that this version does not know. What it takes away is an `origin` that is not
//! the child's to tell, and what only a projected mount writes.

use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::protocol::chunk::{Origin, RawChunk, RemoteSource};
use crate::protocol::ids::{Sequence, SessionId, StreamId};

/// How many announced descendants are remembered here, the latest ones; others are looked up.
const REMEMBERED: usize = 1024;

/// What a projected mount tells with a step of its own session. A child that says it has no right to.
const OF_A_MOUNT: [&str; 3] = ["patches", "projection", "resync"];

/// Tells whether a `subagent_start` in the parent's log announces this session.
pub type Announced<'a> = dyn Fn(&str) -> Result<bool> + 'a;

/// A chunk that is ready for the parent's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forwarded {
    /// The stamped chunk as JSON text.
    pub json: String,
    /// The session that a removed `origin` named: neither the child nor a descendant of its.
    pub removed_origin: Option<String>,
}

/// Stamps the chunks of one child.
#[derive(Clone, Debug)]
pub struct Forwarder {
    child: SessionId,
    announced: BTreeSet<Rc<str>>,
    /// The same, the earliest first.
    order: VecDeque<Rc<str>>,
}

impl Forwarder {
    /// A forwarder of this child's chunks.
    #[must_use]
    pub fn new(child: SessionId) -> Self {
        Self {
            child,
            announced: BTreeSet::new(),
            order: VecDeque::new(),
        }
    }

    /// The child whose chunks are stamped.
    #[must_use]
    pub fn child(&self) -> &SessionId {
        &self.child
    }

    /// Stamps the chunk that stands at `sequence` of the child's stream.
    ///
    /// `earlier` is asked about descendants that this forwarder does not remember: a parent that was
    /// restarted goes on in the middle of the child's stream, and only the latest are remembered.
    ///
    /// # Errors
    /// What `earlier` says, or `INTERNAL` if a value cannot be written as JSON.
    pub fn stamp(
        &mut self,
        stream: &StreamId,
        sequence: Sequence,
        chunk: RawChunk,
        earlier: &Announced<'_>,
    ) -> Result<Forwarded> {
        self.remember(&chunk);
        let mut removed_origin = None;
        let first_hop = !chunk.0.contains_key("origin") && !chunk.0.contains_key("remoteSource");
        let inbound = chunk.0.contains_key("origin").then(|| chunk.origin());
        let is_step = chunk.kind() == "step_committed";
        let mut fields = chunk.0;
        if is_step {
            fields.retain(|name, _| !OF_A_MOUNT.contains(&name.as_str()));
        }
        if first_hop {
            fields.insert(
                "origin".into(),
                encode(&Origin {
                    session_id: self.child.to_string(),
                    stream_id: stream.to_string(),
                    sequence,
                })?,
            );
        } else if let Some(origin) = inbound {
            let session = origin.map(|origin| origin.session_id);
            let known = match &session {
                Some(session) => self.knows(session, earlier)?,
                None => false,
            };
            if !known {
                fields.shift_remove("origin");
                removed_origin =
                    Some(session.map_or("(malformed)".into(), |id| id.chars().take(256).collect()));
            }
        }
        fields.insert(
            "remoteSource".into(),
            encode(&RemoteSource {
                child_session_id: self.child.to_string(),
                child_sequence: sequence,
                stream_id: stream.to_string(),
            })?,
        );
        Ok(Forwarded {
            json: Value::Object(fields).to_string(),
            removed_origin,
        })
    }

    fn remember(&mut self, chunk: &RawChunk) {
        if chunk.kind() == "subagent_start"
            && let Some(id) = chunk.text("subSessionId")
        {
            let id: Rc<str> = id.into();
            if self.announced.insert(id.clone()) {
                self.order.push_back(id);
            }
            // The latest stay: they may not be in the parent's log yet, where others are looked up.
            if self.order.len() > REMEMBERED
                && let Some(earliest) = self.order.pop_front()
            {
                self.announced.remove(&earliest);
            }
        }
    }

    fn knows(&self, session: &str, earlier: &Announced<'_>) -> Result<bool> {
        Ok(session == self.child.as_str() || self.announced.contains(session) || earlier(session)?)
    }
}

fn encode(stamp: &impl serde::Serialize) -> Result<Value> {
    serde_json::to_value(stamp).map_err(|e| Error::internal(format!("stamp: {e}")))
}
