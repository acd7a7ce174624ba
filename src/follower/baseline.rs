//! Where a follower's stream is read on behind a new baseline of the root.

use super::{Follower, FollowerEvent};
use crate::error::Code;
use crate::protocol::frame::{ErrorFrame, Frame};
use crate::protocol::ids::{Position, Sequence, StreamId};
use crate::protocol::message::SnapshotResponse;
use crate::reconstruct::Document;

impl Follower {
    pub(super) fn is_another_life(&self, snapshot: &SnapshotResponse) -> bool {
        let stream = self.stream.as_ref();
        stream.is_some_and(|stream| stream.as_str() != snapshot.stream_id)
    }

    /// Nothing but the root is left of the life before; its snapshots may still come.
    pub(super) fn restart(&mut self, snapshot: &SnapshotResponse) {
        self.reading.clear();
        self.nodes.truncate(1);
        self.places.retain(|_, place| *place == 0);
        self.stream = StreamId::parse(&snapshot.stream_id).ok();
        self.told.push_back(FollowerEvent::Restarted);
    }

    /// The log is read from its first chunk that is kept.
    pub(super) fn read_from_floor(&mut self, floor: Sequence) {
        self.cursor = Position::At(floor.saturating_sub(1));
        self.mind_floor(floor);
    }

    /// Where the log no longer holds what follows the root's baseline, ordinals tell what is missing.
    /// Without them the document waits for its next boundary.
    pub(super) fn mind_hole(&mut self, snapshot: &SnapshotResponse) {
        let Some(root) = self.nodes.first_mut() else {
            return;
        };
        if snapshot.patch_ordinal.is_none() && is_holed(&root.document, snapshot) {
            root.document.observe_end(&Frame::Error(ErrorFrame {
                run_id: None,
                code: Code::Truncated.as_str().into(),
                error: "What follows the baseline is not in the log.".into(),
                detail: None,
                recoverable: false,
                floor: None,
                stream_id: None,
            }));
            let _ = root.document.take_request();
            root.document.no_snapshot();
        }
    }

    /// The root has a new baseline while its stream is read.
    pub(super) fn rebased(&mut self, snapshot: &SnapshotResponse) {
        if self.is_another_life(snapshot) {
            self.restart(snapshot);
            self.read_from_floor(snapshot.oldest_retained_sequence);
            self.frames = None;
        }
        self.mind_hole(snapshot);
        let Some(root) = self.nodes.first() else {
            return;
        };
        let at = root.document.attach_at();
        let is_behind = at.sequence().is_some() && at.sequence() < self.cursor.sequence();
        if is_behind && !is_holed(&root.document, snapshot) {
            // What came while the document was stale is read again, behind the new baseline.
            self.cursor = at;
            self.frames = None;
        }
    }
}

/// Whether the log no longer holds all that follows the document's baseline.
fn is_holed(document: &Document, snapshot: &SnapshotResponse) -> bool {
    let at = document.attach_at().sequence();
    at.is_some_and(|at| at.saturating_add(1) < snapshot.oldest_retained_sequence)
}
