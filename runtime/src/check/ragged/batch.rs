//! What a kernel is checked with: the sequences of a ragged batch, and how their queries and keys lie in memory.

use crate::Distribution;
use flashtune_codegen::{KvScales, Mask, Problem};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::fmt;

/// How the rows of Q and O lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queries {
    /// As many for each sequence, by a stride; of those that have fewer the first ones are used.
    Uniform,
    /// One sequence behind the other.
    Packed,
    /// The same, with rows between them that are not used.
    PackedApart,
}

/// How the keys of a sequence are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// One sequence behind the other.
    Packed,
    /// In a slot of a dense cache each, which an array names if the store is shuffled.
    Slots,
    /// In pages that a table names.
    Table,
    /// In pages that an array names, of which each sequence has a part.
    Csr,
}

/// How the heads, tokens and elements of a page lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreLayout {
    /// Heads of a token side by side.
    Nhd,
    /// Tokens of a head side by side.
    Hnd,
    /// As [`StoreLayout::Hnd`], but the tokens of every 16 bytes of K.
    Chunks,
}

/// What says how long sequences are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LengthsBy {
    /// The index itself: where packed sequences end, how full last pages are, or the length of all slots. A table does
    /// not say it: there it means [`LengthsBy::Array`].
    Index,
    /// An array.
    Array,
    /// An array of what they were before each gained as many.
    Added,
    /// An array of what they were before, and one of what they gained.
    AddedEach,
}

/// The form of scales that heads share; those of tokens are given for each token and head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleForm {
    /// None: 1.
    One,
    /// One of all.
    Tensor,
    /// One for each head.
    Head,
    /// One for each head of each sequence.
    SequenceHead,
}

/// How the log-sum-exp is wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LseForm {
    /// Base 2, not e.
    pub base_2: bool,
    /// That of a row without keys.
    pub empty: f32,
    /// Heads of a row side by side, not rows of a head.
    pub by_rows: bool,
}

/// A ragged batch to check a kernel with. Everything else follows from it and the problem.
#[derive(Debug, Clone, PartialEq)]
pub struct RaggedBatch {
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// The mask, of the problem's kind.
    pub mask: Mask,
    /// Rows and keys of each sequence.
    pub lengths: Vec<[u32; 2]>,
    /// How the rows lie.
    pub queries: Queries,
    /// Heads of Q and O before their rows, not behind.
    pub head_major: bool,
    /// How keys are found.
    pub index: Index,
    /// Tokens of a page, where there are pages.
    pub page_tokens: u32,
    /// How pages lie in memory.
    pub layout: StoreLayout,
    /// Pages lie apart, as those of K and V in one pool do.
    pub apart: bool,
    /// Pages and slots are in no order.
    pub shuffled: bool,
    /// V has a table of its own.
    pub own_v_table: bool,
    /// Some pages, or slots, are none of the store's: their keys are masked.
    pub holes: bool,
    /// What says the lengths.
    pub lengths_by: LengthsBy,
    /// Padding before the first key of sequences.
    pub left_pad: bool,
    /// Whether tables, and lengths, are of 64 bits.
    pub wide: [bool; 2],
    /// The form of scales of a quantised store.
    pub scales: ScaleForm,
    /// The log-sum-exp, if it is wanted.
    pub lse: Option<LseForm>,
    /// The bounds of the lengths are above the longest.
    pub spare: bool,
    /// NaN in an element of V that is seen, if only by some, and in all that are seen by none.
    pub nan: bool,
    /// How values are drawn.
    pub values: Distribution,
    /// The softmax scale; the problem's without.
    pub scale: Option<f32>,
    /// Seed of the values and of what else is drawn.
    pub seed: u64,
}

/// How large a random batch may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Most {
    /// Sequences.
    pub sequences: u32,
    /// Rows of a sequence.
    pub rows: u32,
    /// Keys of a sequence.
    pub keys: u32,
    /// Query heads.
    pub heads: u32,
}

