//! A disk that is late, as that of a Durable Object is: what was committed becomes durable some
//! time after the commit returned, and what is not durable when the object ends is gone.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use futures::channel::oneshot;
use futures::future::LocalBoxFuture;

use super::RusqliteDatabase;
use crate::error::Result;
use crate::protocol::ids::Timestamp;

/// How long the next write to the disk takes.
pub type Latency = Rc<dyn Fn() -> Duration>;

/// A moment of an object's disk, for those who watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskMoment {
    /// All that is committed is on its way to the disk.
    Leaving,
    /// What was last on its way is durable.
    Durable,
    /// The object has ended: what was not durable is gone.
    TakenBack,
}

/// What is durable of an object.
#[derive(Clone, Default)]
pub(super) struct Image {
    /// Its database; an empty one where there is none.
    pub(super) database: Option<Rc<[u8]>>,
    /// When its alarm is due.
    pub(super) alarm: Option<Timestamp>,
}

impl Image {
    /// A database with what is durable.
    pub(super) fn opened(&self) -> Result<Rc<RusqliteDatabase>> {
        let database = match &self.database {
            Some(bytes) => RusqliteDatabase::of_image(bytes)?,
            None => RusqliteDatabase::in_memory()?,
        };
        Ok(Rc::new(database))
    }
}

/// The alarm that is armed, behind a count of how often it was.
type Armed = Rc<Cell<(u64, Option<Timestamp>)>>;

/// One object's disk, as long as the object lives.
pub(super) struct Disk {
    database: Rc<RusqliteDatabase>,
    armed: Armed,
    latency: Latency,
    told: Box<dyn Fn(DiskMoment)>,
    /// How often database and alarm have changed, and how many of these changes are durable.
    changes: Cell<u64>,
    durable: Cell<u64>,
    image: RefCell<Image>,
    is_writing: Cell<bool>,
    waiting: RefCell<Vec<(u64, oneshot::Sender<()>)>>,
}

impl Disk {
    /// A disk on which `image` is, and which holds what `database` holds.
    pub(super) fn new(
        database: Rc<RusqliteDatabase>,
        armed: Armed,
        image: Image,
        latency: Latency,
        told: Box<dyn Fn(DiskMoment)>,
    ) -> Rc<Self> {
        Rc::new(Self {
            database,
            armed,
            latency,
            told,
            changes: Cell::new(0),
            durable: Cell::new(0),
            image: RefCell::new(image),
            is_writing: Cell::new(false),
            waiting: RefCell::default(),
        })
    }

    /// Something was committed; the task that makes it durable, unless one is at work.
    pub(super) fn changed(self: &Rc<Self>) -> Option<LocalBoxFuture<'static, ()>> {
        self.changes.set(self.changes.get().wrapping_add(1));
        if self.is_writing.replace(true) {
            return None;
        }
        Some(Box::pin(self.clone().write()))
    }

    async fn write(self: Rc<Self>) {
        loop {
            let covered = self.changes.get();
            let Ok(image) = self.take() else {
                // Whoever waits hears that it failed.
                self.waiting.take();
                return;
            };
            (self.told)(DiskMoment::Leaving);
            tokio::time::sleep((self.latency)()).await;
            self.image.replace(image);
            self.durable.set(covered);
            (self.told)(DiskMoment::Durable);
            let mut waiting = self.waiting.borrow_mut();
            for (_, told) in waiting.extract_if(.., |(change, _)| *change <= covered) {
                // Who waited may have gone.
                let _gone = told.send(());
            }
            if self.changes.get() == covered {
                self.is_writing.set(false);
                return;
            }
        }
    }

    fn take(&self) -> Result<Image> {
        Ok(Image {
            database: Some(self.database.image()?.into()),
            alarm: self.armed.get().1,
        })
    }

    /// Whether everything is durable.
    pub(super) fn is_settled(&self) -> bool {
        self.durable.get() == self.changes.get()
    }

    /// Hears when everything of now is durable.
    pub(super) fn wait(&self) -> oneshot::Receiver<()> {
        let (told, hears) = oneshot::channel();
        if self.is_settled() {
            let _heard = told.send(());
        } else {
            let change = self.changes.get();
            self.waiting.borrow_mut().push((change, told));
        }
        hears
    }

    /// What is durable.
    pub(super) fn image(&self) -> Image {
        self.image.borrow().clone()
    }
}
