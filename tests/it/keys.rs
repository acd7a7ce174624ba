//! What an idempotency key remembers, and what it does not.

use std::rc::Rc;

use remote_agents::mount::Mount;
use remote_agents::native::LocalObjects;
use remote_agents::{Agent, AgentType, Agents};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Client, Lines, in_world, read, scripted, text};

#[derive(Default, Serialize, Deserialize, schemars::JsonSchema)]
struct Counted {
    count: u32,
}

fn client() -> Client {
    let agent = || {
        let model = scripted(|_| text("one two three"));
        Agent::new(AgentType::parse("talker").unwrap(), "Talk.", model).with_state::<Counted>()
    };
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(move |_, _| Agents::new([agent()])),
        ),
    }
}

async fn keyed(client: &Client, route: &str, body: Value) -> (u16, Value) {
    let path = format!("/agents/talker/{route}");
    let headers = [("idempotency-key", "k1")];
    read(client.send("POST", &path, &headers, body.to_string()).await).await
}

#[test]
fn a_refused_request_stores_no_key() {
    in_world(|| async {
        let client = client();
        let malformed = json!({"sessionId": "s1", "message": "go", "state": {"count": "many"}});
        let (code, body) = keyed(&client, "start", malformed.clone()).await;
        assert_eq!((code, &body["field"]), (400, &json!("state")));
        // The same key with another body is no conflict: nothing stands under it.
        let start = json!({"sessionId": "s1", "message": "go", "state": {"count": 1}});
        let (code, started) = keyed(&client, "start", start.clone()).await;
        assert_eq!(code, 200, "{started}");
        let (code, body) = keyed(&client, "start", malformed).await;
        assert_eq!((code, &body["code"]), (409, &json!("IDEMPOTENCY_CONFLICT")));
        assert_eq!(keyed(&client, "start", start).await, (200, started));

        // A session that is at work refuses, and what it refused is taken when it has ended.
        let body = |session: &str| json!({"sessionId": session, "message": "more"});
        let plain = |route: &'static str, body: Value| {
            let client = &client;
            async move {
                client
                    .post(&format!("/agents/talker/{route}"), body)
                    .await
                    .0
            }
        };
        assert_eq!(plain("start", body("s2")).await, 200);
        let (code, refused) = keyed(&client, "resume", body("s2")).await;
        assert_eq!((code, &refused["code"]), (409, &json!("ALREADY_RUNNING")));
        client.settled("talker", "s2").await;
        let (code, resumed) = keyed(&client, "resume", body("s2")).await;
        assert_eq!(code, 200, "{resumed}");
        client.settled("talker", "s2").await;
        assert_eq!(keyed(&client, "resume", body("s2")).await, (200, resumed));
    });
}
