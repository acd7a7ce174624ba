//! Both services as they are deployed, but for the platform.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use consumer_worker::proxy::{ChildProxy, Reading};
use consumer_worker::sources::{self, Sources};
use futures::StreamExt as _;
use futures::future::{LocalBoxFuture, pending};
use futures::stream;
use remote_agents::agent::OfflineModel;
use remote_agents::agent::model::{LanguageModel, ModelRequest, ModelStream};
use remote_agents::http::{Body, Request, Response};
use remote_agents::mount::{Mount, Objects, serve};
use remote_agents::native::{
    CommitMoment, LocalObjects, LocalRuntime, MountFetch, OnCommit, OnObjectEffect,
};
use remote_agents::platform::Runtime;
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::sse::{Decoded, Decoder};
use remote_agents::store::{CheckpointRecord, Database, SqlStore, Store as _};
use remote_agents::transport::{Fetch, FetchError, HttpTransport, ObjectsFetch, Transport};
use serde_json::{Value, json};

use crate::paired;

pub const KEY: &str = "the-right-key";
pub const WRITER: &str = "job";
const BASE: u64 = 1_700_000_000_000;

/// Runs a test on one thread with a virtual clock: a wait is over as soon as nothing else can run.
/// In no history that a model was sent meanwhile may a call be without its one result.
pub fn in_world<T: 'static, F: Future<Output = T> + 'static>(
    test: impl FnOnce(World) -> F + 'static,
) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let local = tokio::task::LocalSet::new();
    paired::findings();
    let came_to = local.block_on(&runtime, async move {
        tokio::task::spawn_local(async move { test(World::new()).await })
            .await
            .unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    });
    assert_eq!(paired::findings(), Vec::<String>::new());
    came_to
}

/// Lets virtual time pass, and with it every other task run.
pub async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

/// The offline model with a millisecond before each event, as a provider takes its time. Tells of
/// each question and each event of an answer.
struct Paced {
    model: OfflineModel,
    of: Rc<LocalRuntime>,
}

impl LanguageModel for Paced {
    fn name(&self) -> &str {
        self.model.name()
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        self.of.tell(ASKED);
        if let Err(broken) = paired::read(&request) {
            return Box::pin(stream::iter([Err(broken)]));
        }
        let answer = (self.model.stream(request), self.of.clone());
        Box::pin(stream::unfold(answer, |(mut events, of)| async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let event = events.next().await?;
            of.tell(ANSWERED);
            Some((event, (events, of)))
        }))
    }
}

/// A model is asked; a piece of its answer comes; a request leaves; its answer comes.
pub const ASKED: &str = "asked";
pub const ANSWERED: &str = "answered";
pub const SENT: &str = "sent";
pub const RECEIVED: &str = "received";

/// A request that crossed from one object to another, or to the other service.
pub struct Sent {
    pub text: String,
    pub header_names: Vec<String>,
}

/// Notes every request; one of an object that has ended never leaves.
struct Recorder {
    inner: Rc<dyn Fetch>,
    of: Rc<LocalRuntime>,
    sent: Rc<RefCell<Vec<Sent>>>,
}

impl Fetch for Recorder {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        if self.of.is_ended() {
            return Box::pin(pending());
        }
        let body = String::from_utf8_lossy(request.body());
        self.sent.borrow_mut().push(Sent {
            text: format!(
                "{} {}\n{:?}\n{body}",
                request.method(),
                request.uri(),
                request.headers()
            ),
            header_names: request.headers().keys().map(ToString::to_string).collect(),
        });
        self.of.tell(SENT);
        if self.of.is_ended() {
            return Box::pin(pending());
        }
        let (answer, of) = (self.inner.fetch(request), self.of.clone());
        Box::pin(async move {
            let answer = answer.await;
            of.tell(RECEIVED);
            if of.is_ended() {
                return pending().await;
            }
            answer
        })
    }
}

/// Whose mount a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Consumer,
    Internal,
    Public,
}

/// The writers' objects as their class is: they tell their documents, too.
struct WithDocuments(Rc<LocalObjects>);

struct Documented(Rc<LocalObjects>, SessionId);

impl Objects for WithDocuments {
    fn object(&self, session: &SessionId) -> Rc<dyn Fetch> {
        Rc::new(Documented(self.0.clone(), session.clone()))
    }
}

