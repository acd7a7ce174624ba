//! Every route over the real services: the table that all mounts keep to, and what a session's
//! status makes of each action.

use std::time::Duration;

use remote_agents::http::Request;
use serde_json::{Value, json};

use crate::library::{few, topic};
use crate::world::{KEY, Side, World, in_world, pass, whole};

fn side(name: &str) -> Side {
    match name {
        "consumer" => Side::Consumer,
        "internal" => Side::Internal,
        "public" => Side::Public,
        other => panic!("{other}"),
    }
}

fn bytes(body: &Value) -> Vec<u8> {
    if let Some(value) = body.get("json") {
        return value.to_string().into_bytes();
    }
    if let Some(text) = body.get("text") {
        return text.as_str().unwrap().into();
    }
    if let Some(hex) = body.get("hex") {
        let digits = hex.as_str().unwrap().as_bytes().chunks(2);
        return digits
            .map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap())
            .collect();
    }
    let Some(repeat) = body.get("repeat") else {
        return Vec::new();
    };
    let part = |name: &str| repeat[name].as_str().unwrap().to_owned();
    let count = usize::try_from(repeat["count"].as_u64().unwrap()).unwrap();
    (part("before") + &part("text").repeat(count) + &part("after")).into_bytes()
}

fn request(row: &Value) -> Request {
    let text = |name: &str| row[name].as_str().unwrap();
    let mut builder = http::Request::builder()
        .method(text("method"))
        .uri(text("path"));
    builder = match text("auth") {
        "none" => builder,
        "wrong" => builder.header("authorization", "Bearer not-the-key"),
        "empty" => builder.header("authorization", "Bearer "),
        "right" => builder.header("authorization", format!("Bearer {KEY}")),
        other => panic!("{other}"),
    };
    for (name, value) in row["headers"].as_object().into_iter().flatten() {
        builder = builder.header(name, value.as_str().unwrap());
    }
    builder.body(bytes(&row["body"]).into()).unwrap()
}

#[test]
fn the_table_holds_over_both_services() {
    in_world(|world| async move {
        let table = include_str!("../../../tests/vectors/routes.json");
        let table: Value = serde_json::from_str(table).unwrap();
        let rows = table["rows"].as_array().unwrap();
        assert!(rows.len() > 1000);
        for (number, row) in rows.iter().enumerate() {
            let side = side(row["mount"].as_str().unwrap());
            let expect = &row["expect"];
            let name = format!("row {number}: {row:.300}");
            let response = world.request(side, request(row)).await;
            let header = |name: &str| {
                let value = response.headers().get(name);
                value.map_or(Value::Null, |value| json!(value.to_str().unwrap()))
            };
            assert_eq!(
                json!(response.status().as_u16()),
                expect["status"],
                "{name}"
            );
            assert_eq!(header("allow"), expect["allow"], "{name}");
            assert_eq!(header("x-remote-agents-version"), "1", "{name}");
            let kind = if side == Side::Public {
                "projected"
            } else {
                "raw"
            };
            assert_eq!(header("x-remote-agents-mount"), kind, "{name}");
            let (_, body) = whole(response).await;
            if row["method"] == "HEAD" {
                continue;
            }
            assert_eq!(body["agents"], expect["agents"], "{name}");
            if expect["agents"].is_null() {
                assert_eq!(body["field"], expect["field"], "{name}");
                assert!(
                    body["error"]
                        .as_str()
                        .is_some_and(|error| !error.is_empty()),
                    "{name}"
                );
                if !expect["code"].is_null() {
                    assert_eq!(body["code"], expect["code"], "{name}");
                }
            }
        }
        assert_eq!(world.sessions(), [], "a refusal writes nothing");
    });
}

#[test]
fn the_raw_mount_is_for_the_binding_that_says_so() {
    use producer_worker::mounts::is_internal;
    for path in [
        "/internal/agents",
        "/internal/agents/",
        "/internal/agents/planner/start",
    ] {
        assert!(is_internal(path, Some("internal")));
        for mount in [None, Some(""), Some("public"), Some("Internal")] {
            assert!(!is_internal(path, mount), "{path} {mount:?}");
        }
    }
    for path in [
        "/",
        "/agents",
        "/internal",
        "/internal/agentsx",
        "/x/internal/agents",
    ] {
        assert!(!is_internal(path, Some("internal")), "{path}");
    }
    // Without it, the public mount answers: the 404 of an unknown path, whatever the key.
    in_world(|world| async move {
        for path in [
            "/internal/agents",
            "/internal/agents/planner/status?sessionId=x",
            "/nothing",
        ] {
            let (status, body) = world.get(Side::Public, path).await;
            assert_eq!(
                (status, &body["code"]),
                (404, &json!("NOT_FOUND")),
                "{path}"
            );
        }
    });
}

