//! Fingerprints of the machine code of the default kernels: what tells a change of words in a template from a change of
//! the kernel.
//!
//!     cargo xtask cubins write FILE [--sample N] [--only TEXT] [--keep FOLDER]
//!     cargo xtask cubins compare OLD NEW
//!
//! Compiles the default kernels of every family, and the quick ones where a family has them, without a GPU: CUDA
//! kernels with NVRTC, kernels of the host processor with the system C compiler. Prints a line for each: a hash of what
//! is loaded (code and constants, without names, symbols and notes), registers, bytes of spills, bytes of code, and the
//! schedule. `--sample N` takes the first N kernels of a fixed random order, `--only TEXT` those with TEXT in their
//! names; `--keep` writes images and sources. `FLASHTUNE_TEMPLATES` names a folder of templates to use in place of the
//! embedded ones. `compare` ends with 1 where a kernel of both lists differs, or they have none in common.

use flashtune::{DType, Mask, MaskKind, Problem, Program, Shape, TEMPLATES_VARIABLE, read_templates};
use flashtune_codegen::{
    Arch, CallSizes, Family, Kernel, KvElement, KvKind, KvScales, KvStore, Language, Op, PageClass, Schedule,
    ShapeBucket, TemplateSet,
};
use flashtune_runtime::compile::{compile_with, compiler_for};
use object::{Object, ObjectSection, SectionFlags, elf::SHF_ALLOC};
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const USAGE: &str = "usage: cubins write FILE [--sample N] [--only TEXT] [--keep FOLDER] | cubins compare OLD NEW";

/// One of each kind that the kernels have code of their own for.
const PROGRAMS: [(&str, &str); 7] = [
    ("plain", ""),
    ("documents", "d: i32[batch, kv_len] nondecreasing; mask = d[b, q] == d[b, kv];"),
    ("lists", "d: i32[batch, kv_len]; mask = d[b, q] == d[b, kv] or (q - kv) % 7 == 0;"),
    ("alibi", "slope: f32[heads]; score = score + slope[h] * (kv - (q + kv_len - q_len));"),
    ("soft-cap", "score = 30.0 * tanh(score / 30.0);"),
    ("bias", "bias: bf16[heads, q_len, kv_len]; score = score + bias[h, q, kv];"),
    ("sink", "s: float[heads]; mask = kv % 3 != 1; score = 4.0 * tanh(score * 0.25); sink = s[h];"),
];

const HEAD_DIMS: [u32; 5] = [64, 96, 128, 192, 256];

/// A kernel under the words that name it in a list.
struct Case {
    name: String,
    kernel: Kernel,
}

