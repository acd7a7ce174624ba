//! A compiler that knows `wasm32-unknown-unknown`.
//!
//! The active one if it does; else rustup is asked to add the target; else, on Debian where rustup's servers cannot be
//! reached, one is put together from Debian's packages (`debian.rs`). Once such a one exists it is used without
//! asking rustup again, until the active compiler knows the target by itself.

use std::{path::PathBuf, process::Command, time::Duration};

use crate::{
    debian,
    failure::{Failure, Result},
    paths::Paths,
    progress,
    run::{self, Job},
};

/// The target that Workers are compiled for.
pub(crate) const TARGET: &str = "wasm32-unknown-unknown";

const RUSTUP_LIMIT: Duration = Duration::from_secs(180);

/// Where the compiler for WebAssembly comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Toolchain {
    /// The one that cargo uses anyway.
    Active,
    /// Another one, whose programs are in this folder.
    Own(PathBuf),
}

impl Toolchain {
    /// Finds one without installing anything.
    pub(crate) fn find(paths: &Paths) -> Option<Self> {
        if active_knows_target(paths) {
            return Some(Self::Active);
        }
        debian::find(paths).map(Self::Own)
    }

    /// Finds one or installs one.
    pub(crate) fn provide(paths: &Paths) -> Result<Self> {
        let found = progress::noted("compiler for WebAssembly", || {
            let found = Self::find(paths);
            let note = match &found {
                Some(Self::Active) => "the active toolchain",
                Some(Self::Own(_)) => "Debian's, in the cache",
                None => "to be installed",
            };
            Ok((found, note.to_owned()))
        })?;
        if let Some(found) = found {
            return Ok(found);
        }
        if has_rustup(paths) && rustup_adds_target(paths)? {
            return Ok(Self::Active);
        }
        if !debian::is_here(paths) {
            return Err(Failure::new(
                format!("the compiler does not know {TARGET} and it could not be added"),
                format!(
                    "`rustup target add {TARGET}` with access to the internet, then run this again"
                ),
            ));
        }
        debian::provide(paths).map(Self::Own)
    }

    /// Makes `command` and all that it starts compile for WebAssembly with this toolchain, in its own target folder.
    pub(crate) fn apply(&self, paths: &Paths, command: &mut Command) {
        command.env("CARGO_TARGET_DIR", paths.wasm_target());
        // worker-build sets this for its own call of cargo; the same value everywhere keeps all builds alike.
        command.env("WASM_BINDGEN_USE_JS_SYS", "1");
        if let Self::Own(programs) = self {
            command
                .env("RUSTC", programs.join("rustc"))
                .env("RUSTDOC", programs.join("rustdoc"));
            run::search_first(command, &[programs]);
        }
    }

    /// `cargo clippy` for WebAssembly, up to its own arguments.
    pub(crate) fn clippy(&self, paths: &Paths) -> Command {
        let mut command = match self {
            Self::Active => run::cargo(&paths.root),
            Self::Own(programs) => {
                let mut command = Command::new(programs.join("cargo-clippy"));
                command.current_dir(&paths.root);
                run::forget_cargo(&mut command);
                command
            }
        };
        command.arg("clippy").args(["--target", TARGET]);
        self.apply(paths, &mut command);
        command
    }
}

/// Whether rustup is here to add a target.
pub(crate) fn has_rustup(paths: &Paths) -> bool {
    run::output("rustup", &["--version"], &paths.root).is_some()
}

fn active_knows_target(paths: &Paths) -> bool {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    run::output(
        rustc,
        &["--print", "target-libdir", "--target", TARGET],
        &paths.root,
    )
    .is_some_and(|folder| debian::has_std(folder.as_ref()))
}

/// Whether rustup could add the target. A refusal is not a failure: there may be another way.
fn rustup_adds_target(paths: &Paths) -> Result<bool> {
    progress::noted("  rustup target add", || {
        let log = paths.log("rustup");
        let mut command = Command::new("rustup");
        command
            .args(["target", "add", TARGET])
            .current_dir(&paths.root);
        let added = Job::new("rustup", &log, "")
            .with_limit(RUSTUP_LIMIT)
            .run(&mut command);
        Ok(match added {
            Ok(()) if active_knows_target(paths) => (true, String::new()),
            _ => (
                false,
                "its server cannot be reached or has no such target".to_owned(),
            ),
        })
    })
}
