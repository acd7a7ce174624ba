//! Model providers over HTTP: clients of the chat-completions dialect and of Anthropic's messages.
//!
//! A client builds one request from a conversation and reads one streamed answer; it knows no
//! platform and reaches its provider over a [`Fetch`](crate::transport::Fetch). What a provider
//! says is read leniently where dialects differ and never repeated: an error is one of our own
//! sentences, chosen by status and code, because a provider's text may hold a key or a prompt.

mod anthropic;
mod exchange;
mod halves;
mod history;
mod openai;
mod refusal;
mod settings;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use anthropic::{AnthropicModel, Thinking};
pub use openai::{ChatDialect, OpenAiModel};
pub use settings::{KnownModels, SettingError};
