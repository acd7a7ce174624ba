//! What a user writes: an agent with its instructions, state, tools, sub-agents, output and hooks.
//!
//! Definitions are data and callbacks; they do no I/O by themselves and know no platform. The
//! session's driver calls them.

mod document;
pub(crate) mod history;
pub(crate) mod hooks;
pub mod model;
mod models;
mod offline;
mod schema;
pub(crate) mod tool;

use std::rc::Rc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

pub use document::LiveDocument;
pub use history::{
    BytesPerToken, Conversation, CutOldest, History, HistoryPolicy, Selected, TokenCounter,
    check_pairing, cut_oldest,
};
pub use hooks::{
    AfterEntryHook, Completing, CompletingHook, Entered, Entry, EntryHook, Settled, SettledHook,
    SettledOutcome, SubAgentHook, SubAgentPayload, ToolHook, ToolPayload,
};
pub use models::model_by_name;
pub use offline::OfflineModel;
pub use schema::Shape;
pub use tool::{
    StepHandle, StopSignal, Tool, ToolContext, ToolError, keyed, serial, tool, typed_tool,
};

use crate::error::{Code, Error, Result};
use crate::protocol::ids::{AgentType, SessionId};
use crate::session::Retention;
use crate::store::{Database, SessionOrigin, SubLocation};
use crate::transport::{RetryPolicy, Transport};
use model::LanguageModel;

/// The prefix of a sub-agent tool's name.
pub const SUB_AGENT_PREFIX: &str = "subagent__";

/// The tool by which an agent with a declared output hands it in.
pub const FINISH_TOOL: &str = "finish";

/// Readers of one session's stream at once, unless an agent says otherwise. A reader costs a
/// cursor and a connection; far more of them in one object are hardly people.
pub const MAX_READERS: usize = 256;

/// An agent: everything that a session of its type needs to run.
#[derive(Clone)]
pub struct Agent {
    /// Its type, as routes name it.
    pub agent_type: AgentType,
    /// The system prompt.
    pub instructions: Rc<str>,
    /// The model that drives it.
    pub model: Rc<dyn LanguageModel>,
    /// Its tools.
    pub tools: Vec<Rc<dyn Tool>>,
    /// Its sub-agents; each becomes a tool `subagent__<name>`.
    pub sub_agents: Vec<Rc<SubAgent>>,
    /// The shape of its state, with the initial value.
    pub state: Shape,
    /// The shape of its output; without one the output is the last answer's text.
    pub output: Option<Shape>,
    /// Bounds of a run.
    pub limits: Limits,
    /// How much of the conversation its model is sent.
    pub history: History,
    /// How much of its log a session keeps.
    pub retention: Retention,
    /// How long a session is kept after it last changed.
    pub expiry: Option<Duration>,
    /// When what the model streams is committed, and so shown.
    pub flush: Flush,
    /// Readers that a session's stream has at once.
    pub max_readers: usize,
    /// Runs when a start or a message comes in, before anything is stored.
    pub before_entry: Option<EntryHook>,
    /// Runs when a run was opened, in the transaction that opens it.
    pub after_entry: Option<AfterEntryHook>,
    /// Runs when a call of a tool of its own has ended; may stage state.
    pub after_tool: Option<ToolHook>,
    /// Runs when a sub-agent's call has settled; may stage state.
    pub after_sub_agent: Option<SubAgentHook>,
    /// Runs when a run is about to complete, in the transaction of its last commit.
    pub before_completion: Option<CompletingHook>,
    /// Runs when a run has settled.
    pub after_settled: Option<SettledHook>,
}

/// When what a model streams is committed, and so shown: whichever bound is met first. A commit costs
/// the same whether it holds one piece of text or many, so a longer delay makes a long answer cheaper
/// and its readers see it in larger pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flush {
    /// How long the first piece may wait for more. Default zero: what is there together is one
    /// commit, and nothing waits.
    pub max_delay: Duration,
    /// Bytes of text, reasoning and arguments that are committed at once. Default 16 KiB.
    pub max_bytes: usize,
}

impl Default for Flush {
    fn default() -> Self {
        Self {
            max_delay: Duration::ZERO,
            max_bytes: 16 * 1024,
        }
    }
}

