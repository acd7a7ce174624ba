//! Inputs taken apart, and the world that a target's subject sees.

use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::{LocalBoxFuture, pending, ready};
use futures::stream;
use remote_agents::http::{Body, Request, Response};
use remote_agents::platform::{Level, Runtime};
use remote_agents::transport::{Fetch, FetchError};

/// The values of an input; the last one has all that is left.
pub(crate) fn values<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut parts = data.splitn(N, |byte| *byte == 0xFF);
    [(); N].map(|()| parts.next().unwrap_or_default())
}

/// A choice of `of` by the first byte of a value, and the rest of it.
pub(crate) fn choice(data: &[u8], of: usize) -> (usize, &[u8]) {
    match data.split_first() {
        Some((first, rest)) => (usize::from(*first) % of, rest),
        None => (0, data),
    }
}

/// A value as text.
pub(crate) fn text(data: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(data)
}

/// Ways to cut bytes: at every place once, or at many where they are long; and at every place.
pub(crate) fn cuts(data: &[u8]) -> Vec<Vec<Bytes>> {
    let stride = (data.len() / 64).max(1);
    let stride = if data.len() <= 256 { 1 } else { stride };
    let once = (1..data.len())
        .step_by(stride)
        .map(|at| vec![owned(&data[..at]), owned(&data[at..])]);
    let always = data.iter().map(|byte| owned(&[*byte])).collect();
    once.chain([always]).collect()
}

/// The bytes in one part.
pub(crate) fn owned(data: &[u8]) -> Bytes {
    Bytes::copy_from_slice(data)
}

/// A body that comes in these parts.
pub(crate) fn body(parts: Vec<Bytes>) -> Body {
    Body::Stream(Box::pin(stream::iter(parts.into_iter().map(Ok))))
}

/// The value of a future that has nothing to wait for.
pub(crate) fn now<T>(work: impl Future<Output = T>) -> T {
    work.now_or_never().expect("it waits for something")
}

/// Answers every request alike.
pub(crate) struct Answering {
    pub(crate) status: u16,
    pub(crate) content_type: &'static str,
    pub(crate) parts: Vec<Bytes>,
}

impl Fetch for Answering {
    fn fetch(&self, _: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let answer = http::Response::builder()
            .status(self.status)
            .header("content-type", self.content_type)
            .body(body(self.parts.clone()))
            .map_err(|error| FetchError(error.to_string()));
        Box::pin(ready(answer))
    }
}

/// A runtime in which time stands still.
pub(crate) struct Still;

impl Still {
    pub(crate) fn shared() -> Rc<dyn Runtime> {
        Rc::new(Self)
    }
}

impl Runtime for Still {
    fn now(&self) -> u64 {
        1_800_000_000_000
    }

    fn entropy(&self) -> [u8; 16] {
        [7; 16]
    }

    fn sleep(&self, _: Duration) -> LocalBoxFuture<'static, ()> {
        Box::pin(pending())
    }

    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        now(task);
    }

    fn log(&self, _: Level, _: &dyn fmt::Display) {}
}
