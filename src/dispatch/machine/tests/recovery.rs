//! Recovery reads, folds, lost children and dead producers.

use super::*;

#[test]
fn an_end_that_is_not_completed_is_judged_by_the_status() {
    for ended in [SessionStatus::Paused, SessionStatus::Interrupted] {
        assert_eq!(
            Bench::streaming().frames(vec![Frame::End(end(ended))]),
            [Effect::ReadStatus]
        );
    }
    assert_eq!(
        Bench::streaming().frames(vec![Frame::Error(error("x", false))]),
        [Effect::ReadStatus]
    );
}

#[test]
fn case_30_a_paused_child_fails_fast_and_is_no_success() {
    let mut bench = Bench::streaming();
    bench.frames(vec![Frame::End(EndFrame {
        output: Some(Value::Null),
        ..end(SessionStatus::Paused)
    })]);
    assert_eq!(
        bench.tell(Event::Status(Ok(status(SessionStatus::Paused, false)))),
        [Effect::ReadUsage]
    );
    let effects = bench.tell(usage(1));
    assert_eq!(
        failure(&effects),
        (
            "client-tool-unsupported".into(),
            Some("child_paused".into())
        )
    );
    assert!(settled(&effects).usage.is_some());
}

#[test]
fn an_interrupted_child_with_output_is_folded_and_one_without_fails() {
    let mut bench = Bench::streaming();
    bench.frames(vec![Frame::End(end(SessionStatus::Interrupted))]);
    let mut answer = status(SessionStatus::Interrupted, false);
    answer.output = Some(json!("partial"));
    assert_eq!(
        bench.tell(Event::Status(Ok(answer))),
        [Effect::ReadSnapshot]
    );
    assert_eq!(bench.tell(snapshot(json!({"x": 1}))), [Effect::ReadUsage]);
    let outcome = settled(&bench.tell(usage(1)));
    assert_eq!(
        (outcome.output, outcome.child_state),
        (Some(json!("partial")), Some(json!({"x": 1})))
    );

    let mut bench = Bench::streaming();
    bench.frames(vec![Frame::End(end(SessionStatus::Interrupted))]);
    assert_eq!(
        bench.tell(Event::Status(Ok(status(SessionStatus::Interrupted, false)))),
        [Effect::ReadUsage]
    );
    assert_eq!(
        failure(&bench.tell(usage(1))),
        ("run_interrupted".into(), Some("child_interrupted".into()))
    );
}

#[test]
fn a_failed_child_fails_the_call_in_its_own_words() {
    let mut bench = Bench::streaming();
    bench.frames(vec![Frame::Error(error("provider_error", false))]);
    let mut answer = status(SessionStatus::Failed, false);
    answer.error_code = Some("provider_error".into());
    answer.error = Some("The provider is down.".into());
    assert_eq!(
        bench.tell(Event::Status(Ok(answer))),
        [Effect::ReadSnapshot]
    );
    assert_eq!(bench.tell(snapshot(json!({"x": 1}))), [Effect::ReadUsage]);
    let effects = bench.tell(usage(2));
    assert_eq!(
        failure(&effects),
        ("provider_error".into(), Some("child_failed".into()))
    );
    let outcome = settled(&effects);
    assert_eq!(outcome.result["error"], json!("The provider is down."));
    assert!(outcome.usage.is_some());
}

#[test]
fn a_recovered_completion_is_read_in_order() {
    let mut bench = Bench::streaming();
    bench.exhaust_stream();
    let mut answer = status(SessionStatus::Completed, false);
    answer.output = Some(json!(1));
    assert_eq!(bench.tell(Event::Status(Ok(answer))), [attach("st_1", 0)]);
    assert_eq!(bench.fail_to_drain(), [Effect::ReadSnapshot]);
    assert_eq!(bench.tell(snapshot(json!({}))), [Effect::ReadUsage]);
    assert_eq!(settled(&bench.tell(usage(1))).output, Some(json!(1)));
}

