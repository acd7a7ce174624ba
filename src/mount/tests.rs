#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::cell::RefCell;

use futures::StreamExt as _;
use futures::future::LocalBoxFuture;
use http::{HeaderName, HeaderValue, StatusCode};

use super::*;
use crate::http::{BodyError, answer};
use crate::protocol::frame::{EndFrame, ErrorFrame, Frame};
use crate::protocol::message::{ErrorEnvelope, SessionStatus};
use crate::protocol::sse::{Decoded, Decoder, encode_chunk, encode_comment, encode_frame};
use crate::transport::FetchError;

mod live;

const CANARY: &str = "canary-7f3a";

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(future)
}

fn types(names: &[&str]) -> Vec<AgentType> {
    names.iter().map(|n| AgentType::parse(n).unwrap()).collect()
}

fn planner() -> AgentType {
    AgentType::parse("planner").unwrap()
}

/// Shows the number of keys and the agent type.
fn projection() -> Projection {
    Projection {
        name: "count@1".into(),
        map: Rc::new(|agent_type, state| {
            let keys = state.as_object().map_or(0, serde_json::Map::len);
            json!({"agentType": agent_type, "keys": keys})
        }),
    }
}

fn billing() -> UsageProjection {
    Rc::new(|rollup| json!({"billingUnits": rollup["tokens"]["total"]}))
}

fn open() -> Mount {
    Mount::new("/agents").allow_unauthenticated()
}

fn public() -> Mount {
    Mount::new("/agents")
        .with_agents(types(&["planner"]))
        .with_auth(Auth::Bearer(Some("key".into())))
        .with_projection(projection())
        .with_usage_projection(billing())
}

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(
            HeaderName::from_bytes(name.as_bytes()).unwrap(),
            HeaderValue::from_bytes(value.as_bytes()).unwrap(),
        );
    }
    map
}

fn admit(
    mount: &Mount,
    method: &str,
    path: &str,
    pairs: &[(&str, &str)],
) -> Result<Admission, Response> {
    mount.admit(
        &method.parse().unwrap(),
        &path.parse().unwrap(),
        &headers(pairs),
    )
}

fn forward(
    mount: &Mount,
    method: &str,
    path: &str,
    pairs: &[(&str, &str)],
    body: &str,
) -> Result<Forward, Response> {
    admit(mount, method, path, pairs)?.forward(Bytes::copy_from_slice(body.as_bytes()))
}

fn refused<T>(result: Result<T, Response>) -> Response {
    match result {
        Ok(_) => panic!("it was not refused"),
        Err(response) => response,
    }
}

fn body_of(response: Response) -> Vec<u8> {
    block_on(response.into_body().collect(usize::MAX))
        .unwrap()
        .to_vec()
}

fn json_of(response: Response) -> Value {
    serde_json::from_slice(&body_of(response)).unwrap()
}

fn envelope_of(response: Response) -> ErrorEnvelope {
    serde_json::from_slice(&body_of(response)).unwrap()
}

fn header<'a>(response: &'a Response, name: &str) -> Option<&'a str> {
    response.headers().get(name).map(|v| v.to_str().unwrap())
}

fn assert_refused<T>(result: Result<T, Response>, status: u16, code: &str) {
    let response = refused(result);
    assert_eq!(response.status().as_u16(), status);
    assert_eq!(header(&response, "x-remote-agents-version"), Some("1"));
    assert!(header(&response, "x-remote-agents-mount").is_some());
    assert_eq!(envelope_of(response).code, code);
}

// Admission.

#[test]
fn the_first_check_that_fails_is_the_one_that_answers() {
    let mount = public().with_body_limit(40);
    let right = ("authorization", "Bearer key");
    let later = ("x-remote-agents-version", "2");
    // A start may have to carry what a dispatch adds, so its length alone says less.
    let long = ("content-length", "16425");
    let no = |method, path, pairs: &[_], status, code| {
        assert_refused(admit(&mount, method, path, pairs), status, code);
    };
    no(
        "PUT",
        "/agents/planner/unknown",
        &[later, long],
        404,
        "NOT_FOUND",
    );
    no(
        "PUT",
        "/agents/other/start",
        &[later, long],
        405,
        "METHOD_NOT_ALLOWED",
    );
    no(
        "POST",
        "/agents/other/start",
        &[later, long],
        401,
        "UNAUTHORIZED",
    );
    no(
        "POST",
        "/agents/other/start",
        &[right, later, long],
        404,
        "NOT_FOUND",
    );
    no(
        "POST",
        "/agents/planner/start",
        &[right, later, long],
        400,
        "VERSION_UNSUPPORTED",
    );
    no(
        "POST",
        "/agents/planner/start",
        &[right, long],
        413,
        "PAYLOAD_TOO_LARGE",
    );
    let body = |body: &str| forward(&mount, "POST", "/agents/planner/start", &[right], body);
    assert_refused(body(&"x".repeat(41)), 413, "PAYLOAD_TOO_LARGE");
    assert_refused(body(&"x".repeat(40)), 400, "VALIDATION_ERROR");
    assert!(body("{\"sessionId\":\"s\",\"message\":\"m\"}").is_ok());
}

