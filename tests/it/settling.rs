//! Every call of a child settles once: lost children, entries with a message, orphans, stops.
//!
//! The names of the tests are the sentences of the rules that they show.

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
}

#[derive(Clone, Copy)]
enum Fault {
    /// The request never arrives.
    Lost,
    /// It arrives, and its answer does not.
    AnswerLost,
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

// A child the parent cannot find settles framework_subagent_lost.

#[test]
fn not_found_the_child_s_producer_does_not_know_the_session() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.network
            .set(&["sse", "status"], Fault::Refused(404, "NOT_FOUND"));
        pair.evict();
        let settled = pair.settled().await;
        assert_eq!(settled["status"], "completed", "the run goes on: {settled}");
        let log = pair.log().await;
        assert_settled(&log);
        let expected = json!({"code": "framework_subagent_lost", "category": "framework",
            "retryable": false, "cause": "not_found"});
        assert_eq!(detail(own(&log, "tool_end")[0]), &expected);
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
    });
}

#[test]
fn refused_code_the_producer_refused_the_status_read_typed_and_non_retryable() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.network
            .set(&["sse", "status"], Fault::Refused(401, "UNAUTHORIZED"));
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        let told = detail(own(&log, "tool_end")[0]);
        assert_eq!(told["code"], "framework_subagent_lost");
        assert_eq!(told["cause"], "refused:UNAUTHORIZED");
    });
}

#[test]
fn status_unreachable_past_the_child_s_own_timeout_plus_one_minute_of_grace() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(10_000));
        setup.minutes = 5;
        let pair = setup.pair();
        let begun = tokio::time::Instant::now();
        pair.begin().await;
        wait(5_000).await;
        pair.network.set(&ACTIONS, Fault::Lost);
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        let took = begun.elapsed().as_secs();
        assert!((360..390).contains(&took), "{took} s");
        let log = pair.log().await;
        assert_settled(&log);
        let told = detail(own(&log, "tool_end")[0]);
        assert_eq!(told["code"], "framework_subagent_lost");
        assert_eq!(told["cause"], "status_unreachable");
        // It may be at work all the same: that is said, and it is told later.
        let untold = own(&log, "custom");
        assert_eq!(untold[0]["eventName"], "sub_agent_stop_undelivered");
        assert_eq!(untold[0]["data"]["toolCallId"], "c1");
        assert_eq!(pair.refs(), [("c1".into(), "stopping".into())]);
        pair.network.mend();
        assert_eq!(pair.child_status().await["status"], "running");
        let (status, _) = pair.resume(json!({"message": "and?"})).await;
        assert_eq!(status, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        wait(5_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
        assert_settled(&pair.log().await);
    });
}

#[test]
fn any_other_failure_is_transient() {
    in_world(|| async {
        let pair = Setup::new(working_for(120)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.network
            .set(&ACTIONS, Fault::Refused(503, "OVERLOADED"));
        pair.evict();
        wait(100_000).await;
        let warned = pair
            .lines
            .0
            .borrow()
            .iter()
            .any(|line| line.contains("status cannot be read"));
        assert!(warned, "it is logged at warn");
        pair.network.mend();
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(own(&log, "tool_end")[0]["success"], true);
        assert_eq!(pair.network.starts.borrow().len(), 1);
    });
}

#[test]
fn a_child_whose_start_never_answered_is_reconciled_too() {
    in_world(|| async {
        // The request arrives, and no answer ever does; the parent is evicted meanwhile.
        let mut setup = Setup::new(working_for(600));
        setup.minutes = 1;
        let pair = setup.pair();
        pair.network.set(&["start"], Fault::AnswerLost);
        pair.begin().await;
        wait(300).await;
        pair.network.set(&["start"], Fault::Lost);
        // Away until the call's time is over: then the status tells.
        pair.sql("UPDATE ra_sub_sessions SET deadline = 1700000000100");
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(detail(own(&log, "tool_end")[0])["code"], "run_timeout");
        wait(1_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
    });
}

#[test]
fn a_child_that_finished_while_the_parent_was_away_counts_also_past_its_deadline() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(120));
        setup.minutes = 2;
        let pair = setup.pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        wait(600_000).await;
        let (status, _) = pair.resume(json!({})).await;
        assert_eq!(status, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(own(&log, "tool_end")[0]["success"], true);
    });
}

