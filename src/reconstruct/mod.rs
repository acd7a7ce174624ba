//! What an observer knows of a session from outside: a baseline, and the patches that belong on it.
//!
//! Pure. [`PatchFilter`] answers one question for streams of any producer: may this patch be applied
//! to that session's document? [`Document`] does the whole for one session: baseline, patches,
//! triggers, and a status that says when the state is exact. Implements section 6 of the contract.
//! When alignment is in doubt a patch is dropped and the document says that it is stale: stale beats
//! corrupt.

mod document;
mod filter;
mod place;
mod rules;

pub use document::{Document, Heard, Stale, Status};
pub use filter::{PatchFilter, Unalignable, Verdict};
pub use place::Reading;

#[cfg(test)]
mod tests;
