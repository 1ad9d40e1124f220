//! How fast decoding reads its KV cache on the host processor, beside a read of the same bytes.
//!
//!     cargo run --release --example ragged [-- THREADS]
//!
//! One row a sequence, 32 heads on 8 KV heads of 128: 1 x 32k and 16 x 4k keys, in bf16 and f32, dense slots and pages
//! of 16 tokens in random order (`PAGE=64` in the environment: of 64). Prints the best of 30 launches in GB/s of K and
//! V, each after another cache has been read; launches and reads take turns. Pages are read in the order of their
//! table, too: on memory pages of 4 KiB that is slower than in the order of addresses.

use flashtune::{DType, DeviceSpec, Mask, MaskKind, Problem, Shape};
use flashtune_codegen::abi::{Args, RaggedArgs};
use flashtune_codegen::{Arch, CpuRaggedSchedule, Kernel, KvKind, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::{compile_with, open};
use rand::seq::SliceRandom;
use rand::{SeedableRng, rngs::StdRng};
use std::time::Instant;

const RUNS: usize = 30;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

/// The best rates of pieces of work over `bytes` that take turns, in GB/s.
fn rates<const N: usize>(bytes: usize, mut work: [&mut dyn FnMut(usize); N]) -> [f64; N] {
    let mut best = [f64::INFINITY; N];
    for i in 0..RUNS {
        for (n, (work, best)) in work.iter_mut().zip(&mut best).enumerate() {
            let start = Instant::now();
            work(i * N + n);
            *best = best.min(start.elapsed().as_secs_f64());
        }
    }
    best.map(|seconds| bytes as f64 / seconds / 1e9)
}

/// Reads pages of memory in an order from so many threads, each a part of them, sixteen lines at a time.
fn read(words: &[u64], page: usize, order: &[i32], threads: usize) -> u64 {
    let sum = |order: &[i32]| {
        let mut sums = [0u64; 64];
        for &id in order {
            for line in words[id as usize * page..][..page].chunks_exact(64) {
                for (sum, x) in sums.iter_mut().zip(line) {
                    *sum ^= x;
                }
            }
        }
        sums.iter().fold(0, |a, b| a ^ b)
    };
    std::thread::scope(|scope| {
        let parts = order.chunks(order.len().div_ceil(threads));
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || sum(part))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or(0)).fold(0, |a, b| a ^ b)
    })
}

/// Three caches of one shape, so that none is read twice in a row, and what a launch takes of them.
struct Caches {
    kv: Vec<Vec<u64>>,
    tables: Vec<i32>,
    lengths: Vec<i32>,
    q: Vec<u64>,
    o: Vec<u64>,
}

fn caches(dtype: DType, batch: usize, keys: usize, page: usize) -> Caches {
    let words = batch * keys * KV_HEADS * DIM * dtype.bytes() / 8;
    // Small numbers of either dtype.
    let kv = (0..6u64).map(|i| vec![0x3c00_3c80_3c00_3d00 + (i << 2); words]).collect();
    let mut tables: Vec<i32> = (0..(batch * keys / page) as i32).collect();
    tables.shuffle(&mut StdRng::seed_from_u64(1));
    let rows = vec![0x3f00_3f80_3e80_3f00; batch * HEADS * DIM * dtype.bytes() / 8];
    Caches { kv, tables, lengths: vec![keys as i32; batch], o: rows.clone(), q: rows }
}

