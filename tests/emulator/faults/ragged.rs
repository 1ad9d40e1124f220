//! Faults of the families of ragged batches, and of appends.

use super::Fault;
use crate::appends::try_appends;
use crate::ragged::try_ragged;
use flashtune::DType;
use flashtune_codegen::{
    Arch, Family, Kernel, KvElement, KvKind, KvScales, KvStore, MaskKind, Op, Problem, Schedule, ShapeBucket,
    TemplateSet,
};
use flashtune_runtime::check::{Most, RaggedBatch};

const READS: &str = "lib/cuda/attention/ragged.cuh";

/// What both families read of a batch, seen by the plain one.
pub const NAIVE: &[Fault] = &[
    [
        "one key too many",
        "forward/naive_ragged.cu",
        "key > live[i].last ||",
        "key > live[i].last + 1 ||",
        "the oracle says",
    ],
    [
        "a key behind the last",
        "forward/naive_ragged.cu",
        "if (key >= s.kv_len) return at;",
        "if (key > s.kv_len) return at;",
        "broke down|the oracle says",
    ],
    [
        "V from K's page",
        "forward/naive_ragged.cu",
        "page_id(args, args.v_table, s, place.page)",
        "page_id(args, args.k_table, s, place.page)",
        "the oracle says",
    ],
    [
        "pages of no store are the first",
        READS,
        "return is_page(args, id) ? id : -1;",
        "return is_page(args, id) ? id : 0;",
        "the oracle says",
    ],
    [
        "a scale of the token for that of the head",
        "forward/naive_ragged.cu",
        "of_head[kScalePerToken ?",
        "of_head[true ?",
        "broke down|the oracle says",
    ],
    [
        "NaN of masked V by a weight of zero",
        "forward/naive_ragged.cu",
        "if (masked && (key < live[i].first || key > live[i].last)) continue;",
        "",
        "the oracle says",
    ],
    [
        "rows behind the used ones",
        "forward/naive_ragged.cu",
        "if (tile.rows <= 0) return;",
        "if (tile.rows <= 0) tile.rows = 1;",
        "broke down|was written|the oracle says",
    ],
    [
        "full last pages",
        READS,
        "args.last_page == nullptr ? args.page_tokens",
        "true ? args.page_tokens",
        "broke down|the oracle says",
    ],
    ["lengths of before the append", READS, "length += args.kv_added;", "", "the oracle says"],
];

