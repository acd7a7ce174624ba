//! An entry with a new message settles the children of the ended run first.

use super::*;

#[test]
fn a_child_that_finished_has_its_real_result_committed_before_the_message() {
    for mode in ["with_message", "new_turn"] {
        in_world(move || async move {
            let pair = Setup::new(working_for(120)).pair();
            pair.begin().await;
            wait(5_000).await;
            pair.fail_the_run().await;
            wait(200_000).await;
            assert_eq!(pair.child_status().await["status"], "completed");
            let (status, body) = pair.resume(json!({"mode": mode, "message": "and?"})).await;
            assert_eq!(status, 200, "{body}");
            let settled = pair.settled().await;
            assert_eq!(settled["status"], "completed", "{settled}");
            assert_eq!(
                pair.conversation(),
                [
                    "user go",
                    "assistant 1",
                    "tool c1 ok",
                    "user and?",
                    "assistant parent is done0"
                ]
            );
            let log = pair.log().await;
            assert_settled(&log);
            // All of the child's words are there, and the hook has run.
            let words = |chunk: &&Value| chunk["type"] == "text_delta" && chunk["delta"] == "w0 ";
            assert_eq!(log.iter().filter(words).count(), 1);
            let (_, snapshot) = pair.parent.get("/agents/parent/snapshot?sessionId=p").await;
            assert_eq!(snapshot["state"], json!({"research": {"success": true}}));
        });
    }
}

#[test]
fn a_child_that_is_lost_has_its_typed_result_committed_before_the_message() {
    for mode in ["with_message", "new_turn"] {
        in_world(move || async move {
            let pair = Setup::new(working_for(10_000)).pair();
            pair.begin().await;
            wait(5_000).await;
            pair.fail_the_run().await;
            pair.network
                .set(&["sse", "status"], Fault::Refused(404, "NOT_FOUND"));
            let (status, body) = pair.resume(json!({"mode": mode, "message": "and?"})).await;
            assert_eq!(status, 200, "{body}");
            assert_eq!(pair.settled().await["status"], "completed");
            assert_eq!(
                pair.conversation(),
                [
                    "user go",
                    "assistant 1",
                    "tool c1 framework_subagent_lost",
                    "user and?",
                    "assistant parent is done0"
                ]
            );
            assert_settled(&pair.log().await);
        });
    }
}

#[test]
fn a_child_that_is_still_running_refuses_the_entry_busy_and_writes_nothing() {
    in_world(|| async {
        let pair = Setup::new(working_for(400)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        let before = pair.log().await;
        for fault in [None, Some(Fault::Lost)] {
            // Running, or nothing can be learned of it now: either way it is not settled.
            if let Some(fault) = fault {
                pair.network.set(&["status"], fault);
            }
            let body = json!({"mode": "with_message", "message": "and?"});
            let (status, body) = pair.resume(body).await;
            assert_eq!(
                (status, body["code"].as_str()),
                (409, Some("state_already_running"))
            );
        }
        pair.network.mend();
        assert_eq!(pair.log().await, before);
        assert_eq!(pair.conversation(), ["user go"]);
        assert_eq!(pair.child_status().await["status"], "running");
        // Hold the message and send it again once the child has finished.
        wait(400_000).await;
        let (status, _) = pair.resume(json!({"message": "and?"})).await;
        assert_eq!(status, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(pair.conversation()[2..4], ["tool c1 ok", "user and?"]);
    });
}

#[test]
fn on_a_new_turn_the_child_is_stopped_and_its_call_keeps_unpaired_on_continuation() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        let body = json!({"mode": "new_turn", "message": "something else"});
        let (status, body) = pair.resume(body).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(pair.settled().await["status"], "completed");
        wait(1_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
        assert_eq!(
            pair.conversation()[1..4],
            [
                "assistant 1",
                "tool c1 unpaired_on_continuation",
                "user something else"
            ]
        );
        let log = pair.log().await;
        assert_settled(&log);
        let expected = json!({"code": "unpaired_on_continuation", "category": "framework",
            "retryable": false, "cause": "new_message"});
        assert_eq!(detail(own(&log, "tool_end")[0]), &expected);
    });
}

#[test]
fn on_an_entry_with_no_new_message_nothing_changes_and_the_run_reattaches_to_the_child() {
    in_world(|| async {
        let pair = Setup::new(working_for(400)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        let (status, _) = pair.resume(json!({"mode": "continue"})).await;
        assert_eq!(status, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(own(&log, "tool_end")[0]["success"], true);
        assert_eq!(pair.network.starts.borrow().len(), 1);
        let resumed = log.iter().position(|chunk| chunk["type"] == "run_resumed");
        let ended = log.iter().position(|chunk| chunk["type"] == "tool_end");
        assert!(resumed < ended);
    });
}

#[test]
fn a_message_that_waits_behind_a_call_survives_evictions() {
    in_world(|| async {
        let pair = Setup::new(working_for(120)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        wait(200_000).await;
        // The child's stream cannot be read for a while: the call stays open, the message waits.
        pair.network.set(&["sse"], Fault::Lost);
        let headers = [("idempotency-key", "once")];
        let body = json!({"sessionId": "p", "message": "and?"}).to_string();
        for _ in 0..2 {
            let answer = pair
                .parent
                .send("POST", "/agents/parent/resume", &headers, body.clone())
                .await;
            assert_eq!(answer.status(), 200);
            pair.evict();
        }
        pair.network.mend();
        assert_eq!(pair.settled().await["status"], "completed");
        assert_eq!(
            pair.conversation()[1..4],
            ["assistant 1", "tool c1 ok", "user and?"]
        );
        assert_settled(&pair.log().await);
    });
}

#[test]
fn what_an_ended_run_had_staged_is_staged_anew_when_its_step_is_taken_up_again() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(120));
        setup.parent = scripted(|request| match turn(request) {
            0 => calls(&[
                ("n1", "note", json!({"kept": "yes"})),
                ("c1", "subagent__ask", json!({"message": "please"})),
            ]),
            _ => text("parent is done"),
        });
        let pair = setup.pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        let (_, snapshot) = pair.parent.get("/agents/parent/snapshot?sessionId=p").await;
        assert_eq!(snapshot["state"], json!({}), "staged state is never served");
        wait(200_000).await;
        assert_eq!(pair.resume(json!({"message": "and?"})).await.0, 200);
        // A reader that attaches at the new run's checkpoint meets every patch of the step.
        let (_, snapshot) = pair.parent.get("/agents/parent/snapshot?sessionId=p").await;
        assert_eq!(snapshot["state"], json!({}));
        let from = &snapshot["streamSequence"];
        let path = format!("/agents/parent/sse?sessionId=p&fromSequence={from}");
        let seen = chunks(&pair.parent.sse(&path).await.0);
        let patches = own(&seen, "state_patch");
        assert_eq!(patches[0]["patchBase"], snapshot["patchOrdinal"]);
        assert_eq!(patches[0]["patches"][0]["path"], "/kept");
        assert_eq!(patches[1]["patchBase"], patches[0]["patchOrdinal"]);
        let settled = pair.settled().await;
        assert_eq!(settled["status"], "completed");
        let (_, snapshot) = pair.parent.get("/agents/parent/snapshot?sessionId=p").await;
        let expected = json!({"kept": "yes", "research": {"success": true}});
        assert_eq!(snapshot["state"], expected);
        assert_eq!(
            pair.conversation()[1..5],
            ["assistant 2", "tool n1 ok", "tool c1 ok", "user and?"]
        );
    });
}
