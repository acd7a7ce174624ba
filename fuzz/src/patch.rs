//! Patches: what they make of a document is what RFC 6902 says, and they stay within bounds.

use remote_agents::protocol::chunk::PatchOperation;
use remote_agents::session::patch::{DEEPEST, apply, diff};
use serde_json::Value;

use super::input::values;
use super::reference::{depth, patched};

/// The bound of a patched document's depth.
const DEPTH: usize = DEEPEST;

pub(crate) fn patch(data: &[u8]) {
    let [before, operations] = values(data);
    let Ok(before) = serde_json::from_slice::<Value>(before) else {
        return;
    };
    if let Ok(after) = serde_json::from_slice::<Value>(operations) {
        let made = apply(&before, &diff(&before, &after));
        assert_eq!(
            made.as_ref(),
            Ok(&after),
            "apply(before, diff(before, after))"
        );
    }
    let Ok(raw) = serde_json::from_slice::<Vec<Value>>(operations) else {
        return;
    };
    // An operation in which a key stands twice, or a number does not come back, is nobody's.
    let Ok(typed) = serde_json::from_slice::<Vec<PatchOperation>>(operations) else {
        return;
    };
    let made = apply(&before, &typed);
    assert_eq!(apply(&before, &typed), made, "once more");
    if let Ok(made) = &made {
        assert!(depth(made) <= DEPTH.max(depth(&before)), "too deep");
        assert!(made.to_string().len() < 16 << 20, "too large");
    }
    // Copies of copies are for the bounds; the plain reading would make them.
    let copies = typed
        .iter()
        .filter(|operation| operation.op == "copy")
        .count();
    if copies > 6 || depth(&before) + typed.len() > 100 {
        return;
    }
    assert_eq!(
        made.ok(),
        patched(&before, &raw),
        "{before} patched by {raw:?}"
    );
}
