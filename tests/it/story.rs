//! The stories, in this process and over HTTP on loopback. In workerd they are told by
//! `miniflare/test/story.test.mjs`.

use std::cell::RefCell;
use std::rc::Rc;

use futures::{StreamExt as _, stream};
use remote_agents::mount::Mount;
use remote_agents::native::{LocalObjects, LocalRuntime, MountFetch, http_transport};
use remote_agents::platform::Runtime;
use remote_agents::protocol::ids::AgentType;
use remote_agents::store::SubLocation;
use remote_agents::transport::{HttpTransport, ObjectsFetch};

use crate::loopback::{Service, on_loopback};
use crate::stories::agents::{PARENT, Way, agents, policy};
use crate::stories::{STORIES, World};
use crate::support::{Lines, in_world};

const START: u64 = 1_700_000_000_000;

/// Objects that host all agents of the stories and reach children over `way`.
pub fn service(way: Way, location: SubLocation) -> Rc<LocalObjects> {
    LocalObjects::new(
        START,
        Lines::default().sink(),
        Rc::new(move |_, runtime| {
            let runtime = runtime.clone() as Rc<dyn Runtime>;
            agents(&way, location, &runtime)
        }),
    )
}

pub fn mount() -> Rc<Mount> {
    Rc::new(Mount::new("/agents").allow_unauthenticated())
}

fn parent() -> AgentType {
    AgentType::parse(PARENT).unwrap()
}

fn over(fetch: Rc<dyn remote_agents::transport::Fetch>, base: &'static str) -> Way {
    Rc::new(move |agent_type, runtime| {
        HttpTransport::new(fetch.clone(), runtime, "http://service", base, agent_type)
    })
}

/// A way that is known only once the objects at its end exist.
fn later() -> (Way, Rc<RefCell<Option<Way>>>) {
    let slot: Rc<RefCell<Option<Way>>> = Rc::default();
    let inside = slot.clone();
    let way: Way = Rc::new(move |agent_type, runtime| {
        let way = inside.borrow().clone().unwrap();
        way(agent_type, runtime)
    });
    (way, slot)
}

fn world(way: &Way, to_parents: &Way) -> World {
    let runtime = LocalRuntime::new(START, Lines::default().sink());
    World {
        parents: Rc::new(to_parents(parent(), runtime.clone()).with_policy(policy())),
        way: way.clone(),
        runtime,
    }
}

/// Tells every story; those at once take as long as the slowest.
async fn tell_all(world: World, at_once: usize) {
    assert!(STORIES.len() > 20);
    let tellings = STORIES.iter().map(|story| {
        let telling = (story.tell)(world.clone());
        async move {
            telling
                .await
                .err()
                .map(|what| format!("{}: {what}", story.name))
        }
    });
    let wrong: Vec<Option<String>> = stream::iter(tellings).buffered(at_once).collect().await;
    let wrong: Vec<String> = wrong.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_stories_hold_between_two_mounts_in_this_process() {
    in_world(|| async {
        let (way, slot) = later();
        let far = service(way.clone(), SubLocation::Remote);
        let near = service(way.clone(), SubLocation::Remote);
        let fetch = |objects| Rc::new(MountFetch::new(mount(), objects));
        *slot.borrow_mut() = Some(over(fetch(far), "/agents"));
        tell_all(world(&way, &over(fetch(near), "/agents")), 1).await;
    });
}

#[test]
fn the_stories_hold_between_the_objects_of_one_service() {
    in_world(|| async {
        let (way, slot) = later();
        let objects = service(way.clone(), SubLocation::Local);
        let direct = over(Rc::new(ObjectsFetch::new(objects)), "");
        *slot.borrow_mut() = Some(direct.clone());
        tell_all(world(&way, &direct), 1).await;
    });
}

#[test]
fn the_stories_hold_over_http_on_loopback() {
    on_loopback(async {
        let (way, slot) = later();
        let far = Service::new(mount(), service(way.clone(), SubLocation::Remote)).await;
        let near = Service::new(mount(), service(way.clone(), SubLocation::Remote)).await;
        let to = |url: String| -> Way {
            Rc::new(move |agent_type, runtime| http_transport(&url, "/agents", agent_type, runtime))
        };
        *slot.borrow_mut() = Some(to(far.url()));
        // All at once: here a wait takes as long as it says.
        tell_all(world(&way, &to(near.url())), STORIES.len()).await;
        assert!(far.answered() > 100, "{} requests crossed", far.answered());
    });
}
