//! The follower over answers that are written down: a trimmed log, another life, an event too large.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::future::LocalBoxFuture;
use remote_agents::follower::{Follower, FollowerEvent};
use remote_agents::http::{Body, Request, Response};
use remote_agents::native::LocalRuntime;
use remote_agents::platform::Runtime;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::sse;
use remote_agents::reconstruct::{Stale, Status};
use remote_agents::transport::{Fetch, FetchError, HttpTransport, Transport, TransportError};
use serde_json::{Value, json};

use crate::support::{Lines, in_world};

/// The answers of one session's mount: its streams and snapshots in order, the last one again and
/// again. What each stream was asked for is kept.
#[derive(Default)]
struct Script {
    streams: RefCell<VecDeque<String>>,
    snapshots: RefCell<VecDeque<Value>>,
    /// What the statuses are in order, and behind them `running`.
    statuses: RefCell<VecDeque<&'static str>>,
    /// What the tree route answers; without it the mount has none.
    tree: RefCell<Option<Value>>,
    attached: RefCell<Vec<String>>,
    read: Cell<usize>,
}

fn answered_tree(tree: Option<Value>) -> Response {
    let (status, body) = match tree {
        Some(tree) => (200, tree),
        None => (501, json!({"error": "none", "code": "FEATURE_UNAVAILABLE"})),
    };
    let response = http::Response::builder()
        .status(status)
        .header("content-type", "application/json");
    let body = Body::Full(body.to_string().into());
    response.body(body).expect("a response")
}

fn next<T: Clone>(answers: &RefCell<VecDeque<T>>) -> T {
    let mut answers = answers.borrow_mut();
    let first = answers.pop_front().expect("an answer");
    if answers.is_empty() {
        answers.push_back(first.clone());
    }
    first
}

impl Fetch for Script {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let path = request.uri().path().to_owned();
        let (kind, body) = if path.ends_with("/sse") {
            let wanted = |name: &str| {
                let found = query.split('&').find_map(|pair| pair.strip_prefix(name));
                found.unwrap_or_default().to_owned()
            };
            let told = format!("{}@{}", wanted("fromSequence="), wanted("streamId="));
            self.attached.borrow_mut().push(told);
            let events = Ok(Bytes::from(next(&self.streams)));
            // It stays open behind its last event.
            let body = futures::stream::iter([events]).chain(futures::stream::pending());
            (sse::CONTENT_TYPE, Body::Stream(Box::pin(body)))
        } else if path.ends_with("/status") {
            let next = self.statuses.borrow_mut().pop_front();
            let session = query.replace("sessionId=", "");
            let status = json!({"sessionId": session, "status": next.unwrap_or("running")});
            ("application/json", Body::Full(status.to_string().into()))
        } else if path.ends_with("/tree") {
            let tree = self.tree.borrow().clone();
            return Box::pin(async move { Ok(answered_tree(tree)) });
        } else {
            self.read.set(self.read.get() + 1);
            let mut snapshot = next(&self.snapshots);
            if !query.contains("sessionId=s1") {
                snapshot["sessionId"] = query.replace("sessionId=", "").into();
                snapshot["streamId"] = "st_child".into();
            }
            ("application/json", Body::Full(snapshot.to_string().into()))
        };
        let response = http::Response::builder().header("content-type", kind);
        Box::pin(async move { Ok(response.body(body).expect("a response")) })
    }
}

fn script(streams: &[String], snapshots: &[Value]) -> Rc<Script> {
    Rc::new(Script {
        streams: RefCell::new(streams.iter().cloned().collect()),
        snapshots: RefCell::new(snapshots.iter().cloned().collect()),
        ..Script::default()
    })
}

fn snapshot(stream: &str, at: i64, floor: u64, ordinal: Option<u64>) -> Value {
    let mut snapshot = json!({"sessionId": "s1", "streamId": stream, "state": {}, "streamSequence": at,
        "oldestRetainedSequence": floor, "stepCount": 1});
    if let Some(ordinal) = ordinal {
        snapshot["patchOrdinal"] = ordinal.into();
    }
    snapshot
}

