//! The two mounts of the same objects, and who may use which.
//!
//! `/internal/agents` shows everything and is open to a service binding alone, whose props say so.
//! Anyone else gets the 404 of an unknown path there, because the public mount answers. `/agents`
//! is that public mount: the planner alone, with the key, and of its state only the projection, which
//! each step tells live.

use std::rc::Rc;

use remote_agents::Result;
use remote_agents::mount::{Auth, Head, Limiter, Mount, Projection};
use remote_agents::protocol::ids::AgentType;
use remote_agents::protocol::route::Route;

use crate::projection::{project_state, project_usage};
use crate::{planner, researcher};

/// The raw mount's base path.
pub const INTERNAL: &str = "/internal/agents";

/// The projected mount's base path.
pub const PUBLIC: &str = "/agents";

/// What a binding's props must name to reach the raw mount.
const INTERNAL_PROP: &str = "internal";

/// Whether a request for this path is for the raw mount and came over a binding that may use it.
/// `mount` is what the binding's props name, if they name anything.
#[must_use]
pub fn is_internal(path: &str, mount: Option<&str>) -> bool {
    path.strip_prefix(INTERNAL)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        && mount == Some(INTERNAL_PROP)
}

/// The raw mount of planner and thread researcher.
///
/// # Errors
/// None in practice: the types are well formed.
pub fn internal() -> Result<Mount> {
    let types = [
        AgentType::parse(planner::AGENT_TYPE)?,
        AgentType::parse(researcher::AGENT_TYPE)?,
    ];
    Ok(Mount::new(INTERNAL)
        .with_agents(types)
        .allow_unauthenticated())
}

/// The projected mount of the planner. An unset or empty key refuses everything.
///
/// # Errors
/// None in practice: the type is well formed.
pub fn public(key: Option<String>) -> Result<Mount> {
    Ok(Mount::new(PUBLIC)
        .with_agents([AgentType::parse(planner::AGENT_TYPE)?])
        .with_auth(Auth::Bearer(key))
        .with_projection(Projection {
            name: "planner-progress/1".to_owned(),
            map: Rc::new(project_state),
        })
        .with_live_state()
        .with_usage_projection(Rc::new(project_usage)))
}

/// The mount with a limit on what its callers may begin, resume and stop; reading is not counted. The
/// one key is everybody's, so callers are told apart by the address that Cloudflare names, which
/// nobody outside can set there.
#[must_use]
pub fn limited(mount: Mount, limiter: Rc<dyn Limiter>) -> Mount {
    mount.with_limiter(limiter, |head: &Head<'_>| {
        let Route::Agent { action, .. } = head.route else {
            return None;
        };
        let address = head.headers.get("cf-connecting-ip");
        let address = address.and_then(|address| address.to_str().ok());
        action
            .is_post()
            .then(|| address.unwrap_or("unknown").to_owned())
    })
}
