#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use ::http::{HeaderMap, HeaderValue};
use bytes::Bytes;
use futures::future::LocalBoxFuture;
use futures::stream::{self, StreamExt as _};
use serde_json::{Value, json};

mod bodies;
mod streams;

use super::testing::TestRuntime;
use super::*;
use crate::http::{Body, BodyError, answer};
use crate::protocol::ids::AgentType;
use crate::protocol::sse;

type Step = Box<dyn FnOnce(&Request) -> LocalBoxFuture<'static, Result<Response, FetchError>>>;

/// Answers requests from a script, in order, and remembers them.
#[derive(Default)]
struct Scripted {
    steps: RefCell<VecDeque<Step>>,
    seen: RefCell<Vec<Request>>,
}

impl Fetch for Scripted {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let step = self
            .steps
            .borrow_mut()
            .pop_front()
            .expect("a request beyond the script");
        let answer = step(&request);
        self.seen.borrow_mut().push(request);
        answer
    }
}

struct Bench {
    fetch: Rc<Scripted>,
    runtime: Rc<TestRuntime>,
    transport: HttpTransport,
}

impl Bench {
    fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        let fetch = Rc::new(Scripted {
            steps: RefCell::new(steps.into_iter().collect()),
            ..Scripted::default()
        });
        let runtime = Rc::new(TestRuntime::new());
        let agent_type = AgentType::parse("planner").unwrap();
        let transport = HttpTransport::new(
            fetch.clone(),
            runtime.clone(),
            "http://producer/",
            "/internal/agents",
            agent_type,
        );
        Self {
            fetch,
            runtime,
            transport,
        }
    }

    fn without_retries(self) -> Self {
        let once = RetryPolicy {
            post_retries: 0,
            ..RetryPolicy::default()
        };
        self.with(|transport| transport.with_policy(once))
    }

    fn with(mut self, change: impl FnOnce(HttpTransport) -> HttpTransport) -> Self {
        self.transport = change(self.transport);
        self
    }

    fn requests(&self) -> usize {
        assert!(
            self.fetch.steps.borrow().is_empty(),
            "the script was not used up"
        );
        self.fetch.seen.borrow().len()
    }

    fn headers(&self, n: usize) -> Vec<(String, String)> {
        let seen = self.fetch.seen.borrow();
        let mut all: Vec<_> = seen[n]
            .headers()
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
            .collect();
        all.sort();
        all
    }
}