fn chunk(sequence: u64, mut fields: Value) -> String {
    for (name, value) in [("agentId", "s1"), ("agentType", "parent")] {
        fields[name] = value.into();
    }
    fields["timestamp"] = 1.into();
    fields["step"] = 1.into();
    let mut out = String::new();
    sse::encode_chunk(&mut out, sequence, &fields.to_string());
    out
}

fn announced(sequence: u64, child: &str) -> String {
    let fields = json!({"type": "subagent_start", "subSessionId": child, "subAgentType": "child", "toolCallId": child});
    chunk(sequence, fields)
}

fn patched(sequence: u64, ordinals: Option<(u64, u64)>) -> String {
    let patches = json!([{"op": "add", "path": "/n", "value": sequence}]);
    let mut fields = json!({"type": "state_patch", "patches": patches});
    if let Some((base, ordinal)) = ordinals {
        fields["patchBase"] = base.into();
        fields["patchOrdinal"] = ordinal.into();
    }
    chunk(sequence, fields)
}

fn truncated(stream: &str, floor: u64) -> String {
    let error = json!({"code": "TRUNCATED", "error": "gone", "recoverable": false, "floor": floor, "streamId": stream});
    format!("event: error\ndata: {error}\n\n")
}

const DROPPED: &str =
    "event: error\ndata: {\"code\":\"INTERNAL\",\"error\":\"x\",\"recoverable\":true}\n\n";

fn caught_up() -> String {
    "event: caught-up\ndata: {\"sequence\":9}\n\n".to_owned()
}

fn follower(script: &Rc<Script>) -> Follower {
    let runtime: Rc<dyn Runtime> = LocalRuntime::new(1, Lines::default().sink());
    let (fetch, clock) = (script.clone(), runtime.clone());
    let routes = Rc::new(move |agent_type: &AgentType| {
        let base = "http://producer";
        let transport = HttpTransport::new(
            fetch.clone(),
            clock.clone(),
            base,
            "/agents",
            agent_type.clone(),
        );
        Rc::new(transport) as Rc<dyn Transport>
    });
    let session = SessionId::parse("s1").unwrap();
    Follower::new(
        runtime,
        routes,
        session,
        AgentType::parse("parent").unwrap(),
    )
    .with_backoff(Duration::from_millis(1))
}

/// Follows until the replay is done; gives the sequences that were told.
async fn catch_up(follower: &mut Follower) -> Vec<u64> {
    let mut told = Vec::new();
    loop {
        match follower.next().await.unwrap().unwrap() {
            FollowerEvent::Chunk { sequence, .. } => told.push(sequence),
            FollowerEvent::CaughtUp => return told,
            _ => {}
        }
    }
}

fn sessions(follower: &Follower) -> Vec<&str> {
    let nodes = follower.nodes().iter();
    nodes.map(|node| node.session.as_str()).collect()
}

#[test]
fn behind_a_trimmed_log_what_it_still_holds_is_read() {
    in_world(|| async {
        let script = script(
            &[
                announced(1, "a") + DROPPED,
                truncated("st_1", 5),
                announced(5, "b")
                    + &patched(6, Some((1, 2)))
                    + &patched(9, Some((3, 4)))
                    + &caught_up(),
            ],
            &[
                snapshot("st_1", 0, 0, Some(0)),
                snapshot("st_1", 8, 5, Some(3)),
            ],
        );
        let mut follower = follower(&script);
        assert_eq!(catch_up(&mut follower).await, [1, 5, 6, 9]);
        assert_eq!(*script.attached.borrow(), ["0@st_1", "1@st_1", "4@st_1"]);
        assert_eq!(sessions(&follower), ["s1", "a", "b"]);
        // What the baseline covers is left alone, what follows it is applied.
        let root = &follower.nodes()[0].document;
        assert_eq!(root.status(), &Status::InStep);
        assert_eq!(root.state(), &json!({"n": 9}));
    });
}

