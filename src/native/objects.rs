//! Objects in this process: a session id names one, as on the Cloudflare side.
//!
//! Each object has its own SQLite and its own driver; a call to it goes through the same request
//! and answer values. It is how tests, and programs without a server, host agents.
//!
//! An object that is evicted is gone at once, as a crashed one is: it commits nothing more, calls
//! to it fail, and the streams that it was sending break off.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::Poll;

use futures::future::{Either, LocalBoxFuture, select};
use futures::stream;
use futures::{Future as _, FutureExt as _};

use super::disk::Image;
use super::{DiskMoment, Effect, Entropy, Latency, LocalRuntime, LogSink, RusqliteDatabase};
use crate::agent::Agents;
use crate::error::{Error, Result};
use crate::http::{Body, BodyError, ByteStream, Request, Response};
use crate::mount::{Mount, Objects, serve};
use crate::platform::ObjectRuntime as _;
use crate::producer::Producer;
use crate::protocol::ids::{SessionId, Timestamp, millis};
use crate::store::{Database, SqlStore, SqlValue};
use crate::transport::{Fetch, FetchError};

/// Makes the agents of an object; it gets the objects, so that agents may call siblings.
pub type MakeAgents = Rc<dyn Fn(&Rc<LocalObjects>, &Rc<LocalRuntime>) -> Result<Agents>>;

/// A moment of an object's transaction, for those who watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitMoment {
    /// Nothing of it is written; an object that is evicted now never writes it.
    Before,
    /// It is committed, and durable unless the disk is late; an object that is evicted now does
    /// nothing with it.
    After,
}

/// Is told of every transaction of every object; may evict.
pub type OnCommit = Rc<dyn Fn(&SessionId, CommitMoment)>;

/// Is told of every effect of every object; may evict.
pub type OnObjectEffect = Rc<dyn Fn(&SessionId, Effect)>;

/// Is told of every moment of every object's disk, where [`LocalObjects::put_on_disk`] was called.
pub type OnDisk = Rc<dyn Fn(&SessionId, DiskMoment)>;

/// Something that an object asks its database for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoreOperation {
    /// A statement that reads.
    Query,
    /// A statement that writes.
    Write,
    /// A transaction, asked for before anything of it is done.
    Transaction,
    /// An alarm that is armed or disarmed, which the platform's storage does too.
    Alarm,
}

/// Is asked before every operation on an object's storage; may refuse it. The flag says whether it is
/// one on the database with a transaction open.
pub type OnStore = Rc<dyn Fn(&SessionId, StoreOperation, bool) -> Result<()>>;

