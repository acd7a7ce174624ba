//! How often callers may come, over all sessions of a mount.
//!
//! The library keeps no count of its own: a mount asks a [`Limiter`], which is the platform's or the
//! program's. Section 1 of the contract.

use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;

use super::Head;
use crate::error::{Code, Error, Result};

/// Counts requests under keys and says when there are too many. One that cannot tell should let a
/// request pass: it keeps a service usable, it does not guard it.
pub trait Limiter {
    /// Counts a request under this key.
    fn ask<'a>(&'a self, key: &'a str) -> LocalBoxFuture<'a, Verdict>;
}

/// What a limiter says of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Allow,
    /// Too many; the next try makes sense after this time.
    Wait(Duration),
}

/// The key under which a request is counted; `None` is not counted. A key that a caller can choose
/// freely limits nobody.
pub type LimitKey = Rc<dyn Fn(&Head<'_>) -> Option<String>>;

/// Asks about one request.
pub(super) async fn ask(limiter: &dyn Limiter, key: &str) -> Result<()> {
    match limiter.ask(key).await {
        Verdict::Allow => Ok(()),
        Verdict::Wait(wait) => {
            let mut refused = Error::new(
                Code::RateLimited,
                "There were too many requests; come back later.",
            );
            // Up to the next whole second: a client that comes back must not be early.
            let seconds = wait
                .as_millis()
                .div_ceil(1_000)
                .clamp(1, u128::from(u32::MAX));
            refused.retry_after = u32::try_from(seconds).ok();
            Err(refused)
        }
    }
}
