//! Observers of a history, as a model that is explored exhaustively.
//!
//! A state is a moment of the producers' history and what each observer holds: its place in a stream,
//! real documents, and snapshots on their way. Documents are kept in a table and stand in a state by
//! their number; two are the same if all that they hold is the same.

mod judging;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use stateright::{Model, Property};

use super::history::{Histories, Shown, matters, name, stream};
use crate::protocol::frame::{ErrorFrame, Frame};
use crate::protocol::ids::Position;
use crate::reconstruct::rules::Rule;
use crate::reconstruct::{Document, Reading, Stale, Status};

/// What one observer may do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// The session whose stream it reads.
    pub(super) root: usize,
    /// How often its connection breaks, and it reads on behind its baseline.
    pub(super) breaks: u8,
    /// How often a snapshot cannot be read.
    pub(super) failures: u8,
    /// Whether another session's snapshot may come once.
    pub(super) astray: bool,
}

impl Look {
    pub(super) fn at(root: usize) -> Self {
        Self {
            root,
            breaks: 0,
            failures: 0,
            astray: false,
        }
    }
}

/// What must never happen, as bits of [`Seen::wrong`].
pub(super) mod wrong {
    /// Exact or final, and no state that the session committed.
    pub(in super::super) const UNCOMMITTED: u16 = 1;
    /// Stale for a reason that there is not.
    pub(in super::super) const UNREASONED: u16 = 2;
    /// More snapshots than triggers and boundaries call for.
    pub(in super::super) const GREEDY: u16 = 4;
    /// Something calls for a snapshot, and none is wanted.
    pub(in super::super) const UNASKED: u16 = 8;
    /// Exact in a life of the session that is known to be over.
    pub(in super::super) const OUTLIVED: u16 = 16;
    /// Exact or in a step although a patch could not be placed.
    pub(in super::super) const MISPLACED: u16 = 32;
    /// A last state that is none.
    pub(in super::super) const UNENDED: u16 = 64;
    /// Exact at an earlier step although a later one's end was heard.
    pub(in super::super) const DEAF: u16 = 128;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Flight {
    None,
    /// Asked for, and not yet read at the producer.
    Asked,
    /// Read there, and on its way.
    Read(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Absent,
    Following,
    Over,
}

/// One document of an observer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Held {
    document: u32,
    flight: Flight,
    /// Snapshots asked for since the last trigger or boundary.
    asked: u8,
    /// The last reason for which it was stale.
    cause: u8,
}

/// One observer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Seen {
    phase: Phase,
    life: u8,
    cursor: u16,
    held: Vec<Held>,
    breaks: u8,
    failures: u8,
    failed: bool,
    astray: bool,
    pub(super) wrong: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub(super) moment: u32,
    pub(super) seen: Vec<Seen>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// What is next at this moment, by its number.
    Producer(usize),
    Observer(usize, Act),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Takes the first baseline and attaches: at it, or where the log begins.
    Attach {
        at_baseline: bool,
    },
    Deliver,
    /// The connection breaks; what lies above the baseline is read again.
    Break,
    ReadSnapshot(usize),
    Arrive(usize),
    Fail(usize),
    Astray(usize),
    /// The stream is not what it was: TRUNCATED.
    Truncated,
    End,
}

/// Documents by number.
#[derive(Default)]
struct Table {
    ids: HashMap<String, u32>,
    all: Vec<Arc<Document>>,
    after: HashMap<(u32, Told), u32>,
}

/// What a document can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Told {
    Chunk {
        root: usize,
        life: u8,
        sequence: u16,
        chunk: u32,
    },
    Baseline(u32),
    Request,
    NoSnapshot,
    Boundary,
}

pub(super) struct Watching {
    pub(super) histories: Arc<Histories>,
    pub(super) looks: Vec<Look>,
    pub(super) without: Option<Rule>,
    /// Whether an observer acts only while no other one is at work.
    pub(super) turns: bool,
    table: Mutex<Table>,
}

