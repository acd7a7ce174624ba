//! What can happen on the producers' side, as a graph of moments.
//!
//! The sessions are real ones and so are the stamps of the forwarder between them. Each way through
//! the graph is one history; a moment holds all that an observer could read at it.

mod actor;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};

use actor::{Actor, done};

use crate::dispatch::Forwarder;
use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::Frame;
use crate::protocol::ids::{AgentType, SessionId, StreamId};
use crate::protocol::message::SnapshotResponse;
use crate::session::ChildSettled;
use crate::store::{SubLocation, SubRemote, SubSessionRecord, SubStatus};

/// One write of a tool.
#[derive(Clone, Copy, Debug)]
pub(super) enum Do {
    Set(&'static str, u64),
    Push(u64),
}

/// A step's parallel tools and what each writes; `child` is the call of the session below.
pub(super) type Step = &'static [(&'static str, &'static [Do])];

/// Something that a session's log may hold once beside what our own sessions say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Odd {
    /// A patch of a custom streamer under the session's id.
    Streamer,
    /// The last patch again, under a new number.
    Twice,
    /// A patch with an operation that does not apply; the producer took it for good.
    Broken,
    /// A patch is lost, and a resync stands in its place.
    Lost,
    /// A patch in the parent's name, with an origin that claims the parent's stream.
    Forged,
    /// A patch in the child's name that no child said.
    Impostor,
    /// The same without an ordinal: a custom streamer that took the child's id.
    Visitor,
}

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    /// Completed, with the state in the frame or without.
    Completed {
        with_state: bool,
    },
    Interrupted,
    Failed,
}

/// What one session may do.
#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) steps: &'static [Step],
    /// The steps that end a run which is resumed.
    pub(super) pauses: &'static [usize],
    pub(super) ends: Ends,
    /// How often a step is discarded.
    pub(super) discards: u8,
    /// How often the session is deleted and begun anew under its id.
    pub(super) resets: u8,
    /// How often its log is cut at its end.
    pub(super) cuts: u8,
    pub(super) odd: &'static [Odd],
}

impl Script {
    pub(super) fn new(steps: &'static [Step]) -> Self {
        Self {
            steps,
            pauses: &[],
            ends: Ends::Completed { with_state: true },
            discards: 0,
            resets: 0,
            cuts: 0,
            odd: &[],
        }
    }
}

/// A tree of sessions, each the child of the one before.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) scripts: Vec<Script>,
    /// Whether patches are numbered.
    pub(super) numbered: bool,
    /// Whether forwarders stamp `origin`.
    pub(super) stamped: bool,
    /// How often each forwarder is restarted.
    pub(super) restarts: u8,
    /// Whether a restarted forwarder sends its last chunk again, as one does whose cursor and chunks
    /// are not one commit.
    pub(super) resends: bool,
    /// How many chunks that matter a forwarder may be behind. An observer may be behind by any
    /// number; what a forwarder's being behind adds is that chunks are lost to a cut or a reset.
    pub(super) lag: usize,
}

/// Which chunk it is in truth, whatever its stamps say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Truth {
    /// The session that said it; none if nobody did who may.
    pub(super) session: Option<usize>,
    pub(super) life: u8,
    /// Its place in that session's stream.
    pub(super) place: u64,
}

/// A snapshot as it was read, and whether the session had ended.
pub(super) type Read = (SnapshotResponse, bool);

/// What a session shows at a moment.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    pub(super) life: u8,
    pub(super) log: Arc<[u32]>,
    pub(super) floor: u64,
    pub(super) snapshot: u32,
    /// The frame that its stream ends with, once the log is read.
    pub(super) end: Option<Arc<Frame>>,
    /// Every state that it committed: life, step, state.
    pub(super) committed: Arc<[(u8, u64, Value)]>,
    /// Its last states.
    pub(super) finals: Arc<[Value]>,
}

/// A moment and what may come next.
#[derive(Clone, Debug)]
pub(super) struct Moment {
    pub(super) shown: Vec<Shown>,
    pub(super) next: Vec<(String, u32)>,
    /// The reasons for staleness that there have been.
    pub(super) reasons: BTreeSet<&'static str>,
}

/// All histories of a plan.
pub(super) struct Histories {
    pub(super) plan: Plan,
    pub(super) moments: Vec<Moment>,
    pub(super) chunks: Vec<(RawChunk, Truth)>,
    pub(super) snapshots: Vec<Read>,
}

pub(super) fn name(session: usize) -> &'static str {
    ["p", "c", "g"][session]
}

pub(super) fn stream(session: usize, life: u8) -> String {
    format!("st_{}{life}", name(session))
}

/// Whether a chunk is any business of a document's.
pub(super) fn matters(chunk: &RawChunk) -> bool {
    !matches!(
        chunk.kind(),
        "tool_start" | "tool_end" | "output" | "custom" | "run_interrupted"
    )
}

#[derive(Clone)]
struct Link {
    record: SubSessionRecord,
    forwarder: Forwarder,
    life: u8,
    cursor: u64,
    restarts: u8,
    settled: bool,
}

