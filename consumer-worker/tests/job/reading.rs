//! What a page that comes late reads of a job: the tree, the conversation, the documents.

use std::time::Duration;

use remote_agents::protocol::frame::Frame;
use serde_json::{Value, json};

use crate::library::{documents, few, topic};
use crate::world::{Side, WRITER, World, in_world, pass};

async fn tree(world: &World) -> Value {
    let path = format!("/agents/writer/tree?sessionId={WRITER}");
    let (status, tree) = world.get(Side::Consumer, &path).await;
    assert_eq!(status, 200, "{tree}");
    tree
}

async fn status(world: &World) -> String {
    let path = format!("/agents/writer/status?sessionId={WRITER}");
    let (_, status) = world.get(Side::Consumer, &path).await;
    status["status"].as_str().unwrap().to_owned()
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

/// Each node is what its own snapshot is.
async fn assert_are_snapshots(world: &World, nodes: &[Value]) {
    for node in nodes {
        let kind = node["agentType"].as_str().unwrap();
        let (side, base) = match kind {
            "writer" => (Side::Consumer, "/agents"),
            _ => (Side::Internal, "/internal/agents"),
        };
        let session = node["sessionId"].as_str().unwrap();
        let path = format!("{base}/{kind}/snapshot?sessionId={session}");
        let (_, snapshot) = world.get(side, &path).await;
        let mut fields = node.clone();
        for more in ["agentType", "status", "toolCallId", "remote"] {
            fields.as_object_mut().unwrap().remove(more);
        }
        assert_eq!(fields, snapshot);
    }
}

#[test]
fn the_consumers_tree_shows_the_writer_the_planner_and_every_researcher() {
    in_world(|world| async move {
        world.start(&topic(), &documents(3, 9)).await;
        let mut most = 0;
        // At any moment it is whole: what was called is there, with a state or a reason.
        while status(&world).await == "running" {
            let nodes = flat(&tree(&world).await);
            most = most.max(nodes.len());
            for node in &nodes {
                let begins = node["reason"] == "not_found";
                assert!(node["state"].is_object() || begins, "{node}");
            }
            pass(Duration::from_millis(20)).await;
        }
        assert_eq!(most, 8);
        let nodes = flat(&tree(&world).await);
        assert_eq!(nodes.len(), world.sessions().len());
        assert_are_snapshots(&world, &nodes).await;
        assert!(nodes.iter().all(|node| node["status"] == "completed"));
    });
}

#[test]
fn a_conversation_is_read_behind_the_consumers_key() {
    in_world(|world| async move {
        let (topic, documents) = few();
        world.start(topic, &documents).await;
        let (_, end) = world.follow_writer().await;
        let path = format!("/agents/writer/messages?sessionId={WRITER}");
        let (status, page) = world.get(Side::Consumer, &path).await;
        assert_eq!(status, 200, "{page}");
        let messages = page["messages"].as_array().unwrap();
        assert_eq!(
            messages[0],
            json!({"index": 1, "role": "user", "text": topic})
        );
        let last = messages
            .iter()
            .rfind(|message| message["role"] == "assistant");
        assert!(last.unwrap()["text"].as_str().unwrap().contains(topic));
        let Frame::End(end) = end else {
            panic!("{end:?}")
        };
        assert_eq!(page["state"], end.state.unwrap());
    });
}

#[test]
fn the_documents_of_a_job_are_read_by_who_may_read_the_job() {
    in_world(|world| async move {
        let (topic, documents) = few();
        world.start(topic, &documents).await;
        let path = format!("/api/documents?sessionId={WRITER}");
        let (status, body) = world.get(Side::Consumer, &path).await;
        assert_eq!((status, &body["documents"]), (200, &json!(documents)));
        let body = json!({"sessionId": "bare", "message": topic});
        assert_eq!(
            world
                .post(Side::Consumer, "/agents/writer/start", body)
                .await
                .0,
            200
        );
        let (_, body) = world
            .get(Side::Consumer, "/api/documents?sessionId=bare")
            .await;
        assert_eq!(body, json!({"documents": []}));
        let refusals = [
            ("GET", "/api/documents?sessionId=nobody", 404, "NOT_FOUND"),
            ("GET", "/api/documents", 400, "VALIDATION_ERROR"),
            (
                "GET",
                "/api/documents?sessionId=a%2Fb",
                400,
                "VALIDATION_ERROR",
            ),
            (
                "POST",
                "/api/documents?sessionId=bare",
                405,
                "METHOD_NOT_ALLOWED",
            ),
        ];
        for (method, path, status, code) in refusals {
            let answer = world.send(Side::Consumer, method, path, &[], "").await;
            let (answered, body) = crate::world::whole(answer).await;
            assert_eq!(
                (answered, &body["code"]),
                (status, &json!(code)),
                "{method} {path}"
            );
        }
        let request = http::Request::get(&path).body(bytes::Bytes::new()).unwrap();
        assert_eq!(world.request(Side::Consumer, request).await.status(), 401);
        // The path at which the object answers is none of a mount.
        let (status, _) = world.get(Side::Consumer, "/documents").await;
        assert_eq!(status, 404);
    });
}
