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

mod authoring;
mod callers;
mod cases;
mod children;
mod conversation;
mod coverage;
mod disk;
mod eviction;
mod examples;
mod faults;
mod flush;
mod follower;
mod follower_script;
mod fuzz;
mod history;
mod hooks;
mod hops;
mod hostile;
mod house;
mod keys;
mod lifecycle;
mod limits;
mod live;
mod logging;
mod loopback;
mod messages;
mod output;
mod providers;
#[path = "../providers/mod.rs"]
mod providers_suite;
mod races;
mod retry;
mod routes;
mod session;
mod settling;
mod stored;
#[path = "../stories/mod.rs"]
mod stories;
mod story;
mod support;
mod tools;
mod tree;
mod ui;
