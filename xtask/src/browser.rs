//! A browser for the tests of the page: one that is there, else Debian's chromium.

use std::{path::Path, process::Command, time::Duration};

use crate::{
    failure::{Failure, Result},
    paths::Paths,
    progress,
    run::{self, Job},
};

/// The variable that names another program.
const VARIABLE: &str = "CHROME";

const PROGRAMS: [&str; 4] = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
];

/// The browser's program; installed if this is a Debian that lets us.
pub(crate) fn provide(paths: &Paths) -> Result<String> {
    progress::noted("browser", || {
        if let Some((program, version)) = find(&paths.root) {
            return Ok((program, version));
        }
        for arguments in [
            &["update", "-qq"][..],
            &[
                "install",
                "-y",
                "-qq",
                "--no-install-recommends",
                "chromium",
            ],
        ] {
            let mut command = Command::new("apt-get");
            command
                .args(arguments)
                .env("DEBIAN_FRONTEND", "noninteractive")
                .current_dir(&paths.root);
            Job::new(
                "the installation of chromium",
                &paths.log("browser"),
                "install chromium or Chrome yourself (on Debian, as root: `apt-get install chromium`), or name one in CHROME",
            )
            .with_limit(Duration::from_secs(900))
            .run(&mut command)?;
        }
        let (program, version) = find(&paths.root).ok_or_else(|| {
            Failure::new(
                "chromium was installed, but does not run",
                "see what `chromium --version` says, or name another browser in CHROME",
            )
        })?;
        Ok((program, format!("installed, {version}")))
    })
}

/// A browser that runs here, with its version.
pub(crate) fn find(folder: &Path) -> Option<(String, String)> {
    let named = std::env::var(VARIABLE).ok();
    let programs = named
        .iter()
        .map(String::as_str)
        .chain(PROGRAMS.into_iter().filter(|_| named.is_none()));
    programs
        .filter_map(|program| {
            let version = run::output(program, &["--version"], folder)?;
            Some((program.to_owned(), version))
        })
        .next()
}
