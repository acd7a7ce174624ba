//! How a call ends when it does not simply complete.

use super::*;

#[tokio::test(start_paused = true)]
async fn the_deadline_interrupts_the_child_and_a_restart_does_not_extend_it() {
    for (stored, deadline) in [(false, 15 * MINUTE), (true, 2 * MINUTE)] {
        let world = World::new([vec![chunk(1), hang()]]);
        world.child.interrupts.borrow_mut().push_back(stop_answer());
        if stored {
            *world.parent.child.borrow_mut() = Some(stored_ref());
        }
        let outcome = world.outcome().await;
        assert_eq!(World::code(&outcome), "run_timeout");
        assert_eq!(world.parent.runtime.elapsed(), deadline);
        assert_eq!(
            world.log()[world.log().len() - 3..],
            ["interrupt run_timeout", "sse 1 st_1", "usage"]
        );
        assert_eq!(outcome.usage.unwrap().0.steps, 7);
        assert_eq!(world.child.dropped_streams.get(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_interrupts_the_child_and_waits_no_longer_than_a_read() {
    let world = World::new([vec![chunk(1), hang()]]);
    world.child.interrupts.borrow_mut().push_back(stop_answer());
    let outcome = world.stopped_after(5000).await;
    assert_eq!(
        (World::code(&outcome), outcome.status),
        ("run_interrupted", SubStatus::Failed)
    );
    assert_eq!(world.parent.runtime.elapsed(), 5000);
    // Its last words could not be had, and the log says so.
    assert_eq!(world.forwarded(), [1, 2]);
    assert_eq!(
        world.parent.chunks.borrow()[1]["reason"],
        "child_incomplete"
    );

    let world = World::new([vec![chunk(1), hang()]]);
    world.child.interrupts.borrow_mut().push_back(None);
    let outcome = world.stopped_after(5000).await;
    assert_eq!(World::code(&outcome), "run_interrupted");
    assert_eq!(world.parent.runtime.elapsed(), 15_000);
    assert_eq!(world.parent.notes.borrow().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stopped_child_is_heard_to_its_end_and_no_longer_than_a_read_may_take() {
    // Its last words come a second after the interrupt.
    let world = World::new([
        vec![chunk(1), hang()],
        vec![after(1000, chunk(2)), chunk(3), completed()],
    ]);
    world.child.interrupts.borrow_mut().push_back(stop_answer());
    let outcome = world.stopped_after(5000).await;
    assert_eq!(World::code(&outcome), "run_interrupted");
    assert_eq!(world.forwarded(), [1, 2, 3]);
    assert_eq!(world.parent.runtime.elapsed(), 6000);

    // It goes on talking as if nothing had been said.
    let mut endless = vec![chunk(1)];
    endless.extend((2..100).map(|n| after(1000, chunk(n))));
    let world = World::new([vec![hang()], endless]);
    world.child.interrupts.borrow_mut().push_back(stop_answer());
    let outcome = world.stopped_after(5000).await;
    assert_eq!(World::code(&outcome), "run_interrupted");
    assert_eq!(world.parent.runtime.elapsed(), 15_000);
}

#[tokio::test(start_paused = true)]
async fn case_23_a_stop_at_every_moment_ends_in_an_interrupted_child() {
    // Before anything was sent: no ref, no start.
    let world = World::new([]);
    world.parent.stop.set();
    assert_eq!(World::code(&world.outcome().await), "run_interrupted");
    assert_eq!(world.log(), Vec::<String>::new());

    // While the start is on its way, and in a wait between two attaches.
    for (start_delay, stop_at, ends_at) in [(3000, 1000, 3000), (0, 300, 300)] {
        let world = World::new([vec![reset()]]);
        world.child.start_delay.set(start_delay);
        world.child.interrupts.borrow_mut().push_back(stop_answer());
        let outcome = world.stopped_after(stop_at).await;
        assert_eq!(World::code(&outcome), "run_interrupted");
        assert_eq!(world.parent.runtime.elapsed(), ends_at);
        assert!(
            world
                .log()
                .contains(&"interrupt run_interrupted".to_owned())
        );
    }

    // A start that an earlier life may have sent is settled first, also when the stop is there already.
    let world = World::new([]);
    world.child.interrupts.borrow_mut().push_back(stop_answer());
    *world.parent.child.borrow_mut() = Some(stored_ref());
    world.parent.stop.set();
    assert_eq!(World::code(&world.outcome().await), "run_interrupted");
    assert_eq!(
        world.log(),
        [
            "start p-remote-c start:p-remote-c",
            "attached st_1",
            "interrupt run_interrupted",
            "sse 0 st_1",
            "usage"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_start_that_never_answers_ends_with_the_deadline() {
    let world = World::new([]);
    *world.child.starts.borrow_mut() = [None].into();
    world
        .child
        .interrupts
        .borrow_mut()
        .push_back(Some(Err(refused(404, "NOT_FOUND"))));
    assert_eq!(World::code(&world.outcome().await), "run_timeout");
    assert_eq!(world.parent.runtime.elapsed(), 15 * MINUTE);
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_no_start_answers_is_given_up_after_the_call_s_time_plus_one_minute() {
    let world = World::new([]);
    let faults = (0..200).map(|_| Some(Err(TransportError::Unreachable("down".into()))));
    *world.child.starts.borrow_mut() = faults.collect();
    world
        .child
        .interrupts
        .borrow_mut()
        .push_back(Some(Err(TransportError::Unreachable("down".into()))));
    // A stop that comes while the first start is on its way.
    world.child.start_delay.set(1000);
    let outcome = world.stopped_after(500).await;
    assert_eq!(
        (World::code(&outcome), outcome.status),
        ("run_interrupted", SubStatus::Stopping)
    );
    assert_eq!(world.parent.runtime.elapsed(), 16 * MINUTE);
    let starts = |line: &&String| line.starts_with("start ");
    assert!(world.log().iter().filter(starts).count() > 10);
}

#[tokio::test(start_paused = true)]
async fn a_parent_that_was_away_for_long_waits_for_one_answer_and_no_longer_than_for_a_read() {
    for answered in [true, false] {
        let world = World::new([]);
        let answer = answered.then(|| Ok(started()));
        *world.child.starts.borrow_mut() = [answer].into();
        world.child.start_delay.set(3_000);
        world.child.interrupts.borrow_mut().push_back(stop_answer());
        *world.parent.child.borrow_mut() = Some(SubSessionRecord {
            status: SubStatus::Stopping,
            deadline: EPOCH - 5 * MINUTE,
            ..stored_ref()
        });
        let outcome = world.outcome().await;
        assert_eq!(World::code(&outcome), "run_interrupted");
        let expected = if answered { 3_000 } else { 10_000 };
        assert_eq!(world.parent.runtime.elapsed(), expected);
        assert!(
            world
                .log()
                .contains(&"interrupt run_interrupted".to_owned())
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_status_is_lost_a_minute_after_the_deadline() {
    let world = World::new([vec![reset()], vec![reset()], vec![reset()], vec![reset()]]);
    let faults = (0..200).map(|_| Some(Err(TransportError::Unreachable("down".into()))));
    *world.child.statuses.borrow_mut() = faults.collect();
    world
        .child
        .interrupts
        .borrow_mut()
        .push_back(Some(Err(TransportError::Unreachable("down".into()))));
    let outcome = world.outcome().await;
    assert_eq!(World::code(&outcome), "framework_subagent_lost");
    let failure = outcome.error.unwrap();
    assert_eq!(failure.cause.as_deref(), Some("status_unreachable"));
    assert_eq!(world.parent.runtime.elapsed(), 16 * MINUTE);
}

#[tokio::test(start_paused = true)]
async fn a_status_that_hangs_is_given_up_and_read_again() {
    let world = World::new([vec![reset()], vec![reset()], vec![reset()], vec![reset()]]);
    world
        .child
        .statuses
        .borrow_mut()
        .extend([None, Some(Err(refused(404, "NOT_FOUND")))]);
    let outcome = world.outcome().await;
    assert_eq!(World::code(&outcome), "framework_subagent_lost");
    assert_eq!(
        world.log()[4..],
        ["sse 0 st_1", "sse 0 st_1", "sse 0 st_1", "status", "status"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_dead_producer_is_resumed_where_that_is_allowed_and_the_call_goes_on() {
    let dead = || vec![reset()];
    let mut world = World::new([
        dead(),
        dead(),
        dead(),
        dead(),
        dead(),
        dead(),
        dead(),
        vec![chunk(1), completed()],
    ]);
    world.resume_dead_producer = true;
    for _ in 0..4 {
        world
            .child
            .statuses
            .borrow_mut()
            .push_back(status(SessionStatus::Running, false));
    }
    world.child.resumes.borrow_mut().push_back(Ok(started()));
    assert!(world.outcome().await.success);
    let log = world.log();
    assert_eq!(
        log[log.len() - 2..],
        ["resume Continue resume:p-remote-c:1", "sse 0 st_1"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_is_refused_ends_the_call_unsettled() {
    let world = World::new([vec![chunk(1), after(5, chunk(2)), completed()]]);
    world.parent.refuse_forward.set(Some(1));
    assert_eq!(world.call().await.unwrap_err().code, Code::Internal);
    // A later run owns the child: it is not interrupted, and the stream is let go.
    assert!(!world.log().iter().any(|line| line.starts_with("interrupt")));
    assert_eq!(world.child.dropped_streams.get(), 1);
    assert_eq!(world.forwarded(), [1]);
}

#[tokio::test(start_paused = true)]
async fn a_foreign_origin_is_reported_and_a_known_one_kept_across_a_restart() {
    let foreign = |session: &str, sequence| {
        let chunk = json!({"type": "text_delta", "agentId": session,
            "origin": {"sessionId": session, "streamId": "st_g", "sequence": 1},
            "remoteSource": {"childSessionId": session, "childSequence": 1, "streamId": "st_g"}});
        (
            0,
            Ok(Frame::Chunk {
                sequence,
                chunk: serde_json::from_value(chunk).unwrap(),
            }),
        )
    };
    let announce = json!({"type": "subagent_start", "agentId": CHILD, "subSessionId": "g", "subAgentType": "t"});
    let announced = (
        0,
        Ok(Frame::Chunk {
            sequence: 1,
            chunk: serde_json::from_value(announce.clone()).unwrap(),
        }),
    );
    let world = World::new([vec![
        announced,
        foreign("g", 2),
        foreign("stranger", 3),
        completed(),
    ]]);
    world.outcome().await;
    let origins: Vec<_> = world
        .parent
        .chunks
        .borrow()
        .iter()
        .map(|chunk| chunk["origin"]["sessionId"].clone())
        .collect();
    assert_eq!(origins, [json!(CHILD), json!("g"), Value::Null]);
    assert_eq!(world.parent.notes.borrow().len(), 1);

    let by = |child: &str| {
        let mut announce = announce.clone();
        announce["remoteSource"] = json!({"childSessionId": child});
        announce
    };
    // Another child's announcement of the same session counts for nothing.
    let world = World::new([vec![foreign("g", 2), foreign("h", 3), completed()]]);
    world.parent.chunks.borrow_mut().push(by(CHILD));
    let mut others = by("p-remote-other");
    others["subSessionId"] = json!("h");
    world.parent.chunks.borrow_mut().push(others);
    *world.parent.child.borrow_mut() = Some(SubSessionRecord {
        remote: Some(SubRemote {
            stream_id: StreamId::parse("st_1").unwrap(),
            last_sequence: 1,
        }),
        ..stored_ref()
    });
    world.outcome().await;
    let chunks = world.parent.chunks.borrow();
    assert_eq!(chunks[2]["origin"]["sessionId"], json!("g"));
    assert_eq!(chunks[3].get("origin"), None);
    assert_eq!(world.parent.notes.borrow().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_paused_child_is_read_and_refused() {
    let paused = EndFrame {
        run_id: None,
        status: SessionStatus::Paused,
        output: None,
        state: None,
        usage: None,
    };
    let world = World::new([vec![chunk(1), (0, Ok(Frame::End(paused)))]]);
    world
        .child
        .statuses
        .borrow_mut()
        .push_back(status(SessionStatus::Paused, false));
    let outcome = world.outcome().await;
    assert_eq!(World::code(&outcome), "client-tool-unsupported");
    assert_eq!(world.log()[4..], ["status", "usage"]);
}

#[test]
fn the_default_policy_is_the_contract_s() {
    let policy = RetryPolicy::default();
    assert_eq!(policy.call_timeout.as_secs(), 15 * 60);
    assert_eq!(
        (policy.silence.as_secs(), policy.read_timeout.as_secs()),
        (45, 10)
    );
    assert_eq!(
        (
            policy.stream_retries,
            policy.attach_attempts,
            policy.post_retries
        ),
        (3, 3, 3)
    );
    assert_eq!(policy.retry_base.as_millis(), 500);
    assert_eq!(
        (
            policy.reattach_wait.as_secs(),
            policy.longest_wait.as_secs(),
            policy.grace.as_secs()
        ),
        (8, 60, 60)
    );
}

#[tokio::test(start_paused = true)]
async fn a_ref_that_is_stopping_is_stopped_and_a_settled_one_left_alone() {
    let world = World::new([]);
    world.child.interrupts.borrow_mut().push_back(stop_answer());
    *world.parent.child.borrow_mut() = Some(SubSessionRecord {
        status: SubStatus::Stopping,
        remote: Some(SubRemote {
            stream_id: StreamId::parse("st_1").unwrap(),
            last_sequence: 3,
        }),
        ..stored_ref()
    });
    assert_eq!(World::code(&world.outcome().await), "run_interrupted");
    assert_eq!(
        world.log(),
        ["interrupt run_interrupted", "sse 3 st_1", "usage"]
    );

    for status in [SubStatus::Completed, SubStatus::Failed] {
        let world = World::new([]);
        *world.parent.child.borrow_mut() = Some(SubSessionRecord {
            status,
            ..stored_ref()
        });
        assert_eq!(world.call().await.unwrap_err().code, Code::Internal);
        assert_eq!(world.log(), Vec::<String>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn why_a_stream_ended_is_not_lost_behind_the_frames_before_it() {
    let projected = (0, Err(TransportError::ProjectedMount));
    let world = World::new([vec![chunk(1), projected]]);
    world.child.interrupts.borrow_mut().push_back(stop_answer());
    assert_eq!(
        World::code(&world.outcome().await),
        "framework_not_supported"
    );
    assert_eq!(world.forwarded(), [1, 2]);
}
