//! What `flashtune explain` says, word for word and as data: every answer is compared with a file under
//! `tests/golden/`.
//!
//! The answers for a GPU come from one that exists on paper, so that they are the same everywhere. `FLASHTUNE_BLESS=1`
//! writes the files anew: what changed then shows in the difference, and is to be read like any other.

use crate::common::faults::stderr;
use crate::common::paper::{Instant, Paper, call};
use crate::common::{Place, ROOT, SMALL, host_arch, other_cpu_arch};
use flashtune::{
    DType, DeviceSpec, Engine, Explanation, Launches, Mask, OnMiss, Policy, Problem, Program, Shape, TensorView,
};
use flashtune_cache::{
    Artifact, ArtifactFiles, BundleContents, CacheDir, Conditions, DeviceFingerprint, Finalist, Key, Provenance,
    Record, RecordKey, Stage, Store, Trial, TrialResult, Trust,
};
use flashtune_codegen::{CpuIsa, CpuSchedule, Family, Kernel, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::{Device, compile_with, compiler_for};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Texts of this host, and what stands for them in the files.
struct Known(Vec<(String, &'static str)>);

impl Known {
    /// What every answer may hold: the folder, and the hashes of the templates.
    fn of(place: &Place) -> Self {
        let folder = place.path("").to_str().unwrap().to_owned();
        Self(vec![(folder, "<folder>/")]).and_templates(&TemplateSet::embedded(), "<templates>")
    }

    fn and_templates(self, set: &TemplateSet, stand_for: &'static str) -> Self {
        Family::ALL.into_iter().fold(self, |known, family| known.and(set.hash_of(family), stand_for))
    }

    fn and(mut self, text: impl ToString, stands_for: &'static str) -> Self {
        self.0.push((text.to_string(), stands_for));
        self
    }

    /// The answer with nothing in it that another host, moment or change of a template would say otherwise.
    fn settle(&self, answer: &str) -> String {
        let known = self.0.iter().fold(answer.to_owned(), |text, (own, word)| text.replace(own, word));
        let mut text = String::new();
        for line in known.lines() {
            // How long a compilation took, and the age in seconds.
            let line = match (line.find(" in "), line.ends_with(" ms"), line.ends_with(" ms\",")) {
                (Some(at), true, _) => format!("{} in <n> ms", &line[..at]),
                (Some(at), _, true) => format!("{} in <n> ms\",", &line[..at]),
                _ => match line.split_once("\"age_s\": ") {
                    Some((before, _)) => format!("{before}\"age_s\": <n>,"),
                    None => line.to_owned(),
                },
            };
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Compares an answer with its file, or writes that.
#[track_caller]
fn golden(name: &str, answer: &str) {
    let path = Path::new(ROOT).join("tests/golden").join(name);
    if std::env::var_os("FLASHTUNE_BLESS").is_some() {
        return std::fs::write(&path, answer).expect("a writable checkout");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    if answer != expected {
        let differ = expected.lines().zip(answer.lines()).position(|(a, b)| a != b);
        let at = differ.unwrap_or(expected.lines().count().min(answer.lines().count()));
        panic!("{name}, line {}: the answer is not that of the file (FLASHTUNE_BLESS=1 takes it):\n{answer}", at + 1);
    }
}

/// An account as `explain` prints it, as text and as JSON.
#[track_caller]
fn told(name: &str, known: &Known, account: &Explanation) {
    golden(&format!("{name}.txt"), &known.settle(&account.to_string()));
    golden(&format!("{name}.json"), &known.settle(&serde_json::to_string_pretty(account).unwrap()));
}

fn finalist(schedule: Schedule, median_us: f64, is_default: bool) -> Finalist {
    let rounds_ns = [0.99, 1.0, 1.02].map(|part| (median_us * 1e3 * part) as u64).to_vec();
    let (p10_us, p90_us) = (median_us * 0.99, median_us * 1.02);
    Finalist { schedule, median_us, p10_us, p90_us, samples: 12, rounds_ns, max_error: 0.00125, is_default }
}

/// A record as a tuning leaves it, with `winner` before the default.
fn record(
    device: &DeviceFingerprint,
    problem: Problem,
    shape: Shape,
    winner: Schedule,
    default: Schedule,
    templates: &TemplateSet,
    (compiler, artifact): (&str, Key),
) -> Record {
    let bucket = ShapeBucket::of(&shape);
    Record {
        key: RecordKey { device: device.clone(), problem, bucket, launches: Launches::Eager },
        schedule: winner,
        artifact,
        finalists: vec![finalist(winner, 100.0, false), finalist(default, 125.0, true)],
        provenance: Provenance {
            flashtune: "0.0.9".into(),
            templates: templates.hash_of(winner.family()).into(),
            compiler: compiler.into(),
            // A little more than three days, so that a slow test still says three.
            unix_time: std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() - 3 * 86_400 - 5,
            shape,
            space: 5000,
            compiled: 39,
            timed: 37,
            unfused_us: None,
            seconds: 6.5,
            compile_seconds: 6.0,
            device_seconds: 5.5,
            waited_seconds: 0.5,
            conditions: Conditions { sm_mhz: Some((1900, 1980)), temperature_c: Some(41), ..Conditions::default() },
        },
        rivals: Vec::new(),
        settled: Vec::new(),
    }
}

/// A GPU on paper, whose bundle has a record of 1 x 16 heads x 1024 rows, causal, bf16.
struct Gpu {
    place: Place,
    device: Arc<Paper>,
    problem: Problem,
    shape: Shape,
}

impl Gpu {
    fn new() -> Self {
        let (_, problem, shape) = call(1024);
        Self { place: Place::new(), device: Paper::new(Instant::holding("nothing")), problem, shape }
    }

    /// A bundle with a record of some device.
    fn bundle(&self, device: &DeviceFingerprint, templates: &TemplateSet) -> PathBuf {
        let bucket = ShapeBucket::of(&self.shape);
        let of = |family| Schedule::default_for(family, &self.problem, device.arch, &bucket).unwrap();
        let default = of(Family::candidates(&self.problem, device.arch)[0]);
        let winner = of(Family::ForwardSm80);
        let kernel = Kernel { problem: self.problem, schedule: winner, arch: device.arch };
        let artifact: Artifact = compile_with(&*Instant::holding("nothing"), &kernel, templates).unwrap();
        let key = artifact.recipe.key();
        let record = record(device, self.problem, self.shape, winner, default, templates, ("paper 1", key));
        let path = self.place.path("team.ftb");
        let mut load = |_: &Key| Some(artifact.clone());
        BundleContents { records: vec![record], artifacts: Vec::new(), load: &mut load, created: 1 }
            .write(&path)
            .unwrap();
        path
    }

    /// One with a record of this very device.
    fn own(&self) -> PathBuf {
        self.bundle(self.device.fingerprint(), &TemplateSet::embedded())
    }

    fn engine(&self, bundle: Option<&Path>, policy: Policy) -> Engine {
        let engine = Engine::builder().on(self.device.clone()).cache_dir(self.place.cache()).policy(policy);
        let engine = engine.trust(Trust::default().allow_unsigned(true));
        bundle.into_iter().fold(engine, |e, file| e.bundle(file)).build().unwrap()
    }

    fn explain(&self, bundle: Option<&Path>, rows: u32) -> Explanation {
        let shape = Shape { q_len: rows, kv_len: rows, ..self.shape };
        self.engine(bundle, Policy::Default).explain(&self.problem, &shape).unwrap()
    }

    fn known(&self) -> Known {
        Known::of(&self.place)
    }
}

#[test]
fn without_a_record_the_models_choice_is_told_with_what_speaks_against_the_others() {
    let gpu = Gpu::new();
    told("default", &gpu.known(), &gpu.explain(None, 1024));
    let engine = gpu.engine(None, Policy::Default);
    // Exact arithmetic: the families of the tensor cores are refused, each with its reason.
    let f32 = Problem { dtype: DType::F32, ..gpu.problem };
    told("exact", &gpu.known(), &engine.explain(&f32, &gpu.shape).unwrap());
    // On tensor cores, as it was asked for.
    let tf32x3 = f32.in_precision(flashtune::Precision::Tf32x3);
    told("tf32x3", &gpu.known(), &engine.explain(&tf32x3, &gpu.shape).unwrap());
    let program = Program::parse("cap: float; score = cap * tanh(score / cap); mask = kv - q < 512;").unwrap();
    let capped = gpu.problem.with_program(program);
    told("program", &gpu.known(), &engine.explain(&capped, &gpu.shape).unwrap());
}

#[test]
fn what_a_call_asks_beyond_its_sizes_is_told() {
    let gpu = Gpu::new();
    let engine = gpu.engine(None, Policy::Default);
    let (first, _, _) = call(1024);
    let account = |change: &dyn Fn(&mut TensorView)| {
        let mut call = first;
        change(&mut call.k);
        engine.prepare(&call).unwrap().unwrap().explain()
    };
    told("unaligned", &gpu.known(), &account(&|k| k.address += 2));
    told("strided", &gpu.known(), &account(&|k| k.strides[1] = 0));
}

#[test]
fn a_record_is_told_with_its_layer_and_how_far_it_holds() {
    let gpu = Gpu::new();
    let own = gpu.own();
    told("tuned", &gpu.known(), &gpu.explain(Some(&own), 1024));
    told("nearest", &gpu.known(), &gpu.explain(Some(&own), 4096));
    told("far", &gpu.known(), &gpu.explain(Some(&own), 1 << 20));
    let other =
        DeviceFingerprint { name: "Paper of another format".into(), units: 114, ..gpu.device.fingerprint().clone() };
    let others = gpu.bundle(&other, &TemplateSet::embedded());
    told("provisional", &gpu.known(), &gpu.explain(Some(&others), 1024));
}

#[test]
fn bundles_that_may_not_be_used_are_told_with_the_field() {
    let gpu = Gpu::new();
    let (embedded, file) = (TemplateSet::embedded(), "lib/cuda/attention/types.cuh");
    let text = embedded.files().find(|(name, _)| *name == file).unwrap().1;
    let templates = TemplateSet::overlaid([(file.to_owned(), format!("{text}#define MORE 1\n"))].into()).unwrap();
    let bundle = gpu.bundle(gpu.device.fingerprint(), &templates);
    let known = gpu.known().and_templates(&templates, "<other templates>");
    told("other_templates", &known, &gpu.explain(Some(&bundle), 1024));
    let other = DeviceFingerprint { arch: "sm_80".parse().unwrap(), ..gpu.device.fingerprint().clone() };
    let bundle = gpu.bundle(&other, &TemplateSet::embedded());
    told("other_arch", &gpu.known(), &gpu.explain(Some(&bundle), 1024));
}

#[test]
fn what_a_sealed_engine_serves_is_told() {
    let gpu = Gpu::new();
    let engine = gpu.engine(Some(&gpu.own()), Policy::Sealed);
    engine.seal(OnMiss::Nearest).unwrap();
    let of = |rows| engine.explain(&gpu.problem, &Shape { q_len: rows, kv_len: rows, ..gpu.shape }).unwrap();
    told("sealed", &gpu.known(), &of(1024));
    told("sealed_nearest", &gpu.known(), &of(64));
}

/// The command's own words: an account, and the story of a record with all that became of its candidates.
#[test]
fn the_command_tells_the_story_of_a_record() {
    let place = Place::new();
    let device = flashtune_runtime::open(DeviceSpec::Cpu).unwrap().fingerprint().clone();
    let compiler = compiler_for(device.arch).unwrap().id().clone();
    let known = || {
        let known = Known::of(&place).and(&device, "<device>").and(&compiler, "<compiler>");
        known.and(device.arch, "<arch>").and(&device.name, "<processor>")
    };
    let problem = Problem::forward(DType::F32, 32, Mask::Causal.kind()).unwrap();
    let shape = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 128, kv_len: 128, mask: Mask::Causal };
    // Instructions that every processor has.
    let cpu = |block_q, block_kv| {
        let isa = CpuIsa::Generic;
        Schedule::Cpu(CpuSchedule { isa, block_q, block_kv, unroll_q: 2, unroll_kv: 4, threads: 1 })
    };
    let (winner, default) = (cpu(64, 64), cpu(128, 64));
    let kernel = Kernel { problem, schedule: winner, arch: host_arch() };
    let templates = TemplateSet::embedded();
    let key = flashtune_runtime::compile::recipe(&kernel, &templates, &compiler).key();
    let record = record(&device, problem, shape, winner, default, &templates, (&compiler.to_string(), key));
    let dir = CacheDir::at(place.cache());
    {
        let store = Store::open_within(&dir, Duration::from_secs(9)).unwrap();
        let timed = |schedule, median_us: f64| {
            let (p10_us, p90_us) = (median_us * 0.99, median_us * 1.02);
            let race_ns = vec![(median_us * 1e3) as u64; 4];
            (schedule, TrialResult::Timed { median_us, p10_us, p90_us, samples: 16, race_ns, max_error: 0.00125 })
        };
        let failed = |schedule, stage, reason: &str| (schedule, TrialResult::Failed { stage, reason: reason.into() });
        let trials = [
            timed(winner, 100.0),
            timed(default, 125.0),
            timed(cpu(64, 128), 180.0),
            failed(cpu(128, 128), Stage::Compile, "the compiler was stopped after 5 s"),
            failed(cpu(32, 64), Stage::Check, "wrong answer at [0, 1, 127, 3]: 0.5 for 0.25"),
        ];
        for (schedule, result) in trials {
            let (templates, compiler) = (templates.hash_of(schedule.family()).to_owned(), compiler.to_string());
            let trial = Trial { schedule, templates, compiler, artifact: None, result, unix_time: 1 };
            store.put_trial(&record.key, &trial).unwrap();
        }
        store.put_record(&record).unwrap();
        store.publish(&ArtifactFiles::new(&dir)).unwrap();
    }
    let say = |known: &Known, args: &[&str]| {
        let out = place.flashtune(&[&["explain"], args].concat()).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        known.settle(&String::from_utf8(out.stdout).unwrap())
    };
    // The default schedule depends on the processor.
    let choice = |problem, bucket| Schedule::default_for(Family::ForwardCpu, problem, host_arch(), &bucket).unwrap();
    let of_model = known().and(choice(&problem, record.key.bucket), "<schedule>");
    golden("story.txt", &say(&of_model, &[SMALL, &["--story"]].concat()));
    golden("story.json", &say(&of_model, &[SMALL, &["--story", "--json"]].concat()));
    // Without a record.
    let other = ["--dtype", "f16", "--head-dim", "32", "--heads", "1", "--q-len", "64", "--mask", "full"];
    let (f16, mask) = (Problem::forward(DType::F16, 32, Mask::Full.kind()).unwrap(), Mask::Full);
    let bucket = ShapeBucket::of(&Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 64, kv_len: 64, mask });
    let known = known().and(choice(&f16, bucket), "<schedule>");
    golden("no_story.txt", &say(&known, &[&other[..], &["--story"]].concat()));
    // Beside a bundle for another processor.
    let bundle = place.path("foreign.ftb");
    let arch = other_cpu_arch().to_string();
    place.json(&[&["build"], &other[..], &["--arch", &arch, "--out", bundle.to_str().unwrap()]].concat());
    let known = known.and(arch, "<other arch>");
    golden("foreign.txt", &say(&known, &[&other[..], &["--bundle", bundle.to_str().unwrap()]].concat()));
}
