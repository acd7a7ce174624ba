//! The state of a step when some of its writes are dropped or collide.
//!
//! Staged patches are diffs against a working document that all calls of a step share, so their
//! array indices mean elements *of that moment*. Here every operation is first read against the
//! working document as it was then, with each array element under an identity of its own; what
//! remains is replayed by identity. So a dropped write never makes another one hit the wrong
//! element. Section 5 of the contract.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{PatchError, failed};
use crate::protocol::chunk::PatchOperation;
use crate::store::StagedPatch;

/// What one call of the step staged.
#[derive(Clone, Copy, Debug)]
pub struct CallWrites<'a> {
    /// The call's place in the model's answer; of two colliding writes, the one of the higher
    /// place wins. It also names the call: entries with the same place are one call. A hook that
    /// staged state needs a place that no call has.
    pub index: u64,
    /// What it staged.
    pub staged: &'a [StagedPatch],
    /// Whether its writes are to vanish: it failed or timed out.
    pub dropped: bool,
}

/// The outcome of [`reconcile`].
#[derive(Clone, Debug, PartialEq)]
pub struct Reconciled {
    /// The state to commit.
    pub state: Value,
    /// Operations of kept calls that found nothing to apply to any more.
    pub skipped: Vec<Skipped>,
}

/// An operation of a kept call that was left out: what it wrote to is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// The call's place in the model's answer.
    pub index: u64,
    /// The ordinal of the patch.
    pub ordinal: u64,
    /// The operation's path as it was staged.
    pub path: String,
}

