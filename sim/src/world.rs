//! The world of one run: two services with their objects, and what strikes them.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeSet;
use std::rc::{Rc, Weak};
use std::time::Duration;

use remote_agents::mount::{Mount, Objects, Projection};
use remote_agents::native::{
    CommitMoment, DiskMoment, Effect, LocalObjects, LocalRuntime, MountFetch, StoreOperation,
};
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::store::SubLocation;
use remote_agents::transport::{Fetch, HttpTransport, ObjectsFetch};
use remote_agents::{Agents, Error, Result};
use serde_json::{Value, json};

use crate::agents::{LEVELS, Making, policy};
use crate::gate::{Gate, Invariant};
use crate::judge::Judge;
use crate::link::Link;
use crate::plan::{Fault, Kind, Plan, Side};
use crate::random::Random;
use crate::workload::Workload;

/// Stands in every state, and nowhere else.
pub const CANARY: &str = "canary-that-stands-in-state-only";

/// The root session.
pub const ROOT: &str = "job";

/// Where the clocks begin.
const BASE: u64 = 1_700_000_000_000;

/// What an object tells its runtime to be ended.
const END_ME: &str = "end";

/// How far a clock jumps.
const JUMP_MS: i64 = 90_000;

/// What the parts of one run share.
pub struct Shared {
    /// Where effects pass.
    pub gate: Gate,
    /// The job.
    pub workload: Workload,
    /// Chance of line and models.
    pub random: Random,
    entropy: Random,
    disk: Random,
    prices: Cell<u64>,
    clocks: [Cell<i64>; 2],
    // The world holds them: whatever they make holds this.
    near: OnceCell<Weak<LocalObjects>>,
    far: OnceCell<Weak<LocalObjects>>,
    /// Whether the user has asked for a stop.
    pub stop_asked: Cell<bool>,
    /// The children that a dispatch has told to stop.
    pub told_to_stop: RefCell<BTreeSet<String>>,
    /// Whether the run is over.
    pub over: Cell<bool>,
}

impl Shared {
    /// What a plan decides.
    #[must_use]
    pub fn new(plan: &Plan) -> Rc<Self> {
        Rc::new(Self {
            gate: Gate::new(plan),
            workload: plan.workload.clone(),
            random: Random::of(plan.seed, 2),
            entropy: Random::of(plan.seed, 3),
            disk: Random::of(plan.seed, 4),
            prices: Cell::new(1_000),
            clocks: Default::default(),
            near: OnceCell::new(),
            far: OnceCell::new(),
            stop_asked: Cell::new(false),
            told_to_stop: RefCell::default(),
            over: Cell::new(false),
        })
    }

    /// What the next answer of a model costs.
    pub fn price(&self) -> u64 {
        self.prices.set(self.prices.get().saturating_add(1));
        self.prices.get()
    }

    /// How long a hop takes.
    pub fn hop(&self) -> Duration {
        Duration::from_millis(self.random.below(4))
    }

    /// A place within so many bytes.
    pub fn within(&self, bytes: usize) -> usize {
        let bound = u64::try_from(bytes).unwrap_or(u64::MAX).saturating_add(1);
        usize::try_from(self.random.below(bound)).unwrap_or(0)
    }

    /// The objects of a service.
    pub fn objects(&self, side: Side) -> Option<Rc<LocalObjects>> {
        let objects = match side {
            Side::Observer => None,
            Side::Consumer => self.near.get(),
            Side::Producer => self.far.get(),
        };
        objects.and_then(Weak::upgrade)
    }

    /// Carries out what strikes a service or one of its objects; what is left is for whoever asks.
    pub fn strike(
        &self,
        side: Side,
        of: Option<&Rc<LocalRuntime>>,
        fault: Option<Fault>,
    ) -> Option<Fault> {
        match fault? {
            Fault::Crash => self.crash(side),
            Fault::Evict => {
                if let Some(of) = of {
                    of.tell(END_ME);
                }
            }
            Fault::ClockAhead => self.jump(side, JUMP_MS),
            Fault::ClockBack => self.jump(side, -JUMP_MS),
            other => return Some(other),
        }
        None
    }

    fn crash(&self, side: Side) {
        let Some(objects) = self.objects(side) else {
            return;
        };
        let mut sessions = objects.sessions();
        sessions.sort();
        for session in sessions {
            self.end(&objects, &session);
        }
    }

    fn end(&self, objects: &LocalObjects, session: &SessionId) {
        if let Err(error) = objects.evict(session) {
            self.gate.broken(Invariant::Panic, error.to_string());
        }
    }

