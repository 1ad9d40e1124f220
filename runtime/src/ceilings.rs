//! What a device reaches at best: the rates of a copy and of a matrix multiplication, measured with the same clock as
//! the kernels that are compared with them.

use crate::{Device, Result, Stream};
use flashtune_codegen::DType;
use std::fmt;
use std::time::{Duration, Instant};

/// A rate that bounds attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ceiling {
    /// Bytes per second of a copy in device memory, read and written counted both.
    Copy,
    /// Operations per second of a matrix multiplication of this dtype, accumulated in fp32.
    Matmul(DType),
}

impl fmt::Display for Ceiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ceiling::Copy => f.write_str("copying memory"),
            Ceiling::Matmul(dtype) => write!(f, "multiplying {dtype} matrices"),
        }
    }
}

/// Work of a known amount on one device, with the memory that it needs.
pub trait Probe {
    /// By what it works, in a few words.
    fn how(&self) -> String;
    /// Bytes or operations of one run.
    fn amount(&self) -> f64;
    /// Enqueues one run on the stream.
    fn run(&mut self, stream: Stream) -> Result<()>;
}

/// A measured rate.
#[derive(Debug, Clone, PartialEq)]
pub struct Rate {
    /// Bytes or operations per second.
    pub per_second: f64,
    /// By what it was measured.
    pub how: String,
}

/// Runs that are timed at least, and how long more of them may take.
const RUNS: usize = 7;
const BUDGET: Duration = Duration::from_millis(300);

/// Measures a ceiling: the best of several runs, because a ceiling that a lucky kernel exceeds would be none.
///
/// # Errors
/// When the device has no memory, or what the measurement needs is not there (cuBLAS for instance): the message says
/// so.
pub fn measure(device: &dyn Device, ceiling: Ceiling) -> Result<Rate> {
    let mut probe = device.probe(ceiling)?;
    let stream = device.stream();
    let mut run = || device.time_us(stream, &mut || probe.run(stream));
    // Pages, threads, clocks and the library's own choices.
    for _ in 0..2 {
        run()?;
    }
    let (mut best, mut runs) = (f64::INFINITY, 0);
    let start = Instant::now();
    while runs < RUNS || start.elapsed() < BUDGET {
        best = best.min(run()?);
        runs += 1;
    }
    Ok(Rate { per_second: probe.amount() / best * 1e6, how: format!("{}, best of {runs}", probe.how()) })
}

/// `n` bytes of a dtype's normals, repeated from a few that are drawn: zeros would cost less power than data.
pub(crate) fn normals(dtype: DType, n: usize, seed: u64) -> Vec<u8> {
    use crate::{Distribution, HostTensor, Layout};
    let drawn = HostTensor::random(dtype, [1, 1, 1, 65_521], Layout::Bhsd, seed, Distribution::Normal);
    drawn.bytes().iter().copied().cycle().take(n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuDevice;
    use flashtune_codegen::{Arch, CpuIsa};

    #[test]
    fn the_hosts_ceilings_are_of_a_plausible_size() {
        let device = CpuDevice::open().unwrap();
        // From a small board to a large server.
        let copy = measure(&*device, Ceiling::Copy).unwrap();
        assert!((1e8..1e13).contains(&copy.per_second), "{copy:?}");
        let matmul = measure(&*device, Ceiling::Matmul(DType::F32)).unwrap();
        assert!((1e8..1e14).contains(&matmul.per_second), "{matmul:?}");
        assert!(matmul.how.contains("f32"), "{matmul:?}");
    }

    #[test]
    fn a_ceiling_that_cannot_be_measured_says_why() {
        let device = CpuDevice::open().unwrap();
        let bf16 = measure(&*device, Ceiling::Matmul(DType::Bf16));
        match device.fingerprint().arch {
            Arch::Cpu(isa) if isa >= CpuIsa::Avx512Bf16 => {
                assert!(bf16.unwrap_err().to_string().contains("bf16"));
            }
            _ => assert!(bf16.unwrap().how.contains("f32")),
        }
    }

    #[test]
    fn normals_repeat_and_have_the_size() {
        let bytes = normals(DType::Bf16, 200_001, 1);
        assert_eq!(bytes.len(), 200_001);
        assert_eq!(bytes[..100], bytes[2 * 65_521..][..100]);
        assert_ne!(bytes[..100], normals(DType::Bf16, 100, 2));
    }
}
