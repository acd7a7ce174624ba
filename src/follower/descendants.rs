//! The sessions that a trimmed log no longer announces: the tree route tells them.

use futures::future::LocalBoxFuture;
use std::rc::Rc;

use super::reading::Arrival;
use super::{Follower, FollowerEvent, MOST_NODES, SNAPSHOT_RETRIES, wait};
use crate::protocol::ids::Sequence;
use crate::protocol::message::SessionStatus;
use crate::protocol::tree::{TreeBounds, TreeNode};

impl Follower {
    /// A log that begins behind its first chunk may have announced sessions before.
    pub(super) fn mind_floor(&mut self, floor: Sequence) {
        self.wants_tree |= floor > 1;
    }

    /// Begins to read the tree, with retries, where the log is not enough.
    pub(super) fn ask_for_tree(&mut self) {
        if !std::mem::take(&mut self.wants_tree) {
            return;
        }
        let Some(root) = self.nodes.first() else {
            return;
        };
        let transport = (self.routes)(&root.agent_type);
        let (session, runtime, backoff) =
            (root.session.clone(), Rc::clone(&self.runtime), self.backoff);
        let read: LocalBoxFuture<'static, Arrival> = Box::pin(async move {
            let mut failures = 0;
            loop {
                match transport.tree(&session, TreeBounds::MOST).await {
                    Err(error) if error.may_pass() && failures < SNAPSHOT_RETRIES => {
                        runtime.sleep(wait(backoff, failures, &error)).await;
                        failures = failures.saturating_add(1);
                    }
                    result => return Arrival::Tree(result),
                }
            }
        });
        self.reading.push(read);
    }

    /// Opens a document for each session of the tree that is not followed yet, parents first.
    pub(super) fn grown(&mut self, tree: TreeNode) {
        let mut rest: Vec<(Option<String>, TreeNode)> = vec![(None, tree)];
        while let Some((parent, node)) = rest.pop() {
            let id = node.session_id.to_string();
            if !self.places.contains_key(&id) && self.nodes.len() < MOST_NODES {
                let remote = node.remote == Some(true);
                let place = self.add(
                    node.session_id,
                    node.agent_type,
                    parent,
                    node.tool_call_id,
                    remote,
                );
                if let Some(added) = self.nodes.get_mut(place) {
                    added.succeeded = succeeded(node.status);
                    added.document.boundary();
                }
                self.told.push_back(FollowerEvent::Node(place));
            }
            let children = node.children.into_iter().rev();
            rest.extend(children.map(|child| (Some(id.clone()), child)));
        }
    }
}

/// How a call ended, by where its session stands.
fn succeeded(status: Option<SessionStatus>) -> Option<bool> {
    match status? {
        SessionStatus::Completed => Some(true),
        SessionStatus::Failed => Some(false),
        _ => None,
    }
}
