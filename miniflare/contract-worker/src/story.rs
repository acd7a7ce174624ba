//! The stories of transports, told between Durable Objects.
//!
//! `GET /stories` lists them; `GET /stories/binding/<number>` tells one whose children live behind
//! the service binding `FAR`, `GET /stories/stub/<number>` one whose children are objects of this
//! Worker, `GET /stories/http/<number>` one whose children are behind the open network, at
//! [`ADDRESS`]. Each way has a class of its own, because what an object's agents call is decided
//! when it is built.

#![allow(missing_docs)] // `durable_object` writes methods without documentation.

use std::rc::Rc;

use remote_agents::cloudflare::{
    self, ObjectHost, WorkerRuntime, http_transport, object_stub_transport,
    service_binding_transport,
};
use remote_agents::http::refusal;
use remote_agents::platform::Runtime;
use remote_agents::store::SubLocation;
use remote_agents::{AgentType, Agents, Error, Mount, Result};
use worker::{
    Context, DurableObject, Env, ObjectNamespace, Request, Response, State, durable_object,
};

use crate::stories::agents::{PARENT, Way, agents};
use crate::stories::{STORIES, World};

/// The binding of objects whose children are behind [`FAR`].
const BINDING: &str = "BINDING";

/// The binding of objects whose children are objects of the same class.
const STUB: &str = "STUB";

/// The binding of objects whose children are at [`ADDRESS`].
const HTTP: &str = "HTTP";

/// Where children are over the open network; whoever runs this leads requests for it somewhere.
const ADDRESS: &str = "http://far.test";

/// The service of the children: another Worker of this code, or what stands before it.
const FAR: &str = "FAR";

/// A session whose children are behind a service binding.
#[durable_object(alarm)]
pub struct BindingAgents(ObjectHost);

/// A session whose children are behind the open network.
#[durable_object(alarm)]
pub struct HttpAgents(ObjectHost);

/// A session whose children are objects beside it.
#[durable_object(alarm)]
pub struct StubAgents(ObjectHost);

impl DurableObject for BindingAgents {
    fn new(state: State, env: Env) -> Self {
        Self(ObjectHost::new(state, &env, |env, runtime| {
            hosted(&over_binding(env)?, SubLocation::Remote, &runtime)
        }))
    }

    async fn fetch(&self, request: Request) -> worker::Result<Response> {
        Ok(self.0.fetch(request).await)
    }

    async fn alarm(&self) -> worker::Result<Response> {
        self.0.alarm().await
    }
}

impl DurableObject for HttpAgents {
    fn new(state: State, env: Env) -> Self {
        Self(ObjectHost::new(state, &env, |_, runtime| {
            hosted(&over_http(), SubLocation::Remote, &runtime)
        }))
    }

    async fn fetch(&self, request: Request) -> worker::Result<Response> {
        Ok(self.0.fetch(request).await)
    }

    async fn alarm(&self) -> worker::Result<Response> {
        self.0.alarm().await
    }
}

impl DurableObject for StubAgents {
    fn new(state: State, env: Env) -> Self {
        Self(ObjectHost::new(state, &env, |env, runtime| {
            hosted(&over_stub(env, STUB)?, SubLocation::Local, &runtime)
        }))
    }

    async fn fetch(&self, request: Request) -> worker::Result<Response> {
        Ok(self.0.fetch(request).await)
    }

    async fn alarm(&self) -> worker::Result<Response> {
        self.0.alarm().await
    }
}

fn hosted(way: &Way, location: SubLocation, runtime: &Rc<dyn Runtime>) -> Result<Agents> {
    agents(way, location, runtime)
}

fn over_binding(env: &Env) -> Result<Way> {
    let far = env.service(FAR).map_err(|error| missing(FAR, &error))?;
    Ok(Rc::new(move |agent_type, runtime| {
        service_binding_transport(far.clone(), "/agents", agent_type, runtime)
    }))
}

fn over_http() -> Way {
    Rc::new(|agent_type, runtime| http_transport(ADDRESS, "/agents", agent_type, runtime))
}

fn over_stub(env: &Env, binding: &str) -> Result<Way> {
    let objects = objects(env, binding)?;
    Ok(Rc::new(move |agent_type, runtime| {
        object_stub_transport(objects.clone(), agent_type, runtime)
    }))
}

fn objects(env: &Env, binding: &str) -> Result<ObjectNamespace> {
    env.durable_object(binding)
        .map_err(|error| missing(binding, &error))
}

fn missing(binding: &str, error: &worker::Error) -> Error {
    Error::internal(format!("the binding {binding}: {error}"))
}

/// Lists the stories, or tells one.
pub(crate) async fn serve(path: &str, env: &Env, context: &Context) -> worker::Result<Response> {
    let mut segments = path.split('/').skip(2);
    let way = segments.next();
    let number = segments
        .next()
        .and_then(|number| number.parse::<usize>().ok());
    let story = match (way, number) {
        (None, _) => {
            let names: Vec<&str> = STORIES.iter().map(|story| story.name).collect();
            return Response::from_json(&names);
        }
        (Some(way), Some(number)) => STORIES.get(number).map(|story| (way, story)),
        _ => None,
    };
    let Some((way, story)) = story else {
        return Response::error("no such story", 404);
    };
    match world(way, env, context) {
        Ok(world) => match (story.tell)(world).await {
            Ok(()) => Response::ok("held"),
            Err(what) => Response::error(what, 500),
        },
        Err(error) => Response::error(format!("{error:?}"), 500),
    }
}

fn world(way: &str, env: &Env, context: &Context) -> Result<World> {
    let runtime: Rc<dyn Runtime> = Rc::new(WorkerRuntime::new(context));
    let (of_parents, way) = match way {
        "binding" => (BINDING, over_binding(env)?),
        "http" => (HTTP, over_http()),
        "stub" => (STUB, over_stub(env, STUB)?),
        _ => return Err(Error::not_found()),
    };
    let parent = AgentType::parse(PARENT)?;
    let parents = over_stub(env, of_parents)?(parent, runtime.clone());
    Ok(World {
        parents: Rc::new(parents.with_policy(crate::stories::agents::policy())),
        way,
        runtime,
    })
}

/// The raw mount of objects whose children are behind the binding.
pub(crate) async fn mounted(request: &Request, env: &Env) -> worker::Result<Response> {
    let mount = Mount::new("/agents").allow_unauthenticated();
    Ok(match objects(env, BINDING) {
        Ok(objects) => cloudflare::serve(&mount, &objects, request).await,
        Err(error) => cloudflare::answer(refusal(&error)),
    })
}
