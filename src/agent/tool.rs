//! Tools: typed functions that a model may call, and the context they get.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::task::{Poll, Waker};

use futures::future::LocalBoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use super::model::ToolSpec;
use super::{Identity, LiveDocument};
use crate::error::{Code, Error, Result};
use crate::protocol::chunk::PatchOperation;
use crate::protocol::ids::{DocumentId, StreamId, Timestamp, hex};
use crate::store::Database;

/// A tool.
pub trait Tool {
    /// What the model reads.
    fn spec(&self) -> ToolSpec;

    /// The key of what a call with these arguments does outside, where the tool knows one that
    /// means more than the call does, such as the number of an order. `None`, the default: the key
    /// of the call.
    fn idempotency_key(&self, arguments: &Value) -> Option<String> {
        let _none = arguments;
        None
    }

    /// Whether its calls run alone: those before them in the answer have ended, those behind them
    /// wait. Calls of sub-agents go on beside them. Default no, see [`serial`].
    fn is_serial(&self) -> bool {
        false
    }

    /// Runs one call. Dropping the future cancels it.
    fn call(
        &self,
        context: ToolContext,
        arguments: Value,
    ) -> LocalBoxFuture<'static, Result<Value, ToolError>>;
}

/// A failed call, as the model may read it: never with a credential.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ToolError {
    /// The stable code.
    pub code: Code,
    /// One sentence.
    pub message: String,
    /// Whether the same call may succeed later.
    pub retryable: bool,
}

impl ToolError {
    /// A `tool_execution_failed` that is not worth trying again unchanged.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            code: Code::ToolExecutionFailed,
            message: message.into(),
            retryable: false,
        }
    }
}

impl From<Error> for ToolError {
    fn from(error: Error) -> Self {
        Self {
            code: error.code,
            message: error.message.into_owned(),
            retryable: error.code.retryable(),
        }
    }
}

/// What the session's driver does for a tool.
pub trait StepHandle {
    /// The step's working document: the last checkpoint's state and everything staged since.
    fn state(&self) -> Rc<Value>;

    /// Stages a change of the working document in the name of a call; its patch is on the stream
    /// at once, the state becomes visible when the step is promoted.
    fn stage(&self, tool_call_id: &str, state: Value) -> Result<()>;

    /// Says something on the stream.
    fn emit(&self, event_name: &str, data: Value) -> Result<()>;

    /// Says a change of a live document on the stream. Default: `framework_not_supported`.
    fn patch_document(&self, id: &DocumentId, patches: Vec<PatchOperation>) -> Result<()> {
        let _ = (id, patches);
        let sentence = "There is no stream for a live document here.";
        Err(Error::new(Code::NotSupported, sentence))
    }

    /// The object's database, for tables of the agent's own.
    fn database(&self) -> &dyn Database;

    /// The time.
    fn now(&self) -> Timestamp;
}

/// What a tool gets beside its arguments.
#[derive(Clone)]
pub struct ToolContext {
    /// The session.
    pub identity: Identity,
    /// The call.
    pub tool_call_id: String,
    /// Which execution of this very call it is, from 1. See [`Self::is_repeat`].
    pub attempt: u32,
    /// The same for every execution of this call, and for no other call: for the outside to tell a
    /// repeat by. It is printable ASCII of at most 128 characters, as an `Idempotency-Key` asks for,
    /// unless the tool declares its own ([`keyed`]).
    pub idempotency_key: String,
    /// Tells when the run is asked to stop.
    pub stop: StopSignal,
    /// The driver's side.
    pub handle: Rc<dyn StepHandle>,
}

impl ToolContext {
    /// Whether an earlier execution of this very call was cut short by a restart: its effects
    /// outside the session may have happened. A tool that cannot tell the outside to recognise its
    /// [`Self::idempotency_key`] should look whether they have before it does anything.
    #[must_use]
    pub fn is_repeat(&self) -> bool {
        self.attempt > 1
    }

    /// The state as a type of the user's.
    ///
    /// # Errors
    /// `invalid_stored_state` when the state does not have this shape.
    pub fn state<S: DeserializeOwned>(&self) -> Result<S> {
        S::deserialize(&*self.handle.state()).map_err(|e| {
            Error::new(
                Code::InvalidStoredState,
                "The state does not have its declared shape.",
            )
            .with_detail(e.to_string())
        })
    }