/// Bounds of a run, and of what its session holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Steps of one run; the next is refused and the run fails. Default 32.
    pub max_steps: u64,
    /// Tokens of one run: what its model calls cost, and the sub-agents whose calls have settled in
    /// it. Looked at after each step: one that reaches it is the last, and the run fails with
    /// `run_attempts_exhausted` unless it has completed. A provider that tells no usage costs nothing
    /// here. Default none.
    pub max_tokens: Option<u64>,
    /// How long a run may take, across restarts. Then it is ended where it stands and fails with
    /// `run_timeout`: what the model says is discarded, tools are dropped, and children go on until
    /// an entry takes their calls up or the calls' own deadlines pass. Default none.
    pub max_run_time: Option<Duration>,
    /// How often an output may miss its shape before the run fails. Default 3.
    pub max_output_attempts: u32,
    /// Answers in a row that make the same calls and get the same results. The calls of the next
    /// such answer are not made; their results tell the model so, and if it makes them once more
    /// the run fails with `run_attempts_exhausted`. Default 5, 0 counts as 1, and `u32::MAX` sets no
    /// bound.
    pub max_repeats: u32,
    /// How long a local tool may take. Default 5 minutes.
    pub tool_timeout: Duration,
    /// The largest state of a session, in bytes of JSON. A start with a larger one is refused with
    /// `PAYLOAD_TOO_LARGE`; a tool or a hook that would make it larger gets that error instead, and the
    /// state stays as it is. Default 8 MiB: an object holds a few states at once, and its platform
    /// gives it 128 MB.
    pub max_state_bytes: usize,
    /// The size of a session's log, in bytes of JSON, what was trimmed not counted. Looked at after
    /// each step: one that reaches it is the last, and the run fails with `run_attempts_exhausted`
    /// unless it has completed; a resume is refused with `PAYLOAD_TOO_LARGE`. Default none: with
    /// [`Agent::with_retention`] an old log is trimmed instead.
    pub max_log_bytes: Option<u64>,
    /// Children that one session has in flight at once. Default 4: each holds a connection.
    /// [`Limits::UNBOUNDED_CHILDREN`] sets no bound, 0 counts as 1. Calls beyond the bound wait in
    /// call order, and the stream says so.
    pub max_children: usize,
}

impl Limits {
    /// Refuses a state that is too large, of `most` bytes or of what the agent takes.
    pub(crate) fn check_state(&self, state: &Value, most: usize) -> Result<()> {
        let most = most.min(self.max_state_bytes);
        if history::json_bytes(state) <= u64::try_from(most).unwrap_or(u64::MAX) {
            return Ok(());
        }
        let mut refused = Error::new(Code::PayloadTooLarge, "The state is too large.")
            .with_detail(format!("the limit is {most} bytes"));
        refused.field = Some("state".to_owned());
        Err(refused)
    }

    /// For [`Limits::max_children`]: every call of a child begins at once.
    pub const UNBOUNDED_CHILDREN: usize = usize::MAX;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_steps: 32,
            max_tokens: None,
            max_run_time: None,
            max_output_attempts: 3,
            max_repeats: 5,
            tool_timeout: Duration::from_secs(300),
            max_state_bytes: 8 * 1024 * 1024,
            max_log_bytes: None,
            max_children: 4,
        }
    }
}

/// A sub-agent: an agent elsewhere that this agent may call like a tool.
#[derive(Clone)]
pub struct SubAgent {
    /// Its name; the tool is `subagent__<name>`.
    pub name: String,
    /// What the model reads about it.
    pub description: String,
    /// The shape of the call's arguments.
    pub input: Shape,
    /// The shape of the child's output; a miss is a structured tool error.
    pub output: Option<Shape>,
    /// The child's agent type.
    pub agent_type: AgentType,
    /// Where children live: it decides their ids.
    pub location: SubLocation,
    /// How to reach it. Must lead to a raw mount.
    pub transport: Rc<dyn Transport>,
    /// Fills `start.state` from the call's arguments and this session. Must be repeatable.
    pub initial_state: Option<InitialState>,
    /// Deadlines and retries.
    pub policy: RetryPolicy,
    /// The largest child state, in bytes of JSON, that is handed to the hook. Default 262 144.
    pub max_fold_state_bytes: usize,
    /// Whether a child that says "running" but executes nothing is resumed once. Default no.
    pub resume_dead_producer: bool,
}

/// Fills a child's `start.state`: arguments of the call, the state, and the object's database.
pub type InitialState = Rc<dyn Fn(&Value, &Value, &dyn Database) -> Result<Map<String, Value>>>;

impl Agent {
    /// An agent without tools, with an empty state and free text as its output.
    #[must_use]
    pub fn new(
        agent_type: AgentType,
        instructions: impl Into<Rc<str>>,
        model: Rc<dyn LanguageModel>,
    ) -> Self {
        Self {
            agent_type,
            instructions: instructions.into(),
            model,
            tools: Vec::new(),
            sub_agents: Vec::new(),
            state: Shape::any(),
            output: None,
            limits: Limits::default(),
            history: History::default(),
            retention: Retention::default(),
            expiry: None,
            flush: Flush::default(),
            max_readers: MAX_READERS,
            before_entry: None,
            after_entry: None,
            after_tool: None,
            after_sub_agent: None,
            before_completion: None,
            after_settled: None,
        }
    }

