//! The append path by itself, for the benchmark (`miniflare/bench`) alone.
//!
//! It is what the loop does with each batch that a model streams: transition, commit, publish. It
//! stands behind a feature because nobody else may write to a session from outside its loop.

use std::cell::Cell;
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

    /// Appends `commits` commits of the same pieces of text one after the other, and waits until all
    /// may be read after every `each` of them, as directly as the platform tells it: a task that is
    /// woken for each would be measured beside the append.
    ///
    /// # Errors
    /// As [`Self::append`]; nothing is appended after a failure.
    pub async fn append_all(
        self: &Rc<Self>,
        commits: u64,
        deltas: Vec<String>,
        each: u64,
    ) -> Result<()> {
        let (done, told) = futures::channel::oneshot::channel();
        let all = Rc::new(All {
            producer: self.clone(),
            deltas,
            each: each.max(1),
            left: Cell::new(commits),
            done: Cell::new(Some(done)),
        });
        all.go_on();
        told.await
            .unwrap_or_else(|_| Err(Error::internal("the commits became durable for nobody")))
    }
}

/// Commits that are to be made.
struct All {
    producer: Rc<Producer>,
    deltas: Vec<String>,
    each: u64,
    left: Cell<u64>,
    done: Cell<Option<futures::channel::oneshot::Sender<Result<()>>>>,
}

impl All {
    fn go_on(self: Rc<Self>) {
        let now = self.left.get().min(self.each);
        self.left.set(self.left.get().saturating_sub(now));
        let appended = (0..now).try_for_each(|_| self.producer.append(self.deltas.clone()));
        let publisher = self.producer.publisher();
        publisher.once_settled(Box::new(move || {
            if appended.is_ok() && self.left.get() > 0 {
                self.go_on();
            } else if let Some(done) = self.done.take() {
                drop(done.send(appended));
            }
        }));
    }
}
