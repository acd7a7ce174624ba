//! The Worker: its object class, its bindings, its mount, and the way to its children's state.
//!
//! `/agents` is the writer with the key. `/` is the page, where the deployment has its files.
//! `/api/child-snapshot` and `/api/child-usage` read what
//! lives in the other service ([`crate::proxy`]), `/api/documents` what a job was started with
//! ([`crate::sources`]). Nothing else is here, and nothing of a caller's
//! request goes to the other service.

#![allow(missing_docs)] // `durable_object` writes methods without documentation.

use std::rc::Rc;

use remote_agents::cloudflare::{
    self, DurableObjects, ObjectHost, WorkerRuntime, service_binding_transport, variable,
};
use remote_agents::http::refusal;
use remote_agents::platform::Runtime;
use remote_agents::protocol::ids::AgentType;
use remote_agents::{Agents, Error, Result};
use worker::{
    Context, DurableObject, Env, Fetcher, ObjectNamespace, Request, Response, State,
    durable_object, event,
};

use crate::proxy::{ChildProxy, Reading};
use crate::sources::{self, Sources};
use crate::{agents, mounts, page, writer};

/// The binding of the objects.
const OBJECTS: &str = "AGENTS";

/// The binding of Workers AI, which a deployment needs only for the models there.
const AI: &str = "AI";

/// The binding of the page's files; a deployment may be without.
const ASSETS: &str = "ASSETS";

/// The binding to the other service.
const PRODUCER: &str = "PRODUCER";

/// One session of the writer.
#[durable_object(alarm)]
pub struct ConsumerAgents(ObjectHost);

impl DurableObject for ConsumerAgents {
    fn new(state: State, env: Env) -> Self {
        Self(ObjectHost::new(state, &env, hosted))
    }

    async fn fetch(&self, request: Request) -> worker::Result<Response> {
        if request.path() == sources::OF_OBJECT {
            let response = match self.0.database() {
                Ok(database) => sources::of_object(&*database),
                Err(error) => refusal(&error),
            };
            return Ok(cloudflare::answer(response));
        }
        Ok(self.0.fetch(request).await)
    }

    async fn alarm(&self) -> worker::Result<Response> {
        self.0.alarm().await
    }
}

/// The agents of an object, with the model that the deployment names.
fn hosted(env: &Env, runtime: Rc<dyn Runtime>) -> Result<Agents> {
    let provider = variable(env, "MODEL_PROVIDER").unwrap_or_else(|| "offline".to_owned());
    let model = cloudflare::model(env, &provider, AI, Rc::clone(&runtime))?;
    let planner = AgentType::parse(writer::RESEARCH_AGENT_TYPE)?;
    let planner = service_binding_transport(producer(env)?, mounts::PRODUCER, planner, runtime);
    agents::agents(model, Rc::new(planner))
}

fn objects(env: &Env) -> Result<ObjectNamespace> {
    env.durable_object(OBJECTS)
        .map_err(|error| Error::internal(format!("the binding {OBJECTS}: {error}")))
}

fn producer(env: &Env) -> Result<Fetcher> {
    env.service(PRODUCER)
        .map_err(|error| Error::internal(format!("the binding {PRODUCER}: {error}")))
}

#[event(fetch)]
async fn fetch(request: Request, env: Env, context: Context) -> worker::Result<Response> {
    Ok(serve(&request, &env, &context)
        .await
        .unwrap_or_else(|error| cloudflare::answer(refusal(&error))))
}

async fn serve(request: &Request, env: &Env, context: &Context) -> Result<Response> {
    let agent_type = AgentType::parse(writer::AGENT_TYPE)?;
    let mount = mounts::public(variable(env, "API_KEY"))?;
    let objects = objects(env)?;
    if request.path() == sources::PATH {
        let sources = Sources {
            mount: &mount,
            base_path: mounts::PUBLIC,
            agent_type: &agent_type,
            objects: &DurableObjects::new(objects),
        };
        let response = sources.answer(&cloudflare::head(request)?).await;
        return Ok(cloudflare::answer_to(request, response).await);
    }
    let Some(reading) = Reading::of_path(&request.path()) else {
        if let Some(file) = file_of_the_page(request, env).await {
            return Ok(file);
        }
        return Ok(cloudflare::serve(&mount, &objects, request).await);
    };
    let runtime: Rc<dyn Runtime> = Rc::new(WorkerRuntime::new(context));
    let binding = producer(env)?;
    let proxy = ChildProxy {
        mount: &mount,
        base_path: mounts::PUBLIC,
        agent_type: &agent_type,
        objects: &DurableObjects::new(objects),
        children: &|child_type| {
            Rc::new(service_binding_transport(
                binding.clone(),
                mounts::PRODUCER,
                child_type,
                Rc::clone(&runtime),
            ))
        },
    };
    let response = proxy.answer(reading, &cloudflare::head(request)?).await;
    Ok(cloudflare::answer_to(request, response).await)
}

/// A file of the page; `None` when this is no request for one, or it is not there.
async fn file_of_the_page(request: &Request, env: &Env) -> Option<Response> {
    let head = cloudflare::head(request).ok()?;
    if !page::is_file(head.method(), head.uri().path()) {
        return None;
    }
    let assets = env.assets(ASSETS).ok()?;
    let file = assets
        .fetch_request(request.clone().ok()?)
        .await
        .ok()
        .filter(|file| matches!(file.status_code(), 200 | 304))?;
    let headers = file.headers().clone();
    for (name, value) in page::HEADERS {
        headers.set(name, value).ok()?;
    }
    Some(file.with_headers(headers))
}
