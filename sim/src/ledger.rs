//! What was committed of one session, and what holds of its log alone.
//!
//! A ledger knows what of it is durable, and goes back there when its object ends. It is of one life
//! of its session: a deletion ends it, and is taken back with the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use remote_agents::native::{DiskMoment, RusqliteDatabase};
use remote_agents::protocol::chunk::{PatchOperation, RawChunk};
use remote_agents::protocol::ids::StreamId;
use remote_agents::protocol::message::SessionStatus;
use remote_agents::session::patch;
use remote_agents::store::{CheckpointRecord, Database, SessionRecord, SqlStore, Terminal};
use serde_json::Value;

use crate::gate::Invariant;
use crate::plan::Side;

pub(crate) type Held = Result<(), (Invariant, String)>;

pub(crate) fn broken<T>(
    invariant: Invariant,
    what: impl Into<String>,
) -> Result<T, (Invariant, String)> {
    Err((invariant, what.into()))
}

/// All that was ever committed of one session, less what was lost before it was durable.
pub struct Ledger {
    /// Where it lives.
    pub side: Side,
    pub(crate) database: Rc<RusqliteDatabase>,
    pub(crate) store: SqlStore,
    /// Every chunk, from sequence 1 on.
    pub chunks: Vec<RawChunk>,
    pub(crate) checkpoints: Vec<CheckpointRecord>,
    pub(crate) finals: Vec<Rc<Value>>,
    /// What each answer of its model that it counts has cost.
    pub(crate) prices: Vec<u64>,
    pub(crate) known: Known,
    /// What was known when what is on its way to the disk left, and what is durable.
    leaving: Mark,
    durable: Mark,
    /// The life before, until its deletion is durable.
    before: Option<Before>,
}

/// A life whose deletion is not durable.
struct Before {
    ledger: Box<Ledger>,
    /// Whether the deletion is on its way to the disk.
    is_leaving: bool,
}

/// What a moment of the disk has changed.
#[derive(Default)]
pub(crate) struct Moved {
    /// Prices of answers that nobody counts any more.
    pub(crate) uncounted: Vec<u64>,
    /// How many chunks are gone.
    pub(crate) lost: usize,
    /// Lives that are over for good.
    pub(crate) buried: Vec<Ledger>,
    /// Whether a deletion was taken back.
    pub(crate) is_risen: bool,
}

/// What is known of a session, beside what only grows.
#[derive(Clone, Default)]
pub struct Known {
    pub(crate) record: Option<SessionRecord>,
    pub(crate) terminals: BTreeMap<String, Option<Terminal>>,
    pub(crate) promoted: (Rc<Value>, u64),
    pub(crate) working: (Rc<Value>, u64),
    /// The highest ordinal of its patches, those of discarded attempts among them.
    pub(crate) ordinal: u64,
    pub(crate) results: BTreeSet<String>,
    pub(crate) begun: BTreeSet<String>,
    pub(crate) ended: BTreeSet<String>,
    pub(crate) forwarded: BTreeMap<String, u64>,
    pub(crate) usage: usize,
    /// What its model calls have cost.
    pub spent: u64,
    /// When it last stopped running, by the virtual clock.
    pub rested_at: Option<u64>,
}

/// A ledger at a moment: how long what grows was, and the rest.
#[derive(Clone, Default)]
struct Mark {
    chunks: usize,
    checkpoints: usize,
    finals: usize,
    prices: usize,
    known: Known,
}

impl Ledger {
    pub(crate) fn new(side: Side, database: Rc<RusqliteDatabase>) -> Self {
        Self {
            side,
            store: SqlStore::new(database.clone() as Rc<dyn Database>),
            database,
            chunks: Vec::new(),
            checkpoints: Vec::new(),
            finals: Vec::new(),
            prices: Vec::new(),
            known: Known::default(),
            leaving: Mark::default(),
            durable: Mark::default(),
            before: None,
        }
    }

    /// It has another database: its object was opened anew.
    pub(crate) fn reads(&mut self, database: Rc<RusqliteDatabase>) {
        self.store = SqlStore::new(database.clone() as Rc<dyn Database>);
        self.database = database;
    }

    /// Its session was deleted: what comes is of another life.
    pub(crate) fn bury(&mut self) {
        let next = Self::new(self.side, self.database.clone());
        let ledger = Box::new(std::mem::replace(self, next));
        self.before = Some(Before {
            ledger,
            is_leaving: false,
        });
    }

