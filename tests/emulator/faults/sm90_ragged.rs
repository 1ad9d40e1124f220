//! Faults of `forward/sm90_ragged`, on machines where pieces of tiles cost nothing: short sequences are split, too.

use super::{Fault, replaced};
use crate::ragged::{free_pieces, try_ragged};
use crate::templates;
use flashtune::DType;
use flashtune_codegen::{
    Kernel, KvKind, MaskKind, Problem, Schedule, Sm90RaggedSchedule, Sm90Schedule, Sm90Scheduler, TemplateSet,
};
use flashtune_runtime::check::{Index, Most, RaggedBatch, StoreLayout};
use rand::Rng;
use rand::rngs::StdRng;

const CONSUMER: &str = "forward/sm90_ragged/consumer.cuh";
const EPILOGUE: &str = "forward/sm90_ragged/epilogue.cuh";
const OPERANDS: &str = "forward/sm90_ragged/operands.cuh";
const PAGES: &str = "forward/sm90_ragged/pages.cuh";
const PIECES: &str = "forward/sm90_ragged/pieces.cuh";
const PRODUCER: &str = "forward/sm90_ragged/producer.cuh";
const SCHEDULER: &str = "forward/sm90_ragged/scheduler.cuh";

/// Words of what is wrong choose the batches ([`batch`]).
pub const SM90_RAGGED: &[Fault] = &[
    // The end of a sequence.
    ["the mask of the last block is lost", CONSUMER, "            masks.apply(s);\n", "", "the oracle says"],
    [
        "slots behind the last key are left to the search",
        PRODUCER,
        "if (ends) clear_rows_from<kChunksV, kThreadsThatHelp>(v.buffer(smem), filled, thread);",
        "",
        "broke down",
    ],
    [
        "slots are cleared from one too late on",
        PRODUCER,
        "const u32 begin = row * 128;",
        "const u32 begin = (row + 1) * 128;",
        "broke down",
    ],
    // Pages.
    [
        "a lane has the page of its neighbour",
        PAGES,
        "page_of(args.forward, key);",
        "page_of(args.forward, max_of(key - args.box_keys, 0));",
        "the oracle says",
    ],
    ["keys of no page count", CONSUMER, "if (without_page != 0) {", "if (false) {", "the oracle says"],
    [
        "keys of no page are sought a box further",
        PAGES,
        "<< (__ffs(lanes) - 1) * args.box_keys",
        "<< __ffs(lanes) * args.box_keys",
        "the oracle says",
    ],
    [
        "keys of no page have one bit for each box",
        PAGES,
        "((2u << (args.box_keys / kKeysPerBit - 1)) - 1) <<",
        "1u <<",
        "the oracle says",
    ],
    // Barriers of a producer of many lanes.
    [
        "a lane misses a phase of K",
        PRODUCER,
        "k.acquire(smem);\n                __syncwarp();",
        "k.acquire(smem);",
        "deadlock",
    ],
    [
        "a lane misses a phase of V",
        PRODUCER,
        "v.acquire(smem);\n                __syncwarp();",
        "v.acquire(smem);",
        "deadlock",
    ],
    [
        "a row of K too few is waited for",
        PRODUCER,
        "k.expect(smem, Layout::kBytesK);",
        "k.expect(smem, Layout::kBytesK - 128);",
        "bytes too many|on its way",
    ],
    // Pieces of tiles.
    [
        "pieces are merged from the last to arrive on",
        PIECES,
        "n < end; n++) add(at(n, thread),",
        "n < end; n++) add(at((n + own.nth) % own.count, thread),",
        "not the same bits",
    ],
    [
        "the first piece is lost",
        PIECES,
        "for (int n = begin; n < end; n++) add(",
        "for (int n = begin + 1; n < end; n++) add(",
        "the oracle says",
    ],
    [
        "sums of pieces without their weight",
        PIECES,
        "if (sums.z != 0.0f) l[0] += w[0] * sums.z;",
        "l[0] += sums.z;",
        "the oracle says",
    ],
    [
        "a run of the pieces is lost",
        PIECES,
        "for (int t = 1; t < teams; t++) {\n            if",
        "for (int t = 2; t < teams; t++) {\n            if",
        "the oracle says",
    ],
    [
        "pieces of too few rows are left",
        PIECES,
        "self / 32 * 16 + self % 32 / 4 < rows;\n        if (is_row) put",
        "self / 32 * 16 + self % 32 / 4 + 1 < rows;\n        if (is_row) put",
        "the oracle says",
    ],
    [
        "keys behind a piece's end",
        SCHEDULER,
        ", w.own.end = min_of(w.own.end, begin + place.segments.size);",
        ";",
        "the oracle says",
    ],
    ["NaN that another of the pieces has met", PIECES, ", some |= before >= kMetInPiece;", ";", "the oracle says"],
    // Rows.
    [
        "Q of another sequence",
        OPERANDS,
        "tma_load(to, args.q, full, kEvictFirst, chunk * kChunkColumns, 0, tile.q_row +",
        "tma_load(to, args.q, full, kEvictFirst, chunk * kChunkColumns, 0, tile.q_row / 2 +",
        "the oracle says",
    ],
    [
        "O over the rows of the next sequence",
        EPILOGUE,
        "if (rows == 64) {",
        "if (true) {",
        "the oracle says|was written|not the same bits",
    ],
];