impl Fetch for Documented {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        if request.uri().path() != sources::OF_OBJECT {
            return self.0.object(&self.1).fetch(request);
        }
        let database = self.0.database(&self.1).unwrap();
        Box::pin(async move { Ok(sources::of_object(&*database)) })
    }
}

#[derive(Clone)]
pub struct World {
    pub writers: Rc<LocalObjects>,
    pub researchers: Rc<LocalObjects>,
    pub lines: Rc<RefCell<Vec<String>>>,
    pub sent: Rc<RefCell<Vec<Sent>>>,
    /// Every checkpoint that there ever was, by its id; a store keeps the latest alone.
    pub checkpoints: Rc<RefCell<BTreeMap<String, CheckpointRecord>>>,
    /// Is told of every transaction of both services.
    pub watcher: Rc<RefCell<Option<OnCommit>>>,
    /// Is told of every effect of both services.
    pub effects: Rc<RefCell<Option<OnObjectEffect>>>,
    consumer: Rc<Mount>,
    internal: Rc<Mount>,
    public: Rc<Mount>,
}

impl World {
    fn new() -> Self {
        let lines: Rc<RefCell<Vec<String>>> = Rc::default();
        let sent: Rc<RefCell<Vec<Sent>>> = Rc::default();
        let log = {
            let lines = lines.clone();
            move || {
                let lines = lines.clone();
                Rc::new(move |_, line: &str| lines.borrow_mut().push(line.to_owned()))
            }
        };
        let researchers = {
            let sent = sent.clone();
            LocalObjects::new(
                BASE,
                log(),
                Rc::new(move |objects: &Rc<LocalObjects>, runtime| {
                    let fetch = Recorder {
                        inner: Rc::new(ObjectsFetch::new(objects.clone())),
                        of: runtime.clone(),
                        sent: sent.clone(),
                    };
                    let researchers = HttpTransport::new(
                        Rc::new(fetch),
                        runtime.clone() as Rc<dyn Runtime>,
                        "http://object",
                        "",
                        AgentType::parse(producer_worker::researcher::AGENT_TYPE)?,
                    );
                    producer_worker::agents::agents(
                        Rc::new(Paced {
                            model: OfflineModel::new(),
                            of: runtime.clone(),
                        }),
                        Rc::new(researchers),
                    )
                }),
            )
        };
        let internal = Rc::new(producer_worker::mounts::internal().unwrap());
        let writers = {
            let (sent, internal, researchers) =
                (sent.clone(), internal.clone(), researchers.clone());
            LocalObjects::new(
                BASE,
                log(),
                Rc::new(move |_: &Rc<LocalObjects>, runtime| {
                    let fetch = Recorder {
                        inner: Rc::new(MountFetch::new(internal.clone(), researchers.clone())),
                        of: runtime.clone(),
                        sent: sent.clone(),
                    };
                    let planner = HttpTransport::new(
                        Rc::new(fetch),
                        runtime.clone() as Rc<dyn Runtime>,
                        "http://service",
                        consumer_worker::mounts::PRODUCER,
                        AgentType::parse(consumer_worker::writer::RESEARCH_AGENT_TYPE)?,
                    );
                    consumer_worker::agents::agents(
                        Rc::new(Paced {
                            model: OfflineModel::new(),
                            of: runtime.clone(),
                        }),
                        Rc::new(planner),
                    )
                }),
            )
        };
        let world = Self {
            writers,
            researchers,
            lines,
            sent,
            checkpoints: Rc::default(),
            watcher: Rc::default(),
            effects: Rc::default(),
            consumer: Rc::new(consumer_worker::mounts::public(Some(KEY.into())).unwrap()),
            internal,
            public: Rc::new(producer_worker::mounts::public(Some(KEY.into())).unwrap()),
        };
        for objects in [&world.writers, &world.researchers] {
            let (checkpoints, watcher) = (world.checkpoints.clone(), world.watcher.clone());
            let effects = world.effects.clone();
            objects.on_effect(Rc::new(move |session, effect| {
                let watcher = effects.borrow().clone();
                if let Some(watcher) = watcher {
                    watcher(session, effect);
                }
            }));
            let of = Rc::downgrade(objects);
            objects.on_commit(Rc::new(move |session, moment| {
                let database = of.upgrade().and_then(|objects| objects.database(session));
                if let (CommitMoment::After, Some(database)) = (moment, database) {
                    let store = SqlStore::new(database as Rc<dyn Database>);
                    if let Some(checkpoint) = store.checkpoint().unwrap() {
                        let id = checkpoint.checkpoint_id.clone();
                        checkpoints.borrow_mut().entry(id).or_insert(checkpoint);
                    }
                }
                let watcher = watcher.borrow().clone();
                if let Some(watcher) = watcher {
                    watcher(session, moment);
                }
            }));
        }
        world
    }

