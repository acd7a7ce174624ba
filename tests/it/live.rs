//! Live projected state over real sessions: the same bytes for every cursor, one snapshot for a
//! reader, and not one word of the state in any answer, whatever a child forges.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use remote_agents::agent::{SubAgent, typed_tool};
use remote_agents::follower::{Follower, FollowerEvent, Routes};
use remote_agents::http::{Body, Request, Response};
use remote_agents::mount::{ChunkDetail, Mount, Projection};
use remote_agents::native::{LocalObjects, LocalRuntime, MountFetch};
use remote_agents::platform::Runtime;
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::sse::{Decoded, Decoder, encode_frame};
use remote_agents::reconstruct::Status;
use remote_agents::store::SubLocation;
use remote_agents::transport::{Fetch, FetchError, HttpTransport, ObjectsFetch, Transport};
use remote_agents::{Agent, Agents, ToolContext, ToolError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, chunks, in_world, scripted, text, turn};

const START: u64 = 1_700_000_000_000;

/// What stands in states alone.
const STATE: &str = "canary-state-4b1d";
/// What stands in arguments and results of tools.
const TOOL: &str = "canary-tool-90ce";
/// What a child puts where it has no business.
const FORGED: &str = "canary-forged-17aa";

#[derive(Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
struct Notes {
    list: Vec<String>,
    pad: String,
}

fn agent_type(name: &str) -> AgentType {
    AgentType::parse(name).unwrap()
}

/// A tool that writes what nobody is to see into the state, and says nothing.
fn secret_tool() -> Rc<dyn remote_agents::Tool> {
    typed_tool(
        "secret",
        "Writes.",
        |context: ToolContext, _: Value| async move {
            context.update(|notes: &mut Notes| notes.list.push(STATE.into()))?;
            Ok(json!({}))
        },
    )
}

/// A tool whose arguments and result are nobody's business, and one that fails with them.
fn loud_tool(name: &'static str, fails: bool) -> Rc<dyn remote_agents::Tool> {
    typed_tool(
        name,
        "Says.",
        move |_: ToolContext, arguments: Value| async move {
            if fails {
                return Err(ToolError::new(TOOL));
            }
            Ok(json!({"said": arguments, "result": TOOL}))
        },
    )
}

/// A child's stream on its way to the parent, with lies in it.
struct Forging(Rc<dyn Fetch>);

impl Fetch for Forging {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let is_stream = request.uri().path().ends_with("/sse");
        let answer = self.0.fetch(request);
        Box::pin(async move {
            let answer = answer.await?;
            if !is_stream || answer.status() != 200 {
                return Ok(answer);
            }
            let (head, body) = answer.into_parts();
            let body = body.collect(1 << 20).await.unwrap();
            Ok(Response::from_parts(head, Body::Full(forged(&body).into())))
        })
    }
}

/// Every chunk with fields that nobody knows, texts under types that nobody knows, and steps that
/// tell patches as a mount does, one of them in the parent's name.
fn forged(stream: &[u8]) -> String {
    let mut decoder = Decoder::new();
    decoder.push(stream);
    let mut out = String::new();
    while let Some(decoded) = decoder.poll().unwrap() {
        let Decoded::Frame(mut frame) = decoded else {
            continue;
        };
        if let Frame::Chunk { chunk, .. } = &mut frame {
            let mut lie = |name: &str, value: Value| chunk.0.insert(name.to_owned(), value);
            lie("state", json!({"deep": FORGED}));
            lie(
                "patches",
                json!([{"op": "replace", "path": "", "value": FORGED}]),
            );
            lie("projection", json!("count@1"));
            match chunk.kind() {
                "text_delta" => {
                    chunk.0.insert("type".into(), "novelty".into());
                    chunk.0.insert("data".into(), FORGED.into());
                }
                "step_committed" if chunk.0["stepCount"] == 1 => {
                    chunk.0.insert("agentId".into(), "s1".into());
                }
                "step_committed" => drop(chunk.0.insert("resync".into(), FORGED.into())),
                _ => {}
            }
        }
        out += &encode_frame(&frame).unwrap();
    }
    out
}

