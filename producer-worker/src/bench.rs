//! A bench for agents, for tests alone: the loop of model, tools and results in a few lines, over
//! a database in memory and without a session. It keeps all that an agent says.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use futures::executor::block_on;
use futures::stream::StreamExt as _;
use remote_agents::agent::model::{ModelEvent, ModelRequest, ToolSpec};
use remote_agents::agent::{
    Agent, Entry, FINISH_TOOL, Identity, StepHandle, StopSignal, SubAgent, SubAgentPayload,
    ToolContext, ToolError,
};
use remote_agents::error::{Error, Result};
use remote_agents::protocol::ids::{Position, SessionId, StreamId, Timestamp};
use remote_agents::protocol::message::{ResumeRequest, StartRequest, StopRequest};
use remote_agents::protocol::message::{
    SnapshotResponse, StartResponse, StatusResponse, StopResponse, UsageResponse,
};
use remote_agents::store::{Database, MessageRecord, SqlValue, ToolCall, ToolOutcome};
use remote_agents::transport::{Call, FrameStream, Transport, TransportError};
use rusqlite::types::ValueRef;
use serde_json::{Map, Value, json};

/// A database in memory.
pub(crate) struct Memory(rusqlite::Connection);

impl Memory {
    pub(crate) fn new() -> Self {
        Self(rusqlite::Connection::open_in_memory().unwrap())
    }
}

impl Database for Memory {
    fn query(&self, sql: &str, parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        assert!(
            parameters.len() <= 100,
            "a statement takes a hundred parameters"
        );
        let failed = |e: rusqlite::Error| Error::internal(e.to_string());
        let bound = parameters.iter().map(|value| match value {
            SqlValue::Null => rusqlite::types::Value::Null,
            SqlValue::Integer(n) => (*n).into(),
            SqlValue::Real(n) => (*n).into(),
            SqlValue::Text(text) => text.clone().into(),
        });
        let mut statement = self.0.prepare(sql).map_err(failed)?;
        let columns = statement.column_count();
        let mut rows = statement
            .query(rusqlite::params_from_iter(bound))
            .map_err(failed)?;
        let mut all = Vec::new();
        while let Some(row) = rows.next().map_err(failed)? {
            let value = |i| match row.get_ref_unwrap(i) {
                ValueRef::Integer(n) => SqlValue::Integer(n),
                ValueRef::Real(n) => SqlValue::Real(n),
                ValueRef::Text(text) => {
                    SqlValue::Text(std::str::from_utf8(text).unwrap().to_owned())
                }
                ValueRef::Null | ValueRef::Blob(_) => SqlValue::Null,
            };
            all.push((0..columns).map(value).collect());
        }
        Ok(all)
    }

    fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.query("SAVEPOINT bench", &[])?;
        let done = work();
        if done.is_err() {
            self.query("ROLLBACK TO bench", &[])?;
        }
        self.query("RELEASE bench", &[])?;
        done
    }
}

/// The driver's side of a tool: a working document and a database.
pub(crate) struct Desk {
    state: RefCell<Rc<Value>>,
    database: Memory,
    phases: RefCell<Vec<String>>,
}

impl StepHandle for Desk {
    fn state(&self) -> Rc<Value> {
        self.state.borrow().clone()
    }

    fn stage(&self, _tool_call_id: &str, state: Value) -> Result<()> {
        let phase = state["phase"].as_str().unwrap_or_default().to_owned();
        if self.phases.borrow().last() != Some(&phase) {
            self.phases.borrow_mut().push(phase);
        }
        *self.state.borrow_mut() = Rc::new(state);
        Ok(())
    }

    fn emit(&self, _event_name: &str, _data: Value) -> Result<()> {
        Ok(())
    }

    fn database(&self) -> &dyn Database {
        &self.database
    }

    fn now(&self) -> Timestamp {
        0
    }
}

/// What became of a conversation.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The output that was handed in, checked against the agent's shape.
    pub(crate) output: Option<Value>,
    /// The final state.
    pub(crate) state: Value,
    /// The phases that were staged, in order.
    pub(crate) phases: Vec<String>,
    /// The text of each answer.
    pub(crate) texts: Vec<String>,
    /// The names of the called tools, answer by answer.
    pub(crate) calls: Vec<Vec<String>>,
    /// Everything that was said: texts, arguments, results and errors, and the output.
    pub(crate) said: String,
}

/// A child: its sub-agent, the call's arguments and its initial state; output or failure, and the
/// final state.
pub(crate) type Child<'a> =
    dyn FnMut(&SubAgent, &Value, Map<String, Value>) -> (Result<Value, String>, Option<Value>) + 'a;

