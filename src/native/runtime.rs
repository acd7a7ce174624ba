//! The native runtime: one thread of tokio, its clock and its tasks.
//!
//! The clock is tokio's, so that a paused clock makes every wait virtual. An object's alarm is a
//! task that sleeps until the alarm's time; arming it again replaces it.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use futures::channel::oneshot;
use futures::future::{Either, FutureExt as _, LocalBoxFuture, Shared, select};

use super::database::RusqliteDatabase;
use super::disk::{Disk, DiskMoment, Image, Latency};
use crate::error::{Error, Result};
use crate::platform::{Level, Line, ObjectRuntime, Runtime};
use crate::protocol::ids::{Timestamp, millis};

/// Where log lines go as JSON, beside whichever subscriber of `tracing` the program has.
pub type LogSink = Rc<dyn Fn(Level, &str)>;

/// Something that an object does beside its commits, for those who watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// It begins to wait for a time.
    Sleep,
    /// The wait is over.
    SleepOver,
    /// It arms or disarms its alarm.
    AlarmSet,
    /// Its alarm rings.
    AlarmRings,
    /// What its agents or its transports told by [`LocalRuntime::tell`].
    Told(&'static str),
}

/// Where random bits come from.
pub type Entropy = Rc<dyn Fn() -> [u8; 16]>;

/// Is told of effects.
pub type OnEffect = Rc<dyn Fn(Effect)>;

/// Is asked before an alarm is armed or disarmed; may refuse it, and then the one before stays.
type OnArm = Rc<dyn Fn() -> Result<()>>;

/// What an alarm does. One that fails is rung again, as the platform does.
type OnAlarm = Rc<dyn Fn() -> LocalBoxFuture<'static, Result<()>>>;

/// How often an alarm whose action fails is rung again, and the first wait before; it doubles.
const RINGS_AGAIN: u32 = 6;
const RINGS_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// The runtime of one object, or of a program's own calls. Must be used within a tokio
/// `LocalSet`.
pub struct LocalRuntime {
    began: tokio::time::Instant,
    base: Timestamp,
    log: LogSink,
    /// Counts arming; the time that is armed, if any.
    armed: Rc<Cell<(u64, Option<Timestamp>)>>,
    /// What the clock is ahead of tokio's, in milliseconds.
    ahead: Cell<i64>,
    entropy: RefCell<Option<Entropy>>,
    /// Without one, a commit is durable when it returns.
    disk: OnceCell<Rc<Disk>>,
    on_alarm: RefCell<Option<OnAlarm>>,
    on_arm: RefCell<Option<OnArm>>,
    on_effect: Rc<RefCell<Option<OnEffect>>>,
    tasks: Rc<RefCell<Vec<tokio::task::AbortHandle>>>,
    /// Sleeps until the alarm is due.
    sleeper: Rc<RefCell<Option<tokio::task::AbortHandle>>>,
    /// Dropped when the runtime ends.
    living: RefCell<Option<oneshot::Sender<()>>>,
    ended: Shared<oneshot::Receiver<()>>,
}

impl LocalRuntime {
    /// A runtime whose clock starts at `base` (milliseconds since the Unix epoch) now.
    #[must_use]
    pub fn new(base: Timestamp, log: LogSink) -> Rc<Self> {
        let (living, ended) = oneshot::channel();
        Rc::new(Self {
            began: tokio::time::Instant::now(),
            base,
            log,
            armed: Rc::new(Cell::new((0, None))),
            ahead: Cell::new(0),
            entropy: RefCell::default(),
            disk: OnceCell::new(),
            on_alarm: RefCell::new(None),
            on_arm: RefCell::new(None),
            on_effect: Rc::default(),
            tasks: Rc::default(),
            sleeper: Rc::default(),
            living: RefCell::new(Some(living)),
            ended: ended.shared(),
        })
    }

    /// Sets what an alarm does.
    pub fn on_alarm(&self, action: OnAlarm) {
        *self.on_alarm.borrow_mut() = Some(action);
    }

