//! Faults of `forward/sm90_fp8`: of its way with V, P, sums and scales.

use super::{CASE, Fault};
use crate::cases::Case;
use flashtune::{DType, Distribution, Mask, Program};
use flashtune_codegen::{MaskKind, Problem, ScaleUnit, ScaleUnits, Schedule, Sm90Fp8Schedule};

/// Many keys of about equal weight, so that what sums lose adds up.
const LONG: Case = Case {
    sizes: [1, 1, 1, 20, 9000],
    mask: Mask::Window { left: Some(1 << 20), right: Some(1 << 20) },
    values: Distribution::NormalWithOutliers,
    scale: Some(0.0),
    bad: [0; 3],
    ..CASE
};

/// A mask, a change of the score and a sink.
const PROGRAM: &str = "s: f32[heads]; mask = kv <= q + 40 and kv % 7 != 3; \
     score = 4.0 * tanh(score * 0.25) + 0.1 * s[h]; sink = s[h];";

/// With scales of rows and channels, a program, or an O of e4m3, where a fault is of these.
pub fn problem(what: &str) -> Problem {
    let kind = MaskKind { left: true, right: true };
    let finer = ScaleUnits { q: ScaleUnit::Rows, k: ScaleUnit::Rows, v: ScaleUnit::Channel };
    let scales = if what.contains("finer") { finer } else { ScaleUnits::default() };
    let problem = Problem::forward_qk_v(DType::E4m3, 80, 80, kind).expect("legal");
    let output = if what.contains("O of e4m3") { DType::E4m3 } else { DType::F32 };
    let problem = problem.with_output(output).with_scales(scales);
    match what.contains("program") {
        true => problem.with_program(Program::parse(PROGRAM).expect("a program")),
        false => problem,
    }
}

/// A schedule that shows what is wrong.
pub fn schedule(what: &str) -> Schedule {
    Schedule::Sm90Fp8(Sm90Fp8Schedule {
        consumers: 2,
        block_kv: 64,
        stages: 2,
        raw_stages: 1,
        part: 16,
        overlap: !what.contains("serial"),
        take_turns: false,
        blocks_per_sm: 1,
        section_mib: 0,
    })
}

/// A case that shows what is wrong.
pub fn case(what: &str) -> Case {
    match what {
        _ if what.contains("over all keys") => LONG,
        _ => Case { bad: if what.contains("NaN") { CASE.bad } else { [0; 3] }, ..CASE },
    }
}

/// Of what both families store by.
pub const OUTPUT_FP8: &[Fault] = &[
    [
        "an O of e4m3 has no scale",
        "lib/cuda/attention/e4m3_scales.cuh",
        "args.o_scale == nullptr ? 1.0f : __ldg(args.o_scale)",
        "1.0f",
        "the oracle says",
    ],
    [
        "an O of e4m3 whose threads keep their columns",
        "lib/cuda/attention/output_fp8.cuh",
        "const u32 low = odd ? other : first, high = odd ? second : other;",
        "const u32 low = odd ? first : first, high = odd ? second : second;",
        "the oracle says",
    ],
];

