//! Fills a call's arguments from its JSON Schema and what the conversation holds.
//!
//! A property takes, in this order, what stands under its name in the element at hand, in the
//! results (the latest first) and in the user's message, if it has the right shape. What is
//! required and stands nowhere gets the most fitting extract.

use serde_json::{Map, Value};

use super::extract;

/// How deep schemas are followed; recursive ones end here.
const DEEPEST: usize = 12;

/// Phrases of a list that stands nowhere.
const MOST_PHRASES: usize = 5;

/// A text that is made of an extract, in characters.
const EXTRACT: usize = 600;

/// Names of texts that tell what came out.
const RESULT_NAMES: &[&str] = &[
    "summary",
    "answer",
    "content",
    "report",
    "conclusion",
    "result",
    "body",
    "reason",
];

/// Where values come from.
#[derive(Clone, Copy)]
pub(super) struct Sources<'a> {
    /// The item of the list that the step goes over.
    pub(super) element: Option<&'a Value>,
    /// The results of each step, the latest step first.
    pub(super) groups: &'a [Vec<&'a Value>],
    /// The user's message, an object.
    pub(super) user: &'a Value,
    /// What failed calls said, the latest first.
    pub(super) failures: &'a [String],
}

/// The arguments for a tool with this schema.
pub(super) fn arguments(schema: &Value, sources: &Sources<'_>) -> Value {
    Value::Object(
        Filler {
            root: schema,
            sources,
        }
        .object(schema, 0),
    )
}

struct Filler<'a> {
    root: &'a Value,
    sources: &'a Sources<'a>,
}

impl<'a> Filler<'a> {
    fn object(&self, schema: &'a Value, depth: usize) -> Map<String, Value> {
        let schema = self.resolve(schema);
        let mut object = Map::new();
        for (name, property) in properties(schema) {
            if let Some(value) = self.property(name, property, is_required(schema, name), depth) {
                object.insert(name.clone(), value);
            }
        }
        object
    }

    fn property(
        &self,
        name: &str,
        schema: &'a Value,
        required: bool,
        depth: usize,
    ) -> Option<Value> {
        let schema = self.resolve(schema);
        if let Some(constant) = schema.get("const") {
            return Some(constant.clone());
        }
        if let Some(value) = self.known(name, schema) {
            return Some(value);
        }
        if let Some(items) = self.assembled(schema) {
            return Some(items);
        }
        (required && depth < DEEPEST).then(|| self.made(name, schema, depth))
    }

    /// What stands under this name somewhere.
    fn known(&self, name: &str, schema: &'a Value) -> Option<Value> {
        let fits = |value: &Value| self.conform(schema, value, 0);
        let element = self.sources.element;
        let by_id = || {
            let suffix = extract::is_id_name(name) && name != "id";
            element
                .filter(|_| suffix)
                .and_then(|element| element.get("id"))
        };
        let results = || {
            self.sources
                .groups
                .iter()
                .flat_map(|group| group.iter().rev().copied())
        };
        let user = self.sources.user;
        element
            .and_then(|element| extract::find(element, name).and_then(fits))
            .or_else(|| {
                element.and_then(|element| extract::find_alike(element, name).and_then(fits))
            })
            .or_else(|| by_id().and_then(fits))
            .or_else(|| results().find_map(|result| extract::find(result, name).and_then(fits)))
            .or_else(|| extract::find(user, name).and_then(fits))
            .or_else(|| {
                results().find_map(|result| extract::find_alike(result, name).and_then(fits))
            })
            .or_else(|| extract::find_alike(user, name).and_then(fits))
    }

    /// A list of objects out of results that are such objects themselves, all of one step.
    fn assembled(&self, schema: &'a Value) -> Option<Value> {
        let items = schema.get("items").map(|items| self.resolve(items))?;
        if kind(schema) != Some("array")
            || kind(items) != Some("object")
            || properties(items).next().is_none()
        {
            return None;
        }
        self.sources.groups.iter().find_map(|group| {
            let found: Vec<Value> = group
                .iter()
                .filter_map(|result| self.conform(items, result, 0))
                .collect();
            let informative = found
                .iter()
                .any(|item| item.as_object().is_some_and(|object| !object.is_empty()));
            informative.then_some(Value::Array(found))
        })
    }

    fn made(&self, name: &str, schema: &'a Value, depth: usize) -> Value {
        if let Some(choices) = schema.get("enum").and_then(Value::as_array) {
            let topic = extract::topic(self.sources.user).to_lowercase();
            let named = choices.iter().find(|choice| {
                choice
                    .as_str()
                    .is_some_and(|text| topic.contains(&text.to_lowercase()))
            });
            return named
                .or_else(|| choices.first())
                .cloned()
                .unwrap_or_default();
        }
        if let Some(default) = schema.get("default") {
            return default.clone();
        }
        match kind(schema) {
            Some("object") => Value::Object(self.object(schema, depth.saturating_add(1))),
            Some("array") => self.made_list(name, schema, depth),
            Some("integer" | "number") => {
                schema.get("minimum").cloned().unwrap_or_else(|| 0.into())
            }
            Some("boolean") => false.into(),
            Some("null") => Value::Null,
            _ => {
                let most = schema
                    .get("maxLength")
                    .and_then(Value::as_u64)
                    .and_then(|n| usize::try_from(n).ok());
                extract::clip(&self.text(name), most.unwrap_or(usize::MAX)).into()
            }
        }
    }

