//! What a ragged batch gives: each sequence's attention by the reference, on its own gathered and widened keys.

use super::batch::RaggedBatch;
use super::data::QueryRows;
use crate::Verdict;
use crate::check::dropout::of_host as dropout_of;
use crate::reference::{
    Attention, HostTensor, Layout, RowId, Rows, compare_rows, e4m3, oracle_of, sample_rows, unfused_rows_of,
};
use flashtune_codegen::abi::RaggedArgs;
use flashtune_codegen::score::{Elements, Program, ProgramBuilder, SideData};
use flashtune_codegen::{DType, KvElement, Problem, Shape};

/// Rows of a batch that are compared at least, where it has so many.
const LEAST_ROWS: usize = 512;

/// One sequence as dense tensors of a batch of one.
pub(super) struct SequenceInputs {
    pub(super) q: HostTensor,
    pub(super) k: HostTensor,
    pub(super) v: HostTensor,
    /// Which keys are in a page that kernels are told of.
    pub(super) there: Vec<bool>,
}

/// The rows that are compared, and where all that are written lie.
#[derive(Default)]
pub(super) struct Expected {
    oracle: Rows,
    unfused: Rows,
    /// Element of O and of the log-sum-exp for each row of `oracle`.
    places: Vec<[usize; 2]>,
    /// Those of all rows.
    written: Vec<[usize; 2]>,
    lse_unit: f32,
    lse_empty: f32,
}

impl Expected {
    #[allow(clippy::too_many_arguments, reason = "all that a batch is made of, once")]
    pub(super) fn of(
        problem: &Problem,
        batch: &RaggedBatch,
        bounds: &Shape,
        args: &RaggedArgs,
        data: &SideData,
        queries: &QueryRows,
        inputs: Vec<SequenceInputs>,
        most: f64,
    ) -> Self {
        let mut all = Self { lse_unit: args.lse_unit, lse_empty: args.lse_empty, ..Self::default() };
        for rows in [&mut all.oracle, &mut all.unfused] {
            rows.dim = problem.head_dim_v as usize;
        }
        let work = |[rows, keys]: [u32; 2]| {
            f64::from(batch.heads)
                * f64::from(rows)
                * f64::from(keys)
                * f64::from(problem.head_dim_qk + problem.head_dim_v)
        };
        // Of each sequence some, of very many fewer.
        let least = (LEAST_ROWS / batch.lengths.len().max(1)).clamp(2, 16) as f64;
        let total: f64 = batch.lengths.iter().map(|lengths| work(*lengths)).sum();
        let dropout = dropout_of(problem, batch.seed).map(|dropout| dropout.mask([0; 2]));
        for (b, SequenceInputs { q, k, v, there }) in inputs.into_iter().enumerate() {
            let [q_len, kv_len] = batch.lengths[b];
            let shape = Shape { batch: 1, q_len, kv_len, ..*bounds };
            let rows = f64::from(batch.heads) * f64::from(q_len);
            let ids = sample_rows(&shape, (rows * (most / total).min(1.0)).ceil().max(least) as usize, batch.seed);
            let masked = there.contains(&false).then(|| masked_program(problem, data, &there));
            let program = match &masked {
                Some((program, data)) => Some((program, data)),
                None => problem.program.as_deref().map(|program| (program, data)),
            };
            let attention = Attention { mask: batch.mask, scale: args.scale, program, sequence: b as u32, dropout };
            let oracle = oracle_of(&q, &k, &v, &attention, &ids);
            // Quantised stores are measured by attention in f16 on what they stand for; beside e4m3 queries by an
            // emulation that rounds P.
            let quantised = problem.kv.store().is_some_and(|store| store.element != KvElement::Same);
            let narrow = quantised.then(|| HostTensor::from_values(DType::F16, q.shape(), Layout::Bhsd, &q.values()));
            let unfused = match problem.dtype {
                DType::E4m3 => e4m3::emulated([&q, &k, &v], &attention, problem.output_dtype(), &oracle),
                _ => unfused_rows_of(narrow.flatten().as_ref().unwrap_or(&q), &k, &v, &attention, &ids),
            };
            let place = |head: u32, row: u32| {
                [&args.o_stride, &args.lse_stride].map(|stride| queries.offset(stride, b, head as usize, row as usize))
            };
            all.places.extend(ids.iter().map(|id| place(id.head, id.row)));
            all.written.extend((0..batch.heads).flat_map(|h| (0..q_len).map(move |row| place(h, row))));
            for (to, from) in [(&mut all.oracle, oracle), (&mut all.unfused, unfused)] {
                to.ids.extend(from.ids.into_iter().map(|id| RowId { batch: b as u32, ..id }));
                to.o.extend(from.o);
                to.lse.extend(from.lse);
                to.scales.extend(from.scales);
            }
        }
        all
    }

