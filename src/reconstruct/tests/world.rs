//! Three real sessions, each the child of the one before, with the real forwarder between them, and
//! observers that join late, read on from anywhere and take snapshots that arrive late.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::vectors::Recorded;
use crate::dispatch::Forwarder;
use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::{EndFrame, Frame};
use crate::protocol::ids::{AgentType, Position, RunId, SessionId, StreamId};
use crate::protocol::message::{ResumeMode, SessionStatus, SnapshotResponse};
use crate::protocol::usage::{Tokens, UsageRollup};
use crate::reconstruct::{Reading, Status};
use crate::session::{
    Begin, ChildSettled, EntryIds, ModelAnswer, Reopen, Session, Settlement, Transition,
};
use crate::store::{
    RunRecord, SessionOrigin, SubLocation, SubRemote, SubSessionRecord, SubStatus, ToolCall,
    ToolOutcome, Write,
};

/// Small numbers from a seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    pub(super) fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}

/// A session with its log and every state that it has ever committed.
pub(super) struct Live {
    pub(super) session: Session,
    pub(super) log: Vec<RawChunk>,
    /// The log as it is read where producers number nothing.
    bare: Vec<RawChunk>,
    boundaries: BTreeMap<u64, Vec<Value>>,
    finals: Vec<Value>,
    rounds: u64,
    calls: u64,
}

impl Live {
    fn begin(name: &str, rounds: u64) -> Self {
        let begin = Begin {
            session_id: SessionId::parse(name).unwrap(),
            agent_type: AgentType::parse("tester").unwrap(),
            stream_id: StreamId::parse(&format!("st_{name}")).unwrap(),
            message: "hello".into(),
            state: json!({"list": [], "a": 0, "b": {"c": 0}}),
            origin: SessionOrigin::default(),
            idempotency: None,
            ids: ids(1),
        };
        let transition = Session::begin(begin, 1000).unwrap();
        let mut live = Self {
            session: transition.next.clone(),
            log: Vec::new(),
            bare: Vec::new(),
            boundaries: BTreeMap::new(),
            finals: Vec::new(),
            rounds,
            calls: 0,
        };
        live.take(transition);
        live
    }

    fn name(&self) -> &str {
        self.session.record.session_id.as_str()
    }

    fn stream(&self) -> &str {
        self.session.record.stream_id.as_str()
    }

    fn take(&mut self, transition: Transition) {
        for write in &transition.commit.writes {
            if let Write::Chunks { first, chunks } = write {
                assert_eq!(*first, self.log.len() as u64 + 1, "no gap");
                self.log.extend(
                    chunks
                        .iter()
                        .map(|text| serde_json::from_str(text).unwrap()),
                );
                let new = self.log.iter().skip(self.bare.len());
                self.bare.extend(new.map(unnumbered).collect::<Vec<_>>());
            }
        }
        self.session = transition.next;
        let checkpoint = &self.session.checkpoint;
        let state = (*checkpoint.state).clone();
        let states = self.boundaries.entry(checkpoint.step_count).or_default();
        if states.last() != Some(&state) {
            states.push(state.clone());
        }
        if self.session.record.status.is_terminal() {
            self.finals.push(state);
        }
    }

    fn is_over(&self) -> bool {
        self.session.record.status.is_terminal()
    }

    fn open_calls(&self) -> Vec<String> {
        self.session.step.as_ref().map_or_else(Vec::new, |step| {
            let open = step.calls.iter().filter(|call| call.outcome.is_none());
            open.map(|call| call.call.id.clone()).collect()
        })
    }

    fn end_frame(&self, with_state: bool) -> Frame {
        Frame::End(EndFrame {
            run_id: None,
            status: SessionStatus::Completed,
            output: None,
            state: with_state.then(|| (*self.session.checkpoint.state).clone()),
            usage: None,
        })
    }
}

pub(super) fn ids(n: u8) -> EntryIds {
    EntryIds {
        run_id: RunId::from_entropy([n; 16]),
        entropy: [n; 16],
    }
}

fn run() -> RunRecord {
    RunRecord {
        run_id: RunId::from_entropy([1; 16]),
        start_sequence: 0,
        start_step: 0,
        started_at: 1000,
        terminal: None,
    }
}

pub(super) fn done() -> ToolOutcome {
    ToolOutcome {
        success: true,
        result: json!(1),
        error: None,
    }
}

/// A parent's call of the session below it.
struct Link {
    call: String,
    record: SubSessionRecord,
    forwarder: Forwarder,
    settled: bool,
}

