//! Time, randomness, tasks, durability and the alarm on Workers.
//!
//! Tasks run under `waitUntil`, which keeps an object alive while they are pending. The clock
//! stands still between I/O events. Nothing here may call `abort` or throw into WebAssembly.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use js_sys::Function;
use wasm_bindgen::prelude::Closure;
use wasm_bindgen::{JsCast as _, JsValue};

use super::ffi::{self, RawContext, RawStorage};
use super::panics::{self, Standing};
use crate::error::{Error, Result};
use crate::platform::{Level, ObjectRuntime, Runtime};
use crate::protocol::ids::Timestamp;

/// The runtime of one invocation of a Worker.
#[derive(Clone, Debug)]
pub struct WorkerRuntime {
    context: RawContext,
}

/// The runtime of one Durable Object.
#[derive(Clone, Debug)]
pub struct DurableRuntime {
    worker: WorkerRuntime,
    storage: RawStorage,
    standing: Standing,
    barriers: Rc<Barriers>,
}

/// Who is told of durability, first come first told, and the two functions that tell: a pair for
/// each barrier would cost more than the barrier.
struct Barriers {
    told: Rc<RefCell<VecDeque<Told>>>,
    kept: Closure<dyn FnMut(JsValue)>,
    broken: Closure<dyn FnMut(JsValue)>,
}

type Told = Box<dyn FnOnce(Result<()>)>;

impl fmt::Debug for Barriers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Barriers")
    }
}

impl Barriers {
    fn new() -> Self {
        let told = Rc::new(RefCell::new(VecDeque::<Told>::new()));
        let next = |told: &Rc<RefCell<VecDeque<Told>>>| told.borrow_mut().pop_front();
        let (on_kept, on_broken) = (Rc::clone(&told), Rc::clone(&told));
        Self {
            told,
            kept: Closure::new(move |_| {
                if let Some(told) = next(&on_kept) {
                    told(Ok(()));
                }
            }),
            broken: Closure::new(move |thrown| {
                if let Some(told) = next(&on_broken) {
                    told(done("sync", Err(thrown)));
                }
            }),
        }
    }
}

impl WorkerRuntime {
    /// The runtime of the invocation that this context belongs to.
    #[must_use]
    pub fn new(context: &worker::Context) -> Self {
        let context: &JsValue = context.as_ref().as_ref();
        Self {
            context: context.clone().unchecked_into(),
        }
    }
}

impl DurableRuntime {
    pub(super) fn new(context: RawContext, storage: RawStorage, standing: Standing) -> Self {
        Self {
            worker: WorkerRuntime { context },
            storage,
            barriers: Rc::new(Barriers::new()),
            standing,
        }
    }
}

impl Runtime for WorkerRuntime {
    fn now(&self) -> Timestamp {
        // The epoch's milliseconds are far below 2^53, so the cast is exact.
        js_sys::Date::now() as Timestamp
    }

    fn entropy(&self) -> [u8; 16] {
        let mut bits = [0; 16];
        if let Err(error) = getrandom::fill(&mut bits) {
            // The platform's source does not fail inside a handler. If it ever does, an id that
            // is weaker but still fresh beats one that repeats.
            log(Level::Error, &format_args!("no secure randomness: {error}"));
            for part in bits.chunks_mut(4) {
                let random = (js_sys::Math::random() * f64::from(u32::MAX)) as u32;
                part.copy_from_slice(&random.to_le_bytes());
            }
        }
        bits
    }

    fn sleep(&self, duration: Duration) -> LocalBoxFuture<'static, ()> {
        Timer::new(duration).boxed_local()
    }

    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        let promise = wasm_bindgen_futures::future_to_promise(async move {
            task.await;
            Ok(JsValue::UNDEFINED)
        });
        // The task runs in either case; only the platform's promise to wait for it can be refused.
        if let Err(thrown) = self.context.wait_until(&promise) {
            log(
                Level::Warn,
                &format_args!("waitUntil: {}", ffi::message(&thrown)),
            );
        }
    }

    fn log(&self, level: Level, event: &dyn fmt::Display) {
        log(level, event);
    }
}

impl Runtime for DurableRuntime {
    fn now(&self) -> Timestamp {
        self.worker.now()
    }

    fn entropy(&self) -> [u8; 16] {
        self.worker.entropy()
    }

    fn sleep(&self, duration: Duration) -> LocalBoxFuture<'static, ()> {
        self.worker.sleep(duration)
    }

    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        self.worker.spawn(task);
    }

    fn log(&self, level: Level, event: &dyn fmt::Display) {
        log(level, event);
    }
}

