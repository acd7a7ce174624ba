//! Paths: which route a path names, and the path of a route.
//!
//! Implements the route table of section 1. A path is matched as it came: no clean-up of slashes or
//! dots, no change of case, and exactly one percent-decoding, of the agent type alone. What is not
//! a route is no route; there is nothing in between.

use http::Method;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::ids::AgentType;

#[cfg(test)]
mod tests;

/// What can be asked of an agent's session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Begins a session.
    Start,
    /// Goes on with one.
    Resume,
    /// Attaches to its stream.
    Sse,
    /// Tells its status.
    Status,
    /// Tells its state.
    Snapshot,
    /// Tells its usage.
    Usage,
    /// Interrupts its run.
    Interrupt,
    /// Aborts its run.
    Abort,
    /// Tells the snapshots of the session and its descendants.
    Tree,
    /// Attaches to its stream as the AI SDK reads it, where a mount turns that on.
    Ui,
    /// Tells the conversation, page by page. A mount has it only where it is turned on.
    Messages,
}

impl Action {
    /// Every action.
    pub const ALL: [Self; 11] = [
        Self::Start,
        Self::Resume,
        Self::Sse,
        Self::Status,
        Self::Snapshot,
        Self::Usage,
        Self::Interrupt,
        Self::Abort,
        Self::Tree,
        Self::Ui,
        Self::Messages,
    ];

    /// The last part of the action's path.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Resume => "resume",
            Self::Sse => "sse",
            Self::Status => "status",
            Self::Snapshot => "snapshot",
            Self::Usage => "usage",
            Self::Interrupt => "interrupt",
            Self::Abort => "abort",
            Self::Tree => "tree",
            Self::Ui => "ui",
            Self::Messages => "messages",
        }
    }

    /// The action with this spelling.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.as_str() == text)
    }

    /// The one method that the action has. Only a POST has a body.
    #[must_use]
    pub fn method(self) -> Method {
        if self.is_post() {
            Method::POST
        } else {
            Method::GET
        }
    }

    /// Whether the action is a POST: its session is named in the body, not in the query.
    #[must_use]
    pub fn is_post(self) -> bool {
        matches!(
            self,
            Self::Start | Self::Resume | Self::Interrupt | Self::Abort
        )
    }

    /// The value of `Allow`.
    #[must_use]
    pub fn allow(self) -> &'static str {
        if self.is_post() { "POST" } else { "GET" }
    }
}

/// A known path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// The base path itself: the list of agent types.
    List,
    /// An action of an agent type.
    Agent {
        /// The agent type, decoded.
        agent_type: AgentType,
        /// The action.
        action: Action,
    },
}

impl Route {
    /// The one method that the route has.
    #[must_use]
    pub fn method(&self) -> Method {
        match self {
            Self::List => Method::GET,
            Self::Agent { action, .. } => action.method(),
        }
    }

    /// The value of `Allow`.
    #[must_use]
    pub fn allow(&self) -> &'static str {
        match self {
            Self::List => "GET",
            Self::Agent { action, .. } => action.allow(),
        }
    }
}

/// A base path in its one spelling: a slash in front, none behind; the root is the empty text.
#[must_use]
pub fn normalize_base(base_path: &str) -> String {
    let inner = base_path.trim_matches('/');
    if inner.is_empty() {
        String::new()
    } else {
        format!("/{inner}")
    }
}

/// The route that a path names under a base path, as the request spelled it. `None` is a 404.
#[must_use]
pub fn parse_path(base_path: &str, path: &str) -> Option<Route> {
    let base = normalize_base(base_path);
    let rest = path.strip_prefix(base.as_str())?;
    if rest.is_empty() || (base.is_empty() && rest == "/") {
        return Some(Route::List);
    }
    let (agent_type, action) = rest.strip_prefix('/')?.split_once('/')?;
    let action = Action::parse(action)?;
    let decoded = percent_decode_str(agent_type).decode_utf8().ok()?;
    let agent_type = AgentType::parse(&decoded).ok()?;
    Some(Route::Agent { agent_type, action })
}

/// What stands in a path unencoded: RFC 3986's unreserved characters.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// The path of an action, with a query where there is one, everything encoded.
#[must_use]
pub fn agent_path(
    base_path: &str,
    agent_type: &AgentType,
    action: Action,
    query: &[(&str, &str)],
) -> String {
    let mut path = format!(
        "{}/{}/{}",
        normalize_base(base_path),
        utf8_percent_encode(agent_type.as_str(), SEGMENT),
        action.as_str()
    );
    if !query.is_empty() {
        path.push('?');
        let pairs = form_urlencoded::Serializer::new(String::new())
            .extend_pairs(query)
            .finish();
        path.push_str(&pairs);
    }
    path
}
