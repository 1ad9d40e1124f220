//! Matrix multiplication in fp32 on one core, for the unfused attention that fused kernels are compared with.

/// Rows of the register tile.
const MR: usize = 6;
/// Columns of the register tile and of one packed panel.
const NR: usize = 16;

/// The right-hand matrix, `k` rows by `n` columns, in panels of [`NR`] columns, padded with zeros.
pub(crate) struct Packed {
    k: usize,
    n: usize,
    data: Vec<f32>,
}

impl Packed {
    /// Packs a row-major `k` by `n` matrix.
    pub(crate) fn rows(matrix: &[f32], k: usize, n: usize) -> Self {
        let mut data = vec![0.0; n.div_ceil(NR) * NR * k];
        for (j, panel) in data.chunks_exact_mut((NR * k).max(1)).enumerate() {
            let columns = j * NR..((j + 1) * NR).min(n);
            for (p, out) in panel.chunks_exact_mut(NR).enumerate() {
                out[..columns.len()].copy_from_slice(&matrix[p * n..][columns.clone()]);
            }
        }
        Self { k, n, data }
    }

    /// Packs the transpose of a row-major `n` by `k` matrix.
    pub(crate) fn transposed(matrix: &[f32], n: usize, k: usize) -> Self {
        let mut data = vec![0.0; n.div_ceil(NR) * NR * k];
        for (j, panel) in data.chunks_exact_mut((NR * k).max(1)).enumerate() {
            for (c, row) in matrix[j * NR * k..].chunks_exact(k).take(NR).enumerate() {
                for (out, x) in panel.chunks_exact_mut(NR).zip(row) {
                    out[c] = *x;
                }
            }
        }
        Self { k, n, data }
    }
}

/// `out = a * b` for a row-major `a` of `b.k` columns; `out` is row-major with `b.n` columns.
pub(crate) fn matmul(a: &[f32], b: &Packed, out: &mut [f32]) {
    if b.n == 0 {
        return;
    }
    if b.k == 0 {
        out.fill(0.0);
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the instructions.
        unsafe { matmul_avx2(a, b, out) };
        return;
    }
    matmul_with(a, b, out, |x, y, sum| x * y + sum);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn matmul_avx2(a: &[f32], b: &Packed, out: &mut [f32]) {
    matmul_with(a, b, out, f32::mul_add);
}

/// The blocked loop; inlined into each version so that it is compiled for that version's instructions.
#[inline(always)]
fn matmul_with(a: &[f32], b: &Packed, out: &mut [f32], fma: impl Fn(f32, f32, f32) -> f32 + Copy) {
    let (k, n) = (b.k, b.n);
    // Columns of the current rows side by side, so that the loop below reads both matrices in order. Missing rows are
    // zeros, and their sums are not stored.
    let mut block = vec![[0.0; MR]; k];
    for (a, out) in a.chunks(MR * k).zip(out.chunks_mut(MR * n)) {
        for r in 0..MR {
            let row = a.get(r * k..(r + 1) * k);
            for (p, column) in block.iter_mut().enumerate() {
                column[r] = row.map_or(0.0, |row| row[p]);
            }
        }
        for (j, panel) in b.data.chunks_exact(NR * k).enumerate() {
            let columns = NR.min(n - j * NR);
            let sums = tile(&block, panel.as_chunks::<NR>().0, fma);
            for (sums, out) in sums.iter().zip(out.chunks_exact_mut(n)) {
                out[j * NR..][..columns].copy_from_slice(&sums[..columns]);
            }
        }
    }
}

/// One register tile. All trip counts but the outermost are constants, which keeps the sums in registers.
#[inline(always)]
fn tile(a: &[[f32; MR]], b: &[[f32; NR]], fma: impl Fn(f32, f32, f32) -> f32) -> [[f32; NR]; MR] {
    let mut sums = [[0.0; NR]; MR];
    for (a, b) in a.iter().zip(b) {
        for r in 0..MR {
            for c in 0..NR {
                sums[r][c] = fma(a[r], b[c], sums[r][c]);
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::StdRng};

    #[test]
    fn agrees_with_the_definition_for_ragged_sizes() {
        let mut rng = StdRng::seed_from_u64(1);
        for (m, k, n) in [(1, 1, 1), (6, 16, 16), (7, 5, 17), (13, 64, 33), (5, 0, 3), (3, 4, 0)] {
            let a: Vec<f32> = (0..m * k).map(|_| rng.random_range(-1.0..1.0)).collect();
            let b: Vec<f32> = (0..k * n).map(|_| rng.random_range(-1.0..1.0)).collect();
            let b_transposed: Vec<f32> = (0..n * k).map(|i| b[i % k * n + i / k]).collect();
            for packed in [Packed::rows(&b, k, n), Packed::transposed(&b_transposed, n, k)] {
                let mut out = vec![f32::NAN; m * n];
                matmul(&a, &packed, &mut out);
                for i in 0..m {
                    for j in 0..n {
                        let want: f64 = (0..k).map(|p| a[i * k + p] as f64 * b[p * n + j] as f64).sum();
                        assert!((out[i * n + j] as f64 - want).abs() < 1e-5, "{m}x{k}x{n} at {i},{j}");
                    }
                }
            }
        }
    }
}
