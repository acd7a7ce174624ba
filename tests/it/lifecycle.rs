//! How sessions end for good: by policy or by a call of the host, at rest and at work; and what an
//! object at rest leaves armed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use remote_agents::agent::{MAX_READERS, typed_tool};
use remote_agents::http::{Body, ByteStream};
use remote_agents::mount::Mount;
use remote_agents::native::{CommitMoment, LocalObjects, LocalRuntime, MountFetch};
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::session::Retention;
use remote_agents::store::{Database as _, SqlStore, SqlValue, Store as _, SubLocation};
use remote_agents::transport::{Fetch, HttpTransport};
use remote_agents::{Agent, Agents, SubAgent, ToolContext};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, chunks, in_world, scripted, text, turn, yield_now};

const BASE: u64 = 1_700_000_000_000;

/// A call of `hang`, which never ends, where the message says so; else a few words.
fn agent() -> Agent {
    let model = scripted(|request| {
        let says = format!("{:?}", request.messages.last());
        match turn(request) {
            0 if says.contains("hang") => calls(&[("c1", "hang", json!({}))]),
            _ => text("one two three four"),
        }
    });
    Agent::new(AgentType::parse("worker").unwrap(), "Work.", model).with_tool(typed_tool(
        "hang",
        "Keeps things in tables of its own, and never ends.",
        |context: ToolContext, _: Value| async move {
            for sql in [
                "CREATE TABLE IF NOT EXISTS things (body TEXT)",
                "CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(body)",
                "INSERT INTO words VALUES ('secret')",
            ] {
                context.database().query(sql, &[])?;
            }
            std::future::pending::<()>().await;
            Ok(json!({}))
        },
    ))
}

fn client(make: impl Fn() -> Agent + 'static) -> Client {
    client_logging(&Lines::default(), make)
}

fn client_logging(lines: &Lines, make: impl Fn() -> Agent + 'static) -> Client {
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: LocalObjects::new(
            BASE,
            lines.sink(),
            Rc::new(move |_, _| Agents::new([make()])),
        ),
    }
}

fn id() -> SessionId {
    SessionId::parse("s1").unwrap()
}

async fn start(client: &Client, message: &str) -> Value {
    let body = json!({"sessionId": "s1", "message": message});
    let (status, body) = client.post("/agents/worker/start", body).await;
    assert_eq!(status, 200, "{body}");
    body
}

async fn status(client: &Client) -> (u16, Value) {
    client.get("/agents/worker/status?sessionId=s1").await
}

/// Waits by the status alone, which wakes nothing.
async fn until(client: &Client, wanted: &str) -> Value {
    for _ in 0..1_000 {
        let (code, body) = status(client).await;
        if code == 200 && body["status"] == wanted {
            return body;
        }
        yield_now().await;
    }
    panic!("it did not become {wanted}")
}

/// The tables in the session's object.
fn tables(client: &Client) -> Vec<Vec<SqlValue>> {
    let database = client.objects.database(&id()).unwrap();
    database
        .query("SELECT name FROM sqlite_master", &[])
        .unwrap()
}

async fn assert_gone(client: &Client) {
    assert!(tables(client).is_empty(), "{:?}", tables(client));
    assert_eq!(client.objects.alarm_at(&id()), None);
    assert_eq!(client.objects.pending(&id()), 0);
    for route in ["status", "snapshot", "usage", "sse"] {
        let (code, body) = client
            .get(&format!("/agents/worker/{route}?sessionId=s1"))
            .await;
        assert_eq!(
            (code, body["code"].as_str()),
            (404, Some("NOT_FOUND")),
            "{route}"
        );
    }
    for route in ["resume", "interrupt", "abort"] {
        let body = json!({"sessionId": "s1"});
        let (code, _) = client.post(&format!("/agents/worker/{route}"), body).await;
        assert_eq!(code, 404, "{route}");
    }
    assert!(tables(client).is_empty(), "a refusal made tables");
}

