//! Every ordered pair of what can happen to a session, at every commit of a run and at rest.
//!
//! Two things happen in one turn: both requests are in flight before either is answered. What each
//! of them is answered, and what becomes of the session, is the table of `Present::meets`, which is
//! the contract's table of action × status with what it leaves to the host. The end of the run by
//! itself is the third party: every pair meets it at the commits before, at and after it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::model::{ModelError, ModelErrorKind};
use remote_agents::agent::typed_tool;
use remote_agents::mount::Mount;
use remote_agents::native::{CommitMoment, LocalObjects};
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::message::SessionStatus;
use remote_agents::store::{SqlStore, SqlValue, StopKind, Store as _};
use remote_agents::{Agent, Agents, ToolContext};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, chunks, in_world, read, scripted, text, turn};

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Start,
    /// The first start, sent again with its idempotency key.
    StartAgain,
    Continue,
    Message,
    Interrupt,
    Abort,
    /// The alarm goes off.
    Wake,
    /// The object ends where it stands and is opened anew.
    Crash,
    Delete,
}

const ACTS: [Act; 9] = [
    Act::Start,
    Act::StartAgain,
    Act::Continue,
    Act::Message,
    Act::Interrupt,
    Act::Abort,
    Act::Wake,
    Act::Crash,
    Act::Delete,
];

/// How a session stands, as far as the table asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Present {
    Absent,
    Running(Option<StopKind>),
    Interrupted,
    Completed,
    Failed,
    Aborted,
}

/// What an act is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// A start or a resume that begins a run.
    NewRun,
    /// The answer of the first start.
    SameRun,
    /// A stop, and whether it changes something.
    Stop(bool),
    /// A refusal.
    Refused(u16, &'static str),
    /// Nothing is answered: it was no request.
    Nothing,
}

impl Present {
    /// The table. `keyed` says whether the session was begun with the key that is sent again.
    fn meets(self, act: Act, keyed: bool) -> (Answer, Self) {
        use Answer::{NewRun, Nothing, Refused, SameRun, Stop};
        use Present::{Aborted, Absent, Completed, Failed, Interrupted, Running};
        const NOT_FOUND: Answer = Refused(404, "NOT_FOUND");
        const RUNNING: Answer = Refused(409, "ALREADY_RUNNING");
        const ENDED: Answer = Refused(409, "ALREADY_COMPLETED");
        let begun = (NewRun, Running(None));
        match (act, self) {
            (Act::Wake | Act::Crash, _) => (Nothing, self),
            (Act::Delete, _) => (Nothing, Absent),
            (Act::Start | Act::StartAgain, Absent) => begun,
            (Act::StartAgain, _) if keyed => (SameRun, self),
            (Act::Start | Act::StartAgain, Running(_) | Interrupted) => (RUNNING, self),
            (Act::Start | Act::StartAgain, _) => (ENDED, self),
            (_, Absent) => (NOT_FOUND, self),
            (Act::Continue | Act::Message, Running(_)) => (RUNNING, self),
            (Act::Continue | Act::Message, Interrupted | Failed) => begun,
            (Act::Message, Completed) => begun,
            (Act::Continue | Act::Message, _) => (ENDED, self),
            (Act::Interrupt, Running(None)) => (Stop(true), Running(Some(StopKind::Interrupt))),
            (Act::Interrupt, Running(Some(_)) | Interrupted) => (Stop(false), self),
            (Act::Interrupt, _) => (ENDED, self),
            (Act::Abort, Running(Some(StopKind::Abort))) => (Stop(false), self),
            (Act::Abort, Running(_)) => (Stop(true), Running(Some(StopKind::Abort))),
            (Act::Abort, Interrupted) => (Stop(true), Aborted),
            (Act::Abort, _) => (Stop(false), self),
        }
    }

    /// What it is once nothing runs any more: a stop that was accepted is carried out.
    fn settled(self) -> Self {
        match self {
            Self::Running(None) => Self::Completed,
            Self::Running(Some(StopKind::Interrupt)) => Self::Interrupted,
            Self::Running(Some(StopKind::Abort)) => Self::Aborted,
            other => other,
        }
    }
}

