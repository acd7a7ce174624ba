//! The producer: research agents in a Worker.

pub mod agents;
pub mod corpus;
pub mod mounts;
pub mod outline;
pub mod passages;
pub mod planner;
pub mod projection;
pub mod researcher;
#[cfg(target_arch = "wasm32")]
pub mod shell;
pub mod state;

#[cfg(test)]
mod bench;
#[cfg(test)]
mod tests;
