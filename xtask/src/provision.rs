//! What the commands need, provided at first use and once.

use std::cell::OnceCell;

use crate::{failure::Result, node::Node, paths::Paths, toolchain::Toolchain, tools, tools::Tools};

/// Everything that may have to be installed.
pub(crate) struct Provision<'a> {
    /// Where it goes.
    pub(crate) paths: &'a Paths,
    node: OnceCell<Node>,
    toolchain: OnceCell<Toolchain>,
    tools: OnceCell<Tools>,
}

impl<'a> Provision<'a> {
    /// Nothing is looked for yet.
    pub(crate) fn new(paths: &'a Paths) -> Self {
        Self {
            paths,
            node: OnceCell::new(),
            toolchain: OnceCell::new(),
            tools: OnceCell::new(),
        }
    }

    /// npm's packages.
    pub(crate) fn node(&self) -> Result<&Node> {
        provide(&self.node, || Node::provide(self.paths))
    }

    /// The compiler for WebAssembly.
    pub(crate) fn toolchain(&self) -> Result<&Toolchain> {
        provide(&self.toolchain, || Toolchain::provide(self.paths))
    }

    /// `worker-build` and `wasm-bindgen`.
    pub(crate) fn tools(&self) -> Result<&Tools> {
        provide(&self.tools, || tools::provide(self.paths))
    }
}

fn provide<T>(cell: &OnceCell<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(value) = cell.get() {
        return Ok(value);
    }
    let value = make()?;
    Ok(cell.get_or_init(|| value))
}
