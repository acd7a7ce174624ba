//! What an object leaves behind that ends in the middle: nothing but its data and its alarm.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;
use remote_agents::agent::model::LanguageModel;
use remote_agents::http::Body;
use remote_agents::mount::Mount;
use remote_agents::native::{CommitMoment, Effect, LocalObjects, StoreOperation};
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::{Agent, Agents, Error};
use serde_json::{Value, json};

use crate::support::{Client, Lines, Slow, in_world, read, scripted, text};

fn client() -> Client {
    client_of(|| scripted(|_| text("one two three four five six seven")))
}

fn client_of(model: impl Fn() -> Rc<dyn LanguageModel> + 'static) -> Client {
    let agent = move || Agent::new(AgentType::parse("talker").unwrap(), "Talk.", model());
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
fn a_run_whose_object_ends_with_its_first_commit_goes_on_by_itself() {
    in_world(|| async {
        let client = client();
        evict_at(&client, 1, CommitMoment::After);
        // The run is stored with its alarm; nobody was told of it.
        assert_eq!(start(&client).await.0, 503);
        let ended = rest(&client).await.expect("it goes on by itself");
        let (status, answer) = start(&client).await;
        assert_eq!(status, 200);
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

const STATUS: &str = "/agents/talker/status?sessionId=s1";

/// Refuses to arm an alarm for as long as `refuses` is true.
fn refuse_alarms(client: &Client, refuses: &Rc<Cell<bool>>) {
    let refuses = refuses.clone();
    client.objects.on_store(Rc::new(move |_, operation, _| {
        if operation == StoreOperation::Alarm && refuses.get() {
            return Err(Error::internal("the disk refuses"));
        }
        Ok(())
    }));
}

async fn send(client: &Client, action: &str, key: Option<&str>, message: &str) -> (u16, Value) {
    let body = json!({"sessionId": "s1", "message": message}).to_string();
    let headers: Vec<(&str, &str)> = key
        .map(|key| ("idempotency-key", key))
        .into_iter()
        .collect();
    let path = format!("/agents/talker/{action}");
    read(client.send("POST", &path, &headers, body).await).await
}

#[test]
fn a_run_that_no_alarm_would_look_after_does_not_begin() {
    for action in ["start", "resume"] {
        for key in [Some("k2"), None] {
            in_world(move || async move {
                let client = client();
                if action == "resume" {
                    assert_eq!(start(&client).await.0, 200);
                    assert!(rest(&client).await.is_some());
                }
                let before = client.get(STATUS).await;
                let refuses = Rc::new(Cell::new(true));
                refuse_alarms(&client, &refuses);
                let (status, body) = send(&client, action, key, "go").await;
                assert_eq!((status, &body["code"]), (500, &json!("INTERNAL")), "{body}");
                assert_eq!(client.objects.alarm_at(&session()), None);
                assert_eq!(client.get(STATUS).await, before, "nothing has changed");
                refuses.set(false);
                let (status, body) = send(&client, action, key, "go").await;
                assert_eq!(status, 200, "{body}");
                // Nobody asks any more.
                client.objects.evict(&session()).unwrap();
                assert!(rest(&client).await.is_some(), "{action} {key:?}");
            });
        }
    }
}

#[test]
fn an_alarm_that_cannot_arm_the_next_one_is_rung_again() {
    in_world(|| async {
        let client = client_of(|| {
            Rc::new(Slow {
                words: 7,
                pause: Duration::from_secs(3),
            })
        });
        assert_eq!(start(&client).await.0, 200);
        let refuses = Rc::new(Cell::new(true));
        refuse_alarms(&client, &refuses);
        let rings = Rc::new(Cell::new(0));
        let count = rings.clone();
        client.objects.on_effect(Rc::new(move |_, effect| {
            if effect == Effect::AlarmRings {
                count.set(count.get() + 1);
            }
        }));
        // The alarm rings within two seconds and cannot be armed; it rings again two seconds later.
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        assert_eq!(rings.get(), 1);
        refuses.set(false);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(rings.get(), 2);
        // Nothing else woke the session: it is looked after again, whatever becomes of its object.
        client.objects.evict(&session()).unwrap();
        assert!(rest(&client).await.is_some());
    });
}
