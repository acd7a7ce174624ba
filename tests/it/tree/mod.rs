//! The tree route: every session of a tree with its own snapshot, within bounds, over any number of
//! services, and nothing on a mount that the mount does not show.

mod bounds;
mod mounts;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use remote_agents::agent::{SubAgent, typed_tool};
use remote_agents::http::{Body, Request, Response, json as json_answer, refusal};
use remote_agents::mount::Mount;
use remote_agents::native::{LocalObjects, MountFetch};
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::tree::{TreeBounds, TreeNode};
use remote_agents::store::SubLocation;
use remote_agents::transport::{Fetch, FetchError, HttpTransport, ObjectsFetch, Transport as _};
use remote_agents::{Agent, Agents, Code, Error, ToolContext};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::support::{Client, Lines, calls, in_world, scripted, text, turn};

const START: u64 = 1_700_000_000_000;
const CANARY: &str = "canary-4d1c";

#[derive(Deserialize, schemars::JsonSchema)]
struct Keep {
    value: String,
    wait: u64,
}

fn agent_type(name: &str) -> AgentType {
    AgentType::parse(name).unwrap()
}

/// Keeps a value in the state, and takes its time behind it.
fn keep() -> Rc<dyn remote_agents::Tool> {
    typed_tool(
        "keep",
        "Keeps.",
        |context: ToolContext, keep: Keep| async move {
            context.update(|state: &mut Map<String, Value>| {
                state.insert("kept".into(), json!(keep.value));
            })?;
            tokio::time::sleep(Duration::from_millis(keep.wait)).await;
            Ok(json!("kept"))
        },
    )
}

fn leaf(name: &'static str, wait: u64) -> Agent {
    let model = scripted(move |request| match turn(request) {
        0 => {
            let value = format!("{CANARY} of a {name}");
            calls(&[("k", "keep", json!({"value": value, "wait": wait}))])
        }
        1 => calls(&[(
            "l",
            "keep",
            json!({"value": format!("{CANARY} at last"), "wait": 0}),
        )]),
        _ => text("done"),
    });
    Agent::new(agent_type(name), "Keep.", model)
        .with_state::<Map<String, Value>>()
        .with_tool(keep())
}

/// An agent that keeps something and asks one child for each of these.
fn asking(name: &'static str, asks: &'static [(&'static str, &'static str)]) -> Agent {
    let model = scripted(move |request| match turn(request) {
        0 => {
            let value = format!("{CANARY} of a {name}");
            calls(&[("k", "keep", json!({"value": value, "wait": 0}))])
        }
        1 => {
            let tools: Vec<_> = asks
                .iter()
                .map(|(_, tool)| format!("subagent__{tool}"))
                .collect();
            let made: Vec<_> = asks
                .iter()
                .zip(&tools)
                .map(|((id, _), tool)| (*id, tool.as_str(), json!({"message": "please"})))
                .collect();
            calls(&made)
        }
        _ => text("done"),
    });
    Agent::new(agent_type(name), "Ask.", model)
        .with_state::<Map<String, Value>>()
        .with_tool(keep())
}

fn sub(name: &str, kind: &str, location: SubLocation, transport: HttpTransport) -> SubAgent {
    SubAgent::new(
        name,
        "Asks.",
        agent_type(kind),
        location,
        Rc::new(transport),
    )
}

/// Answers a request in place of the other service, or lets it through.
type Between = Rc<dyn Fn(&Request) -> Option<LocalBoxFuture<'static, Response>>>;

struct Line {
    inner: Rc<dyn Fetch>,
    between: Rc<RefCell<Between>>,
    asked: Rc<RefCell<Vec<String>>>,
}

impl Fetch for Line {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        self.asked.borrow_mut().push(request.uri().to_string());
        let between = self.between.borrow().clone();
        match between(&request) {
            Some(answer) => Box::pin(async { Ok(answer.await) }),
            None => self.inner.fetch(request),
        }
    }
}

/// A writer here, a planner in the other service, and the planner's two researchers beside it.
struct World {
    writer: Client,
    planner: Client,
    between: Rc<RefCell<Between>>,
    /// Between the planner and its researchers.
    inside: Rc<RefCell<Between>>,
    asked: Rc<RefCell<Vec<String>>>,
}

fn open() -> Mount {
    Mount::new("/agents").allow_unauthenticated()
}