/// The tree under observation: session `n + 1` is the child of session `n`.
pub(super) struct World {
    pub(super) lives: Vec<Live>,
    links: Vec<Link>,
    stamped: bool,
    pub(super) random: Random,
    reopen: bool,
}

impl World {
    /// `stamped` tells whether the producers stamp `origin`, `patchOrdinal` and `patchBase`.
    pub(super) fn new(seed: u64, stamped: bool) -> Self {
        let mut random = Random::new(seed);
        let rounds = 1 + random.below(3);
        let reopen = random.chance(3);
        let mut world = Self {
            lives: vec![Live::begin("p", rounds)],
            links: Vec::new(),
            stamped,
            random,
            reopen,
        };
        world.call_child(0);
        world.call_child(1);
        world
    }

    /// The session `n` answers with the call of its child, and the child begins.
    fn call_child(&mut self, n: usize) {
        self.answer(n, &["child".to_owned(), "beside".to_owned()]);
        let name = if n == 0 { "c" } else { "g" };
        let record = SubSessionRecord {
            sub_session_id: SessionId::parse(name).unwrap(),
            agent_type: AgentType::parse("tester").unwrap(),
            tool_call_id: "child".into(),
            location: SubLocation::Remote,
            status: SubStatus::Running,
            remote: Some(SubRemote {
                stream_id: StreamId::parse(&format!("st_{name}")).unwrap(),
                last_sequence: 0,
            }),
            deadline: u64::MAX,
            created_at: 0,
        };
        let live = &mut self.lives[n];
        let transition = live.session.child_opened(record.clone(), 1).unwrap();
        live.take(transition);
        let rounds = 1 + self.random.below(4);
        self.lives.push(Live::begin(name, rounds));
        self.links.push(Link {
            call: "child".into(),
            forwarder: Forwarder::new(record.sub_session_id.clone()),
            record,
            settled: false,
        });
    }

    fn answer(&mut self, n: usize, calls: &[String]) {
        let live = &mut self.lives[n];
        let calls = calls.iter().map(|id| ToolCall {
            id: id.clone(),
            name: "t".into(),
            arguments: json!({}),
        });
        let answer = ModelAnswer {
            text: "so".into(),
            calls: calls.collect(),
            queued: Vec::new(),
            cut: false,
            kept: None,
            model: "m".into(),
            tokens: Tokens::default(),
        };
        let transition = live.session.answer(answer, 1).unwrap();
        live.take(transition);
    }

    /// Whether every session has ended and told its parent everything.
    pub(super) fn is_over(&self) -> bool {
        self.lives.iter().all(Live::is_over) && self.links.iter().all(|link| link.settled)
    }

    /// Something happens somewhere.
    pub(super) fn tick(&mut self) {
        match self.random.below(5) {
            0 => self.forward(0),
            1 => self.forward(1),
            n => self.act(usize::try_from(n - 2).unwrap()),
        }
    }

    fn act(&mut self, n: usize) {
        if self.lives[n].is_over() {
            if n == 0 && self.reopen && self.links[0].settled {
                self.reopen = false;
                let live = &mut self.lives[0];
                live.rounds += 1;
                let reopen = Reopen {
                    mode: ResumeMode::WithMessage,
                    message: Some("more".into()),
                    ids: ids(2),
                    state: None,
                    healed: Vec::new(),
                    idempotency: None,
                };
                let transition = live.session.resume(reopen, 2).unwrap();
                live.take(transition);
            }
            return;
        }
        // An execution ends at any moment, and the next one goes on from the last commit.
        if self.random.chance(7) {
            let live = &mut self.lives[n];
            let transition = live.session.wake(1).unwrap();
            return live.take(transition);
        }
        let answered = self.lives[n]
            .session
            .step
            .as_ref()
            .is_some_and(|step| step.record.answer.is_some());
        if !answered {
            let round = self.lives[n].calls;
            self.lives[n].calls += 1;
            let calls: Vec<String> = (0..=self.random.below(2))
                .map(|at| format!("c{round}-{at}"))
                .collect();
            return self.answer(n, &calls);
        }
        let child = |id: &String| {
            self.links
                .get(n)
                .is_some_and(|link| link.call == *id && !link.settled)
        };
        let open = self.lives[n].open_calls();
        let own: Vec<String> = open.iter().filter(|id| !child(id)).cloned().collect();
        if !own.is_empty() {
            let at = usize::try_from(self.random.below(own.len() as u64)).unwrap();
            return self.work(n, &own[at]);
        }
        if !open.is_empty() {
            return;
        }
        let live = &mut self.lives[n];
        live.rounds = live.rounds.saturating_sub(1);
        let output = json!("done");
        let settlement = (live.rounds == 0).then(|| {
            (
                Settlement::Completed { output },
                run(),
                UsageRollup::default(),
            )
        });
        let transition = live.session.promote(settlement, None, [0; 16], 1).unwrap();
        live.take(transition);
    }

