#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

use std::rc::Rc;

use http::Method;
use serde_json::{Value, json};

use super::*;
use crate::http::{Response, answer};
use crate::mount::{Admission, Asked, Auth, ChunkDetail, Forward, Mount, Projection};
use crate::protocol::frame::EndFrame;
use crate::protocol::ids::{AgentType, SessionId};
use crate::protocol::message::SessionStatus;
use crate::protocol::route::Action;
use crate::protocol::ui::Discard;

const CANARY: &str = "canary-7f3a";

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(future)
}

fn raw() -> Mount {
    Mount::new("/agents").allow_unauthenticated().with_ui()
}

fn projected() -> Mount {
    raw()
        .with_projection(Projection {
            name: "nothing@1".into(),
            map: Rc::new(|_, _| json!({"shown": true})),
        })
        .with_usage_projection(Rc::new(|_| json!({"billingUnits": 7})))
}

fn admit(mount: &Mount, query: &str, headers: &HeaderMap) -> Result<Forward, Response> {
    let uri = format!("/agents/planner/ui{query}").parse().unwrap();
    let admitted = mount.admit(&Method::GET, &uri, headers);
    admitted.and_then(|admission: Admission| admission.forward(Bytes::new()))
}

fn chunk(sequence: u64, kind: &str, fields: &Value) -> String {
    let mut chunk = json!({"type": kind, "agentId": "s", "agentType": "planner", "step": 1});
    for (name, value) in fields.as_object().unwrap() {
        chunk[name] = value.clone();
    }
    let mut out = String::new();
    sse::encode_chunk(&mut out, sequence, &chunk.to_string());
    out
}

fn end() -> String {
    let frame = Frame::End(EndFrame {
        run_id: Some("r".into()),
        status: SessionStatus::Completed,
        output: None,
        state: Some(json!({"secret": CANARY})),
        usage: Some(json!({"secret": CANARY})),
    });
    sse::encode_frame(&frame).unwrap()
}

/// The answer of `mount` to an object's stream.
fn passed(mount: &Mount, parts: Vec<Result<Bytes, BodyError>>) -> Response {
    let body = Body::Stream(Box::pin(stream::iter(parts)));
    let mut response = answer(200, sse::CONTENT_TYPE, body);
    let id = HeaderValue::from_static("st-1");
    response.headers_mut().insert(header::STREAM, id);
    let asked = Asked {
        session_id: SessionId::parse("s").unwrap(),
        agent_type: AgentType::parse("planner").unwrap(),
        action: Action::Ui,
        discard: Discard::Close,
    };
    mount.answer(&asked, response)
}

/// What a reader gets, part by part; what the object sent comes in pieces of `size`.
fn read_in(mount: &Mount, text: &str, size: usize) -> Vec<String> {
    let pieces = text.as_bytes().chunks(size);
    let pieces = pieces.map(|p| Ok(Bytes::copy_from_slice(p))).collect();
    let Body::Stream(body) = passed(mount, pieces).into_body() else {
        panic!("it streams")
    };
    let parts = body.map(|part| String::from_utf8(part.unwrap().to_vec()).unwrap());
    block_on(parts.collect())
}

fn read(mount: &Mount, text: &str) -> String {
    read_in(mount, text, usize::MAX).concat()
}

/// A run that says all that may stand in a log, the state and what is not known beside it.
fn run() -> String {
    let secret = json!([{"op": "add", "path": "/a", "value": CANARY}]);
    let forwarded = json!({
        "agentId": "child", "patches": secret,
        "remoteSource": {"childSessionId": "child", "childSequence": 1, "streamId": "st-c"},
    });
    let call = json!({"toolCallId": "c", "toolName": "note", "arguments": {"n": "argument"}});
    let ended = json!({"toolCallId": "c", "toolName": "note", "result": "result", "success": true});
    [
        chunk(1, "run_started", &json!({"runId": "r"})),
        chunk(2, "text_delta", &json!({"delta": "Hello"})),
        chunk(3, "tool_start", &call),
        chunk(
            4,
            "state_patch",
            &json!({"patches": secret, "patchOrdinal": 1}),
        ),
        chunk(5, "state_patch", &forwarded),
        chunk(6, "novelty", &json!({"secret": CANARY})),
        chunk(7, "tool_end", &ended),
        chunk(
            8,
            "step_committed",
            &json!({"stepCount": 1, "patches": secret}),
        ),
        end(),
    ]
    .concat()
}

