//! The consumer: an agent in a Worker that delegates its research to another Worker.

pub mod agents;
pub mod documents;
pub mod writer;