/// A parent that writes secrets in three steps, beside a child that does so too and lies.
fn world() -> Rc<LocalObjects> {
    LocalObjects::new(
        START,
        Lines::default().sink(),
        Rc::new(|objects, runtime| {
            let secret = |id: &'static str| (id, "secret", json!({}));
            let loud = |id: &'static str, name| (id, name, json!({"argument": TOOL}));
            let child = scripted(move |request| match turn(request) {
                0 => calls(&[secret("a"), loud("b", "loud")]),
                1 => calls(&[secret("c"), loud("d", "fail")]),
                _ => text("the child is done"),
            });
            let parent = scripted(move |request| match turn(request) {
                0 => calls(&[secret("a"), loud("b", "loud"), loud("c", "fail")]),
                1 => calls(&[
                    ("d", "subagent__ask", json!({"message": TOOL})),
                    secret("e"),
                ]),
                2 => calls(&[secret("f"), secret("g")]),
                _ => text("the parent is done"),
            });
            let fetch = Rc::new(ObjectsFetch::new(objects.clone())) as Rc<dyn Fetch>;
            let transport = HttpTransport::new(
                Rc::new(Forging(fetch)) as Rc<dyn Fetch>,
                runtime.clone(),
                "http://object",
                "",
                agent_type("child"),
            );
            let sub = SubAgent::new(
                "ask",
                "Asks.",
                agent_type("child"),
                SubLocation::Local,
                Rc::new(transport),
            );
            let with_tools = |agent: Agent| {
                agent
                    .with_state::<Notes>()
                    .with_tool(secret_tool())
                    .with_tool(loud_tool("loud", false))
                    .with_tool(loud_tool("fail", true))
            };
            Agents::new([
                with_tools(Agent::new(agent_type("child"), "Work.", child)),
                with_tools(Agent::new(agent_type("parent"), "Work.", parent)).with_sub_agent(sub),
            ])
        }),
    )
}

fn raw() -> Mount {
    Mount::new("/agents").allow_unauthenticated()
}

/// A mount that shows how many notes there are, live.
fn live() -> Mount {
    raw().with_live_state().with_projection(Projection {
        name: "count@1".into(),
        map: Rc::new(|_, state| json!({"count": state["list"].as_array().map(Vec::len)})),
    })
}

fn client(mount: Mount, objects: &Rc<LocalObjects>) -> Client {
    Client {
        mount: Rc::new(mount),
        objects: objects.clone(),
    }
}

async fn start(client: &Client, pad: usize) {
    let state = json!({"list": [STATE], "pad": "x".repeat(pad)});
    let body = json!({"sessionId": "s1", "message": "go", "state": state});
    assert_eq!(client.post("/agents/parent/start", body).await.0, 200);
}

const STREAM: &str = "/agents/parent/sse?sessionId=s1";

/// The steps of the session itself.
fn own_steps(frames: &[Frame]) -> Vec<Value> {
    let own = |chunk: &Value| {
        chunk["type"] == "step_committed"
            && chunk["agentId"] == "s1"
            && chunk.get("origin").is_none()
    };
    chunks(frames).into_iter().filter(own).collect()
}

#[test]
fn every_cursor_reads_the_same_bytes_and_a_step_tells_what_it_changed() {
    in_world(|| async {
        let objects = world();
        let client = client(live(), &objects);
        start(&client, 0).await;
        let (frames, followed) = client.sse(&format!("{STREAM}&fromSequence=0")).await;
        let counts: Vec<Value> = own_steps(&frames)
            .iter()
            .map(|step| {
                assert_eq!(step["projection"], "count@1");
                assert!(step.get("resync").is_none());
                step["patches"].clone()
            })
            .collect();
        let becomes = |n: u64| json!([{"op": "replace", "path": "/count", "value": n}]);
        assert_eq!(counts, [becomes(2), becomes(3), becomes(5), json!([])]);
        let events: Vec<&str> = followed
            .split_inclusive("\n\n")
            .filter(|part| part.contains("id: "))
            .collect();
        let last = frames
            .iter()
            .filter(|frame| matches!(frame, Frame::Chunk { .. }))
            .count();
        assert_eq!(events.len(), last);
        for (place, event) in events.iter().enumerate() {
            let id: u64 = event
                .split("id: ")
                .nth(1)
                .unwrap()
                .split('\n')
                .next()
                .unwrap()
                .parse()
                .unwrap();
            let (_, again) = client
                .sse(&format!("{STREAM}&fromSequence={}", id - 1))
                .await;
            let rest: String = again
                .split_inclusive("\n\n")
                .filter(|part| part.contains("id: "))
                .collect();
            assert_eq!(rest, events[place..].concat(), "from {id}");
        }
    });
}

