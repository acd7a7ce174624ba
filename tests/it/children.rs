//! A parent and its child under faults: evictions, stops that come late, children that misbehave.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::LocalBoxFuture;
use remote_agents::agent::model::{LanguageModel, ModelError, ModelErrorKind, ModelEvent};
use remote_agents::agent::{SubAgent, typed_tool};
use remote_agents::http::{Body, Request, Response};
use remote_agents::mount::Mount;
use remote_agents::native::{LocalObjects, LocalRuntime, MountFetch};
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::store::SubLocation;
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

/// Changes the answer to a request on its way, or gives it back as it is.
type Tamper = Rc<dyn Fn(&str, Response) -> LocalBoxFuture<'static, Response>>;

struct Tampering {
    inner: MountFetch,
    tamper: Tamper,
}

impl Fetch for Tampering {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let path = request.uri().path().to_owned();
        let answer = self.inner.fetch(request);
        let tamper = self.tamper.clone();
        Box::pin(async move { Ok(tamper(&path, answer.await?).await) })
    }
}

fn honest() -> Tamper {
    Rc::new(|_, response| Box::pin(async { response }))
}

/// A parent `p` that calls one child in another service once.
fn pair(lines: &Lines, child: Rc<dyn LanguageModel>, tamper: Tamper) -> (Client, Client) {
    let producer = LocalObjects::new(
        START,
        lines.sink(),
        Rc::new(move |_, _| Agents::new([Agent::new(agent_type("child"), "Work.", child.clone())])),
    );
    let mount = Rc::new(Mount::new("/agents").allow_unauthenticated());
    let far = Client {
        mount: mount.clone(),
        objects: producer.clone(),
    };
    let objects = LocalObjects::new(
        START,
        lines.sink(),
        Rc::new(move |_, _| {
            let fetch = Tampering {
                inner: MountFetch::new(mount.clone(), producer.clone()),
                tamper: tamper.clone(),
            };
            let transport = HttpTransport::new(
                Rc::new(fetch) as Rc<dyn Fetch>,
                LocalRuntime::new(START, Lines::default().sink()),
                "http://producer",
                "/agents",
                agent_type("child"),
            );
            let model = scripted(|request| match turn(request) {
                0 => calls(&[("c1", "subagent__ask", json!({"message": "please"}))]),
                _ => text("parent is done"),
            });
            let sub = SubAgent::new(
                "ask",
                "Asks.",
                agent_type("child"),
                SubLocation::Remote,
                Rc::new(transport),
            );
            Agents::new([Agent::new(agent_type("parent"), "Delegate.", model)
                .with_state::<Map<String, Value>>()
                .with_sub_agent(sub)
                .with_after_sub_agent(|payload, context| {
                    let success = payload.success;
                    context.update(|state: &mut Map<String, Value>| {
                        state.insert("research".into(), json!({ "success": success }));
                    })
                })])
        }),
    );
    let near = Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects,
    };
    (near, far)
}

async fn begin(parent: &Client) {
    let (status, body) = parent
        .post(
            "/agents/parent/start",
            json!({"sessionId": "p", "message": "go"}),
        )
        .await;
    assert_eq!(status, 200, "{body}");
}

fn child_of(child: &Client) -> String {
    let sessions = child.objects.sessions();
    assert_eq!(sessions.len(), 1, "{sessions:?}");
    sessions[0].to_string()
}

async fn log(client: &Client, agent: &str, session: &str) -> (Vec<Value>, Frame) {
    let path = format!("/agents/{agent}/sse?sessionId={session}&fromSequence=0");
    let (frames, _) = client.sse(&path).await;
    (chunks(&frames), frames.last().unwrap().clone())
}

fn count(chunks: &[Value], kind: &str) -> usize {
    let own = |chunk: &&Value| chunk.get("remoteSource").is_none() && chunk["type"] == kind;
    chunks.iter().filter(own).count()
}

