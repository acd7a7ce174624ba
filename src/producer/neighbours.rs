//! The states on either side of a committed step, for a mount that shows live projected state.
//!
//! They come from the kept checkpoints alone, so a reader that comes back with any cursor is told
//! the same. What is not kept, cannot be read or is too large is not told. Section 9.

use serde_json::Value;

use crate::error::{Code, Result};
use crate::protocol::END_STATE_LIMIT;
use crate::protocol::ids::Sequence;
use crate::protocol::neighbours::{Before, EVENT, Neighbours};
use crate::protocol::sse;
use crate::store::{CheckpointRecord, Store};

/// The first chunk of every session opens its first run.
const FIRST: Sequence = 1;

/// The event in front of the chunk at `sequence`, if that is a step whose neighbours are kept.
pub(crate) fn event(store: &dyn Store, sequence: Sequence) -> Result<Option<String>> {
    if store.run_opened_at(sequence)? {
        return Ok(None);
    }
    let after = kept(store, sequence)?.filter(|after| after.stream_sequence == sequence);
    let before = kept(store, sequence.saturating_sub(1))?;
    let (Some(before), Some(after)) = (before, after) else {
        return Ok(None);
    };
    let place = before.stream_sequence;
    let before = if place != FIRST && store.run_opened_at(place)? {
        Before::Entered
    } else {
        Before::State((*before.state).clone())
    };
    let neighbours = Neighbours {
        sequence,
        before,
        after: (*after.state).clone(),
    };
    let small = |state: &Value| size(state) <= END_STATE_LIMIT;
    let fits = match &neighbours.before {
        Before::State(before) => small(before) && small(&neighbours.after),
        Before::Entered => small(&neighbours.after),
    };
    let Some(data) = fits
        .then(|| serde_json::to_string(&neighbours).ok())
        .flatten()
    else {
        return Ok(None);
    };
    let mut text = String::new();
    sse::encode_event(&mut text, EVENT, None, &data);
    Ok(Some(text))
}

/// The checkpoint at or below `sequence`, if it is kept and can be read.
fn kept(store: &dyn Store, sequence: Sequence) -> Result<Option<CheckpointRecord>> {
    match store.checkpoint_up_to(sequence) {
        Err(error) if error.code == Code::InvalidStoredState => Ok(None),
        other => other,
    }
}

fn size(state: &Value) -> usize {
    serde_json::to_string(state).map_or(usize::MAX, |text| text.len())
}
