//! The loop of one execution: ask the machine what is next, do it, commit, until the run settles.
//!
//! Every wait can be cut by a stop. An execution that finds another epoch in the store ends without
//! writing anything.

use std::rc::Rc;
use std::time::Duration;

use serde_json::Value;

use super::answer::{Batch, BatchEnd, Draft};
use super::{Halt, MAX_ATTEMPTS, Producer};
use crate::agent::history::tokens;
use crate::agent::model::{ModelError, ModelErrorKind, ModelRequest, StopReason, ToolSpec};
use crate::agent::{Agent, FINISH_TOOL, StopSignal};
use crate::error::{Code, Error, Result};
use crate::platform::Level;
use crate::protocol::request::{DEPTH_LIMIT, too_deep};
use crate::protocol::usage::Tokens;
use crate::session::{ModelAnswer, Next, Settlement};
use crate::store::{Epoch, Failure, MessageRecord, Stop, ToolCall};

/// How often in a row a conversation that the model finds too long is sent again with half of its tokens.
const MOST_CUTS: u32 = 4;

/// What a model is told that ended its turn without handing in the declared output.
const OUTPUT_NUDGE: &str =
    "Hand in the result by calling the tool `finish` with arguments that fit its schema.";

impl Producer {
    /// Runs the session of this epoch until it settles, is superseded or fails.
    pub(super) async fn run(self: Rc<Self>, epoch: Epoch, stop: StopSignal) -> Result<(), Halt> {
        let agent = self
            .read(|session| session.record.agent_type.clone())?
            .and_then(|agent_type| self.agents.find(agent_type.as_str()));
        let Some(agent) = agent else {
            let failure = failure(
                Code::NotSupported,
                "This object does not host the session's agent type.",
            );
            return self.fail(epoch, failure).await;
        };
        if self.read(|session| session.record.attempts)?.unwrap_or(0) > MAX_ATTEMPTS {
            let failure = failure(
                Code::RunAttemptsExhausted,
                "The run was restarted too often without progress.",
            );
            return self.fail(epoch, failure).await;
        }
        self.within_time(epoch, &agent, &stop).await
    }

    /// Takes step after step until the run settles.
    pub(super) async fn steps(
        self: &Rc<Self>,
        epoch: Epoch,
        agent: &Rc<Agent>,
        stop: &StopSignal,
    ) -> Result<(), Halt> {
        self.reconcile(epoch, agent).await?;
        loop {
            let present = self.read(|session| (session.record.epoch, session.next()))?;
            match present.map(|(current, next)| (current == epoch, next)) {
                None | Some((_, Next::Rest)) => return Ok(()),
                Some((false, _)) => return Err(Halt::Superseded),
                Some((true, Next::Stop)) => {
                    self.stop_children(epoch, agent, stop).await?;
                    self.settle_stop(epoch).await?;
                }
                Some((true, Next::Ask)) => self.ask(epoch, agent, stop).await?,
                Some((true, Next::Act)) => self.act(epoch, agent, stop).await?,
                Some((true, Next::Promote)) => self.promote(epoch, agent).await?,
            }
        }
    }

    /// Asks the model and commits its answer; a failed attempt is discarded visibly and tried again.
    async fn ask(
        self: &Rc<Self>,
        epoch: Epoch,
        agent: &Rc<Agent>,
        stop: &StopSignal,
    ) -> Result<(), Halt> {
        let policy = agent.model.policy();
        let mut retries = self.retries()?;
        let (mut cuts, mut too_long) = (0, None);
        loop {
            if !self.wait_for_retry(&retries, &policy, stop).await {
                return Ok(());
            }
            let (error, spent, size) = match self.attempt(epoch, agent, stop, too_long).await? {
                Attempt::Answered | Attempt::Stopped => return Ok(()),
                Attempt::Failed(error, spent) => (error, spent, None),
                Attempt::TooLong(error, spent, size) => (error, spent, Some(size)),
            };
            self.log(
                Level::Warn,
                "model_failed",
                &[
                    ("kind", &format!("{:?}", error.kind)),
                    ("error", &error.message),
                ],
            );
            let spent = spent.map(|tokens| (agent.model.name().to_owned(), tokens));
            if let Some(size) = size.filter(|_| cuts < MOST_CUTS) {
                cuts += 1;
                too_long = Some(size);
                self.room.set(size / 2);
                self.discard(epoch, spent)?;
                continue;
            }
            let Some(next) = retries.after(&error, &policy, self.now()) else {
                self.discard(epoch, spent)?;
                let code = match error.kind {
                    ModelErrorKind::RateLimited => Code::ProviderRateLimited,
                    _ => Code::ProviderError,
                };
                return self.fail(epoch, failure(code, &error.message)).await;
            };
            self.apply_in(epoch, |session, now| {
                session.retry(spent, next.made, next.at, now)
            })?;
            retries = next;
        }
    }