    pub fn mount(&self, side: Side) -> &Rc<Mount> {
        match side {
            Side::Consumer => &self.consumer,
            Side::Internal => &self.internal,
            Side::Public => &self.public,
        }
    }

    pub async fn request(&self, side: Side, request: Request) -> Response {
        if side == Side::Consumer
            && let Some(reading) = Reading::of_path(request.uri().path())
        {
            return self.read_child(reading, &request).await;
        }
        if side == Side::Consumer && request.uri().path() == sources::PATH {
            return self.documents(&request).await;
        }
        let objects = match side {
            Side::Consumer => &self.writers,
            Side::Internal | Side::Public => &self.researchers,
        };
        serve(self.mount(side), &**objects, request).await
    }

    async fn documents(&self, request: &Request) -> Response {
        Sources {
            mount: &self.consumer,
            base_path: consumer_worker::mounts::PUBLIC,
            agent_type: &AgentType::parse(consumer_worker::writer::AGENT_TYPE).unwrap(),
            objects: &WithDocuments(self.writers.clone()),
        }
        .answer(request)
        .await
    }

    async fn read_child(&self, reading: Reading, request: &Request) -> Response {
        let runtime = LocalRuntime::new(BASE, Rc::new(|_, _| {}));
        let children = |child_type| {
            let fetch = Recorder {
                inner: Rc::new(MountFetch::new(
                    self.internal.clone(),
                    self.researchers.clone(),
                )),
                of: runtime.clone(),
                sent: self.sent.clone(),
            };
            Rc::new(HttpTransport::new(
                Rc::new(fetch),
                runtime.clone() as Rc<dyn Runtime>,
                "http://service",
                consumer_worker::mounts::PRODUCER,
                child_type,
            )) as Rc<dyn Transport>
        };
        ChildProxy {
            mount: &self.consumer,
            base_path: consumer_worker::mounts::PUBLIC,
            agent_type: &AgentType::parse(consumer_worker::writer::AGENT_TYPE).unwrap(),
            objects: &*self.writers,
            children: &children,
        }
        .answer(reading, request)
        .await
    }

