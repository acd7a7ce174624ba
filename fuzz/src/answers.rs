//! Answers of other services: what a mount shows of its object's, and what a transport reads.

use std::rc::Rc;

use bytes::Bytes;
use futures::StreamExt as _;
use remote_agents::http::{Body, Response};
use remote_agents::mount::{Asked, ChunkDetail, Mount, Projection};
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, Position, SessionId};
use remote_agents::protocol::message::{StartRequest, StopRequest};
use remote_agents::protocol::route::Action;
use remote_agents::protocol::tree::{TreeBounds, TreeNode};
use remote_agents::protocol::ui::Discard;
use remote_agents::transport::{HttpTransport, RetryPolicy, Transport, TransportError};
use serde_json::{Value, json};

use super::input::{Answering, Still, body, choice, cuts, now, owned};
use super::reference::{Item, items, object};

const ACTIONS: [Action; 6] = [
    Action::Sse,
    Action::Ui,
    Action::Snapshot,
    Action::Tree,
    Action::Messages,
    Action::Usage,
];

fn session() -> SessionId {
    SessionId::parse("s").unwrap()
}

fn planner() -> AgentType {
    AgentType::parse("planner").unwrap()
}

/// Projected mounts: with all chunks, with live state, and with the beginnings and ends alone.
fn mount(kind: usize) -> Mount {
    let map = Rc::new(|_: &str, _: &Value| json!("shown"));
    let mount = Mount::new("/agents")
        .with_projection(Projection {
            name: "public@1".to_owned(),
            map,
        })
        .with_ui()
        .with_messages();
    match kind {
        0 => mount,
        1 => mount.with_live_state(),
        _ => mount
            .with_chunks(ChunkDetail::Lifecycle)
            .with_agents([planner()]),
    }
}

pub(crate) fn shown(data: &[u8]) {
    let (kind, data) = choice(data, 3);
    let (action, data) = choice(data, ACTIONS.len());
    let (discard, data) = choice(data, 2);
    let asked = Asked {
        session_id: session(),
        agent_type: planner(),
        action: ACTIONS[action],
        discard: [Discard::Close, Discard::Reset][discard],
    };
    let (status, whole) = answer(kind, &asked, vec![owned(data)]);
    if !matches!(asked.action, Action::Sse | Action::Ui) {
        return json_answer(asked.action, status, &whole);
    }
    let events = shown_events(asked.action, &whole);
    for parts in cuts(data) {
        let (_, cut) = answer(kind, &asked, parts);
        assert_eq!(
            shown_events(asked.action, &cut),
            events,
            "it depends on the cut"
        );
    }
}

fn answer(kind: usize, asked: &Asked, parts: Vec<Bytes>) -> (u16, Vec<u8>) {
    let response = http::Response::builder()
        .header("x-remote-agents-stream", "st")
        .body(body(parts))
        .unwrap();
    let response: Response = now(mount(kind).finish(asked, response));
    let status = response.status().as_u16();
    let bytes = match response.into_body() {
        Body::Full(bytes) => bytes.to_vec(),
        Body::Stream(parts) => {
            let parts: Vec<_> = now(parts.collect());
            parts.into_iter().flatten().flatten().collect()
        }
    };
    (status, bytes)
}

/// The events of a stream that a mount shows, none of which may be state.
fn shown_events(action: Action, stream: &[u8]) -> Vec<(String, String)> {
    let mut events = Vec::new();
    for item in items(stream) {
        let event = match item {
            Item::Comment => continue,
            Item::Broken => panic!("a mount wrote what is not UTF-8"),
            Item::Event(event) => event,
        };
        let data = event.data.unwrap_or_default();
        if data == "[DONE]" {
            continue;
        }
        let read = object(&data).expect("an event of a mount is an object");
        let chunk = match (action, event.name.as_str()) {
            (Action::Ui, name) => {
                assert_eq!(name, "");
                let kind = read.get("type").and_then(Value::as_str).unwrap_or_default();
                assert!(!kind.is_empty() && kind != "data-state-patch", "{data}");
                let data = read.get("data");
                data.and_then(|data| data.get("chunk"))
                    .and_then(Value::as_object)
            }
            (_, "chunk") => read.get("chunk").and_then(Value::as_object),
            (_, "end") => {
                let state = read.get("state").filter(|state| !state.is_null());
                assert!(state.is_none_or(|state| state == "shown"), "{data}");
                None
            }
            (_, name) => {
                assert!(["caught-up", "error"].contains(&name), "{name}");
                None
            }
        };
        let kind = chunk.and_then(|chunk| chunk.get("type"));
        assert_ne!(kind, Some(&json!("state_patch")), "{data}");
        let own = event.id.unwrap_or_default();
        events.push((own, data));
    }
    events
}