fn service(agents: impl Fn(&Rc<LocalObjects>, &HttpTransportOf) -> Vec<Agent> + 'static) -> Client {
    let objects = LocalObjects::new(
        START,
        Lines::default().sink(),
        Rc::new(move |objects, runtime| {
            let (here, runtime) = (objects.clone(), runtime.clone());
            let of: HttpTransportOf = Rc::new(move |fetch, base, path, kind| {
                let local = || Rc::new(ObjectsFetch::new(here.clone())) as Rc<dyn Fetch>;
                let fetch = fetch.unwrap_or_else(local);
                HttpTransport::new(fetch, runtime.clone(), base, path, agent_type(kind))
            });
            Agents::new(agents(objects, &of))
        }),
    );
    Client {
        mount: Rc::new(open()),
        objects,
    }
}

/// A transport over a fetch, or to the objects of the same service.
type HttpTransportOf = Rc<dyn Fn(Option<Rc<dyn Fetch>>, &str, &str, &str) -> HttpTransport>;

fn world(wait: u64) -> World {
    let [between, inside]: [Rc<RefCell<Between>>; 2] =
        [(), ()].map(|()| Rc::new(RefCell::new(Rc::new(|_: &Request| None) as Between)));
    let asked: Rc<RefCell<Vec<String>>> = Rc::default();
    let line = inside.clone();
    let planner = service(move |objects, to| {
        let near = || {
            let fetch = Rc::new(Line {
                inner: Rc::new(ObjectsFetch::new(objects.clone())),
                between: line.clone(),
                asked: Rc::default(),
            });
            to(Some(fetch), "http://object", "", "researcher")
        };
        let subs = ["one", "two"].map(|name| sub(name, "researcher", SubLocation::Local, near()));
        let mut planner = asking("planner", &[("r1", "one"), ("r2", "two")]);
        for sub in subs {
            planner = planner.with_sub_agent(sub);
        }
        vec![planner, leaf("researcher", wait)]
    });
    let (mount, objects) = (planner.mount.clone(), planner.objects.clone());
    let (line, heard) = (between.clone(), asked.clone());
    let writer = service(move |_, to| {
        let fetch = Rc::new(Line {
            inner: Rc::new(MountFetch::new(mount.clone(), objects.clone())),
            between: line.clone(),
            asked: heard.clone(),
        });
        let far = to(Some(fetch), "http://far", "/agents", "planner");
        vec![asking("writer", &[("p", "plan")]).with_sub_agent(sub(
            "plan",
            "planner",
            SubLocation::Remote,
            far,
        ))]
    });
    World {
        writer,
        planner,
        between,
        inside,
        asked,
    }
}

impl World {
    fn behind(&self, mount: Mount) -> Client {
        Client {
            mount: Rc::new(mount),
            objects: self.writer.objects.clone(),
        }
    }

    async fn finished(self) -> Self {
        begin(&self.writer, "writer", "w").await;
        let settled = self.writer.settled("writer", "w").await;
        assert_eq!(settled["status"], "completed", "{settled}");
        self
    }

    fn answer(
        &self,
        answer: impl Fn(&Request) -> Option<LocalBoxFuture<'static, Response>> + 'static,
    ) {
        *self.between.borrow_mut() = Rc::new(answer);
        self.asked.borrow_mut().clear();
    }

    async fn snapshot(&self, node: &Value) -> Value {
        let kind = node["agentType"].as_str().unwrap();
        let client = if kind == "writer" {
            &self.writer
        } else {
            &self.planner
        };
        let session = node["sessionId"].as_str().unwrap();
        let path = format!("/agents/{kind}/snapshot?sessionId={session}");
        let (status, snapshot) = client.get(&path).await;
        assert_eq!(status, 200, "{snapshot}");
        snapshot
    }
}

async fn begin(client: &Client, kind: &str, session: &str) {
    let (status, body) = client
        .post(
            &format!("/agents/{kind}/start"),
            json!({"sessionId": session, "message": "go"}),
        )
        .await;
    assert_eq!(status, 200, "{body}");
}

async fn tree(client: &Client, more: &str) -> Value {
    let (status, tree) = client
        .get(&format!("/agents/writer/tree?sessionId=w{more}"))
        .await;
    assert_eq!(status, 200, "{tree}");
    tree
}

