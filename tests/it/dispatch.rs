//! The dispatcher in one process: once per kernel, cheap when warm, and never silent.

use crate::common::counted::{ALLOCATIONS, counted, engine, small};
use crate::common::{self, Place};
use flashtune::{DType, Engine, Error, Policy, Problem, Status, Trust};
use flashtune_runtime::{Device as _, Error as RuntimeError};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[test]
fn many_threads_that_ask_for_one_kernel_compile_and_load_it_once() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let (problem, shape) = small(128);
    let names: Vec<String> = std::thread::scope(|scope| {
        let ask = || engine.plan(&problem, &shape).unwrap().kernel().name();
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(names.iter().all(|n| *n == names[0]));
    assert_eq!(device.compiles.load(Ordering::SeqCst), 1);
    assert_eq!(device.loads.load(Ordering::SeqCst), 1);
    // Another engine on the same cache finds the kernel in the files.
    let again = common::counted::engine(&place, &device, Policy::Default);
    let plan = again.plan(&problem, &shape).unwrap();
    assert_eq!(device.compiles.load(Ordering::SeqCst), 1);
    assert_eq!(plan.status(), Status::Default, "a compiled kernel is not a tuned one");
}

#[test]
fn a_warm_plan_allocates_nothing_and_takes_under_five_microseconds() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let (problem, shape) = small(128);
    let first = engine.plan(&problem, &shape).unwrap();
    const CALLS: u32 = 1000;
    // The quickest of some batches: what it costs when nothing else runs on the core.
    let mut best = f64::MAX;
    let before = ALLOCATIONS.with(Cell::get);
    for _ in 0..20 {
        let start = std::time::Instant::now();
        for _ in 0..CALLS {
            std::hint::black_box(engine.plan(&problem, &shape).unwrap());
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / CALLS as f64);
    }
    assert_eq!(ALLOCATIONS.with(Cell::get), before, "a warm plan allocates");
    assert!(best < 5.0, "{best} us");
    assert!(Arc::ptr_eq(&first, &engine.plan(&problem, &shape).unwrap()));
    // Other sizes of the same bucket are the same plan.
    assert!(Arc::ptr_eq(&first, &engine.plan(&problem, &small(100).1).unwrap()));
}

#[test]
fn sealed_does_not_even_look_for_a_compiler() {
    let (place, device) = (Place::new(), counted());
    place.tune_small();
    let engine = engine(&place, &device, Policy::Sealed);
    let (problem, shape) = small(128);
    assert_eq!(engine.plan(&problem, &shape).unwrap().status(), Status::Tuned);
    // Far from everything: still the tuned kernel, because nothing else may run.
    let far = engine.plan(&problem, &small(1 << 20).1).unwrap();
    assert_eq!(far.status(), Status::NearestShape);
    let other = Problem { dtype: DType::F16, ..problem };
    let error = engine.plan(&other, &shape).unwrap_err();
    assert!(matches!(error, Error::Runtime(RuntimeError::Sealed { .. })), "{error}");
    assert_eq!(device.compilers.load(Ordering::SeqCst), 0);
}

#[test]
fn what_is_too_far_away_gives_way_to_the_models_choice() {
    let (place, device) = (Place::new(), counted());
    place.tune_small();
    let engine = engine(&place, &device, Policy::Default);
    let (problem, _) = small(0);
    assert_eq!(engine.plan(&problem, &small(128).1).unwrap().status(), Status::Tuned);
    assert_eq!(engine.plan(&problem, &small(512).1).unwrap().status(), Status::NearestShape);
    let far = engine.plan(&problem, &small(1 << 15).1).unwrap();
    assert_eq!(far.status(), Status::Default);
    assert!(far.refusals().iter().any(|r| r.why.contains("too far")), "{}", far.explain());
}

#[test]
fn a_record_of_another_device_serves_as_provisional() {
    use flashtune_cache::{BundleContents, CacheDir, Layers};
    let (place, device) = (Place::new(), counted());
    place.tune_small();
    let layers = Layers::open(&CacheDir::at(place.cache()), &[], None).unwrap();
    let mut record = (*layers.records()[0].1).clone();
    record.key.device.name = "Another Processor".to_owned();
    record.key.device.units += 62;
    let bundle = place.path("other.ftb");
    let mut load = |key: &_| layers.artifact(key).map(|(artifact, _)| artifact);
    BundleContents { records: vec![record], artifacts: Vec::new(), load: &mut load, created: 0 }
        .write(&bundle)
        .unwrap();

    let fresh = Place::new();
    let builder = Engine::builder()
        .on(device.clone())
        .cache_dir(fresh.cache())
        .bundle(&bundle)
        .trust(Trust::default().allow_unsigned(true));
    let engine = builder.policy(Policy::Sealed).build().unwrap();
    let (problem, shape) = small(128);
    let plan = engine.plan(&problem, &shape).unwrap();
    assert_eq!(plan.status(), Status::Provisional);
    let account = plan.explain().to_string();
    assert!(account.contains("Another Processor") && account.contains("other.ftb"), "{account}");
    assert_eq!(device.compilers.load(Ordering::SeqCst), 0);
}

