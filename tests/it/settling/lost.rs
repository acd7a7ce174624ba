//! A child that the parent cannot find settles typed; what may pass is tried again.

use super::*;

#[test]
fn not_found_the_child_s_producer_does_not_know_the_session() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.network
            .set(&["sse", "status"], Fault::Refused(404, "NOT_FOUND"));
        pair.evict();
        let settled = pair.settled().await;
        assert_eq!(settled["status"], "completed", "the run goes on: {settled}");
        let log = pair.log().await;
        assert_settled(&log);
        let expected = json!({"code": "framework_subagent_lost", "category": "framework",
            "retryable": false, "cause": "not_found"});
        assert_eq!(detail(own(&log, "tool_end")[0]), &expected);
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
    });
}

#[test]
fn refused_code_the_producer_refused_the_status_read_typed_and_non_retryable() {
    in_world(|| async {
        let pair = Setup::new(working_for(10_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.network
            .set(&["sse", "status"], Fault::Refused(401, "UNAUTHORIZED"));
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        let told = detail(own(&log, "tool_end")[0]);
        assert_eq!(told["code"], "framework_subagent_lost");
        assert_eq!(told["cause"], "refused:UNAUTHORIZED");
    });
}

#[test]
fn status_unreachable_past_the_child_s_own_timeout_plus_one_minute_of_grace() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(10_000));
        setup.minutes = 5;
        let pair = setup.pair();
        let begun = tokio::time::Instant::now();
        pair.begin().await;
        wait(5_000).await;
        pair.network.set(&ACTIONS, Fault::Lost);
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        let took = begun.elapsed().as_secs();
        assert!((360..390).contains(&took), "{took} s");
        let log = pair.log().await;
        assert_settled(&log);
        let told = detail(own(&log, "tool_end")[0]);
        assert_eq!(told["code"], "framework_subagent_lost");
        assert_eq!(told["cause"], "status_unreachable");
        // It may be at work all the same: that is said, and it is told later.
        let untold = own(&log, "custom");
        assert_eq!(untold[0]["eventName"], "sub_agent_stop_undelivered");
        assert_eq!(untold[0]["data"]["toolCallId"], "c1");
        assert_eq!(pair.refs(), [("c1".into(), "stopping".into())]);
        pair.network.mend();
        assert_eq!(pair.child_status().await["status"], "running");
        let (status, _) = pair.resume(json!({"message": "and?"})).await;
        assert_eq!(status, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        wait(5_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
        assert_settled(&pair.log().await);
    });
}

#[test]
fn any_other_failure_is_transient() {
    in_world(|| async {
        let pair = Setup::new(working_for(120)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.network
            .set(&ACTIONS, Fault::Refused(503, "OVERLOADED"));
        pair.evict();
        wait(100_000).await;
        let warned = pair
            .lines
            .0
            .borrow()
            .iter()
            .any(|line| line.contains("status cannot be read"));
        assert!(warned, "it is logged at warn");
        pair.network.mend();
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(own(&log, "tool_end")[0]["success"], true);
        assert_eq!(pair.network.starts.borrow().len(), 1);
    });
}

#[test]
fn a_child_whose_start_never_answered_is_reconciled_too() {
    in_world(|| async {
        // The request arrives, and no answer ever does; the parent is evicted meanwhile.
        let mut setup = Setup::new(working_for(600));
        setup.minutes = 1;
        let pair = setup.pair();
        pair.network.set(&["start"], Fault::AnswerLost);
        pair.begin().await;
        wait(300).await;
        pair.network.set(&["start"], Fault::Lost);
        // Away until the call's time is over: then the status tells.
        pair.sql("UPDATE ra_sub_sessions SET deadline = 1700000000100");
        pair.evict();
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(detail(own(&log, "tool_end")[0])["code"], "run_timeout");
        wait(1_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
    });
}

#[test]
fn a_child_that_finished_while_the_parent_was_away_counts_also_past_its_deadline() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(100));
        setup.minutes = 2;
        let pair = setup.pair();
        pair.begin().await;
        wait(5_000).await;
        pair.fail_the_run().await;
        wait(600_000).await;
        let (status, _) = pair.resume(json!({})).await;
        assert_eq!(status, 200);
        assert_eq!(pair.settled().await["status"], "completed");
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(own(&log, "tool_end")[0]["success"], true);
    });
}
