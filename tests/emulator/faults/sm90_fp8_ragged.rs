//! Faults of what `forward/sm90_fp8_ragged` adds to `forward/sm90_fp8`: where rows, keys and scales of sequences lie,
//! and pieces of tiles, which cost nothing here: short sequences are split, too.

use super::{Fault, replaced};
use crate::ragged::{free_pieces, try_ragged};
use flashtune::DType;
use flashtune_codegen::{
    Kernel, KvElement, KvKind, KvScales, KvStore, MaskKind, Problem, Schedule, Sm90Fp8RaggedSchedule, Sm90Fp8Schedule,
    TemplateSet,
};
use flashtune_runtime::check::{Index, Most, RaggedBatch, ScaleForm, StoreLayout};
use rand::Rng;
use rand::rngs::StdRng;

const CONSUMER: &str = "forward/sm90_fp8/consumer.cuh";
const LOADER: &str = "forward/sm90_fp8_ragged/loader.cuh";
const MERGED: &str = "forward/sm90_fp8_ragged/merged.cuh";
const OPERANDS: &str = "forward/sm90_fp8_ragged/operands.cuh";
const SCALES: &str = "lib/cuda/attention/e4m3_scales.cuh";
const SCHEDULER: &str = "forward/sm90_fp8_ragged/scheduler.cuh";
const TRANSPOSE: &str = "forward/sm90_fp8/transpose.cuh";

/// Words of what is wrong choose the batches ([`batch`]).
pub const SM90_FP8_RAGGED: &[Fault] = &[
    [
        "slots behind the last key are left to the search",
        OPERANDS,
        "if (filled >= kBlockKV) return;",
        "return;",
        "broke down",
    ],
    ["slots are cleared from one too late on", OPERANDS, "int row = filled +", "int row = filled + 1 +", "broke down"],
    ["V from the page of K", LOADER, "lane_box(args, pages, f.v_table, tile, n)", "k_box", "the oracle says"],
    ["keys of no page count", OPERANDS, "if (bits == 0) return;", "return;", "the oracle says"],
    [
        "keys of no page are sought 16 further",
        OPERANDS,
        "bits >> i / 4 * 8 / kKeysPerBit & 1",
        "bits << 1 >> i / 4 * 8 / kKeysPerBit & 1",
        "the oracle says",
    ],
    [
        "the scale of Q is forgotten",
        OPERANDS,
        "query_scale<e4m3>(f, tile.batch, tile.kv_head) *",
        "",
        "the oracle says",
    ],
    ["the scale of Q of the first sequence", SCALES, "sequence * stride[0] +", "", "the oracle says"],
    ["the scale of Q of the first head", SCALES, "kv_head * stride[1]", "0", "the oracle says"],
    [
        "the scale of K for V",
        OPERANDS,
        "head_scale(args.forward.v_scale,",
        "head_scale(args.forward.k_scale,",
        "the oracle says",
    ],
    [
        "a row's position counts heads",
        OPERANDS,
        "int row) { return row >> args.group_shift; }",
        "int row) { return row; }",
        "the oracle says|was written|broke down",
    ],
    [
        "rows of all heads go to the first",
        OPERANDS,
        "+ (row & ((1 << args.group_shift) - 1));",
        ";",
        "the oracle says|not the same bits",
    ],
    ["a tile is skipped", SCHEDULER, "return gridDim.x + before;", "return gridDim.x + before + 1;", "the oracle says"],
    [
        "sums of merged pieces count four times",
        MERGED,
        "threadIdx.x % 4 == 0 ? softmax.l[h] : 0.0f",
        "softmax.l[h]",
        "the oracle says",
    ],
    ["pieces begin with the tile", SCHEDULER, "w.blocks.begin = max_of(w.blocks.begin, begin);", "", "the oracle says"],
    ["NaN that another of the pieces has met", CONSUMER, "(merged.met || read_flag", "(read_flag", "the oracle says"],
    [
        "a stage is filled before all have left it",
        LOADER,
        "            k.acquire(smem);\n",
        "",
        "still read|overwritten|the oracle says|while|deadlock|broke down|not the same bits|race",
    ],
    [
        "keys of e5m2 are the first 32 of their block",
        CONSUMER,
        "keys * kKeys * 128 + within",
        "within",
        "the oracle says|not the same bits",
    ],
    [
        "scores of e5m2 keys are their last matrix step",
        CONSUMER,
        "? sum + product[e]",
        "? product[e]",
        "the oracle says",
    ],
];

