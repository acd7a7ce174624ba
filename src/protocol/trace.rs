//! The trace of a request, as W3C Trace Context spells it: read from headers, kept with the
//! session, and sent on to children with a span of the call's own.
//!
//! A malformed `traceparent` is no reason to refuse a request: it is dropped. Implements the
//! header rules of section 1.

use http::{HeaderMap, HeaderValue};
use serde::{Deserialize, Serialize};

/// The longest `tracestate` that is kept, in bytes.
const STATE_LIMIT: usize = 512;

/// A trace that a session continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceContext {
    /// The `traceparent` header.
    pub traceparent: String,
    /// The `tracestate` header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
}

impl TraceContext {
    /// The trace that a request continues, if it names one in a form that this version knows.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
        let traceparent = text("traceparent")?;
        parts(traceparent)?;
        Some(Self {
            traceparent: traceparent.to_owned(),
            tracestate: text("tracestate")
                .filter(|state| !state.is_empty() && state.len() <= STATE_LIMIT)
                .map(Into::into),
        })
    }

    /// The trace's id, 32 hex digits; the whole `traceparent` if it has none.
    #[must_use]
    pub fn trace_id(&self) -> &str {
        parts(&self.traceparent).map_or(&self.traceparent, |[_, id, ..]| id)
    }

    /// The same trace with another span: that of the call which is about to be made.
    #[must_use]
    pub fn with_span(&self, span: [u8; 8]) -> Self {
        let Some([_, id, _, flags]) = parts(&self.traceparent) else {
            return self.clone();
        };
        // A span of zeros is none.
        let span = if span == [0; 8] { [1; 8] } else { span };
        Self {
            traceparent: format!("00-{id}-{}-{flags}", super::ids::hex(&span)),
            tracestate: self.tracestate.clone(),
        }
    }

    /// The two headers.
    #[must_use]
    pub fn headers(&self) -> Option<(HeaderValue, Option<HeaderValue>)> {
        let state = self.tracestate.as_deref();
        Some((
            HeaderValue::from_str(&self.traceparent).ok()?,
            state.and_then(|state| HeaderValue::from_str(state).ok()),
        ))
    }
}

/// Version, trace, span and flags of a `traceparent`.
fn parts(text: &str) -> Option<[&str; 4]> {
    let mut fields = text.split('-');
    let all = [
        fields.next()?,
        fields.next()?,
        fields.next()?,
        fields.next()?,
    ];
    let [version, trace, span, flags] = all;
    let hex = |field: &str, length: usize| {
        field.len() == length
            && field
                .bytes()
                .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let said = |field: &str| field.bytes().any(|b| b != b'0');
    // A later version may add fields; this one has exactly four.
    let known = hex(version, 2)
        && version != "ff"
        && hex(trace, 32)
        && said(trace)
        && hex(span, 16)
        && said(span)
        && hex(flags, 2)
        && (version != "00" || fields.next().is_none());
    known.then_some(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn read(traceparent: &str) -> Option<TraceContext> {
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", HeaderValue::from_str(traceparent).unwrap());
        headers.insert("tracestate", HeaderValue::from_static("v=1"));
        TraceContext::from_headers(&headers)
    }

    #[test]
    fn a_trace_goes_on_under_a_span_of_its_own() {
        let trace = read(PARENT).unwrap();
        assert_eq!(trace.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        let next = trace.with_span([0xab; 8]);
        assert_eq!(
            next.traceparent,
            "00-4bf92f3577b34da6a3ce929d0e0e4736-abababababababab-01"
        );
        assert_eq!(next.tracestate.as_deref(), Some("v=1"));
        assert_ne!(trace.with_span([0; 8]).traceparent, PARENT);
        assert!(read(&trace.with_span([0; 8]).traceparent).is_some());
    }

    #[test]
    fn what_is_no_traceparent_is_dropped() {
        for bad in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        ] {
            assert_eq!(read(bad), None, "{bad}");
        }
        let later = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x";
        assert!(read(later).is_some());
    }
}
