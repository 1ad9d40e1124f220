//! Faults that are planted in the templates, each of which the machine or the comparison with the oracle must see, and see as
//! what it is. A fault whose text is not in the templates any more fails the test: it has to be planted anew.

use crate::cases::Case;
use crate::{machine, templates, try_kernel};
use flashtune::codegen::score::{Program, ProgramRef};
use flashtune::codegen::{
    Kernel, MaskKind, Problem, Schedule, Sm80Schedule, Sm90Schedule, Sm90Scheduler, Swizzle, TemplateSet, TileOrder,
};
use flashtune::{DType, Distribution, Layout, Mask};
use rand::Rng;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What is wrong, the file of the templates, the text in it, what is put in its place, and
/// words of which the verdict has one.
type Fault = [&'static str; 5];

const SM90: &[Fault] = &[
    // Masks, one key off or aligned elsewhere.
    [
        "one key too many",
        "forward/sm90/row_masks.cuh",
        "live.last + 1 - column",
        "live.last + 2 - column",
        "the oracle says",
    ],
    [
        "one key before the window",
        "forward/sm90/row_masks.cuh",
        "scores_before(live.first - column)",
        "scores_before(live.first - 1 - column)",
        "the oracle says",
    ],
    [
        "aligned to the top left",
        "lib/cuda/tile.cuh",
        "i64(row) + args.kv_len - args.q_len",
        "i64(row)",
        "the oracle says",
    ],
    // Rescaling.
    ["O is not rescaled", "lib/cuda/row_softmax.cuh", "o[i] *= factor[i / 2 % 2];", ";", "the oracle says"],
    ["the sum is not rescaled", "lib/cuda/row_softmax.cuh", "l[h] *= factor[h];", "", "the oracle says"],
    ["each thread's sum for the row's", "lib/cuda/row_softmax.cuh", "l[h] = quad_sum(l[h]);", "", "the oracle says"],
    // Tails.
    [
        "keys behind the last",
        "lib/cuda/tile.cuh",
        "args.window_right, -1), args.kv_len - 1)",
        "args.window_right, -1), args.kv_len)",
        "broke down|the oracle says",
    ],
    [
        "the last block of keys is left out",
        "lib/cuda/tile.cuh",
        "(bottom.last + kBlockKV) / kBlockKV",
        "bottom.last / kBlockKV",
        "the oracle says",
    ],
    // Order and barriers.
    [
        "no order between writes and asynchronous reads",
        "lib/cuda/tma.cuh",
        "fence.proxy.async.shared::cta;",
        "",
        "no fence.proxy.async",
    ],
    [
        "barriers not announced to the copy engine",
        "lib/cuda/mbarrier.cuh",
        "fence.mbarrier_init.release.cluster;",
        "",
        "not fenced",
    ],
    [
        "columns of V a wrong distance apart",
        "lib/cuda/wgmma.cuh",
        "u64(column_bytes >> 4) << 16",
        "u64(64) << 16",
        "the oracle says",
    ],
    [
        "an A operand with rows swapped",
        "forward/sm90/consumer.cuh",
        "x[2], x[3]), pack<Element>(x[4], x[5])",
        "x[4], x[5]), pack<Element>(x[2], x[3])",
        "the oracle says",
    ],
    [
        "a stage of K freed too early",
        "forward/sm90.cu",
        "kEmptyK + s * 8, kCluster * kConsumers * 4",
        "kEmptyK + s * 8, kCluster * kConsumers * 4 - 1",
        "deadlock|more arrivals|on its way|on their way",
    ],
    [
        "a stage of V never freed",
        "forward/sm90.cu",
        "kEmptyV + s * 8, kCluster * kConsumers * 4",
        "kEmptyV + s * 8, kCluster * kConsumers * 4 + 1",
        "deadlock",
    ],
    [
        "scores used while they are computed",
        "forward/sm90/consumer.cuh",
        "wgmma_wait<1>();",
        "",
        "on its way|the oracle says",
    ],
    [
        "a turn that is never passed",
        "forward/sm90/consumer.cuh",
        "if (kTakeTurns) barrier_arrive(",
        "if (false) barrier_arrive(",
        "deadlock",
    ],
    [
        "O overwritten while it is copied",
        "lib/cuda/tma.cuh",
        "cp.async.bulk.wait_group.read 0;",
        "",
        "on its way|on their way",
    ],
    [
        "threads that disagree about non-finite elements",
        "lib/cuda/warpgroup.cuh",
        "return any != 0;",
        "return x != 0;",
        "deadlock|the oracle says",
    ],
    [
        "V used before it is clean",
        "forward/sm90/producer.cuh",
        "? Layout::kRawV : Layout::kFullV",
        "? Layout::kFullV : Layout::kFullV",
        "deadlock|the oracle says",
    ],
    [
        "more registers than there are",
        "forward/sm90.cu",
        "registers_take<kConsumerRegisters>",
        "registers_take<kConsumerRegisters + 8>",
        "deadlock",
    ],
    [
        "a block that ends before its cluster",
        "forward/sm90.cu",
        "    if constexpr (kCluster > 1) cluster_sync();\n}",
        "}",
        "has ended",
    ],
    [
        "barriers that the cluster does not know yet",
        "forward/sm90.cu",
        "        cluster_sync();\n    } else {\n",
        "        __syncthreads();\n    } else {\n",
        "has no mbarrier|has ended",
    ],
    ["keys for one block of a cluster", "forward/sm90/producer.cuh", "(1 << kCluster) - 1", "1", "deadlock"],
    [
        "a buffer that is filled again while the other block reads it",
        "forward/sm90/consumer.cuh",
        "mbarrier_arrive_at(empty, lane())",
        "mbarrier_arrive_at(empty, cluster_rank())",
        "on its way|deadlock|the oracle says",
    ],
    [
        "O in the place of V while another consumer multiplies",
        "forward/sm90/consumer.cuh",
        "barrier_sync(1 + 2 * kConsumers, kConsumers * 128);",
        "",
        "no fence.proxy.async|on its way|the oracle says",
    ],
    [
        "the place of V given away under O",
        "forward/sm90/producer.cuh",
        "mbarrier_wait(smem + Layout::kAdmitV, admit_parity);",
        "",
        "on its way|on their way",
    ],
    [
        "a scan for non-finite elements that skips some",
        "lib/cuda/non_finite.cuh",
        "sums[0] | sums[1] | ",
        "",
        "the oracle says",
    ],
    [
        "a kernel that never waits for Q",
        "forward/sm90/consumer.cuh",
        "mbarrier_wait(smem + Layout::kFullQ + q_at * 8, q_ring.parity);",
        "",
        "on its way",
    ],
    // Added last: the place of a fault seeds its cases.
    // Blocks of keys that a consumer leaves out.
    [
        "a consumer leaves out one block too many, trimmed",
        "lib/cuda/work.cuh",
        "min_of(max_of(own.begin, b.begin), own.end - 1)",
        "min_of(max_of(own.begin, b.begin + 1), own.end - 1)",
        "the oracle says",
    ],
    [
        "the blocks of another consumer, trimmed",
        "lib/cuda/work.cuh",
        "part.row += consumer * 64;",
        "part.row += (consumer ^ 1) * 64;",
        "the oracle says",
    ],
    ["what is left out takes no turn, trimmed", "forward/sm90/consumer.cuh", "if (kTrim) skip_turn();", "", "deadlock"],
    [
        "K that is left out is not given back, trimmed",
        "forward/sm90/consumer.cuh",
        "            release_k();\n            if (kTrim)",
        "            if (kTrim)",
        "deadlock|the oracle says",
    ],
    // O in a place of its own.
    [
        "Q's place given away with its scores to come, apart",
        "forward/sm90/consumer.cuh",
        "if (n == work.own.begin) release_q();",
        "if (n == work.own.end - 1) release_q();",
        "on its way|deadlock|the oracle says|more arrivals",
    ],
    [
        "O overwritten before it has left, apart",
        "forward/sm90/consumer.cuh",
        "if (kOutputApart) release_o();",
        "",
        "on its way|the oracle says|read by",
    ],
];

/// Of kernels that go by lists of key blocks, with [`ANYWHERE`].
const LISTS: &[Fault] = &[
    [
        "a cut block taken for a whole one",
        "lib/cuda/live_blocks.cuh",
        "if (any && none) return kMixed;",
        "if (any && none) return kWhole;",
        "the oracle says",
    ],
    [
        "a block left out",
        "lib/cuda/live_blocks.cuh",
        "__popc(wholes & below)]",
        "__popc(wholes & below) / 2]",
        "the oracle says",
    ],
    [
        "whole blocks behind the last key",
        "lib/cuda/live_blocks.cuh",
        "n >= window.full_end)) kind = kMixed",
        "n > window.full_end)) kind = kMixed",
        "the oracle says",
    ],
    [
        "the mask of another row",
        "lib/cuda/live_blocks.cuh",
        "if (lane == i * 4 + c)",
        "if (lane == (i ^ 1) * 4 + c)",
        "the oracle says",
    ],
    ["keys of a share one off", "lib/cuda/live_blocks.cuh", "c * 2 + i % 2", "c * 2 + (i + 1) % 2", "the oracle says"],
    [
        "the lists of another head",
        "lib/cuda/mask_units.cuh",
        "kMaskByHead ? tile.head",
        "kMaskByHead ? 0",
        "the oracle says",
    ],
    [
        "block numbers taken for places",
        "forward/sm90/producer.cuh",
        "args.v, full, block, work.tile",
        "args.v, full, n, work.tile",
        "the oracle says",
    ],
    [
        "non-finite elements of V stay out",
        "forward/sm90/output.cuh",
        "place < work.all.end; place++",
        "place < work.all.full_end; place++",
        "the oracle says",
    ],
];

/// Of kernels whose runs of keys lie in memory, with [`DOCUMENTS`].
const RUNS: &[Fault] = &[
    [
        "the run of the row before",
        "lib/cuda/runs.cuh",
        "* q_len + q];",
        "* q_len + max_of(q - 1, 0)];",
        "the oracle says",
    ],
    [
        "one key too many",
        "lib/cuda/runs.cuh",
        "min_of(run.last, window.last) + 1",
        "min_of(run.last + 1, window.last) + 1",
        "the oracle says",
    ],
    [
        "blocks of a tile's first rows alone",
        "lib/cuda/runs.cuh",
        "found[0].join(found[i]);",
        ";",
        "the oracle says|deadlock",
    ],
    ["blocks of one lane's rows alone", "lib/cuda/runs.cuh", "ends.over_lanes();", "", "the oracle says"],
    [
        "runs of another head",
        "lib/cuda/mask_units.cuh",
        "kMaskByHead ? tile.head",
        "kMaskByHead ? 0",
        "the oracle says",
    ],
    ["a search that looks at half of the places", "lib/cuda/search.cuh", "& 0xffff", "& 0xff", "the oracle says"],
    [
        "ends looked for where they are not",
        "lib/cuda/program_blocks.cuh",
        "__shfl_sync(0xffffffff, x, 16)",
        "__shfl_sync(0xffffffff, x, 0)",
        "the oracle says",
    ],
    // Consumers that leave out blocks, and chain those tiles where nothing arrives between.
    [
        "a tile chained over keys that others ask for, trimmed",
        "forward/sm90/consumer.cuh",
        "(kTrim && after(work) > 0)",
        "false",
        "the oracle says|deadlock|on its way",
    ],
    [
        "a chained tile that begins with keys of others, trimmed",
        "forward/sm90/consumer.cuh",
        "(!kTrim || before(next) == 0)",
        "true",
        "the oracle says|deadlock|on its way",
    ],
    [
        "a tile that opens without the turn that others take, trimmed and chained",
        "forward/sm90/consumer.cuh",
        "if (kTrim && kChain) wait_turn();",
        "",
        "deadlock|more arrivals|has ended",
    ],
];

/// Documents of each head's own, shorter than a consumer's rows.
const DOCUMENTS: &str = "d: i32[batch, heads, *] nondecreasing; mask = d[b, h, q] == d[b, h, kv];";

/// A mask that leaves out blocks of 32 keys and 128 queries, cuts some, and shows others whole, each head its own.
const ANYWHERE: &str = "mask = (q // 64 + 2 * (kv // 32) + h) % 3 == 0 or (kv + q + h) % 97 == 0;";

/// Of kernels that have biases brought, or copy those that the copy engine cannot bring.
const BIASES: &[Fault] = &[
    [
        "the biases of another row",
        "forward/sm90/biases.cuh",
        "row = lane % 16, at",
        "row = (lane ^ 1) % 16, at",
        "the oracle says",
    ],
    [
        "the biases of another head",
        "lib/cuda/program.cuh",
        "bias.index[kLeading - 1 - a] = index;",
        "bias.index[kLeading - 1 - a] = 0;",
        "the oracle says",
    ],
    [
        "the biases of another consumer",
        "forward/sm90/biases.cuh",
        "tile.row + c * 64, bias.index[0]",
        "tile.row, bias.index[0]",
        "the oracle says",
    ],
    [
        "the biases of the block before",
        "forward/sm90/biases.cuh",
        "block * kBlockKV + chunk * 64, tile.row",
        "(block ^ 1) * kBlockKV + chunk * 64, tile.row",
        "the oracle says",
    ],
    [
        "biases taken before they are there",
        "forward/sm90/biases.cuh",
        "mbarrier_wait(smem + Layout::kFullBias + at * 8, ring.parity);",
        "",
        "on its way|never written|the oracle says",
    ],
    [
        "a place of biases freed too early",
        "forward/sm90.cu",
        "mbarrier_init(smem + Layout::kEmptyBias + i * 8, 4);",
        "mbarrier_init(smem + Layout::kEmptyBias + i * 8, 3);",
        "on its way|more arrivals|deadlock|the oracle says",
    ],
    [
        "biases given back before they are taken",
        "forward/sm90/biases.cuh",
        "mbarrier_wait(smem + Layout::kFullBias + at * 8, ring.parity);",
        "mbarrier_wait(smem + Layout::kFullBias + at * 8, ring.parity);\n        if (lane == 0) mbarrier_arrive(smem + Layout::kEmptyBias + at * 8);",
        "on its way|more arrivals|deadlock|the oracle says",
    ],
    [
        "bytes announced that nobody brings, copied by threads",
        "forward/sm90/biases.cuh",
        "__popc(args.biases_mapped) * kBytesBias",
        "kBiases * kBytesBias",
        "deadlock",
    ],
    [
        "a copy by threads told before it is made",
        "forward/sm90.cu",
        "copies_biases(args) ? 1 + kHelpers : 1",
        "copies_biases(args) ? kHelpers : 1",
        "on its way|more arrivals|never written|the oracle says|deadlock",
    ],
    [
        "keys behind the last, copied by threads",
        "forward/sm90/biases.cuh",
        "min_of(first_key + piece_of(round) * 8 + e, last_key)",
        "(first_key + piece_of(round) * 8 + e)",
        "broke down",
    ],
    [
        "rows one off, copied by threads",
        "forward/sm90/biases.cuh",
        "min_of(tile_row + row_of(round), last_row)",
        "min_of(tile_row + (row_of(round) ^ 1), last_row)",
        "the oracle says",
    ],
    [
        "what lies behind the tensor, copied by threads",
        "forward/sm90/biases.cuh",
        "at >= inside && (at & ~u64(15)) + 32 <= end",
        "at >= inside",
        "broke down",
    ],
    [
        "elements of a place before, copied by threads",
        "forward/sm90/biases.cuh",
        "at & 4 ? w[i + 1] : w[i]",
        "at & 4 ? w[i] : w[i + 1]",
        "the oracle says",
    ],
];

/// A bias for every score of every head.
const BIAS: &str = "bias: bf16[heads, q_len, kv_len]; score = score + bias[h, q, kv];";

const SM80: &[Fault] = &[
    ["one key too many", "forward/sm80.cu", "if (at > last ||", "if (at > last + 1 ||", "the oracle says"],
    ["one key before the window", "forward/sm80.cu", "at < first)", "at < first - 1)", "the oracle says"],
    [
        "aligned to the top left",
        "lib/cuda/tile.cuh",
        "i64(row) + args.kv_len - args.q_len",
        "i64(row)",
        "the oracle says",
    ],
    [
        "heads take turns at KV heads",
        "lib/cuda/tile.cuh",
        "t.head / (args.heads / args.kv_heads)",
        "t.head % args.kv_heads",
        "the oracle says",
    ],
    [
        "O is not rescaled",
        "lib/cuda/softmax.cuh",
        "o[i][j][2 * h] *= factor, o[i][j][2 * h + 1] *= factor;",
        ";",
        "the oracle says",
    ],
    ["the sum is not rescaled", "lib/cuda/softmax.cuh", "l[i][h] *= factor;", "", "the oracle says"],
    ["each thread's sum for the row's", "lib/cuda/softmax.cuh", "l[i][h] = quad_sum(l[i][h]);", "", "the oracle says"],
    [
        "an empty row divides by zero",
        "lib/cuda/softmax.cuh",
        "return l[i][h] == 0.0f ? 0.0f : reciprocal_approx(l[i][h]);",
        "return reciprocal_approx(l[i][h]);",
        "the oracle says",
    ],
    [
        "keys behind the last",
        "lib/cuda/tile.cuh",
        "args.window_right, -1), args.kv_len - 1)",
        "args.window_right, -1), args.kv_len)",
        "broke down|the oracle says",
    ],
    [
        "the last block of keys is left out",
        "lib/cuda/tile.cuh",
        "(bottom.last + kBlockKV) / kBlockKV",
        "bottom.last / kBlockKV",
        "the oracle says",
    ],
    [
        "a row behind the tensor is read",
        "lib/cuda/copy.cuh",
        "!kCheckRows || row < rows;",
        "!kCheckRows || row <= rows;",
        "broke down",
    ],
    [
        "a row behind the tile is written",
        "forward/sm80.cu",
        "if (row < out_tile.rows && chunk",
        "if (row <= out_tile.rows && chunk",
        "broke down|between its rows|the oracle says",
    ],
    [
        "nobody waits for the others' K and V",
        "forward/sm80.cu",
        "__syncthreads();  // this step's K and V are here, and everyone is done with the stage that is filled next",
        "",
        "on its way",
    ],
    [
        "K and V are used before they arrive",
        "forward/sm80.cu",
        "cp_async_wait<(kStages > 1 ? kStages - 2 : 0)>();",
        "cp_async_wait<kStages>();",
        "on its way",
    ],
    [
        "one buffer, refilled while it is read",
        "forward/sm80.cu",
        "            __syncthreads();\n            if (n > blocks.begin) copy_k(",
        "            if (n > blocks.begin) copy_k(",
        "on its way|the oracle says",
    ],
    [
        "Q in registers, overwritten before all have it",
        "forward/sm80.cu",
        "__syncthreads();  // everyone has read Q before K and V overwrite it",
        "",
        "on its way|the oracle says",
    ],
    ["V is read as it lies", "forward/sm80.cu", "ldmatrix_x4_trans(v,", "ldmatrix_x4(v,", "the oracle says"],
    [
        "non-finite elements of V stay out",
        "forward/sm80.cu",
        "if (restore) restore_non_finite(",
        "if (false) restore_non_finite(",
        "the oracle says",
    ],
    [
        "O leaves before its warp has written it",
        "forward/sm80.cu",
        "__syncwarp();  // a warp reads back only the rows that it wrote",
        "",
        "the oracle says",
    ],
];

/// Several tiles per thread block, masked blocks on both sides, rows without any key, non-finite values.
const CASE: Case = Case {
    sizes: [1, 4, 2, 130, 200],
    mask: Mask::Window { left: Some(60), right: Some(20) },
    layout: Layout::Bhsd,
    values: Distribution::Normal,
    scale: None,
    lse: true,
    bad: [0, 6, 0],
    seed: 0,
};
/// More queries than keys: the first ones see none.
const EMPTY_ROWS: Case = Case { sizes: [1, 4, 2, 200, 90], ..CASE };

/// Faults in what clusters do show in clusters, those of a block that runs ahead in one alone; O takes the place of V
/// where it fits.
fn sm90(family: &str, what: &str) -> Schedule {
    Schedule::Sm90(Sm90Schedule {
        consumers: 2,
        block_kv: if what.contains("place of V") || family == "bias" { 64 } else { 32 },
        stages: 2,
        overlap: true,
        take_turns: true,
        p_in_shared: true,
        masked_loop: true,
        lazy_rescale: false,
        pack_group: family == "sm90",
        trim: what.contains("trimmed"),
        scheduler: Sm90Scheduler::Stride,
        chain: what.contains("chained"),
        output_apart: what.contains(", apart"),
        bias_stages: if family == "bias" { 2 } else { 0 },
        exp2_eighths: 0,
        cluster: if what.contains("cluster") || what.contains("other block") { 2 } else { 1 },
        blocks_per_sm: 1,
        section_mib: 0,
        ending: false,
        quick: false,
    })
}

fn sm80(what: &str) -> Schedule {
    Schedule::Sm80(Sm80Schedule {
        warps: 2,
        rows_per_warp: 16,
        block_kv: 32,
        stages: if what.contains("one buffer") { 1 } else { 2 },
        q_in_registers: what.contains("Q in registers"),
        swizzle: Swizzle::Xor,
        blocks_per_sm: 1,
        lazy_rescale: false,
        masked_loop: true,
        order: TileOrder::HeadMajor,
    })
}

/// What is said of a kernel with the fault; an empty text when nothing is.
fn verdict(templates: &TemplateSet, family: &str, number: usize, [what, file, from, to, _]: &Fault) -> String {
    let files: BTreeMap<&str, &str> = templates.files().collect();
    let text = files[file];
    assert!(text.contains(from), "{what}: {file} has no `{from}` any more: say how to break it now");
    let broken = BTreeMap::from([((*file).to_owned(), text.replace(from, to))]);
    let others = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
    let set = TemplateSet::from_files(others.chain(broken).collect()).expect("templates that parse");
    let program = match family {
        "lists" => Some(ANYWHERE),
        "runs" => Some(DOCUMENTS),
        "bias" => Some(BIAS),
        _ => None,
    };
    let kind = match family {
        "lists" | "runs" => MaskKind::FULL,
        _ => MaskKind { left: true, right: true },
    };
    let mut problem = Problem::forward_qk_v(DType::Bf16, 72, 72, kind).expect("legal");
    problem.program = program.map(|text| ProgramRef::new(Program::parse(text).expect("a program")));
    let (schedule, arch) = match family {
        "sm80" => (sm80(what), "sm_80"),
        _ => (sm90(family, what), "sm_90a"),
    };
    let kernel = Kernel { problem, schedule, arch: arch.parse().expect("an arch") };
    let base = match family {
        _ if what.contains("empty row") => EMPTY_ROWS,
        // A row of biases is no multiple of 16 bytes.
        "bias" if what.contains("copied by threads") => Case { sizes: [1, 4, 2, 130, 199], ..CASE },
        "lists" | "runs" => Case { mask: Mask::Full, ..CASE },
        _ => CASE,
    };
    let case = |rng: &mut rand::rngs::StdRng| Case { seed: rng.random(), ..base };
    let seen = try_kernel(&kernel, &set, 40, number as u64, case).err().unwrap_or_default();
    seen.rsplit("}: ").next().unwrap_or_default().to_owned()
}

/// The machine is no judge if it lets these pass, nor if it sees them for something else.
#[test]
fn planted_faults_are_seen_as_what_they_are() {
    if !machine::has_compiler() {
        return;
    }
    let templates = templates();
    let families = [("sm90", SM90), ("lists", LISTS), ("runs", RUNS), ("bias", BIASES), ("sm80", SM80)];
    let all: Vec<(&str, usize, &Fault)> = families
        .into_iter()
        .flat_map(|(family, faults)| faults.iter().enumerate().map(move |(i, fault)| (family, i, fault)))
        .collect();
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((family, number, fault)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let seen = verdict(&templates, family, *number, fault);
                    println!("{family}, {}: {}", fault[0], seen.lines().next().unwrap_or("NOT SEEN"));
                    // The machine's own breakdown is an answer only where it is the expected one.
                    if !fault[4].split('|').any(|words| seen.contains(words)) || seen.contains("error:") {
                        missed.lock().expect("no panic").push(format!("{family}, {}: `{seen}`", fault[0]));
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().expect("no panic");
    assert!(missed.is_empty(), "not seen as what they are:\n{}", missed.join("\n"));
}