impl ObjectRuntime for DurableRuntime {
    fn sync(&self) -> LocalBoxFuture<'static, Result<()>> {
        let promise = self.storage.sync();
        async move { done("sync", ffi::settled(promise).await) }.boxed_local()
    }

    fn once_durable(&self, told: Told) {
        // Barriers of one object are passed in the order in which they were set.
        self.barriers.told.borrow_mut().push_back(told);
        let set = self.storage.sync_then().and_then(|promise| {
            let [kept, broken] = [&self.barriers.kept, &self.barriers.broken];
            promise.tell(
                kept.as_ref().unchecked_ref(),
                broken.as_ref().unchecked_ref(),
            )
        });
        if let Err(thrown) = set {
            let told = self.barriers.told.borrow_mut().pop_back();
            if let Some(told) = told {
                told(done("sync", Err(thrown)));
            }
        }
    }

    fn set_alarm(&self, at: Option<Timestamp>) -> LocalBoxFuture<'static, Result<()>> {
        // An alarm for the millisecond in which one is running is stored but never fires.
        let earliest = self.now().saturating_add(1);
        let promise = match at {
            Some(at) => self.storage.set_alarm(at.max(earliest) as f64),
            None => self.storage.delete_alarm(),
        };
        async move { done("alarm", ffi::settled(promise).await) }.boxed_local()
    }

    fn is_leaving(&self) -> bool {
        self.standing == Standing::Leaving
    }

    fn was_cut_by_another(&self) -> bool {
        panics::forgive(&self.worker.context)
    }
}

fn done(what: &str, outcome: Result<JsValue, JsValue>) -> Result<()> {
    outcome
        .map(drop)
        .map_err(|thrown| Error::internal(format!("{what}: {}", ffi::message(&thrown))))
}

/// Writes one line of JSON to the console, which is where a Worker's log is read.
pub(super) fn log(level: Level, event: &dyn fmt::Display) {
    let name = match level {
        Level::Info => "info",
        Level::Warn => "warn",
        Level::Error => "error",
    };
    write(level, &line(name, event.to_string()));
}

/// Writes one line to the console.
pub(super) fn write(level: Level, line: &str) {
    let written = match level {
        Level::Info => ffi::console_log(line),
        Level::Warn => ffi::console_warn(line),
        Level::Error => ffi::console_error(line),
    };
    // A console that throws leaves nobody to tell.
    drop(written);
}

/// The line of an event. One that is a JSON object already has its fields in the line itself.
fn line(level: &str, event: String) -> String {
    let mut fields = serde_json::Map::new();
    fields.insert("level".to_owned(), level.into());
    match serde_json::from_str(&event) {
        Ok(serde_json::Value::Object(own)) => fields.extend(own),
        _ => drop(fields.insert("event".to_owned(), event.into())),
    }
    serde_json::Value::Object(fields).to_string()
}

/// A timeout as a future; dropping it clears the timeout.
///
/// Unlike the `worker` crate's delay it wakes whoever polled last, so it may move between tasks,
/// and it keeps the id as it came.
pub(super) struct Timer {
    state: Rc<RefCell<TimerState>>,
    id: Option<JsValue>,
    _callback: Closure<dyn FnMut()>,
}

#[derive(Default)]
struct TimerState {
    fired: bool,
    waker: Option<Waker>,
}

impl Timer {
    pub(super) fn new(duration: Duration) -> Self {
        let state = Rc::new(RefCell::new(TimerState::default()));
        let shared = Rc::clone(&state);
        let callback = Closure::once(move || {
            let waker = {
                let mut state = shared.borrow_mut();
                state.fired = true;
                state.waker.take()
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        });
        let milliseconds = f64::from(i32::try_from(duration.as_millis()).unwrap_or(i32::MAX));
        let id = match ffi::set_timeout(callback.as_ref().unchecked_ref::<Function>(), milliseconds)
        {
            Ok(id) => Some(id),
            Err(thrown) => {
                // Never completing is the lesser harm: completing at once would turn every
                // waiting loop into a busy one.
                log(
                    Level::Error,
                    &format_args!("setTimeout: {}", ffi::message(&thrown)),
                );
                None
            }
        };
        Self {
            state,
            id,
            _callback: callback,
        }
    }
}

impl Future for Timer {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.borrow_mut();
        if state.fired {
            return Poll::Ready(());
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let fired = self.state.try_borrow().is_ok_and(|state| state.fired);
        if let (false, Some(id)) = (fired, self.id.take()) {
            drop(ffi::clear_timeout(&id));
        }
    }
}
