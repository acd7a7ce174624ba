//! The consumer: an agent in a Worker that delegates its research to another Worker.

pub mod agents;
pub mod documents;
pub mod mounts;
pub mod page;
pub mod proxy;
#[cfg(target_arch = "wasm32")]
pub mod shell;
pub mod sources;
pub mod writer;

#[cfg(test)]
#[allow(dead_code)] // The producer's bench; not every part of it is needed here.
#[path = "../../producer-worker/src/bench.rs"]
mod bench;
#[cfg(test)]
mod tests;
