//! The consumer: an agent in a Worker that delegates its research to another Worker.

pub mod agents;
pub mod documents;
pub mod proxy;
#[cfg(target_arch = "wasm32")]
pub mod shell;
pub mod writer;
