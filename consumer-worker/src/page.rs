//! The page on which a person watches a job: which paths are its files, and what its answers say to
//! a browser.
//!
//! The files themselves are static assets of the deployment. A Worker without them serves
//! everything else all the same, and answers these paths as it answers any unknown one.

use http::Method;

/// The files of the page, by path.
const FILES: [&str; 4] = ["/", "/app.js", "/style.css", "/icon.svg"];

/// Headers of each file: nothing but this origin's own files is loaded or talked to, no type is
/// guessed, nobody frames the page, and a new deployment is seen at once.
pub const HEADERS: [(&str, &str); 5] = [
    (
        "content-security-policy",
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-cache"),
];

/// Whether a request asks for a file of the page.
#[must_use]
pub fn is_file(method: &Method, path: &str) -> bool {
    (method == Method::GET || method == Method::HEAD) && FILES.contains(&path)
}