#[test]
fn only_a_dispatchs_start_may_go_over_the_limit_and_only_so_far() {
    let mount = open().with_body_limit(40);
    let start = |message: usize, parent: &str| {
        let message = "m".repeat(message);
        let body = format!("{{\"sessionId\":\"s\",\"message\":\"{message}\"{parent}}}");
        forward(&mount, "POST", "/agents/a/start", &[], &body)
    };
    let parent = ",\"parent\":{\"sessionId\":\"p\",\"streamId\":\"st\",\"toolCallId\":\"c\"}";
    assert_refused(start(40, ""), 413, "PAYLOAD_TOO_LARGE");
    assert!(start(40, parent).is_ok());
    assert_refused(start(17_000, parent), 413, "PAYLOAD_TOO_LARGE");
}

#[test]
fn an_announced_length_is_believed_where_it_is_a_number_too_large() {
    let mount = open().with_body_limit(10);
    let announce =
        |method, path, length| admit(&mount, method, path, &[("content-length", length)]);
    for length in ["11", "99999999999999999999999"] {
        let result = announce("POST", "/agents/a/resume", length);
        assert_refused(result, 413, "PAYLOAD_TOO_LARGE");
        assert!(announce("GET", "/agents/a/status?sessionId=s", length).is_ok());
    }
    for length in ["", "0", "10", "-11", "x"] {
        assert!(
            announce("POST", "/agents/a/start", length).is_ok(),
            "{length}"
        );
    }
}

#[test]
fn a_known_path_has_one_method_and_says_so() {
    let mount = open();
    for (path, allowed) in [
        ("/agents", "GET"),
        ("/agents/planner/status", "GET"),
        ("/agents/planner/abort", "POST"),
    ] {
        for method in [
            "GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND", "get",
        ] {
            let result = admit(&mount, method, path, &[]);
            if method == allowed {
                assert!(result.is_ok(), "{method} {path}");
            } else {
                let response = refused(result);
                assert_eq!(response.status(), 405, "{method} {path}");
                assert_eq!(header(&response, "allow"), Some(allowed));
            }
        }
    }
}

#[test]
fn a_bearer_key_opens_every_route_and_nothing_else_does() {
    let public = || public().with_messages();
    let right = ["Bearer key", "bearer key", "BEARER   key", "Bearer key "];
    let wrong = [
        "",
        "Bearer",
        "Bearer ",
        "Bearer Key",
        "Bearer key2",
        "Bearer ke",
        "Basic key",
        "key",
        "Bearerkey",
        "Bearer key, Bearer key",
        "Bearer k\u{e9}y",
        "Bearer key x",
    ];
    let routes = Action::ALL.map(|a| (a.method(), format!("/agents/planner/{}", a.as_str())));
    for (method, path) in routes
        .into_iter()
        .chain([(Method::GET, "/agents".to_owned())])
    {
        let with = |mount: &Mount, value: &str| {
            admit(mount, method.as_str(), &path, &[("authorization", value)])
        };
        for value in right {
            assert!(with(&public(), value).is_ok(), "{value}");
        }
        for value in wrong {
            assert_refused(with(&public(), value), 401, "UNAUTHORIZED");
        }
        assert_refused(
            admit(&public(), method.as_str(), &path, &[]),
            401,
            "UNAUTHORIZED",
        );
        let twice = [
            ("authorization", "Bearer key"),
            ("authorization", "Bearer key"),
        ];
        assert_refused(
            admit(&public(), method.as_str(), &path, &twice),
            401,
            "UNAUTHORIZED",
        );
        for unset in [None, Some(String::new())] {
            let mount = public().with_auth(Auth::Bearer(unset));
            for value in right.iter().chain(&wrong) {
                assert_refused(with(&mount, value), 401, "UNAUTHORIZED");
            }
        }
    }
    let response = refused(admit(&public(), "GET", "/agents", &[]));
    assert_eq!(header(&response, "www-authenticate"), Some("Bearer"));
}

#[test]
fn a_hook_sees_the_request_and_its_answer_is_sent_as_it_is() {
    let mount = |decide: fn(&Head<'_>) -> Decision| {
        Mount::new("/agents").with_auth(Auth::Hook(Rc::new(decide)))
    };
    let allow = mount(|head| {
        let seen = head.headers["x-tenant"] == "t" && head.uri.path() == "/agents/planner/status";
        let route = matches!(
            head.route,
            Route::Agent {
                action: Action::Status,
                ..
            }
        );
        if seen && route && head.method == Method::GET {
            Decision::Allow
        } else {
            Decision::Refuse
        }
    });
    assert!(
        admit(
            &allow,
            "GET",
            "/agents/planner/status",
            &[("x-tenant", "t")]
        )
        .is_ok()
    );
    assert_refused(
        admit(
            &allow,
            "GET",
            "/agents/planner/status",
            &[("x-tenant", "u")],
        ),
        401,
        "UNAUTHORIZED",
    );
    let own = mount(|_| Decision::Answer(answer(402, "text/plain", Body::Full("pay".into()))));
    let response = refused(admit(&own, "GET", "/agents", &[]));
    assert_eq!(response.status(), 402);
    assert_eq!(header(&response, "content-type"), Some("text/plain"));
    assert_eq!(body_of(response), b"pay");
    assert_refused(admit(&own, "GET", "/agents/x", &[]), 404, "NOT_FOUND");
}