#[test]
fn case_46_a_parent_that_is_evicted_often_goes_on_as_long_as_its_child_does() {
    in_world(|| async {
        let slow = Rc::new(Slow {
            words: 100,
            pause: Duration::from_secs(1),
        });
        let (parent, child) = pair(&Lines::default(), slow, honest());
        begin(&parent).await;
        for _ in 0..9 {
            wait(9_000).await;
            parent.objects.evict(&id("p")).unwrap();
        }
        let settled = parent.settled("parent", "p").await;
        assert_eq!(settled["status"], "completed", "{settled}");
        assert_eq!(child.objects.sessions().len(), 1);
    });
}

#[test]
fn an_interrupt_after_an_eviction_still_reaches_the_child() {
    for action in ["interrupt", "abort"] {
        in_world(move || async move {
            let slow = Rc::new(Slow {
                words: 1_000,
                pause: Duration::from_secs(1),
            });
            let (parent, child) = pair(&Lines::default(), slow, honest());
            begin(&parent).await;
            wait(9_000).await;
            parent.objects.evict(&id("p")).unwrap();
            let (status, stop) = parent
                .post(
                    &format!("/agents/parent/{action}"),
                    json!({"sessionId": "p"}),
                )
                .await;
            assert_eq!((status, stop["accepted"].as_bool()), (200, Some(true)));
            let settled = parent.settled("parent", "p").await;
            let expected = if action == "abort" {
                "failed"
            } else {
                "interrupted"
            };
            assert_eq!(settled["status"], expected);
            wait(5_000).await;
            let name = child_of(&child);
            let (_, status) = child
                .get(&format!("/agents/child/status?sessionId={name}"))
                .await;
            assert_eq!(status["status"], "interrupted");
            let (chunks, _) = log(&parent, "parent", "p").await;
            assert_eq!(count(&chunks, "subagent_start"), 1);
            assert_eq!(count(&chunks, "subagent_end"), 1);
            assert_eq!(count(&chunks, "tool_end"), 1);
        });
    }
}

#[test]
fn an_abort_outranks_an_interrupt_that_is_being_carried_out() {
    in_world(|| async {
        let slow = Rc::new(Slow {
            words: 1_000,
            pause: Duration::from_secs(1),
        });
        // Every answer of the child takes a second.
        let late: Tamper = Rc::new(|_, response| {
            Box::pin(async {
                wait(1_000).await;
                response
            })
        });
        for at in (100..4_000).step_by(400) {
            let (parent, _) = pair(&Lines::default(), slow.clone(), late.clone());
            begin(&parent).await;
            wait(9_000).await;
            parent.objects.evict(&id("p")).unwrap();
            let body = json!({"sessionId": "p"});
            parent.post("/agents/parent/interrupt", body.clone()).await;
            wait(at).await;
            let (status, stop) = parent.post("/agents/parent/abort", body).await;
            assert_eq!((status, stop["accepted"].as_bool()), (200, Some(true)));
            let settled = parent.settled("parent", "p").await;
            assert_eq!(
                (settled["status"].as_str(), settled["errorCode"].as_str()),
                (Some("failed"), Some("run_aborted")),
                "aborted after {at} ms"
            );
        }
    });
}

#[test]
fn what_the_hook_writes_about_a_failed_child_is_promoted() {
    in_world(|| async {
        let failing = scripted(|_| {
            vec![Err(ModelError {
                kind: ModelErrorKind::Rejected,
                message: "No.".into(),
                retry_after: None,
            })]
        });
        let (parent, _) = pair(&Lines::default(), failing, honest());
        begin(&parent).await;
        let (_, last) = log(&parent, "parent", "p").await;
        let Frame::End(end) = last else {
            panic!("{last:?}")
        };
        assert_eq!(end.state, Some(json!({"research": {"success": false}})));
    });
}

/// `[[[…]]]`, so deep that it can be read alone but not inside of something else.
fn deep(levels: usize) -> String {
    format!("{}{}", "[".repeat(levels), "]".repeat(levels))
}

