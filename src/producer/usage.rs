//! `/usage` and the rollup of a terminal frame: own entries, settled children from their records,
//! live children by one read each. Implements section 8.

use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;

use super::Producer;
use super::descendants::each_child;
use crate::error::{Error, Result};
use crate::platform::Level;
use crate::protocol::message::SessionStatus;
use crate::protocol::usage::UsageRollup;
use crate::session::usage::{ChildUsage, rollup};
use crate::store::{SubSessionRecord, SubStatus, UsageRecord};

/// How long the read of one live child may take.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

impl Producer {
    /// The recursive rollup as of now; or, for a run that is about to settle, as of its end with
    /// the steps that the settling commit adds.
    pub(super) async fn usage_rollup(self: &Rc<Self>, ending: Option<u64>) -> Result<UsageRollup> {
        let refs = self.refs()?;
        let mut whole = refs.malformed.is_empty();
        // A ledger that cannot be read must not keep a run from ending: what is known is told.
        let entries = match self.store.usage() {
            Err(error) if ending.is_some() => {
                whole = false;
                self.log(
                    Level::Warn,
                    "usage_unreadable",
                    &[("error", &error.message)],
                );
                Vec::new()
            }
            entries => entries?,
        };
        let children = each_child(refs.readable, |child| {
            let is_told = is_told_whole(&entries, &child);
            self.child_usage(child, is_told)
        })
        .collect::<Vec<_>>()
        .await;
        let record = self
            .read(|session| session.record.clone())?
            .ok_or_else(Error::not_found)?;
        let updated_at = if ending.is_some() {
            self.now()
        } else {
            record.updated_at
        };
        let mut sum = rollup(
            &record.session_id,
            record.created_at,
            updated_at,
            record.step_count.saturating_add(ending.unwrap_or(0)),
            &entries,
            &children,
        );
        sum.partial = sum.partial || !whole;
        // A run that is under way may spend more.
        sum.partial = sum.partial || (ending.is_none() && record.status == SessionStatus::Running);
        Ok(sum)
    }

    /// `is_told` says that the ledger holds the child's last word.
    async fn child_usage(&self, child: SubSessionRecord, is_told: bool) -> ChildUsage {
        let settled = matches!(child.status, SubStatus::Completed | SubStatus::Failed);
        let live = if settled && is_told {
            None
        } else {
            self.read_child_usage(&child).await
        };
        ChildUsage {
            sub_session_id: child.sub_session_id.to_string(),
            agent_type: child.agent_type.to_string(),
            tool_call_id: child.tool_call_id,
            settled,
            live,
            created_at: child.created_at,
        }
    }

    async fn read_child_usage(&self, child: &SubSessionRecord) -> Option<UsageRollup> {
        let id = &child.sub_session_id;
        let answer = self
            .read_child(child, READ_TIMEOUT, |transport| transport.usage(id))
            .await
            .ok()?;
        crate::dispatch::rollup(&answer.rollup).ok()
    }
}

/// Whether the ledger holds a rollup of the child's to which nothing can be added. A call that was
/// stopped or failed may have settled while its child, or a child of that, was still at work.
fn is_told_whole(entries: &[UsageRecord], child: &SubSessionRecord) -> bool {
    entries.iter().any(|entry| match entry {
        UsageRecord::SubAgent {
            sub_session_id,
            rollup: Some(rollup),
            ..
        } => sub_session_id == child.sub_session_id.as_str() && !rollup.partial,
        _ => false,
    })
}
