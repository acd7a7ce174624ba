//! npm's packages: Node itself, workerd, Miniflare, Wrangler, esbuild and wasm-opt, as package-lock.json names them.

use std::{path::PathBuf, process::Command, time::Duration};

use crate::{
    failure::{Failure, Result},
    files,
    paths::Paths,
    progress,
    run::{self, Job},
};

const STAMP: &str = "node_modules/.in-step-with";

/// Installed packages.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    paths: Paths,
}

impl Node {
    /// `npm ci` unless `node_modules` is already what the lock file asks for.
    pub(crate) fn provide(paths: &Paths) -> Result<Self> {
        progress::noted("npm packages", || {
            if is_in_step(paths) {
                return Ok(((), "in step with package-lock.json".to_owned()));
            }
            if run::output(npm(), &["--version"], &paths.root).is_none() {
                return Err(Failure::new(
                    "npm was not found",
                    "install Node.js (any version from 20 on; a newer one for the build comes from npm itself)",
                ));
            }
            let log = paths.log("npm");
            let mut command = Command::new(npm());
            command
                .args(["ci", "--no-audit", "--no-fund", "--no-update-notifier"])
                .current_dir(&paths.root);
            Job::new(
                "`npm ci`",
                &log,
                "check that the npm registry can be reached, then run this again",
            )
            .with_limit(Duration::from_secs(900))
            .run(&mut command)?;
            let node = Self {
                paths: paths.clone(),
            };
            let version = node.version().ok_or_else(|| {
                Failure::new(
                    "npm installed no Node that runs here",
                    "see that npm runs install scripts (`npm config get ignore-scripts` must say false)",
                )
            })?;
            files::write(&paths.root.join(STAMP), &wanted(paths))?;
            Ok(((), format!("installed, Node {version}")))
        })?;
        Ok(Self {
            paths: paths.clone(),
        })
    }

    /// Node with a script's arguments to follow.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(self.program("node"));
        command.current_dir(&self.paths.root);
        run::forget_cargo(&mut command);
        run::search_first(&mut command, &[&self.paths.node_bin()]);
        command
    }

    /// One of npm's programs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        program(&self.paths, name)
    }

    fn version(&self) -> Option<String> {
        version(&self.paths)
    }
}

/// `npm ci` in a folder with packages of its own, which one command alone needs. What is not there is said as a
/// failure that the command may do without.
pub(crate) fn provide_aside(
    paths: &Paths,
    folder: &str,
    log: &str,
    arguments: &[&str],
) -> Result<Result<&'static str>> {
    let folder = paths.root.join(folder);
    let wanted = files::fingerprint(
        &[
            &folder.join("package.json"),
            &folder.join("package-lock.json"),
        ],
        arguments,
    );
    let stamp = folder.join("node_modules/.in-step-with");
    if files::read(&stamp).is_ok_and(|stamp| stamp == wanted) {
        return Ok(Ok("in step with package-lock.json"));
    }
    let mut command = Command::new(npm());
    command
        .args(["ci", "--no-audit", "--no-fund", "--no-update-notifier"])
        .args(arguments)
        .current_dir(&folder);
    let installed = Job::new("`npm ci`", &paths.log(log), "")
        .with_limit(Duration::from_secs(300))
        .run(&mut command);
    if let Err(failure) = installed {
        return Ok(Err(failure));
    }
    files::write(&stamp, &wanted)?;
    Ok(Ok("installed"))
}

/// Whether `node_modules` is what package-lock.json asks for and was installed whole.
pub(crate) fn is_in_step(paths: &Paths) -> bool {
    files::read(&paths.root.join(STAMP)).is_ok_and(|stamp| stamp == wanted(paths))
        && program(paths, "node").exists()
}

/// The version of the system's npm and Node, for `doctor`.
pub(crate) fn system(paths: &Paths) -> Option<String> {
    let npm = run::output(npm(), &["--version"], &paths.root)?;
    let node = run::output("node", &["--version"], &paths.root)?;
    Some(format!("Node {node}, npm {npm}"))
}

/// The version of the Node in `node_modules`.
pub(crate) fn version(paths: &Paths) -> Option<String> {
    run::output(program(paths, "node"), &["--version"], &paths.root)
}

/// A fingerprint of what the lock file asks for.
pub(crate) fn wanted(paths: &Paths) -> String {
    files::fingerprint(
        &[
            &paths.root.join("package.json"),
            &paths.root.join("package-lock.json"),
        ],
        &[],
    )
}

fn program(paths: &Paths, name: &str) -> PathBuf {
    paths.node_bin().join(if cfg!(windows) {
        format!("{name}.cmd")
    } else {
        name.to_owned()
    })
}

/// The system's npm.
pub(crate) fn npm() -> &'static str {
    if cfg!(windows) { "npm.cmd" } else { "npm" }
}
