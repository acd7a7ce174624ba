//! A compiler for WebAssembly from Debian's packages, for machines that reach Debian's archive but not rustup's.
//!
//! Debian's security suite carries a recent compiler with its source. Its packages are unpacked into the cache, not
//! installed, and found through lists of packages of their own, so that nothing on the machine changes and no special
//! rights are needed. The standard library for WebAssembly is built from that source once.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::{
    failure::{Failure, Result},
    files,
    paths::Paths,
    progress,
    run::{self, Job},
    toolchain::TARGET,
};

/// To be raised when this file makes something else of the same packages.
const RECIPE: &str = "wasm-toolchain-1";
const HOST: &str = "x86_64-unknown-linux-gnu";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const SEEDS: [&str; 3] = ["rustc-web", "rust-web-src", "rust-web-clippy"];
/// A machine that compiled this program has these already in one form or another.
const TAKEN_FOR_GRANTED: [&str; 4] = ["gcc", "binutils", "libc6-dev", "libc6"];
const PROGRAMS: [&str; 4] = ["rustc", "rustdoc", "clippy-driver", "cargo-clippy"];
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(1200);
const APT_REMEDY: &str = "see that `apt-get update` works on this machine (network, sources.list), or use a machine \
    where `rustup target add wasm32-unknown-unknown` works; then run this again";

/// Whether this is a machine for which the packages are made.
pub(crate) fn is_here(paths: &Paths) -> bool {
    cfg!(all(target_os = "linux", target_arch = "x86_64"))
        && fs::read_to_string("/etc/os-release")
            .is_ok_and(|text| text.lines().any(|line| line == "ID=debian"))
        && ["apt-get", "apt-cache", "dpkg-deb"]
            .iter()
            .all(|program| run::output(program, &["--version"], &paths.root).is_some())
}

/// The programs of a toolchain that was finished before.
pub(crate) fn find(paths: &Paths) -> Option<PathBuf> {
    let home = paths.cache.join(RECIPE);
    let finished = home.join("bin/rustc").exists() && has_std(&wasm_libraries(&home));
    finished.then(|| home.join("bin"))
}

/// Whether a folder of compiled libraries holds the standard library.
pub(crate) fn has_std(folder: &Path) -> bool {
    files::entries(folder, |name| {
        name.starts_with("libstd-") && name.ends_with(".rlib")
    })
    .is_ok_and(|found| !found.is_empty())
}

/// Makes one. Takes about two minutes and 300 MB.
pub(crate) fn provide(paths: &Paths) -> Result<PathBuf> {
    let home = paths.cache.join(RECIPE);
    files::make_whole(&home, |work| Making { paths, work }.all())?;
    Ok(home.join("bin"))
}

fn wasm_libraries(home: &Path) -> PathBuf {
    home.join("usr/lib/rustlib").join(TARGET).join("lib")
}

/// The making of a toolchain in a folder that is moved to its place when all is done: every path in it is relative.
struct Making<'a> {
    paths: &'a Paths,
    work: &'a Path,
}

