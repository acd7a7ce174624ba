//! A mount in a Worker's `fetch`: its checks, the object by name, its answer.
//!
//! The library's [`Mount`] decides; this carries. Where a mount does not rewrite an answer, the
//! object's native body goes on to the caller untouched: not one byte of a raw stream passes
//! through WebAssembly. The caller's abort is not sent along, since a disconnect cancels no run.

use bytes::Bytes;
use wasm_bindgen::{JsCast as _, JsValue};

use super::console;
use super::convert;
use super::fetch::{overloaded, stub};
use super::ffi;
use super::runtime::log;
use crate::error::{Error, Result};
use crate::http::{Response, refusal};
use crate::mount::{Forward, Mount};
use crate::platform::Level;

/// Serves one request on a mount, with the objects of `namespace` behind it.
///
/// Never fails: whatever goes wrong is answered with an envelope.
pub async fn serve(
    mount: &Mount,
    namespace: &worker::ObjectNamespace,
    request: &worker::Request,
) -> worker::Response {
    console::install();
    let request = request.inner();
    let forward = match admitted(mount, request).await {
        Ok(forward) => forward,
        Err(response) => {
            convert::discard_body(request).await;
            return convert::answer(*response, None);
        }
    };
    let Forward {
        asked,
        request: forwarded,
    } = forward;
    let sent = convert::outgoing(forwarded, None)
        .and_then(|forwarded| stub(namespace, &asked.session_id)?.fetch(&forwarded));
    let answer = ffi::settled(sent)
        .await
        .and_then(|answer| answer.dyn_into::<web_sys::Response>());
    let answer = match answer {
        Ok(answer) => answer,
        Err(thrown) => return convert::answer(unanswered(mount, &thrown), None),
    };
    if mount.rewrites(asked.action) && answer.status() < 400 {
        let response = match convert::incoming(&answer) {
            Ok(response) => mount.finish(&asked, response).await,
            Err(detail) => refused(mount, &Error::internal(detail)),
        };
        return convert::answer(response, convert::signal(request).as_ref());
    }
    let mut headers = convert::headers(&answer.headers());
    mount.stamp(&mut headers);
    convert::with_headers(&answer, &headers)
}

/// The object's request, or the answer that takes its place.
async fn admitted(mount: &Mount, request: &web_sys::Request) -> Result<Forward, Box<Response>> {
    let refused = |error: Error| Box::new(refused(mount, &error));
    let head = convert::head(request).map_err(refused)?;
    let admission = mount
        .admit_within_limits(head.method(), head.uri(), head.headers())
        .await
        .map_err(Box::new)?;
    let body = if admission.takes_body() {
        convert::body(request, admission.body_limit())
            .await
            .map_err(refused)?
    } else {
        Bytes::new()
    };
    admission.forward(body).map_err(Box::new)
}

/// The answer for an object that threw.
fn unanswered(mount: &Mount, thrown: &JsValue) -> Response {
    log(
        Level::Warn,
        &format_args!("an object did not answer: {}", ffi::message(thrown)),
    );
    if ffi::flag(thrown, "overloaded") {
        refused(mount, &overloaded())
    } else {
        mount.unreachable()
    }
}

fn refused(mount: &Mount, error: &Error) -> Response {
    let mut response = refusal(error);
    mount.stamp(response.headers_mut());
    response
}