pub const SM80: &[Fault] = &[
    [
        "a piece is not merged",
        "forward/sm80_ragged/merge.cuh",
        "for (int p = begin; p < end; p +=",
        "for (int p = begin + 1; p < end; p +=",
        "the oracle says",
    ],
    [
        "parts weigh the same",
        "forward/sm80_ragged/merge.cuh",
        "const float w = weight(parts[n].sum.m, m);",
        "const float w = 1.0f;",
        "the oracle says",
    ],
    [
        "runs of pieces weigh the same",
        "forward/sm80_ragged/merge.cuh",
        "of_b = weight(b.sum.m, m);",
        "of_b = 1.0f;",
        "the oracle says",
    ],
    [
        "the last piece counts again",
        "forward/sm80_ragged/merge.cuh",
        "if (p + n >= end) next[n].sum = Sum{-FT_INFINITY, 0.0f};",
        "if (p + n > end) next[n].sum = Sum{-FT_INFINITY, 0.0f};",
        "the oracle says",
    ],
    [
        "the counter stays",
        "forward/sm80_ragged/merge.cuh",
        "if (threadIdx.x == 0) *counter = 0;",
        "",
        "counters is left",
    ],
    [
        "the block that begins a tile merges",
        "forward/sm80_ragged/merge.cuh",
        "if (arrived() != u32(share.pieces - 1)) return;",
        "if (int(blockIdx.x) != share.first) return;",
        "the oracle says|counters is left",
    ],
    [
        "a team is not merged",
        "forward/sm80_ragged/merge.cuh",
        "for (int n = 0; n < kParts; n++) {",
        "for (int n = 0; n + 1 < kParts; n++) {",
        "the oracle says",
    ],
    [
        "an empty row divides by zero",
        "forward/sm80_ragged/merge.cuh",
        "float inverse = sum.l == 0.0f ? 0.0f : 1.0f / sum.l;",
        "float inverse = 1.0f / sum.l;",
        "the oracle says",
    ],
    [
        "the last unit of a thread block is no one's",
        "forward/sm80_ragged/range.cuh",
        "range.end = range.begin + range.each + (c < range.more);",
        "range.end = range.begin + range.each + (c < range.more) - (c + 1 < range.blocks);",
        "the oracle says|broke down|not the same bits|counters is left",
    ],
    [
        "the last unit of another tile's piece is no one's",
        "forward/sm80_ragged/range.cuh",
        "const u32 some = u32(range.each) + (nth < u32(range.more));",
        "const u32 some = u32(range.each) - (range.each > 1);",
        "the oracle says|broke down|not the same bits|counters is left",
    ],
    [
        "tiles that are not alike are dealt out as if they were",
        "forward/sm80_ragged/range.cuh",
        "if (__syncthreads_or(rows && unlike)",
        "if (__syncthreads_or(false)",
        "the oracle says|broke down|not the same bits|counters is left",
    ],
    [
        "lengths of before the wait",
        "forward/sm80_ragged/range.cuh",
        "if (early && waited && !__syncthreads_or(differ(now, lengths))) return range;",
        "if (early && waited && !__syncthreads_or(false)) return range;",
        "the oracle says|broke down|not the same bits|counters is left",
    ],
    [
        "a length that is not compared",
        "forward/sm80_ragged/range.cuh",
        "i < kLengths; i++",
        "i < 3; i++",
        "the oracle says|broke down|not the same bits|counters is left",
    ],
    [
        "a piece is another tile's",
        "forward/sm80_ragged/copies.cuh",
        "begins = int(blockIdx.x / u32(pieces)) * pieces",
        "begins = int(blockIdx.x / u32(pieces)) * pieces + 1",
        "the oracle says|broke down|not the same bits|counters is left",
    ],
    [
        "keys before the first block",
        "forward/sm80_ragged/work.cuh",
        "return TileBlocks{int(u32(keys.first) / kBlockKV),",
        "return TileBlocks{int(u32(keys.first) / kBlockKV) + 1,",
        "the oracle says",
    ],
    [
        "K and V are used before they arrive",
        "forward/sm80_ragged.cu",
        "            cp_async_wait<kStages - 2>();\n",
        "",
        "on its way|the oracle says",
    ],
    [
        "masks are left out",
        "forward/sm80_ragged.cu",
        " now, masked, scales);",
        " now, false, scales);",
        "the oracle says",
    ],
    [
        "scales of the tokens of V",
        "forward/sm80_ragged.cu",
        "scale_probabilities(s, o, v_reference, scales + kBlockKV * 4);",
        "scale_probabilities(s, o, v_reference, scales);",
        "the oracle says",
    ],
];

pub const APPENDS: &[Fault] = &[
    [
        "the slot behind",
        "append/cuda.cu",
        "Place{page, int(slot - page * tokens)}",
        "Place{page, int((slot - page * tokens + 1) % tokens)}",
        "is not from|to be ",
    ],
    [
        "skipped slots",
        "append/cuda.cu",
        "if (slot < 0) return nowhere();",
        "if (slot < -1) return nowhere();",
        "is not from|to be |broke down",
    ],
    [
        "rows of no sequence",
        "append/cuda.cu",
        "if (low == args.batch) return Member{-1, 0};",
        "if (low == args.batch) low--;",
        "is not from|to be |broke down",
    ],
    [
        "rows behind the bound",
        "append/cuda.cu",
        "place >= args.kv_len",
        "place > args.kv_len",
        "is not from|to be |broke down",
    ],
    [
        "a rotation in place is read when it is written",
        "append/cuda.cu",
        "if (in_place) __syncthreads();",
        "",
        "is not from|to be |race",
    ],
    [
        "the wrong sine",
        "lib/cuda/attention/rotary.cuh",
        "second ? turned : -turned",
        "second ? -turned : turned",
        "is not from|to be ",
    ],
    [
        "scales found of half a row",
        "append/cuda.cu",
        "for (int i = 0; i < kLanes; i++) most",
        "for (int i = 0; i < kLanes / 2; i++) most",
        "is not from|to be ",
    ],
];

