//! Tools whose calls run at once, and one whose calls do not: `cargo run --example parallel_tools`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::{model_by_name, serial};
use remote_agents::native::{Host, block_on};
use remote_agents::{Agent, AgentType, Agents, Result, Tool, ToolContext, ToolError, tool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Lists the harbours of a coast.
#[derive(Deserialize, JsonSchema)]
struct List {}

/// Measures how high the water is.
#[derive(Deserialize, JsonSchema)]
struct Measure {
    /// The harbour.
    harbour: String,
}

/// Writes a harbour into the one logbook.
#[derive(Deserialize, JsonSchema)]
struct Log {
    /// The harbour.
    harbour: String,
}

/// What was at work at once, and in which order the logbook was written.
#[derive(Default)]
pub struct Seen {
    at_work: Cell<u32>,
    /// The most measurements that were at work at once.
    pub most_at_once: Cell<u32>,
    /// What was written, line by line.
    pub logbook: RefCell<Vec<String>>,
}

/// What the session keeps.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Heights {
    metres: std::collections::BTreeMap<String, usize>,
}

fn measure(seen: Rc<Seen>) -> Rc<dyn Tool> {
    tool("measure", move |context: ToolContext, measure: Measure| {
        let seen = seen.clone();
        async move {
            seen.at_work.set(seen.at_work.get() + 1);
            seen.most_at_once
                .set(seen.most_at_once.get().max(seen.at_work.get()));
            tokio::time::sleep(Duration::from_millis(20)).await;
            seen.at_work.set(seen.at_work.get() - 1);
            // Each call stages what it changed; changes of different places do not disturb each other.
            let metres = measure.harbour.len();
            context.update(|heights: &mut Heights| {
                heights.metres.insert(measure.harbour.clone(), metres);
            })?;
            Ok::<_, ToolError>(json!({"harbour": measure.harbour, "metres": metres}))
        }
    })
}

fn log(seen: Rc<Seen>) -> Rc<dyn Tool> {
    // The logbook is one book: whoever writes in it is alone.
    serial(tool("log", move |_: ToolContext, log: Log| {
        let seen = seen.clone();
        async move {
            seen.logbook
                .borrow_mut()
                .push(format!("open {}", log.harbour));
            tokio::time::sleep(Duration::from_millis(5)).await;
            seen.logbook
                .borrow_mut()
                .push(format!("shut {}", log.harbour));
            Ok::<_, ToolError>("written")
        }
    }))
}

const INSTRUCTIONS: &str = "\
1. Call `list`.
2. For each item of `harbours`, call `measure` with its harbour.
3. For each item of `harbours`, call `log` with its harbour.
";

fn agents(seen: &Rc<Seen>) -> Result<Agents> {
    let list = tool("list", async |_: ToolContext, _: List| {
        let harbours = ["Brest", "Kiel", "Rotterdam"].map(|name| json!({"harbour": name}));
        Ok::<_, ToolError>(json!({ "harbours": harbours }))
    });
    let gauge = Agent::new(
        AgentType::parse("gauge")?,
        INSTRUCTIONS,
        model_by_name("offline")?,
    )
    .with_state::<Heights>()
    .with_tool(list)
    .with_tool(measure(seen.clone()))
    .with_tool(log(seen.clone()));
    Agents::new([gauge])
}

/// What was seen while the agent worked.
pub async fn run() -> Result<Rc<Seen>> {
    let seen = Rc::new(Seen::default());
    let at_work = seen.clone();
    let host = Host::new(move |_| agents(&at_work));
    host.say("gauge", "s-1", "How high is the water?").await?;
    Ok(seen)
}

fn main() -> Result<()> {
    let seen = block_on(run())?;
    println!("{} measurements at once", seen.most_at_once.get());
    for line in seen.logbook.borrow().iter() {
        println!("{line}");
    }
    Ok(())
}