#[derive(Clone)]
struct World {
    actors: Vec<Actor>,
    links: Vec<Link>,
}

/// The tables that chunks and snapshots are kept in while the graph is made.
struct Tables {
    plan: Plan,
    chunks: Vec<(RawChunk, Truth)>,
    chunk_ids: HashMap<(String, Truth), u32>,
    snapshots: Vec<Read>,
    snapshot_ids: HashMap<String, u32>,
}

impl Histories {
    /// Every history of the plan.
    pub(super) fn of(plan: Plan) -> Self {
        let mut tables = Tables {
            plan,
            chunks: Vec::new(),
            chunk_ids: HashMap::new(),
            snapshots: Vec::new(),
            snapshot_ids: HashMap::new(),
        };
        let first = World::begin(&mut tables);
        let mut moments = vec![first.moment(&mut tables)];
        let mut known = HashMap::from([(first.key(), 0)]);
        let mut open = VecDeque::from([(0_u32, first)]);
        while let Some((id, world)) = open.pop_front() {
            let mut next = Vec::new();
            for (label, after) in world.successors(&mut tables) {
                let key = after.key();
                let to = match known.get(&key) {
                    Some(to) => *to,
                    None => {
                        let to = u32::try_from(moments.len()).unwrap();
                        moments.push(after.moment(&mut tables));
                        known.insert(key, to);
                        open.push_back((to, after));
                        to
                    }
                };
                next.push((label, to));
            }
            moments[id as usize].next = next;
        }
        Self {
            plan: tables.plan,
            moments,
            chunks: tables.chunks,
            snapshots: tables.snapshots,
        }
    }
}

impl Tables {
    fn chunk(&mut self, chunk: RawChunk, truth: Truth) -> u32 {
        let key = (serde_json::to_string(&chunk).unwrap(), truth);
        let next = u32::try_from(self.chunks.len()).unwrap();
        *self.chunk_ids.entry(key).or_insert_with(|| {
            self.chunks.push((chunk, truth));
            next
        })
    }

    fn snapshot(&mut self, read: Read) -> u32 {
        let next = u32::try_from(self.snapshots.len()).unwrap();
        *self
            .snapshot_ids
            .entry(format!("{read:?}"))
            .or_insert_with(|| {
                self.snapshots.push(read);
                next
            })
    }
}

impl World {
    fn begin(tables: &mut Tables) -> Self {
        let scripts = tables.plan.scripts.clone();
        let actors = (0..scripts.len())
            .map(|index| Actor::begin(index, &scripts[index], tables))
            .collect();
        let mut world = Self {
            actors,
            links: Vec::new(),
        };
        for child in 1..scripts.len() {
            let record = record(child);
            let parent = &mut world.actors[child - 1];
            let opened = parent.session.child_opened(record.clone(), 1).unwrap();
            parent.take(opened, tables);
            world.links.push(Link {
                forwarder: Forwarder::new(record.sub_session_id.clone()),
                record,
                life: 0,
                cursor: 0,
                restarts: tables.plan.restarts,
                settled: false,
            });
        }
        world
    }

    /// Two worlds with the same key go on in the same ways.
    fn key(&self) -> String {
        let actors = self.actors.iter().map(|a| {
            (
                &a.log,
                a.life,
                a.step,
                &a.done,
                (a.discards, a.resets, a.cuts, a.session.record.floor),
                &a.odd,
                a.session.record.status,
                (&a.committed, &a.finals, &a.reasons),
            )
        });
        let links = self
            .links
            .iter()
            .map(|l| (l.life, l.cursor, l.restarts, l.settled, &l.forwarder));
        format!(
            "{:?}",
            (actors.collect::<Vec<_>>(), links.collect::<Vec<_>>())
        )
    }

    fn moment(&self, tables: &mut Tables) -> Moment {
        let mut reasons = BTreeSet::new();
        for actor in &self.actors {
            reasons.extend(actor.reasons.iter().copied());
        }
        Moment {
            shown: self.actors.iter().map(|a| a.shown(tables)).collect(),
            next: Vec::new(),
            reasons,
        }
    }

    fn successors(&self, tables: &mut Tables) -> Vec<(String, World)> {
        let mut found = Vec::new();
        for n in 0..self.actors.len() {
            let behind = if n > 0 { self.behind(n - 1, tables) } else { 0 };
            // A parent's chunk between two of its child's is no business of either's document.
            let is_busy = self.actors.get(n + 1).is_some_and(|child| !child.is_over());
            for (label, actor) in self.actors[n].successors(tables) {
                // Only a cut or a reset makes a difference then.
                let is_loss = label.starts_with("is reset") || label.starts_with("is cut");
                if behind > tables.plan.lag && !is_loss {
                    continue;
                }
                let is_odd = label.starts_with("says");
                if is_busy && !self.links[n].settled && !is_odd {
                    continue;
                }
                let mut world = self.clone();
                world.actors[n] = actor;
                found.push((format!("{} {label}", name(n)), world));
            }
        }
        for n in 0..self.links.len() {
            let mut world = self.clone();
            if world.forward(n, tables) {
                found.push((format!("{} forwards", name(n)), world));
            }
            if let Some(world) = self.restarted(n, tables) {
                found.push((format!("{} restarts its forwarder", name(n)), world));
            }
        }
        found
    }

