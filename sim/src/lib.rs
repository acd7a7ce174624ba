//! The deterministic simulator.
//!
//! A seed makes a job for four levels of agents in two services, what its user does, and a list of
//! faults. It is run by the real machines, drivers and stores on one thread with a virtual clock,
//! over a line that loses, doubles, delays, reorders and cuts. After every commit and every part of
//! a stream that arrives, what always holds is looked at.

// A field of a JSON value that is not there is `null`, which is no panic.
#![allow(clippy::indexing_slicing)]

pub mod agents;
pub mod gate;
pub mod judge;
pub mod ledger;
pub mod link;
#[path = "../../tests/stories/paired.rs"]
#[allow(dead_code)] // The judge of histories of all tests.
pub mod paired;
pub mod panics;
pub mod plan;
pub mod random;
pub mod run;
pub mod shrink;
pub mod table;
pub mod told;
pub mod watchers;
pub mod workload;
pub mod world;

pub use gate::{Broken, Invariant, Outcome};
pub use plan::Plan;
pub use remote_agents::mutants;
pub use run::run;
