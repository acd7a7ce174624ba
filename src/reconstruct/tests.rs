//! Random trees under random observers, and the sentences of section 6 one by one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

mod cases;
mod filter_vectors;
mod model;
mod projected;
mod sentences;
mod steps;
mod vectors;
mod world;

use world::{Observer, World};

/// The random sessions of a test: `many`, as many as `RECONSTRUCT_SEEDS` says, or the one of
/// `RECONSTRUCT_SEED`.
fn seeds(many: u64) -> std::ops::RangeInclusive<u64> {
    let told = |name| std::env::var(name).ok()?.parse().ok();
    let seeds = match told("RECONSTRUCT_SEED") {
        Some(seed) => seed..=seed,
        None => 1..=told("RECONSTRUCT_SEEDS").unwrap_or(many),
    };
    println!("seeds {seeds:?}");
    seeds
}

fn watch(stamped: bool) {
    for seed in seeds(1200) {
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
                    observers.push(Observer::new(&mut world, root, false));
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
        assert!(
            told.is_ok(),
            "seed {seed}, see above; RECONSTRUCT_SEED={seed} cargo test --lib reconstruct"
        );
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
