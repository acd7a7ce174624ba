//! A job that is stopped in the middle, and what can be done with it then.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use futures::channel::oneshot;
use remote_agents::native::CommitMoment;
use remote_agents::protocol::frame::Frame;
use serde_json::{Value, json};

use crate::checks::{hold, quotes_are_verbatim, writer_log};
use crate::library::few;
use crate::world::{Side, WRITER, World, in_world, pass};

/// Commits of the writer between two stops.
const STRIDE: u32 = 8;

/// Starts the job and stops it once the writer has made so many commits; what was answered, or
/// `None` when the job is over by then.
async fn stop_after(world: &World, commits: u32, action: &str) -> Option<(u16, Value)> {
    let (now, reached) = oneshot::channel();
    let (now, made) = (RefCell::new(Some(now)), Cell::new(0));
    *world.watcher.borrow_mut() = Some(Rc::new(move |session, moment| {
        if session.as_str() == WRITER && moment == CommitMoment::After {
            made.set(made.get() + 1);
            if made.get() == commits
                && let Some(now) = now.borrow_mut().take()
            {
                now.send(()).unwrap();
            }
        }
    }));
    let (topic, documents) = few();
    let stop = async {
        reached.await.ok()?;
        let body = json!({ "sessionId": WRITER, "reason": "enough" });
        let path = format!("/agents/writer/{action}");
        let (status, answer) = world.post(Side::Consumer, &path, body).await;
        // The last commit of all settles the run.
        let over = answer["code"] == "ALREADY_COMPLETED" || answer["status"] == "completed";
        (!over).then_some((status, answer))
    };
    let started = async {
        world.start(topic, &documents).await;
        world.rest().await;
        // Drops the sender: there will be no more.
        *world.watcher.borrow_mut() = None;
    };
    futures::join!(started, stop).1
}

/// Waits for every session of the producer to be at rest; their statuses.
async fn children_rest(world: &World) -> Vec<String> {
    for _ in 0..400 {
        pass(Duration::from_millis(250)).await;
        let mut statuses = Vec::new();
        for (session, agent_type) in world.sessions().iter().skip(1) {
            let path = format!("/internal/agents/{agent_type}/status?sessionId={session}");
            let (code, status) = world.get(Side::Internal, &path).await;
            assert_eq!(code, 200);
            statuses.push(status["status"].as_str().unwrap().to_owned());
        }
        if !statuses.iter().any(|status| status == "running") {
            return statuses;
        }
    }
    panic!("a child of a stopped writer runs on")
}

fn points() -> impl Iterator<Item = u32> {
    (1..).step_by(STRIDE as usize)
}

#[test]
fn an_interrupted_job_is_resumed_to_its_report() {
    let mut stopped = 0;
    let mut children = 0;
    for point in points() {
        let went_on = in_world(move |world| async move {
            let (code, answer) = stop_after(&world, point, "interrupt").await?;
            assert_eq!(
                (code, &answer["accepted"]),
                (200, &json!(true)),
                "{point}: {answer}"
            );
            let interrupted = world.rest().await;
            assert_eq!(interrupted["status"], "interrupted", "{point}");
            let statuses = children_rest(&world).await;
            hold(&world);
            let (log, end) = world.follow_writer().await;
            let Frame::End(end) = end else {
                panic!("{point}: {end:?}")
            };
            assert_eq!(json!(end.status), "interrupted");
            let own = log.iter().filter(|(_, chunk)| chunk["agentId"] == WRITER);
            let ends = own
                .filter(|(_, chunk)| chunk["type"] == "run_interrupted")
                .count();
            assert_eq!(ends, 1);

            let body = json!({ "sessionId": WRITER });
            let (code, resumed) = world
                .post(Side::Consumer, "/agents/writer/resume", body)
                .await;
            assert_eq!(code, 200, "{point}: {resumed}");
            let status = world.rest().await;
            assert_eq!(status["status"], "completed", "{point}: {status}");
            let (_, documents) = few();
            assert!(
                quotes_are_verbatim(&status["output"], &documents) > 0,
                "{point}: {status}"
            );
            assert_eq!(status["output"]["sections"].as_array().unwrap().len(), 2);
            children_rest(&world).await;
            hold(&world);
            let (log, _) = world.follow_writer().await;
            assert_eq!(log, writer_log(&world));
            Some(statuses.iter().any(|status| status == "interrupted"))
        });
        match went_on {
            Some(child) => children += u32::from(child),
            None => break,
        }
        stopped += 1;
    }
    assert!(stopped > 12, "{stopped} stops");
    assert!(
        children > 6,
        "in {children} of {stopped} jobs a child was interrupted"
    );
}

#[test]
fn an_aborted_job_is_over() {
    let mut stopped = 0;
    let mut children = 0;
    for point in points() {
        let went_on = in_world(move |world| async move {
            let (code, answer) = stop_after(&world, point, "abort").await?;
            assert_eq!(
                (code, &answer["accepted"]),
                (200, &json!(true)),
                "{point}: {answer}"
            );
            let status = world.rest().await;
            assert_eq!(
                (&status["status"], &status["errorCode"]),
                (&json!("failed"), &json!("run_aborted")),
                "{point}"
            );
            let (log, end) = world.follow_writer().await;
            let Frame::Error(end) = end else {
                panic!("{point}: {end:?}")
            };
            assert_eq!((end.code.as_str(), end.recoverable), ("run_aborted", false));
            assert_eq!(log, writer_log(&world));
            let statuses = children_rest(&world).await;
            hold(&world);
            for body in [
                json!({ "sessionId": WRITER }),
                json!({ "sessionId": WRITER, "message": "again" }),
            ] {
                let (code, _) = world
                    .post(Side::Consumer, "/agents/writer/resume", body)
                    .await;
                assert_eq!(code, 409);
            }
            Some(statuses.iter().any(|status| status == "interrupted"))
        });
        match went_on {
            Some(child) => children += u32::from(child),
            None => break,
        }
        stopped += 1;
    }
    assert!(stopped > 12, "{stopped} stops");
    assert!(
        children > 6,
        "in {children} of {stopped} jobs a child was interrupted"
    );
}
