//! What a mount shows of a tree: the types that it serves, and state through its projection alone.

use std::rc::Rc;
use std::time::Duration;

use remote_agents::http::json as json_answer;
use remote_agents::mount::Projection;
use serde_json::{Map, json};

use super::{CANARY, agent_type, begin, flat, kinds, open, snapshot_of, tree, world};
use crate::support::in_world;

#[test]
fn a_mount_shows_the_types_it_serves_and_the_descendants_it_names() {
    in_world(|| async {
        let world = world(0).finished().await;
        let writer = || open().with_agents([agent_type("writer")]);
        let alone = tree(&world.behind(writer()), "").await;
        assert_eq!(
            kinds(&alone),
            ["writer", "planner", "researcher", "researcher"]
        );
        let text = alone.to_string();
        assert_eq!(text.matches(CANARY).count(), 1, "the writer's own: {text}");
        for node in &flat(&alone)[1..] {
            let mut fields: Vec<_> = node.as_object().unwrap().keys().cloned().collect();
            fields.sort();
            assert_eq!(
                fields,
                [
                    "agentType",
                    "reason",
                    "remote",
                    "sessionId",
                    "status",
                    "toolCallId"
                ]
            );
            assert_eq!(node["reason"], "not_served");
        }
        let with_planner = writer().with_descendants([agent_type("planner")]);
        let some = tree(&world.behind(with_planner), "").await;
        let shown: Vec<_> = flat(&some)
            .iter()
            .map(|node| node["state"].is_object())
            .collect();
        assert_eq!(shown, [true, true, false, false]);
        let all = writer().with_descendants(["planner", "researcher"].map(agent_type));
        assert_eq!(
            tree(&world.behind(all), "").await,
            tree(&world.writer, "").await
        );
        // A descendant is reached by no other route.
        let with_planner = writer().with_descendants([agent_type("planner")]);
        let path = format!(
            "/agents/planner/snapshot?sessionId={}",
            flat(&some)[1]["sessionId"].as_str().unwrap()
        );
        assert_eq!(world.behind(with_planner).get(&path).await.0, 404);
    });
}

/// Shows how many keys a state has, by whose it is.
fn counting() -> Projection {
    Projection {
        name: "count/1".into(),
        map: Rc::new(
            |kind, state| json!({"of": kind, "keys": state.as_object().map_or(0, Map::len)}),
        ),
    }
}

#[test]
fn a_projected_mount_shows_no_raw_state_at_any_depth() {
    in_world(|| async {
        for wait in [0, 60_000] {
            let world = world(wait);
            begin(&world.writer, "writer", "w").await;
            tokio::time::sleep(Duration::from_secs(5)).await;
            let projected = tree(&world.behind(open().with_projection(counting())), "").await;
            assert!(!projected.to_string().contains(CANARY), "{projected}");
            assert_eq!(kinds(&projected).len(), 4);
            for node in flat(&projected) {
                assert_eq!(node["state"]["of"], node["agentType"]);
                assert_eq!(node["projection"], "count/1");
                let mut raw = world.snapshot(&node).await;
                let keys = raw["state"].as_object().unwrap().len();
                raw["state"] = json!({"of": node["agentType"], "keys": keys});
                raw["projection"] = json!("count/1");
                assert_eq!(snapshot_of(&node), raw);
            }
            let mount = open()
                .with_projection(counting())
                .with_agents([agent_type("writer")]);
            let narrow = tree(&world.behind(mount), "").await;
            assert!(!narrow.to_string().contains(CANARY), "{narrow}");
            assert_eq!(flat(&narrow)[1]["reason"], "not_served");
            assert!(
                tree(&world.writer, "").await.to_string().contains(CANARY),
                "the raw one has it"
            );
        }
    });
}

#[test]
fn what_a_foreign_child_adds_to_a_node_passes_no_projected_mount() {
    in_world(|| async {
        let world = world(0).finished().await;
        let planner = flat(&tree(&world.writer, "").await)[1]["sessionId"].clone();
        let evil = json!({
            "sessionId": planner, "agentType": "planner", "state": {"a": CANARY}, "raw": CANARY,
            "projection": "count/1", "children": [
                {"sessionId": "x", "agentType": "unheard-of", "state": {"b": CANARY}, "reason": "timeout",
                    "snapshot": {"state": CANARY}, "children": []},
            ],
        });
        world.answer(move |_| {
            let evil = evil.clone();
            Some(Box::pin(async move { json_answer(200, &evil) }))
        });
        let raw = tree(&world.writer, "").await.to_string();
        assert!(raw.contains(CANARY) && !raw.contains("\"raw\""));
        let projected = tree(&world.behind(open().with_projection(counting())), "").await;
        assert!(!projected.to_string().contains(CANARY), "{projected}");
        let mount = open()
            .with_projection(counting())
            .with_agents(["writer", "planner"].map(agent_type));
        let narrow = tree(&world.behind(mount), "").await;
        assert!(!narrow.to_string().contains(CANARY), "{narrow}");
        assert_eq!(flat(&narrow)[2]["reason"], "not_served");
    });
}
