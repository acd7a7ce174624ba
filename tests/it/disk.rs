//! An object on a disk that is late: what it says leaves it once it is durable, and what is not
//! durable when it ends is gone, as if nobody had ever done it.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;
use remote_agents::http::Body;
use remote_agents::mount::Mount;
use remote_agents::native::{DiskMoment, LocalObjects};
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, Sequence};
use remote_agents::protocol::sse::{Decoded, Decoder};
use remote_agents::session::Retention;
use remote_agents::store::{SessionRecord, SqlStore, Store as _};
use remote_agents::{Agent, Agents, ToolContext, typed_tool};
use serde_json::{Map, Value, json};

use crate::support::{Client, Lines, calls, chunks, in_world, read, scripted, text, turn};

/// How long a write takes, in milliseconds.
const LATENCY: u64 = 7;

fn agent() -> Agent {
    let model = scripted(|request| match turn(request) {
        0 => calls(&[("c1", "note", json!({"text": "one"}))]),
        1 => calls(&[("c2", "note", json!({"text": "two"}))]),
        _ => text("one two three four"),
    });
    let note = typed_tool(
        "note",
        "Notes.",
        async |context: ToolContext, note: Map<String, Value>| {
            let call = context.tool_call_id.clone();
            context.update(|state: &mut Map<String, Value>| {
                state.insert(call, json!(note));
            })?;
            tokio::time::sleep(Duration::from_millis(20)).await;
            Ok(json!("noted"))
        },
    );
    Agent::new(AgentType::parse("talker").unwrap(), "Talk.", model)
        .with_state::<Map<String, Value>>()
        .with_tool(note)
}

struct World {
    client: Client,
    /// How often the moment that is waited for has come.
    seen: Rc<Cell<u32>>,
    /// How many chunks were gone with an object.
    gone: Rc<Cell<Sequence>>,
}

/// Objects on a late disk; the object ends at the n-th of these moments.
fn world(number: u32, at: DiskMoment) -> World {
    let client = Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(|_, _| Agents::new([agent()])),
        ),
    };
    let (seen, gone) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let (count, lost) = (seen.clone(), gone.clone());
    let objects = Rc::downgrade(&client.objects);
    client.objects.put_on_disk(
        Rc::new(|| Duration::from_millis(LATENCY)),
        Rc::new(move |session, moment| {
            if moment != at {
                return;
            }
            count.set(count.get() + 1);
            if count.get() == number {
                let objects = objects.upgrade().unwrap();
                let before = last_sequence(&objects);
                objects.evict(session).unwrap();
                lost.set(before - last_sequence(&objects));
            }
        }),
    );
    World { client, seen, gone }
}

fn last_sequence(objects: &LocalObjects) -> Sequence {
    stored(objects).map_or(0, |record| record.last_sequence)
}

/// The one session as it is stored, durable or not.
fn stored(objects: &LocalObjects) -> Option<SessionRecord> {
    let session = objects.sessions().pop()?;
    let store = SqlStore::new(objects.database(&session).unwrap());
    store.session().unwrap()
}

/// Reads what comes behind `seen` until the run ends or the body breaks off; whether it ended.
async fn read_on(client: &Client, seen: &mut Vec<(Sequence, Value)>) -> bool {
    let last = seen.last().map_or(0, |(sequence, _)| *sequence);
    let path = format!("/agents/talker/sse?sessionId=s1&fromSequence={last}");
    let response = client.send("GET", &path, &[], "").await;
    let Body::Stream(mut body) = response.into_body() else {
        return false;
    };
    let mut decoder = Decoder::new();
    while let Some(Ok(part)) = body.next().await {
        decoder.push(&part);
        while let Some(decoded) = decoder.poll().unwrap() {
            match decoded {
                Decoded::Frame(frame @ Frame::Chunk { sequence, .. }) => {
                    seen.push((sequence, chunks(&[frame])[0].clone()));
                }
                Decoded::Frame(Frame::End(_)) => return true,
                _ => {}
            }
        }
    }
    false
}

async fn start(client: &Client) -> (u16, Value) {
    let body = json!({"sessionId": "s1", "message": "go"}).to_string();
    let headers = [("idempotency-key", "k1")];
    let path = "/agents/talker/start";
    read(client.send("POST", path, &headers, body).await).await
}

