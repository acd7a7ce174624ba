//! The library's object under the benchmark: what it does by itself, and an append path to drive.
//!
//! `/agents` is an ordinary raw mount. `/bench/{session}/{action}` goes to the object directly:
//! `append`, `fill`, `live`, `finish`. With a binding `UP` the Worker is a hop: it passes every
//! request on and hands the answer back untouched, as a consumer relays a producer's raw stream.
#![cfg(target_arch = "wasm32")]

mod model;
mod object;

use remote_agents::Mount;
use remote_agents::cloudflare::serve;
use worker::{Context, Env, Request, Response, event};

#[event(fetch)]
async fn fetch(request: Request, env: Env, _context: Context) -> worker::Result<Response> {
    if let Ok(up) = env.service("UP") {
        return up.fetch_request(request).await;
    }
    let objects = env.durable_object("OBJECTS")?;
    let path = request.path();
    match path
        .strip_prefix("/bench/")
        .and_then(|rest| rest.split_once('/'))
    {
        Some((session, _)) => {
            objects
                .get_by_name(session)?
                .fetch_with_request(request)
                .await
        }
        None => Ok(serve(&Mount::new("/agents"), &objects, &request).await),
    }
}
