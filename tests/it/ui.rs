//! `/ui` over real sessions: from every cursor, over restarts and failing models, and its end.
//!
//! [`Message`] is a reader with the rules of the package `ai`: what comes out of order is an error
//! there too. `miniflare/test/ui.test.mjs` reads with the package itself.

use std::rc::Rc;

use remote_agents::agent::model::{LanguageModel, ModelError, ModelErrorKind, ModelEvent};
use remote_agents::agent::typed_tool;
use remote_agents::mount::Mount;
use remote_agents::native::LocalObjects;
use remote_agents::protocol::chunk::RawChunk;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::reconstruct::{Document, Reading, Status};
use remote_agents::store::{SqlStore, Store as _};
use remote_agents::{Agent, Agents};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, in_world, scripted, text, turn, yield_now};

#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Notes {
    notes: Vec<String>,
}

#[derive(Deserialize, JsonSchema)]
struct Note {
    note: String,
}

fn noter(model: Rc<dyn LanguageModel>) -> Agent {
    Agent::new(AgentType::parse("noter").unwrap(), "Note things.", model)
        .with_state::<Notes>()
        .with_tool(typed_tool(
            "note",
            "Notes it twice, with a moment between.",
            |context, Note { note }: Note| async move {
                for n in 0..2 {
                    context.update(|state: &mut Notes| state.notes.push(format!("{note}{n}")))?;
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                Ok(json!({"noted": note}))
            },
        ))
}

fn client(model: impl Fn() -> Rc<dyn LanguageModel> + 'static) -> Client {
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated().with_ui()),
        objects: LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(move |_, _| Agents::new([noter(model())])),
        ),
    }
}

async fn start(client: &Client) -> Value {
    let body = json!({"sessionId": "s1", "message": "go"});
    let (status, body) = client.post("/agents/noter/start", body).await;
    assert_eq!(status, 200, "{body}");
    body
}

/// The parts of one stream, and whether it said that it is done.
async fn parts(client: &Client, query: &str) -> (Vec<Value>, bool) {
    let path = format!("/agents/noter/ui?sessionId=s1{query}");
    let response = client.send("GET", &path, &[], "").await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["x-vercel-ai-ui-message-stream"], "v1");
    let body = response.into_body().collect(16 << 20).await.unwrap();
    let text = String::from_utf8(body.to_vec()).unwrap();
    let data: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .collect();
    let is_done = data.last() == Some(&"[DONE]");
    let parts = data.iter().filter(|data| **data != "[DONE]");
    let parts = parts.map(|data| serde_json::from_str(data).unwrap());
    (parts.collect(), is_done)
}

/// What the package makes of parts.
#[derive(Default)]
struct Message {
    id: Option<String>,
    /// `[type, key, content]`; a step's beginning is `["step-start"]`.
    parts: Vec<[String; 3]>,
    open: Vec<String>,
    errors: Vec<String>,
}

impl Message {
    fn read(parts: &[Value]) -> Self {
        let mut message = Self::default();
        for part in parts {
            message.hear(part);
        }
        message
    }

    fn hear(&mut self, part: &Value) {
        let field = |name: &str| part[name].as_str().unwrap_or_default().to_owned();
        let kind = field("type");
        match kind.as_str() {
            "start" => self.id = part["messageId"].as_str().map(str::to_owned),
            "start-step" => self
                .parts
                .push(["step-start".into(), String::new(), String::new()]),
            "reset-step" => {
                let begun = self
                    .parts
                    .iter()
                    .rposition(|[kind, ..]| kind == "step-start");
                self.parts.truncate(begun.map_or(0, |at| at + 1));
                self.open.clear();
            }
            "text-start" => {
                self.open.push(field("id"));
                self.parts.push(["text".into(), field("id"), String::new()]);
            }
            "text-delta" => {
                assert!(self.open.contains(&field("id")), "{part}");
                let last = self
                    .parts
                    .iter_mut()
                    .rfind(|[_, key, _]| *key == field("id"));
                last.unwrap()[2].push_str(&field("delta"));
            }
            "text-end" => {
                assert!(self.open.contains(&field("id")), "{part}");
                self.open.retain(|id| *id != field("id"));
            }
            "tool-input-start" | "tool-input-available" | "tool-input-error" => {
                let state = ["tool".into(), field("toolCallId"), kind];
                self.call(&field("toolCallId"), state, true);
            }
            "tool-input-delta" => {
                let state = [
                    "tool".into(),
                    field("toolCallId"),
                    "tool-input-start".into(),
                ];
                assert!(self.parts.contains(&state), "{part}");
            }
            "tool-output-available" | "tool-output-error" => {
                let state = ["tool".into(), field("toolCallId"), kind];
                self.call(&field("toolCallId"), state, false);
            }
            "error" => self.errors.push(field("errorText")),
            _ => {}
        }
    }