#[test]
fn a_session_at_rest_is_deleted_at_the_instant_of_its_expiry() {
    in_world(|| async {
        let client = client(|| agent().with_expiry(Duration::from_secs(3_600)));
        start(&client, "go").await;
        let ended = until(&client, "completed").await;
        yield_now().await;
        let due = ended["updatedAt"].as_u64().unwrap() + 3_600_000;
        assert_eq!(client.objects.alarm_at(&id()), Some(due));
        assert_eq!(client.objects.pending(&id()), 0);
        let began = tokio::time::Instant::now();
        let left = Duration::from_millis(3_600_000 - 100);
        tokio::time::sleep(left).await;
        assert_eq!(status(&client).await.0, 200, "a moment before it is there");
        assert!(began.elapsed() < Duration::from_secs(3_600));
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_gone(&client).await;

        // Another life of the id is another stream from its first number on.
        let again = start(&client, "go").await;
        let (frames, _) = client
            .sse("/agents/worker/sse?sessionId=s1&fromSequence=0")
            .await;
        assert_ne!(again["streamId"], ended["streamId"]);
        assert!(matches!(frames[0], Frame::Chunk { sequence: 1, .. }));
        let ended = until(&client, "completed").await;
        let due = ended["updatedAt"].as_u64().unwrap() + 3_600_000;
        assert_eq!(client.objects.alarm_at(&id()), Some(due));
    });
}

#[test]
fn a_version_that_does_not_know_the_agent_loses_no_expiry() {
    in_world(|| async {
        let knows = Rc::new(Cell::new(true));
        let known = knows.clone();
        let client = client(move || {
            let other = || {
                Agent::new(
                    AgentType::parse("other").unwrap(),
                    "",
                    scripted(|_| text("")),
                )
            };
            let agent = if known.get() { agent() } else { other() };
            agent.with_expiry(Duration::from_secs(3_600))
        });
        start(&client, "go").await;
        until(&client, "completed").await;
        knows.set(false);
        client.objects.evict(&id()).unwrap();
        tokio::time::sleep(Duration::from_secs(5 * 3_600)).await;
        knows.set(true);
        client.objects.evict(&id()).unwrap();
        assert_eq!(status(&client).await.0, 200, "it is there still");
        tokio::time::sleep(Duration::from_secs(2 * 3_600)).await;
        assert_gone(&client).await;
    });
}

#[test]
fn what_happens_to_a_session_puts_its_expiry_off_and_a_restart_does_not() {
    in_world(|| async {
        let client = client(|| agent().with_expiry(Duration::from_secs(60)));
        start(&client, "hang").await;
        tokio::time::sleep(Duration::from_secs(200)).await;
        let (_, at_work) = status(&client).await;
        assert_eq!(at_work["status"], "running", "one at work does not expire");
        let body = json!({"sessionId": "s1"});
        client.post("/agents/worker/interrupt", body.clone()).await;
        until(&client, "interrupted").await;
        tokio::time::sleep(Duration::from_secs(50)).await;
        // An abort at rest changes it once more.
        assert_eq!(client.post("/agents/worker/abort", body).await.0, 200);
        let aborted = until(&client, "failed").await;
        let due = aborted["updatedAt"].as_u64().unwrap() + 60_000;
        assert_eq!(client.objects.alarm_at(&id()), Some(due));
        tokio::time::sleep(Duration::from_secs(50)).await;
        assert_eq!(status(&client).await.0, 200);
        client.objects.evict(&id()).unwrap();
        yield_now().await;
        assert_eq!(client.objects.alarm_at(&id()), Some(due));
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert_gone(&client).await;
    });
}

