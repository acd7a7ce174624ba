//! The grammars once more, as plainly as their specifications say them: what the product is held to.

use serde_json::{Map, Value};

/// An event or a comment of a stream.
#[derive(Debug, PartialEq)]
pub(crate) enum Item {
    Event(Event),
    Comment,
    /// A field of the contract that is not UTF-8: nothing follows.
    Broken,
}

/// An event as it stands in the bytes.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Event {
    pub(crate) name: String,
    pub(crate) id: Option<String>,
    pub(crate) data: Option<String>,
}

/// The items of a whole body, line by line as the HTML standard says, but for two things of the
/// contract's: an event may be a name alone, and what is not UTF-8 is an error.
pub(crate) fn items(body: &[u8]) -> Vec<Item> {
    let mut items = Vec::new();
    let mut event = Event::default();
    let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    for line in lines(body) {
        if line.is_empty() {
            let done = std::mem::take(&mut event);
            if !done.name.is_empty() || done.data.is_some() {
                items.push(Item::Event(done));
            }
            continue;
        }
        if line[0] == b':' {
            items.push(Item::Comment);
            continue;
        }
        let (field, value) = match line.iter().position(|byte| *byte == b':') {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &line[..0]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        if field == b"id" && value.contains(&0) {
            continue;
        }
        if ![&b"event"[..], b"id", b"data"].contains(&field) {
            continue;
        }
        let Ok(value) = std::str::from_utf8(value) else {
            items.push(Item::Broken);
            return items;
        };
        match field {
            b"event" => value.clone_into(&mut event.name),
            b"id" => event.id = Some(value.to_owned()),
            _ => {
                let before = event.data.take().map(|data| data + "\n");
                event.data = Some(before.unwrap_or_default() + value);
            }
        }
    }
    items
}

/// The lines that were ended, by CR, LF or both.
fn lines(body: &[u8]) -> Vec<&[u8]> {
    let mut lines = Vec::new();
    let mut rest = body;
    while let Some(at) = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
        lines.push(&rest[..at]);
        let end = if rest[at..].starts_with(b"\r\n") {
            2
        } else {
            1
        };
        rest = &rest[at + end..];
    }
    lines
}

/// The pairs of a query, by the URL standard.
pub(crate) fn pairs(query: &str) -> Vec<(String, String)> {
    let decoded = |text: &str| {
        let bytes = text.as_bytes();
        let mut out = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let hex = |offset: usize| {
                let digit = bytes.get(at + offset).copied().map(char::from);
                digit.and_then(|digit| digit.to_digit(16))
            };
            match (bytes[at], hex(1), hex(2)) {
                (b'%', Some(high), Some(low)) => {
                    out.push(u8::try_from(high * 16 + low).unwrap());
                    at += 2;
                }
                (b'+', ..) => out.push(b' '),
                (byte, ..) => out.push(byte),
            }
            at += 1;
        }
        String::from_utf8_lossy(&out).into_owned()
    };
    let pieces = query.split('&').filter(|piece| !piece.is_empty());
    pieces
        .map(|piece| {
            let (name, value) = piece.split_once('=').unwrap_or((piece, ""));
            (decoded(name), decoded(value))
        })
        .collect()
}

/// A document after the operations of RFC 6902; `None` where one does not apply.
pub(crate) fn patched(document: &Value, operations: &[Value]) -> Option<Value> {
    let mut document = document.clone();
    for operation in operations {
        let pointer = |name: &str| tokens(operation.get(name)?.as_str()?);
        let path = pointer("path")?;
        match operation.get("op")?.as_str()? {
            "add" => add(&mut document, &path, operation.get("value")?.clone())?,
            "remove" => drop(remove(&mut document, &path)?),
            "replace" => *at(&mut document, &path)? = operation.get("value")?.clone(),
            "move" => {
                let from = pointer("from")?;
                if from.len() < path.len() && path.starts_with(&from) {
                    return None;
                }
                let value = remove(&mut document, &from)?;
                add(&mut document, &path, value)?;
            }
            "copy" => {
                let value = at(&mut document, &pointer("from")?)?.clone();
                add(&mut document, &path, value)?;
            }
            "test" if at(&mut document, &path)? == operation.get("value")? => {}
            _ => return None,
        }
    }
    Some(document)
}

fn tokens(pointer: &str) -> Option<Vec<String>> {
    if pointer.is_empty() {
        return Some(Vec::new());
    }
    let unescaped = |token: &str| {
        let mut out = String::new();
        let mut letters = token.chars();
        while let Some(letter) = letters.next() {
            out.push(match letter {
                '~' => match letters.next()? {
                    '0' => '~',
                    '1' => '/',
                    _ => return None,
                },
                letter => letter,
            });
        }
        Some(out)
    };
    pointer
        .strip_prefix('/')?
        .split('/')
        .map(unescaped)
        .collect()
}

fn index(token: &str, below: usize) -> Option<usize> {
    let plain =
        token == "0" || (!token.starts_with('0') && token.bytes().all(|b| b.is_ascii_digit()));
    let index = token.parse().ok().filter(|_| plain)?;
    (index < below).then_some(index)
}

fn at<'a>(document: &'a mut Value, path: &[String]) -> Option<&'a mut Value> {
    let Some((token, rest)) = path.split_first() else {
        return Some(document);
    };
    let inner = match document {
        Value::Object(map) => map.get_mut(token),
        Value::Array(items) => index(token, items.len()).and_then(|index| items.get_mut(index)),
        _ => None,
    };
    at(inner?, rest)
}

fn add(document: &mut Value, path: &[String], value: Value) -> Option<()> {
    let Some((last, parent)) = path.split_last() else {
        *document = value;
        return Some(());
    };
    match at(document, parent)? {
        Value::Object(map) => drop(map.insert(last.clone(), value)),
        Value::Array(items) if last == "-" => items.push(value),
        Value::Array(items) => items.insert(index(last, items.len() + 1)?, value),
        _ => return None,
    }
    Some(())
}

fn remove(document: &mut Value, path: &[String]) -> Option<Value> {
    // The root of a state is not taken away.
    let (last, parent) = path.split_last()?;
    match at(document, parent)? {
        Value::Object(map) => map.shift_remove(last),
        Value::Array(items) => index(last, items.len()).map(|index| items.remove(index)),
        _ => None,
    }
}

/// How deep a value nests: 0 for one that is neither an object nor an array.
pub(crate) fn depth(value: &Value) -> usize {
    let inner = match value {
        Value::Object(map) => map.values().map(depth).max(),
        Value::Array(items) => items.iter().map(depth).max(),
        _ => return 0,
    };
    inner.unwrap_or(0) + 1
}

/// A text as a JSON object, if it is one.
pub(crate) fn object(text: &str) -> Option<Map<String, Value>> {
    serde_json::from_str(text).ok()
}
