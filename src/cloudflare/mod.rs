//! The Cloudflare shell: Durable Objects, service bindings and Workers' HTTP.
//!
//! It decides nothing about sessions; it carries requests, rows, time and bytes between the
//! platform and the library. Two rules hold in every file: nothing panics, because one panic takes
//! down all objects of an isolate, and no platform method that can throw is called without `catch`.

mod ai;
mod console;
mod convert;
mod database;
mod fetch;
mod ffi;
mod limit;
mod mount;
mod object;
mod panics;
mod runtime;
mod stream;

pub use ai::{WorkersAi, model};
pub use database::DurableDatabase;
pub use fetch::{
    BindingFetch, DurableObjects, GlobalFetch, http_transport, object_stub_transport,
    service_binding_transport,
};
pub use limit::RateLimit;
pub use mount::serve;
pub use object::ObjectHost;
pub use runtime::{DurableRuntime, WorkerRuntime};

use wasm_bindgen::{JsCast as _, JsValue};

use crate::http::{Request, Response};

/// A variable or secret of a Worker; `None` when it is not set.
#[must_use]
pub fn variable(env: &worker::Env, name: &str) -> Option<String> {
    env.var(name).ok().map(|value| value.to_string())
}

/// Makes a panic in an object that has no [`ObjectHost`] answer 500 instead of leaving its
/// requests open for ever. To be called by the object's constructor.
pub fn guard_panics(state: &worker::State) {
    // Such an object has no execution that could be begun too soon.
    let _ = panics::guard(&JsValue::from(state.as_raw()).unchecked_into());
}

/// A request's head as the library reads it, for routes of a Worker's own.
///
/// # Errors
/// `VALIDATION_ERROR` when the method or the address cannot be read.
pub fn head(request: &worker::Request) -> crate::Result<Request> {
    convert::head(request.inner()).map(|head| head.map(|()| bytes::Bytes::new()))
}

/// An answer of the library as a Worker sends it.
#[must_use]
pub fn answer(response: Response) -> worker::Response {
    convert::answer(response, None)
}

/// Answers a request of a Worker's own routes that takes no body. One that was sent all the same is
/// read and dropped first, up to 16 MiB and 2 s: the platform closes the connection under a sender
/// whose body nobody reads, and the answer would be lost with it.
pub async fn answer_to(request: &worker::Request, response: Response) -> worker::Response {
    convert::discard_body(request.inner()).await;
    answer(response)
}
