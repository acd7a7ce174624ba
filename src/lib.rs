//! Durable agents that delegate to agents in other services.
//!
//! A session is one agent's conversation, hosted by one object with its own SQLite. This crate has
//! the wire contract ([`protocol`]), the life of a session ([`session`]), the parent's side of a
//! call ([`dispatch`]), and the shells that run both on Cloudflare Workers and natively.

pub mod agent;
#[cfg(target_arch = "wasm32")]
pub mod cloudflare;
pub mod consumer;
pub mod dispatch;
pub mod error;
pub mod http;
pub mod mount;
#[cfg(not(target_arch = "wasm32"))]
pub mod native;
pub mod platform;
pub mod producer;
pub mod protocol;
pub mod session;
pub mod store;
pub mod transport;

pub use agent::{Agent, Agents};
pub use error::{Code, Error, Result};
