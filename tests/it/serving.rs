//! A sealed engine: nothing compiles, hits cost next to nothing, misses are answered as was said, and all of it
//! counted.

use crate::common::counted::{ALLOCATIONS, counted, engine, small};
use crate::common::{Place, ROOT, json};
use flashtune::{DType, Engine, Error, Forward, OnMiss, Policy, Problem, Shape, Status, Stream, TensorView};
use flashtune::{ManifestEntry, read_manifest};
use flashtune_runtime::Error as RuntimeError;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

fn entry((problem, shape): (Problem, Shape)) -> ManifestEntry {
    ManifestEntry::new(problem, &shape)
}

/// A causal call of these lengths with tensors for it.
fn with_call(len: u64, run: impl FnOnce(&Forward)) {
    let memory = vec![0.5f32; 4 * 2 * len as usize * 32];
    let part = |i: u64| memory.as_ptr() as u64 + i * 4 * 2 * len * 32;
    let view = |i| TensorView::bhsd(part(i), DType::F32, [1, 2, len, 32]);
    let call = Forward { mask: flashtune::Mask::Causal, ..Forward::new(view(0), view(1), view(2), view(3)) };
    run(&call);
}

#[test]
fn after_the_seal_nothing_compiles_and_misses_run_on_the_nearest_kernel() {
    let (place, device) = (Place::new(), counted());
    place.tune_small();
    let engine = engine(&place, &device, Policy::Default);
    // One more class, that only a compiler can serve.
    let f16 = Problem { dtype: DType::F16, ..small(64).0 };
    assert!(engine.preload(&[entry((f16, small(64).1))]).is_empty());
    let seal = engine.seal(OnMiss::Nearest).unwrap();
    assert_eq!((seal.classes, seal.kernels, seal.left_out.len()), (2, 2, 0));
    assert_eq!(engine.seal(OnMiss::Refuse).unwrap(), seal, "the first seal holds");
    let (compilers, loads) = (device.compilers.load(Ordering::SeqCst), device.loads.load(Ordering::SeqCst));

    let plan = |problem: &Problem, len| engine.plan(problem, &small(len).1);
    let (f32, _) = small(0);
    assert_eq!(plan(&f32, 128).unwrap().status(), Status::Tuned);
    // However far; the policy `default` would have compiled the default schedule.
    for len in [1, 700, 1 << 20] {
        let near = plan(&f32, len).unwrap();
        assert_eq!(near.status(), Status::NearestShape);
        assert!(near.explain().because.contains("doublings"), "{}", near.explain());
        assert!(Arc::ptr_eq(&near, &plan(&f32, len).unwrap()), "the answer is remembered");
    }
    assert_eq!(plan(&f16, 4096).unwrap().status(), Status::Default);
    let unknown = Problem { dtype: DType::Bf16, ..f32 };
    let e = plan(&unknown, 128).unwrap_err();
    assert!(matches!(e, Error::Runtime(RuntimeError::Sealed { .. })), "{e}");
    let e = engine.tune(&unknown, &small(128).1).unwrap_err().to_string();
    assert!(e.contains("does not tune"), "{e}");
    assert_eq!(device.compilers.load(Ordering::SeqCst), compilers);
    assert_eq!(device.loads.load(Ordering::SeqCst), loads);
    let counters = engine.counters();
    assert!(counters.sealed && counters.compiled == 1 && counters.compile_ms > 0.0, "{counters:?}");
    assert_eq!((counters.loaded, counters.refused), (2, 1), "{counters:?}");
}

#[test]
fn a_seal_may_refuse_what_it_does_not_know_and_needs_something_to_serve_with() {
    let (place, device) = (Place::new(), counted());
    let empty = engine(&place, &device, Policy::Default);
    let e = empty.seal(OnMiss::Nearest).unwrap_err().to_string();
    assert!(e.contains("no layer has a record"), "{e}");
    // Nothing was closed.
    assert!(empty.sealed().is_none() && empty.plan(&small(0).0, &small(64).1).is_ok());
    let seal = empty.seal(OnMiss::Refuse).unwrap();
    assert_eq!(seal.classes, 1);
    let e = empty.plan(&small(0).0, &small(4096).1).unwrap_err().to_string();
    assert!(e.contains("not sealed in"), "{e}");
    assert_eq!(empty.counters().refused, 1);
}