/// The objects of one service.
pub struct LocalObjects {
    agents: MakeAgents,
    base: Timestamp,
    began: tokio::time::Instant,
    log: LogSink,
    this: Weak<Self>,
    objects: RefCell<HashMap<SessionId, Object>>,
    on_commit: RefCell<Option<OnCommit>>,
    on_effect: RefCell<Option<OnObjectEffect>>,
    on_store: RefCell<Option<OnStore>>,
    disk: RefCell<Option<(Latency, OnDisk)>>,
    entropy: RefCell<Option<Entropy>>,
    ahead: Cell<i64>,
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
            on_commit: RefCell::new(None),
            on_effect: RefCell::new(None),
            on_store: RefCell::new(None),
            disk: RefCell::new(None),
            entropy: RefCell::new(None),
            ahead: Cell::new(0),
        })
    }

    /// Watches transactions, which is how a test ends an object at an exact place. Default: nobody
    /// does.
    pub fn on_commit(&self, watcher: OnCommit) {
        *self.on_commit.borrow_mut() = Some(watcher);
    }

    /// Watches effects, as [`Self::on_commit`] does transactions. Default: nobody does.
    pub fn on_effect(&self, watcher: OnObjectEffect) {
        *self.on_effect.borrow_mut() = Some(watcher);
    }

    /// Watches what objects ask of their storage, which is how a test makes one fail. Default:
    /// nobody does.
    pub fn on_store(&self, watcher: OnStore) {
        *self.on_store.borrow_mut() = Some(watcher);
    }

    /// Puts objects that are opened from now on on a disk that is late, as the platform's is: a
    /// commit returns at once and is durable when the `latency` of a write has passed, an answer
    /// leaves its object once everything before it is durable, and an eviction takes back what is
    /// not. Requests that agents send leave when their transport lets them: one that behaves as the
    /// platform does waits for [`sync`](crate::platform::ObjectRuntime::sync). Default: a commit is
    /// durable when it returns.
    pub fn put_on_disk(&self, latency: Latency, watcher: OnDisk) {
        *self.disk.borrow_mut() = Some((latency, watcher));
    }

    /// Draws the random bits of objects that are opened from now on from `entropy`. Default: the
    /// system's.
    pub fn draw_from(&self, entropy: Entropy) {
        *self.entropy.borrow_mut() = Some(entropy);
    }

    /// Puts the clock of all objects ahead, as [`LocalRuntime::put_clock`] does one's.
    pub fn put_clock(&self, ahead: i64) {
        self.ahead.set(ahead);
        for object in self.objects.borrow().values() {
            object.runtime.put_clock(ahead);
        }
    }

    /// The driver of a session's object.
    ///
    /// # Errors
    /// What the database or the agents' construction says.
    pub fn producer(&self, session: &SessionId) -> Result<Rc<Producer>> {
        Ok(self.object_of(session)?.producer)
    }

    fn object_of(&self, session: &SessionId) -> Result<Object> {
        if let Some(object) = self.objects.borrow().get(session) {
            return Ok(object.clone());
        }
        let database = Rc::new(RusqliteDatabase::in_memory()?);
        self.open(session, database, Image::default())
    }

    /// The database of a session's object, if it was ever called.
    #[must_use]
    pub fn database(&self, session: &SessionId) -> Option<Rc<RusqliteDatabase>> {
        self.objects
            .borrow()
            .get(session)
            .map(|object| object.database.clone())
    }

    /// When the alarm of a session's object is due, if one is armed.
    #[must_use]
    pub fn alarm_at(&self, session: &SessionId) -> Option<Timestamp> {
        let objects = self.objects.borrow();
        objects.get(session)?.runtime.alarm_at()
    }

    /// How many tasks of a session's object have not come to their end; an armed alarm is none.
    #[must_use]
    pub fn pending(&self, session: &SessionId) -> usize {
        let objects = self.objects.borrow();
        objects
            .get(session)
            .map_or(0, |object| object.runtime.pending())
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
        // Read before the end: an alarm is the platform's, not the object's.
        let armed = object.runtime.alarm_at();
        object.runtime.kill();
        let is_late = object.runtime.image().is_some();
        let (database, image) = match object.runtime.image() {
            Some((image, false)) => (image.opened()?, image),
            Some((image, true)) => (object.database, image),
            None => (object.database, Image::default()),
        };
        let due = if is_late { image.alarm } else { armed };
        let opened = self.open(session, database, image)?;
        if is_late {
            self.tell_of_disk(session, DiskMoment::TakenBack);
        }
        if let Some(at) = due {
            // Whoever is told of it may have ended the object again, which has armed it anew.
            drop(opened.runtime.arm(Some(at)));
        }
        Ok(opened.producer)
    }

    /// Ends all objects for good, and forgets them and their watchers: nothing of them holds memory
    /// any more.
    pub fn close(&self) {
        for (_, object) in self.objects.borrow_mut().drain() {
            object.runtime.kill();
        }
        self.on_commit.take();
        self.on_effect.take();
        self.on_store.take();
        self.disk.take();
        self.entropy.take();
    }

    fn tell_of_disk(&self, session: &SessionId, moment: DiskMoment) {
        let disk = self.disk.borrow().clone();
        if let Some((_, watcher)) = disk {
            watcher(session, moment);
        }
    }

    fn open(
        &self,
        session: &SessionId,
        database: Rc<RusqliteDatabase>,
        image: Image,
    ) -> Result<Object> {
        let Some(this) = self.this.upgrade() else {
            return Err(Error::internal("the objects are gone"));
        };
        // An object that is opened anew finds the clock where it is, not where it began.
        let elapsed = millis(self.began.elapsed());
        let runtime = LocalRuntime::new(self.base.saturating_add(elapsed), self.log.clone());
        runtime.put_clock(self.ahead.get());
        if let Some(entropy) = self.entropy.borrow().clone() {
            runtime.draw_from(entropy);
        }
        let disk = self.disk.borrow().clone();
        if let Some((latency, _)) = disk {
            let (objects, told) = (self.this.clone(), session.clone());
            let tell = move |moment| {
                if let Some(objects) = objects.upgrade() {
                    objects.tell_of_disk(&told, moment);
                }
            };
            runtime.put_on_disk(database.clone(), image, latency, Box::new(tell));
        }
        let (objects, told) = (self.this.clone(), session.clone());
        runtime.on_effect(Rc::new(move |effect| {
            let watcher = objects
                .upgrade()
                .and_then(|objects| objects.on_effect.borrow().clone());
            if let Some(watcher) = watcher {
                watcher(&told, effect);
            }
        }));
        let (objects, asked) = (self.this.clone(), session.clone());
        runtime.on_arm(Rc::new(move || {
            ask(&objects, &asked, StoreOperation::Alarm, false)
        }));
        let agents = (self.agents)(&this, &runtime)?;
        let store = Rc::new(SqlStore::new(Rc::new(LivingDatabase {
            database: database.clone(),
            runtime: runtime.clone(),
            session: session.clone(),
            objects: self.this.clone(),
            depth: Cell::new(0),
        }) as Rc<dyn Database>));
        let producer = Producer::new(runtime.clone(), store, agents);
        let weak = Rc::downgrade(&producer);
        runtime.on_alarm(Rc::new(move || {
            let producer = weak.upgrade();
            Box::pin(async move {
                match producer {
                    Some(producer) => producer.alarm().await,
                    None => Ok(()),
                }
            })
        }));
        let object = Object {
            database,
            runtime,
            producer,
        };
        self.objects
            .borrow_mut()
            .insert(session.clone(), object.clone());
        Ok(object)
    }
}