/// Every combination that the list of families supports.
fn cases() -> Result<Vec<Case>, Failure> {
    let masks =
        [("full", MaskKind::FULL), ("causal", MaskKind::CAUSAL), ("window", MaskKind { left: true, right: true })];
    let on = |family, arch, dtypes| (family, arch, dtypes);
    let halves = &[DType::Bf16, DType::F16][..];
    let families = [
        on(Family::ForwardSm90, "sm_90a", halves),
        on(Family::ForwardSm80, "sm_80", halves),
        on(Family::ForwardNaive, "sm_75", &[DType::F32]),
        on(Family::ForwardNaive, "sm_90a", &[DType::F16]),
        on(Family::ForwardCpu, "cpu-avx2", &[DType::F32]),
        on(Family::ForwardCpu, "cpu-avx512", &[DType::F16]),
        on(Family::ForwardCpu, "cpu-amx", &[DType::Bf16]),
        on(Family::BackwardSm90, "sm_90a", halves),
        on(Family::BackwardSm80, "sm_80", halves),
        on(Family::BackwardNaive, "sm_75", &[DType::F32]),
        on(Family::BackwardCpu, "cpu-avx2", &[DType::F32]),
    ];
    let mut cases = Vec::new();
    for (family, arch, dtypes) in families {
        let arch: Arch = arch.parse()?;
        for &dtype in dtypes {
            for dim in HEAD_DIMS {
                for (mask_name, mask) in masks {
                    for (program_name, text) in PROGRAMS {
                        let mut problem = Problem { op: family.op(), ..Problem::forward(dtype, dim, mask)? };
                        if !text.is_empty() {
                            problem = problem.with_program(Program::parse(text)?);
                        }
                        let reach = |bounded: bool| bounded.then_some(64);
                        let reach = Mask::Window { left: reach(mask.left), right: reach(mask.right) };
                        let len = 4096;
                        let shape = Shape { batch: 1, heads: 16, kv_heads: 4, q_len: len, kv_len: len, mask: reach };
                        let Ok(schedule) = Schedule::default_for(family, &problem, arch, &ShapeBucket::of(&shape))
                        else {
                            continue;
                        };
                        let name = format!("{}/{arch}/{dtype}/d{dim}/{mask_name}/{program_name}", family.name());
                        let quick = schedule.quick().map(|quick| (format!("{name}/quick"), quick));
                        let packed = Problem { kv: KvKind::RAGGED, ..problem };
                        if family.op() == Op::Backward && family.supports(&packed, arch).is_ok() {
                            let name = format!("{name}/packed");
                            let schedule = Schedule::default_for(family, &packed, arch, &ShapeBucket::of(&shape))?;
                            cases.push(Case { name, kernel: Kernel { problem: packed, schedule, arch } });
                        }
                        // What drops scores, of every mask and head dim.
                        let dropped = problem.with_dropout(true);
                        if text.is_empty() && family.supports(&dropped, arch).is_ok() {
                            let schedule = Schedule::default_for(family, &dropped, arch, &ShapeBucket::of(&shape))?;
                            let kernel = Kernel { problem: dropped, schedule, arch };
                            cases.push(Case { name: format!("{name}/dropout"), kernel });
                        }
                        let both = [(format!("{name}/default"), schedule)].into_iter().chain(quick);
                        cases.extend(
                            both.map(|(name, schedule)| Case { name, kernel: Kernel { problem, schedule, arch } }),
                        );
                    }
                }
            }
        }
    }
    cases.extend(e4m3_cases()?);
    cases.extend(ragged_cases()?);
    Ok(cases)
}

/// The families of e4m3, whose operands have a scale for each head, or finer ones; and the one that makes them.
fn e4m3_cases() -> Result<Vec<Case>, Failure> {
    let families = [
        (Family::ForwardSm90Fp8, "sm_90a"),
        (Family::ForwardSm89Fp8, "sm_89"),
        (Family::ForwardSm89Fp8, "sm_120a"),
        (Family::ForwardCpuE4m3, "cpu-avx2"),
    ];
    let masks =
        [("full", Mask::Full), ("causal", Mask::Causal), ("window", Mask::Window { left: Some(64), right: Some(64) })];
    let mut cases = Vec::new();
    for (family, arch) in families {
        let arch: Arch = arch.parse()?;
        for dim in HEAD_DIMS {
            for (mask_name, mask) in masks {
                let shape = Shape { batch: 1, heads: 16, kv_heads: 4, q_len: 4096, kv_len: 4096, mask };
                for scales in ["head", "k_rows", "q_rows-k_rows-v_channel"] {
                    let problem = Problem::forward(DType::E4m3, dim, mask.kind())?.with_scales(scales.parse()?);
                    let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::of(&shape))?;
                    let finer = if scales == "head" { String::new() } else { format!("/{scales}") };
                    let name = format!("{}/{arch}/e4m3/d{dim}/{mask_name}{finer}", family.name());
                    cases.push(Case { name, kernel: Kernel { problem, schedule, arch } });
                }
            }
        }
    }
    for (family, arch) in
        [(Family::QuantiseCuda, "sm_90a"), (Family::QuantiseCuda, "sm_80"), (Family::QuantiseCpu, "cpu-avx2")]
    {
        let arch: Arch = arch.parse()?;
        for dtype in DType::ALL {
            for dim in HEAD_DIMS {
                let problem = Problem { op: Op::Quantise, ..Problem::forward(dtype, dim, MaskKind::FULL)? };
                let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::default())?;
                let name = format!("{}/{arch}/{dtype}/d{dim}", family.name());
                cases.push(Case { name, kernel: Kernel { problem, schedule, arch } });
            }
        }
    }
    Ok(cases)
}

