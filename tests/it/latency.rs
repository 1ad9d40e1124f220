//! What a call waits for when a service runs: a hit, and the first load of a kernel that is stored, at their 99th
//! percentile.

use crate::common::counted::{counted, engine, small};
use crate::common::{self, Place};
use crate::nvrtc::default_kernel;
use flashtune::{DType, ManifestEntry, Mask, MaskKind, OnMiss, Policy, Problem, Shape, read_manifest, write_manifest};
use flashtune_cache::{Artifact, ArtifactFiles, Bundle, BundleContents, CacheDir, Key};
use flashtune_codegen::{Family, TemplateSet};
use flashtune_runtime::compile::{Nvrtc, compile_with};
use flashtune_runtime::elf;
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Median and 99th percentile of single calls, each of the calmest round: in the others somebody else had the core.
fn calmest(rounds: usize, calls: usize, mut time: impl FnMut(usize) -> Duration) -> (Duration, Duration) {
    let least = |a: (Duration, Duration), b: (Duration, Duration)| (a.0.min(b.0), a.1.min(b.1));
    let round = |_| {
        let mut times: Vec<Duration> = (0..calls).map(&mut time).collect();
        times.sort_unstable();
        (times[calls / 2], times[calls * 99 / 100])
    };
    (0..rounds).map(round).fold((Duration::MAX, Duration::MAX), least)
}

fn time<T>(work: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    let result = black_box(work());
    let time = start.elapsed();
    drop(result);
    time
}

/// Single calls at their 99th percentile, on any machine.
const SLOWEST_HIT: Duration = Duration::from_micros(1);
/// A sealed hit at its median, on a machine that looks up a map as fast as [`LOOKUP`] says.
const HIT: Duration = Duration::from_nanos(200);
/// A lookup in a `HashMap` of 256 numbers in this build. Machines of the same name differ by two, and one does from
/// minute to minute: hits took 170 ns beside lookups of 190, and 311 beside 300.
const LOOKUP: Duration = Duration::from_nanos(170);

/// Single calls, among hundreds of classes, without the clock's own time.
#[test]
fn a_sealed_hit_takes_a_microsecond_at_its_99th_percentile() {
    let (problem, _) = small(64);
    // Lengths that one kernel serves.
    let classes: Vec<Shape> = (1..65)
        .flat_map(|group| (7..11).map(move |n| Shape { heads: group, kv_heads: 1, ..small(1 << n).1 }))
        .collect();
    let numbers: HashMap<usize, usize> = (0..classes.len()).map(|i| (i, i)).collect();
    // Each after another one than the last time.
    let next = |i: usize| i * 7 % classes.len();
    let least = |a: [Duration; 3], b: [Duration; 3]| [0, 1, 2].map(|i| a[i].min(b[i]));
    // A table that lies badly in the core's cache costs 70 ns: the best of three engines.
    let engines = (0..3).map(|_| {
        let (place, device) = (Place::new(), counted());
        let engine = engine(&place, &device, Policy::Default);
        classes.iter().for_each(|shape| drop(engine.plan(&problem, shape).unwrap()));
        assert_eq!(engine.seal(OnMiss::Nearest).unwrap().classes, classes.len());
        let _alone = common::alone();
        let (median, p99) = calmest(10, 10_000, |i| time(|| engine.plan(&problem, &classes[next(i)]).unwrap()));
        let (lookup, _) = calmest(10, 10_000, |i| time(|| numbers[&next(i)]));
        let (clock, _) = calmest(10, 10_000, |_| time(|| ()));
        [median, p99, lookup].map(|time| time.saturating_sub(clock))
    });
    let [median, p99, lookup] = engines.reduce(least).unwrap();
    let slower = (lookup.as_secs_f64() / LOOKUP.as_secs_f64()).max(1.0);
    println!("a sealed hit: {median:?}, {p99:?} (p99), beside {lookup:?} of a lookup");
    assert!(median <= HIT.mul_f64(slower), "{median:?} beside {lookup:?} of a lookup");
    assert!(p99 <= SLOWEST_HIT, "{p99:?} (p99)");
}