#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Notes {
    count: u64,
}

/// What the agents of a world do and count.
#[derive(Default)]
struct Watch {
    /// The next answer of the model is a refusal.
    fails: Cell<bool>,
    /// Model calls and tools at work now, and the most there were.
    asked: Cell<i32>,
    most_asked: Cell<i32>,
}

struct Asking(Rc<Watch>);

impl Asking {
    fn new(watch: &Rc<Watch>) -> Self {
        watch.asked.set(watch.asked.get() + 1);
        watch
            .most_asked
            .set(watch.most_asked.get().max(watch.asked.get()));
        Self(watch.clone())
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.asked.set(self.0.asked.get() - 1);
    }
}

/// A note, then a last word.
fn agent(watch: &Rc<Watch>) -> Agent {
    let seen = watch.clone();
    let model = scripted(move |request| match turn(request) {
        _ if seen.fails.replace(false) => vec![Err(ModelError {
            kind: ModelErrorKind::Rejected,
            message: "No.".into(),
            retry_after: None,
        })],
        0 => calls(&[("c1", "note", json!({}))]),
        _ => text("done"),
    });
    let model = Watched {
        inner: model,
        watch: watch.clone(),
    };
    Agent::new(AgentType::parse("noter").unwrap(), "Note.", Rc::new(model))
        .with_state::<Notes>()
        .with_tool(typed_tool(
            "note",
            "Counts.",
            |context: ToolContext, _: Value| async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                context.update(|notes: &mut Notes| notes.count += 1)?;
                tokio::time::sleep(Duration::from_millis(1)).await;
                Ok(json!({}))
            },
        ))
}

/// A model that knows how often it is asked at once.
struct Watched {
    inner: Rc<dyn remote_agents::agent::model::LanguageModel>,
    watch: Rc<Watch>,
}

impl remote_agents::agent::model::LanguageModel for Watched {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn stream(
        &self,
        request: remote_agents::agent::model::ModelRequest,
    ) -> remote_agents::agent::model::ModelStream {
        use futures::StreamExt as _;
        crate::stories::paired::read(&request).unwrap();
        let asking = Asking::new(&self.watch);
        Box::pin(self.inner.stream(request).map(move |event| {
            let _held = &asking;
            event
        }))
    }
}

/// A session before the two acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    /// Never begun.
    Nothing,
    /// The run has made this many commits.
    Commits(u32),
    /// At rest.
    Interrupted,
    Completed,
    Failed,
    Aborted,
}

struct World {
    client: Client,
    watch: Rc<Watch>,
}

