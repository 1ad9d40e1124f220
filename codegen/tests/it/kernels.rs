//! Every problem renders with its default schedule on every arch; names are unique; rendering is deterministic.

use flashtune_codegen::*;
use std::collections::HashSet;

const ARCHS: [&str; 10] = [
    "cpu-generic",
    "cpu-avx2",
    "cpu-avx512",
    "cpu-avx512bf16",
    "cpu-amx",
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_90a",
    "sm_120a",
];

fn bucket(q_len: u32) -> ShapeBucket {
    ShapeBucket { parallel: 32, group: 1, q_len, kv_len: 4096, ..Default::default() }
}

/// All (problem, arch, family) triples that are supported, over every head dim.
fn supported() -> impl Iterator<Item = (Problem, Arch, Family)> {
    let whole = (HEAD_DIM_MIN..=HEAD_DIM_MAX).step_by(HEAD_DIM_STEP as usize);
    let dims = whole.chain([1, 7, 59, 111, 255]);
    let problems = dims.flat_map(|d| {
        DType::ALL.into_iter().flat_map(move |t| {
            MaskKind::ALL.into_iter().flat_map(move |m| {
                // V as long as Q and K, and at the far end of the range.
                [d, (HEAD_DIM_MAX + HEAD_DIM_MIN - d).min(HEAD_DIM_MAX)]
                    .map(|v| Problem::forward_qk_v(t, d, v, m).unwrap())
            })
        })
    });
    problems.flat_map(|p| {
        ARCHS.into_iter().map(|a| a.parse::<Arch>().unwrap()).flat_map(move |a| {
            Family::ALL.into_iter().filter(move |f| f.supports(&p, a).is_ok()).map(move |f| (p, a, f))
        })
    })
}

#[test]
fn the_default_schedule_of_every_problem_fits_its_arch() {
    let mut count = 0;
    for (problem, arch, family) in supported() {
        for q_len in [1, 64, 4096] {
            let schedule = Schedule::default_for(family, &problem, arch, &bucket(q_len)).unwrap();
            let kernel = Kernel { problem, schedule, arch };
            kernel.check().unwrap_or_else(|e| panic!("{}: {e}", kernel.name()));
            count += 1;
            let Some(schedule) = schedule.quick() else {
                assert_ne!(family, Family::ForwardSm90, "{}", kernel.name());
                continue;
            };
            let quick = Kernel { schedule, ..kernel };
            quick.check().unwrap_or_else(|e| panic!("{}: {e}", quick.name()));
            assert!(schedule.family() == family && schedule.quick().is_none(), "{}", quick.name());
        }
    }
    assert!(count > 10_000, "{count}");
}

#[test]
fn masks_like_a_causal_one_have_its_schedule() {
    let arch: Arch = "sm_90a".parse().unwrap();
    let default = |mask, text: &str, kv_len| {
        let problem = Problem::forward(DType::Bf16, 128, mask).unwrap();
        let problem = problem.with_program(score::Program::parse(text).unwrap());
        Schedule::default_for(Family::ForwardSm90, &problem, arch, &ShapeBucket { kv_len, ..bucket(kv_len) }).unwrap()
    };
    for kv_len in [1024, 4096, 16384] {
        let by_name = default(MaskKind::CAUSAL, "score = score;", kv_len);
        for text in [
            "shift: int; mask = kv <= q + shift;",
            "mask = kv <= q + kv_len - q_len;",
            "prefix: i32[batch]; mask = kv < prefix[b] or kv <= q;",
            "mask = kv // 64 <= q // 64;",
        ] {
            assert_eq!(default(MaskKind::FULL, text, kv_len), by_name, "{text} {kv_len}");
        }
        let window = default(MaskKind::FULL, "mask = kv <= q and q - kv < 1024;", kv_len);
        assert!(kv_len < 4096 || window != by_name, "{window}");
    }
}

