//! Looks after every commit: reads what was committed, and holds it to what always holds.
//!
//! It has a ledger for each session, of all that was ever committed. Whatever a reader is told is
//! compared with it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use remote_agents::native::DiskMoment;
use remote_agents::protocol::chunk::RawChunk;
use remote_agents::protocol::ids::{MAX_SAFE_INTEGER, Position, SessionId};
use remote_agents::protocol::message::SessionStatus;
use remote_agents::reconstruct::{Document, Status};
use remote_agents::store::{
    Database, MessageRecord, PageLimit, SessionRecord, SqlStore, Store as _, SubStatus, UsageRecord,
};
use serde_json::Value;

use crate::gate::Invariant;
use crate::ledger::{Held, Ledger, broken, ends_are_together, forwarded, law};
use crate::paired;
use crate::plan::Side;
use crate::world::{ROOT, Shared};

const EVERYTHING: PageLimit = PageLimit {
    chunks: usize::MAX,
    bytes: usize::MAX,
};

/// Who looks.
pub struct Judge {
    shared: Rc<Shared>,
    ledgers: RefCell<BTreeMap<String, Ledger>>,
    /// Which session was begun for which call.
    calls: RefCell<BTreeMap<(String, String), String>>,
    /// Which session each answer of a model was counted in, by what it cost.
    counted: RefCell<BTreeMap<u64, String>>,
}

impl Judge {
    /// Nothing was committed yet.
    #[must_use]
    pub fn new(shared: Rc<Shared>) -> Rc<Self> {
        Rc::new(Self {
            shared,
            ledgers: RefCell::default(),
            calls: RefCell::default(),
            counted: RefCell::default(),
        })
    }

    fn tell(&self, held: Held) {
        if let Err((invariant, what)) = held {
            self.shared.gate.broken(invariant, what);
        }
    }

    /// An object has committed.
    pub fn committed(&self, side: Side, session: &SessionId) {
        if self.shared.gate.is_broken() {
            return;
        }
        let objects = self.shared.objects(side);
        let Some(database) = objects.and_then(|objects| objects.database(session)) else {
            return;
        };
        let mut ledgers = self.ledgers.borrow_mut();
        let name = session.to_string();
        let mut ledger = ledgers
            .remove(&name)
            .unwrap_or_else(|| Ledger::new(side, database));
        let held = self.look(&name, &mut ledger, &ledgers);
        ledgers.insert(name, ledger);
        drop(ledgers);
        self.tell(held);
    }

    /// A moment of an object's disk.
    pub fn on_disk(&self, side: Side, session: &SessionId, moment: DiskMoment) {
        let name = session.to_string();
        let mut ledgers = self.ledgers.borrow_mut();
        let Some(ledger) = ledgers.get_mut(&name) else {
            return;
        };
        let (uncounted, lost) = ledger.on_disk(moment);
        if moment != DiskMoment::TakenBack {
            return;
        }
        self.shared.gate.lost(lost);
        let mut counted = self.counted.borrow_mut();
        for price in uncounted {
            counted.remove(&price);
        }
        let objects = self.shared.objects(side);
        if let Some(database) = objects.and_then(|objects| objects.database(session)) {
            ledger.store = SqlStore::new(database as Rc<dyn Database>);
        }
    }

