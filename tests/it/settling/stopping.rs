//! A stop is durable before it is sent, reaches every child, and is told again where it did not.

use super::*;

#[test]
fn a_stop_first_marks_the_refs_stopping_in_the_same_commit() {
    for action in ["interrupt", "abort"] {
        in_world(move || async move {
            let pair = Setup::new(working_for(10_000)).pair();
            pair.begin().await;
            wait(5_000).await;
            assert_eq!(pair.refs(), [("c1".into(), "running".into())]);
            // The object ends right behind the stop's commit.
            let seen = Rc::new(RefCell::new(None));
            let (objects, told) = (Rc::downgrade(&pair.parent.objects), seen.clone());
            let database = pair.parent.objects.database(&id("p")).unwrap();
            pair.parent
                .objects
                .on_commit(Rc::new(move |session, moment| {
                    use remote_agents::store::Database as _;
                    if moment == remote_agents::native::CommitMoment::After
                        && told.borrow().is_none()
                    {
                        let rows = database.query(
                        "SELECT s.stop IS NOT NULL, r.status FROM ra_session s, ra_sub_sessions r",
                        &[],
                    );
                        *told.borrow_mut() = Some(format!("{:?}", rows.unwrap()));
                        objects.upgrade().unwrap().evict(session).unwrap();
                    }
                }));
            let path = format!("/agents/parent/{action}");
            pair.parent.post(&path, json!({"sessionId": "p"})).await;
            assert_eq!(
                seen.borrow().as_deref(),
                Some("[[Integer(1), Text(\"stopping\")]]")
            );
            // After a restart it is carried out.
            pair.settled().await;
            assert_eq!(pair.child_status().await["status"], "interrupted");
            assert_settled(&pair.log().await);
            assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
        });
    }
}

#[test]
fn a_start_not_yet_answered_is_settled_first_and_then_interrupted() {
    for evicted in [false, true] {
        in_world(move || async move {
            let pair = Setup::new(working_for(10_000)).pair();
            // The start takes effect and its answer is lost, again and again.
            pair.network.set(&["start"], Fault::AnswerLost);
            pair.begin().await;
            wait(200).await;
            let stop = json!({"sessionId": "p"});
            pair.parent.post("/agents/parent/interrupt", stop).await;
            if evicted {
                pair.evict();
            }
            wait(20_000).await;
            let running = pair.parent.get("/agents/parent/status?sessionId=p").await.1;
            assert_eq!(
                running["status"], "running",
                "it waits for the start's answer"
            );
            assert_eq!(pair.network.asked("interrupt"), 0);
            pair.network.mend();
            assert_eq!(pair.settled().await["status"], "interrupted");
            assert_eq!(pair.child_status().await["status"], "interrupted");
            let starts = pair.network.starts.borrow().clone();
            assert!(starts.len() > 1 && starts.iter().all(|key| *key == starts[0]));
            assert_settled(&pair.log().await);
        });
    }
}

#[test]
fn a_stop_that_is_not_delivered_is_reported_and_every_later_reconcile_tries_again() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(10_000));
        setup.minutes = 2;
        let pair = setup.pair();
        pair.network.set(&["start"], Fault::AnswerLost);
        pair.network.set(&["interrupt"], Fault::Lost);
        let begun = tokio::time::Instant::now();
        pair.begin().await;
        wait(200).await;
        let stop = json!({"sessionId": "p"});
        pair.parent.post("/agents/parent/interrupt", stop).await;
        assert_eq!(pair.settled().await["status"], "interrupted");
        let took = begun.elapsed().as_secs();
        assert!(
            (180..200).contains(&took),
            "the call's time plus one minute: {took} s"
        );
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(
            own(&log, "custom")[0]["eventName"],
            "sub_agent_stop_undelivered"
        );
        assert_eq!(pair.refs(), [("c1".into(), "stopping".into())]);
        // The next entry tries again, to no avail; the one after that delivers it.
        for mended in [false, true] {
            if mended {
                pair.network.mend();
            }
            let before = pair.network.asked("interrupt");
            assert_eq!(pair.resume(json!({"message": "hm"})).await.0, 200);
            pair.settled().await;
            wait(20_000).await;
            assert!(pair.network.asked("interrupt") > before);
            let expected = if mended { "failed" } else { "stopping" };
            assert_eq!(pair.refs(), [("c1".into(), expected.into())]);
        }
        assert_eq!(pair.child_status().await["status"], "interrupted");
        // It is reported once, and the child has one end.
        let log = pair.log().await;
        assert_settled(&log);
        assert_eq!(own(&log, "custom").len(), 1);
    });
}

