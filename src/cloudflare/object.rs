//! What a Durable Object class delegates to.
//!
//! Every error becomes an envelope: an exception that left `fetch` would reach the caller as a
//! broken stub, one that left `alarm` would be retried a few times and then forgotten with the
//! session still running. Construction never fails either; why it could not work is kept and told.

use std::rc::Rc;

use wasm_bindgen::{JsCast as _, JsValue};

use super::console;
use super::convert;
use super::database::DurableDatabase;
use super::ffi::{self, RawContext};
use super::panics;
use super::runtime::{DurableRuntime, log};
use crate::agent::Agents;
use crate::error::{Error, Result};
use crate::http::{Request, refusal};
use crate::platform::{Level, ObjectRuntime, Runtime};
use crate::producer::Producer;
use crate::store::{Database, SqlStore};

/// How long an object that could not be built waits until its alarm tries again, in milliseconds.
const REBUILD_AFTER: u64 = 60_000;

/// One agent session in one Durable Object.
///
/// A `#[durable_object(alarm)]` class keeps one, and [`crate::host_agents`] hands it its events:
///
/// ```ignore
/// /// One session of any of the agents.
/// #[durable_object(alarm)]
/// pub struct MyAgents(ObjectHost);
///
/// remote_agents::host_agents!(MyAgents, hosted);
///
/// fn hosted(env: &Env, runtime: Rc<dyn Runtime>) -> Result<Agents> {
///     agents(env, runtime)
/// }
/// ```
pub struct ObjectHost {
    producer: Result<Rc<Producer>>,
    database: Result<Rc<dyn Database>>,
    runtime: Option<Rc<DurableRuntime>>,
}

/// Makes a class that keeps an [`ObjectHost`] the host of the agents that a function makes, as
/// [`ObjectHost::new`] takes it.
///
/// It writes the class's `impl DurableObject`, and does not compile for a class without an alarm: a
/// session that nobody wakes would not survive a restart. The crate that uses it depends on `worker`.
#[macro_export]
macro_rules! host_agents {
    ($class:ident, $agents:expr) => {
        impl ::worker::DurableObject for $class {
            fn new(state: ::worker::State, env: ::worker::Env) -> Self {
                Self($crate::cloudflare::ObjectHost::new(state, &env, $agents))
            }

            async fn fetch(
                &self,
                request: ::worker::Request,
            ) -> ::worker::Result<::worker::Response> {
                Ok(self.0.fetch(request).await)
            }

            async fn alarm(&self) -> ::worker::Result<::worker::Response> {
                Ok(self.0.alarm().await)
            }
        }

        const _: () = {
            use ::worker::wasm_bindgen::JsValue;

            // What the platform calls: only `durable_object(alarm)` writes a method of this type.
            #[allow(dead_code)]
            async fn is_woken(class: &$class) -> ::core::result::Result<JsValue, JsValue> {
                class.alarm().await
            }
        };
    };
}

impl ObjectHost {
    /// Builds the object's session from its storage and the agents that it may host.
    ///
    /// Never fails: when `agents` or the storage does, every request is answered with that error.
    #[must_use]
    pub fn new(
        state: worker::State,
        env: &worker::Env,
        agents: impl FnOnce(&worker::Env, Rc<dyn Runtime>) -> Result<Agents>,
    ) -> Self {
        let context: RawContext = JsValue::from(state._inner()).unchecked_into();
        let standing = panics::guard(&context);
        console::install();
        let storage = match context.storage() {
            Ok(storage) => storage,
            Err(thrown) => {
                let error = Error::internal(format!("storage: {}", ffi::message(&thrown)));
                return Self {
                    producer: Err(error.clone()),
                    database: Err(error),
                    runtime: None,
                };
            }
        };
        let runtime = Rc::new(DurableRuntime::new(context, storage.clone(), standing));
        let database =
            DurableDatabase::new(storage).map(|database| Rc::new(database) as Rc<dyn Database>);
        let producer = database.clone().and_then(|database| {
            let store = Rc::new(SqlStore::new(database));
            let agents = agents(env, Rc::clone(&runtime) as Rc<dyn Runtime>)?;
            Ok(Producer::new(
                Rc::clone(&runtime) as Rc<dyn ObjectRuntime>,
                store,
                agents,
            ))
        });
        if let Err(error) = &producer {
            let detail = error.detail.as_deref().unwrap_or_default();
            log(
                Level::Error,
                &format_args!("the object cannot be built: {error} {detail}"),
            );
        }
        Self {
            producer,
            database,
            runtime: Some(runtime),
        }
    }

    /// Answers a request that a mount or another object of the same Worker sent.
    pub async fn fetch(&self, request: worker::Request) -> worker::Response {
        let signal = convert::signal(request.inner());
        let producer = match &self.producer {
            Ok(producer) => producer,
            Err(error) => return convert::answer(refusal(error), None),
        };
        match read(request.inner()).await {
            Ok(request) => convert::answer(producer.handle(request).await, signal.as_ref()),
            Err(error) => convert::answer(refusal(&error), None),
        }
    }

    /// Deletes the object's session completely, as [`Producer::delete`] does. No route of a mount
    /// leads here: a class offers it by a request that only its own Worker sends.
    ///
    /// # Errors
    /// Why the object could not be built, or what the deletion says; nothing is deleted then.
    pub async fn delete(&self) -> Result<()> {
        match &self.producer {
            Ok(producer) => producer.delete().await,
            Err(error) => Err(error.clone()),
        }
    }

    /// The object's database, for what an agent keeps in tables of its own: a class may answer a
    /// request that only its own Worker sends from it. Whether a session was begun here is for its
    /// status to tell.
    ///
    /// # Errors
    /// Why the object has none.
    pub fn database(&self) -> Result<Rc<dyn Database>> {
        self.database.clone()
    }

    /// The session's driver, for the benchmark.
    ///
    /// # Errors
    /// Why the object could not be built.
    #[cfg(feature = "bench")]
    pub fn producer(&self) -> Result<Rc<Producer>> {
        self.producer.clone()
    }

    /// Lets the session go on, and sees to it that there is another alarm if there must be one.
    pub async fn alarm(&self) -> worker::Response {
        match (&self.producer, &self.runtime) {
            (Ok(producer), _) => producer.alarm().await,
            (Err(_), Some(runtime)) => {
                // The session may be running still: a later version of the code, or a better
                // moment, finds it only if the alarm lives on.
                let again = runtime.now().saturating_add(REBUILD_AFTER);
                if let Err(error) = runtime.set_alarm(Some(again)).await {
                    log(
                        Level::Error,
                        &format_args!("{error} {}", error.detail.as_deref().unwrap_or_default()),
                    );
                }
            }
            (Err(error), None) => log(
                Level::Error,
                &format_args!("no storage to keep an alarm in: {error}"),
            ),
        }
        worker::ResponseBuilder::new().empty()
    }
}

/// Reads a request whole. Who sent it has bounded it already.
async fn read(request: &web_sys::Request) -> Result<Request> {
    let head = convert::head(request)?;
    let body = convert::body(request, usize::MAX).await?;
    Ok(head.map(|()| body))
}