#[test]
fn where_a_neighbour_is_not_kept_a_step_asks_for_a_snapshot() {
    in_world(|| async {
        let objects = world();
        let client = client(live(), &objects);
        // With states of this size only the latest two checkpoints stay.
        start(&client, 200_000).await;
        client.settled("parent", "s1").await;
        let (frames, _) = client.sse(&format!("{STREAM}&fromSequence=0")).await;
        let told: Vec<bool> = own_steps(&frames)
            .iter()
            .map(|step| {
                assert_eq!(step["projection"], "count@1");
                assert_ne!(step.get("patches").is_some(), step["resync"] == true);
                step.get("patches").is_some()
            })
            .collect();
        assert_eq!(told, [false, false, false, true]);
    });
}

/// Counts the snapshots that are read.
struct Counting {
    inner: MountFetch,
    snapshots: Rc<Cell<u32>>,
}

impl Fetch for Counting {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        if request.uri().path().ends_with("parent/snapshot") {
            self.snapshots.set(self.snapshots.get() + 1);
        }
        self.inner.fetch(request)
    }
}

#[test]
fn a_follower_needs_one_snapshot_of_a_session_whose_steps_tell_what_they_changed() {
    in_world(|| async {
        let objects = world();
        let client = client(live(), &objects);
        start(&client, 0).await;
        let snapshots = Rc::new(Cell::new(0));
        let (mount, counted) = (client.mount.clone(), snapshots.clone());
        let routes: Routes = Rc::new(move |agent_type| {
            let fetch = Rc::new(Counting {
                inner: MountFetch::new(mount.clone(), objects.clone()),
                snapshots: counted.clone(),
            });
            let runtime = LocalRuntime::new(START, Lines::default().sink());
            let base = "http://producer";
            let transport = HttpTransport::new(
                fetch as Rc<dyn Fetch>,
                runtime,
                base,
                "/agents",
                agent_type.clone(),
            );
            Rc::new(transport.any_mount()) as Rc<dyn Transport>
        });
        let runtime: Rc<dyn Runtime> = LocalRuntime::new(START, Lines::default().sink());
        let session = SessionId::parse("s1").unwrap();
        let mut follower = Follower::new(runtime, routes, session, agent_type("parent"));
        let mut exact = Vec::new();
        while let Some(event) = follower.next().await {
            if let FollowerEvent::Document(0) = event.unwrap() {
                let document = &follower.nodes()[0].document;
                if let Status::Exact { step } = document.status() {
                    exact.push((*step, document.state()["count"].clone()));
                }
            }
        }
        let expected = [(0, 1), (1, 2), (2, 3), (3, 5), (4, 5)];
        assert_eq!(exact, expected.map(|(step, count)| (step, json!(count))));
        let root = &follower.nodes()[0].document;
        assert_eq!(
            (root.status(), root.state()),
            (&Status::Final, &json!({"count": 5}))
        );
        assert_eq!(snapshots.get(), 1);
    });
}