    /// Asks before the alarm is armed or disarmed, which is how a test makes that fail. Default:
    /// nobody is asked.
    pub fn on_arm(&self, watcher: OnArm) {
        *self.on_arm.borrow_mut() = Some(watcher);
    }

    /// Watches effects, which is how a test ends an object at an exact place. Default: nobody does.
    pub fn on_effect(&self, watcher: OnEffect) {
        *self.on_effect.borrow_mut() = Some(watcher);
    }

    /// Draws random bits from `entropy`, which is how a test runs the same twice. Default: the
    /// system's.
    pub fn draw_from(&self, entropy: Entropy) {
        *self.entropy.borrow_mut() = Some(entropy);
    }

    /// Puts the clock `ahead` of tokio's, in milliseconds, or behind it. Waits that have begun take
    /// as long as they said. Default: 0.
    pub fn put_clock(&self, ahead: i64) {
        self.ahead.set(ahead);
    }

    /// Tells the watcher of an effect that this runtime cannot see: a request, a call to a model.
    pub fn tell(&self, effect: &'static str) {
        tell(&self.on_effect, Effect::Told(effect));
    }

    /// When the alarm is due, if it is armed or its action has not come to its end.
    #[must_use]
    pub fn alarm_at(&self) -> Option<Timestamp> {
        self.armed.get().1
    }

    /// How many tasks have not come to their end; one that only waits for the alarm is none.
    #[must_use]
    pub fn pending(&self) -> usize {
        let tasks = self.tasks.borrow();
        tasks.iter().filter(|task| !task.is_finished()).count()
    }

    /// Ends every task of this runtime where it stands, as the end of a process does. From then on
    /// it runs, arms and logs nothing more.
    pub fn kill(&self) {
        drop(self.living.borrow_mut().take());
        for task in self.tasks.borrow_mut().drain(..) {
            task.abort();
        }
        self.put_to_sleep(None);
    }

    /// Whether [`Self::kill`] was called.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.living.borrow().is_none()
    }

    /// Puts the object on a disk that is late.
    pub(super) fn put_on_disk(
        &self,
        database: Rc<RusqliteDatabase>,
        image: Image,
        latency: Latency,
        told: Box<dyn Fn(DiskMoment)>,
    ) {
        let disk = Disk::new(database, self.armed.clone(), image, latency, told);
        // An object is put on its disk once, before anything is done with it.
        drop(self.disk.set(disk));
    }

    /// Its database or its alarm has changed.
    pub(super) fn changed(&self) {
        if let Some(writing) = self.disk.get().and_then(Disk::changed) {
            self.spawn(writing);
        }
    }

    /// What is durable, where the disk is late, and whether that is all.
    pub(super) fn image(&self) -> Option<(Image, bool)> {
        let disk = self.disk.get()?;
        Some((disk.image(), disk.is_settled()))
    }

    /// What waits for the alarm from now on, in place of what waited before.
    fn put_to_sleep(&self, sleeper: Option<tokio::task::AbortHandle>) {
        let before = std::mem::replace(&mut *self.sleeper.borrow_mut(), sleeper);
        if let Some(before) = before {
            before.abort();
        }
    }

    /// Completes when [`Self::kill`] is called.
    pub fn ended(&self) -> impl Future<Output = ()> + 'static {
        self.ended.clone().map(drop)
    }
}

impl Runtime for LocalRuntime {
    fn now(&self) -> Timestamp {
        let elapsed = millis(self.began.elapsed());
        let now = self.base.saturating_add(elapsed);
        now.saturating_add_signed(self.ahead.get())
    }

    fn entropy(&self) -> [u8; 16] {
        let entropy = self.entropy.borrow().clone();
        if let Some(entropy) = entropy {
            return entropy();
        }
        let mut bits = [0; 16];
        // Without randomness ids would repeat and sessions would meet; there is no going on.
        if getrandom::fill(&mut bits).is_err() {
            std::process::abort();
        }
        bits
    }

