//! Where the tensors of a random append lie: one after the other in one piece of memory, between guards.

use super::numbers::rounded;
use crate::guarded::{GUARD, UNWRITTEN_CODE};
use crate::ragged::{IntKind, Ints, Scales, StoreRows, StoreType};
use flashtune_codegen::DType;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// The tensors of a case, laid into memory one after the other.
pub(super) struct Layout {
    pub rng: StdRng,
    pub base: u64,
    pub memory: Vec<u8>,
}

impl Layout {
    pub(crate) fn draw<T: Copy>(&mut self, of: &[T]) -> T {
        *of.choose(&mut self.rng).expect("a choice")
    }

    pub(crate) fn chance(&mut self, p: f64) -> bool {
        self.rng.random_bool(p)
    }

    /// Room between guards, often on the 16-byte grid: its place in memory.
    pub(crate) fn room(&mut self, bytes: usize, element: usize) -> usize {
        let off_grid = if self.chance(0.2) { element } else { 0 };
        let at = (self.memory.len() + GUARD).next_multiple_of(64) + off_grid;
        self.memory.resize(at + bytes + GUARD, UNWRITTEN_CODE);
        at
    }

    pub(crate) fn address(&self, at: usize) -> u64 {
        self.base + at as u64
    }

    pub(crate) fn ints(&mut self, kind: IntKind, values: &[i64]) -> Ints {
        let at = self.room(values.len() * kind.bytes() as usize, 8);
        for (i, value) in values.iter().enumerate() {
            let bytes = kind.bytes() as usize;
            self.memory[at + i * bytes..][..bytes].copy_from_slice(&value.to_ne_bytes()[..bytes]);
        }
        Ints { address: self.address(at), kind }
    }

    pub(crate) fn floats(&mut self, values: &[f32]) -> usize {
        let at = self.room(values.len() * 4, 4);
        for (i, value) in values.iter().enumerate() {
            self.memory[at + 4 * i..][..4].copy_from_slice(&value.to_ne_bytes());
        }
        at
    }

    /// Rows `[batch, rows, heads, dim]` or `[batch, heads, rows, dim]`, with numbers of all kinds.
    pub(crate) fn rows(&mut self, dtype: DType, [batch, rows, heads, dim]: [usize; 4]) -> (usize, [i64; 3]) {
        let padded = dim + self.draw(&[0, 0, 8, 3]);
        let (strides, count) = match self.chance(0.7) {
            true => ([rows * heads * padded, padded, heads * padded], batch * rows * heads * padded),
            false => ([rows * heads * padded, rows * padded, padded], batch * rows * heads * padded),
        };
        let size = dtype.bytes();
        let at = self.room(count * size, size);
        let odd = self.chance(0.3);
        for i in 0..count {
            let mut x: f64 = self.rng.random_range(-4.0..4.0);
            if odd && self.chance(0.05) {
                x = self.draw(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e4, -3e4, 0.0, -0.0, 1e-6]);
            }
            let bits = rounded(StoreType::Float(dtype), x);
            self.memory[at + i * size..][..size].copy_from_slice(&bits);
        }
        (at, strides.map(|s| s as i64))
    }
}

/// K or V of the store: where it lies, and its strides with that along a row.
pub(super) struct StoreSide {
    pub at: usize,
    pub rows: StoreRows,
    pub piece: i64,
    pub inner: i64,
    pub scale: Option<usize>,
}

impl StoreSide {
    pub(crate) fn element(&self, page: i64, token: i64, head: i64, column: i64) -> usize {
        let [of_page, of_token, of_head] = self.rows.strides;
        let inner = column / self.piece * self.inner + column % self.piece;
        let n = page * of_page + token * of_token + head * of_head + inner;
        self.at + n as usize * self.rows.element.bytes()
    }

    /// Where a row's scale lies.
    pub(crate) fn scale_at(&self, sequence: i64, page: i64, token: i64, head: i64) -> Option<usize> {
        let n = match self.rows.scales {
            Scales::One => return None,
            Scales::PerHead { strides: [s, h], .. } => sequence * s + head * h,
            Scales::PerToken { strides: [p, h, t], .. } => page * p + head * h + token * t,
        };
        Some(self.scale? + 4 * n as usize)
    }
}