/// Several tiles of one warpgroup, and sequences of up to ten key blocks.
const MOST: Most = Most { sequences: 3, rows: 40, keys: 300, heads: 4 };

/// One warpgroup and steps in a row: the least code that has all that the family adds to `forward/sm90`.
fn kernel() -> Kernel {
    let problem = Problem::forward(DType::Bf16, 64, MaskKind::FULL).expect("legal").with_kv(KvKind::RAGGED);
    let schedule = Sm90Schedule {
        consumers: 1,
        block_kv: 32,
        stages: 2,
        pack_group: true,
        scheduler: Sm90Scheduler::Queue,
        blocks_per_sm: 1,
        ..Sm90Schedule::default()
    };
    let schedule = Schedule::Sm90Ragged(Sm90RaggedSchedule(schedule));
    Kernel { problem, schedule, arch: "sm_90a".parse().expect("an arch") }
}

/// Batches in which a fault can show.
fn batch(problem: &Problem, what: &str, rng: &mut StdRng) -> RaggedBatch {
    let seed = rng.random();
    let random = RaggedBatch::random(problem, MOST, seed);
    let layout = if random.layout == StoreLayout::Hnd { StoreLayout::Hnd } else { StoreLayout::Nhd };
    // What TMA takes.
    let page_tokens = [16, 32, 64][seed as usize % 3];
    let base = RaggedBatch { layout, left_pad: false, page_tokens, ..random };
    let paged = RaggedBatch { index: Index::Table, shuffled: true, ..base.clone() };
    // Each sequence alone in its slots: what lies behind its last key is NaN.
    let slots = if seed.is_multiple_of(2) { Index::Slots } else { Index::Table };
    let filled = base.lengths.iter().map(|[rows, keys]| [*rows, (*keys).max(1)]).collect();
    let long = vec![[1 + seed as u32 % 30, 200 + seed as u32 % 100]];
    match what {
        _ if what.contains("no page") => RaggedBatch { holes: true, ..paged },
        _ if what.contains("page") => RaggedBatch { own_v_table: true, ..paged },
        _ if what.contains("slots") => RaggedBatch { index: slots, holes: false, nan: false, lengths: filled, ..base },
        // Many blocks, of which most lanes have no box.
        _ if what.contains("misses") => RaggedBatch { lengths: vec![[1, 300]; 2], ..base },
        _ if what.contains("NaN") => RaggedBatch { heads: 2, kv_heads: 1, lengths: long, nan: true, ..base },
        _ if what.contains("piece") => {
            RaggedBatch { heads: 2, kv_heads: 1, lengths: long, holes: false, nan: false, ..base }
        }
        _ => base,
    }
}

/// With the templates as a fault needs them: where it is about slots behind the last key, a search for what is not
/// finite that finds any breaks down, since a kernel that leaves them to it is right, but 100 times slower.
fn prepared(set: &TemplateSet, what: &str) -> TemplateSet {
    let set = free_pieces(set);
    if !what.contains("slots") {
        return set;
    }
    replaced(&set, PRODUCER, "if (met) set_flag(Layout::met_non_finite_at(smem));", "if (met) __builtin_trap();")
}

/// What is said of a kernel with the fault; an empty text when nothing is.
pub fn verdict(set: &TemplateSet, number: u64, what: &str) -> String {
    let kernel = kernel();
    let seen = try_ragged(&kernel, &prepared(set, what), 100, number, |rng| batch(&kernel.problem, what, rng));
    seen.err().unwrap_or_default()
}

/// The same batches without a fault: nothing is said, and they are what the faults are about.
#[test]
fn batches_of_faults_pass_where_none_is_planted() {
    let (kernel, set) = (kernel(), prepared(&templates(), "slots"));
    let all = ["slots", "no page", "page", "piece", "rows"];
    crate::try_recorded(0..all.len() as u64, std::time::Duration::MAX, |number| {
        let (seed, what) = (70 + number, all[number as usize]);
        // A search that finds something is right, and breaks down in this kernel: of NaN that is seen, and of what lies
        // behind the last key of a pack, which no one clears.
        let calm = |rng: &mut StdRng| {
            let batch = batch(&kernel.problem, what, rng);
            let index = if batch.index == Index::Packed { Index::Slots } else { batch.index };
            RaggedBatch { nan: false, index, ..batch }
        };
        let reached = try_ragged(&kernel, &set, 3, seed, calm).map_err(|e| format!("{what}: {e}"))?;
        let enough = (what != "piece" || reached.split >= 2) && (!what.contains("page") || reached.in_pages >= 2);
        if enough { Ok(()) } else { Err(format!("{what}: {reached:?}")) }
    });
}
