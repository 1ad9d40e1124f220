//! What the host processor reaches at best: copies and matrix multiplications on all cores.

use super::memory::CpuBuffer;
use crate::ceilings::normals;
use crate::{Ceiling, Error, Probe, Result, Stream};
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{Arch, CpuIsa, DType};
use rayon::ThreadPool;
use rayon::prelude::*;

/// Rows and columns of the matrices that a core multiplies: three of them fit its share of the caches.
const SIDE: usize = 768;

/// The probe of a ceiling on these threads.
///
/// # Errors
/// When there is no memory, or no library that multiplies with the instructions that kernels of the dtype use.
pub(super) fn probe(ceiling: Ceiling, host: &DeviceFingerprint, pool: &'static ThreadPool) -> Result<Box<dyn Probe>> {
    match (ceiling, host.arch) {
        (Ceiling::Copy, _) => Ok(Box::new(Copy::new(host, pool)?)),
        // Kernels use AMX and bf16 dot products where they are faster: fp32 products are no ceiling for those.
        (Ceiling::Matmul(DType::Bf16), Arch::Cpu(isa)) if isa >= CpuIsa::Avx512Bf16 => Err(Error::Missing {
            what: "a matrix multiplication with this processor's bf16 instructions",
            searched: "this build multiplies f32 matrices only".to_owned(),
            remedy: "take the share of the copy ceiling, or compare with PyTorch by benches/peers.py --device cpu",
        }),
        (Ceiling::Matmul(_), _) => Ok(Box::new(Matmul::new(pool))),
    }
}

/// Copies one block of memory to another, a part of it on every core.
struct Copy {
    pool: &'static ThreadPool,
    bytes: usize,
    from: CpuBuffer,
    to: CpuBuffer,
}

impl Copy {
    fn new(host: &DeviceFingerprint, pool: &'static ThreadPool) -> Result<Self> {
        // Beyond the last-level cache, but no burden on a small machine.
        let most = (host.memory_bytes / 16).clamp(64 << 20, 1 << 30);
        let bytes = (4 * host.cache_bytes).clamp(256 << 20, 1 << 30).min(most) as usize;
        let (from, to) = (CpuBuffer::new(bytes)?, CpuBuffer::new(bytes)?);
        // A page that was never written is no memory yet.
        from.fill(1);
        to.fill(2);
        Ok(Self { pool, bytes, from, to })
    }
}

impl Probe for Copy {
    fn how(&self) -> String {
        format!("memcpy of {} MiB on {} threads", self.bytes >> 20, self.pool.current_num_threads())
    }

    fn amount(&self) -> f64 {
        2.0 * self.bytes as f64
    }

    fn run(&mut self, _: Stream) -> Result<()> {
        let part = self.bytes.div_ceil(self.pool.current_num_threads()).next_multiple_of(4096);
        let (from, to) = (self.from.bytes(), self.to.bytes_mut());
        self.pool.install(|| {
            to.par_chunks_mut(part).zip(from.par_chunks(part)).for_each(|(to, from)| to.copy_from_slice(from));
        });
        Ok(())
    }
}

/// Multiplies f32 matrices, every core its own.
struct Matmul {
    pool: &'static ThreadPool,
    /// A and B, which all cores read.
    inputs: [Vec<f32>; 2],
    /// One product per core.
    products: Vec<Vec<f32>>,
}

impl Matmul {
    fn new(pool: &'static ThreadPool) -> Self {
        let matrix = |seed| {
            let bytes = normals(DType::F32, 4 * SIDE * SIDE, seed);
            bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let products = vec![vec![0.0; SIDE * SIDE]; pool.current_num_threads()];
        Self { pool, inputs: [matrix(1), matrix(2)], products }
    }
}

impl Probe for Matmul {
    fn how(&self) -> String {
        let threads = self.pool.current_num_threads();
        format!("f32 products of {SIDE} x {SIDE} matrices, one per thread on {threads} threads (matrixmultiply)")
    }

    fn amount(&self) -> f64 {
        2.0 * (SIDE as f64).powi(3) * self.pool.current_num_threads() as f64
    }

    fn run(&mut self, _: Stream) -> Result<()> {
        let ([a, b], products) = (&self.inputs, &mut self.products);
        let (n, stride) = (SIDE, SIDE as isize);
        self.pool.install(|| {
            products.par_iter_mut().with_max_len(1).for_each(|c| {
                // SAFETY: three matrices of n rows of n contiguous elements; `c` is this iteration's own.
                unsafe {
                    matrixmultiply::sgemm(
                        n,
                        n,
                        n,
                        1.0,
                        a.as_ptr(),
                        stride,
                        1,
                        b.as_ptr(),
                        stride,
                        1,
                        0.0,
                        c.as_mut_ptr(),
                        stride,
                        1,
                    );
                }
            });
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CpuDevice, Device};

    #[test]
    fn probes_do_the_work_that_they_claim() {
        let device = CpuDevice::open().unwrap();
        let mut copy = Copy::new(device.fingerprint(), device.pool).unwrap();
        copy.run(Stream(0)).unwrap();
        assert!(copy.to.bytes().iter().all(|b| *b == 1));

        let mut matmul = Matmul::new(device.pool);
        matmul.run(Stream(0)).unwrap();
        let [a, b] = &matmul.inputs;
        for product in &matmul.products {
            for (i, j) in [(0, 0), (5, 700), (767, 767)] {
                let exact: f64 = (0..SIDE).map(|k| a[i * SIDE + k] as f64 * b[k * SIDE + j] as f64).sum();
                assert!((product[i * SIDE + j] as f64 - exact).abs() < 1e-2, "{i} {j}");
            }
        }
    }
}
