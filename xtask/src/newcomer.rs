//! The first agent of README.md, as a newcomer meets it: its files are what the page prints, nothing is added, and
//! they are compiled, run, and misused.
//!
//! `host_agents!` exists for WebAssembly alone, where no doctest can see it. So its misuses are the Worker of that page
//! with one thing changed: as printed it compiles, changed it must not, for the reason that is expected and no other.

use std::{path::Path, process::Command};

use crate::{
    failure::{Failure, Result},
    files,
    paths::Paths,
    progress,
    provision::Provision,
    run::{self, Job},
    toolchain::TARGET,
};

/// The files of the page, each behind a line that names it.
const FILES: [&str; 5] = [
    "Cargo.toml",
    "src/lib.rs",
    "src/main.rs",
    "src/hosted.rs",
    "wrangler.toml",
];
/// What stands before the answer of the program.
const PRINTS: &str = "`cargo run` prints:";
/// Where the page says that the library is.
const LIBRARY: &str = "../remote-agents";
/// Where the macro is used.
const HOSTED: &str = "src/hosted.rs";
const SECTION: &str = "### A first agent";
const REMEDY: &str = "mend README.md, or what it uses of the library";

/// Some words of the Worker, what stands there instead, and what the compiler then says.
type Misuse = (&'static str, &'static str, &'static str);

const MISUSES: [Misuse; 7] = [
    (
        "|_env, _runtime| crate::agents()",
        "|_env| crate::agents()",
        "closure is expected to take 2 arguments, but it takes 1 argument",
    ),
    (
        "|_env, _runtime| crate::agents()",
        "|_env, _runtime| \"the agents\"",
        "mismatched types",
    ),
    (
        "pub struct Noters(ObjectHost);",
        "pub struct Noters(String);",
        "mismatched types",
    ),
    (
        "host_agents!(Noters, ",
        "host_agents!(Writers, ",
        "cannot find type `Writers` in this scope",
    ),
    (
        "host_agents!(Noters, ",
        "host_agents!(",
        "no rules expected `|`",
    ),
    (
        "#[durable_object(alarm)]",
        "#[durable_object(fetch)]",
        "no method named `alarm` found",
    ),
    (
        "host_agents!(Noters, |_env, _runtime| crate::agents());",
        "",
        "DurableObject` is not satisfied",
    ),
];

/// Runs the program of the page, compiles its Worker, and sees that misuses do not compile; tells how many of these
/// there were.
pub(crate) fn run(provision: &Provision<'_>) -> Result<u64> {
    let paths = provision.paths;
    let page = files::read(&paths.root.join("README.md"))?;
    let folder = paths.target.join("newcomer/first-agent");
    files::make_dir(&folder.join("src"))?;
    for file in FILES {
        let text = printed(&page, &format!("`{file}`"))?;
        let library = paths.root.to_string_lossy();
        files::write(&folder.join(file), &text.replace(LIBRARY, &library))?;
    }
    // The versions of the workspace: those that are compiled already serve here too.
    let lock = files::read(&paths.root.join("Cargo.lock"))?;
    files::write(&folder.join("Cargo.lock"), &lock)?;

    progress::step("cargo run", || {
        answers(paths, &folder, printed(&page, PRINTS)?.trim_end())
    })?;
    let worker = "cargo check --target wasm32-unknown-unknown";
    progress::step(worker, || check(provision, &folder))?;
    let hosted = folder.join(HOSTED);
    let as_printed = files::read(&hosted)?;
    progress::step("misuses of host_agents! do not compile", || {
        let refused = MISUSES
            .into_iter()
            .try_for_each(|misuse| refused(provision, &folder, &as_printed, misuse));
        files::write(&hosted, &as_printed)?;
        refused
    })?;
    Ok(2 + MISUSES.len() as u64)
}

/// The first block of code behind `mark` in the section of the first agent.
fn printed<'a>(page: &'a str, mark: &str) -> Result<&'a str> {
    let missing = || Failure::new(format!("README.md prints nothing behind {mark}"), REMEDY);
    let section = page.split_once(SECTION).ok_or_else(missing)?.1;
    let behind = section.split_once(mark).ok_or_else(missing)?.1;
    let block = behind.split_once("\n```").ok_or_else(missing)?.1;
    let lines = block.split_once('\n').ok_or_else(missing)?.1;
    let end = lines.find("\n```").ok_or_else(missing)?;
    Ok(lines.get(..=end).unwrap_or_default())
}

