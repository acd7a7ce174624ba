//! A random session behind a projected mount with live state, through the real store and the real
//! mount: whoever says that it is exact has the projection of the checkpoint at that very place.

use std::collections::BTreeMap;
use std::rc::Rc;

use futures::FutureExt as _;
use serde_json::{Value, json};

use super::vectors::Recorded;
use super::world::{Random, done, ids};
use crate::http::{Body, Response, answer, json as json_answer};
use crate::mount::{Asked, Mount, Projection};
use crate::producer::neighbours;
use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::{EndFrame, Frame};
use crate::protocol::ids::{AgentType, Position, SessionId, StreamId};
use crate::protocol::message::{ResumeMode, SessionStatus, SnapshotResponse};
use crate::protocol::route::Action;
use crate::protocol::sse::{Decoded, Decoder, encode_chunk};
use crate::protocol::ui::Discard;
use crate::protocol::usage::{Tokens, UsageRollup};
use crate::reconstruct::{Reading, Status};
use crate::session::{Begin, ModelAnswer, Reopen, Session, Settlement, Transition};
use crate::store::{Failure, MemoryStore, SessionOrigin, Store as _, ToolCall, ToolOutcome, Write};

const CANARY: &str = "canary-5d0e";

/// What is shown: how many numbers there are, their sum, and the last ones.
fn shown(state: &Value) -> Value {
    let list: Vec<u64> = serde_json::from_value(state["list"].clone()).unwrap();
    let last: Vec<_> = list.iter().rev().take(3).collect();
    json!({"many": list.len(), "sum": list.iter().sum::<u64>(), "last": last, "a": state["a"]})
}

fn mount() -> Mount {
    Mount::new("/agents")
        .with_live_state()
        .with_projection(Projection {
            name: "numbers@1".into(),
            map: Rc::new(|_, state| shown(state)),
        })
}

fn asked(action: Action) -> Asked {
    Asked {
        session_id: SessionId::parse("s").unwrap(),
        agent_type: AgentType::parse("tester").unwrap(),
        action,
        discard: Discard::default(),
    }
}

fn body(response: Response) -> Vec<u8> {
    let whole = response.into_body().collect(1 << 24).now_or_never();
    whole.unwrap().unwrap().to_vec()
}

/// A checkpoint as everybody may see it.
struct Shown {
    sequence: u64,
    step: u64,
    state: Value,
}

