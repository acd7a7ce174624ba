//! What an object leaves behind that ends in the middle: nothing but its data and its alarm.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;
use remote_agents::http::Body;
use remote_agents::mount::Mount;
use remote_agents::native::{CommitMoment, LocalObjects};
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::{Agent, Agents};
use serde_json::{Value, json};

use crate::support::{Client, Lines, in_world, read, scripted, text};

fn client() -> Client {
    let agent = || {
        let model = scripted(|_| text("one two three four five six seven"));
        Agent::new(AgentType::parse("talker").unwrap(), "Talk.", model)
    };
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(move |_, _| Agents::new([agent()])),
        ),
    }
}

fn session() -> SessionId {
    SessionId::parse("s1").unwrap()
}

/// Evicts the object at the n-th transaction.
fn evict_at(client: &Client, number: u32, at: CommitMoment) {
    let seen = Cell::new(0);
    let objects = Rc::downgrade(&client.objects);
    client.objects.on_commit(Rc::new(move |session, moment| {
        if moment == at {
            seen.set(seen.get() + 1);
            if seen.get() == number {
                objects.upgrade().unwrap().evict(session).unwrap();
            }
        }
    }));
}

async fn start(client: &Client) -> (u16, Value) {
    let body = json!({"sessionId": "s1", "message": "go"}).to_string();
    let headers = [("idempotency-key", "k1")];
    read(
        client
            .send("POST", "/agents/talker/start", &headers, body)
            .await,
    )
    .await
}

/// Waits by the status alone, which wakes nothing.
async fn rest(client: &Client) -> Option<Value> {
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let (_, status) = client.get("/agents/talker/status?sessionId=s1").await;
        if status["status"] == "completed" {
            return Some(status);
        }
    }
    None
}

#[test]
fn a_commit_that_is_refused_leaves_nothing_and_its_caller_has_no_answer() {
    in_world(|| async {
        let client = client();
        evict_at(&client, 1, CommitMoment::Before);
        let (status, body) = start(&client).await;
        assert_eq!((status, &body["code"]), (503, &json!("transport_error")));
        let path = "/agents/talker/status?sessionId=s1";
        assert_eq!(client.get(path).await.0, 404);
        assert_eq!(start(&client).await.0, 200);
        assert!(rest(&client).await.is_some());
    });
}

#[test]
fn a_start_that_is_sent_again_looks_after_the_run_that_the_first_one_left() {
    in_world(|| async {
        let client = client();
        evict_at(&client, 1, CommitMoment::After);
        // The run is stored; nothing executes it and no alarm is armed.
        assert_eq!(start(&client).await.0, 503);
        assert_eq!(rest(&client).await, None);
        let (status, answer) = start(&client).await;
        assert_eq!(status, 200);
        let ended = rest(&client).await.expect("it goes on by itself");
        assert_eq!(ended["runId"], answer["runId"]);
    });
}

#[test]
fn the_streams_of_an_evicted_object_break_off() {
    in_world(|| async {
        let client = client();
        assert_eq!(start(&client).await.0, 200);
        let response = client
            .send("GET", "/agents/talker/sse?sessionId=s1", &[], "")
            .await;
        let Body::Stream(mut body) = response.into_body() else {
            panic!("a stream was expected")
        };
        assert!(body.next().await.unwrap().is_ok());
        client.objects.evict(&session()).unwrap();
        assert!(body.next().await.unwrap().is_err());
        assert!(body.next().await.is_none());
    });
}

#[test]
fn an_alarm_whose_work_was_cut_off_comes_again() {
    in_world(|| async {
        let client = client();
        assert_eq!(start(&client).await.0, 200);
        client.objects.evict(&session()).unwrap();
        // The next transaction is the alarm's: it takes the session over. It ends with it.
        evict_at(&client, 1, CommitMoment::After);
        assert!(rest(&client).await.is_some());
    });
}