fn cause(status: &Status) -> u8 {
    match status {
        Status::Stale(Stale::Discarded) => 1,
        Status::Stale(Stale::Resync) => 2,
        Status::Stale(Stale::Truncated) => 3,
        Status::Stale(Stale::NewStream) => 4,
        Status::Stale(Stale::Gap) => 5,
        Status::Stale(Stale::Diverged) => 6,
        Status::Stale(Stale::NestedDescendant) => 7,
        Status::Stale(Stale::Reopened) => 8,
        _ => 0,
    }
}

impl Watching {
    pub(super) fn new(histories: &Arc<Histories>, looks: &[Look], without: Option<Rule>) -> Self {
        Self {
            histories: Arc::clone(histories),
            looks: looks.to_vec(),
            without,
            turns: false,
            table: Mutex::default(),
        }
    }

    fn shown(&self, moment: u32, session: usize) -> &Shown {
        &self.histories.moments[moment as usize].shown[session]
    }

    pub(super) fn document(&self, id: u32) -> Arc<Document> {
        Arc::clone(&self.table.lock().unwrap().all[id as usize])
    }

    fn number(&self, document: Document) -> u32 {
        let table = &mut *self.table.lock().unwrap();
        let next = u32::try_from(table.all.len()).unwrap();
        *table.ids.entry(format!("{document:?}")).or_insert_with(|| {
            table.all.push(Arc::new(document));
            next
        })
    }

    fn tell(&self, id: u32, told: Told) -> u32 {
        let document = {
            let table = self.table.lock().unwrap();
            if let Some(after) = table.after.get(&(id, told)) {
                return *after;
            }
            Arc::clone(&table.all[id as usize])
        };
        let mut document = (*document).clone();
        match told {
            Told::Chunk {
                root,
                life,
                sequence,
                chunk,
            } => {
                let stream = stream(root, life);
                let reading = Reading {
                    session: name(root),
                    stream: &stream,
                };
                let chunk = &self.histories.chunks[chunk as usize].0;
                document.observe(reading, u64::from(sequence), chunk);
            }
            Told::Baseline(snapshot) => {
                let (snapshot, ended) = &self.histories.snapshots[snapshot as usize];
                document.baseline(snapshot, *ended);
            }
            Told::Request => drop(document.take_request()),
            Told::NoSnapshot => document.no_snapshot(),
            Told::Boundary => drop(document.boundary()),
        }
        let after = self.number(document);
        self.table.lock().unwrap().after.insert((id, told), after);
        after
    }

    fn tell_end(&self, id: u32, frame: &Frame) -> u32 {
        let mut document = (*self.document(id)).clone();
        document.observe_end(frame);
        self.number(document)
    }

    fn add(&self, look: Look, seen: &mut Seen) {
        let session = look.root + seen.held.len();
        let document = match self.without {
            Some(rule) => Document::without(name(session), rule),
            None => Document::new(name(session)),
        };
        seen.held.push(Held {
            document: self.number(document),
            flight: Flight::None,
            asked: 0,
            cause: 0,
        });
    }

    /// Asks for the snapshots that are wanted, and judges what the documents say now.
    fn settle(&self, look: Look, moment: u32, before: &[Held], seen: &mut Seen) {
        for (at, held) in seen.held.iter_mut().enumerate() {
            // What was judged before is judged: what a session committed stays committed.
            if before.get(at) == Some(held) {
                continue;
            }
            if self.document(held.document).wants() {
                held.document = self.tell(held.document, Told::Request);
                held.flight = Flight::Asked;
                held.asked = held.asked.saturating_add(1);
            }
            if held.asked > 2 && !seen.failed {
                seen.wrong |= wrong::GREEDY;
            }
            let document = self.document(held.document);
            let now = cause(document.status());
            if now != 0 {
                held.cause = now;
            }
            seen.wrong |= self.judge(look.root + at, moment, &document, *held, seen.failed);
        }
    }

    fn attach(&self, look: Look, moment: u32, at_baseline: bool, seen: &mut Seen) {
        let shown = self.shown(moment, look.root);
        self.add(look, seen);
        let root = &mut seen.held[0];
        root.document = self.tell(root.document, Told::Request);
        root.document = self.tell(root.document, Told::Baseline(shown.snapshot));
        seen.phase = Phase::Following;
        seen.life = shown.life;
        let begins = shown.floor.saturating_sub(1);
        let cursor = match self.document(root.document).attach_at() {
            Position::At(at) if at_baseline => at,
            // As a reader without a cursor: where the log begins.
            _ => begins,
        };
        seen.cursor = u16::try_from(cursor).unwrap();
    }

