//! What happens to an isolate's objects when one of them panics.
//!
//! Without measures a panic leaves every open request of every object hanging for ever: the
//! WebAssembly instance is thrown away, but nobody tells the platform. Two measures end them. The
//! panic hook aborts the object that panicked, so its clients see an error at once. And an object
//! that is built a second time on a context that still lives, because its instance was thrown
//! away, aborts that context a moment later, so that what the dead instance left open ends as well.
//!
//! `abort` must never be called from a task of ours (it would tear through the executor of all
//! objects); only the hook may, since nothing runs after it.

use std::cell::{Cell, RefCell};

use js_sys::{Reflect, Set};
use wasm_bindgen::{JsCast as _, JsValue};

use super::ffi::{self, RawContext, RawFunction, RawWeakRef};
use super::runtime::log;
use crate::platform::Level;

/// The property of a context that says that an object was built on it before.
const BUILT: &str = "__remote_agents_built";

/// The global set of the ids of objects that another object's panic has cut off. It is the
/// isolate's, so that it outlives the instance.
const VICTIMS: &str = "__remote_agents_victims";

/// How an object stands after [`guard`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// On a context of its own.
    Sound,
    /// On a context that is aborted in a moment.
    Leaving,
}

thread_local! {
    /// The contexts of this instance's objects; weak, so that an evicted object goes.
    static CONTEXTS: RefCell<Vec<RawWeakRef>> = const { RefCell::new(Vec::new()) };
    /// Whether this instance has the hook.
    static HOOKED: Cell<bool> = const { Cell::new(false) };
}

/// Takes both measures for an object. To be called first when it is built.
pub(super) fn guard(context: &RawContext) -> Standing {
    if !HOOKED.replace(true) {
        // The hook before ours is the worker crate's, which marks the instance for replacement.
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            console_error_panic_hook::hook(info);
            previous(info);
            abort_all();
        }));
    }
    match RawWeakRef::new(context) {
        Ok(reference) => CONTEXTS.with(|contexts| {
            let mut contexts = contexts.borrow_mut();
            contexts.retain(|known| known.deref().is_ok_and(|context| !context.is_undefined()));
            contexts.push(reference);
        }),
        Err(thrown) => log(
            Level::Warn,
            &format_args!("panic guard: {}", ffi::message(&thrown)),
        ),
    }
    let built = JsValue::from_str(BUILT);
    let rebuilt = Reflect::get(context, &built).is_ok_and(|before| before.is_truthy());
    if rebuilt {
        log(
            Level::Warn,
            &"the instance was replaced after a panic; requests that it left open are ended",
        );
        if let Err(thrown) = remember_victim(context) {
            log(
                Level::Warn,
                &format_args!("panic guard: {}", ffi::message(&thrown)),
            );
        }
        match abort_later(context) {
            Ok(()) => return Standing::Leaving,
            Err(thrown) => log(
                Level::Error,
                &format_args!("abort: {}", ffi::message(&thrown)),
            ),
        }
    } else if let Err(thrown) = Reflect::set(context, &built, &JsValue::TRUE) {
        log(
            Level::Warn,
            &format_args!("panic guard: {}", ffi::message(&thrown)),
        );
    }
    Standing::Sound
}

/// Whether the object of this context was cut off by another one's panic; told once.
pub(super) fn forgive(context: &RawContext) -> bool {
    let forgiven = || -> Result<bool, JsValue> { Ok(victims()?.delete(&ffi::object_id(context)?)) };
    // Where nothing can be remembered, nothing was.
    forgiven().unwrap_or(false)
}

fn remember_victim(context: &RawContext) -> Result<(), JsValue> {
    victims()?.add(&ffi::object_id(context)?);
    Ok(())
}

fn victims() -> Result<Set, JsValue> {
    let global = js_sys::global();
    let name = JsValue::from_str(VICTIMS);
    let known = Reflect::get(&global, &name)?;
    if let Ok(known) = known.dyn_into::<Set>() {
        return Ok(known);
    }
    let fresh = Set::new(&JsValue::UNDEFINED);
    Reflect::set(&global, &name, &fresh)?;
    Ok(fresh)
}

/// Aborts the context that the current event belongs to. The others refuse, and that is meant.
fn abort_all() {
    CONTEXTS.with(|contexts| {
        let Ok(contexts) = contexts.try_borrow() else {
            return;
        };
        for context in contexts.iter().filter_map(|known| known.deref().ok()) {
            if !context.is_undefined() {
                drop(
                    context
                        .unchecked_into::<RawContext>()
                        .abort("the object panicked"),
                );
            }
        }
    });
}

/// Has the platform call `abort` after the current event, with no code of ours on the stack.
fn abort_later(context: &RawContext) -> Result<(), JsValue> {
    let abort = Reflect::get(context, &"abort".into())?;
    if !abort.is_function() {
        return Err("the context has no abort".into());
    }
    let abort = abort.unchecked_into::<RawFunction>().tied_to(context)?;
    ffi::set_timeout_with(&abort, 0.0, "the instance was replaced").map(drop)
}