// An entry with a new message settles its remote children first.

#[test]
fn a_child_that_finished_has_its_real_result_committed_before_the_message() {
    for mode in ["with_message", "new_turn"] {
        in_world(move || async move {
            let pair = Setup::new(working_for(120)).pair();
            pair.begin().await;
            wait(5_000).await;
            pair.fail_the_run().await;
            wait(200_000).await;
            assert_eq!(pair.child_status().await["status"], "completed");
            let (status, body) = pair.resume(json!({"mode": mode, "message": "and?"})).await;
            assert_eq!(status, 200, "{body}");
            let settled = pair.settled().await;
            assert_eq!(settled["status"], "completed", "{settled}");
            assert_eq!(
                pair.conversation(),
                [
                    "user go",
                    "assistant 1",
                    "tool c1 ok",
                    "user and?",
                    "assistant parent is done0"
                ]
            );
            let log = pair.log().await;
            assert_settled(&log);
            // All of the child's words are there, and the hook has run.
            let words = |chunk: &&Value| chunk["type"] == "text_delta" && chunk["delta"] == "w0 ";
            assert_eq!(log.iter().filter(words).count(), 1);
            let (_, snapshot) = pair.parent.get("/agents/parent/snapshot?sessionId=p").await;
            assert_eq!(snapshot["state"], json!({"research": {"success": true}}));
        });
    }
}

#[test]
fn a_child_that_is_lost_has_its_typed_result_committed_before_the_message() {
    for mode in ["with_message", "new_turn"] {
        in_world(move || async move {
            let pair = Setup::new(working_for(10_000)).pair();
            pair.begin().await;
            wait(5_000).await;
            pair.fail_the_run().await;
            pair.network
                .set(&["sse", "status"], Fault::Refused(404, "NOT_FOUND"));
            let (status, body) = pair.resume(json!({"mode": mode, "message": "and?"})).await;
            assert_eq!(status, 200, "{body}");
            assert_eq!(pair.settled().await["status"], "completed");
            assert_eq!(
                pair.conversation(),
                [
                    "user go",
                    "assistant 1",
                    "tool c1 framework_subagent_lost",
                    "user and?",
                    "assistant parent is done0"
                ]
            );
            assert_settled(&pair.log().await);
        });
    }
}

#[test]
fn a_child_that_is_still_running_refuses_the_entry_busy_and_writes_nothing() {
    in_world(|| async {
        let pair = Setup::new(working_for(400)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        let before = pair.log().await;
        for fault in [None, Some(Fault::Lost)] {
            // Running, or nothing can be learned of it now: either way it is not settled.
            if let Some(fault) = fault {
                pair.network.set(&["status"], fault);
            }
            let body = json!({"mode": "with_message", "message": "and?"});
            let (status, body) = pair.resume(body).await;
            assert_eq!(
                (status, body["code"].as_str()),
                (409, Some("state_already_running"))
            );
        }
        pair.network.mend();
        assert_eq!(pair.log().await, before);
        assert_eq!(pair.conversation(), ["user go"]);
        assert_eq!(pair.child_status().await["status"], "running");
        // Hold the message and send it again once the child has finished.
        wait(400_000).await;
        let (status, _) = pair.resume(json!({"message": "and?"})).await;
        assert_eq!(status, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(pair.conversation()[2..4], ["tool c1 ok", "user and?"]);
    });
}

#[test]
fn on_a_new_turn_the_child_is_stopped_and_its_call_keeps_unpaired_on_continuation() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        let body = json!({"mode": "new_turn", "message": "something else"});
        let (status, body) = pair.resume(body).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(pair.settled().await["status"], "completed");
        wait(1_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
        assert_eq!(
            pair.conversation()[1..4],
            [
                "assistant 1",
                "tool c1 unpaired_on_continuation",
                "user something else"
            ]
        );
        let log = pair.log().await;
        assert_settled(&log);
        let expected = json!({"code": "unpaired_on_continuation", "category": "framework",
            "retryable": false, "cause": "new_message"});
        assert_eq!(detail(own(&log, "tool_end")[0]), &expected);
    });
}