    fn deliver(&self, look: Look, moment: u32, seen: &mut Seen) {
        let log = &self.shown(moment, look.root).log;
        while let Some(id) = log.get(usize::from(seen.cursor)) {
            seen.cursor += 1;
            let chunk = &self.histories.chunks[*id as usize].0;
            if chunk.kind() == "subagent_start" {
                let child = look.root + seen.held.len();
                if chunk.text("subSessionId") == Some(name(child.min(2))) && child < 3 {
                    self.add(look, seen);
                }
            }
            for at in 0..seen.held.len() {
                self.hear(look, *id, at, seen);
            }
            if matters(chunk) {
                break;
            }
        }
    }

    /// A document hears a chunk; and what must follow from it at once.
    fn hear(&self, look: Look, id: u32, at: usize, seen: &mut Seen) {
        let (chunk, truth) = &self.histories.chunks[id as usize];
        let session = look.root + at;
        let before = self.document(seen.held[at].document);
        let told = Told::Chunk {
            root: look.root,
            life: seen.life,
            sequence: seen.cursor,
            chunk: id,
        };
        let held = &mut seen.held[at];
        held.document = self.tell(held.document, told);
        let after = self.document(held.document);
        let ends =
            chunk.kind() == "subagent_end" && chunk.text("subSessionId") == Some(name(session));
        let own = truth.session == Some(session);
        let kind = chunk.kind();
        let is_present = before.stream_id() == Some(stream(session, truth.life).as_str());
        let is_news = own && (!is_present || truth.place > before.seen());
        let trigger = matches!(
            kind,
            "step_discarded" | "stream_resync" | "run_started" | "run_resumed"
        );
        let settled = matches!(after.status(), Status::Exact { .. } | Status::InStep);
        let ordered = self.histories.plan.stamped || at <= 1;
        // A trigger calls for one snapshot, however often it is read.
        let voids = matches!(kind, "step_discarded" | "stream_resync");
        let is_new_trigger = trigger && !(voids && is_present && truth.place <= before.voided());
        let calls = is_new_trigger || kind == "step_committed";
        if ends || (own && calls && (is_news || !ordered)) {
            held.asked = 0;
        }
        if ends && !matches!(after.status(), Status::Final) && !after.waits() {
            seen.wrong |= wrong::UNASKED;
        }
        let behind = matches!(after.status(), Status::Stale(_) | Status::Unpinned);
        if is_news && is_present && kind == "step_committed" && behind && !after.waits() {
            seen.wrong |= wrong::UNASKED;
        }
        if own && !is_present && before.stream_id().is_some() && ordered && settled {
            let speaks = matches!(kind, "run_started" | "state_patch" | "step_committed");
            let later = (0..truth.life)
                .any(|life| before.stream_id() == Some(stream(session, life).as_str()));
            if speaks && later {
                seen.wrong |= wrong::OUTLIVED;
            }
        }
        if is_news && is_present && kind == "run_resumed" && *after.status() == Status::Final {
            seen.wrong |= wrong::OUTLIVED;
        }
        let once = !self.histories.plan.resends && truth.life > 0;
        if own && is_present && once && kind == "step_committed" && !after.waits() {
            let told = chunk.0.get("stepCount").and_then(serde_json::Value::as_u64);
            if matches!(after.status(), Status::Exact { step } if Some(*step) < told) {
                seen.wrong |= wrong::DEAF;
            }
        }
        if own && kind == "state_patch" && !ordered && settled {
            seen.wrong |= wrong::MISPLACED;
        }
    }

