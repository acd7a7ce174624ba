//! What is stored and for how long, seen over the routes: retention, and rows that are malformed.

use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::typed_tool;
use remote_agents::mount::Mount;
use remote_agents::native::LocalObjects;
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::session::Retention;
use remote_agents::store::{Database as _, SqlStore, SqlValue, Store as _};
use remote_agents::{Agent, Agents};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, in_world, scripted, text, turn, yield_now};

#[derive(Deserialize, schemars::JsonSchema)]
struct Note {
    note: String,
}

/// Twelve steps with a tool call each, then a last word.
fn worker(retention: Retention) -> Agent {
    let model = scripted(|request| match turn(request) {
        step @ 0..12 => calls(&[(
            &format!("c{step}"),
            "note",
            json!({"note": step.to_string()}),
        )]),
        _ => text("that was all of it"),
    });
    Agent::new(AgentType::parse("worker").unwrap(), "Work.", model)
        .with_tool(typed_tool("note", "Notes.", |_, note: Note| async move {
            Ok(json!({"noted": note.note}))
        }))
        .with_retention(retention)
}

fn client(retention: Retention) -> Client {
    let objects = LocalObjects::new(
        1_700_000_000_000,
        Lines::default().sink(),
        Rc::new(move |_, _| Agents::new([worker(retention)])),
    );
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects,
    }
}

async fn start(client: &Client, session: &str) {
    let body = json!({"sessionId": session, "message": "go"});
    let (status, body) = client.post("/agents/worker/start", body).await;
    assert_eq!(status, 200, "{body}");
}

async fn read(client: &Client, query: &str) -> Vec<Frame> {
    client
        .sse(&format!("/agents/worker/sse?sessionId=s1{query}"))
        .await
        .0
}

async fn snapshot(client: &Client) -> Value {
    client.get("/agents/worker/snapshot?sessionId=s1").await.1
}

fn sequences(frames: &[Frame]) -> Vec<u64> {
    let sequence = |frame: &Frame| match frame {
        Frame::Chunk { sequence, .. } => Some(*sequence),
        _ => None,
    };
    frames.iter().filter_map(sequence).collect()
}

#[test]
fn case_10_a_policy_raises_the_floor_and_readers_are_told() {
    in_world(|| async {
        let client = client(Retention::default().with_max_chunks(20));
        start(&client, "s1").await;
        let session = SessionId::parse("s1").unwrap();
        let mut floors = Vec::new();
        loop {
            let store = SqlStore::new(client.objects.database(&session).unwrap());
            let record = store.session().unwrap().unwrap();
            let checkpoint = store.checkpoint().unwrap().unwrap();
            let stats = store.log_stats(0).unwrap();
            assert!(record.floor <= checkpoint.stream_sequence || record.status.is_terminal());
            assert_eq!(
                record.floor.max(1),
                stats.oldest,
                "the floor is what is kept"
            );
            floors.push(record.floor);
            if record.status.is_terminal() {
                break;
            }
            let body = snapshot(&client).await;
            assert_eq!(body["oldestRetainedSequence"], record.floor);
            assert!(body["streamSequence"].as_i64() >= Some(record.floor as i64));
            yield_now().await;
        }
        assert!(floors.is_sorted(), "the floor only rises");
        floors.dedup();
        assert!(floors.len() > 5, "it rises with the steps: {floors:?}");
        let floor = *floors.last().unwrap();

        // From the floor on everything is there, without a cursor and with the lowest one.
        let all = read(&client, "").await;
        let numbers = sequences(&all);
        assert_eq!(numbers.first(), Some(&floor));
        assert!(numbers.len() >= 20, "{numbers:?}");
        assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]));
        assert!(matches!(all.last(), Some(Frame::End(_))));
        let lowest = read(&client, &format!("&fromSequence={}", floor - 1)).await;
        assert_eq!(lowest, all);

        // Below it a reader is told, never given a gap.
        for below in [0, floor - 2] {
            let frames = read(&client, &format!("&fromSequence={below}")).await;
            let [Frame::Error(error)] = &frames[..] else {
                panic!("from {below}: {frames:?}");
            };
            assert_eq!(
                (error.code.as_str(), error.floor),
                ("TRUNCATED", Some(floor))
            );
            assert!(!error.recoverable);
        }
    });
}

#[test]
fn by_default_and_for_a_young_log_everything_is_kept() {
    in_world(|| async {
        for retention in [
            Retention::default(),
            Retention::default().with_max_age(Duration::from_secs(3_600)),
            Retention::default().with_max_bytes(1 << 30),
        ] {
            let client = client(retention);
            start(&client, "s1").await;
            let frames = read(&client, "&fromSequence=0").await;
            assert!(
                matches!(frames.last(), Some(Frame::End(_))),
                "{retention:?}"
            );
            assert_eq!(sequences(&frames).first(), Some(&1));
            assert_eq!(snapshot(&client).await["oldestRetainedSequence"], 0);
        }
    });
}

