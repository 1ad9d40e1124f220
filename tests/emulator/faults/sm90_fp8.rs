//! Faults of `forward/sm90_fp8`: of its way with V, P, sums and scales.

use super::{CASE, Fault};
use crate::cases::Case;
use flashtune::codegen::{MaskKind, Problem, Schedule, Sm90Fp8Schedule};
use flashtune::{DType, Distribution, Mask};

/// Many keys of about equal weight, so that what sums lose adds up.
const LONG: Case = Case {
    sizes: [1, 1, 1, 20, 9000],
    mask: Mask::Window { left: Some(1 << 20), right: Some(1 << 20) },
    values: Distribution::NormalWithOutliers,
    scale: Some(0.0),
    bad: [0; 3],
    ..CASE
};

pub fn problem() -> Problem {
    let kind = MaskKind { left: true, right: true };
    Problem::forward_qk_v(DType::E4m3, 80, 80, kind).expect("legal").with_output(DType::F32)
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

pub const SM90_FP8: &[Fault] = &[
    [
        "V is transposed with its keys in the order of memory",
        "forward/sm90_fp8/producer.cuh",
        "__byte_perm(x[0], x[1], 0x6420), __byte_perm(x[2], x[3], 0x6420),",
        "__byte_perm(x[0], x[1], 0x6240), __byte_perm(x[2], x[3], 0x6240),",
        "the oracle says",
    ],
    [
        "the columns of O in the order of shared memory",
        "forward/sm90_fp8/consumer.cuh",
        "store_four(to + 16 * j, x[0] * by, x[4] * by, x[1] * by, x[5] * by);",
        "store_four(to + 16 * j, x[0] * by, x[1] * by, x[4] * by, x[5] * by);",
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
        "forward/sm90_fp8/consumer.cuh",
        "scales[tile.batch * stride[0] + tile.kv_head * stride[1]]",
        "scales[tile.batch * stride[0]]",
        "the oracle says",
    ],
    [
        "P's scale stays in the log-sum-exp",
        "forward/sm90_fp8/softmax.cuh",
        "kLn2 * (fmaf(m[h], c, -kProbabilityLog2) + log2_approx(l[h]))",
        "kLn2 * (m[h] * c + log2_approx(l[h]))",
        "LSE",
    ],
    [
        "NaN of V reach rows that do not see them",
        "forward/sm90_fp8/producer.cuh",
        "x[word] &= ~((nan >> 7) * 0xff);",
        "",
        "the oracle says",
    ],
    [
        "NaN of V stay out",
        "forward/sm90_fp8/consumer.cuh",
        "if (kMasks && read_flag(smem + Layout::kMetNan) != 0) restore_nan(work);",
        "",
        "the oracle says",
    ],
    [
        "transposed V is not ordered before the products",
        "forward/sm90_fp8/producer.cuh",
        "            fence_async_proxy();\n            __syncwarp();",
        "            __syncwarp();",
        "fence|ordered",
    ],
    [
        "V is transposed into a stage that is still read",
        "forward/sm90_fp8/producer.cuh",
        "            v.acquire(smem);\n            if (kMasks",
        "            if (kMasks",
        "the oracle says|wgmma|read|written|bits",
    ],
];
