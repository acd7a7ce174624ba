//! `worker-build` and `wasm-bindgen`, in exactly the versions that Cargo.lock asks for, and `cargo-deny`.

use std::{
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use crate::{
    failure::{Failure, Result},
    files,
    paths::Paths,
    progress,
    run::{self, Job},
};

const DENY: &str = "0.20.2";

/// The two programs of a Worker's build.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    /// Drives cargo, `wasm-bindgen`, `wasm-opt` and esbuild.
    pub(crate) worker_build: PathBuf,
    /// Makes the JavaScript side of a module.
    pub(crate) wasm_bindgen: PathBuf,
    /// Their versions, for fingerprints.
    pub(crate) versions: String,
}

/// One program that cargo installs into the cache.
#[derive(Debug)]
pub(crate) struct Tool {
    package: &'static str,
    program: &'static str,
    version: String,
    locked: bool,
}

impl Tool {
    /// The tools in the versions that go with Cargo.lock.
    pub(crate) fn wanted(paths: &Paths) -> Result<[Self; 2]> {
        let lock = files::read(&paths.root.join("Cargo.lock"))?;
        let version = |package: &str| {
            locked_version(&lock, package).ok_or_else(|| {
                Failure::new(
                    format!("Cargo.lock has no package {package}"),
                    "restore Cargo.lock from version control",
                )
            })
        };
        Ok([
            // worker-build is published together with `worker`, under the same version.
            Self {
                package: "worker-build",
                program: "worker-build",
                version: version("worker")?,
                locked: true,
            },
            // Its published lock file does not build.
            Self {
                package: "wasm-bindgen-cli",
                program: "wasm-bindgen",
                version: version("wasm-bindgen")?,
                locked: false,
            },
        ])
    }

    /// Where the program is or will be.
    pub(crate) fn place(&self, paths: &Paths) -> PathBuf {
        self.home(paths).join("bin").join(format!(
            "{}{}",
            self.program,
            std::env::consts::EXE_SUFFIX
        ))
    }

    /// The program with its version.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.program, self.version)
    }

    /// `cargo-deny`, which goes with nothing of ours.
    pub(crate) fn deny() -> Self {
        Self {
            package: "cargo-deny",
            program: "cargo-deny",
            version: DENY.to_owned(),
            locked: true,
        }
    }

    fn home(&self, paths: &Paths) -> PathBuf {
        paths
            .cache
            .join("tools")
            .join(format!("{}-{}", self.package, self.version))
    }

    fn install(&self, paths: &Paths, build: &Path) -> Result<()> {
        let home = self.home(paths);
        files::remove(&home)?;
        files::make_whole(&home, |root| {
            let log = paths.log(self.package);
            let what = format!("installing {}", self.name());
            let mut command = run::cargo(&paths.cache);
            command
                .args([
                    "install",
                    &format!("{}@{}", self.package, self.version),
                    "--root",
                ])
                .arg(root);
            // Without optimisation and debug information they build in a quarter of the time and are fast enough.
            command
                .arg("--debug")
                .env("CARGO_PROFILE_DEV_DEBUG", "0")
                .env("CARGO_TARGET_DIR", build);
            if self.locked {
                command.arg("--locked");
            }
            Job::new(
                &what,
                &log,
                "check that crates.io (or the registry set in cargo's config) can be reached",
            )
            .with_limit(Duration::from_secs(1800))
            .run(&mut command)
        })
    }
}

/// Finds or installs both.
pub(crate) fn provide(paths: &Paths) -> Result<Tools> {
    let [worker_build, wasm_bindgen] = Tool::wanted(paths)?;
    install(paths, &[&worker_build, &wasm_bindgen])?;
    Ok(Tools {
        versions: format!("{} {}", worker_build.name(), wasm_bindgen.name()),
        worker_build: worker_build.place(paths),
        wasm_bindgen: wasm_bindgen.place(paths),
    })
}

/// Finds or installs `cargo-deny`.
pub(crate) fn provide_deny(paths: &Paths) -> Result<PathBuf> {
    let deny = Tool::deny();
    install(paths, &[&deny])?;
    Ok(deny.place(paths))
}

fn install(paths: &Paths, tools: &[&Tool]) -> Result<()> {
    let build = paths
        .cache
        .join("tools")
        .join(format!(".build-{}", process::id()));
    for tool in tools {
        progress::noted(&tool.name(), || {
            if tool.place(paths).exists() {
                return Ok(((), "in the cache".to_owned()));
            }
            tool.install(paths, &build)
                .map(|()| ((), "installed".to_owned()))
        })?;
    }
    files::remove(&build)
}

/// The version of a package in the text of a Cargo.lock.
fn locked_version(lock: &str, package: &str) -> Option<String> {
    let name = format!("name = \"{package}\"");
    let mut lines = lock.lines().skip_while(|line| *line != name).skip(1);
    let version = lines
        .next()?
        .strip_prefix("version = \"")?
        .strip_suffix('"')?;
    Some(version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::locked_version;

    #[test]
    fn a_version_is_read_from_the_lock_file() {
        let lock = "[[package]]\nname = \"worker-macros\"\nversion = \"1.0.0\"\n\n\
                    [[package]]\nname = \"worker\"\nversion = \"0.8.7\"\nsource = \"x\"\n";
        assert_eq!(locked_version(lock, "worker").as_deref(), Some("0.8.7"));
        assert_eq!(locked_version(lock, "work"), None);
    }
}
