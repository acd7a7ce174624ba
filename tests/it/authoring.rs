//! What whoever writes an agent is promised of its tools, hooks, limits and documents.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::model::LanguageModel;
use remote_agents::agent::{Limits, SubAgent, keyed, serial, tool, typed_tool};
use remote_agents::mount::{Mount, Projection};
use remote_agents::native::{LocalObjects, LocalRuntime};
use remote_agents::protocol::ids::{AgentType, DocumentId, SessionId};
use remote_agents::store::SubLocation;
use remote_agents::transport::{HttpTransport, ObjectsFetch};
use remote_agents::{Agent, Agents, Code, Error, ToolContext, ToolError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, chunks, in_world, scripted, text, turn};

/// What is kept.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Kept {
    #[serde(default)]
    notes: Vec<String>,
    #[serde(default)]
    told: u32,
}

/// Waits for a while
/// and says when it began and ended.
#[derive(Deserialize, JsonSchema)]
struct Nap {
    /// The name of the nap.
    name: String,
    /// In milliseconds.
    millis: u64,
}

fn agent(model: Rc<dyn LanguageModel>) -> Agent {
    Agent::new(AgentType::parse("napper").unwrap(), "Nap.", model).with_state::<Kept>()
}

fn hosting(make: impl Fn() -> Agent + 'static, lines: &Lines) -> Client {
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: LocalObjects::new(
            1_700_000_000_000,
            lines.sink(),
            Rc::new(move |_, _| Agents::new([make()])),
        ),
    }
}

async fn start(client: &Client) {
    let body = json!({"sessionId": "s1", "message": "go", "metadata": {"team": "blue"}});
    let (status, answer) = client.post("/agents/napper/start", body).await;
    assert_eq!(status, 200, "{answer}");
}

async fn log(client: &Client) -> Vec<Value> {
    let path = "/agents/napper/sse?sessionId=s1&fromSequence=0";
    chunks(&client.sse(path).await.0)
}

async fn state(client: &Client) -> Value {
    let path = "/agents/napper/snapshot?sessionId=s1";
    client.get(path).await.1["state"].clone()
}

/// Calls of these tools in the first answer, each with a nap of so many milliseconds.
fn naps(these: &'static [(&'static str, u64)]) -> Rc<dyn LanguageModel> {
    scripted(move |request| match turn(request) {
        0 => {
            let ids: Vec<String> = (0..these.len())
                .zip(these)
                .map(|(n, (tool, _))| format!("{tool}{n}"))
                .collect();
            let made: Vec<_> = ids
                .iter()
                .zip(these)
                .map(|(id, (tool, millis))| {
                    (id.as_str(), *tool, json!({"name": id, "millis": millis}))
                })
                .collect();
            calls(&made)
        }
        _ => text("rested"),
    })
}

type Diary = Rc<RefCell<Vec<String>>>;

fn nap(name: &'static str, diary: &Diary) -> Rc<dyn remote_agents::Tool> {
    let diary = diary.clone();
    tool(name, move |_: ToolContext, nap: Nap| {
        let diary = diary.clone();
        async move {
            diary.borrow_mut().push(format!("+{}", nap.name));
            tokio::time::sleep(Duration::from_millis(nap.millis)).await;
            diary.borrow_mut().push(format!("-{}", nap.name));
            Ok::<_, ToolError>(json!({"slept": nap.millis}))
        }
    })
}

#[test]
fn a_doc_comment_is_the_description_and_a_tool_without_one_is_refused() {
    #[derive(Deserialize, JsonSchema)]
    struct Undescribed {}
    let diary = Diary::default();
    let spec = nap("nap", &diary).spec();
    assert_eq!(
        spec.description,
        "Waits for a while\nand says when it began and ended."
    );
    let field = &spec.parameters["properties"]["name"]["description"];
    assert_eq!(field, "The name of the nap.");
    let silent = tool("silent", async |_: ToolContext, _: Undescribed| {
        Ok::<_, ToolError>(())
    });
    let model = || scripted(|_| text("done"));
    let refused = Agents::new([agent(model()).with_tool(silent)])
        .err()
        .unwrap();
    assert!(refused.detail.unwrap().contains("silent"));
    Agents::new([agent(model()).with_tool(nap("nap", &diary))]).unwrap();
}