fn gives(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Step {
    let body = body.into();
    Box::new(move |_| Box::pin(async move { Ok(answer(status, content_type, Body::Full(body))) }))
}

fn ok(value: &Value) -> Step {
    gives(200, "application/json", value.to_string())
}

fn refuses(status: u16, code: &str) -> Step {
    gives(
        status,
        "application/json",
        json!({"code": code, "error": "No."}).to_string(),
    )
}

fn with_header(step: Step, name: &'static str, value: &'static str) -> Step {
    Box::new(move |request| {
        let answer = step(request);
        Box::pin(async move {
            let mut answer = answer.await?;
            answer
                .headers_mut()
                .insert(name, HeaderValue::from_static(value));
            Ok(answer)
        })
    })
}

fn unreachable() -> Step {
    Box::new(|_| Box::pin(async { Err(FetchError("connection refused".into())) }))
}

fn silent() -> Step {
    Box::new(|_| Box::pin(std::future::pending()))
}

fn streams(parts: Vec<Result<Bytes, BodyError>>, then_hang: bool) -> Step {
    Box::new(move |_| {
        let parts = stream::iter(parts);
        let body: crate::http::ByteStream = if then_hang {
            Box::pin(parts.chain(stream::pending()))
        } else {
            Box::pin(parts)
        };
        Box::pin(async move { Ok(answer(200, sse::CONTENT_TYPE, Body::Stream(body))) })
    })
}

fn child() -> SessionId {
    SessionId::parse("p:1-remote-c").unwrap()
}

fn status_body() -> Value {
    json!({"sessionId": child(), "agentType": "planner", "status": "running", "isExecuting": true,
        "streamId": "st_1", "stepCount": 2, "updatedAt": 5})
}

fn started() -> Value {
    json!({"sessionId": child(), "streamId": "st_1", "runId": "run_1"})
}

fn start_request() -> StartRequest {
    StartRequest {
        session_id: child(),
        agent_type: None,
        message: "hello".into(),
        state: None,
        metadata: None,
        user_id: None,
        tags: None,
        parent: None,
    }
}

async fn start(bench: &Bench) -> Result<StartResponse, TransportError> {
    bench
        .transport
        .start(start_request(), "start:k".into())
        .await
}

async fn stop(bench: &Bench) -> Result<StopResponse, TransportError> {
    bench
        .transport
        .interrupt(StopRequest {
            session_id: child(),
            reason: None,
        })
        .await
}

#[tokio::test(start_paused = true)]
async fn requests_carry_exactly_the_contract_headers_and_the_configured_ones() {
    let mut configured = HeaderMap::new();
    configured.insert("x-tenant", HeaderValue::from_static("t1"));
    configured.insert("accept", HeaderValue::from_static("text/plain"));
    let bench = Bench::new([
        ok(&started()),
        ok(&started()),
        ok(&json!({"sessionId": child(), "status": "interrupted", "accepted": true})),
        ok(&json!({"sessionId": child(), "status": "failed", "accepted": true})),
        ok(&status_body()),
        ok(
            &json!({"sessionId": child(), "streamId": "st_1", "state": {}, "streamSequence": -1,
            "oldestRetainedSequence": 0, "stepCount": 1}),
        ),
        ok(&json!({"sessionId": child(), "rollup": {}})),
        streams(vec![], true),
    ])
    .with(|transport| {
        transport
            .with_headers(HeaderSource::Static(configured))
            .with_trace(
                HeaderValue::from_static("00-a-b-01"),
                Some(HeaderValue::from_static("v=1")),
            )
    });
    let transport = &bench.transport;
    start(&bench).await.unwrap();
    let resume = ResumeRequest {
        session_id: child(),
        mode: None,
        message: None,
        parent: None,
    };
    transport.resume(resume, "resume:k:1".into()).await.unwrap();
    stop(&bench).await.unwrap();
    transport
        .abort(StopRequest {
            session_id: child(),
            reason: None,
        })
        .await
        .unwrap();
    transport.status(&child()).await.unwrap();
    assert_eq!(
        transport.snapshot(&child()).await.unwrap().stream_sequence,
        Position::None
    );
    transport.usage(&child()).await.unwrap();
    let stream = StreamId::parse("st_1").unwrap();
    drop(
        transport
            .stream(&child(), Position::At(7), Some(&stream))
            .await
            .unwrap(),
    );

    assert_eq!(bench.requests(), 8);
    let seen: Vec<_> = bench
        .fetch
        .seen
        .borrow()
        .iter()
        .map(|r| format!("{} {}", r.method(), r.uri()))
        .collect();
    assert_eq!(
        seen,
        [
            "POST http://producer/internal/agents/planner/start",
            "POST http://producer/internal/agents/planner/resume",
            "POST http://producer/internal/agents/planner/interrupt",
            "POST http://producer/internal/agents/planner/abort",
            "GET http://producer/internal/agents/planner/status?sessionId=p%3A1-remote-c",
            "GET http://producer/internal/agents/planner/snapshot?sessionId=p%3A1-remote-c",
            "GET http://producer/internal/agents/planner/usage?sessionId=p%3A1-remote-c",
            "GET http://producer/internal/agents/planner/sse?sessionId=p%3A1-remote-c&fromSequence=7&streamId=st_1",
        ]
    );
    let expect = |accept: &str, post: bool, key: Option<&str>| {
        let mut all = vec![
            ("accept", accept),
            ("traceparent", "00-a-b-01"),
            ("tracestate", "v=1"),
            ("x-remote-agents-version", "1"),
            ("x-tenant", "t1"),
        ];
        all.extend(post.then_some(("content-type", "application/json")));
        all.extend(key.map(|key| ("idempotency-key", key)));
        all.sort_unstable();
        all.into_iter()
            .map(|(n, v)| (n.to_owned(), v.to_owned()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        bench.headers(0),
        expect("application/json", true, Some("start:k"))
    );
    assert_eq!(
        bench.headers(1),
        expect("application/json", true, Some("resume:k:1"))
    );
    assert_eq!(bench.headers(2), expect("application/json", true, None));
    assert_eq!(bench.headers(3), expect("application/json", true, None));
    for read in 4..7 {
        assert_eq!(bench.headers(read), expect("application/json", false, None));
    }
    assert_eq!(bench.headers(7), expect("text/event-stream", false, None));
    let body: Value = serde_json::from_slice(bench.fetch.seen.borrow()[0].body()).unwrap();
    assert_eq!(
        body,
        json!({"sessionId": "p:1-remote-c", "message": "hello"})
    );
}

#[tokio::test(start_paused = true)]
async fn without_configuration_a_read_carries_two_headers() {
    let bench = Bench::new([ok(&status_body())]);
    bench.transport.status(&child()).await.unwrap();
    let names: Vec<_> = bench.headers(0).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["accept", "x-remote-agents-version"]);
}

#[tokio::test(start_paused = true)]
async fn a_header_factory_is_asked_for_each_try() {
    let count = Rc::new(Cell::new(0_u32));
    let factory: HeaderFactory = Rc::new(move || {
        count.set(count.get() + 1);
        let n = count.get();
        Box::pin(async move {
            if n == 1 {
                return Err("the token service is down".to_owned());
            }
            let mut headers = HeaderMap::new();
            headers.insert(
                "authorization",
                HeaderValue::from_str(&format!("Bearer {n}")).unwrap(),
            );
            Ok(headers)
        })
    });
    let bench = Bench::new([unreachable(), ok(&status_body())])
        .with(|transport| transport.with_headers(HeaderSource::Factory(factory)));
    bench.transport.status(&child()).await.unwrap();
    assert_eq!(bench.requests(), 2);
    let token = |n: usize| {
        bench
            .headers(n)
            .into_iter()
            .find(|(name, _)| name == "authorization")
            .unwrap()
            .1
    };
    assert_eq!([token(0), token(1)], ["Bearer 2", "Bearer 3"]);
}

/// The kinds of call that differ in what is retried.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Read,
    KeyedPost,
    PlainPost,
}

async fn outcome(kind: Kind, steps: Vec<Step>) -> (Result<(), TransportError>, usize, u64) {
    let bench = Bench::new(steps);
    let result = match kind {
        Kind::Read => bench.transport.status(&child()).await.map(drop),
        Kind::KeyedPost => start(&bench).await.map(drop),
        Kind::PlainPost => stop(&bench).await.map(drop),
    };
    let sent = bench.fetch.seen.borrow().len();
    (result, sent, bench.runtime.elapsed())
}

#[tokio::test(start_paused = true)]
async fn what_is_retried_and_what_is_not() {
    use Kind::{KeyedPost, PlainPost, Read};
    let all = [Read, KeyedPost, PlainPost];
    type Make = fn() -> Step;
    let table: [(&str, Make, &[Kind]); 18] = [
        ("network failure", unreachable, &all),
        ("silence", silent, &all),
        (
            "502 without an envelope",
            || gives(502, "text/html", "<h1>bad gateway</h1>"),
            &all,
        ),
        (
            "500 without an envelope",
            || gives(500, "text/plain", "error 1101"),
            &all,
        ),
        (
            "520 without an envelope",
            || gives(520, "text/plain", ""),
            &all,
        ),
        (
            "429 without an envelope",
            || gives(429, "text/plain", ""),
            &all,
        ),
        ("429", || refuses(429, "RATE_LIMITED"), &all),
        ("503", || refuses(503, "transport_error"), &all),
        ("504", || refuses(504, "OVERLOADED"), &all),
        ("500", || refuses(500, "INTERNAL"), &[Read, KeyedPost]),
        ("501", || refuses(501, "FEATURE_UNAVAILABLE"), &[]),
        ("400", || refuses(400, "VALIDATION_ERROR"), &[]),
        ("401", || refuses(401, "UNAUTHORIZED"), &[]),
        ("404", || refuses(404, "NOT_FOUND"), &[]),
        ("409", || refuses(409, "ALREADY_RUNNING"), &[]),
        (
            "404 without an envelope",
            || gives(404, "text/html", "nothing here"),
            &[],
        ),
        (
            "redirect",
            || with_header(gives(302, "text/html", ""), "location", "http://elsewhere/"),
            &[KeyedPost],
        ),
        (
            "garbage",
            || gives(200, "application/json", "{\"sessionId\":"),
            &[KeyedPost],
        ),
    ];
    for (name, step, retried) in table {
        for kind in all {
            let steps = (0..4).map(|_| step()).collect();
            let (result, sent, _) = outcome(kind, steps).await;
            assert!(result.is_err(), "{name} {kind:?}");
            assert_eq!(
                sent,
                if retried.contains(&kind) { 4 } else { 1 },
                "{name} {kind:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_is_answered_counts() {
    let steps = vec![
        unreachable(),
        gives(503, "text/plain", ""),
        refuses(500, "INTERNAL"),
        ok(&started()),
    ];
    let (result, sent, elapsed) = outcome(Kind::KeyedPost, steps).await;
    assert_eq!((result, sent), (Ok(()), 4));
    // Half of each wait is chance, and the test's chance is at its highest.
    assert_eq!(elapsed, 500 + 1000 + 2000);
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_honoured_and_capped() {
    let steps = vec![
        with_header(refuses(429, "RATE_LIMITED"), "retry-after", "7"),
        with_header(gives(503, "text/plain", ""), "retry-after", "86400"),
        ok(&started()),
    ];
    let (result, _, elapsed) = outcome(Kind::KeyedPost, steps).await;
    assert_eq!((result, elapsed), (Ok(()), 67_000));
}

#[tokio::test(start_paused = true)]
async fn each_try_has_its_own_deadline() {
    let (result, sent, elapsed) = outcome(Kind::Read, vec![silent(), ok(&status_body())]).await;
    assert_eq!((result, sent, elapsed), (Ok(()), 2, 10_500));
    let (result, ..) = outcome(Kind::KeyedPost, (0..4).map(|_| silent()).collect()).await;
    assert_eq!(
        result,
        Err(TransportError::Timeout(Duration::from_secs(30)))
    );
}

#[tokio::test(start_paused = true)]
async fn refusals_keep_their_envelope() {
    let step = with_header(
        gives(409, "application/json; charset=utf-8",
            json!({"code": "ALREADY_RUNNING", "error": "Attach.", "streamId": "st_9", "runId": "r"}).to_string()),
        "retry-after",
        "3",
    );
    let bench = Bench::new([step]);
    let Err(TransportError::Refused {
        status,
        envelope,
        retry_after,
    }) = start(&bench).await
    else {
        panic!("refused")
    };
    assert_eq!((status, retry_after), (409, Some(3)));
    assert_eq!(
        (envelope.code.as_str(), envelope.stream_id.as_deref()),
        ("ALREADY_RUNNING", Some("st_9"))
    );
}

#[tokio::test(start_paused = true)]
async fn answers_that_break_the_contract_are_malformed() {
    let elsewhere = json!({"sessionId": "other", "streamId": "st_1"});
    let odd_stream = json!({"sessionId": child(), "streamId": "a b"});
    let huge = format!("{{\"sessionId\":\"{}\"}}", "x".repeat(8 * 1024 * 1024));
    let cases: Vec<(&str, Step)> = vec![
        ("another session", ok(&elsewhere)),
        ("an odd stream id", ok(&odd_stream)),
        ("a missing field", ok(&json!({"sessionId": child()}))),
        ("no JSON", gives(200, "application/json", "<html>")),
        ("nothing", gives(200, "application/json", "")),
        (
            "wrong content type",
            gives(200, "text/html", started().to_string()),
        ),
        (
            "another success",
            gives(202, "application/json", started().to_string()),
        ),
        (
            "a redirect",
            with_header(gives(307, "text/plain", ""), "location", "/x"),
        ),
        ("too large", gives(200, "application/json", huge.clone())),
        (
            "too large, in parts",
            Box::new(move |_| {
                let parts = stream::repeat(Ok(Bytes::from(vec![b' '; 1024 * 1024])));
                Box::pin(async move {
                    Ok(answer(
                        200,
                        "application/json",
                        Body::Stream(Box::pin(parts)),
                    ))
                })
            }),
        ),
        (
            "an odd version",
            with_header(ok(&started()), "x-remote-agents-version", "one"),
        ),
    ];
    for (name, step) in cases {
        let bench = Bench::new([step]).without_retries();
        assert!(
            matches!(start(&bench).await, Err(TransportError::Malformed(_))),
            "{name}"
        );
        assert_eq!(bench.requests(), 1, "{name}");
    }
    let bench = Bench::new([ok(
        &json!({"sessionId": child(), "streamId": "st_1", "state": [], "streamSequence": 3,
        "oldestRetainedSequence": 0, "stepCount": 1}),
    )]);
    assert!(matches!(
        bench.transport.snapshot(&child()).await,
        Err(TransportError::Malformed(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn a_body_cut_short_is_a_network_failure() {
    let whole = started().to_string();
    for cut in 0..whole.len() {
        let part = Bytes::copy_from_slice(&whole.as_bytes()[..cut]);
        let step: Step = Box::new(move |_| {
            let parts = stream::iter([Ok(part), Err(BodyError("reset".into()))]);
            Box::pin(async move {
                Ok(answer(
                    200,
                    "application/json",
                    Body::Stream(Box::pin(parts)),
                ))
            })
        });
        let (result, sent, _) = outcome(Kind::KeyedPost, vec![step, ok(&started())]).await;
        assert_eq!((result, sent), (Ok(()), 2), "cut at {cut}");
    }
}

#[tokio::test(start_paused = true)]
async fn case_41_a_later_version_is_refused_and_an_absent_one_is_ours() {
    let bench = Bench::new([with_header(ok(&started()), "x-remote-agents-version", "2")]);
    assert_eq!(
        start(&bench).await,
        Err(TransportError::VersionUnsupported { theirs: 2 })
    );
    assert_eq!(bench.requests(), 1);
    let old: Step = Box::new(|_| {
        Box::pin(async {
            let mut answer = answer(
                200,
                "application/json",
                Body::Full(started().to_string().into()),
            );
            answer.headers_mut().remove("x-remote-agents-version");
            Ok(answer)
        })
    });
    assert!(start(&Bench::new([old])).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_projected_mount_is_refused_unless_the_reader_takes_any() {
    let projected = || with_header(ok(&status_body()), "x-remote-agents-mount", "projected");
    let bench = Bench::new([projected()]);
    assert_eq!(
        bench.transport.status(&child()).await,
        Err(TransportError::ProjectedMount)
    );
    assert_eq!(bench.requests(), 1);
    let bench = Bench::new([projected()]).with(HttpTransport::any_mount);
    assert!(bench.transport.status(&child()).await.is_ok());
    let bench = Bench::new([projected()]).with(|transport| transport.any_mount().raw_only());
    assert_eq!(
        bench.transport.status(&child()).await,
        Err(TransportError::ProjectedMount)
    );
    let raw = with_header(ok(&status_body()), "x-remote-agents-mount", "raw");
    assert!(Bench::new([raw]).transport.status(&child()).await.is_ok());
    let bench = Bench::new([with_header(
        streams(vec![], true),
        "x-remote-agents-mount",
        "projected",
    )]);
    assert_eq!(
        attach(&bench).await.err(),
        Some(TransportError::ProjectedMount)
    );
}

async fn attach(bench: &Bench) -> Result<FrameStream, TransportError> {
    bench
        .transport
        .stream(&child(), Position::At(0), None)
        .await
}