#[test]
fn on_an_entry_with_no_new_message_nothing_changes_and_the_run_reattaches_to_the_child() {
    in_world(|| async {
        let pair = Setup::new(working_for(400)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        let (status, _) = pair.resume(json!({"mode": "continue"})).await;
        assert_eq!(status, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(own(&log, "tool_end")[0]["success"], true);
        assert_eq!(pair.network.starts.borrow().len(), 1);
        let resumed = log.iter().position(|chunk| chunk["type"] == "run_resumed");
        let ended = log.iter().position(|chunk| chunk["type"] == "tool_end");
        assert!(resumed < ended);
    });
}

#[test]
fn a_message_that_waits_behind_a_call_survives_evictions() {
    in_world(|| async {
        let pair = Setup::new(working_for(120)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        wait(200_000).await;
        // The child's stream cannot be read for a while: the call stays open, the message waits.
        pair.network.set(&["sse"], Fault::Lost);
        let headers = [("idempotency-key", "once")];
        let body = json!({"sessionId": "p", "message": "and?"}).to_string();
        for _ in 0..2 {
            let answer = pair
                .parent
                .send("POST", "/agents/parent/resume", &headers, body.clone())
                .await;
            assert_eq!(answer.status(), 200);
            pair.evict();
        }
        pair.network.mend();
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(
            pair.conversation()[1..4],
            ["assistant 1", "tool c1 ok", "user and?"]
        );
        assert_settled(&pair.log().await);
    });
}

// Orphans.

#[test]
fn a_non_terminal_child_whose_call_did_not_survive_is_an_orphan() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        // The step is gone with its call, as after a truncation; the ref is live.
        pair.sql("DELETE FROM ra_tool_calls");
        pair.sql("DELETE FROM ra_step");
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(pair.child_status().await["status"], "interrupted");
        let log = pair.log().await;
        let mut ends = own(&log, "subagent_end");
        ends.retain(|end| end["toolCallId"] == "c1");
        assert_eq!(ends.len(), 1);
        assert_eq!(
            (&ends[0]["success"], &ends[0]["toolCallId"]),
            (&json!(false), &json!("c1"))
        );
        assert_eq!(pair.refs()[0], ("c1".into(), "failed".into()));
        // Orphan spend is counted.
        let (_, usage) = pair.parent.get("/agents/parent/usage?sessionId=p").await;
        let sessions = usage["rollup"]["subAgents"]["sessions"].as_array().unwrap();
        let child = pair.child().to_string();
        let orphan = sessions
            .iter()
            .find(|one| one["subSessionId"] == child.as_str());
        assert_eq!(orphan.unwrap()["remoteRollupOrigin"], "recovery");
    });
}

