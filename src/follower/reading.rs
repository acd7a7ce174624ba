//! The readings under way: a few snapshots at once, and the tree.

use std::rc::Rc;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;

use super::{Follower, FollowerEvent, SNAPSHOT_RETRIES, wait};
use crate::protocol::ids::Position;
use crate::protocol::message::SnapshotResponse;
use crate::protocol::tree::TreeNode;
use crate::transport::TransportError;

/// What comes of a reading.
pub(super) enum Arrival {
    Snapshot(Read),
    Tree(Result<TreeNode, TransportError>),
}

/// A snapshot that was read, or not; and whether the session had ended before.
pub(super) struct Read {
    pub(super) node: usize,
    pub(super) truncations: u64,
    pub(super) result: Result<(SnapshotResponse, bool), TransportError>,
}

impl Follower {
    /// Begins to read the snapshots that are wanted, a few at once.
    pub(super) fn ask(&mut self) {
        self.ask_for_tree();
        for place in 0..self.nodes.len() {
            if self.reading.len() >= self.snapshots_at_once {
                return;
            }
            let wanted = self
                .nodes
                .get_mut(place)
                .is_some_and(|node| node.document.take_request());
            if wanted {
                let read = self.read(place).map(Arrival::Snapshot);
                self.reading.push(Box::pin(read));
            }
        }
    }

    pub(super) fn arrived(&mut self, arrival: Arrival) {
        let read = match arrival {
            Arrival::Snapshot(read) => read,
            Arrival::Tree(Ok(tree)) => return self.grown(tree),
            Arrival::Tree(Err(error)) => {
                return self.told.push_back(FollowerEvent::NoTree { error });
            }
        };
        if read.node == 0 && read.truncations != self.truncations {
            return;
        }
        let Some(node) = self.nodes.get_mut(read.node) else {
            return;
        };
        match read.result {
            Ok((snapshot, ended)) => {
                node.document.baseline(&snapshot, ended);
                self.told.push_back(FollowerEvent::Document(read.node));
                if read.node == 0 && self.last.is_none() {
                    self.rebased(&snapshot);
                }
            }
            Err(error) => {
                node.document.no_snapshot();
                self.told.push_back(FollowerEvent::NoSnapshot {
                    node: read.node,
                    error,
                });
            }
        }
    }

    /// Reads a node's status and snapshot, with retries. In this order: a session that goes on in
    /// between is read with a position. One that ends in between has none, as one whose log is cut
    /// inside a step: its status is read again then, and behind an end its snapshot.
    pub(super) fn read(&self, place: usize) -> LocalBoxFuture<'static, Read> {
        let runtime = Rc::clone(&self.runtime);
        let (backoff, truncations) = (self.backoff, self.truncations);
        let node = self.nodes.get(place).map(|node| {
            let transport = (self.routes)(&node.agent_type);
            (node.session.clone(), transport)
        });
        Box::pin(async move {
            let Some((session, transport)) = node else {
                let error = TransportError::Malformed("no such node".into());
                return Read {
                    node: place,
                    truncations,
                    result: Err(error),
                };
            };
            let mut failures = 0;
            loop {
                // A call may be over before its session has ended: the status alone tells.
                let has_ended = async || -> Result<bool, TransportError> {
                    let status = transport.status(&session).await?.status;
                    Ok(status.is_terminal())
                };
                let read = async {
                    let ended = has_ended().await?;
                    let snapshot = transport.snapshot(&session).await?;
                    let is_pinned = snapshot.stream_sequence != Position::None;
                    if ended || is_pinned || !has_ended().await? {
                        return Ok::<_, TransportError>((snapshot, ended));
                    }
                    Ok((transport.snapshot(&session).await?, true))
                };
                match read.await {
                    Err(error) if error.may_pass() && failures < SNAPSHOT_RETRIES => {
                        runtime.sleep(wait(backoff, failures, &error)).await;
                        failures = failures.saturating_add(1);
                    }
                    result => {
                        return Read {
                            node: place,
                            truncations,
                            result,
                        };
                    }
                }
            }
        })
    }
}
