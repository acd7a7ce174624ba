//! What of a conversation a model is sent, and how much of it that may be.
//!
//! The stored conversation is never touched: each model call is sent a selection that a
//! [`HistoryPolicy`] makes once the conversation is beyond the budget. Whatever a policy does, each
//! call in what is sent has exactly one result; a selection that breaks that is never sent.

use std::io;
use std::rc::Rc;

use futures::future::LocalBoxFuture;
use serde::Serialize;

use super::Identity;
use crate::error::Result;
use crate::protocol::usage::Tokens;
use crate::store::{Database, MessageRecord, ToolCall};

/// How much of its conversation an agent's model is sent.
#[derive(Clone)]
pub struct History {
    /// Estimated tokens of messages that are sent as they are; instructions and tools are not
    /// counted. Beyond it the policy is asked. Default 100 000, which leaves room in a context of
    /// 128 000. With 0 the policy is asked before every model call.
    pub budget: u64,
    /// Estimates what a message costs. Default [`BytesPerToken`] with 4.
    pub counter: Rc<dyn TokenCounter>,
    /// Selects what is sent of a conversation beyond the budget. Default [`CutOldest`].
    pub policy: Rc<dyn HistoryPolicy>,
}

impl Default for History {
    fn default() -> Self {
        Self {
            budget: 100_000,
            counter: Rc::new(BytesPerToken(4)),
            policy: Rc::new(CutOldest::default()),
        }
    }
}

/// Estimates tokens.
pub trait TokenCounter {
    /// About how many tokens the message costs when it is sent.
    fn count(&self, message: &MessageRecord) -> u64;
}

/// The tokens of messages together.
pub(crate) fn tokens(counter: &dyn TokenCounter, messages: &[MessageRecord]) -> u64 {
    messages
        .iter()
        .fold(0, |sum, one| sum.saturating_add(counter.count(one)))
}

/// So many bytes of a message's JSON are one token. Four is about right for English text; fewer
/// are nearer to the truth for code and for other scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BytesPerToken(pub u32);

impl TokenCounter for BytesPerToken {
    fn count(&self, message: &MessageRecord) -> u64 {
        json_bytes(message).div_ceil(u64::from(self.0.max(1)))
    }
}

/// Selects what a model is sent of a conversation beyond the budget.
pub trait HistoryPolicy {
    /// The messages to send. It may wait, such as for a model that summarises, for no longer than a
    /// tool of the agent may; a stop of the run drops it. It is asked again before each further
    /// call, so what was dear to make should be kept, in memory or in a table of the agent's own.
    ///
    /// # Errors
    /// Make the run fail with their code.
    fn select<'a>(&'a self, conversation: Conversation<'a>)
    -> LocalBoxFuture<'a, Result<Selected>>;
}

/// A conversation beyond the budget.
#[derive(Clone, Copy)]
pub struct Conversation<'a> {
    /// Whose it is.
    pub identity: &'a Identity,
    /// All of it. Each answer is followed by the results of its calls.
    pub messages: &'a [MessageRecord],
    /// The tokens that the selection should keep to.
    pub budget: u64,
    /// What the budget is counted with.
    pub counter: &'a dyn TokenCounter,
    /// The object's database, for tables of the agent's own.
    pub database: &'a dyn Database,
}

/// What is sent in a conversation's place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selected {
    /// The messages.
    pub messages: Vec<MessageRecord>,
    /// What the policy has spent on models for it, by their names; it is part of the session's
    /// usage.
    pub spent: Vec<(String, Tokens)>,
}

/// Leaves out the oldest exchanges, see [`cut_oldest`]. The default policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutOldest {
    /// The latest exchanges that are sent whatever they cost. Default 4.
    pub keep_last: usize,
}

impl Default for CutOldest {
    fn default() -> Self {
        Self { keep_last: 4 }
    }
}

impl HistoryPolicy for CutOldest {
    fn select<'a>(
        &'a self,
        conversation: Conversation<'a>,
    ) -> LocalBoxFuture<'a, Result<Selected>> {
        let messages = cut_oldest(
            conversation.messages,
            conversation.budget,
            conversation.counter,
            self.keep_last,
        );
        Box::pin(async move {
            Ok(Selected {
                messages,
                spent: Vec::new(),
            })
        })
    }
}

