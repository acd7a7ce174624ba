//! How much of a tree is told, whatever a service further down answers.

use std::cell::RefCell;
use std::rc::Rc;

use bytes::Bytes;
use futures::future::LocalBoxFuture;
use remote_agents::agent::StopSignal;
use remote_agents::http::{Body, Request, Response, json as json_answer};
use remote_agents::mount::Projection;
use remote_agents::protocol::tree::TreeBounds;
use remote_agents::store::{MessageRecord, SubLocation};
use remote_agents::transport::ObjectsFetch;
use remote_agents::{Agent, Code};
use serde_json::{Map, Value, json};

use super::{
    Between, Line, agent_type, asking, begin, error, flat, kinds, leaf, open, service, sub, tree,
    world,
};
use crate::support::{Client, calls, in_world, scripted, text, turn, yield_now};

#[test]
fn a_request_may_lower_the_bounds_and_every_hop_keeps_them() {
    in_world(|| async {
        let world = world(0).finished().await;
        world.answer(|_| None);
        let whole = tree(&world.writer, "").await;
        for (depth, expected) in [(1, 1), (2, 2), (3, 4), (8, 4)] {
            let cut = tree(&world.writer, &format!("&depth={depth}")).await;
            assert_eq!(kinds(&cut).len(), expected, "depth {depth}");
            assert_eq!(
                cut.get("truncated"),
                (expected < 4).then(|| json!(true)).as_ref()
            );
        }
        assert!(
            world
                .asked
                .borrow()
                .iter()
                .any(|uri| uri.contains("depth=1&nodes=255"))
        );
        for nodes in 1..=5 {
            let cut = tree(&world.writer, &format!("&nodes={nodes}")).await;
            assert_eq!(
                kinds(&cut)[..],
                kinds(&whole)[..nodes.min(4)],
                "nodes {nodes}"
            );
            assert_eq!(cut.get("truncated").is_some(), nodes < 4);
        }
        let small = tree(&world.writer, "&bytes=4096").await;
        assert!(small.to_string().len() <= 4096);
        assert_eq!(
            (kinds(&small).len(), small.get("truncated")),
            (1, Some(&json!(true))),
            "no room for a child"
        );
        for (field, values) in [
            ("depth", &["0", "9", "-1", "x", ""][..]),
            ("nodes", &["0", "257", "1.5"]),
            ("bytes", &["4095", "4194305", "+5000"]),
        ] {
            for value in values {
                let path = format!("/agents/writer/tree?sessionId=w&{field}={value}");
                let (status, body) = world.writer.get(&path).await;
                assert_eq!((status, &body["field"]), (400, &json!(field)), "{path}");
            }
        }
    });
}

#[test]
fn what_a_child_answers_beyond_its_bounds_is_cut() {
    in_world(|| async {
        let world = world(0).finished().await;
        let planner = flat(&tree(&world.writer, "").await)[1]["sessionId"].clone();
        let node = |id: &Value, children: Value| json!({"sessionId": id, "agentType": "planner", "state": {"x": "y"}, "children": children});
        let wide: Vec<_> = (0..400)
            .map(|n| node(&json!(format!("c{n}")), json!([])))
            .collect();
        let mut deep = json!([]);
        for n in 0..20 {
            deep = json!([node(&json!(format!("d{n}")), deep)]);
        }
        let answers = |answer: Value| {
            move |_: &Request| -> Option<LocalBoxFuture<'static, Response>> {
                let answer = answer.clone();
                Some(Box::pin(async move { json_answer(200, &answer) }))
            }
        };
        world.answer(answers(node(&planner, json!(wide))));
        let cut = tree(&world.writer, "").await;
        assert_eq!((kinds(&cut).len(), &cut["truncated"]), (256, &json!(true)));
        world.answer(answers(node(&planner, deep)));
        let cut = tree(&world.writer, "").await;
        assert_eq!((kinds(&cut).len(), &cut["truncated"]), (8, &json!(true)));
        // A tree with one state that is too large for what is left keeps the node without it.
        let mut large = node(&planner, json!([node(&json!("c"), json!([]))]));
        large["state"] = json!({"x": "y".repeat(6_400)});
        world.answer(answers(large.clone()));
        let client = world
            .writer
            .get("/agents/writer/tree?sessionId=w&bytes=6500")
            .await
            .1;
        assert_eq!(
            client["children"][0]["reason"], "malformed",
            "an answer above what was asked for is not read"
        );
        // An endless answer is dropped at the bound.
        let sent = Rc::new(RefCell::new(0_usize));
        let counted = sent.clone();
        world.answer(move |_| {
            let counted = counted.clone();
            let parts = futures::stream::repeat_with(move || {
                *counted.borrow_mut() += 64 * 1024;
                Ok(Bytes::from(vec![b' '; 64 * 1024]))
            });
            let mut answer = Response::new(Body::Stream(Box::pin(parts)));
            answer
                .headers_mut()
                .insert("content-type", "application/json".parse().unwrap());
            Some(Box::pin(async { answer }))
        });
        let endless = tree(&world.writer, "").await;
        assert_eq!(endless["children"][0]["reason"], "malformed");
        assert!(
            *sent.borrow() <= TreeBounds::MOST.bytes + 64 * 1024,
            "{}",
            sent.borrow()
        );
    });
}

