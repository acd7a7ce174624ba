//! The rows of a session, as plain data.

use std::rc::Rc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::protocol::chunk::PatchOperation;
use crate::protocol::ids::{AgentType, RunId, Sequence, SessionId, StreamId, Timestamp};
use crate::protocol::message::{ParentRef, SessionStatus};
use crate::protocol::trace::TraceContext;
use crate::protocol::usage::{RollupOrigin, Tokens, UsageRollup};

/// Counts the executions of a session: it rises with every run and every wake-up, and a write of
/// an earlier one is refused. A life of an id begins at a random number.
pub type Epoch = u64;

/// The one session row: small, rewritten by every commit that moves a counter.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionRecord {
    /// Who it is; also the object's name.
    pub session_id: SessionId,
    /// What it is.
    pub agent_type: AgentType,
    /// The name of its sequence space.
    pub stream_id: StreamId,
    /// Where it stands.
    pub status: SessionStatus,
    /// The latest run.
    pub run_id: RunId,
    /// The execution that owns it.
    pub epoch: Epoch,
    /// Committed steps.
    pub step_count: u64,
    /// The newest sequence that was issued.
    pub last_sequence: Sequence,
    /// The retention floor: the oldest sequence that is kept; 0 when nothing was dropped.
    pub floor: Sequence,
    /// The last patch ordinal that was issued, discarded ones included.
    pub last_ordinal: u64,
    /// Executions of the latest run that ended without a commit of progress.
    pub attempts: u32,
    /// A stop that was asked for and has not been carried out yet.
    pub stop: Option<Stop>,
    /// The latest run's output.
    pub output: Option<Value>,
    /// The latest run's failure.
    pub failure: Option<Failure>,
    /// Identity and hand-downs, fixed at the start.
    pub origin: Rc<SessionOrigin>,
    /// When it began.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// What a session was started with and never changes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SessionOrigin {
    /// The calling parent, when a dispatch began it.
    pub parent: Option<ParentRef>,
    /// The end user.
    pub user_id: Option<String>,
    /// Labels.
    pub tags: Option<Vec<String>>,
    /// Free for products.
    pub metadata: Option<Map<String, Value>>,
    /// The caller that it is bound to, as `protocol::inside::Caller` has it. Nobody, where it was begun
    /// over a mount that binds nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The trace that the start continues, and that children continue in their turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<TraceContext>,
}

/// A stop that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stop {
    /// Interrupt or abort.
    pub kind: StopKind,
    /// Why.
    pub reason: Option<String>,
}

/// The two ways to stop a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StopKind {
    /// The run can be resumed.
    Interrupt,
    /// The session is over.
    Abort,
}

/// Why a run failed, by its stable code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// The code's wire spelling.
    pub code: String,
    /// One short sentence.
    pub error: String,
    /// More for developers.
    pub detail: Option<String>,
}

impl From<crate::error::Error> for Failure {
    fn from(error: crate::error::Error) -> Self {
        Self {
            code: error.code.as_str().into(),
            error: error.message.into_owned(),
            detail: error.detail,
        }
    }
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunRecord {
    /// Its id.
    pub run_id: RunId,
    /// The newest sequence before its first chunk: reading from here yields the whole run.
    pub start_sequence: Sequence,
    /// The steps that were committed before it: its own are counted from here.
    pub start_step: u64,
    /// When it began.
    pub started_at: Timestamp,
    /// Its terminal frame as SSE-ready event name and JSON, once it has settled. State is not in
    /// it; a reader's frame gets the state when it is written.
    pub terminal: Option<Terminal>,
}

/// A stored terminal frame.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Terminal {
    /// The status that the run settled with.
    pub status: SessionStatus,
    /// The sequence of the run's last chunk.
    pub sequence: Sequence,
    /// The output, when it completed.
    pub output: Option<Value>,
    /// The state, when it is not above the limit of a terminal frame.
    pub state: Option<Value>,
    /// The recursive usage as of the end.
    pub usage: Option<UsageRollup>,
    /// The failure, when it failed.
    pub failure: Option<Failure>,
}

/// The state at a step boundary and the place in the stream that it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointRecord {
    /// `cpv1-{sessionId}-s{step}-t{ms}-{6 hex}`.
    pub checkpoint_id: String,
    /// Steps committed at this point.
    pub step_count: u64,
    /// The sequence of its own `step_committed`, or of the chunk that opened its run.
    pub stream_sequence: Sequence,
    /// The last promoted patch ordinal; 0 when there was none.
    pub patch_ordinal: u64,
    /// The state, an object.
    pub state: Rc<Value>,
    /// When.
    pub created_at: Timestamp,
}

/// A message of the conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "role",
    rename_all = "snake_case",
    rename_all_fields = "camelCase"
)]
pub enum MessageRecord {
    /// What the user, or the calling parent, said.
    User {
        /// The text.
        text: String,
    },
    /// What the model answered.
    Assistant {
        /// The text; may be empty when there are calls.
        text: String,
        /// The calls, with their final ids.
        #[serde(default)]
        tool_calls: Vec<ToolCall>,
        /// Set when the run was interrupted in the middle of it.
        #[serde(default)]
        cut: bool,
        /// What its provider wants back with it, see
        /// [`ModelEvent::Kept`](crate::agent::model::ModelEvent::Kept).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kept: Option<Value>,
    },
    /// What a call came back with; stands right after the answer, in call order.
    Tool {
        /// The call.
        tool_call_id: String,
        /// The tool.
        tool_name: String,
        /// The result.
        outcome: ToolOutcome,
    },
}

