//! The whole job over both services in this process: writer, planner, researchers, their mounts as
//! the Workers have them, the offline model, a virtual clock.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    missing_docs,
    unreachable_pub
)]

mod checks;
mod crash;
mod library;
#[path = "../../../tests/stories/paired.rs"]
mod paired;
mod reading;
mod routes;
mod secrets;
mod sizes;
mod stopping;
mod whole;
mod world;