/// The session with its log, and every checkpoint that there ever was.
struct World {
    session: Session,
    store: MemoryStore,
    log: Vec<String>,
    checkpoints: Vec<Shown>,
    mount: Mount,
    random: Random,
    calls: u64,
    runs: u8,
    /// What each step's chunk was when it was first read.
    read: BTreeMap<u64, Vec<u8>>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        // A large state leaves room for few checkpoints.
        let pad = if random.chance(12) { 90_000 } else { 10 };
        let begin = Begin {
            session_id: SessionId::parse("s").unwrap(),
            agent_type: AgentType::parse("tester").unwrap(),
            stream_id: StreamId::parse("st_s").unwrap(),
            message: "hello".into(),
            state: json!({"list": [], "a": 0, "secret": CANARY, "pad": "x".repeat(pad)}),
            origin: SessionOrigin::default(),
            idempotency: None,
            ids: ids(1),
        };
        let transition = Session::begin(begin, 1).unwrap();
        let mut world = Self {
            session: transition.next.clone(),
            store: MemoryStore::new(),
            log: Vec::new(),
            checkpoints: Vec::new(),
            mount: mount(),
            random,
            calls: 0,
            runs: 1,
            read: BTreeMap::new(),
        };
        world.take(transition);
        world
    }

    fn take(&mut self, transition: Transition) {
        self.store.commit(&transition.commit).unwrap();
        for write in &transition.commit.writes {
            if let Some((_, chunks)) = write.chunks() {
                self.log.extend(chunks.iter().cloned());
            }
            if let Write::Checkpoint(checkpoint) = write {
                self.checkpoints.push(Shown {
                    sequence: checkpoint.stream_sequence,
                    step: checkpoint.step_count,
                    state: shown(&checkpoint.state),
                });
            }
        }
        self.session = transition.next;
    }

    /// What may be seen at a place of the stream.
    fn at(&self, sequence: u64) -> &Shown {
        let mut newest_first = self.checkpoints.iter().rev();
        newest_first
            .find(|shown| shown.sequence <= sequence)
            .unwrap()
    }

    fn ended(&self) -> bool {
        self.session.record.status.is_terminal()
    }

    fn run(&self) -> crate::store::RunRecord {
        let id = self.session.record.run_id.as_str();
        self.store.run(id).unwrap().unwrap()
    }

    /// Something happens.
    fn tick(&mut self) {
        if self.session.record.status != SessionStatus::Running {
            return self.resume();
        }
        if self.random.chance(9) {
            let transition = self.session.wake(1).unwrap();
            return self.take(transition);
        }
        if self.random.chance(14) {
            return self.stop();
        }
        if self.session.open_step().is_none() {
            return self.answer();
        }
        let open: Vec<String> = self
            .session
            .open_calls()
            .map(|call| call.call.id.clone())
            .collect();
        match open.first() {
            Some(call) => self.work(call),
            None => self.promote(),
        }
    }

    fn answer(&mut self) {
        self.calls += 1;
        let call = |n| ToolCall {
            id: format!("c{}-{n}", self.calls),
            name: "t".into(),
            arguments: json!({}),
        };
        let answer = ModelAnswer {
            text: "so".into(),
            calls: (0..=self.random.below(2)).map(call).collect(),
            queued: Vec::new(),
            cut: false,
            kept: None,
            model: "m".into(),
            tokens: Tokens::default(),
        };
        let transition = self.session.answer(answer, 1).unwrap();
        self.take(transition);
    }

    /// A call writes something, or ends in one way or the other.
    fn work(&mut self, call: &str) {
        let mut state = (*self.session.working_state()).clone();
        let transition = if self.random.chance(3) {
            let outcome = ToolOutcome {
                success: !self.random.chance(4),
                ..done()
            };
            self.session.tool_finished(call, outcome, None, 1).unwrap()
        } else {
            self.change(&mut state);
            self.session.stage(call, state, 1).unwrap()
        };
        self.take(transition);
    }

    fn change(&mut self, state: &mut Value) {
        let number = self.random.below(9);
        let list = state["list"].as_array_mut().unwrap();
        match self.random.below(5) {
            0 => state["a"] = json!(number),
            1 => drop(list.pop()),
            2 => state["secret"] = json!(format!("{CANARY} {number}")),
            _ => list.push(json!(number)),
        }
    }

    fn promote(&mut self) {
        let ends = self.random.chance(8);
        let settlement = ends.then(|| {
            let output = json!("done");
            (
                Settlement::Completed { output },
                self.run(),
                UsageRollup::default(),
            )
        });
        let transition = self.session.promote(settlement, None, [0; 16], 1).unwrap();
        self.take(transition);
    }

    fn stop(&mut self) {
        let (run, usage) = (self.run(), UsageRollup::default());
        let transition = if self.random.chance(2) {
            let settlement = Settlement::Interrupted { reason: None };
            self.session
                .stopped(settlement, run, usage, Vec::new(), [0; 16], 1)
        } else {
            let failure = Failure {
                code: "provider_error".into(),
                error: "No.".into(),
                detail: None,
            };
            self.session
                .settle(Settlement::Failed { failure }, run, usage, 1)
        };
        self.take(transition.unwrap());
    }

    /// The next run, whose entry may change the state.
    fn resume(&mut self) {
        if self.runs > 5 {
            return;
        }
        self.runs += 1;
        let mut state = (*self.session.checkpoint.state).clone();
        let changes = self.random.chance(2);
        if changes {
            self.change(&mut state);
        }
        let reopen = Reopen {
            mode: ResumeMode::WithMessage,
            message: Some("more".into()),
            ids: ids(self.runs),
            state: changes.then_some(state),
            healed: Vec::new(),
            idempotency: None,
        };
        let transition = self.session.resume(reopen, 2).unwrap();
        self.take(transition);
    }

    fn is_over(&self) -> bool {
        self.runs > 5 && self.session.record.status != SessionStatus::Running
    }

    fn snapshot(&self) -> (SnapshotResponse, bool) {
        let raw = json_answer(200, &self.session.snapshot());
        let seen = body(self.mount.answer(&asked(Action::Snapshot), raw));
        assert!(!String::from_utf8_lossy(&seen).contains(CANARY));
        (serde_json::from_slice(&seen).unwrap(), self.ended())
    }

    /// The chunk at this place as a reader of the mount gets it now, if it passes.
    fn chunk(&mut self, sequence: u64) -> Option<RawChunk> {
        let at = usize::try_from(sequence).unwrap() - 1;
        let mut text = neighbours::event(&self.store, sequence)
            .unwrap()
            .unwrap_or_default();
        let kept = !text.is_empty();
        encode_chunk(&mut text, sequence, &self.log[at]);
        let raw = answer(200, "text/event-stream", Body::Full(text.into()));
        let seen = body(self.mount.answer(&asked(Action::Sse), raw));
        assert!(!String::from_utf8_lossy(&seen).contains(CANARY));
        let mut decoder = Decoder::new();
        decoder.push(&seen);
        let mut passed = None;
        while let Some(decoded) = decoder.poll().unwrap() {
            if let Decoded::Frame(Frame::Chunk { chunk, .. }) = decoded {
                passed = Some(chunk);
            }
        }
        if kept {
            let first = self.read.entry(sequence).or_insert_with(|| seen.clone());
            assert_eq!(*first, seen, "whoever reads a step reads the same bytes");
        }
        passed
    }
}