    fn sleep(&self, duration: Duration) -> LocalBoxFuture<'static, ()> {
        let watcher = self.on_effect.clone();
        tell(&watcher, Effect::Sleep);
        Box::pin(async move {
            tokio::time::sleep(duration).await;
            tell(&watcher, Effect::SleepOver);
        })
    }

    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        if self.is_ended() {
            return;
        }
        let mut tasks = self.tasks.borrow_mut();
        tasks.retain(|task| !task.is_finished());
        tasks.push(tokio::task::spawn_local(task).abort_handle());
    }

    fn log(&self, level: Level, event: &dyn fmt::Display) {
        if !self.is_ended() {
            (self.log)(level, &event.to_string());
        }
    }

    fn tell(&self, line: &Line<'_>) {
        if !self.is_ended() {
            line.trace();
            (self.log)(line.level, &line.to_json().to_string());
        }
    }
}

impl ObjectRuntime for LocalRuntime {
    fn sync(&self) -> LocalBoxFuture<'static, Result<()>> {
        let Some(disk) = self.disk.get() else {
            return Box::pin(async { Ok(()) });
        };
        let (durable, ended) = (disk.wait(), self.ended().boxed_local());
        Box::pin(async move {
            match select(durable, ended).await {
                Either::Left((Ok(()), _)) => Ok(()),
                Either::Left(_) => Err(Error::internal("the disk has failed")),
                Either::Right(_) => Err(Error::internal("the object has ended")),
            }
        })
    }

    fn set_alarm(&self, at: Option<Timestamp>) -> LocalBoxFuture<'static, Result<()>> {
        let asked = self.on_arm.borrow().clone();
        let refused = asked.map_or(Ok(()), |ask| ask()).err();
        let done = refused.map_or_else(|| self.arm(at), Err);
        Box::pin(async move { done })
    }
}

impl LocalRuntime {
    /// Arms the alarm, or disarms it, without asking anybody.
    pub(super) fn arm(&self, at: Option<Timestamp>) -> Result<()> {
        if self.is_ended() {
            return Err(Error::internal("the object has ended"));
        }
        let generation = self.armed.get().0.wrapping_add(1);
        self.armed.set((generation, at));
        self.changed();
        tell(&self.on_effect, Effect::AlarmSet);
        if self.is_ended() {
            // Who was told has ended the object; the alarm is armed and outlives it.
            return Err(Error::internal("the object has ended"));
        }
        let action = self.on_alarm.borrow().clone();
        let Some(at) = at else {
            self.put_to_sleep(None);
            return Ok(());
        };
        let Some(action) = action else {
            return Err(Error::internal("this runtime has no object for an alarm"));
        };
        let wait = Duration::from_millis(at.saturating_sub(self.now()));
        let (armed, sleeper) = (self.armed.clone(), self.sleeper.clone());
        let (tasks, watcher) = (self.tasks.clone(), self.on_effect.clone());
        let disk = self.disk.get().cloned();
        let alarm = tokio::task::spawn_local(async move {
            tokio::time::sleep(wait).await;
            if armed.get().0 == generation {
                // It is at work now, a task as any other: to arm the alarm again does not end it.
                let awake = sleeper.borrow_mut().take();
                tasks.borrow_mut().extend(awake);
                let mut rings = 0;
                loop {
                    tell(&watcher, Effect::AlarmRings);
                    let is_done = action().await.is_ok();
                    if is_done || rings == RINGS_AGAIN || armed.get().0 != generation {
                        break;
                    }
                    tokio::time::sleep(RINGS_AGAIN_AFTER * 2_u32.pow(rings)).await;
                    if armed.get().0 != generation {
                        break;
                    }
                    rings = rings.saturating_add(1);
                }
                // An action that is cut off stays due: the platform repeats it.
                if armed.get().0 == generation {
                    armed.set((generation, None));
                    if let Some(writing) = disk.as_ref().and_then(Disk::changed) {
                        writing.await;
                    }
                }
            }
        });
        self.put_to_sleep(Some(alarm.abort_handle()));
        Ok(())
    }
}

/// Tells outside of any borrow: who is told may end the object.
fn tell(watcher: &RefCell<Option<OnEffect>>, effect: Effect) {
    let watcher = watcher.borrow().clone();
    if let Some(watcher) = watcher {
        watcher(effect);
    }
}
