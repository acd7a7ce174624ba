//! The platform's JavaScript, bound by hand: every call is fallible here.
//!
//! The `worker` crate binds some of these without `catch`, and some not at all. An exception that
//! crosses WebAssembly uncaught takes down every object of the isolate, so nothing in this folder
//! may call a platform method by another way when it can throw.

use js_sys::{Array, Function, JsString, Object, Promise, Reflect};
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

#[wasm_bindgen]
extern "C" {
    /// The context of an object or of a request.
    #[wasm_bindgen(extends = Object)]
    #[derive(Clone, Debug)]
    pub(super) type RawContext;
    #[wasm_bindgen(method, catch, js_name = waitUntil)]
    pub(super) fn wait_until(this: &RawContext, promise: &Promise) -> Result<(), JsValue>;
    #[wasm_bindgen(method, catch, getter)]
    pub(super) fn storage(this: &RawContext) -> Result<RawStorage, JsValue>;
    #[wasm_bindgen(method, catch)]
    pub(super) fn abort(this: &RawContext, reason: &str) -> Result<(), JsValue>;

    /// An object's storage.
    #[wasm_bindgen(extends = Object)]
    #[derive(Clone, Debug)]
    pub(super) type RawStorage;
    #[wasm_bindgen(method, catch, js_name = transactionSync)]
    pub(super) fn transaction_sync(
        this: &RawStorage,
        work: &mut dyn FnMut() -> Result<JsValue, JsValue>,
    ) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch, getter)]
    pub(super) fn sql(this: &RawStorage) -> Result<RawSql, JsValue>;
    #[wasm_bindgen(method, catch)]
    pub(super) fn sync(this: &RawStorage) -> Result<Promise, JsValue>;
    #[wasm_bindgen(method, catch, js_name = sync)]
    pub(super) fn sync_then(this: &RawStorage) -> Result<RawPromise, JsValue>;
    #[wasm_bindgen(method, catch, js_name = setAlarm)]
    pub(super) fn set_alarm(this: &RawStorage, at: f64) -> Result<Promise, JsValue>;
    #[wasm_bindgen(method, catch, js_name = deleteAlarm)]
    pub(super) fn delete_alarm(this: &RawStorage) -> Result<Promise, JsValue>;

    /// A promise of which no other promise is made.
    #[wasm_bindgen(extends = Object)]
    pub(super) type RawPromise;
    #[wasm_bindgen(method, catch, js_name = then)]
    pub(super) fn tell(
        this: &RawPromise,
        kept: &Function,
        broken: &Function,
    ) -> Result<JsValue, JsValue>;

    /// An object's SQLite.
    #[wasm_bindgen(extends = Object)]
    #[derive(Clone, Debug)]
    pub(super) type RawSql;
    #[wasm_bindgen(method, catch, variadic)]
    pub(super) fn exec(
        this: &RawSql,
        sql: &JsString,
        bindings: Array,
    ) -> Result<RawCursor, JsValue>;
    // As above for a few parameters, which then need no array.
    #[wasm_bindgen(method, catch, js_name = exec)]
    pub(super) fn exec_0(this: &RawSql, sql: &JsString) -> Result<RawCursor, JsValue>;
    #[wasm_bindgen(method, catch, js_name = exec)]
    pub(super) fn exec_1(this: &RawSql, sql: &JsString, a: &JsValue) -> Result<RawCursor, JsValue>;
    #[wasm_bindgen(method, catch, js_name = exec)]
    pub(super) fn exec_2(
        this: &RawSql,
        sql: &JsString,
        a: &JsValue,
        b: &JsValue,
    ) -> Result<RawCursor, JsValue>;
    #[wasm_bindgen(method, catch, js_name = exec)]
    pub(super) fn exec_3(
        this: &RawSql,
        sql: &JsString,
        a: &JsValue,
        b: &JsValue,
        c: &JsValue,
    ) -> Result<RawCursor, JsValue>;
    #[wasm_bindgen(method, catch, js_name = exec)]
    pub(super) fn exec_5(
        this: &RawSql,
        sql: &JsString,
        a: &JsValue,
        b: &JsValue,
        c: &JsValue,
        d: &JsValue,
        e: &JsValue,
    ) -> Result<RawCursor, JsValue>;

    /// A statement's cursor.
    #[wasm_bindgen(extends = Object)]
    pub(super) type RawCursor;
    #[wasm_bindgen(method, catch)]
    pub(super) fn raw(this: &RawCursor) -> Result<RawRows, JsValue>;
    #[wasm_bindgen(method, catch, getter, js_name = rowsWritten)]
    pub(super) fn rows_written(this: &RawCursor) -> Result<f64, JsValue>;

    /// A cursor's rows as arrays.
    #[wasm_bindgen(extends = Object)]
    pub(super) type RawRows;
    #[wasm_bindgen(method, catch, js_name = toArray)]
    pub(super) fn to_array(this: &RawRows) -> Result<Array, JsValue>;

    /// Whatever answers requests: a service binding or an object's stub.
    #[wasm_bindgen(extends = Object)]
    #[derive(Clone, Debug)]
    pub(super) type RawFetcher;
    #[wasm_bindgen(method, catch)]
    pub(super) fn fetch(this: &RawFetcher, request: &web_sys::Request) -> Result<Promise, JsValue>;
    #[wasm_bindgen(catch, js_name = fetch)]
    pub(super) fn global_fetch(request: &web_sys::Request) -> Result<Promise, JsValue>;

    /// The binding of Workers AI.
    #[wasm_bindgen(extends = Object)]
    #[derive(Clone, Debug)]
    pub(super) type RawAi;
    #[wasm_bindgen(method, catch)]
    pub(super) fn run(
        this: &RawAi,
        model: &str,
        inputs: &JsValue,
        options: &Object,
    ) -> Result<Promise, JsValue>;

    /// A binding of the platform's rate limiter.
    #[wasm_bindgen(extends = Object)]
    #[derive(Clone, Debug)]
    pub(super) type RawRateLimit;
    #[wasm_bindgen(method, catch)]
    pub(super) fn limit(this: &RawRateLimit, options: &Object) -> Result<Promise, JsValue>;

    /// Text as bytes.
    #[wasm_bindgen(extends = Object, js_name = TextEncoder)]
    pub(super) type RawTextEncoder;
    #[wasm_bindgen(constructor, catch, js_class = "TextEncoder")]
    pub(super) fn new() -> Result<RawTextEncoder, JsValue>;
    #[wasm_bindgen(method, catch, js_class = "TextEncoder")]
    pub(super) fn encode(
        this: &RawTextEncoder,
        text: &JsString,
    ) -> Result<js_sys::Uint8Array, JsValue>;

    /// A native body.
    #[wasm_bindgen(extends = Object)]
    pub(super) type RawStream;
    #[wasm_bindgen(method, catch, js_name = getReader)]
    pub(super) fn reader(this: &RawStream) -> Result<RawReader, JsValue>;

    /// The reader of a native body.
    #[wasm_bindgen(extends = Object)]
    pub(super) type RawReader;
    #[wasm_bindgen(method, catch)]
    pub(super) fn read(this: &RawReader) -> Result<Promise, JsValue>;
    #[wasm_bindgen(method, catch)]
    pub(super) fn cancel(this: &RawReader) -> Result<Promise, JsValue>;

    /// Cancels a request that waits for its answer.
    #[wasm_bindgen(extends = Object, js_name = AbortController)]
    pub(super) type RawAbortController;
    #[wasm_bindgen(constructor, catch, js_class = "AbortController")]
    pub(super) fn new() -> Result<RawAbortController, JsValue>;
    #[wasm_bindgen(method, catch, getter, js_class = "AbortController")]
    pub(super) fn signal(this: &RawAbortController) -> Result<web_sys::AbortSignal, JsValue>;
    #[wasm_bindgen(method, catch, js_name = abort, js_class = "AbortController")]
    pub(super) fn cancel_request(this: &RawAbortController) -> Result<(), JsValue>;

    // The id stays opaque: under Node compatibility it is an object, not a number.
    #[wasm_bindgen(catch, js_name = setTimeout)]
    pub(super) fn set_timeout(callback: &Function, milliseconds: f64) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(catch, js_name = setTimeout)]
    pub(super) fn set_timeout_with(
        callback: &Function,
        milliseconds: f64,
        argument: &str,
    ) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(catch, js_name = clearTimeout)]
    pub(super) fn clear_timeout(id: &JsValue) -> Result<(), JsValue>;

    /// A function as something that can be tied to its object.
    #[wasm_bindgen(extends = Function)]
    pub(super) type RawFunction;
    #[wasm_bindgen(method, catch, js_name = bind)]
    pub(super) fn tied_to(this: &RawFunction, this_value: &JsValue) -> Result<Function, JsValue>;

    /// A reference that keeps nothing alive.
    #[derive(Debug)]
    #[wasm_bindgen(extends = Object, js_name = WeakRef)]
    pub(super) type RawWeakRef;
    #[wasm_bindgen(constructor, catch, js_class = "WeakRef")]
    pub(super) fn new(target: &JsValue) -> Result<RawWeakRef, JsValue>;
    #[wasm_bindgen(method, catch, js_class = "WeakRef")]
    pub(super) fn deref(this: &RawWeakRef) -> Result<JsValue, JsValue>;

    #[wasm_bindgen(catch, js_namespace = console, js_name = log)]
    pub(super) fn console_log(line: &str) -> Result<(), JsValue>;
    #[wasm_bindgen(catch, js_namespace = console, js_name = warn)]
    pub(super) fn console_warn(line: &str) -> Result<(), JsValue>;
    #[wasm_bindgen(catch, js_namespace = console, js_name = error)]
    pub(super) fn console_error(line: &str) -> Result<(), JsValue>;
}

