//! `cargo xtask doctor`: what was found, what is missing, how to mend it. Installs and changes nothing.

use std::process::ExitCode;

use crate::{
    browser, debian, node,
    paths::Paths,
    run,
    toolchain::{self, TARGET, Toolchain},
    tools::Tool,
};

/// What was seen of one thing.
enum Finding {
    /// It is there.
    Found(String),
    /// `cargo xtask dev` or `test` will install it.
    WillCome(String),
    /// Only `cargo xtask test` needs it.
    Wanted(String),
    /// Nothing here can install it.
    Missing(String),
}

/// Prints the findings; fails if something is missing that `dev` could not install by itself.
pub(crate) fn run(paths: &Paths) -> ExitCode {
    println!("  cache: {}", paths.cache.display());
    let mut is_well = true;
    for (name, finding) in findings(paths) {
        let (sign, told) = match &finding {
            Finding::Found(told) => ("ok", told),
            Finding::WillCome(told) => ("to come", told),
            Finding::Wanted(told) => ("for test", told),
            Finding::Missing(told) => ("MISSING", told),
        };
        is_well &= !matches!(finding, Finding::Missing(_));
        println!("  {sign:<9} {name:<34} {told}");
    }
    if is_well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn findings(paths: &Paths) -> Vec<(String, Finding)> {
    let mut findings = vec![
        ("Rust".to_owned(), rust(paths)),
        ("C compiler and linker".to_owned(), c_compiler(paths)),
        ("rustfmt".to_owned(), component(paths, "fmt", "rustfmt")),
        ("clippy".to_owned(), component(paths, "clippy", "clippy")),
        (format!("compiler for {TARGET}"), wasm(paths)),
        ("Node and npm of this machine".to_owned(), npm(paths)),
        ("npm packages".to_owned(), packages(paths)),
        ("browser".to_owned(), browser(paths)),
    ];
    match Tool::wanted(paths) {
        Ok(tools) => findings.extend(tools.iter().map(|tool| (tool.name(), program(paths, tool)))),
        Err(failure) => findings.push((
            "Cargo.lock".to_owned(),
            Finding::Missing(failure.to_string()),
        )),
    }
    let deny = Tool::deny();
    findings.push((deny.name(), program(paths, &deny)));
    findings
}

fn rust(paths: &Paths) -> Finding {
    let rustc = run::output("rustc", &["--version"], &paths.root);
    rustc.map_or_else(
        || Finding::Missing("no rustc: install Rust by rustup".to_owned()),
        Finding::Found,
    )
}

fn c_compiler(paths: &Paths) -> Finding {
    let found = ["cc", "gcc", "clang"]
        .iter()
        .find_map(|name| run::output(name, &["--version"], &paths.root));
    match found.as_deref().and_then(|text| text.lines().next()) {
        Some(line) => Finding::Found(line.to_owned()),
        None if cfg!(windows) => Finding::Found("that of the Rust toolchain".to_owned()),
        None => Finding::Missing(
            "install gcc or clang; SQLite is compiled for the native tests".to_owned(),
        ),
    }
}

fn component(paths: &Paths, command: &str, component: &str) -> Finding {
    let seen = run::output("cargo", &[command, "--version"], &paths.root);
    seen.map_or_else(
        || Finding::Wanted(format!("`rustup component add {component}`")),
        Finding::Found,
    )
}

fn wasm(paths: &Paths) -> Finding {
    match Toolchain::find(paths) {
        Some(Toolchain::Active) => Finding::Found("the active toolchain knows it".to_owned()),
        Some(Toolchain::Own(programs)) => {
            Finding::Found(format!("Debian's, in {}", programs.display()))
        }
        None if debian::is_here(paths) => Finding::WillCome(
            "by rustup, or from Debian's packages where rustup cannot reach its server".to_owned(),
        ),
        None if toolchain::has_rustup(paths) => {
            Finding::WillCome(format!("`rustup target add {TARGET}`"))
        }
        None => Finding::Missing(format!(
            "install Rust by rustup, then `rustup target add {TARGET}`"
        )),
    }
}

fn npm(paths: &Paths) -> Finding {
    node::system(paths).map_or_else(
        || Finding::Missing("install Node.js, 20 or newer, with npm".to_owned()),
        |told| Finding::Found(format!("{told} (only installs the packages)")),
    )
}

fn packages(paths: &Paths) -> Finding {
    match node::version(paths) {
        Some(version) if node::is_in_step(paths) => {
            Finding::Found(format!("in step, Node {version}"))
        }
        Some(_) => {
            Finding::WillCome("node_modules is out of step with package-lock.json".to_owned())
        }
        None => Finding::WillCome("`npm ci`".to_owned()),
    }
}

fn browser(paths: &Paths) -> Finding {
    match browser::find(&paths.root) {
        Some((program, version)) => Finding::Found(format!("{program}, {version}")),
        None => Finding::Wanted("chromium, for the page's tests; they install Debian's".to_owned()),
    }
}

fn program(paths: &Paths, tool: &Tool) -> Finding {
    let place = tool.place(paths);
    if place.exists() {
        Finding::Found(place.display().to_string())
    } else {
        Finding::WillCome("`cargo install` into the cache".to_owned())
    }
}