    fn act(&self, look: Look, moment: u32, act: Act, seen: &mut Seen) {
        let before = seen.held.clone();
        match act {
            Act::Attach { at_baseline } => self.attach(look, moment, at_baseline, seen),
            Act::Deliver => self.deliver(look, moment, seen),
            Act::Break => {
                seen.breaks -= 1;
                if let Position::At(at) = self.document(seen.held[0].document).attach_at() {
                    seen.cursor = seen.cursor.min(u16::try_from(at).unwrap());
                }
            }
            Act::ReadSnapshot(at) => {
                seen.held[at].flight = Flight::Read(self.shown(moment, look.root + at).snapshot);
            }
            Act::Arrive(at) => {
                let held = &mut seen.held[at];
                if let Flight::Read(snapshot) = held.flight {
                    held.flight = Flight::None;
                    held.document = self.tell(held.document, Told::Baseline(snapshot));
                }
                // What came while the root's document was stale is read again.
                if at == 0
                    && seen.phase == Phase::Following
                    && let Position::At(at) = self.document(held.document).attach_at()
                {
                    seen.cursor = seen.cursor.min(u16::try_from(at).unwrap());
                }
            }
            Act::Fail(at) => {
                seen.failures -= 1;
                seen.failed = true;
                let held = &mut seen.held[at];
                held.flight = Flight::None;
                held.document = self.tell(held.document, Told::NoSnapshot);
            }
            Act::Astray(at) => {
                seen.astray = false;
                let other = self.shown(moment, look.root + 1 - at).snapshot;
                let held = &mut seen.held[at];
                held.document = self.tell(held.document, Told::Baseline(other));
            }
            Act::Truncated => {
                let shown = self.shown(moment, look.root);
                let truncated = Frame::Error(ErrorFrame {
                    run_id: None,
                    code: "TRUNCATED".into(),
                    error: "gone".into(),
                    detail: None,
                    recoverable: false,
                    floor: Some(shown.floor),
                    stream_id: Some(stream(look.root, shown.life)),
                });
                let root = &mut seen.held[0];
                root.document = self.tell_end(root.document, &truncated);
                root.asked = 0;
                root.cause = 3;
                let stale = self.document(root.document);
                if !matches!(stale.status(), Status::Stale(_)) {
                    seen.wrong |= wrong::OUTLIVED;
                }
                root.document = self.tell(root.document, Told::Request);
                root.document = self.tell(root.document, Told::Baseline(shown.snapshot));
                root.flight = Flight::None;
                seen.life = shown.life;
                seen.cursor = match self.document(root.document).attach_at() {
                    Position::At(at) => u16::try_from(at).unwrap(),
                    Position::None => u16::try_from(shown.floor.saturating_sub(1)).unwrap(),
                };
            }
            Act::End => {
                seen.phase = Phase::Over;
                if let Some(end) = &self.shown(moment, look.root).end {
                    seen.held[0].document = self.tell_end(seen.held[0].document, end);
                }
                let root = self.document(seen.held[0].document);
                if !matches!(root.status(), Status::Final) && !root.waits() {
                    seen.wrong |= wrong::UNASKED;
                }
                seen.held[0].asked = 0;
                for held in seen.held.iter_mut().skip(1) {
                    if !matches!(self.document(held.document).status(), Status::Final) {
                        held.document = self.tell(held.document, Told::Boundary);
                        held.asked = 0;
                    }
                }
            }
        }
        self.settle(look, moment, &before, seen);
    }

    fn acts(&self, look: Look, moment: u32, seen: &Seen, acts: &mut Vec<Act>) {
        let shown = self.shown(moment, look.root);
        match seen.phase {
            Phase::Absent => {
                acts.push(Act::Attach { at_baseline: true });
                if !shown.snapshot_is_at_start() {
                    acts.push(Act::Attach { at_baseline: false });
                }
                return;
            }
            Phase::Following => {
                let is_lost = seen.life != shown.life || u64::from(seen.cursor) + 1 < shown.floor;
                if is_lost {
                    acts.push(Act::Truncated);
                } else if usize::from(seen.cursor) < shown.log.len() {
                    acts.push(Act::Deliver);
                } else if shown.end.is_some() {
                    acts.push(Act::End);
                }
                let at = self.document(seen.held[0].document).attach_at().sequence();
                let goes_back = at.is_some_and(|at| at < u64::from(seen.cursor));
                if seen.breaks > 0 && goes_back && !is_lost {
                    acts.push(Act::Break);
                }
            }
            Phase::Over => {}
        }
        for (at, held) in seen.held.iter().enumerate() {
            match held.flight {
                Flight::None => {}
                Flight::Asked => {
                    acts.push(Act::ReadSnapshot(at));
                    if seen.failures > 0 {
                        acts.push(Act::Fail(at));
                    }
                }
                Flight::Read(_) => acts.push(Act::Arrive(at)),
            }
        }
        if seen.astray && seen.held.len() > 1 {
            acts.push(Act::Astray(0));
            acts.push(Act::Astray(1));
        }
    }
}