    fn jump(&self, side: Side, by: i64) {
        let (Some(objects), [near, far]) = (self.objects(side), &self.clocks) else {
            return;
        };
        let clock = if side == Side::Consumer { near } else { far };
        clock.set(clock.get().saturating_add(by));
        objects.put_clock(clock.get());
    }

    fn watch(self: &Rc<Self>, side: Side, objects: &Rc<LocalObjects>, judge: &Rc<Judge>) {
        let entropy = self.clone();
        objects.draw_from(Rc::new(move || entropy.entropy.bits()));
        self.put_on_disk(side, objects, judge);
        let (shared, judge) = (self.clone(), judge.clone());
        objects.on_commit(Rc::new(move |session, moment| {
            if moment == CommitMoment::After {
                let fault = shared.gate.pass(side, Kind::Committed, session);
                judge.committed(side, session);
                shared.at(side, session, fault);
            }
        }));
        let shared = self.clone();
        objects.on_effect(Rc::new(move |session, effect| {
            let kind = match effect {
                Effect::Sleep => Kind::Sleep,
                Effect::SleepOver => Kind::Awake,
                Effect::AlarmSet => Kind::AlarmSet,
                Effect::AlarmRings => Kind::AlarmRings,
                Effect::Told(END_ME) => {
                    shared.at(side, session, Some(Fault::Evict));
                    return;
                }
                Effect::Told(_) => return,
            };
            let fault = shared.gate.pass(side, kind, session);
            shared.at(side, session, fault);
        }));
        let shared = self.clone();
        objects.on_store(Rc::new(move |session, operation, inside| {
            let kind = match (operation, inside) {
                (StoreOperation::Alarm, _) => Kind::Arm,
                (_, true) => Kind::Statement,
                (StoreOperation::Query, false) => Kind::Read,
                (_, false) => Kind::Commit,
            };
            let fault = shared.gate.pass(side, kind, session);
            if shared.gate.is_broken() {
                // Whatever still runs comes to its end here.
                return Err(Error::internal("the run is over"));
            }
            match shared.at(side, session, fault) {
                Some(Fault::Storage) => Err(Error::internal("the disk refuses")),
                _ => Ok(()),
            }
        }));
    }

    fn put_on_disk(self: &Rc<Self>, side: Side, objects: &LocalObjects, judge: &Rc<Judge>) {
        let disk = self.clone();
        let latency = move || Duration::from_millis(disk.disk.below(disk.disk.below(30) + 1));
        let (shared, judge) = (self.clone(), judge.clone());
        objects.put_on_disk(
            Rc::new(latency),
            Rc::new(move |session, moment| {
                judge.on_disk(side, session, moment);
                if moment == DiskMoment::Durable {
                    let fault = shared.gate.pass(side, Kind::Durable, session);
                    shared.at(side, session, fault);
                }
            }),
        );
    }

    /// As [`Self::strike`], of an object by its session.
    fn at(&self, side: Side, session: &SessionId, fault: Option<Fault>) -> Option<Fault> {
        match (fault, self.objects(side)) {
            (Some(Fault::Evict), Some(objects)) => {
                self.end(&objects, session);
                None
            }
            (fault, _) => self.strike(side, None, fault),
        }
    }
}

/// Two services and their mounts.
pub struct World {
    /// What everything shares.
    pub shared: Rc<Shared>,
    /// Who looks after each commit.
    pub judge: Rc<Judge>,
    /// The raw mount, the same for both.
    pub raw: Rc<Mount>,
    /// The projected mount of the consumer.
    pub public: Rc<Mount>,
    _objects: [Rc<LocalObjects>; 2],
}

impl World {
    /// A world in which nothing has happened yet.
    ///
    /// # Errors
    /// When an agent type is malformed.
    pub fn new(plan: &Plan) -> Result<Rc<Self>> {
        let shared = Shared::new(plan);
        let judge = Judge::new(shared.clone());
        let raw = Rc::new(
            Mount::new("/agents")
                .allow_unauthenticated()
                .with_messages(),
        );
        let public = Mount::new("/public")
            .allow_unauthenticated()
            .with_messages()
            .with_projection(Projection {
                name: "how-many/1".into(),
                map: Rc::new(|_, state: &Value| {
                    json!({"notes": state.as_object().map_or(0, serde_json::Map::len)})
                }),
            })
            .with_live_state();
        let far = {
            let shared = shared.clone();
            let make = move |objects: &Rc<LocalObjects>, runtime: &Rc<LocalRuntime>| {
                let inner = Rc::new(ObjectsFetch::new(objects.clone() as Rc<dyn Objects>));
                producers(&shared, inner, runtime)
            };
            LocalObjects::new(BASE, Rc::new(|_, _| {}), Rc::new(make))
        };
        let near = {
            let (shared, far, raw) = (shared.clone(), far.clone(), raw.clone());
            let make = move |_: &Rc<LocalObjects>, runtime: &Rc<LocalRuntime>| {
                let inner = Rc::new(MountFetch::new(raw.clone(), far.clone()));
                consumer(&shared, inner, runtime)
            };
            LocalObjects::new(BASE, Rc::new(|_, _| {}), Rc::new(make))
        };
        shared.watch(Side::Consumer, &near, &judge);
        shared.watch(Side::Producer, &far, &judge);
        drop(shared.near.set(Rc::downgrade(&near)));
        drop(shared.far.set(Rc::downgrade(&far)));
        Ok(Rc::new(Self {
            _objects: [near, far],
            shared,
            judge,
            raw,
            public: Rc::new(public),
        }))
    }

