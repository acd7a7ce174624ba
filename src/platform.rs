//! What the drivers need of a platform: time, randomness, tasks, an alarm, durability.
//!
//! Two shells implement it: Cloudflare and native. Nothing here is `Send`: an object is one thread.

use std::fmt;
use std::time::Duration;

use futures::future::LocalBoxFuture;

use crate::error::Result;
use crate::protocol::ids::Timestamp;

/// Time, randomness, tasks and the log of one isolate or thread.
pub trait Runtime {
    /// Milliseconds since the Unix epoch. May stand still between I/O events.
    fn now(&self) -> Timestamp;

    /// 128 fresh random bits.
    fn entropy(&self) -> [u8; 16];

    /// Completes after `duration`.
    fn sleep(&self, duration: Duration) -> LocalBoxFuture<'static, ()>;

    /// Runs `task` to its end, whether or not anyone waits; on Workers through `wait_until`.
    fn spawn(&self, task: LocalBoxFuture<'static, ()>);

    /// Writes one structured line: ids and outcomes, never content or credentials.
    fn log(&self, level: Level, event: &dyn fmt::Display);
}

/// What an object adds: durability and one alarm.
pub trait ObjectRuntime: Runtime {
    /// Completes when every commit made so far is durable.
    fn sync(&self) -> LocalBoxFuture<'static, Result<()>>;

    /// Tells `told` when every commit made so far is durable. As [`ObjectRuntime::sync`] for one who
    /// does not wait, without a task of its own where the platform can do without.
    fn once_durable(&self, told: Box<dyn FnOnce(Result<()>)>) {
        let sync = self.sync();
        self.spawn(Box::pin(async move { told(sync.await) }));
    }

    /// Arms the object's one alarm for `at`, or disarms it.
    fn set_alarm(&self, at: Option<Timestamp>) -> LocalBoxFuture<'static, Result<()>>;
}

/// How important a log line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What happened.
    Info,
    /// What went wrong and was dealt with.
    Warn,
    /// What went wrong and needs a person.
    Error,
}
