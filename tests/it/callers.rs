//! Whose sessions the callers of a mount reach, where it binds sessions to those who begin them.

use std::rc::Rc;

use bytes::Bytes;
use remote_agents::agent::typed_tool;
use remote_agents::mount::{INTERNAL_CALLER, Mount, Objects as _};
use remote_agents::native::{LocalObjects, LocalRuntime, MountFetch};
use remote_agents::protocol::ids::SessionId;
use remote_agents::protocol::inside::Caller;
use remote_agents::protocol::route::Action;
use remote_agents::store::SubLocation;
use remote_agents::transport::HttpTransport;
use remote_agents::{Agent, Agents, SubAgent, ToolContext};
use serde_json::{Value, json};

use crate::limits::{
    BASE, KEY, ask, bound, commits, ended, idle, objects, of, talker, unbound, worker,
};
use crate::support::{Lines, calls, in_world, scripted, text, turn, yield_now};

#[test]
fn case_36_for_a_foreign_caller_a_session_is_unknown_on_every_route() {
    in_world(|| async {
        let objects = objects(|| Agents::new([talker()]).unwrap());
        let client = bound(&objects);
        assert_eq!(ask(&client, Action::Start, "hers", &of("ada")).await.0, 200);
        ended(&client, "hers", &of("ada")).await;
        // One that no caller of this mount has begun is nobody's.
        let inside = unbound(&objects);
        assert_eq!(ask(&inside, Action::Start, "inner", &[]).await.0, 200);
        ended(&inside, "inner", &[]).await;

        let written = commits(&objects);
        for action in Action::ALL {
            let before = written.get();
            let unknown = ask(&client, action, "never-begun", &of("bob")).await;
            if action == Action::Start {
                // Only this one is answered otherwise where an id is free, or it could not begin.
                assert_eq!(unknown.0, 200);
                ended(&client, "never-begun", &of("bob")).await;
                assert!(written.get() > before, "what is written is counted");
            } else {
                assert_eq!(written.get(), before, "{action:?} of an unknown session");
            }
            for session in ["hers", "inner"] {
                let before = written.get();
                let foreign = ask(&client, action, session, &of("bob")).await;
                assert_eq!(foreign.0, 404, "{session} {action:?}");
                // What the request has begun comes to its end before it is looked at.
                idle(&client, session).await;
                let now = written.get();
                assert_eq!(now, before, "a foreign {action:?} of {session} was written");
                if action == Action::Start {
                    let gone = ask(&client, Action::Status, "no-such", &of("bob")).await;
                    assert_eq!(foreign, gone);
                } else {
                    assert_eq!(foreign, unknown, "{session} {action:?}");
                }
            }
            if action == Action::Start {
                // From here on it is bob's: what is unknown is another one.
                let deleted = SessionId::parse("never-begun").unwrap();
                client
                    .objects
                    .producer(&deleted)
                    .unwrap()
                    .delete()
                    .await
                    .unwrap();
            }
        }

        // Their owner reaches them on every route, and what is bound to nobody is reached without.
        for action in [
            Action::Status,
            Action::Snapshot,
            Action::Usage,
            Action::Tree,
            Action::Messages,
            Action::Sse,
            Action::Ui,
            Action::Abort,
            Action::Resume,
            Action::Interrupt,
        ] {
            let (status, _, body) = ask(&client, action, "hers", &of("ada")).await;
            let is_reached = status == 200 || action == Action::Interrupt && status == 409;
            assert!(is_reached, "{action:?}: {status} {body}");
            if action == Action::Resume {
                ended(&client, "hers", &of("ada")).await;
            }
        }
        for session in ["hers", "inner"] {
            assert_eq!(ask(&inside, Action::Status, session, &[]).await.0, 200);
        }
    });
}

