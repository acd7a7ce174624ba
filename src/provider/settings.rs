//! The model that a deployment's settings name.
//!
//! A setting that is missing is a typed error that names the variable, and never what another one
//! holds. The names of the variables stand here, because they are the same for every program.

use std::rc::Rc;

use super::anthropic::{ANTHROPIC, AnthropicModel, Thinking};
use super::openai::{ChatDialect, OPENAI, OpenAiModel};
use crate::agent::OfflineModel;
use crate::agent::model::LanguageModel;
use crate::error::Error;
use crate::platform::Runtime;
use crate::transport::Fetch;

/// The variable with the model's name at its provider.
const MODEL_NAME: &str = "MODEL_NAME";

/// The variable that bounds the tokens of an answer.
const MODEL_MAX_TOKENS: &str = "MODEL_MAX_TOKENS";

/// The variable that has a model of Anthropic think: `adaptive`, or a number of tokens.
const MODEL_THINKING: &str = "MODEL_THINKING";

/// The variable that holds a model to an agent's declared output.
const MODEL_STRUCTURED_OUTPUT: &str = "MODEL_STRUCTURED_OUTPUT";

/// The providers.
const PROVIDERS: [&str; 4] = ["offline", "openai", "anthropic", "workers-ai"];

/// Who does something by each variable that is not one provider's own.
const TAKERS: [(&str, &[&str]); 4] = [
    (MODEL_NAME, &["openai", "anthropic", "workers-ai"]),
    (MODEL_MAX_TOKENS, &["openai", "anthropic", "workers-ai"]),
    (MODEL_THINKING, &["anthropic"]),
    (
        MODEL_STRUCTURED_OUTPUT,
        &["openai", "anthropic", "workers-ai"],
    ),
];

/// Why the settings name no model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// There is no provider of this name.
    #[error("there is no model provider {0:?}; there are: offline, openai, anthropic, workers-ai")]
    Unknown(String),
    /// A variable or secret is not set, or is empty.
    #[error("the variable {variable} is not set, and the model provider {provider} needs it")]
    Missing {
        /// The variable.
        variable: &'static str,
        /// The provider.
        provider: &'static str,
    },
    /// A variable holds what it may not hold.
    #[error("the variable {variable} is malformed")]
    Malformed {
        /// The variable.
        variable: &'static str,
    },
    /// A variable is set that the provider does nothing by.
    #[error(
        "the variable {variable} is set, and the model provider {provider} does nothing by it; unset \
         it, or choose the provider {}", .takers.join(" or ")
    )]
    Unsupported {
        /// The variable.
        variable: &'static str,
        /// The provider.
        provider: &'static str,
        /// The providers that do something by it.
        takers: &'static [&'static str],
    },
    /// The program has no way to the models of Workers AI.
    #[error("the model provider workers-ai needs the binding of Workers AI, which is not there")]
    NoBinding,
}

impl From<SettingError> for Error {
    fn from(error: SettingError) -> Self {
        Self::internal(error.to_string())
    }
}

/// What models a program can reach.
pub struct KnownModels<'a> {
    /// A variable or secret by its name.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// How providers over HTTP are reached.
    pub fetch: Rc<dyn Fetch>,
    /// How Workers AI is reached, where it is; see [`ChatDialect::WorkersAi`].
    pub workers_ai: Option<Rc<dyn Fetch>>,
    /// The clock of deadlines.
    pub runtime: Rc<dyn Runtime>,
}

