//! The wire: ids, bodies, chunks, frames, their byte forms, and the routes.
//!
//! What is spelled here is the contract; nothing else in the crate knows a wire name. This module
//! is pure: no clock, no randomness, no I/O. Sections 1 to 5 and 8 of the contract.

pub mod canonical;
pub mod chunk;
pub mod conversation;
pub mod frame;
pub mod ids;
pub mod inside;
pub mod message;
pub mod neighbours;
pub mod request;
pub mod route;
pub mod sse;
pub mod trace;
pub mod tree;
pub mod ui;
pub mod usage;

/// The major version of the contract that this crate speaks.
pub const VERSION: u32 = 1;

/// The largest request body that a mount takes by default, in bytes (1 MiB).
pub const BODY_LIMIT: usize = 1024 * 1024;

/// How much a start that a dispatch sends may go over the limit, in bytes (16 KiB): it carries what
/// its caller was started with, and its parent, and longer ids. Without this, a body that one mount
/// took could be too large for the next.
pub const DISPATCH_HEADROOM: usize = 16 * 1024;

/// The largest state that a terminal frame carries, in bytes of JSON (1 MiB).
pub const END_STATE_LIMIT: usize = 1024 * 1024;

/// Header names, lower case.
pub mod header {
    /// The contract's major version, on answers and on our requests.
    pub const VERSION: &str = "x-remote-agents-version";
    /// `raw` or `projected`, on answers of a mount.
    pub const MOUNT: &str = "x-remote-agents-mount";
    /// The stream's id, on answers of `/sse`.
    pub const STREAM: &str = "x-remote-agents-stream";
    /// The version of the AI SDK's UI message stream, on answers of `/ui`.
    pub const UI_STREAM: &str = "x-vercel-ai-ui-message-stream";
    /// What only a mount may set towards its object; such headers are stripped from what comes in.
    pub const INTERNAL_PREFIX: &str = "x-remote-agents-internal-";
    /// Set by a mount that shows live projected state, on `/sse`: the object tells it
    /// [neighbours](super::neighbours).
    pub const INTERNAL_NEIGHBOURS: &str = "x-remote-agents-internal-neighbours";
    /// Set by a mount that binds sessions: the caller, as [inside](super::inside) has it.
    pub const INTERNAL_CALLER: &str = "x-remote-agents-internal-caller";
    /// Set by a mount with limits on sessions, as [inside](super::inside) has them.
    pub const INTERNAL_LIMITS: &str = "x-remote-agents-internal-limits";
    /// The idempotency key of a POST.
    pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
    /// The other name under which an idempotency key is read.
    pub const IDEMPOTENCY_KEY_OTHER: &str = "x-helix-request-key";
}

/// For fields that are left out where they are `false`.
#[allow(clippy::trivially_copy_pass_by_ref)] // The signature that serde asks for.
fn is_false(value: &bool) -> bool {
    !value
}
