//! Trims the log by the agent's policy, in commits that are made anyway.

use super::Producer;
use crate::error::Result;
use crate::platform::Level;
use crate::session::{Retention, SPANS_AT_ONCE, Transition, retention};

impl Producer {
    /// The transition, with a trim in its commit where the agent's policy allows or demands one. A
    /// log that cannot be looked at is no reason to lose a commit: it is kept as it is, and told.
    pub(super) fn within_retention(&self, transition: Transition) -> Transition {
        let agent = self.agents.find(transition.next.record.agent_type.as_str());
        let Some(policy) = agent.map(|agent| agent.retention) else {
            return transition;
        };
        // The hard cap holds inside a step as well.
        let is_due = transition.is_boundary() || policy.hard_max_bytes.is_some();
        if policy.keeps_all() || !is_due {
            return transition;
        }
        match self.floor(&policy, &transition) {
            Ok(Some(floor)) => transition.trimmed(floor),
            Ok(None) => transition,
            Err(error) => {
                let fields = [("code", error.code.as_str()), ("error", &*error.message)];
                self.log(Level::Error, "log_not_trimmed", &fields);
                transition
            }
        }
    }

    fn floor(&self, policy: &Retention, transition: &Transition) -> Result<Option<u64>> {
        let stats = transition.log_afterwards(self.store.log_stats(SPANS_AT_ONCE)?);
        Ok(retention(policy, &transition.next, &stats, self.now()))
    }
}
