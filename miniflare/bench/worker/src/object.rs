//! The object class: the library's host, and the actions of the benchmark in front of it.

#![allow(missing_docs)] // `durable_object` writes methods without documentation.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use remote_agents::agent::Limits;
use remote_agents::agent::model::{ModelEvent, StopReason};
use remote_agents::cloudflare::ObjectHost;
use remote_agents::producer::Producer;
use remote_agents::{Agent, AgentType, Agents, Error, Result, ToolContext, ToolError, typed_tool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use worker::{Delay, DurableObject, Env, Request, Response, State, durable_object};

use crate::model::{BenchModel, Feed};

/// The one agent type.
const AGENT: &str = "bench";

/// Commits of a fill between two waits for durability.
const FILL_COMMITS: u64 = 200;

/// What stands around a text in its chunk's JSON, without the session's id, in bytes.
const ENVELOPE: usize = 102;

/// One session.
#[durable_object(alarm)]
pub struct BenchAgents {
    host: ObjectHost,
    feed: Rc<Feed>,
    begun: Cell<bool>,
}

impl DurableObject for BenchAgents {
    fn new(state: State, env: Env) -> Self {
        let feed = Rc::new(Feed::default());
        let model = Rc::new(BenchModel(Rc::clone(&feed)));
        Self {
            host: ObjectHost::new(state, &env, move |_, _| agents(Rc::clone(&model))),
            feed,
            begun: Cell::new(false),
        }
    }

    async fn fetch(&self, request: Request) -> worker::Result<Response> {
        let path = request.path();
        let action = path
            .strip_prefix("/bench/")
            .and_then(|rest| rest.split_once('/'));
        let Some((session, action)) = action else {
            return Ok(self.host.fetch(request).await);
        };
        match self.act(session, action, request).await {
            Ok(told) => Response::from_json(&told),
            Err(error) => Response::error(format!("{error:?}"), 500),
        }
    }

    async fn alarm(&self) -> worker::Result<Response> {
        self.host.alarm().await
    }
}

impl BenchAgents {
    async fn act(
        &self,
        session: &str,
        action: &str,
        request: Request,
    ) -> Result<serde_json::Value> {
        let asked = Asked::of(session, &request);
        let producer = self.host.producer()?;
        if !self.begun.replace(true) {
            begin(&producer, session).await?;
        }
        match action {
            "append" => append(&producer, &asked, 1).await,
            "fill" => append(&producer, &asked, FILL_COMMITS).await,
            "live" => self.live(&asked).await,
            "finish" => {
                self.feed.say(ModelEvent::Stop(StopReason::EndTurn)).await;
                Ok(json!({}))
            }
            _ => Err(Error::not_found()),
        }
    }
}

impl BenchAgents {
    /// Has the model say a text every few milliseconds, each stamped with its time; tells how late
    /// the worst one was.
    async fn live(&self, asked: &Asked) -> Result<serde_json::Value> {
        let started = worker::Date::now().as_millis();
        let mut late = Vec::new();
        for tick in 0..asked.commits {
            let due = started.saturating_add(tick.saturating_mul(asked.every));
            let early = due.saturating_sub(worker::Date::now().as_millis());
            if early > 0 {
                Delay::from(Duration::from_millis(early)).await;
            }
            let now = worker::Date::now().as_millis();
            late.push(now.saturating_sub(due));
            let text = format!("{now}{}", asked.text);
            self.feed.say(ModelEvent::TextDelta(text)).await;
        }
        Ok(json!({"late": late}))
    }
}

/// Makes the session, whose model says what the feed is told; one that is there stays as it is.
async fn begin(producer: &Rc<Producer>, session: &str) -> Result<()> {
    let body = json!({"sessionId": session, "message": "feed"}).to_string();
    let request = http::Request::post(format!("http://object/{AGENT}/start"))
        .body(Bytes::from(body))
        .map_err(|error| Error::internal(error.to_string()))?;
    match producer.handle(request).await.status().as_u16() {
        200 | 409 => Ok(()),
        other => Err(Error::internal(format!("start: {other}"))),
    }
}

/// Appends `commits` times `per` chunks; waits until they may be read after every `each` commits.
async fn append(producer: &Rc<Producer>, asked: &Asked, each: u64) -> Result<serde_json::Value> {
    let started = worker::Date::now().as_millis();
    let deltas = vec![asked.text.clone(); asked.per];
    producer.append_all(asked.commits, deltas, each).await?;
    let ms = worker::Date::now().as_millis().saturating_sub(started);
    Ok(json!({"ms": ms, "last": producer.last_sequence()?}))
}

/// The numbers of a request's query.
struct Asked {
    commits: u64,
    per: usize,
    /// Milliseconds from one to the next.
    every: u64,
    text: String,
}

impl Asked {
    fn of(session: &str, request: &Request) -> Self {
        let query: HashMap<String, usize> = request.query().unwrap_or_default();
        let number = |name: &str| query.get(name).copied().unwrap_or(1);
        let around = ENVELOPE.saturating_add(session.len());
        Self {
            commits: u64::try_from(number("commits")).unwrap_or(1),
            per: number("per"),
            every: u64::try_from(number("every")).unwrap_or(1),
            text: "x".repeat(number("bytes").saturating_sub(around).max(1)),
        }
    }
}

/// The state that a step changes.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
struct Notes {
    count: u64,
    last: String,
}

#[derive(Deserialize, JsonSchema)]
struct Note {
    text: String,
}

fn agents(model: Rc<BenchModel>) -> Result<Agents> {
    let note = typed_tool(
        "note",
        "Writes a note down.",
        |context: ToolContext, note: Note| async move {
            context
                .update(|notes: &mut Notes| {
                    notes.count += 1;
                    notes.last = note.text;
                })
                .map_err(ToolError::from)?;
            Ok("noted")
        },
    );
    let limits = Limits {
        max_steps: 1_000_000,
        ..Limits::default()
    };
    let agent = Agent::new(AgentType::parse(AGENT)?, "Do as the script says.", model)
        .with_state::<Notes>()
        .with_tool(note)
        .with_limits(limits);
    Agents::new([agent])
}