#[test]
fn a_key_of_another_caller_s_start_answers_nothing_of_it() {
    in_world(|| async {
        let objects = objects(|| Agents::new([talker()]).unwrap());
        let client = bound(&objects);
        let with_key = |account| [of(account)[0], of(account)[1], ("idempotency-key", "k-1")];
        let first = ask(&client, Action::Start, "hers", &with_key("ada")).await;
        let again = ask(&client, Action::Start, "hers", &with_key("ada")).await;
        assert_eq!((first.0, &first.2), (200, &again.2));
        for action in [Action::Start, Action::Resume] {
            let foreign = ask(&client, action, "hers", &with_key("bob")).await;
            let unknown = ask(&client, Action::Resume, "never-begun", &of("bob")).await;
            assert_eq!(foreign, unknown);
        }
    });
}

#[test]
fn nobody_can_forge_a_caller_and_a_request_of_nobody_is_refused() {
    in_world(|| async {
        let objects = objects(|| Agents::new([talker()]).unwrap());
        let client = bound(&objects);
        assert_eq!(ask(&client, Action::Start, "hers", &of("ada")).await.0, 200);
        ended(&client, "hers", &of("ada")).await;
        let digest = Caller::of("ada");
        let forged = [
            vec![(INTERNAL_CALLER, digest.as_str())],
            vec![
                ("X-Remote-Agents-Internal-Caller", "ada"),
                ("connection", INTERNAL_CALLER),
            ],
            vec![
                (INTERNAL_CALLER, digest.as_str()),
                ("connection", "x-account"),
            ],
        ];
        for more in forged {
            let headers = [of("bob").to_vec(), more].concat();
            assert_eq!(
                ask(&client, Action::Snapshot, "hers", &headers).await.0,
                404
            );
        }
        // Behind credentials, and before anything is known of a session.
        for action in Action::ALL {
            for session in ["hers", "never-begun"] {
                let headers = [("authorization", KEY), (INTERNAL_CALLER, digest.as_str())];
                let (status, _, body) = ask(&client, action, session, &headers).await;
                assert!(
                    status == 401 && body.contains("UNAUTHORIZED"),
                    "{action:?} {body}"
                );
                let (status, ..) = ask(&client, action, session, &of("")).await;
                assert_eq!(status, 401, "{action:?} of an empty name");
                let (status, ..) = ask(&client, action, session, &[("x-account", "ada")]).await;
                assert_eq!(status, 401, "{action:?}");
            }
        }
        let list = client
            .send("GET", "/agents", &[("authorization", KEY)], Bytes::new())
            .await;
        assert_eq!(list.status(), 401);
        // The mount that binds nothing drops it, and nothing of a caller is in what it answers.
        let inside = unbound(&objects);
        let (status, told, body) = ask(
            &inside,
            Action::Status,
            "hers",
            &[(INTERNAL_CALLER, "nobody")],
        )
        .await;
        assert_eq!(status, 200);
        assert!(!format!("{told:?}{body}").contains(digest.as_str()));
    });
}

