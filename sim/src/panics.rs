//! A panic anywhere in a run is seen: in an object's task, in whoever watches, and in the user.
//!
//! A task that panics ends like one that was cut off, so nobody who waits for it would tell.

use std::cell::RefCell;
use std::panic;
use std::sync::Once;

thread_local! {
    static SEEN: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Sees to it that panics are seen from now on; what was seen before on this thread is forgotten.
pub fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            SEEN.with_borrow_mut(|seen| {
                seen.get_or_insert_with(|| info.to_string().replace('\n', " "));
            });
            others(info);
        }));
    });
    SEEN.take();
}

/// The first panic on this thread that was not told yet.
#[must_use]
pub fn seen() -> Option<String> {
    SEEN.take()
}