/// The state of the step: `base` is the state at the last checkpoint, `calls` is everything that
/// was staged since then.
///
/// Where no call is dropped and no two calls wrote to overlapping paths, the result is the working
/// document: all patches in the order of their ordinals. Else:
///
/// - The writes of dropped calls vanish.
/// - Two calls collide when one wrote to a place that the other wrote to, or to something inside
///   it. Appends to one array do not collide. Calls that collide, also through a third, are
///   replayed in call order in the slots that they had in the staged order; so the later in call
///   order wins, whichever ran first. All others stay in the staged order.
/// - `add` and `replace` of an object's member set it, whether or not it is there: a member that
///   only a dropped call had made is made by the one that then replaced it.
/// - An operation whose array element, parent or member to remove is gone is skipped and reported.
///
/// # Errors
/// [`PatchError`] when the patches do not even apply in the order in which they were staged, or
/// use operations that a session never stages (`move`, `copy`, `test`).
pub fn reconcile(base: &Value, calls: &[CallWrites<'_>]) -> Result<Reconciled, PatchError> {
    let mut identities = 0;
    let base = Node::from_value(base, &mut identities);
    let mut staged: Vec<(&CallWrites<'_>, &StagedPatch)> = calls
        .iter()
        .flat_map(|call| call.staged.iter().map(move |patch| (call, patch)))
        .collect();
    staged.sort_by_key(|(_, patch)| patch.ordinal);

    let mut working = base.clone();
    let mut kept = Vec::new();
    for (call, patch) in staged {
        let mut writes = Vec::new();
        for (index, operation) in patch.patches.iter().enumerate() {
            let write = Write::read(operation, &working, &mut identities)
                .map_err(|reason| failed(index, operation, reason))?;
            if !write.apply(&mut working) {
                return Err(failed(index, operation, "there is nothing at the path"));
            }
            writes.push((operation.path.as_str(), write));
        }
        if !call.dropped {
            kept.push(Kept {
                index: call.index,
                ordinal: patch.ordinal,
                writes,
            });
        }
    }

    let mut state = base;
    let mut skipped = Vec::new();
    for patch in in_winning_order(kept) {
        for (path, write) in patch.writes {
            if !write.apply(&mut state) {
                skipped.push(Skipped {
                    index: patch.index,
                    ordinal: patch.ordinal,
                    path: path.to_owned(),
                });
            }
        }
    }
    Ok(Reconciled {
        state: state.into_value(),
        skipped,
    })
}

/// A kept patch.
struct Kept<'a> {
    index: u64,
    ordinal: u64,
    writes: Vec<(&'a str, Write)>,
}

/// Reorders the patches of colliding calls among the slots that they have.
fn in_winning_order(kept: Vec<Kept<'_>>) -> Vec<Kept<'_>> {
    let groups = colliding_groups(&kept);
    let group_of = |patch: &Kept<'_>| groups.get(&patch.index).copied().unwrap_or(patch.index);
    let mut queues: BTreeMap<u64, Vec<Kept<'_>>> = BTreeMap::new();
    let slots: Vec<u64> = kept.iter().map(group_of).collect();
    for patch in kept {
        queues.entry(group_of(&patch)).or_default().push(patch);
    }
    for queue in queues.values_mut() {
        // Taken from the back below.
        queue.sort_by_key(|patch| std::cmp::Reverse((patch.index, patch.ordinal)));
    }
    slots
        .into_iter()
        .filter_map(|group| queues.get_mut(&group).and_then(Vec::pop))
        .collect()
}

/// For each call the lowest index of the calls that it collides with, directly or through others.
fn colliding_groups(kept: &[Kept<'_>]) -> BTreeMap<u64, u64> {
    let mut groups: BTreeMap<u64, u64> = kept.iter().map(|p| (p.index, p.index)).collect();
    for (place, one) in kept.iter().enumerate() {
        for other in kept.iter().skip(place.saturating_add(1)) {
            let (Some(&a), Some(&b)) = (groups.get(&one.index), groups.get(&other.index)) else {
                continue;
            };
            let collide = || {
                one.writes
                    .iter()
                    .any(|(_, left)| other.writes.iter().any(|(_, right)| left.overlaps(right)))
            };
            if a != b && collide() {
                let (low, high) = (a.min(b), a.max(b));
                groups
                    .values_mut()
                    .filter(|group| **group == high)
                    .for_each(|group| *group = low);
            }
        }
    }
    groups
}

/// A JSON value whose array elements have identities.
#[derive(Clone, Debug)]
enum Node {
    Leaf(Value),
    Object(Vec<(String, Node)>),
    Array(Vec<(u64, Node)>),
}

/// A step of a path, by name or by identity.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    Member(String),
    Element(u64),
}

/// An operation read against the document that it was made on.
#[derive(Clone, Debug)]
struct Write {
    /// From the root to the target; a new element has its new identity here.
    path: Vec<Step>,
    action: Action,
}

#[derive(Clone, Debug)]
enum Action {
    /// Sets a member, or replaces an element that is there.
    Set(Node),
    /// Puts a new element before the one with this identity, or at the end.
    Insert {
        before: Option<u64>,
        node: Node,
    },
    Remove,
}

impl Write {
    fn read(
        operation: &PatchOperation,
        document: &Node,
        identities: &mut u64,
    ) -> Result<Self, String> {
        let is_add = match operation.op.as_str() {
            "add" => true,
            "replace" | "remove" => false,
            other => return Err(format!("a session does not stage '{other}'")),
        };
        let mut keys = pointer(&operation.path)?;
        let last = keys.pop();
        let mut path = Vec::new();
        let mut parent = document;
        for key in &keys {
            let step = parent.step(key).ok_or("there is nothing at the path")?;
            parent = parent.child(&step).ok_or("there is nothing at the path")?;
            path.push(step);
        }
        let value = |identities: &mut u64| match &operation.value {
            Some(value) => Ok(Node::from_value(value, identities)),
            None => Err("the operation has no value".to_owned()),
        };
        let Some(last) = last else {
            return match operation.op.as_str() {
                "remove" => Err("the whole state cannot be removed".into()),
                _ => Ok(Self {
                    path,
                    action: Action::Set(value(identities)?),
                }),
            };
        };
        if let (Node::Array(elements), true) = (parent, is_add) {
            let before = if last == "-" || last == elements.len().to_string() {
                None
            } else {
                let at = array_index(&last).and_then(|index| elements.get(index));
                Some(at.ok_or("the index is not in the array")?.0)
            };
            path.push(Step::Element(next(identities)));
            let node = value(identities)?;
            return Ok(Self {
                path,
                action: Action::Insert { before, node },
            });
        }
        let step = parent.step(&last).ok_or("there is nothing at the path")?;
        // Only `add` may make a member; later, in the replay, `replace` may too.
        if !is_add && parent.child(&step).is_none() {
            return Err("there is nothing at the path".into());
        }
        path.push(step);
        let action = if operation.op == "remove" {
            Action::Remove
        } else {
            Action::Set(value(identities)?)
        };
        Ok(Self { path, action })
    }

    /// Whether one of the two targets is the other or holds it.
    fn overlaps(&self, other: &Self) -> bool {
        self.path.iter().zip(&other.path).all(|(a, b)| a == b)
    }

    /// Carries the operation out; false, and nothing changed, when its place is gone.
    fn apply(&self, document: &mut Node) -> bool {
        let Some((last, parents)) = self.path.split_last() else {
            if let Action::Set(node) = &self.action {
                *document = node.clone();
            }
            return true;
        };
        let mut parent = document;
        for step in parents {
            match parent.child_mut(step) {
                Some(child) => parent = child,
                None => return false,
            }
        }
        match (parent, last) {
            (Node::Object(members), Step::Member(name)) => {
                let at = members.iter().position(|(member, _)| member == name);
                set_or_remove(members, at, name, &self.action)
            }
            (Node::Array(elements), Step::Element(identity)) => {
                let at = elements.iter().position(|(element, _)| element == identity);
                change_elements(elements, at, *identity, &self.action)
            }
            _ => false,
        }
    }
}

fn set_or_remove(
    members: &mut Vec<(String, Node)>,
    at: Option<usize>,
    name: &str,
    action: &Action,
) -> bool {
    match (action, at) {
        (Action::Set(node), Some(at)) => match members.get_mut(at) {
            Some(member) => member.1 = node.clone(),
            None => return false,
        },
        (Action::Set(node), None) => members.push((name.to_owned(), node.clone())),
        (Action::Remove, Some(at)) => drop(members.remove(at)),
        (Action::Remove, None) | (Action::Insert { .. }, _) => return false,
    }
    true
}

fn change_elements(
    elements: &mut Vec<(u64, Node)>,
    at: Option<usize>,
    identity: u64,
    action: &Action,
) -> bool {
    match (action, at) {
        (Action::Insert { before: None, node }, _) => elements.push((identity, node.clone())),
        (
            Action::Insert {
                before: Some(before),
                node,
            },
            _,
        ) => match elements.iter().position(|(element, _)| element == before) {
            Some(at) => elements.insert(at, (identity, node.clone())),
            None => return false,
        },
        (Action::Set(node), Some(at)) => match elements.get_mut(at) {
            Some(element) => element.1 = node.clone(),
            None => return false,
        },
        (Action::Remove, Some(at)) => drop(elements.remove(at)),
        (Action::Set(_) | Action::Remove, None) => return false,
    }
    true
}

impl Node {
    fn from_value(value: &Value, identities: &mut u64) -> Self {
        match value {
            Value::Object(members) => Self::Object(
                members
                    .iter()
                    .map(|(name, value)| (name.clone(), Self::from_value(value, identities)))
                    .collect(),
            ),
            Value::Array(elements) => Self::Array(
                elements
                    .iter()
                    .map(|value| (next(identities), Self::from_value(value, identities)))
                    .collect(),
            ),
            leaf => Self::Leaf(leaf.clone()),
        }
    }

    fn into_value(self) -> Value {
        match self {
            Self::Leaf(value) => value,
            Self::Object(members) => members
                .into_iter()
                .map(|(name, node)| (name, node.into_value()))
                .collect::<serde_json::Map<_, _>>()
                .into(),
            Self::Array(elements) => elements
                .into_iter()
                .map(|(_, node)| node.into_value())
                .collect::<Vec<_>>()
                .into(),
        }
    }

    /// What a key of a pointer means here. A member need not exist, an element must.
    fn step(&self, key: &str) -> Option<Step> {
        match self {
            Self::Leaf(_) => None,
            Self::Object(_) => Some(Step::Member(key.to_owned())),
            Self::Array(elements) => {
                let (identity, _) = elements.get(array_index(key)?)?;
                Some(Step::Element(*identity))
            }
        }
    }

    fn child(&self, step: &Step) -> Option<&Self> {
        match (self, step) {
            (Self::Object(members), Step::Member(name)) => members
                .iter()
                .find(|(member, _)| member == name)
                .map(|(_, node)| node),
            (Self::Array(elements), Step::Element(identity)) => elements
                .iter()
                .find(|(element, _)| element == identity)
                .map(|(_, node)| node),
            _ => None,
        }
    }

    fn child_mut(&mut self, step: &Step) -> Option<&mut Self> {
        match (self, step) {
            (Self::Object(members), Step::Member(name)) => members
                .iter_mut()
                .find(|(member, _)| member == name)
                .map(|(_, node)| node),
            (Self::Array(elements), Step::Element(identity)) => elements
                .iter_mut()
                .find(|(element, _)| element == identity)
                .map(|(_, node)| node),
            _ => None,
        }
    }
}

fn next(identities: &mut u64) -> u64 {
    *identities = identities.saturating_add(1);
    *identities
}

fn array_index(key: &str) -> Option<usize> {
    let plain = key == "0" || (!key.starts_with('0') && key.bytes().all(|b| b.is_ascii_digit()));
    plain.then(|| key.parse().ok()).flatten()
}

fn pointer(path: &str) -> Result<Vec<String>, String> {
    if path.is_empty() {
        return Ok(Vec::new());
    }
    let Some(path) = path.strip_prefix('/') else {
        return Err("the path is not a JSON pointer".into());
    };
    Ok(path
        .split('/')
        .map(|key| key.replace("~1", "/").replace("~0", "~"))
        .collect())
}