#[test]
fn equal_caches_have_equal_digests_and_others_differ() {
    let (place, device) = (Place::new(), counted());
    place.tune_small();
    let digest = |preload: &[ManifestEntry], on_miss| {
        let engine = engine(&place, &device, Policy::Default);
        // In whatever order, and whatever was called meanwhile.
        assert!(engine.preload(preload).is_empty());
        engine.seal(on_miss).unwrap().digest
    };
    let [a, b] = [64, 128].map(|n| entry(small(n)));
    let one = digest(&[a, b], OnMiss::Nearest);
    assert_eq!(one, digest(&[b, a, a], OnMiss::Nearest));
    assert_eq!(digest(&[], OnMiss::Nearest), digest(&[b], OnMiss::Nearest), "the record is there in any case");
    assert_ne!(one, digest(&[b], OnMiss::Nearest));
    assert_ne!(one, digest(&[a, b], OnMiss::Refuse));
}

/// The promise is 1 us at release; the figure is in docs/trust.md, as that of hits.
#[test]
fn a_sealed_miss_allocates_little_and_is_quick() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let (problem, _) = small(64);
    let grouped = |group, n: u32| Shape { heads: group, kv_heads: 1, ..small(1 << n).1 };
    // Lengths that one kernel serves.
    let classes = |groups: std::ops::Range<u32>| groups.flat_map(|g| (7..11).map(move |n| (g, n))).collect::<Vec<_>>();
    for (group, n) in classes(1..25) {
        engine.plan(&problem, &grouped(group, n)).unwrap();
    }
    engine.seal(OnMiss::Nearest).unwrap();
    let (mut times, before) = (Vec::new(), ALLOCATIONS.with(Cell::get));
    let unknown = classes(25..61);
    for (group, n) in &unknown {
        let start = Instant::now();
        let plan = engine.plan(&problem, &grouped(*group, *n)).unwrap();
        times.push(start.elapsed().as_secs_f64() * 1e6);
        assert_eq!((plan.bucket().group, plan.bucket().q_len), (*group, 1 << n));
    }
    // The plan, its place in the table, its count; what the list of times and the map of counts take is shared by many.
    let each = (ALLOCATIONS.with(Cell::get) - before) as f64 / unknown.len() as f64;
    assert!(each < 3.5, "{each} allocations for each unknown class");
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    assert!(median < 20.0, "{median} us for a class that is met for the first time");
    // What it is served from has its lengths, and says so.
    let account = engine.explain(&problem, &grouped(60, 7)).unwrap();
    assert!(account.because.contains("g24q128k128, ") && account.because.contains("doublings away"), "{account}");
}

/// The promise is 200 ns at release; what is checked here is an unoptimised build on a busy machine. The figure is in
/// docs/trust.md, by `cargo run --release --example hit`.
#[test]
fn a_sealed_hit_allocates_nothing_and_is_quick() {
    let (place, device) = (Place::new(), counted());
    place.tune_small();
    let engine = engine(&place, &device, Policy::Sealed);
    engine.seal(OnMiss::Nearest).unwrap();
    with_call(128, |call| {
        let (problem, shape) = small(128);
        engine.prepare(call).unwrap();
        const CALLS: u32 = 1000;
        let mut best = f64::MAX;
        let before = ALLOCATIONS.with(Cell::get);
        for _ in 0..20 {
            let start = Instant::now();
            for _ in 0..CALLS {
                std::hint::black_box(engine.plan(&problem, &shape).unwrap());
            }
            best = best.min(start.elapsed().as_secs_f64() * 1e6 / CALLS as f64);
        }
        assert!(best < 5.0, "{best} us");
        // With tensors, and with all that comes before the launch.
        for _ in 0..CALLS {
            std::hint::black_box(engine.prepare(call).unwrap());
        }
        assert_eq!(ALLOCATIONS.with(Cell::get), before, "a sealed hit allocates");
        // The threads of the cpu share a queue, which takes memory for every 63rd job, whosever it is: not for each of
        // three.
        let launch = |_| {
            let before = ALLOCATIONS.with(Cell::get);
            // SAFETY: the tensors are live memory of these sizes.
            unsafe { engine.forward(call, Stream(0)).unwrap() };
            ALLOCATIONS.with(Cell::get) - before
        };
        assert_eq!((0..3).map(launch).min(), Some(0), "a sealed launch allocates");
    });
}