impl KnownModels<'_> {
    /// The model of this provider: `offline`, `openai`, `anthropic` or `workers-ai`. No variable that
    /// is set is passed over, but those of another provider's key and address.
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn model(&self, provider: &str) -> Result<Rc<dyn LanguageModel>, SettingError> {
        self.all_are_taken(provider)?;
        Ok(match provider {
            "offline" => Rc::new(OfflineModel::new()),
            "openai" => Rc::new(self.openai()?),
            "anthropic" => Rc::new(self.anthropic()?),
            _ => Rc::new(self.workers_ai()?),
        })
    }

    fn all_are_taken(&self, provider: &str) -> Result<(), SettingError> {
        let known = PROVIDERS.into_iter().find(|known| *known == provider);
        let provider = known.ok_or_else(|| SettingError::Unknown(provider.to_owned()))?;
        let is_on = |variable| self.set(variable).is_some_and(|value| value != "false");
        let mut untaken = TAKERS
            .into_iter()
            .filter(|(_, takers)| !takers.contains(&provider));
        match untaken.find(|(variable, _)| is_on(variable)) {
            None => Ok(()),
            Some((variable, takers)) => Err(SettingError::Unsupported {
                variable,
                provider,
                takers,
            }),
        }
    }

    fn openai(&self) -> Result<OpenAiModel, SettingError> {
        const KEY: &str = "OPENAI_API_KEY";
        let name = self.needed(MODEL_NAME, "openai")?;
        let key = self.needed(KEY, "openai")?;
        let base_url = self.base_url("OPENAI_BASE_URL", OPENAI)?;
        let runtime = self.runtime.clone();
        let model = OpenAiModel::new(self.fetch.clone(), runtime, &base_url, Some(&key), name)
            .map_err(|_| SettingError::Malformed { variable: KEY })?;
        self.chat(model)
    }

    fn anthropic(&self) -> Result<AnthropicModel, SettingError> {
        const KEY: &str = "ANTHROPIC_API_KEY";
        let name = self.needed(MODEL_NAME, "anthropic")?;
        let key = self.needed(KEY, "anthropic")?;
        let base_url = self.base_url("ANTHROPIC_BASE_URL", ANTHROPIC)?;
        let runtime = self.runtime.clone();
        let model = AnthropicModel::new(self.fetch.clone(), runtime, &base_url, &key, name)
            .map_err(|_| SettingError::Malformed { variable: KEY })?;
        let thinking = match self.set(MODEL_THINKING).as_deref() {
            None => None,
            Some("adaptive") => Some(Thinking::Adaptive),
            Some(tokens) => {
                let malformed = |_| SettingError::Malformed {
                    variable: MODEL_THINKING,
                };
                Some(Thinking::Budget(tokens.parse().map_err(malformed)?))
            }
        };
        let model = match thinking {
            None => model,
            Some(thinking) => model.with_thinking(thinking),
        };
        let model = self.structured(model, AnthropicModel::with_structured_output)?;
        self.bounded(model, AnthropicModel::with_max_tokens)
    }

    fn workers_ai(&self) -> Result<OpenAiModel, SettingError> {
        let name = self.needed(MODEL_NAME, "workers-ai")?;
        let fetch = self.workers_ai.clone().ok_or(SettingError::NoBinding)?;
        // The binding decides who answers; the address is ignored.
        let model = OpenAiModel::new(fetch, self.runtime.clone(), "http://ai", None, name)
            .map_err(|_| SettingError::NoBinding)?
            .with_dialect(ChatDialect::WorkersAi);
        self.chat(model)
    }

    /// What both kinds of chat completions have.
    fn chat(&self, model: OpenAiModel) -> Result<OpenAiModel, SettingError> {
        let model = self.structured(model, OpenAiModel::with_structured_output)?;
        self.bounded(model, OpenAiModel::with_max_tokens)
    }

    fn structured<M>(&self, model: M, hold: impl FnOnce(M) -> M) -> Result<M, SettingError> {
        match self.set(MODEL_STRUCTURED_OUTPUT).as_deref() {
            None | Some("false") => Ok(model),
            Some("true") => Ok(hold(model)),
            Some(_) => Err(SettingError::Malformed {
                variable: MODEL_STRUCTURED_OUTPUT,
            }),
        }
    }

    fn bounded<M>(&self, model: M, bound: impl FnOnce(M, u32) -> M) -> Result<M, SettingError> {
        match self.set(MODEL_MAX_TOKENS).map(|text| text.parse::<u32>()) {
            None => Ok(model),
            Some(Ok(tokens)) if tokens > 0 => Ok(bound(model, tokens)),
            Some(_) => Err(SettingError::Malformed {
                variable: MODEL_MAX_TOKENS,
            }),
        }
    }

    fn base_url(&self, variable: &'static str, default: &str) -> Result<String, SettingError> {
        let url = self.set(variable).unwrap_or_else(|| default.to_owned());
        match url.parse::<http::Uri>() {
            Ok(uri) if matches!(uri.scheme_str(), Some("http" | "https")) => Ok(url),
            _ => Err(SettingError::Malformed { variable }),
        }
    }

    fn needed(
        &self,
        variable: &'static str,
        provider: &'static str,
    ) -> Result<String, SettingError> {
        self.set(variable)
            .ok_or(SettingError::Missing { variable, provider })
    }

    /// A variable that is set and not empty, without the blanks around it.
    fn set(&self, variable: &str) -> Option<String> {
        (self.variable)(variable)
            .map(|value| value.trim().to_owned())
            .filter(|value| !value.is_empty())
    }
}