    fn made_list(&self, name: &str, schema: &'a Value, depth: usize) -> Value {
        let bound = |key: &str| {
            schema
                .get(key)
                .and_then(Value::as_u64)
                .and_then(|n| usize::try_from(n).ok())
        };
        let least = bound("minItems").unwrap_or(0);
        let items = schema.get("items").map(|items| self.resolve(items));
        let mut list: Vec<Value> = Vec::new();
        if items.and_then(kind) == Some("string") {
            let text = self.text("topic");
            let most = bound("maxItems")
                .unwrap_or(MOST_PHRASES)
                .min(MOST_PHRASES.max(least));
            list.extend(
                extract::phrases(&text)
                    .into_iter()
                    .take(most)
                    .map(Value::from),
            );
        }
        if let Some(items) = items {
            while list.len() < least.min(MOST_PHRASES) {
                list.push(self.made(name, items, depth.saturating_add(1)));
            }
        }
        list.into()
    }

    /// The most fitting text for a name.
    fn text(&self, name: &str) -> String {
        if let Some(Value::String(text)) = self.sources.element {
            return text.clone();
        }
        if extract::is_topic_name(name) {
            return extract::topic(self.sources.user);
        }
        if let Some(text) = self.sources.element.and_then(extract::longest_text) {
            return text.to_owned();
        }
        if RESULT_NAMES
            .iter()
            .any(|result| extract::alike(result, name))
        {
            let results = self
                .sources
                .groups
                .iter()
                .flatten()
                .find_map(|result| extract::first_text(result));
            let found = results.or_else(|| self.sources.failures.first().map(String::as_str));
            if let Some(text) = found {
                return extract::clip(text, EXTRACT).to_owned();
            }
        }
        extract::topic(self.sources.user)
    }

    /// The value as far as the schema names it, if it has the schema's shape.
    fn conform(&self, schema: &'a Value, value: &Value, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        let schema = self.resolve(schema);
        if let Some(choices) = schema.get("enum").and_then(Value::as_array) {
            return choices.contains(value).then(|| value.clone());
        }
        let deeper = depth.saturating_add(1);
        match (kind(schema), value) {
            (Some("object"), Value::Object(object)) => {
                let mut named = properties(schema).peekable();
                if named.peek().is_none() {
                    return Some(value.clone());
                }
                let mut fitted = Map::new();
                for (name, property) in named {
                    match object
                        .get(name)
                        .and_then(|value| self.conform(property, value, deeper))
                    {
                        Some(value) => drop(fitted.insert(name.clone(), value)),
                        None if is_required(schema, name) => return None,
                        None => {}
                    }
                }
                Some(Value::Object(fitted))
            }
            (Some("array"), Value::Array(items)) => match schema.get("items") {
                Some(item) => items
                    .iter()
                    .map(|value| self.conform(item, value, deeper))
                    .collect::<Option<_>>()
                    .map(Value::Array),
                None => Some(value.clone()),
            },
            (Some("string"), Value::String(_))
            | (Some("number"), Value::Number(_))
            | (Some("boolean"), Value::Bool(_))
            | (None, _) => Some(value.clone()),
            (Some("integer"), Value::Number(number)) if !number.is_f64() => Some(value.clone()),
            _ => None,
        }
    }

    /// Follows references and takes the first alternative that is not null.
    fn resolve(&self, schema: &'a Value) -> &'a Value {
        let mut schema = schema;
        for _ in 0..DEEPEST {
            let referred = schema
                .get("$ref")
                .and_then(Value::as_str)
                .and_then(|path| path.strip_prefix('#'))
                .and_then(|path| self.root.pointer(path));
            let alternative = || {
                let options = ["anyOf", "oneOf", "allOf"]
                    .iter()
                    .find_map(|key| schema.get(*key)?.as_array())?;
                options.iter().find(|option| kind(option) != Some("null"))
            };
            match referred.or_else(alternative) {
                Some(next) => schema = next,
                None => break,
            }
        }
        schema
    }
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
}

fn is_required(schema: &Value, name: &str) -> bool {
    let required = schema.get("required").and_then(Value::as_array);
    required.is_some_and(|names| names.iter().any(|required| required == name))
}

/// The schema's type; of several the first that is not null.
fn kind(schema: &Value) -> Option<&str> {
    match schema.get("type") {
        Some(Value::String(kind)) => Some(kind),
        Some(Value::Array(kinds)) => kinds
            .iter()
            .filter_map(Value::as_str)
            .find(|kind| *kind != "null"),
        _ => schema.get("properties").map(|_| "object"),
    }
}
