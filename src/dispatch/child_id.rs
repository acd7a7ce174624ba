//! The id of a child session, derived from the call that makes it.
//!
//! Implements the first rule of section 7: a re-run of the same call reconnects to the same child,
//! and another life of the parent never meets it.

use sha2::{Digest as _, Sha256};

use crate::error::Result;
use crate::protocol::ids::{SessionId, StreamId};
use crate::store::SubLocation;

/// The longest id that keeps the readable form, in characters.
const READABLE_LIMIT: usize = 200;

/// How much of the root session's id stays in the short form, in characters.
const ROOT_LIMIT: usize = 120;

/// Characters of base32 that bind a readable id to one life of the parent.
const TAG_LENGTH: usize = 16;

/// The longest idempotency key, in characters (section 1).
const KEY_LIMIT: usize = 128;

/// Characters of base32 of a whole SHA-256.
const DIGEST_LENGTH: usize = 52;

/// The id of the child that `tool_call_id` of this life of the parent makes.
///
/// # Errors
/// `VALIDATION_ERROR` is impossible for the ids that [`SessionId`] admits; it is passed on rather
/// than hidden.
pub fn child_id(
    parent: &SessionId,
    parent_stream: &StreamId,
    tool_call_id: &str,
    location: SubLocation,
) -> Result<SessionId> {
    let separator = match location {
        SubLocation::Remote => "-remote-",
        SubLocation::Local => "-sub-",
    };
    let call = Sha256::new().chain_update(parent_stream.as_str()).chain_update([0]).chain_update(tool_call_id);
    let tag: String = base32(&call.finalize()).take(TAG_LENGTH).collect();
    let whole = format!("{parent}{separator}{tool_call_id}-{tag}");
    if whole.len() <= READABLE_LIMIT
        && let Ok(id) = SessionId::parse(&whole)
    {
        return Ok(id);
    }
    let root: String = root_of(parent.as_str()).chars().take(ROOT_LIMIT).collect();
    let digest: String = base32(&Sha256::digest(&whole)).take(DIGEST_LENGTH).collect();
    SessionId::parse(&format!("{root}-remote-{digest}"))
}

/// The idempotency key of a call's request: `{what}:{child}`, or with the digest of the child's id
/// in its place where the key would be longer than the contract allows.
#[must_use]
pub fn call_key(what: &str, child: &SessionId, number: Option<u32>) -> String {
    let number = number.map_or(String::new(), |number| format!(":{number}"));
    let key = format!("{what}:{child}{number}");
    if key.len() <= KEY_LIMIT {
        return key;
    }
    let digest: String = base32(&Sha256::digest(child.as_str())).collect();
    format!("{what}:{digest}{number}")
}

/// The id of the root session: what stands before the first suffix that this module may have added.
///
/// A root whose own id happens to hold `-remote-` is not cut, unless what follows ends like a
/// derived id.
fn root_of(id: &str) -> &str {
    let derived = |rest: &str| {
        rest.rsplit_once('-').is_some_and(|(_, tail)| {
            matches!(tail.len(), TAG_LENGTH | DIGEST_LENGTH)
                && tail.bytes().all(|b| b.is_ascii_lowercase() || (b'2'..=b'7').contains(&b))
        })
    };
    let cut = ["-remote-", "-sub-"].iter().filter_map(|separator| id.find(separator)).min();
    match cut.and_then(|at| id.split_at_checked(at)) {
        Some((root, rest)) if !root.is_empty() && derived(rest) => root,
        _ => id,
    }
}

/// Lower-case base32 (RFC 4648) without padding, character by character.
fn base32(bytes: &[u8]) -> impl Iterator<Item = char> {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let bits = bytes.len() * 8;
    let bit = move |i: usize| bytes.get(i / 8).map_or(0, |byte| (byte >> (7 - i % 8)) & 1);
    (0..bits.div_ceil(5)).filter_map(move |group| {
        let value = (0..5).fold(0_u8, |value, i| (value << 1) | bit(group * 5 + i));
        ALPHABET.get(usize::from(value)).map(|c| char::from(*c))
    })
}