impl World {
    fn new() -> Self {
        let watch = Rc::new(Watch::default());
        let agents = watch.clone();
        let objects = LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(move |_, _| Agents::new([agent(&agents)])),
        );
        Self {
            client: Client {
                mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
                objects,
            },
            watch,
        }
    }

    fn store(&self) -> SqlStore {
        let objects = &self.client.objects;
        objects.producer(&id()).unwrap();
        SqlStore::new(objects.database(&id()).unwrap())
    }

    fn present(&self) -> Present {
        let Some(record) = self.store().session().unwrap() else {
            return Present::Absent;
        };
        let aborted = record.failure.is_some_and(|f| f.code == "run_aborted");
        match record.status {
            SessionStatus::Running => Present::Running(record.stop.map(|stop| stop.kind)),
            SessionStatus::Interrupted | SessionStatus::Paused => Present::Interrupted,
            SessionStatus::Completed => Present::Completed,
            SessionStatus::Failed if aborted => Present::Aborted,
            SessionStatus::Failed => Present::Failed,
        }
    }

    async fn post(&self, route: &str, key: Option<&str>, body: Value) -> (u16, Value) {
        let headers: Vec<_> = key
            .map(|key| ("idempotency-key", key))
            .into_iter()
            .collect();
        let path = format!("/agents/noter/{route}");
        read(
            self.client
                .send("POST", &path, &headers, body.to_string())
                .await,
        )
        .await
    }

    async fn first(&self) -> (u16, Value) {
        let body = json!({"sessionId": "s1", "message": "go"});
        self.post("start", Some("k1"), body).await
    }

    async fn perform(&self, act: Act, may_end: bool) -> Option<(u16, Value)> {
        let bare = json!({"sessionId": "s1"});
        Some(match act {
            Act::Start => {
                let body = json!({"sessionId": "s1", "message": "begin"});
                self.post("start", None, body).await
            }
            Act::StartAgain => self.first().await,
            Act::Continue => self.post("resume", None, bare).await,
            Act::Message => {
                let body = json!({"sessionId": "s1", "message": "more"});
                self.post("resume", None, body).await
            }
            Act::Interrupt => self.post("interrupt", None, bare).await,
            Act::Abort => self.post("abort", None, bare).await,
            Act::Wake => {
                let producer = self.client.objects.producer(&id()).unwrap();
                producer.alarm().await.unwrap();
                return None;
            }
            Act::Crash => {
                self.client.objects.evict(&id()).unwrap();
                return None;
            }
            Act::Delete => {
                let producer = self.client.objects.producer(&id()).unwrap();
                // An object that ends in the same turn cannot say that it is durable.
                let done = producer.delete().await;
                assert!(done.is_ok() || may_end, "{done:?}");
                return None;
            }
        })
    }

    /// Waits, by the stored row alone, until nothing runs.
    async fn at_rest(&self) {
        for _ in 0..200 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            if !matches!(self.present(), Present::Running(_))
                && self.client.objects.pending(&id()) == 0
            {
                return;
            }
        }
        panic!("it goes on for ever: {:?}", self.present());
    }

    /// Brings the session to where the acts meet it, and lets them happen there in one turn. None
    /// when the run had not that many commits.
    async fn happen(self: &Rc<Self>, before: Before, acts: [Act; 2]) -> Option<Happened> {
        let happened = Rc::new(RefCell::new(None));
        let both = {
            let (this, happened) = (self.clone(), happened.clone());
            async move {
                let present = this.present();
                let first = this.first_run();
                let [one, two] = acts;
                let answers = futures::join!(
                    this.perform(one, two == Act::Crash),
                    this.perform(two, false)
                );
                *happened.borrow_mut() = Some(Happened {
                    present,
                    first,
                    answers: [answers.0, answers.1],
                });
            }
        };
        match before {
            Before::Nothing => both.await,
            Before::Commits(number) => {
                let both = Cell::new(Some(both));
                let seen = Cell::new(0);
                self.client.objects.on_commit(Rc::new(move |_, moment| {
                    if moment == CommitMoment::After {
                        seen.set(seen.get() + 1);
                        if seen.get() == number {
                            tokio::task::spawn_local(both.take().unwrap());
                        }
                    }
                }));
                assert_eq!(self.first().await.0, 200);
                tokio::time::sleep(Duration::from_millis(200)).await;
                self.client.objects.on_commit(Rc::new(|_, _| ()));
            }
            _ => {
                self.watch.fails.set(before == Before::Failed);
                assert_eq!(self.first().await.0, 200);
                let stop = match before {
                    Before::Interrupted => Some(Act::Interrupt),
                    Before::Aborted => Some(Act::Abort),
                    _ => None,
                };
                if let Some(stop) = stop {
                    self.perform(stop, false).await;
                }
                self.at_rest().await;
                both.await;
            }
        }
        happened.take()
    }

    fn first_run(&self) -> Option<String> {
        let rows = self
            .store()
            .database()
            .query("SELECT answer FROM ra_idempotency WHERE key = 'k1'", &[])
            .ok()?;
        let Some(SqlValue::Text(answer)) = rows.first()?.first() else {
            return None;
        };
        let answer: Value = serde_json::from_str(answer).unwrap();
        answer["runId"].as_str().map(str::to_owned)
    }

    /// What always holds of a session at rest, whatever happened to it.
    async fn check(&self, what: &str, runs: usize) {
        let path = "/agents/noter/sse?sessionId=s1&fromSequence=0";
        let (frames, _) = self.client.sse(path).await;
        let said = chunks(&frames);
        let numbers: Vec<u64> = frames
            .iter()
            .filter_map(|frame| match frame {
                Frame::Chunk { sequence, .. } => Some(*sequence),
                _ => None,
            })
            .collect();
        let unbroken: Vec<u64> = (1..=numbers.len() as u64).collect();
        assert_eq!(numbers, unbroken, "{what}: numbers");

        // Every run opened once and has its one end, and only the latest is told.
        let of = |kind: &str| -> Vec<&Value> {
            said.iter().filter(|chunk| chunk["type"] == kind).collect()
        };
        let opened: Vec<&str> = said
            .iter()
            .filter(|chunk| chunk["type"] == "run_started" || chunk["type"] == "run_resumed")
            .filter_map(|chunk| chunk["runId"].as_str())
            .collect();
        assert_eq!(opened.len(), runs, "{what}: runs {opened:?}");
        assert_eq!(of("run_started").len(), 1, "{what}");
        let distinct: BTreeSet<_> = opened.iter().collect();
        assert_eq!(distinct.len(), runs, "{what}");
        let store = self.store();
        for run in &opened {
            let run = store.run(run).unwrap().unwrap();
            let ended = run.terminal.unwrap_or_else(|| panic!("{what}: no end"));
            assert_ne!(ended.status, SessionStatus::Running, "{what}");
        }
        let ends = |frame: &&Frame| matches!(frame, Frame::End(_) | Frame::Error(_));
        assert_eq!(frames.iter().filter(ends).count(), 1, "{what}");
        let record = store.session().unwrap().unwrap();
        match frames.last() {
            Some(Frame::End(end)) => {
                assert_eq!(end.status, record.status, "{what}");
                assert_eq!(end.run_id.as_deref(), opened.last().copied(), "{what}");
            }
            Some(Frame::Error(_)) => assert_eq!(record.status, SessionStatus::Failed, "{what}"),
            other => panic!("{what}: {other:?}"),
        }

        // Nothing stands twice, and nothing of it is lost.
        let mut ended = BTreeSet::new();
        for chunk in of("tool_end") {
            let call = chunk["toolCallId"].to_string();
            assert!(ended.insert(call), "{what}: {chunk} stands twice");
        }
        let steps: Vec<u64> = of("step_committed")
            .iter()
            .map(|chunk| chunk["stepCount"].as_u64().unwrap())
            .collect();
        let in_order: Vec<u64> = (1..=steps.len() as u64).collect();
        assert_eq!(steps, in_order, "{what}: steps");
        let noted = of("tool_end")
            .iter()
            .filter(|chunk| chunk["success"] == true)
            .count();
        let checkpoint = store.checkpoint().unwrap().unwrap();
        assert_eq!(checkpoint.state["count"], noted, "{what}: the state");
        assert!(store.step().unwrap().is_none(), "{what}: a step is open");

        let (_, status) = self.client.get("/agents/noter/status?sessionId=s1").await;
        assert_eq!(status["isExecuting"], false, "{what}");
        assert_eq!(status["stepCount"], steps.len(), "{what}");
        assert_eq!(self.client.objects.alarm_at(&id()), None, "{what}");
    }
}

