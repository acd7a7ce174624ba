//! The follower over real sessions: at once, late, over a line that breaks, and over a projection.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::LocalBoxFuture;
use remote_agents::agent::{SubAgent, typed_tool};
use remote_agents::follower::{Follower, FollowerEvent, Replay, Routes};
use remote_agents::http::{Body, BodyError, Request, Response};
use remote_agents::mount::{Mount, Projection};
use remote_agents::native::{LocalObjects, LocalRuntime, MountFetch};
use remote_agents::platform::Runtime;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::reconstruct::Status;
use remote_agents::session::Retention;
use remote_agents::store::SubLocation;
use remote_agents::transport::{
    Fetch, FetchError, HttpTransport, ObjectsFetch, Transport, TransportError,
};
use remote_agents::{Agent, Agents, ToolContext};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Client, Lines, calls, in_world, scripted, text, turn};

const START: u64 = 1_700_000_000_000;

#[derive(Default, Serialize, Deserialize, schemars::JsonSchema)]
struct Notes {
    list: Vec<u64>,
}

#[derive(Deserialize, schemars::JsonSchema)]
struct Write {
    values: Vec<u64>,
}

/// A tool that writes its values one after the other, each with a pause behind it. It shows them in
/// a live document too, which must mislead nobody.
fn write_tool() -> Rc<dyn remote_agents::Tool> {
    typed_tool(
        "write",
        "Writes.",
        |context: ToolContext, Write { values }: Write| async move {
            let shown = context.document("shown")?;
            for value in values {
                shown.set(&json!({"list": [value, "of the document"]}))?;
                context.update(|notes: &mut Notes| notes.list.push(value))?;
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            Ok(json!("written"))
        },
    )
}

fn agent_type(name: &str) -> AgentType {
    AgentType::parse(name).unwrap()
}

/// A parent that writes beside two children at once, in three steps, and children that write too.
fn world() -> Rc<LocalObjects> {
    world_that_keeps(Retention::default())
}

/// The same, with so much of the parent's log kept.
fn world_that_keeps(retention: Retention) -> Rc<LocalObjects> {
    LocalObjects::new(
        START,
        Lines::default().sink(),
        Rc::new(move |objects, runtime| {
            let write = |id: &'static str, from: u64| {
                let values: Vec<u64> = (from..from + 4).collect();
                (id, "write", json!({"values": values}))
            };
            let child = scripted(move |request| match turn(request) {
                0 => calls(&[write("a", 0), write("b", 10)]),
                1 => calls(&[write("c", 20)]),
                _ => text("the child is done"),
            });
            let ask = |id: &'static str| (id, "subagent__ask", json!({"message": id}));
            let parent = scripted(move |request| match turn(request) {
                0 => calls(&[write("a", 0), ask("one"), ask("two")]),
                1 => calls(&[write("b", 10), write("c", 20)]),
                _ => text("the parent is done"),
            });
            let fetch = Rc::new(ObjectsFetch::new(objects.clone())) as Rc<dyn Fetch>;
            let transport = HttpTransport::new(
                fetch,
                runtime.clone(),
                "http://object",
                "",
                agent_type("child"),
            );
            let sub = SubAgent::new(
                "ask",
                "Asks.",
                agent_type("child"),
                SubLocation::Local,
                Rc::new(transport),
            );
            Agents::new([
                Agent::new(agent_type("child"), "Work.", child)
                    .with_state::<Notes>()
                    .with_tool(write_tool()),
                Agent::new(agent_type("parent"), "Work.", parent)
                    .with_state::<Notes>()
                    .with_retention(retention)
                    .with_tool(write_tool())
                    .with_sub_agent(sub),
            ])
        }),
    )
}

/// A line whose streams break after so many parts, each time after another number of them.
struct Breaking {
    inner: MountFetch,
    after: usize,
    tries: Rc<Cell<usize>>,
}

