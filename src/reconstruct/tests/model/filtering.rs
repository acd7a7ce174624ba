//! The filter under a reader that takes snapshots whenever it likes, as a model.
//!
//! What the filter says of each patch is held against what the patch is in truth.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use stateright::{Model, Property};

use super::history::{Histories, matters, name, stream};
use crate::protocol::ids::Position;
use crate::reconstruct::rules::Rule;
use crate::reconstruct::{PatchFilter, Reading, Unalignable, Verdict};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    moment: u32,
    attached: bool,
    life: u8,
    cursor: u16,
    filter: u32,
    /// The baseline of each session.
    based: Vec<Option<u32>>,
    /// The highest place of each session that was applied in the life of its baseline.
    applied: Vec<u64>,
    /// Whether each was told to be nested, and to have no position.
    told: Vec<(bool, bool)>,
    snapshots: u8,
    rereads: u8,
    wrong: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Producer(usize),
    Attach,
    Deliver,
    Snapshot(usize),
    Reread,
}

#[derive(Default)]
struct Table {
    ids: HashMap<String, u32>,
    all: Vec<Arc<PatchFilter>>,
}

pub(super) struct Filtering {
    pub(super) histories: Arc<Histories>,
    pub(super) root: usize,
    table: Mutex<Table>,
}

impl Filtering {
    pub(super) fn new(histories: &Arc<Histories>, root: usize, without: Option<Rule>) -> Self {
        let model = Self {
            histories: Arc::clone(histories),
            root,
            table: Mutex::default(),
        };
        model.number(without.map_or_else(PatchFilter::new, PatchFilter::without));
        model
    }

    fn number(&self, filter: PatchFilter) -> u32 {
        let table = &mut *self.table.lock().unwrap();
        let next = u32::try_from(table.all.len()).unwrap();
        *table.ids.entry(format!("{filter:?}")).or_insert_with(|| {
            table.all.push(Arc::new(filter));
            next
        })
    }

    fn filter(&self, id: u32) -> PatchFilter {
        (*self.table.lock().unwrap().all[id as usize]).clone()
    }

    fn baseline(&self, state: &mut State, session: usize) {
        let shown = &self.histories.moments[state.moment as usize].shown[session];
        let snapshot = &self.histories.snapshots[shown.snapshot as usize].0;
        let before = state.based[session].replace(shown.snapshot);
        let stream = before.map(|id| &self.histories.snapshots[id as usize].0.stream_id);
        if stream != Some(&snapshot.stream_id) {
            state.applied[session] = 0;
        }
        state.told[session].1 = false;
        let mut filter = self.filter(state.filter);
        filter.baseline(snapshot);
        state.filter = self.number(filter);
    }

    fn attach(&self, state: &mut State) {
        let shown = &self.histories.moments[state.moment as usize].shown[self.root];
        self.baseline(state, self.root);
        let snapshot = &self.histories.snapshots[shown.snapshot as usize].0;
        state.attached = true;
        state.life = shown.life;
        let at = match snapshot.stream_sequence {
            Position::At(at) => at,
            Position::None => shown.floor.saturating_sub(1),
        };
        state.cursor = u16::try_from(at).unwrap();
    }

    fn deliver(&self, state: &mut State) {
        let log = &self.histories.moments[state.moment as usize].shown[self.root].log;
        while let Some(id) = log.get(usize::from(state.cursor)) {
            state.cursor += 1;
            self.judge(state, *id);
            if matters(&self.histories.chunks[*id as usize].0) {
                break;
            }
        }
    }

    fn judge(&self, state: &mut State, id: u32) {
        let (chunk, truth) = &self.histories.chunks[id as usize];
        let stream_id = stream(self.root, state.life);
        let reading = Reading {
            session: name(self.root),
            stream: &stream_id,
        };
        let mut filter = self.filter(state.filter);
        let verdict = filter.judge(reading, u64::from(state.cursor), chunk);
        state.filter = self.number(filter);
        if chunk.kind() != "state_patch" {
            state.wrong |= verdict != Verdict::Pass;
            return;
        }
        let Some(session) = truth.session else {
            state.wrong |= verdict == Verdict::Apply;
            return;
        };
        let based = state.based[session].map(|id| &self.histories.snapshots[id as usize].0);
        let is_placed = self.histories.plan.stamped || session <= self.root + 1;
        let expected = match based {
            None => Verdict::Pass,
            Some(_) if !is_placed => Verdict::Suppress {
                why: Unalignable::NestedDescendant,
                first: !std::mem::replace(&mut state.told[session].0, true),
            },
            Some(baseline) => match baseline.stream_sequence {
                Position::At(at) if baseline.stream_id == stream(session, truth.life) => {
                    let again = session > self.root && truth.place <= state.applied[session];
                    if truth.place <= at || again {
                        Verdict::Known
                    } else {
                        state.applied[session] = truth.place;
                        Verdict::Apply
                    }
                }
                _ => Verdict::Suppress {
                    why: Unalignable::UnpinnedBaseline,
                    first: !std::mem::replace(&mut state.told[session].1, true),
                },
            },
        };
        state.wrong |= verdict != expected;
    }
}

impl Model for Filtering {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let many = self.histories.plan.scripts.len();
        vec![State {
            moment: 0,
            attached: false,
            life: 0,
            cursor: 0,
            filter: 0,
            based: vec![None; many],
            applied: vec![0; many],
            told: vec![(false, false); many],
            snapshots: 2,
            rereads: 1,
            wrong: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.wrong {
            return;
        }
        let moment = &self.histories.moments[state.moment as usize];
        actions.extend((0..moment.next.len()).map(Action::Producer));
        let shown = &moment.shown[self.root];
        if !state.attached {
            actions.push(Action::Attach);
            return;
        }
        let is_lost = state.life != shown.life || u64::from(state.cursor) + 1 < shown.floor;
        if is_lost {
            actions.push(Action::Attach);
        } else if usize::from(state.cursor) < shown.log.len() {
            actions.push(Action::Deliver);
        }
        if state.snapshots > 0 {
            actions.extend((self.root + 1..moment.shown.len()).map(Action::Snapshot));
        }
        // Of its own stream a reader reads nothing twice: the filter cannot see that.
        if state.rereads > 0 && self.histories.plan.scripts.len() > 1 {
            actions.push(Action::Reread);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Producer(way) => {
                next.moment = self.histories.moments[state.moment as usize].next[way].1;
            }
            Action::Attach => self.attach(&mut next),
            Action::Deliver => self.deliver(&mut next),
            Action::Snapshot(session) => {
                next.snapshots -= 1;
                self.baseline(&mut next, session);
            }
            Action::Reread => {
                next.rereads -= 1;
                let shown = &self.histories.moments[state.moment as usize].shown[self.root];
                let begins = u16::try_from(shown.floor.saturating_sub(1)).unwrap();
                next.cursor = next.cursor.min(begins.max(1));
            }
        }
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always(
            "the filter says of each patch what it is",
            |_, state: &State| !state.wrong,
        )]
    }
}