#[test]
fn calls_are_counted_and_untuned_shapes_come_back_as_work_for_the_tuner() {
    let (place, device) = (Place::new(), counted());
    place.tune_small();
    let served = engine(&place, &device, Policy::Sealed);
    served.seal(OnMiss::Nearest).unwrap();
    let call = |len, times: u32| {
        with_call(len, |call| {
            for _ in 0..times {
                // SAFETY: the tensors are live memory of these sizes.
                unsafe { served.forward(call, Stream(0)).unwrap() };
            }
        })
    };
    call(128, 3);
    call(300, 2);
    call(17, 5);
    let counters = served.counters();
    assert_eq!((counters.calls.tuned, counters.calls.nearest_shape, counters.calls.default), (3, 7, 0));
    // Both lengths two doublings away, of which those of queries count twice; then two doublings down.
    assert!(counters.nearest_distance_max > 5.0 && counters.nearest_distance_sum > 40.0, "{counters:?}");
    let text = served.prometheus();
    assert!(text.contains("status=\"nearest_shape\"} 7\n") && text.contains("status=\"tuned\"} 3\n"), "{text}");

    let file = place.path("untuned.jsonl");
    assert_eq!(served.write_untuned(&file).unwrap(), 2);
    // What the file says is what is tuned, the most called first, and what is tuned is no longer untuned.
    let lens: Vec<_> = read_manifest(&file).unwrap().iter().map(|e| (e.shape.q_len, e.calls)).collect();
    assert_eq!(lens, [(17, 5), (300, 2)]);
    let tuned = place.tune(&["--from", file.to_str().unwrap(), "--trials", "2", "--budget-s", "8"]);
    let shapes: Vec<_> = tuned["tuned"].as_array().unwrap().iter().map(|t| t["shape"].as_str().unwrap()).collect();
    assert_eq!(shapes, ["b1 h2/2 17x17 causal", "b1 h2/2 300x300 causal"]);
    let again: Engine = engine(&place, &device, Policy::Sealed);
    assert_eq!(again.seal(OnMiss::Refuse).unwrap().classes, 3);
    assert_eq!(again.plan(&small(0).0, &small(300).1).unwrap().status(), Status::Tuned);
    assert!(again.untuned().is_empty());
}

#[test]
fn a_process_leaves_what_it_met_and_a_model_says_what_it_will_ask() {
    let place = Place::new();
    let (input, _) = place.inputs("in.safetensors", DType::F32, [1, 2, 40, 32], [1, 2, 40, 32]);
    let (output, met) = (place.path("out.safetensors"), place.path("met.jsonl"));
    let run = ["run", input.to_str().unwrap(), "-o", output.to_str().unwrap(), "--mask", "causal", "--json"];
    for _ in 0..2 {
        json(place.flashtune(&run).env("FLASHTUNE_UNTUNED", &met));
    }
    let entries = read_manifest(&met).unwrap();
    assert_eq!(entries.iter().map(|e| (e.shape.q_len, e.calls)).collect::<Vec<_>>(), [(40, 2)]);
    // The same kind of file says beforehand what will be asked.
    let shapes = place.path("shapes.jsonl");
    let model = &format!("{ROOT}/tests/data/models/gemma-3-1b.json");
    let list = ["tune", "--model", model, "--dry-run", "--manifest", shapes.to_str().unwrap()];
    let listed = place.json(&list);
    let cases = listed["cases"].as_array().unwrap().len();
    assert!(cases > 2 && read_manifest(&shapes).unwrap().len() == cases, "{listed}");
}