    fn call(&mut self, id: &str, state: [String; 3], may_be_new: bool) {
        let known = self
            .parts
            .iter_mut()
            .rfind(|[kind, key, _]| kind == "tool" && key == id);
        match known {
            Some(known) => *known = state,
            None if may_be_new => self.parts.push(state),
            None => panic!("{state:?} of a call that was not told"),
        }
    }

    fn of(&self, kind: &str) -> Vec<&str> {
        let parts = self.parts.iter().filter(|[found, ..]| found == kind);
        parts.map(|[_, _, content]| content.as_str()).collect()
    }
}

/// The session's state by the data parts alone, on top of the snapshot at which they begin.
fn folded(stream: &str, parts: &[Value]) -> Document {
    let baseline = serde_json::from_value(json!({
        "sessionId": "s1", "streamId": stream, "state": {"notes": []}, "streamSequence": 1,
        "oldestRetainedSequence": 0, "stepCount": 0, "patchOrdinal": 0,
    }))
    .unwrap();
    let mut document = Document::new("s1");
    document.baseline(&baseline, false);
    let reading = Reading {
        session: "s1",
        stream,
    };
    for part in parts {
        let kind = part["type"].as_str().unwrap();
        let Some(kind) = kind
            .strip_prefix("data-")
            .map(|kind| kind.replace('-', "_"))
        else {
            continue;
        };
        let (Some(sequence), Value::Object(mut fields)) =
            (part["data"]["sequence"].as_u64(), part["data"].clone())
        else {
            continue;
        };
        fields.insert("type".into(), kind.into());
        document.observe(reading, sequence, &RawChunk(fields));
    }
    document
}

fn newest(client: &Client) -> u64 {
    let session = SessionId::parse("s1").unwrap();
    let database = client.objects.database(&session).unwrap();
    let record = SqlStore::new(database).session().unwrap();
    record.map_or(0, |record| record.last_sequence)
}

fn two_notes() -> Rc<dyn LanguageModel> {
    scripted(|request| match turn(request) {
        0 => calls(&[
            ("c1", "note", json!({"note": "a"})),
            ("c2", "note", json!({"note": "b"})),
        ]),
        _ => text("all is noted now"),
    })
}

