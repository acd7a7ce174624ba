//! Stop and deadline.

use super::*;

/// The answer of a start that is to be stopped names the child's stream.
fn known_and_interrupted() -> Vec<Effect> {
    let stream = StreamId::parse("st_1").unwrap();
    let mut effects = vec![Effect::Identify { stream }];
    effects.extend(interrupt(Code::RunInterrupted));
    effects
}

#[test]
fn a_stop_before_anything_was_sent_settles_at_once() {
    let mut bench = Bench::with(terms());
    assert_eq!(bench.dispatch.handle_stop(), Abandon::Yes);
    let effects = bench.effects();
    assert_eq!(
        failure(&effects),
        ("run_interrupted".into(), Some("not_started".into()))
    );
    assert_eq!(effects.len(), 1);
}

#[test]
fn case_23_a_stop_settles_an_unanswered_start_first() {
    for (answer, told) in [
        (started("st_1"), true),
        (
            Event::Started(Err(refused_with(409, "ALREADY_RUNNING", Some("st_1")))),
            true,
        ),
        (Event::Started(Err(refused(400, "VALIDATION_ERROR"))), false),
        (
            Event::Started(Err(refused(409, "state_child_session_taken"))),
            false,
        ),
    ] {
        // A start on its way, and one that an earlier life of the parent may have sent.
        for mut bench in [Bench::with(terms()), Bench::restarted(true, None)] {
            let sent_before = bench.dispatch.start_sent;
            if !sent_before {
                assert_eq!(bench.effects(), [Effect::Start]);
            }
            assert_eq!(bench.dispatch.handle_stop(), Abandon::No);
            assert_eq!(bench.effects().len(), usize::from(sent_before));
            let mut effects = bench.tell(answer.clone());
            if told {
                assert_eq!(effects, known_and_interrupted());
                // What the child has said until then is heard.
                assert_eq!(bench.tell(interrupted()), [attach("st_1", 0)]);
                bench.tell(Event::Attached);
                let heard = bench.frames(vec![chunk(1), Frame::End(completed())]);
                assert!(matches!(
                    &heard[..],
                    [Effect::Forward { through: 1, .. }, Effect::ReadUsage]
                ));
                effects = bench.tell(usage(1));
            }
            assert_eq!(failure(&effects).0, "run_interrupted");
            assert!(!is_untold(&effects));
        }
    }
}

#[test]
fn a_start_that_is_to_be_stopped_is_sent_again_until_it_is_answered() {
    let stopping = || {
        let mut bench = Bench::with(terms());
        bench.effects();
        assert_eq!(bench.dispatch.handle_stop(), Abandon::No);
        for fault in [
            unreachable(),
            refused(503, "transport_error"),
            TransportError::Timeout(Duration::from_secs(30)),
        ] {
            let effects = bench.tell(Event::Started(Err(fault)));
            assert!(has_note(&effects));
            assert_eq!(bench.sleep(&effects), [Effect::Start]);
        }
        // A second stop and the deadline change nothing.
        assert_eq!(bench.dispatch.handle_stop(), Abandon::No);
        assert_eq!(bench.dispatch.handle_deadline(), Abandon::No);
        bench
    };
    let mut bench = stopping();
    assert_eq!(bench.tell(started("st_1")), known_and_interrupted());
    bench.tell(interrupted());
    assert_eq!(bench.fail_to_drain(), [Effect::ReadUsage]);
    assert_eq!(failure(&bench.tell(usage(1))).0, "run_interrupted");

    // The call's time plus one minute is over: the child is told as well as it goes.
    let mut bench = stopping();
    assert_eq!(bench.dispatch.handle_grace_over(), Abandon::Yes);
    assert_eq!(bench.effects(), interrupt(Code::RunInterrupted));
    let effects = bench.tell(Event::Interrupted(Err(unreachable())));
    assert_eq!(failure(&effects).0, "run_interrupted");
    assert!(is_untold(&effects));
}

#[test]
fn a_stop_interrupts_the_child_wherever_the_call_stands() {
    type Reach = fn() -> Bench;
    let places: [(&str, Reach); 5] = [
        ("attaching", || Bench::restarted(true, Some(("st_1", 4)))),
        ("streaming", Bench::streaming),
        ("pausing", || {
            let mut bench = Bench::streaming();
            bench.drop_stream();
            bench
        }),
        ("status", || {
            let mut bench = Bench::streaming();
            bench.exhaust_stream();
            bench
        }),
        ("resuming", || {
            let mut bench = Bench::streaming_with(Terms {
                resume_dead_producer: true,
                ..terms()
            });
            bench.exhaust_stream();
            exhaust_attaches(&mut bench);
            bench
        }),
    ];
    for (place, reach) in places {
        let mut bench = reach();
        assert_eq!(bench.dispatch.handle_stop(), Abandon::Yes, "{place}");
        assert_eq!(bench.effects(), interrupt(Code::RunInterrupted), "{place}");
        assert_eq!(
            (
                bench.dispatch.handle_stop(),
                bench.dispatch.handle_deadline()
            ),
            (Abandon::No, Abandon::No)
        );
        let effects = bench.tell(Event::Interrupted(Err(unreachable())));
        assert!(has_note(&effects), "{place}");
        assert_eq!(
            failure(&effects),
            ("run_interrupted".into(), None),
            "{place}"
        );

        assert!(is_untold(&effects), "{place}");

        let mut bench = reach();
        // A child that is not being heard may have ended: that is found out first.
        let abandon = bench.dispatch.handle_deadline();
        let mut effects = bench.effects();
        if place != "streaming" {
            assert_eq!(abandon == Abandon::No, place == "status", "{place}");
            let running = status(SessionStatus::Running, true);
            effects = bench.tell(Event::Status(Ok(running)));
        }
        assert_eq!(effects, interrupt(Code::RunTimeout), "{place}");
        assert_eq!(bench.tell_interrupted(), [Effect::ReadUsage]);
        let effects = bench.tell(usage(9));
        assert_eq!(
            failure(&effects),
            ("run_timeout".into(), Some("deadline".into())),
            "{place}"
        );
        assert!(settled(&effects).usage.is_some(), "{place}");
    }
}