    async fn attempt(
        self: &Rc<Self>,
        epoch: Epoch,
        agent: &Rc<Agent>,
        stop: &StopSignal,
        too_long: Option<u64>,
    ) -> Result<Attempt, Halt> {
        let messages = match self.history(epoch, agent, stop).await? {
            None => return Ok(Attempt::Stopped),
            Some(Ok(messages)) => messages,
            Some(Err(error)) => {
                self.fail(epoch, error.into()).await?;
                return Ok(Attempt::Stopped);
            }
        };
        let size = tokens(&*agent.history.counter, &messages);
        if too_long.is_some_and(|refused| size >= refused) {
            let said = "The conversation is too long for the model.";
            let error = ModelError::new(ModelErrorKind::ContextOverflow, said);
            return Ok(Attempt::Failed(error, None));
        }
        let request = ModelRequest {
            instructions: agent.instructions.clone(),
            messages,
            tools: tool_specs(agent).into(),
            output: agent.output.as_ref().map(|output| output.schema().clone()),
        };
        let mut events = agent.model.stream(request);
        let mut answer = Draft::default();
        loop {
            let batch = self
                .gather(&mut events, &mut answer, agent.flush, stop)
                .await?;
            let Batch {
                bodies, ids, end, ..
            } = batch;
            if !bodies.is_empty() {
                self.apply_in(epoch, |session, now| session.stream(bodies, ids, now))?;
                // A model that never waits for anything would keep the platform from moving bytes: a
                // timer lets the event loop turn, so that events leave as they are written.
                self.runtime.sleep(Duration::ZERO).await;
            }
            let (failed, ended) = match end {
                None => (None, false),
                Some(BatchEnd::Stopped) => {
                    drop(events);
                    return self.cut(epoch, agent, answer);
                }
                Some(BatchEnd::Failed(error)) => (Some(error), false),
                Some(BatchEnd::Ended) => (None, true),
            };
            if let Some(error) = failed {
                if error.kind == ModelErrorKind::ContextOverflow {
                    return Ok(Attempt::TooLong(error, answer.usage, size));
                }
                return Ok(Attempt::Failed(error, answer.usage));
            }
            if ended {
                return match answer.stop {
                    Some(StopReason::Refusal) => {
                        let error = ModelError::new(
                            ModelErrorKind::Rejected,
                            "The model refused to answer.",
                        );
                        Ok(Attempt::Failed(error, answer.usage))
                    }
                    Some(reason) if answer.is_empty() => {
                        Ok(Attempt::Failed(nothing(reason), answer.usage))
                    }
                    Some(_) => {
                        let mut answer = answer.finish(agent.model.name());
                        answer.queued = queued(agent, &answer.calls);
                        self.apply_in(epoch, |session, now| session.answer(answer, now))?;
                        Ok(Attempt::Answered)
                    }
                    None => {
                        let error = ModelError::new(
                            ModelErrorKind::Unavailable,
                            "The model's answer broke off.",
                        );
                        Ok(Attempt::Failed(error, answer.usage))
                    }
                };
            }
        }
    }