/// One session on the bench.
pub(crate) struct Session {
    agent: Rc<Agent>,
    desk: Rc<Desk>,
    messages: Vec<MessageRecord>,
}

impl Session {
    /// Begins a session.
    pub(crate) fn start(
        agent: Rc<Agent>,
        message: &str,
        mut state: Map<String, Value>,
    ) -> Result<Self> {
        let database = Memory::new();
        enter(&agent, message, true, &mut state, &database)?;
        let mut whole = agent.state.initial().as_object().unwrap().clone();
        whole.extend(state);
        let whole = Value::Object(whole);
        agent
            .state
            .check(&whole)
            .map_err(|e| Error::invalid("state", e))?;
        let desk = Desk {
            state: RefCell::new(Rc::new(whole)),
            database,
            phases: RefCell::default(),
        };
        let messages = vec![MessageRecord::User {
            text: message.into(),
        }];
        Ok(Self {
            agent,
            desk: Rc::new(desk),
            messages,
        })
    }

    /// Adds another message.
    pub(crate) fn message(&mut self, message: &str) {
        enter(
            &self.agent,
            message,
            false,
            &mut Map::new(),
            &self.desk.database,
        )
        .unwrap();
        self.messages.push(MessageRecord::User {
            text: message.into(),
        });
    }

    /// The state as it stands.
    pub(crate) fn state(&self) -> Value {
        (*self.desk.state()).clone()
    }

    /// What a tool of the agent's says to a call.
    pub(crate) fn call(&self, tool: &str, arguments: Value) -> Result<Value, ToolError> {
        let tool = self
            .agent
            .tools
            .iter()
            .find(|candidate| candidate.spec().name == tool)
            .unwrap();
        block_on(tool.call(self.context("direct"), arguments))
    }

    fn context(&self, tool_call_id: &str) -> ToolContext {
        ToolContext {
            identity: Identity {
                session_id: SessionId::parse("bench").unwrap(),
                agent_type: self.agent.agent_type.clone(),
                origin: Rc::default(),
            },
            tool_call_id: tool_call_id.into(),
            attempt: 1,
            idempotency_key: tool_call_id.into(),
            stop: StopSignal::default(),
            handle: self.desk.clone(),
        }
    }

    /// Lets the model answer until it hands in an output or calls nothing more.
    pub(crate) fn run(&mut self, child: &mut Child<'_>) -> Outcome {
        let tools = self.specs();
        let mut outcome = Outcome {
            output: None,
            state: Value::Null,
            phases: Vec::new(),
            texts: Vec::new(),
            calls: Vec::new(),
            said: String::new(),
        };
        for _ in 0..self.agent.limits.max_steps {
            let (text, calls) = self.answer(&tools);
            outcome.said.push_str(&format!("{text}\n"));
            outcome.texts.push(text.clone());
            outcome
                .calls
                .push(calls.iter().map(|call| call.name.clone()).collect());
            self.messages.push(MessageRecord::Assistant {
                text,
                tool_calls: calls.clone(),
                cut: false,
                kept: None,
            });
            for call in &calls {
                let result = self.perform(call, child);
                outcome
                    .said
                    .push_str(&format!("{}\n{result:?}\n", call.arguments));
                if let (FINISH_TOOL, Ok(output)) = (call.name.as_str(), &result) {
                    outcome.output = Some(output.clone());
                }
                let outcome = match result {
                    Ok(result) => ToolOutcome {
                        success: true,
                        result,
                        error: None,
                    },
                    Err(error) => ToolOutcome {
                        success: false,
                        result: json!({ "error": error }),
                        error: Some(error),
                    },
                };
                let (tool_call_id, tool_name) = (call.id.clone(), call.name.clone());
                self.messages.push(MessageRecord::Tool {
                    tool_call_id,
                    tool_name,
                    outcome,
                });
            }
            if calls.is_empty() || outcome.output.is_some() {
                outcome.state = self.state();
                outcome.phases = self.desk.phases.borrow().clone();
                return outcome;
            }
        }
        panic!("the conversation does not end");
    }

    fn specs(&self) -> Rc<[ToolSpec]> {
        let mut specs: Vec<ToolSpec> = self.agent.tools.iter().map(|tool| tool.spec()).collect();
        specs.extend(self.agent.sub_agents.iter().map(|sub| ToolSpec {
            name: sub.tool_name(),
            description: sub.description.clone(),
            parameters: sub.input.schema().clone(),
        }));
        specs.extend(self.agent.output.iter().map(|output| ToolSpec {
            name: FINISH_TOOL.into(),
            description: "Hands in the output.".into(),
            parameters: output.schema().clone(),
        }));
        specs.into()
    }

