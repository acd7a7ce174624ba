//! Random trees under random observers, and the sentences of section 6 one by one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

mod projected;
mod sentences;
mod steps;
mod vectors;
mod world;

use world::{Observer, World};

/// How many random trees a run looks at; `RECONSTRUCT_SEEDS` asks for more.
fn seeds() -> u64 {
    std::env::var("RECONSTRUCT_SEEDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(150)
}

fn watch(stamped: bool) {
    for seed in 1..=seeds() {
        let told = std::panic::catch_unwind(|| {
            let mut world = World::new(seed, stamped);
            let mut observers: Vec<Observer> = Vec::new();
            for tick in 0..100_000 {
                if world.is_over() {
                    break;
                }
                world.tick();
                if tick % 40 == 0 && observers.len() < 4 {
                    let root = usize::try_from(world.random.below(3)).unwrap();
                    observers.push(Observer::new(&mut world, root));
                }
                for observer in &mut observers {
                    observer.tick(&mut world);
                }
            }
            assert!(world.is_over(), "the tree comes to its end");
            for observer in &mut observers {
                observer.finish(&mut world);
            }
        });
        assert!(told.is_ok(), "seed {seed}: see the panic above");
    }
}

#[test]
fn an_exact_document_equals_a_committed_boundary_whatever_was_cut_or_late() {
    watch(true);
}

#[test]
fn so_it_does_where_producers_stamp_neither_origin_nor_ordinal() {
    watch(false);
}
