//! Cases from the field that need a whole session to show, by their numbers in `tests/coverage.md`.

use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;
use remote_agents::agent::model::{ModelError, ModelErrorKind, ModelEvent};
use remote_agents::agent::typed_tool;
use remote_agents::http::{Body, ByteStream};
use remote_agents::mount::Mount;
use remote_agents::native::LocalObjects;
use remote_agents::protocol::chunk::PatchOperation;
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::session::patch::apply;
use remote_agents::{Agent, Agents};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, in_world, scripted, text, turn, yield_now};

mod connections;
mod endings;
mod peers;

const SSE: &str = "/agents/worker/sse?sessionId=s1";

#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Notes {
    padding: String,
    notes: Vec<u64>,
}

#[derive(Deserialize, JsonSchema)]
struct Note {
    note: u64,
}

/// Makes two notes in each of `steps` steps and says a few words in between; where the message says
/// so it hangs in a tool instead.
fn worker(steps: usize) -> Agent {
    let model = scripted(move |request| {
        let says = format!("{:?}", request.messages.last());
        match turn(request) {
            0 if says.contains("hang") => calls(&[("c", "hang", json!({}))]),
            0 if says.contains("fail") => {
                vec![Err(ModelError::new(
                    ModelErrorKind::Rejected,
                    "It is refused.",
                ))]
            }
            step if step < steps => {
                let mut events = vec![Ok(ModelEvent::TextDelta(format!("step {step} ")))];
                let note = |n: usize| json!({ "note": 2 * step + n });
                events.extend(calls(&[("c1", "note", note(0)), ("c2", "note", note(1))]));
                events
            }
            _ => text("all is done now"),
        }
    });
    Agent::new(AgentType::parse("worker").unwrap(), "Work.", model)
        .with_state::<Notes>()
        .with_tool(typed_tool(
            "note",
            "Notes.",
            |context, note: Note| async move {
                context.update(|state: &mut Notes| state.notes.push(note.note))?;
                Ok(json!({}))
            },
        ))
        .with_tool(typed_tool("hang", "Hangs.", |_, _: Value| async move {
            std::future::pending::<()>().await;
            Ok(json!({}))
        }))
}

fn client(make: impl Fn() -> Agent + 'static) -> Client {
    client_behind(Mount::new("/agents"), make)
}

fn client_behind(mount: Mount, make: impl Fn() -> Agent + 'static) -> Client {
    Client {
        mount: Rc::new(mount.allow_unauthenticated()),
        objects: LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(move |_, _| Agents::new([make()])),
        ),
    }
}

fn id() -> SessionId {
    SessionId::parse("s1").unwrap()
}

async fn post(client: &Client, route: &str, message: Option<&str>) -> (u16, Value) {
    let mut body = json!({"sessionId": "s1"});
    if let Some(message) = message {
        body["message"] = message.into();
    }
    client.post(&format!("/agents/worker/{route}"), body).await
}

async fn start(client: &Client, message: &str) -> Value {
    let (status, body) = post(client, "start", Some(message)).await;
    assert_eq!(status, 200, "{body}");
    body
}

async fn status(client: &Client) -> Value {
    client.get("/agents/worker/status?sessionId=s1").await.1
}