#[test]
fn an_output_that_is_too_deep_fails_its_call_and_not_the_session() {
    in_world(|| async {
        let tamper: Tamper = Rc::new(|path, response| {
            let stream = path.ends_with("/sse");
            Box::pin(async move {
                if !stream {
                    return response;
                }
                let (parts, _) = response.into_parts();
                let end = format!(
                    "event: end\ndata: {{\"status\":\"completed\",\"output\":{}}}\n\n",
                    deep(126)
                );
                Response::from_parts(parts, Body::Full(Bytes::from(end)))
            })
        });
        let (parent, _) = pair(&Lines::default(), scripted(|_| text("done")), tamper);
        begin(&parent).await;
        let settled = parent.settled("parent", "p").await;
        assert_eq!(settled["status"], "completed", "{settled}");
        parent.objects.evict(&id("p")).unwrap();
        let (status, body) = parent
            .post(
                "/agents/parent/resume",
                json!({"sessionId": "p", "message": "again"}),
            )
            .await;
        assert_eq!(status, 200, "{body}");
        let settled = parent.settled("parent", "p").await;
        assert_eq!(settled["status"], "completed", "{settled}");
    });
}

#[test]
fn arguments_and_results_that_are_too_deep_fail_their_call_and_not_the_session() {
    in_world(|| async {
        let model = scripted(|request| match turn(request) {
            0 => {
                let mut events = calls(&[("deep", "nest", json!({}))]);
                events[1] = Ok(ModelEvent::ToolCallDelta {
                    index: 0,
                    delta: format!("{{\"x\":{}", deep(126)),
                });
                events
            }
            1 => calls(&[("result", "nest", json!({"x": 1}))]),
            _ => text("all is well"),
        });
        let objects = LocalObjects::new(
            START,
            Lines::default().sink(),
            Rc::new(move |_, _| {
                Agents::new([
                    Agent::new(agent_type("nester"), "Nest.", model.clone()).with_tool(typed_tool(
                        "nest",
                        "Nests.",
                        |_, _: Map<String, Value>| async {
                            Ok((0..200).fold(json!(1), |value, _| json!([value])))
                        },
                    )),
                ])
            }),
        );
        let client = Client {
            mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
            objects,
        };
        client
            .post(
                "/agents/nester/start",
                json!({"sessionId": "n", "message": "go"}),
            )
            .await;
        let settled = client.settled("nester", "n").await;
        assert_eq!(settled["output"], "all is well", "{settled}");
    });
}

#[test]
fn what_a_child_answers_is_in_no_log_line() {
    in_world(|| async {
        let tamper: Tamper = Rc::new(|path, response| {
            let action = path.rsplit('/').next().unwrap_or_default().to_owned();
            Box::pin(async move {
                let (parts, body) = response.into_parts();
                let text = match action.as_str() {
                    "snapshot" => json!({"sessionId": "x", "streamId": "y", "state": {},
                        "streamSequence": "canary"})
                    .to_string(),
                    "usage" => json!({"sessionId": "x", "rollup": "canary"}).to_string(),
                    "sse" => "event: end\ndata: {\"status\":\"completed\",\"usage\":{\"tokens\":\"canary\"}}\n\n".to_owned(),
                    _ => return Response::from_parts(parts, body),
                };
                Response::from_parts(parts, Body::Full(text.into()))
            })
        });
        let lines = Lines::default();
        let (parent, _) = pair(&lines, scripted(|_| text("done")), tamper);
        begin(&parent).await;
        let settled = parent.settled("parent", "p").await;
        assert_eq!(settled["status"], "completed", "{settled}");
        let lines = lines.0.borrow();
        assert!(lines.iter().any(|line| line.contains("not folded")));
        for line in lines.iter() {
            assert!(!line.contains("canary"), "{line}");
        }
    });
}

#[test]
fn a_rollup_that_is_too_deep_is_not_folded_and_the_session_ends() {
    in_world(|| async {
        let tamper: Tamper = Rc::new(|path, response| {
            let stream = path.ends_with("/sse");
            Box::pin(async move {
                if !stream {
                    return response;
                }
                let (parts, _) = response.into_parts();
                let end = format!(
                    "event: end\ndata: {{\"status\":\"completed\",\"usage\":{{\"custom\":{{\"x\":{}}}}}}}\n\n",
                    deep(123)
                );
                Response::from_parts(parts, Body::Full(Bytes::from(end)))
            })
        });
        let (parent, _) = pair(&Lines::default(), scripted(|_| text("done")), tamper);
        begin(&parent).await;
        let (_, last) = log(&parent, "parent", "p").await;
        assert!(matches!(last, Frame::End(_)), "{last:?}");
    });
}