    /// Changes the state: the top-level fields that differ afterwards are staged.
    ///
    /// # Errors
    /// `invalid_stored_state` when the state does not have this shape, or what the store says.
    pub fn update<S: Serialize + DeserializeOwned>(
        &self,
        change: impl FnOnce(&mut S),
    ) -> Result<()> {
        let mut typed: S = self.state()?;
        let encode = |typed: &S| {
            serde_json::to_value(typed).map_err(|e| Error::internal(format!("state: {e}")))
        };
        let before = encode(&typed)?;
        change(&mut typed);
        let after = encode(&typed)?;
        let mut state = (*self.handle.state()).clone();
        let (Some(document), Value::Object(before), Value::Object(after)) =
            (state.as_object_mut(), before, after)
        else {
            return Err(Error::internal("a state must be an object"));
        };
        document.retain(|key, _| !before.contains_key(key) || after.contains_key(key));
        for (key, value) in after {
            if before.get(&key) != Some(&value) {
                document.insert(key, value);
            }
        }
        self.handle.stage(&self.tool_call_id, state)
    }

    /// The metadata that the session was started with; children are handed their parent's.
    #[must_use]
    pub fn metadata(&self) -> Option<&Map<String, Value>> {
        self.identity.origin.metadata.as_ref()
    }

    /// A live document of this session: something that readers see grow and that is not its state.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` when the name is not 1 to 64 characters of `[A-Za-z0-9._-]`.
    pub fn document(&self, name: &str) -> Result<LiveDocument> {
        let id = DocumentId::new(&self.identity.session_id, name)?;
        Ok(LiveDocument::new(id, self.handle.clone()))
    }

    /// Says something on the stream, as a `custom` chunk.
    ///
    /// # Errors
    /// What the store says.
    pub fn emit(&self, event_name: &str, data: Value) -> Result<()> {
        self.handle.emit(event_name, data)
    }

    /// The object's database, for tables of the agent's own.
    #[must_use]
    pub fn database(&self) -> &dyn Database {
        self.handle.database()
    }
}

