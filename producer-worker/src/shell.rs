//! The Worker: its object class, its bindings, and two mounts of the same objects.
//!
//! `/internal/agents` shows everything and is open to a service binding alone: the binding's props
//! say so, and no request from outside can carry props. Anyone else gets the 404 of an unknown
//! path there, because the public mount answers. `/agents` is that public mount: the planner alone,
//! with the key, and of its state only the projection.

#![allow(missing_docs)] // `durable_object` writes methods without documentation.

use std::rc::Rc;

use remote_agents::agent::model_by_name;
use remote_agents::cloudflare::{self, ObjectHost, object_stub_transport, variable};
use remote_agents::http::refusal;
use remote_agents::mount::{Auth, Mount, Projection};
use remote_agents::platform::Runtime;
use remote_agents::protocol::ids::AgentType;
use remote_agents::{Agents, Error, Result};
use serde::Deserialize;
use worker::{
    Context, DurableObject, Env, ObjectNamespace, Request, Response, State, durable_object, event,
};

use crate::projection::{project_state, project_usage};
use crate::{agents, planner, researcher};

/// The binding of the objects.
const OBJECTS: &str = "AGENTS";

/// The raw mount.
const INTERNAL: &str = "/internal/agents";

/// The projected mount.
const PUBLIC: &str = "/agents";

/// One session of the planner or of a researcher.
#[durable_object(alarm)]
pub struct ProducerAgents(ObjectHost);

impl DurableObject for ProducerAgents {
    fn new(state: State, env: Env) -> Self {
        Self(ObjectHost::new(state, &env, hosted))
    }

    async fn fetch(&self, request: Request) -> worker::Result<Response> {
        Ok(self.0.fetch(request).await)
    }

    async fn alarm(&self) -> worker::Result<Response> {
        Ok(self.0.alarm().await)
    }
}

/// The agents of an object, with the model that the deployment names.
fn hosted(env: &Env, runtime: Rc<dyn Runtime>) -> Result<Agents> {
    let provider = variable(env, "MODEL_PROVIDER").unwrap_or_else(|| "offline".to_owned());
    let researchers = object_stub_transport(
        objects(env)?,
        AgentType::parse(researcher::AGENT_TYPE)?,
        runtime,
    );
    agents::agents(model_by_name(&provider)?, researchers)
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
    let mount = if is_internal(&request.path(), &context) {
        internal_mount()
    } else {
        public_mount(&env)
    };
    Ok(match mount.and_then(|mount| Ok((mount, objects(&env)?))) {
        Ok((mount, objects)) => cloudflare::serve(&mount, &objects, &request).await,
        Err(error) => cloudflare::answer(refusal(&error)),
    })
}

/// Whether the request is for the raw mount and came over a binding that may use it.
fn is_internal(path: &str, context: &Context) -> bool {
    let inside = path
        .strip_prefix(INTERNAL)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    inside
        && context
            .props::<Props>()
            .is_ok_and(|props| props.mount.as_deref() == Some("internal"))
}

fn internal_mount() -> Result<Mount> {
    let types = [
        AgentType::parse(planner::AGENT_TYPE)?,
        AgentType::parse(researcher::AGENT_TYPE)?,
    ];
    Ok(Mount::new(INTERNAL)
        .with_agents(types)
        .allow_unauthenticated())
}

fn public_mount(env: &Env) -> Result<Mount> {
    Ok(Mount::new(PUBLIC)
        .with_agents([AgentType::parse(planner::AGENT_TYPE)?])
        .with_auth(Auth::Bearer(variable(env, "API_KEY")))
        .with_projection(Projection {
            name: "planner-progress/1".to_owned(),
            map: Rc::new(project_state),
        })
        .with_usage_projection(Rc::new(project_usage)))
}
