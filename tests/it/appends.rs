//! Appends through the engine, on the CPU: what a warm call costs the host, and what a sealed engine says.

use crate::common::Place;
use crate::common::counted::{ALLOCATIONS, counted, engine};
use flashtune::append::*;
use flashtune::{DType, Engine, Error, ManifestEntry, OnMiss, Policy, Stream};
use flashtune_runtime::{AppendCase, Error as RuntimeError, append_call};
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Three sequences with two new rows each, by a table, rotated from their lengths on.
struct Rows3 {
    new: Vec<f32>,
    store: Vec<f32>,
    table: Vec<i32>,
    lengths: Vec<i32>,
    angles: Vec<f32>,
}

impl Rows3 {
    fn new() -> Self {
        let (table, lengths) = (vec![4, 0, 2, 1, 3, 5], vec![3, 0, 6]);
        Self {
            new: vec![0.5; 3 * 2 * 2 * 16],
            store: vec![-1.0; 2 * 6 * 4 * 2 * 16],
            table,
            lengths,
            angles: vec![1.0; 8 * 8],
        }
    }

    fn append(&mut self) -> Append {
        let rows = Rows { address: self.new.as_ptr() as u64, strides: [64, 16, 32] };
        let side = |at: u64| StoreRows::new(at, StoreType::Float(DType::F32), [128, 32, 16]);
        let store = self.store.as_mut_ptr() as u64;
        let angles = self.angles.as_ptr() as u64;
        Append {
            dtype: DType::F32,
            head_dim: 16,
            k: rows,
            v: rows,
            rows: RowCount::Each(2),
            store: Store {
                k: side(store),
                v: side(store + 4 * 6 * 128),
                head_dim_v: 16,
                kv_heads: 2,
                pages: 6,
                page_tokens: 4,
            },
            target: Target::Lengths {
                batch: 3,
                index: Index::Table { k: Ints::i32(self.table.as_ptr() as u64), v: None, stride: 2, capacity: 2 },
                keys: KeyLengths::Each { lengths: Ints::i32(self.lengths.as_ptr() as u64), added: Added::Rows(2) },
                max_kv: 8,
            },
            queries: None,
            rotary: Some(Rotary {
                cos: angles,
                sin: angles,
                dtype: DType::F32,
                stride: 8,
                rows: 8,
                dim: 16,
                interleaved: false,
                positions: Positions::OfPlaces,
            }),
            finds_scales: false,
        }
    }
}

fn run(engine: &Engine, append: &Append) -> flashtune::Result<Option<flashtune::Dispatch>> {
    // SAFETY: the addresses are those of live memory of the sizes that the call says.
    unsafe { engine.append(append, Stream(0)) }
}

#[test]
fn a_warm_append_is_prepared_without_allocating() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let mut memory = Rows3::new();
    let append = memory.append();
    run(&engine, &append).unwrap();
    // Rows 3 and 4 of the first sequence: the last token of its first page, and the first of its second.
    let token = |page: usize, t: usize| memory.store[6 * 128 + page * 128 + t * 32..][..32].to_vec();
    assert_eq!((token(4, 3), token(0, 0)), (vec![0.5; 32], vec![0.5; 32]));
    assert_eq!((token(4, 2), token(0, 1)), (vec![-1.0; 32], vec![-1.0; 32]));

    // Calls of every kind that has arrays of lengths, first rows and positions.
    let begin = Ints::i32(memory.lengths.as_ptr() as u64);
    let packed = RowCount::Packed { begin, total: 6 };
    let Target::Lengths { batch, index, max_kv, .. } = append.target else { unreachable!() };
    let keys = KeyLengths::Cumulative { sums: begin };
    let from = append.rotary.map(|r| Rotary { positions: Positions::From { first: begin }, ..r });
    let packed = Append {
        rows: packed,
        target: Target::Lengths { batch, index, keys, max_kv },
        rotary: from,
        queries: Some(AppendQueries { from: append.k, to: append.k, heads: 2, rows: packed, advance: true }),
        ..append
    };
    let slots = Append { target: Target::Slots { mapping: begin }, rows: RowCount::Each(3), rotary: None, ..append };
    for call in [append, packed, slots] {
        engine.prepare_append(&call).unwrap().unwrap();
        let (compiles, before) = (device.compiles.load(Ordering::SeqCst), ALLOCATIONS.with(Cell::get));
        for _ in 0..1000 {
            std::hint::black_box(engine.prepare_append(&call).unwrap());
        }
        assert_eq!(ALLOCATIONS.with(Cell::get), before, "a warm append allocates: {call:?}");
        assert_eq!(device.compiles.load(Ordering::SeqCst), compiles);
    }
}

/// One kernel serves every number of rows: what was appended once, or preloaded in any size, is in the seal; nothing is
/// near to what was not.
#[test]
fn a_sealed_engine_appends_what_it_knows_and_refuses_the_rest() {
    let place = Place::new();
    let sealed = |append: &Append, preload: Option<ManifestEntry>, on_miss| {
        let device = counted();
        let engine = engine(&place, &device, Policy::Default);
        match preload {
            Some(entry) => assert!(engine.preload(&[entry]).is_empty()),
            None => drop(engine.prepare_append(append).unwrap().unwrap()),
        }
        engine.seal(on_miss).unwrap();
        (engine, device)
    };
    let mut memory = Rows3::new();
    let append = memory.append();
    let call = append_call(&append).unwrap();
    let entry = ManifestEntry::new(call.problem, &call.shape);
    for preload in [None, Some(entry)] {
        for on_miss in [OnMiss::Refuse, OnMiss::Nearest] {
            let (engine, device) = sealed(&append, preload, on_miss);
            let (compilers, loads) = (device.compilers.load(Ordering::SeqCst), device.loads.load(Ordering::SeqCst));
            memory.store.fill(-1.0);
            run(&engine, &append).unwrap().expect("there are rows");
            assert!(memory.store.contains(&0.5), "{preload:?}");
            // Another number of rows is the same kernel.
            let fewer = Append {
                rows: RowCount::Each(1),
                target: Target::Slots { mapping: Ints::i32(memory.table.as_ptr() as u64) },
                rotary: None,
                ..append
            };
            run(&engine, &fewer).unwrap().expect("there are rows");
            // Rows of another size are another one, which nothing here is near to.
            let other = Append { head_dim: 24, ..append };
            let e = run(&engine, &Append { rotary: None, ..other }).unwrap_err();
            assert!(matches!(e, Error::Runtime(RuntimeError::Sealed { .. })), "{e}");
            assert_eq!(device.compilers.load(Ordering::SeqCst), compilers);
            assert_eq!(device.loads.load(Ordering::SeqCst), loads);
            assert_eq!(engine.counters().refused, 1);
        }
    }
    // There is nothing to tune of an append.
    let device = counted();
    let engine = engine(&place, &device, Policy::Default);
    run(&engine, &append).unwrap();
    assert!(engine.untuned().is_empty(), "{:?}", engine.untuned());
    // A random call's problem goes through the list of a file, as those of forward passes do.
    let path = place.path("appends.jsonl");
    let problem = AppendCase::random(5, 4096).problem().unwrap();
    flashtune::write_manifest(&path, &[ManifestEntry { problem, ..entry }]).unwrap();
    assert_eq!(flashtune::read_manifest(&path).unwrap()[0].problem, problem);
}