    /// Voids the last attempt of a step that is not tried again.
    fn discard(&self, epoch: Epoch, spent: Option<(String, Tokens)>) -> Result<(), Halt> {
        if spent.is_some() || self.read(|session| session.step.is_some())? == Some(true) {
            self.apply_in(epoch, |session, now| {
                session.discard("model_failed", spent, now)
            })?;
        }
        Ok(())
    }

    /// Keeps what an interrupted answer had said, marked as cut, without its calls.
    fn cut(&self, epoch: Epoch, agent: &Agent, answer: Draft) -> Result<Attempt, Halt> {
        if !answer.text.is_empty() {
            let answer = ModelAnswer {
                text: answer.text,
                calls: Vec::new(),
                queued: Vec::new(),
                cut: true,
                kept: None,
                model: agent.model.name().into(),
                tokens: answer.usage.unwrap_or_default(),
            };
            self.apply_in(epoch, |session, now| session.answer(answer, now))?;
        } else if let Some(tokens) = answer.usage {
            let spent = Some((agent.model.name().to_owned(), tokens));
            self.apply_in(epoch, |session, now| session.discard("stopped", spent, now))?;
        }
        Ok(Attempt::Stopped)
    }

    /// Promotes the step, and settles the run with it when it was the last one.
    async fn promote(self: &Rc<Self>, epoch: Epoch, agent: &Rc<Agent>) -> Result<(), Halt> {
        let verdict = self
            .read(|session| verdict(session, agent))?
            .ok_or_else(Error::not_found)?;
        let waiting = self.has_messages_waiting()?;
        let settlement = match verdict {
            // Messages stand behind the step: whatever it came to, the conversation goes on.
            _ if waiting => None,
            Verdict::Settle(settlement) => Some(settlement),
            Verdict::GoOn => self.over_limit(agent)?,
        };
        let entropy = self.runtime.entropy();
        let Some(settlement) = settlement else {
            let nudge = self.read(|session| {
                session
                    .step
                    .as_ref()
                    .is_some_and(|step| step.calls.is_empty())
            })?;
            let nudge = (nudge == Some(true) && !waiting).then(|| OUTPUT_NUDGE.to_owned());
            self.apply_in(epoch, |session, now| {
                session.promote(None, nudge, entropy, now)
            })?;
            self.log(Level::Info, "step", &[]);
            return Ok(());
        };
        let run = self.latest_run()?;
        let usage = self.usage_rollup(Some(1)).await?;
        if self.read(|session| session.record.stop.is_some())? == Some(true) {
            // A stop that came while usage was read is carried out instead.
            return Ok(());
        }
        let mut settlement = settlement;
        let is_hooked =
            matches!(settlement, Settlement::Completed { .. }) && agent.before_completion.is_some();
        if is_hooked {
            let end = (settlement, run.clone(), usage.clone());
            let Err(error) = self.complete(epoch, agent, end, entropy)? else {
                self.log_settled();
                return Ok(());
            };
            settlement = Settlement::Failed {
                failure: failure(error.code, &error.message),
            };
        }
        self.apply_in(epoch, |session, now| {
            session.promote(Some((settlement, run, usage)), None, entropy, now)
        })?;
        self.log_settled();
        Ok(())
    }

    fn has_messages_waiting(&self) -> Result<bool> {
        let waiting = self.read(|session| {
            let answer = session
                .open_step()
                .and_then(|step| step.record.answer.as_ref());
            answer.is_some_and(|answer| !answer.then.is_empty())
        })?;
        Ok(waiting == Some(true))
    }

