//! A file system that fails at random, for as long as a cache is used: any operation, with any error, alone or several
//! in a row, slowly, with writes cut short or torn, under dispatches, hosts, tunings, imports, exports and evictions.
//!
//! `FLASHTUNE_RANDOM_FAULTS` sets how many failures there are in all, `FLASHTUNE_SEED` which.

use crate::common::faults::{Faults, answers, count_of, stderr};
use crate::common::{self, Place, SMALL};
use flashtune::{DType, DeviceSpec, Engine, Forward, ManifestEntry, Mask, OnMiss, Problem, Shape, Stream, TensorView};
use std::collections::BTreeMap;
use std::process::Command;

/// A small problem that a bundle has and the cache lacks at first.
const OTHER: [&str; 10] = ["--dtype", "f32", "--head-dim", "16", "--mask", "full", "--heads", "1", "--q-len", "64"];
/// Where the host below finds its cache.
const HOST_CACHE: &str = "RANDOM_FAULTS_CACHE";

/// Random numbers that are the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// A host: preloads, computes, seals, computes again. Run in a process of its own, whose cache may fail in any way.
#[test]
#[ignore = "the random faults start it"]
fn a_host() {
    let cache = std::env::var_os(HOST_CACHE).expect("it is started by the test below");
    let engine = Engine::builder().device(DeviceSpec::Cpu).cache_dir(cache).build().expect("an engine");
    let mask = Mask::Causal;
    let problem = Problem::forward(DType::F32, 32, mask.kind()).unwrap();
    let shape = |len| Shape { batch: 1, heads: 2, kv_heads: 2, q_len: len, kv_len: len, mask };
    let entries = [64, 128].map(|len| ManifestEntry::new(problem, &shape(len)));
    let failed = engine.preload(&entries);
    assert!(failed.is_empty(), "{failed:?}");
    compute(&engine, 128);
    engine.seal(OnMiss::Nearest).expect("there are kernels to serve with");
    compute(&engine, 64);
    compute(&engine, 300);
    assert!(engine.prometheus().contains("flashtune_"));
}

/// Equal scores: each row of O is the mean of the rows of V up to its own.
fn compute(engine: &Engine, len: usize) {
    let (qk, mut o) = (vec![0.25f32; 2 * len * 32], vec![f32::NAN; 2 * len * 32]);
    let v: Vec<f32> = (0..2 * len * 32).map(|i| (i / 32 % len) as f32).collect();
    let view = |t: &[f32]| TensorView::bhsd(t.as_ptr() as u64, DType::F32, [1, 2, len as u64, 32]);
    let out = TensorView::bhsd(o.as_mut_ptr() as u64, DType::F32, [1, 2, len as u64, 32]);
    let call = Forward { mask: Mask::Causal, ..Forward::new(view(&qk), view(&qk), view(&v), out) };
    // SAFETY: the tensors outlive the call, which has computed when it returns on the cpu.
    unsafe { engine.forward(&call, Stream::default()) }.expect("an answer");
    for (i, o) in o.iter().enumerate() {
        let mean = (i / 32 % len) as f32 / 2.0;
        assert!((o - mean).abs() <= 1e-4 * (1.0 + mean), "row {}: {o} for {mean}", i / 32);
    }
}

