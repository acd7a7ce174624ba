//! What is sent to the model of the conversation, and whether its calls get anywhere.
//!
//! No history leaves that breaks the pairing of calls and results, whoever broke it.

use std::rc::Rc;

use futures::future::{Either, select};

use super::{Halt, Producer};
use crate::agent::history::tokens;
use crate::agent::{Agent, Conversation, Identity, Selected, StopSignal, check_pairing};
use crate::error::{Code, Error, Result};
use crate::session::{Repeats, repeats};
use crate::store::{Epoch, MessageRecord, ToolCall};

impl Producer {
    /// The messages of the next model call; `None` when a stop came first. The outer error is the
    /// execution's, the inner one makes the run fail.
    pub(super) async fn history(
        self: &Rc<Self>,
        epoch: Epoch,
        agent: &Agent,
        stop: &StopSignal,
    ) -> Result<Option<Result<Rc<[MessageRecord]>>>, Halt> {
        let messages = self.store.messages()?;
        if let Err(reason) = check_pairing(&messages) {
            let sentence = "The stored conversation has a call without its one result.";
            let error = Error::new(Code::InvalidStoredState, sentence).with_detail(reason);
            return Ok(Some(Err(error)));
        }
        let history = &agent.history;
        let counter = &*history.counter;
        let budget = history.budget.min(self.room.get());
        if tokens(counter, &messages) <= budget {
            return Ok(Some(Ok(messages.into())));
        }
        let identity = self.identity()?;
        let selecting = history.policy.select(Conversation {
            identity: &identity,
            messages: &messages,
            budget,
            counter,
            database: self.store.database(),
        });
        let limit = select(
            self.runtime.sleep(agent.limits.tool_timeout),
            Box::pin(stop.wait()),
        );
        let selected = match select(selecting, limit).await {
            Either::Left((selected, _)) => selected,
            Either::Right((Either::Right(_), _)) => return Ok(None),
            Either::Right((Either::Left(_), _)) => {
                let sentence = "The conversation could not be shortened in time.";
                Err(Error::new(Code::RunTimeout, sentence))
            }
        };
        let Selected { messages, spent } = match selected {
            Ok(selected) => selected,
            Err(error) => return Ok(Some(Err(error))),
        };
        for (model, tokens) in spent {
            self.apply_in(epoch, |session, now| Ok(session.spent(model, tokens, now)))?;
        }
        Ok(Some(match check_pairing(&messages) {
            Ok(()) => Ok(messages.into()),
            Err(reason) => {
                let sentence =
                    "What is to be sent of the conversation has a call without its one result.";
                Err(Error::new(Code::Internal, sentence).with_detail(reason))
            }
        }))
    }

    /// Whether the calls of the step repeat those of the answers before.
    pub(super) fn repeats_of_step(&self, agent: &Agent) -> Result<Repeats> {
        let step = self.read(|session| {
            let calls = session.step.iter().flat_map(|step| &step.calls);
            let calls: Vec<ToolCall> = calls.map(|call| call.call.clone()).collect();
            (session.record.step_count, calls)
        })?;
        let (committed, calls) = step.unwrap_or_default();
        if calls.is_empty() || committed < u64::from(agent.limits.max_repeats.max(1)) {
            return Ok(Repeats::default());
        }
        Ok(repeats(&self.store.messages()?, &calls))
    }

    /// Who the session is.
    pub(super) fn identity(&self) -> Result<Identity> {
        self.read(|session| Identity {
            session_id: session.record.session_id.clone(),
            agent_type: session.record.agent_type.clone(),
            origin: session.record.origin.clone(),
        })?
        .ok_or_else(Error::not_found)
    }
}