/// A child that completed while its stream could not be attached, its status just read.
fn completed_meanwhile() -> Bench {
    let mut bench = Bench::streaming();
    bench.frames(vec![chunk(1)]);
    bench.exhaust_stream();
    let mut answer = status(SessionStatus::Completed, false);
    answer.output = Some(json!(1));
    assert_eq!(bench.tell(Event::Status(Ok(answer))), [attach("st_1", 1)]);
    bench
}

#[test]
fn what_a_child_said_before_it_completed_unheard_is_forwarded_all_the_same() {
    let mut bench = completed_meanwhile();
    assert_eq!(bench.tell(Event::Attached), [Effect::Next]);
    assert_eq!(
        bench.frames(vec![chunk(2), chunk(3)]),
        [forward("st_1", &[2, 3]), Effect::Next]
    );
    assert_eq!(
        bench.frames(vec![chunk(4), Frame::End(completed())]),
        [forward("st_1", &[4]), Effect::ReadSnapshot]
    );
}

#[test]
fn where_the_rest_of_a_completed_child_cannot_be_had_the_log_says_so() {
    // The stream drops again, is refused, is truncated, or never ends.
    let endings: [fn(&mut Bench) -> Vec<Effect>; 3] = [
        |bench| bench.drop_stream(),
        |bench| {
            bench.tell(Event::Attached);
            bench.frames(vec![truncated(Some(9), "st_1")])
        },
        |bench| {
            bench.tell(Event::Attached);
            assert!(bench.dispatch.has_ended());
            assert_eq!(bench.dispatch.handle_drained(bench.now), Abandon::Yes);
            bench.effects()
        },
    ];
    for end in endings {
        let mut bench = completed_meanwhile();
        let effects = end(&mut bench);
        assert_eq!(
            effects,
            [unheard("st_1", 2, bench.now), Effect::ReadSnapshot]
        );
        bench.tell(snapshot(json!({})));
        assert!(settled(&bench.tell(usage(1))).success);
    }
}

#[test]
fn a_fold_that_cannot_be_read_is_skipped_with_a_warning() {
    for fault in [
        refused(404, "NOT_FOUND"),
        refused(404, "FEATURE_UNAVAILABLE"),
        TransportError::Timeout(Duration::from_secs(10)),
        unreachable(),
        TransportError::Malformed("x".into()),
    ] {
        let mut bench = Bench::streaming();
        bench.frames(vec![Frame::End(EndFrame {
            state: None,
            usage: None,
            ..completed()
        })]);
        let effects = bench.tell(Event::Snapshot(Err(fault.clone())));
        assert!(has_note(&effects));
        assert_eq!(effects.last(), Some(&Effect::ReadUsage));
        let effects = bench.tell(Event::Usage(Err(fault)));
        assert!(has_note(&effects));
        let outcome = settled(&effects);
        assert_eq!(
            (outcome.success, outcome.child_state, outcome.usage),
            (true, None, None)
        );
    }
}

#[test]
fn a_malformed_rollup_is_read_again_and_then_skipped() {
    let mut bench = Bench::streaming();
    let effects = bench.frames(vec![Frame::End(EndFrame {
        usage: Some(json!({"steps": "many"})),
        ..completed()
    })]);
    assert!(has_note(&effects));
    assert_eq!(effects.last(), Some(&Effect::ReadUsage));
    let answer = UsageResponse {
        session_id: "c".into(),
        rollup: json!([]),
    };
    let effects = bench.tell(Event::Usage(Ok(answer)));
    assert!(has_note(&effects));
    assert_eq!(settled(&effects).usage, None);
}