#[test]
fn whatever_fails_at_random_calls_are_answered_and_nothing_published_is_lost() {
    let (wanted, seed) = (count_of("FLASHTUNE_RANDOM_FAULTS", 100), count_of("FLASHTUNE_SEED", 1));
    let place = Place::new();
    place.tune_small();
    let bundle = place.path("other.ftb");
    let bundle = bundle.to_str().unwrap();
    let arch = common::host_arch().to_string();
    place.json(&[&["build"], &OTHER[..], &["--arch", &arch, "--out", bundle]].concat());
    let faults = Faults::new(&place, place.cache());
    let out = place.path("out.ftb");
    let out = out.to_str().unwrap();

    let mut random = Random(seed);
    let mut known = faults.served();
    let (mut failures, mut runs, mut refused) = (0, BTreeMap::<&str, u64>::new(), 0);
    for case in 0u64.. {
        if failures >= wanted {
            break;
        }
        let explain = [&["explain", "--json"], SMALL].concat();
        let explain_other = [&["explain", "--json"], &OTHER[..]].concat();
        let again = [&["tune", "--force", "--trials", "2", "--budget-s", "6"], SMALL].concat();
        let length = (17 + random.below(2000)).to_string();
        let new =
            ["tune", "--dtype", "f32", "--head-dim", "16", "--q-len", &length, "--trials", "1", "--budget-s", "6"];
        // A call is answered whatever happens; the others may be refused.
        let (what, answered, mut command) = match random.below(100) {
            0..35 => ("explain", true, faults.unharmed(&explain)),
            35..45 => ("explain another", true, faults.unharmed(&explain_other)),
            45..60 => ("host", true, host(&faults)),
            60..75 => ("import", false, faults.unharmed(&["import", "--replace", bundle])),
            75..80 => ("export", false, faults.unharmed(&["export", out])),
            80..98 => ("evict", false, faults.unharmed(&["import", "--replace", bundle])),
            98 => ("tune again", false, faults.unharmed(&again)),
            _ => ("tune another", false, faults.unharmed(&new)),
        };
        // From a fault in most runs to hardly an operation that works.
        let chance = [10, 30, 100, 400][random.below(4) as usize];
        let slow = [0, 0, 0, 20_000][random.below(4) as usize];
        let (own, slow) = (seed.wrapping_mul(1_000_003).wrapping_add(case), if answered { slow } else { slow / 10 });
        let mut settings = vec![
            ("FAULT_SEED", (own % (1 << 62)).to_string()),
            ("FAULT_CHANCE", chance.to_string()),
            ("FAULT_SLOW_US", slow.to_string()),
        ];
        if what == "evict" {
            // Files are older than an hour then, and all of them too many.
            settings.extend([("FAULT_CLOCK_S", "7200".into()), ("FLASHTUNE_CACHE_LIMIT_MIB", "0".into())]);
        }
        let told = faults.run(&mut command, &settings);
        let what_and_how = format!("case {case}, {what}, {settings:?}");
        failures += told.failures;
        *runs.entry(what).or_default() += 1;
        match answered {
            true => {
                let said = told.stderr();
                assert!(told.output.status.success(), "{what_and_how}: {}\n{said}", told.output.status);
                assert!(!said.contains("panicked"), "{what_and_how}: {said}");
                for word in ["snapshot", "cannot be kept"] {
                    let warnings = said.lines().filter(|l| l.contains("WARN") && l.contains(word)).count();
                    assert!(warnings <= 1, "{what_and_how}: {said}");
                }
            }
            false => told.ended_in_order(&what_and_how),
        }
        refused += u64::from(!told.output.status.success());
        // What was there is there, with its kernel; what is new may have made it.
        let now = faults.served();
        let lost: Vec<_> = known.difference(&now).collect();
        assert!(lost.is_empty(), "{what_and_how}: {} records are lost\n{}", lost.len(), told.stderr());
        known = now;
    }
    // Nothing fails any more: all is as it should be, and can be added to.
    let explain = [&["explain", "--json"], SMALL].concat();
    assert_eq!(answers(&faults.unharmed(&explain).output().unwrap(), "afterwards")[0]["status"]["kind"], "tuned");
    let import = faults.unharmed(&["import", "--replace", bundle]).output().unwrap();
    assert!(import.status.success(), "{}", stderr(&import));
    println!("{failures} failures, {runs:?}, {refused} refused, {} records", known.len());
}

/// The host above on the cache, in a process of its own.
fn host(faults: &Faults) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["random_faults::a_host", "--exact", "--ignored", "--nocapture", "--test-threads", "1"]);
    command.env(HOST_CACHE, &faults.cache).env_remove("FLASHTUNE_BUNDLES").env_remove("FLASHTUNE_TEMPLATES");
    command
}
