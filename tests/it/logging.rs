//! The log: one structured line for each run, step, wake and refusal, as an event that any
//! subscriber can have, with ids and without content.

use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use remote_agents::agent::typed_tool;
use remote_agents::mount::{Auth, Mount};
use remote_agents::native::LocalObjects;
use remote_agents::platform::LOG_TARGET;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::{Agent, Agents, ToolContext, ToolError};
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::support::{Client, Lines, calls, in_world, scripted, text, turn, yield_now};

/// A subscriber as a program may have one.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<Value>>>);

impl Subscriber for Seen {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        assert_eq!(event.metadata().target(), LOG_TARGET);
        let mut fields = Fields(Map::new());
        event.record(&mut fields);
        fields
            .0
            .insert("level".into(), event.metadata().level().as_str().into());
        self.0.lock().unwrap().push(Value::Object(fields.0));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0
            .insert(field.name().into(), format!("{value:?}").into());
    }
}

/// Stands in everything that an agent is told, says, keeps and fails with.
const SECRET: &str = "CANARY-41c7";

/// Two steps, then the end; `hang` waits until the object ends.
fn agent() -> Agent {
    let model = scripted(|request| match turn(request) {
        0 => calls(&[
            ("c1", "note", json!({"text": SECRET})),
            ("c2", "fail", json!({"text": SECRET})),
        ]),
        1 => calls(&[("c3", "hang", json!({"text": SECRET}))]),
        _ => text(SECRET),
    });
    Agent::new(AgentType::parse("worker").unwrap(), SECRET, model)
        .with_state::<Value>()
        .with_tool(typed_tool(
            "note",
            "Notes.",
            |context: ToolContext, _: Value| async move {
                context.update(|state: &mut Value| state["secret"] = SECRET.into())?;
                Ok(json!({"told": SECRET}))
            },
        ))
        .with_tool(typed_tool(
            "fail",
            "Fails.",
            |_: ToolContext, _: Value| async move { Err::<Value, _>(ToolError::new(SECRET)) },
        ))
        .with_tool(typed_tool(
            "hang",
            "Hangs once.",
            |context: ToolContext, _: Value| async move {
                if !context.is_repeat() {
                    std::future::pending::<()>().await;
                }
                Ok(json!({}))
            },
        ))
}

fn client(lines: &Lines) -> Client {
    Client {
        mount: Rc::new(
            Mount::new("/agents").with_auth(Auth::Bearer(Some(format!("key-{SECRET}")))),
        ),
        objects: LocalObjects::new(
            1_700_000_000_000,
            lines.sink(),
            Rc::new(|_, _| Agents::new([agent()])),
        ),
    }
}

#[test]
fn each_run_step_wake_and_refusal_is_one_line_with_ids_and_without_content() {
    let seen = Seen::default();
    // With one subscriber alone, an event that another test's thread meets first counts as unwanted
    // everywhere, since that thread has none; with two, each of them is asked.
    let _other = tracing::Dispatch::new(Seen::default());
    let _guard = tracing::subscriber::set_default(seen.clone());
    let lines = Lines::default();
    let sink = lines.clone();
    in_world(|| async move {
        let client = client(&sink);
        let bearer = format!("Bearer key-{SECRET}");
        let send = async |route: &str, body: Value| {
            let headers = [("authorization", bearer.as_str())];
            let path = format!("/agents/worker/{route}");
            let answer = client.send("POST", &path, &headers, body.to_string()).await;
            crate::support::read(answer).await
        };
        let body = json!({"sessionId": "s1", "message": SECRET});
        let (status, started) = send("start", body.clone()).await;
        assert_eq!(status, 200, "{started}");
        tokio::time::sleep(Duration::from_millis(500)).await;
        let id = SessionId::parse("s1").unwrap();
        client.objects.evict(&id).unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(send("start", body.clone()).await.0, 409);
        let (status, resumed) = send("resume", body).await;
        assert_eq!(status, 200);
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(send("interrupt", json!({"sessionId": "s1"})).await.0, 200);
        yield_now().await;

        let seen = seen.0.lock().unwrap();
        let of = |event: &str| -> Vec<&Value> {
            seen.iter().filter(|line| line["event"] == event).collect()
        };
        let run = |line: &Value| line["runId"].clone();
        let [start] = of("start")[..] else {
            panic!("{seen:?}")
        };
        assert_eq!(start["level"], "INFO");
        assert_eq!(run(start), started["runId"]);
        let [resume] = of("resume")[..] else {
            panic!("{seen:?}")
        };
        assert_eq!(run(resume), resumed["runId"]);
        let [wake] = of("wake")[..] else {
            panic!("{seen:?}")
        };
        assert_eq!(run(wake), started["runId"]);
        assert_eq!(
            wake["epoch"].as_u64().unwrap(),
            start["epoch"].as_u64().unwrap() + 1
        );
        let settled: Vec<_> = of("settled")
            .into_iter()
            .map(|line| (run(line), line["status"].clone()))
            .collect();
        assert_eq!(
            settled,
            [
                (started["runId"].clone(), json!("completed")),
                (resumed["runId"].clone(), json!("interrupted"))
            ]
        );
        // The last step of a run is the line of its end.
        let steps: Vec<_> = of("step").iter().map(|line| line["step"].clone()).collect();
        assert_eq!(steps, [json!(1), json!(2), json!(4)]);
        let [refused] = of("refused")[..] else {
            panic!("{seen:?}")
        };
        assert_eq!(refused["code"], "ALREADY_COMPLETED");
        for line in &*seen {
            assert_eq!(line["sessionId"], "s1", "{line}");
            assert_eq!(line["agentType"], "worker", "{line}");
            assert_eq!(line["more"], Value::Null, "a field has no name: {line}");
            assert!(!line.to_string().contains(SECRET), "{line}");
        }
        // The sink of the objects has the same lines.
        let told: Vec<Value> = sink
            .0
            .borrow()
            .iter()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let events = |lines: &[Value]| -> Vec<Value> {
            lines.iter().map(|line| line["event"].clone()).collect()
        };
        assert_eq!(events(&told), events(&seen));
        assert!(told.iter().all(|line| !line.to_string().contains(SECRET)));
    });
}
