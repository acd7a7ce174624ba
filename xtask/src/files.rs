//! File operations whose failures say what to do.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process,
};

use crate::failure::{Failure, Result};

/// Makes a folder and its parents.
pub(crate) fn make_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|error| Failure::file("make the folder", path, &error))
}

/// Removes a folder or file; one that does not exist is fine.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() && !path.is_symlink() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    match removed {
        Err(error) if path.exists() => Err(Failure::file("remove", path, &error)),
        _ => Ok(()),
    }
}

/// Reads a file as text.
pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| Failure::file("read", path, &error))
}

/// Writes a file as a whole.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|error| Failure::file("write", path, &error))
}

/// Writes a program text that may be run.
pub(crate) fn write_script(path: &Path, text: &str) -> Result<()> {
    write(path, text)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))
            .map_err(|error| Failure::file("mark as a program", path, &error))?;
    }
    Ok(())
}

/// The entries of a folder whose name passes `wanted`, sorted.
pub(crate) fn entries(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let listing = fs::read_dir(folder).map_err(|error| Failure::file("list", folder, &error))?;
    let mut found: Vec<PathBuf> = listing
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(&wanted)
        })
        .collect();
    found.sort();
    Ok(found)
}

/// A fingerprint of files and texts, to see whether a result is still of its inputs. A missing file counts as empty.
pub(crate) fn fingerprint(files: &[&Path], texts: &[&str]) -> String {
    let mut hasher = DefaultHasher::new();
    for file in files {
        fs::read(file).unwrap_or_default().hash(&mut hasher);
    }
    texts.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Makes a folder by `fill` in one go: it either appears whole at `place` or not at all, also when several runs do
/// this at once or one is interrupted. `fill` gets a folder beside it to work in.
pub(crate) fn make_whole(place: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let parent = place.parent().unwrap_or(place);
    let name = place
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or("folder")
        .to_owned();
    make_dir(parent)?;
    let mark = format!(".{name}.unfinished-");
    for leftover in entries(parent, |entry| {
        entry.strip_prefix(&mark).is_some_and(is_over)
    })? {
        remove(&leftover)?;
    }
    let work = parent.join(format!("{mark}{}", process::id()));
    remove(&work)?;
    make_dir(&work)?;
    let filled = fill(&work);
    if filled.is_ok() && !place.exists() && fs::rename(&work, place).is_ok() {
        return Ok(());
    }
    remove(&work)?;
    filled?;
    if place.exists() {
        return Ok(());
    }
    Err(Failure::new(
        format!("could not move a finished folder to {}", place.display()),
        "check that its parent folder may be written",
    ))
}

/// Whether the process with this id has ended; where that cannot be told, no.
fn is_over(id: &str) -> bool {
    Path::new("/proc/self").exists() && !Path::new("/proc").join(id).exists()
}
