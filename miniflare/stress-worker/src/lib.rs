//! Agents that do what a test's message says: a Worker that is built for the tests alone.
//!
//! There is one agent type, `stress`, behind the raw mount `/agents`. Its model follows the script
//! in the latest message (`script`): it says texts, takes steps, calls children or the tool that
//! panics. Children are agents of this same type behind the binding `CHILD`, and planners behind
//! the binding `PRODUCER`; each is there when its binding is. `/memory` is beside the mount.

#![cfg(target_arch = "wasm32")]

mod object;
mod script;

use remote_agents::Mount;
use remote_agents::cloudflare::serve;
use worker::{Context, Env, Request, Response, event};

/// Where the agents answer.
const MOUNT: &str = "/agents";

/// Tells how much memory the Worker's module has taken, in bytes: it never gives any back, so that
/// this is the most that it needed at once.
const MEMORY: &str = "/memory";

/// A page of WebAssembly's memory, in bytes.
const PAGE: usize = 65_536;

/// The binding of the objects.
const OBJECTS: &str = "OBJECTS";

#[event(fetch)]
async fn fetch(request: Request, env: Env, _context: Context) -> worker::Result<Response> {
    if request.path() == MEMORY {
        let pages = core::arch::wasm32::memory_size::<0>();
        return Response::ok(pages.saturating_mul(PAGE).to_string());
    }
    let mount = Mount::new(MOUNT).allow_unauthenticated();
    let objects = env.durable_object(OBJECTS)?;
    Ok(serve(&mount, &objects, &request).await)
}