    /// This life, and those before whose deletion is not durable.
    pub(crate) fn lives(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |ledger| {
            ledger.before.as_ref().map(|before| &*before.ledger)
        })
    }

    /// The life it is of, once it has begun.
    pub(crate) fn stream(&self) -> Option<&StreamId> {
        self.known.record.as_ref().map(|record| &record.stream_id)
    }

    /// What is known beside what grows.
    #[must_use]
    pub fn known(&self) -> &Known {
        &self.known
    }

    pub(crate) fn status(&self) -> Option<SessionStatus> {
        self.known.record.as_ref().map(|record| record.status)
    }

    /// The oldest chunk that its session keeps; 0 where it keeps all.
    pub(crate) fn floor(&self) -> u64 {
        self.known.record.as_ref().map_or(0, |record| record.floor)
    }

    /// As [`Self::floor`], of what is durable.
    pub(crate) fn durable_floor(&self) -> u64 {
        let record = self.durable.known.record.as_ref();
        record.map_or(0, |record| record.floor)
    }

    fn mark(&self) -> Mark {
        Mark {
            chunks: self.chunks.len(),
            checkpoints: self.checkpoints.len(),
            finals: self.finals.len(),
            prices: self.prices.len(),
            known: self.known.clone(),
        }
    }

    /// The chunk with a sequence, if it is durable.
    pub(crate) fn durable_chunk(&self, sequence: u64) -> Option<&RawChunk> {
        let place = usize::try_from(sequence).ok()?.checked_sub(1)?;
        self.chunks.get(..self.durable.chunks)?.get(place)
    }

    pub(crate) fn durable_checkpoints(&self) -> &[CheckpointRecord] {
        let durable = self.checkpoints.get(..self.durable.checkpoints);
        durable.unwrap_or_default()
    }

    pub(crate) fn durable_finals(&self) -> &[Rc<Value>] {
        self.finals.get(..self.durable.finals).unwrap_or_default()
    }

    /// A moment of the object's disk, and what it changes.
    pub(crate) fn on_disk(&mut self, moment: DiskMoment) -> Moved {
        match moment {
            DiskMoment::Leaving => self.leave(),
            DiskMoment::Durable => return self.settle(),
            DiskMoment::TakenBack => return self.take_back(),
        }
        Moved::default()
    }

    fn leave(&mut self) {
        self.leaving = self.mark();
        let mut next = self.before.as_mut();
        while let Some(before) = next {
            before.is_leaving = true;
            next = before.ledger.before.as_mut();
        }
    }

    fn settle(&mut self) -> Moved {
        match self.before.take() {
            // What was on its way is of the life before.
            Some(mut before) if !before.is_leaving => {
                let moved = before.ledger.settle();
                self.before = Some(before);
                moved
            }
            before => {
                self.durable = self.leaving.clone();
                let mut moved = Moved::default();
                let mut next = before;
                while let Some(mut before) = next {
                    next = before.ledger.before.take();
                    // What was committed before its deletion is durable with it.
                    before.ledger.durable = before.ledger.mark();
                    moved.buried.push(*before.ledger);
                }
                moved
            }
        }
    }

    /// What is not durable was never said.
    fn take_back(&mut self) -> Moved {
        if let Some(before) = self.before.take() {
            let (prices, lost) = (std::mem::take(&mut self.prices), self.chunks.len());
            *self = *before.ledger;
            let mut moved = self.take_back();
            moved.uncounted.extend(prices);
            moved.lost = moved.lost.saturating_add(lost);
            moved.is_risen = true;
            return moved;
        }
        let lost = self.chunks.len().saturating_sub(self.durable.chunks);
        self.leaving = self.durable.clone();
        let durable = self.durable.clone();
        self.chunks.truncate(durable.chunks);
        self.checkpoints.truncate(durable.checkpoints);
        self.finals.truncate(durable.finals);
        self.known = durable.known;
        let prices = durable.prices.min(self.prices.len());
        Moved {
            uncounted: self.prices.split_off(prices),
            lost,
            ..Moved::default()
        }
    }
}

/// The end of a child and that of its call stand together, in one commit.
pub(crate) fn ends_are_together(name: &str, chunks: &[RawChunk], known: u64) -> Held {
    let new = chunks.get(usize::try_from(known).unwrap_or(usize::MAX)..);
    let own: Vec<&RawChunk> = new
        .unwrap_or_default()
        .iter()
        .filter(|chunk| chunk.remote_source().is_none())
        .collect();
    for (at, chunk) in own.iter().enumerate() {
        let next = own.get(at.saturating_add(1));
        let together = next.is_some_and(|next| {
            next.kind() == "tool_end" && next.text("toolCallId") == chunk.text("toolCallId")
        });
        if chunk.kind() == "subagent_end" && !together {
            let what = format!("{name}: {chunk:?} and then {next:?}");
            return broken(Invariant::SettledOnce, what);
        }
    }
    Ok(())
}

