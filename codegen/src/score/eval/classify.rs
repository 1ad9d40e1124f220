//! The tiles of one head on the host: for tile maps, for tests, and for what visits live tiles only.

use super::data::SideData;
use super::interp::{At, Evaluator, Precision};
use crate::Shape;
use crate::score::analysis::tile::{TileKind, TileProgram};
use crate::score::program::Program;
use crate::score::syntax::error::ProgramError;
use std::ops::Range;

/// A tile program with sizes and side data.
pub struct Classifier<'a> {
    tiles: &'a TileProgram,
    evaluator: Evaluator<'a>,
    sizes: Shape,
}

/// Neighbouring key blocks of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visit {
    /// The keys.
    pub keys: Range<u32>,
    /// Whether each needs the mask.
    pub mixed: bool,
}

impl<'a> Classifier<'a> {
    /// Checks the data against the program that the tiles are of, and gets ready to classify.
    ///
    /// # Errors
    /// As [`SideData::check`].
    pub fn new(
        program: &Program,
        tiles: &'a TileProgram,
        sizes: &Shape,
        data: &'a SideData,
    ) -> Result<Self, ProgramError> {
        data.check(program, sizes)?;
        let roots = [tiles.all_masked, tiles.all_visible, tiles.kv_begin, tiles.kv_end];
        let evaluator = Evaluator::new(&tiles.graph, &roots, sizes, data, Precision::F32);
        Ok(Self { tiles, evaluator, sizes: *sizes })
    }

    fn go(&mut self, b: u32, h: u32, q: &Range<u32>, kv: &Range<u32>) {
        let last = |r: &Range<u32>| r.end as i64 - 1;
        let tile = [q.start.into(), last(q), kv.start.into(), last(kv)];
        self.evaluator.go(At { b, h, q: q.start, kv: kv.start }, tile, 0.0);
    }

    /// What the mask does to a tile, which has a row and a key at least.
    pub fn kind(&mut self, b: u32, h: u32, q: &Range<u32>, kv: &Range<u32>) -> TileKind {
        self.go(b, h, q, kv);
        match (self.evaluator.bool(self.tiles.all_masked), self.evaluator.bool(self.tiles.all_visible)) {
            (true, _) => TileKind::Masked,
            (false, true) => TileKind::Visible,
            (false, false) => TileKind::Mixed,
        }
    }

    /// The keys that some rows can see at most.
    pub fn keys(&mut self, b: u32, h: u32, q: &Range<u32>) -> Range<u32> {
        self.go(b, h, q, &(0..1));
        let clamp = |x: i64| x.clamp(0, self.sizes.kv_len as i64) as u32;
        let begin = clamp(self.evaluator.int(self.tiles.kv_begin));
        begin..clamp(self.evaluator.int(self.tiles.kv_end)).max(begin)
    }

    /// The key blocks that some rows visit, in order, neighbours of one kind joined. Blocks start at multiples of
    /// `block`.
    pub fn visits(&mut self, b: u32, h: u32, q: &Range<u32>, block: u32) -> Vec<Visit> {
        let keys = self.keys(b, h, q);
        let mut visits: Vec<Visit> = Vec::new();
        let mut start = keys.start - keys.start % block;
        while start < keys.end {
            let kv = start..self.sizes.kv_len.min(start.saturating_add(block));
            start = start.saturating_add(block);
            let kind = self.kind(b, h, q, &kv);
            if kind == TileKind::Masked {
                continue;
            }
            let mixed = kind == TileKind::Mixed;
            match visits.last_mut().filter(|v| v.keys.end == kv.start && v.mixed == mixed) {
                Some(last) => last.keys.end = kv.end,
                None => visits.push(Visit { keys: kv, mixed }),
            }
        }
        visits
    }

    /// The kinds of all tiles of one head, one row of tiles after the other.
    pub fn map(&mut self, b: u32, h: u32, block_q: u32, block_kv: u32) -> Vec<Vec<TileKind>> {
        let blocks = |n: u32, block: u32| {
            (0..n).step_by(block as usize).map(move |start| start..n.min(start.saturating_add(block)))
        };
        let sizes = self.sizes;
        blocks(sizes.q_len, block_q)
            .map(|q| blocks(sizes.kv_len, block_kv).map(|kv| self.kind(b, h, &q, &kv)).collect())
            .collect()
    }
}
