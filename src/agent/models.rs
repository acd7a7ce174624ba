//! Models that need no provider, by name. Those of providers are in [`crate::provider`].
//!
//! An agent is handed a model and cannot tell which one it is.

use std::rc::Rc;

use super::OfflineModel;
use super::model::LanguageModel;
use crate::error::{Error, Result};

/// The model with this name. The one that needs no provider is `offline`.
///
/// # Errors
/// `INTERNAL`, naming the setting's value and the names that there are, when there is no such
/// model.
pub fn model_by_name(name: &str) -> Result<Rc<dyn LanguageModel>> {
    match name {
        "offline" => Ok(Rc::new(OfflineModel::new())),
        other => Err(Error::internal(format!(
            "there is no model provider {other:?}; there is: offline"
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::model_by_name;

    #[test]
    fn a_model_is_found_by_its_exact_name() {
        assert_eq!(model_by_name("offline").unwrap().name(), "offline");
        let refusal = model_by_name("Offline ").err().unwrap();
        assert_eq!(refusal.status(), 500);
        assert!(refusal.detail.unwrap().contains("\"Offline \""));
    }
}