#[test]
fn a_mount_without_auth_warns_once_unless_it_is_meant_so() {
    let lines = Rc::new(RefCell::new(Vec::new()));
    let sink = lines.clone();
    let warn: Warn = Rc::new(move |line| sink.borrow_mut().push(line.to_owned()));
    let mount = Mount::new("/agents").with_warning(warn.clone());
    assert!(admit(&mount, "GET", "/agents", &[]).is_ok());
    assert!(admit(&mount, "GET", "/agents", &[]).is_ok());
    assert_eq!(lines.take().len(), 1);
    let meant = Mount::new("/agents")
        .with_warning(warn.clone())
        .allow_unauthenticated();
    let gated = public().with_warning(warn);
    assert!(admit(&meant, "GET", "/agents", &[]).is_ok());
    assert_refused(admit(&gated, "GET", "/agents", &[]), 401, "UNAUTHORIZED");
    assert_eq!(lines.take().len(), 0);
}

#[test]
fn case_36_a_type_outside_the_list_is_the_same_404_as_an_unknown_path() {
    let auth = [("authorization", "Bearer key")];
    let unlisted = refused(admit(
        &public(),
        "GET",
        "/agents/thread-researcher/status?sessionId=s",
        &auth,
    ));
    let unknown = refused(admit(&public(), "GET", "/agents/planner/unknown", &auth));
    assert_eq!(unlisted.status(), unknown.status());
    assert_eq!(unlisted.headers(), unknown.headers());
    assert_eq!(body_of(unlisted), body_of(unknown));
    assert!(admit(&open(), "GET", "/agents/anything/status", &[]).is_ok());
}

#[test]
fn the_list_tells_types_and_version() {
    let list = |mount: &Mount, pairs: &[_]| {
        let admission =
            admit(mount, "GET", "/agents?x=1", pairs).unwrap_or_else(|r| panic!("{}", r.status()));
        assert!(!admission.takes_body());
        let response = refused(admission.forward(Bytes::new()));
        assert_eq!(response.status(), 200);
        assert!(header(&response, "x-remote-agents-mount").is_some());
        json_of(response)
    };
    let mount = public().with_registered(types(&["planner", "hidden"]));
    let expected = json!({"agents": ["planner"], "version": 1});
    assert_eq!(list(&mount, &[("authorization", "Bearer key")]), expected);
    let mount = open().with_registered(types(&["planner", "thread-researcher"]));
    assert_eq!(
        list(&mount, &[])["agents"],
        json!(["planner", "thread-researcher"])
    );
}

#[test]
fn a_request_is_refused_before_the_object_with_its_field_named() {
    let mount = open();
    let field = |method, path: &str, pairs: &[(&str, &str)], body: &str| {
        let response = refused(forward(&mount, method, path, pairs, body));
        assert_eq!(response.status(), 400);
        envelope_of(response).field.unwrap()
    };
    let ok = "{\"sessionId\":\"s\",\"message\":\"m\"}";
    let key = [("idempotency-key", "")];
    assert_eq!(
        field("POST", "/agents/a/start", &[], "{\"sessionId\":\"s\"}"),
        "message"
    );
    assert_eq!(
        field("POST", "/agents/a/start", &key, ok),
        "Idempotency-Key"
    );
    assert_eq!(
        field(
            "POST",
            "/agents/a/resume",
            &[],
            "{\"sessionId\":\"s\",\"mode\":\"x\"}"
        ),
        "mode"
    );
    assert_eq!(
        field("POST", "/agents/a/resume", &key, ok),
        "Idempotency-Key"
    );
    for stop in ["interrupt", "abort"] {
        assert_eq!(
            field(
                "POST",
                &format!("/agents/a/{stop}"),
                &[],
                "{\"reason\":\"r\"}"
            ),
            "sessionId"
        );
    }
    assert_eq!(
        field("GET", "/agents/a/sse?sessionId=s&fromSequence=x", &[], ""),
        "fromSequence"
    );
    assert_eq!(
        field(
            "GET",
            "/agents/a/sse?sessionId=s",
            &[("last-event-id", "x")],
            ""
        ),
        "Last-Event-ID"
    );
    for read in ["sse", "status", "snapshot", "usage", "tree"] {
        assert_eq!(
            field("GET", &format!("/agents/a/{read}"), &[], ok),
            "sessionId"
        );
    }
}

#[test]
fn the_object_is_asked_by_session_with_the_callers_headers() {
    let sent = [
        ("Authorization", "Bearer key"),
        ("Accept", "text/event-stream"),
        ("X-Tenant", "t"),
        ("Traceparent", "00-1-2-03"),
        ("Cookie", "c=1"),
        ("Last-Event-ID", "4"),
        ("X-Remote-Agents-Version", "1"),
        ("Connection", "close, X-One-Hop ,,"),
        ("X-One-Hop", "x"),
        ("Keep-Alive", "x"),
        ("Proxy-Authorization", "x"),
        ("TE", "trailers"),
        ("Transfer-Encoding", "chunked"),
        ("Upgrade", "websocket"),
        ("Content-Length", "3"),
        ("X-Remote-Agents-Internal-Session", "forged"),
        ("X-Remote-Agents-Internal-Mount", "raw"),
        ("x-remote-agents-internal-anything", "forged"),
    ];
    let path = "/agents/%70lanner/sse?sessionId=a%3Ab&fromSequence=3&novel=%20x";
    let forward = forward(&public(), "GET", path, &sent, "a body")
        .unwrap_or_else(|r| panic!("{:?}", r.status()));
    assert_eq!(forward.asked.session_id.as_str(), "a:b");
    assert_eq!(forward.asked.agent_type, planner());
    assert_eq!(forward.asked.action, Action::Sse);
    let request = forward.request;
    assert_eq!(request.method(), Method::GET);
    assert_eq!(
        request.uri(),
        "http://object/planner/sse?sessionId=a%3Ab&fromSequence=3&novel=%20x"
    );
    assert!(request.body().is_empty());
    let mut expected = headers(&sent[..7]);
    expected.insert(INTERNAL_SESSION, HeaderValue::from_static("a:b"));
    expected.insert(INTERNAL_MOUNT, HeaderValue::from_static("projected"));
    assert_eq!(*request.headers(), expected);
}