    fn look(&self, name: &str, ledger: &mut Ledger, others: &BTreeMap<String, Ledger>) -> Held {
        let unreadable = |error: remote_agents::Error| {
            let detail = error.detail.clone().unwrap_or_default();
            (Invariant::Panic, format!("{name}: {error} {detail}"))
        };
        let Some(record) = ledger.store.session().map_err(unreadable)? else {
            return Ok(());
        };
        self.row(name, ledger, &record)?;
        let known = u64::try_from(ledger.chunks.len()).unwrap_or(u64::MAX);
        if record.last_sequence < known {
            return broken(
                Invariant::Sequence,
                format!("{name} goes back from {known} to {}", record.last_sequence),
            );
        }
        let checkpoint = ledger.store.checkpoint().map_err(unreadable)?;
        if let Some(checkpoint) = checkpoint {
            let last = ledger.checkpoints.last();
            if last.is_none_or(|last| last.checkpoint_id != checkpoint.checkpoint_id) {
                ledger.checkpoints.push(checkpoint);
            }
        }
        let page = ledger
            .store
            .chunks(known, MAX_SAFE_INTEGER, EVERYTHING)
            .map_err(unreadable)?;
        if record.last_sequence > known || !page.chunks.is_empty() {
            let mut next = known;
            for (sequence, json) in page.chunks {
                next = next.saturating_add(1);
                if sequence != next {
                    let what = format!("{name}: {sequence} stands where {next} was due");
                    return broken(Invariant::Sequence, what);
                }
                let chunk: RawChunk = serde_json::from_str(&json)
                    .map_err(|e| (Invariant::Panic, format!("{name} {sequence}: {e}")))?;
                self.chunk(name, ledger, sequence, &chunk, others)?;
                ledger.chunks.push(chunk);
            }
            if next != record.last_sequence {
                let what = format!("{name} ends at {next}, not {}", record.last_sequence);
                return broken(Invariant::Sequence, what);
            }
            ends_are_together(name, &ledger.chunks, known)?;
        }
        let run_id = record.run_id.to_string();
        let run = ledger.store.run(&run_id).map_err(unreadable)?;
        ledger
            .known
            .terminals
            .insert(run_id, run.and_then(|run| run.terminal));
        let rests = record.status != SessionStatus::Running;
        if rests && ledger.status() != Some(record.status) {
            ledger.known.rested_at = Some(self.shared.gate.now());
        }
        if rests {
            let last = ledger.checkpoints.last();
            ledger.finals.extend(last.map(|last| last.state.clone()));
            self.at_rest(name, ledger)?;
        }
        ledger.known.record = Some(record);
        Ok(())
    }

    /// What holds of the session row, and of the runs before.
    fn row(&self, name: &str, ledger: &Ledger, record: &SessionRecord) -> Held {
        for (run_id, terminal) in &ledger.known.terminals {
            let run = ledger
                .store
                .run(run_id)
                .map_err(|error| (Invariant::Panic, error.to_string()))?;
            let now = run.and_then(|run| run.terminal);
            if terminal.is_some() && *terminal != now {
                let what = format!("the end of {run_id} in {name} was {terminal:?}, is {now:?}");
                return broken(Invariant::Terminal, what);
            }
        }
        if let Some(before) = &ledger.known.record {
            if record.epoch < before.epoch {
                let what = format!("{name}: epoch {} after {}", record.epoch, before.epoch);
                return broken(Invariant::Terminal, what);
            }
            let rested = before.status != SessionStatus::Running;
            if rested && record.status != before.status && record.run_id == before.run_id {
                let what = format!(
                    "{name}: {} is {:?} after it was {:?}",
                    record.run_id, record.status, before.status
                );
                return broken(Invariant::Terminal, what);
            }
            if record.stream_id != before.stream_id {
                return broken(Invariant::Sequence, format!("{name} has another stream"));
            }
        } else {
            self.first(name, record)?;
        }
        self.stops(name, record)
    }

    /// A session begins: it is the only one of its call.
    fn first(&self, name: &str, record: &SessionRecord) -> Held {
        let Some(parent) = &record.origin.parent else {
            if name == ROOT {
                return Ok(());
            }
            return broken(Invariant::StartedOnce, format!("{name} has no parent"));
        };
        let call = (parent.session_id.to_string(), parent.tool_call_id.clone());
        let mut calls = self.calls.borrow_mut();
        let child = calls.entry(call).or_insert_with(|| name.to_owned());
        if child == name {
            return Ok(());
        }
        broken(
            Invariant::StartedOnce,
            format!("{child} and {name} were begun for one call"),
        )
    }

    /// Nobody is stopped but by whoever may.
    fn stops(&self, name: &str, record: &SessionRecord) -> Held {
        let stops = record.stop.is_some() || record.status == SessionStatus::Interrupted;
        if !stops {
            return Ok(());
        }
        let may = match &record.origin.parent {
            None => self.shared.stop_asked.get(),
            // Its parent alone, whose call is over or fails.
            Some(_) => self.shared.told_to_stop.borrow().contains(name),
        };
        if may {
            return Ok(());
        }
        broken(
            Invariant::Disconnect,
            format!("{name} stops and nobody has asked for it"),
        )
    }

