//! Levels of instruction paths: what is dispatched, what has to be allowed by name, and what raises a level.

use crate::common::Place;
use crate::common::paper::{Instant, Paper};
use flashtune::{DType, Engine, InstructionPath, Level, Mask, Problem, Shape};
use flashtune_cache::{
    ArtifactFiles, CacheDir, Conditions, Finalist, KeptLevel, Launches, Levels, Needed, Provenance, Record, RecordKey,
    Store,
};
use flashtune_codegen::{Family, Kernel, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::compile::compile_with;

const TURING: &str = "forward/sm80:f16-m16n8k8";

fn path(name: &str) -> InstructionPath {
    name.parse().unwrap()
}

fn call(dtype: DType) -> (Problem, Shape) {
    let mask = Mask::Causal;
    let shape = Shape { batch: 1, heads: 32, kv_heads: 8, q_len: 4096, kv_len: 4096, mask };
    (Problem::forward(dtype, 128, mask.kind()).unwrap(), shape)
}

/// A card on paper, with a cache folder.
struct Card {
    place: Place,
    arch: &'static str,
}

impl Card {
    fn of(arch: &'static str) -> Self {
        Self { place: Place::new(), arch }
    }

    fn builder(&self) -> flashtune::Builder {
        Engine::builder().on(Paper::of(self.arch, Instant::holding("nothing"))).cache_dir(self.place.cache())
    }

    fn engine(&self) -> Engine {
        self.builder().build().unwrap()
    }

    /// What a check that passes leaves.
    fn raise(&self, name: &str, level: Level, templates: &TemplateSet) {
        let needed = Needed::new(self.arch.parse().unwrap(), templates);
        let kept = KeptLevel::new(path(name), &needed, level, "NVIDIA T4", "check", 1_700_000_000);
        assert!(Levels::new(&CacheDir::at(self.place.cache())).raise(&kept).unwrap());
    }
}

fn level_of(engine: &Engine, dtype: DType) -> (String, String) {
    let (problem, shape) = call(dtype);
    let told = engine.explain(&problem, &shape).unwrap();
    (told.family, told.level)
}

#[test]
fn what_a_card_has_run_is_dispatched_on_others_and_the_account_says_so() {
    for (arch, level) in [
        ("sm_80", "ran on sm_90, never on sm_80"),
        ("sm_89", "ran on sm_90, never on sm_89"),
        ("sm_120a", "ran on sm_90, never on sm_120"),
    ] {
        let told = level_of(&Card::of(arch).engine(), DType::Bf16);
        assert_eq!(told, ("forward/sm80".to_owned(), level.to_owned()));
        if arch != "sm_80" {
            let told = level_of(&Card::of(arch).engine(), DType::E4m3);
            assert_eq!(told, ("forward/sm89_fp8".to_owned(), level.to_owned()));
        }
    }
    let hopper = Card::of("sm_90a").engine();
    assert_eq!(level_of(&hopper, DType::Bf16), ("forward/sm90".to_owned(), "raced on sm_90".to_owned()));
    assert_eq!(level_of(&hopper, DType::E4m3), ("forward/sm90_fp8".to_owned(), "raced on sm_90".to_owned()));
    let (problem, shape) = call(DType::Bf16);
    let text = Card::of("sm_89").engine().explain(&problem, &shape).unwrap().to_string();
    assert!(text.contains("\nlevel      ran on sm_90, never on sm_89\n"), "{text}");
}

#[test]
fn what_only_the_emulator_has_run_says_so_where_it_is_allowed() {
    let card = Card::of("sm_75");
    let engine = card.builder().allow_path(path(TURING)).build().unwrap();
    let (family, level) = level_of(&engine, DType::F16);
    assert_eq!(family, "forward/sm80");
    assert!(level.starts_with("emulated, on no card yet") && level.contains("allowed by name"), "{level}");
    // Another path is another matter.
    let engine = card.builder().allow_path(path("forward/sm80:f16")).build().unwrap();
    assert_eq!(level_of(&engine, DType::F16).0, "forward/naive");
}

#[test]
fn where_another_family_serves_the_refusal_is_told_and_no_call_fails() {
    let card = Card::of("sm_75");
    let (problem, shape) = call(DType::F16);
    let told = card.engine().explain(&problem, &shape).unwrap();
    assert_eq!((told.family.as_str(), told.level.as_str()), ("forward/naive", "ran on sm_90, never on sm_75"));
    let refused = told.refusals.iter().find(|r| r.what == "forward/sm80").expect("an account of forward/sm80");
    for words in [TURING, "emulated", "flashtune check --family forward/sm80", "--allow-path", "FLASHTUNE_ALLOW_PATHS"]
    {
        assert!(refused.why.contains(words), "{told}");
    }
    let engine = card.builder().allow_path(path(TURING)).build().unwrap();
    let told = engine.explain(&problem, &shape).unwrap();
    assert_eq!((told.family.as_str(), told.path.as_str()), ("forward/sm80", TURING));
    assert!(told.schedule.ends_with("-turing"), "{told}");
    // bf16 has no such instructions there.
    assert_eq!(level_of(&engine, DType::Bf16).0, "forward/naive");
}

#[test]
fn a_raised_level_is_kept_and_holds_for_these_templates_alone() {
    let card = Card::of("sm_75");
    let family = |engine: &Engine| level_of(engine, DType::F16).0;
    card.raise(TURING, Level::Ran, &TemplateSet::embedded());
    assert_eq!(level_of(&card.engine(), DType::F16), ("forward/sm80".into(), "ran on sm_75 (NVIDIA T4)".into()));
    card.raise(TURING, Level::Raced, &TemplateSet::embedded());
    assert_eq!(level_of(&card.engine(), DType::F16).1, "raced on sm_75 (NVIDIA T4)");

    // What ran were other kernels.
    let (folder, file) = (card.place.path("templates"), "forward/sm80/instructions.cuh");
    let text = TemplateSet::embedded().files().find(|(name, _)| *name == file).unwrap().1.to_owned();
    std::fs::create_dir_all(folder.join("forward/sm80")).unwrap();
    std::fs::write(folder.join(file), format!("{text}\nconstexpr int kOther = 1;\n")).unwrap();
    assert_eq!(family(&card.builder().templates(&folder).build().unwrap()), "forward/naive");
    // A comment changes no kernel.
    std::fs::write(folder.join(file), format!("{text}\n// More words.\n")).unwrap();
    assert_eq!(family(&card.builder().templates(&folder).build().unwrap()), "forward/sm80");

    // Nor on another arch, nor where the file is damaged.
    let elsewhere = Card { place: card.place, arch: "sm_80" };
    assert_eq!(level_of(&elsewhere.engine(), DType::F16).1, "ran on sm_90, never on sm_80");
    let card = Card { arch: "sm_75", ..elsewhere };
    let levels = CacheDir::at(card.place.cache()).base().join("levels");
    for entry in std::fs::read_dir(levels).unwrap().flatten() {
        let mut bytes = std::fs::read(entry.path()).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(entry.path(), bytes).unwrap();
    }
    assert_eq!(family(&card.engine()), "forward/naive");
}

/// A tuning elsewhere on such a card, whose record came here.
#[test]
fn a_measured_record_is_taken_and_one_that_was_only_built_is_not() {
    let (problem, shape) = call(DType::F16);
    for measured in [true, false] {
        let card = Card::of("sm_75");
        let device = card.engine().device().fingerprint().clone();
        let (templates, bucket) = (TemplateSet::embedded(), ShapeBucket::of(&shape));
        let schedule = Schedule::default_for(Family::ForwardSm80, &problem, device.arch, &bucket).unwrap();
        let kernel = Kernel { problem, schedule, arch: device.arch };
        let artifact = compile_with(&*Instant::holding("nothing"), &kernel, &templates).unwrap();
        let finalist = Finalist {
            schedule,
            median_us: 100.0,
            p10_us: 99.0,
            p90_us: 101.0,
            samples: 20,
            rounds_ns: Vec::new(),
            max_error: 0.01,
            is_default: true,
        };
        let provenance = Provenance {
            flashtune: "0.1.0".into(),
            templates: templates.hash_of(Family::ForwardSm80).into(),
            compiler: "paper 1".into(),
            unix_time: 1_700_000_000,
            shape,
            space: 1,
            compiled: 1,
            timed: 1,
            unfused_us: None,
            seconds: 1.0,
            compile_seconds: 1.0,
            device_seconds: 1.0,
            waited_seconds: 0.0,
            conditions: Conditions::default(),
        };
        let record = Record {
            key: RecordKey { device, problem, bucket, launches: Launches::Eager },
            schedule,
            artifact: artifact.recipe.key(),
            finalists: if measured { vec![finalist] } else { Vec::new() },
            provenance,
            rivals: Vec::new(),
            settled: Vec::new(),
        };
        let dir = CacheDir::at(card.place.cache());
        let files = ArtifactFiles::new(&dir);
        dir.create().unwrap();
        files.put(&artifact).unwrap();
        let store = Store::open(&dir).unwrap();
        store.put_record(&record).unwrap();
        store.publish(&files).unwrap();
        drop(store);
        let planned = card.engine().explain(&problem, &shape).unwrap();
        match measured {
            true => assert_eq!(planned.level, "raced on sm_75 (Paper)"),
            false => assert_eq!(planned.family, "forward/naive", "{planned}"),
        }
    }
}

#[test]
fn names_come_from_options_and_variable_and_unknown_ones_are_refused() {
    let place = Place::new();
    let emit: &[&str] = &["emit", "--arch", "sm_75", "--dtype", "f16", "--head-dim", "64"];
    let printed = |command: &mut assert_cmd::Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let clean = |args: &[&str]| {
        let mut command = place.flashtune(args);
        command.env_remove(flashtune::ALLOW_PATHS_VARIABLE);
        command
    };
    assert!(printed(&mut clean(emit)).contains(".naive."));
    assert!(printed(&mut clean(&[emit, &["--allow-path", TURING]].concat())).contains("-turing"));
    assert!(
        printed(clean(emit).env(flashtune::ALLOW_PATHS_VARIABLE, format!("forward/sm89_fp8:e4m3, {TURING}")))
            .contains("-turing")
    );
    // Naming the family is a name.
    assert!(printed(&mut clean(&[emit, &["--family", "forward/sm80"]].concat())).contains("-turing"));
    for bad in ["forward/sm80:f17", "forward/sm80:f16-m9", "sm80"] {
        let refused = clean(&[emit, &["--allow-path", bad]].concat()).output().unwrap();
        assert!(!refused.status.success());
    }
    let refused = clean(emit).env(flashtune::ALLOW_PATHS_VARIABLE, "forward/sm81:f16").output().unwrap();
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("forward/sm81"));
    assert_eq!(Family::by_name("sm89_fp8"), Some(Family::ForwardSm89Fp8));
}