#[test]
fn a_session_whose_object_ended_right_after_it_settled_expires_all_the_same() {
    in_world(|| async {
        // At every commit of the run the object ends; what the alarm finds is seen to.
        let mut ends = 0;
        for number in 2..40 {
            let client = client(|| agent().with_expiry(Duration::from_secs(60)));
            let seen = Rc::new(Cell::new(0));
            let (objects, count) = (Rc::downgrade(&client.objects), seen.clone());
            client.objects.on_commit(Rc::new(move |session, moment| {
                if moment == CommitMoment::After {
                    count.set(count.get() + 1);
                    if count.get() == number {
                        objects.upgrade().unwrap().evict(session).unwrap();
                    }
                }
            }));
            start(&client, "go").await;
            tokio::time::sleep(Duration::from_secs(90)).await;
            ends += u32::from(seen.get() >= number);
            assert_gone(&client).await;
        }
        assert!(ends >= 6, "only {ends} runs were cut");
    });
}

#[test]
fn case_12_without_a_policy_an_object_at_rest_has_no_alarm_no_timer_and_no_task() {
    in_world(|| async {
        let client = client(agent);
        start(&client, "go").await;
        assert!(client.objects.alarm_at(&id()).is_some(), "the watchdog");
        assert!(client.objects.pending(&id()) > 0, "the run");
        until(&client, "completed").await;
        yield_now().await;
        assert_eq!(client.objects.alarm_at(&id()), None);
        assert_eq!(client.objects.pending(&id()), 0);
        // Interrupted is at rest as well.
        let body = json!({"sessionId": "s1", "message": "hang"});
        assert_eq!(client.post("/agents/worker/resume", body).await.0, 200);
        let body = json!({"sessionId": "s1"});
        client.post("/agents/worker/interrupt", body).await;
        until(&client, "interrupted").await;
        yield_now().await;
        assert_eq!(client.objects.alarm_at(&id()), None);
        assert_eq!(client.objects.pending(&id()), 0);
        tokio::time::sleep(Duration::from_secs(86_400 * 365)).await;
        assert_eq!(status(&client).await.0, 200);
    });
}

#[test]
fn case_10_a_log_with_a_policy_by_age_is_trimmed_at_rest_when_its_oldest_part_is_due() {
    in_world(|| async {
        let age = Duration::from_secs(100);
        let client = client(move || agent().with_retention(Retention::default().with_max_age(age)));
        start(&client, "go").await;
        let ended = until(&client, "completed").await;
        yield_now().await;
        let store = || SqlStore::new(client.objects.database(&id()).unwrap());
        let newest = store().session().unwrap().unwrap().last_sequence;
        let oldest = store().log_stats(1).unwrap().front[0];
        assert_eq!(
            client.objects.alarm_at(&id()),
            Some(oldest.committed_at + 100_000)
        );
        tokio::time::sleep(Duration::from_secs(101)).await;
        let stats = store().log_stats(1).unwrap();
        assert!(stats.oldest > oldest.last, "{stats:?}");
        assert_eq!(stats.newest, newest);
        let record = store().session().unwrap().unwrap();
        assert_eq!(record.floor, stats.oldest);
        assert_eq!(
            Some(record.updated_at),
            ended["updatedAt"].as_u64(),
            "a trim is no change of the session"
        );
        // What stays, stays for good: nothing is due any more.
        assert_eq!(client.objects.alarm_at(&id()), None);
        assert_eq!(client.objects.pending(&id()), 0);
        let (frames, _) = client
            .sse("/agents/worker/sse?sessionId=s1&fromSequence=0")
            .await;
        assert!(
            matches!(&frames[..], [Frame::Error(error)] if error.code == "TRUNCATED"),
            "{frames:?}"
        );
    });
}

/// Opens the stream and reads until it says `word`.
async fn reader(client: &Client, word: &str) -> ByteStream {
    let response = client
        .send("GET", "/agents/worker/sse?sessionId=s1", &[], "")
        .await;
    let Body::Stream(mut body) = response.into_body() else {
        panic!("a stream was expected")
    };
    let mut told = String::new();
    while !told.contains(word) {
        let part = body.next().await.unwrap().unwrap();
        told.push_str(std::str::from_utf8(&part).unwrap());
    }
    body
}

