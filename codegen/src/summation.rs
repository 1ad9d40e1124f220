//! How the gradient of what a score program reads is summed over the places that read it.
//!
//! A place is a sequence, a query head, a query and a key, or, of a sink, the first three. Which of these coordinates
//! an element of the tensor belongs to alone divides the places into groups, whose elements are different ones: for a
//! bias `[q, kv]` a group is a tile of queries and keys with all sequences and heads, for a slope `[h]` a head. Few
//! groups are split, with partial sums for each part, which are added up in their order. All of it follows from the
//! sizes, so the same call gives the same bytes.

use crate::abi::keeps;
use crate::score::{ByTensor, Derivative, Var};
use crate::{Error, Problem, Result, Shape};

/// Groups and parts of groups that are wanted, so that a large device is full several times over.
const WANTED: u64 = 1024;
/// Bytes that the partial sums of split groups take at most; of groups that are not split, 4 for an element.
const MOST_SPLIT_BYTES: u64 = 64 << 20;
/// Rows of a tile by which splits are counted, whatever a kernel's own are: results do not depend on those.
const TILE: u32 = 64;

/// How one gradient is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summation {
    /// Bits of [`keeps`].
    pub keeps: i32,
    /// Parts of a group.
    pub splits: u32,
    /// Whether every pair of a query and a key has an element of its own, in a tensor that has no other.
    pub direct: bool,
    /// Elements of the tensor.
    pub elements: u64,
}

impl Summation {
    /// For a tensor of some lengths, which fit its declaration ([`crate::score::check_shape`]); none of a scalar.
    ///
    /// # Errors
    /// A problem that is not one of a gradient, and a tensor of 2^31 elements that are not those of pairs.
    pub fn of(problem: &Problem, shape: &Shape, lengths: &[u32]) -> Result<Self> {
        let (Some(program), Some(by)) = (problem.program, problem.by) else {
            let limit = "the gradient of a tensor or scalar of its score program";
            return Err(Error::unsupported("op", problem.op, limit, "use `Problem::gradient_by`"));
        };
        let loads = Derivative::of_score(&program).by(by.into()).tensors;
        let sinks = Derivative::of_sink(&program).map_or(Vec::new(), |d| d.by(by.into()).tensors);
        let is_of_sink = !sinks.is_empty();
        let all: Vec<&ByTensor> = loads.iter().chain(&sinks).collect();
        // The axis that is a coordinate's in every place that reads the tensor.
        let axis_of = |var: Var, rows: u32| {
            let is_its = |axis: &usize| !all.is_empty() && all.iter().all(|l| l.coordinate(*axis) == Some(var));
            (0..lengths.len()).find(|axis| lengths[*axis] >= rows && is_its(axis))
        };
        let [batch, heads, kv_heads, queries, keys] = [
            axis_of(Var::B, shape.batch),
            axis_of(Var::H, shape.heads),
            axis_of(Var::HKv, shape.kv_heads),
            axis_of(Var::Q, shape.q_len),
            axis_of(Var::Kv, shape.kv_len),
        ];
        let bit = |kept: bool, bit: i32| if kept { bit } else { 0 };
        let keeps = bit(batch.is_some(), keeps::BATCH)
            | bit(heads.is_some() || kv_heads.is_some(), keeps::KV_HEADS)
            | bit(heads.is_some(), keeps::MEMBERS)
            | bit(queries.is_some(), keeps::QUERIES)
            | bit(keys.is_some(), keeps::KEYS);
        let elements = lengths.iter().map(|n| u64::from(*n)).product::<u64>();
        // One place that reads, by axes that are a kept coordinate's, as long as that, or of one element.
        let is_exact = |axis: usize| {
            let kept = [
                (batch, shape.batch),
                (heads, shape.heads),
                (kv_heads, shape.kv_heads),
                (queries, shape.q_len),
                (keys, shape.kv_len),
            ];
            lengths[axis] == 1 || kept.contains(&(Some(axis), lengths[axis]))
        };
        let direct = loads.len() == 1
            && !is_of_sink
            && !shape.is_empty()
            && queries.is_some()
            && keys.is_some()
            && (0..lengths.len()).all(is_exact);
        if !direct && elements >= 1 << 31 {
            let limit = "fewer than 2^31 elements, unless each belongs to one query and one key";
            let remedy = "index it by coordinates alone (`t[b, h, q, kv]`), or split it";
            return Err(Error::unsupported("the tensor's elements", elements, limit, remedy));
        }
        let tiles = |rows: u32| u64::from(rows.div_ceil(TILE));
        let counts = [
            (keeps::BATCH, u64::from(shape.batch)),
            (keeps::KV_HEADS, u64::from(shape.kv_heads)),
            (keeps::MEMBERS, u64::from(shape.group())),
            (keeps::QUERIES, tiles(shape.q_len)),
            (keeps::KEYS, if loads.is_empty() { 0 } else { tiles(shape.kv_len) } + u64::from(is_of_sink)),
        ];
        let product = |kept: bool| {
            let counts = counts.iter().filter(|(bit, _)| (keeps & bit != 0) == kept);
            counts.map(|(_, n)| *n).fold(1u64, u64::saturating_mul)
        };
        let room = MOST_SPLIT_BYTES / (4 * elements.max(1));
        let splits =
            if direct { 1 } else { WANTED.div_ceil(product(true).max(1)).min(product(false)).min(room).max(1) };
        Ok(Self { keeps, splits: splits as u32, direct, elements })
    }

