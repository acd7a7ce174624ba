//! Random numbers that are the same for the same seed.

use std::cell::Cell;

/// A generator of numbers (SplitMix64); shared by reference.
#[derive(Debug)]
pub struct Random(Cell<u64>);

impl Random {
    /// The numbers of a seed, for one purpose: another purpose has others.
    #[must_use]
    pub fn of(seed: u64, purpose: u64) -> Self {
        let random = Self(Cell::new(
            seed ^ purpose.wrapping_mul(0xd1b5_4a32_d192_ed03),
        ));
        random.next();
        random
    }

    /// The next number.
    pub fn next(&self) -> u64 {
        let state = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(state);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 where there is none.
    pub fn below(&self, bound: u64) -> u64 {
        self.next().checked_rem(bound).unwrap_or(0)
    }

    /// Whether something happens that does so in `percent` of a hundred cases.
    pub fn chance(&self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of a few.
    pub fn one_of<'a, T>(&self, choices: &'a [T]) -> Option<&'a T> {
        let at = self.below(u64::try_from(choices.len()).unwrap_or(u64::MAX));
        choices.get(usize::try_from(at).unwrap_or(usize::MAX))
    }

    /// 128 bits.
    pub fn bits(&self) -> [u8; 16] {
        let high = u128::from(self.next());
        ((high << 64) | u128::from(self.next())).to_be_bytes()
    }
}