#[test]
fn parallel_calls_run_at_once_unless_their_tool_says_otherwise() {
    in_world(|| async {
        let diary = Diary::default();
        let kept = diary.clone();
        let make = move || {
            let model = naps(&[
                ("nap", 30),
                ("nap", 10),
                ("alone", 20),
                ("nap", 5),
                ("nap", 1),
            ]);
            // Whatever a tool is wrapped in, it stays alone.
            let alone = keyed(serial(nap("alone", &diary)), |nap: &Nap| nap.name.clone());
            agent(model).with_tool(nap("nap", &diary)).with_tool(alone)
        };
        let client = hosting(make, &Lines::default());
        start(&client).await;
        let said = log(&client).await;
        let ended = said.iter().filter(|chunk| chunk["type"] == "tool_end");
        assert_eq!(ended.count(), 5);
        assert_eq!(
            *kept.borrow(),
            [
                "+nap0", "+nap1", "-nap1", "-nap0", "+alone2", "-alone2", "+nap3", "+nap4",
                "-nap4", "-nap3"
            ]
        );
    });
}

#[test]
fn under_a_stop_no_call_begins_that_waited_for_one_alone() {
    in_world(|| async {
        let diary = Diary::default();
        let kept = diary.clone();
        let make = move || {
            agent(naps(&[("alone", 60_000), ("alone", 1)])).with_tool(serial(nap("alone", &diary)))
        };
        let client = hosting(make, &Lines::default());
        start(&client).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let stop = json!({"sessionId": "s1"});
        client.post("/agents/napper/interrupt", stop).await;
        let status = client.settled("napper", "s1").await;
        assert_eq!(status["status"], "interrupted");
        assert_eq!(*kept.borrow(), ["+alone0"]);
        let said = log(&client).await;
        let ended = said.iter().filter(|chunk| chunk["type"] == "tool_end");
        assert_eq!(ended.count(), 2, "each call is paired");
    });
}

#[test]
fn the_hook_after_a_tool_stages_state_whatever_came_of_the_call_and_changes_no_result() {
    in_world(|| async {
        let lines = Lines::default();
        let seen: Rc<RefCell<Vec<(String, bool, Value)>>> = Rc::default();
        let told = seen.clone();
        let make = move || {
            let seen = told.clone();
            let model = scripted(|request| match turn(request) {
                0 => calls(&[
                    ("c1", "note", json!({"name": "kept", "millis": 0})),
                    ("c2", "note", json!({"name": "fails", "millis": 0})),
                    ("c3", "note", json!({"name": "hangs", "millis": 9_000})),
                    ("c4", "nothing", json!({})),
                ]),
                _ => text("done"),
            });
            let note = typed_tool("note", "Notes.", async |context: ToolContext, nap: Nap| {
                context.update(|kept: &mut Kept| kept.notes.push(nap.name.clone()))?;
                tokio::time::sleep(Duration::from_millis(nap.millis)).await;
                if nap.name == "fails" {
                    return Err(ToolError::new("It failed."));
                }
                Ok(nap.name)
            });
            agent(model)
                .with_tool(note)
                .with_limits(Limits {
                    tool_timeout: Duration::from_secs(5),
                    ..Limits::default()
                })
                .with_after_tool(move |payload, context| {
                    let name = payload.arguments["name"].as_str().unwrap().to_owned();
                    let cause = &payload.result["metadata"]["helixErrorDetail"]["code"];
                    seen.borrow_mut()
                        .push((name, payload.success, cause.clone()));
                    context.update(|kept: &mut Kept| kept.told += 1)?;
                    Err(Error::new(Code::ToolExecutionFailed, "The hook failed."))
                })
        };
        let client = hosting(make, &lines);
        start(&client).await;
        let status = client.settled("napper", "s1").await;
        assert_eq!(status["status"], "completed");
        let mut seen = seen.take();
        seen.sort_by(|a, b| a.0.cmp(&b.0));
        let wanted = [
            ("fails", false, json!("tool_execution_failed")),
            ("hangs", false, json!("run_timeout")),
            ("kept", true, Value::Null),
        ];
        assert_eq!(
            seen,
            wanted.map(|(name, ok, code)| (name.to_owned(), ok, code))
        );
        // What failed tools wrote is dropped, what the hook wrote is not.
        assert_eq!(state(&client).await, json!({"notes": ["kept"], "told": 3}));
        let ends: Vec<bool> = log(&client)
            .await
            .iter()
            .filter(|chunk| chunk["type"] == "tool_end")
            .map(|chunk| chunk["success"].as_bool().unwrap())
            .collect();
        assert_eq!(ends.iter().filter(|success| **success).count(), 1);
        let logged = lines.0.borrow();
        let warned = logged
            .iter()
            .filter(|line| line.contains("after_tool_failed"));
        assert_eq!(warned.count(), 3);
    });
}

