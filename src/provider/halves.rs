//! Characters that a server cut in two.
//!
//! A server that cuts texts between two units of UTF-16 writes each half of a character as an escape
//! of its own, which is no JSON by itself. The halves are carried through the reader as characters
//! of a private plane and joined where the pieces of one text meet.

use serde_json::Value;

use crate::agent::model::ModelEvent;

/// Where the halves stand while they are apart: the last plane, which no text uses.
const PRIVATE: u32 = 0x0010_0000;

/// The first of the first halves; there are as many of either.
const HIGH: u32 = 0xD800;

/// The first second half.
const LOW: u32 = 0xDC00;

/// The JSON object that an event's data is.
pub(super) fn object(data: &str) -> Option<Value> {
    let read = |data: &str| serde_json::from_str::<Value>(data).ok();
    read(data)
        .or_else(|| data.contains("\\u").then(|| read(&apart(data)))?)
        .filter(Value::is_object)
}

/// The text with each escape of a lone half as a character of the private plane.
fn apart(data: &str) -> String {
    let mut out = String::with_capacity(data.len());
    let mut rest = data;
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        out.push_str(before);
        let unit = unit(escape);
        let taken = match unit {
            Some(unit) if is_half(unit) => {
                let next = escape.get(6..).and_then(self::unit);
                if unit < LOW && next.is_some_and(|next| (LOW..=0xDFFF).contains(&next)) {
                    // Both halves: a character.
                    out.push_str(escape.get(..12).unwrap_or_default());
                    12
                } else {
                    out.extend(char::from_u32(PRIVATE | (unit - HIGH)));
                    6
                }
            }
            // Any other escape, whose second character may be a backslash.
            _ => {
                let length = escape
                    .char_indices()
                    .nth(2)
                    .map_or(escape.len(), |(at, _)| at);
                out.push_str(escape.get(..length).unwrap_or_default());
                length
            }
        };
        rest = escape.get(taken..).unwrap_or_default();
    }
    out.push_str(rest);
    out
}

/// The unit that the text begins with as an escape.
fn unit(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    u32::from_str_radix(digits, 16).ok()
}

fn is_half(unit: u32) -> bool {
    (HIGH..=0xDFFF).contains(&unit)
}

/// Joins what was cut, over the pieces of each text.
#[derive(Default)]
pub(super) struct Halves {
    /// A first half, and the text whose last piece ended with it.
    waiting: Option<(Text, u32)>,
}

/// Which text a piece belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Text {
    Answer,
    Reasoning,
    Arguments(usize),
}

/// A text that is whole, with whole characters.
pub(super) fn whole(text: String) -> String {
    match Halves::default().join(ModelEvent::TextDelta(text)) {
        Some(ModelEvent::TextDelta(text)) => text,
        _ => String::new(),
    }
}

impl Halves {
    /// The event with whole characters; `None` when nothing of it is left for now.
    pub(super) fn join(&mut self, event: ModelEvent) -> Option<ModelEvent> {
        match event {
            ModelEvent::TextDelta(text) => {
                self.piece(Text::Answer, text).map(ModelEvent::TextDelta)
            }
            ModelEvent::Reasoning {
                content,
                is_complete: false,
            } => {
                let content = self.piece(Text::Reasoning, content)?;
                Some(ModelEvent::Reasoning {
                    content,
                    is_complete: false,
                })
            }
            ModelEvent::ToolCallDelta { index, delta } => {
                let delta = self.piece(Text::Arguments(index), delta)?;
                Some(ModelEvent::ToolCallDelta { index, delta })
            }
            other => Some(other),
        }
    }

    fn piece(&mut self, text: Text, piece: String) -> Option<String> {
        let half = |letter: char| {
            let unit = u32::from(letter).checked_sub(PRIVATE)?.checked_add(HIGH)?;
            is_half(unit).then_some(unit)
        };
        if self.waiting.is_none() && !piece.chars().any(|letter| half(letter).is_some()) {
            return Some(piece);
        }
        // What waited for another text waits no more: half a character is none.
        let mut first = self
            .waiting
            .take()
            .filter(|(of, _)| *of == text)
            .map(|(_, half)| half);
        let mut whole = String::with_capacity(piece.len());
        for letter in piece.chars() {
            match (first.take(), half(letter)) {
                (Some(high), Some(low)) if low >= LOW => {
                    let joined = 0x1_0000 + ((high - HIGH) << 10) + (low - LOW);
                    whole.push(char::from_u32(joined).unwrap_or(char::REPLACEMENT_CHARACTER));
                }
                (lone, found) => {
                    if lone.is_some() {
                        whole.push(char::REPLACEMENT_CHARACTER);
                    }
                    match found {
                        Some(unit) if unit < LOW => first = Some(unit),
                        Some(_) => whole.push(char::REPLACEMENT_CHARACTER),
                        None => whole.push(letter),
                    }
                }
            }
        }
        self.waiting = first.map(|half| (text, half));
        (!whole.is_empty()).then_some(whole)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::{Halves, object};
    use crate::agent::model::ModelEvent;

    /// A text cut at every unit of UTF-16, each piece as a server writes it.
    fn through(text: &str) -> String {
        let mut halves = Halves::default();
        text.encode_utf16()
            .filter_map(|unit| {
                let data = object(&format!("{{\"a\":\"\\u{unit:04x}\"}}")).unwrap();
                let piece = data.get("a").unwrap().as_str().unwrap().to_owned();
                halves.join(ModelEvent::TextDelta(piece))
            })
            .map(|event| match event {
                ModelEvent::TextDelta(text) => text,
                other => format!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn a_text_that_was_cut_between_the_halves_of_its_characters_is_whole() {
        let text = "Größe 日本 👩‍👩‍👧‍👦 𝔘𝔫𝔦 \\u \\ud83d \"\n end";
        assert_eq!(through(text), text);
    }

    #[test]
    fn half_a_character_that_stays_alone_is_replaced_or_left_out() {
        let delta = |index, text: &str| {
            let data = object(&format!("{{\"a\":\"{text}\"}}")).unwrap();
            let delta = data.get("a").unwrap().as_str().unwrap().to_owned();
            ModelEvent::ToolCallDelta { index, delta }
        };
        let mut halves = Halves::default();
        assert_eq!(halves.join(delta(0, "a\\ud83d")), Some(delta(0, "a")));
        // Another text has nothing to do with it.
        assert_eq!(halves.join(delta(1, "\\udc69")), Some(delta(1, "\u{fffd}")));
        assert_eq!(
            halves.join(delta(0, "b\\ud83dc")),
            Some(delta(0, "b\u{fffd}c"))
        );
        assert_eq!(halves.join(delta(0, "\\ud83d")), None);
        assert_eq!(halves.join(delta(0, "\\ud83d")), Some(delta(0, "\u{fffd}")));
        assert_eq!(halves.join(delta(0, "\\udc69")), Some(delta(0, "👩")));
    }

    #[test]
    fn what_is_no_object_is_none_and_whole_characters_stay() {
        assert_eq!(object("{\"a\":\"\\ud83d"), None);
        assert_eq!(object("[\"\\ud83d\"]"), None);
        let both = object("{\"a\":\"\\\\ud83d \\ud83d\\udc69 \\ud83d\"}").unwrap();
        let text = both.get("a").unwrap().as_str().unwrap();
        assert!(text.starts_with("\\ud83d 👩 "), "{text}");
    }
}
