//! A JSON Schema in the words to which the provider can hold an answer.
//!
//! It takes a part of JSON Schema: every object says that it has no other fields, and there are no
//! bounds on numbers, texts and lists. What an answer misses of the bounds, its check finds; the model
//! reads them in the tool that hands the output in.

use serde_json::{Map, Value};

use super::super::history::{object, put};

/// Fields that stay as they are.
const KEPT: [&str; 6] = ["type", "enum", "const", "required", "title", "description"];

/// The formats of texts.
const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "uri",
    "ipv4",
    "ipv6",
    "uuid",
];

/// Fields that let in what the provider has no words for: maps, tuples, and mixtures.
const BEYOND: [&str; 5] = [
    "additionalProperties",
    "patternProperties",
    "prefixItems",
    "allOf",
    "not",
];

/// Where the types that a schema names are.
const DEFS: &str = "$defs";

/// The schema in those words; `None` when it has a map, a tuple, a value of any kind, a mixture of
/// fields and variants, or a type within itself.
pub(super) fn held(schema: &Value) -> Option<Value> {
    let mut holder = Holder {
        given: schema.get(DEFS),
        made: Map::new(),
    };
    let mut held = holder.part(schema)?;
    if !holder.made.is_empty() {
        put(held.as_object_mut()?, DEFS, holder.made.into());
    }
    Some(held)
}

struct Holder<'a> {
    given: Option<&'a Value>,
    /// The named types so far; one that is under way is null.
    made: Map<String, Value>,
}

impl Holder<'_> {
    fn part(&mut self, schema: &Value) -> Option<Value> {
        let schema = schema.as_object()?;
        if let Some(reference) = schema.get("$ref") {
            let is_mixed = schema.contains_key("properties");
            self.named(reference.as_str()?).filter(|()| !is_mixed)?;
            return Some(object(&mut [("$ref", reference.clone())]));
        }
        let mut held = Map::new();
        for (field, value) in schema {
            let value = match field.as_str() {
                field if KEPT.contains(&field) => value.clone(),
                "format" if FORMATS.iter().any(|format| value == format) => value.clone(),
                "minItems" if matches!(value.as_u64(), Some(0 | 1)) => value.clone(),
                "items" => self.part(value)?,
                "anyOf" | "oneOf" => {
                    let variants = value.as_array()?.iter().map(|one| self.part(one));
                    variants.collect::<Option<_>>()?
                }
                "properties" => {
                    let mut fields = Map::new();
                    for (name, field) in value.as_object()? {
                        put(&mut fields, name, self.part(field)?);
                    }
                    fields.into()
                }
                field if BEYOND.contains(&field) && *value != Value::Bool(false) => return None,
                _ => continue,
            };
            let field = if field == "oneOf" { "anyOf" } else { field };
            put(&mut held, field, value);
        }
        is_said(&held).then(|| closed(held))
    }

    /// Sees to a type by its place in the schema.
    fn named(&mut self, place: &str) -> Option<()> {
        let name = place.strip_prefix("#/$defs/")?;
        match self.made.get(name) {
            // A type within itself.
            Some(Value::Null) => None,
            Some(_) => Some(()),
            None => {
                put(&mut self.made, name, Value::Null);
                let part = self.part(self.given?.get(name)?)?;
                put(&mut self.made, name, part);
                Some(())
            }
        }
    }
}

/// Whether a part says what its values are, and not by fields and variants at once.
fn is_said(part: &Map<String, Value>) -> bool {
    let says = |field: &str| part.contains_key(field);
    if says("anyOf") {
        return !says("properties");
    }
    if is(part, "array") {
        return says("items");
    }
    ["type", "enum", "const"].into_iter().any(says)
}

/// An object that has no other fields.
fn closed(mut part: Map<String, Value>) -> Value {
    if is(&part, "object") {
        part.entry("properties").or_insert_with(|| object(&mut []));
        put(&mut part, "additionalProperties", false.into());
    }
    part.into()
}

