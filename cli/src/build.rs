//! `flashtune build`: kernels for archs that need not be here.

use super::cases::{Case, CaseArgs, default_case, fixed};
use super::context::{Context, made_at};
use super::progress;
use super::relink::{self, Relinked, default_kernel};
use super::table::table;
use anyhow::Result;
use flashtune::{DType, Mask};
use flashtune_cache::{
    Artifact, ArtifactFiles, BundleContents, CacheDir, Conditions, DeviceFingerprint, Key, Launches, Provenance,
    Record, RecordKey, Store,
};
use flashtune_codegen::{Arch, Kernel, ShapeBucket, TemplateSet};
use flashtune_runtime::{Compiler, compile};
use rayon::prelude::*;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Options of `build`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Without options that name a problem, a set of common ones is built. What is built was never \
                        measured; the dispatcher says so and prefers anything tuned. With SOURCE_DATE_EPOCH (seconds) \
                        the same build gives the same bytes.")]
pub(crate) struct Args {
    #[command(flatten)]
    cases: CaseArgs,
    /// Targets, e.g. sm_80,sm_90a,cpu-avx2
    #[arg(long, value_delimiter = ',', required = true, value_name = "LIST")]
    arch: Vec<Arch>,
    /// A bundle file (*.ftb), or a folder to be used with --cache
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Also take the records of the cache and of the named bundles that are for these targets, tuned ones included
    #[arg(long)]
    records: bool,
    /// Build what this bundle holds anew for the targets and the templates in force. Schedules are kept where they fit;
    /// measurements are not
    #[arg(long, value_name = "FILE")]
    relink: Option<PathBuf>,
}

/// The built-in set: what most models ask for.
fn common_cases(arch: Arch) -> Vec<Case> {
    let mut cases = Vec::new();
    let dtypes: &[DType] = match arch {
        Arch::Cpu(_) => &[DType::F32, DType::Bf16],
        Arch::Sm(sm) if sm.number < 80 => &[DType::F32],
        Arch::Sm(_) => &[DType::F16, DType::Bf16],
    };
    for &dtype in dtypes {
        for head_dim in [64, 128] {
            for mask in [Mask::Full, Mask::Causal] {
                for len in [128, 1024, 4096] {
                    cases.push(fixed(dtype, head_dim, mask, 1, (32, 8), len));
                }
            }
        }
    }
    cases
}