async fn rest_of(mut body: ByteStream) -> String {
    let mut rest = String::new();
    while let Some(part) = body.next().await {
        rest.push_str(std::str::from_utf8(&part.unwrap()).unwrap());
    }
    rest
}

#[test]
fn a_deletion_at_work_ends_the_run_its_readers_and_everything_it_kept() {
    in_world(|| async {
        let lines = Lines::default();
        let client = client_logging(&lines, agent);
        start(&client, "hang").await;
        let bodies = [
            reader(&client, "tool_start").await,
            reader(&client, "caught-up").await,
        ];
        assert!(tables(&client).len() > 10);
        let producer = client.objects.producer(&id()).unwrap();
        producer.delete().await.unwrap();
        for body in bodies {
            let rest = rest_of(body).await;
            let last = rest.rsplit("\n\n").nth(1).unwrap();
            assert!(last.starts_with("event: error"), "{rest}");
            assert!(last.contains("NOT_FOUND") && last.contains("\"recoverable\":false"));
        }
        yield_now().await;
        assert_gone(&client).await;
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        assert_gone(&client).await;
        // Deleting nothing is no error.
        producer.delete().await.unwrap();
        assert_gone(&client).await;
        let errors = lines
            .0
            .borrow()
            .iter()
            .filter(|line| line.contains("failed"))
            .count();
        assert_eq!(errors, 0, "{:?}", lines.0.borrow());
    });
}

#[test]
fn a_session_that_cannot_be_read_is_deleted_as_any_other() {
    in_world(|| async {
        let client = client(agent);
        start(&client, "go").await;
        until(&client, "completed").await;
        let database = client.objects.database(&id()).unwrap();
        database
            .query("UPDATE ra_session SET status = 'broken'", &[])
            .unwrap();
        let producer = client.objects.evict(&id()).unwrap();
        assert_eq!(status(&client).await.0, 500);
        producer.delete().await.unwrap();
        assert_gone(&client).await;
        start(&client, "go").await;
        until(&client, "completed").await;
    });
}

#[test]
fn a_life_that_was_deleted_at_any_commit_never_writes_into_the_next_one() {
    in_world(|| async {
        let mut deleted = 0;
        for number in 1..30 {
            let client = Rc::new(client(agent));
            let seen = Rc::new(Cell::new(0));
            let (objects, count) = (Rc::downgrade(&client.objects), seen.clone());
            let second = Rc::new(RefCell::new(None));
            let (shared, again) = (client.clone(), second.clone());
            client.objects.on_commit(Rc::new(move |session, moment| {
                if moment == CommitMoment::After {
                    count.set(count.get() + 1);
                }
                if moment == CommitMoment::After && count.get() == number {
                    let producer = objects.upgrade().unwrap().producer(session).unwrap();
                    let (client, again) = (shared.clone(), again.clone());
                    tokio::task::spawn_local(async move {
                        // The next life begins in the same turn in which the first one ended.
                        let (gone, begun) = futures::join!(producer.delete(), start(&client, "go"));
                        gone.unwrap();
                        *again.borrow_mut() = Some(begun);
                    });
                }
            }));
            let first = start(&client, "go").await;
            tokio::time::sleep(Duration::from_secs(30)).await;
            client.objects.on_commit(Rc::new(|_, _| ()));
            let Some(second) = second.borrow_mut().take() else {
                continue;
            };
            deleted += 1;
            let path = "/agents/worker/sse?sessionId=s1&fromSequence=0";
            let (frames, raw) = client.sse(path).await;
            assert_ne!(first["streamId"], second["streamId"]);
            assert!(
                !raw.contains(first["runId"].as_str().unwrap()),
                "at {number}: {raw}"
            );
            let sequences: Vec<u64> = frames
                .iter()
                .filter_map(|frame| match frame {
                    Frame::Chunk { sequence, .. } => Some(*sequence),
                    _ => None,
                })
                .collect();
            let unbroken: Vec<u64> = (1..=sequences.len() as u64).collect();
            assert_eq!(sequences, unbroken, "at {number}");
            let text: String = chunks(&frames)
                .iter()
                .filter_map(|chunk| chunk["delta"].as_str().map(str::to_owned))
                .collect();
            assert_eq!(text, "one two three four", "at {number}");
            let Some(Frame::End(end)) = frames.last() else {
                panic!("at {number}: {frames:?}")
            };
            assert_eq!(end.run_id.as_deref(), second["runId"].as_str());
            assert_eq!(client.objects.pending(&id()), 0);
            assert_eq!(client.objects.alarm_at(&id()), None);
            // The cursor of a reader of the first life finds another stream here.
            let stream = first["streamId"].as_str().unwrap();
            let (frames, _) = client.sse(&format!("{path}&streamId={stream}")).await;
            assert!(matches!(&frames[..], [Frame::Error(error)] if error.code == "TRUNCATED"));
        }
        assert!(deleted >= 6, "only {deleted} runs were deleted");
    });
}