    /// The run's failure if the step to be promoted is the last that the limits allow.
    fn over_limit(&self, agent: &Agent) -> Result<Option<Settlement>> {
        let run = self.latest_run()?;
        let committed = self
            .read(crate::session::Session::step_number)?
            .ok_or_else(Error::not_found)?;
        if committed.saturating_sub(run.start_step) >= agent.limits.max_steps {
            let sentence = format!(
                "The run reached its limit of {} steps.",
                agent.limits.max_steps
            );
            return Ok(Some(Settlement::Failed {
                failure: failure(Code::RunAttemptsExhausted, &sentence),
            }));
        }
        if let Some(most) = agent.limits.max_tokens
            && self.tokens_of_run(&run)? >= most
        {
            let sentence = format!("The run reached its limit of {most} tokens.");
            return Ok(Some(Settlement::Failed {
                failure: failure(Code::RunAttemptsExhausted, &sentence),
            }));
        }
        if let Some(most) = agent.limits.max_log_bytes
            && self.log_bytes()? >= most
        {
            let sentence = format!("The session's log reached its limit of {most} bytes.");
            return Ok(Some(Settlement::Failed {
                failure: failure(Code::RunAttemptsExhausted, &sentence),
            }));
        }
        if self.repeats_of_step(agent)?.is_told {
            let sentence =
                "The model made the same calls again after it was told that they repeat.";
            return Ok(Some(Settlement::Failed {
                failure: failure(Code::RunAttemptsExhausted, sentence),
            }));
        }
        if agent.output.is_some() {
            let misses = self.output_misses()?;
            if misses >= agent.limits.max_output_attempts {
                let sentence = format!("The model missed the declared output {misses} times.");
                return Ok(Some(Settlement::Failed {
                    failure: failure(Code::OutputValidationFailed, &sentence),
                }));
            }
        }
        Ok(None)
    }

    /// How often the present turn's answers missed the declared output, the step to be promoted
    /// included.
    fn output_misses(&self) -> Result<u32> {
        let missed = |name: &str, success: bool| name == FINISH_TOOL && !success;
        let mut misses = 0u32;
        for message in self.store.messages()?.iter().rev() {
            match message {
                MessageRecord::User { text } if text != OUTPUT_NUDGE => break,
                MessageRecord::Tool {
                    tool_name, outcome, ..
                } if missed(tool_name, outcome.success) => misses += 1,
                MessageRecord::Assistant { tool_calls, .. } if tool_calls.is_empty() => misses += 1,
                _ => {}
            }
        }
        let present = self.read(|session| {
            session.step.as_ref().map_or(0, |step| {
                if step.calls.is_empty() {
                    return 1;
                }
                let finished = step
                    .calls
                    .iter()
                    .filter_map(|call| Some((&call.call.name, call.outcome.as_ref()?)));
                u32::try_from(
                    finished
                        .filter(|(name, outcome)| missed(name, outcome.success))
                        .count(),
                )
                .unwrap_or(u32::MAX)
            })
        })?;
        Ok(misses.saturating_add(present.unwrap_or(0)))
    }

    /// The stop that was asked for and is not carried out yet.
    fn pending_stop(&self) -> Result<Option<Stop>> {
        Ok(self.read(|session| session.record.stop.clone())?.flatten())
    }

    /// Carries out a stop that was asked for; not when another one came meanwhile.
    async fn settle_stop(self: &Rc<Self>, epoch: Epoch) -> Result<(), Halt> {
        let Some(stop) = self.pending_stop()? else {
            return Ok(());
        };
        let run = self.latest_run()?;
        let has_answer = self.read(|session| {
            session
                .step
                .as_ref()
                .is_some_and(|step| step.record.answer.is_some())
        })?;
        let usage = self
            .usage_rollup(Some(u64::from(has_answer == Some(true))))
            .await?;
        if self.pending_stop()?.as_ref() != Some(&stop) {
            // An abort that came while usage was read outranks the interrupt.
            return Ok(());
        }
        let open = self.open_children()?;
        let entropy = self.runtime.entropy();
        self.apply_in(epoch, |session, now| {
            session.stopped(stop.into(), run, usage, open, entropy, now)
        })?;
        self.log_settled();
        Ok(())
    }

    /// Settles the run as failed. Calls that are open survive it, and their children go on: the
    /// next entry settles them. A stop that was accepted meanwhile is carried out instead.
    pub(super) async fn fail(self: &Rc<Self>, epoch: Epoch, failure: Failure) -> Result<(), Halt> {
        let run = self.latest_run()?;
        let usage = self.usage_rollup(Some(0)).await?;
        if self.pending_stop()?.is_some() {
            return self.settle_stop(epoch).await;
        }
        self.apply_in(epoch, |session, now| {
            session.settle(Settlement::Failed { failure }, run, usage, now)
        })?;
        self.log_settled();
        Ok(())
    }