/// Whether a part's values may be of this kind.
fn is(part: &Map<String, Value>, kind: &str) -> bool {
    match part.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|one| one == kind),
        Some(one) => one == kind,
        None => false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, dead_code)]

    use std::collections::BTreeMap;

    use schemars::JsonSchema;
    use serde::Deserialize;
    use serde_json::{Value, json};

    use super::held;
    use crate::agent::Shape;

    /// A report.
    #[derive(Deserialize, JsonSchema)]
    struct Report {
        /// How deep.
        #[schemars(range(min = 3, max = 9))]
        depth: u32,
        #[schemars(length(min = 2), pattern("^a"))]
        name: String,
        tides: Vec<Tide>,
        best: Option<Tide>,
        noted: Option<String>,
        #[serde(default)]
        kind: Kind,
        sky: Sky,
    }

    #[derive(Deserialize, JsonSchema)]
    struct Tide {
        height: f64,
    }

    #[derive(Default, Deserialize, JsonSchema)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        /// The high one.
        #[default]
        Spring,
        /// The low one.
        Neap,
    }

    #[derive(Deserialize, JsonSchema)]
    #[serde(tag = "is")]
    enum Sky {
        Clear,
        Cloudy { parts: u8 },
    }

    fn of<T: serde::de::DeserializeOwned + JsonSchema>() -> Option<Value> {
        held(Shape::of::<T>().schema())
    }

    #[test]
    fn a_schema_is_said_in_the_words_that_the_provider_has() {
        let text = |value: &str| json!({"type": "string", "const": value});
        let closed = |fields: Value, required: Value| {
            json!({
                "type": "object", "properties": fields,
                "required": required, "additionalProperties": false,
            })
        };
        let mut spring = text("spring");
        spring["description"] = "The high one.".into();
        let mut neap = text("neap");
        neap["description"] = "The low one.".into();
        let mut wanted = closed(
            json!({
                "depth": {"description": "How deep.", "type": "integer"},
                "name": {"type": "string"},
                "tides": {"type": "array", "items": {"$ref": "#/$defs/Tide"}},
                "best": {"anyOf": [{"$ref": "#/$defs/Tide"}, {"type": "null"}]},
                "noted": {"type": ["string", "null"]},
                "kind": {"$ref": "#/$defs/Kind"},
                "sky": {"$ref": "#/$defs/Sky"},
            }),
            json!(["depth", "name", "tides", "sky"]),
        );
        wanted["title"] = "Report".into();
        wanted["description"] = "A report.".into();
        wanted["$defs"] = json!({
            "Tide": closed(json!({"height": {"type": "number"}}), json!(["height"])),
            "Kind": {"anyOf": [spring, neap]},
            "Sky": {"anyOf": [
                closed(json!({"is": text("Clear")}), json!(["is"])),
                closed(json!({"is": text("Cloudy"), "parts": {"type": "integer"}}), json!(["is", "parts"])),
            ]},
        });
        assert_eq!(of::<Report>(), Some(wanted));
    }

    #[derive(Deserialize, JsonSchema)]
    struct Tree {
        branches: Vec<Tree>,
    }

    #[derive(Deserialize, JsonSchema)]
    struct Grove {
        tree: Option<Box<Tree>>,
    }

    #[derive(Deserialize, JsonSchema)]
    struct Mixed {
        name: String,
        #[serde(flatten)]
        sky: Sky,
    }

    #[derive(Deserialize, JsonSchema)]
    #[serde(tag = "is")]
    enum Tagged {
        Tide(Tide),
    }

    #[derive(Deserialize, JsonSchema)]
    struct Wrapped<T> {
        value: T,
    }

    #[test]
    fn what_the_provider_has_no_words_for_is_told() {
        assert!(of::<Wrapped<u8>>().is_some());
        let beyond = [
            of::<Wrapped<BTreeMap<String, u8>>>(),
            of::<Wrapped<Value>>(),
            of::<Wrapped<Vec<Value>>>(),
            of::<Wrapped<(u8, String)>>(),
            of::<Wrapped<Vec<BTreeMap<String, Tide>>>>(),
            of::<Tree>(),
            of::<Grove>(),
            of::<Mixed>(),
            of::<Tagged>(),
        ];
        for (at, held) in beyond.iter().enumerate() {
            assert_eq!(*held, None, "{at}");
        }
    }
}