struct Happened {
    /// How the session stood when the acts met it.
    present: Present,
    /// The run of the first start.
    first: Option<String>,
    answers: [Option<(u16, Value)>; 2],
}

fn id() -> SessionId {
    SessionId::parse("s1").unwrap()
}

/// Compares an answer with the table's; where the object ended in the same turn, the answer may
/// not have left it.
fn compare(
    what: &str,
    wanted: Answer,
    got: Option<&(u16, Value)>,
    first: Option<&String>,
    may_be_lost: bool,
) {
    let Some((status, body)) = got else {
        assert_eq!(wanted, Answer::Nothing, "{what}");
        return;
    };
    if may_be_lost && *status == 503 {
        return;
    }
    match wanted {
        Answer::NewRun => {
            assert_eq!(*status, 200, "{what}: {body}");
            assert_ne!(body["runId"].as_str(), first.map(String::as_str), "{what}");
        }
        Answer::SameRun => {
            assert_eq!(*status, 200, "{what}: {body}");
            assert!(body["runId"].is_string(), "{what}: {body}");
            if let Some(first) = first {
                assert_eq!(body["runId"], **first, "{what}");
            }
        }
        Answer::Stop(accepted) => {
            assert_eq!(*status, 200, "{what}: {body}");
            assert_eq!(body["accepted"], accepted, "{what}: {body}");
        }
        Answer::Refused(code, name) => {
            assert_eq!(
                (*status, body["code"].as_str()),
                (code, Some(name)),
                "{what}"
            );
        }
        Answer::Nothing => panic!("{what}: {body}"),
    }
}

