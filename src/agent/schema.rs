//! Shapes: a JSON Schema for the model to read, and the Rust type that has the last word.

use std::rc::Rc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// The declared shape of a state, an argument or an output.
#[derive(Clone)]
pub struct Shape {
    schema: Rc<Value>,
    initial: Rc<Value>,
    check: Check,
}

/// Says what is wrong with a value.
type Check = Rc<dyn Fn(&Value) -> Result<(), String>>;

impl Shape {
    /// Any JSON object.
    #[must_use]
    pub fn any() -> Self {
        Self {
            schema: Rc::new(json!({"type": "object"})),
            initial: Rc::new(Value::Object(Map::new())),
            check: Rc::new(|value| {
                if value.is_object() {
                    Ok(())
                } else {
                    Err("expected an object".into())
                }
            }),
        }
    }

    /// The shape of a type.
    #[must_use]
    pub fn of<T: DeserializeOwned + schemars::JsonSchema>() -> Self {
        let mut schema = schemars::schema_for!(T).to_value();
        if let Some(object) = schema.as_object_mut() {
            object.remove("$schema");
        }
        Self {
            schema: Rc::new(schema),
            initial: Rc::new(Value::Object(Map::new())),
            check: Rc::new(|value| T::deserialize(value).map(drop).map_err(|e| e.to_string())),
        }
    }

    /// The shape of a type, with its default as the initial value.
    #[must_use]
    pub fn of_default<T: Serialize + DeserializeOwned + schemars::JsonSchema + Default>() -> Self {
        let mut shape = Self::of::<T>();
        if let Ok(value) = serde_json::to_value(T::default()) {
            shape.initial = Rc::new(value);
        }
        shape
    }

    /// The JSON Schema.
    #[must_use]
    pub fn schema(&self) -> &Value {
        &self.schema
    }

    /// The initial value: the type's default, or an empty object.
    #[must_use]
    pub fn initial(&self) -> &Value {
        &self.initial
    }

    /// Checks a value.
    ///
    /// # Errors
    /// What is wrong with it, naming the field where that is known.
    pub fn check(&self, value: &Value) -> Result<(), String> {
        (self.check)(value)
    }
}
