#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::cell::RefCell;
use std::collections::BTreeSet;

use futures::FutureExt as _;
use futures::future::{LocalBoxFuture, ready};
use remote_agents::http::{Body, answer};
use remote_agents::mount::Auth;
use remote_agents::protocol::ids::{Position, StreamId};
use remote_agents::protocol::inside::{Caller, Inside};
use remote_agents::protocol::message::{
    ErrorEnvelope, ResumeRequest, SnapshotResponse, StartRequest, StartResponse, StatusResponse,
    StopRequest, StopResponse, UsageResponse,
};
use remote_agents::transport::{Call, Fetch, FetchError, FrameStream};
use serde_json::{Value, json};

use super::*;

/// The other service: every read ends in the same way.
#[derive(Clone)]
enum Child {
    Answers,
    Fails(TransportError),
}

impl Child {
    fn refuses(status: u16, code: Code) -> Self {
        let envelope = Box::new(ErrorEnvelope::from(
            &Error::new(code, "theirs").with_detail("their detail"),
        ));
        Self::Fails(TransportError::Refused {
            status,
            envelope,
            retry_after: None,
        })
    }

    fn outcome<T>(&self, value: Value) -> Call<'_, T>
    where
        T: serde::de::DeserializeOwned + 'static,
    {
        let outcome = match self {
            Self::Answers => Ok(serde_json::from_value(value).unwrap()),
            Self::Fails(error) => Err(error.clone()),
        };
        ready(outcome).boxed_local()
    }
}

impl Transport for Child {
    fn start(&self, _: StartRequest, _: String) -> Call<'_, StartResponse> {
        panic!("a reader starts nothing")
    }
    fn resume(&self, _: ResumeRequest, _: String) -> Call<'_, StartResponse> {
        panic!("a reader resumes nothing")
    }
    fn interrupt(&self, _: StopRequest) -> Call<'_, StopResponse> {
        panic!("a reader stops nothing")
    }
    fn abort(&self, _: StopRequest) -> Call<'_, StopResponse> {
        panic!("a reader stops nothing")
    }
    fn status(&self, _: &SessionId) -> Call<'_, StatusResponse> {
        panic!("the status is not read")
    }
    fn stream(&self, _: &SessionId, _: Position, _: Option<&StreamId>) -> Call<'_, FrameStream> {
        panic!("the stream is not read")
    }
    fn snapshot(&self, session: &SessionId) -> Call<'_, SnapshotResponse> {
        self.outcome(
            json!({"sessionId": session, "streamId": "s", "state": {"n": 1}, "streamSequence": 7,
            "oldestRetainedSequence": 0, "stepCount": 2}),
        )
    }
    fn usage(&self, session: &SessionId) -> Call<'_, UsageResponse> {
        self.outcome(json!({"sessionId": session, "rollup": {"steps": 2}}))
    }
}

/// The sessions of this service.
#[derive(Default)]
struct Sessions {
    /// Whose they are, where the mount binds them.
    owner: Option<Caller>,
    /// `session child type` of every child that is known.
    known: BTreeSet<String>,
    unreachable: bool,
    asked: Rc<RefCell<Vec<String>>>,
}

struct Session {
    owner: Option<Caller>,
    answer: Result<u16, FetchError>,
    asked: Rc<RefCell<Vec<String>>>,
    name: String,
    known: BTreeSet<String>,
}

impl Objects for Sessions {
    fn object(&self, session: &SessionId) -> Rc<dyn Fetch> {
        Rc::new(Session {
            owner: self.owner.clone(),
            answer: if self.unreachable {
                Err(FetchError("reset".into()))
            } else {
                Ok(404)
            },
            asked: self.asked.clone(),
            name: session.to_string(),
            known: self.known.clone(),
        })
    }
}

impl Fetch for Session {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        assert_eq!(request.method(), http::Method::GET);
        assert_eq!(request.uri().path(), "/writer/descendant");
        let caller = Inside::read(request.headers()).caller;
        assert_eq!(
            request.headers().len(),
            usize::from(caller.is_some()),
            "nothing of the reader's request goes on but who it is"
        );
        let query: Vec<(String, String)> =
            form_urlencoded::parse(request.uri().query().unwrap().as_bytes())
                .into_owned()
                .collect();
        let names: Vec<&str> = query.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["sessionId", "subSessionId", "subAgentType"]);
        assert_eq!(query[0].1, self.name);
        self.asked.borrow_mut().push(self.name.clone());
        let known = self
            .known
            .contains(&format!("{} {} {}", self.name, query[1].1, query[2].1));
        let known = known && caller == self.owner;
        let outcome = match &self.answer {
            _ if known => Ok(200),
            other => other.clone(),
        };
        ready(outcome.map(|status| answer(status, "application/json", Body::Full("{}".into()))))
            .boxed_local()
    }
}

