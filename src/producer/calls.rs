//! The tools of a step: local ones at once, children within their bound, each result one commit.
//!
//! A stop cuts local tools off and lets children be told; what has no result then is paired by the
//! settling commit. A tool's future is dropped to cancel it.

mod side;

use std::cell::Cell;
use std::rc::Rc;

use futures::StreamExt as _;
use futures::future::{Either, LocalBoxFuture, join, join_all, select};
use futures::stream;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::{Halt, Producer};
use crate::agent::{Agent, FINISH_TOOL, StopSignal, SubAgent, SubAgentPayload, Tool, ToolPayload};
use crate::consumer::{CallSpec, run_call};
use crate::dispatch::{CallOutcome, child_id, message_for};
use crate::error::{Code, Error, Result};
use crate::mutants::{self, Mutant};
use crate::platform::Level;
use crate::protocol::ids::{SessionId, millis};
use crate::protocol::message::{ParentRef, StartRequest};
use crate::protocol::request::{DEPTH_LIMIT, too_deep};
use crate::session::{CallFailure, ChildSettled, repeated};
use crate::store::{Epoch, SubSessionRecord, SubStatus, ToolCall, ToolCallRecord, ToolOutcome};

/// What carries a call out.
enum Route {
    Finish,
    Local(Rc<dyn Tool>),
    Child(Rc<SubAgent>),
    Unknown,
    /// Nothing does: the call is refused.
    Refused(CallFailure),
}

impl Producer {
    /// Runs every call of the step that has no result yet.
    pub(super) async fn act(
        self: &Rc<Self>,
        epoch: Epoch,
        agent: &Rc<Agent>,
        stop: &StopSignal,
    ) -> Result<(), Halt> {
        let open: Vec<ToolCallRecord> = self
            .read(|session| {
                session.step.as_ref().map_or_else(Vec::new, |step| {
                    step.calls
                        .iter()
                        .filter(|call| {
                            call.outcome.is_none() || mutants::lacks(Mutant::FinishedStays)
                        })
                        .cloned()
                        .collect()
                })
            })?
            .unwrap_or_default();
        let repeats = self.repeats_of_step(agent)?;
        let mut locals = Vec::new();
        let mut children = Vec::new();
        for record in open {
            let agent = agent.clone();
            let mut route = route(&agent, &record.call);
            // A child that was begun is never forsaken for a bound.
            let was_begun = matches!(route, Route::Child(_)) && record.begun > 0;
            if repeats.is_told || repeats.same >= agent.limits.max_repeats.max(1) {
                route = if was_begun {
                    route
                } else {
                    Route::Refused(repeated(repeats.same))
                };
            }
            let side = Rc::new(CallSide {
                producer: self.clone(),
                epoch,
                stop: stop.clone(),
                tool_call_id: record.call.id.clone(),
                by_hook: Cell::new(matches!(route, Route::Child(_))),
            });
            match route {
                Route::Child(sub) => children.push(side.child(agent, sub, record)),
                other => {
                    let is_serial = matches!(&other, Route::Local(tool) if tool.is_serial());
                    locals.push((is_serial, side.local(agent, other, record)));
                }
            }
        }
        let at_once = agent.limits.max_children.max(1);
        // Children leave the queue in call order; none leaves it under a stop.
        let children = stream::iter(children)
            .buffer_unordered(at_once)
            .collect::<Vec<_>>();
        let (locals, children) = join(in_turns(locals, stop), children).await;
        children.into_iter().fold(locals, Result::and)
    }

    /// Under a stop: tells every child whose call is open, and settles that call. In the execution
    /// that made the calls they were cut already; this is for one that took over after a restart.
    pub(super) async fn stop_children(
        self: &Rc<Self>,
        epoch: Epoch,
        agent: &Rc<Agent>,
        stop: &StopSignal,
    ) -> Result<(), Halt> {
        let refs = self.open_children()?;
        let open: Vec<ToolCallRecord> = self
            .read(|session| {
                let calls = session.step.iter().flat_map(|step| &step.calls);
                calls
                    .filter(|call| call.outcome.is_none())
                    .filter(|call| refs.iter().any(|child| child.tool_call_id == call.call.id))
                    .cloned()
                    .collect()
            })?
            .unwrap_or_default();
        if open.is_empty() {
            return Ok(());
        }
        stop.set();
        let calls = open
            .into_iter()
            .filter_map(|record| match route(agent, &record.call) {
                Route::Child(sub) => {
                    let side = Rc::new(CallSide {
                        producer: self.clone(),
                        epoch,
                        stop: stop.clone(),
                        tool_call_id: record.call.id.clone(),
                        by_hook: Cell::new(true),
                    });
                    Some(side.call_child(agent.clone(), sub, record))
                }
                _ => None,
            });
        let at_once = agent.limits.max_children.max(1);
        let ended = stream::iter(calls)
            .buffer_unordered(at_once)
            .collect::<Vec<_>>()
            .await;
        ended.into_iter().collect()
    }
}