#[test]
fn what_a_trimmed_log_no_longer_announces_the_tree_tells() {
    in_world(|| async {
        let node = |id: &str, status: &str, children: Vec<Value>| json!({"sessionId": id, "agentType": "child", "status": status, "state": {}, "children": children});
        let below = [
            node("a", "completed", vec![node("a1", "running", vec![])]),
            node("b", "failed", vec![]),
        ];
        let replay = announced(5, "b") + &announced(6, "c") + &caught_up();
        for tree in [Some(node("s1", "running", below.to_vec())), None] {
            let is_told = tree.is_some();
            let script = script(
                std::slice::from_ref(&replay),
                &[snapshot("st_1", 4, 5, Some(3))],
            );
            script.tree.replace(tree);
            let mut follower = follower(&script);
            let (mut said, mut is_read) = (Vec::new(), false);
            while !is_read || said.len() < 2 {
                match follower.next().await.unwrap().unwrap() {
                    FollowerEvent::Chunk { sequence, .. } => said.push(sequence),
                    FollowerEvent::NoTree { error } => {
                        assert!(!is_told, "{error}");
                        is_read = true;
                    }
                    FollowerEvent::Node(_) => is_read |= follower.nodes().len() == 5,
                    _ => {}
                }
            }
            let mut seen = sessions(&follower);
            seen.sort_unstable();
            if !is_told {
                assert_eq!(seen, ["b", "c", "s1"]);
                continue;
            }
            assert_eq!(seen, ["a", "a1", "b", "c", "s1"]);
            let of = |id: &str| {
                let found = follower.nodes().iter().find(|at| at.session.as_str() == id);
                found.expect("a node").clone()
            };
            assert_eq!(of("a1").parent.as_deref(), Some("a"));
            assert_eq!(of("a").parent.as_deref(), Some("s1"));
            assert_eq!(
                [of("a"), of("a1")].map(|at| at.succeeded),
                [Some(true), None]
            );
        }
    });
}

#[test]
fn what_a_discard_voided_stays_void_when_it_is_read_again_behind_a_trimmed_log() {
    in_world(|| async {
        let discarded = json!({"type": "step_discarded", "stepCount": 1, "fromSequence": 4, "reason": "restarted"});
        let void = patched(5, Some((0, 1))) + &patched(6, Some((1, 2))) + &chunk(7, discarded);
        let script = script(
            &[
                void.clone() + DROPPED,
                truncated("st_1", 5),
                void + &patched(8, Some((0, 3))) + &caught_up(),
            ],
            &[
                snapshot("st_1", 4, 0, Some(0)),
                snapshot("st_1", 4, 5, Some(0)),
            ],
        );
        let mut follower = follower(&script);
        catch_up(&mut follower).await;
        assert_eq!(script.attached.borrow().last().unwrap(), "4@st_1");
        let root = &follower.nodes()[0].document;
        assert_eq!(root.status(), &Status::InStep);
        assert_eq!(root.state(), &json!({"n": 8}));
    });
}

#[test]
fn another_life_of_the_session_has_a_tree_of_its_own_and_is_read_from_its_beginning() {
    in_world(|| async {
        let script = script(
            &[
                announced(1, "a") + &announced(2, "b") + DROPPED,
                truncated("st_2", 0),
                announced(1, "b") + &announced(2, "c") + &caught_up(),
            ],
            &[
                snapshot("st_1", 0, 0, Some(0)),
                snapshot("st_2", 2, 0, Some(0)),
            ],
        );
        let mut follower = follower(&script);
        let mut restarted = 0;
        let mut told = Vec::new();
        loop {
            match follower.next().await.unwrap().unwrap() {
                FollowerEvent::Chunk { sequence, .. } => told.push(sequence),
                FollowerEvent::Restarted => {
                    restarted += 1;
                    assert_eq!(sessions(&follower), ["s1"]);
                }
                FollowerEvent::CaughtUp => break,
                _ => {}
            }
        }
        assert_eq!((told, restarted), (vec![1, 2, 1, 2], 1));
        assert_eq!(script.attached.borrow().last().unwrap(), "0@st_2");
        assert_eq!(sessions(&follower), ["s1", "b", "c"]);
        assert_eq!(
            follower.nodes()[0].document.status(),
            &Status::Exact { step: 1 }
        );
    });
}