/// Where a session can be reached, and how it is begun there.
const PLACES: [(Side, &str, &str); 4] = [
    (Side::Consumer, "/agents", "writer"),
    (Side::Internal, "/internal/agents", "planner"),
    (Side::Internal, "/internal/agents", "thread-researcher"),
    (Side::Public, "/agents", "planner"),
];

/// Start, resume, resume with a message, interrupt, abort: the status of the answer, and the code
/// of a refusal or the status after an accepted or unaccepted stop.
const TABLE: [(&str, [(u16, &str); 5]); 4] = [
    (
        "running",
        [
            (409, "ALREADY_RUNNING"),
            (409, "ALREADY_RUNNING"),
            (409, "ALREADY_RUNNING"),
            (200, "accepted"),
            (200, "accepted"),
        ],
    ),
    (
        "interrupted",
        [
            (409, "ALREADY_RUNNING"),
            (200, "run"),
            (200, "run"),
            (200, "not accepted"),
            (200, "accepted"),
        ],
    ),
    (
        "completed",
        [
            (409, "ALREADY_COMPLETED"),
            (409, "ALREADY_COMPLETED"),
            (200, "run"),
            (409, "ALREADY_COMPLETED"),
            (200, "not accepted"),
        ],
    ),
    (
        "aborted",
        [
            (409, "ALREADY_COMPLETED"),
            (409, "ALREADY_COMPLETED"),
            (409, "ALREADY_COMPLETED"),
            (409, "ALREADY_COMPLETED"),
            (200, "not accepted"),
        ],
    ),
];

/// A session in this status, and the id of its run.
async fn session_in(world: &World, place: (Side, &str, &str), status: &str) -> String {
    let (side, base, agent_type) = place;
    let (_, documents) = few();
    let body = json!({ "sessionId": "s", "message": topic(), "state": { "documents": documents } });
    let (code, answer) = world
        .post(side, &format!("{base}/{agent_type}/start"), body)
        .await;
    assert_eq!(code, 200, "{answer}");
    let stop = match status {
        "interrupted" => "interrupt",
        "aborted" => "abort",
        _ => "",
    };
    if !stop.is_empty() {
        pass(Duration::from_millis(5)).await;
        let path = format!("{base}/{agent_type}/{stop}");
        let (code, answer) = world.post(side, &path, json!({ "sessionId": "s" })).await;
        assert_eq!((code, &answer["accepted"]), (200, &json!(true)));
    }
    if status != "running" {
        world.follow(side, agent_type, "s").await;
    }
    answer["runId"].as_str().unwrap().to_owned()
}

#[test]
fn a_sessions_status_decides_what_each_action_does() {
    for place in PLACES {
        for (status, row) in TABLE {
            for (action, (code, outcome)) in row.into_iter().enumerate() {
                in_world(move |world| async move {
                    let run = session_in(&world, place, status).await;
                    let (side, base, agent_type) = place;
                    let (name, body) = match action {
                        0 => ("start", json!({ "sessionId": "s", "message": "again" })),
                        1 => ("resume", json!({ "sessionId": "s" })),
                        2 => (
                            "resume",
                            json!({ "sessionId": "s", "message": "more knots" }),
                        ),
                        3 => ("interrupt", json!({ "sessionId": "s" })),
                        _ => ("abort", json!({ "sessionId": "s" })),
                    };
                    let case = format!("{place:?} {status} {name} {body}");
                    let path = format!("{base}/{agent_type}/{name}");
                    let (answered, answer) = world.post(side, &path, body).await;
                    assert_eq!(answered, code, "{case}: {answer}");
                    match outcome {
                        "run" => assert_ne!(answer["runId"], run.as_str(), "{case}"),
                        "accepted" => assert_eq!(answer["accepted"], true, "{case}"),
                        "not accepted" => assert_eq!(answer["accepted"], false, "{case}"),
                        refusal => {
                            assert_eq!(answer["code"], refusal, "{case}");
                            assert_eq!(answer["runId"], run.as_str(), "{case}");
                        }
                    }
                    let path = format!("{base}/{agent_type}/status?sessionId=s");
                    let (read, now) = world.get(side, &path).await;
                    assert_eq!(read, 200, "{case}");
                    if outcome == "run" {
                        assert_eq!(now["status"], "running", "{case}");
                    }
                    // Another type is no session here.
                    let other = if agent_type == "planner" {
                        "thread-researcher"
                    } else {
                        "planner"
                    };
                    let path = format!("{base}/{other}/status?sessionId=s");
                    assert_eq!(world.get(side, &path).await.0, 404, "{case}");
                });
            }
        }
    }
}
