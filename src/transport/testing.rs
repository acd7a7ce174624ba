//! A runtime on tokio's clock, for tests in virtual time.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use tokio::time::Instant;

use crate::platform::{Level, Runtime};
use crate::protocol::ids::{Timestamp, millis};

/// Where the test clock begins.
pub(crate) const EPOCH: Timestamp = 1_800_000_000_000;

pub(crate) struct TestRuntime {
    begun: Instant,
    /// What every byte of randomness is.
    pub(crate) chance: Cell<u8>,
    pub(crate) lines: RefCell<Vec<String>>,
}

impl TestRuntime {
    pub(crate) fn new() -> Self {
        Self {
            begun: Instant::now(),
            chance: Cell::new(255),
            lines: RefCell::default(),
        }
    }

    /// Milliseconds of virtual time since the test began.
    pub(crate) fn elapsed(&self) -> u64 {
        millis(self.begun.elapsed())
    }
}

impl Runtime for TestRuntime {
    fn now(&self) -> Timestamp {
        EPOCH + self.elapsed()
    }

    fn entropy(&self) -> [u8; 16] {
        [self.chance.get(); 16]
    }

    fn sleep(&self, duration: Duration) -> LocalBoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(duration))
    }

    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        tokio::task::spawn_local(task);
    }

    fn log(&self, _: Level, event: &dyn fmt::Display) {
        self.lines.borrow_mut().push(event.to_string());
    }
}
