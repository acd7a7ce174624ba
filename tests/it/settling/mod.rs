//! Every call of a child settles once: lost children, entries with a message, orphans, stops.
//!
//! The names of the tests are the sentences of the rules that they show.

mod entries;
mod fan_out;
mod kills;
mod late;
mod lost;
mod orphans;
mod stopping;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use remote_agents::agent::model::LanguageModel;
use remote_agents::agent::{SubAgent, typed_tool};
use remote_agents::http::{Request, Response};
use remote_agents::mount::Mount;
use remote_agents::native::{LocalObjects, LocalRuntime, MountFetch};
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::store::{MessageRecord, SubLocation};
use remote_agents::transport::{Fetch, FetchError, HttpTransport};
use remote_agents::{Agent, Agents};
use serde_json::{Map, Value, json};

use crate::support::{Client, Lines, Slow, calls, chunks, in_world, scripted, text, turn};

const START: u64 = 1_700_000_000_000;

fn agent_type(name: &str) -> AgentType {
    AgentType::parse(name).unwrap()
}

fn id(text: &str) -> SessionId {
    SessionId::parse(text).unwrap()
}

async fn wait(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

/// The network between the two services: by action, the fault that requests meet.
#[derive(Clone, Default)]
struct Network {
    faults: Rc<RefCell<BTreeMap<&'static str, Fault>>>,
    /// How often each action was asked for.
    asked: Rc<RefCell<BTreeMap<String, usize>>>,
    /// The keys of starts that reached the child's service.
    starts: Rc<RefCell<Vec<String>>>,
    /// The requests that are on their way.
    held: Rc<RefCell<Vec<Held>>>,
}

type Held = LocalBoxFuture<'static, Result<Response, FetchError>>;

#[derive(Clone, Copy)]
enum Fault {
    /// The request never arrives.
    Lost,
    /// It arrives, and its answer does not.
    AnswerLost,
    /// It is on its way until [`Network::deliver`], when nobody waits for its answer any more.
    Held,
    /// The service answers with an envelope of this status and code.
    Refused(u16, &'static str),
}

const ACTIONS: [&str; 6] = ["start", "sse", "status", "snapshot", "usage", "interrupt"];

impl Network {
    fn set(&self, actions: &[&'static str], fault: Fault) {
        for action in actions {
            self.faults.borrow_mut().insert(action, fault);
        }
    }

    fn mend(&self) {
        self.faults.borrow_mut().clear();
    }

    /// What was held arrives.
    async fn deliver(&self) {
        let held = std::mem::take(&mut *self.held.borrow_mut());
        assert!(!held.is_empty());
        for request in held {
            request.await.unwrap();
        }
    }

    fn asked(&self, action: &str) -> usize {
        self.asked.borrow().get(action).copied().unwrap_or(0)
    }
}

struct Line {
    inner: MountFetch,
    network: Network,
}

impl Fetch for Line {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let action = request.uri().path().rsplit('/').next().unwrap().to_owned();
        *self
            .network
            .asked
            .borrow_mut()
            .entry(action.clone())
            .or_default() += 1;
        let fault = self.network.faults.borrow().get(action.as_str()).copied();
        let lost = || Err(FetchError("no answer".into()));
        if let Some(Fault::Lost) = fault {
            return Box::pin(async move { lost() });
        }
        if let Some(Fault::Refused(status, code)) = fault {
            let body = json!({"code": code, "error": "No."}).to_string();
            let answer = http::Response::builder()
                .status(status)
                .header("content-type", "application/json")
                .body(remote_agents::http::Body::Full(body.into()))
                .unwrap();
            return Box::pin(async move { Ok(answer) });
        }
        if action == "start" {
            let key = request.headers()["idempotency-key"].to_str().unwrap();
            self.network.starts.borrow_mut().push(key.to_owned());
        }
        let answer = self.inner.fetch(request);
        if let Some(Fault::Held) = fault {
            self.network.held.borrow_mut().push(answer);
            return Box::pin(futures::future::pending());
        }
        Box::pin(async move {
            let answer = answer.await;
            match fault {
                Some(Fault::AnswerLost) => lost(),
                _ => answer,
            }
        })
    }
}

/// A parent `p` and the service of its children.
struct Pair {
    parent: Client,
    far: Client,
    network: Network,
    lines: Lines,
    /// Whether the parent's agent has its sub-agent: a deployment may take it away.
    has_sub_agent: Rc<Cell<bool>>,
}

struct Setup {
    child: Rc<dyn LanguageModel>,
    parent: Rc<dyn LanguageModel>,
    max_children: usize,
    /// Minutes that a call may take.
    minutes: u64,
}

impl Setup {
    fn new(child: Rc<dyn LanguageModel>) -> Self {
        Self {
            child,
            parent: scripted(|request| {
                match (turn(request), last_word(request.messages.as_ref())) {
                    (0, "go") => calls(&[("c1", "subagent__ask", json!({"message": "please"}))]),
                    _ => text("parent is done"),
                }
            }),
            max_children: 4,
            minutes: 15,
        }
    }

    fn pair(self) -> Pair {
        let network = Network::default();
        let lines = Lines::default();
        let child = self.child;
        let producer = LocalObjects::new(
            START,
            lines.sink(),
            Rc::new(move |_, _| {
                Agents::new([Agent::new(agent_type("child"), "Work.", child.clone())])
            }),
        );
        let mount = Rc::new(Mount::new("/agents").allow_unauthenticated());
        let far = Client {
            mount: mount.clone(),
            objects: producer.clone(),
        };
        let has_sub_agent = Rc::new(Cell::new(true));
        let (line, has) = (network.clone(), has_sub_agent.clone());
        let (model, max_children, minutes) = (self.parent, self.max_children, self.minutes);
        let objects = LocalObjects::new(
            START,
            lines.sink(),
            Rc::new(move |_, runtime| {
                let fetch = Line {
                    inner: MountFetch::new(mount.clone(), producer.clone()),
                    network: line.clone(),
                };
                let transport = HttpTransport::new(
                    Rc::new(fetch) as Rc<dyn Fetch>,
                    runtime.clone() as Rc<LocalRuntime>,
                    "http://producer",
                    "/agents",
                    agent_type("child"),
                );
                let mut sub = SubAgent::new(
                    "ask",
                    "Asks.",
                    agent_type("child"),
                    SubLocation::Remote,
                    Rc::new(transport),
                );
                sub.policy.call_timeout = Duration::from_secs(minutes * 60);
                let mut agent = Agent::new(agent_type("parent"), "Delegate.", model.clone())
                    .with_state::<Map<String, Value>>()
                    .with_tool(typed_tool(
                        "note",
                        "Notes.",
                        |context, note: Map<String, Value>| async move {
                            context.update(|state: &mut Map<String, Value>| state.extend(note))?;
                            Ok(json!("noted"))
                        },
                    ))
                    .with_after_sub_agent(|payload, context| {
                        let success = payload.success;
                        context.update(|state: &mut Map<String, Value>| {
                            state.insert("research".into(), json!({ "success": success }));
                        })
                    });
                agent.limits.max_children = max_children;
                if has.get() {
                    agent = agent.with_sub_agent(sub);
                }
                Agents::new([agent])
            }),
        );
        Pair {
            parent: Client {
                mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
                objects,
            },
            far,
            network,
            lines,
            has_sub_agent,
        }
    }
}

fn last_word(messages: &[MessageRecord]) -> &str {
    let user = messages.iter().rev().find_map(|message| match message {
        MessageRecord::User { text } => Some(text.as_str()),
        _ => None,
    });
    user.unwrap_or_default()
}

/// A child that says a word now and then for `seconds`.
fn working_for(seconds: u64) -> Rc<dyn LanguageModel> {
    Rc::new(Slow {
        words: 1,
        pause: Duration::from_secs(seconds / 2),
    })
}

impl Pair {
    async fn begin(&self) {
        let body = json!({"sessionId": "p", "message": "go"});
        let (status, body) = self.parent.post("/agents/parent/start", body).await;
        assert_eq!(status, 200, "{body}");
    }

    async fn resume(&self, body: Value) -> (u16, Value) {
        let mut all = json!({"sessionId": "p"});
        all.as_object_mut()
            .unwrap()
            .extend(body.as_object().unwrap().clone());
        self.parent.post("/agents/parent/resume", all).await
    }

    async fn settled(&self) -> Value {
        self.parent.settled("parent", "p").await
    }

    async fn log(&self) -> Vec<Value> {
        let path = "/agents/parent/sse?sessionId=p&fromSequence=0";
        chunks(&self.parent.sse(path).await.0)
    }

    fn evict(&self) {
        self.parent.objects.evict(&id("p")).unwrap();
    }

    fn sql(&self, statement: &str) {
        let database = self.parent.objects.database(&id("p")).unwrap();
        use remote_agents::store::Database as _;
        database.query(statement, &[]).unwrap();
    }

    fn child(&self) -> SessionId {
        let mut sessions = self.far.objects.sessions();
        sessions.retain(|session| session.as_str().contains("-c1-"));
        assert_eq!(sessions.len(), 1, "{sessions:?}");
        sessions[0].clone()
    }

    async fn child_status(&self) -> Value {
        let path = format!("/agents/child/status?sessionId={}", self.child());
        self.far.get(&path).await.1
    }

    /// Each ref's call and status.
    fn refs(&self) -> Vec<(String, String)> {
        use remote_agents::store::{Database as _, SqlValue};
        let database = self.parent.objects.database(&id("p")).unwrap();
        let text = |cell: &SqlValue| match cell {
            SqlValue::Text(text) => text.clone(),
            other => panic!("{other:?}"),
        };
        let rows = "SELECT tool_call_id, status FROM ra_sub_sessions ORDER BY position";
        let rows = database.query(rows, &[]).unwrap();
        rows.iter()
            .map(|row| (text(&row[0]), text(&row[1])))
            .collect()
    }

    /// The parent dies again and again without any progress, until its run has failed. Its child
    /// goes on.
    async fn fail_the_run(&self) {
        for _ in 0..20 {
            wait(2_500).await;
            self.evict();
        }
        let settled = self.settled().await;
        assert_eq!(settled["errorCode"], "run_attempts_exhausted", "{settled}");
        assert_eq!(self.child_status().await["status"], "running");
    }

    /// The conversation as the model reads it, in short.
    fn conversation(&self) -> Vec<String> {
        use remote_agents::store::{Database as _, SqlValue};
        let database = self.parent.objects.database(&id("p")).unwrap();
        let rows = database
            .query("SELECT body FROM ra_messages ORDER BY position", &[])
            .unwrap();
        rows.iter()
            .map(|row| {
                let SqlValue::Text(body) = &row[0] else {
                    panic!("{row:?}")
                };
                match serde_json::from_str(body).unwrap() {
                    MessageRecord::User { text } => format!("user {text}"),
                    MessageRecord::Assistant {
                        text, tool_calls, ..
                    } => format!("assistant {text}{}", tool_calls.len()),
                    MessageRecord::Tool {
                        tool_call_id,
                        outcome,
                        ..
                    } => {
                        let detail = &outcome.result["metadata"]["helixErrorDetail"];
                        let told = detail["code"].as_str().unwrap_or("ok").to_owned();
                        format!("tool {tool_call_id} {told}")
                    }
                }
            })
            .collect()
    }
}

/// The session's own chunks of one type.
fn own<'a>(log: &'a [Value], kind: &str) -> Vec<&'a Value> {
    let of = |chunk: &&Value| chunk.get("remoteSource").is_none() && chunk["type"] == kind;
    log.iter().filter(of).collect()
}