    /// Declares the state's type; a session begins with its default, overlaid by `start.state`.
    #[must_use]
    pub fn with_state<S>(mut self) -> Self
    where
        S: Serialize + DeserializeOwned + schemars::JsonSchema + Default + 'static,
    {
        self.state = Shape::of_default::<S>();
        self
    }

    /// Declares the output's type: the model hands it in through the `finish` tool.
    #[must_use]
    pub fn with_output<O>(mut self) -> Self
    where
        O: DeserializeOwned + schemars::JsonSchema + 'static,
    {
        self.output = Some(Shape::of::<O>());
        self
    }

    /// Adds a tool.
    #[must_use]
    pub fn with_tool(mut self, tool: Rc<dyn Tool>) -> Self {
        self.tools.push(tool);
        self
    }

    /// Adds a sub-agent.
    #[must_use]
    pub fn with_sub_agent(mut self, sub_agent: SubAgent) -> Self {
        self.sub_agents.push(Rc::new(sub_agent));
        self
    }

    /// Sets the bounds of a run.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets how much of the conversation its model is sent. Default [`History::default`].
    #[must_use]
    pub fn with_history(mut self, history: History) -> Self {
        self.history = history;
        self
    }

    /// Sets how much of its log a session keeps. Default: all of it, because what was dropped can
    /// never be read again.
    #[must_use]
    pub fn with_retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Sets how long a session is kept after it last changed, once nothing of it runs any more:
    /// then it is deleted completely. Default: for ever. The alarm of a session at rest is armed
    /// by what happens to it, so one that came to rest before its agent had an expiry is deleted
    /// once it was stopped, resumed or woken again.
    #[must_use]
    pub fn with_expiry(mut self, after: Duration) -> Self {
        self.expiry = Some(after);
        self
    }

    /// Sets when what the model streams is committed. Default [`Flush::default`].
    #[must_use]
    pub fn with_flush(mut self, flush: Flush) -> Self {
        self.flush = flush;
        self
    }

    /// Sets how many readers a session's stream has at once; one more is refused with
    /// `RATE_LIMITED`. Default [`MAX_READERS`].
    #[must_use]
    pub fn with_max_readers(mut self, readers: usize) -> Self {
        self.max_readers = readers;
        self
    }

