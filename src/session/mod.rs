//! One session's life, as pure functions.
//!
//! What changes of the state mean ([`patch`]) and what a session has spent ([`usage`]). No clock,
//! no randomness, no I/O. Sections 4, 5 and 8 of the contract.

pub mod patch;
pub mod usage;
