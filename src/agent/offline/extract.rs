//! Reading texts and JSON: names, topics, phrases, and results told as Markdown.
//!
//! Everything here returns parts of what it was given.

use serde_json::{Map, Value};

/// The longest text that is told of results, in bytes.
const LONGEST_TEXT: usize = 64 * 1024;

/// Names that stand for what somebody wants to know, the most telling first.
const TOPIC_NAMES: &[&str] = &[
    "topic", "question", "query", "message", "prompt", "text", "subject", "title", "task", "input",
    "request",
];

/// Names that stand for a heading.
const HEADING_NAMES: &[&str] = &["title", "topic", "question", "heading", "subject", "name"];

const LINKING: &[&str] = &[
    "a", "about", "an", "and", "are", "as", "at", "be", "by", "can", "do", "does", "for", "from",
    "how", "in", "is", "it", "of", "on", "or", "that", "the", "this", "to", "was", "were", "what",
    "when", "where", "which", "who", "why", "with",
];

/// Whether a name asks for what the user wants to know.
pub(super) fn is_topic_name(name: &str) -> bool {
    TOPIC_NAMES.iter().any(|topic| alike(topic, name))
}

/// Whether two names differ in case and separators only.
pub(super) fn alike(a: &str, b: &str) -> bool {
    let plain = |name: &str| -> String {
        name.chars()
            .filter(|c| c.is_alphanumeric())
            .flat_map(char::to_lowercase)
            .collect()
    };
    plain(a) == plain(b)
}

/// Whether a name is that of an identifier.
pub(super) fn is_id_name(name: &str) -> bool {
    name == "id" || name.ends_with("Id") || name.ends_with("_id")
}

/// The value under a name, in the outermost object that has it; lists are not entered.
pub(super) fn find<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    walk(value, &|object: &'a Map<String, Value>| object.get(name))
}

/// The value under a name that is alike.
pub(super) fn find_alike<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    walk(value, &|object: &'a Map<String, Value>| {
        object
            .iter()
            .find(|(key, _)| alike(key, name))
            .map(|(_, value)| value)
    })
}

/// The outermost non-empty list.
pub(super) fn first_array(value: &Value) -> Option<&Vec<Value>> {
    if let Value::Array(items) = value {
        return Some(items);
    }
    walk(value, &|object| {
        object
            .values()
            .find_map(|value| value.as_array().filter(|items| !items.is_empty()))
    })
}

/// Goes through nested objects, the outermost first.
fn walk<'a, T>(value: &'a Value, pick: &dyn Fn(&'a Map<String, Value>) -> Option<T>) -> Option<T> {
    let mut level: Vec<&'a Map<String, Value>> = value.as_object().into_iter().collect();
    while !level.is_empty() {
        if let Some(found) = level.iter().find_map(|object| pick(object)) {
            return Some(found);
        }
        level = level
            .iter()
            .flat_map(|object| object.values().filter_map(Value::as_object))
            .collect();
    }
    None
}

/// What the user wants to know, out of the message.
pub(super) fn topic(user: &Value) -> String {
    let named = TOPIC_NAMES
        .iter()
        .find_map(|name| find(user, name)?.as_str());
    let text = named.or_else(|| first_text(user)).map(str::trim);
    text.map_or_else(|| user.to_string(), str::to_owned)
}

/// The outermost text that is no identifier.
pub(super) fn first_text(value: &Value) -> Option<&str> {
    match value {
        Value::String(text) => Some(text),
        Value::Array(items) => items.iter().find_map(first_text),
        Value::Object(_) => walk(value, &|object| {
            object
                .iter()
                .find(|(name, value)| value.is_string() && !is_id_name(name))
                .and_then(|(_, value)| value.as_str())
        })
        .or_else(|| {
            walk(value, &|object| {
                object
                    .values()
                    .find_map(|value| value.as_array()?.iter().find_map(first_text))
            })
        }),
        _ => None,
    }
}