impl Objects for LocalObjects {
    fn object(&self, session: &SessionId) -> Rc<dyn Fetch> {
        Rc::new(ObjectFetch(self.object_of(session)))
    }
}

/// An object's database as long as the object lives.
struct LivingDatabase {
    database: Rc<RusqliteDatabase>,
    runtime: Rc<LocalRuntime>,
    session: SessionId,
    objects: Weak<LocalObjects>,
    depth: Cell<u32>,
}

impl LivingDatabase {
    fn check(&self) -> Result<()> {
        if self.runtime.is_ended() {
            return Err(Error::internal(ENDED));
        }
        Ok(())
    }

    fn ask(&self, operation: StoreOperation) -> Result<()> {
        let is_inside = self.depth.get() > 0;
        ask(&self.objects, &self.session, operation, is_inside)
    }

    /// Tells the disk and the watcher of a transaction that is part of no other.
    fn tell(&self, moment: CommitMoment) {
        if self.depth.get() == 0 && moment == CommitMoment::After {
            self.runtime.changed();
        }
        let watcher = self
            .objects
            .upgrade()
            .filter(|_| self.depth.get() == 0)
            .and_then(|objects| objects.on_commit.borrow().clone());
        if let Some(watcher) = watcher {
            watcher(&self.session, moment);
        }
    }
}

impl Database for LivingDatabase {
    fn query(&self, sql: &str, parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        self.ask(StoreOperation::Query)?;
        self.check()?;
        self.database.query(sql, parameters)
    }

    fn write(&self, sql: &str, parameters: &[SqlValue]) -> Result<bool> {
        // Outside of a transaction it is a commit of its own.
        self.tell(CommitMoment::Before);
        self.ask(StoreOperation::Write)?;
        self.check()?;
        let written = self.database.write(sql, parameters);
        if matches!(written, Ok(true)) {
            self.tell(CommitMoment::After);
        }
        written
    }

    fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.tell(CommitMoment::Before);
        self.ask(StoreOperation::Transaction)?;
        self.check()?;
        let depth = self.depth.get();
        self.depth.set(depth.saturating_add(1));
        let done = self.database.transaction(work);
        self.depth.set(depth);
        if done.is_ok() {
            self.tell(CommitMoment::After);
        }
        done
    }
}

/// Asks the watcher whether the storage does what it is asked for.
fn ask(
    objects: &Weak<LocalObjects>,
    session: &SessionId,
    operation: StoreOperation,
    is_inside: bool,
) -> Result<()> {
    let objects = objects.upgrade();
    let watcher = objects.and_then(|objects| objects.on_store.borrow().clone());
    watcher.map_or(Ok(()), |watcher| watcher(session, operation, is_inside))
}

const ENDED: &str = "the object has ended";

/// Calls one object.
struct ObjectFetch(Result<Object>);

impl Fetch for ObjectFetch {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let object = self.0.clone();
        Box::pin(async move {
            let object = object.map_err(|error| FetchError(error.to_string()))?;
            let runtime = object.runtime;
            // An answer leaves once all that came before it is durable.
            let answer = Box::pin(async {
                let answer = object.producer.handle(request).await;
                runtime.sync().await.map(|()| answer)
            });
            match select(answer, runtime.ended().boxed_local()).await {
                // An answer that the object gave with its last breath did not leave it.
                Either::Left((Ok(response), _)) if !runtime.is_ended() => {
                    Ok(response.map(|body| living(body, &runtime)))
                }
                _ => Err(FetchError(ENDED.into())),
            }
        })
    }
}

/// A body that breaks off when its object ends.
fn living(body: Body, runtime: &LocalRuntime) -> Body {
    let Body::Stream(parts) = body else {
        return body;
    };
    let mut parts: Option<ByteStream> = Some(parts);
    let mut ended = runtime.ended().boxed_local();
    Body::Stream(Box::pin(stream::poll_fn(move |context| {
        let Some(body) = parts.as_mut() else {
            return Poll::Ready(None);
        };
        if Pin::new(&mut ended).poll(context).is_ready() {
            parts = None;
            return Poll::Ready(Some(Err(BodyError(ENDED.into()))));
        }
        let part = body.as_mut().poll_next(context);
        if let Poll::Ready(None) = part {
            parts = None;
        }
        part
    })))
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