const CHILD: &str = "w1-remote-c1-abc";
const GRANDCHILD: &str = "w1-remote-c1-abc-sub-c2-def";

fn sessions() -> Sessions {
    let known = [
        format!("w1 {CHILD} planner"),
        format!("w1 {GRANDCHILD} thread-researcher"),
    ];
    Sessions {
        known: known.into(),
        ..Sessions::default()
    }
}

fn request(method: &str, path_and_query: &str, key: Option<&str>) -> Request {
    let mut request = http::Request::builder()
        .method(method)
        .uri(format!("http://x{path_and_query}"));
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    request.body(Bytes::new()).unwrap()
}

fn mount() -> Mount {
    Mount::new("/agents")
        .with_agents([AgentType::parse("writer").unwrap()])
        .with_auth(Auth::Bearer(Some("k".into())))
}

fn read_with(sessions: &Sessions, child: &Child, request: &Request) -> (Response, Value) {
    read_over(mount(), sessions, child, request)
}

fn read_over(
    mount: Mount,
    sessions: &Sessions,
    child: &Child,
    request: &Request,
) -> (Response, Value) {
    let agent_type = AgentType::parse("writer").unwrap();
    let types = RefCell::new(Vec::new());
    let proxy = ChildProxy {
        mount: &mount,
        base_path: "/agents",
        agent_type: &agent_type,
        objects: sessions,
        children: &|child_type| {
            types.borrow_mut().push(child_type.to_string());
            Rc::new(child.clone())
        },
    };
    let reading = Reading::of_path(request.uri().path()).expect("one of the two paths");
    let response = proxy
        .answer(reading, request)
        .now_or_never()
        .expect("nothing waits");
    let (parts, body) = response.into_parts();
    let Body::Full(bytes) = body else {
        panic!("the answer is whole")
    };
    let value = serde_json::from_slice(&bytes).unwrap();
    (Response::from_parts(parts, Body::Full(bytes)), value)
}

fn read(path_and_query: &str) -> (u16, Value) {
    let (response, value) = read_with(
        &sessions(),
        &Child::Answers,
        &request("GET", path_and_query, Some("k")),
    );
    (response.status().as_u16(), value)
}

#[test]
fn a_known_child_and_its_descendants_are_read() {
    let (status, body) = read(&format!("/api/child-snapshot?sessionId={CHILD}"));
    assert_eq!(
        (status, &body["state"], &body["streamSequence"]),
        (200, &json!({"n": 1}), &json!(7))
    );
    let (status, body) = read(&format!(
        "/api/child-usage?sessionId={GRANDCHILD}&agentType=thread-researcher"
    ));
    assert_eq!(
        (status, body),
        (
            200,
            json!({"sessionId": GRANDCHILD, "rollup": {"steps": 2}})
        )
    );
}

#[test]
fn where_the_mount_binds_sessions_a_child_is_read_by_the_caller_of_its_session_alone() {
    let sessions = Sessions {
        owner: Some(Caller::of("ada")),
        ..sessions()
    };
    for (account, wanted) in [(Some("ada"), 200), (Some("bob"), 404), (None, 401)] {
        for route in ["snapshot", "usage"] {
            let mut request = request(
                "GET",
                &format!("/api/child-{route}?sessionId={CHILD}"),
                Some("k"),
            );
            if let Some(account) = account {
                let account = HeaderValue::from_static(account);
                request.headers_mut().insert("x-account", account);
            }
            let bound = mount().with_callers(|head| {
                let account = head.headers.get("x-account")?;
                account.to_str().ok().map(str::to_owned)
            });
            let (answer, _) = read_over(bound, &sessions, &Child::Answers, &request);
            assert_eq!(answer.status(), wanted, "{account:?} {route}");
        }
    }
}

#[test]
fn whatever_is_not_a_known_child_is_one_and_the_same_404() {
    let cases = [
        "sessionId=w1".to_owned(),
        "sessionId=nobody".to_owned(),
        "sessionId=w1-remote-".to_owned(),
        "sessionId=-remote-c1".to_owned(),
        "sessionId=w2-remote-c1-abc".to_owned(),
        "sessionId=w1-remote-c9-zzz".to_owned(),
        "sessionId=w1-sub-c1-abc".to_owned(),
        format!("sessionId={CHILD}&agentType=thread-researcher"),
        format!("sessionId={GRANDCHILD}"),
        format!("sessionId={CHILD}&agentType=.."),
    ];
    let expected = serde_json::to_value(ErrorEnvelope::from(&Error::not_found())).unwrap();
    for case in cases {
        for path in ["/api/child-snapshot", "/api/child-usage"] {
            assert_eq!(
                read(&format!("{path}?{case}")),
                (404, expected.clone()),
                "{path} {case}"
            );
        }
    }
}

