//! Agents that do what a test's message says: a Worker that is built for the tests alone.
//!
//! There is one agent type, `stress`, behind the raw mount `/agents`. Its model follows the script
//! in the latest message ([`script`]): it says texts, takes steps, calls children or the tool that
//! panics. Children are agents of this same type behind the binding `CHILD`, and planners behind
//! the binding `PRODUCER`; each is there when its binding is.

#![cfg(target_arch = "wasm32")]

mod object;
mod script;

use remote_agents::Mount;
use remote_agents::cloudflare::serve;
use worker::{Context, Env, Request, Response, event};

/// Where the agents answer.
const MOUNT: &str = "/agents";

/// The binding of the objects.
const OBJECTS: &str = "OBJECTS";

#[event(fetch)]
async fn fetch(request: Request, env: Env, _context: Context) -> worker::Result<Response> {
    let mount = Mount::new(MOUNT).allow_unauthenticated();
    let objects = env.durable_object(OBJECTS)?;
    Ok(serve(&mount, &objects, &request).await)
}