#[test]
fn a_posted_body_reaches_the_object_byte_for_byte() {
    let body = " {\"message\" : \"m\u{e9}\", \"novel\":1.0, \"sessionId\":\"s\"}\n";
    let mount = Mount::new("/internal/agents");
    assert!(
        admit(&mount, "POST", "/internal/agents/a/start", &[])
            .unwrap_or_else(|r| panic!("{}", r.status()))
            .takes_body()
    );
    let forward = forward(&mount, "POST", "/internal/agents/a/start", &[], body)
        .unwrap_or_else(|r| panic!("{}", r.status()));
    assert_eq!(forward.request.body(), body.as_bytes());
    assert_eq!(forward.request.uri(), "http://object/a/start");
    assert_eq!(forward.request.headers()[INTERNAL_MOUNT], "raw");
}

// Answers.

fn reply(status: u16, pairs: &[(&str, &str)], body: impl Into<Bytes>) -> Response {
    let mut response = answer(status, "application/json", Body::Full(body.into()));
    response.headers_mut().extend(headers(pairs));
    response
}

/// A request for the planner `s`.
fn asked(action: Action) -> Asked {
    Asked {
        session_id: SessionId::parse("s").unwrap(),
        agent_type: planner(),
        action,
        discard: Discard::Close,
    }
}

fn passed(mount: &Mount, action: Action, response: Response) -> Response {
    block_on(mount.finish(&asked(action), response))
}

#[test]
fn an_answer_is_stamped_and_loses_the_headers_of_its_hop() {
    let sent = [
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("x-remote-agents-internal-x", "1"),
        ("x-own", "1"),
        ("x-remote-agents-mount", "raw"),
        ("x-remote-agents-stream", "st"),
    ];
    let response = passed(&public(), Action::Status, reply(200, &sent, "{}"));
    assert_eq!(
        header(&response, "x-remote-agents-mount"),
        Some("projected")
    );
    assert_eq!(header(&response, "x-remote-agents-version"), Some("1"));
    assert_eq!(header(&response, "x-remote-agents-stream"), Some("st"));
    assert_eq!(header(&response, "x-own"), Some("1"));
    for gone in ["connection", "x-hop", "x-remote-agents-internal-x"] {
        assert_eq!(header(&response, gone), None, "{gone}");
    }
    let mut stamped = HeaderMap::new();
    open().stamp(&mut stamped);
    assert_eq!(stamped["x-remote-agents-mount"], "raw");
}

#[test]
fn no_answer_leaves_that_a_platform_cannot_send() {
    for status in [100, 101, 199, 600, 999] {
        let mut response = reply(200, &[], "x");
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        assert_eq!(
            passed(&open(), Action::Status, response).status(),
            500,
            "{status}"
        );
    }
    for status in [204, 205, 304] {
        let response = passed(
            &open(),
            Action::Status,
            reply(status, &[("content-length", "1")], "x"),
        );
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(header(&response, "content-length"), None);
        assert!(body_of(response).is_empty());
    }
    for status in [200, 302, 404, 500, 599] {
        let response = passed(&open(), Action::Status, reply(status, &[], "x"));
        assert_eq!(
            (response.status().as_u16(), body_of(response)),
            (status, b"x".to_vec())
        );
    }
}

fn snapshot() -> Value {
    json!({"sessionId": "s", "streamId": "st", "state": {"secret": CANARY, "b": 1}, "streamSequence": -1,
        "oldestRetainedSequence": 0, "stepCount": 2, "checkpointId": "c", "patchOrdinal": 4, "novel": CANARY})
}

#[test]
fn a_snapshot_of_a_projected_mount_has_the_projection_in_place_of_the_state() {
    let sent = reply(
        200,
        &[("content-length", "999"), ("etag", "x")],
        snapshot().to_string(),
    );
    let response = passed(&public(), Action::Snapshot, sent);
    assert_eq!(header(&response, "content-length"), None);
    assert_eq!(header(&response, "etag"), None);
    let expected = json!({"sessionId": "s", "streamId": "st", "state": {"agentType": "planner", "keys": 2},
        "streamSequence": -1, "oldestRetainedSequence": 0, "stepCount": 2, "checkpointId": "c", "patchOrdinal": 4,
        "projection": "count@1"});
    assert_eq!(json_of(response), expected);
    // In parts it is the same.
    let parts = snapshot().to_string().into_bytes();
    let parts: Vec<_> = parts
        .chunks(7)
        .map(|p| Ok(Bytes::copy_from_slice(p)))
        .collect();
    let response = answer(
        200,
        "application/json",
        Body::Stream(Box::pin(futures::stream::iter(parts))),
    );
    assert_eq!(
        json_of(passed(&public(), Action::Snapshot, response)),
        expected
    );
    // Without a projection nothing is touched.
    let raw = snapshot().to_string();
    assert_eq!(
        body_of(passed(
            &open(),
            Action::Snapshot,
            reply(200, &[], raw.clone())
        )),
        raw.as_bytes()
    );
}

