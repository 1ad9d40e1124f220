//! Packed sequences to check a backward kernel with: each with its own gradients, and rows between them that nobody may
//! read or write.

use super::{BackwardCase, CheckInputs, Drawn};
use crate::check::{dropout, written};
use crate::guarded::Guarded;
use crate::ragged::Ints;
use crate::reference::{Gradients, RowId, Rows};
use crate::{Device, HostTensor, Layout, Packed, Result, typical_side};
use flashtune_codegen::score::SideData;
use flashtune_codegen::{KvKind, Mask, MaskKind, Problem, Shape};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::fmt;
use std::sync::Arc;

/// Sequences of different lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedBatch {
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// The mask, of the problem's kind.
    pub mask: Mask,
    /// Rows and keys of each sequence.
    pub lengths: Vec<[u32; 2]>,
    /// Rows behind each sequence's that are not used, and behind the last sequence's end.
    pub unused: u32,
    /// By how much the bounds exceed the longest.
    pub spare: u32,
    /// Whether first rows and lengths of Q, and those of K, are of 64 bits.
    pub wide: [bool; 2],
}

impl fmt::Display for PackedBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { heads, kv_heads, mask, lengths, unused, spare, wide } = self;
        write!(f, "h{heads}/{kv_heads} {mask} {lengths:?} unused {unused} spare {spare} wide {wide:?}")
    }
}

impl PackedBatch {
    /// Draws up to `most` sequences of lengths of a list, some of them without rows or keys.
    pub fn random(kind: MaskKind, lengths: &[u32], most: usize, seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let length = |rng: &mut StdRng| if rng.random_bool(0.1) { 0 } else { *lengths.choose(rng).expect("not empty") };
        let sequences = rng.random_range(1..=most);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let reach = |bounded: bool, rng: &mut StdRng| {
            bounded.then(|| *[0, 1, 9, 40, longest / 2, longest * 2, u32::MAX].choose(rng).expect("not empty"))
        };
        let mask = match (kind.left, kind.right) {
            (false, false) => Mask::Full,
            (false, true) if rng.random() => Mask::Causal,
            (left, right) => Mask::Window { left: reach(left, rng), right: reach(right, rng) },
        };
        let kv_heads = rng.random_range(1..=2);
        Self {
            heads: kv_heads * rng.random_range(1..=3),
            kv_heads,
            mask,
            lengths: (0..sequences).map(|_| [length(rng), length(rng)]).collect(),
            unused: *[0, 0, 1, 5].choose(rng).expect("not empty"),
            spare: *[0, 3, 100].choose(rng).expect("not empty"),
            wide: [rng.random(), rng.random()],
        }
    }

    /// The bounds, whatever a sequence has.
    fn bounds(&self) -> Shape {
        let [q_len, kv_len] = [0, 1].map(|i| self.lengths.iter().map(|n| n[i]).max().unwrap_or(0) + self.spare);
        let Self { heads, kv_heads, mask, .. } = *self;
        Shape { batch: self.lengths.len() as u32, heads, kv_heads, q_len, kv_len, mask }
    }
}

/// The rows of one side, queries or keys.
struct Side {
    /// First row of each sequence, and how many are used.
    rows: Vec<[usize; 2]>,
    /// Rows of the pack.
    all: usize,
    /// First rows, and rows that are used: bytes of the arrays, with their memory.
    arrays: [(Vec<u8>, Guarded); 2],
    wide: bool,
}

impl Side {
    fn new(device: &dyn Device, batch: &PackedBatch, side: usize) -> Result<Self> {
        let (mut rows, mut all) = (Vec::new(), 0);
        for lengths in &batch.lengths {
            rows.push([all, lengths[side] as usize]);
            all += (lengths[side] + batch.unused) as usize;
        }
        let wide = batch.wide[side];
        let array = |name, numbers: Vec<usize>| {
            let bytes: Vec<u8> = match wide {
                true => numbers.iter().flat_map(|n| (*n as i64).to_ne_bytes()).collect(),
                false => numbers.iter().flat_map(|n| (*n as i32).to_ne_bytes()).collect(),
            };
            Guarded::new(device, name, &bytes).map(|memory| (bytes, memory))
        };
        let begin = array(["q_begin", "kv_begin"][side], rows.iter().map(|r| r[0]).chain([all]).collect())?;
        let used = array(["q_used", "kv_used"][side], rows.iter().map(|r| r[1]).collect())?;
        Ok(Self { rows, all: all + batch.unused as usize, arrays: [begin, used], wide })
    }

