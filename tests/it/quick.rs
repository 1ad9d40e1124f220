//! The first calls of a kernel that must be compiled: a quick schedule answers them, says so, and gives way.

use crate::common::paper::{Instant, Paper, call};
use crate::common::{Place, nvrtc_or_skip};
use flashtune::{Engine, Error, OnMiss, Policy, Status, Stream};
use flashtune_cache::{CacheDir, Layers};
use flashtune_runtime::Error as RuntimeError;
use flashtune_runtime::compile::Nvrtc;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A word in the names of default schedules for Hopper that the quick ones lack.
const SLOW: &str = "overlap";

fn engine(place: &Place, device: &Arc<Paper>) -> Engine {
    Engine::builder().on(device.clone()).cache_dir(place.cache()).quick_first(true).build().unwrap()
}

/// What a call of so many rows runs on.
fn forward(engine: &Engine, rows: u64) -> flashtune::Result<Status> {
    // SAFETY: a launch on paper touches no memory.
    let dispatch = unsafe { engine.forward(&call(rows).0, Stream(0))? };
    Ok(dispatch.expect("something to compute").plan.status())
}

/// Calls until the kernel itself answers.
fn settle(engine: &Engine, rows: u64) {
    for _ in 0..1000 {
        match forward(engine, rows).unwrap() {
            Status::Quick => std::thread::sleep(Duration::from_millis(10)),
            status => return assert_eq!(status, Status::Default),
        }
    }
    panic!("the quick schedule never gives way");
}

#[test]
fn a_quick_schedule_answers_until_the_default_is_compiled_and_says_so() {
    let (place, compiler) = (Place::new(), Instant::holding(SLOW));
    let device = Paper::new(compiler.clone());
    let engine = engine(&place, &device);
    let (first, problem, shape) = call(1024);
    // SAFETY: as in `forward`.
    let dispatch = unsafe { engine.forward(&first, Stream(0)).unwrap().unwrap() };
    let account = dispatch.explain();
    assert_eq!(account.status, Status::Quick, "{account}");
    assert!(account.because.contains(SLOW) && account.because.contains("the default schedule"), "{account}");
    assert_eq!(forward(&engine, 1000).unwrap(), Status::Quick);
    // Another class of sizes with the same schedules, too.
    assert_eq!(forward(&engine, 700).unwrap(), Status::Quick);
    assert_eq!(engine.counters().calls.quick, 3);
    assert!(engine.prometheus().contains("status=\"quick\"} 3"), "{}", engine.prometheus());
    assert_eq!(compiler.compiled.load(Ordering::SeqCst), 1);

    compiler.free();
    settle(&engine, 1024);
    settle(&engine, 700);
    let plan = engine.plan(&problem, &shape).unwrap();
    assert!(
        plan.kernel().name().contains(SLOW) && plan.explain().binary.contains("compiled now"),
        "{}",
        plan.explain()
    );
    assert_eq!((compiler.compiled.load(Ordering::SeqCst), engine.counters().compiled), (2, 2));
    let launched = std::mem::take(&mut *device.launched.lock().unwrap());
    assert!(!launched[0].contains(SLOW) && launched.last().unwrap().contains(SLOW), "{launched:?}");
    // What was kept: two kernels, and no record of what nobody measured.
    let layers = Layers::open(&CacheDir::at(place.cache()), &[], None).unwrap();
    assert!(layers.records().is_empty());
    drop(engine);
    let engine = self::engine(&place, &device);
    assert_eq!(forward(&engine, 1024).unwrap(), Status::Default);
    assert_eq!(compiler.compiled.load(Ordering::SeqCst), 2);
}

#[test]
fn who_prepares_captures_or_wants_no_quick_schedule_waits_for_the_kernel_itself() {
    let (first, problem, shape) = call(1024);
    type Ask<'a> = &'a dyn Fn(&Engine, &Paper) -> Status;
    let waiting: [(&str, bool, Ask<'_>); 5] = [
        ("prepare", true, &|engine, _| engine.prepare(&first).unwrap().unwrap().plan.status()),
        ("plan", true, &|engine, _| engine.plan(&problem, &shape).unwrap().status()),
        ("capture", true, &|engine, device| {
            device.capturing.store(true, Ordering::SeqCst);
            forward(engine, 1024).unwrap()
        }),
        ("capture after a quick call", true, &|engine, device| {
            assert_eq!(forward(engine, 1024).unwrap(), Status::Quick);
            device.capturing.store(true, Ordering::SeqCst);
            forward(engine, 1024).unwrap()
        }),
        ("off", false, &|engine, _| forward(engine, 1024).unwrap()),
    ];
    for (name, quick_first, ask) in waiting {
        let (place, compiler) = (Place::new(), Instant::holding(SLOW));
        let device = Paper::new(compiler.clone());
        let builder = Engine::builder().on(device.clone()).cache_dir(place.cache());
        let engine = builder.quick_first(quick_first).build().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                compiler.free();
            });
            assert_eq!(ask(&engine, &device), Status::Default, "{name}");
        });
        let expected = if name.contains("after a quick") { 2 } else { 1 };
        assert_eq!(compiler.compiled.load(Ordering::SeqCst), expected, "{name}");
        assert_eq!(forward(&engine, 1024).unwrap(), Status::Default, "{name}");
    }
}