#[test]
fn over_every_restart_and_from_every_cursor_it_is_read_without_an_error() {
    in_world(|| async {
        let (mut discarded, mut read, mut folds) = (0, 0, 0);
        for at in 1..34_u64 {
            let client = client(two_notes);
            let started = start(&client).await;
            while newest(&client) < at {
                let (_, status) = client.get("/agents/noter/status?sessionId=s1").await;
                if status["status"] != "running" {
                    break;
                }
                yield_now().await;
            }
            client
                .objects
                .evict(&SessionId::parse("s1").unwrap())
                .unwrap();
            for discard in ["reset", "close"] {
                let (all, is_done) = parts(&client, &format!("&discard={discard}")).await;
                assert!(is_done);
                let message = Message::read(&all);
                assert_eq!(message.id.as_deref(), started["runId"].as_str());
                assert!(message.open.is_empty() && message.errors.is_empty());
                let texts = message.of("text");
                assert_eq!(texts.last(), Some(&"all is noted now"), "ended at {at}");
                // Whatever was said before is taken back, or stands before it as a part of its own.
                assert!(discard == "close" || texts.len() == 1, "{texts:?}");
                let results = message.of("tool");
                let good = results
                    .iter()
                    .filter(|state| **state == "tool-output-available");
                assert_eq!(good.count(), 2, "{results:?}");
                assert!(discard == "close" || results.len() == 2, "{results:?}");

                let again = |part: &&Value| part["type"] == "data-step-discarded";
                discarded += all.iter().filter(again).count();
                let document = folded(started["streamId"].as_str().unwrap(), &all);
                if all.iter().any(|part| again(&part)) {
                    // It says so rather than hold what is void.
                    assert!(matches!(document.status(), Status::Stale(_)));
                } else {
                    let (_, snapshot) = client.get("/agents/noter/snapshot?sessionId=s1").await;
                    assert_eq!(*document.state(), snapshot["state"]);
                    assert!(matches!(document.status(), Status::Exact { .. }));
                    folds += 1;
                }

                for from in (at % 9..newest(&client)).step_by(9) {
                    let query = format!("&discard={discard}&fromSequence={from}");
                    let (rest, is_done) = parts(&client, &query).await;
                    assert!(is_done && Message::read(&rest).errors.is_empty());
                    read += 1;
                }
            }
        }
        assert!(discarded > 20, "{discarded} discards");
        assert!(read > 150 && folds > 0, "{read} streams, {folds} folds");
    });
}

#[test]
fn a_failing_model_s_attempts_are_closed_or_taken_back_and_the_failure_is_a_sentence() {
    in_world(|| async {
        let failing = || {
            scripted(|_| {
                vec![
                    Ok(ModelEvent::TextDelta("half".into())),
                    Err(ModelError {
                        kind: ModelErrorKind::Unavailable,
                        message: "The provider broke off: secret.".into(),
                        retry_after: None,
                    }),
                ]
            })
        };
        let client = client(failing);
        start(&client).await;
        let (closed, is_done) = parts(&client, "").await;
        assert!(is_done);
        let message = Message::read(&closed);
        assert_eq!(message.of("text"), ["half"; 4]);
        assert!(message.open.is_empty());
        let (_, status) = client.get("/agents/noter/status?sessionId=s1").await;
        assert_eq!(message.errors, [status["error"].as_str().unwrap()]);
        let code = closed.iter().find(|part| part["type"] == "data-error");
        assert_eq!(code.unwrap()["data"]["code"], "provider_error");

        let (reset, _) = parts(&client, "&discard=reset").await;
        let message = Message::read(&reset);
        assert_eq!(message.of("text"), [""; 0]);
        assert_eq!(message.errors.len(), 1);
    });
}

#[test]
fn a_cursor_that_cannot_be_served_and_an_interrupted_run_are_told() {
    in_world(|| async {
        let client = client(two_notes);
        start(&client).await;
        while newest(&client) < 4 {
            yield_now().await;
        }
        let stop = json!({"sessionId": "s1", "reason": "enough"});
        client.post("/agents/noter/interrupt", stop).await;
        let (told, is_done) = parts(&client, "").await;
        let last = told.last().unwrap();
        assert_eq!(*last, json!({"type": "abort", "reason": "enough"}));
        assert!(is_done && Message::read(&told).open.is_empty());

        for query in ["&fromSequence=9999", "&streamId=another"] {
            let (told, is_done) = parts(&client, query).await;
            let kinds: Vec<_> = told.iter().map(|part| &part["type"]).collect();
            assert_eq!(kinds, ["data-error", "error"], "{query}");
            assert_eq!(told[0]["data"]["code"], "TRUNCATED");
            assert!(told[0]["data"]["streamId"].is_string() && is_done);
        }
        let (status, refused) = client.get("/agents/noter/ui?sessionId=unknown").await;
        assert_eq!((status, refused["code"].as_str()), (404, Some("NOT_FOUND")));
    });
}