pub const SM90_FP8: &[Fault] = &[
    [
        "V is transposed with its keys in the order of memory",
        "forward/sm90_fp8/transpose.cuh",
        "__byte_perm(x[0], x[1], 0x6420), __byte_perm(x[2], x[3], 0x6420),",
        "__byte_perm(x[0], x[1], 0x6240), __byte_perm(x[2], x[3], 0x6240),",
        "the oracle says",
    ],
    [
        "the columns of O in the order of shared memory",
        "forward/sm90_fp8/consumer.cuh",
        "o[8 * j + 2 * h + i % 2 * 4 + i / 2] * by;",
        "o[8 * j + 2 * h + i / 2 * 4 + i % 2] * by;",
        "the oracle says",
    ],
    [
        "tensor cores sum P V over all keys",
        "forward/sm90_fp8/consumer.cuh",
        "sum = fmaf(sum, factor[i / 2 % 2], t[i]);",
        "sum = __uint_as_float(__float_as_uint(fmaf(sum, factor[i / 2 % 2], t[i])) & ~0x3ffu);",
        "the oracle says|in the mean",
    ],
    [
        "sums are not brought to the new maximum",
        "forward/sm90_fp8/consumer.cuh",
        "sum = fmaf(sum, factor[i / 2 % 2], t[i]);",
        "sum += t[i];",
        "the oracle says",
    ],
    [
        "a factor of the block after",
        "forward/sm90_fp8/consumer.cuh",
        "multiply(before, [&](auto part) {",
        "multiply(softmax.factor, [&](auto part) {",
        "the oracle says",
    ],
    [
        "K has the scale of another head",
        "lib/cuda/attention/descale.cuh",
        "scales[tile.batch * stride[0] + tile.kv_head * stride[1]]",
        "scales[tile.batch * stride[0]]",
        "the oracle says",
    ],
    [
        "finer: the scale of the next key",
        "forward/sm90_fp8/loader.cuh",
        "scales.at(key) : 0.0f",
        "scales.at(max_of(key - 1, 0)) : 0.0f",
        "the oracle says|in the mean|LSE",
    ],
    [
        "finer: scales of keys in the order of memory",
        "forward/sm90_fp8/loader.cuh",
        "to += (lane / 16 * 16 + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2) * 4;",
        "to += lane * 4;",
        "the oracle says|in the mean|LSE",
    ],
    [
        "finer: scales of keys from another stage",
        "forward/sm90_fp8/consumer.cuh",
        "Layout::key_scales_at(smem, k.stage) + lane() % 4 * 16;",
        "Layout::key_scales_at(smem, 0) + lane() % 4 * 16;",
        "the oracle says|in the mean|LSE|never written",
    ],
    [
        "finer: a stage is full before all lanes have written its scales",
        "forward/sm90_fp8/loader.cuh",
        "            __syncwarp();\n            if (leads) k.commit(smem);",
        "            if (leads) k.commit(smem);",
        "the oracle says|in the mean|LSE|never written|ordered|read",
    ],
    [
        "finer: a stage is given back before all lanes have read its scales",
        "forward/sm90_fp8/consumer.cuh",
        "        __syncwarp();  // all lanes have read them: one gives the stage back\n",
        "",
        "the oracle says|in the mean|LSE|written",
    ],
    [
        "finer: a row of Q has the scale of its KV head's",
        "lib/cuda/attention/descale.cuh",
        "f.q_descale_stride, tile.batch, tile.head}",
        "f.q_descale_stride, tile.batch, tile.kv_head}",
        "the oracle says|in the mean|LSE",
    ],
    [
        "finer: both rows of a thread have the scale of one",
        "forward/sm90_fp8/consumer.cuh",
        "id * 64 + warp() * 16 + lane() / 4 + h * 8);\n#else",
        "id * 64 + warp() * 16 + lane() / 4);\n#else",
        "the oracle says|in the mean|LSE",
    ],
    [
        "finer: the log-sum-exp has the factor of the other row",
        "forward/sm90_fp8/softmax.cuh",
        "kLn2 * (fmaf(m[h], c[h], -kProbabilityLog2)",
        "kLn2 * (fmaf(m[h], c[1 - h], -kProbabilityLog2)",
        "LSE",
    ],
    [
        "finer: negative scales of rows",
        "forward/sm90_fp8/consumer.cuh",
        "if (of_row > 0.0f) continue;",
        "continue;",
        "the oracle says|in the mean|LSE",
    ],
    [
        "finer: channels have the scale of the next",
        "forward/sm90_fp8/consumer.cuh",
        "channels.at(16 * j + lane() % 4 * 4 + i);",
        "channels.at(min_of(16 * j + lane() % 4 * 4 + i + 1, kHeadDimV - 1));",
        "the oracle says|in the mean",
    ],
    [
        "P's scale stays in the log-sum-exp",
        "forward/sm90_fp8/softmax.cuh",
        "kLn2 * (fmaf(m[h], c[h], -kProbabilityLog2) + log2_approx(l[h]))",
        "kLn2 * (m[h] * c[h] + log2_approx(l[h]))",
        "LSE",
    ],
    [
        "NaN of V reach rows that do not see them",
        "forward/sm90_fp8/transpose.cuh",
        "x[word] &= ~((none >> 7) * 0xff);",
        "",
        "the oracle says",
    ],
    ["NaN of V stay out", "forward/sm90_fp8/consumer.cuh", "restore_special(work, inverse);", ";", "the oracle says"],
    [
        "transposed V is not ordered before the products",
        "forward/sm90_fp8/transpose.cuh",
        "            fence_async_proxy();\n            __syncwarp();",
        "            __syncwarp();",
        "fence|ordered",
    ],
    [
        "V is transposed into a stage that is still read",
        "forward/sm90_fp8/transpose.cuh",
        "            v.acquire(smem);\n            if (kMasks",
        "            if (kMasks",
        "the oracle says|wgmma|read|written|bits",
    ],
    [
        "a program is given scores in other units",
        "forward/sm90_fp8/consumer.cuh",
        "unit.of[h] = of_row == 0.0f ? 1.0f : fabsf(of_row);",
        "unit.of[h] = 1.0f;",
        "the oracle says|in the mean|LSE",
    ],
    [
        "finer: a program is given the scores of the other row's scale",
        "forward/sm90_fp8/consumer.cuh",
        "s[i] *= unit[i / 2 % 2];",
        "s[i] *= unit[1 - i / 2 % 2];",
        "the oracle says|in the mean|LSE",
    ],
    [
        "the sink of a program beside sums of scaled P",
        "forward/sm90_fp8/softmax.cuh",
        "as_log2(m[h], c[h]) - kProbabilityLog2, sinks[h]",
        "as_log2(m[h], c[h]), sinks[h]",
        "the oracle says|in the mean|LSE",
    ],
    [
        "blocks of a program's mask by the first row alone",
        "forward/sm90_fp8/loader.cuh",
        "tile.row, tile.row + tile.rows - 1, work.blocks",
        "tile.row, tile.row, work.blocks",
        "the oracle says|in the mean|LSE|deadlock",
    ],
    [
        "blocks of a program's mask that the loader found, left aside",
        "forward/sm90_fp8/scheduler.cuh",
        "if (kProgramMask) work.blocks = by_program;",
        "",
        "deadlock|the oracle says",
    ],
    [
        "NaN of V reach rows from which a program masks them",
        "forward/sm90_fp8/consumer.cuh",
        " && program_visible(head(work), row, key)",
        "",
        "the oracle says",
    ],
];
