//! One line per step: its name when it starts, its duration and a note when it ends.

use std::{
    io::{Write, stdout},
    time::{Duration, Instant},
};

use crate::failure::Result;

const NAME_WIDTH: usize = 50;

/// Runs `work` as a step that prints its duration.
pub(crate) fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    noted(name, || work().map(|value| (value, String::new())))
}

/// Like [`step`], with a note of the work's own behind the duration.
pub(crate) fn noted<T>(name: &str, work: impl FnOnce() -> Result<(T, String)>) -> Result<T> {
    // A closed standard output must not stop the work.
    let mut out = stdout();
    let _ = write!(out, "  {name:<NAME_WIDTH$} ");
    let _ = out.flush();
    let started = Instant::now();
    let result = work();
    let took = seconds(started.elapsed());
    match result {
        Ok((value, note)) => {
            let gap = if note.is_empty() { "" } else { "  " };
            let _ = writeln!(out, "{took:>8}{gap}{note}");
            Ok(value)
        }
        Err(failure) => {
            let _ = writeln!(out, "{took:>8}  FAILED");
            Err(failure)
        }
    }
}

/// A duration as a person reads it.
pub(crate) fn seconds(duration: Duration) -> String {
    let whole = duration.as_secs();
    if whole < 60 {
        format!("{:.1} s", duration.as_secs_f64())
    } else {
        format!("{} m {:02} s", whole / 60, whole % 60)
    }
}
