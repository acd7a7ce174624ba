//! A start that arrives behind the end of its call: the child that it begins is told to stop all the
//! same. That nobody knew the child before says nothing of it.

use super::*;

/// How the call ends while its start is on its way.
#[derive(Clone, Copy, Debug)]
enum Ends {
    /// Its time is over.
    Deadline,
    /// Its parent was away when its time was over.
    Away,
    /// Its parent is stopped.
    Stop,
    /// Its parent has lost the call itself.
    Gone,
}

async fn end(pair: &Pair, how: Ends) {
    match how {
        Ends::Deadline => {}
        Ends::Away => {
            wait(200).await;
            pair.sql("UPDATE ra_sub_sessions SET deadline = 1700000000100");
            pair.evict();
        }
        Ends::Stop => {
            wait(200).await;
            let stop = json!({"sessionId": "p"});
            pair.parent.post("/agents/parent/interrupt", stop).await;
        }
        Ends::Gone => {
            wait(200).await;
            pair.sql("DELETE FROM ra_tool_calls");
            pair.sql("DELETE FROM ra_step");
            pair.evict();
        }
    }
}

/// How often the log says that the child may come; the call has one end.
fn of_the_call(log: &[Value]) -> usize {
    let of_it = |chunk: &Value| chunk["toolCallId"] == "c1";
    let ends = own(log, "subagent_end");
    assert_eq!(ends.into_iter().filter(|end| of_it(end)).count(), 1);
    let told = own(log, "custom");
    let told = told.into_iter().filter(|told| of_it(&told["data"]));
    told.filter(|told| told["eventName"] == "sub_agent_stop_undelivered")
        .count()
}

#[test]
fn a_start_that_arrives_behind_the_end_of_its_call_begins_nothing_that_goes_on() {
    for how in [Ends::Deadline, Ends::Away, Ends::Stop, Ends::Gone] {
        in_world(move || async move {
            let mut setup = Setup::new(working_for(1_000_000));
            setup.minutes = 1;
            let pair = setup.pair();
            pair.network.set(&["start"], Fault::Held);
            pair.begin().await;
            end(&pair, how).await;
            let settled = pair.settled().await;
            assert_ne!(settled["status"], "running", "{how:?}");
            assert_eq!(of_the_call(&pair.log().await), 1, "{how:?}");
            assert_eq!(pair.refs()[0], ("c1".into(), "stopping".into()), "{how:?}");
            // It arrives, and its child is at work until it is told.
            pair.network.deliver().await;
            assert_eq!(pair.child_status().await["status"], "running");
            pair.evict();
            wait(10 * 60_000).await;
            assert_eq!(
                pair.child_status().await["status"],
                "interrupted",
                "{how:?}"
            );
            assert_eq!(pair.refs()[0], ("c1".into(), "failed".into()), "{how:?}");
            assert_eq!(of_the_call(&pair.log().await), 1, "{how:?}");
        });
    }
}

#[test]
fn a_child_that_nobody_has_begun_an_hour_later_is_looked_for_no_more() {
    in_world(|| async {
        let mut setup = Setup::new(working_for(100));
        setup.minutes = 1;
        let pair = setup.pair();
        pair.network.set(&["start"], Fault::Held);
        pair.begin().await;
        assert_eq!(pair.settled().await["status"], "completed");
        wait(4 * 60 * 60_000).await;
        let asked = pair.network.asked("interrupt");
        assert!((4..20).contains(&asked), "{asked} requests");
        wait(48 * 60 * 60_000).await;
        assert_eq!(pair.network.asked("interrupt"), asked);
        assert_eq!(pair.refs(), [("c1".into(), "failed".into())]);
        assert_eq!(pair.parent.objects.alarm_at(&id("p")), None);
    });
}
