//! The native shell: what a server outside Cloudflare needs of its platform.
//!
//! A faithful twin of a Durable Object: it keeps to the platform's limits also where the machine
//! could do more, so that what passes natively passes there. Section 4 of the platform's rules for
//! SQLite is in [`database`].

mod client;
pub mod database;
mod disk;
mod host;
mod limiter;
mod objects;
mod runtime;

pub use client::{HttpClient, http_transport};
pub use database::RusqliteDatabase;
pub use disk::{DiskMoment, Latency};
pub use host::{Host, block_on};
pub use limiter::MemoryLimiter;
pub use objects::{
    CommitMoment, LocalObjects, MakeAgents, MountFetch, OnCommit, OnDisk, OnObjectEffect, OnStore,
    StoreOperation,
};
pub use runtime::{Effect, Entropy, LocalRuntime, LogSink, OnEffect};
