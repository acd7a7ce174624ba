//! The append path by itself, for the benchmark (`miniflare/bench`) alone.
//!
//! It is what the loop does with each batch that a model streams: transition, commit, publish. It
//! stands behind a feature because nobody else may write to a session from outside its loop.

use std::rc::Rc;

use super::{Halt, Producer};
use crate::error::{Error, Result};
use crate::protocol::chunk::ChunkBody;
use crate::protocol::ids::Sequence;

impl Producer {
    /// Appends pieces of text as one commit of the execution that owns the session.
    ///
    /// # Errors
    /// `SESSION_NOT_FOUND` without a session, or what the store says.
    pub fn append(&self, deltas: Vec<String>) -> Result<()> {
        let epoch = self
            .read(|session| session.record.epoch)?
            .ok_or_else(Error::not_found)?;
        let bodies = deltas
            .into_iter()
            .map(|delta| ChunkBody::TextDelta { delta })
            .collect();
        self.apply_in(epoch, |session, now| {
            session.stream(bodies, Vec::new(), now)
        })
        .map_err(|halt| match halt {
            Halt::Failed(error) => error,
            Halt::Superseded => Error::internal("another execution owns the session"),
        })
    }

    /// The newest sequence.
    ///
    /// # Errors
    /// `SESSION_NOT_FOUND` without a session, or what the store says.
    pub fn last_sequence(&self) -> Result<Sequence> {
        self.read(|session| session.record.last_sequence)?
            .ok_or_else(Error::not_found)
    }

    /// Completes when all that was committed may be read.
    pub async fn durable(self: &Rc<Self>) {
        let publisher = self.publisher();
        while !publisher.is_settled() {
            let seen = publisher.durable();
            publisher.changed(seen).await;
        }
    }
}