pub const PADS: &[Fault] = &[
    [
        "no zeros behind a row",
        "pad/cuda.cu",
        "column < from_dim ? from[r][column] : u16(0)",
        "true ? from[r][column] : u16(0)",
        "host copies",
    ],
    ["rows behind the last", "pad/cuda.cu", "if (u32(r) < live) to", "to", "were written|host copies|broke down"],
    ["heads do not end", "pad/cuda.cu", "if (++head == heads) head = 0, batch++;", "++head;", "host copies|broke down"],
    ["the tensor before", "pad/cuda.cu", "int(blockIdx.x) >= args", "int(blockIdx.x) > args", "host copies|broke down"],
];

/// Sequences of many blocks, on machines of few multiprocessors.
const MOST: Most = Most { sequences: 3, rows: 20, keys: 300, heads: 4 };

/// What is said of a kernel with the fault; an empty text when nothing is.
pub fn verdict(family: &str, set: &TemplateSet, number: u64, what: &str) -> String {
    // Lengths are read before the wait where there is one.
    let early = what.contains("length");
    let arch: Arch = if early && family == "sm80_ragged" { "sm_90a" } else { "sm_80" }.parse().expect("an arch");
    let alike = what.contains("another tile's");
    let scaled = what.contains("scale");
    let element = if scaled { KvElement::E4m3 } else { KvElement::Same };
    let scales =
        if what.contains("of the token") || what.contains("found") { KvScales::PerToken } else { KvScales::PerHead };
    let scales = if what.contains("for that of the head") { KvScales::PerHead } else { scales };
    let store = KvStore { element, scales, v_columns: false };
    let mask = MaskKind { left: !alike, right: !alike };
    // Rows of 8-bit elements are whole pieces of 16 bytes.
    let dims = if family == "append" {
        64
    } else if scaled {
        48
    } else {
        40
    };
    let problem = Problem::forward_qk_v(DType::Bf16, dims, dims, mask).expect("legal");
    let problem = problem.with_kv(KvKind::Ragged(store));
    let seen = if family == "append" {
        let problem = Problem { op: Op::Append, mask: MaskKind::FULL, ..problem };
        let family = Family::candidates(&problem, arch)[0];
        let bucket = ShapeBucket { parallel: 1, group: 1, q_len: 1, kv_len: 0, ..Default::default() };
        let schedule = Schedule::default_for(family, &problem, arch, &bucket).expect("a schedule");
        try_appends(&Kernel { problem, schedule, arch }, set, 100, number)
    } else {
        let of = if family == "naive_ragged" { Family::ForwardNaiveRagged } else { Family::ForwardSm80Ragged };
        let bucket = ShapeBucket { parallel: 16, group: 4, q_len: 1, kv_len: 512, ..Default::default() };
        let schedule = Schedule::default_for(of, &problem, arch, &bucket).expect("a schedule");
        let kernel = Kernel { problem, schedule, arch };
        let random = |rng: &mut _| {
            let mut batch = RaggedBatch::random(&problem, MOST, rand::Rng::random(rng));
            if alike {
                batch.lengths.fill([1, MOST.keys]);
            }
            batch
        };
        try_ragged(&kernel, set, 60, number, random).map(drop)
    };
    seen.err().unwrap_or_default()
}
