//! What a seed decides before anything runs: the job, what its user does, and which faults strike
//! where.
//!
//! A fault is planned for the n-th effect of a kind on a side. So a plan is a list, and taking one
//! fault out of it leaves the others where they are.

use std::fmt;

use crate::random::Random;
use crate::workload::Workload;

/// Who does something, or sends a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The user with its readers.
    Observer,
    /// The service of the root session.
    Consumer,
    /// The service of its children, and of theirs.
    Producer,
}

impl Side {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Observer, Self::Consumer, Self::Producer];
}

/// A kind of effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// An object reads its database.
    Read,
    /// It is about to commit.
    Commit,
    /// A statement within a transaction.
    Statement,
    /// It has committed.
    Committed,
    /// What it has committed is durable.
    Durable,
    /// It begins to wait.
    Sleep,
    /// It has waited.
    Awake,
    /// It is about to arm its alarm, or to disarm it.
    Arm,
    /// It has armed its alarm.
    AlarmSet,
    /// Its alarm rings.
    AlarmRings,
    /// It asks its model.
    Asks,
    /// Its model says something.
    Hears,
    /// A tool begins.
    Tool,
    /// A request leaves.
    Request(Action),
    /// The answer to one comes.
    Answer,
    /// A part of a stream comes.
    Part,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // They are the routes.
pub enum Action {
    Start,
    Resume,
    Interrupt,
    Abort,
    Sse,
    Status,
    Snapshot,
    Usage,
    Tree,
    Messages,
}

impl Action {
    /// The action that a path ends with.
    #[must_use]
    pub fn of(path: &str) -> Option<Self> {
        Some(match path.rsplit('/').next().unwrap_or_default() {
            "start" => Self::Start,
            "resume" => Self::Resume,
            "interrupt" => Self::Interrupt,
            "abort" => Self::Abort,
            "sse" => Self::Sse,
            "status" => Self::Status,
            "snapshot" => Self::Snapshot,
            "usage" => Self::Usage,
            "tree" => Self::Tree,
            "messages" => Self::Messages,
            _ => return None,
        })
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// Every object of the service ends where it stands and is opened anew.
    Crash,
    /// The one object does.
    Evict,
    /// The database refuses.
    Storage,
    /// The service's clock jumps ahead.
    ClockAhead,
    /// The service's clock jumps back.
    ClockBack,
    /// The model's provider refuses, or breaks off.
    Model,
    /// A request never arrives.
    Lost,
    /// A request takes effect, and its answer is lost.
    Unheard,
    /// A request arrives twice.
    Twice,
    /// A request arrives when nobody waits for its answer any more.
    Late,
    /// An answer comes behind those of later requests.
    Reordered,
    /// No answer ever comes.
    Silent,
    /// A body breaks off in the middle.
    Cut,
    /// A body ends in the middle as if it were whole.
    Short,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::Crash,
        Self::Evict,
        Self::Storage,
        Self::ClockAhead,
        Self::ClockBack,
        Self::Model,
        Self::Lost,
        Self::Unheard,
        Self::Twice,
        Self::Late,
        Self::Reordered,
        Self::Silent,
        Self::Cut,
        Self::Short,
    ];
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 25] = [
        Self::Read,
        Self::Commit,
        Self::Statement,
        Self::Committed,
        Self::Durable,
        Self::Sleep,
        Self::Awake,
        Self::Arm,
        Self::AlarmSet,
        Self::AlarmRings,
        Self::Asks,
        Self::Hears,
        Self::Tool,
        Self::Request(Action::Start),
        Self::Request(Action::Resume),
        Self::Request(Action::Interrupt),
        Self::Request(Action::Abort),
        Self::Request(Action::Sse),
        Self::Request(Action::Status),
        Self::Request(Action::Snapshot),
        Self::Request(Action::Usage),
        Self::Request(Action::Tree),
        Self::Request(Action::Messages),
        Self::Answer,
        Self::Part,
    ];

    /// Whether this happens on a side at all.
    #[must_use]
    pub fn occurs(self, side: Side) -> bool {
        match (self, side) {
            // A user has no objects. A dispatch resumes nobody here, and aborts the children of the
            // root alone, which may be deleted.
            (Self::Request(Action::Resume | Action::Messages), side) => side == Side::Observer,
            (Self::Request(Action::Abort), side) => side != Side::Producer,
            (Self::Request(_) | Self::Answer | Self::Part, _) => true,
            (_, side) => side != Side::Observer,
        }
    }

    /// The faults that can strike here.
    #[must_use]
    pub fn faults(self, side: Side) -> Vec<Fault> {
        use Fault::{
            ClockAhead, ClockBack, Crash, Cut, Evict, Late, Lost, Model, Reordered, Short, Silent,
            Storage, Twice, Unheard,
        };
        if !self.occurs(side) {
            return Vec::new();
        }
        let mut faults = match self {
            Self::Read | Self::Commit | Self::Statement | Self::Arm => vec![Storage],
            Self::Asks | Self::Hears => vec![Model],
            Self::Request(Action::Sse) => vec![Lost, Unheard, Twice, Late, Reordered, Silent],
            Self::Request(_) => {
                vec![Lost, Unheard, Twice, Late, Reordered, Silent, Cut]
            }
            Self::Part => vec![Cut, Short, Silent],
            _ => Vec::new(),
        };
        if side != Side::Observer {
            faults.extend([Crash, Evict, ClockAhead, ClockBack]);
        }
        faults
    }

    /// Within how many effects of this kind a fault is planned.
    fn reach(self, side: Side) -> u64 {
        match (self, side) {
            (Self::Read, _) => 60,
            (Self::Commit | Self::Committed | Self::Durable, _) => 40,
            (Self::Statement, _) => 150,
            (Self::Sleep | Self::Awake, _) => 30,
            (Self::Hears, _) => 40,
            (Self::Arm | Self::AlarmSet | Self::Answer | Self::Part, _) => 12,
            (Self::Asks | Self::Tool, _) => 6,
            (Self::AlarmRings | Self::Request(Action::Sse), _) => 4,
            (Self::Request(_), _) => 2,
        }
    }
}