#[test]
fn a_terminal_child_whose_call_did_not_survive_is_reconciled_into_the_parent() {
    in_world(|| async {
        let pair = Setup::new(working_for(120)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        wait(120_000).await;
        pair.sql("DELETE FROM ra_tool_calls");
        pair.sql("DELETE FROM ra_step");
        pair.evict();
        assert_eq!(pair.resume(json!({})).await.0, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_eq!(own(&log, "subagent_end")[0]["success"], true);
        assert_eq!(pair.refs()[0], ("c1".into(), "completed".into()));
    });
}

#[test]
fn a_transient_failure_leaves_the_orphan_to_the_next_reconcile() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        pair.sql("DELETE FROM ra_tool_calls");
        pair.sql("DELETE FROM ra_step");
        pair.evict();
        pair.network.set(&["status"], Fault::Lost);
        assert_eq!(pair.resume(json!({"message": "hm"})).await.0, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(pair.refs()[0], ("c1".into(), "running".into()));
        pair.network.mend();
        assert_eq!(pair.resume(json!({"message": "hm"})).await.0, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(pair.refs()[0], ("c1".into(), "failed".into()));
        assert_eq!(own(&pair.log().await, "subagent_end").len(), 1);
        assert_eq!(pair.child_status().await["status"], "interrupted");
    });
}

#[test]
fn a_malformed_ref_fails_its_call_typed_while_the_others_reconcile() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(60));
        setup.parent = scripted(|request| match turn(request) {
            0 => calls(&[
                ("c1", "subagent__ask", json!({"message": "one"})),
                ("c2", "subagent__ask", json!({"message": "two"})),
            ]),
            _ => text("parent is done"),
        });
        let pair = setup.pair();
        pair.begin().await;
        wait(5_000).await;
        pair.sql(
            "UPDATE ra_sub_sessions SET remote_last_sequence = NULL WHERE tool_call_id = 'c1'",
        );
        pair.evict();
        let settled = pair.settled().await;
        assert_eq!(settled["status"], "completed", "{settled}");
        let log = pair.log().await;
        assert_settled(&log);
        let result = |call: &str| {
            let all = own(&log, "tool_end");
            (*all.iter().find(|one| one["toolCallId"] == call).unwrap()).clone()
        };
        assert_eq!(detail(&result("c1"))["code"], "invalid_stored_state");
        assert_eq!(result("c2")["success"], true);
        assert_eq!(
            pair.refs(),
            [
                ("c1".into(), "failed".into()),
                ("c2".into(), "completed".into())
            ]
        );
    });
}

#[test]
fn a_call_whose_sub_agent_was_taken_away_settles_and_its_child_is_told_once_it_is_back() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.has_sub_agent.set(false);
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(
            detail(own(&log, "tool_end")[0])["code"],
            "framework_not_supported"
        );
        assert_eq!(
            own(&log, "custom")[0]["eventName"],
            "sub_agent_stop_undelivered"
        );
        pair.has_sub_agent.set(true);
        pair.evict();
        assert_eq!(pair.resume(json!({"message": "hm"})).await.0, 200);
        pair.settled().await;
        wait(1_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
    });
}

// Stopping.

#[test]
fn a_stop_first_marks_the_refs_stopping_in_the_same_commit() {
    for action in ["interrupt", "abort"] {
        in_world(move || async move {
            let pair = Setup::new(working_for(10_000)).pair();
            pair.begin().await;
            wait(5_000).await;
            assert_eq!(pair.refs(), [("c1".into(), "running".into())]);
            // The object ends right behind the stop's commit.
            let seen = Rc::new(RefCell::new(None));
            let (objects, told) = (Rc::downgrade(&pair.parent.objects), seen.clone());
            let database = pair.parent.objects.database(&id("p")).unwrap();
            pair.parent
                .objects
                .on_commit(Rc::new(move |session, moment| {
                    use remote_agents::store::Database as _;
                    if moment == remote_agents::native::CommitMoment::After
                        && told.borrow().is_none()
                    {
                        let rows = database.query(
                        "SELECT s.stop IS NOT NULL, r.status FROM ra_session s, ra_sub_sessions r",
                        &[],
                    );
                        *told.borrow_mut() = Some(format!("{:?}", rows.unwrap()));
                        objects.upgrade().unwrap().evict(session).unwrap();
                    }
                }));
            let path = format!("/agents/parent/{action}");
            pair.parent.post(&path, json!({"sessionId": "p"})).await;
            assert_eq!(
                seen.borrow().as_deref(),
                Some("[[Integer(1), Text(\"stopping\")]]")
            );
            // After a restart it is carried out.
            pair.settled().await;
            assert_eq!(pair.child_status().await["status"], "interrupted");
            assert_settled(&pair.log().await);
            assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
        });
    }
}

