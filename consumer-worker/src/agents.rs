//! The agents of this service. They know no platform: the model and the way to the other service
//! are given to them.

use std::rc::Rc;

use remote_agents::agent::model::LanguageModel;
use remote_agents::transport::Transport;
use remote_agents::{Agents, Result};

use crate::writer;

/// The writer. `planner` leads to the research service's raw mount.
///
/// # Errors
/// None in practice: types and tool names are distinct.
pub fn agents(model: Rc<dyn LanguageModel>, planner: Rc<dyn Transport>) -> Result<Agents> {
    Agents::new([writer::agent(model, planner)?])
}