#[test]
fn a_failed_tool_tells_the_model_its_sentence_and_never_its_detail() {
    in_world(|| async {
        let make = || {
            let model = scripted(|request| match turn(request) {
                0 => calls(&[("c1", "leak", json!({"name": "x", "millis": 0}))]),
                _ => text("done"),
            });
            agent(model).with_tool(typed_tool(
                "leak",
                "Leaks.",
                async |_: ToolContext, _: Nap| {
                    let error = Error::new(Code::Overloaded, "The service is busy.");
                    Err::<(), _>(ToolError::from(error.with_detail("key CANARY-KEY")))
                },
            ))
        };
        let client = hosting(make, &Lines::default());
        start(&client).await;
        let said = log(&client).await;
        let end = said
            .iter()
            .find(|chunk| chunk["type"] == "tool_end")
            .unwrap();
        assert_eq!(end["result"]["error"], "The service is busy.");
        let detail = &end["result"]["metadata"]["helixErrorDetail"];
        assert_eq!(
            (&detail["code"], &detail["retryable"]),
            (&json!("OVERLOADED"), &json!(true))
        );
        let whole = serde_json::to_string(&said).unwrap();
        assert!(!whole.contains("CANARY-KEY") && whole.contains("busy"));
    });
}

#[test]
fn a_tool_knows_the_metadata_that_its_session_was_started_with() {
    in_world(|| async {
        let make = || {
            let model = scripted(|request| match turn(request) {
                0 => calls(&[("c1", "team", json!({"name": "x", "millis": 0}))]),
                _ => text("done"),
            });
            agent(model).with_tool(typed_tool(
                "team",
                "Tells.",
                async |context: ToolContext, _: Nap| {
                    let team = context.metadata().and_then(|all| all.get("team")).cloned();
                    Ok::<_, ToolError>(team)
                },
            ))
        };
        let client = hosting(make, &Lines::default());
        start(&client).await;
        let said = log(&client).await;
        let end = said
            .iter()
            .find(|chunk| chunk["type"] == "tool_end")
            .unwrap();
        assert_eq!(end["result"], "blue");
    });
}

