//! The tree of snapshots: its nodes, and how much of a tree one answer holds.
//!
//! Implements the tree of section 5. Every hop cuts a tree with [`TreeNode::bounded`], so that the
//! bounds hold for the whole of it, whatever a service further down answers.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ids::{AgentType, Position, Sequence, SessionId};
use super::message::{SessionStatus, SnapshotResponse};
use super::request::{DEPTH_LIMIT, too_deep};

#[cfg(test)]
mod tests;

/// How much of a tree is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeBounds {
    /// Levels, the asked session's own included; at least 1.
    pub depth: usize,
    /// Nodes; at least 1.
    pub nodes: usize,
    /// Bytes of the answer; at least [`TreeBounds::FEWEST_BYTES`].
    pub bytes: usize,
}

impl TreeBounds {
    /// The bounds of a tree, and what they are where a request does not lower them: 8 levels, 256
    /// nodes, 4 MiB.
    pub const MOST: Self = Self {
        depth: 8,
        nodes: 256,
        bytes: 4 * 1024 * 1024,
    };

    /// Room for one node without its state, in bytes (4 KiB).
    pub const FEWEST_BYTES: usize = 4096;

    /// What is left for a child; `None` when not even its own node would fit.
    #[must_use]
    pub fn below(self) -> Option<Self> {
        let depth = self.depth.checked_sub(1).filter(|depth| *depth > 0)?;
        (self.nodes > 0 && self.bytes >= Self::FEWEST_BYTES).then_some(Self { depth, ..self })
    }
}

/// Why a node has no state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TreeReason {
    /// The mount does not show sessions of this type.
    NotServed,
    /// It could not be read in time.
    Timeout,
    /// There was no answer, or its service failed.
    Unreachable,
    /// Its service does not know it: it never began there, or is deleted.
    NotFound,
    /// Its service refused the reading, or shows less than the state.
    Refused,
    /// What was answered cannot be read.
    Malformed,
    /// The state has no room in the answer, or is nested too deeply for one.
    TooLarge,
    /// A reason that this version does not know.
    #[serde(other)]
    Unknown,
}

/// A session in a tree, with its snapshot: each node is pinned by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TreeNode {
    /// The session.
    pub session_id: SessionId,
    /// Its agent type.
    pub agent_type: AgentType,
    /// Where it stands, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<SessionStatus>,
    /// The parent's call that made it; absent at the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Whether it lives in another service than its parent; absent at the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<bool>,
    /// The stream that the position belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_id: Option<String>,
    /// As in a snapshot; absent where there is a [`Self::reason`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<Value>,
    /// As in a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_sequence: Option<Position>,
    /// As in a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_retained_sequence: Option<Sequence>,
    /// As in a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_count: Option<u64>,
    /// As in a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_id: Option<String>,
    /// As in a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch_ordinal: Option<u64>,
    /// As in a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub projection: Option<String>,
    /// Why there is no state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<TreeReason>,
    /// Whether something is left out in this node or below it: for a bound, or because a peer could
    /// not tell its children.
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub truncated: bool,
    /// The children, in the order in which they were called.
    #[serde(default)]
    pub children: Vec<TreeNode>,
}

impl TreeNode {
    /// A node without state.
    #[must_use]
    pub fn without_state(session: SessionId, agent_type: AgentType, reason: TreeReason) -> Self {
        Self {
            session_id: session,
            agent_type,
            status: None,
            tool_call_id: None,
            remote: None,
            stream_id: None,
            state: None,
            stream_sequence: None,
            oldest_retained_sequence: None,
            step_count: None,
            checkpoint_id: None,
            patch_ordinal: None,
            projection: None,
            reason: Some(reason),
            truncated: false,
            children: Vec::new(),
        }
    }

    /// The node of a session with this snapshot, without children.
    #[must_use]
    pub fn of_snapshot(
        session: SessionId,
        agent_type: AgentType,
        status: Option<SessionStatus>,
        snapshot: SnapshotResponse,
    ) -> Self {
        Self {
            status,
            stream_id: Some(snapshot.stream_id),
            state: Some(snapshot.state),
            stream_sequence: Some(snapshot.stream_sequence),
            oldest_retained_sequence: Some(snapshot.oldest_retained_sequence),
            step_count: Some(snapshot.step_count),
            checkpoint_id: snapshot.checkpoint_id,
            patch_ordinal: snapshot.patch_ordinal,
            projection: snapshot.projection,
            reason: None,
            ..Self::without_state(session, agent_type, TreeReason::Unknown)
        }
    }

    /// Takes the snapshot out of the node. What is left tells who it is and where it stands.
    pub fn hide(&mut self, reason: TreeReason) {
        *self = Self {
            status: self.status,
            tool_call_id: self.tool_call_id.take(),
            remote: self.remote,
            truncated: self.truncated,
            children: std::mem::take(&mut self.children),
            ..Self::without_state(self.session_id.clone(), self.agent_type.clone(), reason)
        };
    }

    /// Checks what types cannot: a node has a state or says why not. Nothing else is a node.
    ///
    /// # Errors
    /// A sentence that quotes nothing.
    pub fn check(&self) -> Result<(), String> {
        if self.state.is_none() && self.reason.is_none() {
            return Err("a node has neither a state nor a reason".into());
        }
        self.children.iter().try_for_each(Self::check)
    }

    /// As much of the tree as fits, the node itself in any case: nodes in the order of the tree,
    /// first those above and then those that were called first. A state for which there is no room
    /// is left out by itself.
    #[must_use]
    pub fn bounded(mut self, bounds: TreeBounds) -> Self {
        let children = std::mem::take(&mut self.children);
        let mut room = bounds;
        self.settle(&mut room);
        self.adopt(children, &mut room);
        self
    }

    /// Gives these children to the node, as many as fit. `room` has the node's own depth.
    fn adopt(&mut self, children: Vec<Self>, room: &mut TreeBounds) {
        for child in children {
            if !self.push(child, room) {
                break;
            }
        }
    }

    /// Makes the node fit without its children, and takes its room. Whether it fits now.
    pub fn settle(&mut self, room: &mut TreeBounds) -> bool {
        if self
            .state
            .as_ref()
            .is_some_and(|s| too_deep(s, DEPTH_LIMIT))
        {
            self.leave_out_state();
        }
        let mut size = self.size();
        if size > room.bytes && self.state.is_some() {
            self.leave_out_state();
            size = self.size();
        }
        let fits = room.nodes > 0 && size <= room.bytes;
        room.nodes = room.nodes.saturating_sub(1);
        room.bytes = room.bytes.saturating_sub(size);
        fits
    }

    /// Adds a child with what fits of the tree below it, and takes its room; whether it fitted. A
    /// child that did not marks the node as truncated.
    pub fn push(&mut self, mut child: Self, room: &mut TreeBounds) -> bool {
        let children = std::mem::take(&mut child.children);
        let depth = room.depth;
        room.depth = depth.saturating_sub(1);
        let fits = room.depth > 0 && child.settle(room);
        if fits {
            child.adopt(children, room);
            self.truncated |= child.truncated;
            self.children.push(child);
        } else {
            self.truncated = true;
        }
        room.depth = depth;
        fits
    }

    fn leave_out_state(&mut self) {
        self.hide(TreeReason::TooLarge);
        self.truncated = true;
    }

    /// Bytes of the node alone in an answer, a comma and the mark of something left out included.
    fn size(&self) -> usize {
        const MARK: usize = ",\"truncated\":true,".len();
        debug_assert!(self.children.is_empty());
        serde_json::to_vec(self).map_or(usize::MAX, |json| json.len().saturating_add(MARK))
    }
}
