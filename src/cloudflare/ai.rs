//! The binding of Workers AI, as something to fetch from.
//!
//! A request for chat completions becomes a call of the binding, and what the binding answers is an
//! answer of HTTP again, refusals included. Dropping a call cancels it.

use std::rc::Rc;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use js_sys::{JSON, Object, Reflect};
use wasm_bindgen::{JsCast as _, JsValue};

use super::convert;
use super::fetch::{GlobalFetch, Pending};
use super::ffi::{self, RawAi};
use super::variable;
use crate::agent::model::LanguageModel;
use crate::error::Result;
use crate::http::{Request, Response};
use crate::platform::Runtime;
use crate::provider::KnownModels;
use crate::transport::{Fetch, FetchError};

/// Calls the models behind a binding of Workers AI.
#[derive(Clone, Debug)]
pub struct WorkersAi {
    binding: RawAi,
}

impl WorkersAi {
    /// The binding of this name; `None` when the Worker has none.
    #[must_use]
    pub fn bound(env: &worker::Env, binding: &str) -> Option<Self> {
        let binding = Reflect::get(env.as_ref(), &binding.into()).ok()?;
        (!binding.is_undefined() && !binding.is_null()).then(|| Self {
            binding: binding.unchecked_into(),
        })
    }
}

impl Fetch for WorkersAi {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        run(self.binding.clone(), request).boxed_local()
    }
}

/// The model of this provider, with the Worker's variables and secrets as
/// [`KnownModels::model`] reads them. `ai` is the name of the binding of Workers AI, which only a
/// Worker that uses it needs.
///
/// # Errors
/// `INTERNAL`, naming the variable or the binding that is missing or malformed.
pub fn model(
    env: &worker::Env,
    provider: &str,
    ai: &str,
    runtime: Rc<dyn Runtime>,
) -> Result<Rc<dyn LanguageModel>> {
    let models = KnownModels {
        variable: &|name| variable(env, name),
        fetch: Rc::new(GlobalFetch),
        workers_ai: WorkersAi::bound(env, ai).map(|binding| Rc::new(binding) as Rc<dyn Fetch>),
        runtime,
    };
    Ok(models.model(provider)?)
}

async fn run(binding: RawAi, request: Request) -> Result<Response, FetchError> {
    let failed = |thrown: JsValue| FetchError(ffi::message(&thrown));
    let body = String::from_utf8_lossy(request.body());
    let inputs = JSON::parse(&body).map_err(failed)?;
    let name = Reflect::get(&inputs, &"model".into()).map_err(failed)?;
    let name = name.as_string().unwrap_or_default();
    Reflect::delete_property(inputs.unchecked_ref::<Object>(), &"model".into()).map_err(failed)?;
    let (mut pending, signal) = Pending::new().map_err(failed)?;
    let options = Object::new();
    // The answer as it is, with its status: the binding's own errors quote the provider.
    for (option, value) in [
        ("returnRawResponse", JsValue::TRUE),
        ("signal", signal.into()),
    ] {
        Reflect::set(&options, &option.into(), &value).map_err(failed)?;
    }
    let answer = ffi::settled(binding.run(&name, &inputs, &options)).await;
    pending.done();
    let answer = answer.map_err(failed)?;
    let answer = answer
        .dyn_into()
        .map_err(|_| FetchError("the binding's answer is no response".to_owned()))?;
    convert::incoming(&answer).map_err(FetchError)
}