/// `forward/sm90_ragged`: prompts, and chunks of them beside caches in pages.
fn hopper_ragged_cases() -> Result<Vec<Case>, Failure> {
    let family = Family::ForwardSm90Ragged;
    let arch: Arch = "sm_90a".parse()?;
    let masks =
        [("full", MaskKind::FULL), ("causal", MaskKind::CAUSAL), ("window", MaskKind { left: true, right: true })];
    let sizes = [("prompts", 32, 1024, 1024), ("chunk", 1, 512, 8192)];
    let mut cases = Vec::new();
    for dtype in [DType::Bf16, DType::F16] {
        for dim in HEAD_DIMS {
            for (mask_name, mask) in masks {
                for (program_name, text) in PROGRAMS {
                    let mut problem = Problem::forward(dtype, dim, mask)?.with_kv(KvKind::RAGGED);
                    if !text.is_empty() {
                        problem = problem.with_program(Program::parse(text)?);
                    }
                    if family.supports(&problem, arch).is_err() {
                        continue;
                    }
                    for (size_name, batch, q_len, kv_len) in sizes {
                        let reach = |bounded: bool| bounded.then_some(64);
                        let mask = Mask::Window { left: reach(mask.left), right: reach(mask.right) };
                        let shape = Shape { batch, heads: 32, kv_heads: 8, q_len, kv_len, mask };
                        let sizes = CallSizes::ragged(shape, PageClass::Tokens(16));
                        let bucket = ShapeBucket::of_call(&problem, &sizes, 132);
                        let schedule = Schedule::default_for(family, &problem, arch, &bucket)?;
                        let name =
                            format!("{}/{arch}/{dtype}/d{dim}/{mask_name}/{program_name}/{size_name}", family.name());
                        cases.push(Case { name, kernel: Kernel { problem, schedule, arch } });
                    }
                }
            }
        }
    }
    Ok(cases)
}

/// The other families of ragged batches: stores of every element, and few and many rows beside their keys.
fn ragged_cases() -> Result<Vec<Case>, Failure> {
    let families = [
        (Family::ForwardSm80Ragged, "sm_80", DType::Bf16),
        (Family::ForwardSm80Ragged, "sm_90a", DType::Bf16),
        (Family::ForwardSm80Ragged, "sm_90a", DType::F16),
        (Family::ForwardNaiveRagged, "sm_75", DType::F16),
        (Family::ForwardCpuRagged, "cpu-avx2", DType::F16),
        (Family::ForwardCpuRagged, "cpu-avx512", DType::F16),
    ];
    let stores = [
        ("same", KvElement::Same, KvScales::PerHead),
        ("e4m3", KvElement::E4m3, KvScales::PerHead),
        ("int8-token", KvElement::Int8, KvScales::PerToken),
    ];
    let mut cases = hopper_ragged_cases()?;
    for (family, arch, dtype) in families {
        let arch: Arch = arch.parse()?;
        for (store_name, element, scales) in stores {
            let store = KvStore { element, scales, v_columns: false };
            for dim in [64, 128, 256] {
                for rows in [1, 8, 16, 512] {
                    let problem = Problem::forward(dtype, dim, MaskKind::CAUSAL)?.with_kv(KvKind::Ragged(store));
                    let shape =
                        Shape { batch: 8, heads: 32, kv_heads: 8, q_len: rows, kv_len: 8192, mask: Mask::Causal };
                    let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::of(&shape))?;
                    let name = format!("{}/{arch}/{dtype}/d{dim}/{store_name}/{rows}-rows", family.name());
                    cases.push(Case { name, kernel: Kernel { problem, schedule, arch } });
                }
            }
        }
    }
    Ok(cases)
}

/// A hash of every section that is loaded, by its kind but not its name, which holds the kernel's.
fn fingerprint(image: &[u8]) -> Result<(u64, u64), Failure> {
    let file = object::File::parse(image)?;
    let (mut hasher, mut code) = (DefaultHasher::new(), 0);
    for section in file.sections() {
        let SectionFlags::Elf { sh_flags } = section.flags() else { continue };
        let name = section.name()?;
        // How a shared library is put together follows its symbols' names.
        let linked = [".dyn", ".gnu", ".hash", ".note", ".rela", ".eh_frame", ".got", ".plt"];
        if sh_flags & u64::from(SHF_ALLOC) == 0 || linked.iter().any(|start| name.starts_with(start)) {
            continue;
        }
        let data = section.data()?;
        hasher.write_u64(data.len() as u64);
        hasher.write(data);
        code += if name.starts_with(".text") { data.len() as u64 } else { 0 };
    }
    Ok((hasher.finish(), code))
}