/// A call that the model made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolCall {
    /// Unique in the session.
    pub id: String,
    /// The tool's name as the model wrote it.
    pub name: String,
    /// The arguments; an object, unless the model wrote something else.
    pub arguments: Value,
}

/// What a tool call came back with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolOutcome {
    /// Whether it succeeded.
    pub success: bool,
    /// The result, or for a failure what the model may read of it.
    pub result: Value,
    /// The failure's sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The step under way.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRecord {
    /// Its number: the committed steps plus one.
    pub step: u64,
    /// The newest sequence before its first chunk.
    pub start_sequence: Sequence,
    /// The model's answer, once it is committed: from then on its calls survive.
    pub answer: Option<Answer>,
}

/// The model's answer as committed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Set when the run was interrupted in the middle of it.
    #[serde(default)]
    pub cut: bool,
    /// What its provider wants back with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Value>,
    /// Messages that came in while calls of an ended run had no result yet. They stand behind the
    /// results, once the step is promoted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub then: Vec<String>,
}

/// A tool call of the step under way, or a hook that staged state (its index is `None`).
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCallRecord {
    /// The call.
    pub call: ToolCall,
    /// Its place in the model's answer, from 0.
    pub index: u64,
    /// How often an execution has begun: more than once where one was cut short by a restart.
    pub begun: u32,
    /// The result, once it is there.
    pub outcome: Option<ToolOutcome>,
    /// What it staged, in order.
    pub staged: Vec<StagedPatch>,
}

/// One staged change of the step's working document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StagedPatch {
    /// The ordinal of its `state_patch`.
    pub ordinal: u64,
    /// The operations.
    pub patches: Vec<PatchOperation>,
    /// Whether the hook after the call staged it: such a write stands also when the call failed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_hook: bool,
}

/// Where a child lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SubLocation {
    /// In an object of the same worker.
    Local,
    /// Behind another service.
    Remote,
}

/// How a child's ref stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SubStatus {
    /// The call is open.
    Running,
    /// A stop is on its way to the child.
    Stopping,
    /// The call has its result, from a child that completed.
    Completed,
    /// The call has its result, and it is a failure.
    Failed,
}

/// A child's ref: made before its `/start` is sent, settled together with the call's result.
#[derive(Clone, Debug, PartialEq)]
pub struct SubSessionRecord {
    /// The child's session id.
    pub sub_session_id: SessionId,
    /// The child's agent type.
    pub agent_type: AgentType,
    /// The call.
    pub tool_call_id: String,
    /// Where the child lives.
    pub location: SubLocation,
    /// How the ref stands.
    pub status: SubStatus,
    /// The child's stream, once it has answered its start.
    pub remote: Option<SubRemote>,
    /// When the call has to be settled, whatever happens.
    pub deadline: Timestamp,
    /// When the ref was made.
    pub created_at: Timestamp,
}

/// The child's stream and how far it has been forwarded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SubRemote {
    /// The child's stream.
    pub stream_id: StreamId,
    /// The last child sequence that is in the parent's log; 0 before the first.
    pub last_sequence: Sequence,
}

/// One entry of the usage ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "kind",
    rename_all = "snake_case",
    rename_all_fields = "camelCase"
)]
pub enum UsageRecord {
    /// A model call, also one whose answer was discarded.
    Model {
        /// The model's name.
        model: String,
        /// What it counted.
        tokens: Tokens,
        /// When.
        at: Timestamp,
    },
    /// A tool call that has its result.
    Tool {
        /// The tool.
        name: String,
        /// Whether it succeeded.
        success: bool,
        /// When.
        at: Timestamp,
    },
    /// A pointer to a child, with its rollup where it is known. Duplicates are expected and are
    /// told apart at read.
    SubAgent {
        /// The child.
        sub_session_id: String,
        /// Its type.
        sub_agent_type: String,
        /// The call.
        tool_call_id: String,
        /// The child's rollup.
        rollup: Option<Box<UsageRollup>>,
        /// Where the rollup came from.
        origin: RollupOrigin,
        /// When.
        at: Timestamp,
    },
}

/// An idempotency key that was used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyRecord {
    /// The key.
    pub key: String,
    /// Lower-case hex SHA-256 of action and canonical body.
    pub digest: String,
    /// The JSON that was answered.
    pub answer: String,
    /// When.
    pub at: Timestamp,
}

/// A hook that a settled run is owed: stored by the commit that settles the run, removed once the
/// hook has come to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueHook {
    /// The run.
    pub run_id: RunId,
    /// The status that it settled with. A run can have more than one: an interrupted one that is
    /// aborted afterwards has two.
    pub status: SessionStatus,
    /// How often the hook was begun.
    pub attempts: u32,
    /// When it is begun next.
    pub due_at: Timestamp,
}