#[test]
fn the_deadline_does_not_wait_for_a_start() {
    let mut bench = Bench::with(terms());
    bench.effects();
    assert_eq!(bench.dispatch.handle_deadline(), Abandon::Yes);
    assert_eq!(bench.effects(), interrupt(Code::RunTimeout));
    let effects = bench.tell(Event::Interrupted(Err(refused(404, "NOT_FOUND"))));
    assert_eq!(failure(&effects).0, "run_timeout");
    assert!(is_untold(&effects), "the start may be on its way");
}

#[test]
fn a_child_that_nobody_knows_has_to_be_told_as_long_as_its_start_is_not_answered() {
    let not_found = || refused(404, "NOT_FOUND");
    // Away until the call's time was over, and nobody has heard of the child.
    let mut bench = Bench::restarted(true, None);
    bench.effects();
    bench.dispatch.handle_deadline();
    assert_eq!(bench.effects(), [Effect::ReadStatus]);
    let effects = bench.tell(Event::Status(Err(not_found())));
    assert_eq!(
        failure(&effects),
        ("framework_subagent_lost".into(), Some("not_found".into()))
    );
    assert!(is_untold(&effects));

    // One whose start was answered is gone for good.
    let mut bench = Bench::restarted(true, Some(("st_1", 4)));
    bench.effects();
    bench.dispatch.handle_stop();
    assert_eq!(bench.effects(), interrupt(Code::RunInterrupted));
    let effects = bench.tell(Event::Interrupted(Err(not_found())));
    assert_eq!(failure(&effects).0, "run_interrupted");
    assert!(!is_untold(&effects));
}

#[test]
fn a_known_end_outlives_a_stop() {
    let mut bench = Bench::streaming();
    bench.frames(vec![Frame::End(EndFrame {
        state: None,
        usage: None,
        ..completed()
    })]);
    assert_eq!(
        (
            bench.dispatch.handle_stop(),
            bench.dispatch.handle_deadline()
        ),
        (Abandon::No, Abandon::No)
    );
    assert_eq!(bench.tell(snapshot(json!({}))), [Effect::ReadUsage]);
    assert_eq!(bench.dispatch.handle_stop(), Abandon::No);
    assert!(settled(&bench.tell(usage(1))).success);
}

#[test]
fn an_interrupt_of_a_child_that_has_ended_still_counts_its_usage() {
    let mut bench = Bench::streaming();
    bench.dispatch.handle_deadline();
    bench.effects();
    assert_eq!(
        bench.tell(Event::Interrupted(Err(refused(409, "ALREADY_COMPLETED")))),
        [attach("st_1", 0)]
    );
    assert_eq!(bench.fail_to_drain(), [Effect::ReadUsage]);
}

#[test]
fn what_a_stopped_child_still_says_is_forwarded_to_its_end() {
    let mut bench = Bench::streaming();
    bench.frames(vec![chunk(1)]);
    bench.dispatch.handle_stop();
    bench.effects();
    assert_eq!(bench.tell(interrupted()), [attach("st_1", 1)]);
    assert_eq!(bench.tell(Event::Attached), [Effect::Next]);
    // Neither a second stop nor the deadline cuts the wait: the driver bounds it.
    assert_eq!(
        (
            bench.dispatch.handle_stop(),
            bench.dispatch.handle_deadline()
        ),
        (Abandon::No, Abandon::No)
    );
    let effects = bench.frames(vec![chunk(1), chunk(2)]);
    assert!(
        matches!(&effects[..], [Effect::Forward { through: 2, chunks, .. }, Effect::Next] if chunks.len() == 1)
    );
    // Whatever its end says, the call was stopped.
    let effects = bench.frames(vec![chunk(3), Frame::End(completed())]);
    assert!(matches!(
        &effects[..],
        [Effect::Forward { through: 3, .. }, Effect::ReadUsage]
    ));
    assert_eq!(failure(&bench.tell(usage(2))).0, "run_interrupted");
}

#[test]
fn the_wait_for_a_stopped_child_s_end_is_bounded() {
    let mut bench = Bench::streaming();
    assert_eq!(bench.dispatch.handle_drained(bench.now), Abandon::No);
    bench.dispatch.handle_stop();
    bench.effects();
    bench.tell(interrupted());
    assert_eq!(bench.dispatch.handle_drained(bench.now), Abandon::Yes);
    let now = bench.now;
    assert_eq!(
        bench.effects(),
        [unheard("st_1", 1, now), Effect::ReadUsage]
    );
    assert_eq!(failure(&bench.tell(usage(2))).0, "run_interrupted");
}
