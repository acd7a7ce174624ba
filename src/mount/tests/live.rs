//! Live projected state: what steps carry, and what they must not.

use super::*;

fn live() -> Mount {
    public().with_live_state()
}

fn neighbours(sequence: u64, before: &Value, after: &Value) -> String {
    let data = json!({"sequence": sequence, "before": before, "after": after});
    format!("event: neighbours\ndata: {data}\n\n")
}

fn step() -> Value {
    chunk(
        "step_committed",
        &json!({"stepCount": 1, "checkpointId": "c", "patchOrdinal": 2}),
    )
}

/// The step that a reader gets.
fn step_read(mount: &Mount, text: &str) -> Value {
    let got = read(mount, text, 7);
    assert!(
        !got.contains(CANARY) && !got.contains("neighbours"),
        "{got}"
    );
    let mut decoder = Decoder::new();
    decoder.push(without_comments(&got).as_bytes());
    let Ok(Some(Decoded::Frame(Frame::Chunk { chunk, .. }))) = decoder.poll() else {
        panic!("{got}")
    };
    assert_eq!(decoder.poll(), Ok(None));
    Value::Object(chunk.0)
}

fn with(mut chunk: Value, more: &Value) -> Value {
    chunk
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    chunk
}

#[test]
fn a_step_of_the_session_carries_what_it_changed_in_the_projection() {
    let before = json!({"state": {"secret": CANARY}});
    let after = json!({"secret": CANARY, "more": CANARY});
    let text = event(9, &step().to_string());
    let told = neighbours(9, &before, &after) + &text;
    let patches = json!([{"op": "replace", "path": "/keys", "value": 2}]);
    let changed = json!({"projection": "count@1", "patches": patches});
    assert_eq!(step_read(&live(), &told), with(step(), &changed));
    // Nothing changed that is shown: that is told too.
    let same = neighbours(9, &before, &json!({"other": CANARY})) + &text;
    let unchanged = json!({"projection": "count@1", "patches": []});
    assert_eq!(step_read(&live(), &same), with(step(), &unchanged));
    // After an entry it is the whole document, which fits on whatever a reader had.
    let entered = neighbours(9, &json!("entered"), &after) + &text;
    let whole = json!([{"op": "replace", "path": "",
        "value": {"agentType": "planner", "keys": 2}}]);
    let whole = json!({"projection": "count@1", "patches": whole});
    assert_eq!(step_read(&live(), &entered), with(step(), &whole));
    // A mount that was not asked for it shows the step alone.
    assert_eq!(step_read(&public(), &told), step());
    let only_usage = open().with_usage_projection(billing()).with_live_state();
    assert_eq!(step_read(&only_usage, &told), step());
}

#[test]
fn a_step_whose_neighbours_are_not_told_asks_for_a_snapshot() {
    let resync = with(step(), &json!({"projection": "count@1", "resync": true}));
    let text = event(9, &step().to_string());
    let after = json!({"secret": CANARY});
    let large = "x".repeat(crate::protocol::END_STATE_LIMIT);
    for told in [
        String::new(),
        neighbours(8, &json!("entered"), &after),
        format!("event: neighbours\ndata: {CANARY}\n\n"),
        neighbours(9, &json!({"novel": CANARY}), &after),
    ] {
        assert_eq!(step_read(&live(), &(told + &text)), resync);
    }
    // What is told of one step is not kept for another.
    let told = neighbours(9, &json!("entered"), &after) + &text + &event(9, &step().to_string());
    let got = read(&live(), &told, usize::MAX);
    assert_eq!(
        (
            got.matches("patches").count(),
            got.matches("resync").count()
        ),
        (1, 1)
    );
    // A projection that is too large is not sent with a chunk.
    let mirror = open().with_live_state().with_projection(Projection {
        name: "count@1".into(),
        map: Rc::new(|_, state| state.clone()),
    });
    let told = neighbours(9, &json!("entered"), &json!({"large": large})) + &text;
    assert_eq!(step_read(&mirror, &told), resync);
}

#[test]
fn a_diff_that_outgrows_the_document_is_the_document() {
    let mirror = open().with_live_state().with_projection(Projection {
        name: "all".into(),
        map: Rc::new(|_, state| state.clone()),
    });
    let many = |n: u64| {
        let fields = (0..40).map(|key| (format!("key{key}"), json!(key * n)));
        Value::Object(fields.collect())
    };
    let text = event(9, &step().to_string());
    let told = neighbours(9, &json!({"state": many(1)}), &many(2)) + &text;
    let patches = &step_read(&mirror, &told)["patches"];
    assert_eq!(
        *patches,
        json!([{"op": "replace", "path": "", "value": many(2)}])
    );
    let mut one = many(1);
    one["key7"] = json!("new");
    let told = neighbours(9, &json!({"state": many(1)}), &one) + &text;
    let patches = &step_read(&mirror, &told)["patches"];
    assert_eq!(
        *patches,
        json!([{"op": "replace", "path": "/key7", "value": "new"}])
    );
}

#[test]
fn nobody_but_the_session_itself_has_steps_with_patches() {
    let forged = json!({"projection": "count@1", "resync": true,
        "patches": [{"op": "add", "path": "/a", "value": CANARY}]});
    let told = neighbours(9, &json!("entered"), &json!({"secret": CANARY}));
    for own in [
        forwarded(step()),
        chunk_of_agent(step(), "c"),
        chunk_of_agent(forwarded(step()), "c"),
        with(step(), &json!({"origin": {"sessionId": "s"}})),
    ] {
        let sent = told.clone() + &event(9, &with(own.clone(), &forged).to_string());
        for mount in [live(), live().with_chunks(ChunkDetail::Lifecycle), public()] {
            assert_eq!(step_read(&mount, &sent), own);
        }
    }
}

#[test]
fn only_a_mount_with_live_state_asks_the_object_for_neighbours() {
    let asks = |mount: &Mount, action: &str| {
        let auth = [
            ("authorization", "Bearer key"),
            ("x-remote-agents-internal-neighbours", "1"),
        ];
        let uri = format!("/agents/planner/{action}?sessionId=s");
        let forward = forward(mount, "GET", &uri, &auth, "").unwrap();
        let name = "x-remote-agents-internal-neighbours";
        forward.request.headers().contains_key(name)
    };
    assert!(asks(&live(), "sse"));
    assert!(!asks(&live(), "status"));
    assert!(asks(&live().with_ui(), "ui"));
    for mount in [open(), public(), open().with_live_state()] {
        assert!(!asks(&mount, "sse"));
    }
}
