//! The conversation, page by page, beside the state that it belongs to.

use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::typed_tool;
use remote_agents::mount::{Auth, ChunkDetail, Mount, Projection};
use remote_agents::native::LocalObjects;
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::AgentType;
use remote_agents::{Agent, Agents, ToolContext};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::support::{Client, Lines, calls, in_world, read, scripted, text, turn};

const CANARY: &str = "canary-91e7";

#[derive(Deserialize, schemars::JsonSchema)]
struct Note {
    note: String,
}

fn agent_type(name: &str) -> AgentType {
    AgentType::parse(name).unwrap()
}

fn open() -> Mount {
    Mount::new("/agents")
        .allow_unauthenticated()
        .with_messages()
}

/// An agent that notes twice, slowly, and then says so.
fn noter(mount: Mount) -> Client {
    let objects = LocalObjects::new(
        1_700_000_000_000,
        Lines::default().sink(),
        Rc::new(|_, _| {
            let model = scripted(|request| match turn(request) {
                n @ 0..=1 => {
                    let id = format!("n{n}");
                    calls(&[(id.as_str(), "note", json!({"note": format!("note {n}")}))])
                }
                _ => text("all is noted"),
            });
            let note = typed_tool(
                "note",
                "Notes.",
                |context: ToolContext, note: Note| async move {
                    let count = context.state::<Map<String, Value>>()?.len();
                    context.update(|state: &mut Map<String, Value>| {
                        state.insert(format!("{CANARY}-{count}"), json!(note.note));
                    })?;
                    tokio::time::sleep(Duration::from_secs(10)).await;
                    Ok(json!({ "kept": note.note }))
                },
            );
            Agents::new([Agent::new(agent_type("noter"), "Note.", model)
                .with_state::<Map<String, Value>>()
                .with_tool(note)])
        }),
    );
    Client {
        mount: Rc::new(mount),
        objects,
    }
}

impl Client {
    fn behind(&self, mount: Mount) -> Self {
        Self {
            mount: Rc::new(mount),
            objects: self.objects.clone(),
        }
    }
}

async fn begin(client: &Client) {
    let body = json!({"sessionId": "s", "message": "please"});
    let (status, body) = client.post("/agents/noter/start", body).await;
    assert_eq!(status, 200, "{body}");
}

async fn page(client: &Client, more: &str) -> Value {
    let path = format!("/agents/noter/messages?sessionId=s{more}");
    let (status, page) = client.get(&path).await;
    assert_eq!(status, 200, "{page}");
    page
}

fn roles(page: &Value) -> Vec<&str> {
    let messages = page["messages"].as_array().unwrap();
    messages
        .iter()
        .map(|message| message["role"].as_str().unwrap())
        .collect()
}

#[test]
fn a_page_is_of_one_commit_with_its_state_and_position() {
    in_world(|| async {
        let client = noter(open());
        begin(&client).await;
        let mut pages = Vec::new();
        for steps in [0_usize, 1, 3] {
            // In the middle of the next step, or behind the end.
            tokio::time::sleep(Duration::from_secs(if steps == 0 { 5 } else { 10 })).await;
            let page = page(&client, "").await;
            let (_, snapshot) = client.get("/agents/noter/snapshot?sessionId=s").await;
            for field in ["sessionId", "streamId", "streamSequence", "state"] {
                assert_eq!(page[field], snapshot[field], "{field}");
            }
            assert_eq!(snapshot["stepCount"], steps);
            let mut expected = vec!["user"];
            expected.extend(["assistant", "tool"].repeat(steps.min(2)));
            expected.extend((steps == 3).then_some("assistant"));
            assert_eq!(roles(&page), expected);
            assert_eq!(page.get("next"), None);
            pages.push(page);
        }
        assert_eq!(pages[2]["streamSequence"], -1);
        // What the stream says up to the position is in a message, and what it says above in none.
        let (frames, _) = client
            .sse("/agents/noter/sse?sessionId=s&fromSequence=0")
            .await;
        for page in &pages[..2] {
            let text = page["messages"].to_string();
            let mut seen = [0, 0];
            for frame in &frames {
                let Frame::Chunk { sequence, chunk } = frame else {
                    continue;
                };
                if chunk.kind() == "tool_start" {
                    let covered = *sequence <= page["streamSequence"].as_u64().unwrap();
                    assert_eq!(text.contains(chunk.text("toolCallId").unwrap()), covered);
                    seen[usize::from(covered)] += 1;
                }
            }
            assert_eq!(seen[0] + seen[1], 2);
            assert!(seen[0] > 0);
        }
    });
}