/// Somebody who reads through the mount with a document.
struct Observer {
    document: Recorded,
    cursor: u64,
    /// The newest place that was heard of since the last baseline.
    heard: u64,
    under_way: Option<Option<(SnapshotResponse, bool)>>,
    shaky: bool,
    snapshots: u64,
    told: [u64; 3],
}

impl Observer {
    fn new(cursor: u64, shaky: bool, writes: bool) -> Self {
        Self {
            document: Recorded::new("s", writes),
            cursor,
            heard: 0,
            under_way: None,
            shaky,
            snapshots: 0,
            told: [0; 3],
        }
    }

    fn tick(&mut self, world: &mut World) {
        if self.under_way.is_none() && self.document.take_request() {
            self.snapshots += 1;
            self.under_way = Some(None);
        }
        if self.under_way.is_some() && (!self.shaky || world.random.chance(3)) {
            self.snapshot(world);
        } else {
            self.next(world);
        }
        self.check(world);
    }

    /// A snapshot is read, or what was read arrives.
    fn snapshot(&mut self, world: &World) {
        let Some(Some((snapshot, ended))) = self.under_way.take() else {
            self.under_way = Some(Some(world.snapshot()));
            return;
        };
        self.document.baseline(&snapshot, ended);
        self.heard = 0;
        if let Position::At(at) = self.document.attach_at() {
            self.cursor = at;
        }
    }

    fn next(&mut self, world: &mut World) {
        // A connection breaks, and some of what was read is read again.
        if self.shaky && world.random.chance(6) {
            self.cursor = self.cursor.saturating_sub(world.random.below(9));
        }
        if self.cursor >= world.log.len() as u64 {
            return;
        }
        self.cursor += 1;
        let Some(chunk) = world.chunk(self.cursor) else {
            return;
        };
        let reading = Reading {
            session: "s",
            stream: "st_s",
        };
        if chunk.kind() == "step_committed" {
            let whole = chunk
                .0
                .get("patches")
                .is_some_and(|patches| patches[0]["path"] == "");
            let resync = chunk.0.contains_key("resync");
            self.told[usize::from(whole) + 2 * usize::from(resync)] += 1;
        }
        self.document.observe(reading, self.cursor, &chunk);
        self.heard = self.heard.max(self.cursor);
    }

    fn check(&self, world: &World) {
        let covered = self.document.attach_at().sequence().unwrap_or(0);
        match self.document.status() {
            Status::Exact { step } => {
                let shown = world.at(self.heard.max(covered));
                assert_eq!((shown.step, &shown.state), (*step, self.document.state()));
            }
            Status::Final => assert!(
                world
                    .checkpoints
                    .iter()
                    .any(|shown| shown.state == *self.document.state())
            ),
            Status::InStep => panic!("a projection shows no step under way"),
            Status::Unpinned | Status::Stale(_) => {}
        }
    }