/// What holds of a parent's log however its run was stopped.
fn assert_paired(chunks: &[Value], what: &str) {
    let own = |kind: &str| -> Vec<(usize, &str)> {
        let of = |(_, chunk): &(usize, &Value)| {
            chunk.get("remoteSource").is_none() && chunk["type"] == kind
        };
        let all = chunks.iter().enumerate().filter(of);
        all.map(|(at, chunk)| (at, chunk["toolCallId"].as_str().unwrap()))
            .collect()
    };
    let starts = own("subagent_start");
    let ends = own("subagent_end");
    assert_eq!(
        starts.iter().map(|(_, id)| id).collect::<Vec<_>>(),
        ends.iter().map(|(_, id)| id).collect::<Vec<_>>(),
        "{what}"
    );
    let results = own("tool_end");
    for (at, id) in ends {
        assert!(results.contains(&(at + 1, id)), "{what}: {chunks:?}");
    }
    for (n, (_, id)) in results.iter().enumerate() {
        let again = results.iter().skip(n + 1).any(|(_, other)| other == id);
        assert!(!again, "{what}: {id} ends twice");
    }
    let mut seen = std::collections::BTreeSet::new();
    for chunk in chunks {
        if let Some(source) = chunk.get("remoteSource") {
            assert!(seen.insert(source.to_string()), "{what}: {source} twice");
        }
    }
}

#[test]
fn a_stop_at_any_moment_leaves_nothing_open_and_an_interrupted_run_goes_on() {
    for (action, evict) in [
        ("interrupt", "never"),
        ("interrupt", "before"),
        ("interrupt", "after"),
        ("abort", "never"),
        ("abort", "after"),
    ] {
        in_world(move || async move {
            let mut stopped = 0;
            for at in (1..40u64).step_by(2) {
                let what = format!("{action} at {at}, evicted {evict}");
                let words = "one two three four five six seven eight nine ten";
                let (parent, child) =
                    pair(&Lines::default(), scripted(move |_| text(words)), honest());
                begin(&parent).await;
                wait(at).await;
                if evict == "before" {
                    parent.objects.evict(&id("p")).unwrap();
                }
                let (status, stop) = parent
                    .post(
                        &format!("/agents/parent/{action}"),
                        json!({"sessionId": "p"}),
                    )
                    .await;
                if evict == "after" {
                    parent.objects.evict(&id("p")).unwrap();
                }
                if status != 200 || stop["accepted"] == false {
                    continue;
                }
                stopped += 1;
                let settled = parent.settled("parent", "p").await;
                let expected = if action == "abort" {
                    "failed"
                } else {
                    "interrupted"
                };
                assert_eq!(settled["status"], expected, "{what}");
                wait(3_000).await;
                for session in child.objects.sessions() {
                    let path = format!("/agents/child/status?sessionId={session}");
                    let (status, child) = child.get(&path).await;
                    assert!(status == 404 || child["status"] != "running", "{what}");
                }
                let (chunks, _) = log(&parent, "parent", "p").await;
                assert_paired(&chunks, &what);
                let (_, snapshot) = parent.get("/agents/parent/snapshot?sessionId=p").await;
                let state = &snapshot["state"];
                assert!(
                    *state == json!({}) || state["research"]["success"] == true,
                    "{what}: {state}"
                );
                let (_, usage) = parent.get("/agents/parent/usage?sessionId=p").await;
                let (_, last) = log(&parent, "parent", "p").await;
                if let Frame::End(end) = last {
                    let end = end.usage.unwrap();
                    assert_eq!(end["tokens"], usage["rollup"]["tokens"], "{what}");
                }
                let (status, _) = parent
                    .post("/agents/parent/resume", json!({"sessionId": "p"}))
                    .await;
                if action == "abort" {
                    assert_eq!(status, 409, "{what}");
                    continue;
                }
                assert_eq!(status, 200, "{what}");
                let settled = parent.settled("parent", "p").await;
                assert_eq!(settled["status"], "completed", "{what}");
                let (chunks, _) = log(&parent, "parent", "p").await;
                assert_paired(&chunks, &what);
            }
            assert!(stopped > 8, "only {stopped} stops happened");
        });
    }
}