/// What a thrown value says, without the stack that its debug form would carry.
pub(super) fn message(thrown: &JsValue) -> String {
    let said = thrown
        .dyn_ref::<js_sys::Error>()
        .and_then(|error| String::from(error.message()).into());
    said.or_else(|| thrown.as_string())
        .unwrap_or_else(|| "a value was thrown that is no error".to_owned())
}

/// Whether a thrown error carries a flag such as `overloaded` or `retryable`.
pub(super) fn flag(thrown: &JsValue, name: &str) -> bool {
    Reflect::get(thrown, &JsValue::from_str(name)).is_ok_and(|value| value.is_truthy())
}

/// Waits for what a fallible call promised.
pub(super) async fn settled(promise: Result<Promise, JsValue>) -> Result<JsValue, JsValue> {
    JsFuture::from(promise?).await
}

/// Lets a promise run on and looks at its outcome, so that a rejection is not "unhandled".
pub(super) fn forget(promise: Result<Promise, JsValue>) {
    if let Ok(promise) = promise {
        wasm_bindgen_futures::spawn_local(async move {
            drop(JsFuture::from(promise).await);
        });
    }
}

/// The id of a context's object as text.
pub(super) fn object_id(context: &RawContext) -> Result<JsValue, JsValue> {
    let id = Reflect::get(context, &"id".into())?;
    let to_string = Reflect::get(&id, &"toString".into())?.dyn_into::<Function>()?;
    to_string.call0(&id)
}
