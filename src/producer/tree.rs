//! `/tree`: the session's own snapshot and, below it, what each child tells of its own tree.
//! Implements the tree of section 5.
//!
//! Nothing is projected here: that is the mount's. A child that cannot be read keeps no one waiting
//! and takes nobody with it: it is a node with a reason.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use futures::future::{Either, FutureExt as _, join, select};
use futures::stream::StreamExt as _;

use super::Producer;
use super::descendants::{Unread, each_child};
use crate::error::{Code, Error, Result};
use crate::protocol::tree::{TreeBounds, TreeNode, TreeReason};
use crate::store::{SubLocation, SubSessionRecord};
use crate::transport::TransportError;

/// A tree is told within this for each of its levels: a child's is there before its parent's has to
/// be.
const LEVEL: Duration = Duration::from_secs(1);

/// What a child's answer may take on its way.
const WAY: Duration = Duration::from_millis(500);

impl Producer {
    pub(super) async fn tree(self: &Rc<Self>, bounds: TreeBounds) -> Result<TreeNode> {
        let refs = self.refs()?;
        let (mut node, depth) = (self.own_node()?, bounds.depth);
        // A ref that cannot be read names no child that could be asked.
        node.truncated |= !refs.malformed.is_empty();
        let room = Cell::new(bounds);
        let mut left = bounds;
        node.settle(&mut left);
        room.set(left);
        let levels = |depth: usize| LEVEL.saturating_mul(u32::try_from(depth).unwrap_or(u32::MAX));
        let over = self.runtime.sleep(levels(depth)).shared();
        let within = levels(depth.saturating_sub(1)).saturating_add(WAY);
        let mut children = Box::pin(each_child(refs.readable, |child| {
            let (asked, over) = (room.get().below(), over.clone());
            async move {
                let asked = asked?;
                let read = Box::pin(self.child_tree(&child, asked, within));
                Some(match select(read, over).await {
                    Either::Left((node, _)) => node,
                    Either::Right(_) => node_of(&child, TreeReason::Timeout),
                })
            }
        }));
        while let Some(child) = children.next().await {
            let mut left = room.get();
            let fits = match child {
                Some(child) => node.push(child, &mut left),
                None => false,
            };
            room.set(left);
            if !fits {
                node.truncated = true;
                break;
            }
        }
        Ok(node)
    }

    fn own_node(&self) -> Result<TreeNode> {
        self.read(|session| {
            let record = &session.record;
            TreeNode::of_snapshot(
                record.session_id.clone(),
                record.agent_type.clone(),
                Some(record.status),
                session.snapshot(),
            )
        })?
        .ok_or_else(Error::not_found)
    }

    /// What a child tells of its tree; of a peer that tells no trees, its own node.
    async fn child_tree(
        &self,
        child: &SubSessionRecord,
        bounds: TreeBounds,
        within: Duration,
    ) -> TreeNode {
        let id = &child.sub_session_id;
        let told = self
            .read_child(child, within, |transport| transport.tree(id, bounds))
            .await;
        let mut node = match told {
            Ok(node) if node.session_id == *id && node.agent_type == child.agent_type => node,
            Ok(_) => node_of(child, TreeReason::Malformed),
            Err(Unread::Failed(error)) if is_unserved(&error) => {
                self.child_snapshot(child, within).await
            }
            Err(unread) => node_of(child, reason(&unread)),
        };
        node.tool_call_id = Some(child.tool_call_id.clone());
        node.remote = Some(child.location == SubLocation::Remote);
        node
    }

    async fn child_snapshot(&self, child: &SubSessionRecord, within: Duration) -> TreeNode {
        let id = &child.sub_session_id;
        let (status, snapshot) = join(
            self.read_child(child, within, |transport| transport.status(id)),
            self.read_child(child, within, |transport| transport.snapshot(id)),
        )
        .await;
        match snapshot {
            Ok(snapshot) if snapshot.session_id != id.as_str() => {
                node_of(child, TreeReason::Malformed)
            }
            Ok(snapshot) => {
                let mut node = TreeNode::of_snapshot(
                    id.clone(),
                    child.agent_type.clone(),
                    status.ok().map(|answer| answer.status),
                    snapshot,
                );
                // Its children are not known.
                node.truncated = true;
                node
            }
            Err(unread) => node_of(child, reason(&unread)),
        }
    }
}

/// A child that could not be read.
fn node_of(child: &SubSessionRecord, reason: TreeReason) -> TreeNode {
    TreeNode {
        tool_call_id: Some(child.tool_call_id.clone()),
        remote: Some(child.location == SubLocation::Remote),
        ..TreeNode::without_state(
            child.sub_session_id.clone(),
            child.agent_type.clone(),
            reason,
        )
    }
}

/// Whether a peer may know the session but no trees. One that knows neither is told apart by the
/// next reading.
fn is_unserved(error: &TransportError) -> bool {
    match error {
        TransportError::Refused { status, .. } | TransportError::Unexplained { status } => {
            *status == 404
        }
        _ => false,
    }
}

fn reason(unread: &Unread) -> TreeReason {
    match unread {
        Unread::Late | Unread::Failed(TransportError::Timeout(_)) => TreeReason::Timeout,
        Unread::NoWay | Unread::Failed(TransportError::Unreachable(_)) => TreeReason::Unreachable,
        Unread::Failed(TransportError::Malformed(_) | TransportError::TooLarge(_)) => {
            TreeReason::Malformed
        }
        Unread::Failed(TransportError::Unexplained { status: 404 }) => TreeReason::NotFound,
        Unread::Failed(TransportError::Refused {
            status, envelope, ..
        }) => match envelope.known_code() {
            Some(Code::NotFound) => TreeReason::NotFound,
            _ if *status >= 500 || *status == 429 => TreeReason::Unreachable,
            _ => TreeReason::Refused,
        },
        Unread::Failed(
            TransportError::Unexplained { .. }
            | TransportError::VersionUnsupported { .. }
            | TransportError::ProjectedMount,
        ) => TreeReason::Refused,
    }
}
