//! Objects in this process: a session id names one, as on the Cloudflare side.
//!
//! Each object has its own SQLite and its own driver; a call to it goes through the same request
//! and answer values. It is how tests, and programs without a server, host agents.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;

use super::{LocalRuntime, LogSink, RusqliteDatabase};
use crate::agent::Agents;
use crate::error::Result;
use crate::http::{Request, Response};
use crate::mount::{Mount, Objects, serve};
use crate::platform::{ObjectRuntime as _, Runtime as _};
use crate::producer::Producer;
use crate::protocol::ids::{SessionId, Timestamp};
use crate::store::{Database, SqlStore};
use crate::transport::{Fetch, FetchError};

/// Makes the agents of an object; it gets the objects, so that agents may call siblings.
pub type MakeAgents = Rc<dyn Fn(&Rc<LocalObjects>, &Rc<LocalRuntime>) -> Result<Agents>>;

/// The objects of one service.
pub struct LocalObjects {
    agents: MakeAgents,
    base: Timestamp,
    began: tokio::time::Instant,
    log: LogSink,
    this: Weak<Self>,
    objects: RefCell<HashMap<SessionId, Object>>,
}

#[derive(Clone)]
struct Object {
    database: Rc<RusqliteDatabase>,
    runtime: Rc<LocalRuntime>,
    producer: Rc<Producer>,
}

impl LocalObjects {
    /// No objects yet; each comes to be when it is first called.
    #[must_use]
    pub fn new(base: Timestamp, log: LogSink, agents: MakeAgents) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            agents,
            base,
            began: tokio::time::Instant::now(),
            log,
            this: this.clone(),
            objects: RefCell::new(HashMap::new()),
        })
    }

    /// The driver of a session's object.
    ///
    /// # Errors
    /// What the database or the agents' construction says.
    pub fn producer(&self, session: &SessionId) -> Result<Rc<Producer>> {
        if let Some(object) = self.objects.borrow().get(session) {
            return Ok(object.producer.clone());
        }
        self.open(session, Rc::new(RusqliteDatabase::in_memory()?))
    }

    /// The database of a session's object, if it was ever called.
    #[must_use]
    pub fn database(&self, session: &SessionId) -> Option<Rc<RusqliteDatabase>> {
        self.objects
            .borrow()
            .get(session)
            .map(|object| object.database.clone())
    }

    /// The ids of all objects that were ever called.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionId> {
        self.objects.borrow().keys().cloned().collect()
    }

    /// Ends an object where it stands and opens it anew on the same data, as a crash or an eviction
    /// does. Its alarm outlives it.
    ///
    /// # Errors
    /// As [`Self::producer`].
    pub fn evict(&self, session: &SessionId) -> Result<Rc<Producer>> {
        let Some(object) = self.objects.borrow_mut().remove(session) else {
            return self.producer(session);
        };
        object.runtime.kill();
        let producer = self.open(session, object.database)?;
        if let Some(at) = object.runtime.alarm_at() {
            let runtime = self
                .objects
                .borrow()
                .get(session)
                .map(|object| object.runtime.clone());
            if let Some(runtime) = runtime {
                runtime.spawn(runtime.set_alarm(Some(at)).map(drop).boxed_local());
            }
        }
        Ok(producer)
    }

    fn open(&self, session: &SessionId, database: Rc<RusqliteDatabase>) -> Result<Rc<Producer>> {
        let Some(this) = self.this.upgrade() else {
            return Err(crate::error::Error::internal("the objects are gone"));
        };
        // An object that is opened anew finds the clock where it is, not where it began.
        let elapsed = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let runtime = LocalRuntime::new(self.base.saturating_add(elapsed), self.log.clone());
        let agents = (self.agents)(&this, &runtime)?;
        let store = Rc::new(SqlStore::new(database.clone() as Rc<dyn Database>));
        let producer = Producer::new(runtime.clone(), store, agents);
        let weak = Rc::downgrade(&producer);
        runtime.on_alarm(Rc::new(move || {
            let producer = weak.upgrade();
            Box::pin(async move {
                if let Some(producer) = producer {
                    producer.alarm().await;
                }
            })
        }));
        let object = Object {
            database,
            runtime,
            producer: producer.clone(),
        };
        self.objects.borrow_mut().insert(session.clone(), object);
        Ok(producer)
    }
}

impl Objects for LocalObjects {
    fn object(&self, session: &SessionId) -> Rc<dyn Fetch> {
        Rc::new(ObjectFetch(self.producer(session)))
    }
}

/// Calls one object.
struct ObjectFetch(Result<Rc<Producer>>);

impl Fetch for ObjectFetch {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let producer = self.0.clone();
        Box::pin(async move {
            let producer = producer.map_err(|error| FetchError(error.to_string()))?;
            Ok(producer.handle(request).await)
        })
    }
}

/// Calls a mount of objects in this process, as a service binding calls a Worker.
pub struct MountFetch {
    mount: Rc<Mount>,
    objects: Rc<LocalObjects>,
}

impl MountFetch {
    /// A way to call `mount`.
    #[must_use]
    pub fn new(mount: Rc<Mount>, objects: Rc<LocalObjects>) -> Self {
        Self { mount, objects }
    }
}

impl Fetch for MountFetch {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let (mount, objects) = (self.mount.clone(), self.objects.clone());
        Box::pin(async move { Ok(serve(&mount, &*objects, request).await) })
    }
}