#[test]
fn an_object_that_ends_at_any_write_to_its_disk_has_told_nobody_what_is_gone_with_it() {
    let (mut ended, mut gone) = (0, 0);
    for at in [DiskMoment::Leaving, DiskMoment::Durable] {
        for number in 1.. {
            let seen = Rc::new(Cell::new(0));
            let lost = Rc::new(Cell::new(0));
            let (count, most) = (seen.clone(), lost.clone());
            in_world(move || async move {
                let world = world(number, at);
                let client = &world.client;
                let mut said = Vec::new();
                let mut is_over = false;
                // A start without an answer is sent again; a body that broke off is read on.
                for _ in 0..20 {
                    if !is_over && start(client).await.0 == 200 {
                        is_over = read_on(client, &mut said).await;
                    }
                }
                assert!(is_over, "{at:?} {number}: it never ends");
                let mut log = Vec::new();
                assert!(read_on(client, &mut log).await);
                assert_eq!(
                    said, log,
                    "{at:?} {number}: what was said is not what is so"
                );
                let path = "/agents/talker/snapshot?sessionId=s1";
                let (_, snapshot) = client.get(path).await;
                let state = json!({"c1": {"text": "one"}, "c2": {"text": "two"}});
                assert_eq!(snapshot["state"], state, "{at:?} {number}");
                count.set(world.seen.get());
                most.set(world.gone.get());
            });
            if seen.get() < number {
                break;
            }
            ended += 1;
            gone += u32::from(lost.get() > 0);
        }
    }
    // Otherwise nothing of this was looked at.
    assert!(ended >= 10 && gone >= 5, "{ended} ends, {gone} with a loss");
}

#[test]
fn an_answer_leaves_its_object_once_what_it_tells_is_durable() {
    in_world(|| async {
        let world = world(1, DiskMoment::Leaving);
        let (status, body) = start(&world.client).await;
        assert_eq!((status, &body["code"]), (503, &json!("transport_error")));
        let path = "/agents/talker/status?sessionId=s1";
        assert_eq!(world.client.get(path).await.0, 404, "it is gone");
        let began = tokio::time::Instant::now();
        assert_eq!(start(&world.client).await.0, 200);
        assert!(began.elapsed() >= Duration::from_millis(LATENCY));
    });
}

/// A reader that comes back to its stream after a while; which floor it was told, if any, and which
/// one was durable then.
async fn told_of_a_trim(after: u64) -> Option<(Sequence, Sequence)> {
    let trims = || agent().with_retention(Retention::default().with_max_chunks(1));
    let client = Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(move |_, _| Agents::new([trims()])),
        ),
    };
    let durable = Rc::new(Cell::new(0));
    let (known, leaving, objects) = (
        durable.clone(),
        Cell::new(0),
        Rc::downgrade(&client.objects),
    );
    client.objects.put_on_disk(
        Rc::new(|| Duration::from_millis(LATENCY)),
        Rc::new(move |_, moment| match moment {
            DiskMoment::Leaving => {
                let stored = stored(&objects.upgrade().unwrap());
                leaving.set(stored.map_or(0, |record| record.floor));
            }
            DiskMoment::Durable => known.set(leaving.get()),
            DiskMoment::TakenBack => {}
        }),
    );
    assert_eq!(start(&client).await.0, 200);
    let path = "/agents/talker/sse?sessionId=s1&fromSequence=0";
    let Body::Stream(mut body) = client.send("GET", path, &[], "").await.into_body() else {
        return None;
    };
    let mut decoder = Decoder::new();
    // Its place is taken with the first part.
    decoder.push(&body.next().await.unwrap().unwrap());
    tokio::time::sleep(Duration::from_millis(after)).await;
    while let Some(Ok(part)) = body.next().await {
        decoder.push(&part);
        while let Some(decoded) = decoder.poll().unwrap() {
            if let Decoded::Frame(Frame::Error(error)) = decoded {
                assert_eq!(error.code, "TRUNCATED");
                return Some((error.floor.unwrap(), durable.get()));
            }
        }
    }
    None
}

#[test]
fn a_reader_is_told_of_a_trim_once_it_is_durable() {
    let told = Rc::new(Cell::new(0));
    for after in 0..80 {
        let count = told.clone();
        in_world(move || async move {
            if let Some((floor, durable)) = told_of_a_trim(after).await {
                assert!(
                    floor <= durable,
                    "after {after} ms {floor}, durable {durable}"
                );
                count.set(count.get() + 1);
            }
        });
    }
    assert!(told.get() >= 20, "{} of 80 were told", told.get());
}