impl Default for RaggedBatch {
    /// Two sequences of 100 and 37 keys in shuffled pages of 16 tokens, one query each.
    fn default() -> Self {
        Self {
            heads: 4,
            kv_heads: 2,
            mask: Mask::Full,
            lengths: vec![[1, 100], [1, 37]],
            queries: Queries::Uniform,
            head_major: false,
            index: Index::Table,
            page_tokens: 16,
            layout: StoreLayout::Nhd,
            apart: false,
            shuffled: true,
            own_v_table: false,
            holes: false,
            lengths_by: LengthsBy::Array,
            left_pad: false,
            wide: [false; 2],
            scales: ScaleForm::Head,
            lse: Some(LseForm { base_2: false, empty: f32::NEG_INFINITY, by_rows: false }),
            spare: false,
            nan: false,
            values: Distribution::Normal,
            scale: None,
            seed: 1,
        }
    }
}

/// Lengths at and around what tiles and pages divide.
const LENGTHS: [u32; 22] = [0, 1, 1, 2, 5, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300, 1000];
const PAGES: [u32; 6] = [1, 5, 16, 16, 64, 256];
const GROUPS: [u32; 10] = [1, 1, 2, 3, 4, 5, 6, 7, 8, 16];

impl RaggedBatch {
    /// A batch for kernels of a problem; the same for the same seed.
    pub fn random(problem: &Problem, most: Most, seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed ^ 0x7a66ed);
        let groups: Vec<u32> = GROUPS.into_iter().filter(|g| *g <= most.heads).collect();
        let group = *groups.choose(rng).expect("one at least");
        let kv_heads = rng.random_range(1..=(most.heads / group).min(3));
        let sequences = match rng.random_range(0..8) {
            0 => 1,
            _ => rng.random_range(1..=most.sequences),
        };
        // Steps of a decoder, drafts, prompts, or all of them.
        let kind = rng.random_range(0..5);
        let rows = |rng: &mut StdRng| match kind {
            0 => 1,
            1 => rng.random_range(1..=16),
            2 => *[0, 1, 1, 4, 16].choose(rng).expect("not empty"),
            3 => rng.random_range(1..=300),
            _ => *[0, 1, 1, 2, 9, 64, 130].choose(rng).expect("not empty"),
        };
        let keys = |rng: &mut StdRng| match rng.random_range(0..8) {
            0 => rng.random_range(0..=most.keys),
            1 => most.keys - rng.random_range(0..=most.keys / 8),
            _ => *LENGTHS.choose(rng).expect("not empty"),
        };
        let equal = rng.random_bool(0.1).then(|| keys(rng));
        let lengths = (0..sequences)
            .map(|_| [rows(rng).min(most.rows), equal.unwrap_or_else(|| keys(rng)).min(most.keys)])
            .collect();
        let reach = |rng: &mut StdRng| *[0, 1, 5, 31, 64, 100, 200, 1000, u32::MAX].choose(rng).expect("not empty");
        let mask = match (problem.mask.left, problem.mask.right) {
            (false, false) => Mask::Full,
            (false, true) if rng.random_bool(0.6) => Mask::Causal,
            (left, right) => Mask::Window { left: left.then(|| reach(rng)), right: right.then(|| reach(rng)) },
        };
        let index = *[Index::Packed, Index::Slots, Index::Table, Index::Table, Index::Csr].choose(rng).expect("some");
        let v_columns = problem.kv.store().is_some_and(|store| store.v_columns);
        let layouts = [StoreLayout::Nhd, StoreLayout::Hnd, StoreLayout::Chunks];
        let empty = *[f32::NEG_INFINITY, f32::NEG_INFINITY, f32::INFINITY, 0.0].choose(rng).expect("some");
        let lse = LseForm { base_2: rng.random(), empty, by_rows: rng.random() };
        let forms = [ScaleForm::One, ScaleForm::Tensor, ScaleForm::Head, ScaleForm::SequenceHead];
        let ways = [LengthsBy::Index, LengthsBy::Array, LengthsBy::Added, LengthsBy::AddedEach];
        let scales = [None, None, None, Some(0.25), Some(1.0), Some(-0.2), Some(0.0)];
        Self {
            heads: kv_heads * group,
            kv_heads,
            mask,
            lengths,
            queries: *[Queries::Uniform, Queries::Packed, Queries::PackedApart].choose(rng).expect("some"),
            head_major: rng.random(),
            index,
            page_tokens: *PAGES.choose(rng).expect("some"),
            layout: if v_columns { layouts[1 + rng.random_range(0..2)] } else { layouts[rng.random_range(0..3)] },
            apart: rng.random_bool(0.3),
            shuffled: rng.random_bool(0.7),
            own_v_table: rng.random_bool(0.3),
            holes: rng.random_bool(0.15),
            lengths_by: *ways.choose(rng).expect("some"),
            left_pad: rng.random_bool(0.25),
            wide: [rng.random_bool(0.2), rng.random_bool(0.2)],
            scales: *forms.choose(rng).expect("some"),
            lse: rng.random_bool(0.8).then_some(lse),
            spare: rng.random_bool(0.4),
            nan: rng.random_bool(0.25),
            values: *[
                Distribution::Normal,
                Distribution::Normal,
                Distribution::NormalWithOutliers,
                Distribution::Uniform,
            ]
            .choose(rng)
            .expect("some"),
            scale: *scales.choose(rng).expect("some"),
            seed,
        }
    }

    /// Whether the index says how long sequences are.
    pub(super) fn index_says_lengths(&self) -> bool {
        let pads = || self.lengths.iter().any(|[_, keys]| *keys != self.lengths[0][1]) || self.left_pad;
        self.lengths_by == LengthsBy::Index
            && match self.index {
                Index::Table => false,
                Index::Slots => !pads(),
                Index::Packed | Index::Csr => true,
            }
    }
}

