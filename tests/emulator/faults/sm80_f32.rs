//! Faults of `forward/sm80_f32`: of what it does not share with `forward/sm80`.

use super::{CASE, Fault};
use crate::cases::Case;
use flashtune::{Distribution, Mask};
use flashtune_codegen::{Schedule, Sm80F32Schedule};

/// Many keys of about equal weight, and columns of V far from zero, so that what sums lose adds up.
pub const LONG: Case = Case {
    sizes: [1, 1, 1, 20, 3000],
    mask: Mask::Window { left: Some(1 << 20), right: Some(1 << 20) },
    values: Distribution::NormalWithOutliers,
    scale: Some(0.003),
    bad: [0; 3],
    ..CASE
};
/// More keys than O holds before it goes to memory.
pub const GATHERED: Case = Case { sizes: [1, 1, 1, 20, 5000], values: Distribution::Normal, scale: None, ..LONG };
/// An infinity of K and some of V in blocks that every row sees.
const INFINITE: Case = Case { mask: Mask::Window { left: Some(1000), right: Some(1000) }, bad: [1, 6, 0], ..CASE };

/// A schedule that shows what is wrong.
pub fn schedule(what: &str) -> Schedule {
    Schedule::Sm80F32(Sm80F32Schedule {
        warps: 2,
        rows_per_warp: 16,
        block_kv: if what.contains("one sum") { 128 } else { 32 },
        stages: if what.contains("one buffer") { 1 } else { 2 },
        blocks_per_sm: 1,
        masked_loop: false,
        ..Sm80F32Schedule::default()
    })
}

/// A case that shows what is wrong.
pub fn case(what: &str) -> Case {
    match what {
        _ if what.contains("sum") => LONG,
        _ if what.contains("gathered") => GATHERED,
        _ if what.contains("infin") => INFINITE,
        _ => Case { bad: if what.contains("non-finite") { CASE.bad } else { [0; 3] }, ..CASE },
    }
}

pub const SM80_F32: &[Fault] = &[
    [
        "what TF32 leaves of Q is lost",
        "forward/sm80_f32.cu",
        "mma_tf32(part, q[h][i].small, k[h].big[2 * side], k[h].big[2 * side + 1]);",
        "",
        "the oracle says",
    ],
    [
        "what TF32 leaves of V is lost",
        "forward/sm80_f32.cu",
        "mma_tf32(less[i][j], p[i][step].big, v[0].small[j], v[1].small[j]);",
        "",
        "the oracle says",
    ],
    [
        "what TF32 leaves is cut off too early",
        "lib/cuda/ptx/mma_tf32.cuh",
        "__uint_as_float(x) - __uint_as_float(big & kTf32Bits)",
        "__uint_as_float(x) - __uint_as_float(big)",
        "the oracle says",
    ],
    [
        "the keys of V in the order of memory",
        "forward/sm80_f32.cu",
        "{__float_as_uint(x[0]), __float_as_uint(x[2]), __float_as_uint(x[1]),",
        "{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),",
        "the oracle says",
    ],
    [
        "the columns of O in the order of tiles",
        "forward/sm80_f32.cu",
        "f(j * 8 + t * 8 + e * 4, x);",
        "f(j * 8 + t * 4 + e * 16, x);",
        "the oracle says",
    ],
    [
        "tensor cores sum P V over all keys",
        "forward/sm80_f32.cu",
        "mma_tf32(part[i][j], p[i][step].big, v[0].big[j], v[1].big[j]);",
        "mma_tf32(o[i][kFirst + j], p[i][step].big, v[0].big[j], v[1].big[j]);",
        "the oracle says",
    ],
    [
        "what has gathered is not brought to the new maximum",
        "forward/sm80_f32.cu",
        "const float factor = Softmax::factor(gathered_m[i][h], softmax.m[i][h], c);",
        "const float factor = 1.0f;",
        "the oracle says",
    ],
    [
        "infinities meet the parts of products",
        "forward/sm80_f32.cu",
        "if (any_non_finite(s)) {",
        "if (false) {",
        "the oracle says",
    ],
    [
        "non-finite elements of V stay out",
        "forward/sm80_f32.cu",
        "if (restore) restore_non_finite(",
        "if (false) restore_non_finite(",
        "the oracle says",
    ],
    [
        "non-finite elements of V reach rows that do not see them",
        "forward/sm80_f32.cu",
        "if ((words[w] & kExponent) == kExponent) words[w] = 0, bad = true;",
        "",
        "the oracle says",
    ],
    [
        "nobody waits for the others' K and V",
        "forward/sm80_f32.cu",
        "__syncthreads();  // this step's K and V are here, and everyone is done with the stage that is filled next",
        "",
        "on its way",
    ],
    [
        "one buffer, refilled while it is read",
        "forward/sm80_f32.cu",
        "            __syncthreads();\n            if (n > blocks.begin) copy_k(",
        "            if (n > blocks.begin) copy_k(",
        "on its way|the oracle says",
    ],
];