#[test]
fn a_start_not_yet_answered_is_settled_first_and_then_interrupted() {
    for evicted in [false, true] {
        in_world(move || async move {
            let pair = Setup::new(working_for(10_000)).pair();
            // The start takes effect and its answer is lost, again and again.
            pair.network.set(&["start"], Fault::AnswerLost);
            pair.begin().await;
            wait(200).await;
            let stop = json!({"sessionId": "p"});
            pair.parent.post("/agents/parent/interrupt", stop).await;
            if evicted {
                pair.evict();
            }
            wait(20_000).await;
            let running = pair.parent.get("/agents/parent/status?sessionId=p").await.1;
            assert_eq!(
                running["status"], "running",
                "it waits for the start's answer"
            );
            assert_eq!(pair.network.asked("interrupt"), 0);
            pair.network.mend();
            assert_eq!(pair.settled().await["status"], "interrupted");
            assert_eq!(pair.child_status().await["status"], "interrupted");
            let starts = pair.network.starts.borrow().clone();
            assert!(starts.len() > 1 && starts.iter().all(|key| *key == starts[0]));
            assert_settled(&pair.log().await);
        });
    }
}

#[test]
fn a_stop_that_is_not_delivered_is_reported_and_every_later_reconcile_tries_again() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(10_000));
        setup.minutes = 2;
        let pair = setup.pair();
        pair.network.set(&["start"], Fault::AnswerLost);
        pair.network.set(&["interrupt"], Fault::Lost);
        let begun = tokio::time::Instant::now();
        pair.begin().await;
        wait(200).await;
        let stop = json!({"sessionId": "p"});
        pair.parent.post("/agents/parent/interrupt", stop).await;
        assert_eq!(pair.settled().await["status"], "interrupted");
        let took = begun.elapsed().as_secs();
        assert!(
            (180..200).contains(&took),
            "the call's time plus one minute: {took} s"
        );
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(
            own(&log, "custom")[0]["eventName"],
            "sub_agent_stop_undelivered"
        );
        assert_eq!(pair.refs(), [("c1".into(), "stopping".into())]);
        // The next entry tries again, to no avail; the one after that delivers it.
        for mended in [false, true] {
            if mended {
                pair.network.mend();
            }
            let before = pair.network.asked("interrupt");
            assert_eq!(pair.resume(json!({"message": "hm"})).await.0, 200);
            pair.settled().await;
            wait(20_000).await;
            assert!(pair.network.asked("interrupt") > before);
            let expected = if mended { "failed" } else { "stopping" };
            assert_eq!(pair.refs(), [("c1".into(), expected.into())]);
        }
        assert_eq!(pair.child_status().await["status"], "interrupted");
        // It is reported once, and the child has one end.
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(own(&log, "custom").len(), 1);
    });
}

