//! The Worker: its object class, its bindings, and two mounts of the same objects.
//!
//! What the mounts are is in [`crate::mounts`]. Which of the two answers is decided by the props of
//! the binding that a request came over: no request from outside can carry props.

#![allow(missing_docs)] // `durable_object` writes methods without documentation.

use std::rc::Rc;
use std::time::Duration;

use remote_agents::cloudflare::{self, ObjectHost, RateLimit, object_stub_transport, variable};
use remote_agents::http::refusal;
use remote_agents::platform::Runtime;
use remote_agents::protocol::ids::AgentType;
use remote_agents::{Agents, Error, Result, host_agents};
use serde::Deserialize;
use worker::{Context, Env, ObjectNamespace, Request, Response, durable_object, event};

use crate::{agents, mounts, researcher};

/// The binding of the objects.
const OBJECTS: &str = "AGENTS";

/// The binding of Workers AI, which a deployment needs only for the models there.
const AI: &str = "AI";

/// The binding of the platform's rate limiter; a deployment may be without.
const RATE_LIMIT: &str = "RATE_LIMIT";

/// The limiter's period, as `wrangler.toml` has it.
const RATE_PERIOD: Duration = Duration::from_secs(60);

/// One session of the planner or of a researcher.
#[durable_object(alarm)]
pub struct ProducerAgents(ObjectHost);

host_agents!(ProducerAgents, hosted);

/// The agents of an object, with the model that the deployment names.
fn hosted(env: &Env, runtime: Rc<dyn Runtime>) -> Result<Agents> {
    let provider = variable(env, "MODEL_PROVIDER").unwrap_or_else(|| "offline".to_owned());
    let model = cloudflare::model(env, &provider, AI, Rc::clone(&runtime))?;
    let researchers = object_stub_transport(
        objects(env)?,
        AgentType::parse(researcher::AGENT_TYPE)?,
        runtime,
    );
    agents::agents(model, Rc::new(researchers))
}

fn objects(env: &Env) -> Result<ObjectNamespace> {
    env.durable_object(OBJECTS)
        .map_err(|error| Error::internal(format!("the binding {OBJECTS}: {error}")))
}

/// What a service binding says of its owner.
#[derive(Deserialize)]
struct Props {
    mount: Option<String>,
}

#[event(fetch)]
async fn fetch(request: Request, env: Env, context: Context) -> worker::Result<Response> {
    let props = context.props::<Props>().ok();
    let props = props.as_ref().and_then(|props| props.mount.as_deref());
    let mount = if mounts::is_internal(&request.path(), props) {
        mounts::internal()
    } else {
        let limiter = RateLimit::bound(&env, RATE_LIMIT, RATE_PERIOD);
        mounts::public(variable(&env, "API_KEY")).map(|mount| match limiter {
            Some(limiter) => mounts::limited(mount, Rc::new(limiter)),
            None => mount,
        })
    };
    Ok(match mount.and_then(|mount| Ok((mount, objects(&env)?))) {
        Ok((mount, objects)) => cloudflare::serve(&mount, &objects, &request).await,
        Err(error) => cloudflare::answer(refusal(&error)),
    })
}
