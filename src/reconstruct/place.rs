//! Where a chunk stands in the stream of the session that emitted it.
//!
//! The one place that reads the stamps of a forwarded chunk. A stamp that does not fit gives no
//! place, and what has no place is never applied.

use super::rules::{Rule, Rules};
use crate::protocol::chunk::RawChunk;
use crate::protocol::ids::Sequence;

/// The stream that an observer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading<'a> {
    /// The session whose stream it is.
    pub session: &'a str,
    /// The stream's id, as `X-Remote-Agents-Stream` or the answer of start says it.
    pub stream: &'a str,
}

/// A place in the emitting session's own stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) stream: String,
    pub(super) sequence: Sequence,
    /// Whether the chunk came through another session's log, where it may stand again later.
    pub(super) forwarded: bool,
}

/// The place of a chunk that was read at `sequence`, if its stamps tell it.
///
/// A chunk without `remoteSource` is the read session's own. One with an `origin` of its emitter's
/// stands there. Without an `origin`, the direct child's chunks alone have a known place: `agentId`
/// is then the session whose stream the forwarder read.
pub(super) fn place(
    rules: Rules,
    reading: Reading<'_>,
    sequence: Sequence,
    chunk: &RawChunk,
) -> Option<Place> {
    let agent = chunk.agent_id()?;
    if !chunk.0.contains_key("remoteSource") {
        let own = agent == reading.session && !chunk.0.contains_key("origin");
        return (own || !rules.hold(Rule::OwnStream)).then(|| Place {
            stream: reading.stream.to_owned(),
            sequence,
            forwarded: false,
        });
    }
    let has_origin = chunk.0.contains_key("origin") && rules.hold(Rule::OriginFirst);
    let (session, stream, sequence) = if has_origin {
        let origin = chunk.origin()?;
        (origin.session_id, origin.stream_id, origin.sequence)
    } else {
        let source = chunk.remote_source()?;
        (
            source.child_session_id,
            source.stream_id,
            source.child_sequence,
        )
    };
    (session == agent || !rules.hold(Rule::Emitter)).then_some(Place {
        stream,
        sequence,
        forwarded: true,
    })
}
