//! What callers of a mount may take: how often they come, and how much of one session they get.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::{LocalBoxFuture, ready};
use remote_agents::agent::{Limits, typed_tool};
use remote_agents::http::Body;
use remote_agents::mount::{Auth, Head, Limiter, Mount, SessionLimits, Verdict, serve};
use remote_agents::native::{CommitMoment, LocalObjects, LocalRuntime, MemoryLimiter};
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::route::{Action, Route};
use remote_agents::{Agent, Agents, ToolContext};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, in_world, scripted, text, turn, yield_now};

pub const BASE: u64 = 1_700_000_000_000;
pub const KEY: &str = "Bearer the-key";

pub fn worker() -> AgentType {
    AgentType::parse("worker").unwrap()
}

pub fn objects(make: impl Fn() -> Agents + 'static) -> Rc<LocalObjects> {
    LocalObjects::new(
        BASE,
        Lines::default().sink(),
        Rc::new(move |_, _| Ok(make())),
    )
}

pub fn talker() -> Agent {
    Agent::new(worker(), "Talk.", scripted(|_| text("one two three")))
}

/// The caller of a request, as this product knows it: a header that its own gateway would set.
pub fn account(head: &Head<'_>) -> Option<String> {
    let account = head.headers.get("x-account")?.to_str().ok()?;
    Some(account.to_owned())
}

/// A mount that binds sessions, over some objects.
pub fn bound(objects: &Rc<LocalObjects>) -> Client {
    Client {
        mount: Rc::new(
            Mount::new("/agents")
                .with_auth(Auth::Bearer(Some("the-key".to_owned())))
                .with_callers(account)
                .with_messages()
                .with_ui(),
        ),
        objects: objects.clone(),
    }
}

/// A mount of the same objects that binds nothing, as for another service of one's own.
pub fn unbound(objects: &Rc<LocalObjects>) -> Client {
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: objects.clone(),
    }
}

/// A request of an action for a session, and what it is answered: status, headers and body.
pub async fn ask(
    client: &Client,
    action: Action,
    session: &str,
    headers: &[(&str, &str)],
) -> (u16, BTreeMap<String, String>, String) {
    let path = format!("/agents/worker/{}", action.as_str());
    let response = if action.is_post() {
        let body = json!({"sessionId": session, "message": "Go on."});
        client.send("POST", &path, headers, body.to_string()).await
    } else {
        let path = format!("{path}?sessionId={session}");
        client.send("GET", &path, headers, Bytes::new()).await
    };
    let status = response.status().as_u16();
    let told = response.headers().iter();
    let told = told.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()));
    let told = told.collect();
    let body = response.into_body().collect(1 << 20).await.unwrap();
    (status, told, String::from_utf8(body.to_vec()).unwrap())
}

pub fn of(account: &str) -> [(&str, &str); 2] {
    [("authorization", KEY), ("x-account", account)]
}

pub async fn ended(client: &Client, session: &str, headers: &[(&str, &str)]) {
    let (status, _, log) = ask(client, Action::Sse, session, headers).await;
    assert!(
        status == 200 && log.contains("event: end"),
        "{status} {log}"
    );
    idle(client, session).await;
}

/// Completes when nothing of a session's object is going on any more.
pub async fn idle(client: &Client, session: &str) {
    while client.objects.pending(&SessionId::parse(session).unwrap()) > 0 {
        yield_now().await;
    }
}

pub fn commits(objects: &LocalObjects) -> Rc<Cell<usize>> {
    let commits = Rc::new(Cell::new(0));
    let counted = commits.clone();
    objects.on_commit(Rc::new(move |_, moment| {
        if moment == CommitMoment::Before {
            counted.set(counted.get() + 1);
        }
    }));
    commits
}

/// Counts by hand: what it was asked, and what it says.
struct Scales {
    asked: RefCell<Vec<String>>,
    verdict: Cell<Verdict>,
}

impl Limiter for Scales {
    fn ask<'a>(&'a self, key: &'a str) -> LocalBoxFuture<'a, Verdict> {
        self.asked.borrow_mut().push(key.to_owned());
        ready(self.verdict.get()).boxed_local()
    }
}

