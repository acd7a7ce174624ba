//! The bounds of a run that are not counted in steps: how long it may take, and what it may spend.

use std::rc::Rc;
use std::time::Duration;

use futures::future::{Either, select};

use super::run::failure;
use super::{Halt, Producer};
use crate::agent::{Agent, StopSignal};
use crate::error::{Code, Error, Result};
use crate::protocol::ids::millis;
use crate::protocol::message::SessionStatus;
use crate::session::usage::rollup;
use crate::store::{Epoch, RunRecord, UsageRecord};

impl Producer {
    /// Runs the session until it settles, or until the run has taken as long as it may: then it is
    /// ended where it stands.
    pub(super) async fn within_time(
        self: &Rc<Self>,
        epoch: Epoch,
        agent: &Rc<Agent>,
        stop: &StopSignal,
    ) -> Result<(), Halt> {
        let Some(most) = agent.limits.max_run_time else {
            return self.steps(epoch, agent, stop).await;
        };
        let end = self.latest_run()?.started_at.saturating_add(millis(most));
        let left = end.saturating_sub(self.now());
        if left > 0 {
            let steps = Box::pin(self.steps(epoch, agent, stop));
            match select(steps, self.runtime.sleep(Duration::from_millis(left))).await {
                Either::Left((ended, _)) => return ended,
                Either::Right((_, steps)) => drop(steps),
            }
        }
        // A task that a tool has left behind hears of it as well.
        stop.set();
        self.out_of_time(epoch, most).await
    }

    async fn out_of_time(self: &Rc<Self>, epoch: Epoch, most: Duration) -> Result<(), Halt> {
        if self.read(|session| session.record.status)? != Some(SessionStatus::Running) {
            return Ok(());
        }
        let sentence = format!("The run took longer than {} s.", most.as_secs_f64());
        self.fail(epoch, failure(Code::RunTimeout, &sentence)).await
    }

    /// What a run has spent so far, with the children whose calls have settled in it.
    pub(super) fn tokens_of_run(&self, run: &RunRecord) -> Result<u64> {
        let mut entries = self.store.usage()?;
        entries.retain(|entry| {
            let (UsageRecord::Model { at, .. }
            | UsageRecord::Tool { at, .. }
            | UsageRecord::SubAgent { at, .. }) = entry;
            *at >= run.started_at
        });
        let id = self
            .read(|session| session.record.session_id.clone())?
            .ok_or_else(Error::not_found)?;
        let tokens = rollup(&id, run.started_at, run.started_at, 0, &entries, &[]).tokens;
        let parts = tokens.prompt.saturating_add(tokens.completion);
        Ok(tokens.total.max(parts))
    }
}