/// One fault of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// On which side.
    pub side: Side,
    /// At which kind of effect.
    pub kind: Kind,
    /// At the how manieth of them, from 0.
    pub nth: u64,
    /// What goes wrong.
    pub fault: Fault,
    /// Its place in the plan of its seed.
    pub place: usize,
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            side,
            kind,
            nth,
            fault,
            place,
        } = self;
        write!(f, "{place}: {fault:?} at {side:?} {kind:?} #{nth}")
    }
}

/// All that a seed decides.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// The job, and what its user does.
    pub workload: Workload,
    /// What goes wrong.
    pub faults: Vec<Planned>,
}

impl Plan {
    /// The plan of a seed.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let random = Random::of(seed, 1);
        let later = Random::of(seed, 5);
        let workload = Workload::of(&random, &later);
        let many = if random.chance(15) {
            10 + random.below(20)
        } else {
            3 + random.below(8)
        };
        let mut faults: Vec<Planned> = (0..many).filter_map(|_| planned(&random)).collect();
        if random.chance(15) {
            faults.extend(storm(&random));
        }
        faults.extend(came_later(&later, &workload));
        for (place, fault) in faults.iter_mut().enumerate() {
            fault.place = place;
        }
        Self {
            seed,
            workload,
            faults,
        }
    }

    /// The same with those faults alone that have these places in the plan of the seed.
    #[must_use]
    pub fn only(mut self, places: &[usize]) -> Self {
        self.faults.retain(|fault| places.contains(&fault.place));
        self
    }

    /// The same without the fault at this place of what is left.
    #[must_use]
    pub fn without(&self, place: usize) -> Self {
        let mut plan = self.clone();
        if place < plan.faults.len() {
            plan.faults.remove(place);
        }
        plan
    }
}

/// A line on which streams break off again and again.
fn storm(random: &Random) -> Vec<Planned> {
    let side = if random.chance(50) {
        Side::Consumer
    } else {
        Side::Producer
    };
    let first = random.below(8);
    let many = 4 + random.below(12);
    let planned = (first..first + many).map(|nth| Planned {
        side,
        kind: Kind::Part,
        nth,
        fault: if random.chance(50) {
            Fault::Cut
        } else {
            Fault::Short
        },
        place: 0,
    });
    planned.collect()
}

fn planned(random: &Random) -> Option<Planned> {
    let side = *random.one_of(&[
        Side::Observer,
        Side::Consumer,
        Side::Consumer,
        Side::Producer,
        Side::Producer,
    ])?;
    let kinds: Vec<Kind> = Kind::ALL
        .into_iter()
        .filter(|kind| kind.occurs(side) && !LATER.contains(&(side, *kind)))
        .collect();
    let kind = *random.one_of(&kinds)?;
    strikes(random, side, kind)
}

/// What came to be planned later has a chance of its own: a seed without it is the run that it was.
const LATER: [(Side, Kind); 3] = [
    (Side::Consumer, Kind::Arm),
    (Side::Producer, Kind::Arm),
    (Side::Consumer, Kind::Request(Action::Abort)),
];

fn came_later(random: &Random, workload: &Workload) -> Vec<Planned> {
    let mut faults = Vec::new();
    if random.chance(30) {
        for _ in 0..=random.below(3) {
            let side = random.one_of(&[Side::Consumer, Side::Producer]);
            faults.extend(side.and_then(|side| strikes(random, *side, Kind::Arm)));
        }
    }
    if workload.deleted.is_some() && random.chance(60) {
        let abort = Kind::Request(Action::Abort);
        faults.extend(strikes(random, Side::Consumer, abort));
    }
    faults
}

fn strikes(random: &Random, side: Side, kind: Kind) -> Option<Planned> {
    let fault = *random.one_of(&kind.faults(side))?;
    // Most of what happens happens early.
    let nth = random.below(random.below(kind.reach(side)).saturating_add(1));
    Some(Planned {
        side,
        kind,
        nth,
        fault,
        place: 0,
    })
}
