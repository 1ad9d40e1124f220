//! Faults of `forward/sm80` on sm_75: of products of half the depth, and of copies through registers.

use super::Fault;
use flashtune_codegen::{Schedule, Sm80Instructions, Sm80Schedule, Swizzle, TileOrder};

/// A schedule that shows what is wrong.
pub fn schedule(what: &str) -> Schedule {
    Schedule::Sm80(Sm80Schedule {
        warps: 2,
        rows_per_warp: 16,
        block_kv: 32,
        stages: 1,
        q_in_registers: what.contains("Q in registers"),
        swizzle: Swizzle::Xor,
        blocks_per_sm: 1,
        lazy_rescale: false,
        masked_loop: what.contains("loop"),
        order: TileOrder::HeadMajor,
        instructions: Sm80Instructions::Turing,
    })
}

pub const SM75: &[Fault] = &[
    [
        "the second half of the depth is the first again",
        "lib/cuda/ptx/mma_k8.cuh",
        "\"r\"(a[2]), \"r\"(a[3]), \"r\"(b1)",
        "\"r\"(a[0]), \"r\"(a[1]), \"r\"(b0)",
        "the oracle says",
    ],
    [
        "the halves of A are taken by rows",
        "lib/cuda/ptx/mma_k8.cuh",
        "\"r\"(a[0]), \"r\"(a[1]), \"r\"(b0)",
        "\"r\"(a[0]), \"r\"(a[2]), \"r\"(b0)",
        "the oracle says",
    ],
    [
        "pairs are packed the wrong way round",
        "lib/cuda/ptx/mma_k8.cuh",
        "u32(from_float<f16>(low).bits) | u32(from_float<f16>(high).bits) << 16",
        "u32(from_float<f16>(high).bits) | u32(from_float<f16>(low).bits) << 16",
        "the oracle says",
    ],
    [
        "V stays in registers",
        "forward/sm80.cu",
        "            next_v.finish(smem_v);\n",
        "",
        "the oracle says|never written|bits",
    ],
    [
        "K stays in registers",
        "forward/sm80.cu",
        "        if (n > blocks.begin) next_k.finish(smem_k);\n",
        "",
        "the oracle says|never written|bits",
    ],
    [
        "K is stored while others multiply by it",
        "forward/sm80.cu",
        "            __syncthreads();\n            if (n > blocks.begin) copy_k(n - 1, 0, Bool<false>{});\n",
        "            if (n > blocks.begin) { copy_k(n - 1, 0, Bool<false>{}); next_k.finish(smem_k); }\n",
        "the oracle says|never written|bits",
    ],
    [
        "nobody waits for the others' K",
        "forward/sm80.cu",
        "            wait_for_copies<0>();\n            __syncthreads();\n            if (masked) {",
        "            wait_for_copies<0>();\n            if (masked) {",
        "the oracle says|never written|bits",
    ],
    [
        "Q in registers, overwritten before all have it",
        "forward/sm80.cu",
        "__syncthreads();  // everyone has read Q before K and V overwrite it",
        "",
        "the oracle says|never written|bits",
    ],
    [
        "a row behind the tensor is read",
        "forward/sm80/instructions.cuh",
        "(!kCheckRows || row < rows)",
        "(!kCheckRows || row <= rows)",
        "broke down|the oracle says",
    ],
    [
        "rows behind the last key keep what was there",
        "forward/sm80/instructions.cuh",
        "loaded[r][g] = uint4{0, 0, 0, 0};",
        "loaded[r][g] = uint4{0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff};",
        "the oracle says",
    ],
    [
        "chunks are stored where those of another row belong",
        "forward/sm80/instructions.cuh",
        "store_shared_16(to + RowsTile::offset(row, chunk), loaded[r][g]);",
        "store_shared_16(to + RowsTile::offset(row ^ 1, chunk), loaded[r][g]);",
        "the oracle says|never written",
    ],
];
