//! The parent's object ends at every one of its commits; every call settles once all the same.

use remote_agents::native::CommitMoment;

use super::*;

/// Ends the parent's object at its n-th transaction from now on.
fn kill_at(pair: &Pair, number: usize, at: CommitMoment) -> Rc<Cell<usize>> {
    let seen = Rc::new(Cell::new(0));
    let (objects, counted) = (Rc::downgrade(&pair.parent.objects), seen.clone());
    pair.parent
        .objects
        .on_commit(Rc::new(move |session, moment| {
            if moment == at {
                counted.set(counted.get() + 1);
                if counted.get() == number {
                    objects.upgrade().unwrap().evict(session).unwrap();
                }
            }
        }));
    seen
}

/// Waits by the status alone, which neither wakes an object nor breaks off with it.
async fn at_rest(pair: &Pair) -> Value {
    let mut last = Value::Null;
    for _ in 0..2_000 {
        wait(1_000).await;
        let (code, status) = pair.parent.get("/agents/parent/status?sessionId=p").await;
        if code == 200 && status["status"] != "running" {
            return status;
        }
        last = status;
    }
    last
}

/// What is done to a parent while its object is being killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    Start,
    Interrupt,
    Abort,
    WithMessage,
    NewTurn,
}

/// Whether the kill happened.
async fn act_and_kill(act: Act, number: usize, at: CommitMoment) -> bool {
    let what = format!("{act:?}, killed {at:?} commit {number}");
    let seconds = match act {
        Act::Start => 6,
        Act::WithMessage => 120,
        Act::Interrupt | Act::Abort | Act::NewTurn => 10_000,
    };
    let mut setup = Setup::new(working_for(seconds));
    setup.parent =
        scripted(
            |request| match (turn(request), last_word(request.messages.as_ref())) {
                (0, "go") => calls(&[
                    ("c1", "subagent__ask", json!({"message": "one"})),
                    ("n1", "note", json!({"kept": "yes"})),
                    ("c2", "subagent__ask", json!({"message": "two"})),
                ]),
                _ => text("parent is done"),
            },
        );
    let pair = setup.pair();
    if act == Act::Start {
        let seen = kill_at(&pair, number, at);
        // The caller tries again under its key until it has an answer.
        let body = json!({"sessionId": "p", "message": "go"}).to_string();
        let headers = [("idempotency-key", "k")];
        for _ in 0..3 {
            let answer = pair
                .parent
                .send("POST", "/agents/parent/start", &headers, body.clone())
                .await;
            if answer.status() == 200 {
                break;
            }
        }
        let settled = at_rest(&pair).await;
        assert_eq!(settled["status"], "completed", "{what}: {settled}");
        check(&pair, act, &what).await;
        return seen.get() >= number;
    }
    pair.begin().await;
    wait(5_000).await;
    if matches!(act, Act::WithMessage | Act::NewTurn) {
        for _ in 0..20 {
            wait(2_500).await;
            pair.evict();
        }
        assert_eq!(pair.settled().await["status"], "failed", "{what}");
        wait(200_000).await;
    }
    let seen = kill_at(&pair, number, at);
    let (route, body) = match act {
        Act::Interrupt => ("interrupt", json!({"sessionId": "p"})),
        Act::Abort => ("abort", json!({"sessionId": "p"})),
        Act::WithMessage => ("resume", json!({"sessionId": "p", "message": "and?"})),
        _ => (
            "resume",
            json!({"sessionId": "p", "mode": "new_turn", "message": "and?"}),
        ),
    };
    let path = format!("/agents/parent/{route}");
    for _ in 0..3 {
        let headers = [("idempotency-key", "e")];
        let answer = pair
            .parent
            .send("POST", &path, &headers, body.to_string())
            .await;
        if answer.status() == 200 {
            break;
        }
    }
    let settled = at_rest(&pair).await;
    let expected = match act {
        Act::Interrupt => "interrupted",
        Act::Abort => "failed",
        _ => "completed",
    };
    assert_eq!(settled["status"], expected, "{what}: {settled}");
    check(&pair, act, &what).await;
    seen.get() >= number
}

async fn check(pair: &Pair, act: Act, what: &str) {
    wait(120_000).await;
    let log = pair.log().await;
    assert_settled(&log);
    let starts = pair.network.starts.borrow().clone();
    let distinct: std::collections::BTreeSet<_> = starts.iter().collect();
    assert_eq!(pair.far.objects.sessions().len(), distinct.len(), "{what}");
    for session in pair.far.objects.sessions() {
        let path = format!("/agents/child/status?sessionId={session}");
        let status = pair.far.get(&path).await.1["status"].clone();
        let expected = match act {
            Act::Start | Act::WithMessage => "completed",
            _ => "interrupted",
        };
        assert_eq!(status, expected, "{what}: {session}");
    }
    for (call, status) in pair.refs() {
        assert!(
            status == "completed" || status == "failed",
            "{what}: the ref of {call} is {status}"
        );
    }
    if matches!(act, Act::WithMessage | Act::NewTurn) {
        let conversation = pair.conversation();
        assert_eq!(conversation[5], "user and?", "{what}: {conversation:?}");
        assert_eq!(conversation.len(), 7, "{what}: {conversation:?}");
    }
    let sequences: Vec<u64> = {
        let path = "/agents/parent/sse?sessionId=p&fromSequence=0";
        let (frames, _) = pair.parent.sse(path).await;
        let of = |frame: &Frame| match frame {
            Frame::Chunk { sequence, .. } => Some(*sequence),
            _ => None,
        };
        frames.iter().filter_map(of).collect()
    };
    let expected: Vec<u64> = (1..=u64::try_from(sequences.len()).unwrap()).collect();
    assert_eq!(sequences, expected, "{what}");
}

#[test]
fn killed_at_every_commit_every_call_settles_once() {
    let acts = [
        Act::Start,
        Act::Interrupt,
        Act::Abort,
        Act::WithMessage,
        Act::NewTurn,
    ];
    for act in acts {
        in_world(move || async move {
            let mut kills = 0;
            for at in [CommitMoment::Before, CommitMoment::After] {
                for number in 1.. {
                    if !act_and_kill(act, number, at).await {
                        break;
                    }
                    kills += 1;
                }
            }
            assert!(kills > 8, "{act:?}: only {kills} kills");
        });
    }
}