/// Every node, the root first, each without its children.
fn flat(tree: &Value) -> Vec<Value> {
    let mut node = tree.clone();
    let children = node.as_object_mut().unwrap().remove("children").unwrap();
    let mut all = vec![node];
    for child in children.as_array().unwrap() {
        all.extend(flat(child));
    }
    all
}

fn kinds(tree: &Value) -> Vec<String> {
    let kind = |node: &Value| node["agentType"].as_str().unwrap().to_owned();
    flat(tree).iter().map(kind).collect()
}

/// The fields of a snapshot among those of a node.
fn snapshot_of(node: &Value) -> Value {
    let mut fields = node.as_object().unwrap().clone();
    for more in ["agentType", "status", "toolCallId", "remote"] {
        fields.remove(more);
    }
    Value::Object(fields)
}

fn error(code: Code, message: &'static str) -> Response {
    refusal(&Error::new(code, message))
}

#[test]
fn three_levels_over_two_services_are_each_its_own_snapshot() {
    in_world(|| async {
        let world = world(0).finished().await;
        let tree = tree(&world.writer, "").await;
        assert_eq!(
            kinds(&tree),
            ["writer", "planner", "researcher", "researcher"]
        );
        for node in flat(&tree) {
            assert_eq!(snapshot_of(&node), world.snapshot(&node).await);
            assert_eq!(
                (&node["status"], &node["streamSequence"]),
                (&json!("completed"), &json!(-1))
            );
            assert!(node["state"]["kept"].as_str().unwrap().starts_with(CANARY));
        }
        let planner = &tree["children"][0];
        assert_eq!(
            (&planner["toolCallId"], &planner["remote"]),
            (&json!("p"), &json!(true))
        );
        let [one, two] = [0, 1].map(|n| &planner["children"][n]);
        assert_eq!(
            (&one["toolCallId"], &one["remote"]),
            (&json!("r1"), &json!(false))
        );
        assert_eq!(two["toolCallId"], "r2");
        assert_eq!((tree.get("toolCallId"), tree.get("remote")), (None, None));
        assert_eq!(tree.get("truncated"), None);
    });
}

#[test]
fn a_running_tree_is_pinned_node_by_node() {
    in_world(|| async {
        let world = world(60_000);
        begin(&world.writer, "writer", "w").await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let tree = tree(&world.writer, "").await;
        assert_eq!(
            kinds(&tree),
            ["writer", "planner", "researcher", "researcher"]
        );
        for node in flat(&tree) {
            // Everyone waits for the researchers, so nothing moves.
            assert_eq!(snapshot_of(&node), world.snapshot(&node).await);
            assert_eq!(node["status"], "running");
            assert!(node["streamSequence"].as_i64().unwrap() > 0, "{node}");
            assert!(node["patchOrdinal"].is_u64());
        }
        // What a researcher staged is no state yet.
        assert_eq!(tree["children"][0]["children"][0]["state"], json!({}));
        assert_eq!(
            world.writer.settled("writer", "w").await["status"],
            "completed"
        );
    });
}

#[test]
fn a_child_that_cannot_be_read_has_a_reason_and_takes_nobody_with_it() {
    in_world(|| async {
        let world = world(0).finished().await;
        let refused = |code, message| {
            move |_: &Request| -> Option<LocalBoxFuture<'static, Response>> {
                Some(Box::pin(async move { error(code, message) }))
            }
        };
        let node = |tree: &Value| tree["children"][0].clone();
        world.answer(refused(Code::TransportError, "gone"));
        let unreachable = node(&tree(&world.writer, "").await);
        assert_eq!(
            unreachable,
            json!({"sessionId": unreachable["sessionId"], "agentType": "planner",
                "toolCallId": "p", "remote": true, "reason": "unreachable", "children": []})
        );
        world.answer(refused(Code::NotFound, "no"));
        assert_eq!(node(&tree(&world.writer, "").await)["reason"], "not_found");
        world.answer(refused(Code::Unauthorized, "no"));
        assert_eq!(node(&tree(&world.writer, "").await)["reason"], "refused");
        world.answer(|_| Some(Box::pin(async { json_answer(200, &json!({"state": 1})) })));
        assert_eq!(node(&tree(&world.writer, "").await)["reason"], "malformed");
        // Another session's tree is not this child's.
        world.answer(|_| {
            let other =
                json!({"sessionId": "other", "agentType": "planner", "state": {}, "children": []});
            Some(Box::pin(async move { json_answer(200, &other) }))
        });
        assert_eq!(node(&tree(&world.writer, "").await)["reason"], "malformed");
        // A projected mount shows no state that could be handed on.
        world.answer(|_| {
            let mut answer = json_answer(200, &json!({}));
            answer
                .headers_mut()
                .insert("x-remote-agents-mount", "projected".parse().unwrap());
            Some(Box::pin(async { answer }))
        });
        assert_eq!(node(&tree(&world.writer, "").await)["reason"], "refused");

        let before = tokio::time::Instant::now();
        world.answer(|_| Some(Box::pin(std::future::pending())));
        let late = tree(&world.writer, "").await;
        assert_eq!(node(&late)["reason"], "timeout");
        assert!(late["state"]["kept"].is_string());
        let eight = Duration::from_secs(8);
        assert!(before.elapsed() <= eight, "{:?}", before.elapsed());
    });
}