impl Fetch for Breaking {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let is_stream = request.uri().path().ends_with("/sse");
        let answer = self.inner.fetch(request);
        self.tries.set(self.tries.get() + 1);
        let cut = 1 + (self.after + self.tries.get()) % 9;
        Box::pin(async move {
            let answer = answer.await?;
            if !is_stream || answer.status() != 200 {
                return Ok(answer);
            }
            let (head, body) = answer.into_parts();
            let Body::Stream(parts) = body else {
                return Ok(Response::from_parts(head, body));
            };
            let broken = futures::stream::iter([Err(BodyError("cut".into()))]);
            let parts = parts.take(cut).chain(broken);
            Ok(Response::from_parts(head, Body::Stream(Box::pin(parts))))
        })
    }
}

fn routes(objects: &Rc<LocalObjects>, mount: &Rc<Mount>, breaks: Option<usize>) -> Routes {
    let (objects, mount) = (objects.clone(), mount.clone());
    let tries = Rc::new(Cell::new(0));
    Rc::new(move |agent_type| {
        let inner = MountFetch::new(mount.clone(), objects.clone());
        let fetch: Rc<dyn Fetch> = match breaks {
            None => Rc::new(inner),
            Some(after) => Rc::new(Breaking {
                inner,
                after,
                tries: tries.clone(),
            }),
        };
        let runtime = LocalRuntime::new(START, Lines::default().sink());
        let base = "http://producer";
        let transport = HttpTransport::new(fetch, runtime, base, "/agents", agent_type.clone());
        Rc::new(transport.any_mount()) as Rc<dyn Transport>
    })
}

fn follower(routes: Routes) -> Follower {
    let runtime: Rc<dyn Runtime> = LocalRuntime::new(START, Lines::default().sink());
    let session = SessionId::parse("s1").unwrap();
    Follower::new(runtime, routes, session, agent_type("parent"))
        .with_backoff(Duration::from_millis(1))
}

/// What a follower saw: every exact state by session and step, and its last tree.
struct Seen {
    exact: BTreeMap<(String, u64), Value>,
    tree: BTreeMap<String, (Status, Value)>,
    end: FollowerEvent,
}

async fn follow(mut follower: Follower) -> Seen {
    let mut exact = BTreeMap::new();
    let mut end = None;
    while let Some(event) = follower.next().await {
        match event.unwrap() {
            FollowerEvent::Document(place) => {
                let document = &follower.nodes()[place].document;
                if let Status::Exact { step } = document.status() {
                    let key = (document.session().to_owned(), *step);
                    let known = exact.entry(key).or_insert_with(|| document.state().clone());
                    assert_eq!(known, document.state(), "one state for each step");
                }
            }
            event @ (FollowerEvent::End(_) | FollowerEvent::Failed(_)) => end = Some(event),
            _ => {}
        }
    }
    let nodes = follower.nodes().iter().map(|node| {
        let document = &node.document;
        let said = (document.status().clone(), document.state().clone());
        (document.session().to_owned(), said)
    });
    Seen {
        exact,
        tree: nodes.collect(),
        end: end.expect("an end"),
    }
}

async fn begin(client: &Client) {
    let start = json!({"sessionId": "s1", "message": "go"});
    assert_eq!(client.post("/agents/parent/start", start).await.0, 200);
}