impl Making<'_> {
    fn all(&self) -> Result<()> {
        let packages = progress::noted("  Debian's lists of packages", || self.packages())?;
        progress::step("  fetch the compiler's packages", || self.fetch(&packages))?;
        progress::step("  unpack them", || self.unpack())?;
        progress::noted("  build the standard library for WebAssembly", || {
            self.build_std()
        })?;
        progress::step("  remove what is no longer needed", || self.tidy())
    }

    /// `apt-get` or `apt-cache` on lists of our own.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (setting, folder) in [("Dir::State", "apt/state"), ("Dir::Cache", "apt/cache")] {
            command
                .arg("-o")
                .arg(format!("{setting}={}", self.work.join(folder).display()));
        }
        // As root, apt would fetch as another user, who may not write here.
        command.args([
            "-o",
            "APT::Sandbox::User=",
            "-o",
            "Dir::State::status=/var/lib/dpkg/status",
        ]);
        command.current_dir(self.work);
        command
    }

    fn apt_cache(&self, arguments: &[&str]) -> Result<String> {
        let output = self
            .apt("apt-cache")
            .args(arguments)
            .output()
            .map_err(|error| {
                Failure::new(format!("apt-cache could not start: {error}"), APT_REMEDY)
            })?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(Failure::new(
                format!("apt-cache {} failed", arguments.join(" ")),
                APT_REMEDY,
            )
            .with_seen(said));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The packages to fetch: the seeds, their libraries, the linker of the compiler's own LLVM; and their version.
    fn packages(&self) -> Result<(BTreeSet<String>, String)> {
        for folder in [
            "apt/state/lists/partial",
            "apt/cache/archives/partial",
            "packages",
        ] {
            files::make_dir(&self.work.join(folder))?;
        }
        let log = self.paths.log("apt-update");
        Job::new("`apt-get update`", &log, APT_REMEDY)
            .with_limit(DOWNLOAD_LIMIT)
            .run(self.apt("apt-get").arg("update"))?;
        let version = self.version()?;
        let mut wanted = self.closure(&SEEDS.map(str::to_owned))?;
        let llvm = wanted
            .iter()
            .find_map(|name| name.strip_prefix("libllvm"))
            .map(ToOwned::to_owned)
            .ok_or_else(|| {
                Failure::new(
                    "Debian's rustc-web no longer depends on a libllvm package",
                    "report this as a bug",
                )
            })?;
        wanted.extend(self.closure(&[format!("lld-{llvm}")])?);
        Ok((wanted, format!("Rust {version}")))
    }

    /// The version on offer, which must be one that this workspace compiles with.
    fn version(&self) -> Result<String> {
        let shown = self.apt_cache(&["show", "--no-all-versions", "rustc-web"])?;
        let version = shown
            .lines()
            .find_map(|line| line.strip_prefix("Version: "))
            .unwrap_or_default();
        let version = version
            .split(['+', '-', '~'])
            .next()
            .unwrap_or_default()
            .to_owned();
        let manifest = files::read(&self.paths.root.join("Cargo.toml"))?;
        let least = manifest
            .lines()
            .find_map(|line| line.strip_prefix("rust-version = "))
            .unwrap_or_default();
        if numbers(&version) < numbers(least.trim_matches('"')) {
            return Err(Failure::new(
                format!(
                    "this Debian release offers Rust {version}, older than the {least} needed here"
                ),
                format!(
                    "`rustup target add {TARGET}` with access to the internet, or a newer Debian release"
                ),
            ));
        }
        Ok(version)
    }

    /// `seeds` and what they depend on, less what the machine has.
    fn closure(&self, seeds: &[String]) -> Result<BTreeSet<String>> {
        let installed = installed(self.work);
        let mut wanted = BTreeSet::new();
        let mut open = seeds.to_vec();
        while let Some(package) = open.pop() {
            if !wanted.insert(package.clone()) {
                continue;
            }
            let listing = self.apt_cache(&["depends", &package])?;
            let needed = listing
                .lines()
                .filter_map(|line| {
                    line.strip_prefix("  Depends: ")
                        .or_else(|| line.strip_prefix("  PreDepends: "))
                })
                .map(|name| name.split(':').next().unwrap_or(name))
                .filter(|name| !name.starts_with('<') && !TAKEN_FOR_GRANTED.contains(name))
                .filter(|name| !installed.contains(*name));
            open.extend(needed.map(ToOwned::to_owned));
        }
        Ok(wanted)
    }

    fn fetch(&self, packages: &BTreeSet<String>) -> Result<()> {
        let log = self.paths.log("apt-download");
        let mut command = self.apt("apt-get");
        command
            .arg("download")
            .args(packages)
            .current_dir(self.work.join("packages"));
        Job::new("`apt-get download`", &log, APT_REMEDY)
            .with_limit(DOWNLOAD_LIMIT)
            .run(&mut command)
    }

    fn unpack(&self) -> Result<()> {
        for package in files::entries(&self.work.join("packages"), |name| name.ends_with(".deb"))? {
            let is_source = package
                .file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with("rust-web-src"));
            let log = self.paths.log("unpack");
            let remedy = "check that the disk is not full, then run this again";
            let mut command = Command::new("sh");
            // Of the compiler's source only the standard library is needed, a fifth of it.
            let only = if is_source {
                "--wildcards '*/library/*'"
            } else {
                ""
            };
            command
                .args([
                    "-c",
                    &format!("dpkg-deb --fsys-tarfile \"$1\" | tar -x -C \"$2\" {only}"),
                    "sh",
                ])
                .arg(&package)
                .arg(self.work);
            Job::new("unpacking a package", &log, remedy).run(&mut command)?;
        }
        self.link_source()?;
        self.write_wrappers()
    }

    /// The source in the place where cargo looks for it.
    fn link_source(&self) -> Result<()> {
        let source = first(&self.work.join("usr/src"), |name| {
            name.starts_with("rustc-")
        })?;
        let place = self.work.join("usr/lib/rustlib/src");
        files::make_dir(&place)?;
        fs::rename(&source, place.join("rust"))
            .map_err(|error| Failure::file("move", &source, &error))
    }

    /// The unpacked programs find their libraries through these.
    fn write_wrappers(&self) -> Result<()> {
        let programs = self.work.join("bin");
        files::make_dir(&programs)?;
        for program in PROGRAMS {
            files::write_script(
                &programs.join(program),
                &wrapper("${0%/*}/..", &format!("usr/bin/{program}")),
            )?;
        }
        let llvm = first(&self.work.join("usr/lib"), |name| name.starts_with("llvm-"))?;
        let llvm = llvm
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let linkers = self.work.join("usr/lib/rustlib").join(HOST).join("bin");
        files::make_dir(&linkers)?;
        // Five folders up: bin, the host's, rustlib, lib, usr.
        let linker = wrapper("${0%/*}/../../../../..", &format!("usr/lib/{llvm}/bin/lld"));
        files::write_script(&linkers.join("rust-lld"), &linker)
    }

    /// Compiles an empty crate together with the standard library and keeps the latter.
    fn build_std(&self) -> Result<((), String)> {
        let krate = self.work.join("std");
        files::make_dir(&krate.join("src"))?;
        files::write(
            &krate.join("Cargo.toml"),
            "[package]\nname = \"empty\"\nversion = \"0.0.0\"\nedition = \"2021\"\n\n[workspace]\n",
        )?;
        files::write(&krate.join("src/lib.rs"), "#![no_std]\n")?;
        let source = self.work.join("usr/lib/rustlib/src/rust");
        let log = self.paths.log("wasm-std");
        let mut command = run::cargo(&krate);
        command
            .args([
                "build",
                "--release",
                "-Zbuild-std=std,panic_abort",
                "--target",
                TARGET,
            ])
            .env("RUSTC", self.work.join("bin/rustc"))
            // A stable compiler builds its own standard library with this.
            .env("RUSTC_BOOTSTRAP", "1")
            // Without bitcode the library could take no part in link-time optimisation.
            .env(
                "RUSTFLAGS",
                format!(
                    "-Cembed-bitcode=yes --remap-path-prefix={}=/rust",
                    source.display()
                ),
            )
            .env("CARGO_TARGET_DIR", krate.join("target"))
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env_remove("RUSTC_WRAPPER");
        Job::new(
            "building the standard library",
            &log,
            "look at the end of the log; report it if it is no local cause",
        )
        .with_limit(Duration::from_secs(1200))
        .run(&mut command)?;
        let built = krate.join("target").join(TARGET).join("release/deps");
        let place = wasm_libraries(self.work);
        files::make_dir(&place)?;
        let libraries = files::entries(&built, |name| {
            name.ends_with(".rlib") && !name.starts_with("libempty")
        })?;
        for library in &libraries {
            if let Some(name) = library.file_name() {
                fs::rename(library, place.join(name))
                    .map_err(|error| Failure::file("move", library, &error))?;
            }
        }
        Ok(((), format!("{} libraries", libraries.len())))
    }

    fn tidy(&self) -> Result<()> {
        for spent in [
            "apt",
            "packages",
            "std",
            "usr/share",
            "usr/lib/rustlib/src",
            "usr/src",
        ] {
            files::remove(&self.work.join(spent))?;
        }
        if has_std(&wasm_libraries(self.work)) {
            return Ok(());
        }
        Err(Failure::new(
            "the standard library for WebAssembly was not made",
            "report this as a bug",
        ))
    }
}

/// A program text that runs `program` of the toolchain `up` from the script's own folder.
fn wrapper(up: &str, program: &str) -> String {
    format!(
        "#!/bin/sh\nhome=\"{up}\"\n\
         export LD_LIBRARY_PATH=\"$home/{LIBRARIES}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\"\n\
         exec \"$home/{program}\" \"$@\"\n"
    )
}

/// The names of the packages that the machine has.
fn installed(folder: &Path) -> BTreeSet<String> {
    run::output(
        "dpkg-query",
        &["-W", "-f", "${Package} ${db:Status-Status}\n"],
        folder,
    )
    .unwrap_or_default()
    .lines()
    .filter_map(|line| line.strip_suffix(" installed").map(ToOwned::to_owned))
    .collect()
}

fn first(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    files::entries(folder, wanted)?
        .into_iter()
        .next()
        .ok_or_else(|| {
            Failure::new(
                format!(
                    "Debian's packages lack what was expected in {}",
                    folder.display()
                ),
                "report this as a bug, with the version that `apt-cache policy rustc-web` shows",
            )
        })
}

fn numbers(version: &str) -> Vec<u32> {
    version
        .split('.')
        .filter_map(|part| part.parse().ok())
        .collect()
}