/// One pair at one place. Says whether there was such a place.
async fn race(before: Before, acts: [Act; 2]) -> Option<Present> {
    let world = Rc::new(World::new());
    let happened = world.happen(before, acts).await?;
    let Happened {
        present,
        first,
        answers,
    } = happened;
    let what = format!("{acts:?} at {before:?}, {present:?}");
    let had = match (before, present) {
        (Before::Nothing, _) | (_, Present::Absent) => 0,
        _ => 1,
    };
    let mut runs = had;
    let mut now = present;
    let mut first = first;
    let mut keyed = first.is_some();
    for (place, act) in acts.into_iter().enumerate() {
        let (wanted, next) = now.meets(act, keyed);
        let lost = acts.get(place + 1) == Some(&Act::Crash);
        compare(&what, wanted, answers[place].as_ref(), first.as_ref(), lost);
        if wanted == Answer::NewRun {
            runs += 1;
            keyed |= act == Act::StartAgain;
        }
        if next == Present::Absent {
            (runs, first, keyed) = (0, None, false);
        }
        now = next;
    }
    world.at_rest().await;
    assert_eq!(world.present(), now.settled(), "{what}");
    if now == Present::Absent {
        let tables = "SELECT name FROM sqlite_master";
        let left = world.store().database().query(tables, &[]).unwrap();
        assert!(left.is_empty(), "{what}: {left:?}");
        assert_eq!(world.client.objects.alarm_at(&id()), None, "{what}");
    } else {
        world.check(&what, runs).await;
    }
    let is_cut = |act: &Act| matches!(act, Act::Crash | Act::Delete);
    if !acts.iter().any(is_cut) {
        let most = world.watch.most_asked.get();
        assert!(most <= 1, "{what}: {most} executions at once");
    }
    Some(present)
}

#[test]
fn every_pair_at_rest_and_from_nothing_ends_as_the_table_says() {
    in_world(|| async {
        for one in ACTS {
            for two in ACTS {
                for (before, present) in [
                    (Before::Nothing, Present::Absent),
                    (Before::Interrupted, Present::Interrupted),
                    (Before::Completed, Present::Completed),
                    (Before::Failed, Present::Failed),
                    (Before::Aborted, Present::Aborted),
                ] {
                    assert_eq!(race(before, [one, two]).await, Some(present));
                }
            }
        }
    });
}

#[test]
fn every_pair_at_every_commit_of_a_run_ends_as_the_table_says() {
    in_world(|| async {
        for one in ACTS {
            for two in ACTS {
                let (mut running, mut ended) = (0, 0);
                for number in 1.. {
                    match race(Before::Commits(number), [one, two]).await {
                        Some(Present::Running(None)) => running += 1,
                        Some(Present::Completed) => ended += 1,
                        Some(other) => panic!("{one:?}, {two:?} at {number}: {other:?}"),
                        None => break,
                    }
                }
                // The last commit is the run's end; the one before it leaves no room for anybody.
                assert!(ended > 0, "{one:?}, {two:?}");
                assert!(running > 10, "{one:?}, {two:?}: only {running} places");
            }
        }
    });
}