#[test]
fn usage_is_mapped_where_there_is_a_map() {
    let usage =
        json!({"sessionId": "s", "rollup": {"tokens": {"total": 7, "prompt": 3}}}).to_string();
    let mapped = json_of(passed(
        &public(),
        Action::Usage,
        reply(200, &[], usage.clone()),
    ));
    assert_eq!(
        mapped,
        json!({"sessionId": "s", "rollup": {"billingUnits": 7}})
    );
    let projected = open().with_projection(projection());
    for mount in [open(), projected] {
        assert_eq!(
            body_of(passed(
                &mount,
                Action::Usage,
                reply(200, &[], usage.clone())
            )),
            usage.as_bytes()
        );
    }
}

#[test]
fn what_cannot_be_read_is_not_shown() {
    for (action, body) in [
        (Action::Snapshot, format!("{{\"state\":\"{CANARY}\"}}")),
        (Action::Snapshot, format!("\"{CANARY}\"")),
        (Action::Snapshot, String::new()),
        (Action::Usage, format!("[\"{CANARY}\"]")),
        (Action::Tree, snapshot().to_string()),
        (Action::Messages, snapshot().to_string()),
    ] {
        for status in [200, 201, 206, 299, 302] {
            let response = passed(&public(), action, reply(status, &[], body.clone()));
            assert!(response.status().as_u16() >= 400, "{action:?} {status}");
            let body = body_of(response);
            assert!(!String::from_utf8_lossy(&body).contains(CANARY));
        }
    }
    // A body that was not collected is no way around.
    let response = answer(
        200,
        "application/json",
        Body::Stream(Box::pin(futures::stream::empty())),
    );
    assert_eq!(
        public().answer(&asked(Action::Snapshot), response).status(),
        500
    );
    let broken = futures::stream::iter([Err(BodyError("reset".into()))]);
    let response = answer(200, "application/json", Body::Stream(Box::pin(broken)));
    let response = passed(&public(), Action::Snapshot, response);
    assert_eq!(envelope_of(response).code, "transport_error");
}

#[test]
fn refusals_of_the_object_and_the_status_pass() {
    let envelope = "{\"code\":\"NOT_FOUND\",\"error\":\"Not found.\"}";
    for action in Action::ALL {
        let response = passed(&public(), action, reply(404, &[], envelope));
        assert_eq!(
            (response.status().as_u16(), body_of(response)),
            (404, envelope.as_bytes().to_vec())
        );
    }
    let status = "{\"status\":\"completed\",\"output\":{\"a\":1}}";
    assert_eq!(
        body_of(passed(&public(), Action::Status, reply(200, &[], status))),
        status.as_bytes()
    );
}

#[test]
fn what_is_rewritten_is_told_beforehand() {
    let rewritten = |mount: &Mount| {
        Action::ALL
            .into_iter()
            .filter(|a| mount.rewrites(*a))
            .collect::<Vec<_>>()
    };
    assert_eq!(rewritten(&open()), [Action::Ui]);
    assert_eq!(
        rewritten(&open().with_usage_projection(billing())),
        [Action::Sse, Action::Usage, Action::Ui]
    );
    assert_eq!(
        rewritten(&open().with_projection(projection())),
        [
            Action::Sse,
            Action::Snapshot,
            Action::Tree,
            Action::Ui,
            Action::Messages
        ]
    );
    assert_eq!(
        rewritten(&open().with_agents(types(&["planner"]))),
        [Action::Tree, Action::Ui]
    );
    assert_eq!(
        rewritten(&open().with_chunks(ChunkDetail::Lifecycle)),
        [Action::Sse, Action::Ui, Action::Messages]
    );
    assert!(!open().with_usage_projection(billing()).is_projected());
    assert!(open().with_projection(projection()).is_projected());
    assert!(open().with_chunks(ChunkDetail::Lifecycle).is_projected());
}

// Streams.

fn chunk(kind: &str, more: &Value) -> Value {
    let mut chunk =
        json!({"type": kind, "agentId": "s", "agentType": "planner", "timestamp": 1, "step": 1});
    chunk
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    chunk
}

fn event(sequence: u64, chunk_json: &str) -> String {
    let mut out = String::new();
    encode_chunk(&mut out, sequence, chunk_json);
    out
}

fn forwarded(mut chunk: Value) -> Value {
    chunk["remoteSource"] = json!({"childSessionId": "c", "childSequence": 4, "streamId": "cs"});
    chunk["origin"] = json!({"sessionId": "c", "streamId": "cs", "sequence": 4});
    chunk
}