/// The conversation without as many of its oldest exchanges as it takes to keep to the budget. An
/// exchange is one answer of the model with the results of its calls.
///
/// The first message, the latest one and the last `keep_last` exchanges always stay, also where they
/// are beyond the budget. A message goes only after all that was answered to it.
#[must_use]
pub fn cut_oldest(
    messages: &[MessageRecord],
    budget: u64,
    counter: &dyn TokenCounter,
    keep_last: usize,
) -> Vec<MessageRecord> {
    let parts = parts(messages);
    let exchanges = parts.iter().filter(|part| !part.is_user).count();
    let mut droppable = exchanges.saturating_sub(keep_last);
    let mut total = tokens(counter, messages);
    let mut keep = vec![true; parts.len()];
    // The message whose answers go at present; it goes itself once the next one comes.
    let mut answered: Option<usize> = None;
    for (place, part) in parts.iter().enumerate() {
        if part.is_user {
            let gone = answered.replace(place);
            if let Some(mark) = gone.filter(|first| *first > 0)
                && total > budget
                && let (Some(kept), Some(gone)) = (keep.get_mut(mark), parts.get(mark))
            {
                *kept = false;
                total = total.saturating_sub(tokens(counter, gone.messages));
            }
        } else if droppable == 0 {
            break;
        } else if total > budget {
            droppable -= 1;
            if let Some(kept) = keep.get_mut(place) {
                *kept = false;
            }
            total = total.saturating_sub(tokens(counter, part.messages));
        }
    }
    let kept = parts.iter().zip(keep).filter(|(_, kept)| *kept);
    kept.flat_map(|(part, _)| part.messages.iter().cloned())
        .collect()
}

/// A message, or an answer with the results of its calls.
struct Part<'a> {
    is_user: bool,
    messages: &'a [MessageRecord],
}

fn parts(messages: &[MessageRecord]) -> Vec<Part<'_>> {
    messages
        .chunk_by(|_, next| matches!(next, MessageRecord::Tool { .. }))
        .map(|messages| Part {
            is_user: matches!(messages.first(), Some(MessageRecord::User { .. })),
            messages,
        })
        .collect()
}

/// What breaks the pairing in a history that is to be sent: each answer must be followed at once by
/// exactly one result for each of its calls, in their order, and there must be no other result.
///
/// # Errors
/// One sentence that names the first call at fault.
pub fn check_pairing(messages: &[MessageRecord]) -> Result<(), String> {
    let mut open: &[ToolCall] = &[];
    for message in messages {
        match message {
            MessageRecord::Tool { tool_call_id, .. } => {
                let Some((first, rest)) = open.split_first().filter(|(f, _)| f.id == *tool_call_id)
                else {
                    return Err(format!(
                        "the result of call {tool_call_id} stands not behind it"
                    ));
                };
                let _answered = first;
                open = rest;
            }
            other => {
                if let Some(call) = open.first() {
                    return Err(format!("call {} has no result", call.id));
                }
                if let MessageRecord::Assistant { tool_calls, .. } = other {
                    open = tool_calls;
                }
            }
        }
    }
    match open.first() {
        Some(call) => Err(format!("call {} has no result", call.id)),
        None => Ok(()),
    }
}

/// The size of a value as JSON.
pub(crate) fn json_bytes(value: &impl Serialize) -> u64 {
    let mut count = Count(0);
    // Plain data is always written, and counting never fails.
    let _written = serde_json::to_writer(&mut count, value);
    count.0
}

struct Count(u64);

