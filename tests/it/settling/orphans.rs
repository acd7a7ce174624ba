//! Children whose calls are gone, and refs that cannot be read.

use super::*;

#[test]
fn a_non_terminal_child_whose_call_did_not_survive_is_an_orphan() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        // The step is gone with its call, as after a truncation; the ref is live.
        pair.sql("DELETE FROM ra_tool_calls");
        pair.sql("DELETE FROM ra_step");
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(pair.child_status().await["status"], "interrupted");
        let log = pair.log().await;
        let mut ends = own(&log, "subagent_end");
        ends.retain(|end| end["toolCallId"] == "c1");
        assert_eq!(ends.len(), 1);
        assert_eq!(
            (&ends[0]["success"], &ends[0]["toolCallId"]),
            (&json!(false), &json!("c1"))
        );
        assert_eq!(pair.refs()[0], ("c1".into(), "failed".into()));
        // Orphan spend is counted.
        let (_, usage) = pair.parent.get("/agents/parent/usage?sessionId=p").await;
        let sessions = usage["rollup"]["subAgents"]["sessions"].as_array().unwrap();
        let child = pair.child().to_string();
        let orphan = sessions
            .iter()
            .find(|one| one["subSessionId"] == child.as_str());
        assert_eq!(orphan.unwrap()["remoteRollupOrigin"], "recovery");
    });
}

#[test]
fn a_terminal_child_whose_call_did_not_survive_is_reconciled_into_the_parent() {
    in_world(|| async {
        let pair = Setup::new(working_for(120)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        wait(120_000).await;
        pair.sql("DELETE FROM ra_tool_calls");
        pair.sql("DELETE FROM ra_step");
        pair.evict();
        assert_eq!(pair.resume(json!({})).await.0, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_eq!(own(&log, "subagent_end")[0]["success"], true);
        assert_eq!(pair.refs()[0], ("c1".into(), "completed".into()));
    });
}

#[test]
fn a_transient_failure_leaves_the_orphan_to_the_next_reconcile() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        pair.sql("DELETE FROM ra_tool_calls");
        pair.sql("DELETE FROM ra_step");
        pair.evict();
        pair.network.set(&["status"], Fault::Lost);
        assert_eq!(pair.resume(json!({"message": "hm"})).await.0, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(pair.refs()[0], ("c1".into(), "running".into()));
        pair.network.mend();
        assert_eq!(pair.resume(json!({"message": "hm"})).await.0, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(pair.refs()[0], ("c1".into(), "failed".into()));
        assert_eq!(own(&pair.log().await, "subagent_end").len(), 1);
        assert_eq!(pair.child_status().await["status"], "interrupted");
    });
}

#[test]
fn a_child_of_a_failed_run_is_stopped_at_its_call_s_deadline_although_no_entry_comes() {
    in_world(|| async {
        let pair = Setup::new(working_for(100_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        let log = pair.log().await;
        pair.network.set(&["interrupt"], Fault::Lost);
        wait(16 * 60_000).await;
        assert_eq!(pair.child_status().await["status"], "running");
        pair.evict();
        pair.network.mend();
        wait(20 * 60_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
        // Then it rests; nothing was written behind the run's end.
        let asked = pair.network.asked("status");
        wait(48 * 60 * 60_000).await;
        assert_eq!(pair.network.asked("status"), asked);
        assert_eq!(pair.log().await, log);
        // The next entry settles the call.
        assert_eq!(pair.resume(json!({"message": "and?"})).await.0, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(detail(own(&log, "tool_end")[0])["code"], "run_interrupted");
    });
}

#[test]
fn a_malformed_ref_fails_its_call_typed_while_the_others_reconcile() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(60));
        setup.parent = scripted(|request| match turn(request) {
            0 => calls(&[
                ("c1", "subagent__ask", json!({"message": "one"})),
                ("c2", "subagent__ask", json!({"message": "two"})),
            ]),
            _ => text("parent is done"),
        });
        let pair = setup.pair();
        pair.begin().await;
        wait(5_000).await;
        pair.sql(
            "UPDATE ra_sub_sessions SET remote_last_sequence = NULL WHERE tool_call_id = 'c1'",
        );
        pair.evict();
        let settled = pair.settled().await;
        assert_eq!(settled["status"], "completed", "{settled}");
        let log = pair.log().await;
        assert_settled(&log);
        let result = |call: &str| {
            let all = own(&log, "tool_end");
            (*all.iter().find(|one| one["toolCallId"] == call).unwrap()).clone()
        };
        assert_eq!(detail(&result("c1"))["code"], "invalid_stored_state");
        assert_eq!(result("c2")["success"], true);
        assert_eq!(
            pair.refs(),
            [
                ("c1".into(), "failed".into()),
                ("c2".into(), "completed".into())
            ]
        );
    });
}

#[test]
fn a_call_whose_sub_agent_was_taken_away_settles_and_its_child_is_told_once_it_is_back() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.has_sub_agent.set(false);
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(
            detail(own(&log, "tool_end")[0])["code"],
            "framework_not_supported"
        );
        assert_eq!(
            own(&log, "custom")[0]["eventName"],
            "sub_agent_stop_undelivered"
        );
        pair.has_sub_agent.set(true);
        pair.evict();
        assert_eq!(pair.resume(json!({"message": "hm"})).await.0, 200);
        pair.settled().await;
        wait(1_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
    });
}

#[test]
fn what_a_settled_child_spent_is_read_again_where_it_could_not_be_told() {
    in_world(|| async {
        let pair = Setup::new(scripted(|_| text("the child is done"))).pair();
        pair.network.set(&["sse", "snapshot", "usage"], Fault::Lost);
        pair.begin().await;
        assert_eq!(pair.settled().await["status"], "completed");
        let rollup = || async {
            let (_, usage) = pair.parent.get("/agents/parent/usage?sessionId=p").await;
            usage["rollup"].clone()
        };
        let before = rollup().await;
        assert_eq!(before["partial"], true, "nothing is known of the child");
        pair.network.mend();
        let after = rollup().await;
        assert_eq!(after["partial"], false);
        let total = |rollup: &Value| rollup["tokens"]["total"].as_u64().unwrap();
        assert_eq!(total(&after), total(&before) + 15);
        assert_eq!(rollup().await, after, "and counted once");
    });
}