/// A chunk of every type, with what it may carry.
fn every_chunk() -> Vec<Value> {
    let call = json!({"toolCallId": "t", "toolName": "n"});
    let tool_end =
        json!({"toolCallId": "t", "toolName": "n", "result": "r", "success": false, "error": "e"});
    let sub = json!({"subSessionId": "c", "subAgentType": "x", "toolCallId": "t", "remote": true});
    let sub_end = json!({"subSessionId": "c", "subAgentType": "x", "toolCallId": "t", "success": true,
        "result": {"r": 1}, "error": "e"});
    vec![
        chunk("text_delta", &json!({"delta": "d"})),
        chunk("thinking", &json!({"content": "t", "isComplete": true})),
        chunk("tool_arg_stream_start", &call),
        chunk(
            "tool_arg_stream_delta",
            &json!({"toolCallId": "t", "delta": "{"}),
        ),
        chunk("tool_arg_stream_end", &json!({"toolCallId": "t"})),
        chunk(
            "tool_start",
            &json!({"toolCallId": "t", "toolName": "n", "arguments": {"a": 1}}),
        ),
        chunk("tool_end", &tool_end),
        chunk("subagent_start", &sub),
        chunk("subagent_end", &sub_end),
        chunk("custom", &json!({"eventName": "e", "data": 1})),
        chunk("output", &json!({"output": {"o": 1}})),
        chunk(
            "step_committed",
            &json!({"stepCount": 1, "checkpointId": "cp", "patchOrdinal": 2}),
        ),
        chunk(
            "step_discarded",
            &json!({"stepCount": 1, "reason": "r", "fromSequence": 1}),
        ),
        chunk("stream_resync", &json!({"reason": "r"})),
        chunk("run_started", &json!({"runId": "r"})),
        chunk("run_resumed", &json!({"runId": "r"})),
        chunk("run_paused", &json!({"runId": "r"})),
        chunk("run_interrupted", &json!({"runId": "r", "reason": "r"})),
        chunk("error", &json!({"code": "c", "error": "e"})),
    ]
}

fn state_patch() -> Value {
    chunk(
        "state_patch",
        &json!({"patches": [{"op": "add", "path": "/a", "value": CANARY}], "patchOrdinal": 1}),
    )
}

fn end_frame() -> Frame {
    Frame::End(EndFrame {
        run_id: Some("r".into()),
        status: SessionStatus::Completed,
        output: Some(json!({"o": 1})),
        state: Some(json!({"a": CANARY})),
        usage: Some(json!({"tokens": {"total": 7}})),
    })
}

fn sse(parts: Vec<Result<Bytes, BodyError>>) -> Response {
    answer(
        200,
        "text/event-stream",
        Body::Stream(Box::pin(futures::stream::iter(parts))),
    )
}

/// The text that a reader of the mount gets, the object's bytes coming in parts of `size`.
fn read(mount: &Mount, text: &str, size: usize) -> String {
    let parts = text
        .as_bytes()
        .chunks(size)
        .map(|p| Ok(Bytes::copy_from_slice(p)))
        .collect();
    let response = passed(mount, Action::Sse, sse(parts));
    assert_eq!(header(&response, "content-type"), Some("text/event-stream"));
    String::from_utf8(body_of(response)).unwrap()
}

fn without_comments(text: &str) -> String {
    text.replace(": ping\n\n", "")
}

#[test]
fn a_projected_stream_keeps_the_bytes_of_what_passes_and_drops_state_at_every_depth() {
    let mount = public();
    let (mut sent, mut expected) = (String::new(), String::new());
    let mut sequence = 0;
    for chunk in every_chunk() {
        for chunk in [chunk.clone(), forwarded(chunk)] {
            sequence += 1;
            let passing = event(sequence, &chunk.to_string());
            sent += &passing;
            expected += &passing;
            let custom_streamer = chunk_of_agent(state_patch(), "no-session");
            let dropped = [
                state_patch(),
                forwarded(state_patch()),
                custom_streamer,
                chunk_of_agent(chunk_of_type("novelty"), "s"),
                chunk_of_type(""),
                json!({"delta": CANARY}),
            ];
            for chunk in dropped {
                sequence += 1;
                sent += &event(sequence, &chunk.to_string());
            }
        }
    }
    sent += "event: novelty\ndata: canary-7f3a\n\n: canary-7f3a\n\nevent: rewound\ndata: \"canary-7f3a\"\n\n";
    let caught_up = encode_frame(&Frame::CaughtUp { sequence }).unwrap();
    sent += &caught_up;
    expected += &caught_up;
    sent += &encode_frame(&end_frame()).unwrap();
    expected += "event: end\ndata: {\"runId\":\"r\",\"status\":\"completed\",\"output\":{\"o\":1},\
        \"state\":{\"agentType\":\"planner\",\"keys\":1},\"usage\":{\"billingUnits\":7}}\n\n";
    sent += &event(
        sequence + 1,
        &chunk("text_delta", &json!({"delta": CANARY})).to_string(),
    );
    for size in [1, 7, 100, usize::MAX] {
        let got = read(&mount, &sent, size);
        assert_eq!(without_comments(&got), expected, "parts of {size}");
        assert!(!got.contains(CANARY));
    }
}

fn chunk_of_type(kind: &str) -> Value {
    chunk(kind, &json!({"state": CANARY}))
}

fn chunk_of_agent(mut chunk: Value, agent: &str) -> Value {
    chunk["agentId"] = json!(agent);
    chunk
}

#[test]
fn stored_text_that_is_written_otherwise_than_here_passes_unchanged() {
    let odd = event(
        3,
        "{ \"type\":\"output\", \"output\":{\"f\":1.50e1, \"n\":9007199254740993}, \"agentId\":\"\\u00e9\" }",
    );
    assert_eq!(read(&public(), &odd, usize::MAX), odd);
}

#[test]
fn a_committed_step_of_another_mount_loses_its_patches() {
    let patches = json!([{"op": "add", "path": "/a", "value": CANARY}]);
    let step = chunk(
        "step_committed",
        &json!({"patches": patches, "stepCount": 1, "checkpointId": "c", "resync": true}),
    );
    for step in [step.clone(), forwarded(step)] {
        let mut expected = step.clone();
        for field in ["patches", "resync"] {
            expected.as_object_mut().unwrap().shift_remove(field);
        }
        let got = read(&public(), &event(9, &step.to_string()), usize::MAX);
        assert_eq!(got, event(9, &expected.to_string()));
    }
}