#[test]
fn a_limiter_is_asked_behind_every_check_of_the_head_and_its_refusal_says_when() {
    in_world(|| async {
        let scales = Rc::new(Scales {
            asked: RefCell::default(),
            verdict: Cell::new(Verdict::Wait(Duration::from_millis(1_001))),
        });
        let objects = objects(|| Agents::new([talker()]).unwrap());
        let mount = Mount::new("/agents")
            .with_agents([worker()])
            .with_auth(Auth::Bearer(Some("the-key".to_owned())))
            .with_callers(account)
            .with_limiter(scales.clone(), |head| match head.route {
                Route::Agent {
                    action: Action::Sse,
                    ..
                } => None,
                _ => account(head),
            });
        let client = Client {
            mount: Rc::new(mount),
            objects: objects.clone(),
        };
        let written = commits(&objects);
        let (status, told, body) = ask(&client, Action::Start, "s", &of("ada")).await;
        assert_eq!((status, told["retry-after"].as_str()), (429, "2"));
        assert!(
            body.contains("\"RATE_LIMITED\"") && body.contains("\"retryable\":true"),
            "{body}"
        );
        assert_eq!(told["x-remote-agents-version"], "1");
        assert_eq!(written.get(), 0);
        assert!(objects.sessions().is_empty(), "no object was asked");
        // What is refused anyway is not counted, and neither is what has no key.
        for (path, method, headers, status) in [
            ("/nothing", "GET", of("ada").to_vec(), 404),
            ("/agents/worker/status", "POST", of("ada").to_vec(), 405),
            (
                "/agents/worker/status",
                "GET",
                vec![("x-account", "ada")],
                401,
            ),
            (
                "/agents/worker/status",
                "GET",
                vec![("authorization", KEY)],
                401,
            ),
            ("/agents/other/status", "GET", of("ada").to_vec(), 404),
            (
                "/agents/worker/sse?sessionId=s",
                "GET",
                of("ada").to_vec(),
                404,
            ),
        ] {
            let answer = client.send(method, path, &headers, Bytes::new()).await;
            assert_eq!(answer.status().as_u16(), status, "{method} {path}");
        }
        assert_eq!(scales.asked.take(), ["ada"]);
        scales.verdict.set(Verdict::Allow);
        assert_eq!(ask(&client, Action::Start, "s", &of("ada")).await.0, 200);
        let list = client
            .send("GET", "/agents", &of("bob"), Bytes::new())
            .await;
        assert_eq!(list.status(), 200);
        assert_eq!(scales.asked.take(), ["ada", "bob"]);
    });
}

#[test]
fn a_limiter_in_memory_lets_so_many_come_in_a_period_and_forgets_who_stayed_away() {
    in_world(|| async {
        let runtime = LocalRuntime::new(BASE, Lines::default().sink());
        let limiter = MemoryLimiter::new(runtime, 2, Duration::from_secs(10));
        let ask = async |key: &str| limiter.ask(key).await;
        assert_eq!(ask("a").await, Verdict::Allow);
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(ask("a").await, Verdict::Allow);
        assert_eq!(ask("a").await, Verdict::Wait(Duration::from_secs(6)));
        assert_eq!(ask("b").await, Verdict::Allow, "each key has its own count");
        tokio::time::sleep(Duration::from_millis(5_999)).await;
        assert_eq!(ask("a").await, Verdict::Wait(Duration::from_millis(1)));
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(ask("a").await, Verdict::Allow);
        for number in 0..1_000 {
            assert_eq!(ask(&format!("k{number}")).await, Verdict::Allow);
        }
        assert_eq!(limiter.keys(), 1_002);
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(ask("c").await, Verdict::Allow);
        assert_eq!(limiter.keys(), 1);
    });
}

fn limits(objects: &Rc<LocalObjects>, limits: SessionLimits) -> Client {
    let mount = Mount::new("/agents").allow_unauthenticated();
    Client {
        mount: Rc::new(mount.with_session_limits(limits)),
        objects: objects.clone(),
    }
}