    /// A call writes something, or ends.
    fn work(&mut self, n: usize, call: &str) {
        let choice = self.random.below(6);
        let number = self.random.below(9);
        let live = &mut self.lives[n];
        let mut state = (*live.session.working_state()).clone();
        match choice {
            0 => state["a"] = json!(number),
            1 => state["b"]["c"] = json!(number),
            2 | 3 => state["list"].as_array_mut().unwrap().push(json!(number)),
            4 => drop(state["list"].as_array_mut().unwrap().pop()),
            _ => {
                let transition = live.session.tool_finished(call, done(), None, 1).unwrap();
                return live.take(transition);
            }
        }
        let transition = live.session.stage(call, state, 1).unwrap();
        live.take(transition);
    }

    /// A few chunks of the child's log go into the parent's, and at last the call's end.
    fn forward(&mut self, n: usize) {
        let many = usize::try_from(1 + self.random.below(6)).unwrap();
        let restart = self.random.chance(5);
        let (parents, children) = self.lives.split_at_mut(n + 1);
        let (Some(parent), Some(child)) = (parents.last_mut(), children.first()) else {
            return;
        };
        let link = &mut self.links[n];
        if link.settled || parent.open_calls().iter().all(|id| *id != link.call) {
            return;
        }
        if restart {
            link.forwarder = Forwarder::new(link.record.sub_session_id.clone());
        }
        let remote = link.record.remote.clone().unwrap();
        let cursor = usize::try_from(remote.last_sequence).unwrap();
        let (mut through, mut chunks) = (remote.last_sequence, Vec::new());
        for (at, chunk) in child.log.iter().enumerate().skip(cursor).take(many) {
            through = at as u64 + 1;
            let mut stamped = link
                .forwarder
                .stamp(&remote.stream_id, through, chunk.clone(), &|_| Ok(true))
                .unwrap()
                .json;
            if !self.stamped {
                stamped = unstamp(&stamped);
            }
            chunks.push(stamped);
        }
        if !chunks.is_empty() {
            let transition = parent
                .session
                .forwarded(
                    link.record.clone(),
                    remote.stream_id.clone(),
                    through,
                    chunks,
                    1,
                )
                .unwrap();
            parent.take(transition);
            link.record.remote = Some(SubRemote {
                stream_id: remote.stream_id,
                last_sequence: through,
            });
        } else if child.is_over() {
            link.settled = true;
            let settled = ChildSettled {
                status: SubStatus::Completed,
                usage: None,
                untold: false,
            };
            let transition = parent
                .session
                .tool_finished(&link.call, done(), Some((link.record.clone(), settled)), 1)
                .unwrap();
            parent.take(transition);
        }
    }

    /// The snapshot of a session as it is now, and whether it had ended before.
    fn snapshot(&self, session: &str) -> (SnapshotResponse, bool) {
        let live = self.live(session);
        let mut snapshot = live.session.snapshot();
        if !self.stamped {
            snapshot.patch_ordinal = None;
        }
        (snapshot, live.is_over())
    }

    fn live(&self, session: &str) -> &Live {
        self.lives
            .iter()
            .find(|live| live.name() == session)
            .unwrap()
    }
}

fn unstamp(chunk: &str) -> String {
    let mut chunk: Value = serde_json::from_str(chunk).unwrap();
    chunk.as_object_mut().unwrap().shift_remove("origin");
    chunk.to_string()
}

fn unnumbered(chunk: &RawChunk) -> RawChunk {
    let mut chunk = chunk.clone();
    chunk.0.shift_remove("patchOrdinal");
    chunk.0.shift_remove("patchBase");
    chunk
}

/// Somebody who watches the stream of one session and keeps a document of each that it hears of.
pub(super) struct Observer {
    root: usize,
    cursor: usize,
    pub(super) documents: Vec<Recorded>,
    /// Snapshots on their way: of which session, and what was read if it was read already.
    under_way: Vec<(String, Option<(SnapshotResponse, bool)>)>,
    pub(super) snapshots: u64,
    /// Whether what its documents hear is written down.
    writes: bool,
    /// Whether connections break.
    shaky: bool,
}