    fn ints(&self) -> [Ints; 2] {
        [0, 1].map(|i| match (self.wide, self.arrays[i].1.address()) {
            (true, address) => Ints::i64(address),
            (false, address) => Ints::i32(address),
        })
    }

    /// Each sequence's own tensor into one, whose other rows are NaN.
    fn join(&self, tensors: &[&HostTensor], layout: Layout) -> HostTensor {
        let [_, heads, _, dim] = tensors[0].shape();
        let mut to = HostTensor::poisoned(tensors[0].dtype(), [1, heads, self.all, dim], layout);
        let mut row = vec![0.0; dim];
        for (tensor, [first, rows]) in tensors.iter().zip(&self.rows) {
            for at in (0..heads).flat_map(|h| (0..*rows).map(move |i| [0, h, i])) {
                tensor.read_row(at, &mut row);
                to.write_row([0, at[1], first + at[2]], &row);
            }
        }
        to
    }

    /// The sequences of a tensor as its batch: [`Side::join`] the other way round.
    fn part(&self, tensor: &HostTensor) -> HostTensor {
        let [_, heads, _, dim] = tensor.shape();
        let longest = self.rows.iter().map(|r| r[1]).max().unwrap_or(0);
        let mut to = HostTensor::zeros(tensor.dtype(), [self.rows.len(), heads, longest, dim], Layout::Bhsd);
        let mut row = vec![0.0; dim];
        for (b, [first, rows]) in self.rows.iter().enumerate() {
            for (h, i) in (0..heads).flat_map(|h| (0..*rows).map(move |i| (h, i))) {
                tensor.read_row([0, h, first + i], &mut row);
                to.write_row([b, h, i], &row);
            }
        }
        to
    }
}

/// Where the rows of sequences lie.
pub(super) struct PackedRows {
    sides: [Side; 2],
    /// Whether the used rows are told beside the first ones.
    says_used: bool,
}

impl PackedRows {
    fn side(&self, gradient: &str) -> &Side {
        &self.sides[usize::from(gradient != "dq")]
    }

    /// As a call takes it.
    pub(super) fn arrays(&self, bounds: &Shape) -> Packed {
        let [[q_begin, q_used], [kv_begin, kv_used]] = [self.sides[0].ints(), self.sides[1].ints()];
        let [q_used, kv_used] = [q_used, kv_used].map(|used| self.says_used.then_some(used));
        let [batch, max_q, max_kv] = [bounds.batch, bounds.q_len, bounds.kv_len].map(u64::from);
        Packed { batch, q_begin, kv_begin, q_used, kv_used, max_q, max_kv }
    }

    /// What was written in the arrays or around them.
    pub(super) fn changed(&self, device: &dyn Device) -> Result<Option<String>> {
        for (bytes, memory) in self.sides.iter().flat_map(|side| &side.arrays) {
            let changed = memory.changed(device, bytes, device.stream())?;
            if changed.is_some() {
                return Ok(changed);
            }
        }
        Ok(None)
    }

