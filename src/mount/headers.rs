//! Which headers cross a mount.
//!
//! Implements the header rules of section 1. Headers of one hop stay on that hop, and
//! `x-remote-agents-internal-*` is what a mount tells its object: nobody else can set it.

use http::header::{
    CONNECTION, CONTENT_LENGTH, ETAG, EXPECT, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION,
    TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderValue};

use crate::error::{Error, Result};
use crate::protocol::VERSION;
use crate::protocol::header::{
    INTERNAL_NEIGHBOURS, INTERNAL_PREFIX, MOUNT, VERSION as VERSION_HEADER,
};
use crate::protocol::ids::SessionId;
use crate::protocol::inside::Inside;

/// The session's id, towards the object.
pub const INTERNAL_SESSION: &str = "x-remote-agents-internal-session";

/// The mount's kind, `raw` or `projected`, towards the object.
pub const INTERNAL_MOUNT: &str = "x-remote-agents-internal-mount";

/// Removes the headers of one hop, those that `Connection` names, and internal ones.
pub(super) fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|b| *b == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect();
    let internal: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with(INTERNAL_PREFIX))
        .cloned()
        .collect();
    let fixed = [
        CONNECTION,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
        EXPECT,
    ];
    for name in named.into_iter().chain(internal).chain(fixed) {
        headers.remove(name);
    }
}

/// Removes what describes a body that is about to be another one; its sender sets it anew.
pub(super) fn body_changes(headers: &mut HeaderMap) {
    for name in [CONTENT_LENGTH, ETAG] {
        headers.remove(name);
    }
}

/// What a mount shows, as far as its headers tell it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// Less than the object says.
    pub(super) projected: bool,
    /// What each step changes in the projection.
    pub(super) live: bool,
}

/// Tells the object which session it is, and how it is being looked at.
pub(super) fn mark_internal(
    headers: &mut HeaderMap,
    session: &SessionId,
    mount: Kind,
    inside: &Inside,
) -> Result<()> {
    let session = HeaderValue::from_str(session.as_str())
        .map_err(|e| Error::internal(format!("the session's id: {e}")))?;
    headers.insert(INTERNAL_SESSION, session);
    headers.insert(INTERNAL_MOUNT, kind(mount.projected));
    if mount.live {
        headers.insert(INTERNAL_NEIGHBOURS, HeaderValue::from_static("1"));
    }
    inside.write(headers);
    Ok(())
}

/// Sets what every answer of a mount carries.
pub(super) fn stamp(headers: &mut HeaderMap, projected: bool) {
    headers.insert(VERSION_HEADER, VERSION.into());
    headers.insert(MOUNT, kind(projected));
}

/// The announced length of a body; 0 where none is announced, for it is counted again.
pub(super) fn content_length(headers: &HeaderMap) -> u64 {
    let text = headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok());
    match text.map(str::trim) {
        // A number that is too long to be read is too long a body.
        Some(t) if !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit()) => {
            t.parse().unwrap_or(u64::MAX)
        }
        _ => 0,
    }
}

fn kind(projected: bool) -> HeaderValue {
    HeaderValue::from_static(if projected { "projected" } else { "raw" })
}