impl fmt::Display for RaggedBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lengths: Vec<String> = self.lengths.iter().take(12).map(|[q, kv]| format!("{q}x{kv}")).collect();
        write!(f, "{:?} {:?} {:?} by {:?}", self.queries, self.index, self.layout, self.lengths_by)?;
        if matches!(self.index, Index::Table | Index::Csr) {
            write!(f, " page {}", self.page_tokens)?;
        }
        write!(f, " h{}/{} {} [{}", self.heads, self.kv_heads, self.mask, lengths.join(" "))?;
        f.write_str(if self.lengths.len() > 12 { " ..]" } else { "]" })?;
        let flags = [
            (self.head_major, "heads first"),
            (self.apart, "apart"),
            (self.shuffled, "shuffled"),
            (self.own_v_table, "own V table"),
            (self.holes, "holes"),
            (self.left_pad, "left pad"),
            (self.wide[0], "wide tables"),
            (self.wide[1], "wide lengths"),
            (self.spare, "spare"),
            (self.nan, "NaN"),
        ];
        flags.into_iter().filter(|(set, _)| *set).try_for_each(|(_, word)| write!(f, ", {word}"))?;
        write!(f, ", scales {:?}, {:?}", self.scales, self.values)?;
        if let Some(LseForm { base_2, empty, by_rows }) = self.lse {
            write!(
                f,
                ", LSE base {} empty {empty}{}",
                if base_2 { "2" } else { "e" },
                if by_rows { " by rows" } else { "" }
            )?;
        }
        if let Some(scale) = self.scale {
            write!(f, ", scale {scale}")?;
        }
        write!(f, ", seed {}", self.seed)
    }
}

/// Whether scales of a store are those of tokens.
pub(super) fn per_token(problem: &Problem) -> bool {
    problem.kv.store().is_some_and(|store| store.scales == KvScales::PerToken)
}
