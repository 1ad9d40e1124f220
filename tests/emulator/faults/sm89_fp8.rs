//! Faults of `forward/sm89_fp8`: of its way with V, P, sums and scales. Cases are those of `forward/sm90_fp8`.

use super::Fault;
use flashtune_codegen::{Schedule, Sm89Fp8Schedule, Swizzle, TileOrder};

/// A schedule that shows what is wrong.
pub fn schedule(what: &str) -> Schedule {
    Schedule::Sm89Fp8(Sm89Fp8Schedule {
        warps: 2,
        rows_per_warp: if what.contains("second tile") { 32 } else { 16 },
        block_kv: 64,
        stages: if what.contains("one buffer") { 1 } else { 2 },
        q_in_registers: what.contains("Q in registers"),
        swizzle: Swizzle::Xor,
        blocks_per_sm: 1,
        in_order: false,
        order: TileOrder::HeadMajor,
    })
}

pub const SM89_FP8: &[Fault] = &[
    [
        "finer: the scale of the next key",
        "forward/sm89_fp8/rows.cuh",
        "scales.address(key + i),",
        "scales.address(max_of(key + i - 1, 0)),",
        "the oracle says|in the mean|LSE",
    ],
    [
        "finer: the second row of a thread has the scale of the first",
        "forward/sm89_fp8/rows.cuh",
        "const float of_row = scale * query_descale(args, tile, row_of_thread(row / 2, row % 2));",
        "const float of_row = scale * query_descale(args, tile, row_of_thread(row / 2, 0));",
        "the oracle says|in the mean|LSE",
    ],
    [
        "finer: the log-sum-exp has the factor of the other row",
        "forward/sm89_fp8/softmax.cuh",
        "kLn2 * (fmaf(m[i][h], c[2 * i + h], -kProbabilityLog2)",
        "kLn2 * (fmaf(m[i][h], c[2 * i + 1 - h], -kProbabilityLog2)",
        "LSE",
    ],
    [
        "finer: channels have the scale of the next",
        "forward/sm89_fp8/rows.cuh",
        "channels.at(16 * group + lane % 4 * 4 + n);",
        "channels.at(min_of(16 * group + lane % 4 * 4 + n + 1, kHeadDimV - 1));",
        "the oracle says|in the mean",
    ],
    [
        "V comes with its keys in the order of memory",
        "forward/sm89_fp8/products.cuh",
        "even0 = __byte_perm(v[0], v[1], 0x6420), even1 = __byte_perm(v[2], v[3], 0x6420)",
        "even0 = __byte_perm(v[0], v[1], 0x6240), even1 = __byte_perm(v[2], v[3], 0x6240)",
        "the oracle says",
    ],
    [
        "odd columns of V are even ones",
        "forward/sm89_fp8/products.cuh",
        "odd0 = __byte_perm(v[0], v[1], 0x7531)",
        "odd0 = __byte_perm(v[0], v[1], 0x6420)",
        "the oracle says",
    ],
    [
        "the columns of O in the order of accumulators",
        "forward/sm89_fp8/rows.cuh",
        "o[i][2 * group + n % 2][2 * h + n / 2] * by;",
        "o[i][2 * group + n / 2][2 * h + n % 2] * by;",
        "the oracle says",
    ],
    [
        "P comes with the keys of the other half",
        "forward/sm89_fp8/softmax.cuh",
        "p[i][j / 4][j % 4 + h] = low | high << 16;",
        "p[i][j / 4][(j % 4 + h) ^ 2] = low | high << 16;",
        "the oracle says",
    ],
    [
        "tensor cores sum P V over all keys",
        "forward/sm89_fp8/products.cuh",
        "float sums[kMTiles][2][4] = {};",
        "float sums[kMTiles][2][4];
         for (int i = 0; i < kMTiles; i++)
             for (int e = 0; e < 8; e++) {
                 float& sum = o[i][2 * group + e / 4][e % 4];
                 sums[i][e / 4][e % 4] = sum * factor[i][e % 4 / 2];
                 sum = 0.0f;
             }",
        "the oracle says|in the mean",
    ],
    [
        "sums are not brought to the new maximum",
        "forward/sm89_fp8/products.cuh",
        "sum = fmaf(sum, factor[i][e % 4 / 2], sums[i][e / 4][e % 4]);",
        "sum += sums[i][e / 4][e % 4];",
        "the oracle says",
    ],
    [
        "the second tile of rows has the factors of the first",
        "forward/sm89_fp8/products.cuh",
        "fmaf(sum, factor[i][e % 4 / 2],",
        "fmaf(sum, factor[0][e % 4 / 2],",
        "the oracle says",
    ],
    [
        "the sum is not brought to the new maximum",
        "forward/sm89_fp8/softmax.cuh",
        "l[i][h] *= factor[i][h];",
        "",
        "the oracle says|LSE",
    ],
    [
        "K has the scale of another head",
        "lib/cuda/attention/descale.cuh",
        "scales[tile.batch * stride[0] + tile.kv_head * stride[1]]",
        "scales[tile.batch * stride[0]]",
        "the oracle says",
    ],
    [
        "V has no scale",
        "forward/sm89_fp8/rows.cuh",
        "const float by = inverse * v_scale * of_o;",
        "const float by = inverse * of_o;",
        "the oracle says",
    ],
    [
        "P's scale stays in the log-sum-exp",
        "forward/sm89_fp8/softmax.cuh",
        "kLn2 * (fmaf(m[i][h], c[2 * i + h], -kProbabilityLog2) + log2_approx(sum))",
        "kLn2 * (m[i][h] * c[2 * i + h] + log2_approx(sum))",
        "LSE",
    ],
    ["one key too many", "forward/sm89_fp8/rows.cuh", "if (at > last ||", "if (at > last + 1 ||", "the oracle says"],
    [
        "NaN of V reach rows that do not see them",
        "forward/sm89_fp8/rows.cuh",
        "words[w] &= ~((nan >> 7) * 0xff);",
        "",
        "the oracle says",
    ],
    [
        "NaN of V stay out",
        "forward/sm89_fp8.cu",
        "const bool restore = kMasks && __syncthreads_or(met_nan);",
        "const bool restore = kMasks && __syncthreads_or(false);",
        "the oracle says",
    ],
    [
        "K and V are used before they arrive",
        "forward/sm89_fp8.cu",
        "cp_async_wait<(kStages > 1 ? kStages - 2 : 0)>();",
        "cp_async_wait<kStages>();",
        "on its way",
    ],
    [
        "nobody waits for the others' K and V",
        "forward/sm89_fp8.cu",
        "__syncthreads();  // this step's K and V are here, and everyone is done with the stage that is filled next",
        "",
        "on its way|never written",
    ],
    [
        "one buffer, refilled while it is read",
        "forward/sm89_fp8.cu",
        "            __syncthreads();\n            if (n > blocks.begin) copy_k(",
        "            if (n > blocks.begin) copy_k(",
        "on its way|the oracle says",
    ],
    [
        "Q in registers, overwritten before all have it",
        "forward/sm89_fp8.cu",
        "__syncthreads();  // everyone has read Q before K and V overwrite it",
        "",
        "on its way|the oracle says",
    ],
    [
        "a row behind the tile is written",
        "forward/sm89_fp8/rows.cuh",
        "const bool live = row < tile.rows;",
        "const bool live = row <= tile.rows;",
        "broke down|between its rows|the oracle says|not the same bits",
    ],
];
