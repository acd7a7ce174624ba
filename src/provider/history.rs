//! What both dialects make of a stored conversation.
//!
//! A provider refuses a whole request for one name or argument that it does not like, also when a
//! model made it up itself long ago. So what a model wrote is brought into shape here, each time it
//! is sent; what is stored stays as it was.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use crate::store::ToolOutcome;

/// The longest name of a tool that providers take.
const LONGEST_NAME: usize = 64;

/// What stands for a text of nothing, which one of the dialects refuses.
pub(super) const NO_TEXT: &str = "(no text)";

/// A tool's name as every provider takes it.
pub(super) fn tool_name(name: &str) -> Cow<'_, str> {
    if !name.is_empty() && name.len() <= LONGEST_NAME && name.chars().all(is_plain) {
        return Cow::Borrowed(name);
    }
    let plain: String = name
        .chars()
        .map(|letter| if is_plain(letter) { letter } else { '_' })
        .take(LONGEST_NAME)
        .collect();
    if plain.is_empty() {
        return Cow::Borrowed("unnamed");
    }
    Cow::Owned(plain)
}

/// An object of these fields, whose values are taken. As a function it stands in a Worker's module once;
/// a macro's code stands there for each use.
#[inline(never)]
pub(super) fn object(fields: &mut [(&str, Value)]) -> Value {
    fields
        .iter_mut()
        .map(|(name, value)| ((*name).to_owned(), value.take()))
        .collect()
}

/// A text as a value, in one place as [`object`].
#[inline(never)]
pub(super) fn string(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// Sets a field, in one place as [`object`].
#[inline(never)]
pub(super) fn put(fields: &mut Map<String, Value>, name: &str, value: Value) {
    fields.insert(name.to_owned(), value);
}

/// What a user says behind an answer that is last, which not every model goes on with.
pub(super) const GO_ON: &str = "Go on.";

/// A call's id in letters, digits, `_` and `-`, which one of the dialects asks for. Ids that differ
/// stay different: what begins as a rewritten one is rewritten, too.
pub(super) fn call_id(id: &str) -> Cow<'_, str> {
    if !id.is_empty() && !id.starts_with('x') && id.chars().all(is_plain) {
        return Cow::Borrowed(id);
    }
    let mut plain = String::from("x");
    for letter in id.chars() {
        if is_plain(letter) && letter != '-' {
            plain.push(letter);
        } else {
            plain.push_str(&format!("-{:x}-", u32::from(letter)));
        }
    }
    Cow::Owned(plain)
}

fn is_plain(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-')
}

/// The schema of a tool's arguments, of which every provider wants to read that they are an object.
pub(super) fn parameters(schema: &Value) -> Cow<'_, Value> {
    if schema.get("type").is_some() {
        return Cow::Borrowed(schema);
    }
    let mut schema = schema.as_object().cloned().unwrap_or_default();
    schema.insert("type".into(), "object".into());
    Cow::Owned(Value::Object(schema))
}

/// A call's arguments as the object that they have to be; what the model wrote instead is kept in it.
pub(super) fn arguments(arguments: &Value) -> Cow<'_, Value> {
    match arguments {
        Value::Object(_) => Cow::Borrowed(arguments),
        other => Cow::Owned(json!({ "malformed": other })),
    }
}

/// What a model reads of a call's result.
pub(super) fn result(outcome: &ToolOutcome) -> String {
    if outcome.success {
        return text(&outcome.result);
    }
    let mut failure = Map::new();
    if let Some(error) = &outcome.error {
        failure.insert("error".into(), error.as_str().into());
    }
    if !outcome.result.is_null() {
        failure.insert("result".into(), outcome.result.clone());
    }
    Value::Object(failure).to_string()
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::{arguments, call_id, is_plain, parameters, result, tool_name};
    use crate::store::ToolOutcome;

    #[test]
    fn made_up_names_and_ids_are_brought_into_shape() {
        assert_eq!(
            tool_name("subagent__thread-researcher"),
            "subagent__thread-researcher"
        );
        assert_eq!(tool_name("functions.search"), "functions_search");
        assert_eq!(tool_name(""), "unnamed");
        assert_eq!(tool_name(&"n".repeat(100)), "n".repeat(64));
        assert_eq!(call_id("toolu_01-a"), "toolu_01-a");
        assert_eq!(call_id("functions.search:0"), "xfunctions-2e-search-3a-0");
        let alike = [
            "a.b", "a:b", "xa-2e-b", "a-2e-b", "a-2e-b.", "a.b.", "x", "", "-",
        ];
        let sent: BTreeSet<_> = alike.iter().map(|id| call_id(id)).collect();
        assert_eq!(sent.len(), alike.len(), "{sent:?}");
        assert!(sent.iter().all(|id| id.chars().all(is_plain)));
        assert_eq!(call_id(""), "x");
    }

    #[test]
    fn arguments_are_an_object_and_a_failed_result_says_so() {
        assert_eq!(*arguments(&json!({"a": 1})), json!({"a": 1}));
        assert_eq!(*parameters(&json!(true)), json!({"type": "object"}));
        assert_eq!(
            *parameters(&json!({"title": "AnyValue"})),
            json!({"title": "AnyValue", "type": "object"})
        );
        assert_eq!(
            *arguments(&json!("{\"a\": ")),
            json!({"malformed": "{\"a\": "})
        );
        let outcome = |success, value, error: Option<&str>| ToolOutcome {
            success,
            result: value,
            error: error.map(str::to_owned),
        };
        assert_eq!(result(&outcome(true, json!("plain"), None)), "plain");
        assert_eq!(result(&outcome(true, json!({"n": 1}), None)), "{\"n\":1}");
        assert_eq!(
            result(&outcome(false, json!({"code": "x"}), Some("It failed."))),
            "{\"error\":\"It failed.\",\"result\":{\"code\":\"x\"}}"
        );
    }
}