    fn log_settled(&self) {
        let settled = self.read(|session| {
            let code = session
                .record
                .failure
                .as_ref()
                .map(|f| f.code.clone())
                .unwrap_or_default();
            (session.record.status, code)
        });
        if let Ok(Some((status, code))) = settled {
            self.log(
                Level::Info,
                "settled",
                &[("status", status.as_str()), ("code", &code)],
            );
        }
    }
}

enum Attempt {
    Answered,
    Stopped,
    /// What went wrong, and what the attempt is known to have cost.
    Failed(ModelError, Option<Tokens>),
    /// As a failure; the conversation that was sent, of so many tokens, does not fit the model.
    TooLong(ModelError, Option<Tokens>, u64),
}

enum Verdict {
    GoOn,
    Settle(Settlement),
}

/// Whether the step to be promoted ends the run, and with which output.
fn verdict(session: &crate::session::Session, agent: &Agent) -> Verdict {
    let Some(step) = session.step.as_ref() else {
        return Verdict::GoOn;
    };
    let complete = |output: Value| Verdict::Settle(Settlement::Completed { output });
    let finished = step.calls.iter().find(|call| {
        call.call.name == FINISH_TOOL
            && call.outcome.as_ref().is_some_and(|outcome| outcome.success)
    });
    if let (Some(call), Some(_)) = (finished, agent.output.as_ref()) {
        return complete(call.call.arguments.clone());
    }
    if !step.calls.is_empty() {
        return Verdict::GoOn;
    }
    let text = step
        .record
        .answer
        .as_ref()
        .map(|answer| answer.text.clone())
        .unwrap_or_default();
    match &agent.output {
        None => complete(Value::String(text)),
        // A provider's structured output comes as the text of the answer.
        Some(shape) => match serde_json::from_str::<Value>(&text) {
            Ok(value) if shape.check(&value).is_ok() && !too_deep(&value, DEPTH_LIMIT) => {
                complete(value)
            }
            _ => Verdict::GoOn,
        },
    }
}

/// An answer of nothing. One that reached its limit reaches it again.
fn nothing(reason: StopReason) -> ModelError {
    if reason == StopReason::MaxTokens {
        let said = "The model reached its limit of tokens before it answered; give it more, or have \
                    it reason less.";
        return ModelError::new(ModelErrorKind::Rejected, said);
    }
    ModelError::new(ModelErrorKind::Unavailable, "The model answered nothing.")
}

/// The calls of children that go beyond the bound of those at work at once.
fn queued(agent: &Agent, calls: &[ToolCall]) -> Vec<String> {
    calls
        .iter()
        .filter(|call| {
            let mut subs = agent.sub_agents.iter();
            subs.any(|sub| sub.tool_name() == call.name)
        })
        .skip(agent.limits.max_children.max(1))
        .map(|call| call.id.clone())
        .collect()
}

/// The tools as the model sees them: the agent's own, its sub-agents, and `finish`.
fn tool_specs(agent: &Agent) -> Vec<ToolSpec> {
    let mut specs: Vec<ToolSpec> = agent.tools.iter().map(|tool| tool.spec()).collect();
    specs.extend(agent.sub_agents.iter().map(|sub| ToolSpec {
        name: sub.tool_name(),
        description: sub.description.clone(),
        parameters: sub.input.schema().clone(),
    }));
    specs.extend(agent.output.as_ref().map(|output| ToolSpec {
        name: FINISH_TOOL.into(),
        description: "Hands in the final result and ends the work.".into(),
        parameters: output.schema().clone(),
    }));
    specs
}

pub(super) fn failure(code: Code, sentence: &str) -> Failure {
    Failure {
        code: code.as_str().into(),
        error: sentence.into(),
        detail: None,
    }
}
