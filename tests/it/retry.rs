//! A model call that fails: how often and when it is made again, and what readers see of it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::model::{
    LanguageModel, ModelError, ModelErrorKind, ModelEvent, ModelPolicy, ModelRequest, ModelStream,
};
use remote_agents::mount::Mount;
use remote_agents::native::LocalObjects;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::usage::Tokens;
use remote_agents::{Agent, Agents};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::stories::paired;
use crate::support::{Client, Lines, chunks, in_world, text};

type Answer = Vec<Result<ModelEvent, ModelError>>;

/// A model that gives these answers one after the other, the last one again and again, and
/// remembers when it was asked.
#[derive(Clone)]
struct Failing {
    answers: Rc<dyn Fn(usize) -> Answer>,
    began: Instant,
    asked: Rc<RefCell<Vec<u64>>>,
}

impl LanguageModel for Failing {
    fn name(&self) -> &str {
        "failing"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        paired::read(&request).unwrap();
        let number = self.asked.borrow().len();
        let at = u64::try_from(self.began.elapsed().as_millis()).unwrap();
        self.asked.borrow_mut().push(at);
        Box::pin(futures::stream::iter((self.answers)(number)))
    }
}

struct World {
    client: Client,
    asked: Rc<RefCell<Vec<u64>>>,
}

impl World {
    fn new(answers: impl Fn(usize) -> Answer + 'static) -> Self {
        let model = Failing {
            answers: Rc::new(answers),
            began: Instant::now(),
            asked: Rc::default(),
        };
        let asked = model.asked.clone();
        let agents = move || {
            let agent_type = AgentType::parse("talker").unwrap();
            Agents::new([Agent::new(agent_type, "Talk.", Rc::new(model.clone()))])
        };
        let client = Client {
            mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
            objects: LocalObjects::new(
                1_700_000_000_000,
                Lines::default().sink(),
                Rc::new(move |_, _| agents()),
            ),
        };
        Self { client, asked }
    }

    async fn start(&self) {
        let body = json!({"sessionId": "s1", "message": "go"});
        assert_eq!(self.client.post("/agents/talker/start", body).await.0, 200);
    }

    async fn run(&self) -> Value {
        self.start().await;
        self.client.settled("talker", "s1").await
    }