#[test]
fn a_session_that_ends_while_it_is_read_is_read_to_its_end() {
    in_world(|| async {
        for ends in [true, false] {
            let mut last = snapshot("st_1", -1, 0, None);
            last["state"] = json!({"read": "behind the end"});
            let script = script(
                &[caught_up()],
                &[snapshot("st_1", -1, 0, None), last.clone()],
            );
            if ends {
                script.statuses.replace(["running", "completed"].into());
            }
            let mut follower = follower(&script);
            catch_up(&mut follower).await;
            let root = &follower.nodes()[0].document;
            if ends {
                assert_eq!(root.status(), &Status::Final);
                assert_eq!(root.state(), &last["state"]);
                assert_eq!(script.read.get(), 2);
            } else {
                // Its log is cut inside a step: the next boundary has a position.
                assert_eq!(root.status(), &Status::Unpinned);
                assert_eq!(script.read.get(), 1);
            }
        }
    });
}

#[test]
fn a_session_whose_call_is_over_and_that_goes_on_has_not_ended() {
    in_world(|| async {
        let over = json!({"type": "subagent_end", "subSessionId": "a", "toolCallId": "a", "success": false});
        let script = script(
            &[announced(1, "a") + &chunk(2, over) + &caught_up()],
            &[
                snapshot("st_1", 0, 0, Some(0)),
                snapshot("st_1", -1, 0, None),
            ],
        );
        let mut follower = follower(&script);
        catch_up(&mut follower).await;
        // Until all that was asked for is read.
        let second = Duration::from_secs(1);
        while tokio::time::timeout(second, follower.next()).await.is_ok() {}
        assert!(script.read.get() >= 2);
        let child = &follower.nodes()[1];
        assert_eq!(child.succeeded, Some(false));
        assert_eq!(child.document.status(), &Status::Unpinned);
    });
}

#[test]
fn a_step_longer_than_the_log_is_no_reason_to_ask_again_and_again() {
    in_world(|| async {
        for ordinals in [true, false] {
            let base = ordinals.then_some(0);
            let long = (50..90).map(|n| patched(n, ordinals.then_some((n, n + 1))));
            let script = script(
                &[
                    truncated("st_1", 50),
                    long.collect::<String>() + &caught_up(),
                ],
                &[snapshot("st_1", 1, 50, base)],
            );
            let mut follower = follower(&script);
            catch_up(&mut follower).await;
            // Whatever is still under way comes.
            let more = tokio::time::timeout(Duration::from_millis(200), follower.next());
            let _ = more.await;
            let root = &follower.nodes()[0].document;
            assert!(
                matches!(root.status(), Status::Stale(Stale::Gap | Stale::Truncated)),
                "{:?}",
                root.status()
            );
            assert_eq!(
                root.state(),
                &json!({}),
                "nothing on a baseline with a hole"
            );
            assert_eq!(script.attached.borrow().len(), 2, "{ordinals}");
            assert!(script.read.get() <= 3, "{} snapshots", script.read.get());
        }
    });
}

#[test]
fn an_event_over_the_limit_ends_a_follower() {
    in_world(|| async {
        let large = "x".repeat(sse::EVENT_LIMIT);
        let script = script(
            &[format!("event: chunk\ndata: {large}")],
            &[snapshot("st_1", 0, 0, Some(0))],
        );
        let mut follower = follower(&script);
        let error = loop {
            match follower.next().await.unwrap() {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error, TransportError::TooLarge(sse::EVENT_LIMIT));
        assert!(follower.next().await.is_none());
        assert_eq!(script.attached.borrow().len(), 1);
    });
}