#[test]
fn a_hard_cap_holds_inside_a_step_and_a_reader_left_behind_is_told() {
    in_world(|| async {
        let model = scripted(|_| text(&"word ".repeat(300)));
        let objects = LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(move |_, _| {
                let agent = Agent::new(AgentType::parse("worker").unwrap(), "Talk.", model.clone());
                let cap = Retention::default().with_hard_max_bytes(4_000);
                Agents::new([agent.with_retention(cap)])
            }),
        );
        let client = Client {
            mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
            objects,
        };
        start(&client, "s1").await;
        let session = SessionId::parse("s1").unwrap();
        let mut unpinned = 0;
        loop {
            let store = SqlStore::new(client.objects.database(&session).unwrap());
            let record = store.session().unwrap().unwrap();
            let stats = store.log_stats(0).unwrap();
            assert!(stats.bytes <= 4_200, "{} bytes", stats.bytes);
            if record.status.is_terminal() {
                break;
            }
            let body = snapshot(&client).await;
            if record.floor > store.checkpoint().unwrap().unwrap().stream_sequence {
                assert_eq!(body["streamSequence"], -1);
                unpinned += 1;
            }
            yield_now().await;
        }
        assert!(unpinned > 100, "the cap was hardly felt: {unpinned}");
        let frames = read(&client, "&fromSequence=1").await;
        assert!(matches!(&frames[..], [Frame::Error(error)] if error.code == "TRUNCATED"));
        assert!(matches!(
            read(&client, "").await.last(),
            Some(Frame::End(_))
        ));
    });
}

#[test]
fn a_malformed_row_is_told_where_it_is_needed_and_nowhere_else() {
    in_world(|| async {
        let client = client(Retention::default());
        for session in ["s1", "s2"] {
            start(&client, session).await;
            client.settled("worker", session).await;
        }
        let path =
            |route: &str, session: &str| format!("/agents/worker/{route}?sessionId={session}");
        let session = SessionId::parse("s1").unwrap();
        let damage = [
            ("UPDATE ra_usage SET body = 'secret'", "usage", "ra_usage"),
            (
                "UPDATE ra_checkpoints SET state = 'secret'",
                "snapshot",
                "ra_checkpoints",
            ),
            (
                "UPDATE ra_session SET status = 'secret'",
                "status",
                "ra_session",
            ),
        ];
        for (change, route, table) in damage {
            client.objects.evict(&session).unwrap();
            let (status, _) = client.get(&path(route, "s1")).await;
            assert_eq!(status, 200, "{route} before {change}");
            let database = client.objects.database(&session).unwrap();
            database.query(change, &[]).unwrap();
            client.objects.evict(&session).unwrap();
            let (status, body) = client.get(&path(route, "s1")).await;
            assert_eq!(status, 500, "{route}: {body}");
            assert_eq!(body["code"], "invalid_stored_state");
            let told = body.to_string();
            assert!(told.contains(table) && !told.contains("secret"), "{told}");
            if table == "ra_usage" {
                for other in ["status", "snapshot"] {
                    let (status, body) = client.get(&path(other, "s1")).await;
                    assert_eq!(status, 200, "{other}: {body}");
                }
                assert!(matches!(
                    read(&client, "").await.last(),
                    Some(Frame::End(_))
                ));
            }
            for route in ["status", "snapshot", "usage"] {
                let (status, _) = client.get(&path(route, "s2")).await;
                assert_eq!(status, 200, "the other session's {route}");
            }
            // Mended, so that the next row is the only malformed one.
            if table == "ra_checkpoints" {
                database
                    .query("UPDATE ra_checkpoints SET state = '{}'", &[])
                    .unwrap();
            }
        }
    });
}

#[test]
fn a_log_with_a_row_missing_is_told_at_every_cursor_and_never_read_over() {
    in_world(|| async {
        let client = client(Retention::default());
        start(&client, "s1").await;
        client.settled("worker", "s1").await;
        let all = sequences(&read(&client, "").await);
        let session = SessionId::parse("s1").unwrap();
        let database = client.objects.database(&session).unwrap();
        let row = "SELECT first_sequence, last_sequence FROM ra_tail_0
                   WHERE first_sequence > 20 ORDER BY first_sequence LIMIT 1";
        let found = database.query(row, &[]).unwrap();
        let [SqlValue::Integer(first), SqlValue::Integer(last)] = found[0][..] else {
            panic!("{found:?}");
        };
        let (first, last) = (first.unsigned_abs(), last.unsigned_abs());
        let delete = format!("DELETE FROM ra_tail_0 WHERE first_sequence = {first}");
        database.query(&delete, &[]).unwrap();
        client.objects.evict(&session).unwrap();
        for from in 0..last {
            let frames = read(&client, &format!("&fromSequence={from}")).await;
            let Some(Frame::Error(error)) = frames.last() else {
                panic!("from {from}: {frames:?}");
            };
            assert_eq!(error.code, "invalid_stored_state", "from {from}");
            assert!(sequences(&frames).iter().all(|sequence| *sequence < first));
        }
        let rest = sequences(&read(&client, &format!("&fromSequence={last}")).await);
        assert_eq!(rest.last(), all.last());
        assert_eq!(rest.first(), Some(&(last + 1)));
    });
}
