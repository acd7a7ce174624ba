//! The suites that any implementation is put through, inside of workerd: a Worker that is built for
//! tests alone. `/store` is the store's contract, `/stories` the stories of transports, `/agents` a raw mount of the
//! stories' agents, `/life` sessions that end, and `/providers` the suite of model providers.

#![cfg(target_arch = "wasm32")]

mod life;
mod provider;
#[allow(clippy::indexing_slicing, missing_docs, unreachable_pub, dead_code)]
#[path = "../../../tests/providers/mod.rs"]
mod providers;
mod store;
// What is indexed there is JSON, and what is missing in it is null.
#[allow(
    clippy::indexing_slicing,
    missing_docs,
    unreachable_pub,
    dead_code,
    unused_imports
)]
#[path = "../../../tests/stories/mod.rs"]
mod stories;
mod story;

use worker::{Context, Env, Request, Response, event};

#[event(fetch)]
async fn fetch(request: Request, env: Env, context: Context) -> worker::Result<Response> {
    let path = request.path();
    match path.split('/').nth(1) {
        Some("store") => store::serve(request, &env).await,
        Some("life") => life::serve(request, &env).await,
        Some("providers") => provider::serve(&path, &env, &context).await,
        Some("stories") => story::serve(&path, &env, &context).await,
        _ => story::mounted(&request, &env).await,
    }
}