#[test]
fn sealed_goes_on_to_the_next_record_when_a_kernel_is_missing() {
    use flashtune_cache::{BundleContents, CacheDir, Key, Layers};
    use flashtune_codegen::{Family, Kernel, Schedule, ShapeBucket};
    let (place, device) = (Place::new(), counted());
    place.tune_small();
    let layers = Layers::open(&CacheDir::at(place.cache()), &[], None).unwrap();
    let near = (*layers.records()[0].1).clone();
    let (problem, shape) = small(512);
    let mut exact = near.clone();
    exact.key.bucket = ShapeBucket::of(&shape);
    // Another schedule, whose kernel nobody has.
    let arch = device.fingerprint().arch;
    let fits = |s: &Schedule| *s != near.schedule && Kernel { problem, schedule: *s, arch }.check().is_ok();
    exact.schedule = Schedule::space(Family::ForwardCpu, &problem, arch).into_iter().find(fits).unwrap();
    exact.artifact = Key::of(b"a kernel that nobody has");
    let bundle = place.path("two.ftb");
    let mut load = |key: &_| layers.artifact(key).map(|(artifact, _)| artifact);
    let contents = BundleContents { records: vec![exact, near], artifacts: Vec::new(), load: &mut load, created: 0 };
    contents.write(&bundle).unwrap();

    let plan = |policy| {
        let fresh = Place::new();
        let builder = Engine::builder()
            .on(device.clone())
            .cache_dir(fresh.cache())
            .bundle(&bundle)
            .trust(Trust::default().allow_unsigned(true));
        builder.policy(policy).build().unwrap().plan(&problem, &shape).unwrap()
    };
    let sealed = plan(Policy::Sealed);
    assert_eq!(sealed.status(), Status::NearestShape);
    assert!(sealed.refusals().iter().any(|r| r.why.contains("binary")), "{}", sealed.explain());
    assert_eq!(device.compilers.load(Ordering::SeqCst), 0);
    let compiled = plan(Policy::Default);
    assert_eq!(compiled.status(), Status::Tuned, "the record's own schedule, compiled again");
    assert_eq!(device.compiles.load(Ordering::SeqCst), 1);
}

#[test]
fn an_embedded_bundle_is_searched_last() {
    let (place, device) = (Place::new(), counted());
    place.tune_small();
    let bundle = place.path("mine.ftb");
    place.json(&["export", bundle.to_str().unwrap()]);
    // A host would use `include_bytes!`.
    let bytes: &'static [u8] = Box::leak(std::fs::read(&bundle).unwrap().into_boxed_slice());
    let fresh = Place::new();
    let builder = Engine::builder().on(device.clone()).cache_dir(fresh.cache()).embedded(bytes);
    let (problem, shape) = small(128);
    let plan = builder.policy(Policy::Sealed).build().unwrap().plan(&problem, &shape).unwrap();
    assert_eq!(plan.explain().layer, "embedded");
    let own = Engine::builder().on(device).cache_dir(place.cache()).embedded(bytes).build().unwrap();
    assert_eq!(own.plan(&problem, &shape).unwrap().explain().layer, "snapshot");
}

#[test]
fn the_account_names_family_layer_status_and_what_was_not_used() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let (problem, shape) = small(128);
    let account = engine.explain(&problem, &shape).unwrap();
    assert_eq!(account.family, "forward/cpu");
    assert_eq!(account.layer, "none");
    assert!(account.binary.contains("compiled now"));
    assert!(account.because.contains("tune"), "{}", account.because);
    for family in ["forward/sm80", "forward/naive"] {
        assert!(account.refusals.iter().any(|r| r.what == family), "{account}");
    }
    let text = account.to_string();
    for word in ["problem", "shape", "schedule", "status", "layer", "not used"] {
        assert!(text.contains(word), "{text}");
    }
}