/// The longest text in an element.
pub(super) fn longest_text(value: &Value) -> Option<&str> {
    match value {
        Value::String(text) => Some(text),
        Value::Array(items) => items
            .iter()
            .filter_map(longest_text)
            .max_by_key(|text| text.len()),
        Value::Object(object) => object
            .values()
            .filter_map(longest_text)
            .max_by_key(|text| text.len()),
        _ => None,
    }
}

/// Runs of telling words, as they stand in the text.
pub(super) fn phrases(text: &str) -> Vec<String> {
    let mut phrases: Vec<String> = Vec::new();
    let mut phrase = String::new();
    let mut close = |phrase: &mut String| {
        let done = std::mem::take(phrase);
        if !done.is_empty() && !phrases.contains(&done) {
            phrases.push(done);
        }
    };
    for word in text.split_whitespace() {
        let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
        if bare.is_empty() || LINKING.contains(&bare.to_lowercase().as_str()) {
            close(&mut phrase);
            continue;
        }
        if !word.starts_with(bare) {
            close(&mut phrase);
        }
        if !phrase.is_empty() {
            phrase.push(' ');
        }
        phrase.push_str(bare);
        if !word.ends_with(bare) {
            close(&mut phrase);
        }
    }
    close(&mut phrase);
    phrases
}

/// The first `characters` of a text.
pub(super) fn clip(text: &str, characters: usize) -> &str {
    text.char_indices()
        .nth(characters)
        .and_then(|(end, _)| text.get(..end))
        .unwrap_or(text)
}

/// Results as Markdown: what names something becomes a heading, what has an identifier beside it a
/// quotation, and lists follow in order.
pub(super) fn render(results: &[&Value]) -> String {
    let mut blocks = Vec::new();
    for result in results {
        block(result, 1, &mut blocks);
    }
    let mut text = String::new();
    for block in blocks {
        if text.len().saturating_add(block.len()) > LONGEST_TEXT {
            break;
        }
        if !text.is_empty() {
            text.push_str("\n\n");
        }
        text.push_str(&block);
    }
    text
}

fn block(value: &Value, level: usize, blocks: &mut Vec<String>) {
    match value {
        Value::String(text) if !text.trim().is_empty() => blocks.push(text.trim().to_owned()),
        Value::Array(items) => items.iter().for_each(|item| block(item, level, blocks)),
        Value::Object(object) => object_blocks(object, level, blocks),
        _ => {}
    }
}

fn object_blocks(object: &Map<String, Value>, level: usize, blocks: &mut Vec<String>) {
    let heading = HEADING_NAMES
        .iter()
        .find(|name| object.get(**name).is_some_and(Value::is_string))
        .copied();
    if let Some(text) = heading.and_then(|name| object.get(name)?.as_str()) {
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        blocks.push(format!("{} {line}", "#".repeat(level.min(6))));
    }
    let ids: Vec<&str> = object
        .iter()
        .filter(|(name, _)| is_id_name(name))
        .filter_map(|(_, value)| value.as_str())
        .collect();
    for (name, value) in object {
        match value {
            Value::String(_) if Some(name.as_str()) == heading || is_id_name(name) => {}
            Value::String(text)
                if heading.is_none() && !ids.is_empty() && !text.trim().is_empty() =>
            {
                let quoted: Vec<String> = text
                    .trim()
                    .lines()
                    .map(|line| format!("> {line}"))
                    .collect();
                blocks.push(format!("{}\n> [{}]", quoted.join("\n"), ids.join(", ")));
            }
            Value::Array(items) => match items.iter().map(short).collect::<Option<Vec<_>>>() {
                Some(names) if names.is_empty() => {}
                Some(names) => blocks.push(format!("{name}: {}", names.join(", "))),
                None => items
                    .iter()
                    .for_each(|item| block(item, level.saturating_add(1), blocks)),
            },
            other => block(other, level.saturating_add(1), blocks),
        }
    }
}

/// A list item that is a word: a string, or an object with nothing but an identifier.
fn short(item: &Value) -> Option<&str> {
    match item {
        Value::String(text) => Some(text),
        Value::Object(object) => match object.iter().next() {
            Some((name, Value::String(text))) if object.len() == 1 && is_id_name(name) => {
                Some(text)
            }
            _ => None,
        },
        _ => None,
    }
}
