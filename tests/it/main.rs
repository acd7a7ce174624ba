//! The integration tests: one binary, one module a feature.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    dead_code,
    missing_docs,
    unreachable_pub
)]

mod children;
mod eviction;
mod flush;
mod follower;
mod hooks;
mod house;
mod lifecycle;
mod logging;
mod races;
mod routes;
mod session;
mod stored;
mod support;
mod tools;