#[test]
fn pages_add_up_to_the_conversation_over_turns() {
    in_world(|| async {
        let client = noter(open());
        begin(&client).await;
        client.settled("noter", "s").await;
        let more = json!({"sessionId": "s", "message": "once more"});
        assert_eq!(client.post("/agents/noter/resume", more).await.0, 200);
        client.settled("noter", "s").await;
        let whole = page(&client, "").await;
        let messages = whole["messages"].as_array().unwrap();
        assert_eq!(messages.len(), 12);
        assert_eq!(
            messages[0],
            json!({"index": 1, "role": "user", "text": "please"})
        );
        assert_eq!(
            messages[1],
            json!({"index": 2, "role": "assistant", "text": "",
                "toolCalls": [{"id": "n0", "name": "note", "arguments": {"note": "note 0"}}]})
        );
        assert_eq!(
            messages[2],
            json!({"index": 3, "role": "tool", "toolCallId": "n0", "toolName": "note",
                "success": true, "result": {"kept": "note 0"}})
        );
        assert_eq!(messages[5]["text"], "all is noted");
        assert_eq!(
            messages[6],
            json!({"index": 7, "role": "user", "text": "once more"})
        );
        for limit in [1, 5, 12, 200] {
            let (mut all, mut after) = (Vec::new(), 0);
            loop {
                let page = page(&client, &format!("&after={after}&limit={limit}")).await;
                assert!(page["messages"].as_array().unwrap().len() <= limit);
                all.extend(page["messages"].as_array().unwrap().clone());
                match page["next"].as_u64() {
                    Some(next) => after = next,
                    None => break,
                }
            }
            assert_eq!(&all, messages, "limit {limit}");
        }
        assert_eq!(page(&client, "&after=12").await["messages"], json!([]));
    });
}

#[test]
fn a_mount_has_no_messages_unless_it_is_told_to() {
    in_world(|| async {
        let client = noter(open());
        begin(&client).await;
        client.settled("noter", "s").await;
        let base = || Mount::new("/agents").allow_unauthenticated();
        let path = "/agents/noter/messages?sessionId=s";
        let projection = || Projection {
            name: "none/1".into(),
            map: Rc::new(|_, _| json!({})),
        };
        for mount in [
            base(),
            base().with_projection(projection()),
            base().with_chunks(ChunkDetail::Lifecycle),
        ] {
            let (status, body) = client.behind(mount).get(path).await;
            assert_eq!(
                (status, &body["code"]),
                (404, &json!("FEATURE_UNAVAILABLE"))
            );
        }
        // Whether a mount has them is told to those alone who may use it.
        let gated = base().with_auth(Auth::Bearer(Some("key".into())));
        assert_eq!(client.behind(gated).get(path).await.0, 401);
        for path in [
            "/agents/noter/messages?sessionId=nobody",
            "/agents/other/messages?sessionId=s",
        ] {
            let (status, body) = client.get(path).await;
            assert_eq!(
                (status, &body["code"]),
                (404, &json!("NOT_FOUND")),
                "{path}"
            );
        }
        let narrow = open().with_agents([agent_type("other")]);
        assert_eq!(client.behind(narrow).get(path).await.0, 404);
    });
}

#[test]
fn a_projected_mount_shows_the_conversation_without_the_state() {
    in_world(|| async {
        let client = noter(open());
        begin(&client).await;
        client.settled("noter", "s").await;
        let projected = client.behind(open().with_projection(Projection {
            name: "count/1".into(),
            map: Rc::new(
                |kind, state| json!({"of": kind, "keys": state.as_object().map_or(0, Map::len)}),
            ),
        }));
        let shown = page(&projected, "").await;
        assert!(!shown.to_string().contains(CANARY), "{shown}");
        assert_eq!(shown["state"], json!({"of": "noter", "keys": 2}));
        assert_eq!(shown["projection"], "count/1");
        let raw = page(&client, "").await;
        assert!(raw.to_string().contains(CANARY));
        assert_eq!(shown["messages"], raw["messages"]);

        let lifecycle = client.behind(open().with_chunks(ChunkDetail::Lifecycle));
        let answer = lifecycle
            .send("GET", "/agents/noter/messages?sessionId=s", &[], "")
            .await;
        let (_, shown) = read(answer).await;
        let text = shown["messages"].to_string();
        assert!(
            !text.contains("note 0") && !text.contains("arguments") && !text.contains("result")
        );
        assert_eq!(roles(&shown), roles(&raw));
        assert_eq!(shown["messages"][5]["text"], "all is noted");
    });
}