#[test]
fn a_mount_lowers_the_readers_of_a_session_and_raises_nothing() {
    in_world(|| async {
        let hang = || {
            typed_tool("hang", "Never ends.", |_: ToolContext, _: Value| async {
                std::future::pending::<()>().await;
                Ok(json!({}))
            })
        };
        let objects = objects(move || {
            let model = scripted(|_| calls(&[("c1", "hang", json!({}))]));
            let agent = Agent::new(worker(), "Hang.", model).with_tool(hang());
            Agents::new([agent.with_max_readers(2)]).unwrap()
        });
        let few = limits(
            &objects,
            SessionLimits {
                max_readers: 1,
                ..SessionLimits::default()
            },
        );
        let many = limits(
            &objects,
            SessionLimits {
                max_readers: 9,
                ..SessionLimits::default()
            },
        );
        assert_eq!(ask(&few, Action::Start, "s", &[]).await.0, 200);
        let open = async |client: &Client, headers: &[(&str, &str)]| {
            let path = "/agents/worker/sse?sessionId=s";
            client.send("GET", path, headers, Bytes::new()).await
        };
        let one = open(&few, &[]).await;
        assert_eq!(one.status(), 200);
        for headers in [
            &[][..],
            &[("x-remote-agents-internal-limits", "100 100 100")],
        ] {
            let refused = open(&few, headers).await;
            assert_eq!(refused.status(), 429);
            assert_eq!(refused.headers()["retry-after"], "5");
        }
        let two = open(&many, &[]).await;
        assert_eq!(two.status(), 200);
        assert_eq!(
            open(&many, &[]).await.status(),
            429,
            "the agent's own bound"
        );
        let (Body::Stream(_), Body::Stream(_)) = (one.into_body(), two.into_body()) else {
            panic!("streams were expected");
        };
        assert_eq!(open(&few, &[]).await.status(), 200, "both have left");
    });
}

#[test]
fn a_state_over_the_bound_is_refused_at_the_start_and_stays_as_it_was_in_a_tool() {
    in_world(|| async {
        let tool = || {
            typed_tool(
                "grow",
                "Grows.",
                |context: ToolContext, _: Value| async move {
                    context.update(|state: &mut serde_json::Map<String, Value>| {
                        state.insert("more".to_owned(), json!("x".repeat(100)));
                    })?;
                    Ok(json!({}))
                },
            )
        };
        let objects = objects(move || {
            let model = scripted(|request| match turn(request) {
                0 => calls(&[("c1", "grow", json!({}))]),
                _ => text("done"),
            });
            let limits = Limits {
                max_state_bytes: 100,
                ..Limits::default()
            };
            let agent = Agent::new(worker(), "Grow.", model).with_tool(tool());
            Agents::new([agent.with_limits(limits)]).unwrap()
        });
        // {"a":""} and so many more.
        let start = async |client: &Client, session: &str, bytes: usize| {
            let state = json!({"a": "x".repeat(bytes - 8)});
            let body = json!({"sessionId": session, "message": "m", "state": state});
            client.post("/agents/worker/start", body).await
        };
        let own = unbound(&objects);
        let less = limits(
            &objects,
            SessionLimits {
                max_state_bytes: 50,
                ..SessionLimits::default()
            },
        );
        for (client, most) in [(&own, 100), (&less, 50)] {
            let (status, refused) = start(client, "s", most + 1).await;
            assert_eq!(
                (status, &refused["code"]),
                (413, &json!("PAYLOAD_TOO_LARGE"))
            );
            assert_eq!(refused["field"], "state");
            let (status, _) = client.get("/agents/worker/status?sessionId=s").await;
            assert_eq!(status, 404, "nothing was begun");
        }
        assert_eq!(start(&less, "s", 50).await.0, 200);
        ended(&less, "s", &[]).await;
        let (_, snapshot) = own.get("/agents/worker/snapshot?sessionId=s").await;
        assert_eq!(snapshot["state"], json!({"a": "x".repeat(42)}));
        let (_, status) = own.get("/agents/worker/status?sessionId=s").await;
        assert_eq!(status["status"], "completed");
        let (_, _, log) = ask(&own, Action::Sse, "s", &[]).await;
        assert!(
            log.contains("\"success\":false") && log.contains("The state is too large."),
            "{log}"
        );
        assert!(!log.contains("state_patch"));
    });
}