    pub async fn send(
        &self,
        side: Side,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Response {
        let mut request = http::Request::builder().method(method).uri(path);
        if side != Side::Internal {
            request = request.header("authorization", format!("Bearer {KEY}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.request(side, request.body(body.into()).unwrap()).await
    }

    pub async fn post(&self, side: Side, path: &str, body: Value) -> (u16, Value) {
        whole(self.send(side, "POST", path, &[], body.to_string()).await).await
    }

    pub async fn get(&self, side: Side, path: &str) -> (u16, Value) {
        whole(self.send(side, "GET", path, &[], "").await).await
    }

    /// Starts the writer; tried again with its key while its object does not answer, as a client
    /// does.
    pub async fn start(&self, topic: &str, documents: &[Value]) {
        let mut body = json!({ "sessionId": WRITER, "message": topic });
        if !documents.is_empty() {
            body["state"] = json!({ "documents": documents });
        }
        for _ in 0..4 {
            let headers = [("idempotency-key", "start-1")];
            let path = "/agents/writer/start";
            let sent = self.send(Side::Consumer, "POST", path, &headers, body.to_string());
            match whole(sent.await).await {
                (200, _) => return,
                (503, _) => pass(Duration::from_millis(500)).await,
                refused => panic!("{refused:?}"),
            }
        }
        panic!("the writer cannot be started")
    }

    /// Follows a session from a cursor to its terminal frame, re-attaching where a stream breaks
    /// off. Every number must be the next one.
    pub async fn follow(&self, side: Side, agent_type: &str, session: &str) -> (Log, Frame) {
        let base = match side {
            Side::Internal => "/internal/agents",
            Side::Consumer | Side::Public => "/agents",
        };
        let mut log = Log::new();
        for _ in 0..200 {
            let from = log.last().map_or(0, |(sequence, _)| *sequence);
            let path = format!("{base}/{agent_type}/sse?sessionId={session}&fromSequence={from}");
            let response = self.send(side, "GET", &path, &[], "").await;
            let status = response.status();
            let Body::Stream(mut body) = response.into_body() else {
                assert_eq!(status, 503, "{path}");
                pass(Duration::from_millis(300)).await;
                continue;
            };
            let mut decoder = Decoder::new();
            while let Some(Ok(part)) = body.next().await {
                decoder.push(&part);
                while let Some(decoded) = decoder.poll().unwrap() {
                    match decoded {
                        Decoded::Frame(Frame::Chunk { sequence, chunk }) => {
                            let last = log.last().map_or(0, |(sequence, _)| *sequence);
                            if side != Side::Public {
                                assert_eq!(sequence, last + 1, "a gap or a repetition");
                            }
                            log.push((sequence, Value::Object(chunk.0)));
                        }
                        Decoded::Frame(Frame::Error(error)) if error.recoverable => {}
                        Decoded::Frame(frame @ (Frame::End(_) | Frame::Error(_))) => {
                            return (log, frame);
                        }
                        _ => {}
                    }
                }
            }
            pass(Duration::from_millis(300)).await;
        }
        panic!("the stream of {session} never ends")
    }

    pub async fn follow_writer(&self) -> (Log, Frame) {
        self.follow(Side::Consumer, "writer", WRITER).await
    }

    /// Waits until the writer is not running any more, by its status alone: that wakes nothing.
    pub async fn rest(&self) -> Value {
        let mut misses = 0;
        for _ in 0..4000 {
            pass(Duration::from_millis(250)).await;
            let path = format!("/agents/writer/status?sessionId={WRITER}");
            match self.get(Side::Consumer, &path).await {
                (200, status) if status["status"] != "running" => return status,
                (200, _) => {}
                _ => misses += 1,
            }
            assert!(misses < 10, "the writer does not answer");
        }
        panic!("the writer never rests")
    }

    /// Every session of both services with its type, the writer first.
    pub fn sessions(&self) -> Vec<(SessionId, &'static str)> {
        let mut sessions: Vec<_> = self
            .writers
            .sessions()
            .into_iter()
            .map(|id| (id, "writer"))
            .chain(self.researchers.sessions().into_iter().map(|id| {
                let researcher = id.as_str().contains("-sub-");
                (
                    id,
                    if researcher {
                        "thread-researcher"
                    } else {
                        "planner"
                    },
                )
            }))
            .filter(|(id, _)| self.store(id).session().unwrap().is_some())
            .collect();
        sessions.sort();
        sessions
    }

    pub fn store(&self, session: &SessionId) -> SqlStore {
        let has = |objects: &LocalObjects| objects.database(session);
        let database = has(&self.writers)
            .filter(|database| {
                let store = SqlStore::new(database.clone() as Rc<dyn Database>);
                store.session().unwrap().is_some()
            })
            .or_else(|| has(&self.researchers))
            .unwrap();
        SqlStore::new(database as Rc<dyn Database>)
    }

    pub async fn usage(&self, session: &SessionId, agent_type: &str) -> Value {
        let (side, base) = match agent_type {
            "writer" => (Side::Consumer, "/agents"),
            _ => (Side::Internal, "/internal/agents"),
        };
        let path = format!("{base}/{agent_type}/usage?sessionId={session}");
        let (status, body) = self.get(side, &path).await;
        assert_eq!(status, 200, "{body}");
        body["rollup"].clone()
    }
}

/// A session's chunks by their numbers.
pub type Log = Vec<(u64, Value)>;

pub async fn whole(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let bytes = response.into_body().collect(64 << 20).await.unwrap();
    let text = || json!(String::from_utf8_lossy(&bytes));
    (
        status,
        serde_json::from_slice(&bytes).unwrap_or_else(|_| text()),
    )
}