#[test]
fn a_child_of_an_aborted_parent_is_told_again_although_no_entry_ever_comes() {
    in_world(|| async {
        let pair = Setup::new(working_for(100_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.network.set(&["interrupt"], Fault::Lost);
        let stop = json!({"sessionId": "p"});
        pair.parent.post("/agents/parent/abort", stop).await;
        assert_eq!(pair.settled().await["errorCode"], "run_aborted");
        assert_eq!(pair.refs(), [("c1".into(), "stopping".into())]);
        wait(600_000).await;
        let tried = pair.network.asked("interrupt");
        assert!((6..40).contains(&tried), "{tried} requests in ten minutes");
        pair.evict();
        pair.network.mend();
        wait(600_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
        // Then it rests.
        let tried = pair.network.asked("interrupt");
        wait(7_200_000).await;
        assert_eq!(pair.network.asked("interrupt"), tried);
        assert_settled(&pair.log().await);
    });
}

#[test]
fn no_new_child_starts_under_a_stopping_parent_and_queued_calls_are_paired_not_executed() {
    for evicted in [false, true] {
        in_world(move || async move {
            let mut setup = Setup::new(working_for(10_000));
            setup.max_children = 2;
            setup.parent = scripted(|request| match turn(request) {
                0 => {
                    let ids = ["c1", "c2", "c3", "c4"];
                    calls(&ids.map(|id| (id, "subagent__ask", json!({"message": id}))))
                }
                _ => text("parent is done"),
            });
            let pair = setup.pair();
            pair.begin().await;
            wait(5_000).await;
            let stop = json!({"sessionId": "p"});
            pair.parent.post("/agents/parent/interrupt", stop).await;
            if evicted {
                pair.evict();
            }
            assert_eq!(pair.settled().await["status"], "interrupted");
            let log = pair.log().await;
            assert_settled(&log);
            assert_eq!(own(&log, "subagent_start").len(), 2);
            assert_eq!(pair.far.objects.sessions().len(), 2);
            let results = own(&log, "tool_end");
            assert_eq!(results.len(), 4);
            for result in results {
                assert_eq!(detail(result)["code"], "run_interrupted");
            }
        });
    }
}

#[test]
fn an_unreadable_ledger_does_not_keep_a_run_from_ending() {
    in_world(|| async {
        let pair = Setup::new(working_for(20)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.sql("UPDATE ra_usage SET body = 'nonsense'");
        let path = "/agents/parent/sse?sessionId=p&fromSequence=0";
        let (frames, _) = pair.parent.sse(path).await;
        let Some(Frame::End(end)) = frames.last() else {
            panic!("{frames:?}")
        };
        assert_eq!(end.usage.as_ref().unwrap()["partial"], true);
        let lines = pair.lines.0.borrow();
        assert!(lines.iter().any(|line| line.contains("usage_unreadable")));
    });
}

#[test]
fn a_refused_start_writes_nothing_and_the_run_is_looked_after_all_the_same() {
    in_world(|| async {
        let pair = Setup::new(working_for(60)).pair();
        pair.begin().await;
        wait(3_000).await;
        pair.evict();
        let commits = Rc::new(Cell::new(0));
        let counted = commits.clone();
        pair.parent.objects.on_commit(Rc::new(move |_, moment| {
            if moment == remote_agents::native::CommitMoment::After {
                counted.set(counted.get() + 1);
            }
        }));
        let body = json!({"sessionId": "p", "message": "go"});
        let (status, _) = pair.parent.post("/agents/parent/start", body).await;
        assert_eq!((status, commits.get()), (409, 0));
        assert_eq!(pair.settled().await["status"], "completed");
    });
}

// Fan-out.

/// A parent that calls `n` children in one answer, and the most that were at work at once.
async fn fanned_out(n: usize, max_children: usize, evictions: u64) -> (Vec<Value>, usize) {
    let mut setup = Setup::new(working_for(60));
    setup.max_children = max_children;
    setup.parent = scripted(move |request| match turn(request) {
        0 => {
            let ids: Vec<String> = (1..=n).map(|i| format!("c{i:02}")).collect();
            let all: Vec<_> = ids
                .iter()
                .map(|id| (id.as_str(), "subagent__ask", json!({"message": id})))
                .collect();
            calls(&all)
        }
        _ => text("parent is done"),
    });
    let pair = setup.pair();
    pair.begin().await;
    let mut most = 0;
    for second in 0..2_000 {
        wait(1_000).await;
        if second % 20 == 10 && second / 20 < evictions {
            pair.evict();
        }
        let mut at_work = 0;
        for session in pair.far.objects.sessions() {
            let path = format!("/agents/child/status?sessionId={session}");
            at_work += usize::from(pair.far.get(&path).await.1["status"] == "running");
        }
        most = most.max(at_work);
        let (_, status) = pair.parent.get("/agents/parent/status?sessionId=p").await;
        if status["status"] != "running" {
            assert_eq!(status["status"], "completed", "{status}");
            break;
        }
    }
    assert_eq!(pair.network.starts.borrow().len(), n);
    let log = pair.log().await;
    assert_settled(&log);
    (log, most)
}

#[test]
fn never_more_children_than_the_bound_are_at_work_and_the_others_wait_in_call_order_visibly() {
    for evictions in [0, 5] {
        in_world(move || async move {
            let (log, most) = fanned_out(20, 4, evictions).await;
            assert_eq!(most, 4);
            let queued = own(&log, "custom");
            assert_eq!(queued.len(), 16);
            for (position, chunk) in queued.iter().enumerate() {
                assert_eq!(chunk["eventName"], "sub_agent_queued");
                let data = json!({"toolCallId": format!("c{:02}", position + 5),
                    "position": position + 1});
                assert_eq!(chunk["data"], data);
            }
            let started: Vec<String> = own(&log, "subagent_start")
                .iter()
                .map(|chunk| chunk["toolCallId"].as_str().unwrap().to_owned())
                .collect();
            let expected: Vec<String> = (1..=20).map(|i| format!("c{i:02}")).collect();
            assert_eq!(started, expected);
            // What waits is told before anything begins.
            let place = |kind: &str| log.iter().position(|chunk| chunk["type"] == kind);
            assert!(place("custom") < place("subagent_start"));
        });
    }
}

#[test]
fn the_bound_is_configurable_up_to_none() {
    in_world(|| async {
        let unbounded = remote_agents::agent::Limits::UNBOUNDED_CHILDREN;
        let (log, most) = fanned_out(20, unbounded, 0).await;
        assert_eq!((most, own(&log, "custom").len()), (20, 0));
        let (log, most) = fanned_out(3, 1, 0).await;
        assert_eq!((most, own(&log, "custom").len()), (1, 2));
        // The default of the contract.
        assert_eq!(remote_agents::agent::Limits::default().max_children, 4);
    });
}

// Folding and usage.

#[test]
fn what_an_ended_run_had_staged_is_staged_anew_when_its_step_is_taken_up_again() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(120));
        setup.parent = scripted(|request| match turn(request) {
            0 => calls(&[
                ("n1", "note", json!({"kept": "yes"})),
                ("c1", "subagent__ask", json!({"message": "please"})),
            ]),
            _ => text("parent is done"),
        });
        let pair = setup.pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        let (_, snapshot) = pair.parent.get("/agents/parent/snapshot?sessionId=p").await;
        assert_eq!(snapshot["state"], json!({}), "staged state is never served");
        wait(200_000).await;
        assert_eq!(pair.resume(json!({"message": "and?"})).await.0, 200);
        // A reader that attaches at the new run's checkpoint meets every patch of the step.
        let (_, snapshot) = pair.parent.get("/agents/parent/snapshot?sessionId=p").await;
        assert_eq!(snapshot["state"], json!({}));
        let from = &snapshot["streamSequence"];
        let path = format!("/agents/parent/sse?sessionId=p&fromSequence={from}");
        let seen = chunks(&pair.parent.sse(&path).await.0);
        let patches = own(&seen, "state_patch");
        assert_eq!(patches[0]["patchBase"], snapshot["patchOrdinal"]);
        assert_eq!(patches[0]["patches"][0]["path"], "/kept");
        assert_eq!(patches[1]["patchBase"], patches[0]["patchOrdinal"]);
        let settled = pair.settled().await;
        assert_eq!(settled["status"], "completed");
        let (_, snapshot) = pair.parent.get("/agents/parent/snapshot?sessionId=p").await;
        let expected = json!({"kept": "yes", "research": {"success": true}});
        assert_eq!(snapshot["state"], expected);
        assert_eq!(
            pair.conversation()[1..5],
            ["assistant 2", "tool n1 ok", "tool c1 ok", "user and?"]
        );
    });
}
