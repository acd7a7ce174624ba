//! What must stay where it is: state behind a projection, credentials in the request that has them.

use std::collections::BTreeSet;
use std::time::Duration;

use remote_agents::protocol::ids::SessionId;
use remote_agents::store::{SqlValue, Store as _};
use serde_json::{Value, json};

use crate::library::{few, topic};
use crate::world::{KEY, Side, WRITER, World, in_world, pass};

const CANARIES: [&str; 4] = [
    "canary-title",
    "canary-note",
    "canary-field",
    "canary-quote",
];

/// Every answer of the projected mount, as text.
struct Seen<'a> {
    world: &'a World,
    answers: Vec<String>,
}

impl Seen<'_> {
    async fn ask(&mut self, method: &str, path: &str, body: Value) -> u16 {
        let body = if method == "GET" {
            String::new()
        } else {
            body.to_string()
        };
        let response = self.world.send(Side::Public, method, path, &[], body).await;
        let status = response.status().as_u16();
        let headers = format!("{:?}", response.headers());
        let body = response.into_body().collect(64 << 20).await.unwrap();
        self.answers.push(format!(
            "{headers} {}",
            String::from_utf8(body.to_vec()).unwrap()
        ));
        status
    }

    async fn every_read(&mut self, session: &str) {
        for action in ["status", "snapshot", "usage", "tree"] {
            let path = format!("/agents/planner/{action}?sessionId={session}");
            assert_eq!(self.ask("GET", &path, Value::Null).await, 200);
        }
        for path in [
            format!("/agents/planner/messages?sessionId={session}"),
            format!("/agents/thread-researcher/snapshot?sessionId={session}"),
            format!("/agents/planner/descendant?sessionId={session}"),
        ] {
            assert_eq!(self.ask("GET", &path, Value::Null).await, 404);
        }
    }

    async fn stream(&mut self, session: &str, from: u64) {
        let path = format!("/agents/planner/sse?sessionId={session}&fromSequence={from}");
        assert_eq!(self.ask("GET", &path, Value::Null).await, 200);
    }
}

#[test]
fn no_route_of_the_projected_mount_shows_what_is_in_the_state_alone() {
    in_world(|world| async move {
        let mut documents = crate::library::documents(7, 9);
        for document in &mut documents {
            document["title"] = json!("canary-title");
        }
        let state = json!({
            "documents": documents,
            "unknown": { "deep": ["canary-field"] },
            "findings": [{ "threadId": "t1", "documentId": "x", "quote": "canary-quote", "note": "canary-note" }],
        });
        let body =
            |session: &str| json!({ "sessionId": session, "message": topic(), "state": state });
        let mut seen = Seen {
            world: &world,
            answers: Vec::new(),
        };

        // One that runs through, looked at all the while, and takes a second message.
        assert_eq!(
            seen.ask("POST", "/agents/planner/start", body("p1")).await,
            200
        );
        while world
            .get(Side::Public, "/agents/planner/status?sessionId=p1")
            .await
            .1["status"]
            == "running"
        {
            seen.every_read("p1").await;
            pass(Duration::from_millis(40)).await;
        }
        let looks = seen.answers.len();
        assert!(looks > 20, "{looks}");
        seen.stream("p1", 0).await;
        seen.stream("p1", 20).await;
        let more = json!({ "sessionId": "p1", "message": "rope knots and 水路" });
        assert_eq!(seen.ask("POST", "/agents/planner/resume", more).await, 200);
        seen.stream("p1", 0).await;
        seen.every_read("p1").await;

        // One that is interrupted, resumed and aborted.
        assert_eq!(
            seen.ask("POST", "/agents/planner/start", body("p2")).await,
            200
        );
        pass(Duration::from_millis(90)).await;
        let stop = json!({ "sessionId": "p2", "reason": "enough" });
        assert_eq!(
            seen.ask("POST", "/agents/planner/interrupt", stop.clone())
                .await,
            200
        );
        seen.stream("p2", 0).await;
        seen.every_read("p2").await;
        assert_eq!(
            seen.ask(
                "POST",
                "/agents/planner/resume",
                json!({ "sessionId": "p2" })
            )
            .await,
            200
        );
        pass(Duration::from_millis(50)).await;
        assert_eq!(seen.ask("POST", "/agents/planner/abort", stop).await, 200);
        seen.stream("p2", 0).await;
        seen.every_read("p2").await;
        assert_eq!(seen.ask("GET", "/agents", Value::Null).await, 200);
        for (method, path) in [
            ("POST", "/agents/planner/start"),
            ("POST", "/agents/planner/resume"),
        ] {
            assert_eq!(seen.ask(method, path, body("p2")).await / 100, 4);
        }

        for answer in &seen.answers {
            for canary in CANARIES {
                assert!(!answer.contains(canary), "{canary} in {answer:.2000}");
            }
            assert!(!answer.contains("state_patch"));
        }
        assert!(
            seen.answers
                .iter()
                .any(|answer| answer.contains("\"findings\":[{")),
            "it says something"
        );
        // They are there to be seen.
        let path = "/internal/agents/planner/snapshot?sessionId=p1";
        let raw = world.get(Side::Internal, path).await.1.to_string();
        for canary in CANARIES {
            assert!(raw.contains(canary), "{canary}");
        }
    });
}