/// As [`typed_tool`], with the doc comment of the argument type as the description:
///
/// ```
/// use remote_agents::{ToolContext, ToolError, tool};
/// use schemars::JsonSchema;
/// use serde::Deserialize;
///
/// /// Adds two numbers.
/// #[derive(Deserialize, JsonSchema)]
/// struct Sum {
///     /// The first.
///     a: i64,
///     /// The second.
///     b: i64,
/// }
///
/// let add = tool("add", async |_: ToolContext, sum: Sum| {
///     Ok::<_, ToolError>(sum.a.saturating_add(sum.b))
/// });
/// assert_eq!(add.spec().description, "Adds two numbers.");
/// assert_eq!(add.spec().parameters["properties"]["a"]["description"], "The first.");
/// ```
///
/// A type without a doc comment gives a tool without a description, which [`super::Agents::new`]
/// refuses.
pub fn tool<A, O, F, Fut>(name: &'static str, function: F) -> Rc<dyn Tool>
where
    A: DeserializeOwned + schemars::JsonSchema + 'static,
    O: Serialize + 'static,
    F: Fn(ToolContext, A) -> Fut + 'static,
    Fut: Future<Output = Result<O, ToolError>> + 'static,
{
    let shape = super::Shape::of::<A>();
    let described = shape.schema().get("description").and_then(Value::as_str);
    made(name, described.unwrap_or_default(), function)
}

/// A tool made of a function: the schema is derived from its argument type.
pub fn typed_tool<A, O, F, Fut>(
    name: &'static str,
    description: &'static str,
    function: F,
) -> Rc<dyn Tool>
where
    A: DeserializeOwned + schemars::JsonSchema + 'static,
    O: Serialize + 'static,
    F: Fn(ToolContext, A) -> Fut + 'static,
    Fut: Future<Output = Result<O, ToolError>> + 'static,
{
    made(name, description, function)
}

fn made<A, O, F, Fut>(name: &str, description: &str, function: F) -> Rc<dyn Tool>
where
    A: DeserializeOwned + schemars::JsonSchema + 'static,
    O: Serialize + 'static,
    F: Fn(ToolContext, A) -> Fut + 'static,
    Fut: Future<Output = Result<O, ToolError>> + 'static,
{
    Rc::new(TypedTool {
        spec: ToolSpec {
            name: name.into(),
            description: description.into(),
            parameters: super::Shape::of::<A>().schema().clone(),
        },
        call: Box::new(move |context, arguments| match A::deserialize(&arguments) {
            Ok(typed) => {
                let running = function(context, typed);
                Box::pin(async move {
                    let output = running.await?;
                    serde_json::to_value(output)
                        .map_err(|e| ToolError::new(format!("the result is not JSON: {e}")))
                })
            }
            Err(e) => {
                let error = ToolError {
                    code: Code::ValidationError,
                    ..ToolError::new(format!("The arguments do not fit: {e}"))
                };
                Box::pin(async move { Err(error) })
            }
        }),
    })
}

/// The key of a call that declares none: bound to one life of the session.
pub(crate) fn call_key(stream: &StreamId, tool_call_id: &str) -> String {
    let digest = Sha256::new()
        .chain_update(stream.as_str())
        .chain_update([0])
        .chain_update(tool_call_id)
        .finalize();
    format!("call:{}", hex(&digest))
}

/// The tool, with the idempotency key of what its calls do outside. Calls with equal keys are one
/// effect to the outside, also when the model made two of them. Arguments that do not fit `A` have
/// the key of their call; the tool refuses them anyway.
pub fn keyed<A>(tool: Rc<dyn Tool>, key: impl Fn(&A) -> String + 'static) -> Rc<dyn Tool>
where
    A: DeserializeOwned + 'static,
{
    Rc::new(KeyedTool {
        tool,
        key: Box::new(move |arguments| A::deserialize(arguments).ok().map(|typed| key(&typed))),
    })
}

/// The tool, whose calls run alone: see [`Tool::is_serial`].
#[must_use]
pub fn serial(tool: Rc<dyn Tool>) -> Rc<dyn Tool> {
    Rc::new(SerialTool(tool))
}

struct SerialTool(Rc<dyn Tool>);

impl Tool for SerialTool {
    fn spec(&self) -> ToolSpec {
        self.0.spec()
    }

    fn idempotency_key(&self, arguments: &Value) -> Option<String> {
        self.0.idempotency_key(arguments)
    }

    fn is_serial(&self) -> bool {
        true
    }

    fn call(
        &self,
        context: ToolContext,
        arguments: Value,
    ) -> LocalBoxFuture<'static, Result<Value, ToolError>> {
        self.0.call(context, arguments)
    }
}

type Key = Box<dyn Fn(&Value) -> Option<String>>;

struct KeyedTool {
    tool: Rc<dyn Tool>,
    key: Key,
}

impl Tool for KeyedTool {
    fn spec(&self) -> ToolSpec {
        self.tool.spec()
    }

    fn idempotency_key(&self, arguments: &Value) -> Option<String> {
        (self.key)(arguments)
    }

    fn is_serial(&self) -> bool {
        self.tool.is_serial()
    }

    fn call(
        &self,
        context: ToolContext,
        arguments: Value,
    ) -> LocalBoxFuture<'static, Result<Value, ToolError>> {
        self.tool.call(context, arguments)
    }
}

type Call = Box<dyn Fn(ToolContext, Value) -> LocalBoxFuture<'static, Result<Value, ToolError>>>;

struct TypedTool {
    spec: ToolSpec,
    call: Call,
}

impl Tool for TypedTool {
    fn spec(&self) -> ToolSpec {
        self.spec.clone()
    }

    fn call(
        &self,
        context: ToolContext,
        arguments: Value,
    ) -> LocalBoxFuture<'static, Result<Value, ToolError>> {
        (self.call)(context, arguments)
    }
}

/// Tells when a run is asked to stop. Cheap to clone; all clones tell the same.
#[derive(Clone, Default)]
pub struct StopSignal(Rc<RefCell<(bool, Vec<Waker>)>>);

impl StopSignal {
    /// Whether the run was asked to stop.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.borrow().0
    }

    /// Asks to stop and wakes everyone who waits.
    pub fn set(&self) {
        let wakers = {
            let mut inner = self.0.borrow_mut();
            inner.0 = true;
            std::mem::take(&mut inner.1)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Completes when the run is asked to stop.
    pub fn wait(&self) -> impl Future<Output = ()> + 'static {
        let inner = self.0.clone();
        std::future::poll_fn(move |context| {
            let mut inner = inner.borrow_mut();
            if inner.0 {
                return Poll::Ready(());
            }
            if !inner.1.iter().any(|waker| waker.will_wake(context.waker())) {
                inner.1.push(context.waker().clone());
            }
            Poll::Pending
        })
    }
}