#[test]
fn a_reader_of_a_deleted_life_hears_nothing_of_the_next_one() {
    in_world(|| async {
        let client = client(agent);
        start(&client, "hang").await;
        let body = reader(&client, "tool_start").await;
        let producer = client.objects.producer(&id()).unwrap();
        let (gone, _) = futures::join!(producer.delete(), start(&client, "go"));
        gone.unwrap();
        let rest = rest_of(body).await;
        assert!(rest.contains("NOT_FOUND"), "{rest}");
        assert!(!rest.contains("run_started") && !rest.contains("text_delta"));
        until(&client, "completed").await;
    });
}

#[test]
fn the_children_of_a_deleted_session_are_aborted() {
    in_world(|| async {
        let far = LocalObjects::new(
            BASE,
            Lines::default().sink(),
            Rc::new(|_, _| Agents::new([agent()])),
        );
        let (mount, there) = (
            Rc::new(Mount::new("/internal/agents").allow_unauthenticated()),
            far.clone(),
        );
        let client = client(move || {
            let transport = HttpTransport::new(
                Rc::new(MountFetch::new(mount.clone(), there.clone())) as Rc<dyn Fetch>,
                LocalRuntime::new(BASE, Lines::default().sink()),
                "http://far",
                "/internal/agents",
                AgentType::parse("worker").unwrap(),
            );
            let model = scripted(|_| calls(&[("p1", "subagent__ask", json!({"message": "hang"}))]));
            Agent::new(AgentType::parse("worker").unwrap(), "Ask.", model).with_sub_agent(
                SubAgent::new(
                    "ask",
                    "Asks.",
                    AgentType::parse("worker").unwrap(),
                    SubLocation::Remote,
                    Rc::new(transport),
                ),
            )
        });
        start(&client, "go").await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let child = far.sessions().pop().unwrap();
        let record = || {
            let database = far.database(&child).unwrap();
            SqlStore::new(database).session().unwrap().unwrap()
        };
        assert_eq!(record().status.as_str(), "running");
        let producer = client.objects.producer(&id()).unwrap();
        producer.delete().await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(record().failure.unwrap().code, "run_aborted");
        assert_gone(&client).await;
    });
}

#[test]
fn case_14_a_request_for_another_session_is_not_found_and_told_with_both_ids() {
    in_world(|| async {
        let lines = Lines::default();
        let client = client_logging(&lines, agent);
        start(&client, "go").await;
        until(&client, "completed").await;
        let producer = client.objects.producer(&id()).unwrap();
        for route in ["status", "snapshot", "usage", "sse"] {
            lines.0.borrow_mut().clear();
            let request = |session: &str| {
                http::Request::get(format!("/worker/{route}?sessionId={session}"))
                    .body(Bytes::new())
                    .unwrap()
            };
            assert_eq!(producer.handle(request("s1")).await.status(), 200);
            assert!(lines.0.borrow().is_empty());
            let answer = producer.handle(request("s2")).await;
            assert_eq!(answer.status(), 404, "{route}");
            let lines = lines.0.borrow();
            let told: Vec<Value> = lines
                .iter()
                .map(|line| serde_json::from_str(line).unwrap())
                .filter(|line: &Value| line["event"] == "foreign_session")
                .collect();
            let [line] = &told[..] else {
                panic!("{route}: {lines:?}")
            };
            assert_eq!(
                (&line["sessionId"], &line["askedSessionId"]),
                (&json!("s1"), &json!("s2"))
            );
        }
    });
}