#[test]
fn fields_that_this_version_does_not_know_are_removed() {
    for chunk in every_chunk() {
        for plain in [chunk.clone(), forwarded(chunk)] {
            let mut laden = plain.clone();
            for field in ["state", "patches", "projection", "resync", "novel"] {
                laden[field] = json!(CANARY);
            }
            for stamp in ["remoteSource", "origin"] {
                if let Some(stamp) = laden.get_mut(stamp) {
                    stamp["novel"] = json!({"deep": CANARY});
                }
            }
            let got = read(&public(), &event(3, &laden.to_string()), usize::MAX);
            assert_eq!(got, event(3, &plain.to_string()));
        }
    }
}

#[test]
fn fields_beside_a_chunk_do_not_ride_along() {
    let text = chunk("text_delta", &json!({"delta": "d"})).to_string();
    let sent = format!(
        "event: chunk\nid: 1\ndata: {{\"sequence\":1,\"state\":\"{CANARY}\",\"chunk\":{text}}}\n\n"
    );
    assert_eq!(read(&public(), &sent, usize::MAX), event(1, &text));
}

#[test]
fn a_stream_that_cannot_be_read_ends_with_an_error() {
    let good = event(1, &chunk("text_delta", &json!({"delta": "d"})).to_string());
    let twice =
        format!("{{\"type\":\"state_patch\",\"patches\":\"{CANARY}\",\"type\":\"text_delta\"}}");
    for bad in [
        format!(
            "event: chunk\nid: 2\ndata: {{\"sequence\":3,\"chunk\":{{\"x\":\"{CANARY}\"}}}}\n\n"
        ),
        format!("event: chunk\nid: 2\ndata: {CANARY}\n\n"),
        format!("event: end\ndata: \"{CANARY}\"\n\n"),
        event(2, &twice),
    ] {
        let got = read(&public(), &format!("{good}{bad}{good}"), 5);
        let rest = without_comments(&got);
        let rest = rest.strip_prefix(good.as_str()).unwrap();
        let mut decoder = Decoder::new();
        decoder.push(rest.as_bytes());
        let Ok(Some(Decoded::Frame(Frame::Error(ErrorFrame {
            code, recoverable, ..
        })))) = decoder.poll()
        else {
            panic!("{rest}")
        };
        assert_eq!((code.as_str(), recoverable), ("INTERNAL", false));
        assert_eq!(decoder.poll(), Ok(None));
        assert!(!got.contains(CANARY), "{got}");
    }
}

#[test]
fn an_unfinished_event_of_a_dropped_stream_is_not_shown() {
    let good = event(1, &chunk("text_delta", &json!({"delta": "d"})).to_string());
    let cut =
        format!("{good}event: chunk\nid: 2\ndata: {{\"sequence\":2,\"chunk\":{{\"a\":\"{CANARY}");
    assert_eq!(read(&public(), &cut, usize::MAX), good);
    // A body that breaks off breaks off for the reader too.
    let parts = vec![
        Ok(Bytes::from(good.clone())),
        Err(BodyError("reset".into())),
    ];
    let Body::Stream(mut body) = passed(&public(), Action::Sse, sse(parts)).into_body() else {
        panic!()
    };
    assert_eq!(block_on(body.next()), Some(Ok(Bytes::from(good))));
    assert_eq!(block_on(body.next()), Some(Err(BodyError("reset".into()))));
    assert_eq!(block_on(body.next()), None);
}

#[test]
fn frames_pass_as_they_come_and_silence_is_never_of_our_making() {
    let text = event(1, &chunk("text_delta", &json!({"delta": "d"})).to_string());
    let patch = event(2, &state_patch().to_string());
    let (half, rest) = text.split_at(20);
    let parts = [
        half,
        rest,
        &patch,
        &patch,
        &encode_comment("ping"),
        &format!("{patch}{text}"),
    ];
    let parts = parts
        .iter()
        .map(|p| Ok(Bytes::copy_from_slice(p.as_bytes())))
        .collect();
    let Body::Stream(body) = passed(&public(), Action::Sse, sse(parts)).into_body() else {
        panic!()
    };
    let got: Vec<_> = block_on(
        body.map(|p| String::from_utf8(p.unwrap().to_vec()).unwrap())
            .collect(),
    );
    let ping = ": ping\n\n";
    assert_eq!(got, [text.as_str(), ping, ping, ping, text.as_str()]);
}

#[test]
fn lifecycle_shows_that_something_happened_but_not_with_what() {
    for mount in [
        public().with_chunks(ChunkDetail::Lifecycle),
        open().with_chunks(ChunkDetail::Lifecycle),
    ] {
        for mut chunk in every_chunk()
            .into_iter()
            .flat_map(|c| [c.clone(), forwarded(c)])
        {
            chunk["novel"] = json!(CANARY);
            let got = read(&mount, &event(5, &chunk.to_string()), usize::MAX);
            let kind = chunk["type"].as_str().unwrap().to_owned();
            let fields = chunk.as_object_mut().unwrap();
            let hidden: &[&str] = match kind.as_str() {
                "tool_start" => &["arguments"],
                "tool_end" | "subagent_end" => &["result", "error"],
                _ => &[],
            };
            fields.retain(|name, _| name != "novel" && !hidden.contains(&name.as_str()));
            let passes = kind.starts_with("run_")
                || kind.starts_with("step_")
                || [
                    "text_delta",
                    "output",
                    "tool_start",
                    "tool_end",
                    "subagent_start",
                    "subagent_end",
                    "stream_resync",
                ]
                .contains(&kind.as_str());
            let expected = if passes {
                event(5, &chunk.to_string())
            } else {
                String::new()
            };
            assert_eq!(without_comments(&got), expected, "{kind}");
        }
        assert_eq!(
            without_comments(&read(&mount, &event(1, &state_patch().to_string()), 9)),
            ""
        );
    }
}

