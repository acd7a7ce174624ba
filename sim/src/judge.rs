//! Looks after every commit: reads what was committed, and holds it to what always holds.
//!
//! It has a ledger for each session, of all that was ever committed. Whatever others are told is
//! compared with it, in `told.rs`.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use remote_agents::native::DiskMoment;
use remote_agents::protocol::chunk::RawChunk;
use remote_agents::protocol::ids::{MAX_SAFE_INTEGER, SessionId, StreamId};
use remote_agents::protocol::message::SessionStatus;
use remote_agents::store::{
    Database as _, MessageRecord, PageLimit, SessionRecord, Store as _, SubStatus, Terminal,
    UsageRecord,
};

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
    pub(crate) shared: Rc<Shared>,
    pub(crate) ledgers: RefCell<BTreeMap<String, Ledger>>,
    /// Lives of sessions that are over for good.
    pub(crate) past: RefCell<BTreeMap<String, Vec<Ledger>>>,
    /// How often a life was over, or a deletion taken back.
    turns: Cell<u64>,
    /// Which session was begun for which call of which life.
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
            past: RefCell::default(),
            turns: Cell::default(),
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
        let moved = ledger.on_disk(moment);
        if !moved.buried.is_empty() {
            let mut past = self.past.borrow_mut();
            past.entry(name).or_default().extend(moved.buried);
        }
        if moment != DiskMoment::TakenBack {
            return;
        }
        if moved.is_risen {
            self.turn();
        }
        self.shared.gate.lost(moved.lost);
        let mut counted = self.counted.borrow_mut();
        for price in moved.uncounted {
            counted.remove(&price);
        }
        let objects = self.shared.objects(side);
        if let Some(database) = objects.and_then(|objects| objects.database(session)) {
            ledger.reads(database);
        }
    }

    fn look(&self, name: &str, ledger: &mut Ledger, others: &BTreeMap<String, Ledger>) -> Held {
        let unreadable = |error: remote_agents::Error| {
            let detail = error.detail.clone().unwrap_or_default();
            (Invariant::Panic, format!("{name}: {error} {detail}"))
        };
        let Some(record) = ledger.store.session().map_err(unreadable)? else {
            return self.gone(name, ledger);
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
        self.kept(name, ledger, &record)?;
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

    /// Nothing is committed of a session: it was deleted, or it never began.
    fn gone(&self, name: &str, ledger: &mut Ledger) -> Held {
        if ledger.known.record.is_none() {
            return Ok(());
        }
        if self.shared.workload.deleted.is_none() || name != ROOT {
            return broken(Invariant::Deletion, format!("{name} is gone"));
        }
        let tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'ra_%'";
        let left = ledger.database.query(tables, &[]);
        let left = left.map_err(|error| (Invariant::Panic, error.to_string()))?;
        if !left.is_empty() {
            let what = format!("{name} is gone, and leaves {left:?}");
            return broken(Invariant::Deletion, what);
        }
        ledger.bury();
        self.shared.gate.deleted();
        self.turn();
        Ok(())
    }

    /// What is kept of the log.
    fn kept(&self, name: &str, ledger: &Ledger, record: &SessionRecord) -> Held {
        let keeps = self.shared.workload.keeps;
        if keeps.keeps_all() && record.floor == 0 {
            return Ok(());
        }
        let one = PageLimit {
            chunks: 1,
            bytes: usize::MAX,
        };
        let oldest = ledger.store.chunks(0, MAX_SAFE_INTEGER, one);
        let oldest = oldest.map_err(|error| (Invariant::Panic, error.to_string()))?;
        let oldest = oldest.chunks.first().map(|(sequence, _)| *sequence);
        let what = format!(
            "{name} keeps {oldest:?} and on, its floor is {}, was {}, its newest {}",
            record.floor,
            ledger.floor(),
            record.last_sequence
        );
        if oldest != Some(record.floor.max(1)) || record.floor < ledger.floor() {
            return broken(Invariant::Kept, what);
        }
        let position = ledger.checkpoints.last().map(|last| last.stream_sequence);
        let is_needed = !record.status.is_terminal() && keeps.hard_max_bytes.is_none();
        if is_needed && position.is_none_or(|position| record.floor > position) {
            let what = format!("{what}, its snapshot is of {position:?}");
            return broken(Invariant::Kept, what);
        }
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
            if terminal.is_some()
                && *terminal != now
                && !is_aborted(terminal.as_ref(), now.as_ref())
            {
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
            let is_aborted = before.status == SessionStatus::Interrupted
                && record.status == SessionStatus::Failed;
            if rested
                && !is_aborted
                && record.status != before.status
                && record.run_id == before.run_id
            {
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
        let call = (parent.stream_id.to_string(), parent.tool_call_id.clone());
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

    fn turn(&self) {
        self.turns.set(self.turns.get().saturating_add(1));
    }

    /// Changes whenever a life is over, or its deletion is taken back.
    pub fn turns(&self) -> u64 {
        self.turns.get()
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

    /// What all sessions of the root's present life together have spent.
    pub fn spent(&self) -> u64 {
        let ledgers = self.ledgers.borrow();
        let of_life = |ledger: &Ledger, streams: &BTreeSet<&StreamId>| {
            let record = ledger.known.record.as_ref();
            let parent = record.and_then(|record| record.origin.parent.as_ref());
            parent.is_some_and(|parent| streams.contains(&parent.stream_id))
        };
        let mut streams: BTreeSet<&StreamId> = BTreeSet::new();
        streams.extend(ledgers.get(ROOT).and_then(Ledger::stream));
        loop {
            let living = ledgers.values().filter(|ledger| of_life(ledger, &streams));
            let found: Vec<_> = living.filter_map(Ledger::stream).collect();
            let before = streams.len();
            streams.extend(found);
            if streams.len() == before {
                break;
            }
        }
        let is_of_life = |ledger: &&Ledger| ledger.stream().is_some_and(|id| streams.contains(id));
        let living = ledgers.values().filter(is_of_life);
        living.map(|ledger| ledger.known.spent).sum()
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

/// Whether an end is that of a run that was interrupted, and aborted then: all else stays.
fn is_aborted(before: Option<&Terminal>, now: Option<&Terminal>) -> bool {
    let (Some(before), Some(now)) = (before, now) else {
        return false;
    };
    let as_before = Terminal {
        status: before.status,
        failure: before.failure.clone(),
        ..now.clone()
    };
    let code = now.failure.as_ref().map(|failure| failure.code.as_str());
    before.status == SessionStatus::Interrupted
        && now.status == SessionStatus::Failed
        && code == Some("run_aborted")
        && as_before == *before
}
