//! Readings of children, for what is told of a whole tree: a few at once, in the order of the
//! calls, each with a deadline of its own.

use std::time::Duration;

use futures::future::{Either, select};
use futures::stream::{self, Stream, StreamExt as _};

use super::Producer;
use crate::store::SubSessionRecord;
use crate::transport::{Call, Transport, TransportError};

/// Readings of children at once.
const READS_AT_ONCE: usize = 4;

/// Why a child was not read.
pub(super) enum Unread {
    /// The agent has no way to it any more.
    NoWay,
    /// It took too long.
    Late,
    /// Its answer was none.
    Failed(TransportError),
}

/// One reading of each, a few at once. A later one begins when an earlier one was taken.
pub(super) fn each_child<'a, C: 'a, F>(
    children: Vec<C>,
    read: impl FnMut(C) -> F + 'a,
) -> impl Stream<Item = F::Output> + 'a
where
    F: Future + 'a,
{
    stream::iter(children).map(read).buffered(READS_AT_ONCE)
}

impl Producer {
    /// One reading of a child over the transport that its calls go over.
    pub(super) async fn read_child<T>(
        &self,
        child: &SubSessionRecord,
        within: Duration,
        read: impl for<'a> FnOnce(&'a dyn Transport) -> Call<'a, T>,
    ) -> Result<T, Unread> {
        let sub = self
            .read(|session| session.record.agent_type.clone())
            .ok()
            .flatten()
            .and_then(|agent_type| self.agents.find(agent_type.as_str()))
            .and_then(|agent| {
                let mut subs = agent.sub_agents.iter();
                subs.find(|sub| {
                    sub.agent_type == child.agent_type && sub.location == child.location
                })
                .cloned()
            })
            .ok_or(Unread::NoWay)?;
        match select(read(&*sub.transport), self.runtime.sleep(within)).await {
            Either::Left((answer, _)) => answer.map_err(Unread::Failed),
            Either::Right(_) => Err(Unread::Late),
        }
    }
}