#[test]
fn the_object_is_asked_for_its_stream_with_the_same_cursor() {
    let mut headers = HeaderMap::new();
    headers.insert("last-event-id", HeaderValue::from_static("7"));
    let Ok(forward) = admit(&raw(), "?sessionId=s&streamId=st&discard=reset", &headers) else {
        panic!("it is admitted")
    };
    let address = "http://object/planner/sse?sessionId=s&streamId=st&discard=reset";
    assert_eq!(forward.request.uri(), address);
    assert_eq!(forward.request.headers()["last-event-id"], "7");
    assert_eq!(forward.asked.action, Action::Ui);
    assert_eq!(forward.asked.discard, Discard::Reset);
}

#[test]
fn a_mount_without_it_says_so_after_every_check() {
    let code = |mount: &Mount, query: &str| {
        let Err(response) = admit(mount, query, &HeaderMap::new()) else {
            panic!("it is refused")
        };
        let status = response.status().as_u16();
        let body = block_on(response.into_body().collect(4096)).unwrap();
        let envelope: Value = serde_json::from_slice(&body).unwrap();
        (status, envelope["code"].as_str().unwrap().to_owned())
    };
    let off = || Mount::new("/agents").with_auth(Auth::Bearer(None));
    let open = || Mount::new("/agents").allow_unauthenticated();
    assert_eq!(code(&off(), "?sessionId=s"), (401, "UNAUTHORIZED".into()));
    let types = [AgentType::parse("writer").unwrap()];
    let other = open().with_agents(types);
    assert_eq!(code(&other, "?sessionId=s"), (404, "NOT_FOUND".into()));
    assert_eq!(code(&open(), ""), (400, "VALIDATION_ERROR".into()));
    let unavailable = (404, "FEATURE_UNAVAILABLE".to_owned());
    assert_eq!(code(&open(), "?sessionId=s"), unavailable);
}

#[test]
fn the_parts_stand_as_the_package_reads_them() {
    let text = [
        ": open\n\n".to_owned(),
        chunk(1, "run_started", &json!({"runId": "r"})),
        chunk(2, "text_delta", &json!({"delta": "a\nb"})),
        "event: caught-up\ndata: {\"sequence\":2}\n\n".to_owned(),
        "event: end\ndata: {\"status\":\"completed\"}\n\n".to_owned(),
    ]
    .concat();
    let metadata = "{\"sessionId\":\"s\",\"streamId\":\"st-1\",\"runId\":\"r\"}";
    let expected = [
        ": ping\n\n".to_owned(),
        format!(
            "id: 1\ndata: {{\"type\":\"start\",\"messageId\":\"r\",\"messageMetadata\":{metadata}}}\n\n"
        ),
        "data: {\"type\":\"start-step\"}\n\n".to_owned(),
        "data: {\"type\":\"text-start\",\"id\":\"text-2\"}\n\n".to_owned(),
        "id: 2\ndata: {\"type\":\"text-delta\",\"id\":\"text-2\",\"delta\":\"a\\nb\"}\n\n".to_owned(),
        "id: 2\ndata: {\"type\":\"data-cursor\",\"data\":{\"sequence\":2,\"streamId\":\"st-1\"},\"transient\":true}\n\n".to_owned(),
        "data: {\"type\":\"text-end\",\"id\":\"text-2\"}\n\n".to_owned(),
        "data: {\"type\":\"finish-step\"}\n\n".to_owned(),
        "data: {\"type\":\"finish\",\"finishReason\":\"stop\",\"messageMetadata\":{\"status\":\"completed\"}}\n\n".to_owned(),
        "data: [DONE]\n\n".to_owned(),
    ]
    .concat();
    assert_eq!(read(&raw(), &text), expected);
    let response = passed(&raw(), vec![Ok(text.clone().into())]);
    let sent = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
    assert_eq!(sent("x-vercel-ai-ui-message-stream"), "v1");
    assert_eq!(sent("content-type"), "text/event-stream");
    assert_eq!(sent("x-remote-agents-stream"), "st-1");
    // However the object's bytes are cut, and whatever follows its end.
    for size in 1..60 {
        let got = read_in(&raw(), &format!("{text}{text}"), size).concat();
        let without = |text: &str| text.replace(": ping\n\n", "");
        assert_eq!(without(&got), without(&expected), "pieces of {size}");
    }
}

#[test]
fn parts_leave_as_their_chunks_come_and_a_silence_is_never_of_our_making() {
    let quiet = chunk(1, "run_paused", &json!({"runId": "r"}));
    let pieces = [
        chunk(1, "run_started", &json!({"runId": "r"})),
        chunk(2, "tool_arg_stream_end", &json!({"toolCallId": "c"})),
        quiet,
        ": ping\n\n".to_owned(),
        chunk(3, "text_delta", &json!({"delta": "x"})),
    ];
    let sent = pieces.iter().map(|p| Ok(Bytes::from(p.clone()))).collect();
    let Body::Stream(body) = passed(&raw(), sent).into_body() else {
        panic!("it streams")
    };
    let got: Vec<String> = block_on(
        body.map(|part| String::from_utf8(part.unwrap().to_vec()).unwrap())
            .collect(),
    );
    assert!(got[0].contains("\"start\""));
    assert_eq!(got[1..4], [": ping\n\n", ": ping\n\n", ": ping\n\n"]);
    assert!(got[4].contains("text-delta"));
    assert_eq!(got.len(), 6);
}