#[test]
fn a_state_over_the_bound_is_not_folded_and_nothing_else_suffers() {
    let limit = json!({"phase": "done"}).to_string().len();
    for (max_fold_state_bytes, folded) in [(limit, true), (limit - 1, false)] {
        let mut bench = Bench::streaming_with(Terms {
            max_fold_state_bytes,
            ..terms()
        });
        let effects = bench.frames(vec![Frame::End(completed())]);
        let outcome = settled(&effects);
        assert_eq!(
            (outcome.child_state.is_some(), has_note(&effects)),
            (folded, !folded)
        );
        assert!(outcome.success && outcome.usage.is_some());
    }
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Report {
    #[allow(dead_code)]
    title: String,
}

#[test]
fn an_output_without_its_declared_shape_is_a_structured_failure() {
    let mut bench = Bench::streaming_with(Terms {
        output: Some(Shape::of::<Report>()),
        ..terms()
    });
    let effects = bench.frames(vec![Frame::End(completed())]);
    assert_eq!(
        failure(&effects),
        (
            "output_validation_failed".into(),
            Some("output_shape".into())
        )
    );
    assert!(settled(&effects).usage.is_some());
}

#[test]
fn a_child_that_cannot_be_found_is_lost() {
    for (answer, cause) in [
        (refused(404, "NOT_FOUND"), "not_found"),
        (refused(401, "UNAUTHORIZED"), "refused:UNAUTHORIZED"),
        (
            refused(404, "FEATURE_UNAVAILABLE"),
            "refused:FEATURE_UNAVAILABLE",
        ),
        // Something between the services answered: it is not asked again either.
        (TransportError::Unexplained { status: 404 }, "not_found"),
        (
            TransportError::Unexplained { status: 403 },
            "refused:http_403",
        ),
    ] {
        let mut bench = Bench::streaming();
        bench.exhaust_stream();
        let effects = bench.tell(Event::Status(Err(answer)));
        assert_eq!(
            failure(&effects),
            ("framework_subagent_lost".into(), Some(cause.into()))
        );
    }
}

#[test]
fn an_unreadable_status_proves_nothing_and_is_read_again() {
    let mut bench = Bench::streaming();
    bench.exhaust_stream();
    for fault in [
        unreachable(),
        refused(503, "OVERLOADED"),
        TransportError::Timeout(Duration::from_secs(10)),
    ] {
        let effects = bench.tell(Event::Status(Err(fault)));
        assert!(has_note(&effects));
        assert_eq!(bench.sleep(&effects), [Effect::ReadStatus]);
    }
    assert_eq!(bench.dispatch.handle_deadline(), Abandon::No);
    let answer = Event::Status(Ok(status(SessionStatus::Running, true)));
    assert_eq!(bench.tell(answer), interrupt(Code::RunTimeout));
}

#[test]
fn status_unreachable_is_past_the_child_s_own_deadline_plus_one_minute_of_grace() {
    let mut bench = Bench::streaming();
    bench.exhaust_stream();
    let effects = bench.tell(Event::Status(Err(unreachable())));
    assert!(matches!(effects.last(), Some(Effect::Sleep { .. })));
    assert_eq!(bench.dispatch.handle_deadline(), Abandon::Yes);
    assert_eq!(bench.effects(), [Effect::ReadStatus]);
    let effects = bench.tell(Event::Status(Err(unreachable())));
    assert!(matches!(effects.last(), Some(Effect::Sleep { .. })));
    assert_eq!(bench.dispatch.handle_grace_over(), Abandon::Yes);
    assert_eq!(bench.effects(), interrupt(Code::SubagentLost));
    let effects = bench.tell(Event::Interrupted(Err(unreachable())));
    assert_eq!(
        failure(&effects),
        (
            "framework_subagent_lost".into(),
            Some("status_unreachable".into())
        )
    );
    assert!(is_untold(&effects));

    // A parent that was away for longer than that asks once.
    let mut bench = Bench::restarted(true, Some(("st_1", 4)));
    bench.effects();
    bench.dispatch.handle_deadline();
    assert_eq!(bench.effects(), [Effect::ReadStatus]);
    assert_eq!(bench.dispatch.handle_grace_over(), Abandon::No);
    let effects = bench.tell(Event::Status(Err(unreachable())));
    assert_eq!(
        effects.last(),
        Some(&Effect::Interrupt {
            reason: Code::SubagentLost
        })
    );
}

#[test]
fn a_child_that_ended_while_the_parent_was_away_past_the_deadline_counts() {
    for known in [None, Some(("st_1", 4))] {
        let mut bench = Bench::restarted(true, known);
        bench.effects();
        assert_eq!(bench.dispatch.handle_deadline(), Abandon::Yes);
        assert_eq!(bench.effects(), [Effect::ReadStatus]);
        let mut answer = status(SessionStatus::Completed, false);
        answer.output = Some(json!(1));
        let effects = bench.tell(Event::Status(Ok(answer.clone())));
        if known.is_none() {
            // The stream is learned from the status and read to its end.
            assert_eq!(effects.last(), Some(&attach("st_1", 0)));
            bench.tell(Event::Attached);
            assert!(settled(&bench.frames(vec![Frame::End(completed())])).success);
        } else {
            assert_eq!(effects, [attach("st_1", 4)]);
            bench.tell(Event::Attached);
            bench.frames(vec![Frame::End(completed())]);
            bench.tell(snapshot(json!({})));
            assert!(settled(&bench.tell(usage(1))).success);
        }
    }
}

#[test]
fn a_failure_that_the_stream_told_stands_in_for_an_unreadable_status() {
    let mut bench = Bench::streaming();
    bench.frames(vec![Frame::Error(error("provider_error", false))]);
    for _ in 0..2 {
        let effects = bench.tell(Event::Status(Err(unreachable())));
        assert_eq!(bench.sleep(&effects), [Effect::ReadStatus]);
    }
    let effects = bench.tell(Event::Status(Err(unreachable())));
    assert_eq!(failure(&effects).0, "provider_error");
    assert_eq!(settled(&effects).result["error"], json!("It broke."));
}

#[test]
fn a_running_child_with_a_runner_is_attached_to_for_as_long_as_it_takes() {
    let mut bench = Bench::streaming();
    bench.exhaust_stream();
    for _ in 0..20 {
        let effects = bench.tell(Event::Status(Ok(status(SessionStatus::Running, true))));
        assert_eq!(bench.sleep(&effects), [attach("st_1", 0)]);
        assert_eq!(bench.drop_stream(), [Effect::ReadStatus]);
    }
}

#[test]
fn a_dead_producer_fails_typed_after_the_attach_attempts() {
    let mut bench = Bench::streaming();
    bench.exhaust_stream();
    assert_eq!(exhaust_attaches(&mut bench), interrupt(Code::ProducerDead));
    let effects = bench.tell(Event::Interrupted(Err(unreachable())));
    assert_eq!(
        failure(&effects),
        ("producer-dead".into(), Some("no_runner".into()))
    );
    assert!(is_untold(&effects));
}

#[test]
fn a_dead_producer_is_resumed_once_where_that_is_allowed() {
    let allowed = || {
        Bench::streaming_with(Terms {
            resume_dead_producer: true,
            ..terms()
        })
    };
    for answer in [
        Ok(start_answer("st_1")),
        Err(refused(409, "ALREADY_RUNNING")),
    ] {
        let mut bench = allowed();
        bench.exhaust_stream();
        assert_eq!(exhaust_attaches(&mut bench), [Effect::Resume { number: 1 }]);
        assert_eq!(bench.tell(Event::Resumed(answer)), [attach("st_1", 0)]);
        assert_eq!(bench.drop_stream(), [Effect::ReadStatus]);
        assert_eq!(exhaust_attaches(&mut bench), interrupt(Code::ProducerDead));
    }
    let mut bench = allowed();
    bench.exhaust_stream();
    exhaust_attaches(&mut bench);
    let effects = bench.tell(Event::Resumed(Err(refused(
        409,
        "state_child_session_taken",
    ))));
    assert_eq!(failure(&effects).0, "state_child_session_taken");
    let mut bench = allowed();
    bench.exhaust_stream();
    exhaust_attaches(&mut bench);
    assert_eq!(
        bench.tell(Event::Resumed(Err(unreachable()))),
        interrupt(Code::ProducerDead)
    );
}