impl Seen {
    fn is_at_work(&self) -> bool {
        match self.phase {
            Phase::Absent => false,
            Phase::Following => true,
            Phase::Over => self.held.iter().any(|held| held.flight != Flight::None),
        }
    }
}

impl Shown {
    fn snapshot_is_at_start(&self) -> bool {
        self.log.len() < 2
    }

    fn snapshot_is_last(&self, histories: &Histories) -> bool {
        histories.snapshots[self.snapshot as usize].1
    }
}

fn free(state: &State, bit: u16) -> bool {
    state.seen.iter().all(|seen| seen.wrong & bit == 0)
}

impl Model for Watching {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let seen = self.looks.iter().map(|look| Seen {
            phase: Phase::Absent,
            life: 0,
            cursor: 0,
            held: Vec::new(),
            breaks: look.breaks,
            failures: look.failures,
            failed: false,
            astray: look.astray,
            wrong: 0,
        });
        vec![State {
            moment: 0,
            seen: seen.collect(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.seen.iter().any(|seen| seen.wrong != 0) {
            return;
        }
        let next = self.histories.moments[state.moment as usize].next.len();
        actions.extend((0..next).map(Action::Producer));
        let mut acts = Vec::new();
        for (n, (look, seen)) in self.looks.iter().zip(&state.seen).enumerate() {
            // They share nothing, so what two do at once is what they do one after the other; where
            // they take turns the states are their sum and not their product.
            let others = state.seen.iter().enumerate().filter(|(at, _)| *at != n);
            if self.turns && others.into_iter().any(|(_, other)| other.is_at_work()) {
                continue;
            }
            self.acts(*look, state.moment, seen, &mut acts);
            actions.extend(acts.drain(..).map(|act| Action::Observer(n, act)));
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Producer(way) => {
                next.moment = self.histories.moments[state.moment as usize].next[way].1;
            }
            Action::Observer(n, act) => {
                self.act(self.looks[n], state.moment, act, &mut next.seen[n]);
            }
        }
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(
                "an exact or final document equals a committed boundary of the producer",
                |_, state| free(state, wrong::UNCOMMITTED),
            ),
            Property::always("a final document is a last state", |_, state| {
                free(state, wrong::UNENDED)
            }),
            Property::always("a stale document has a reason", |_, state| {
                free(state, wrong::UNREASONED)
            }),
            Property::always("no more snapshots are asked for than help", |_, state| {
                free(state, wrong::GREEDY)
            }),
            Property::always("what calls for a snapshot asks for one", |_, state| {
                free(state, wrong::UNASKED)
            }),
            Property::always("no document outlives its stream", |_, state| {
                free(state, wrong::OUTLIVED)
            }),
            Property::always("no document is deaf to a step's end", |_, state| {
                free(state, wrong::DEAF)
            }),
            Property::always("a patch without a place is no document's", |_, state| {
                free(state, wrong::MISPLACED)
            }),
            Property::always(
                "at rest every document is the last state",
                |model: &Self, state| model.rests_well(state),
            ),
        ];
        for (reason, name, holds) in Self::MENDED {
            if self.expects(reason) {
                properties.push(Property::sometimes(name, holds));
            }
        }
        if self.histories.plan.scripts.len() > 2 && self.histories.plan.stamped {
            properties.push(Property::sometimes(
                "a grandchild's patch is applied",
                |model: &Self, state| model.patched_deep(state),
            ));
        }
        properties
    }
}