    /// Reads to the end of a session to which nothing happens any more.
    fn finish(&mut self, world: &mut World) {
        self.shaky = false;
        for _ in 0..10_000 {
            self.tick(world);
            if self.cursor == world.log.len() as u64 && self.under_way.is_none() {
                break;
            }
        }
        let last = world.checkpoints.last().unwrap().state.clone();
        if world.session.record.status == SessionStatus::Completed {
            let end = EndFrame {
                run_id: None,
                status: SessionStatus::Completed,
                output: None,
                state: Some(last.clone()),
                usage: None,
            };
            self.document.observe_end(&Frame::End(end));
        } else {
            self.document.boundary();
            for _ in 0..3 {
                self.tick(world);
            }
        }
        self.check(world);
        assert_eq!(*self.document.state(), last);
    }
}

/// An observer that knows two sentences: apply a step above the baseline whose number is the next,
/// and take a snapshot where a step says so.
#[derive(Default)]
struct Plain {
    state: Value,
    step: Option<u64>,
    cursor: u64,
    applied: u64,
}

impl Plain {
    fn tick(&mut self, world: &mut World) {
        let Some(step) = self.step else {
            let (snapshot, _) = world.snapshot();
            if let Position::At(at) = snapshot.stream_sequence {
                (self.state, self.step) = (snapshot.state, Some(snapshot.step_count));
                self.cursor = at;
            }
            return;
        };
        if self.cursor >= world.log.len() as u64 {
            return;
        }
        self.cursor += 1;
        let Some(chunk) = world.chunk(self.cursor) else {
            return;
        };
        if chunk.kind() != "step_committed" {
            return;
        }
        let patches = chunk.0.get("patches").cloned();
        let (Some(patches), Some(next)) = (patches, chunk.0["stepCount"].as_u64()) else {
            self.step = None;
            return;
        };
        assert_eq!(next, step + 1);
        let patches: json_patch::Patch = serde_json::from_value(patches).unwrap();
        json_patch::patch(&mut self.state, &patches).unwrap();
        self.step = Some(next);
        self.applied += 1;
        assert_eq!(world.at(self.cursor).state, self.state);
    }
}

/// What the documents of two observers of a random session were told: of one who reads on, and of
/// one whose connections break.
pub(super) fn scripts(seed: u64) -> Vec<Value> {
    let mut world = World::new(seed);
    let mut observers = [Observer::new(0, false, true), Observer::new(0, true, true)];
    while !world.is_over() {
        world.tick();
        for observer in &mut observers {
            observer.tick(&mut world);
        }
    }
    let script = |mut observer: Observer| {
        observer.finish(&mut world);
        json!({
            "name": format!("projection {seed}, {} snapshots", observer.snapshots),
            "session": "s",
            "events": observer.document.script,
        })
    };
    observers.into_iter().map(script).collect()
}

#[test]
fn an_exact_projected_document_is_the_projection_of_the_checkpoint_there() {
    let (mut told, mut applied) = ([0; 3], 0);
    for seed in super::seeds(150) {
        let outcome = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            let mut observers = vec![Observer::new(0, false, false)];
            let mut plain = Plain::default();
            for tick in 0..100_000 {
                if world.is_over() {
                    break;
                }
                world.tick();
                if tick % 40 == 39 && observers.len() < 4 {
                    let from = world.random.below(world.log.len() as u64);
                    observers.push(Observer::new(from, true, false));
                }
                for observer in &mut observers {
                    observer.tick(&mut world);
                }
                plain.tick(&mut world);
            }
            assert!(world.is_over(), "the session comes to its end");
            let mut told = [0; 3];
            for observer in &mut observers {
                observer.finish(&mut world);
                for (sum, n) in told.iter_mut().zip(observer.told) {
                    *sum += n;
                }
            }
            (told, plain.applied)
        });
        let Ok((here, plain)) = outcome else {
            panic!("seed {seed}, see above; RECONSTRUCT_SEED={seed} cargo test --lib reconstruct");
        };
        for (sum, n) in told.iter_mut().zip(here) {
            *sum += n;
        }
        applied += plain;
    }
    assert!(
        std::env::var_os("RECONSTRUCT_SEED").is_some()
            || (told.iter().all(|n| *n > 20) && applied > 100),
        "{told:?} {applied}"
    );
}
