#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use serde_json::json;

use super::*;

fn node(name: &str, state: Value, children: Vec<TreeNode>) -> TreeNode {
    let snapshot = SnapshotResponse {
        session_id: name.into(),
        stream_id: "st".into(),
        state,
        stream_sequence: Position::At(3),
        oldest_retained_sequence: 0,
        step_count: 1,
        checkpoint_id: None,
        patch_ordinal: Some(0),
        projection: None,
    };
    TreeNode {
        children,
        ..TreeNode::of_snapshot(
            SessionId::parse(name).unwrap(),
            AgentType::parse("agent").unwrap(),
            Some(SessionStatus::Running),
            snapshot,
        )
    }
}

fn names(tree: &TreeNode) -> Vec<String> {
    let mut all = vec![tree.session_id.to_string()];
    all.extend(tree.children.iter().flat_map(names));
    all
}

fn family() -> TreeNode {
    let leaf = |name: &str| node(name, json!({"x": name}), Vec::new());
    let state = json!({"x": "y".repeat(500)});
    node(
        "root",
        json!({}),
        vec![
            node("a", state, vec![leaf("a1"), leaf("a2")]),
            node("b", json!({}), vec![leaf("b1")]),
        ],
    )
}

fn bounds(depth: usize, nodes: usize, bytes: usize) -> TreeBounds {
    TreeBounds {
        depth,
        nodes,
        bytes,
    }
}

#[test]
fn a_tree_within_its_bounds_stays_as_it_is() {
    assert_eq!(family().bounded(TreeBounds::MOST), family());
    let json = serde_json::to_string(&family()).unwrap();
    let read: TreeNode = serde_json::from_str(&json).unwrap();
    assert_eq!(read, family());
    assert_eq!(read.check(), Ok(()));
}

#[test]
fn every_bound_cuts_and_says_so_up_to_the_root() {
    let cut = family().bounded(bounds(2, 256, 1 << 20));
    assert_eq!(names(&cut), ["root", "a", "b"]);
    assert!(cut.truncated && cut.children.iter().all(|child| child.truncated));
    let cut = family().bounded(bounds(8, 3, 1 << 20));
    assert_eq!(
        names(&cut),
        ["root", "a", "a1"],
        "the first call is told first"
    );
    assert!(cut.truncated && cut.children[0].truncated && !cut.children[0].children[0].truncated);
    let cut = family().bounded(bounds(1, 1, 10));
    assert_eq!(names(&cut), ["root"], "the root itself in any case");
}

#[test]
fn the_answer_is_never_longer_than_its_bytes() {
    let whole = serde_json::to_string(&family()).unwrap().len();
    let mut shown = 0;
    for bytes in 300..whole + 200 {
        let cut = family().bounded(bounds(8, 256, bytes));
        let written = serde_json::to_string(&cut).unwrap().len();
        assert!(written <= bytes, "{written} of {bytes}");
        let count = names(&cut).len();
        assert_eq!(cut.truncated, cut != family());
        shown = shown.max(count);
    }
    assert_eq!(shown, 6);
    // The large state is left out by itself.
    let cut = family().bounded(bounds(8, 256, 700));
    assert_eq!(cut.children[0].reason, Some(TreeReason::TooLarge));
    assert_eq!(
        (&cut.children[0].state, cut.children[0].stream_sequence),
        (&None, None)
    );
    assert!(cut.children[0].children[0].state.is_some());
}

#[test]
fn a_state_that_no_reader_of_a_tree_could_read_is_left_out() {
    let mut deep = json!({});
    for _ in 0..DEPTH_LIMIT {
        deep = json!({"d": deep});
    }
    let mut tree = node("z", deep, Vec::new());
    for n in 0..7 {
        tree = node(&format!("n{n}"), json!({}), vec![tree]);
    }
    let told = tree.bounded(TreeBounds::MOST);
    assert_eq!(names(&told).len(), 8);
    let json = serde_json::to_string(&told).unwrap();
    assert!(json.contains("too_large"));
    assert!(serde_json::from_str::<TreeNode>(&json).is_ok());
}

#[test]
fn what_is_hidden_tells_who_and_how_and_nothing_else() {
    let mut hidden = family();
    hidden.tool_call_id = Some("c".into());
    hidden.hide(TreeReason::NotServed);
    let mut json = serde_json::to_value(&hidden).unwrap();
    json["children"] = json!([]);
    assert_eq!(
        json,
        json!({"sessionId": "root", "agentType": "agent", "status": "running", "toolCallId": "c",
            "reason": "not_served", "children": []})
    );
    assert_eq!(names(&hidden), names(&family()));
}

#[test]
fn a_node_has_a_state_or_a_reason() {
    let read = |json: Value| serde_json::from_value::<TreeNode>(json);
    let bare = json!({"sessionId": "s", "agentType": "a"});
    assert!(read(bare.clone()).unwrap().check().is_err());
    let inside = json!({"sessionId": "s", "agentType": "a", "state": {}, "children": [bare]});
    assert!(read(inside).unwrap().check().is_err());
    let later = json!({"sessionId": "s", "agentType": "a", "reason": "on_holiday", "novel": 1});
    let later = read(later).unwrap();
    assert_eq!(
        (later.reason, later.check()),
        (Some(TreeReason::Unknown), Ok(()))
    );
    for broken in [
        json!({"sessionId": "a/b", "agentType": "a", "state": {}}),
        json!({"sessionId": "s", "agentType": "..", "state": {}}),
        json!({"sessionId": "s", "state": {}}),
        json!({"sessionId": "s", "agentType": "a", "state": {}, "streamSequence": -2}),
    ] {
        assert!(read(broken).is_err());
    }
}

#[test]
fn a_child_is_asked_for_what_is_left() {
    let left = bounds(3, 10, 9_000).below().unwrap();
    assert_eq!(left, bounds(2, 10, 9_000));
    assert_eq!(bounds(1, 10, 9_000).below(), None);
    assert_eq!(bounds(3, 0, 9_000).below(), None);
    assert_eq!(bounds(3, 10, TreeBounds::FEWEST_BYTES - 1).below(), None);
}
