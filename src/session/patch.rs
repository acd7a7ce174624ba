//! Patches: from two states to operations, from operations to a state, and what a step's state is
//! when some of its writes are dropped.
//!
//! Pure. `apply(before, diff(before, after))` is `after` as a JSON value, always. Section 4 (the
//! form of a `state_patch`) and section 5 (staging, the law of the step, the default winner).

mod reconcile;

use json_patch::jsonptr::PointerBuf;
use json_patch::{
    AddOperation, CopyOperation, MoveOperation, PatchOperation as Typed, RemoveOperation,
    ReplaceOperation, TestOperation,
};
use serde_json::{Map, Value};

pub use reconcile::{CallWrites, Reconciled, Skipped, reconcile};

use crate::protocol::chunk::PatchOperation;
use crate::protocol::request::too_deep;

/// How deep what a patch places may nest, counted from the document's root: deeper documents no
/// JSON reader takes.
pub const DEEPEST: usize = 127;

/// How much a patch may copy within its document, and how large a document may be that copies went
/// into, in bytes of JSON, about (8 MiB). A few copies of copies would otherwise fill any memory.
pub const MOST_COPIED: usize = 8 * 1024 * 1024;

/// A patch that does not apply, or an operation that is malformed. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("operation {operation} of a patch does not apply at '{path}': {reason}")]
pub struct PatchError {
    /// The operation's place in the patch, from 0.
    pub operation: usize,
    /// Its path.
    pub path: String,
    /// Why.
    pub reason: String,
}

/// The operations that turn `before` into `after`: `add`, `remove` and `replace`.
///
/// An array that only grew at its end becomes one `add <path>/-` for each new element; one that
/// only lost elements at one end becomes `remove`s where these are fewer than what stays; one of
/// the same length is compared element by element; any other is replaced. Both documents should be
/// objects, as every state is; another root is replaced as a whole.
#[must_use]
pub fn diff(before: &Value, after: &Value) -> Vec<PatchOperation> {
    let mut operations = Vec::new();
    compare(&mut String::new(), before, after, &mut operations);
    operations
}

