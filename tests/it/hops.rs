//! Three services in a row: who asked, under which labels, in which trace; what was spent.

use std::cell::RefCell;
use std::rc::Rc;

use futures::future::LocalBoxFuture;
use remote_agents::agent::SubAgent;
use remote_agents::http::{Request, Response};
use remote_agents::mount::Mount;
use remote_agents::native::{LocalObjects, MountFetch};
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::store::{Database as _, SqlValue, SubLocation};
use remote_agents::transport::{Fetch, FetchError, HttpTransport};
use remote_agents::{Agent, Agents};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, in_world, read, scripted, text, turn};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// One line for each request: the hop, the action, and the headers that were sent.
type Seen = Rc<RefCell<Vec<(usize, String, Vec<(String, String)>)>>>;

struct Watched {
    hop: usize,
    seen: Seen,
    inner: MountFetch,
}

impl Fetch for Watched {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let action = request.uri().path().rsplit('/').next().unwrap().to_owned();
        let headers = request.headers().iter();
        let headers = headers
            .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
            .collect();
        self.seen.borrow_mut().push((self.hop, action, headers));
        self.inner.fetch(request)
    }
}

fn kind(hop: usize) -> AgentType {
    AgentType::parse(&format!("hop{hop}")).unwrap()
}

/// Services 0, 1 and 2; each calls the next.
fn services(seen: &Seen, lines: &Lines) -> Vec<Client> {
    let mut next: Option<(Rc<Mount>, Rc<LocalObjects>)> = None;
    let mut all = Vec::new();
    for hop in (0..3).rev() {
        let below = next.take();
        let seen = seen.clone();
        let objects = LocalObjects::new(
            1_700_000_000_000,
            lines.sink(),
            Rc::new(move |_, runtime| {
                let model = scripted(move |request| match turn(request) {
                    0 if hop < 2 => calls(&[("c", "subagent__next", json!({"message": "go on"}))]),
                    _ => text("done"),
                });
                let mut agent = Agent::new(kind(hop), "Hop.", model);
                if let Some((mount, objects)) = &below {
                    let transport = HttpTransport::new(
                        Rc::new(Watched {
                            hop: hop + 1,
                            seen: seen.clone(),
                            inner: MountFetch::new(mount.clone(), objects.clone()),
                        }) as Rc<dyn Fetch>,
                        runtime.clone(),
                        "http://next",
                        "/agents",
                        kind(hop + 1),
                    );
                    agent = agent.with_sub_agent(SubAgent::new(
                        "next",
                        "The next.",
                        kind(hop + 1),
                        SubLocation::Remote,
                        Rc::new(transport),
                    ));
                }
                Agents::new([agent])
            }),
        );
        let mount = Rc::new(Mount::new("/agents").allow_unauthenticated());
        next = Some((mount.clone(), objects.clone()));
        all.insert(0, Client { mount, objects });
    }
    all
}

async fn run(services: &[Client], headers: &[(&str, &str)]) -> Value {
    let body = json!({"sessionId": "root", "message": "go", "userId": "user-1",
        "tags": ["a", "b"], "metadata": {"order": 7}});
    let answer = services[0]
        .send("POST", "/agents/hop0/start", headers, body.to_string())
        .await;
    let (status, body) = read(answer).await;
    assert_eq!(status, 200, "{body}");
    let settled = services[0].settled("hop0", "root").await;
    assert_eq!(settled["status"], "completed", "{settled}");
    settled
}

fn origin(client: &Client) -> Value {
    let sessions: Vec<SessionId> = client.objects.sessions();
    assert_eq!(sessions.len(), 1);
    let database = client.objects.database(&sessions[0]).unwrap();
    let rows = database.query("SELECT origin FROM ra_session", &[]);
    let SqlValue::Text(text) = rows.unwrap()[0][0].clone() else {
        panic!("no origin")
    };
    serde_json::from_str(&text).unwrap()
}

#[test]
fn user_tags_and_metadata_reach_every_descendant() {
    in_world(|| async {
        let services = services(&Seen::default(), &Lines::default());
        run(&services, &[]).await;
        for client in &services {
            let origin = origin(client);
            assert_eq!(origin["userId"], "user-1");
            assert_eq!(origin["tags"], json!(["a", "b"]));
            assert_eq!(origin["metadata"], json!({"order": 7}));
            assert_eq!(origin.get("trace"), None);
        }
    });
}

#[test]
fn case_40_a_traceparent_that_comes_in_makes_one_trace_over_three_hops() {
    in_world(|| async {
        let seen = Seen::default();
        let lines = Lines::default();
        let services = services(&seen, &lines);
        let parent = format!("00-{TRACE}-00f067aa0ba902b7-01");
        let headers = [
            ("traceparent", parent.as_str()),
            ("tracestate", "vendor=1"),
            ("authorization", "Bearer secret"),
            ("x-tenant", "t"),
        ];
        run(&services, &headers).await;
        let mut spans = vec!["00f067aa0ba902b7".to_owned()];
        for hop in [1, 2] {
            let mut of_hop = Vec::new();
            for (at, action, headers) in seen.borrow().iter() {
                if *at != hop {
                    continue;
                }
                let get = |name: &str| {
                    let found = headers.iter().find(|(known, _)| known == name);
                    found.map(|(_, value)| value.clone())
                };
                let trace = get("traceparent").unwrap_or_else(|| panic!("{action} has none"));
                let fields: Vec<&str> = trace.split('-').collect();
                assert_eq!((fields[0], fields[1], fields[3]), ("00", TRACE, "01"));
                assert_eq!(get("tracestate").as_deref(), Some("vendor=1"));
                assert_eq!(get("x-remote-agents-version").as_deref(), Some("1"));
                // Nothing else of the incoming request crosses.
                assert_eq!((get("authorization"), get("x-tenant")), (None, None));
                of_hop.push(fields[2].to_owned());
            }
            of_hop.dedup();
            assert_eq!(of_hop.len(), 1, "one span for one call");
            spans.extend(of_hop);
        }
        let distinct: std::collections::BTreeSet<_> = spans.iter().collect();
        assert_eq!(
            distinct.len(),
            3,
            "each hop is a span of its own: {spans:?}"
        );
        for client in &services {
            let trace = origin(client)["trace"]["traceparent"].to_string();
            assert!(trace.contains(TRACE), "{trace}");
        }
        let lines = lines.0.borrow();
        let of = |agent: &str| {
            let agent = format!("\"agentType\":\"{agent}\"");
            let all = lines.iter().filter(|line| line.contains(&agent));
            assert!(all.clone().count() > 0);
            assert!(all.into_iter().all(|line| line.contains(TRACE)), "{agent}");
        };
        for agent in ["hop0", "hop1", "hop2"] {
            of(agent);
        }
    });
}

#[test]
fn case_39_usage_of_three_hops_is_counted_once_and_the_same_wherever_it_is_asked_for() {
    in_world(|| async {
        let services = services(&Seen::default(), &Lines::default());
        run(&services, &[]).await;
        let (_, usage) = services[0].get("/agents/hop0/usage?sessionId=root").await;
        let rollup = &usage["rollup"];
        // Hops 0 and 1 ask the model twice (30 and 15 tokens), hop 2 once (15).
        assert_eq!(rollup["tokens"]["total"], 45 + 45 + 15);
        assert_eq!(rollup["partial"], false);
        let child = &rollup["subAgents"]["sessions"][0];
        assert_eq!(child["remoteRollupOrigin"], "end");
        assert_eq!(child["remoteRollup"]["tokens"]["total"], 45 + 15);
    });
}