#[test]
fn whoever_joins_whenever_and_however_often_it_is_cut_sees_the_same_tree() {
    in_world(|| async {
        let client = Client {
            mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
            objects: world(),
        };
        begin(&client).await;
        let mut tasks = Vec::new();
        for late in 0..60usize {
            let breaks = (late % 2 == 1).then_some(late);
            let follower = follower(routes(&client.objects, &client.mount, breaks));
            tasks.push(tokio::task::spawn_local(follow(follower)));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut all: Vec<Seen> = Vec::new();
        for task in tasks {
            all.push(task.await.unwrap());
        }
        let first = all.first().unwrap();
        assert_eq!(first.tree.len(), 3, "a parent and two children");
        for seen in &all {
            assert!(matches!(&seen.end, FollowerEvent::End(_)));
            assert_eq!(seen.tree, first.tree);
            for (key, state) in &seen.exact {
                let other = first.exact.get(key).unwrap_or(state);
                assert_eq!(state, other, "{key:?}");
            }
        }
        let steps = first
            .exact
            .keys()
            .filter(|(session, _)| session == "s1")
            .count();
        assert!(steps >= 3, "{:?}", first.exact.keys());
        for (session, (status, state)) in &first.tree {
            assert_eq!(status, &Status::Final, "{session}");
            let kind = if session == "s1" { "parent" } else { "child" };
            let path = format!("/agents/{kind}/snapshot?sessionId={session}");
            assert_eq!(&client.get(&path).await.1["state"], state, "{session}");
        }
    });
}

#[test]
fn whoever_joins_behind_a_trimmed_log_has_the_whole_tree() {
    in_world(|| async {
        let client = Client {
            mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
            objects: world_that_keeps(Retention::default().with_max_chunks(4)),
        };
        begin(&client).await;
        let mut tasks = Vec::new();
        for _ in 0..30 {
            tokio::time::sleep(Duration::from_millis(2)).await;
            let follower = follower(routes(&client.objects, &client.mount, None));
            tasks.push(tokio::task::spawn_local(follow(follower)));
        }
        client.settled("parent", "s1").await;
        let path = "/agents/parent/snapshot?sessionId=s1";
        let floor = client.get(path).await.1["oldestRetainedSequence"].clone();
        assert!(
            floor.as_u64().unwrap() > 20,
            "the announcements are trimmed: {floor}"
        );
        let late = follower(routes(&client.objects, &client.mount, None));
        tasks.push(tokio::task::spawn_local(follow(late)));
        for task in tasks {
            let seen = task.await.unwrap();
            assert_eq!(seen.tree.len(), 3, "a parent and two children");
            for (session, (status, state)) in &seen.tree {
                assert_eq!(status, &Status::Final, "{session}");
                let kind = if session == "s1" { "parent" } else { "child" };
                let path = format!("/agents/{kind}/snapshot?sessionId={session}");
                assert_eq!(&client.get(&path).await.1["state"], state, "{session}");
            }
        }
    });
}

#[test]
fn a_follower_that_begins_at_the_baseline_knows_what_is_announced_afterwards() {
    in_world(|| async {
        let client = Client {
            mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
            objects: world(),
        };
        begin(&client).await;
        client.settled("parent", "s1").await;
        let routes = routes(&client.objects, &client.mount, None);
        let whole = follow(follower(routes.clone())).await;
        let late = follow(follower(routes).with_replay(Replay::Baseline)).await;
        assert_eq!(late.tree["s1"], whole.tree["s1"]);
    });
}

#[test]
fn a_projected_mount_is_followed_by_its_snapshots() {
    in_world(|| async {
        let mount = Mount::new("/agents")
            .allow_unauthenticated()
            .with_projection(Projection {
                name: "count".into(),
                map: Rc::new(|_, state| json!({"count": state["list"].as_array().map(Vec::len)})),
            });
        let client = Client {
            mount: Rc::new(mount),
            objects: world(),
        };
        begin(&client).await;
        let seen = follow(follower(routes(&client.objects, &client.mount, Some(3)))).await;
        assert_eq!(seen.tree["s1"], (Status::Final, json!({"count": 12})));
    });
}

#[test]
fn a_session_that_is_not_there_is_said_so_at_once() {
    in_world(|| async {
        let client = Client {
            mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
            objects: world(),
        };
        let mut follower = follower(routes(&client.objects, &client.mount, None));
        let error = follower.next().await.unwrap().unwrap_err();
        assert!(matches!(error, TransportError::Refused { status: 404, .. }));
        assert!(follower.next().await.is_none());
    });
}
