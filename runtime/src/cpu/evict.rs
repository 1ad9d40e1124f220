//! Eviction of what a kernel reads and writes from the caches, so that the next launch starts from memory.

use super::memory::{ALIGN, live};
use rayon::ThreadPool;
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Written through to replace what the caches hold.
static WORDS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Evicts all device memory of this process: line by line where the processor can and that is fewer bytes than it takes
/// to replace the last-level cache, of `cache_bytes`.
pub(super) fn flush(pool: &ThreadPool, cache_bytes: u64) {
    // Not more than 64 MiB: on a server whose cores share a larger cache, the private ones and this process's share of
    // the last one are still replaced.
    let bytes = (2 * cache_bytes).clamp(8 << 20, 64 << 20) as usize;
    if !flush_lines(bytes) {
        replace(pool, bytes);
    }
}

/// Flushes each line of the blocks that there are; `false` when they have more than `most` bytes, or when there is no
/// instruction for it.
#[cfg(target_arch = "x86_64")]
fn flush_lines(most: usize) -> bool {
    use std::arch::x86_64::{_mm_clflush, _mm_mfence};
    // Held to the end: no block is freed meanwhile.
    let blocks = live();
    if blocks.values().sum::<usize>() > most {
        return false;
    }
    for (&address, &bytes) in blocks.iter() {
        for line in (address..address + bytes).step_by(ALIGN) {
            // SAFETY: the line is of a block that is there. It changes no byte, whoever uses them.
            unsafe { _mm_clflush(line as *const u8) };
        }
    }
    // SAFETY: it orders the flushes before what follows, and does no more.
    unsafe { _mm_mfence() };
    true
}

#[cfg(not(target_arch = "x86_64"))]
fn flush_lines(_: usize) -> bool {
    false
}

/// Reads and writes so many bytes of other memory, by all threads.
fn replace(pool: &ThreadPool, bytes: usize) {
    let mut words = WORDS.lock().unwrap_or_else(PoisonError::into_inner);
    words.resize(bytes / 8, 0);
    let chunk = words.len().div_ceil(pool.current_num_threads());
    let words = words.as_mut_slice();
    pool.install(|| {
        words.par_chunks_mut(chunk).for_each(|chunk| {
            for word in chunk {
                *word = word.wrapping_add(1);
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::super::memory::CpuBuffer;
    use super::*;
    use crate::Buffer;
    use std::time::Instant;

    /// Nanoseconds of a read of each line, in an order that nothing foresees.
    fn reading(buffer: &CpuBuffer) -> f64 {
        let lines = buffer.len() / ALIGN;
        assert!(lines.is_power_of_two());
        let (mut line, mut sum) = (0, 0u64);
        let start = Instant::now();
        for _ in 0..lines {
            // SAFETY: a byte of the buffer. Volatile, so that it is read.
            let byte = unsafe { std::ptr::read_volatile((buffer.address() as usize + line * ALIGN) as *const u8) };
            sum += u64::from(byte);
            // Each line once, as the multiplier is 1 modulo 4 and the addend odd. The next address waits for the byte.
            line = (line * 1_664_525 + 1_013_904_223 + byte as usize) & (lines - 1);
        }
        let took = start.elapsed().as_secs_f64() * 1e9 / lines as f64;
        assert_eq!(sum, 0, "a buffer is zeroed");
        took
    }

    #[test]
    fn both_ways_of_flushing_leave_memory_cold() {
        // Fits the private caches, where a read is some nanoseconds; from memory it is tens.
        let buffer = CpuBuffer::new(256 << 10).unwrap();
        buffer.fill(0);
        let pool = super::super::threads::pool(2).unwrap();
        let best = |flush: &dyn Fn()| {
            let times = (0..50).map(|_| {
                flush();
                reading(&buffer)
            });
            times.fold(f64::INFINITY, f64::min)
        };
        let warm = best(&|| ());
        let lines = best(&|| assert!(cfg!(not(target_arch = "x86_64")) || flush_lines(usize::MAX)));
        let replaced = best(&|| replace(pool, 64 << 20));
        println!("ns a line: {warm:.1} warm, {lines:.1} flushed, {replaced:.1} replaced");
        // A last-level cache of more than 64 MiB still has it.
        assert!(replaced > 1.3 * warm, "{warm} warm, {replaced} replaced");
        assert!(cfg!(not(target_arch = "x86_64")) || lines > 2.0 * warm, "{warm} warm, {lines} flushed");
    }

    #[test]
    fn more_memory_than_the_caches_hold_is_not_flushed_by_the_line() {
        let _buffer = CpuBuffer::new(1 << 20).unwrap();
        assert!(!flush_lines((1 << 20) - 1));
    }
}
