//! `cargo deny`: what the dependencies may be, by `deny.toml`.
//!
//! Bans, licenses and sources are checked without network, once the packages are there. The database
//! of advisories is a repository on the internet: where it cannot be reached, that is said.

use std::{process::Command, time::Duration};

use crate::{
    failure::Result,
    files,
    paths::Paths,
    progress,
    provision::Provision,
    run::{self, Job},
    tools,
};

/// Each has a lock file of its own.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "fuzz/Cargo.toml"];
/// How long the database may take.
const ADVISORIES_LIMIT: Duration = Duration::from_secs(90);

/// Checks both lock files.
pub(crate) fn run(provision: &Provision<'_>) -> Result<()> {
    let paths = provision.paths;
    let tool = tools::provide_deny(paths)?;
    let deny = |manifest: &str, arguments: &[&str]| {
        let mut command = Command::new(&tool);
        run::forget_cargo(&mut command);
        command
            .args([
                "--color",
                "never",
                "--config",
                "deny.toml",
                "--manifest-path",
                manifest,
            ])
            .args(arguments)
            .current_dir(&paths.root);
        command
    };
    for manifest in MANIFESTS {
        fetch(paths, manifest)?;
        let name = format!("cargo deny check bans licenses sources ({manifest})");
        progress::step(&name, || {
            let log = paths.log("deny");
            let remedy = "mend the dependency, or say in deny.toml why it may stay";
            let mut command = deny(
                manifest,
                &["--offline", "check", "bans", "licenses", "sources"],
            );
            Job::new(&name, &log, remedy)
                .with_quote_from(&["error["])
                .run(&mut command)
        })?;
    }
    progress::noted("cargo deny check advisories", || {
        let log = paths.log("deny-advisories");
        let remedy =
            "take a version that mends it, or say in deny.toml why it does not concern this";
        let mut command = deny("Cargo.toml", &["check", "advisories"]);
        let outcome = Job::new("cargo deny check advisories", &log, remedy)
            .with_limit(ADVISORIES_LIMIT)
            .with_quote_from(&["error["])
            .run(&mut command);
        match outcome {
            Ok(()) => Ok(((), String::new())),
            Err(_) if !was_checked(&files::read(&log).unwrap_or_default()) => {
                Ok(((), "not checked: the database cannot be reached".to_owned()))
            }
            Err(failure) => Err(failure),
        }
    })
}

/// Gets the packages of a lock file, those of other platforms included.
fn fetch(paths: &Paths, manifest: &str) -> Result<()> {
    let mut command = run::cargo(&paths.root);
    command.args(["fetch", "--manifest-path", manifest]);
    let remedy = "check that crates.io (or the registry set in cargo's config) can be reached";
    Job::new("cargo fetch", &paths.log("fetch"), remedy).run(&mut command)
}

/// Whether the check came to a verdict: it says one about advisories at its end.
fn was_checked(log: &str) -> bool {
    log.lines().any(|line| line.starts_with("advisories "))
}

#[cfg(test)]
mod tests {
    use super::was_checked;

    #[test]
    fn a_database_that_was_not_reached_gives_no_verdict() {
        assert!(!was_checked(
            "2026-01-01 [ERROR] failed to fetch advisory database https://x\n"
        ));
        assert!(was_checked(
            "error[vulnerability]: a title\n\nadvisories FAILED\n"
        ));
        assert!(was_checked("advisories ok\n"));
    }
}
