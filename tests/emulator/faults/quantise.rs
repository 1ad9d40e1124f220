//! Faults that are planted in `quantise/cuda`.

use super::Fault;
use crate::quantise::{kernel_of, try_quantise};
use flashtune::DType;
use flashtune_codegen::TemplateSet;

const FILE: &str = "quantise/cuda.cu";

pub const QUANTISE: &[Fault] = &[
    [
        "the scale of another unit",
        FILE,
        "scale_of(__ldcg(scratch.largest + place))",
        "scale_of(__ldcg(scratch.largest + (place ^ 1)))",
        "the scale of",
    ],
    [
        "the scale is written for another head",
        FILE,
        "*scales_of(args, t, rows, rows.kv_head) = scale",
        "*scales_of(args, t, rows, 0) = scale",
        "the scale of",
    ],
    [
        "the largest of half a warp",
        FILE,
        "most = largest_of_lanes(most, 1, 32);",
        "most = largest_of_lanes(most, 1, 16);",
        "the scale of",
    ],
    [
        "the largest of one warp",
        FILE,
        "for (int w = 0; w < kWarps; w++) most",
        "for (int w = 0; w < 1; w++) most",
        "the scale of",
    ],
    [
        "an infinity decides the scale",
        FILE,
        "return bits < 0x7f800000 ? bits : 0;",
        "return bits <= 0x7f800000 ? bits : 0;",
        "the scale of",
    ],
    ["zeros divide by zero", FILE, "largest == 0 ? 1.0f", "false ? 1.0f", "the scale of"],
    ["a scale below normal numbers", FILE, ", 0x1p-126f)", ", 0.0f)", "the scale of| is "],
    [
        "the heads of a group are one",
        FILE,
        "kv_head * group_of(args, t) + item.tile / of_head",
        "kv_head * group_of(args, t)",
        " is |the scale of",
    ],
    [
        "a tile of K is not in its mean",
        FILE,
        "tile < list.tiles[kK]; tile++",
        "tile < list.tiles[kK] - 1; tile++",
        "the mean of| is ",
    ],
    [
        "a warp's rows are not in the mean",
        FILE,
        "for (int w = 0; w < kWarps; w++) sum",
        "for (int w = 1; w < kWarps; w++) sum",
        "the mean of| is ",
    ],
    [
        "the mean of an infinity",
        FILE,
        "sums[u][i] += is_finite(x[u][i]) ? x[u][i] : 0.0f",
        "sums[u][i] += x[u][i]",
        "the mean of| is ",
    ],
    [
        "the mean is taken from Q as well",
        FILE,
        "if (tensor == kK && args.subtracts_mean && row >= 0)",
        "if (tensor != kV && args.subtracts_mean && row >= 0)",
        " is |the scale of|never written",
    ],
    [
        "the mean of another unit",
        FILE,
        "__ldcg(scratch.mean + i64(unit) * kHeadDimQK + c)",
        "__ldcg(scratch.mean + c)",
        " is |the scale of",
    ],
    ["a mean beyond fp32", FILE, "is_finite(quotient) ? quotient : 0.0f", "quotient", "the mean of| is "],
    ["the matrix over no root", FILE, "x[u][i] *= root_of_inverse(kDim)", "x[u][i] *= 1.0f", " is |the scale of"],
    [
        "signs of the matrix",
        FILE,
        "? other - x[u][i] : x[u][i] + other",
        "? x[u][i] - other : x[u][i] + other",
        " is |the scale of",
    ],
    [
        "V is rotated",
        FILE,
        "rotates = tensor != kV && args.cos != nullptr",
        "rotates = args.cos != nullptr",
        " is |the scale of|broke down|not the same bytes",
    ],
    [
        "positions of Q for K's",
        FILE,
        "args.first_position[tensor] + row",
        "args.first_position[0] + row",
        " is |the scale of",
    ],
    [
        "the mean before the rotation",
        FILE,
        "each_row<kDim, false>(args, smem, rows, kK, [] {},",
        "each_row<kDim, false>(args, smem, rows, kV, [] {},",
        "the mean of| is ",
    ],
    [
        "a row by a part of its elements",
        FILE,
        "largest_of_part<kDim>(x), 1, kLanes));",
        "largest_of_part<kDim>(x), 1, kLanes / 2));",
        "the scale of",
    ],
    [
        "a block by half of its rows",
        FILE,
        "row < of_scale; row += together",
        "row < max_of(of_scale / 2, 1); row += together",
        "the scale of",
    ],
    [
        "rows by the scale of another block",
        FILE,
        "(step * kStepRows + int(threadIdx.x) / kLanes) >> log2;",
        "((step * kStepRows + int(threadIdx.x) / kLanes) >> log2) ^ 1;",
        " is ",
    ],
    [
        "scales of rows of Q where those of its KV head are",
        FILE,
        "scales_of(args, t, rows, rows.head)[row",
        "scales_of(args, t, rows, rows.kv_head)[row",
        "the scale of",
    ],
    [
        "channels of all units",
        FILE,
        "scratch.channels + i64(item.unit) * kDim + c, of_tile",
        "scratch.channels + c, of_tile",
        "the scale of",
    ],
    [
        "channels by the rows of one warp",
        FILE,
        "for (int w = 0; w < kWarps; w++) of_tile",
        "for (int w = 0; w < 1; w++) of_tile",
        "the scale of",
    ],
    ["the scale of the next channel", FILE, "return inverse[u][i];", "return inverse[u][i ^ 1];", " is "],
    [
        "the largest of before",
        FILE,
        "scratch.taken[i] = 0",
        "if (i != scratch.largest - scratch.taken) scratch.taken[i] = 0",
        "the scale of",
    ],
];

/// What is said of a kernel with the fault; an empty text when nothing is.
pub fn verdict(set: &TemplateSet, number: u64, what: &str) -> String {
    // Only rows of fp32 have means beyond it, and scales below normal numbers.
    let dtype = if what.contains("beyond") || what.contains("below") { DType::F32 } else { DType::Bf16 };
    // Of one call in forty.
    let calls = if what.contains("beyond") { 300 } else { 60 };
    try_quantise(&kernel_of(dtype, (64, 64), "sm_90a"), set, calls, number).err().unwrap_or_default()
}
