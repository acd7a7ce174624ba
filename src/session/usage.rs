//! The usage rollup: what a session and everything below it has spent.
//!
//! Pure: the caller has made the reads of live children. A child counts once, whatever the ledger
//! says twice; nothing that is known is left out, and what is not known makes the rollup partial.
//! Section 8 of the contract.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::protocol::ids::{SessionId, Timestamp};
use crate::protocol::usage::{
    OwnUsage, RollupOrigin, SubAgentUsage, SubAgents, Tokens, ToolUsage, UsageRollup,
};
use crate::store::UsageRecord;

/// What is known of one direct child beside the ledger: its ref, and a read of it if one was made.
#[derive(Clone, Debug, PartialEq)]
pub struct ChildUsage {
    /// The child's session id.
    pub sub_session_id: String,
    /// The child's agent type.
    pub agent_type: String,
    /// The call.
    pub tool_call_id: String,
    /// Whether the call has its result: the child's numbers will not change any more.
    pub settled: bool,
    /// The child's rollup, read just now. It is preferred to any that the ledger embeds.
    pub live: Option<UsageRollup>,
    /// When the ref was made.
    pub created_at: Timestamp,
}

/// The recursive rollup of a session.
///
/// The sums are the session's own `entries` and one rollup for each child session, found in
/// `children` or in the ledger alone (an orphan: what it spent is spent). Of a child the live read
/// counts; without one the embedded rollup that ranks highest: `recovery` above `end`, then the
/// later timestamp, then the later entry. A sub-agent call counts as a tool call, by the entry of
/// its tool, and in `sub_agents.calls`. The rollup is partial unless every child is settled and
/// its rollup is known and whole; an orphan has no ref that could be open and counts as settled.
/// Custom counters add up where they are numbers.
#[must_use]
pub fn rollup(
    session_id: &SessionId,
    created_at: Timestamp,
    updated_at: Timestamp,
    steps: u64,
    entries: &[UsageRecord],
    children: &[ChildUsage],
) -> UsageRollup {
    let (own, by_model) = own_usage(steps, entries);
    let (sessions, calls) = child_sessions(entries, children);
    let mut sum = UsageRollup {
        session_id: session_id.as_str().to_owned(),
        tokens: own.tokens,
        by_model,
        tools: own.tools.clone(),
        sub_agents: SubAgents {
            calls,
            sessions: Vec::new(),
        },
        steps: own.steps,
        custom: BTreeMap::new(),
        partial: false,
        own: Some(own),
        started_at: created_at,
        updated_at,
    };
    for child in &sessions {
        sum.partial |= !child.settled;
        match &child.remote_rollup {
            Some(rollup) => add(&mut sum, rollup),
            None => sum.partial = true,
        }
    }
    sum.sub_agents.sessions = sessions;
    sum
}

fn own_usage(steps: u64, entries: &[UsageRecord]) -> (OwnUsage, BTreeMap<String, Tokens>) {
    let mut own = OwnUsage {
        steps,
        ..OwnUsage::default()
    };
    let mut by_model: BTreeMap<String, Tokens> = BTreeMap::new();
    for entry in entries {
        match entry {
            UsageRecord::Model { model, tokens, .. } => {
                own.tokens.add(tokens);
                by_model.entry(model.clone()).or_default().add(tokens);
            }
            UsageRecord::Tool { name, success, .. } => own.tools.add(&ToolUsage {
                calls: 1,
                failures: u64::from(!success),
                by_tool: BTreeMap::from([(name.clone(), 1)]),
            }),
            UsageRecord::SubAgent { .. } => {}
        }
    }
    (own, by_model)
}

