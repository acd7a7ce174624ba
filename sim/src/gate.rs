//! Where every effect of a run passes: it is counted, told in the trace, and struck by what is
//! planned for it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;

use futures::FutureExt as _;
use futures::channel::oneshot;
use futures::future::Shared;

use crate::panics;
use crate::plan::{Fault, Kind, Plan, Planned, Side};

/// How many of the last lines of a trace are kept.
const LAST: usize = 40;

/// More lines than any run has whose parts come to rest.
const MOST: u64 = 400_000;

/// What was found to be wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Which invariant does not hold.
    pub invariant: Invariant,
    /// What was seen.
    pub what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.invariant, self.what)
    }
}

/// What always holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Invariant {
    /// No committed chunk is lost or doubled for a reader with a cursor.
    Cursor,
    /// A chunk of a child stands once in its parent's log, in order and as it was.
    Forwarded,
    /// An exact document equals a committed boundary.
    Exact,
    /// Each call settles once, with one result.
    SettledOnce,
    /// Everything comes to rest in bounded virtual time after the last fault.
    Bounded,
    /// Each child is started effectively once.
    StartedOnce,
    /// Each token is counted once.
    CountedOnce,
    /// Nothing unpromoted is read as state.
    Promoted,
    /// Nothing terminal is overwritten by an older run.
    Terminal,
    /// Every history pairs calls and results.
    Paired,
    /// A disconnect cancels nothing.
    Disconnect,
    /// An interrupt reaches every live descendant or is reported.
    Interrupt,
    /// What stands in state only crosses no projected mount.
    Canary,
    /// The law of the step.
    Law,
    /// No sequence that was seen is issued twice.
    Sequence,
    /// A log is kept from its floor on, and its floor leaves a snapshot its reader.
    Kept,
    /// A deletion leaves nothing, and nobody else's session is gone.
    Deletion,
    /// Nothing panics.
    Panic,
}

/// The gate of one run.
pub struct Gate {
    plan: Vec<Planned>,
    began: tokio::time::Instant,
    counts: RefCell<BTreeMap<(Side, Kind), u64>>,
    struck: RefCell<Vec<Planned>>,
    struck_at: Cell<u64>,
    last: RefCell<VecDeque<String>>,
    digest: Cell<u64>,
    lines: Cell<u64>,
    lost: Cell<u64>,
    truncated: Cell<u64>,
    deleted: Cell<u64>,
    broken: RefCell<Option<Broken>>,
    /// Whether every line is printed: `SIM_TRACE` asks for it.
    is_printed: bool,
    /// Dropped when something does not hold.
    whole: RefCell<Option<oneshot::Sender<()>>>,
    breaks: Shared<oneshot::Receiver<()>>,
}

