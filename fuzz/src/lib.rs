//! One function for each place that reads what others wrote. It panics where a promise is broken.
//!
//! `fuzz_targets` hands them to libFuzzer, and `tests/it/fuzz.rs` runs them over `corpus` and over
//! mutations of it. An input is any bytes; a target that takes several values finds them between
//! bytes of 0xFF, which no UTF-8 has.

mod answers;
mod input;
mod observer;
mod patch;
mod provider;
mod reference;
mod requests;
mod sse;
mod stored;

/// What a target does with an input.
pub type Target = fn(&[u8]);

/// Every target by its name, which is also that of its file in `fuzz_targets` and of its folder in
/// `corpus`.
pub const TARGETS: [(&str, Target); 12] = [
    ("sse", sse::decoder),
    ("route", requests::route),
    ("cursor", requests::cursor),
    ("body", requests::body),
    ("request", requests::request),
    ("patch", patch::patch),
    ("stored", stored::rows),
    ("openai", provider::openai),
    ("anthropic", provider::anthropic),
    ("shown", answers::shown),
    ("transport", answers::transport),
    ("observer", observer::observer),
];

/// Runs one target.
///
/// # Panics
/// When there is no target of this name, or a promise is broken.
pub fn run(name: &str, data: &[u8]) {
    let found = TARGETS.iter().find(|(target, _)| *target == name);
    let Some((_, target)) = found else {
        panic!("there is no target {name}");
    };
    target(data);
}
