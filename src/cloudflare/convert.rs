//! HTTP messages between the platform's objects and the library's values.
//!
//! The platform throws on a status that it does not like and on a body where none may be; the
//! `worker` crate panics on both. So every answer is brought into shape here first. Header values
//! are text in JavaScript and UTF-8 here, which loses nothing in either direction.

use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures::future::select;
use futures::{StreamExt as _, TryStreamExt as _};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode, Uri};
use js_sys::{Array, Uint8Array};
use wasm_bindgen::{JsCast as _, JsValue};

use super::ffi;
use super::runtime::{Timer, log};
use super::stream::{NativeBody, SlotBody};
use crate::error::{Error, Result};
use crate::http::{Body, BodyError, Request, Response, refusal};
use crate::platform::Level;

/// How much of a refused body is read and dropped, in bytes.
const DISCARDED_BYTES: usize = 16 * 1024 * 1024;

/// How long the rest of a refused body is waited for.
const DISCARDED_FOR: Duration = Duration::from_secs(2);

/// A request's method, address and headers.
pub(super) fn head(request: &web_sys::Request) -> Result<http::Request<()>> {
    let method = Method::from_bytes(request.method().as_bytes())
        .map_err(|_| Error::invalid("method", "The method cannot be read."))?;
    let uri =
        uri(&request.url()).ok_or_else(|| Error::invalid("url", "The address cannot be read."))?;
    let mut head = http::Request::new(());
    *head.method_mut() = method;
    *head.uri_mut() = uri;
    *head.headers_mut() = headers(&request.headers());
    Ok(head)
}

/// What tells that the sender of a request has gone. Without its compatibility flag it may be
/// missing, or never tell.
pub(super) fn signal(request: &web_sys::Request) -> Option<web_sys::AbortSignal> {
    js_sys::Reflect::get(request, &"signal".into())
        .ok()?
        .dyn_into()
        .ok()
}

/// Parses an address. The platform leaves a few characters as they are that the parser refuses.
fn uri(text: &str) -> Option<Uri> {
    let text = text.split('#').next()?;
    text.parse().ok().or_else(|| {
        let mut escaped = String::with_capacity(text.len());
        for character in text.chars() {
            match character {
                '"' | '<' | '>' | '\\' | '^' | '`' | '{' | '|' | '}' | '[' | ']' | ' ' => {
                    escaped.push_str(&format!("%{:02X}", u32::from(character)));
                }
                other => escaped.push(other),
            }
        }
        escaped.parse().ok()
    })
}

/// The headers as a map; what a map cannot hold is left out.
pub(super) fn headers(headers: &web_sys::Headers) -> HeaderMap {
    let mut map = HeaderMap::new();
    let Ok(Some(entries)) = js_sys::try_iter(headers) else {
        return map;
    };
    for entry in entries.flatten() {
        let Ok(pair) = entry.dyn_into::<Array>() else {
            continue;
        };
        let (Some(name), Some(value)) = (pair.get(0).as_string(), pair.get(1).as_string()) else {
            continue;
        };
        if let (Ok(name), Ok(value)) = (
            HeaderName::from_bytes(name.as_bytes()),
            HeaderValue::from_bytes(value.as_bytes()),
        ) {
            map.append(name, value);
        }
    }
    map
}

/// The map as headers of a new message; what the platform refuses is left out and logged by name.
fn platform_headers(map: &HeaderMap) -> Result<web_sys::Headers, JsValue> {
    let headers = web_sys::Headers::new()?;
    for (name, value) in map {
        let text = String::from_utf8_lossy(value.as_bytes());
        if let Err(thrown) = headers.append(name.as_str(), &text) {
            log(
                Level::Warn,
                &format_args!("header {name} left out: {}", ffi::message(&thrown)),
            );
        }
    }
    Ok(headers)
}

/// A request of ours as the platform sends it. Redirects are answers, not instructions.
pub(super) fn outgoing(
    request: Request,
    signal: Option<&web_sys::AbortSignal>,
) -> Result<web_sys::Request, JsValue> {
    let (head, body) = request.into_parts();
    let init = web_sys::RequestInit::new();
    init.set_method(head.method.as_str());
    init.set_headers_headers(&platform_headers(&head.headers)?);
    init.set_redirect(web_sys::RequestRedirect::Manual);
    init.set_signal(signal);
    if !body.is_empty() && head.method != Method::GET && head.method != Method::HEAD {
        init.set_body(&Uint8Array::from(body.as_ref()));
    }
    web_sys::Request::new_with_str_and_init(&head.uri.to_string(), &init)
}