#[test]
fn a_default_that_does_not_compile_leaves_the_quick_schedule_and_is_told() {
    let (place, compiler) = (Place::new(), Instant::holding(SLOW));
    let engine = engine(&place, &Paper::new(compiler.clone()));
    *compiler.refused.lock().unwrap() = Some(SLOW);
    assert_eq!(forward(&engine, 1024).unwrap(), Status::Quick);
    compiler.free();
    let (first, problem, shape) = call(1024);
    let refused = |e: Error| assert!(e.to_string().contains("refused by the test"), "{e}");
    refused(engine.prepare(&first).unwrap_err());
    refused(engine.plan(&problem, &shape).unwrap_err());
    // SAFETY: as in `forward`.
    let dispatch = unsafe { engine.forward(&first, Stream(0)).unwrap().unwrap() };
    let account = dispatch.explain();
    assert!(account.status == Status::Quick && account.notes.iter().any(|n| n.contains("could not be")), "{account}");
    // Nothing is sealed in that was to be replaced.
    assert!(matches!(engine.seal(OnMiss::Nearest), Err(Error::Runtime(RuntimeError::Sealed { .. }))));
}

#[test]
fn what_is_sealed_is_the_kernel_itself() {
    let digest = |quick_first: bool| {
        let (place, compiler) = (Place::new(), Instant::holding(SLOW));
        let device = Paper::new(compiler.clone());
        let builder = Engine::builder().on(device).cache_dir(place.cache());
        let engine = builder.quick_first(quick_first).build().unwrap();
        let free = |after| {
            std::thread::sleep(Duration::from_millis(after));
            compiler.free();
        };
        std::thread::scope(|scope| {
            if quick_first {
                assert_eq!(forward(&engine, 1024).unwrap(), Status::Quick);
            }
            scope.spawn(|| free(100));
            forward(&engine, 1024).unwrap();
            let seal = engine.seal(OnMiss::Refuse).unwrap();
            assert!(seal.left_out.is_empty(), "{seal:?}");
            assert_eq!(forward(&engine, 1024).unwrap(), Status::Default);
            seal.digest
        })
    };
    assert_eq!(digest(true), digest(false));
    // A sealed engine and the policy of that name never compile.
    let (place, compiler) = (Place::new(), Instant::holding(SLOW));
    let builder = Engine::builder().on(Paper::new(compiler.clone())).cache_dir(place.cache());
    let engine = builder.policy(Policy::Sealed).quick_first(true).build().unwrap();
    assert!(matches!(forward(&engine, 1024), Err(Error::Runtime(RuntimeError::Sealed { .. }))));
    assert_eq!(compiler.compiled.load(Ordering::SeqCst), 0);
}

#[test]
fn many_engines_on_one_cache_compile_each_kernel_once_and_what_a_closed_one_began_is_kept() {
    let (place, compiler) = (Place::new(), Instant::holding(SLOW));
    let device = Paper::new(compiler.clone());
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| assert_eq!(forward(&engine(&place, &device), 1024).unwrap(), Status::Quick));
        }
    });
    compiler.free();
    let patient = Engine::builder().on(device).cache_dir(place.cache()).quick_first(false).build().unwrap();
    assert_eq!(forward(&patient, 1024).unwrap(), Status::Default);
    assert_eq!(compiler.compiled.load(Ordering::SeqCst), 2);
}

const CHILD: &str = "FLASHTUNE_TEST_CHILD";
const CHILD_MS: &str = "FLASHTUNE_TEST_CHILD_MS";

/// The process of the next test.
#[test]
fn child_that_ends_while_it_compiles() {
    let Some(cache) = std::env::var_os(CHILD) else { return };
    let device = Paper::new(Nvrtc::find().unwrap());
    let engine = Engine::builder().on(device).cache_dir(cache).build().unwrap();
    assert_eq!(forward(&engine, 1024).unwrap(), Status::Quick);
    // As hosts that keep their engine in a static do.
    std::mem::forget(engine);
    let ms = std::env::var(CHILD_MS).unwrap().parse().unwrap();
    std::thread::sleep(Duration::from_millis(ms));
    std::process::exit(7);
}

#[test]
fn a_process_that_ends_while_a_kernel_compiles_ends_well_and_keeps_it() {
    if nvrtc_or_skip("a_process_that_ends_while_a_kernel_compiles_ends_well_and_keeps_it").is_none() {
        return;
    }
    // In the front end, in the middle, and about at the end.
    for ms in ["0", "200", "900"] {
        let place = Place::new();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "quick::child_that_ends_while_it_compiles", "--nocapture"])
            .envs([(CHILD, place.cache().as_os_str()), (CHILD_MS, ms.as_ref())])
            .env_remove(flashtune::QUICK_FIRST_VARIABLE)
            .stdout(Stdio::piped())
            .output()
            .unwrap();
        assert_eq!(child.status.code(), Some(7), "{ms}: {}", String::from_utf8_lossy(&child.stderr));
        let device = Paper::new(Nvrtc::find().unwrap());
        let engine = Engine::builder().on(device).cache_dir(place.cache()).build().unwrap();
        assert_eq!(forward(&engine, 1024).unwrap(), Status::Default, "{ms}");
        assert_eq!(engine.counters().compiled, 0, "{ms}: the child's compilation was lost");
    }
}
