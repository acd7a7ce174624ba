//! The agents of this service. They know no platform: the model and the way to the researchers
//! are given to them.

use std::rc::Rc;

use remote_agents::agent::model::LanguageModel;
use remote_agents::transport::Transport;
use remote_agents::{Agents, Result};

use crate::{planner, researcher};

/// Planner and thread researcher. `researchers` leads to the objects of this service, unfiltered.
///
/// # Errors
/// None in practice: types and tool names are distinct.
pub fn agents(model: Rc<dyn LanguageModel>, researchers: Rc<dyn Transport>) -> Result<Agents> {
    Agents::new([
        planner::agent(model.clone(), researchers)?,
        researcher::agent(model)?,
    ])
}