#[test]
fn a_grandchild_that_does_not_answer_leaves_its_parent_time_to_say_so() {
    in_world(|| async {
        let world = world(0).finished().await;
        let first = flat(&tree(&world.writer, "").await)[2]["sessionId"].clone();
        *world.inside.borrow_mut() = Rc::new(move |request| {
            let hangs = request.uri().to_string().contains(first.as_str().unwrap());
            hangs.then(|| Box::pin(std::future::pending()) as LocalBoxFuture<'static, Response>)
        });
        let before = tokio::time::Instant::now();
        let tree = tree(&world.writer, "").await;
        // The planner gave up before the writer would have.
        let seven = Duration::from_secs(7);
        assert!(before.elapsed() < seven, "{:?}", before.elapsed());
        let reasons: Vec<_> = flat(&tree)
            .iter()
            .map(|node| node["reason"].clone())
            .collect();
        assert_eq!(
            reasons,
            [json!(null), json!(null), json!("timeout"), json!(null)]
        );
    });
}

#[test]
fn a_peer_that_tells_no_trees_is_read_by_its_snapshot() {
    in_world(|| async {
        let world = world(0).finished().await;
        for code in [Code::FeatureUnavailable, Code::NotFound] {
            world.answer(move |request| {
                let is_tree = request.uri().path().ends_with("/tree");
                let old = async move { error(code, "An old peer.") };
                is_tree.then(|| Box::pin(old) as LocalBoxFuture<'static, Response>)
            });
            let tree = tree(&world.writer, "").await;
            let planner = &tree["children"][0];
            let mut fields = snapshot_of(planner);
            let cut = fields.as_object_mut().unwrap();
            assert_eq!(
                cut.remove("truncated"),
                Some(json!(true)),
                "its children are not known"
            );
            assert_eq!(cut.remove("children"), Some(json!([])));
            assert_eq!(fields, world.snapshot(planner).await);
            assert_eq!(
                (&planner["status"], &tree["truncated"]),
                (&json!("completed"), &json!(true))
            );
        }
        // Without an envelope, too.
        world.answer(|request| {
            let is_tree = request.uri().path().ends_with("/tree");
            is_tree.then(|| {
                let mut answer = Response::new(Body::empty());
                *answer.status_mut() = http::StatusCode::NOT_FOUND;
                Box::pin(async { answer }) as LocalBoxFuture<'static, Response>
            })
        });
        assert!(tree(&world.writer, "").await["children"][0]["state"].is_object());
    });
}

#[test]
fn a_transport_reads_a_typed_tree() {
    in_world(|| async {
        let world = world(0).finished().await;
        let fetch = MountFetch::new(world.writer.mount.clone(), world.writer.objects.clone());
        let runtime = remote_agents::native::LocalRuntime::new(START, Lines::default().sink());
        let transport = HttpTransport::new(
            Rc::new(fetch),
            runtime,
            "http://w",
            "/agents",
            agent_type("writer"),
        );
        let session = SessionId::parse("w").unwrap();
        let node = transport.tree(&session, TreeBounds::MOST).await.unwrap();
        let told: TreeNode = serde_json::from_value(tree(&world.writer, "").await).unwrap();
        assert_eq!(node, told);
        assert_eq!(node.children[0].children.len(), 2);
        let unknown = SessionId::parse("nobody").unwrap();
        assert!(transport.tree(&unknown, TreeBounds::MOST).await.is_err());
    });
}
