//! Kernels for ragged batches, compiled and timed by name: what a schedule of `forward/sm80_ragged` takes.
//!
//!     cargo run --release --example decode compile [ARCH]
//!     cargo run --release --example decode bench [FILTER]
//!
//! `compile` needs no GPU: registers, spills and bytes of the default kernels. `bench` times decode per node of a graph of
//! as many launches as have 256 MB of keys and values between them, so that the L2 cache holds none of them, best of
//! five replays; every schedule's O is held against `forward/naive_ragged`.

use bytemuck::Zeroable;
use flashtune::codegen::abi::RaggedArgs;
use flashtune::codegen::{
    Arch, Family, Kernel, KvElement, KvKind, KvScales, KvStore, Schedule, ShapeBucket, Sm80RaggedSchedule, TemplateSet,
};
use flashtune::runtime::compile::{compile_with, compiler_for};
use flashtune::runtime::{Buffer, CudaDevice, Device, Module};
use flashtune::{
    DType, Distribution, HostTensor, Layout, Mask, MaskKind, Problem, Shape, TEMPLATES_VARIABLE, read_templates,
};
use std::sync::Arc;

type Answer<T> = Result<T, Box<dyn std::error::Error>>;

/// Keys and values between which no cache helps.
const COLD_BYTES: u64 = 256 << 20;

fn templates() -> Answer<TemplateSet> {
    Ok(match std::env::var_os(TEMPLATES_VARIABLE).filter(|v| !v.is_empty()) {
        Some(folder) => read_templates(folder.as_ref())?,
        None => TemplateSet::embedded(),
    })
}

fn store(element: KvElement, scales: KvScales) -> KvKind {
    KvKind::Ragged(KvStore { element, scales, v_columns: false })
}

fn compile(arch: &str) -> Answer<()> {
    let (arch, templates): (Arch, _) = (arch.parse()?, templates()?);
    let compiler = compiler_for(arch)?;
    for dtype in [DType::Bf16, DType::F16] {
        for (element, scales) in [
            (KvElement::Same, KvScales::PerHead),
            (KvElement::E4m3, KvScales::PerHead),
            (KvElement::Int8, KvScales::PerToken),
        ] {
            for dim in [64, 128, 256] {
                for rows in [1, 8, 16, 512] {
                    let problem = Problem::forward(dtype, dim, MaskKind::CAUSAL)?.with_kv(store(element, scales));
                    let shape =
                        Shape { batch: 8, heads: 32, kv_heads: 8, q_len: rows, kv_len: 8192, mask: Mask::Causal };
                    let family = Family::ForwardSm80Ragged;
                    let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::of(&shape))?;
                    let kernel = Kernel { problem, schedule, arch };
                    match compile_with(&*compiler, &kernel, &templates) {
                        Ok(artifact) => println!("{:60} {:?}", kernel.name(), artifact.facts),
                        Err(e) => println!("{:60} {e}", kernel.name()),
                    }
                }
            }
        }
    }
    Ok(())
}

/// One line of the table.
struct Case {
    name: String,
    lengths: Vec<u32>,
    q_len: u32,
    heads: [u32; 2],
    dim: u32,
    page: u32,
    element: KvElement,
    mask: Mask,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: &str, lengths: Vec<u32>, q_len, heads, dim, page, element, mask| {
        cases.push(Case { name: name.to_owned(), lengths, q_len, heads, dim, page, element, mask });
    };
    let skewed = || [vec![1u32 << 14, 1 << 15, 1 << 16, 100_000], (0..60).map(|i| 128 + i * 15).collect()].concat();
    for (suffix, element) in [("", KvElement::Same), (" e4m3", KvElement::E4m3)] {
        for (batch, length, heads) in [
            (1, 4096, [32, 8]),
            (1, 32768, [32, 8]),
            (1, 131_072, [64, 8]),
            (8, 4096, [32, 8]),
            (16, 8192, [32, 8]),
            (64, 4096, [32, 8]),
        ] {
            add(&format!("{batch}x{length}{suffix}"), vec![length; batch], 1, heads, 128, 16, element, Mask::Causal);
        }
        add(&format!("skewed{suffix}"), skewed(), 1, [32, 8], 128, 16, element, Mask::Causal);
        let short = (0..128).map(|i| 200 + i * 22).collect();
        add(&format!("128short{suffix}"), short, 1, [32, 8], 128, 16, element, Mask::Causal);
        add(&format!("8x8k-q4{suffix}"), vec![8192; 8], 4, [32, 8], 128, 16, element, Mask::Causal);
        let window = Mask::Window { left: Some(127), right: Some(0) };
        add(&format!("window{suffix}"), vec![32768; 16], 1, [32, 8], 128, 16, element, window);
    }
    for page in [1, 64, 256, 1 << 20] {
        add(&format!("16x8192 page{page}"), vec![8192; 16], 1, [32, 8], 128, page, KvElement::Same, Mask::Causal);
    }
    add("32x8k 8/1", vec![8192; 32], 1, [8, 1], 128, 16, KvElement::Same, Mask::Causal);
    add("64x4k d64 64/8", vec![4096; 64], 1, [64, 8], 64, 16, KvElement::Same, Mask::Causal);
    add("8x8k d256 16/8", vec![8192; 8], 1, [16, 8], 256, 16, KvElement::Same, Mask::Causal);
    add("8x4k 32/32", vec![4096; 8], 1, [32, 32], 128, 16, KvElement::Same, Mask::Causal);
    add("8x4k 28/4", vec![4096; 8], 1, [28, 4], 128, 16, KvElement::Same, Mask::Causal);
    add("8x8k-q16", vec![8192; 8], 16, [32, 8], 128, 16, KvElement::Same, Mask::Causal);
    for chunk in [128, 512] {
        for heads in [[28, 4], [32, 8], [8, 1]] {
            let name = format!("chunk{chunk}x8k {}/{}", heads[0], heads[1]);
            add(&name, vec![8192], chunk, heads, 128, 16, KvElement::Same, Mask::Causal);
        }
    }
    cases
}

