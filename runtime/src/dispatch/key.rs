//! What calls have in common that run on one plan.

use flashtune_codegen::{Constraints, Problem, ShapeBucket};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A class of calls: what is computed, on about which sizes, and what is asked of the kernel beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PlanKey {
    pub problem: Problem,
    pub bucket: ShapeBucket,
    /// Those that make a difference on the arch.
    pub demands: Constraints,
}

/// Something for every class.
pub(super) type ByClass<T> = HashMap<PlanKey, T, BuildHasherDefault<Mix>>;

/// A hash for keys of a few words that nobody chooses to collide: sizes of one process's own calls.
#[derive(Default)]
pub(super) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(n.into());
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(n.into());
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(23) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn write_isize(&mut self, n: isize) {
        self.write_u64(n as u64);
    }
}
