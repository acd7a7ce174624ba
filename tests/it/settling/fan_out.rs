//! The bound on children at once, and how waiting shows.

use super::*;

/// A parent that calls `n` children in one answer, and the most that were at work at once.
async fn fanned_out(n: usize, max_children: usize, evictions: u64) -> (Vec<Value>, usize) {
    let mut setup = Setup::new(working_for(60));
    setup.max_children = max_children;
    setup.parent = scripted(move |request| match turn(request) {
        0 => {
            let ids: Vec<String> = (1..=n).map(|i| format!("c{i:02}")).collect();
            let all: Vec<_> = ids
                .iter()
                .map(|id| (id.as_str(), "subagent__ask", json!({"message": id})))
                .collect();
            calls(&all)
        }
        _ => text("parent is done"),
    });
    let pair = setup.pair();
    pair.begin().await;
    let mut most = 0;
    for second in 0..2_000 {
        wait(1_000).await;
        if second % 20 == 10 && second / 20 < evictions {
            pair.evict();
        }
        let mut at_work = 0;
        for session in pair.far.objects.sessions() {
            let path = format!("/agents/child/status?sessionId={session}");
            at_work += usize::from(pair.far.get(&path).await.1["status"] == "running");
        }
        most = most.max(at_work);
        let (_, status) = pair.parent.get("/agents/parent/status?sessionId=p").await;
        if status["status"] != "running" {
            assert_eq!(status["status"], "completed", "{status}");
            break;
        }
    }
    assert_eq!(pair.network.starts.borrow().len(), n);
    let log = pair.log().await;
    assert_settled(&log);
    (log, most)
}

#[test]
fn never_more_children_than_the_bound_are_at_work_and_the_others_wait_in_call_order_visibly() {
    for evictions in [0, 5] {
        in_world(move || async move {
            let (log, most) = fanned_out(20, 4, evictions).await;
            assert_eq!(most, 4);
            let queued = own(&log, "custom");
            assert_eq!(queued.len(), 16);
            for (position, chunk) in queued.iter().enumerate() {
                assert_eq!(chunk["eventName"], "sub_agent_queued");
                let data = json!({"toolCallId": format!("c{:02}", position + 5),
                    "position": position + 1});
                assert_eq!(chunk["data"], data);
            }
            let started: Vec<String> = own(&log, "subagent_start")
                .iter()
                .map(|chunk| chunk["toolCallId"].as_str().unwrap().to_owned())
                .collect();
            let expected: Vec<String> = (1..=20).map(|i| format!("c{i:02}")).collect();
            assert_eq!(started, expected);
            // What waits is told before anything begins.
            let place = |kind: &str| log.iter().position(|chunk| chunk["type"] == kind);
            assert!(place("custom") < place("subagent_start"));
        });
    }
}

#[test]
fn the_bound_is_configurable_up_to_none() {
    in_world(|| async {
        let unbounded = remote_agents::agent::Limits::UNBOUNDED_CHILDREN;
        let (log, most) = fanned_out(20, unbounded, 0).await;
        assert_eq!((most, own(&log, "custom").len()), (20, 0));
        let (log, most) = fanned_out(3, 1, 0).await;
        assert_eq!((most, own(&log, "custom").len()), (1, 2));
        // The default of the contract.
        assert_eq!(remote_agents::agent::Limits::default().max_children, 4);
    });
}