/// An answer from the platform; its body stays a stream.
pub(super) fn incoming(response: &web_sys::Response) -> Result<Response, String> {
    let body = match response.body() {
        Some(body) => Body::Stream(Box::pin(NativeBody::new(body).map_err(|error| error.0)?)),
        None => Body::empty(),
    };
    let mut answer = http::Response::new(body);
    *answer.status_mut() =
        StatusCode::from_u16(response.status()).map_err(|error| error.to_string())?;
    *answer.headers_mut() = headers(&response.headers());
    Ok(answer)
}

/// An answer of ours for the platform. When `signal` aborts, a streaming body is let go at once.
pub(super) fn answer(
    response: Response,
    signal: Option<&web_sys::AbortSignal>,
) -> worker::Response {
    let (head, body) = response.into_parts();
    let status = head.status.as_u16();
    if !(200..=599).contains(&status) {
        let error = Error::internal(format!(
            "an answer had the status {status}, which cannot be sent"
        ));
        return answer(refusal(&error), None);
    }
    let body = match body {
        _ if is_null_body(status) => worker::ResponseBody::Empty,
        Body::Full(bytes) => worker::ResponseBody::Body(bytes.into()),
        Body::Stream(source) => match native_stream(SlotBody::new(source, signal)) {
            Ok(stream) => worker::ResponseBody::Stream(stream),
            Err(thrown) => {
                let error = Error::internal(format!("body: {thrown}"));
                return answer(refusal(&error), None);
            }
        },
    };
    let headers = worker::Headers::new();
    for (name, value) in &head.headers {
        let text = String::from_utf8_lossy(value.as_bytes());
        if headers.append(name.as_str(), &text).is_err() {
            log(
                Level::Warn,
                &format_args!("header {name} left out of an answer"),
            );
        }
    }
    worker::ResponseBuilder::new()
        .with_status(status)
        .with_headers(headers)
        .body(body)
}

/// The platform's answer with other headers and the same native body, which never enters Rust.
pub(super) fn with_headers(response: &web_sys::Response, headers: &HeaderMap) -> worker::Response {
    let status = response.status();
    let body = match response.body() {
        Some(body) if !is_null_body(status) => worker::ResponseBody::Stream(body),
        _ => worker::ResponseBody::Empty,
    };
    let mut shell = http::Response::new(Body::empty());
    *shell.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
    *shell.headers_mut() = headers.clone();
    let (builder, _) = answer(shell, None).into_parts();
    builder.body(body)
}

/// The statuses with which the platform refuses a body.
fn is_null_body(status: u16) -> bool {
    matches!(status, 101 | 204 | 205 | 304)
}

fn native_stream(body: SlotBody) -> Result<web_sys::ReadableStream, String> {
    let parts = body
        .map_ok(|part| -> Vec<u8> { part.into() })
        .map_err(|error| worker::Error::RustError(error.0));
    match worker::Response::from_stream(parts).map(worker::Response::into_parts) {
        Ok((_, worker::ResponseBody::Stream(stream))) => Ok(stream),
        Ok(_) => Err("the platform made no stream".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// A request's body. Reading stops above `limit` bytes: a longer body comes back cut, but too long.
pub(super) async fn body(request: &web_sys::Request, limit: usize) -> Result<Bytes> {
    let Some(stream) = request.body() else {
        return Ok(Bytes::new());
    };
    let unreadable = |error: BodyError| {
        Error::invalid("body", "The body could not be read to its end.").with_detail(error.0)
    };
    let mut stream = NativeBody::new(stream).map_err(unreadable)?;
    let mut all = Vec::new();
    while let Some(part) = stream.next().await {
        all.extend_from_slice(&part.map_err(unreadable)?);
        if all.len() > limit {
            discard(stream).await;
            break;
        }
    }
    Ok(all.into())
}

/// Reads what is left of a refused request's body, and drops it, so that the refusal reaches its
/// sender: the platform closes the connection under a sender whose body nobody reads, and the
/// answer is lost with it. At most [`DISCARDED_BYTES`], for at most [`DISCARDED_FOR`]; after that
/// the connection is the platform's to close.
pub(super) async fn discard_body(request: &web_sys::Request) {
    // A body that was read already has nothing left.
    if request.body_used() {
        return;
    }
    if let Some(stream) = request.body().and_then(|body| NativeBody::new(body).ok()) {
        discard(stream).await;
    }
}

async fn discard(mut stream: NativeBody) {
    let read = async {
        let mut bytes = 0usize;
        while let Some(Ok(part)) = stream.next().await {
            bytes = bytes.saturating_add(part.len());
            if bytes > DISCARDED_BYTES {
                break;
            }
        }
    };
    select(pin!(read), Timer::new(DISCARDED_FOR)).await;
}