    pub(super) fn rows(&self) -> usize {
        self.places.len()
    }

    pub(super) fn is_finite(&self) -> bool {
        self.oracle.o.iter().all(|x| x.is_finite())
    }

    /// Compares bytes of O and of the log-sum-exp, and tells what was written besides.
    pub(super) fn compare(
        &self,
        problem: &Problem,
        args: &RaggedArgs,
        o: &[u8],
        lse: Option<&[u8]>,
    ) -> (Verdict, Option<String>) {
        let (dim, dtype) = (self.oracle.dim, problem.output_dtype());
        let row_bytes = dim * dtype.bytes();
        let nth = |id: &RowId| self.oracle.ids.binary_search(id).expect("a row of the oracle");
        let read = |id: &RowId, to: &mut [f32]| {
            let at = self.places[nth(id)][0] * dtype.bytes();
            crate::reference::decode(dtype, &o[at..at + row_bytes], to);
        };
        // As the comparison takes it: contiguous, of base e, -inf for rows without keys.
        let rows = self.oracle.ids.iter().map(|id| id.row as usize + 1).max().unwrap_or(0);
        let (heads, batch) = (args.heads as usize, args.batch as usize);
        let natural = lse.map(|bytes| {
            let mut natural = vec![f32::NAN; batch * heads * rows];
            for (i, id) in self.oracle.ids.iter().enumerate() {
                let at = self.places[i][1] * 4;
                let got = f32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
                let empty = self.oracle.lse[i] == f64::NEG_INFINITY;
                let to = &mut natural[(id.batch as usize * heads + id.head as usize) * rows + id.row as usize];
                *to = match (empty, got.to_bits() == self.lse_empty.to_bits()) {
                    (true, true) => f32::NEG_INFINITY,
                    (true, false) => f32::NAN,
                    (false, _) => got / self.lse_unit,
                };
            }
            natural
        });
        let lse_rows = natural.as_deref().map(|lse| (lse, [heads, rows]));
        let verdict = match problem.dtype {
            DType::E4m3 => e4m3::compare_rows(dtype, &read, lse_rows, &self.oracle, &self.unfused),
            _ => compare_rows(dtype, &read, lse_rows, &self.oracle, &self.unfused),
        };
        let stray = self.stray(o, 0, row_bytes, dtype.bytes(), "o");
        (verdict, stray.or_else(|| self.stray(lse?, 1, 4, 4, "lse")))
    }

    /// What was written outside of the rows that sequences have.
    fn stray(&self, bytes: &[u8], nth: usize, row: usize, size: usize, name: &str) -> Option<String> {
        let mut rest = bytes.to_vec();
        for place in &self.written {
            rest[place[nth] * size..place[nth] * size + row].fill(crate::guarded::POISON);
        }
        let at = super::super::written(&rest)?;
        Some(format!("byte {at} of {name} was written, which is in no row of any sequence"))
    }
}

/// The problem's program with a mask of keys that are not there.
fn masked_program(problem: &Problem, data: &SideData, there: &[bool]) -> (Program, SideData) {
    let own = problem.program.map_or(Ok(ProgramBuilder::new()), |p| ProgramBuilder::new().text(p.text()));
    let both = own.and_then(|own| own.text("ft_there: bool[kv_len]; mask = ft_there[kv];"));
    let program = both.and_then(ProgramBuilder::build).expect("a program with one more mask");
    (program, data.clone().tensor("ft_there", &[there.len()], Elements::Bool(there.to_vec())))
}