    /// Sets the hook right after a run was opened. Default: none.
    #[must_use]
    pub fn with_after_entry(mut self, hook: impl Fn(&Entered<'_>) -> Result<()> + 'static) -> Self {
        self.after_entry = Some(Rc::new(hook));
        self
    }

    /// Sets the hook right before a run completes. Default: none.
    #[must_use]
    pub fn with_before_completion(
        mut self,
        hook: impl Fn(&mut Completing<'_>) -> Result<()> + 'static,
    ) -> Self {
        self.before_completion = Some(Rc::new(hook));
        self
    }

    /// Sets the hook after a run has settled. Default: none. Runs that settled before an agent had
    /// one are not told.
    #[must_use]
    pub fn with_after_settled<F>(mut self, hook: impl Fn(Settled) -> F + 'static) -> Self
    where
        F: Future<Output = Result<()>> + 'static,
    {
        self.after_settled = Some(Rc::new(move |settled| Box::pin(hook(settled))));
        self
    }

    /// Sets the entry hook.
    #[must_use]
    pub fn with_before_entry(
        mut self,
        hook: impl Fn(&mut Entry<'_>) -> Result<()> + 'static,
    ) -> Self {
        self.before_entry = Some(Rc::new(hook));
        self
    }

    /// Sets the hook after a call of a tool of the agent's own. Default: none.
    #[must_use]
    pub fn with_after_tool(
        mut self,
        hook: impl Fn(&ToolPayload, &ToolContext) -> Result<()> + 'static,
    ) -> Self {
        self.after_tool = Some(Rc::new(hook));
        self
    }

    /// Sets the hook after a sub-agent's call.
    #[must_use]
    pub fn with_after_sub_agent(
        mut self,
        hook: impl Fn(&SubAgentPayload, &ToolContext) -> Result<()> + 'static,
    ) -> Self {
        self.after_sub_agent = Some(Rc::new(hook));
        self
    }
}

impl SubAgent {
    /// A sub-agent with the contract's default limits.
    #[must_use]
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        agent_type: AgentType,
        location: SubLocation,
        transport: Rc<dyn Transport>,
    ) -> Self {
        Self {
            name: name.into(),
            description: description.into(),
            input: Shape::any(),
            output: None,
            agent_type,
            location,
            transport,
            initial_state: None,
            policy: RetryPolicy::default(),
            max_fold_state_bytes: 262_144,
            resume_dead_producer: false,
        }
    }

    /// Declares the type of the call's arguments.
    #[must_use]
    pub fn with_input<I: DeserializeOwned + schemars::JsonSchema + 'static>(mut self) -> Self {
        self.input = Shape::of::<I>();
        self
    }

    /// Declares the type of the child's output.
    #[must_use]
    pub fn with_output<O: DeserializeOwned + schemars::JsonSchema + 'static>(mut self) -> Self {
        self.output = Some(Shape::of::<O>());
        self
    }

    /// Sets how `start.state` is filled.
    #[must_use]
    pub fn with_initial_state(
        mut self,
        fill: impl Fn(&Value, &Value, &dyn Database) -> Result<Map<String, Value>> + 'static,
    ) -> Self {
        self.initial_state = Some(Rc::new(fill));
        self
    }

    /// The name of the tool that calls it.
    #[must_use]
    pub fn tool_name(&self) -> String {
        format!("{SUB_AGENT_PREFIX}{}", self.name)
    }
}

/// The agents that an object can host, by type.
#[derive(Clone, Default)]
pub struct Agents(Rc<Vec<Rc<Agent>>>);

impl Agents {
    /// A set of agents.
    ///
    /// # Errors
    /// `INTERNAL` when two share a type, a tool name is taken twice in one agent, the model would
    /// read no description of a tool, or a provider would refuse every request of an agent: for a
    /// tool's name that is not 1 to 64 letters, digits, `_` and `-`, and for arguments or an output
    /// that are no JSON object.
    pub fn new(agents: impl IntoIterator<Item = Agent>) -> Result<Self> {
        let agents: Vec<_> = agents.into_iter().map(Rc::new).collect();
        for (i, agent) in agents.iter().enumerate() {
            if agents
                .iter()
                .skip(i + 1)
                .any(|other| other.agent_type == agent.agent_type)
            {
                return Err(Error::internal(format!(
                    "agent type {} is registered twice",
                    agent.agent_type
                )));
            }
            let specs: Vec<_> = agent.tools.iter().map(|tool| tool.spec()).collect();
            if let Some(silent) = specs.iter().find(|spec| spec.description.trim().is_empty()) {
                return Err(Error::internal(format!(
                    "the tool {} of agent {} has no description",
                    silent.name, agent.agent_type
                )));
            }
            let subs = agent.sub_agents.iter();
            let shapes = specs
                .iter()
                .map(|spec| (spec.name.clone(), &spec.parameters))
                .chain(subs.map(|sub| (sub.tool_name(), sub.input.schema())));
            let output = agent.output.iter();
            let output = output.map(|shape| (FINISH_TOOL.to_owned(), shape.schema()));
            for (name, schema) in shapes.chain(output) {
                if !is_tool_name(&name) {
                    return Err(Error::internal(format!(
                        "a tool of agent {} is named {name:?}; providers take 1 to 64 letters, digits, _ and -",
                        agent.agent_type
                    )));
                }
                if !may_be_object(schema) {
                    return Err(Error::internal(format!(
                        "what the tool {name} of agent {} takes is no JSON object: make it a struct",
                        agent.agent_type
                    )));
                }
            }
            let mut names: Vec<_> = specs.into_iter().map(|spec| spec.name).collect();
            names.extend(agent.sub_agents.iter().map(|sub| sub.tool_name()));
            names.extend(agent.output.iter().map(|_| FINISH_TOOL.to_owned()));
            names.sort();
            if names.windows(2).any(|pair| pair.first() == pair.last()) {
                return Err(Error::internal(format!(
                    "agent {} has two tools of one name",
                    agent.agent_type
                )));
            }
        }
        Ok(Self(Rc::new(agents)))
    }

    /// The agent of this type.
    #[must_use]
    pub fn find(&self, agent_type: &str) -> Option<Rc<Agent>> {
        self.0
            .iter()
            .find(|agent| agent.agent_type.as_str() == agent_type)
            .cloned()
    }

    /// The registered types.
    pub fn types(&self) -> impl Iterator<Item = &AgentType> {
        self.0.iter().map(|agent| &agent.agent_type)
    }
}

fn is_tool_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    (1..=64).contains(&name.len()) && name.bytes().all(is_plain)
}

/// Whether a schema is of objects, or says nothing of what it is of.
fn may_be_object(schema: &Value) -> bool {
    let others = ["oneOf", "anyOf", "enum", "const", "$ref"];
    match schema.get("type") {
        Some(kind) => kind == "object",
        None => others.iter().all(|other| schema.get(other).is_none()),
    }
}

/// Who a session is, as tools see it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The session.
    pub session_id: SessionId,
    /// Its agent type.
    pub agent_type: AgentType,
    /// What it was started with.
    pub origin: Rc<SessionOrigin>,
}