    fn answer(&self, tools: &Rc<[ToolSpec]>) -> (String, Vec<ToolCall>) {
        let request = ModelRequest {
            instructions: self.agent.instructions.clone(),
            messages: self.messages.clone().into(),
            tools: tools.clone(),
            output: None,
        };
        let events = block_on(self.agent.model.stream(request).collect::<Vec<_>>());
        let (mut text, mut calls) = (
            String::new(),
            BTreeMap::<usize, (String, String, String)>::new(),
        );
        for event in events {
            match event.unwrap() {
                ModelEvent::TextDelta(delta) => text.push_str(&delta),
                ModelEvent::ToolCallStart { index, id, name } => {
                    drop(calls.insert(index, (id, name, String::new())))
                }
                ModelEvent::ToolCallDelta { index, delta } => {
                    calls.get_mut(&index).unwrap().2.push_str(&delta)
                }
                _ => {}
            }
        }
        let call = |(id, name, arguments): (String, String, String)| ToolCall {
            id,
            name,
            arguments: serde_json::from_str(&arguments).unwrap(),
        };
        (text, calls.into_values().map(call).collect())
    }

    fn perform(&self, call: &ToolCall, child: &mut Child<'_>) -> Result<Value, String> {
        if call.name == FINISH_TOOL {
            return self
                .agent
                .output
                .as_ref()
                .unwrap()
                .check(&call.arguments)
                .map(|()| call.arguments.clone());
        }
        if let Some(sub) = self
            .agent
            .sub_agents
            .iter()
            .find(|sub| sub.tool_name() == call.name)
        {
            sub.input.check(&call.arguments)?;
            let fill = sub.initial_state.as_ref().unwrap();
            let state = fill(&call.arguments, &self.desk.state(), &self.desk.database)
                .map_err(|e| e.to_string())?;
            let (result, child_custom_state) = child(sub, &call.arguments, state);
            let payload = SubAgentPayload {
                name: sub.name.clone(),
                sub_session_id: SessionId::parse("bench-child").unwrap(),
                agent_type: sub.agent_type.clone(),
                success: result.is_ok(),
                output: result.as_ref().ok().cloned(),
                child_custom_state,
            };
            let hook = self.agent.after_sub_agent.as_ref().unwrap();
            hook(&payload, &self.context(&call.id)).unwrap();
            let once = self.state();
            hook(&payload, &self.context(&call.id)).unwrap();
            assert_eq!(
                self.state(),
                once,
                "a hook that fires again changes nothing"
            );
            return result;
        }
        let tool = self
            .agent
            .tools
            .iter()
            .find(|tool| tool.spec().name == call.name)
            .expect("a tool on offer");
        block_on(tool.call(self.context(&call.id), call.arguments.clone()))
            .map_err(|e| e.to_string())
    }
}

fn enter(
    agent: &Agent,
    message: &str,
    is_start: bool,
    state: &mut Map<String, Value>,
    database: &Memory,
) -> Result<()> {
    let session_id = SessionId::parse("bench").unwrap();
    let hook = agent.before_entry.as_ref().unwrap();
    database.transaction(&mut || {
        hook(&mut Entry {
            session_id: &session_id,
            is_start,
            message,
            state: &mut *state,
            database,
        })
    })
}

/// A transport that leads nowhere: on the bench children are closures.
pub(crate) struct Nowhere;

fn nowhere<T: 'static>() -> Call<'static, T> {
    Box::pin(async { Err(TransportError::Unreachable("nowhere".into())) })
}

impl Transport for Nowhere {
    fn start(&self, _: StartRequest, _: String) -> Call<'_, StartResponse> {
        nowhere()
    }
    fn resume(&self, _: ResumeRequest, _: String) -> Call<'_, StartResponse> {
        nowhere()
    }
    fn interrupt(&self, _: StopRequest) -> Call<'_, StopResponse> {
        nowhere()
    }
    fn abort(&self, _: StopRequest) -> Call<'_, StopResponse> {
        nowhere()
    }
    fn status(&self, _: &SessionId) -> Call<'_, StatusResponse> {
        nowhere()
    }
    fn snapshot(&self, _: &SessionId) -> Call<'_, SnapshotResponse> {
        nowhere()
    }
    fn usage(&self, _: &SessionId) -> Call<'_, UsageResponse> {
        nowhere()
    }
    fn stream(&self, _: &SessionId, _: Position, _: Option<&StreamId>) -> Call<'_, FrameStream> {
        nowhere()
    }
}
