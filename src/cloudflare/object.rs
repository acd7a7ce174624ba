//! What a Durable Object class delegates to.
//!
//! Every error becomes an envelope: an exception that left `fetch` would reach the caller as a
//! broken stub, one that left `alarm` would be retried a few times and then forgotten with the
//! session still running. Construction never fails either; why it could not work is told to each event.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

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
///
/// What the session and its agents take in memory is there while something works with the session:
/// a request, an execution, a hook, a reader. Between two events of a session at rest it is not,
/// because the platform neither tells an object that it is evicted nor frees its value before
/// JavaScript's garbage is collected, which may be hundreds of objects later.
pub struct ObjectHost {
    agents: MakeAgents,
    database: Result<Rc<dyn Database>>,
    runtime: Option<Rc<DurableRuntime>>,
    /// The session's driver, which belongs to those who work with it.
    producer: RefCell<Weak<Producer>>,
}

type MakeAgents = Box<dyn Fn(Rc<dyn Runtime>) -> Result<Agents>>;

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
                self.0.alarm().await
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
    /// Hosts the session in the object's storage with the agents that it may have. `agents` is
    /// called when an event finds the session at rest, so that it may be called many times.
    ///
    /// Never fails: when `agents` or the storage does, every request is answered with that error.
    #[must_use]
    pub fn new(
        state: worker::State,
        env: &worker::Env,
        agents: impl Fn(&worker::Env, Rc<dyn Runtime>) -> Result<Agents> + 'static,
    ) -> Self {
        let context: RawContext = JsValue::from(state._inner()).unchecked_into();
        let standing = panics::guard(&context);
        console::install();
        let (database, runtime) = match context.storage() {
            Ok(storage) => (
                DurableDatabase::new(storage.clone())
                    .map(|database| Rc::new(database) as Rc<dyn Database>),
                Some(Rc::new(DurableRuntime::new(context, storage, standing))),
            ),
            Err(thrown) => {
                let error = Error::internal(format!("storage: {}", ffi::message(&thrown)));
                (Err(error), None)
            }
        };
        let env = env.clone();
        Self {
            agents: Box::new(move |runtime| agents(&env, runtime)),
            database,
            runtime,
            producer: RefCell::default(),
        }
    }

    /// The session's driver: the one that is at work, or a new one. There are never two.
    fn driver(&self) -> Result<Rc<Producer>> {
        if let Some(producer) = self.producer.borrow().upgrade() {
            return Ok(producer);
        }
        let built = self.build();
        match &built {
            Ok(producer) => *self.producer.borrow_mut() = Rc::downgrade(producer),
            Err(error) => log(
                Level::Error,
                &format_args!(
                    "the object cannot be built: {error} {}",
                    error.detail.as_deref().unwrap_or_default()
                ),
            ),
        }
        built
    }

    fn build(&self) -> Result<Rc<Producer>> {
        let store = Rc::new(SqlStore::new(self.database()?));
        let runtime = self.runtime.clone();
        let runtime = runtime.ok_or_else(|| Error::internal("the object has no storage"))?;
        let agents = (self.agents)(runtime.clone())?;
        Ok(Producer::new(runtime, store, agents))
    }

    /// Answers a request that a mount or another object of the same Worker sent.
    pub async fn fetch(&self, request: worker::Request) -> worker::Response {
        let signal = convert::signal(request.inner());
        let producer = match self.driver() {
            Ok(producer) => producer,
            Err(error) => return convert::answer(refusal(&error), None),
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
        self.driver()?.delete().await
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
        self.driver()
    }

    /// Lets the session go on, and sees to it that there is another alarm if there must be one.
    ///
    /// # Errors
    /// When there must be one and it cannot be armed: what the platform is told then makes it ring
    /// the alarm again.
    pub async fn alarm(&self) -> worker::Result<worker::Response> {
        match (self.driver(), &self.runtime) {
            (Ok(producer), _) => producer.alarm().await.map_err(not_armed)?,
            (Err(_), Some(runtime)) => {
                // The session may be running still: a later version of the code, or a better
                // moment, finds it only if the alarm lives on.
                let again = runtime.now().saturating_add(REBUILD_AFTER);
                if let Err(error) = runtime.set_alarm(Some(again)).await {
                    log(
                        Level::Error,
                        &format_args!("{error} {}", error.detail.as_deref().unwrap_or_default()),
                    );
                    return Err(not_armed(error));
                }
            }
            (Err(error), None) => {
                let told = format!("no storage to keep an alarm in: {error}");
                log(Level::Error, &told);
                return Err(not_armed(error));
            }
        }
        Ok(worker::ResponseBuilder::new().empty())
    }
}

fn not_armed(error: Error) -> worker::Error {
    worker::Error::RustError(error.to_string())
}

/// Reads a request whole. Who sent it has bounded it already.
async fn read(request: &web_sys::Request) -> Result<Request> {
    let head = convert::head(request)?;
    let body = convert::body(request, usize::MAX).await?;
    Ok(head.map(|()| body))
}
