//! The answers that a mount changes on their way: each is read as its type and written anew.
//!
//! Implements section 9 for everything but the stream. What cannot be read is not shown, and why not
//! is not told: the reason could quote what was to be held back. A field that the types do not know
//! does not pass.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::project::View;
use super::{Asked, ChunkDetail, Mount, headers, ui};
use crate::error::{Error, Result};
use crate::http::{Body, Response, refusal};
use crate::protocol::conversation::MessagesResponse;
use crate::protocol::message::{SnapshotResponse, UsageResponse};
use crate::protocol::route::Action;
use crate::protocol::tree::{TreeBounds, TreeNode, TreeReason};
use crate::protocol::ui::UiStream;

impl Mount {
    pub(super) fn rewrite(&self, asked: &Asked, response: Response) -> Response {
        let action = asked.action;
        let view = View {
            session: asked.session_id.clone(),
            agent_type: asked.agent_type.clone(),
            projection: self.projection.clone(),
            usage: self.usage.clone(),
            chunks: self.chunks,
            live: self.live,
            next_step: None,
        };
        let (mut parts, body) = response.into_parts();
        headers::body_changes(&mut parts.headers);
        let body = match (action, body) {
            (Action::Sse, body) => view.stream(body),
            (Action::Ui, body) => {
                // What the mount holds back is gone before a part is made.
                let shown = if self.rewrites(Action::Sse) {
                    view.stream(body)
                } else {
                    body
                };
                let stream = ui::announce(&mut parts.headers);
                let session = asked.session_id.as_str();
                ui::stream(shown, UiStream::new(session, stream, asked.discard))
            }
            (_, Body::Full(bytes)) => match self.rewrite_json(&view, action, &bytes) {
                Ok(bytes) => Body::Full(bytes),
                Err(error) => return refusal(&error),
            },
            _ => return refusal(&Error::internal("an answer's body was not whole")),
        };
        Response::from_parts(parts, body)
    }

    fn rewrite_json(&self, view: &View, action: Action, body: &[u8]) -> Result<Bytes> {
        let projection = self.projection.as_ref().map(|p| p.name.clone());
        match action {
            Action::Snapshot => rewritten(body, |answer: &mut SnapshotResponse| {
                answer.state = view.state(&answer.state);
                answer.projection = projection;
            }),
            Action::Usage => rewritten(body, |answer: &mut UsageResponse| {
                answer.rollup = view.usage(&answer.rollup);
            }),
            Action::Tree => {
                let mut root: TreeNode = read(body)?;
                self.show(&mut root);
                // Projections can be larger than what they are of.
                written(&root.bounded(TreeBounds::MOST))
            }
            Action::Messages => rewritten(body, |answer: &mut MessagesResponse| {
                answer.state = view.state(&answer.state);
                answer.projection = projection;
                if self.chunks == ChunkDetail::Lifecycle {
                    for numbered in &mut answer.messages {
                        numbered.message.keep_lifecycle();
                    }
                }
            }),
            _ => Err(Error::internal("an answer that no mount changes")),
        }
    }

    /// A node and those below it as this mount's callers may see them, each by its own type.
    fn show(&self, node: &mut TreeNode) {
        let served = self.agents.as_ref().is_none_or(|agents| {
            agents.contains(&node.agent_type) || self.descendants.contains(&node.agent_type)
        });
        if !served {
            node.hide(TreeReason::NotServed);
        } else if let Some(projection) = &self.projection {
            node.state = (node.state.as_ref())
                .map(|state| (projection.map)(node.agent_type.as_str(), state));
            node.projection = node.state.as_ref().map(|_| projection.name.clone());
        }
        for child in &mut node.children {
            self.show(child);
        }
    }
}

fn rewritten<T: DeserializeOwned + Serialize>(
    body: &[u8],
    change: impl FnOnce(&mut T),
) -> Result<Bytes> {
    let mut answer = read(body)?;
    change(&mut answer);
    written(&answer)
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(unreadable)
}

fn written(answer: &impl Serialize) -> Result<Bytes> {
    serde_json::to_vec(answer)
        .map(Bytes::from)
        .map_err(unreadable)
}

/// The reader's message could quote the state, so it is not told.
#[allow(clippy::needless_pass_by_value)] // The signature that `map_err` asks for.
fn unreadable(_: serde_json::Error) -> Error {
    Error::internal("the object's answer cannot be read")
}