    /// The service that hosts a type.
    #[must_use]
    pub fn side_of(agent_type: &str) -> Side {
        if LEVELS.first() == Some(&agent_type) {
            Side::Consumer
        } else {
            Side::Producer
        }
    }

    /// A way to the mount of the service that hosts a type.
    ///
    /// # Errors
    /// When the objects are gone.
    pub fn honest(&self, agent_type: &str, mount: &Rc<Mount>) -> Result<Rc<dyn Fetch>> {
        let objects = self.shared.objects(Self::side_of(agent_type));
        let objects = objects.ok_or_else(|| Error::internal("no objects"))?;
        Ok(Rc::new(MountFetch::new(mount.clone(), objects)))
    }

    /// The user's line to the service that hosts a type, on which things go wrong.
    ///
    /// # Errors
    /// As [`Self::honest`].
    pub fn line(&self, agent_type: &str) -> Result<Link> {
        Ok(Link {
            inner: self.honest(agent_type, &self.raw)?,
            side: Side::Observer,
            of: None,
            shared: self.shared.clone(),
        })
    }

    /// The user's way to sessions of a type, over such a line.
    ///
    /// # Errors
    /// As [`Self::honest`].
    pub fn to(&self, agent_type: &str) -> Result<HttpTransport> {
        Ok(HttpTransport::new(
            Rc::new(self.line(agent_type)?),
            self.user(),
            "http://service",
            "/agents",
            AgentType::parse(agent_type)?,
        )
        .with_policy(policy(false)))
    }

    /// Ends every object, so that nothing holds the world together any more.
    pub fn close(&self) {
        for side in [Side::Consumer, Side::Producer] {
            if let Some(objects) = self.shared.objects(side) {
                objects.close();
            }
        }
    }

    /// A runtime of the user's.
    #[must_use]
    pub fn user(&self) -> Rc<LocalRuntime> {
        let runtime = LocalRuntime::new(BASE, Rc::new(|_, _| {}));
        let shared = self.shared.clone();
        runtime.draw_from(Rc::new(move || shared.entropy.bits()));
        runtime
    }
}

fn consumer(
    shared: &Rc<Shared>,
    inner: Rc<dyn Fetch>,
    runtime: &Rc<LocalRuntime>,
) -> Result<Agents> {
    let making = Making {
        shared,
        side: Side::Consumer,
        runtime,
    };
    let transport = way(&making, inner, "/agents", "planner")?;
    let child = ("planner", SubLocation::Remote, transport);
    Agents::new([making.agent("root", Some(child))?])
}

fn producers(
    shared: &Rc<Shared>,
    inner: Rc<dyn Fetch>,
    runtime: &Rc<LocalRuntime>,
) -> Result<Agents> {
    let making = Making {
        shared,
        side: Side::Producer,
        runtime,
    };
    let below = |name: &'static str| -> Result<_> {
        Ok((
            name,
            SubLocation::Local,
            way(&making, inner.clone(), "", name)?,
        ))
    };
    Agents::new([
        making.agent("planner", Some(below("researcher")?))?,
        making.agent("researcher", Some(below("clerk")?))?,
        making.agent("clerk", None)?,
    ])
}

fn way(
    making: &Making<'_>,
    inner: Rc<dyn Fetch>,
    base: &str,
    agent_type: &str,
) -> Result<Rc<dyn remote_agents::transport::Transport>> {
    let link = Link {
        inner,
        side: making.side,
        of: Some(making.runtime.clone()),
        shared: making.shared.clone(),
    };
    let transport = HttpTransport::new(
        Rc::new(link),
        making.runtime.clone(),
        "http://service",
        base,
        AgentType::parse(agent_type)?,
    );
    let policy = policy(making.shared.workload.hasty);
    Ok(Rc::new(transport.with_policy(policy)))
}
