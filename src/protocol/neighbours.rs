//! What an object tells a mount that shows live projected state: the state before a step and the
//! state that it committed.
//!
//! It is an event between an object and its mount, in front of the step's `step_committed`, and
//! never goes further: it holds raw state. Section 9 of the contract.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ids::Sequence;

/// The name of the event.
pub const EVENT: &str = "neighbours";

/// The two checkpoints that meet at a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Neighbours {
    /// The sequence of the `step_committed` that follows.
    pub sequence: Sequence,
    /// The state that readers had before.
    pub before: Before,
    /// The state that the step committed.
    pub after: Value,
}

/// What readers had before a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Before {
    /// The state of the step before.
    State(Value),
    /// A run was entered in between, and its entry may have changed the state: some readers have
    /// seen that and some have not.
    Entered,
}