#[test]
fn a_usage_projection_alone_changes_the_usage_at_the_end_and_nothing_else() {
    let mount = open().with_usage_projection(billing());
    let begin = format!(
        "{}event: novelty\nid: 3\ndata: a\ndata: b\n\ndata: no name\n\n",
        event(1, &state_patch().to_string())
    );
    let sent = format!(
        "{begin}event: end\ndata: {{\"status\":\"completed\",\"novel\":1,\"state\":{{\"a\":1}},\"usage\":{{\"tokens\":{{\"total\":7}}}}}}\n\n"
    );
    let expected = format!(
        "{begin}event: end\ndata: {{\"status\":\"completed\",\"novel\":1,\"state\":{{\"a\":1}},\"usage\":{{\"billingUnits\":7}}}}\n\n"
    );
    for size in [1, 50, usize::MAX] {
        assert_eq!(without_comments(&read(&mount, &sent, size)), expected);
    }
}

#[test]
fn an_end_without_state_stays_without_and_a_failed_run_passes() {
    let mut failed = ErrorFrame {
        run_id: Some("r".into()),
        code: "run_aborted".into(),
        error: "Stopped.".into(),
        detail: Some("d".into()),
        recoverable: false,
        floor: Some(3),
        stream_id: Some("st".into()),
    };
    let text = encode_frame(&Frame::Error(failed.clone())).unwrap();
    assert_eq!(read(&public(), &text, usize::MAX), text);
    failed.recoverable = true;
    let text = encode_frame(&Frame::Error(failed)).unwrap();
    assert_eq!(read(&public(), &text, usize::MAX), text);
    let end = "event: end\ndata: {\"status\":\"paused\"}\n\n";
    assert_eq!(read(&public(), end, usize::MAX), end);
}

// The whole.

/// An object that notes what it is asked and answers with what it is given.
struct Noting {
    asked: RefCell<Vec<(String, Request)>>,
    answer: Result<&'static str, FetchError>,
}

struct Stub(Rc<Noting>, String);

impl Fetch for Stub {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        self.0.asked.borrow_mut().push((self.1.clone(), request));
        let answer = self.0.answer.clone().map(|text| reply(200, &[], text));
        Box::pin(async move { answer })
    }
}

struct World(Rc<Noting>);

impl Objects for World {
    fn object(&self, session: &SessionId) -> Rc<dyn Fetch> {
        Rc::new(Stub(self.0.clone(), session.to_string()))
    }
}

fn world(answer: Result<&'static str, FetchError>) -> World {
    World(Rc::new(Noting {
        asked: RefCell::default(),
        answer,
    }))
}

fn request(method: &str, uri: &str, body: &'static str) -> Request {
    let builder = http::Request::builder().method(method).uri(uri);
    builder
        .header("authorization", "Bearer key")
        .body(Bytes::from_static(body.as_bytes()))
        .unwrap()
}

#[test]
fn a_request_is_served_by_the_object_of_its_session() {
    let world = world(Ok("{\"answer\":1}"));
    let body = "{\"sessionId\":\"s-9\"}";
    let response = block_on(serve(
        &public(),
        &world,
        request("POST", "http://h/agents/planner/interrupt", body),
    ));
    assert_eq!(response.status(), 200);
    assert_eq!(json_of(response), json!({"answer": 1}));
    let asked = world.0.asked.take();
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].0, "s-9");
    assert_eq!(asked[0].1.uri(), "http://object/planner/interrupt");
}

#[test]
fn a_refused_request_and_the_list_reach_no_object() {
    let world = world(Ok("{}"));
    for (method, uri, body, status) in [
        ("GET", "/agents", "", 200),
        ("GET", "/agents/planner/status", "", 400),
        ("POST", "/agents/planner/start", "{}", 400),
        ("GET", "/agents/planner/descendant?sessionId=s", "", 404),
        ("GET", "/agents/other/status?sessionId=s", "", 404),
    ] {
        let response = block_on(serve(&public(), &world, request(method, uri, body)));
        assert_eq!(response.status().as_u16(), status, "{method} {uri}");
    }
    assert!(world.0.asked.borrow().is_empty());
}

#[test]
fn an_object_that_cannot_be_reached_is_a_retryable_503() {
    let world = world(Err(FetchError(CANARY.into())));
    let response = block_on(serve(
        &public(),
        &world,
        request("GET", "/agents/planner/status?sessionId=s", ""),
    ));
    assert_eq!(response.status(), 503);
    assert_eq!(
        header(&response, "x-remote-agents-mount"),
        Some("projected")
    );
    let body = String::from_utf8(body_of(response)).unwrap();
    assert!(!body.contains(CANARY));
    let envelope: ErrorEnvelope = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (envelope.code.as_str(), envelope.retryable),
        ("transport_error", Some(true))
    );
}