fn json_answer(action: Action, status: u16, body: &[u8]) {
    if status != 200 {
        assert_eq!(status, 500, "an answer that cannot be read");
        return;
    }
    match action {
        Action::Tree => {
            let root: TreeNode = serde_json::from_slice(body).unwrap();
            let (nodes, depth) = size(&root);
            let most = TreeBounds::MOST;
            assert!(nodes <= most.nodes && depth <= most.depth && body.len() <= most.bytes);
        }
        Action::Usage => {}
        _ => {
            let answer: Value = serde_json::from_slice(body).unwrap();
            assert_eq!(answer.get("state"), Some(&json!("shown")));
            assert_eq!(answer.get("projection"), Some(&json!("public@1")));
        }
    }
}

/// Nodes and levels of a tree, each node of which shows no state but the projection.
fn size(node: &TreeNode) -> (usize, usize) {
    assert!(node.state.as_ref().is_none_or(|state| state == "shown"));
    let below = node.children.iter().map(size);
    let (nodes, depth) = below.fold((0, 0), |(nodes, depth), (more, deeper)| {
        (nodes + more, depth.max(deeper))
    });
    (nodes + 1, depth + 1)
}

pub(crate) fn transport(data: &[u8]) {
    let (status, data) = choice(data, 6);
    let (call, data) = choice(data, 7);
    let status = [200, 200, 200, 404, 429, 500][status];
    let streams = call == 0;
    let transport = |parts| {
        let fetch = Rc::new(Answering {
            status,
            content_type: if streams {
                "text/event-stream"
            } else {
                "application/json"
            },
            parts,
        });
        let policy = RetryPolicy {
            post_retries: 0,
            stream_retries: 0,
            ..RetryPolicy::default()
        };
        HttpTransport::new(
            fetch,
            Still::shared(),
            "http://p.test",
            "/agents",
            planner(),
        )
        .with_policy(policy)
    };
    if !streams {
        let whole = called(&transport(vec![owned(data)]), call);
        let parts = data.chunks(3).map(owned).collect();
        return assert_eq!(called(&transport(parts), call), whole);
    }
    let whole = frames(&transport(vec![owned(data)]));
    let ends = whole.iter().filter(|frame| match frame {
        Ok(frame) => frame.is_terminal(),
        Err(_) => true,
    });
    assert_eq!(ends.count(), 1, "a stream has one end");
    for parts in cuts(data) {
        assert_eq!(frames(&transport(parts)), whole, "it depends on the cut");
    }
}

fn frames(transport: &HttpTransport) -> Vec<Result<Frame, TransportError>> {
    match now(transport.stream(&session(), Position::None, None)) {
        Ok(frames) => now(frames.collect()),
        Err(error) => vec![Err(error)],
    }
}

/// What a call gives, as text.
fn called(transport: &HttpTransport, call: usize) -> String {
    let stop = || StopRequest {
        session_id: session(),
        reason: None,
    };
    match call {
        1 => {
            let start: StartRequest =
                serde_json::from_value(json!({"sessionId": "s", "message": "m"})).unwrap();
            format!("{:?}", now(transport.start(start, "k".to_owned())))
        }
        2 => format!("{:?}", now(transport.interrupt(stop()))),
        3 => format!("{:?}", now(transport.status(&session()))),
        4 => format!("{:?}", now(transport.snapshot(&session()))),
        5 => format!("{:?}", now(transport.usage(&session()))),
        _ => format!("{:?}", now(transport.tree(&session(), TreeBounds::MOST))),
    }
}
