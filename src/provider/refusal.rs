//! What a provider refuses with, in our own words.
//!
//! Status, type and code choose the sentence. A provider's own text is searched for what tells an
//! overflow of the context and is never repeated: it may quote the prompt or the key.

use http::HeaderMap;
use http::header::RETRY_AFTER;
use serde_json::Value;

use crate::agent::model::{ModelError, ModelErrorKind};
use crate::protocol::ids::Timestamp;

/// What providers and gateways say of a conversation that is too long.
const OVERFLOW: [&str; 13] = [
    "context_length_exceeded",
    "maximum context length",
    "exceed_context",
    "prompt is too long",
    "input is too long",
    "request_too_large",
    "too many tokens",
    "maximum number of tokens",
    "reduce the length",
    "exceeds the maximum token",
    "exceed context limit",
    "maximum model length",
    "maximum prompt length",
];

/// What is spoken of where a conversation is too long, and where a setting is wrong.
const ROOM: [&str; 3] = ["context length", "context window", "context size"];

/// What is said of the one alone.
const EXCESS: [&str; 6] = [
    "exceed",
    "too long",
    "too large",
    "longer than",
    "larger than",
    "greater than",
];

/// The names of an account that has no credit left, which no waiting mends.
const NO_CREDIT: [&str; 2] = ["insufficient_quota", "billing"];

/// What is said of such an account where it has no name. A limit on the rate may speak of billing.
const NO_CREDIT_TEXT: [&str; 2] = ["insufficient balance", "credit balance"];

/// The names of a limit on the rate.
const RATE_LIMIT: [&str; 2] = ["rate_limit", "too_many_requests"];

/// What a refusal says of itself.
#[derive(Debug, Default)]
pub(super) struct Refusal {
    /// Its type and code, in lower case, one after the other.
    name: String,
    /// Its text, in lower case.
    text: String,
    /// A status that stands in the body, as gateways put it into a stream.
    status: Option<u16>,
}

impl Refusal {
    /// Reads `{"error": {type, code, message}}` in the spellings that there are.
    pub(super) fn of_body(body: &Value) -> Self {
        // One gateway answers with a list of one.
        let body = body.get(0).unwrap_or(body);
        let error = match body.get("error") {
            Some(error) => error,
            None => body
                .get("errors")
                .and_then(|errors| errors.get(0))
                .unwrap_or(body),
        };
        let mut refusal = Self::default();
        if let Some(text) = error.as_str() {
            refusal.text = text.to_ascii_lowercase();
            return refusal;
        }
        for field in ["type", "code", "status", "internalCode"] {
            match error.get(field).or_else(|| body.get(field)) {
                Some(Value::String(name)) => {
                    refusal.name.push_str(&name.to_ascii_lowercase());
                    refusal.name.push(' ');
                }
                Some(Value::Number(number)) => {
                    let number = number
                        .as_u64()
                        .and_then(|number| u16::try_from(number).ok());
                    refusal.status = number.or(refusal.status);
                }
                _ => {}
            }
        }
        for field in ["message", "description"] {
            if let Some(text) = error.get(field).and_then(Value::as_str) {
                refusal.text.push_str(&text.to_ascii_lowercase());
            }
        }
        refusal
    }

    /// The failure. `status` is that of the answer; a refusal inside of a stream has none.
    pub(super) fn to_error(&self, status: Option<u16>, retry_after: Option<u32>) -> ModelError {
        let status = status.or_else(|| self.status_of_code());
        let (kind, sentence) = self.judge(status);
        let message = match status {
            Some(status) => format!("{sentence} (status {status})."),
            None => format!("{sentence}."),
        };
        ModelError {
            kind,
            message,
            retry_after: retry_after.filter(|_| kind.may_pass()),
        }
    }

    fn judge(&self, status: Option<u16>) -> (ModelErrorKind, &'static str) {
        use ModelErrorKind::{ContextOverflow, Malformed, RateLimited, Rejected, Unavailable};
        let names = |words: &[&str]| words.iter().any(|word| self.name.contains(word));
        let says = |words: &[&str]| words.iter().any(|word| self.text.contains(word));
        let is_request = matches!(status, None | Some(400 | 413 | 422 | 500));
        let is_overflow = names(&OVERFLOW) || says(&OVERFLOW) || (says(&ROOM) && says(&EXCESS));
        if status == Some(413) || (is_request && is_overflow) {
            return (
                ContextOverflow,
                "The conversation is too long for the model's context",
            );
        }
        if says(&["json mode couldn't be met"]) {
            return (Malformed, "The model did not keep to the declared output");
        }
        let is_said = status < Some(500) && !names(&RATE_LIMIT) && says(&NO_CREDIT_TEXT);
        if status == Some(402) || names(&NO_CREDIT) || is_said {
            return (Rejected, "The model provider's account has no credit");
        }
        match status {
            Some(401 | 403) => (Rejected, "The model provider refused the key"),
            Some(404) => (
                Rejected,
                "The model provider knows no such model or address",
            ),
            Some(408 | 409 | 425 | 500..=599) => {
                (Unavailable, "The model provider is not available")
            }
            Some(429) => (RateLimited, "The model provider asked to slow down"),
            Some(300..=399) => (Rejected, "The model provider's address has moved"),
            Some(_) => (Rejected, "The model provider refused the request"),
            None if names(&RATE_LIMIT) => (RateLimited, "The model provider asked to slow down"),
            None if names(&["authentication", "permission", "invalid_api_key"]) => {
                (Rejected, "The model provider refused the key")
            }
            None if names(&["not_found"]) => (
                Rejected,
                "The model provider knows no such model or address",
            ),
            None if names(&["invalid_request", "content_filter", "content_policy"]) => {
                (Rejected, "The model provider refused the request")
            }
            // Whatever else ends a stream that had begun well.
            None => (Unavailable, "The model provider is not available"),
        }
    }