/// Applies operations in order, to a copy: an error leaves nothing half done.
///
/// # Errors
/// [`PatchError`] names the operation that does not apply, or goes beyond [`DEEPEST`] or
/// [`MOST_COPIED`].
pub fn apply(document: &Value, operations: &[PatchOperation]) -> Result<Value, PatchError> {
    let patch = operations
        .iter()
        .enumerate()
        .map(|(index, operation)| {
            typed(operation).map_err(|reason| failed(index, operation, reason))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut copy = document.clone();
    let mut room = MOST_COPIED;
    for (index, (one, operation)) in patch.chunks(1).zip(operations).enumerate() {
        for typed in one {
            bounded(&copy, typed, &mut room).map_err(|reason| failed(index, operation, reason))?;
        }
        json_patch::patch_unsafe(&mut copy, one)
            .map_err(|error| failed(index, operation, error.kind.to_string()))?;
    }
    let last = operations.len().saturating_sub(1);
    match operations.get(last) {
        Some(operation) if room < MOST_COPIED && !fits(&copy, &mut MOST_COPIED.clone()) => {
            Err(failed(last, operation, TOO_LARGE))
        }
        _ => Ok(copy),
    }
}

const TOO_LARGE: &str = "the document would become too large";

/// Whether an operation keeps within the bounds; `room` is what may still be copied. What is not
/// there is the operation's own matter.
fn bounded(document: &Value, operation: &Typed, room: &mut usize) -> Result<(), &'static str> {
    let (path, value) = match operation {
        Typed::Add(add) => (&add.path, Some(&add.value)),
        Typed::Replace(replace) => (&replace.path, Some(&replace.value)),
        Typed::Move(moved) => (&moved.path, document.pointer(moved.from.as_str())),
        Typed::Copy(copied) => (&copied.path, document.pointer(copied.from.as_str())),
        Typed::Remove(_) | Typed::Test(_) => return Ok(()),
    };
    let Some(value) = value else {
        return Ok(());
    };
    let left = DEEPEST.checked_sub(path.count());
    if left.is_none_or(|left| too_deep(value, left)) {
        return Err("the document would nest too deeply");
    }
    if matches!(operation, Typed::Copy(_)) && !fits(value, room) {
        return Err(TOO_LARGE);
    }
    Ok(())
}

/// Takes the size of a value from what is left; whether that was enough.
fn fits(value: &Value, room: &mut usize) -> bool {
    let own = match value {
        Value::String(text) => text.len(),
        Value::Object(map) => map.keys().map(String::len).sum(),
        _ => 0,
    };
    let Some(left) = room.checked_sub(own.saturating_add(4)) else {
        return false;
    };
    *room = left;
    match value {
        Value::Object(map) => map.values().all(|value| fits(value, room)),
        Value::Array(items) => items.iter().all(|item| fits(item, room)),
        _ => true,
    }
}

fn failed(index: usize, operation: &PatchOperation, reason: impl Into<String>) -> PatchError {
    PatchError {
        operation: index,
        path: operation.path.clone(),
        reason: reason.into(),
    }
}

fn typed(operation: &PatchOperation) -> Result<Typed, String> {
    let pointer = |text: &str| PointerBuf::parse(text).map_err(|_| format!("{text} is no pointer"));
    let from = || pointer(operation.from.as_deref().ok_or("from is missing")?);
    let value = || operation.value.clone().ok_or("the value is missing");
    let path = pointer(&operation.path)?;
    Ok(match operation.op.as_str() {
        "add" => Typed::Add(AddOperation {
            path,
            value: value()?,
        }),
        "remove" => Typed::Remove(RemoveOperation { path }),
        "replace" => Typed::Replace(ReplaceOperation {
            path,
            value: value()?,
        }),
        "move" => Typed::Move(MoveOperation {
            from: from()?,
            path,
        }),
        "copy" => Typed::Copy(CopyOperation {
            from: from()?,
            path,
        }),
        "test" => Typed::Test(TestOperation {
            path,
            value: value()?,
        }),
        other => return Err(format!("{other} is no operation")),
    })
}

fn compare(path: &mut String, before: &Value, after: &Value, operations: &mut Vec<PatchOperation>) {
    match (before, after) {
        _ if before == after => {}
        (Value::Object(before), Value::Object(after)) => {
            compare_objects(path, before, after, operations);
        }
        (Value::Array(old), Value::Array(new)) => compare_arrays(path, old, new, after, operations),
        _ => operations.push(operation("replace", path, Some(after))),
    }
}

fn compare_objects(
    path: &mut String,
    before: &Map<String, Value>,
    after: &Map<String, Value>,
    operations: &mut Vec<PatchOperation>,
) {
    for key in before.keys().filter(|key| !after.contains_key(*key)) {
        below(path, key, |path| {
            operations.push(operation("remove", path, None));
        });
    }
    for (key, value) in after {
        below(path, key, |path| match before.get(key) {
            Some(old) => compare(path, old, value, operations),
            None => operations.push(operation("add", path, Some(value))),
        });
    }
}

fn compare_arrays(
    path: &mut String,
    old: &[Value],
    new: &[Value],
    after: &Value,
    operations: &mut Vec<PatchOperation>,
) {
    if old.len() == new.len() {
        for (index, (old, new)) in old.iter().zip(new).enumerate() {
            below(path, &index.to_string(), |path| {
                compare(path, old, new, operations);
            });
        }
        return;
    }
    if let Some(added) = new.strip_prefix(old) {
        below(path, "-", |path| {
            operations.extend(
                added
                    .iter()
                    .map(|value| operation("add", path, Some(value))),
            );
        });
        return;
    }
    let removed = old.len().saturating_sub(new.len());
    let worth_it = removed < new.len();
    if worth_it && old.starts_with(new) {
        for index in (new.len()..old.len()).rev() {
            below(path, &index.to_string(), |path| {
                operations.push(operation("remove", path, None));
            });
        }
    } else if worth_it && old.ends_with(new) {
        below(path, "0", |path| {
            operations.extend((0..removed).map(|_| operation("remove", path, None)));
        });
    } else {
        operations.push(operation("replace", path, Some(after)));
    }
}

/// Runs `work` with the path of a member, and takes the path back afterwards.
fn below(path: &mut String, key: &str, work: impl FnOnce(&mut String)) {
    let length = path.len();
    path.push('/');
    path.push_str(&key.replace('~', "~0").replace('/', "~1"));
    work(path);
    path.truncate(length);
}

fn operation(op: &str, path: &str, value: Option<&Value>) -> PatchOperation {
    PatchOperation {
        op: op.into(),
        path: path.into(),
        from: None,
        value: value.cloned(),
    }
}

#[cfg(test)]
mod tests;