    fn behind(&self, n: usize, tables: &Tables) -> usize {
        let (link, child) = (&self.links[n], &self.actors[n + 1]);
        if link.life != child.life {
            return 0;
        }
        let left = child.log.iter().skip(usize::try_from(link.cursor).unwrap());
        left.filter(|id| matters(&tables.chunks[**id as usize].0))
            .count()
    }

    /// A new forwarder takes over: with nothing but what is stored.
    fn restarted(&self, n: usize, tables: &mut Tables) -> Option<Self> {
        let mut world = self.clone();
        let link = &mut world.links[n];
        let log = &self.actors[n + 1].log;
        let at = usize::try_from(link.cursor).unwrap();
        let last = at.checked_sub(1).and_then(|at| log.get(at));
        // Where it matters most: right behind a discard, and at a step's end.
        let kind = last.map_or("", |id| tables.chunks[*id as usize].0.kind());
        let hurts = matches!(kind, "step_discarded" | "step_committed");
        if !hurts || link.settled || link.restarts == 0 || self.actors[n].is_over() {
            return None;
        }
        link.restarts -= 1;
        link.forwarder = Forwarder::new(link.record.sub_session_id.clone());
        if tables.plan.resends {
            link.cursor -= 1;
            world.forward(n, tables);
        }
        Some(world)
    }

    /// The next of the child's chunks that matters goes into the parent's log, or the call ends.
    fn forward(&mut self, n: usize, tables: &mut Tables) -> bool {
        let (parents, children) = self.actors.split_at_mut(n + 1);
        let (parent, child) = (&mut parents[n], &children[0]);
        let link = &mut self.links[n];
        if link.settled || parent.is_over() {
            return false;
        }
        let floor = child.session.record.floor;
        let mut batch: Vec<(u64, RawChunk, Truth)> = Vec::new();
        if child.life != link.life || link.cursor + 1 < floor {
            // As the dispatch does when it is told TRUNCATED.
            link.life = child.life;
            link.cursor = floor.saturating_sub(1);
            let resync = json!({
                "type": "stream_resync", "reason": "child_truncated", "agentId": name(n + 1),
                "agentType": "tester", "timestamp": 1, "step": 0,
            });
            let truth = Truth {
                session: Some(n + 1),
                life: link.life,
                place: link.cursor,
            };
            parent.reasons.insert("resync");
            batch.push((link.cursor, serde_json::from_value(resync).unwrap(), truth));
        } else {
            while let Some(id) = child.log.get(usize::try_from(link.cursor).unwrap()) {
                let (chunk, truth) = &tables.chunks[*id as usize];
                link.cursor += 1;
                batch.push((link.cursor, chunk.clone(), *truth));
                if matters(chunk) {
                    break;
                }
            }
        }
        if batch.is_empty() {
            if !child.is_over() {
                return false;
            }
            link.settled = true;
            let settled = ChildSettled {
                status: SubStatus::Completed,
                usage: None,
                untold: false,
            };
            let ended = parent
                .session
                .tool_finished("child", done(), Some((link.record.clone(), settled)), 1)
                .unwrap();
            parent.take(ended, tables);
            return true;
        }
        let stream_id = StreamId::parse(&stream(n + 1, link.life)).unwrap();
        let (mut stamped, mut truths) = (Vec::new(), Vec::new());
        for (place, chunk, truth) in batch {
            let announced = |id: &str| Ok(id == name((n + 2).min(2)));
            let json = link
                .forwarder
                .stamp(&stream_id, place, chunk, &announced)
                .unwrap()
                .json;
            stamped.push(if tables.plan.stamped {
                json
            } else {
                without(&json, &["origin"])
            });
            truths.push(truth);
        }
        let forwarded = parent
            .session
            .forwarded(link.record.clone(), stream_id, link.cursor, stamped, 1)
            .unwrap();
        parent.take_as(forwarded, tables, |_, at| truths[at]);
        true
    }
}

fn without(chunk: &str, fields: &[&str]) -> String {
    let mut chunk: Value = serde_json::from_str(chunk).unwrap();
    for field in fields {
        chunk.as_object_mut().unwrap().shift_remove(*field);
    }
    chunk.to_string()
}

fn record(session: usize) -> SubSessionRecord {
    SubSessionRecord {
        sub_session_id: SessionId::parse(name(session)).unwrap(),
        agent_type: AgentType::parse("tester").unwrap(),
        tool_call_id: "child".into(),
        location: SubLocation::Remote,
        status: SubStatus::Running,
        remote: Some(SubRemote {
            stream_id: StreamId::parse(&stream(session, 0)).unwrap(),
            last_sequence: 0,
        }),
        deadline: u64::MAX,
        created_at: 0,
    }
}