#[test]
fn a_run_ends_with_the_step_that_reaches_its_tokens() {
    in_world(|| async {
        // A scripted answer with calls costs 30 tokens, one without 15.
        for (most, steps, wanted) in [
            (Some(60), 2, "failed"),
            (Some(61), 3, "failed"),
            (Some(100), 4, "completed"),
            (None, 4, "completed"),
        ] {
            let make = move || {
                let model = scripted(|request| match turn(request) {
                    n if n < 3 => calls(&[(
                        &format!("c{n}"),
                        "nap",
                        json!({"name": n.to_string(), "millis": 1}),
                    )]),
                    _ => text("done"),
                });
                agent(model)
                    .with_tool(nap("nap", &Diary::default()))
                    .with_limits(Limits {
                        max_tokens: most,
                        ..Limits::default()
                    })
            };
            let client = hosting(make, &Lines::default());
            start(&client).await;
            let status = client.settled("napper", "s1").await;
            assert_eq!(status["status"], wanted, "{most:?}");
            assert_eq!(status["stepCount"], steps, "{most:?}");
            if wanted == "failed" {
                assert_eq!(status["errorCode"], "run_attempts_exhausted");
                assert!(status["error"].as_str().unwrap().contains("tokens"));
                // Each run has its own: the next one goes on.
                let body = json!({"sessionId": "s1"});
                let (answer, _) = client.post("/agents/napper/resume", body).await;
                assert_eq!(answer, 200);
                let status = client.settled("napper", "s1").await;
                assert_eq!(status["status"], "completed", "{status}");
            }
        }
    });
}

#[test]
fn a_run_that_takes_too_long_is_ended_where_it_stands_also_across_restarts() {
    in_world(|| async {
        for (millis, kills, wanted) in [
            (60_000, 0, "failed"),
            (60_000, 3, "failed"),
            (1_000, 0, "completed"),
        ] {
            let diary = Diary::default();
            let kept = diary.clone();
            let make = move || {
                let model = scripted(move |request| match turn(request) {
                    0 if request.messages.len() == 1 => {
                        calls(&[("c1", "nap", json!({"name": "n", "millis": millis}))])
                    }
                    _ => text("done"),
                });
                agent(model)
                    .with_tool(nap("nap", &diary))
                    .with_limits(Limits {
                        max_run_time: Some(Duration::from_secs(20)),
                        ..Limits::default()
                    })
            };
            let client = hosting(make, &Lines::default());
            let began = tokio::time::Instant::now();
            start(&client).await;
            for _ in 0..kills {
                tokio::time::sleep(Duration::from_secs(4)).await;
                client
                    .objects
                    .evict(&SessionId::parse("s1").unwrap())
                    .unwrap();
            }
            let status = client.settled("napper", "s1").await;
            assert_eq!(status["status"], wanted);
            if wanted == "completed" {
                continue;
            }
            assert_eq!(status["errorCode"], "run_timeout");
            let took = began.elapsed().as_millis();
            assert!((20_000..23_000).contains(&took), "{took}");
            assert!(kept.borrow().iter().all(|entry| entry == "+n"));
            // The call is open still: whoever goes on gets its result.
            let body = json!({"sessionId": "s1", "message": "and then?"});
            let (answer, _) = client.post("/agents/napper/resume", body).await;
            assert_eq!(answer, 200);
            assert_eq!(client.settled("napper", "s1").await["status"], "completed");
        }
        // In the middle of an answer, which is discarded.
        let make = || {
            let slow = crate::support::Slow {
                words: 1_000,
                pause: Duration::from_millis(300),
            };
            agent(Rc::new(slow)).with_limits(Limits {
                max_run_time: Some(Duration::from_secs(2)),
                ..Limits::default()
            })
        };
        let client = hosting(make, &Lines::default());
        start(&client).await;
        let status = client.settled("napper", "s1").await;
        assert_eq!(
            (&status["errorCode"], &status["stepCount"]),
            (&json!("run_timeout"), &json!(0))
        );
        let said = log(&client).await;
        assert!(said.iter().any(|chunk| chunk["type"] == "text_delta"));
        assert!(said.iter().any(|chunk| chunk["type"] == "step_discarded"));
    });
}