/// Loads of as many as there are, in turn; the promise.
const LOADS: usize = 200;
const LIMIT: Duration = Duration::from_millis(5);

/// The host's own: all that a new engine does for the first call of a class whose kernel is stored, read from a
/// manifest.
#[test]
fn stored_kernels_are_loaded_within_five_milliseconds_and_compile_nothing() {
    let (place, device) = (Place::new(), counted());
    let wide = |dtype, head_dim| Problem::forward(dtype, head_dim, Mask::Causal.kind()).unwrap();
    let problems = [small(0).0, wide(DType::F32, 128), wide(DType::Bf16, 64)];
    let entries = problems.map(|problem| ManifestEntry::new(problem, &small(1024).1));
    let first = engine(&place, &device, Policy::Default);
    assert!(first.preload(&entries).is_empty());
    let manifest = place.path("manifest.jsonl");
    write_manifest(&manifest, &entries).unwrap();
    let entries = read_manifest(&manifest).unwrap();
    let before = [&*device.compiles, &device.loads].map(|n| n.load(Ordering::SeqCst));
    let _alone = common::alone();
    let (median, p99) = calmest(5, LOADS, |i| {
        let engine = engine(&place, &device, Policy::Default);
        let mut missing = Vec::new();
        let time = time(|| missing = engine.preload(&entries[i % entries.len()..][..1]));
        assert!(missing.is_empty(), "{missing:?}");
        time
    });
    let after = [&*device.compiles, &device.loads].map(|n| n.load(Ordering::SeqCst));
    assert_eq!((after[0] - before[0], after[1] - before[1]), (0, 5 * LOADS as u32));
    println!("a kernel of the host's: {median:?}, {p99:?} (p99)");
    assert!(p99 < LIMIT, "{p99:?}");
}

/// A GPU's, up to the driver: from a file of its own and from a bundle, with every check that comes before.
#[test]
fn stored_cubins_are_read_and_verified_within_five_milliseconds() {
    if common::nvrtc_or_skip("stored_cubins_are_read_and_verified_within_five_milliseconds").is_none() {
        return;
    }
    let (place, nvrtc, templates) = (Place::new(), Nvrtc::find().unwrap(), TemplateSet::embedded());
    let files = ArtifactFiles::new(&CacheDir::at(place.cache()));
    let problem = Problem::forward(DType::F16, 128, MaskKind::ALL[1]).unwrap();
    // Those that other tests compile too.
    let keys = [Family::ForwardSm90, Family::ForwardSm80].map(|family| {
        let kernel = default_kernel(family, problem, "sm_90a".parse().unwrap(), 4096);
        files.put(&compile_with(&*nvrtc, &kernel, &templates).unwrap()).unwrap()
    });
    let path = place.path("kernels.ftb");
    let load = &mut |key: &Key| files.get(key);
    BundleContents { records: Vec::new(), artifacts: keys.to_vec(), load, created: 0 }.write(&path).unwrap();
    let bundle = Bundle::map(&path).unwrap();
    let _alone = common::alone();
    let whole = |artifact: Artifact| elf::check(&artifact.bytes).map(|()| artifact.bytes.len()).unwrap();
    let sizes = keys.map(|key| whole(files.get(&key).unwrap()));
    assert!(sizes.iter().all(|bytes| *bytes > 30_000), "{sizes:?}");
    for (what, load) in [
        ("a file", &(|key: &Key| whole(files.get(key).unwrap())) as &dyn Fn(&Key) -> usize),
        ("a bundle", &|key| whole(bundle.artifact(key).unwrap().unwrap())),
    ] {
        let (median, p99) = calmest(5, LOADS, |i| time(|| assert_eq!(load(&keys[i % 2]), sizes[i % 2])));
        println!("a cubin of {sizes:?} bytes from {what}: {median:?}, {p99:?} (p99)");
        assert!(p99 < LIMIT, "{what}: {p99:?}");
    }
}