fn parse(name: &str) -> Option<Sm80RaggedSchedule> {
    let mut s = Sm80RaggedSchedule::default();
    for part in name.split('-') {
        if let Some(rows) = part.strip_prefix('r') {
            let (a, b) = rows.split_once('x')?;
            (s.rows_per_warp, s.row_warps) = (a.parse().ok()?, b.parse().ok()?);
        } else if let Some(n) = part.strip_prefix("kv") {
            s.block_kv = n.parse().ok()?;
        } else if let Some(n) = part.strip_prefix('k') {
            s.key_warps = n.parse().ok()?;
        } else if let Some(n) = part.strip_prefix('s') {
            s.stages = n.parse().ok()?;
        } else if let Some(n) = part.strip_prefix('b') {
            s.blocks_per_sm = n.parse().ok()?;
        }
    }
    Some(s)
}

/// Device memory of these 4-byte numbers.
fn ints(device: &dyn Device, all: &[i32]) -> Answer<Box<dyn Buffer>> {
    let buffer = device.alloc(all.len() * 4)?;
    device.upload(&*buffer, bytemuck::cast_slice(all))?;
    Ok(buffer)
}

fn bench(filter: &str, schedules: &[String]) -> Answer<()> {
    let device: Arc<dyn Device> = CudaDevice::open(0)?;
    let (templates, arch) = (templates()?, device.fingerprint().arch);
    let compiler = device.compiler()?;
    let stream = device.stream();
    let load = |problem: Problem, schedule| -> Answer<Arc<dyn Module>> {
        let kernel = Kernel { problem, schedule, arch };
        kernel.check()?;
        Ok(device.load(&compile_with(&*compiler, &kernel, &templates)?)?)
    };
    for case in cases().iter().filter(|c| c.name.contains(filter)) {
        let Case { name, lengths, q_len, heads: [heads, kv_heads], dim, page, element, mask } = case;
        let (page, batch, longest) = (*page, lengths.len() as u32, *lengths.iter().max().ok_or("no lengths")?);
        let bytes = element.bytes(DType::Bf16) as u64;
        let problem = Problem::forward(DType::Bf16, *dim, mask.kind())?.with_kv(store(*element, KvScales::PerHead));
        // The bounds of the model, not of the lengths.
        let bound = if page < 1 << 20 { 131_072 } else { longest };
        let shape = Shape { batch, heads: *heads, kv_heads: *kv_heads, q_len: *q_len, kv_len: bound, mask: *mask };
        let page = page.min(longest.next_multiple_of(16));
        let row = bound.div_ceil(page);
        let of: Vec<u32> = lengths.iter().map(|n| n.div_ceil(page)).collect();
        let pages: u32 = of.iter().sum();
        let page_bytes = u64::from(page) * u64::from(*kv_heads) * u64::from(*dim) * bytes;
        let keys: u64 = lengths.iter().map(|&n| u64::from(mask.window().0.map_or(n, |left| n.min(left + q_len)))).sum();
        let read = 2 * keys * u64::from(*kv_heads) * u64::from(*dim) * bytes;
        let layers = (COLD_BYTES.div_ceil(2 * u64::from(pages) * page_bytes)).clamp(1, 16) as usize;
        let layers = layers.max(2);
        // Random keys and values, the same bytes over and over, from one large buffer.
        let host = HostTensor::random(DType::Bf16, [1, 1, 1 << 16, 64], Layout::Bhsd, 1, Distribution::Normal);
        let noise: Vec<u8> = match element {
            KvElement::Same => host.bytes().to_vec(),
            _ => host.bytes().iter().map(|b| b & 0xb7).collect(),
        };
        let size = (u64::from(pages) * page_bytes) as usize;
        let mut all = noise.repeat(size.div_ceil(noise.len()));
        all.truncate(size);
        let stores = (0..2 * layers)
            .map(|_| {
                let buffer = device.alloc(size)?;
                device.upload(&*buffer, &all)?;
                Ok(buffer)
            })
            .collect::<Answer<Vec<_>>>()?;
        // Pages in no order.
        let mut order: Vec<i32> = (0..pages as i32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, (i * 7919 + 13) % (i + 1));
        }
        let mut table = vec![-1i32; (row * batch) as usize];
        let mut taken = order.into_iter();
        for (b, n) in of.iter().enumerate() {
            table[b * row as usize..][..*n as usize].iter_mut().for_each(|id| *id = taken.next().unwrap_or(-1));
        }
        let table = ints(&*device, &table)?;
        let lengths = ints(&*device, &lengths.iter().map(|n| *n as i32).collect::<Vec<_>>())?;
        let tensor = |seed| {
            let shape = [batch as usize, *heads as usize, *q_len as usize, *dim as usize];
            let host = HostTensor::random(DType::Bf16, shape, Layout::Bshd, seed, Distribution::Normal);
            let buffer = device.alloc(host.bytes().len())?;
            device.upload(&*buffer, host.bytes())?;
            Ok::<_, flashtune::runtime::Error>(buffer)
        };
        let (q, o, expected) = (tensor(2)?, tensor(3)?, tensor(4)?);
        let (h, k, d) = (i64::from(*heads), i64::from(*kv_heads), i64::from(*dim));
        let rows = [i64::from(*q_len) * h * d, d, h * d];
        let args = |layer: usize| RaggedArgs {
            q: q.address(),
            k: stores[2 * layer].address(),
            v: stores[2 * layer + 1].address(),
            o: o.address(),
            k_table: table.address(),
            v_table: table.address(),
            kv_lengths: lengths.address(),
            q_stride: rows,
            o_stride: rows,
            k_stride: [i64::from(page) * k * d, k * d, d, 16 / bytes as i64],
            v_stride: [i64::from(page) * k * d, k * d, d, 1],
            table_stride: row.into(),
            pages: pages.into(),
            batch: batch as i32,
            heads: *heads as i32,
            kv_heads: *kv_heads as i32,
            q_len: *q_len as i32,
            kv_len: bound as i32,
            page_tokens: page as i32,
            table_words: 1,
            length_words: 1,
            window_left: mask.window().0.map_or(i32::MAX, |n| n as i32),
            window_right: 0,
            scale: 1.0 / (*dim as f32).sqrt(),
            lse_unit: 1.0,
            lse_empty: f32::NEG_INFINITY,
            ..RaggedArgs::zeroed()
        };
        let naive = Schedule::default_for(Family::ForwardNaiveRagged, &problem, arch, &ShapeBucket::of(&shape))?;
        let naive = load(problem, naive)?;
        let numbers = |buffer: &dyn Buffer| -> Answer<Vec<f32>> {
            let mut bytes = vec![0; buffer.len()];
            device.download(buffer, &mut bytes, stream)?;
            Ok(bytes
                .chunks_exact(2)
                .map(|b| f32::from_bits(u32::from(u16::from_ne_bytes([b[0], b[1]])) << 16))
                .collect())
        };
        // SAFETY: all addresses are those of buffers that live on, of the sizes that the arguments say.
        unsafe { device.launch_shape(&*naive, &shape, &RaggedArgs { o: expected.address(), ..args(0) }, stream)? };
        let expected = numbers(&*expected)?;
        let default = Schedule::default_for(Family::ForwardSm80Ragged, &problem, arch, &ShapeBucket::of(&shape))?;
        let named = schedules.iter().filter_map(|s| parse(s)).map(Schedule::Sm80Ragged);
        for schedule in std::iter::once(default).chain(named) {
            let module = match load(problem, schedule) {
                Ok(module) => module,
                Err(e) => {
                    println!("{name:18} {schedule}: {e}");
                    continue;
                }
            };
            device.fill(&*o, 0xff)?;
            // SAFETY: as above.
            unsafe { device.launch_shape(&*module, &shape, &args(0), stream)? };
            let far = numbers(&*o)?.iter().zip(&expected).fold(0.0f32, |far, (a, b)| {
                let apart = (a - b).abs();
                if apart.is_nan() { f32::INFINITY } else { far.max(apart) }
            });
            let graph = device.capture(stream, &mut || {
                for layer in 0..16 {
                    // SAFETY: as above.
                    unsafe { device.launch_shape(&*module, &shape, &args(layer % layers), stream)? };
                }
                Ok(())
            })?;
            let mut best = f64::INFINITY;
            for _ in 0..6 {
                // SAFETY: as above, and one replay follows the other.
                best = best.min(device.time_us(stream, &mut || unsafe { graph.replay(stream) })? / 16.0);
            }
            println!("{name:18} {schedule:24} {best:8.2} us {:7.0} GB/s  far {far:.1e}", read as f64 / best / 1e3);
        }
    }
    Ok(())
}

fn main() -> Answer<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("compile") => compile(args.get(1).map_or("sm_90a", String::as_str)),
        Some("bench") => bench(args.get(1).map_or("", String::as_str), args.get(2..).unwrap_or_default()),
        _ => Err("usage: decode compile [ARCH] | decode bench [FILTER] [SCHEDULE ..]".into()),
    }
}