    /// A number in the body, where it is a status of HTTP.
    fn status_of_code(&self) -> Option<u16> {
        self.status.filter(|status| (400..=599).contains(status))
    }
}

/// The seconds of `Retry-After`, of its form as a date, or of `Retry-After-Ms`; a begun second counts
/// as a whole one. `now` is in milliseconds since the Unix epoch.
pub(super) fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<u32> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    if let Some(milliseconds) = text("retry-after-ms").and_then(begun) {
        return Some(seconds(milliseconds));
    }
    let text = text(RETRY_AFTER.as_str())?;
    if let Some(at) = date(text) {
        return Some(seconds(at.saturating_mul(1000).saturating_sub(now)));
    }
    u32::try_from(begun(text)?).ok()
}

/// A decimal number, what is begun counted as a whole one.
fn begun(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_begun = fraction.bytes().any(|digit| digit != b'0');
    if !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    Some(whole.saturating_add(u64::from(is_begun)))
}

fn seconds(milliseconds: u64) -> u32 {
    u32::try_from(milliseconds.div_ceil(1000)).unwrap_or(u32::MAX)
}

/// Seconds since the Unix epoch of a date as `Sun, 06 Nov 1994 08:49:37 GMT`.
fn date(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let mut words = text.split_once(", ")?.1.split(' ');
    let day: u64 = words.next()?.parse().ok()?;
    let month = words.next()?;
    let month = (1u64..).zip(MONTHS).find(|(_, name)| *name == month)?.0;
    let year: u64 = words.next()?.parse().ok()?;
    let mut clock = words.next()?.split(':').map(str::parse::<u64>);
    let mut next = || clock.next()?.ok();
    let (hour, minute, second) = (next()?, next()?, next()?);
    if words.next() != Some("GMT") || !(1970..=9999).contains(&year) || !(1..=31).contains(&day) {
        return None;
    }
    // Days by the calendar whose years begin in March, so that a leap day is a year's last.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some(days * 86_400 + hour.min(23) * 3600 + minute.min(59) * 60 + second.min(60))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use http::HeaderMap;
    use serde_json::{Value, json};

    use super::{Refusal, retry_after};
    use crate::agent::model::ModelErrorKind::{
        self, ContextOverflow, Malformed, RateLimited, Rejected, Unavailable,
    };

    fn judged(status: Option<u16>, body: &Value) -> (ModelErrorKind, String) {
        let error = Refusal::of_body(body).to_error(status, None);
        (error.kind, error.message)
    }

    #[test]
    fn status_type_and_code_choose_kind_and_sentence() {
        let table = [
            (
                Some(400),
                json!({"error": {"message": "This model's maximum context length is 8192 tokens", "code": "context_length_exceeded"}}),
                ContextOverflow,
            ),
            (
                Some(400),
                json!({"object": "error", "message": "maximum context length is 4096", "type": "BadRequestError"}),
                ContextOverflow,
            ),
            (
                Some(400),
                json!({"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 200001 tokens > 200000 maximum"}}),
                ContextOverflow,
            ),
            (
                Some(413),
                json!({"type": "error", "error": {"type": "request_too_large"}}),
                ContextOverflow,
            ),
            (
                Some(400),
                json!({"error": {"message": "bad", "type": "invalid_request_error"}}),
                Rejected,
            ),
            (
                Some(400),
                json!({"type": "error", "error": {"type": "invalid_request_error", "message": "Your credit balance is too low"}}),
                Rejected,
            ),
            (
                Some(429),
                json!({"error": {"message": "Rate limit reached. Try again in 20s, or add a payment method at /account/billing.", "type": "requests", "code": "rate_limit_exceeded"}}),
                RateLimited,
            ),
            (
                Some(429),
                json!({"error": {"message": "Too many requests: see billing."}}),
                RateLimited,
            ),
            (
                None,
                json!({"error": {"message": "Your credit balance is of no account here.", "code": "rate_limit_exceeded"}}),
                RateLimited,
            ),
            (
                Some(400),
                json!({"type": "error", "error": {"type": "invalid_request_error", "message": "input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000"}}),
                ContextOverflow,
            ),
            (
                Some(400),
                json!({"object": "error", "message": "The decoder prompt (length 5000) is longer than the maximum model length of 4096", "code": 400}),
                ContextOverflow,
            ),
            (
                Some(400),
                json!([{"error": {"code": 400, "message": "The input token count exceeds the maximum number of tokens allowed", "status": "INVALID_ARGUMENT"}}]),
                ContextOverflow,
            ),
            (
                Some(400),
                json!({"errors": [{"code": 5025, "message": "AiError: JSON Mode couldn't be met"}]}),
                Malformed,
            ),
            (
                Some(400),
                json!({"error": {"message": "Your input exceeds the context window of this model. Please adjust your input and try again."}}),
                ContextOverflow,
            ),
            (
                Some(400),
                json!({"errors": [{"code": 5021, "message": "The estimated number of input and maximum output tokens (9000) exceeded this model context window limit (8000)."}]}),
                ContextOverflow,
            ),
            (
                Some(400),
                json!({"error": {"code": 400, "message": "the request exceeds the available context size, try increasing it", "type": "exceed_context_size_error"}}),
                ContextOverflow,
            ),
            (
                Some(400),
                json!({"error": {"message": "The 1M context window is not available for this model or account."}}),
                Rejected,
            ),
            (
                Some(400),
                json!({"error": {"message": "context size must be a positive integer"}}),
                Rejected,
            ),
            (Some(401), Value::Null, Rejected),
            (
                Some(402),
                json!({"error": {"message": "Insufficient Balance"}}),
                Rejected,
            ),
            (Some(403), Value::Null, Rejected),
            (Some(404), json!({"error": "model not found"}), Rejected),
            (Some(408), Value::Null, Unavailable),
            (Some(422), Value::Null, Rejected),
            (
                Some(429),
                json!({"error": {"code": "rate_limit_exceeded"}}),
                RateLimited,
            ),
            (
                Some(429),
                json!({"error": {"code": "insufficient_quota"}}),
                Rejected,
            ),
            (Some(500), Value::Null, Unavailable),
            (Some(502), Value::Null, Unavailable),
            (Some(503), Value::Null, Unavailable),
            (
                Some(529),
                json!({"type": "error", "error": {"type": "overloaded_error"}}),
                Unavailable,
            ),
            (Some(302), Value::Null, Rejected),
            (
                None,
                json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
                Unavailable,
            ),
            (
                None,
                json!({"error": {"code": 429, "message": "slow"}}),
                RateLimited,
            ),
            (
                None,
                json!({"error": {"code": 502, "message": "upstream"}}),
                Unavailable,
            ),
            (
                None,
                json!({"error": {"type": "rate_limit_error"}}),
                RateLimited,
            ),
            (
                None,
                json!({"error": {"type": "authentication_error"}}),
                Rejected,
            ),
            (
                None,
                json!({"error": {"code": "context_length_exceeded"}}),
                ContextOverflow,
            ),
        ];
        for (status, body, kind) in table {
            assert_eq!(judged(status, &body).0, kind, "{status:?} {body}");
        }
    }

    #[test]
    fn a_sentence_repeats_nothing_that_the_provider_said() {
        let body = json!({"error": {"message": "Incorrect API key provided: sk-canary. Prompt: canary", "type": "canary_type", "code": "canary_code"}});
        for status in [
            None,
            Some(400),
            Some(401),
            Some(404),
            Some(429),
            Some(500),
            Some(418),
        ] {
            let (_, message) = judged(status, &body);
            assert!(!message.contains("canary"), "{message}");
            assert!(!message.contains("sk-"), "{message}");
        }
    }

    #[test]
    fn a_wait_is_read_in_each_of_its_forms() {
        let now = 784_111_777_000; // Sun, 06 Nov 1994 08:49:37 GMT
        let table = [
            ("retry-after", "7", Some(7)),
            ("retry-after", " 0 ", Some(0)),
            ("retry-after", "1.5", Some(2)),
            ("retry-after", "2.000", Some(2)),
            ("retry-after", "Sun, 06 Nov 1994 08:49:47 GMT", Some(10)),
            ("retry-after", "Sat, 05 Nov 1994 08:49:47 GMT", Some(0)),
            (
                "retry-after",
                "Wed, 01 Mar 1995 00:00:00 GMT",
                Some(9_904_223),
            ),
            ("retry-after", "soon", None),
            ("retry-after", "-1", None),
            ("retry-after", "1.x", None),
            ("retry-after-ms", "1200", Some(2)),
            ("retry-after-ms", "2000.5", Some(3)),
            ("retry-after-ms", "soon", None),
        ];
        for (name, value, expected) in table {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            assert_eq!(retry_after(&headers, now), expected, "{name}: {value}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }
}
