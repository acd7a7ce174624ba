//! Looks at what others are told: readers of a stream, followers of a tree, whoever asks for a
//! snapshot. Each of it was committed, and durable when it was said.

use remote_agents::protocol::chunk::RawChunk;
use remote_agents::protocol::frame::ErrorFrame;
use remote_agents::protocol::ids::{Position, SessionId, StreamId};
use remote_agents::protocol::message::SessionStatus;
use remote_agents::reconstruct::{Document, Status};
use remote_agents::store::CheckpointRecord;
use serde_json::Value;

use crate::gate::Invariant;
use crate::judge::Judge;
use crate::ledger::Ledger;
use crate::world::ROOT;

impl Judge {
    /// Looks at a chunk that a reader of a session was told.
    ///
    /// A reader that does not say of which life reads the present one.
    pub fn was_told(
        &self,
        (session, stream): (&str, Option<&StreamId>),
        cursor: u64,
        sequence: u64,
        chunk: &RawChunk,
    ) {
        let due = cursor.saturating_add(1);
        if sequence != due {
            let what = format!("a reader of {session} at {cursor} is told {sequence}");
            self.shared.gate.broken(Invariant::Cursor, what);
            return;
        }
        let is_of = |ledger: &Ledger| stream.is_none() || ledger.stream() == stream;
        let is_true = self.in_any_life(session, |ledger| {
            is_of(ledger) && ledger.durable_chunk(sequence) == Some(chunk)
        });
        if !is_true {
            let what = format!("a reader of {session} {stream:?} is told {sequence} {chunk:?}");
            self.shared.gate.broken(Invariant::Sequence, what);
        }
    }

    /// Looks at what a reader of the root is told whose cursor is not in the log; where it goes on.
    pub fn was_truncated(
        &self,
        stream: Option<&StreamId>,
        cursor: u64,
        error: &ErrorFrame,
    ) -> Option<(StreamId, u64)> {
        let told = error.stream_id.as_deref();
        let told = told.and_then(|told| StreamId::parse(told).ok());
        let floor = error.floor.unwrap_or(0);
        let is_another = stream.is_some() && told.as_ref() != stream;
        let is_true = self.in_any_life(ROOT, |ledger| {
            ledger.stream() == told.as_ref() && floor <= ledger.durable_floor()
        });
        self.shared.gate.truncated();
        if is_true && (is_another || floor > cursor.saturating_add(1)) {
            return Some((told?, floor.saturating_sub(1)));
        }
        let what = format!("a reader of {stream:?} at {cursor} is told {error:?}");
        self.shared.gate.broken(Invariant::Cursor, what);
        None
    }

    /// Whether something is so in some life of a session.
    fn in_any_life(&self, session: &str, is_so: impl Fn(&Ledger) -> bool) -> bool {
        let (ledgers, past) = (self.ledgers.borrow(), self.past.borrow());
        let living = ledgers.get(session).into_iter().flat_map(Ledger::lives);
        let past = past.get(session).into_iter().flatten();
        living.chain(past).any(is_so)
    }

    /// Looks at a document that somebody follows.
    pub fn looks_exact(&self, document: &Document) {
        let state = document.state();
        let is_true = self.in_any_life(document.session(), |ledger| match document.status() {
            Status::Exact { step } => ledger
                .durable_checkpoints()
                .iter()
                .any(|checkpoint| checkpoint.step_count == *step && *checkpoint.state == *state),
            Status::Final => ledger.durable_finals().iter().any(|last| **last == *state),
            _ => true,
        });
        if !is_true && self.is_known(document.session()) {
            let what = format!(
                "{} is {:?} with {state}",
                document.session(),
                document.status()
            );
            self.shared.gate.broken(Invariant::Exact, what);
        }
    }

    /// Looks at the documents of a tree that was followed to the end of its run, and whose snapshots
    /// could be read.
    pub fn was_followed<'a>(&self, mut documents: impl Iterator<Item = &'a Document>) {
        let is_left = |document: &&Document| match document.status() {
            Status::Final | Status::Exact { .. } => false,
            // A child may go on when nobody could tell it to stop.
            Status::InStep => document.session() == ROOT,
            // So may one whose log is cut inside a step.
            Status::Unpinned => !self.is_cut() || self.has_ended(document.session()),
            Status::Stale(_) => true,
        };
        if let Some(left) = documents.find(is_left) {
            let what = format!("{} is left {:?}", left.session(), left.status());
            self.shared.gate.broken(Invariant::Exact, what);
        }
    }

    /// Looks at a state that somebody was given with a position, of a snapshot or a tree.
    pub fn was_shown(&self, session: &SessionId, position: Position, state: &Value) {
        let is_cut = self.is_cut();
        let is_true = self.in_any_life(session.as_str(), |ledger| match position {
            Position::At(sequence) => ledger.durable_checkpoints().iter().any(|checkpoint| {
                checkpoint.stream_sequence == sequence && *checkpoint.state == *state
            }),
            Position::None => {
                let is_committed = |of: &CheckpointRecord| is_cut && *of.state == *state;
                ledger.durable_finals().iter().any(|last| **last == *state)
                    || ledger.durable_checkpoints().iter().any(is_committed)
            }
        });
        if !is_true && self.is_known(session.as_str()) {
            let what = format!("{session} is shown at {position:?} with {state}");
            self.shared.gate.broken(Invariant::Promoted, what);
        }
    }

    fn has_ended(&self, session: &str) -> bool {
        self.of(session, Ledger::status)
            .flatten()
            .is_some_and(SessionStatus::is_terminal)
    }

    /// Whether a log may be cut inside a step, which leaves a committed state without a position.
    fn is_cut(&self) -> bool {
        self.shared.workload.keeps.hard_max_bytes.is_some()
    }

    fn is_known(&self, session: &str) -> bool {
        self.ledgers.borrow().contains_key(session)
    }
}
