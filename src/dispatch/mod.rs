//! A parent's call to a child: start, attach, stream, recover, fold, fail.
//!
//! [`Dispatch`] decides and does nothing by itself: it is told what happened and says what to do
//! next, so that every order of events is a test without a clock. It never waits, reads a clock or
//! touches a store; [`crate::consumer`] carries its effects out. Implements section 7 of the
//! contract, and the forwarding stamps of section 4.

mod child_id;
mod effect;
mod failure;
mod fold;
mod forward;
mod machine;
mod recovery;
#[cfg(test)]
mod tests;

pub use child_id::{call_key, child_id};
pub use effect::{Abandon, Effect, Event};
pub(crate) use fold::rollup;
pub use fold::{CallOutcome, message_for};
pub use forward::{Announced, Forwarded, Forwarder};
pub(crate) use machine::attach_instead;
pub use machine::{Dispatch, Terms};
pub(crate) use recovery::lost_cause;