    /// The waits before each attempt, in milliseconds.
    fn waits(&self) -> Vec<u64> {
        let asked = self.asked.borrow();
        asked.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    async fn chunks(&self) -> Vec<Value> {
        let path = "/agents/talker/sse?sessionId=s1&fromSequence=-1";
        chunks(&self.client.sse(path).await.0)
    }
}

fn failure(kind: ModelErrorKind, retry_after: Option<u32>) -> Result<ModelEvent, ModelError> {
    Err(ModelError {
        retry_after,
        ..ModelError::new(kind, "The provider said no.")
    })
}

/// The waits, up to the milliseconds that the work itself takes.
fn in_seconds(waits: &[u64]) -> Vec<u64> {
    waits.iter().map(|wait| wait / 1000).collect()
}

#[test]
fn a_failure_that_may_pass_is_three_more_attempts_after_one_two_and_four_seconds() {
    use ModelErrorKind::{Malformed, RateLimited, Unavailable};
    for (kind, code) in [
        (Unavailable, "provider_error"),
        (Malformed, "provider_error"),
        (RateLimited, "provider_rate_limited"),
    ] {
        in_world(move || async move {
            let world = World::new(move |_| vec![failure(kind, None)]);
            let status = world.run().await;
            assert_eq!(
                (&status["status"], &status["errorCode"]),
                (&json!("failed"), &json!(code))
            );
            assert_eq!(status["error"], "The provider said no.");
            assert_eq!(in_seconds(&world.waits()), [1, 2, 4]);
        });
    }
}

#[test]
fn a_failure_that_does_not_pass_is_the_end_of_the_run() {
    for kind in [ModelErrorKind::Rejected, ModelErrorKind::ContextOverflow] {
        in_world(move || async move {
            let world = World::new(move |_| vec![failure(kind, Some(1))]);
            assert_eq!(world.run().await["errorCode"], "provider_error");
            assert_eq!(world.asked.borrow().len(), 1);
        });
    }
}

#[test]
fn what_the_provider_asks_for_is_waited_for_up_to_the_longest_wait() {
    in_world(|| async {
        let asks = [Some(0), Some(90), Some(1)];
        let world = World::new(move |n| match asks.get(n) {
            Some(wait) => vec![failure(ModelErrorKind::RateLimited, *wait)],
            None => text("done"),
        });
        assert_eq!(world.run().await["status"], "completed");
        assert_eq!(in_seconds(&world.waits()), [1, 90, 4]);
    });
    in_world(|| async {
        let longest = u32::try_from(ModelPolicy::default().longest_wait.as_secs()).unwrap();
        let world =
            World::new(move |_| vec![failure(ModelErrorKind::RateLimited, Some(longest + 1))]);
        assert_eq!(world.run().await["errorCode"], "provider_rate_limited");
        assert_eq!(world.asked.borrow().len(), 1);
    });
}

#[test]
fn an_attempt_that_had_streamed_is_discarded_visibly_and_what_it_cost_counts() {
    in_world(|| async {
        let spent = || {
            Ok(ModelEvent::Usage(Tokens {
                prompt: 100,
                total: 100,
                ..Tokens::default()
            }))
        };
        let world = World::new(move |n| match n {
            0 => vec![
                spent(),
                Ok(ModelEvent::TextDelta("half".into())),
                failure(ModelErrorKind::Unavailable, None),
            ],
            1 => vec![failure(ModelErrorKind::Unavailable, None)],
            // Without a reason for its end.
            2 => vec![spent(), Ok(ModelEvent::TextDelta("third".into()))],
            _ => text("whole"),
        });
        assert_eq!(world.run().await["output"], "whole");
        let told = world.chunks().await;
        let told: Vec<&Value> = told
            .iter()
            .filter(|chunk| chunk["type"] != "run_started" && chunk["type"] != "output")
            .collect();
        let kinds: Vec<&str> = told
            .iter()
            .map(|chunk| chunk["type"].as_str().unwrap())
            .collect();
        let discarded = ["text_delta", "step_discarded", "custom"];
        let last = ["text_delta", "step_committed"];
        let expected = [&discarded[..], &["custom"], &discarded[..], &last[..]].concat();
        assert_eq!(kinds, expected);
        assert_eq!(told[1]["reason"], "model_failed");
        let retries: Vec<&Value> = told
            .iter()
            .filter(|chunk| chunk["type"] == "custom")
            .map(|chunk| &chunk["data"]["retry"])
            .collect();
        assert_eq!(retries, [1, 2, 3]);
        assert!(
            told.iter()
                .filter(|chunk| chunk["type"] == "custom")
                .all(|chunk| chunk["eventName"] == "model_retry")
        );
        let (_, usage) = world.client.get("/agents/talker/usage?sessionId=s1").await;
        assert_eq!(usage["rollup"]["tokens"]["total"], 100 + 100 + 15);
    });
}

#[test]
fn a_stop_ends_the_wait_at_once_and_the_next_run_counts_anew() {
    in_world(|| async {
        let world = World::new(|_| vec![failure(ModelErrorKind::RateLimited, Some(60))]);
        world.start().await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let stopped = Instant::now();
        let body = json!({"sessionId": "s1"});
        let (status, _) = world
            .client
            .post("/agents/talker/interrupt", body.clone())
            .await;
        assert_eq!(status, 200);
        assert_eq!(
            world.client.settled("talker", "s1").await["status"],
            "interrupted"
        );
        assert!(
            stopped.elapsed() < Duration::from_secs(1),
            "{:?}",
            stopped.elapsed()
        );
        assert_eq!(world.asked.borrow().len(), 1);
        assert_eq!(
            world.client.post("/agents/talker/resume", body).await.0,
            200
        );
        let status = world.client.settled("talker", "s1").await;
        assert_eq!(status["errorCode"], "provider_rate_limited");
        assert_eq!(world.asked.borrow().len(), 1 + 4);
    });
}

#[test]
fn attempts_and_waits_survive_the_end_of_the_object() {
    in_world(|| async {
        let world = World::new(|n| match n {
            0 => vec![
                Ok(ModelEvent::TextDelta("half".into())),
                failure(ModelErrorKind::RateLimited, Some(30)),
            ],
            _ => vec![failure(ModelErrorKind::Unavailable, None)],
        });
        world.start().await;
        // In the first wait three times, in a later one once.
        let session = SessionId::parse("s1").unwrap();
        let evictions = Cell::new(0);
        for seconds in [5, 5, 5, 17] {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            world.client.objects.evict(&session).unwrap();
            evictions.set(evictions.get() + 1);
        }
        // Read by the alarm alone: it looks after the session every two seconds.
        tokio::time::sleep(Duration::from_secs(60)).await;
        let status = world.client.settled("talker", "s1").await;
        assert_eq!(status["errorCode"], "provider_error");
        assert_eq!(world.asked.borrow().len(), 4, "{:?}", world.asked);
        assert_eq!(in_seconds(&world.waits()), [30, 2, 4]);
    });
}
