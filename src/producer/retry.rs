//! When a model is asked again after an attempt that failed.
//!
//! The log is what remembers: each retry was said there before it was waited for. An execution that
//! takes a run over counts on from the last one, and waits for what is left of its wait.

use std::time::Duration;

use futures::future::select;
use serde_json::Value;

use super::Producer;
use crate::agent::StopSignal;
use crate::agent::model::{ModelError, ModelPolicy};
use crate::error::{Error, Result};
use crate::protocol::ids::{Timestamp, millis};
use crate::session::RETRY_EVENT;
use crate::store::PageLimit;

/// Chunks that are looked at together.
const PAGE: PageLimit = PageLimit {
    chunks: 512,
    bytes: 256 * 1024,
};

/// The retries of the present step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Retries {
    /// How many there were; the attempt to come is the last of them.
    pub(super) made: u32,
    /// When the attempt to come may be made.
    pub(super) at: Timestamp,
}

impl Retries {
    /// The retry after this failure; `None` when there is none.
    pub(super) fn after(
        self,
        error: &ModelError,
        policy: &ModelPolicy,
        now: Timestamp,
    ) -> Option<Self> {
        let made = usize::try_from(self.made).ok()?;
        let wait = policy
            .retry_waits
            .get(made)
            .filter(|_| error.kind.may_pass())?;
        let asked = Duration::from_secs(error.retry_after.map_or(0, u64::from));
        (asked <= policy.longest_wait).then(|| Self {
            made: self.made.saturating_add(1),
            at: now.saturating_add(millis(asked.max(*wait))),
        })
    }
}

impl Producer {
    /// The retries of the present step in the present run, as the log tells them.
    pub(super) fn retries(&self) -> Result<Retries> {
        let (checkpoint, last) = self
            .read(|session| {
                let record = &session.record;
                (session.checkpoint.stream_sequence, record.last_sequence)
            })?
            .ok_or_else(Error::not_found)?;
        let mut from = checkpoint.max(self.latest_run()?.start_sequence);
        let mut retries = Retries::default();
        while from < last {
            let before = from;
            self.store
                .each_chunk(before, last, PAGE, &mut |sequence, chunk| {
                    from = sequence;
                    retries = told(chunk).unwrap_or(retries);
                })?;
            if from == before {
                break;
            }
        }
        Ok(retries)
    }

    /// Waits until the next attempt may be made; `false` when a stop ends the wait.
    pub(super) async fn wait_for_retry(
        &self,
        retries: &Retries,
        policy: &ModelPolicy,
        stop: &StopSignal,
    ) -> bool {
        let wait = Duration::from_millis(retries.at.saturating_sub(self.now()));
        if wait.is_zero() {
            return true;
        }
        // A clock that was set back must not make a wait longer than any can be.
        let longest = policy
            .retry_waits
            .iter()
            .fold(policy.longest_wait, |a, b| a.max(*b));
        let slept = self.runtime.sleep(wait.min(longest));
        select(slept, Box::pin(stop.wait())).await;
        !stop.is_set()
    }
}

/// The retry that a chunk of the log tells, if it is the session's own and tells one.
fn told(chunk: &str) -> Option<Retries> {
    if !chunk.contains(RETRY_EVENT) {
        return None;
    }
    let chunk: Value = serde_json::from_str(chunk).ok()?;
    let text = |field: &str| chunk.get(field).and_then(Value::as_str);
    if (text("type"), text("eventName")) != (Some("custom"), Some(RETRY_EVENT))
        || chunk.get("remoteSource").is_some()
    {
        return None;
    }
    let number = |field: &str| chunk.get("data")?.get(field)?.as_u64();
    Some(Retries {
        made: u32::try_from(number("retry")?).ok()?,
        at: number("at")?,
    })
}