fn outliner() -> Agent {
    let model = scripted(|request| match turn(request) {
        0 => calls(&[("c1", "outline", json!({"name": "x", "millis": 1}))]),
        _ => text("done"),
    });
    let outline = typed_tool(
        "outline",
        "Outlines.",
        async |context: ToolContext, nap: Nap| {
            let outline = context.document("outline")?;
            outline.set(&json!({"headings": ["CANARY-1"], "notes": ["not the state"]}))?;
            context.update(|kept: &mut Kept| kept.notes.push("state".into()))?;
            outline
                .set(&json!({"headings": ["CANARY-1", "CANARY-2"], "notes": ["not the state"]}))?;
            outline
                .set(&json!({"headings": ["CANARY-1", "CANARY-2"], "notes": ["not the state"]}))?;
            tokio::time::sleep(Duration::from_millis(nap.millis)).await;
            assert!(context.document("no/name").is_err());
            Ok::<_, ToolError>(outline.id().to_string())
        },
    );
    agent(model).with_tool(outline)
}

#[test]
fn a_live_document_is_in_a_name_that_no_session_can_have_and_never_in_the_state() {
    in_world(|| async {
        let client = hosting(outliner, &Lines::default());
        start(&client).await;
        let said = log(&client).await;
        let patches: Vec<&Value> = said
            .iter()
            .filter(|chunk| chunk["type"] == "state_patch")
            .collect();
        let of = |name: &str| {
            let mut found = patches.iter().filter(|chunk| chunk["agentId"] == name);
            let found: Vec<&Value> = found.by_ref().copied().collect();
            found
        };
        let (own, document) = (of("s1"), of("s1/outline"));
        assert_eq!((own.len(), document.len(), patches.len()), (1, 2, 3));
        assert_eq!(document[0]["patches"][0]["path"], "");
        let more = json!([{"op": "add", "path": "/headings/-", "value": "CANARY-2"}]);
        assert_eq!(document[1]["patches"], more);
        assert!(
            document
                .iter()
                .all(|chunk| chunk.get("patchOrdinal").is_none())
        );
        assert_eq!(state(&client).await, json!({"notes": ["state"], "told": 0}));
        // The type keeps the two apart.
        assert!(SessionId::parse("s1/outline").is_err());
        let id = DocumentId::parse("s1/outline").unwrap();
        assert_eq!(id.as_str(), "s1/outline");
        assert!(
            ["s1", "s1/", "/x", "s1/a/b", "s 1/x"]
                .iter()
                .all(|text| DocumentId::parse(text).is_err())
        );
    });
}

#[test]
fn a_projected_mount_shows_no_live_document() {
    in_world(|| async {
        let client = hosting(outliner, &Lines::default());
        start(&client).await;
        client.settled("napper", "s1").await;
        let projection = Projection {
            name: "none/1".into(),
            map: Rc::new(|_, _| json!({})),
        };
        let mount = Mount::new("/agents").allow_unauthenticated();
        let projected = Client {
            mount: Rc::new(mount.with_projection(projection)),
            objects: client.objects.clone(),
        };
        let path = "/agents/napper/sse?sessionId=s1&fromSequence=0";
        let (_, shown) = projected.sse(path).await;
        assert!(shown.contains("tool_end") && !shown.contains("CANARY"));
        assert!(client.sse(path).await.1.contains("CANARY"));
    });
}