#[test]
fn blocks_of_other_rows_are_left_out_where_the_ends_of_runs_are_known() {
    let arch: Arch = "sm_90a".parse().unwrap();
    let documents = "d: i32[batch, *] nondecreasing; mask = d[b, q] == d[b, kv];";
    let sm90 = |text: &str| {
        let problem = Problem::forward(DType::Bf16, 128, MaskKind::FULL).unwrap();
        let problem = problem.with_program(score::Program::parse(text).unwrap());
        let default = Schedule::default_for(Family::ForwardSm90, &problem, arch, &bucket(16384)).unwrap();
        let Schedule::Sm90(schedule) = default else { panic!("{default}") };
        let trims =
            |trim| Kernel { problem, schedule: Schedule::Sm90(Sm90Schedule { trim, ..schedule }), arch }.check();
        let space = Schedule::space(Family::ForwardSm90, &problem, arch);
        let both = |s: &Schedule| matches!(s, Schedule::Sm90(s) if s.trim && s.chain && s.overlap);
        (schedule, trims(true).map_err(|e| e.to_string()), space.iter().filter(|s| both(s)).count() > 0)
    };
    // Where they lie in memory, the search has it with and without a chain.
    let (schedule, legal, searched) = sm90(documents);
    assert!(!schedule.trim && schedule.chain && legal.is_ok() && searched, "{}", Schedule::Sm90(schedule));
    let (schedule, legal, searched) = sm90("mask = kv <= q and q - kv < 1000;");
    assert!(!schedule.trim && legal.is_ok() && !searched, "{}", Schedule::Sm90(schedule));
    // Blocks of a list are no range.
    let (schedule, legal, searched) = sm90("mask = (q - kv) % 7 == 0;");
    assert!(!schedule.trim && !searched && legal.unwrap_err().contains("one run of keys"));
}

#[test]
fn registers_that_the_producer_keeps_are_those_that_consumers_lack() {
    let arch: Arch = "sm_90a".parse().unwrap();
    let problem = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap();
    let default = Schedule::default_for(Family::ForwardSm90, &problem, arch, &bucket(1024)).unwrap();
    let Schedule::Sm90(schedule) = default else { panic!("{default}") };
    let with = |producer_spare| Sm90Schedule { producer_spare, ..schedule };
    let registers = |s: Sm90Schedule| (s.producer_registers(&problem), s.consumer_registers(&problem));
    assert_eq!((registers(with(0)), registers(with(16))), ((40, 232), (56, 224)));
    let legal = |spare| Kernel { problem, schedule: Schedule::Sm90(with(spare)), arch }.check();
    assert!(legal(16).is_ok());
    for spare in [7, 136] {
        let e = legal(spare).unwrap_err().to_string();
        assert!(e.contains("producer_spare") && e.contains("a multiple of 8"), "{spare}: {e}");
    }
    let space = Schedule::space(Family::ForwardSm90, &problem, arch);
    assert!(space.iter().any(|s| matches!(s, Schedule::Sm90(s) if s.producer_spare == 16)));
}

#[test]
fn rendering_is_complete_and_deterministic() {
    let (a, b) = (TemplateSet::embedded(), TemplateSet::embedded());
    assert_eq!(a.hash(), b.hash());
    for (problem, arch, family) in supported().step_by(97) {
        let schedule = Schedule::default_for(family, &problem, arch, &bucket(1024)).unwrap();
        let kernel = Kernel { problem, schedule, arch };
        let source = kernel.render(&a).unwrap();
        assert_eq!(source, kernel.render(&b).unwrap());
        for left_over in ["@{", "}@", "<%", "%>", "<#"] {
            assert!(!source.text.contains(left_over), "{} has {left_over}", source.name);
        }
        assert!(source.text.contains(&source.name) && source.text.contains(a.hash_of(family)));
        assert!(source.text.contains(&source.entry), "{}", source.entry);
    }
}

#[test]
fn generated_cuda_includes_nothing() {
    for (problem, arch, family) in supported().filter(|(_, a, _)| matches!(a, Arch::Sm(_))).step_by(331) {
        let schedule = Schedule::default_for(family, &problem, arch, &bucket(1024)).unwrap();
        let text = Kernel { problem, schedule, arch }.render(&TemplateSet::embedded()).unwrap().text;
        assert!(!text.contains("#include"));
    }
}

#[test]
fn names_tell_all_schedules_apart() {
    let arch = "sm_90a".parse().unwrap();
    let problem = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap();
    let space = Schedule::space(Family::ForwardSm80, &problem, arch);
    let names: HashSet<String> = space.iter().map(|&schedule| Kernel { problem, schedule, arch }.name()).collect();
    assert_eq!(names.len(), space.len());
}

#[test]
fn the_space_holds_fitting_schedules_for_every_arch() {
    for (arch, head_dim, least) in
        [("sm_80", 64, 100), ("sm_86", 64, 50), ("sm_86", 256, 5), ("sm_90a", 128, 100), ("sm_90a", 256, 30)]
    {
        let arch = arch.parse().unwrap();
        let problem = Problem::forward(DType::F16, head_dim, MaskKind::FULL).unwrap();
        let fit = Schedule::space(Family::ForwardSm80, &problem, arch)
            .into_iter()
            .filter(|&schedule| Kernel { problem, schedule, arch }.check().is_ok())
            .count();
        assert!(fit >= least, "{arch} d{head_dim}: {fit}");
    }
}

