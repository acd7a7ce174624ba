//! Live documents: what readers of a stream see grow and what is not the session's state.

use std::cell::RefCell;
use std::rc::Rc;

use serde::Serialize;
use serde_json::Value;

use super::StepHandle;
use crate::error::{Error, Result};
use crate::protocol::chunk::PatchOperation;
use crate::protocol::ids::DocumentId;
use crate::protocol::request::{DEPTH_LIMIT, too_deep};
use crate::session::patch::diff;

/// A document that is on the stream alone: nothing stores it, no snapshot has it, and it belongs to
/// one call. Its patches are `state_patch` chunks in the name of its own [`DocumentId`], so whoever
/// rebuilds a session's state never mistakes them for it, and a projected mount shows none.
///
/// The first change that a call makes replaces the whole document; readers need no baseline, and a
/// call that is repeated after a restart begins it anew.
///
/// ```
/// use remote_agents::{Result, ToolContext};
/// use serde_json::json;
///
/// fn show(context: &ToolContext) -> Result<()> {
///     let outline = context.document("outline")?;
///     outline.set(&json!({"headings": ["Tides"]}))?; // the whole
///     outline.set(&json!({"headings": ["Tides", "Moon"]})) // one heading more
/// }
/// ```
pub struct LiveDocument {
    id: DocumentId,
    handle: Rc<dyn StepHandle>,
    shown: RefCell<Option<Value>>,
}

impl LiveDocument {
    pub(super) fn new(id: DocumentId, handle: Rc<dyn StepHandle>) -> Self {
        let shown = RefCell::new(None);
        Self { id, handle, shown }
    }

    /// The `agentId` of its patches.
    #[must_use]
    pub fn id(&self) -> &DocumentId {
        &self.id
    }

    /// Makes this the document: what has changed since the last time is on the stream.
    ///
    /// # Errors
    /// `INTERNAL` when the content is not JSON, `VALIDATION_ERROR` when it is nested too deeply, or
    /// what the store says. Then the document is shown as it was.
    pub fn set(&self, content: &impl Serialize) -> Result<()> {
        let content = serde_json::to_value(content)
            .map_err(|e| Error::internal(format!("live document: {e}")))?;
        if too_deep(&content, DEPTH_LIMIT) {
            let sentence = "The document is nested too deeply.";
            return Err(Error::invalid("document", sentence));
        }
        let patches = match &*self.shown.borrow() {
            Some(shown) => diff(shown, &content),
            None => vec![PatchOperation {
                op: "replace".into(),
                path: String::new(),
                value: Some(content.clone()),
                from: None,
            }],
        };
        if !patches.is_empty() {
            self.handle.patch_document(&self.id, patches)?;
            *self.shown.borrow_mut() = Some(content);
        }
        Ok(())
    }
}