/// Each announced child has one end, with its call's end right behind; no call ends twice.
fn assert_settled(log: &[Value]) {
    let mine: Vec<&Value> = log
        .iter()
        .filter(|chunk| chunk.get("remoteSource").is_none())
        .collect();
    let mut starts: Vec<&Value> = own(log, "subagent_start");
    starts.sort_by_key(|chunk| chunk["toolCallId"].to_string());
    let mut ends: Vec<&Value> = own(log, "subagent_end");
    ends.sort_by_key(|chunk| chunk["toolCallId"].to_string());
    let ids = |chunks: &[&Value]| -> Vec<(Value, Value)> {
        chunks
            .iter()
            .map(|chunk| (chunk["toolCallId"].clone(), chunk["subSessionId"].clone()))
            .collect()
    };
    assert_eq!(ids(&starts), ids(&ends));
    for (at, chunk) in mine.iter().enumerate() {
        if chunk["type"] == "subagent_end" {
            let next = mine[at + 1];
            assert_eq!(next["type"], "tool_end", "{next}");
            assert_eq!(next["toolCallId"], chunk["toolCallId"]);
        }
    }
    let results = own(log, "tool_end");
    let mut seen = std::collections::BTreeSet::new();
    for result in results {
        assert!(seen.insert(result["toolCallId"].to_string()), "{result}");
    }
    let mut forwarded = std::collections::BTreeSet::new();
    for chunk in log {
        if let Some(source) = chunk.get("remoteSource") {
            assert!(forwarded.insert(source.to_string()), "{source} twice");
        }
    }
}

fn detail(chunk: &Value) -> &Value {
    &chunk["result"]["metadata"]["helixErrorDetail"]
}