#[test]
fn an_oversized_schedule_names_the_resource() {
    let arch: Arch = "sm_86".parse().unwrap();
    let problem = Problem::forward(DType::F16, 256, MaskKind::FULL).unwrap();
    let Schedule::Sm80(default) = Schedule::default_for(Family::ForwardSm80, &problem, arch, &bucket(4096)).unwrap()
    else {
        panic!("family")
    };
    let check_on =
        |s: Sm80Schedule, arch| Kernel { problem, schedule: Schedule::Sm80(s), arch }.check().unwrap_err().to_string();
    let check = |s| check_on(s, arch);
    assert!(check(Sm80Schedule { block_kv: 128, stages: 3, ..default }).contains("shared memory"));
    let wide = Sm80Schedule { rows_per_warp: 64, block_kv: 16, ..default };
    assert!(check_on(wide, "sm_90a".parse().unwrap()).contains("registers"));
    assert!(check(Sm80Schedule { block_kv: 20, ..default }).contains("block_kv"));
    assert!(check(Sm80Schedule { warps: 0, ..default }).contains("warps"));
    assert!(check(Sm80Schedule { stages: 9, ..default }).contains("stages"));
}

#[test]
fn launches_count_tiles_and_refuse_what_a_grid_cannot_hold() {
    let arch = "sm_90a".parse().unwrap();
    let problem = Problem::forward(DType::F16, 64, MaskKind::FULL).unwrap();
    let schedule = Schedule::default_for(Family::ForwardSm80, &problem, arch, &bucket(4096)).unwrap();
    let kernel = Kernel { problem, schedule, arch };
    let shape = |batch, q_len| Shape { batch, heads: 8, kv_heads: 2, q_len, kv_len: 77, mask: Mask::Full };
    let plan = kernel.plan(&shape(3, 129)).unwrap();
    let main = plan.main().unwrap();
    assert_eq!((plan.stages().count(), plan.regions().count()), (1, 0));
    assert_eq!((main.grid, main.threads), (3 * 8 * 2, 128));
    assert!(kernel.plan(&shape(0, 129)).unwrap().is_empty());
    assert!(kernel.plan(&shape(1 << 28, 1 << 20)).unwrap_err().to_string().contains("split the batch"));
}

