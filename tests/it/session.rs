//! A session over its routes: run, replay, stop, resume, eviction, keys, projections, children.

use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::model::{
    LanguageModel, ModelError, ModelErrorKind, ModelEvent, ModelRequest, ModelStream,
};
use remote_agents::agent::{SubAgent, ToolError, typed_tool};
use remote_agents::mount::{Mount, Objects, Projection};
use remote_agents::native::{LocalObjects, MountFetch};
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::store::SubLocation;
use remote_agents::transport::{Fetch, HttpTransport, ObjectsFetch};
use remote_agents::{Agent, Agents};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::stories::paired;
use crate::support::{Client, Lines, calls, chunks, in_world, scripted, text, turn, yield_now};

#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Notes {
    notes: Vec<String>,
    count: u32,
}

#[derive(Deserialize, JsonSchema)]
struct Note {
    note: String,
}

fn agent_type(name: &str) -> AgentType {
    AgentType::parse(name).unwrap()
}

/// An agent that notes what it is told to and says something.
fn noter(model: Rc<dyn LanguageModel>) -> Agent {
    Agent::new(agent_type("noter"), "Note things.", model)
        .with_state::<Notes>()
        .with_tool(typed_tool(
            "note",
            "Notes.",
            |context, note: Note| async move {
                context.update(|state: &mut Notes| {
                    state.notes.push(note.note);
                    state.count += 1;
                })?;
                Ok(json!({"noted": true}))
            },
        ))
        .with_tool(typed_tool(
            "fail",
            "Fails after it wrote.",
            |context, note: Note| async move {
                context.update(|state: &mut Notes| state.notes.push(note.note))?;
                Err::<Value, _>(ToolError::new("it did not work"))
            },
        ))
        .with_tool(typed_tool(
            "hang",
            "Never ends.",
            |context, note: Note| async move {
                context.update(|state: &mut Notes| state.notes.push(note.note))?;
                std::future::pending::<()>().await;
                Ok(json!({}))
            },
        ))
}

fn client(mount: Mount, make: impl Fn(&Rc<LocalObjects>) -> Vec<Agent> + 'static) -> Client {
    client_logging(mount, &Lines::default(), make)
}

fn client_logging(
    mount: Mount,
    lines: &Lines,
    make: impl Fn(&Rc<LocalObjects>) -> Vec<Agent> + 'static,
) -> Client {
    let objects = LocalObjects::new(
        1_700_000_000_000,
        lines.sink(),
        Rc::new(move |objects, _| Agents::new(make(objects))),
    );
    Client {
        mount: Rc::new(mount),
        objects,
    }
}

fn open_mount() -> Mount {
    Mount::new("/agents").allow_unauthenticated()
}

fn two_notes() -> Rc<dyn LanguageModel> {
    scripted(|request| match turn(request) {
        0 => calls(&[
            ("c1", "note", json!({"note": "a"})),
            ("c2", "note", json!({"note": "b"})),
        ]),
        1 => calls(&[("c1", "fail", json!({"note": "lost"}))]),
        _ => text("all is noted now"),
    })
}

async fn start(client: &Client, session: &str) -> Value {
    let (status, body) = client
        .post(
            "/agents/noter/start",
            json!({"sessionId": session, "message": "go"}),
        )
        .await;
    assert_eq!(status, 200, "{body}");
    body
}