/// A chunk of a child in its parent's log.
pub(crate) fn forwarded(
    name: &str,
    chunk: &RawChunk,
    (child, sequence): (&str, u64),
    last: &mut u64,
    others: &BTreeMap<String, Ledger>,
) -> Held {
    if chunk.kind() == "stream_resync" && chunk.agent_id() == Some(child) {
        // The parent says so in the child's name: the rest could not be had, or the child keeps it no
        // longer.
        let floor = others.get(child).map_or(0, Ledger::durable_floor);
        let is_true = match chunk.text("reason") {
            Some("child_incomplete") => true,
            Some("child_truncated") => sequence > *last && sequence < floor,
            _ => false,
        };
        if !is_true {
            let what = format!("{name} at {last} of {child}, kept from {floor}, says {chunk:?}");
            return broken(Invariant::Forwarded, what);
        }
        *last = sequence.max(*last);
        return Ok(());
    }
    let due = last.saturating_add(1);
    if sequence != due {
        let what = format!("{sequence} of {child} stands in {name} where {due} was due");
        return broken(Invariant::Forwarded, what);
    }
    *last = sequence;
    let known = others
        .get(child)
        .and_then(|ledger| ledger.durable_chunk(sequence));
    let bare = |chunk: &RawChunk| {
        let mut bare = chunk.0.clone();
        bare.shift_remove("remoteSource");
        bare.shift_remove("origin");
        bare
    };
    if known.map(bare) != Some(bare(chunk)) {
        let what = format!("{chunk:?} in {name} is not {known:?}");
        return broken(Invariant::Forwarded, what);
    }
    Ok(())
}

/// The law of the step, chunk by chunk.
pub(crate) fn law(name: &str, ledger: &mut Ledger, sequence: u64, chunk: &RawChunk) -> Held {
    let checkpoint = ledger.checkpoints.last();
    let is_here = |checkpoint: &&CheckpointRecord| checkpoint.stream_sequence == sequence;
    match chunk.kind() {
        "run_started" | "run_resumed" => {
            if let Some(checkpoint) = checkpoint.filter(is_here) {
                ledger.known.promoted = (checkpoint.state.clone(), checkpoint.patch_ordinal);
                ledger.known.working = ledger.known.promoted.clone();
            }
            Ok(())
        }
        "state_patch" => {
            let operations = chunk.0.get("patches").cloned().unwrap_or_default();
            let operations: Vec<PatchOperation> =
                serde_json::from_value(operations).unwrap_or_default();
            let state = patch::apply(&ledger.known.working.0, &operations)
                .map_err(|e| (Invariant::Law, format!("{name} at {sequence}: {e}")))?;
            let ordinal = chunk.0.get("patchOrdinal").and_then(Value::as_u64);
            let ordinal = ordinal.unwrap_or_default();
            if ordinal <= ledger.known.ordinal {
                let what = format!("{name} at {sequence}: ordinal {ordinal} again");
                return broken(Invariant::Law, what);
            }
            let base = chunk.0.get("patchBase").and_then(Value::as_u64);
            if base != Some(ledger.known.working.1) {
                let due = ledger.known.working.1;
                let what = format!("{name} at {sequence}: made on top of {base:?}, not of {due}");
                return broken(Invariant::Law, what);
            }
            ledger.known.ordinal = ordinal;
            ledger.known.working = (Rc::new(state), ordinal);
            Ok(())
        }
        "step_discarded" => {
            ledger.known.working = ledger.known.promoted.clone();
            Ok(())
        }
        "step_committed" => {
            let Some(checkpoint) = checkpoint.filter(is_here) else {
                let what = format!("{name} at {sequence}: a step without a checkpoint");
                return broken(Invariant::Law, what);
            };
            if checkpoint.state != ledger.known.working.0 {
                let what = format!(
                    "{name} at {sequence}: patches make {}, the checkpoint is {}",
                    ledger.known.working.0, checkpoint.state
                );
                return broken(Invariant::Law, what);
            }
            ledger.known.promoted = ledger.known.working.clone();
            Ok(())
        }
        _ => Ok(()),
    }
}