impl Gate {
    /// The gate of a plan; within a runtime of tokio.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let (whole, breaks) = oneshot::channel();
        Self {
            is_printed: std::env::var_os("SIM_TRACE").is_some(),
            whole: RefCell::new(Some(whole)),
            breaks: breaks.shared(),
            plan: plan.faults.clone(),
            began: tokio::time::Instant::now(),
            counts: RefCell::default(),
            struck: RefCell::default(),
            struck_at: Cell::new(0),
            last: RefCell::default(),
            digest: Cell::new(0xcbf2_9ce4_8422_2325),
            lines: Cell::new(0),
            lost: Cell::new(0),
            truncated: Cell::new(0),
            deleted: Cell::new(0),
            broken: RefCell::default(),
        }
    }

    /// Virtual milliseconds since the beginning.
    #[must_use]
    pub fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// An effect happens; what strikes it.
    pub fn pass(&self, side: Side, kind: Kind, who: &dyn fmt::Display) -> Option<Fault> {
        let nth = {
            let mut counts = self.counts.borrow_mut();
            let count = counts.entry((side, kind)).or_default();
            let nth = *count;
            *count = count.saturating_add(1);
            nth
        };
        self.no_panics();
        if self.lines.get() > MOST {
            self.broken(Invariant::Bounded, "there is no end of effects");
        }
        let is_here = |planned: &&Planned| (planned.side, planned.kind) == (side, kind);
        let mut planned = self.plan.iter().filter(is_here);
        let planned = planned.find(|planned| planned.nth == nth).copied();
        if let Some(planned) = planned {
            self.struck.borrow_mut().push(planned);
            self.struck_at.set(self.now());
        }
        match planned {
            Some(Planned { fault, .. }) => self.tell(&format_args!(
                "{side:?} {kind:?} #{nth} {who}   <- {fault:?}"
            )),
            None => self.tell(&format_args!("{side:?} {kind:?} #{nth} {who}")),
        }
        planned.map(|planned| planned.fault)
    }

    /// One line of the trace.
    pub fn tell(&self, line: &dyn fmt::Display) {
        let line = format!("{:>8} ms  {line}", self.now());
        if self.is_printed {
            println!("{line}");
        }
        let mut digest = self.digest.get();
        for byte in line.bytes() {
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.digest.set(digest);
        self.lines.set(self.lines.get().saturating_add(1));
        let mut last = self.last.borrow_mut();
        if last.len() >= LAST {
            last.pop_front();
        }
        last.push_back(line);
    }

    /// Nothing has panicked so far.
    pub fn no_panics(&self) {
        if let Some(what) = panics::seen() {
            self.broken(Invariant::Panic, what);
        }
    }

    /// Chunks were committed, and gone before they were durable.
    pub fn lost(&self, chunks: usize) {
        let chunks = u64::try_from(chunks).unwrap_or(u64::MAX);
        self.lost.set(self.lost.get().saturating_add(chunks));
    }

    /// A reader was told that its cursor is not in the log.
    pub fn truncated(&self) {
        self.truncated.set(self.truncated.get().saturating_add(1));
    }

    /// A session was deleted.
    pub fn deleted(&self) {
        self.deleted.set(self.deleted.get().saturating_add(1));
    }

    /// Something does not hold; the first thing counts.
    pub fn broken(&self, invariant: Invariant, what: impl Into<String>) {
        let mut broken = self.broken.borrow_mut();
        if broken.is_none() {
            let what = what.into();
            self.whole.take();
            self.tell(&format_args!("BROKEN {invariant:?}: {what}"));
            *broken = Some(Broken { invariant, what });
        }
    }

    /// Completes once something does not hold.
    pub fn breaks(&self) -> impl Future<Output = ()> + 'static {
        self.breaks.clone().map(drop)
    }

    /// Whether something did not hold.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.borrow().is_some()
    }

    /// When the last fault struck.
    #[must_use]
    pub fn struck_at(&self) -> u64 {
        self.struck_at.get()
    }

    /// Whether this fault has struck anywhere.
    #[must_use]
    pub fn has_struck(&self, wanted: impl Fn(&Planned) -> bool) -> bool {
        self.struck.borrow().iter().any(wanted)
    }

    /// What the run came to.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        Outcome {
            effects: self.counts.borrow().clone(),
            struck: self.struck.borrow().clone(),
            broken: self.broken.borrow().clone(),
            last: self.last.borrow().iter().cloned().collect(),
            trace: (self.lines.get(), self.digest.get()),
            virtual_ms: self.now(),
            lost: self.lost.get(),
            truncated: self.truncated.get(),
            deleted: self.deleted.get(),
        }
    }
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How often each effect happened.
    pub effects: BTreeMap<(Side, Kind), u64>,
    /// The faults that have struck.
    pub struck: Vec<Planned>,
    /// What does not hold.
    pub broken: Option<Broken>,
    /// The last lines of the trace.
    pub last: Vec<String>,
    /// How many lines the trace has, and a digest of all of them.
    pub trace: (u64, u64),
    /// How long it took by the virtual clock.
    pub virtual_ms: u64,
    /// How many chunks were committed, and gone before they were durable.
    pub lost: u64,
    /// How often a reader was told that its cursor is not in the log.
    pub truncated: u64,
    /// How often a session was deleted; again, if that was gone before it was durable.
    pub deleted: u64,
}
