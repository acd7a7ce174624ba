//! Where things are.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::failure::{Failure, Result};

/// The folders that every step works in.
#[derive(Debug, Clone)]
pub(crate) struct Paths {
    /// The workspace.
    pub(crate) root: PathBuf,
    /// Cargo's target folder for native builds.
    pub(crate) target: PathBuf,
    /// Tools and toolchains, shared by all clones.
    pub(crate) cache: PathBuf,
}

impl Paths {
    /// Reads them from the environment.
    pub(crate) fn find() -> Result<Self> {
        let manifest =
            env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest)
            .parent()
            .map(Path::to_path_buf)
            .ok_or_else(|| {
                Failure::new(
                    "the workspace was not found",
                    "run `cargo xtask` inside the clone",
                )
            })?;
        let target = env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| root.join("target"), |dir| root.join(dir));
        Ok(Self {
            target,
            cache: cache()?,
            root,
        })
    }

    /// Cargo's target folder for WebAssembly: apart from the native one, so that neither build undoes the other.
    pub(crate) fn wasm_target(&self) -> PathBuf {
        self.target.join("wasm")
    }

    /// What the tools said.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.target.join("xtask").join(format!("{name}.log"))
    }

    /// The folder of npm's programs.
    pub(crate) fn node_bin(&self) -> PathBuf {
        self.root.join("node_modules").join(".bin")
    }

    /// Both Workers' data during `dev`.
    pub(crate) fn data(&self) -> PathBuf {
        self.root.join(".data")
    }
}

fn cache() -> Result<PathBuf> {
    let set = |name: &str| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set("XDG_CACHE_HOME")
        .or_else(|| set("LOCALAPPDATA"))
        .or_else(|| set("HOME").map(|home| home.join(".cache")))
        .map(|base| base.join("remote-agents"))
        .ok_or_else(|| {
            Failure::new(
                "there is no place for a cache: neither XDG_CACHE_HOME nor HOME is set",
                "set XDG_CACHE_HOME",
            )
        })
}