#[test]
fn a_child_of_a_run_that_took_too_long_goes_on_and_the_next_run_hears_it() {
    in_world(|| async {
        let make = |objects: &Rc<LocalObjects>, runtime: &Rc<LocalRuntime>| {
            let child = AgentType::parse("child").unwrap();
            let fetch = Rc::new(ObjectsFetch::new(objects.clone()));
            let (address, clock) = ("http://object", runtime.clone());
            let transport = HttpTransport::new(fetch, clock, address, "", child.clone());
            let (place, way) = (SubLocation::Local, Rc::new(transport));
            let ask = SubAgent::new("ask", "Asks.", child.clone(), place, way);
            let model = scripted(|request| match turn(request) {
                0 => calls(&[("c1", "subagent__ask", json!({"message": "how long?"}))]),
                _ => text("heard"),
            });
            let slow = crate::support::Slow {
                words: 40,
                pause: Duration::from_millis(500),
            };
            let parent = agent(model).with_sub_agent(ask).with_limits(Limits {
                max_run_time: Some(Duration::from_secs(15)),
                ..Limits::default()
            });
            Agents::new([parent, Agent::new(child, "Talk.", Rc::new(slow))])
        };
        let client = Client {
            mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
            objects: LocalObjects::new(1_700_000_000_000, Lines::default().sink(), Rc::new(make)),
        };
        start(&client).await;
        let status = client.settled("napper", "s1").await;
        assert_eq!(status["errorCode"], "run_timeout");
        let on = json!({"sessionId": "s1", "mode": "continue"});
        assert_eq!(client.post("/agents/napper/resume", on).await.0, 200);
        let status = client.settled("napper", "s1").await;
        assert_eq!(status["output"], "heard", "{status}");
        let said = log(&client).await;
        let of = |kind: &str| said.iter().filter(|chunk| chunk["type"] == kind).count();
        assert_eq!((of("subagent_start"), of("subagent_end")), (1, 1));
        let end = said.iter().find(|chunk| chunk["type"] == "subagent_end");
        assert_eq!(end.unwrap()["success"], true);
        // Each word of the child stands in the parent's log once.
        let words = said.iter().filter(|chunk| chunk["agentType"] == "child");
        assert_eq!(
            words.filter(|chunk| chunk["type"] == "text_delta").count(),
            40
        );
    });
}

#[derive(Deserialize, Serialize, JsonSchema)]
enum Either {
    #[allow(dead_code)]
    One(u64),
}

#[derive(Deserialize, Serialize, JsonSchema)]
struct One {
    n: u64,
}

/// Whether a set with one agent can be made, and what is said where it cannot.
fn made(name: &str, with: impl FnOnce(Agent) -> Agent) -> Result<(), String> {
    let agent_type = AgentType::parse(name).unwrap();
    let agent = with(Agent::new(agent_type, "Work.", scripted(|_| text("done"))));
    Agents::new([agent]).map(drop).map_err(|error| {
        assert_eq!(error.code, Code::Internal);
        error.detail.unwrap_or_default()
    })
}

#[test]
fn an_agent_that_every_provider_would_refuse_cannot_be_made() {
    fn takes<T: serde::de::DeserializeOwned + JsonSchema + 'static>(
        name: &'static str,
        description: &'static str,
    ) -> impl FnOnce(Agent) -> Agent {
        move |agent| {
            agent.with_tool(typed_tool(
                name,
                description,
                |_: ToolContext, _: T| async move { Ok(json!(null)) },
            ))
        }
    }
    assert_eq!(made("a", takes::<One>("look-up_2", "Looks.")), Ok(()));
    // What says nothing of its shape is an object to the model.
    assert_eq!(made("a", takes::<Value>("look", "Looks.")), Ok(()));
    let said = |with| made("a", with).unwrap_err();
    let long = Box::leak("n".repeat(65).into_boxed_str());
    for name in ["look up", "", "größe", long] {
        let told = made("a", takes::<One>(name, "Looks.")).unwrap_err();
        assert!(told.contains("64 letters"), "{told}");
    }
    assert!(said(takes::<One>("look", " ")).contains("description"));
    for told in [
        made("a", takes::<Either>("look", "Looks.")),
        made("a", takes::<Vec<u64>>("look", "Looks.")),
        made("a", takes::<String>("look", "Looks.")),
        made("a", Agent::with_output::<Vec<u64>>),
        made("a", Agent::with_output::<Either>),
    ] {
        let told = told.unwrap_err();
        assert!(told.contains("make it a struct"), "{told}");
    }
    assert_eq!(made("a", Agent::with_output::<One>), Ok(()));
    let twice = |agent| takes::<One>("look", "Looks.")(takes::<One>("look", "Looks.")(agent));
    assert!(made("a", twice).unwrap_err().contains("two tools"));
}