/// Everything that a mount answers about a session while it works and afterwards, as text.
async fn all_answers(client: &Client) -> String {
    let seen = RefCell::new(String::new());
    let send = async |method: &str, path: &str, body: Value| {
        let body = if method == "GET" {
            String::new()
        } else {
            body.to_string()
        };
        let response = client.send(method, path, &[], body).await;
        let (head, body) = response.into_parts();
        let body = body.collect(1 << 24).await.unwrap();
        *seen.borrow_mut() += &format!("{head:?}\n{}\n", String::from_utf8_lossy(&body));
    };
    let ask = async || {
        for action in ["status", "snapshot", "usage", "tree", "messages"] {
            send(
                "GET",
                &format!("/agents/parent/{action}?sessionId=s1"),
                Value::Null,
            )
            .await;
            send(
                "GET",
                &format!("/agents/parent/{action}?sessionId=other"),
                Value::Null,
            )
            .await;
            send(
                "GET",
                &format!("/agents/child/{action}?sessionId=s1"),
                Value::Null,
            )
            .await;
        }
    };
    for _ in 0..8 {
        ask().await;
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    // Followed to its end, replayed, and from a place that is not there.
    for from in [
        "",
        "&fromSequence=0",
        "&fromSequence=999999",
        "&fromSequence=x",
        "&streamId=y",
    ] {
        send("GET", &format!("{STREAM}{from}"), Value::Null).await;
    }
    for from in ["", "&fromSequence=0"] {
        let path = STREAM.replace("/sse", "/ui");
        send("GET", &format!("{path}{from}"), Value::Null).await;
    }
    ask().await;
    let id = json!({"sessionId": "s1"});
    let message = json!({"sessionId": "s1", "message": "more"});
    send("POST", "/agents/parent/start", message.clone()).await;
    send("POST", "/agents/parent/resume", id.clone()).await;
    send("POST", "/agents/parent/interrupt", id.clone()).await;
    send("POST", "/agents/parent/resume", message).await;
    send("GET", STREAM, Value::Null).await;
    send("POST", "/agents/parent/abort", id).await;
    send("GET", "/agents", Value::Null).await;
    ask().await;
    seen.into_inner()
}

#[test]
fn no_canary_is_in_any_byte_of_a_projected_mount_whatever_a_child_forges() {
    in_world(|| async {
        for (detail, hidden) in [
            (ChunkDetail::Full, vec![STATE, FORGED]),
            (ChunkDetail::Lifecycle, vec![STATE, FORGED, TOOL]),
        ] {
            let objects = world();
            let client = client(
                live().with_ui().with_messages().with_chunks(detail),
                &objects,
            );
            start(&client, 0).await;
            let seen = all_answers(&client).await;
            for canary in hidden {
                assert!(!seen.contains(canary), "{detail:?} {canary}: {seen}");
            }
            assert!(!seen.contains("state_patch") && !seen.contains("neighbours"));
            // What is allowed is there: the live state, the child's steps, and with everything the
            // words of the tools.
            assert!(seen.contains("\"patches\":[{\"op\":\"replace\",\"path\":\"/count\""));
            assert!(seen.contains("\"type\":\"data-step-committed\""));
            assert!(seen.contains("\"origin\"") && seen.contains("the parent is done"));
            assert_eq!(seen.contains(TOOL), detail == ChunkDetail::Full);
            // A step in the session's name that came through a child tells nothing.
            let (frames, _) = client.sse(&format!("{STREAM}&fromSequence=0")).await;
            let mut children = 0;
            for step in chunks(&frames) {
                if step["type"] == "step_committed" && step.get("remoteSource").is_some() {
                    children += 1;
                    for field in ["patches", "projection", "resync"] {
                        assert!(step.get(field).is_none(), "{step}");
                    }
                }
            }
            assert!(children > 2, "{children}");
        }
    });
}

#[test]
fn a_raw_mount_shows_every_canary_and_no_step_with_patches() {
    in_world(|| async {
        let objects = world();
        let client = client(raw().with_live_state(), &objects);
        start(&client, 0).await;
        let seen = all_answers(&client).await;
        for canary in [STATE, FORGED, TOOL] {
            assert!(seen.contains(canary), "{canary}");
        }
        let (frames, _) = client.sse(&format!("{STREAM}&fromSequence=0")).await;
        for step in chunks(&frames)
            .iter()
            .filter(|chunk| chunk["type"] == "step_committed")
        {
            for field in ["patches", "projection", "resync"] {
                assert!(step.get(field).is_none(), "{step}");
            }
        }
        // Whoever asks the mount for what only a mount may ask gets the same.
        let headers = [("x-remote-agents-internal-neighbours", "1")];
        let response = client.send("GET", STREAM, &headers, "").await;
        let body = response.into_body().collect(1 << 24).await.unwrap();
        assert!(!String::from_utf8_lossy(&body).contains("neighbours"));
    });
}
