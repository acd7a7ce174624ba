//! The platform's rate limiter, as a limiter of mounts.
//!
//! The platform counts by itself, for each of its locations, and tells only whether there was room.
//! A binding that fails lets requests pass, and the log says so.

use std::time::Duration;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use js_sys::{Object, Reflect};
use wasm_bindgen::{JsCast as _, JsValue};

use super::ffi::{self, RawRateLimit};
use super::runtime::log;
use crate::mount::{Limiter, Verdict};
use crate::platform::Level;

/// Asks a binding of `ratelimits`.
#[derive(Clone, Debug)]
pub struct RateLimit {
    binding: RawRateLimit,
    period: Duration,
}

impl RateLimit {
    /// The binding of this name; `None` when the Worker has none. The binding does not say when to
    /// come back: `period` is what `wrangler.toml` has as its `simple.period`.
    #[must_use]
    pub fn bound(env: &worker::Env, binding: &str, period: Duration) -> Option<Self> {
        let binding = Reflect::get(env.as_ref(), &binding.into()).ok()?;
        (!binding.is_undefined() && !binding.is_null()).then(|| Self {
            binding: binding.unchecked_into(),
            period,
        })
    }

    async fn count(&self, key: &str) -> Result<bool, JsValue> {
        let options = Object::new();
        Reflect::set(&options, &"key".into(), &key.into())?;
        let outcome = ffi::settled(self.binding.limit(&options)).await?;
        Ok(Reflect::get(&outcome, &"success".into())?.as_bool() != Some(false))
    }
}

impl Limiter for RateLimit {
    fn ask<'a>(&'a self, key: &'a str) -> LocalBoxFuture<'a, Verdict> {
        async move {
            match self.count(key).await {
                Ok(false) => Verdict::Wait(self.period),
                Ok(true) => Verdict::Allow,
                Err(thrown) => {
                    let why = ffi::message(&thrown);
                    log(Level::Warn, &format_args!("a rate limiter failed: {why}"));
                    Verdict::Allow
                }
            }
        }
        .boxed_local()
    }
}