#[test]
fn children_are_nobody_s_and_are_seen_through_the_session_that_called_them() {
    in_world(|| async {
        let inner = objects(|| Agents::new([talker()]).unwrap());
        let mount = Rc::new(Mount::new("/internal/agents").allow_unauthenticated());
        let line = Rc::new(MountFetch::new(mount, inner.clone()));
        let outer = LocalObjects::new(
            BASE,
            Lines::default().sink(),
            Rc::new(move |_, runtime: &Rc<LocalRuntime>| {
                let transport = HttpTransport::new(
                    line.clone(),
                    runtime.clone(),
                    "http://inner",
                    "/internal/agents",
                    worker(),
                );
                let child = SubAgent::new(
                    "help",
                    "Helps.",
                    worker(),
                    SubLocation::Remote,
                    Rc::new(transport),
                );
                let model = scripted(|request| match turn(request) {
                    0 => calls(&[("c1", "subagent__help", json!({"message": "Help."}))]),
                    _ => text("done"),
                });
                Agents::new([Agent::new(worker(), "Ask for help.", model).with_sub_agent(child)])
            }),
        );
        let client = bound(&outer);
        assert_eq!(ask(&client, Action::Start, "hers", &of("ada")).await.0, 200);
        ended(&client, "hers", &of("ada")).await;
        let (_, _, tree) = ask(&client, Action::Tree, "hers", &of("ada")).await;
        let tree: Value = serde_json::from_str(&tree).unwrap();
        let child = &tree["children"][0];
        assert_eq!(child["status"], "completed", "{tree}");
        assert_eq!(ask(&client, Action::Tree, "hers", &of("bob")).await.0, 404);
        // Over a mount of the other service that binds, the child is unknown to everyone.
        let id = child["sessionId"].as_str().unwrap();
        assert_eq!(
            ask(&bound(&inner), Action::Status, id, &of("ada")).await.0,
            404
        );
        assert_eq!(ask(&unbound(&inner), Action::Status, id, &[]).await.0, 200);
        // The question by which a proxy finds out whose child it is knows the caller as well.
        let question = |caller: &str| {
            let request = http::Request::builder()
                .uri(format!(
                    "http://object/worker/descendant?sessionId=hers&subSessionId={id}&subAgentType=worker"
                ))
                .header(INTERNAL_CALLER, Caller::of(caller).as_str())
                .body(Bytes::new())
                .unwrap();
            let object = outer.object(&SessionId::parse("hers").unwrap());
            async move { object.fetch(request).await.unwrap().status().as_u16() }
        };
        assert_eq!(question("ada").await, 200);
        assert_eq!(question("bob").await, 404);
    });
}

#[test]
fn a_session_stays_its_caller_s_over_evictions_and_its_id_is_free_again_once_it_is_deleted() {
    in_world(|| async {
        let objects = objects(|| Agents::new([talker()]).unwrap());
        let client = bound(&objects);
        assert_eq!(ask(&client, Action::Start, "hers", &of("ada")).await.0, 200);
        ended(&client, "hers", &of("ada")).await;
        let id = SessionId::parse("hers").unwrap();
        objects.evict(&id).unwrap();
        assert_eq!(
            ask(&client, Action::Status, "hers", &of("bob")).await.0,
            404
        );
        assert_eq!(
            ask(&client, Action::Status, "hers", &of("ada")).await.0,
            200
        );
        objects.producer(&id).unwrap().delete().await.unwrap();
        assert_eq!(ask(&client, Action::Start, "hers", &of("bob")).await.0, 200);
        ended(&client, "hers", &of("bob")).await;
        assert_eq!(
            ask(&client, Action::Status, "hers", &of("ada")).await.0,
            404
        );
    });
}

#[test]
fn a_wait_for_room_does_not_end_in_somebody_else_s_life_of_the_id() {
    in_world(|| async {
        let hang = || {
            let model = scripted(|_| calls(&[("c1", "hang", json!({}))]));
            let hang = typed_tool("hang", "Never ends.", |_: ToolContext, _: Value| async {
                std::future::pending::<()>().await;
                Ok(json!({}))
            });
            Agent::new(worker(), "Hang.", model).with_tool(hang)
        };
        let objects = objects(move || Agents::new([hang().with_max_readers(1)]).unwrap());
        let client = Rc::new(bound(&objects));
        assert_eq!(ask(&client, Action::Start, "s", &of("ada")).await.0, 200);
        let path = "/agents/worker/sse?sessionId=s";
        let reading = client.send("GET", path, &of("ada"), Bytes::new()).await;
        assert_eq!(reading.status(), 200);
        let waiting = {
            let client = client.clone();
            tokio::task::spawn_local(async move {
                let answer = client.send("GET", path, &of("ada"), Bytes::new()).await;
                answer.status().as_u16()
            })
        };
        yield_now().await;
        assert!(!waiting.is_finished(), "it waits for room");
        let id = SessionId::parse("s").unwrap();
        objects.producer(&id).unwrap().delete().await.unwrap();
        assert_eq!(ask(&client, Action::Start, "s", &of("bob")).await.0, 200);
        assert_eq!(waiting.await.unwrap(), 404);
        let theirs = client.send("GET", path, &of("bob"), Bytes::new()).await;
        assert_eq!(theirs.status(), 200);
    });
}
