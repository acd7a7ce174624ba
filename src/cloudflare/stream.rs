//! Bodies between Rust and the platform, in both directions.
//!
//! What must never happen here: a reader that has gone keeps what it read from alive. A body that
//! we write stands in a slot, which is emptied when it ends, when the platform drops it, and when
//! the request is aborted, because some versions of the platform drop nothing.

use std::cell::RefCell;
use std::future::Future as _;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures::stream::Stream;
use js_sys::{Reflect, Uint8Array};
use wasm_bindgen::prelude::Closure;
use wasm_bindgen::{JsCast as _, JsValue};
use wasm_bindgen_futures::JsFuture;

use super::ffi::{self, RawReader, RawStream};
use crate::http::{BodyError, ByteStream};

/// A body from the platform, read part by part. Dropping it cancels the body at its source.
pub(super) struct NativeBody {
    reader: Option<RawReader>,
    pending: Option<JsFuture>,
}

impl NativeBody {
    /// Takes the body over; it must not have a reader yet.
    pub(super) fn new(body: web_sys::ReadableStream) -> Result<Self, BodyError> {
        let body: RawStream = JsValue::from(body).unchecked_into();
        let reader = body.reader().map_err(|thrown| broken(&thrown))?;
        Ok(Self {
            reader: Some(reader),
            pending: None,
        })
    }

    fn part(result: &JsValue) -> Result<Option<Bytes>, JsValue> {
        if Reflect::get(result, &"done".into())?.is_truthy() {
            return Ok(None);
        }
        let value = Reflect::get(result, &"value".into())?;
        match value.dyn_ref::<Uint8Array>() {
            Some(part) => Ok(Some(part.to_vec().into())),
            None => Err("a part of the body is not bytes".into()),
        }
    }
}

impl Stream for NativeBody {
    type Item = Result<Bytes, BodyError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let Some(reader) = this.reader.as_ref() else {
            return Poll::Ready(None);
        };
        let mut read = match this.pending.take() {
            Some(read) => read,
            None => match reader.read() {
                Ok(promise) => JsFuture::from(promise),
                Err(thrown) => {
                    this.reader = None;
                    return Poll::Ready(Some(Err(broken(&thrown))));
                }
            },
        };
        let Poll::Ready(result) = Pin::new(&mut read).poll(context) else {
            this.pending = Some(read);
            return Poll::Pending;
        };
        match result.and_then(|result| Self::part(&result)) {
            Ok(Some(part)) => Poll::Ready(Some(Ok(part))),
            Ok(None) => {
                this.reader = None;
                Poll::Ready(None)
            }
            Err(thrown) => {
                this.reader = None;
                Poll::Ready(Some(Err(broken(&thrown))))
            }
        }
    }
}

impl Drop for NativeBody {
    fn drop(&mut self) {
        if let Some(reader) = self.reader.take() {
            ffi::forget(reader.cancel());
        }
    }
}

fn broken(thrown: &JsValue) -> BodyError {
    BodyError(ffi::message(thrown))
}

/// A body that we write: yields what `source` yields until it ends or its slot is emptied.
pub(super) struct SlotBody {
    slot: Slot,
}

/// Where the source of a body stands, so that something besides its reader can end it.
#[derive(Clone)]
struct Slot(Rc<RefCell<SlotState>>);

struct SlotState {
    source: Option<ByteStream>,
    closed: bool,
    waker: Option<Waker>,
}

impl SlotBody {
    /// Puts `source` into a slot that empties itself when `signal` aborts.
    pub(super) fn new(source: ByteStream, signal: Option<&web_sys::AbortSignal>) -> Self {
        let slot = Slot(Rc::new(RefCell::new(SlotState {
            source: Some(source),
            closed: false,
            waker: None,
        })));
        if let Some(signal) = signal {
            if signal.aborted() {
                slot.close();
            } else {
                let on_abort = slot.clone();
                // The closure belongs to the signal from here on and goes with it. One that is made to
                // be called once would stay for ever where it is never called.
                let callback =
                    Closure::<dyn FnMut()>::new(move || on_abort.close()).into_js_value();
                drop(signal.add_event_listener_with_callback("abort", callback.unchecked_ref()));
            }
        }
        Self { slot }
    }
}

impl Slot {
    /// Drops the source, and lets a reader that is waiting see the end.
    fn close(&self) {
        let (source, waker) = {
            let mut state = self.0.borrow_mut();
            state.closed = true;
            (state.source.take(), state.waker.take())
        };
        drop(source);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Stream for SlotBody {
    type Item = Result<Bytes, BodyError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // The source is taken out while it is polled: nobody may hold a borrow across foreign code.
        let Some(mut source) = self.slot.0.borrow_mut().source.take() else {
            return Poll::Ready(None);
        };
        let polled = source.as_mut().poll_next(context);
        let mut state = self.slot.0.borrow_mut();
        match polled {
            Poll::Ready(Some(Ok(part))) if !state.closed => {
                state.source = Some(source);
                Poll::Ready(Some(Ok(part)))
            }
            Poll::Pending if !state.closed => {
                state.source = Some(source);
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
            ended => {
                drop(state);
                drop(source);
                match ended {
                    Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error))),
                    _ => Poll::Ready(None),
                }
            }
        }
    }
}

impl Drop for SlotBody {
    fn drop(&mut self) {
        self.slot.close();
    }
}