    fn chunk(
        &self,
        name: &str,
        ledger: &mut Ledger,
        sequence: u64,
        chunk: &RawChunk,
        others: &BTreeMap<String, Ledger>,
    ) -> Held {
        if let Some(source) = chunk.remote_source() {
            let child = source.child_session_id.to_string();
            let last = ledger.known.forwarded.entry(child.clone()).or_default();
            return forwarded(name, chunk, (&child, source.child_sequence), last, others);
        }
        if chunk.agent_id() != Some(name) {
            return Ok(());
        }
        let call = chunk.text("toolCallId").unwrap_or_default().to_owned();
        let twice = |what: &str| {
            broken(
                Invariant::SettledOnce,
                format!("{call} in {name} {what} twice, at {sequence}"),
            )
        };
        match chunk.kind() {
            "run_started" if sequence > 2 => {
                broken(Invariant::StartedOnce, format!("{name} starts again"))
            }
            "tool_end" if !ledger.known.results.insert(call.clone()) => twice("ends"),
            "subagent_start" if !ledger.known.begun.insert(call.clone()) => twice("begins"),
            "subagent_end" if !ledger.known.ended.insert(call.clone()) => {
                twice("has a child that ends")
            }
            "subagent_end" if !ledger.known.begun.contains(&call) => broken(
                Invariant::SettledOnce,
                format!("{call} in {name} ends and never began"),
            ),
            _ => law(name, ledger, sequence, chunk),
        }
    }

    /// What holds of a session that has come to rest.
    fn at_rest(&self, name: &str, ledger: &mut Ledger) -> Held {
        let unreadable =
            |error: remote_agents::Error| (Invariant::Panic, format!("{name}: {error}"));
        let entries = ledger.store.usage().map_err(unreadable)?;
        let mut counted = self.counted.borrow_mut();
        for entry in entries.iter().skip(ledger.known.usage) {
            // What an answer that was cut has cost is not known.
            if let UsageRecord::Model { tokens, .. } = entry
                && tokens.total > 0
            {
                ledger.known.spent = ledger.known.spent.saturating_add(tokens.total);
                ledger.prices.push(tokens.prompt);
                if let Some(other) = counted.insert(tokens.prompt, name.to_owned()) {
                    return broken(
                        Invariant::CountedOnce,
                        format!("an answer counts in {other} and in {name}"),
                    );
                }
            }
        }
        ledger.known.usage = entries.len();
        let messages = ledger.store.messages().map_err(unreadable)?;
        let open = ledger.store.step().map_err(unreadable)?;
        paired::judge(&messages)
            .or_else(|what| if open.is_some() { Ok(()) } else { Err(what) })
            .map_err(|what| (Invariant::Paired, format!("in {name} {what}")))
    }

    /// Looks at a chunk that a reader of a session was told.
    pub fn was_told(&self, session: &str, cursor: u64, sequence: u64, chunk: &RawChunk) {
        let due = cursor.saturating_add(1);
        if sequence != due {
            let what = format!("a reader of {session} at {cursor} is told {sequence}");
            self.shared.gate.broken(Invariant::Cursor, what);
            return;
        }
        let ledgers = self.ledgers.borrow();
        let known = ledgers
            .get(session)
            .and_then(|ledger| ledger.durable_chunk(sequence));
        if known != Some(chunk) {
            let what = format!("a reader of {session} is told {chunk:?}, not {known:?}");
            drop(ledgers);
            self.shared.gate.broken(Invariant::Sequence, what);
        }
    }

    /// Looks at a document that somebody follows.
    pub fn looks_exact(&self, document: &Document) {
        let ledgers = self.ledgers.borrow();
        let Some(ledger) = ledgers.get(document.session()) else {
            return;
        };
        let state = document.state();
        let is_true = match document.status() {
            Status::Exact { step } => ledger
                .durable_checkpoints()
                .iter()
                .any(|checkpoint| checkpoint.step_count == *step && *checkpoint.state == *state),
            Status::Final => ledger.durable_finals().iter().any(|last| **last == *state),
            _ => true,
        };
        if !is_true {
            let what = format!(
                "{} is {:?} with {state}",
                document.session(),
                document.status()
            );
            drop(ledgers);
            self.shared.gate.broken(Invariant::Exact, what);
        }
    }

