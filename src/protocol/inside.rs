//! What a mount tells its object about a request, beside the request: whose it is, and how much of a
//! session it may take.
//!
//! It stands in headers that a mount removes from whatever comes in and sets by itself, so nobody
//! else can (section 1 of the contract). Without them a request is bound to nobody and to no bounds
//! but the agent's.

use std::fmt;

use http::{HeaderMap, HeaderValue};
use sha2::{Digest as _, Sha256};

use super::header::{INTERNAL_CALLER, INTERNAL_LIMITS};
use super::ids::hex;

/// How much of one session those may take who come over a mount. Each lowers what the agent allows
/// and raises nothing. Default: what the agent allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Readers of a session at once, wherever they came from, with which one more over this mount is
    /// a 429 `RATE_LIMITED`. See `Agent::with_max_readers`.
    pub max_readers: usize,
    /// The largest state that a start over this mount may begin with, in bytes of JSON; a larger one
    /// is a 413 `PAYLOAD_TOO_LARGE`. See `Limits::max_state_bytes`.
    pub max_state_bytes: usize,
    /// The size of a session's log, in bytes of JSON, from which on a resume over this mount is a 413
    /// `PAYLOAD_TOO_LARGE`. See `Limits::max_log_bytes`.
    pub max_log_bytes: u64,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            max_readers: usize::MAX,
            max_state_bytes: usize::MAX,
            max_log_bytes: u64::MAX,
        }
    }
}

/// Who a caller is, as sessions keep it: a digest of the identity that a mount's hook gave, so that
/// no name, address or credential is stored.
#[derive(Clone, PartialEq, Eq)]
pub struct Caller(String);

impl Caller {
    /// The caller with this identity.
    #[must_use]
    pub fn of(identity: &str) -> Self {
        Self(hex(&Sha256::digest(identity.as_bytes())))
    }

    /// The digest, 64 hexadecimal digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a mount says of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inside {
    /// Whose request it is, where the mount binds sessions to their callers.
    pub caller: Option<Caller>,
    /// What may be taken of the session.
    pub limits: SessionLimits,
}

impl Inside {
    /// Reads what a mount has said.
    #[must_use]
    pub fn read(headers: &HeaderMap) -> Self {
        // A value that cannot be read is nobody's and no number.
        let text = |value: &HeaderValue| value.to_str().unwrap_or_default().to_owned();
        let bounds = headers.get(INTERNAL_LIMITS).map(text).unwrap_or_default();
        let mut bounds = bounds.split(' ');
        let mut bound = || bounds.next().and_then(|text| text.parse::<u64>().ok());
        let count = |bound: Option<u64>| {
            bound.map_or(usize::MAX, |bound| {
                usize::try_from(bound).unwrap_or(usize::MAX)
            })
        };
        Self {
            limits: SessionLimits {
                max_readers: count(bound()),
                max_state_bytes: count(bound()),
                max_log_bytes: bound().unwrap_or(u64::MAX),
            },
            caller: headers.get(INTERNAL_CALLER).map(text).map(Caller),
        }
    }

    /// Says it. Nothing is said where there is nothing to say.
    pub fn write(&self, headers: &mut HeaderMap) {
        let mut set = |name, text: &str| {
            // Digits and spaces are a header's value always.
            if let Ok(value) = HeaderValue::from_str(text) {
                headers.insert(name, value);
            }
        };
        if let Some(caller) = &self.caller {
            set(INTERNAL_CALLER, caller.as_str());
        }
        if self.limits != SessionLimits::default() {
            let SessionLimits {
                max_readers,
                max_state_bytes,
                max_log_bytes,
            } = self.limits;
            set(
                INTERNAL_LIMITS,
                &format!("{max_readers} {max_state_bytes} {max_log_bytes}"),
            );
        }
    }

    /// Whether this request may know of a session with this owner. A mount that binds reaches what its
    /// caller began and nothing else; one that does not reaches everything.
    #[must_use]
    pub fn reaches(&self, owner: Option<&str>) -> bool {
        let is_owner = |caller: &Caller| owner == Some(caller.as_str());
        self.caller.as_ref().is_none_or(is_owner)
    }
}