/// One entry for each direct child, in the order in which they are first met, and the number of
/// sub-agent calls of the session itself.
fn child_sessions(entries: &[UsageRecord], children: &[ChildUsage]) -> (Vec<SubAgentUsage>, u64) {
    let mut order = Vec::new();
    let mut known: BTreeMap<&str, Child> = BTreeMap::new();
    let mut calls = BTreeSet::new();
    for child in children {
        calls.insert(child.tool_call_id.as_str());
        let one = known.entry(&child.sub_session_id).or_insert_with(|| {
            order.push(child.sub_session_id.as_str());
            Child::new(
                &child.sub_session_id,
                &child.agent_type,
                &child.tool_call_id,
                child.created_at,
                Kind::Referred,
            )
        });
        one.usage.settled &= child.settled;
        if let Some(rollup) = &child.live {
            one.usage.remote_rollup = Some(Box::new(rollup.clone()));
            // Of a child whose call has its result, this is what a recovery would have read.
            one.usage.remote_rollup_origin = child.settled.then_some(RollupOrigin::Recovery);
            one.kind = Kind::Read;
        }
    }
    for entry in entries {
        let UsageRecord::SubAgent {
            sub_session_id,
            sub_agent_type,
            tool_call_id,
            rollup,
            origin,
            at,
        } = entry
        else {
            continue;
        };
        calls.insert(tool_call_id.as_str());
        let one = known.entry(sub_session_id).or_insert_with(|| {
            order.push(sub_session_id.as_str());
            Child::new(
                sub_session_id,
                sub_agent_type,
                tool_call_id,
                *at,
                Kind::Orphan,
            )
        });
        match (rollup, one.kind) {
            (None, _) | (_, Kind::Read) => {}
            (Some(rollup), Kind::Referred | Kind::Orphan) => {
                embed(&mut one.usage, rollup, *origin, *at);
            }
        }
    }
    let sessions = order
        .iter()
        .filter_map(|id| known.remove(id))
        .map(|child| child.usage)
        .collect();
    (sessions, u64::try_from(calls.len()).unwrap_or(u64::MAX))
}

/// A direct child while its entries are gathered.
struct Child {
    usage: SubAgentUsage,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    /// There is a ref; its rollup comes from the ledger.
    Referred,
    /// There is a ref and a read of the child, which nothing in the ledger outranks.
    Read,
    /// The ledger alone knows it.
    Orphan,
}

impl Child {
    fn new(id: &str, agent_type: &str, call: &str, timestamp: Timestamp, kind: Kind) -> Self {
        Self {
            usage: SubAgentUsage {
                sub_session_id: id.to_owned(),
                sub_agent_type: agent_type.to_owned(),
                tool_call_id: call.to_owned(),
                // An orphan has no ref that could be open: what is known of it is its last word.
                settled: true,
                remote_rollup: None,
                remote_rollup_origin: None,
                timestamp,
            },
            kind,
        }
    }
}

/// Keeps the embedded rollup that ranks highest; of equals the later entry.
fn embed(session: &mut SubAgentUsage, rollup: &UsageRollup, origin: RollupOrigin, at: Timestamp) {
    let rank = session
        .remote_rollup_origin
        .map(|origin| (origin, session.timestamp));
    if rank <= Some((origin, at)) {
        session.remote_rollup = Some(Box::new(rollup.clone()));
        session.remote_rollup_origin = Some(origin);
        session.timestamp = at;
    }
}

fn add(sum: &mut UsageRollup, child: &UsageRollup) {
    sum.tokens.add(&child.tokens);
    for (model, tokens) in &child.by_model {
        sum.by_model.entry(model.clone()).or_default().add(tokens);
    }
    sum.tools.add(&child.tools);
    sum.sub_agents.calls = sum.sub_agents.calls.saturating_add(child.sub_agents.calls);
    sum.steps = sum.steps.saturating_add(child.steps);
    sum.partial |= child.partial;
    for (name, value) in &child.custom {
        if let Some(added) = added(sum.custom.get(name).unwrap_or(&Value::from(0)), value) {
            sum.custom.insert(name.clone(), added);
        }
    }
}

fn added(left: &Value, right: &Value) -> Option<Value> {
    match (left.as_u64(), right.as_u64()) {
        (Some(left), Some(right)) => Some(left.saturating_add(right).into()),
        _ => Some((left.as_f64()? + right.as_f64()?).into()),
    }
}

#[cfg(test)]
mod tests;