    /// Looks at a state that somebody was given with a position, of a snapshot or a tree.
    pub fn was_shown(&self, session: &SessionId, position: Position, state: &Value) {
        let ledgers = self.ledgers.borrow();
        let Some(ledger) = ledgers.get(session.as_str()) else {
            return;
        };
        let is_true = match position {
            Position::At(sequence) => ledger.durable_checkpoints().iter().any(|checkpoint| {
                checkpoint.stream_sequence == sequence && *checkpoint.state == *state
            }),
            Position::None => ledger.durable_finals().iter().any(|last| **last == *state),
        };
        if !is_true {
            let what = format!("{session} is shown at {position:?} with {state}");
            drop(ledgers);
            self.shared.gate.broken(Invariant::Promoted, what);
        }
    }

    /// The sessions that are known, with their types.
    pub fn sessions(&self) -> Vec<(String, String)> {
        let ledgers = self.ledgers.borrow();
        let typed = ledgers.iter().filter_map(|(name, ledger)| {
            let record = ledger.known.record.as_ref()?;
            Some((name.clone(), record.agent_type.to_string()))
        });
        typed.collect()
    }

    /// Sessions that run.
    pub fn running(&self) -> Vec<String> {
        let ledgers = self.ledgers.borrow();
        let runs = |ledger: &&Ledger| ledger.status() == Some(SessionStatus::Running);
        let running = ledgers.iter().filter(|(_, ledger)| runs(ledger));
        running.map(|(name, _)| name.clone()).collect()
    }

    /// Whether a session has begun and does not run.
    pub fn rests(&self, session: &str) -> bool {
        self.of(session, |ledger| {
            ledger.status() != Some(SessionStatus::Running)
        }) == Some(true)
    }

    /// Reads a ledger.
    pub fn of<T>(&self, session: &str, read: impl FnOnce(&Ledger) -> T) -> Option<T> {
        self.ledgers.borrow().get(session).map(read)
    }

    /// What all sessions together have spent.
    pub fn spent(&self) -> u64 {
        let ledgers = self.ledgers.borrow();
        ledgers.values().map(|ledger| ledger.known.spent).sum()
    }

    /// What holds when everything has come to rest.
    pub fn at_the_end(&self) {
        let ledgers = self.ledgers.borrow();
        let held = ledgers
            .iter()
            .try_for_each(|(name, ledger)| self.ended(name, ledger));
        drop(ledgers);
        self.tell(held);
    }

    fn ended(&self, name: &str, ledger: &Ledger) -> Held {
        let unreadable =
            |error: remote_agents::Error| (Invariant::Panic, format!("{name}: {error}"));
        let refs = ledger.store.sub_sessions().map_err(unreadable)?;
        for child in refs {
            let reported = || {
                ledger.chunks.iter().any(|chunk| {
                    chunk.text("eventName") == Some("sub_agent_stop_undelivered")
                        && chunk.agent_id() == Some(name)
                })
            };
            match child.status {
                SubStatus::Completed | SubStatus::Failed => {}
                SubStatus::Stopping if reported() => {}
                other => {
                    let id = child.sub_session_id;
                    let what = format!("{id} is {other:?} in {name}, which is at rest");
                    return broken(Invariant::SettledOnce, what);
                }
            }
        }
        if ledger.known.begun != ledger.known.ended {
            let what = format!(
                "{name}: began {:?}, ended {:?}",
                ledger.known.begun, ledger.known.ended
            );
            return broken(Invariant::SettledOnce, what);
        }
        for message in ledger.store.messages().map_err(unreadable)? {
            if let MessageRecord::Assistant { tool_calls, .. } = message
                && let Some(call) = tool_calls
                    .iter()
                    .find(|call| !ledger.known.results.contains(&call.id))
            {
                let what = format!("{} in {name} has no result", call.id);
                return broken(Invariant::SettledOnce, what);
            }
        }
        Ok(())
    }
}