async fn until(client: &Client, wanted: &str) {
    for _ in 0..100_000 {
        if status(client).await["status"] == wanted {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it did not become {wanted}")
}

async fn attach(client: &Client, query: &str) -> ByteStream {
    let answer = client.send("GET", &format!("{SSE}{query}"), &[], "").await;
    assert_eq!(answer.status(), 200);
    let Body::Stream(body) = answer.into_body() else {
        panic!("a stream was expected")
    };
    body
}

fn numbered(frames: &[Frame]) -> Vec<(u64, Value)> {
    let numbered = |frame: &Frame| match frame {
        Frame::Chunk { sequence, chunk } => Some((*sequence, Value::Object(chunk.0.clone()))),
        _ => None,
    };
    frames.iter().filter_map(numbered).collect()
}

fn is_terminal(frame: &Frame) -> bool {
    matches!(frame, Frame::End(_) | Frame::Error(_))
}

/// The document with the patches of all these chunks.
fn patched(mut document: Value, chunks: &[(u64, Value)]) -> Value {
    for (_, chunk) in chunks {
        if chunk["type"] == "state_patch" {
            let patches: Vec<PatchOperation> =
                serde_json::from_value(chunk["patches"].clone()).unwrap();
            document = apply(&document, &patches).unwrap();
        }
    }
    document
}

#[test]
fn case_02_whatever_is_written_between_a_snapshot_and_its_stream_is_read_once() {
    in_world(|| async {
        let mut positions = std::collections::BTreeSet::new();
        for taken in 0..40 {
            for written in [0, 1, 7] {
                let client = client(|| worker(3));
                start(&client, "go").await;
                for _ in 0..taken {
                    yield_now().await;
                }
                let (_, snapshot) = client.get("/agents/worker/snapshot?sessionId=s1").await;
                for _ in 0..written {
                    yield_now().await;
                }
                // A session that has ended has no position: its state is the last one.
                let Some(at) = snapshot["streamSequence"].as_u64() else {
                    assert_eq!(snapshot["streamSequence"], -1);
                    assert_eq!(snapshot["state"]["notes"], json!([0, 1, 2, 3, 4, 5]));
                    continue;
                };
                positions.insert(at);
                let (frames, _) = client.sse(&format!("{SSE}&fromSequence={at}")).await;
                let (whole, _) = client.sse(&format!("{SSE}&fromSequence=0")).await;
                let rest = numbered(&frames);
                assert_eq!(
                    rest[..],
                    numbered(&whole)[usize::try_from(at).unwrap()..],
                    "{taken} {written}"
                );
                let Some(Frame::End(end)) = frames.last() else {
                    panic!("{frames:?}")
                };
                let folded = patched(snapshot["state"].clone(), &rest);
                assert_eq!(Some(&folded), end.state.as_ref(), "{taken} {written}");
            }
        }
        assert_eq!(
            positions.len(),
            4,
            "a checkpoint was never met: {positions:?}"
        );
    });
}

#[test]
fn case_33_a_change_costs_the_wire_its_own_size_however_large_the_state_is() {
    in_world(|| async {
        // The bytes of the whole stream but for its terminal event, which tells the state once.
        let bytes = async |padding: usize| {
            let client = client(|| worker(10));
            let state = json!({"padding": "x".repeat(padding)});
            let body = json!({"sessionId": "s1", "message": "go", "state": state});
            assert_eq!(client.post("/agents/worker/start", body).await.0, 200);
            let (frames, raw) = client.sse(&format!("{SSE}&fromSequence=0")).await;
            let patches = numbered(&frames);
            let patches = patches
                .iter()
                .filter(|(_, chunk)| chunk["type"] == "state_patch");
            assert_eq!(patches.count(), 20);
            let end = raw.find("event: end\n").unwrap();
            assert!(raw[end..].len() > padding, "the end has the state");
            (end, raw[..end].matches("xxxxxxxx").count())
        };
        let (small, _) = bytes(0).await;
        let (large, copies) = bytes(512 << 10).await;
        assert_eq!(copies, 0, "the state is told beside its changes");
        assert!(large.abs_diff(small) < 64, "{small} became {large}");
        // Twenty changes with their calls, words and steps.
        assert!(small < 20 * 2_000, "{small} bytes");
    });
}

#[test]
fn case_33_a_projected_step_costs_the_change_of_its_projection() {
    in_world(|| async {
        let bytes = async |padding: usize| {
            let projection = remote_agents::mount::Projection {
                name: "all".into(),
                map: Rc::new(|_, state| state.clone()),
            };
            let mount = Mount::new("/agents")
                .with_projection(projection)
                .with_live_state();
            let client = client_behind(mount, || worker(10));
            let state = json!({"padding": "x".repeat(padding)});
            let body = json!({"sessionId": "s1", "message": "go", "state": state});
            assert_eq!(client.post("/agents/worker/start", body).await.0, 200);
            let (frames, raw) = client.sse(&format!("{SSE}&fromSequence=0")).await;
            let steps = numbered(&frames);
            let steps = steps
                .iter()
                .filter(|(_, chunk)| chunk.get("patches").is_some());
            assert!(steps.count() >= 10);
            raw.find("event: end\n").unwrap()
        };
        let (small, large) = (bytes(0).await, bytes(100 << 10).await);
        // The first step behind an entry has the whole document, once.
        assert!(
            large - small < (100 << 10) + 1_024,
            "{small} became {large}"
        );
    });
}
