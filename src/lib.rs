//! Durable agents that delegate to agents in other services.
//!
//! A session is one agent's conversation, hosted by one object with its own SQLite. [`agent`] is
//! what a user writes; [`mount`] lets callers reach sessions; [`producer`] runs one session and
//! [`consumer`] its calls of children. They drive the pure machines [`session`] and [`dispatch`]
//! over the wire of [`protocol`]. `cloudflare` hosts them on Workers, `native` in a process:
//!
//! ```
//! use std::rc::Rc;
//!
//! use remote_agents::agent::model_by_name;
//! use remote_agents::mount::serve;
//! use remote_agents::native::LocalObjects;
//! use remote_agents::{Agent, AgentType, Agents, Mount};
//!
//! # tokio::task::LocalSet::new().block_on(&tokio::runtime::Builder::new_current_thread().enable_time().build()?, async {
//! let agents = || {
//!     let echo = Agent::new(AgentType::parse("echo")?, "1. Repeat it.", model_by_name("offline")?);
//!     Agents::new([echo])
//! };
//! let objects = LocalObjects::new(0, Rc::new(|_, _| {}), Rc::new(move |_, _| agents()));
//! let start = http::Request::post("/agents/echo/start")
//!     .body(r#"{"sessionId": "s-1", "message": "hello"}"#.into())?;
//! let answer = serve(&Mount::new("/agents"), &*objects, start).await;
//! assert_eq!(answer.status(), 200);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

pub mod agent;
#[cfg(target_arch = "wasm32")]
pub mod cloudflare;
pub mod consumer;
pub mod dispatch;
pub mod error;
pub mod follower;
pub mod http;
pub mod mount;
pub mod mutants;
#[cfg(not(target_arch = "wasm32"))]
pub mod native;
pub mod platform;
pub mod producer;
pub mod protocol;
pub mod provider;
pub mod reconstruct;
pub mod session;
pub mod store;
pub mod transport;

pub use agent::{Agent, Agents, SubAgent, Tool, ToolContext, ToolError, tool, typed_tool};
pub use error::{Code, Error, Result};
pub use mount::Mount;
pub use protocol::ids::{AgentType, SessionId};

/// The code of the texts, compiled and run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
#[cfg(doctest)]
#[doc = include_str!("../docs/agents.md")]
mod writing_agents {}