/// What the preprocessor leaves of a text with this value of `name`, for conditions on it alone.
fn preprocessed(text: &str, name: &str, on: bool) -> String {
    let mut kept = String::new();
    // Of each open condition whether it is ours, and whether its lines are kept.
    let mut open: Vec<(bool, bool)> = Vec::new();
    for line in text.lines() {
        let word = line.trim_start();
        if word.starts_with("#if") {
            let ours = word.strip_prefix("#if ").is_some_and(|of| of.trim() == name);
            open.push((ours, !ours || on));
            if ours {
                continue;
            }
        } else if word.starts_with("#else") && open.last().is_some_and(|(ours, _)| *ours) {
            open.last_mut().expect("it is open").1 ^= true;
            continue;
        } else if word.starts_with("#endif") && open.pop().is_some_and(|(ours, _)| ours) {
            continue;
        }
        if open.iter().all(|(_, kept)| *kept) {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

/// A kernel without a residual has nothing of it but the switch, and one with it has the fields behind all others.
#[test]
fn kernels_without_a_residual_know_nothing_of_it() {
    let templates = TemplateSet::embedded();
    for (family, arch) in [
        (Family::ForwardSm90, "sm_90a"),
        (Family::ForwardSm80, "sm_80"),
        (Family::ForwardNaive, "sm_75"),
        (Family::ForwardCpu, "cpu-avx2"),
        (Family::BackwardSm90, "sm_90a"),
        (Family::BackwardSm80, "sm_80"),
        (Family::BackwardNaive, "sm_75"),
        (Family::BackwardCpu, "cpu-avx2"),
    ] {
        let arch: Arch = arch.parse().unwrap();
        let forward = Problem::forward(DType::Bf16, 64, MaskKind::CAUSAL).unwrap();
        let problem = if family.op() == Op::Backward { forward.backward() } else { forward };
        let rendered = |problem: Problem| {
            let schedule = Schedule::default_for(family, &problem, arch, &bucket(1024)).unwrap();
            let kernel = Kernel { problem, schedule, arch };
            let name = if family.name().ends_with("cpu") { "RESIDUAL" } else { "FT_RESIDUAL" };
            let text = kernel.render(&templates).unwrap().text;
            (preprocessed(&text, name, problem.residual), abi::ArgsLayout::of(&kernel))
        };
        let (plain, layout) = rendered(problem);
        let knows = plain.lines().filter(|l| l.contains("residual") || l.contains("RESIDUAL"));
        // The switch itself, and a constant that it gives.
        let knows: Vec<&str> = knows.filter(|l| !l.contains("RESIDUAL")).collect();
        assert!(knows.is_empty(), "{family}: {knows:?}");
        let (with, longer) = rendered(problem.with_residual(true));
        assert!(with.contains("residual_stride[3];"), "{family}");
        assert_eq!((longer.forward - layout.forward, longer.head, longer.tail), (32, layout.head, layout.tail));
    }
    let stored = serde_json::to_string(&Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap()).unwrap();
    assert!(!stored.contains("residual"), "{stored}");
}

/// Where P is rounded, its largest must be 1.
#[test]
fn forward_passes_with_a_residual_rescale_eagerly() {
    let problem = Problem::forward(DType::Bf16, 128, MaskKind::FULL).unwrap().with_residual(true);
    for (family, name) in [(Family::ForwardSm80, "sm_80"), (Family::ForwardSm90, "sm_90a")] {
        let arch: Arch = name.parse().unwrap();
        for q_len in [1, 64, 4096] {
            let schedule = Schedule::default_for(family, &problem, arch, &bucket(q_len)).unwrap();
            Kernel { problem, schedule, arch }.check().unwrap();
            let lazy = match schedule {
                Schedule::Sm80(s) => Schedule::Sm80(Sm80Schedule { lazy_rescale: true, ..s }),
                Schedule::Sm90(s) => Schedule::Sm90(Sm90Schedule { lazy_rescale: true, ..s }),
                other => unreachable!("{other}"),
            };
            let e = Kernel { problem, schedule: lazy, arch }.check().unwrap_err().to_string();
            assert!(e.contains("lazy_rescale") && e.contains("residual"), "{e}");
        }
    }
}

#[test]
fn stages_start_early_where_their_kernels_wait_for_the_launch_before() {
    let program = score::Program::parse("slope: f32[heads]; score = score + slope[h];").unwrap();
    let shape = Shape { batch: 2, heads: 8, kv_heads: 2, q_len: 300, kv_len: 4096, mask: Mask::Full };
    let templates = TemplateSet::embedded();
    let mut seen = HashSet::new();
    for dtype in DType::ALL.into_iter().chain([DType::E4m3]) {
        let forward = Problem::forward(dtype, 64, MaskKind::FULL).unwrap();
        let element = KvElement::Same.beside(dtype);
        let ragged = forward.with_kv(KvKind::Ragged(KvStore { element, ..KvStore::default() }));
        let of = |op| Problem { op, ..forward };
        let programmed = forward.with_program(program.clone());
        let gradient = programmed.gradient_by("slope").unwrap();
        let problems =
            [forward, ragged, of(Op::Backward), Problem { op: Op::Append, ..ragged }, of(Op::Quantise), gradient];
        let packed = ragged.backward();
        for problem in problems.into_iter().chain([Problem::pad(), packed, programmed]) {
            for arch in ["sm_80", "sm_89", "sm_90a"].map(|name| name.parse::<Arch>().unwrap()) {
                for family in Family::ALL {
                    let bucket = ShapeBucket::of(&shape);
                    let Ok(schedule) = Schedule::default_for(family, &problem, arch, &bucket) else { continue };
                    let kernel = Kernel { problem, schedule, arch };
                    let text = kernel.render(&templates).unwrap().text;
                    let plan = kernel.plan(&shape).unwrap();
                    let early = plan.stages().filter(|s| s.starts_early).count();
                    assert_eq!(text.contains(" ft_waits_for_launch_before = 1;"), early > 0, "{}", kernel.name());
                    // What finds mask metadata has no such wait.
                    let waiting = text.lines().filter(|line| line.trim() == "wait_for_launch_before();").count();
                    assert!(
                        early == 0 || waiting >= plan.stages().count() && early == plan.stages().count(),
                        "{family}"
                    );
                    seen.insert((family, early > 0));
                }
            }
        }
    }
    let early: HashSet<Family> = seen.iter().filter(|(_, early)| *early).map(|(family, _)| *family).collect();
    let expected = [
        Family::ForwardSm90Fp8Ragged,
        Family::ForwardSm90Ragged,
        Family::ForwardSm80Ragged,
        Family::BackwardSm90,
        Family::AppendCuda,
        Family::QuantiseCuda,
        Family::PadCuda,
    ];
    assert_eq!(early, HashSet::from(expected));
    assert!(seen.len() >= 15, "{}", seen.len());
}