#[test]
fn a_child_of_an_aborted_parent_is_told_again_although_no_entry_ever_comes() {
    in_world(|| async {
        let pair = Setup::new(working_for(100_000)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.network.set(&["interrupt"], Fault::Lost);
        let stop = json!({"sessionId": "p"});
        pair.parent.post("/agents/parent/abort", stop).await;
        assert_eq!(pair.settled().await["errorCode"], "run_aborted");
        assert_eq!(pair.refs(), [("c1".into(), "stopping".into())]);
        wait(600_000).await;
        let tried = pair.network.asked("interrupt");
        assert!((6..40).contains(&tried), "{tried} requests in ten minutes");
        pair.evict();
        pair.network.mend();
        wait(600_000).await;
        assert_eq!(pair.child_status().await["status"], "interrupted");
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
        // Then it rests.
        let tried = pair.network.asked("interrupt");
        wait(7_200_000).await;
        assert_eq!(pair.network.asked("interrupt"), tried);
        assert_settled(&pair.log().await);
    });
}

#[test]
fn no_new_child_starts_under_a_stopping_parent_and_queued_calls_are_paired_not_executed() {
    for evicted in [false, true] {
        in_world(move || async move {
            let mut setup = Setup::new(working_for(10_000));
            setup.max_children = 2;
            setup.parent = scripted(|request| match turn(request) {
                0 => {
                    let ids = ["c1", "c2", "c3", "c4"];
                    calls(&ids.map(|id| (id, "subagent__ask", json!({"message": id}))))
                }
                _ => text("parent is done"),
            });
            let pair = setup.pair();
            pair.begin().await;
            wait(5_000).await;
            let stop = json!({"sessionId": "p"});
            pair.parent.post("/agents/parent/interrupt", stop).await;
            if evicted {
                pair.evict();
            }
            assert_eq!(pair.settled().await["status"], "interrupted");
            let log = pair.log().await;
            assert_settled(&log);
            assert_eq!(own(&log, "subagent_start").len(), 2);
            assert_eq!(pair.far.objects.sessions().len(), 2);
            let results = own(&log, "tool_end");
            assert_eq!(results.len(), 4);
            for result in results {
                assert_eq!(detail(result)["code"], "run_interrupted");
            }
        });
    }
}

#[test]
fn an_unreadable_ledger_does_not_keep_a_run_from_ending() {
    in_world(|| async {
        let pair = Setup::new(working_for(20)).pair();
        pair.begin().await;
        wait(5_000).await;
        pair.sql("UPDATE ra_usage SET body = 'nonsense'");
        let path = "/agents/parent/sse?sessionId=p&fromSequence=0";
        let (frames, _) = pair.parent.sse(path).await;
        let Some(Frame::End(end)) = frames.last() else {
            panic!("{frames:?}")
        };
        assert_eq!(end.usage.as_ref().unwrap()["partial"], true);
        let lines = pair.lines.0.borrow();
        assert!(lines.iter().any(|line| line.contains("usage_unreadable")));
    });
}

#[test]
fn a_refused_start_writes_nothing_and_the_run_is_looked_after_all_the_same() {
    in_world(|| async {
        let pair = Setup::new(working_for(60)).pair();
        pair.begin().await;
        wait(3_000).await;
        pair.evict();
        let commits = Rc::new(Cell::new(0));
        let counted = commits.clone();
        pair.parent.objects.on_commit(Rc::new(move |_, moment| {
            if moment == remote_agents::native::CommitMoment::After {
                counted.set(counted.get() + 1);
            }
        }));
        let body = json!({"sessionId": "p", "message": "go"});
        let (status, _) = pair.parent.post("/agents/parent/start", body).await;
        assert_eq!((status, commits.get()), (409, 0));
        assert_eq!(pair.settled().await["status"], "completed");
    });
}