#[test]
fn a_chain_of_twelve_is_told_to_its_eighth_level() {
    in_world(|| async {
        let chain = service(|_, to| {
            let model = scripted(|request| {
                let left: usize = match &request.messages[0] {
                    MessageRecord::User { text } => text.parse().unwrap(),
                    _ => 0,
                };
                match turn(request) {
                    0 if left > 1 => {
                        let message = (left - 1).to_string();
                        calls(&[("c", "subagent__next", json!({"message": message}))])
                    }
                    _ => text("done"),
                }
            });
            let near = to(None, "http://object", "", "writer");
            vec![
                Agent::new(agent_type("writer"), "Chain.", model)
                    .with_state::<Map<String, Value>>()
                    .with_sub_agent(sub("next", "writer", SubLocation::Local, near)),
            ]
        });
        let (status, body) = chain
            .post(
                "/agents/writer/start",
                json!({"sessionId": "w", "message": "12"}),
            )
            .await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(chain.settled("writer", "w").await["status"], "completed");
        assert_eq!(chain.objects.sessions().len(), 12);
        let tree = tree(&chain, "").await;
        let marks: Vec<_> = flat(&tree)
            .iter()
            .map(|node| node["truncated"].clone())
            .collect();
        assert_eq!(
            marks,
            vec![json!(true); 8],
            "every node says that something below it is left out"
        );
    });
}

#[test]
fn a_tree_of_large_states_stays_within_its_bytes() {
    in_world(|| async {
        let world = world(0).finished().await;
        let whole = tree(&world.writer, "").await;
        let size = whole.to_string().len();
        // Below what the whole takes, states are left out one by one, the last first.
        let bytes = size - 20;
        let cut = tree(&world.writer, &format!("&bytes={}", bytes.max(4096))).await;
        assert!(cut.to_string().len() <= bytes.max(4096));
        let client = Client {
            mount: Rc::new(open().with_projection(Projection {
                name: "large".into(),
                map: Rc::new(|_, _| json!({"x": "y".repeat(1_500_000)})),
            })),
            objects: world.writer.objects.clone(),
        };
        let large = tree(&client, "").await;
        assert!(large.to_string().len() <= TreeBounds::MOST.bytes);
        let reasons: Vec<_> = flat(&large)
            .iter()
            .map(|node| node["reason"].clone())
            .collect();
        assert_eq!(
            reasons,
            [
                json!(null),
                json!(null),
                json!("too_large"),
                json!("too_large")
            ]
        );
        assert_eq!(large["truncated"], true);
    });
}

#[test]
fn four_children_are_read_at_once() {
    in_world(|| async {
        let between: Rc<RefCell<Between>> = Rc::new(RefCell::new(Rc::new(|_: &Request| None)));
        let asked: Rc<RefCell<Vec<String>>> = Rc::default();
        let (line, heard) = (between.clone(), asked.clone());
        let crowd = service(move |objects, to| {
            let fetch = Rc::new(Line {
                inner: Rc::new(ObjectsFetch::new(objects.clone())),
                between: line.clone(),
                asked: heard.clone(),
            });
            let near = to(Some(fetch), "http://object", "", "researcher");
            let calls = &[
                ("a", "one"),
                ("b", "one"),
                ("c", "one"),
                ("d", "one"),
                ("e", "one"),
                ("f", "one"),
                ("g", "one"),
                ("h", "one"),
                ("i", "one"),
            ];
            let one = sub("one", "researcher", SubLocation::Local, near);
            vec![
                asking("crowd", calls).with_sub_agent(one),
                leaf("researcher", 0),
            ]
        });
        begin(&crowd, "crowd", "c").await;
        assert_eq!(crowd.settled("crowd", "c").await["status"], "completed");
        asked.borrow_mut().clear();

        // Each reading waits for the gate; whoever is answered makes room for the next.
        let gate = StopSignal::default();
        let held = gate.clone();
        *between.borrow_mut() = Rc::new(move |_| {
            let open = held.wait();
            let answer = async move {
                open.await;
                error(Code::Internal, "Not now.")
            };
            Some(Box::pin(answer) as LocalBoxFuture<'static, Response>)
        });
        let crowd = Rc::new(crowd);
        let reader = crowd.clone();
        let told =
            tokio::task::spawn_local(
                async move { reader.get("/agents/crowd/tree?sessionId=c").await },
            );
        for _ in 0..20 {
            yield_now().await;
        }
        assert_eq!(asked.borrow().len(), 4, "{:?}", asked.borrow());
        gate.set();
        let (code, tree) = told.await.unwrap();
        assert_eq!(code, 200);
        assert_eq!(tree["children"].as_array().unwrap().len(), 9);
    });
}
