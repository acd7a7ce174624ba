//! Runs seeds.

use sim::{Plan, run};

fn main() {
    let mut args = std::env::args().skip(1);
    let first: u64 = args.next().and_then(|a| a.parse().ok()).unwrap_or(0);
    let many: u64 = args.next().and_then(|a| a.parse().ok()).unwrap_or(10);
    let began = std::time::Instant::now();
    for seed in first..first + many {
        let outcome = run(&Plan::of(seed));
        if let Some(broken) = outcome.broken {
            println!("seed {seed}: {broken}");
            if many == 1 {
                for line in outcome.last { println!("{line}"); }
                println!("{:?}", Plan::of(seed));
            }
        } else if many == 1 { println!("{outcome:?}"); }
    }
    println!("{many} in {:?}", began.elapsed());
}