    /// What was written of a gradient in rows that belong to no sequence.
    pub(super) fn unowned(&self, gradient: &str, tensor: &HostTensor) -> Option<String> {
        let [_, heads, rows, dim] = tensor.shape();
        let side = self.side(gradient);
        let owned = |row: usize| side.rows.iter().any(|[first, rows]| (*first..first + rows).contains(&row));
        let touched = |h: usize, row: usize| {
            let at = tensor.offset([0, h, row, 0]);
            written(&tensor.bytes()[at..at + dim * tensor.dtype().bytes()]).is_some()
        };
        let unowned = (0..rows).filter(|row| !owned(*row)).collect::<Vec<_>>();
        let mut found =
            (0..heads).flat_map(|h| unowned.iter().map(move |row| (h, *row))).filter(|at| touched(at.0, at.1));
        found
            .next()
            .map(|(h, row)| format!("row {row} of {gradient}, head {h}, belongs to no sequence and was written"))
    }

    /// A gradient with the sequences as its batch.
    pub(super) fn apart(&self, gradient: &str, tensor: &HostTensor) -> HostTensor {
        self.side(gradient).part(tensor)
    }
}

impl BackwardCase {
    /// [`BackwardCase::new`] for packed sequences. Rows that belong to none are NaN, and must stay what they are.
    ///
    /// # Errors
    /// As [`BackwardCase::new`].
    pub fn packed(
        device: Arc<dyn Device>,
        problem: &Problem,
        batch: &PackedBatch,
        inputs: &CheckInputs,
    ) -> Result<Self> {
        let bounds = batch.bounds();
        crate::check::same_kind(problem, &bounds)?;
        let data = problem.program.map_or(SideData::default(), |p| typical_side(&p, &bounds, inputs.seed));
        let sides = [Side::new(&*device, batch, 0)?, Side::new(&*device, batch, 1)?];
        let dense = problem.with_kv(KvKind::Dense);
        let dropout = dropout::mask(problem, inputs.seed);
        let mut each: Vec<Drawn> = Vec::new();
        for (b, [q_len, kv_len]) in (0..).zip(&batch.lengths) {
            let shape = Shape { batch: 1, q_len: *q_len, kv_len: *kv_len, ..bounds };
            let seed = inputs.seed.wrapping_add(u64::from(b) * 1_000_003);
            let inputs = CheckInputs { seed, layout: Layout::Bhsd, ..*inputs };
            each.push(Drawn::new(&dense, &shape, &inputs, &data, b, dropout, problem.residual && dropout.is_none()));
        }
        let of_queries = [true, true, false, false, true, true, true];
        let tensors = (0..each[0].tensors.len()).map(|i| {
            let layout = if i < 5 { inputs.layout } else { Layout::Bhsd };
            let parts: Vec<&HostTensor> = each.iter().map(|drawn| &drawn.tensors[i]).collect();
            sides[usize::from(!of_queries[i])].join(&parts, layout)
        });
        let tensors = tensors.collect();
        let residuals: Vec<&HostTensor> = each.iter().filter_map(|drawn| drawn.residual.as_ref()).collect();
        let residual = (!residuals.is_empty()).then(|| sides[0].join(&residuals, inputs.layout));
        let peaked = each.iter().flat_map(|drawn| drawn.peaked.iter().copied()).collect();
        let (mut oracle, mut unfused) = (Gradients::default(), Gradients::default());
        for (b, drawn) in (0..).zip(each) {
            append(&mut oracle, drawn.oracle, b);
            append(&mut unfused, drawn.unfused, b);
        }
        let rows = PackedRows { sides, says_used: batch.unused > 0 };
        Self::place(
            device,
            problem,
            &bounds,
            inputs,
            &data,
            Drawn { tensors, oracle, unfused, residual, peaked },
            Some(rows),
        )
    }
}

/// The gradients of a sequence behind those of the ones before.
fn append(to: &mut Gradients, from: Gradients, sequence: u32) {
    let put = |to: &mut Rows, from: Rows| {
        to.dim = from.dim;
        to.ids.extend(from.ids.into_iter().map(|id| RowId { batch: sequence, ..id }));
        to.o.extend(from.o);
        to.lse.extend(from.lse);
        to.scales.extend(from.scales);
    };
    put(&mut to.dq, from.dq);
    put(&mut to.dk, from.dk);
    put(&mut to.dv, from.dv);
    put(&mut to.o, from.o);
}