impl Observer {
    /// An observer of the session `root`, who begins to read somewhere.
    pub(super) fn new(world: &mut World, root: usize, writes: bool) -> Self {
        let length = world.lives[root].log.len() as u64;
        let cursor = usize::try_from(world.random.below(length + 1)).unwrap();
        let name = world.lives[root].name().to_owned();
        Self {
            root,
            cursor,
            documents: vec![Recorded::new(&name, writes)],
            writes,
            under_way: Vec::new(),
            snapshots: 0,
            shaky: true,
        }
    }

    pub(super) fn tick(&mut self, world: &mut World) {
        match world.random.below(4) {
            0 => self.snapshot(world),
            _ => self.read(world),
        }
        self.check(world);
    }

    /// Reads the next chunk.
    fn read(&mut self, world: &mut World) {
        // A connection breaks, and some of what was read is read again.
        if self.shaky && world.random.chance(12) {
            let back = usize::try_from(world.random.below(5)).unwrap();
            let floor = match self.documents[0].attach_at() {
                Position::At(at) => usize::try_from(at).unwrap(),
                Position::None => 0,
            };
            self.cursor = self.cursor.saturating_sub(back).max(floor.min(self.cursor));
        }
        let live = &world.lives[self.root];
        let log = if world.stamped { &live.log } else { &live.bare };
        let Some(chunk) = log.get(self.cursor) else {
            return;
        };
        self.cursor += 1;
        let reading = Reading {
            session: live.name(),
            stream: live.stream(),
        };
        if chunk.kind() == "subagent_start" {
            let child = chunk.text("subSessionId").unwrap();
            if self.documents.iter().all(|known| known.session() != child) {
                self.documents.push(Recorded::new(child, self.writes));
            }
        }
        for document in &mut self.documents {
            document.observe(reading, self.cursor as u64, chunk);
        }
        self.ask();
    }

    fn ask(&mut self) {
        for document in &mut self.documents {
            if document.take_request() {
                self.snapshots += 1;
                self.under_way.push((document.session().to_owned(), None));
            }
        }
    }

    /// A snapshot is read at the producer, or what was read there arrives.
    fn snapshot(&mut self, world: &mut World) {
        self.ask();
        if self.under_way.is_empty() {
            return;
        }
        let at = usize::try_from(world.random.below(self.under_way.len() as u64)).unwrap();
        let (session, read) = &mut self.under_way[at];
        let Some((snapshot, ended)) = read.take() else {
            *read = Some(world.snapshot(session));
            return;
        };
        self.under_way.remove(at);
        let root = world.lives[self.root].name();
        for document in &mut self.documents {
            if document.session() == snapshot.session_id {
                document.baseline(&snapshot, ended);
                // The stream of the document's own session is attached at the baseline.
                if document.session() == root
                    && let Position::At(position) = document.attach_at()
                {
                    self.cursor = usize::try_from(position).unwrap();
                }
            }
        }
    }

    /// What says that it is exact is a state that the session has committed.
    fn check(&self, world: &World) {
        for document in &self.documents {
            let live = world.live(document.session());
            let name = document.session();
            match document.status() {
                Status::Exact { step } => {
                    let states = live.boundaries.get(step);
                    assert!(
                        states.is_some_and(|states| states.contains(document.state())),
                        "{name}: {} is no state of step {step}: {states:?}",
                        document.state()
                    );
                }
                Status::Final => assert!(
                    live.finals.contains(document.state()),
                    "{name}: {} is no last state: {:?}",
                    document.state(),
                    live.finals
                ),
                Status::Unpinned | Status::InStep | Status::Stale(_) => {}
            }
        }
    }

    /// Reads to the end of a world in which nothing happens any more.
    pub(super) fn finish(&mut self, world: &mut World) {
        self.shaky = false;
        for _ in 0..10_000 {
            self.tick(world);
            if self.cursor == world.lives[self.root].log.len() && self.under_way.is_empty() {
                break;
            }
        }
        let length = world.lives[self.root].log.len();
        assert_eq!(self.cursor, length, "the stream is read to its end");
        let with_state = world.random.chance(2);
        let end = world.lives[self.root].end_frame(with_state);
        self.documents[0].observe_end(&end);
        for document in self.documents.iter_mut().skip(1) {
            document.boundary();
        }
        self.ask();
        while !self.under_way.is_empty() {
            self.snapshot(world);
            self.check(world);
        }
        for document in &self.documents {
            assert_eq!(document.status(), &Status::Final, "{}", document.session());
            let live = world.live(document.session());
            assert_eq!(Some(document.state()), live.finals.last());
        }
    }
}
