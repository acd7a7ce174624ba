//! Hooks: at an entry, after it, before a run completes and after it has settled, with crashes in
//! between.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::model::{ModelError, ModelErrorKind};
use remote_agents::agent::{Settled, typed_tool};
use remote_agents::mount::Mount;
use remote_agents::native::{CommitMoment, LocalObjects};
use remote_agents::protocol::chunk::PatchOperation;
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::store::{Database, SqlStore, SqlValue, Store as _};
use remote_agents::{Agent, Agents, Code, Error, Result, ToolContext};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, chunks, in_world, scripted, text, turn, yield_now};

#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct State {
    said: Vec<String>,
    notes: u32,
    done: bool,
}

/// A note, then a last word; a refusal where the message says so, a hang where it says so.
fn agent() -> Agent {
    let model = scripted(|request| {
        let asked = format!("{:?}", request.messages.last());
        match turn(request) {
            _ if asked.contains("fail") => vec![Err(ModelError {
                kind: ModelErrorKind::Rejected,
                message: "No.".into(),
                retry_after: None,
            })],
            0 if asked.contains("hang") => calls(&[("h", "hang", json!({}))]),
            0 => calls(&[("c", "note", json!({}))]),
            _ => text("all done"),
        }
    });
    Agent::new(AgentType::parse("worker").unwrap(), "Work.", model)
        .with_state::<State>()
        .with_tool(typed_tool(
            "note",
            "Notes.",
            |context: ToolContext, _: Value| async move {
                context.update(|state: &mut State| state.notes += 1)?;
                Ok(json!({}))
            },
        ))
        .with_tool(typed_tool(
            "hang",
            "Never ends.",
            |_: ToolContext, _: Value| async move {
                std::future::pending::<()>().await;
                Ok(json!({}))
            },
        ))
}