fn line(case: &Case, templates: &TemplateSet, keep: Option<&Path>) -> Result<String, Failure> {
    let compiler = compiler_for(case.kernel.arch)?;
    let artifact = compile_with(&*compiler, &case.kernel, templates)?;
    let (hash, code) = fingerprint(&artifact.bytes)?;
    if let Some(folder) = keep {
        let file = folder.join(case.name.replace('/', "."));
        std::fs::write(&file, &artifact.bytes)?;
        std::fs::write(format!("{}.txt", file.display()), case.kernel.render(templates)?.text)?;
    }
    let facts = match case.kernel.language() {
        Language::Cuda => format!("{} registers, {} spilled", artifact.facts.registers, artifact.facts.spill_bytes),
        Language::C => "host".to_owned(),
    };
    Ok(format!("{}\t{hash:016x}\t{facts}\t{code} bytes\t{}", case.name, case.kernel.schedule))
}

/// What a compiler says of errors, without its warnings.
fn brief(e: &dyn std::error::Error) -> String {
    let text = e.to_string();
    let errors: Vec<&str> = text.lines().filter(|line| line.contains("error:")).take(5).collect();
    if errors.is_empty() { text } else { errors.join("; ") }
}

fn write(path: &str, sample: Option<usize>, only: &str, keep: Option<&Path>) -> Result<(), Failure> {
    let mut cases = cases()?;
    cases.retain(|case| case.name.contains(only));
    cases.shuffle(&mut StdRng::seed_from_u64(1));
    cases.truncate(sample.unwrap_or(usize::MAX));
    let templates = match std::env::var_os(TEMPLATES_VARIABLE) {
        Some(folder) => read_templates(folder.as_ref())?,
        None => TemplateSet::embedded(),
    };
    let next = AtomicUsize::new(0);
    let lines = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let line = line(case, &templates, keep)
                        .unwrap_or_else(|e| format!("{}\tfailed: {}", case.name, brief(&*e)));
                    lines.lock().expect("no thread panics with it").push(line);
                }
            });
        }
    });
    let mut lines = lines.into_inner()?;
    lines.sort();
    std::fs::write(path, lines.join("\n") + "\n")?;
    let failed: Vec<&String> = lines.iter().filter(|line| line.contains("\tfailed: ")).collect();
    println!("{} kernels, {} of them failed", lines.len(), failed.len());
    failed.first().map_or(Ok(()), |first| Err(first.as_str().into()))
}

/// The lists' lines by name. Returns whether they are the same.
fn compare(old: &str, new: &str) -> Result<bool, Failure> {
    let read = |path: &str| -> Result<BTreeMap<String, String>, Failure> {
        let text = std::fs::read_to_string(path)?;
        Ok(text.lines().filter_map(|l| l.split_once('\t')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect())
    };
    let (old, new) = (read(old)?, read(new)?);
    let mut counts = BTreeMap::<&str, [usize; 2]>::new();
    for (name, before) in &old {
        let Some(after) = new.get(name) else { continue };
        let family = name.split('/').nth(1).unwrap_or_default();
        counts.entry(family).or_default()[usize::from(before != after)] += 1;
        if before != after {
            println!("! {name}\n    {}\n    {}", before.replace('\t', "  "), after.replace('\t', "  "));
        }
    }
    for (family, [same, different]) in &counts {
        println!("{family}: {same} the same, {different} different");
    }
    let common: usize = counts.values().flatten().sum();
    println!("in one list alone: {}", old.len() + new.len() - 2 * common);
    Ok(common > 0 && counts.values().all(|[_, different]| *different == 0))
}

fn main() -> Result<std::process::ExitCode, Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let same = match words[..] {
        ["write", path, ref options @ ..] => {
            let (mut sample, mut only, mut keep) = (None, "", None);
            for option in options.chunks(2) {
                match *option {
                    ["--sample", count] => sample = Some(count.parse()?),
                    ["--only", text] => only = text,
                    ["--keep", folder] => keep = Some(Path::new(folder)),
                    _ => return Err(USAGE.into()),
                }
            }
            write(path, sample, only, keep).map(|()| true)?
        }
        ["compare", old, new] => compare(old, new)?,
        _ => {
            eprintln!("{USAGE}");
            return Ok(2.into());
        }
    };
    Ok(if same { 0.into() } else { 1.into() })
}