fn args(caches: &Caches, i: usize, batch: usize, keys: usize, page: Option<usize>) -> RaggedArgs {
    let (paged, tokens) = (page.is_some(), page.unwrap_or(keys));
    let (row, token) = (DIM as i64, (KV_HEADS * DIM) as i64);
    let x = 16 / (caches.kv[0].len() * 8 / (batch * keys * KV_HEADS * DIM)) as i64;
    RaggedArgs {
        q: caches.q.as_ptr() as u64,
        k: caches.kv[2 * (i % 3)].as_ptr() as u64,
        v: caches.kv[2 * (i % 3) + 1].as_ptr() as u64,
        o: caches.o.as_ptr() as u64,
        k_table: if paged { caches.tables.as_ptr() as u64 } else { 0 },
        v_table: if paged { caches.tables.as_ptr() as u64 } else { 0 },
        kv_lengths: caches.lengths.as_ptr() as u64,
        q_stride: [HEADS as i64 * row, row, 0],
        o_stride: [HEADS as i64 * row, row, 0],
        k_stride: [tokens as i64 * token, token, row, x],
        v_stride: [tokens as i64 * token, token, row, 1],
        table_stride: (keys / tokens) as i64,
        pages: (batch * keys / tokens) as i64,
        batch: batch as i32,
        heads: HEADS as i32,
        kv_heads: KV_HEADS as i32,
        q_len: 1,
        kv_len: keys as i32,
        page_tokens: tokens as i32,
        table_words: 1,
        length_words: 1,
        scale: 1.0 / (DIM as f32).sqrt(),
        lse_unit: 1.0,
        ..bytemuck::Zeroable::zeroed()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = open("cpu".parse::<DeviceSpec>()?)?;
    let (arch, units) = (device.fingerprint().arch, device.fingerprint().units as usize);
    let threads = std::env::args().nth(1).map_or(Ok(units), |n| n.parse())?;
    let Arch::Cpu(isa) = arch else { return Err("the host processor is no CUDA device".into()) };
    println!("{}, {threads} threads, GB/s of K and V", device.fingerprint());
    let page = std::env::var("PAGE").map_or(Ok(16), |n| n.parse::<usize>())?;
    println!(
        "| keys | dtype | read | slots | of read | pages of {page} | of slots | read by pages |\n\
         |---|---|---|---|---|---|---|---|"
    );
    let compiler = device.compiler()?;
    for (batch, keys) in [(1, 32 << 10), (16, 4 << 10)] {
        for dtype in [DType::Bf16, DType::F32] {
            let problem = Problem::forward(dtype, DIM as u32, MaskKind::FULL)?.with_kv(KvKind::RAGGED);
            let [heads, kv_heads] = [HEADS, KV_HEADS].map(|h| h as u32);
            let shape = Shape { batch: batch as u32, heads, kv_heads, q_len: 1, kv_len: keys as u32, mask: Mask::Full };
            let schedule = CpuRaggedSchedule::default_for(&problem, isa, &ShapeBucket::of(&shape));
            let schedule = tried(CpuRaggedSchedule { threads: threads as u32, ..schedule });
            let kernel = Kernel { problem, schedule: Schedule::CpuRagged(schedule), arch };
            let module = device.load(&compile_with(&*compiler, &kernel, &TemplateSet::embedded())?)?;
            let caches = caches(dtype, batch, keys, page);
            let bytes = 2 * caches.kv[0].len() * 8;
            let plan = kernel.plan(&shape)?;
            let launch = |i: usize, page: Option<usize>| {
                let args = args(&caches, i, batch, keys, page);
                // SAFETY: the arguments name the vectors of `caches`, of the sizes that they say.
                unsafe { device.launch(&*module, &plan, Args::Ragged(&args), device.stream()) }.expect("a launch");
            };
            let words = page * KV_HEADS * DIM * dtype.bytes() / 8;
            let in_order: Vec<i32> = (0..caches.tables.len() as i32).collect();
            let both = |i: usize, order: &[i32]| {
                let [k, v] = [0, 1].map(|n| read(&caches.kv[2 * (i % 3) + n], words, order, threads));
                std::hint::black_box(k ^ v);
            };
            let [slots, pages, peak, by_pages] = rates(
                bytes,
                [&mut |i| launch(i, None), &mut |i| launch(i, Some(page)), &mut |i| both(i, &in_order), &mut |i| {
                    both(i, &caches.tables)
                }],
            );
            let (of_read, of_slots) = (100.0 * slots / peak, 100.0 * pages / slots);
            println!(
                "| {batch} x {keys} | {} | {peak:.1} | {slots:.1} | {of_read:.0} % | {pages:.1} | {of_slots:.0} % | \
                 {by_pages:.1} |",
                dtype.name()
            );
        }
    }
    Ok(())
}

/// The schedule with the fields that `FIELDS=few_block=64,...` names set, to try others than the default.
fn tried(mut schedule: CpuRaggedSchedule) -> CpuRaggedSchedule {
    for field in std::env::var("FIELDS").unwrap_or_default().split(',').filter(|f| !f.is_empty()) {
        let (name, value) = field.split_once('=').expect("name=value");
        let value = value.parse().expect("a number");
        match name {
            "few_rows" => schedule.few_rows = value,
            "few_block" => schedule.few_block = value,
            "split_kv" => schedule.split_kv = value,
            "split_tiles" => schedule.split_tiles = value,
            _ => panic!("no field {name}"),
        }
    }
    schedule
}