fn client(make: impl Fn() -> Agent + 'static) -> Client {
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
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

/// Waits by the stored row alone until it says so.
async fn until(client: &Client, wanted: &str) {
    for _ in 0..1_000 {
        let store = SqlStore::new(client.objects.database(&id()).unwrap());
        let record = store.session().unwrap();
        if record.is_some_and(|record| record.status.as_str() == wanted) {
            return yield_now().await;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it did not become {wanted}")
}

async fn log(client: &Client) -> Vec<Frame> {
    let path = "/agents/worker/sse?sessionId=s1&fromSequence=0";
    client.sse(path).await.0
}

async fn state(client: &Client) -> Value {
    let path = "/agents/worker/snapshot?sessionId=s1";
    client.get(path).await.1["state"].clone()
}

fn note(database: &dyn Database, text: &str) -> Result<()> {
    database.query("CREATE TABLE IF NOT EXISTS seen (body TEXT)", &[])?;
    database
        .query(
            "INSERT INTO seen VALUES (?)",
            &[SqlValue::Text(text.into())],
        )
        .map(drop)
}

fn noted(client: &Client) -> Vec<String> {
    let database = client.objects.database(&id()).unwrap();
    let rows = database
        .query("SELECT body FROM seen ORDER BY rowid", &[])
        .unwrap_or_default();
    rows.into_iter()
        .flatten()
        .map(|cell| match cell {
            SqlValue::Text(text) => text,
            other => panic!("{other:?}"),
        })
        .collect()
}

fn refusal() -> Error {
    Error::new(Code::ValidationError, "Not today.")
}

#[test]
fn what_an_entry_hook_makes_of_the_state_is_in_the_log_and_in_the_checkpoint_of_the_run() {
    in_world(|| async {
        let client = client(|| {
            agent().with_before_entry(|entry| {
                if entry.message == "forbidden" {
                    note(entry.database, "never")?;
                    return Err(refusal());
                }
                note(entry.database, entry.message)?;
                let said = entry.state.entry("said").or_insert(json!([]));
                said.as_array_mut().unwrap().push(entry.message.into());
                Ok(())
            })
        });
        assert_eq!(post(&client, "start", Some("one")).await.0, 200);
        until(&client, "completed").await;
        assert_eq!(post(&client, "resume", Some("hang")).await.0, 200);
        tokio::time::sleep(Duration::from_millis(50)).await;
        // The reopening commit is what a running session is read from.
        assert_eq!(state(&client).await["said"], json!(["one", "hang"]));
        post(&client, "interrupt", None).await;
        until(&client, "interrupted").await;
        assert_eq!(post(&client, "resume", Some("forbidden")).await.0, 400);
        // A session that merely goes on has no entry.
        assert_eq!(post(&client, "resume", None).await.0, 200);
        until(&client, "completed").await;
        assert_eq!(noted(&client), ["one", "hang"]);
        let frames = log(&client).await;
        let said = chunks(&frames);
        let at = said
            .iter()
            .position(|chunk| chunk["type"] == "run_resumed")
            .unwrap();
        let patch = &said[at - 1];
        assert_eq!(patch["type"], "state_patch");
        assert_eq!(
            patch["patches"],
            json!([{"op": "add", "path": "/said/-", "value": "hang"}])
        );
        // The ordinals are one chain, and the patches add up to what is told at the end.
        let mut ordinal = 0;
        let mut document = json!({"said": ["one"], "notes": 0, "done": false});
        for chunk in said.iter().filter(|chunk| chunk["type"] == "state_patch") {
            assert_eq!(chunk["patchBase"], ordinal, "{chunk}");
            ordinal = chunk["patchOrdinal"].as_u64().unwrap();
            let patches: Vec<PatchOperation> =
                serde_json::from_value(chunk["patches"].clone()).unwrap();
            document = remote_agents::session::patch::apply(&document, &patches).unwrap();
        }
        assert_eq!(document, state(&client).await);
    });
}

#[test]
fn the_hook_after_an_entry_sees_the_run_and_undoes_it_by_an_error() {
    in_world(|| async {
        let client = client(|| {
            agent().with_after_entry(|entered| {
                let line = json!({
                    "run": entered.run_id.as_str(), "start": entered.is_start,
                    "message": entered.message, "notes": entered.state["notes"],
                });
                note(entered.database, &line.to_string())?;
                match entered.message {
                    Some("forbidden") => Err(refusal()),
                    _ => Ok(()),
                }
            })
        });
        assert_eq!(post(&client, "start", Some("forbidden")).await.0, 400);
        let database = client.objects.database(&id()).unwrap();
        let tables = database.query("SELECT 1 FROM sqlite_master", &[]).unwrap();
        assert!(tables.is_empty(), "a refused start left something");
        let mut runs = Vec::new();
        for (route, message) in [
            ("start", Some("hang")),
            ("resume", None),
            ("resume", Some("more")),
        ] {
            let (status, body) = post(&client, route, message).await;
            assert_eq!(status, 200, "{body}");
            runs.push(body["runId"].clone());
            if message == Some("hang") {
                tokio::time::sleep(Duration::from_millis(50)).await;
                post(&client, "interrupt", None).await;
                until(&client, "interrupted").await;
            } else {
                until(&client, "completed").await;
            }
        }
        let before = chunks(&log(&client).await);
        assert_eq!(post(&client, "resume", Some("forbidden")).await.0, 400);
        assert_eq!(chunks(&log(&client).await), before);
        let seen: Vec<Value> = noted(&client)
            .iter()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(
            seen,
            [
                json!({"run": runs[0], "start": true, "message": "hang", "notes": 0}),
                json!({"run": runs[1], "start": false, "message": null, "notes": 0}),
                json!({"run": runs[2], "start": false, "message": "more", "notes": 0}),
            ]
        );
    });
}

#[test]
fn what_the_hook_before_completion_writes_is_one_commit_with_the_end_or_nothing() {
    in_world(|| async {
        // At every commit, before and after it, the object ends once.
        let mut ends = 0;
        for moment in [CommitMoment::Before, CommitMoment::After] {
            for number in 2..24 {
                let client = client(|| {
                    agent().with_before_completion(|completing| {
                        note(completing.database, completing.output.as_str().unwrap())?;
                        completing.state.insert("done".into(), true.into());
                        Ok(())
                    })
                });
                let seen = Rc::new(Cell::new(0));
                evict_at(&client, number, moment, &seen);
                post(&client, "start", Some("go")).await;
                until(&client, "completed").await;
                ends += u32::from(seen.get() >= number);
                assert_eq!(noted(&client), ["all done"], "{moment:?} {number}");
                let frames = log(&client).await;
                let said = chunks(&frames);
                let last = &said[said.len() - 2..];
                assert_eq!(last[0]["type"], "state_patch", "{moment:?} {number}");
                let set = json!([{"op": "replace", "path": "/done", "value": true}]);
                assert_eq!(last[0]["patches"], set);
                assert_eq!(last[1]["type"], "step_committed");
                assert_eq!(last[1]["patchOrdinal"], last[0]["patchOrdinal"]);
                let Some(Frame::End(end)) = frames.last() else {
                    panic!("{frames:?}")
                };
                assert_eq!(
                    end.state,
                    Some(json!({"said": [], "notes": 1, "done": true}))
                );
            }
        }
        assert!(ends > 20, "only {ends} runs were cut");
    });
}

#[test]
fn an_error_before_completion_is_the_failure_of_the_run() {
    in_world(|| async {
        for wrong_shape in [false, true] {
            let client = client(move || {
                agent().with_before_completion(move |completing| {
                    note(completing.database, "never")?;
                    completing.state.insert("done".into(), json!("yes"));
                    if wrong_shape { Ok(()) } else { Err(refusal()) }
                })
            });
            post(&client, "start", Some("go")).await;
            until(&client, "failed").await;
            assert!(noted(&client).is_empty());
            let frames = log(&client).await;
            let Some(Frame::Error(error)) = frames.last() else {
                panic!("{frames:?}")
            };
            let code = if wrong_shape {
                "tool_execution_failed"
            } else {
                "VALIDATION_ERROR"
            };
            assert_eq!((error.code.as_str(), error.recoverable), (code, false));
            assert!(
                chunks(&frames)
                    .iter()
                    .all(|chunk| chunk["type"] != "output")
            );
            assert_eq!(state(&client).await["done"], false);
        }
    });
}

/// Ends the object once, at the n-th transaction.
fn evict_at(client: &Client, number: u32, at: CommitMoment, seen: &Rc<Cell<u32>>) {
    let (objects, seen) = (Rc::downgrade(&client.objects), seen.clone());
    client.objects.on_commit(Rc::new(move |session, moment| {
        if moment == at {
            seen.set(seen.get() + 1);
            if seen.get() == number {
                objects.upgrade().unwrap().evict(session).unwrap();
            }
        }
    }));
}

/// Gathers what a hook is told.
type Told = Rc<RefCell<Vec<Settled>>>;

fn telling(told: &Told) -> impl Fn() -> Agent + 'static + use<> {
    let told = told.clone();
    move || {
        let told = told.clone();
        agent().with_after_settled(move |settled| {
            let told = told.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                told.borrow_mut().push(settled);
                Ok(())
            }
        })
    }
}

fn brief(told: &Told) -> Vec<(String, String, u32)> {
    let brief = |settled: &Settled| {
        (
            settled.run_id.to_string(),
            settled.status.as_str().to_owned(),
            settled.attempt,
        )
    };
    told.borrow().iter().map(brief).collect()
}

#[test]
fn an_end_at_rest_is_told_wherever_the_object_ends() {
    in_world(|| async {
        let told = Told::default();
        let client = client(telling(&told));
        post(&client, "start", Some("hang")).await;
        post(&client, "interrupt", None).await;
        until(&client, "interrupted").await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(client.objects.alarm_at(&id()), None);
        // The object ends with the commit of the abort.
        evict_at(&client, 1, CommitMoment::After, &Rc::default());
        assert_eq!(post(&client, "abort", None).await.0, 503);
        // Nobody asks any more.
        tokio::time::sleep(Duration::from_secs(60)).await;
        let statuses: Vec<String> = brief(&told).into_iter().map(|told| told.1).collect();
        assert_eq!(statuses, ["interrupted", "failed"]);
    });
}

#[test]
fn a_settled_run_is_told_once_with_what_it_came_to() {
    in_world(|| async {
        let told = Told::default();
        let client = client(telling(&told));
        let run = |body: (u16, Value)| body.1["runId"].as_str().unwrap().to_owned();
        let first = run(post(&client, "start", Some("hang")).await);
        post(&client, "interrupt", None).await;
        until(&client, "interrupted").await;
        let second = run(post(&client, "resume", Some("go")).await);
        until(&client, "completed").await;
        let third = run(post(&client, "resume", Some("fail")).await);
        until(&client, "failed").await;
        let fourth = run(post(&client, "resume", Some("hang")).await);
        post(&client, "interrupt", None).await;
        until(&client, "interrupted").await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        post(&client, "abort", None).await;
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        let of = |run: &String, status: &str| (run.clone(), status.to_owned(), 1);
        assert_eq!(
            brief(&told),
            [
                of(&first, "interrupted"),
                of(&second, "completed"),
                of(&third, "failed"),
                of(&fourth, "interrupted"),
                of(&fourth, "failed"),
            ]
        );
        let told = told.borrow();
        let outcome = told[1].outcome.as_ref().unwrap();
        assert_eq!(outcome.output, Some(json!("all done")));
        assert_eq!(outcome.state.as_ref().unwrap()["notes"], 1);
        assert!(outcome.usage.as_ref().unwrap().tokens.total > 0);
        let failure = |n: usize| told[n].outcome.clone().unwrap().failure.unwrap().code;
        assert_eq!(failure(2), "provider_error");
        assert_eq!(failure(4), "run_aborted");
        let keys: std::collections::BTreeSet<_> = told
            .iter()
            .map(|settled| &settled.idempotency_key)
            .collect();
        assert_eq!(keys.len(), told.len());
        assert_eq!(client.objects.pending(&id()), 0);
        assert_eq!(client.objects.alarm_at(&id()), None);
    });
}

#[test]
fn a_settled_run_is_told_wherever_the_object_ended() {
    in_world(|| async {
        let (mut ends, mut repeats) = (0, 0);
        for moment in [CommitMoment::Before, CommitMoment::After] {
            for number in 2..26 {
                let told = Told::default();
                let client = client(telling(&told));
                let seen = Rc::new(Cell::new(0));
                evict_at(&client, number, moment, &seen);
                let (_, body) = post(&client, "start", Some("go")).await;
                tokio::time::sleep(Duration::from_secs(60)).await;
                ends += u32::from(seen.get() >= number);
                let told = told.borrow();
                assert!(!told.is_empty(), "{moment:?} {number}: nobody was told");
                for settled in &*told {
                    assert_eq!(Some(settled.run_id.as_str()), body["runId"].as_str());
                    assert_eq!(settled.status.as_str(), "completed");
                    assert_eq!(settled.idempotency_key, told[0].idempotency_key);
                    assert!(settled.outcome.is_some());
                }
                repeats += told.len() - 1;
                let store = SqlStore::new(client.objects.database(&id()).unwrap());
                assert_eq!(store.due_hooks().unwrap(), []);
                assert_eq!(client.objects.alarm_at(&id()), None);
                assert_eq!(client.objects.pending(&id()), 0);
            }
        }
        assert!(ends > 20, "only {ends} runs were cut");
        assert!(repeats > 0, "no hook was cut off behind its effect");
    });
}

#[test]
fn a_hook_that_was_cut_off_is_told_that_it_is_repeated() {
    in_world(|| async {
        let begun = Told::default();
        let seen = begun.clone();
        let client = client(move || {
            let seen = seen.clone();
            agent().with_after_settled(move |settled| {
                let seen = seen.clone();
                async move {
                    let attempt = settled.attempt;
                    seen.borrow_mut().push(settled);
                    if attempt < 3 {
                        std::future::pending::<()>().await;
                    }
                    Ok(())
                }
            })
        });
        post(&client, "start", Some("go")).await;
        until(&client, "completed").await;
        for attempts in [1, 2] {
            tokio::time::sleep(Duration::from_secs(10)).await;
            assert_eq!(begun.borrow().len(), attempts, "one at a time");
            assert_eq!(
                client.get("/agents/worker/status?sessionId=s1").await.0,
                200
            );
            client.objects.evict(&id()).unwrap();
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        let attempts: Vec<u32> = begun.borrow().iter().map(|s| s.attempt).collect();
        assert_eq!(attempts, [1, 2, 3]);
        assert_eq!(client.objects.alarm_at(&id()), None);
    });
}

#[test]
fn a_hook_that_fails_is_tried_ten_times_and_puts_the_expiry_off() {
    in_world(|| async {
        let tries = Rc::new(Cell::new(0));
        let seen = tries.clone();
        let client = client(move || {
            let seen = seen.clone();
            agent()
                .with_expiry(Duration::from_secs(10))
                .with_after_settled(move |_| {
                    seen.set(seen.get() + 1);
                    async { Err(refusal()) }
                })
        });
        post(&client, "start", Some("go")).await;
        until(&client, "completed").await;
        tokio::time::sleep(Duration::from_secs(1_000)).await;
        assert!((5..10).contains(&tries.get()), "{}", tries.get());
        let path = "/agents/worker/status?sessionId=s1";
        assert_eq!(client.get(path).await.0, 200, "it is kept while it owes");
        tokio::time::sleep(Duration::from_secs(3_000)).await;
        assert_eq!(tries.get(), 10);
        assert_eq!(client.get(path).await.0, 404);
        assert_eq!(client.objects.alarm_at(&id()), None);
    });
}

#[test]
fn a_hook_at_work_keeps_no_run_and_no_deletion_waiting() {
    in_world(|| async {
        let gate = Rc::new(tokio::sync::Notify::new());
        let told = Told::default();
        let (opened, seen) = (gate.clone(), told.clone());
        let client = client(move || {
            let (gate, told) = (opened.clone(), seen.clone());
            agent().with_after_settled(move |settled| {
                let (gate, told) = (gate.clone(), told.clone());
                async move {
                    gate.notified().await;
                    told.borrow_mut().push(settled);
                    Ok(())
                }
            })
        });
        post(&client, "start", Some("go")).await;
        until(&client, "completed").await;
        assert_eq!(post(&client, "resume", Some("more")).await.0, 200);
        until(&client, "completed").await;
        assert!(told.borrow().is_empty());
        gate.notify_one();
        tokio::time::sleep(Duration::from_secs(5)).await;
        gate.notify_one();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(told.borrow().len(), 2);
        assert_eq!(client.objects.alarm_at(&id()), None);
        // Deleted while its hook is at work: the hook ends, and writes nothing behind it.
        assert_eq!(post(&client, "resume", Some("more")).await.0, 200);
        until(&client, "completed").await;
        let producer = client.objects.producer(&id()).unwrap();
        producer.delete().await.unwrap();
        gate.notify_one();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let database = client.objects.database(&id()).unwrap();
        let tables = database.query("SELECT 1 FROM sqlite_master", &[]).unwrap();
        assert!(tables.is_empty());
        assert_eq!(client.objects.alarm_at(&id()), None);
        assert_eq!(client.objects.pending(&id()), 0);
    });
}
