//! Who may use a mount.
//!
//! Implements the auth rules of section 1. Whatever is not clearly allowed is refused: a key that is
//! unset or empty opens nothing. A key is kept and compared as a digest, in constant time.

use std::rc::Rc;

use http::{HeaderMap, Method, Uri};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::error::{Code, Error};
use crate::http::{Response, refusal};
use crate::protocol::route::Route;

/// How a mount's callers prove who they are.
pub enum Auth {
    /// `Authorization: Bearer <key>`. A key that is unset or empty refuses everything.
    Bearer(Option<String>),
    /// The product decides, for every route.
    Hook(Hook),
}

/// Decides about one request before its body is read.
pub type Hook = Rc<dyn Fn(&Head<'_>) -> Decision>;

/// Says who makes a request, as the product knows its callers: an account, a tenant, the subject of a
/// token. `None` or an empty text is nobody, and refused.
pub type CallerHook = Rc<dyn Fn(&Head<'_>) -> Option<String>>;

/// What a hook sees of a request.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// The method.
    pub method: &'a Method,
    /// The address, as it came.
    pub uri: &'a Uri,
    /// The headers, as they came.
    pub headers: &'a HeaderMap,
    /// The route that was found.
    pub route: &'a Route,
}

/// What a hook says.
pub enum Decision {
    /// Go on.
    Allow,
    /// Answer with a 401 envelope.
    Refuse,
    /// Answer with this.
    Answer(Response),
}

/// The gate that a mount keeps; the key itself is gone.
#[derive(Clone)]
pub(super) enum Guard {
    Bearer(Option<[u8; 32]>),
    Hook(Hook),
}

impl From<Auth> for Guard {
    fn from(auth: Auth) -> Self {
        match auth {
            Auth::Bearer(key) => {
                let key = key.filter(|key| !key.is_empty());
                Self::Bearer(key.map(|key| Sha256::digest(key.as_bytes()).into()))
            }
            Auth::Hook(hook) => Self::Hook(hook),
        }
    }
}

impl Guard {
    /// Lets a request pass, or gives the answer that refuses it.
    pub(super) fn check(&self, head: &Head<'_>) -> Result<(), Box<Response>> {
        match self {
            Self::Bearer(key) if bearer_matches(*key, head.headers) => Ok(()),
            Self::Bearer(_) => {
                let mut response = unauthorized();
                let scheme = http::HeaderValue::from_static("Bearer");
                response
                    .headers_mut()
                    .insert(http::header::WWW_AUTHENTICATE, scheme);
                Err(Box::new(response))
            }
            Self::Hook(hook) => match hook(head) {
                Decision::Allow => Ok(()),
                Decision::Refuse => Err(Box::new(unauthorized())),
                Decision::Answer(response) => Err(Box::new(response)),
            },
        }
    }
}

pub(super) fn unauthorized() -> Response {
    refusal(&Error::new(
        Code::Unauthorized,
        "The credentials are missing or wrong.",
    ))
}

fn bearer_matches(key: Option<[u8; 32]>, headers: &HeaderMap) -> bool {
    let Some(key) = key else { return false };
    let mut values = headers.get_all(http::header::AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return false;
    };
    let Some((scheme, token)) = split_scheme(value.as_bytes()) else {
        return false;
    };
    let given: [u8; 32] = Sha256::digest(token).into();
    scheme.eq_ignore_ascii_case(b"bearer") && bool::from(given.ct_eq(&key))
}

fn split_scheme(value: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = value.iter().position(|b| *b == b' ')?;
    let (scheme, token) = value.split_at(space);
    Some((scheme, token.trim_ascii()))
}
