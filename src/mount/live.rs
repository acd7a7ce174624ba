//! Live projected state: what a committed step changed in the projection.
//!
//! Pure, and of the two neighbouring checkpoints alone: whoever reads the step again reads the same
//! bytes. Section 9 of the contract, at its end.

use serde::Serialize;
use serde_json::Value;

use crate::protocol::END_STATE_LIMIT;
use crate::protocol::chunk::PatchOperation;
use crate::protocol::neighbours::{Before, Neighbours};
use crate::session::patch;

/// A diff up to this size is sent even where the document itself is smaller, in bytes: it tells
/// what has changed.
const SMALL_DIFF: usize = 1024;

/// The patch from the projection before the step to the one after it, through `shown`; none where
/// the projection is too large to be sent with a chunk.
///
/// Where readers may have had different states before, and where the diff would be larger than the
/// document, it replaces the document as a whole.
pub(super) fn patches(
    neighbours: &Neighbours,
    shown: impl Fn(&Value) -> Value,
) -> Option<Vec<PatchOperation>> {
    let after = shown(&neighbours.after);
    let limit = size(&after);
    if limit > END_STATE_LIMIT {
        return None;
    }
    if let Before::State(before) = &neighbours.before {
        let patches = patch::diff(&shown(before), &after);
        if size(&patches) <= limit.max(SMALL_DIFF) {
            return Some(patches);
        }
    }
    Some(vec![PatchOperation {
        op: "replace".to_owned(),
        path: String::new(),
        from: None,
        value: Some(after),
    }])
}

fn size(value: &impl Serialize) -> usize {
    serde_json::to_string(value).map_or(usize::MAX, |text| text.len())
}