#[test]
fn a_projected_mount_shows_no_state_but_its_projection() {
    let seen = read(&raw(), &run());
    assert!(
        seen.matches(CANARY).count() >= 5,
        "it would be seen: {seen}"
    );
    assert_eq!(seen.matches("data-state-patch").count(), 2);
    for size in [1, 13, usize::MAX] {
        let shown = read_in(&projected(), &run(), size).concat();
        assert!(!shown.contains(CANARY), "{shown}");
        assert!(!shown.contains("data-state-patch"), "{shown}");
        for part in ["Hello", "argument", "result", "\"data-step-committed\""] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        assert!(shown.contains("\"state\":{\"shown\":true}"), "{shown}");
        assert!(shown.contains("\"usage\":{\"billingUnits\":7}"), "{shown}");
        assert!(shown.ends_with(DONE));
    }
}

#[test]
fn a_mount_of_lifecycles_shows_neither_arguments_nor_results() {
    let mount = projected().with_chunks(ChunkDetail::Lifecycle);
    let shown = read(&mount, &run());
    for held in [CANARY, "argument", "\"output\":\"result\""] {
        assert!(!shown.contains(held), "{held} in {shown}");
    }
    for part in [
        "Hello",
        "\"input\":null",
        "\"output\":null",
        "\"toolName\":\"note\"",
    ] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
}

#[test]
fn a_stream_that_breaks_off_says_so_and_is_not_done() {
    let begun = chunk(1, "text_delta", &json!({"delta": "x"}));
    let cut = format!("{begun}event: chunk\nid: 2\ndata: {{\"seq");
    let told = read(&raw(), &cut);
    let code = "{\"code\":\"transport_error\",\"error\":\"The stream broke off; attach again.\",\"recoverable\":true}";
    assert!(told.contains(code), "{told}");
    assert!(told.contains("\"errorText\":\"The stream broke off; attach again.\""));
    assert!(!told.contains(DONE) && !told.contains("text-end"), "{told}");
    // So is one whose object says so itself.
    let error =
        "event: error\ndata: {\"code\":\"INTERNAL\",\"error\":\"Later.\",\"recoverable\":true}\n\n";
    let told = read(&raw(), &format!("{begun}{error}"));
    assert!(
        told.contains("\"errorText\":\"Later.\"") && !told.contains(DONE),
        "{told}"
    );
    // A body that breaks off breaks off for the reader too, behind that.
    let broken = BodyError("reset".into());
    let parts = vec![Ok(Bytes::from(begun)), Err(broken.clone())];
    let Body::Stream(body) = passed(&raw(), parts).into_body() else {
        panic!("it streams")
    };
    let got: Vec<_> = block_on(body.collect());
    assert_eq!(got.len(), 3);
    assert!(String::from_utf8_lossy(got[1].as_ref().unwrap()).contains("errorText"));
    assert_eq!(got[2], Err(broken));
}

#[test]
fn what_cannot_be_read_ends_with_a_sentence_and_is_not_quoted() {
    for bad in [
        format!("event: chunk\nid: 1\ndata: {CANARY}\n\n"),
        format!("event: end\ndata: \"{CANARY}\"\n\n"),
        format!(
            "event: chunk\nid: 2\ndata: {{\"sequence\":3,\"chunk\":{{\"x\":\"{CANARY}\"}}}}\n\n"
        ),
        format!(
            "event: error\ndata: {{\"code\":\"x\",\"error\":\"Failed.\",\"detail\":\"{CANARY}\",\"recoverable\":false}}\n\n"
        ),
    ] {
        for mount in [raw(), projected()] {
            let told = read(&mount, &format!("{bad}{}", run()));
            assert!(told.contains("\"errorText\":"), "{told}");
            assert!(!told.contains(CANARY) && told.ends_with(DONE), "{told}");
        }
    }
}

#[test]
fn a_refusal_passes_as_it_is() {
    let body = Body::Full(Bytes::from_static(
        b"{\"code\":\"NOT_FOUND\",\"error\":\"Not found.\"}",
    ));
    let asked = Asked {
        session_id: SessionId::parse("s").unwrap(),
        agent_type: AgentType::parse("planner").unwrap(),
        action: Action::Ui,
        discard: Discard::Close,
    };
    let response = raw().answer(&asked, answer(404, "application/json", body));
    assert_eq!(response.status(), 404);
    assert!(!response.headers().contains_key(header::UI_STREAM));
}