/// Runs the program; it has to say what the page says.
fn answers(paths: &Paths, folder: &Path, wanted: &str) -> Result<()> {
    let mut command = run::cargo(folder);
    command
        .args(["run", "--quiet"])
        .env("CARGO_TARGET_DIR", &paths.target)
        .env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
    let log = paths.log("newcomer-run");
    Job::new("the first program", &log, REMEDY).run(&mut command)?;
    let said = files::read(&log)?;
    if said.trim_end() == wanted {
        return Ok(());
    }
    let what = format!("the first program does not say {wanted}, as README.md has it");
    Err(Failure::new(what, REMEDY).with_seen(said))
}

fn check(provision: &Provision<'_>, folder: &Path) -> Result<()> {
    let mut command = checking(provision, folder)?;
    let log = provision.paths.log("newcomer-check");
    Job::new("the first Worker", &log, REMEDY).run(&mut command)
}

/// `cargo check` of the Worker, with the profile of the workspace, whose lints have checked its dependencies before.
fn checking(provision: &Provision<'_>, folder: &Path) -> Result<Command> {
    let mut command = run::cargo(folder);
    command
        .args(["check", "--lib", "--release", "--target", TARGET])
        .envs([
            ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "2"),
            ("CARGO_PROFILE_RELEASE_LTO", "true"),
            ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
            ("CARGO_PROFILE_RELEASE_PANIC", "abort"),
            ("CARGO_PROFILE_RELEASE_STRIP", "debuginfo"),
        ]);
    provision.toolchain()?.apply(provision.paths, &mut command);
    Ok(command)
}

/// Sees that the Worker with one change does not compile, for the reason that is expected of it.
fn refused(
    provision: &Provision<'_>,
    folder: &Path,
    hosted: &str,
    (words, instead, reason): Misuse,
) -> Result<()> {
    if !hosted.contains(words) {
        let what = format!("README.md's Worker does not have {words}, which a misuse changes");
        return Err(Failure::new(what, REMEDY));
    }
    files::write(&folder.join(HOSTED), &hosted.replace(words, instead))?;
    let mut command = checking(provision, folder)?;
    let log = provision.paths.log("newcomer-misuse");
    let outcome = Job::new("a misuse", &log, "").run(&mut command);
    let said = files::read(&log)?;
    let is_there = said.contains(reason) && said.contains(&format!("--> {HOSTED}"));
    if outcome.is_err() && is_there {
        return Ok(());
    }
    let what = format!("with {instead:?} for {words:?} the compiler does not say: {reason}");
    let remedy = "see that `host_agents!` refuses it still, and by its own cause";
    Err(Failure::new(what, remedy).with_seen(said))
}

#[cfg(test)]
mod tests {
    use super::printed;

    #[test]
    fn what_the_page_prints_is_taken_as_it_stands() {
        let page = "# x\n`a`:\n```toml\nno\n```\n### A first agent\n`a`; so:\n\n```rust,ignore\nfn a() {\n\n}\n```\n`b`:\n```\nb\n```\n";
        let taken = |mark: &str| printed(page, mark).ok();
        assert_eq!(taken("`a`"), Some("fn a() {\n\n}\n"));
        assert_eq!(taken("`b`"), Some("b\n"));
        assert_eq!(taken("`c`"), None);
    }
}