    /// Bytes of partial sums.
    pub fn scratch_bytes(&self) -> u64 {
        if self.direct { 0 } else { 4 * u64::from(self.splits) * self.elements }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::keeps::{BATCH, KEYS, KV_HEADS, MEMBERS, QUERIES};
    use crate::score::Program;
    use crate::{DType, Mask, MaskKind};

    fn shape() -> Shape {
        Shape { batch: 3, heads: 8, kv_heads: 2, q_len: 256, kv_len: 640, mask: Mask::Full }
    }

    fn summation(text: &str, lengths: &[u32]) -> Summation {
        let problem = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap();
        let problem = problem.with_program(Program::parse(text).unwrap()).gradient_by("t").unwrap();
        Summation::of(&problem, &shape(), lengths).unwrap()
    }

    #[test]
    fn coordinates_of_an_element_alone_divide_the_places() {
        let heads = KV_HEADS | MEMBERS;
        for (text, lengths, keeps, direct) in [
            ("t[b, h, q, kv]", &[3, 8, 256, 640][..], BATCH | heads | QUERIES | KEYS, true),
            ("t[b, h, q, kv]", &[1, 1, 256, 640], QUERIES | KEYS, true),
            ("t[b, h, q, kv]", &[3, 8, 1, 640], BATCH | heads | KEYS, false),
            ("t[h_kv, q, kv]", &[2, 256, 640], KV_HEADS | QUERIES | KEYS, true),
            ("t[q, kv]", &[300, 640], QUERIES | KEYS, false),
            ("t[q, kv]", &[100, 640], KEYS, false),
            ("t[q, kv] * t[q, kv]", &[256, 640], QUERIES | KEYS, true),
            ("t[q, kv] + t[kv, q]", &[640, 640], 0, false),
            ("t[h, min(abs(q - kv), 31)]", &[8, 32], heads, false),
            ("t[h, q]; sink = t[h, 0]", &[8, 256], heads, false),
            ("t[b]", &[3], BATCH, false),
        ] {
            let axes = vec!["*"; lengths.len()].join(", ");
            let text = format!("t: float[{axes}]; score = score + {text};");
            let got = summation(&text, lengths);
            assert_eq!((got.keeps, got.direct), (keeps, direct), "{text} {lengths:?}");
            assert_eq!(got.elements, lengths.iter().map(|n| u64::from(*n)).product::<u64>());
        }
    }

    #[test]
    fn few_groups_are_split_within_a_bound_of_memory() {
        // A scalar: all places are one group of 3 * 8 * 4 * 10 tiles.
        let scalar = summation("t: float; score = score * t;", &[]);
        assert_eq!((scalar.keeps, scalar.direct, scalar.elements, scalar.splits), (0, false, 1, 960));
        assert_eq!(summation("t: float[heads]; score = score * t[h];", &[8]).splits, 120);
        // 64 MiB are 16 parts of 2^20 elements.
        let table = summation("t: float[*]; score = score + t[q * kv_len + kv];", &[1 << 20]);
        assert_eq!((table.splits, table.scratch_bytes()), (16, 64 << 20));
        let dense = summation("t: float[q_len, kv_len]; score = score + t[q, kv];", &[256, 640]);
        assert_eq!((dense.splits, dense.scratch_bytes()), (1, 0));
    }

    #[test]
    fn a_tensor_that_is_too_large_is_refused_by_its_size() {
        let problem = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap();
        let program = Program::parse("t: float[*, *]; score = score + t[q, kv];").unwrap();
        let problem = problem.with_program(program).gradient_by("t").unwrap();
        let e = Summation::of(&problem, &shape(), &[1 << 16, 1 << 16]).unwrap_err().to_string();
        assert!(e.contains("4294967296") && e.contains("2^31"), "{e}");
        assert!(problem.gradient_by("u").is_none() && problem.to_string().ends_with("-by-t"));
    }
}