#[test]
fn a_log_over_the_bound_ends_the_run_with_its_step_and_takes_no_further_one() {
    in_world(|| async {
        let objects = objects(|| {
            let tool = typed_tool("look", "Looks.", |_: ToolContext, _: Value| async {
                Ok(json!({"seen": "x".repeat(2_000)}))
            });
            let model = scripted(|request| {
                let says = format!("{:?}", request.messages.last());
                let id = format!("c{}", turn(request));
                if says.contains("briefly") {
                    text("done")
                } else {
                    calls(&[(id.as_str(), "look", json!({"n": turn(request)}))])
                }
            });
            let limits = Limits {
                max_log_bytes: Some(20_000),
                ..Limits::default()
            };
            let agent = Agent::new(worker(), "Look.", model).with_tool(tool);
            Agents::new([agent.with_limits(limits)]).unwrap()
        });
        let own = unbound(&objects);
        let say = async |client: &Client, action: &str, session: &str, message: &str| {
            let body = json!({"sessionId": session, "message": message});
            client.post(&format!("/agents/worker/{action}"), body).await
        };
        assert_eq!(say(&own, "start", "s", "Look on and on.").await.0, 200);
        let (_, _, log) = ask(&own, Action::Sse, "s", &[]).await;
        assert!(log.contains("reached its limit of 20000 bytes"), "{log}");
        let (_, status) = own.get("/agents/worker/status?sessionId=s").await;
        assert_eq!(status["errorCode"], "run_attempts_exhausted");
        let steps = status["stepCount"].as_u64().unwrap();
        assert!((2..20).contains(&steps), "{steps} steps");
        let written = commits(&objects);
        for message in ["Answer briefly.", "Look on."] {
            let (status, refused) = say(&own, "resume", "s", message).await;
            assert_eq!(
                (status, &refused["code"]),
                (413, &json!("PAYLOAD_TOO_LARGE"))
            );
        }
        assert_eq!(written.get(), 0);
        // A mount's bound is met earlier, and by its own callers alone.
        let less = limits(
            &objects,
            SessionLimits {
                max_log_bytes: 100,
                ..SessionLimits::default()
            },
        );
        assert_eq!(say(&less, "start", "t", "Answer briefly.").await.0, 200);
        ended(&less, "t", &[]).await;
        assert_eq!(say(&less, "resume", "t", "Answer briefly.").await.0, 413);
        assert_eq!(say(&own, "resume", "t", "Answer briefly.").await.0, 200);
        ended(&own, "t", &[]).await;
        let running = say(&own, "start", "s", "Again.").await.1;
        assert_eq!(
            running["code"], "ALREADY_COMPLETED",
            "what is refused anyway says why"
        );
    });
}

#[test]
fn a_mount_sets_the_largest_body() {
    in_world(|| async {
        let objects = objects(|| Agents::new([talker()]).unwrap());
        let mount = Mount::new("/agents")
            .allow_unauthenticated()
            .with_body_limit(100);
        let client = Client {
            mount: Rc::new(mount),
            objects: objects.clone(),
        };
        let body = |size: usize| {
            let empty = json!({"sessionId": "s", "message": ""}).to_string();
            empty.replace("\"\"", &format!("\"{}\"", "x".repeat(size - empty.len())))
        };
        for size in [101, 5_000] {
            let refused = client
                .send("POST", "/agents/worker/start", &[], body(size))
                .await;
            assert_eq!(refused.status(), 413);
        }
        assert!(objects.sessions().is_empty());
        let request = http::Request::post("/agents/worker/start").body(Bytes::from(body(100)));
        let taken = serve(&client.mount, &*objects, request.unwrap()).await;
        assert_eq!(taken.status(), 200);
    });
}