/// Runs local calls in call order: at once, but for those that run alone. None begins under a stop.
async fn in_turns(
    calls: Vec<(bool, LocalBoxFuture<'static, Result<(), Halt>>)>,
    stop: &StopSignal,
) -> Result<(), Halt> {
    let mut turns: Vec<Vec<_>> = Vec::new();
    let mut is_open = false;
    for (is_serial, call) in calls {
        match turns.last_mut().filter(|_| is_open && !is_serial) {
            Some(turn) => turn.push(call),
            None => turns.push(vec![call]),
        }
        is_open = !is_serial;
    }
    for turn in turns {
        if stop.is_set() {
            break;
        }
        join_all(turn)
            .await
            .into_iter()
            .collect::<Result<(), Halt>>()?;
    }
    Ok(())
}

fn route(agent: &Agent, call: &ToolCall) -> Route {
    let name = call.name.as_str();
    let route = named(agent, name);
    if matches!(route, Route::Unknown) || call.arguments.is_object() {
        return route;
    }
    let sentence = "The arguments are not a JSON object that can be read.";
    Route::Refused(CallFailure::new(Code::ValidationError, sentence))
}

fn named(agent: &Agent, name: &str) -> Route {
    if name == FINISH_TOOL && agent.output.is_some() {
        return Route::Finish;
    }
    if let Some(sub) = agent.sub_agents.iter().find(|sub| sub.tool_name() == name) {
        return Route::Child(sub.clone());
    }
    match agent.tools.iter().find(|tool| tool.spec().name == name) {
        Some(tool) => Route::Local(tool.clone()),
        None => Route::Unknown,
    }
}

/// One call's side of the session: what its tool, or its dispatch, may do.
struct CallSide {
    producer: Rc<Producer>,
    epoch: Epoch,
    stop: StopSignal,
    tool_call_id: String,
    /// Whether what is staged now is written by the hook after the call. Of a call that goes to a
    /// child nothing else writes state.
    by_hook: Cell<bool>,
}

impl CallSide {
    fn local(
        self: Rc<Self>,
        agent: Rc<Agent>,
        route: Route,
        record: ToolCallRecord,
    ) -> LocalBoxFuture<'static, Result<(), Halt>> {
        Box::pin(async move {
            self.started()?;
            if let Route::Unknown = route
                && let Some(child) = self.forsaken()?
            {
                let sentence = "The agent no longer has the sub-agent that this call went to.";
                let failure = CallFailure::new(Code::NotSupported, sentence);
                let settled = ChildSettled {
                    status: SubStatus::Stopping,
                    usage: None,
                    untold: true,
                };
                return self.finished(failure.to_outcome(), Some((child, settled)));
            }
            let outcome = match route {
                Route::Finish => Some(finish(&agent, &record.call)),
                Route::Local(tool) => {
                    let outcome = self.execute(&agent, &*tool, &record).await?;
                    if let Some(outcome) = &outcome {
                        self.after_tool(&agent, &record, outcome)?;
                    }
                    outcome
                }
                Route::Refused(failure) => Some(failure.to_outcome()),
                Route::Child(_) | Route::Unknown => {
                    let sentence = format!("There is no tool {}.", record.call.name);
                    Some(CallFailure::new(Code::ValidationError, sentence).to_outcome())
                }
            };
            match outcome {
                Some(outcome) => self.finished(outcome, None),
                None => Ok(()),
            }
        })
    }

    /// The child that this call had begun when its tool still was a sub-agent.
    fn forsaken(&self) -> Result<Option<SubSessionRecord>> {
        let children = self.producer.open_children()?;
        Ok(children
            .into_iter()
            .find(|child| child.tool_call_id == self.tool_call_id))
    }

    /// Runs a local tool; `None` when a stop cut it off.
    async fn execute(
        self: &Rc<Self>,
        agent: &Agent,
        tool: &dyn Tool,
        record: &ToolCallRecord,
    ) -> Result<Option<ToolOutcome>, Halt> {
        let running = tool.call(self.context(tool, record)?, record.call.arguments.clone());
        let limit = select(
            self.producer.runtime.sleep(agent.limits.tool_timeout),
            Box::pin(self.stop.wait()),
        );
        Ok(match select(running, limit).await {
            Either::Left((Ok(result), _)) => Some(ToolOutcome {
                success: true,
                result,
                error: None,
            }),
            Either::Left((Err(error), _)) => Some(
                CallFailure::new(error.code, error.message)
                    .retryable(error.retryable)
                    .to_outcome(),
            ),
            Either::Right((Either::Left(_), _)) => {
                let sentence = format!(
                    "The tool took longer than {} s.",
                    agent.limits.tool_timeout.as_secs()
                );
                Some(
                    CallFailure::new(Code::RunTimeout, sentence)
                        .retryable(true)
                        .to_outcome(),
                )
            }
            Either::Right((Either::Right(_), _)) => None,
        })
    }

    /// Runs the hook after a local tool. The call's result stands whatever the hook makes of it.
    fn after_tool(
        self: &Rc<Self>,
        agent: &Agent,
        record: &ToolCallRecord,
        outcome: &ToolOutcome,
    ) -> Result<()> {
        let Some(hook) = &agent.after_tool else {
            return Ok(());
        };
        let payload = ToolPayload {
            name: record.call.name.clone(),
            arguments: record.call.arguments.clone(),
            success: outcome.success,
            result: outcome.result.clone(),
        };
        let context = self.context_for(record.begun.saturating_add(1), None)?;
        self.by_hook.set(true);
        let made = hook(&payload, &context);
        self.by_hook.set(false);
        if let Err(error) = made {
            self.hook_failed("after_tool_failed", &error);
        }
        Ok(())
    }

    fn hook_failed(&self, event: &str, error: &Error) {
        let fields = [
            ("toolCallId", self.tool_call_id.as_str()),
            ("code", error.code.as_str()),
        ];
        self.producer.log(Level::Warn, event, &fields);
    }

    fn child(
        self: Rc<Self>,
        agent: Rc<Agent>,
        sub: Rc<SubAgent>,
        record: ToolCallRecord,
    ) -> LocalBoxFuture<'static, Result<(), Halt>> {
        Box::pin(async move {
            if self.stop.is_set() {
                return Ok(());
            }
            self.call_child(agent, sub, record).await
        })
    }

    /// Makes the call, or takes it up again; under a stop a call that was begun is stopped.
    fn call_child(
        self: Rc<Self>,
        agent: Rc<Agent>,
        sub: Rc<SubAgent>,
        record: ToolCallRecord,
    ) -> LocalBoxFuture<'static, Result<(), Halt>> {
        Box::pin(async move {
            self.started()?;
            if let Err(reason) = sub.input.check(&record.call.arguments) {
                let sentence = format!("The arguments do not fit: {reason}");
                return self.finished(
                    CallFailure::new(Code::ValidationError, sentence).to_outcome(),
                    None,
                );
            }
            let spec = match self.spec(&sub, &record) {
                Ok(spec) => spec,
                Err(error) => {
                    let outcome =
                        CallFailure::new(error.code, error.message.into_owned()).to_outcome();
                    return self.finished(outcome, None);
                }
            };
            let child = spec.request.session_id.clone();
            let traced = self.traced(&sub, &child)?;
            let outcome = run_call(self.clone(), traced, spec).await?;
            self.settle_child(&agent, &sub, child, outcome)
        })
    }

    /// The sub-agent as this call reaches it: as a span of the session's trace, if it has one. The
    /// span is derived, so that a repeated execution is part of the same.
    fn traced(&self, sub: &Rc<SubAgent>, child: &SessionId) -> Result<Rc<SubAgent>> {
        let trace = self
            .producer
            .read(|session| session.record.origin.trace.clone())?
            .flatten();
        let transport = trace.and_then(|trace| {
            let digest = Sha256::digest(child.as_str());
            let span = digest.first_chunk::<8>().copied().unwrap_or_default();
            sub.transport.traced(&trace.with_span(span))
        });
        Ok(match transport {
            Some(transport) => Rc::new(SubAgent {
                transport,
                ..(**sub).clone()
            }),
            None => sub.clone(),
        })
    }

    /// The call's child: derived, so that a repeated execution meets the one that it began.
    fn spec(&self, sub: &SubAgent, record: &ToolCallRecord) -> Result<CallSpec> {
        let producer = &self.producer;
        let (session, state) = producer
            .read(|session| (session.record.clone(), session.checkpoint.state.clone()))?
            .ok_or_else(Error::not_found)?;
        let child = child_id(
            &session.session_id,
            &session.stream_id,
            &self.tool_call_id,
            sub.location,
        )?;
        let state = match &sub.initial_state {
            Some(fill) => Some(fill(
                &record.call.arguments,
                &state,
                producer.store.database(),
            )?),
            None => None,
        };
        let timeout = millis(sub.policy.call_timeout);
        Ok(CallSpec {
            tool_call_id: self.tool_call_id.clone(),
            request: StartRequest {
                session_id: child,
                agent_type: Some(sub.agent_type.clone()),
                message: message_for(&record.call.arguments),
                state,
                metadata: session.origin.metadata.clone(),
                user_id: session.origin.user_id.clone(),
                tags: session.origin.tags.clone(),
                parent: Some(ParentRef {
                    session_id: session.session_id.clone(),
                    stream_id: session.stream_id.clone(),
                    tool_call_id: self.tool_call_id.clone(),
                }),
            },
            deadline: producer.now().saturating_add(timeout),
        })
    }

    /// Runs the hook, then commits outcome, ref and usage together.
    fn settle_child(
        self: &Rc<Self>,
        agent: &Agent,
        sub: &SubAgent,
        child: SessionId,
        outcome: CallOutcome,
    ) -> Result<(), Halt> {
        // A call that the run's own stop cut off did not come to anything that state could tell.
        let cut = self.stop.is_set() && !outcome.success;
        if let (Some(hook), false) = (&agent.after_sub_agent, cut) {
            let payload = SubAgentPayload {
                name: sub.name.clone(),
                sub_session_id: child.clone(),
                agent_type: sub.agent_type.clone(),
                success: outcome.success,
                output: outcome.output.clone(),
                child_custom_state: outcome.child_state.clone(),
            };
            // The child's result stands whatever the hook makes of it.
            if let Err(error) = hook(&payload, &self.context_for(1, None)?) {
                self.hook_failed("after_sub_agent_failed", &error);
            }
        }
        let tool = outcome.to_tool_outcome();
        let settled = ChildSettled {
            status: outcome.status,
            usage: outcome.usage,
            untold: outcome.status == SubStatus::Stopping,
        };
        let record = self
            .producer
            .store
            .sub_session(child.as_str())?
            .map(|record| (record, settled));
        self.finished(tool, record)
    }

    fn started(&self) -> Result<(), Halt> {
        self.producer.apply_in(self.epoch, |session, now| {
            session.tool_started(&self.tool_call_id, now)
        })
    }

    fn finished(
        &self,
        outcome: ToolOutcome,
        child: Option<(SubSessionRecord, ChildSettled)>,
    ) -> Result<(), Halt> {
        // What a tool or a child came back with is stored and told inside of other JSON: what is
        // too deep to be read again from there would be the end of the session.
        let outcome = if too_deep(&outcome.result, DEPTH_LIMIT) {
            let sentence = "The result is nested too deeply.";
            CallFailure::new(Code::OutputValidationFailed, sentence).to_outcome()
        } else {
            outcome
        };
        self.producer.apply_in(self.epoch, |session, now| {
            session.tool_finished(&self.tool_call_id, outcome, child, now)
        })
    }
}

/// Checks what the model hands in.
fn finish(agent: &Agent, call: &ToolCall) -> ToolOutcome {
    let checked = agent
        .output
        .as_ref()
        .map_or(Ok(()), |shape| shape.check(&call.arguments));
    match checked {
        Ok(()) => ToolOutcome {
            success: true,
            result: json!({"accepted": true}),
            error: None,
        },
        Err(reason) => {
            let sentence = format!("The output does not have its declared shape: {reason}");
            CallFailure::new(Code::OutputValidationFailed, sentence).to_outcome()
        }
    }
}