#[test]
fn readers_over_the_bound_are_refused_and_one_that_leaves_makes_room_at_once() {
    in_world(|| async {
        let client = client(|| agent().with_max_readers(3));
        start(&client, "hang").await;
        let path = "/agents/worker/sse?sessionId=s1";
        let mut readers = Vec::new();
        for _ in 0..3 {
            let response = client.send("GET", path, &[], "").await;
            assert_eq!(response.status(), 200);
            readers.push(response);
        }
        for _ in 0..2 {
            let refused = client.send("GET", path, &[], "").await;
            assert_eq!(refused.status(), 429);
            assert_eq!(refused.headers()["retry-after"], "5");
            let (_, body) = crate::support::read(refused).await;
            assert_eq!(
                (&body["code"], &body["retryable"]),
                (&json!("RATE_LIMITED"), &json!(true))
            );
            // Whoever only asks is no reader.
            assert_eq!(status(&client).await.0, 200);
        }
        // One that never read a byte, and one that waits for more.
        drop(readers.pop());
        readers.push(client.send("GET", path, &[], "").await);
        assert_eq!(readers[2].status(), 200);
        assert_eq!(client.send("GET", path, &[], "").await.status(), 429);
        let waiting = readers.remove(0);
        let Body::Stream(mut body) = waiting.into_body() else {
            panic!()
        };
        body.next().await.unwrap().unwrap();
        drop(body);
        let response = client.send("GET", path, &[], "").await;
        assert_eq!(response.status(), 200);
    });
}

#[test]
fn who_knocks_at_a_full_session_does_not_make_it_write_to_its_readers_each_time() {
    in_world(|| async {
        let client = client(|| agent().with_max_readers(1));
        start(&client, "hang").await;
        let path = "/agents/worker/sse?sessionId=s1";
        let Body::Stream(mut body) = client.send("GET", path, &[], "").await.into_body() else {
            panic!()
        };
        let pings = Cell::new(0);
        let reading = async {
            while let Some(part) = body.next().await {
                let text = String::from_utf8_lossy(&part.unwrap()).into_owned();
                pings.set(pings.get() + text.matches(": ping").count());
            }
        };
        let knocking = async {
            // Each looks for half a second: four of them are done before five seconds are over.
            for times in [4, 8] {
                for _ in 0..times {
                    assert_eq!(client.send("GET", path, &[], "").await.status(), 429);
                }
                assert!(pings.get() > 0, "it was asked");
            }
        };
        futures::future::select(Box::pin(reading), Box::pin(knocking)).await;
        // Six seconds of it are two rounds of three at the most; without a bound it would be thirty.
        assert!((3..=6).contains(&pings.get()), "{} pings", pings.get());
        drop(body);
        assert_eq!(client.send("GET", path, &[], "").await.status(), 200);
    });
}

#[test]
fn by_default_a_session_has_room_for_hundreds_of_readers() {
    in_world(|| async {
        let client = client(agent);
        start(&client, "hang").await;
        let path = "/agents/worker/sse?sessionId=s1";
        let mut readers = Vec::new();
        for _ in 0..MAX_READERS {
            let response = client.send("GET", path, &[], "").await;
            assert_eq!(response.status(), 200);
            readers.push(response);
        }
        assert!(readers.len() >= 128);
        assert_eq!(client.send("GET", path, &[], "").await.status(), 429);
    });
}