impl io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.0 = self.0.saturating_add(length);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;
    use crate::store::ToolOutcome;

    /// Each message is one token.
    struct One;

    impl TokenCounter for One {
        fn count(&self, _: &MessageRecord) -> u64 {
            1
        }
    }

    fn user(text: &str) -> MessageRecord {
        MessageRecord::User { text: text.into() }
    }

    fn assistant(text: &str, calls: &[&str]) -> MessageRecord {
        let call = |id: &&str| ToolCall {
            id: (*id).into(),
            name: "t".into(),
            arguments: json!({}),
        };
        MessageRecord::Assistant {
            text: text.into(),
            tool_calls: calls.iter().map(call).collect(),
            cut: false,
            kept: None,
        }
    }

    fn result(id: &str) -> MessageRecord {
        MessageRecord::Tool {
            tool_call_id: id.into(),
            tool_name: "t".into(),
            outcome: ToolOutcome {
                success: true,
                result: json!(1),
                error: None,
            },
        }
    }

    /// Three turns: two exchanges, one, and two.
    fn talk() -> Vec<MessageRecord> {
        vec![
            user("q1"),
            assistant("", &["a", "b"]),
            result("a"),
            result("b"),
            assistant("r1", &[]),
            user("q2"),
            assistant("r2", &[]),
            user("q3"),
            assistant("", &["c"]),
            result("c"),
            assistant("r3", &[]),
        ]
    }

    fn shape(messages: &[MessageRecord]) -> String {
        let name = |message: &MessageRecord| match message {
            MessageRecord::User { text } => text.clone(),
            MessageRecord::Assistant {
                text, tool_calls, ..
            } => {
                let calls: Vec<&str> = tool_calls.iter().map(|call| call.id.as_str()).collect();
                format!("{text}[{}]", calls.join(""))
            }
            MessageRecord::Tool { tool_call_id, .. } => format!("={tool_call_id}"),
        };
        messages.iter().map(name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_oldest_exchanges_go_first_and_a_message_goes_after_its_answers() {
        let cut = |budget, keep| shape(&cut_oldest(&talk(), budget, &One, keep));
        let whole = "q1 [ab] =a =b r1[] q2 r2[] q3 [c] =c r3[]";
        assert_eq!(cut(11, 0), whole);
        assert_eq!(cut(10, 0), "q1 r1[] q2 r2[] q3 [c] =c r3[]");
        assert_eq!(cut(7, 0), "q1 q2 r2[] q3 [c] =c r3[]");
        assert_eq!(cut(6, 0), "q1 q2 q3 [c] =c r3[]");
        assert_eq!(cut(5, 0), "q1 q3 [c] =c r3[]");
        assert_eq!(cut(3, 0), "q1 q3 r3[]");
        // The first message and the latest one stay whatever they cost.
        assert_eq!(cut(0, 0), "q1 q3");
        assert_eq!(cut(0, 1), "q1 q3 r3[]");
        assert_eq!(cut(0, 3), "q1 q2 r2[] q3 [c] =c r3[]");
        assert_eq!(cut(0, 9), whole);
    }

    #[test]
    fn whatever_is_cut_each_call_keeps_its_one_result() {
        for budget in 0..12 {
            for keep in 0..6 {
                let sent = cut_oldest(&talk(), budget, &One, keep);
                check_pairing(&sent).unwrap();
                assert!(sent.contains(&user("q1")) && sent.contains(&user("q3")));
            }
        }
    }

    #[test]
    fn a_history_that_breaks_the_pairing_is_seen() {
        check_pairing(&talk()).unwrap();
        check_pairing(&[]).unwrap();
        let broken = [
            vec![user("q"), assistant("", &["a"])],
            vec![assistant("", &["a"]), user("q"), result("a")],
            vec![assistant("", &["a", "b"]), result("b"), result("a")],
            vec![assistant("", &["a"]), result("a"), result("a")],
            vec![assistant("", &["a"]), result("b")],
            vec![result("a")],
            vec![assistant("", &["a", "b"]), result("a"), assistant("", &[])],
        ];
        for messages in broken {
            assert!(check_pairing(&messages).is_err(), "{}", shape(&messages));
        }
    }

    #[test]
    fn bytes_are_counted_as_they_are_written() {
        let message = user(&"x".repeat(400));
        let bytes = serde_json::to_string(&message).unwrap().len();
        let four = BytesPerToken(4).count(&message);
        assert_eq!(four, u64::try_from(bytes.div_ceil(4)).unwrap());
        assert_eq!(
            BytesPerToken(0).count(&message),
            BytesPerToken(1).count(&message)
        );
    }
}
