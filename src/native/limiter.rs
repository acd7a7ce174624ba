//! A limiter in this process: so many requests of a key in a time.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{LocalBoxFuture, ready};

use crate::mount::{Limiter, Verdict};
use crate::platform::Runtime;
use crate::protocol::ids::{Timestamp, millis};

/// Lets each key make a number of requests in a period, which begins with its first one. What is kept
/// is one count for each key of the last two periods.
pub struct MemoryLimiter {
    runtime: Rc<dyn Runtime>,
    limit: u32,
    period: u64,
    windows: RefCell<HashMap<String, Window>>,
    swept_at: Cell<Timestamp>,
}

struct Window {
    began: Timestamp,
    count: u32,
}

impl MemoryLimiter {
    /// A limiter of `limit` requests in `period` for each key, by the clock of `runtime`.
    #[must_use]
    pub fn new(runtime: Rc<dyn Runtime>, limit: u32, period: Duration) -> Self {
        Self {
            swept_at: Cell::new(runtime.now()),
            runtime,
            limit,
            period: millis(period),
            windows: RefCell::default(),
        }
    }

    /// How many keys are kept.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.windows.borrow().len()
    }

    fn count(&self, key: &str) -> Verdict {
        let now = self.runtime.now();
        let is_over = |began: Timestamp| now.saturating_sub(began) >= self.period;
        let mut windows = self.windows.borrow_mut();
        if is_over(self.swept_at.get()) {
            self.swept_at.set(now);
            windows.retain(|_, window| !is_over(window.began));
        }
        let window = windows.entry(key.to_owned()).or_insert(Window {
            began: now,
            count: 0,
        });
        if is_over(window.began) {
            *window = Window {
                began: now,
                count: 0,
            };
        }
        if window.count >= self.limit {
            let left = self.period.saturating_sub(now.saturating_sub(window.began));
            return Verdict::Wait(Duration::from_millis(left));
        }
        window.count = window.count.saturating_add(1);
        Verdict::Allow
    }
}

impl Limiter for MemoryLimiter {
    fn ask<'a>(&'a self, key: &'a str) -> LocalBoxFuture<'a, Verdict> {
        ready(self.count(key)).boxed_local()
    }
}
