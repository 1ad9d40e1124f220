//! Ragged batches are tuned on the CPU, and what was found serves calls of its class: in another process's engine, from
//! a bundle, and after the tuner was killed on its way.

use crate::common::compiler::LoggedCompiler;
use crate::common::{Place, alone};
use flashtune::ragged::*;
use flashtune::{DType, DeviceSpec, Engine, Mask, Policy, Ragged, Status, Stream};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BATCH: usize = 4;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 32;
const MAX_KV: usize = 96;

/// What the options below tune: four sequences with 40 keys on average.
const OPTIONS: [&str; 16] = [
    "--dtype",
    "f32",
    "--head-dim",
    "32",
    "--mask",
    "causal",
    "--batch",
    "4",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--q-len",
    "1",
    "--kv-len",
    "40",
];

fn with(command: &'static str, pages: &'static str, more: &[&'static str]) -> Vec<&'static str> {
    [&[command, "--pages", pages][..], &OPTIONS, more].concat()
}

/// A decoding step whose values are the same in all keys of a head, so that the output is known: O is V's row.
struct Step {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    table: Vec<i32>,
    lengths: Vec<i32>,
    page: usize,
}

impl Step {
    fn new(lengths: [i32; BATCH], page: usize) -> Self {
        let (of_row, of_pages) = (MAX_KV / page, BATCH * MAX_KV);
        let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 25.0;
        let v = (0..of_pages * KV_HEADS * DIM).map(|i| (i % (KV_HEADS * DIM)) as f32 / 8.0).collect();
        Self {
            q: (0..BATCH * HEADS * DIM).map(value).collect(),
            k: (0..of_pages * KV_HEADS * DIM).map(value).collect(),
            v,
            o: vec![f32::NAN; BATCH * HEADS * DIM],
            // Last pages first.
            table: (0..BATCH * of_row).rev().map(|page| page as i32).collect(),
            lengths: lengths.to_vec(),
            page,
        }
    }

    fn call(&mut self, expected: Expected) -> Ragged<'static> {
        let address = |of: &[f32]| of.as_ptr() as u64;
        let (heads, kv_heads, dim, page) = (HEADS as i64, KV_HEADS as i64, DIM as i64, self.page as i64);
        let rows = [heads * dim, dim, heads * dim];
        let element = StoreType::Float(DType::F32);
        let of_page = [page * kv_heads * dim, kv_heads * dim, dim];
        let batch = RaggedBatch {
            queries: Queries {
                address: address(&self.q),
                dtype: DType::F32,
                heads: HEADS as u64,
                head_dim: DIM as u64,
                strides: rows,
                rows: QueryRows::Uniform,
                used: None,
                tree: None,
            },
            store: Store {
                k: StoreRows::new(address(&self.k), element, of_page),
                v: StoreRows::new(address(&self.v), element, of_page),
                head_dim_v: DIM as u64,
                kv_heads: KV_HEADS as u64,
                pages: (BATCH * MAX_KV / self.page) as u64,
                page_tokens: self.page as u64,
            },
            index: Index::Table {
                k: Ints::i32(self.table.as_ptr() as u64),
                v: None,
                stride: (MAX_KV / self.page) as i64,
                capacity: (MAX_KV / self.page) as u64,
            },
            keys: KeyLengths::Each { lengths: Ints::i32(self.lengths.as_ptr() as u64), added: Added::Nothing },
            left_pad: None,
            output: Output { address: self.o.as_mut_ptr() as u64, dtype: DType::F32, strides: rows, lse: None },
            bounds: Bounds { batch: BATCH as u64, total_q: 0, max_q: 1, max_kv: MAX_KV as u64 },
            expected,
        };
        Ragged { mask: Mask::Causal, ..Ragged::new(batch) }
    }

    /// Runs it, and gives what it ran on.
    fn run(&mut self, engine: &Engine, expected: Expected) -> flashtune::Dispatch {
        self.o.fill(f32::NAN);
        let call = self.call(expected);
        // SAFETY: the addresses are those of the step, which outlives the call: on the CPU it is done when it returns.
        let dispatch = unsafe { engine.forward_ragged(&call, Stream(0)) }.unwrap().expect("there are rows");
        for (i, o) in self.o.iter().enumerate() {
            let kv_head = i / DIM % HEADS / (HEADS / KV_HEADS);
            let v = (kv_head * DIM + i % DIM) as f32 / 8.0;
            assert!((o - v).abs() < 1e-4 * v.abs().max(1.0), "element {i}: {o}, not {v}");
        }
        dispatch
    }
}

fn engine(place: &Place) -> Engine {
    Engine::builder()
        .device(DeviceSpec::Cpu)
        .cache_dir(place.cache())
        .policy(Policy::Default)
        .quick_first(false)
        .build()
        .unwrap()
}

fn expecting(total_keys: u64, longest: u64) -> Expected {
    Expected { total_keys, longest }
}

#[test]
fn a_tuned_class_serves_calls_of_any_skew_and_from_a_bundle() {
    let _alone = alone();
    let place = Place::new();
    let tuned = place.json(&with("tune", "8", &["--trials", "3", "--budget-s", "20"]));
    let winner = tuned["tuned"][0]["schedule"].as_str().expect("a winner").to_owned();
    assert_eq!(tuned["tuned"][0]["problem"], "forward-f32-d32-causal-ragged", "{tuned}");
    assert_eq!(tuned["tuned"][0]["shape"], "b4 h4/2 1x40 causal pages of 8", "{tuned}");
    assert_eq!(tuned["tuned"][0]["record"]["key"]["bucket"]["pages"], serde_json::json!({ "Tokens": 8 }), "{tuned}");

    let engine = engine(&place);
    let even = Step::new([40; BATCH], 8).run(&engine, expecting(160, 40)).plan;
    assert_eq!((even.status(), even.kernel().schedule.to_string()), (Status::Tuned, winner.clone()));
    // Only the sum counts, and no more than its power of two.
    let skewed = Step::new([96, 33, 30, 1], 8).run(&engine, expecting(160, 96)).plan;
    assert!(Arc::ptr_eq(&even, &skewed));
    // Bounds of more than twice as many keys are another class, and so are other pages: the record is their nearest.
    let unhinted = Step::new([40; BATCH], 8).run(&engine, Expected::default()).plan;
    let paged = Step::new([40; BATCH], 16).run(&engine, expecting(160, 40)).plan;
    for (plan, most) in [(unhinted, 2.0), (paged, 0.2)] {
        let bucket = plan.record().expect("a record").key.bucket;
        assert!((0.05..most).contains(&bucket.distance(plan.bucket())), "{bucket} for {}", plan.bucket());
        assert_eq!((plan.status(), plan.kernel().schedule.to_string()), (Status::NearestShape, winner.clone()));
    }

    // What was met untuned is told with its pages, for a later tuning.
    let met = place.path("met.jsonl");
    assert_eq!(engine.write_untuned(&met).unwrap(), 2);
    let listed = place.json(&["tune", "--dry-run", "--from", met.to_str().unwrap()]);
    let shapes: BTreeSet<&str> =
        listed["cases"].as_array().unwrap().iter().map(|c| c["shape"].as_str().unwrap()).collect();
    assert_eq!(shapes, BTreeSet::from(["b4 h4/2 1x40 causal pages of 16", "b4 h4/2 1x96 causal pages of 8"]));

    // The record is found by the command, told with how the kernel takes the batch, listed, and carried.
    let told = place.json(&with("explain", "8", &[]));
    assert_eq!(
        (&told[0]["status"]["kind"], &told[0]["schedule"]),
        (&"tuned".into(), &winner.as_str().into()),
        "{told}"
    );
    for (field, word) in [("split", "tiles"), ("merge", "range"), ("pages", "pages of 8 tokens")] {
        assert!(told[0][field].as_str().is_some_and(|text| text.contains(word)), "{field}: {told}");
    }
    assert_eq!(place.json(&["list"])[0]["shape"], "b4 h4/2 1x40 causal pages of 8");
    let [bundle, merged] = ["ragged.ftb", "merged.ftb"].map(|name| place.path(name).to_str().unwrap().to_owned());
    place.json(&["export", &bundle]);
    place.json(&["merge", &bundle, &bundle, "--out", &merged]);
    let fresh = Place::new();
    fresh.json(&["import", &merged]);
    let engine = self::engine(&fresh);
    let carried = Step::new([40; BATCH], 8).run(&engine, expecting(160, 40)).plan;
    assert_eq!((carried.status(), carried.kernel().schedule.to_string()), (Status::Tuned, winner));
    assert_eq!(engine.counters().compiled, 0);
}

#[test]
fn a_ragged_tuner_that_was_killed_repeats_no_compilation() {
    let _alone = alone();
    let place = Place::new();
    let compiler = LoggedCompiler::new(&place, 0.2);
    let tune = with("tune", "packed", &["--trials", "6", "--budget-s", "60", "--exhaustive"]);
    let mut first = compiler.start(&place, &tune);
    let start = Instant::now();
    while compiler.compiled().len() < 4 {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", compiler.compiled());
        assert!(first.try_wait().unwrap().is_none(), "it was done before it could be killed");
        std::thread::sleep(Duration::from_millis(5));
    }
    first.kill().unwrap();
    first.wait().unwrap();
    let report = (0..4).find_map(|_| {
        let output = compiler.command(&place, &tune).output().unwrap();
        let noisy = String::from_utf8_lossy(&output.stderr).contains("nothing was stored");
        assert!(noisy || output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.status.success().then(|| serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap())
    });
    let report = report.expect("the machine is too busy to tune");
    assert_eq!(
        (&report["tuned"][0]["cached"], &report["failures"]),
        (&false.into(), &serde_json::json!([])),
        "{report}"
    );
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    compiler.compiled().into_iter().for_each(|schedule| *times.entry(schedule).or_default() += 1);
    // Twice was what was being compiled, on each core, when it was killed.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let again = times.values().filter(|n| **n > 1).count();
    assert!(times.len() >= 5 && again <= cores && times.values().all(|n| *n <= 2), "{times:?}");
}