#[test]
fn the_refusals_come_in_the_mounts_order_and_form() {
    let query = format!("sessionId={CHILD}");
    // Method, credentials, query: each case breaks all that comes after as well.
    let cases = [
        ("POST", "", None, 405, "METHOD_NOT_ALLOWED"),
        ("HEAD", query.as_str(), Some("k"), 405, "METHOD_NOT_ALLOWED"),
        ("GET", "", None, 401, "UNAUTHORIZED"),
        ("GET", query.as_str(), Some("K"), 401, "UNAUTHORIZED"),
        ("GET", "", Some("k"), 400, "VALIDATION_ERROR"),
        ("GET", "sessionId=a%2Fb", Some("k"), 400, "VALIDATION_ERROR"),
    ];
    for (method, query, key, status, code) in cases {
        let (response, body) = read_with(
            &sessions(),
            &Child::Answers,
            &request(method, &format!("/api/child-snapshot?{query}"), key),
        );
        assert_eq!(
            (response.status().as_u16(), &body["code"]),
            (status, &json!(code)),
            "{method} {query}"
        );
        assert_eq!(response.headers()["x-remote-agents-version"], "1");
        if status == 405 {
            assert_eq!(response.headers()["allow"], "GET");
        }
        if status == 400 {
            assert_eq!(body["field"], "sessionId");
        }
    }
}

#[test]
fn every_prefix_is_asked_once_and_nothing_else() {
    let sessions = sessions();
    let id = "a-remote-b-remote-c-remote-d";
    read_with(
        &sessions,
        &Child::Answers,
        &request(
            "GET",
            &format!("/api/child-usage?sessionId={id}"),
            Some("k"),
        ),
    );
    assert_eq!(
        *sessions.asked.borrow(),
        ["a", "a-remote-b", "a-remote-b-remote-c"]
    );
}

#[test]
fn a_session_that_cannot_be_asked_makes_no_404() {
    let sessions = Sessions {
        unreachable: true,
        ..Sessions::default()
    };
    let request = request(
        "GET",
        &format!("/api/child-snapshot?sessionId={CHILD}"),
        Some("k"),
    );
    let (response, body) = read_with(&sessions, &Child::Answers, &request);
    assert_eq!(
        (response.status().as_u16(), &body["code"]),
        (503, &json!("transport_error"))
    );
    assert_eq!(body["retryable"], true);
}

#[test]
fn the_other_services_failures_have_their_statuses_here() {
    let cases = [
        (Child::refuses(404, Code::NotFound), 404, "NOT_FOUND"),
        (
            Child::refuses(404, Code::FeatureUnavailable),
            501,
            "FEATURE_UNAVAILABLE",
        ),
        (Child::refuses(500, Code::Internal), 502, "transport_error"),
        (
            Child::refuses(401, Code::Unauthorized),
            502,
            "transport_error",
        ),
        (
            Child::Fails(TransportError::Unreachable("gone".into())),
            502,
            "transport_error",
        ),
        (
            Child::Fails(TransportError::Malformed("no JSON".into())),
            502,
            "transport_error",
        ),
        (
            Child::Fails(TransportError::ProjectedMount),
            502,
            "transport_error",
        ),
    ];
    for (child, status, code) in cases {
        let request = request(
            "GET",
            &format!("/api/child-usage?sessionId={CHILD}"),
            Some("k"),
        );
        let (response, body) = read_with(&sessions(), &child, &request);
        assert_eq!(
            (response.status().as_u16(), &body["code"]),
            (status, &json!(code))
        );
        assert!(
            body["error"]
                .as_str()
                .is_some_and(|sentence| !sentence.is_empty() && sentence != "theirs")
        );
    }
}

#[test]
fn a_session_whose_id_ends_like_a_mark_begins_has_children_too() {
    let found = |child: &str| -> Vec<String> {
        ancestors(&SessionId::parse(child).unwrap())
            .map(|session| session.to_string())
            .collect()
    };
    // The two marks share a hyphen.
    assert_eq!(
        found("my-remote-remote-call-x"),
        ["my", "my-remote"].map(str::to_owned)
    );
    assert_eq!(
        found("a-remote--remote-call-x"),
        ["a", "a-remote-"].map(str::to_owned)
    );
    assert!(found("a-remote-").is_empty());
    assert!(found("-remote-b").is_empty());
}
