//! Tools with effects outside: what tells them, and the outside, a repeat.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::{keyed, typed_tool};
use remote_agents::mount::Mount;
use remote_agents::native::LocalObjects;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::{Agent, Agents, Tool, ToolContext, ToolError};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::conversation::{hosting, looker};
use crate::support::{Client, Lines, calls, chunks, in_world, scripted, text, turn};

#[derive(Deserialize, JsonSchema)]
struct Payment {
    order: u32,
}

/// The outside: it does a thing once for each key that it sees.
#[derive(Default)]
struct Bank {
    keys: RefCell<Vec<(String, u32, bool)>>,
    paid: RefCell<BTreeSet<String>>,
    /// Executions that hang behind their effect before one comes to its end.
    hang: Cell<u32>,
}

fn pay(bank: &Rc<Bank>) -> Rc<dyn Tool> {
    let bank = bank.clone();
    typed_tool(
        "pay",
        "Pays.",
        move |context: ToolContext, payment: Payment| {
            let bank = bank.clone();
            async move {
                let key = context.idempotency_key.clone();
                bank.keys
                    .borrow_mut()
                    .push((key.clone(), context.attempt, context.is_repeat()));
                bank.paid.borrow_mut().insert(key);
                if bank.hang.get() > 0 {
                    bank.hang.set(bank.hang.get() - 1);
                    std::future::pending::<()>().await;
                }
                Ok(json!({"paid": payment.order}))
            }
        },
    )
}

fn client(bank: &Rc<Bank>, with_key: bool, orders: &'static [u32]) -> Client {
    let bank = bank.clone();
    let make = move || {
        let model = scripted(move |request| match turn(request) {
            0 => {
                let ids: Vec<String> = (0..orders.len()).map(|n| format!("c{n}")).collect();
                let all: Vec<_> = ids
                    .iter()
                    .zip(orders)
                    .map(|(id, order)| (id.as_str(), "pay", json!({"order": order})))
                    .collect();
                calls(&all)
            }
            _ => text("paid"),
        });
        let tool = pay(&bank);
        let tool = if with_key {
            keyed(tool, |payment: &Payment| format!("order-{}", payment.order))
        } else {
            tool
        };
        Agent::new(AgentType::parse("payer").unwrap(), "Pay.", model).with_tool(tool)
    };
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(move |_, _| Agents::new([make()])),
        ),
    }
}

async fn run(client: &Client, session: &str, kills: u32) -> Vec<Value> {
    let body = json!({"sessionId": session, "message": "go"});
    assert_eq!(client.post("/agents/payer/start", body).await.0, 200);
    for _ in 0..kills {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let id = SessionId::parse(session).unwrap();
        client.objects.evict(&id).unwrap();
    }
    let path = format!("/agents/payer/sse?sessionId={session}&fromSequence=0");
    let (frames, _) = client.sse(&path).await;
    chunks(&frames)
}

#[test]
fn an_execution_after_a_kill_has_the_key_of_the_one_before_and_knows_that_it_is_a_repeat() {
    in_world(|| async {
        let bank = Rc::new(Bank::default());
        bank.hang.set(2);
        let client = client(&bank, false, &[7]);
        let said = run(&client, "s1", 2).await;
        let of = |kind: &str| said.iter().filter(|chunk| chunk["type"] == kind).count();
        assert_eq!((of("tool_start"), of("tool_end")), (1, 1));
        assert_eq!(bank.paid.borrow().len(), 1, "{:?}", bank.paid);
        let keys = bank.keys.borrow();
        let told: Vec<_> = keys
            .iter()
            .map(|(_, attempt, again)| (*attempt, *again))
            .collect();
        assert_eq!(told, [(1, false), (2, true), (3, true)]);
        let key = &keys[0].0;
        assert!(key.len() <= 128 && key.bytes().all(|byte| byte.is_ascii_graphic()));
    });
}

#[test]
fn no_two_calls_share_a_key_unless_their_tool_declares_one() {
    in_world(|| async {
        for (with_key, wanted) in [(false, 6), (true, 2)] {
            let bank = Rc::new(Bank::default());
            let client = client(&bank, with_key, &[7, 7, 8]);
            run(&client, "s1", 0).await;
            // The same call of another session, or of another life of the id, is another call.
            let id = SessionId::parse("s1").unwrap();
            client
                .objects
                .producer(&id)
                .unwrap()
                .delete()
                .await
                .unwrap();
            run(&client, "s1", 0).await;
            assert_eq!(bank.keys.borrow().len(), 6);
            assert_eq!(bank.paid.borrow().len(), wanted, "{:?}", bank.paid);
            let first = |(_, attempt, again): &(String, u32, bool)| *attempt == 1 && !again;
            assert!(bank.keys.borrow().iter().all(first));
        }
    });
}

/// Notes that it is dropped.
struct Guard(Rc<Cell<bool>>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.set(true);
    }
}

#[test]
fn a_tool_says_something_on_the_stream_and_what_it_began_hears_the_stop() {
    in_world(|| async {
        let (heard, dropped) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        let flags = (heard.clone(), dropped.clone());
        let client = hosting(move || {
            let (heard, dropped) = flags.clone();
            let wait = typed_tool(
                "wait",
                "Waits.",
                move |context: ToolContext, at: Payment| {
                    let (heard, guard) = (heard.clone(), Guard(dropped.clone()));
                    async move {
                        let _guard = guard;
                        context.emit("begun", json!({"order": at.order}))?;
                        let stop = context.stop.clone();
                        tokio::task::spawn_local(async move {
                            stop.wait().await;
                            heard.set(true);
                        });
                        std::future::pending::<()>().await;
                        Ok::<_, ToolError>("over")
                    }
                },
            );
            let model = scripted(|_| calls(&[("c", "wait", json!({"order": 7}))]));
            looker(model, &Rc::default()).with_tool(wait)
        });
        let body = json!({"sessionId": "s1", "message": "go"});
        assert_eq!(client.post("/agents/looker/start", body).await.0, 200);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!heard.get() && !dropped.get());
        let stop = json!({"sessionId": "s1"});
        assert_eq!(client.post("/agents/looker/interrupt", stop).await.0, 200);
        let status = client.settled("looker", "s1").await;
        assert_eq!(status["status"], "interrupted");
        assert!(heard.get() && dropped.get());
        let path = "/agents/looker/sse?sessionId=s1&fromSequence=0";
        let said = chunks(&client.sse(path).await.0);
        let custom: Vec<_> = said
            .iter()
            .filter(|chunk| chunk["type"] == "custom")
            .map(|chunk| (&chunk["eventName"], &chunk["data"], &chunk["agentId"]))
            .collect();
        assert_eq!(
            custom,
            [(&json!("begun"), &json!({"order": 7}), &json!("s1"))]
        );
    });
}