/// The stand-in for "any device of this arch": a record under it is provisional everywhere.
fn any_device(arch: Arch) -> DeviceFingerprint {
    DeviceFingerprint {
        arch,
        name: format!("any {arch} (flashtune build)"),
        units: 0,
        memory_bytes: 0,
        cache_bytes: 0,
        driver: "none".to_owned(),
    }
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    let made = made_at()?;
    let templates = cx.templates()?;
    let mut relinked = relink::Summary::default();
    let carried = match &args.relink {
        Some(bundle) => relink::read(bundle, &cx.trust()?, &mut relinked)?,
        None => Vec::new(),
    };
    let mut records: Vec<Record> = Vec::new();
    let mut kernels: BTreeMap<String, Kernel> = BTreeMap::new();
    let mut compilers: HashMap<Arch, Arc<dyn Compiler>> = HashMap::new();
    for &arch in &args.arch {
        compilers.insert(arch, flashtune_runtime::compiler_for(arch)?);
        let paths = cx.paths(arch)?;
        for relinked @ Relinked { kernel, .. } in relink::relink(&carried, arch, &paths, &mut relinked) {
            kernels.insert(kernel.name(), kernel);
            records.push(untuned(relinked, &templates, &*compilers[&arch], made));
        }
        let cases = match (args.cases.is_empty(), &args.relink) {
            (true, Some(_)) => Vec::new(),
            (true, None) => common_cases(arch),
            (false, _) => args.cases.on(arch, args.cases.cases(&default_case())?),
        };
        for case in cases {
            let kernel = default_kernel(&case, arch, &paths)?;
            kernels.insert(kernel.name(), kernel);
            let Case { problem, shape, .. } = case;
            let relinked = Relinked { problem, bucket: ShapeBucket::of(&shape), shape, kernel };
            records.push(untuned(relinked, &templates, &*compilers[&arch], made));
        }
    }
    // Two lengths of one bucket give the same record.
    let mut seen = std::collections::BTreeSet::new();
    records.retain(|r| seen.insert(r.key.clone()));

    let mut stored: HashMap<Key, Artifact> = HashMap::new();
    if args.records {
        let layers = cx.layers()?;
        for (_, record, validity) in layers.records() {
            if !args.arch.contains(&validity.arch) || validity.templates != templates.hash_of(validity.family) {
                continue;
            }
            let kernel = Kernel { problem: record.key.problem, schedule: record.schedule, arch: validity.arch };
            let mut record = (*record).clone();
            match layers.artifact(&record.artifact) {
                Some((artifact, _)) => {
                    stored.insert(record.artifact, artifact);
                }
                None => {
                    record.artifact = compile::recipe(&kernel, &templates, compilers[&validity.arch].id()).key();
                    kernels.insert(kernel.name(), kernel);
                }
            }
            records.push(record);
        }
    }

    let bar = progress::bar(kernels.len() as u64, cx.hides_progress());
    let kernels: Vec<Kernel> = kernels.into_values().collect();
    let built: Vec<Result<Artifact>> = kernels
        .par_iter()
        .map(|kernel| {
            let artifact = compile::compile_with(&*compilers[&kernel.arch], kernel, &templates)?;
            bar.set_message(kernel.name());
            bar.inc(1);
            Ok(artifact)
        })
        .collect();
    bar.finish_and_clear();
    let built = built.into_iter().collect::<Result<Vec<_>>>()?;
    let rows: Vec<_> = built.iter().map(summary).collect();
    for artifact in built {
        stored.insert(artifact.recipe.key(), artifact);
    }
    let (count, bytes) = (stored.len(), stored.values().map(|a| a.bytes.len()).sum::<usize>());
    write(&args.out, records.clone(), stored, made)?;

    if cx.json() {
        let rows: Vec<_> = rows
            .iter()
            .map(|r| json!({"kernel": r[0], "registers": r[1], "spill_bytes": r[2], "ms": r[3], "bytes": r[4]}))
            .collect();
        return cx.print_json(&json!({
            "out": args.out.display().to_string(),
            "records": records.len(),
            "kernels": rows,
            "relinked": args.relink.as_ref().map(|_| relinked),
        }));
    }
    let mut printed = table(&["kernel", "registers", "spills", "ms", "bytes"]);
    for row in rows {
        printed.add_row(row);
    }
    writeln!(cx.out, "{printed}")?;
    writeln!(
        cx.out,
        "{} records and {count} kernels ({} KiB) in {}",
        records.len(),
        bytes.div_ceil(1024),
        args.out.display()
    )?;
    if let Some(from) = &args.relink {
        let relink::Summary { carried, replaced, .. } = relinked;
        writeln!(
            cx.out,
            "from {}: {carried} schedules kept, {replaced} replaced by the target's default; `flashtune tune` measures",
            from.display()
        )?;
        for reason in &relinked.left_out {
            writeln!(cx.out, "left out: {reason}")?;
        }
    }
    Ok(())
}

/// A record without finalists: a schedule that was never measured.
fn untuned(of: Relinked, templates: &TemplateSet, compiler: &dyn Compiler, made: u64) -> Record {
    let Relinked { problem, bucket, shape, kernel } = of;
    Record {
        key: RecordKey { device: any_device(kernel.arch), problem, bucket, launches: Launches::Eager },
        schedule: kernel.schedule,
        artifact: compile::recipe(&kernel, templates, compiler.id()).key(),
        finalists: Vec::new(),
        provenance: Provenance {
            flashtune: env!("CARGO_PKG_VERSION").to_owned(),
            templates: templates.hash_of(kernel.schedule.family()).to_owned(),
            compiler: compiler.id().to_string(),
            unix_time: made,
            shape,
            space: 0,
            compiled: 1,
            timed: 0,
            unfused_us: None,
            seconds: 0.0,
            compile_seconds: 0.0,
            device_seconds: 0.0,
            waited_seconds: 0.0,
            conditions: Conditions::default(),
        },
        rivals: Vec::new(),
        settled: Vec::new(),
    }
}

/// Writes a bundle, or adds to a cache folder.
fn write(out: &PathBuf, records: Vec<Record>, artifacts: HashMap<Key, Artifact>, made: u64) -> Result<()> {
    if out.extension().is_some_and(|e| e == "ftb") {
        let mut load = |key: &Key| artifacts.get(key).cloned();
        let contents = BundleContents { records, artifacts: Vec::new(), load: &mut load, created: made };
        contents.write(out)?;
        return Ok(());
    }
    let dir = CacheDir::at(out);
    let files = ArtifactFiles::new(&dir);
    let store = Store::open(&dir)?;
    for artifact in artifacts.values() {
        files.put(artifact)?;
    }
    for record in &records {
        store.put_record(record)?;
    }
    store.publish(&files)?;
    Ok(())
}

fn summary(artifact: &Artifact) -> [String; 5] {
    let facts = &artifact.facts;
    [
        artifact.recipe.kernel.name(),
        facts.registers.to_string(),
        facts.spill_bytes.to_string(),
        format!("{:.0}", facts.compile_ms),
        artifact.bytes.len().to_string(),
    ]
}
