//! Sessions whose lives are short: agents that wait, that expire, and that take three readers.
//!
//! `/life/agents/…` is a mount of them, and `/life/bound/…` one of the same objects that binds sessions
//! to their callers, with two readers for each. `DELETE /life/session` and `GET /life/alarm`, each with
//! `?sessionId=`, reach the object itself, as a host's own requests do.

#![allow(missing_docs)] // `durable_object` writes methods without documentation.

use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::model_by_name;
use remote_agents::cloudflare::{self, ObjectHost};
use remote_agents::http::refusal;
use remote_agents::mount::SessionLimits;
use remote_agents::platform::Runtime;
use remote_agents::{Agent, AgentType, Agents, Mount, Result, ToolContext, ToolError, typed_tool};
use serde_json::Value;
use worker::{DurableObject, Env, Method, Request, Response, State, Storage, durable_object};

/// One session.
#[durable_object(alarm)]
pub struct LifeObject {
    host: ObjectHost,
    storage: Storage,
}

impl DurableObject for LifeObject {
    fn new(state: State, env: Env) -> Self {
        let storage = state.storage();
        Self {
            host: ObjectHost::new(state, &env, |_, runtime| agents(&runtime)),
            storage,
        }
    }

    async fn fetch(&self, request: Request) -> worker::Result<Response> {
        match (request.method(), request.path().as_str()) {
            (Method::Delete, "/life/session") => match self.host.delete().await {
                Ok(()) => Response::empty(),
                Err(error) => Ok(cloudflare::answer(refusal(&error))),
            },
            (Method::Get, "/life/alarm") => Response::from_json(&self.storage.get_alarm().await?),
            _ => Ok(self.host.fetch(request).await),
        }
    }

    async fn alarm(&self) -> worker::Result<Response> {
        self.host.alarm().await
    }
}

fn agents(runtime: &Rc<dyn Runtime>) -> Result<Agents> {
    let talker = |name: &str| -> Result<Agent> {
        let agent_type = AgentType::parse(name)?;
        Ok(Agent::new(
            agent_type,
            "1. Repeat it.",
            model_by_name("offline")?,
        ))
    };
    let runtime = runtime.clone();
    let wait = typed_tool(
        "wait",
        "Waits for longer than a test lasts.",
        move |_: ToolContext, _: Value| {
            let waited = runtime.sleep(Duration::from_secs(600));
            async move {
                waited.await;
                Ok::<_, ToolError>("waited")
            }
        },
    );
    let mut waiter = Agent::new(
        AgentType::parse("waiter")?,
        "1. Call `wait`.\n2. Repeat it.",
        model_by_name("offline")?,
    );
    waiter = waiter.with_tool(wait).with_max_readers(3);
    Agents::new([
        talker("keeper")?,
        talker("brief")?.with_expiry(Duration::from_secs(3)),
        waiter,
    ])
}

/// Answers what is below `/life`.
pub(crate) async fn serve(request: Request, env: &Env) -> worker::Result<Response> {
    let objects = env.durable_object("LIFE")?;
    if request.path().starts_with("/life/agents/") {
        let mount = Mount::new("/life/agents").allow_unauthenticated();
        return Ok(cloudflare::serve(&mount, &objects, &request).await);
    }
    if request.path().starts_with("/life/bound/") {
        let limits = SessionLimits {
            max_readers: 2,
            ..SessionLimits::default()
        };
        let mount = Mount::new("/life/bound")
            .allow_unauthenticated()
            .with_messages()
            .with_ui()
            .with_session_limits(limits)
            .with_callers(|head| {
                let account = head.headers.get("x-account")?;
                account.to_str().ok().map(str::to_owned)
            });
        return Ok(cloudflare::serve(&mount, &objects, &request).await);
    }
    let session = request
        .url()?
        .query_pairs()
        .find_map(|(name, value)| (name == "sessionId").then(|| value.into_owned()))
        .unwrap_or_default();
    objects
        .get_by_name(&session)?
        .fetch_with_request(request)
        .await
}
