//! This service's one mount, and where the other service's is.
//!
//! The mount is raw and serves the writer alone, with its conversation, to whoever has the key, as the
//! AI SDK reads it too. What lives in the other service is shown in the writer's tree, and read through
//! [`crate::proxy`], behind the same key.

use remote_agents::Result;
use remote_agents::mount::{Auth, Mount};
use remote_agents::protocol::ids::AgentType;

use crate::writer;

/// The mount's base path.
pub const PUBLIC: &str = "/agents";

/// The base path of the other service's raw mount.
pub const PRODUCER: &str = "/internal/agents";

/// The mount of the writer. An unset or empty key refuses everything.
///
/// # Errors
/// None in practice: the type is well formed.
pub fn public(key: Option<String>) -> Result<Mount> {
    let descendants = [writer::RESEARCH_AGENT_TYPE, writer::THREAD_AGENT_TYPE];
    let descendants = descendants.map(AgentType::parse).into_iter();
    Ok(Mount::new(PUBLIC)
        .with_agents([AgentType::parse(writer::AGENT_TYPE)?])
        .with_descendants(descendants.collect::<Result<Vec<_>>>()?)
        .with_messages()
        .with_ui()
        .with_auth(Auth::Bearer(key)))
}
