//! The digest that tells whether two requests ask for the same.
//!
//! Implements "the same key with another body (canonical JSON)" of section 1: the order of keys and
//! the spelling of a whole number do not matter, everything else does.

use std::fmt::Write as _;

use serde_json::{Number, Value};
use sha2::{Digest as _, Sha256};

use super::ids::{MAX_SAFE_INTEGER, hex};
use super::route::Action;

/// Lower-case hexadecimal SHA-256 over an action and a body in canonical JSON.
#[must_use]
pub fn digest(action: Action, body: &Value) -> String {
    let mut text = String::from(action.as_str());
    text.push('\0');
    write(&mut text, body);
    hex(&Sha256::digest(text.as_bytes()))
}

/// Canonical JSON: no white space, keys sorted at every level, whole numbers without a fraction.
#[must_use]
pub fn canonical_json(value: &Value) -> String {
    let mut text = String::new();
    write(&mut text, value);
    text
}

fn write(out: &mut String, value: &Value) {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_unstable_by_key(|(key, _)| key.as_str());
            out.push('{');
            for (n, (key, value)) in entries.into_iter().enumerate() {
                if n > 0 {
                    out.push(',');
                }
                // Writing to a `String` cannot fail.
                let _ = write!(out, "{}:", Value::from(key.as_str()));
                write(out, value);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (n, value) in items.iter().enumerate() {
                if n > 0 {
                    out.push(',');
                }
                write(out, value);
            }
            out.push(']');
        }
        Value::Number(number) => write_number(out, number),
        Value::Null | Value::Bool(_) | Value::String(_) => {
            let _ = write!(out, "{value}");
        }
    }
}

/// `1`, `1.0` and `1e0` are one number for every JavaScript peer.
#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
fn write_number(out: &mut String, number: &Number) {
    let _ = match number.as_f64() {
        Some(float)
            if number.is_f64()
                && float.fract() == 0.0
                && float.abs() <= MAX_SAFE_INTEGER as f64 =>
        {
            write!(out, "{}", float as i64)
        }
        _ => write!(out, "{number}"),
    };
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(text: &str) -> Value {
        serde_json::from_str(text).unwrap_or_default()
    }

    #[test]
    fn key_order_and_number_spelling_do_not_matter_at_any_depth() {
        let one = parsed(r#"{"b":[{"y":1,"x":"é\n"}],"a":{"d":null,"c":2.0}}"#);
        let two = parsed(r#" {"a":{"c":2,"d":null}, "b":[{"x":"\u00e9\u000a","y":1e0}]}"#);
        assert_eq!(
            canonical_json(&one),
            "{\"a\":{\"c\":2,\"d\":null},\"b\":[{\"x\":\"é\\n\",\"y\":1}]}"
        );
        assert_eq!(digest(Action::Start, &one), digest(Action::Start, &two));
    }

    #[test]
    fn anything_else_matters() {
        let base = json!({"message": "m", "tags": ["a", "b"]});
        let others = [
            json!({"message": "n", "tags": ["a", "b"]}),
            json!({"message": "m", "tags": ["b", "a"]}),
            json!({"message": "m", "tags": ["a", "b"], "state": null}),
            json!({"message": "m", "tags": [["a", "b"]]}),
        ];
        let digest_of = |v: &Value| digest(Action::Start, v);
        for other in &others {
            assert_ne!(digest_of(&base), digest_of(other), "{other}");
        }
        assert_ne!(digest_of(&base), digest(Action::Resume, &base));
        assert_ne!(digest_of(&json!(1.5)), digest_of(&json!(1)));
        assert_ne!(digest_of(&json!("1")), digest_of(&json!(1)));
    }

    #[test]
    fn the_digest_is_lower_hex_sha_256_of_the_action_a_zero_and_the_text() {
        // sha256("start\0{}"), computed by another implementation.
        assert_eq!(
            digest(Action::Start, &json!({})),
            DIGEST_OF_START_AND_NOTHING
        );
    }

    const DIGEST_OF_START_AND_NOTHING: &str =
        "54acb09b393bf704907f7b5257619e459772d2f79a8035995e0f6d1130ff7fb2";
}