/// Several tiles, and sequences of up to ten key blocks.
const MOST: Most = Most { sequences: 3, rows: 40, keys: 300, heads: 4 };

fn kernel(element: KvElement) -> Kernel {
    let store = KvStore { element, scales: KvScales::PerHead, v_columns: false };
    let problem = Problem::forward(DType::E4m3, 64, MaskKind::CAUSAL).expect("legal").with_output(DType::F32);
    let schedule = Sm90Fp8Schedule {
        consumers: 1,
        // Scores of e5m2 keys are of 32 at a time.
        block_kv: if element == KvElement::E5m2 { 64 } else { 32 },
        stages: 2,
        raw_stages: 1,
        part: 32,
        blocks_per_sm: 1,
        ..Sm90Fp8Schedule::default()
    };
    let schedule = Schedule::Sm90Fp8Ragged(Sm90Fp8RaggedSchedule(schedule));
    Kernel { problem: problem.with_kv(KvKind::Ragged(store)), schedule, arch: "sm_90a".parse().expect("an arch") }
}

/// Batches in which a fault can show.
fn batch(problem: &Problem, what: &str, rng: &mut StdRng) -> RaggedBatch {
    let seed = rng.random();
    let random = RaggedBatch::random(problem, MOST, seed);
    let layout = if random.layout == StoreLayout::Hnd { StoreLayout::Hnd } else { StoreLayout::Nhd };
    // What TMA takes.
    let page_tokens = [16, 32, 64][seed as usize % 3];
    let base = RaggedBatch { layout, left_pad: false, page_tokens, scales: ScaleForm::SequenceHead, ..random };
    let paged = RaggedBatch { index: Index::Table, shuffled: true, ..base.clone() };
    // Each sequence alone in its slots: what lies behind its last key is NaN.
    let slots = if seed.is_multiple_of(2) { Index::Slots } else { Index::Table };
    let long = vec![[1 + seed as u32 % 30, 200 + seed as u32 % 100]];
    let filled = base.lengths.iter().map(|[rows, keys]| [*rows, (*keys).max(1)]).collect();
    match what {
        _ if what.contains("no page") => RaggedBatch { holes: true, ..paged },
        _ if what.contains("page") => RaggedBatch { own_v_table: true, ..paged },
        _ if what.contains("NaN") => RaggedBatch { heads: 2, kv_heads: 1, lengths: long, nan: true, ..base },
        _ if what.contains("piece") => {
            RaggedBatch { heads: 2, kv_heads: 1, lengths: long, holes: false, nan: false, ..base }
        }
        _ if what.contains("slots") => RaggedBatch { index: slots, holes: false, nan: false, lengths: filled, ..base },
        _ => base,
    }
}

/// What is said of a kernel with the fault; an empty text when nothing is. Where it is about slots behind the last key,
/// a search for NaN that finds any breaks down: a kernel that leaves them to it is right, and slow.
pub fn verdict(set: &TemplateSet, number: u64, what: &str) -> String {
    let kernel = kernel(if what.contains("e5m2") { KvElement::E5m2 } else { KvElement::E4m3 });
    let set = free_pieces(set);
    let set = match what.contains("slots") {
        true => replaced(&set, TRANSPOSE, "set_flag(Layout::met_non_finite_at(smem));", "__builtin_trap();"),
        false => set,
    };
    let seen = try_ragged(&kernel, &set, 60, number, |rng| batch(&kernel.problem, what, rng));
    seen.err().unwrap_or_default()
}

/// The same batches without a fault: nothing is said.
#[test]
fn batches_of_faults_pass_where_none_is_planted() {
    let (templates, all) = (crate::templates(), ["slots", "no page", "page", "piece", "NaN", "rows", "e5m2"]);
    crate::try_recorded(0..all.len() as u64, std::time::Duration::MAX, |number| {
        let what = all[number as usize];
        let said = verdict(&templates, 80 + number, what);
        if said.is_empty() { Ok(()) } else { Err(format!("{what}: {said}")) }
    });
}