const SECRETS: [(&str, &str); 6] = [
    ("cookie", "session=secret-cookie"),
    ("x-api-key", "secret-api-key"),
    ("cf-access-jwt-assertion", "secret-jwt"),
    ("x-forwarded-authorization", "Basic secret-basic"),
    ("x-remote-agents-internal-session", "secret-internal"),
    ("referer", "https://user:secret-referer@x/"),
];

#[test]
fn credentials_stay_in_the_request_that_has_them() {
    in_world(|world| async move {
        let (topic, documents) = few();
        let body =
            json!({ "sessionId": WRITER, "message": topic, "state": { "documents": documents } });
        let send = async |method: &str, path: &str, body: Value| {
            let body = if method == "GET" {
                String::new()
            } else {
                body.to_string()
            };
            let response = world
                .send(Side::Consumer, method, path, &SECRETS, body)
                .await;
            let status = response.status().as_u16();
            (
                status,
                response.into_body().collect(64 << 20).await.unwrap(),
            )
        };
        let named = json!({ "sessionId": WRITER });
        assert_eq!(
            send("POST", "/agents/writer/start", body.clone()).await.0,
            200
        );
        pass(Duration::from_millis(120)).await;
        assert_eq!(
            send("POST", "/agents/writer/interrupt", named.clone())
                .await
                .0,
            200
        );
        let sse = format!("/agents/writer/sse?sessionId={WRITER}&fromSequence=0");
        assert_eq!(send("GET", &sse, Value::Null).await.0, 200);
        assert_eq!(send("POST", "/agents/writer/resume", named).await.0, 200);
        assert_eq!(send("GET", &sse, Value::Null).await.0, 200);
        assert_eq!(send("POST", "/agents/writer/start", body).await.0, 409);
        for action in ["status", "snapshot", "usage"] {
            let path = format!("/agents/writer/{action}?sessionId={WRITER}");
            assert_eq!(send("GET", &path, Value::Null).await.0, 200);
        }
        let mut read = 0;
        for (session, agent_type) in world.sessions().into_iter().skip(1) {
            for reading in ["snapshot", "usage"] {
                let path =
                    format!("/api/child-{reading}?sessionId={session}&agentType={agent_type}");
                read += u32::from(send("GET", &path, Value::Null).await.0 == 200);
            }
        }
        assert!(read >= 6, "{read}");

        let secrets: Vec<&str> = ["secret-", KEY, "Bearer"].to_vec();
        let sent = world.sent.borrow();
        let mut names = BTreeSet::new();
        for request in sent.iter() {
            for secret in &secrets {
                assert!(
                    !request.text.contains(secret),
                    "{secret} in {}",
                    request.text
                );
            }
            names.extend(request.header_names.iter().cloned());
        }
        assert!(sent.len() > 10, "{} requests", sent.len());
        let expected = [
            "accept",
            "content-type",
            "idempotency-key",
            "x-remote-agents-version",
        ];
        assert_eq!(
            names.iter().map(String::as_str).collect::<Vec<_>>(),
            expected
        );

        let lines = world.lines.borrow();
        assert!(lines.len() > 10);
        for line in lines.iter() {
            assert!(
                !secrets.iter().any(|secret| line.contains(secret)),
                "{line}"
            );
        }
        let mut cells = 0;
        for (session, _) in world.sessions() {
            cells += dump(&world, &session, &secrets);
        }
        assert!(cells > 1000, "{cells}");
    });
}

/// Looks for texts in every cell of every table of an object; how many cells there are.
fn dump(world: &World, session: &SessionId, secrets: &[&str]) -> usize {
    let store = world.store(session);
    let query = |sql: &str| store.database().query(sql, &[]).unwrap();
    let text = |value: &SqlValue| match value {
        SqlValue::Text(text) => text.clone(),
        other => panic!("{other:?}"),
    };
    let hex = |text: &str| {
        text.bytes()
            .map(|byte| format!("{byte:02X}"))
            .collect::<String>()
    };
    let mut cells = 0;
    for table in query("SELECT name FROM sqlite_master WHERE type = 'table'") {
        let table = text(&table[0]);
        for column in query(&format!("SELECT name FROM pragma_table_info('{table}')")) {
            let column = text(&column[0]);
            for row in query(&format!("SELECT hex(\"{column}\") FROM \"{table}\"")) {
                let cell = text(&row[0]);
                for secret in secrets {
                    assert!(!cell.contains(&hex(secret)), "{secret} in {table}.{column}");
                }
                cells += 1;
            }
        }
    }
    cells
}
