//! The log of a Worker: every event of `tracing` is one line of JSON on the console.
//!
//! Installed once for each instance, unless the Worker has a subscriber of its own by then. Spans
//! are let through and not written: an event here has the ids that it needs.

use std::fmt;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::set_global_default;
use tracing::{Event, Metadata, Subscriber};

use super::runtime::write;
use crate::platform::{LOG_TARGET, Level};

/// Makes the console the place where events go, if they go nowhere yet.
pub(super) fn install() {
    if !tracing::dispatcher::has_been_set() {
        // Nobody else can have come first: there is one thread.
        drop(set_global_default(Console));
    }
}

struct Console;

impl Subscriber for Console {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let (level, name) = match *metadata.level() {
            tracing::Level::ERROR => (Level::Error, "error"),
            tracing::Level::WARN => (Level::Warn, "warn"),
            _ => (Level::Info, "info"),
        };
        let mut line = Map::new();
        line.insert("level".to_owned(), name.into());
        if metadata.target() != LOG_TARGET {
            line.insert("target".to_owned(), metadata.target().into());
        }
        event.record(&mut Fields(&mut line));
        write(level, &Value::Object(line).to_string());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Takes an event's fields into its line.
struct Fields<'a>(&'a mut Map<String, Value>);

impl Fields<'_> {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Fields<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}