#[test]
fn case_01_a_run_streams_replays_and_ends_the_same_for_every_cursor() {
    in_world(|| async {
        let client = client(open_mount(), |_| vec![noter(two_notes())]);
        let started = start(&client, "s1").await;
        let (frames, raw) = client.sse("/agents/noter/sse?sessionId=s1").await;
        let kinds: Vec<String> = chunks(&frames)
            .iter()
            .map(|chunk| chunk["type"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(
            kinds
                .iter()
                .filter(|kind| *kind == "step_committed")
                .count(),
            3
        );
        assert_eq!(kinds.first().map(String::as_str), Some("run_started"));
        let Some(Frame::End(end)) = frames.last() else {
            panic!("{frames:?}")
        };
        assert_eq!(end.output, Some(json!("all is noted now")));
        assert_eq!(end.state, Some(json!({"notes": ["a", "b"], "count": 2})));
        assert_eq!(end.usage.as_ref().unwrap()["tokens"]["total"], 75);
        assert_eq!(end.run_id, started["runId"].as_str().map(Into::into));

        // A call id that came twice was renamed before anything was said about it.
        let ends: Vec<_> = chunks(&frames)
            .into_iter()
            .filter(|chunk| chunk["type"] == "tool_end")
            .collect();
        assert_eq!(ends[2]["toolCallId"], "c1_2");
        assert_eq!(ends[2]["success"], false);

        // Case 1: cut at every chunk and re-attach by cursor.
        let whole: Vec<&str> = raw
            .split_inclusive("\n\n")
            .filter(|event| event.contains("event: chunk"))
            .collect();
        let terminal = raw.split_inclusive("\n\n").last().unwrap();
        for cut in 0..=whole.len() {
            let (_, rest) = client
                .sse(&format!(
                    "/agents/noter/sse?sessionId=s1&fromSequence={cut}"
                ))
                .await;
            let again: Vec<&str> = rest
                .split_inclusive("\n\n")
                .filter(|event| event.contains("event: chunk"))
                .collect();
            assert_eq!(again, whole[cut..], "cut at {cut}");
            assert_eq!(rest.split_inclusive("\n\n").last(), Some(terminal));
        }
    });
}

#[test]
fn case_21_the_first_byte_precedes_the_first_token_and_events_come_as_they_are_written() {
    in_world(|| async {
        use futures::StreamExt as _;
        let client = client(open_mount(), |_| vec![noter(two_notes())]);
        start(&client, "s1").await;
        let response = client
            .send("GET", "/agents/noter/sse?sessionId=s1", &[], "")
            .await;
        let remote_agents::http::Body::Stream(mut body) = response.into_body() else {
            panic!()
        };
        let mut parts = Vec::new();
        while let Some(part) = body.next().await {
            parts.push(String::from_utf8(part.unwrap().to_vec()).unwrap());
        }
        assert!(parts[0].starts_with(':'), "{}", parts[0]);
        assert!(!parts[0].contains("data:"));
        let with_text = parts
            .iter()
            .filter(|part| part.contains("text_delta"))
            .count();
        assert!(
            with_text >= 4,
            "the words of the answer came in {with_text} parts"
        );
    });
}

#[test]
fn a_silent_stream_says_every_fifteen_seconds_that_it_lives() {
    in_world(|| async {
        use futures::StreamExt as _;
        let model = scripted(|_| calls(&[("c1", "hang", json!({"note": "x"}))]));
        let client = client(open_mount(), move |_| vec![noter(model.clone())]);
        start(&client, "s1").await;
        let response = client
            .send("GET", "/agents/noter/sse?sessionId=s1", &[], "")
            .await;
        let remote_agents::http::Body::Stream(mut body) = response.into_body() else {
            panic!()
        };
        let mut next =
            async || String::from_utf8(body.next().await.unwrap().unwrap().to_vec()).unwrap();
        while !next().await.contains("tool_start") {}
        let mut silences = Vec::new();
        let mut last = tokio::time::Instant::now();
        while silences.len() < 3 {
            if next().await == ": ping\n\n" {
                silences.push(last.elapsed().as_secs());
            }
            last = tokio::time::Instant::now();
        }
        assert_eq!(silences, [15, 15, 15]);
    });
}

/// A model that never says anything.
struct Silent;

impl LanguageModel for Silent {
    fn name(&self) -> &str {
        "silent"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        paired::read(&request).unwrap();
        Box::pin(futures::stream::pending())
    }
}

#[test]
fn what_an_entry_committed_is_told_before_the_model_says_anything() {
    in_world(|| async {
        use futures::StreamExt as _;
        let client = client(open_mount(), |_| vec![noter(Rc::new(Silent))]);
        let told = async |from: u64| {
            let path = format!("/agents/noter/sse?sessionId=s1&fromSequence={from}");
            let response = client.send("GET", &path, &[], "").await;
            let remote_agents::http::Body::Stream(mut body) = response.into_body() else {
                panic!()
            };
            body.next().await.unwrap().unwrap();
            String::from_utf8(body.next().await.unwrap().unwrap().to_vec()).unwrap()
        };
        start(&client, "s1").await;
        let part = told(0).await;
        assert!(part.contains("run_started"), "{part}");
        client
            .post("/agents/noter/interrupt", json!({"sessionId": "s1"}))
            .await;
        client.settled("noter", "s1").await;
        let (code, _) = client
            .post("/agents/noter/resume", json!({"sessionId": "s1"}))
            .await;
        assert_eq!(code, 200);
        let part = told(2).await;
        assert!(part.contains("run_resumed"), "{part}");
    });
}

#[test]
fn positions_outside_the_log_are_told_and_never_skipped() {
    in_world(|| async {
        let client = client(open_mount(), |_| vec![noter(two_notes())]);
        start(&client, "s1").await;
        client.settled("noter", "s1").await;
        for query in ["fromSequence=100000", "fromSequence=0&streamId=other"] {
            let (frames, _) = client
                .sse(&format!("/agents/noter/sse?sessionId=s1&{query}"))
                .await;
            let [Frame::Error(error)] = frames.as_slice() else {
                panic!("{frames:?}")
            };
            assert_eq!(
                (error.code.as_str(), error.recoverable),
                ("TRUNCATED", false)
            );
            assert!(error.stream_id.is_some() && error.floor == Some(0));
        }
        let (status, body) = client
            .get("/agents/noter/sse?sessionId=s1&fromSequence=1.5")
            .await;
        assert_eq!(
            (status, body["field"].as_str()),
            (400, Some("fromSequence"))
        );
    });
}

#[test]
fn an_idempotency_key_is_answered_before_the_status_is_looked_at() {
    in_world(|| async {
        let client = client(open_mount(), |_| vec![noter(two_notes())]);
        let send = async |key: &str, body: Value| {
            crate::support::read(
                client
                    .send(
                        "POST",
                        "/agents/noter/start",
                        &[("idempotency-key", key)],
                        body.to_string(),
                    )
                    .await,
            )
            .await
        };
        let body = json!({"sessionId": "s1", "message": "go", "metadata": {"a": 1, "b": 2}});
        let (status, first) = send("k1", body.clone()).await;
        assert_eq!(status, 200);
        client.settled("noter", "s1").await;
        let reordered = json!({"metadata": {"b": 2, "a": 1}, "message": "go", "sessionId": "s1"});
        assert_eq!(send("k1", reordered).await, (200, first));
        let (status, conflict) = send("k1", json!({"sessionId": "s1", "message": "other"})).await;
        assert_eq!(
            (status, conflict["code"].as_str()),
            (409, Some("IDEMPOTENCY_CONFLICT"))
        );
        let (status, ended) = send("k2", body).await;
        assert_eq!(
            (status, ended["code"].as_str()),
            (409, Some("ALREADY_COMPLETED"))
        );
    });
}

#[test]
fn an_interrupt_cuts_a_hanging_tool_and_a_resume_goes_on() {
    in_world(|| async {
        let model = scripted(|request| match turn(request) {
            0 => calls(&[
                ("c1", "note", json!({"note": "kept"})),
                ("c2", "hang", json!({"note": "lost"})),
            ]),
            _ => text("went on"),
        });
        let client = client(open_mount(), move |_| vec![noter(model.clone())]);
        start(&client, "s1").await;
        let status = loop {
            let (_, status) = client.get("/agents/noter/status?sessionId=s1").await;
            let (_, usage) = client.get("/agents/noter/usage?sessionId=s1").await;
            if usage["rollup"]["tools"]["calls"] == 1 {
                break status;
            }
            yield_now().await;
        };
        assert_eq!(
            (status["status"].as_str(), status["isExecuting"].as_bool()),
            (Some("running"), Some(true))
        );
        let (code, busy) = client
            .post(
                "/agents/noter/start",
                json!({"sessionId": "s1", "message": "x"}),
            )
            .await;
        assert_eq!(
            (code, busy["code"].as_str()),
            (409, Some("ALREADY_RUNNING"))
        );
        assert_eq!(busy["streamId"], status["streamId"]);

        let (code, stop) = client
            .post(
                "/agents/noter/interrupt",
                json!({"sessionId": "s1", "reason": "enough"}),
            )
            .await;
        assert_eq!((code, stop["accepted"].as_bool()), (200, Some(true)));
        let settled = client.settled("noter", "s1").await;
        assert_eq!(settled["status"], "interrupted");
        let (_, snapshot) = client.get("/agents/noter/snapshot?sessionId=s1").await;
        assert_eq!(snapshot["state"]["notes"], json!(["kept"]));
        assert!(
            snapshot["streamSequence"].as_i64().unwrap() > 0,
            "an interrupted session is pinned"
        );
        let (_, again) = client
            .post("/agents/noter/interrupt", json!({"sessionId": "s1"}))
            .await;
        assert_eq!(again["accepted"], false);

        let (code, _) = client
            .post("/agents/noter/resume", json!({"sessionId": "s1"}))
            .await;
        assert_eq!(code, 200);
        let settled = client.settled("noter", "s1").await;
        assert_eq!(
            (settled["status"].as_str(), settled["output"].as_str()),
            (Some("completed"), Some("went on"))
        );
        let (code, refused) = client
            .post("/agents/noter/resume", json!({"sessionId": "s1"}))
            .await;
        assert_eq!(
            (code, refused["code"].as_str()),
            (409, Some("ALREADY_COMPLETED"))
        );
        let (code, _) = client
            .post(
                "/agents/noter/resume",
                json!({"sessionId": "s1", "message": "more"}),
            )
            .await;
        assert_eq!(code, 200);
        client.settled("noter", "s1").await;

        // A cursor of the first run is carried on through all later runs.
        let (frames, _) = client
            .sse("/agents/noter/sse?sessionId=s1&fromSequence=0")
            .await;
        let kinds: Vec<_> = chunks(&frames)
            .iter()
            .map(|chunk| chunk["type"].as_str().unwrap().to_owned())
            .filter(|kind| kind.starts_with("run_"))
            .collect();
        assert_eq!(
            kinds,
            [
                "run_started",
                "run_interrupted",
                "run_resumed",
                "run_resumed"
            ]
        );
    });
}

#[test]
fn an_abort_is_final() {
    in_world(|| async {
        let model = scripted(|_| calls(&[("c1", "hang", json!({"note": "x"}))]));
        let client = client(open_mount(), move |_| vec![noter(model.clone())]);
        start(&client, "s1").await;
        let (_, stop) = client
            .post("/agents/noter/abort", json!({"sessionId": "s1"}))
            .await;
        assert_eq!(stop["accepted"], true);
        let (frames, _) = client.sse("/agents/noter/sse?sessionId=s1").await;
        let Some(Frame::Error(error)) = frames.last() else {
            panic!("{frames:?}")
        };
        assert_eq!(
            (error.code.as_str(), error.recoverable),
            ("run_aborted", false)
        );
        let (_, status) = client.get("/agents/noter/status?sessionId=s1").await;
        assert_eq!(
            (status["status"].as_str(), status["errorCode"].as_str()),
            (Some("failed"), Some("run_aborted"))
        );
        for body in [
            json!({"sessionId": "s1"}),
            json!({"sessionId": "s1", "message": "again"}),
        ] {
            let (code, refused) = client.post("/agents/noter/resume", body).await;
            assert_eq!(
                (code, refused["code"].as_str()),
                (409, Some("ALREADY_COMPLETED"))
            );
        }
        let (code, again) = client
            .post("/agents/noter/abort", json!({"sessionId": "s1"}))
            .await;
        assert_eq!((code, again["accepted"].as_bool()), (200, Some(false)));
    });
}

#[test]
fn an_evicted_session_goes_on_by_its_alarm_and_readers_see_no_gap() {
    in_world(|| async {
        // The object is forgotten after every number of chunks that its run can have.
        let mut evicted = 0;
        for at in 1..60u64 {
            let client = client(open_mount(), |_| vec![noter(two_notes())]);
            start(&client, "s1").await;
            let session = SessionId::parse("s1").unwrap();
            loop {
                let (_, status) = client.get("/agents/noter/status?sessionId=s1").await;
                let seen = newest(&client);
                if seen >= at {
                    evicted += 1;
                    client.objects.evict(&session).unwrap();
                    break;
                }
                if status["status"] != "running" {
                    break;
                }
                yield_now().await;
            }
            let (frames, _) = client
                .sse("/agents/noter/sse?sessionId=s1&fromSequence=0")
                .await;
            let mut next = 1;
            for frame in &frames {
                if let Frame::Chunk { sequence, .. } = frame {
                    assert_eq!(*sequence, next);
                    next += 1;
                }
            }
            let Some(Frame::End(end)) = frames.last() else {
                panic!("evicted at {at}: {frames:?}")
            };
            assert_eq!(end.output, Some(json!("all is noted now")));
            assert_eq!(
                end.state,
                Some(json!({"notes": ["a", "b"], "count": 2})),
                "evicted at {at}"
            );
        }
        assert!(evicted > 20, "only {evicted} evictions happened");
    });
}

fn newest(client: &Client) -> u64 {
    use remote_agents::store::{SqlStore, Store as _};
    let database = client
        .objects
        .database(&SessionId::parse("s1").unwrap())
        .unwrap();
    SqlStore::new(database)
        .session()
        .unwrap()
        .map_or(0, |record| record.last_sequence)
}

#[test]
fn a_failing_model_is_tried_again_visibly_and_then_fails_typed() {
    in_world(|| async {
        let failing = || {
            vec![
                Ok(ModelEvent::TextDelta("half".into())),
                Err(ModelError {
                    kind: ModelErrorKind::Unavailable,
                    message: "The provider broke off.".into(),
                    retry_after: None,
                }),
            ]
        };
        let tries = Rc::new(std::cell::Cell::new(0));
        let seen = tries.clone();
        let model = scripted(move |_| {
            seen.set(seen.get() + 1);
            failing()
        });
        let client = client(open_mount(), move |_| vec![noter(model.clone())]);
        start(&client, "s1").await;
        let (frames, _) = client
            .sse("/agents/noter/sse?sessionId=s1&fromSequence=0")
            .await;
        let discarded = chunks(&frames)
            .iter()
            .filter(|chunk| chunk["type"] == "step_discarded")
            .count();
        assert_eq!((tries.get(), discarded), (4, 4));
        let Some(Frame::Error(error)) = frames.last() else {
            panic!("{frames:?}")
        };
        assert_eq!(error.code, "provider_error");
    });
}

#[test]
fn a_projected_mount_shows_state_through_the_projection_alone() {
    in_world(|| async {
        let mount = open_mount().with_projection(Projection {
            name: "count".into(),
            map: Rc::new(|_, state| json!({"count": state["count"]})),
        });
        // The canary stands in state only: the tool is told nothing and says nothing.
        let model = scripted(|request| match turn(request) {
            0 => calls(&[("c1", "secret", json!({}))]),
            _ => text("done"),
        });
        let make = move |_: &Rc<LocalObjects>| {
            vec![noter(model.clone()).with_tool(typed_tool(
                "secret",
                "Writes a secret.",
                |context, _: Value| async move {
                    context.update(|state: &mut Notes| {
                        state.notes.push("CANARY-7f3a".into());
                        state.count += 1;
                    })?;
                    Ok(json!({"ok": true}))
                },
            ))]
        };
        let projected = client(mount, make);
        start(&projected, "s1").await;
        let (frames, raw) = projected.sse("/agents/noter/sse?sessionId=s1").await;
        let Some(Frame::End(end)) = frames.last() else {
            panic!("{frames:?}")
        };
        assert_eq!(end.state, Some(json!({"count": 1})));
        let mut all = raw;
        for action in ["status", "snapshot", "usage", "sse", "tree"] {
            let response = projected
                .send(
                    "GET",
                    &format!("/agents/noter/{action}?sessionId=s1&fromSequence=0"),
                    &[],
                    "",
                )
                .await;
            let bytes = response.into_body().collect(1 << 20).await.unwrap();
            all.push_str(std::str::from_utf8(&bytes).unwrap());
        }
        assert!(!all.contains("CANARY"), "{all}");
        assert!(!all.contains("state_patch"));

        // The same session on a raw mount has both: the test above can fail.
        let raw_mount = Client {
            mount: Rc::new(open_mount()),
            objects: projected.objects.clone(),
        };
        let (_, raw) = raw_mount
            .sse("/agents/noter/sse?sessionId=s1&fromSequence=0")
            .await;
        assert!(raw.contains("CANARY") && raw.contains("state_patch"));
    });
}

/// A parent in one service, its child and grandchild in another, over a mount.
fn family(lines: &Lines) -> (Client, Rc<LocalObjects>) {
    let producer = LocalObjects::new(
        1_700_000_000_000,
        lines.sink(),
        Rc::new(|objects: &Rc<LocalObjects>, runtime| {
            let grandchild = noter(two_notes());
            let model = scripted(|request| match turn(request) {
                0 => calls(&[
                    ("n1", "note", json!({"note": "child"})),
                    ("g1", "subagent__deep", json!({"message": "dig"})),
                ]),
                _ => text("child is done"),
            });
            let transport = HttpTransport::new(
                Rc::new(ObjectsFetch::new(objects.clone() as Rc<dyn Objects>)) as Rc<dyn Fetch>,
                runtime.clone(),
                "http://object",
                "",
                agent_type("noter"),
            );
            let mut child = noter(model).with_sub_agent(SubAgent::new(
                "deep",
                "Digs.",
                agent_type("noter"),
                SubLocation::Local,
                Rc::new(transport),
            ));
            child.agent_type = agent_type("middle");
            Agents::new([grandchild, child])
        }),
    );
    let mount = Rc::new(Mount::new("/internal/agents").allow_unauthenticated());
    let far = producer.clone();
    let consumer = client_logging(open_mount(), lines, move |_| {
        let runtime =
            remote_agents::native::LocalRuntime::new(1_700_000_000_000, Lines::default().sink());
        let transport = HttpTransport::new(
            Rc::new(MountFetch::new(mount.clone(), far.clone())) as Rc<dyn Fetch>,
            runtime,
            "http://producer",
            "/internal/agents",
            agent_type("middle"),
        );
        let model = scripted(|request| match turn(request) {
            0 => calls(&[("p1", "subagent__ask", json!({"message": "please"}))]),
            _ => text("parent is done"),
        });
        let parent = Agent::new(agent_type("parent"), "Delegate.", model)
            .with_state::<Value>()
            .with_sub_agent(SubAgent::new(
                "ask",
                "Asks.",
                agent_type("middle"),
                SubLocation::Remote,
                Rc::new(transport),
            ))
            .with_after_sub_agent(|payload, context| {
                let folded = payload.child_custom_state.clone().unwrap_or_default();
                context.update(|state: &mut Value| state["folded"] = folded)
            });
        vec![parent]
    });
    (consumer, producer)
}

#[test]
fn a_parent_forwards_folds_and_counts_its_whole_tree() {
    in_world(|| async {
        let (consumer, _) = family(&Lines::default());
        let (status, body) = consumer
            .post(
                "/agents/parent/start",
                json!({"sessionId": "p", "message": "go"}),
            )
            .await;
        assert_eq!(status, 200, "{body}");
        let (frames, _) = consumer.sse("/agents/parent/sse?sessionId=p").await;
        let chunks = chunks(&frames);
        let child = chunks
            .iter()
            .find(|chunk| chunk["type"] == "subagent_start" && chunk["agentId"] == "p")
            .unwrap()["subSessionId"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(child.starts_with("p-remote-p1-"), "{child}");
        let grandchild = chunks
            .iter()
            .find(|chunk| chunk["type"] == "subagent_start" && chunk["agentId"] == child.as_str())
            .unwrap()["subSessionId"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(grandchild.contains("-sub-g1-"), "{grandchild}");

        let mut seen = std::collections::BTreeSet::new();
        for chunk in chunks.iter().filter(|chunk| chunk["agentId"] != "p") {
            assert_eq!(chunk["remoteSource"]["childSessionId"], child.as_str());
            assert_eq!(chunk["origin"]["sessionId"], chunk["agentId"]);
            let sequence = chunk["remoteSource"]["childSequence"].as_u64().unwrap();
            assert!(seen.insert(sequence), "child chunk {sequence} stands twice");
        }
        assert_eq!(
            seen.iter().copied().collect::<Vec<_>>(),
            (1..=seen.len() as u64).collect::<Vec<_>>()
        );
        assert!(
            chunks
                .iter()
                .any(|chunk| chunk["agentId"] == grandchild.as_str()
                    && chunk["type"] == "state_patch")
        );

        let order: Vec<&str> = chunks
            .iter()
            .filter(|chunk| chunk["agentId"] == "p")
            .filter_map(|chunk| chunk["type"].as_str())
            .filter(|kind| {
                kind.starts_with("subagent_") || kind.starts_with("tool_e") || *kind == "tool_start"
            })
            .collect();
        assert_eq!(
            order,
            ["tool_start", "subagent_start", "subagent_end", "tool_end"]
        );

        let Some(Frame::End(end)) = frames.last() else {
            panic!("{frames:?}")
        };
        assert_eq!(end.output, Some(json!("parent is done")));
        assert_eq!(
            end.state.as_ref().unwrap()["folded"]["notes"],
            json!(["child"])
        );
        let usage = end.usage.as_ref().unwrap();
        // parent 30 + 15, child 30 + 15, grandchild 75.
        assert_eq!(usage["tokens"]["total"], 165);
        assert_eq!(usage["partial"], false);
        let (_, read) = consumer.get("/agents/parent/usage?sessionId=p").await;
        assert_eq!(read["rollup"]["tokens"]["total"], 165);
        assert_eq!(
            read["rollup"]["subAgents"]["sessions"][0]["subSessionId"],
            child.as_str()
        );
    });
}

#[test]
fn an_evicted_parent_reattaches_and_nothing_is_doubled() {
    in_world(|| async {
        let mut evicted = 0;
        for at in (1..70u64).step_by(3) {
            let (consumer, producer) = family(&Lines::default());
            consumer
                .post(
                    "/agents/parent/start",
                    json!({"sessionId": "p", "message": "go"}),
                )
                .await;
            let session = SessionId::parse("p").unwrap();
            for _ in 0..10_000 {
                use remote_agents::store::{SqlStore, Store as _};
                let database = consumer.objects.database(&session).unwrap();
                let record = SqlStore::new(database).session().unwrap().unwrap();
                if record.last_sequence >= at {
                    evicted += 1;
                    consumer.objects.evict(&session).unwrap();
                    break;
                }
                yield_now().await;
            }
            let (frames, _) = consumer
                .sse("/agents/parent/sse?sessionId=p&fromSequence=0")
                .await;
            let Some(Frame::End(end)) = frames.last() else {
                panic!("evicted at {at}: {frames:?}")
            };
            assert_eq!(end.output, Some(json!("parent is done")));
            assert_eq!(
                end.state.as_ref().unwrap()["folded"]["notes"],
                json!(["child"])
            );
            let mut seen = std::collections::BTreeSet::new();
            for chunk in chunks(&frames)
                .iter()
                .filter(|chunk| chunk.get("remoteSource").is_some())
            {
                let source = &chunk["remoteSource"];
                let key = (
                    source["childSessionId"].to_string(),
                    source["childSequence"].as_u64(),
                );
                assert!(
                    seen.insert(key.clone()),
                    "evicted at {at}: {key:?} stands twice"
                );
            }
            // The child was begun once per call that survived; a discarded answer's call is none.
            assert!(producer.sessions().len() <= 4, "{:?}", producer.sessions());
        }
        assert!(evicted > 10, "only {evicted} evictions happened");
    });
}

#[test]
fn unknown_sessions_leave_nothing_behind() {
    in_world(|| async {
        let client = client(open_mount(), |_| vec![noter(two_notes())]);
        let (status, body) = client.get("/agents/noter/status?sessionId=nobody").await;
        assert_eq!((status, body["code"].as_str()), (404, Some("NOT_FOUND")));
        let (status, body) = client
            .post(
                "/agents/noter/start",
                json!({"sessionId": "bad", "message": "m", "state": {"count": "x"}}),
            )
            .await;
        assert_eq!((status, body["field"].as_str()), (400, Some("state")));
        use remote_agents::store::Database as _;
        for session in ["nobody", "bad"] {
            let database = client
                .objects
                .database(&SessionId::parse(session).unwrap())
                .unwrap();
            let tables = database
                .query("SELECT count(*) FROM sqlite_master", &[])
                .unwrap();
            assert_eq!(
                tables,
                [[remote_agents::store::SqlValue::Integer(0)]],
                "{session}"
            );
        }
    });
}

#[test]
fn case_24_what_a_tool_left_behind_says_nothing_after_its_call() {
    in_world(|| async {
        let model = scripted(|request| match turn(request) {
            0 => calls(&[("c1", "linger", json!({"note": "x"}))]),
            _ => text("done"),
        });
        let tool = || {
            typed_tool("linger", "Lingers.", |context, _: Note| async move {
                tokio::task::spawn_local(async move {
                    tokio::time::sleep(Duration::from_secs(5)).await;
                    assert!(context.emit("late", json!({})).is_err());
                    let late = context.update(|state: &mut Notes| state.count = 9);
                    assert!(late.is_err());
                });
                Ok(json!({}))
            })
        };
        let client = client(open_mount(), move |_| {
            vec![noter(model.clone()).with_tool(tool())]
        });
        start(&client, "s1").await;
        client.settled("noter", "s1").await;
        let path = "/agents/noter/sse?sessionId=s1&fromSequence=0";
        let (_, before) = client.sse(path).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        let (_, after) = client.sse(path).await;
        assert_eq!(after, before);
    });
}

#[test]
fn a_session_that_cannot_be_read_does_not_keep_its_alarm_busy() {
    in_world(|| async {
        use remote_agents::store::Database as _;
        let lines = Lines::default();
        let model = scripted(|_| calls(&[("c1", "hang", json!({"note": "x"}))]));
        let client = client_logging(open_mount(), &lines, move |_| vec![noter(model.clone())]);
        start(&client, "s1").await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let session = SessionId::parse("s1").unwrap();
        let database = client.objects.database(&session).unwrap();
        database.query("DELETE FROM ra_checkpoints", &[]).unwrap();
        client.objects.evict(&session).unwrap();
        tokio::time::sleep(Duration::from_secs(600)).await;
        let is_alarm = |line: &&String| line.contains("\"watchdog\"");
        let alarms = lines.0.borrow().iter().filter(is_alarm).count();
        assert!((5..15).contains(&alarms), "{alarms} alarms in ten minutes");
        let (status, body) = client.get("/agents/noter/status?sessionId=s1").await;
        assert_eq!(
            (status, body["code"].as_str()),
            (500, Some("invalid_stored_state"))
        );
    });
}
