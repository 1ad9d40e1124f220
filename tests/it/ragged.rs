//! Ragged batches through the engine, on the CPU: every layout and index of a serving host against the fp64 reference,
//! sequence by sequence.

use crate::common::Place;
use crate::common::counted::{ALLOCATIONS, counted, engine};
use flashtune::ragged::*;
use flashtune::{
    DType, Distribution, Engine, HostTensor, Layout, Mask, Policy, Program, ProgramRef, Scalar, Shape, SideData,
    SideInputs, SideView, Stream,
};
use flashtune_codegen::score::{BUILTINS, Elements, Storage, Texts};
use flashtune_runtime::ragged_call;
use flashtune_runtime::reference::{Attention, all_rows, compare, oracle_of, unfused_rows_of};
use std::cell::Cell;
use std::sync::atomic::Ordering;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 32;
/// Tokens of a page: the tails of most sequences fill a part of one.
const PAGE: usize = 8;
/// Rows and keys of each sequence: without keys, without rows, of fewer keys than rows, and of several pages.
const LENGTHS: [(usize, usize); 6] = [(1, 37), (5, 0), (0, 9), (7, 3), (3, 64), (12, 100)];
const MAX_Q: usize = 12;
const MAX_KV: usize = 104;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// Q and K packed.
    Packed,
    /// A cache without a table, its sequences in another order, longer Q rows than are used.
    Slots,
    /// `[pages, page, kv_heads, dim]`, 64-bit tables, K and V by tables of their own, lengths before the append.
    Nhd,
    /// `[pages, kv_heads, page, dim]` by CSR.
    Hnd,
    /// K in pieces of 16 bytes, V by columns, cumulative lengths.
    Pieces,
}

/// Memory of one batch. What no sequence has is NaN, in all bytes 0xff.
struct Memory {
    dtype: DType,
    kind: Kind,
    sequences: Vec<[HostTensor; 3]>,
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    o: Vec<u8>,
    lse: Vec<f32>,
    ints: Vec<Vec<i32>>,
    wide: Vec<Vec<i64>>,
}

/// First rows of lengths, and their end.
fn sums(lengths: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut sum = 0;
    std::iter::once(0)
        .chain(lengths.map(|n| {
            sum += n as i32;
            sum
        }))
        .collect()
}

impl Memory {
    fn new(kind: Kind, dtype: DType) -> Self {
        let of = |heads, rows, seed| {
            let shape = [1, heads, rows, DIM];
            HostTensor::random(dtype, shape, Layout::Bhsd, seed, Distribution::Normal)
        };
        let sequence = |(b, (q, kv)): (usize, (usize, usize))| {
            let seed = 3 * b as u64;
            [of(HEADS, q, seed), of(KV_HEADS, kv, seed + 1), of(KV_HEADS, kv, seed + 2)]
        };
        let sequences: Vec<_> = LENGTHS.into_iter().enumerate().map(sequence).collect();
        let total_q = LENGTHS.iter().map(|l| l.0).sum::<usize>().max(LENGTHS.len() * MAX_Q);
        let nothing = |elements: usize| vec![0xff; elements * dtype.bytes()];
        let room = 2 * LENGTHS.len() * MAX_KV * KV_HEADS * DIM;
        let (q, k, v, o) = (total_q * HEADS * DIM, room, room, total_q * HEADS * DIM);
        let lse = vec![f32::NAN; HEADS * total_q];
        let (q, k, v, o) = (nothing(q), nothing(k), nothing(v), nothing(o));
        Self { dtype, kind, sequences, q, k, v, o, lse, ints: Vec::new(), wide: Vec::new() }
    }

    fn ints(&mut self, values: Vec<i32>) -> Ints {
        self.ints.push(values);
        Ints::i32(self.ints.last().unwrap().as_ptr() as u64)
    }

    fn wide(&mut self, values: Vec<i64>) -> Ints {
        self.wide.push(values);
        Ints::i64(self.wide.last().unwrap().as_ptr() as u64)
    }

    /// Where row `i` of sequence `b` begins in Q: rows are `[heads, dim]`.
    fn q_row(&self, b: usize, i: usize) -> usize {
        let uniform = self.kind == Kind::Slots;
        let first = if uniform { b * MAX_Q } else { LENGTHS[..b].iter().map(|l| l.0).sum() };
        first + i
    }

    /// The batch, with K and V put where its kind has them.
    fn batch(&mut self) -> RaggedBatch {
        let size = self.dtype.bytes();
        for (b, (q_len, _)) in LENGTHS.into_iter().enumerate() {
            for i in 0..q_len {
                for h in 0..HEADS {
                    let (from, to) = ((h * q_len + i) * DIM * size, (self.q_row(b, i) * HEADS + h) * DIM * size);
                    let row = self.sequences[b][0].bytes()[from..from + DIM * size].to_vec();
                    self.q[to..to + DIM * size].copy_from_slice(&row);
                }
            }
        }
        let (pages_of, piece) = (|kv: usize| kv.div_ceil(PAGE), 16 / size);
        let all = LENGTHS.len();
        // Pages in an order that nobody guesses, those of V in another.
        let capacity = MAX_KV / PAGE;
        let page = |b: usize, n: usize, odd: usize| (b * capacity + n) * odd % (all * capacity);
        let [heads, dim, tokens] = [KV_HEADS, DIM, PAGE].map(|n| n as i64);
        let (pages, page_tokens) = match self.kind {
            Kind::Packed => (1, LENGTHS.iter().map(|l| l.1).sum()),
            Kind::Slots => (all, MAX_KV),
            _ => (all * capacity, PAGE),
        };
        let (k_strides, v_strides, k_inner, v_inner) = match self.kind {
            Kind::Packed => ([0, heads * dim, dim], [0, heads * dim, dim], None, None),
            Kind::Slots => {
                let all = [MAX_KV as i64 * heads * dim, heads * dim, dim];
                (all, all, None, None)
            }
            // Two stores in one pool: strides that are no products of sizes.
            Kind::Nhd => {
                ([2 * tokens * heads * dim, heads * dim, dim], [tokens * heads * dim, heads * dim, dim], None, None)
            }
            Kind::Hnd => {
                ([tokens * heads * dim, dim, tokens * dim], [tokens * heads * dim, dim, tokens * dim], None, None)
            }
            Kind::Pieces => {
                let pieces = [tokens * heads * dim, piece as i64, tokens * dim];
                (pieces, [tokens * heads * dim, 1, tokens * dim], Some(tokens * piece as i64), Some(tokens))
            }
        };
        for b in 0..all {
            for t in 0..LENGTHS[b].1 {
                let before: usize = LENGTHS[..b].iter().map(|l| l.1).sum();
                let place = |odd| match self.kind {
                    Kind::Packed => (0, before + t),
                    Kind::Slots => (all - 1 - b, t),
                    _ => (page(b, t / PAGE, odd), t % PAGE),
                };
                let odd = if self.kind == Kind::Nhd { [5, 7] } else { [5, 5] };
                for (which, (strides, inner, piece)) in
                    [(k_strides, k_inner, piece), (v_strides, v_inner, 1)].into_iter().enumerate()
                {
                    let (page, token) = place(odd[which]);
                    for h in 0..KV_HEADS {
                        for d in 0..DIM {
                            let [sp, st, sh] = strides.map(|n| n as usize);
                            let column = inner.map_or(d, |inner| d / piece * inner as usize + d % piece);
                            let to = (page * sp + token * st + h * sh + column) * size;
                            let from = ((h * LENGTHS[b].1 + t) * DIM + d) * size;
                            let element = self.sequences[b][1 + which].bytes()[from..from + size].to_vec();
                            let store = if which == 0 { &mut self.k } else { &mut self.v };
                            store[to..to + size].copy_from_slice(&element);
                        }
                    }
                }
            }
        }
        let keys: Vec<i32> = LENGTHS.iter().map(|l| l.1 as i32).collect();
        // What lies behind a sequence's length names no page.
        let row = |b: usize, odd: usize| {
            (0..capacity).map(move |n| if n < pages_of(LENGTHS[b].1) { page(b, n, odd) as i32 } else { i32::MIN })
        };
        let table = |odd| (0..all).flat_map(|b| row(b, odd)).collect::<Vec<i32>>();
        let (stride, capacity) = (capacity as i64, capacity as u64);
        let (index, keys, rows, used) = match self.kind {
            Kind::Packed => {
                let begin = self.ints(sums(LENGTHS.iter().map(|l| l.1)));
                (Index::Packed { begin }, KeyLengths::OfIndex, None, None)
            }
            Kind::Slots => {
                let slots = Some(self.wide((0..all as i64).rev().collect()));
                let used = self.ints(LENGTHS.iter().map(|l| l.0 as i32).collect());
                let lengths = self.ints(keys);
                let keys = KeyLengths::Each { lengths, added: Added::Nothing };
                (Index::Dense { slots }, keys, Some(QueryRows::Uniform), Some(used))
            }
            Kind::Nhd => {
                let [k, v] = [5, 7].map(|odd| table(odd).into_iter().map(i64::from).collect());
                let (k, v) = (self.wide(k), self.wide(v).address);
                // Three sequences gained rows in this step, and no sequence is left without its own.
                let gained: Vec<usize> = LENGTHS.iter().map(|l| l.1.min(2)).collect();
                let before = keys.iter().zip(&gained).map(|(n, g)| n - *g as i32).collect();
                let begin = self.ints(sums(gained.into_iter()));
                let keys = KeyLengths::Each { lengths: self.ints(before), added: Added::Packed { begin } };
                (Index::Table { k, v: Some(v), stride, capacity }, keys, None, None)
            }
            Kind::Hnd => {
                let ids = (0..all).flat_map(|b| row(b, 5).take(pages_of(LENGTHS[b].1))).collect();
                let begin = self.ints(sums(LENGTHS.iter().map(|l| pages_of(l.1))));
                let last = LENGTHS.iter().map(|l| if l.1 == 0 { 0 } else { ((l.1 - 1) % PAGE + 1) as i32 });
                let tokens = self.ints(last.collect());
                (Index::Csr { begin, k: self.ints(ids), v: None }, KeyLengths::LastPage { tokens }, None, None)
            }
            Kind::Pieces => {
                let sums = self.ints(sums(LENGTHS.iter().map(|l| l.1)));
                let k = self.ints(table(5));
                (Index::Table { k, v: None, stride, capacity }, KeyLengths::Cumulative { sums }, None, None)
            }
        };
        let begin = self.ints(sums(LENGTHS.iter().map(|l| l.0)));
        let rows = rows.unwrap_or(QueryRows::Packed { begin });
        let total_q = LENGTHS.iter().map(|l| l.0 as u64).sum();
        let strides = [(MAX_Q * HEADS * DIM) as i64, DIM as i64, (HEADS * DIM) as i64];
        let element = StoreType::Float(self.dtype);
        let store = |bytes: &[u8], strides, inner| {
            let rows = StoreRows::new(bytes.as_ptr() as u64, element, strides);
            StoreRows { inner, ..rows }
        };
        RaggedBatch {
            queries: Queries {
                address: self.q.as_ptr() as u64,
                dtype: self.dtype,
                heads: HEADS as u64,
                head_dim: DIM as u64,
                strides,
                rows,
                used,
                tree: None,
            },
            store: Store {
                k: store(&self.k, k_strides, k_inner),
                v: store(&self.v, v_strides, v_inner),
                head_dim_v: DIM as u64,
                kv_heads: KV_HEADS as u64,
                pages: pages as u64,
                page_tokens: page_tokens as u64,
            },
            index,
            keys,
            left_pad: None,
            output: Output {
                address: self.o.as_mut_ptr() as u64,
                dtype: self.dtype,
                strides,
                // Rows before heads, as some hosts have it.
                lse: Some(Lse {
                    address: self.lse.as_mut_ptr() as u64,
                    strides: [(MAX_Q * HEADS) as i64, 1, HEADS as i64],
                    base: if self.kind == Kind::Hnd { LogBase::Two } else { LogBase::E },
                    empty: if self.kind == Kind::Hnd { f32::INFINITY } else { f32::NEG_INFINITY },
                }),
            },
            bounds: Bounds { batch: all as u64, total_q, max_q: MAX_Q as u64, max_kv: MAX_KV as u64 },
            expected: Expected::default(),
        }
    }

    /// O and LSE of every sequence against fp64, and that rows behind those used were not written.
    fn check(&self, mask: Mask, program: Option<(&Program, &SideData)>) {
        let size = self.dtype.bytes();
        for (b, (q_len, kv_len)) in LENGTHS.into_iter().enumerate() {
            let mut o = HostTensor::zeros(self.dtype, [1, HEADS, q_len, DIM], Layout::Bhsd);
            let mut lse = Vec::new();
            for h in 0..HEADS {
                for i in 0..q_len {
                    let from = (self.q_row(b, i) * HEADS + h) * DIM * size;
                    let to = (h * q_len + i) * DIM * size;
                    o.bytes_mut()[to..to + DIM * size].copy_from_slice(&self.o[from..from + DIM * size]);
                    let found = self.lse[self.q_row(b, i) * HEADS + h];
                    lse.push(match self.kind {
                        Kind::Hnd if found == f32::INFINITY => f32::NEG_INFINITY,
                        Kind::Hnd => found * std::f32::consts::LN_2,
                        _ => found,
                    });
                }
            }
            let (q_rows, kv_rows) = (q_len as u32, kv_len as u32);
            let (heads, kv_heads) = (HEADS as u32, KV_HEADS as u32);
            let shape = Shape { batch: 1, heads, kv_heads, q_len: q_rows, kv_len: kv_rows, mask };
            let [q, k, v] = &self.sequences[b];
            let attention = Attention { mask, scale: 0.25, program, sequence: b as u32, dropout: None };
            let rows = all_rows(&shape);
            let (oracle, unfused) =
                (oracle_of(q, k, v, &attention, &rows), unfused_rows_of(q, k, v, &attention, &rows));
            let verdict = compare(&o, Some(&lse), &oracle, &unfused);
            assert!(
                verdict.passed(),
                "{:?} {} {mask}, sequence {b} of {q_len}x{kv_len}: {verdict}",
                self.kind,
                self.dtype
            );
            if self.kind == Kind::Slots {
                let behind = self.q_row(b, q_len) * HEADS * DIM * size..self.q_row(b, MAX_Q) * HEADS * DIM * size;
                assert!(self.o[behind].iter().all(|byte| *byte == 0xff), "rows behind those of sequence {b}");
            }
        }
    }
}

fn run(engine: &Engine, call: &Ragged<'_>) -> flashtune::Dispatch {
    // SAFETY: the addresses are those of the live memory of a batch.
    unsafe { engine.forward_ragged(call, Stream(0)) }.unwrap().expect("there are rows")
}

fn call(batch: RaggedBatch, mask: Mask) -> Ragged<'static> {
    Ragged { mask, scale: Some(0.25), ..Ragged::new(batch) }
}

#[test]
fn every_layout_gives_each_sequence_its_own_attention() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let window = Mask::Window { left: Some(20), right: Some(2) };
    for kind in [Kind::Packed, Kind::Slots, Kind::Nhd, Kind::Hnd, Kind::Pieces] {
        for (dtype, mask) in [(DType::Bf16, Mask::Causal), (DType::F32, Mask::Full), (DType::F32, window)] {
            let mut memory = Memory::new(kind, dtype);
            let batch = memory.batch();
            run(&engine, &call(batch, mask));
            memory.check(mask, None);
        }
    }
}

#[test]
fn programs_count_the_rows_and_keys_of_a_sequence() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let sinks: Vec<f32> = (0..HEADS).map(|h| h as f32 - 1.5).collect();
    let sinks_view = SideView::contiguous(sinks.as_ptr() as u64, Storage::F32, &[HEADS as u64]);
    let given = [sinks_view.declaration("sinks")];
    let texts = Texts {
        mask: Some("kv <= q + kv_len - q_len and kv % 3 != 1"),
        score: Some("20.0 * tanh(score / 20.0)"),
        sink: Some("sinks[h]"),
    };
    let program = texts.program(&given).unwrap();
    let data = SideData::default().tensor("sinks", &[HEADS], Elements::Float(sinks.clone()));
    let side = SideInputs { scalars: &[], tensors: &[("sinks", sinks_view)] };
    for kind in [Kind::Packed, Kind::Hnd] {
        let mut memory = Memory::new(kind, DType::F32);
        let call = call(memory.batch(), Mask::Full).with_program(ProgramRef::new(program.clone()), side);
        run(&engine, &call);
        memory.check(Mask::Full, Some((&program, &data)));
    }

    // What is indexed along rows and keys reaches to the bounds.
    let mut memory = Memory::new(Kind::Nhd, DType::F32);
    let bias = vec![0.5f32; MAX_Q * MAX_KV];
    let bias_of = |q_len| SideView::contiguous(bias.as_ptr() as u64, Storage::F32, &[q_len, MAX_KV as u64]);
    let program = Program::parse("bias: f32[q_len, kv_len]; score = score + bias[q, kv];").unwrap();
    let batch = memory.batch();
    let with = |views: &[(&str, SideView)]| {
        let side = SideInputs { scalars: &[], tensors: views };
        engine.prepare_ragged(&call(batch, Mask::Full).with_program(ProgramRef::new(program.clone()), side)).map(drop)
    };
    with(&[("bias", bias_of(MAX_Q as u64))]).unwrap();
    let e = with(&[("bias", bias_of(5))]).unwrap_err().to_string();
    assert!(e.contains("axis 0 of the tensor `bias`") && e.contains("q_len, which is 12"), "{e}");
    let e = with(&[]).unwrap_err().to_string();
    assert!(e.contains("tensor `bias` is missing"), "{e}");
    // Scalars out of their usual range are served without it, as in dense calls.
    let capped = BUILTINS.iter().find(|b| b.name == "soft_cap").unwrap();
    let capped = ProgramRef::new(Program::parse(capped.text).unwrap());
    let side = SideInputs { scalars: &[("cap", Scalar::Float(-4.0))], tensors: &[] };
    assert!(engine.prepare_ragged(&call(batch, Mask::Full).with_program(capped, side)).unwrap().is_some());
}

#[test]
fn a_warm_call_is_prepared_without_allocating_in_five_microseconds() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let mut memory = Memory::new(Kind::Nhd, DType::Bf16);
    let batch = memory.batch();
    let call = call(batch, Mask::Causal);
    let first = engine.prepare_ragged(&call).unwrap().unwrap();
    let compiles = device.compiles.load(Ordering::SeqCst);
    const CALLS: u32 = 1000;
    let mut best = f64::MAX;
    let before = ALLOCATIONS.with(Cell::get);
    for _ in 0..20 {
        let start = std::time::Instant::now();
        for _ in 0..CALLS {
            std::hint::black_box(engine.prepare_ragged(&call).unwrap());
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS));
    }
    assert_eq!(ALLOCATIONS.with(Cell::get), before, "a warm call allocates");
    // 5 us are promised of an optimised build; one for tests takes about as long on a machine of its own.
    let limit = if cfg!(debug_assertions) { 25.0 } else { 5.0 };
    assert!(best < limit, "{best} us");
    let again = run(&engine, &call);
    assert!(std::sync::Arc::ptr_eq(&first.plan, &again.plan));
    assert_eq!(device.compiles.load(Ordering::SeqCst), compiles, "a prepared call compiles");
}

#[test]
fn a_hint_chooses_the_class_and_the_explanation_says_the_bounds() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let mut memory = Memory::new(Kind::Pieces, DType::F32);
    let batch = memory.batch();
    let plain = run(&engine, &call(batch, Mask::Causal));
    let expected = Expected { total_keys: 60, longest: 30 };
    let hinted = run(&engine, &call(RaggedBatch { expected, ..batch }, Mask::Causal));
    // Keys of a core: of all sequences and KV heads by the bounds, and of a mean of ten by the hint.
    let keys = |mean: usize| {
        let all = (LENGTHS.len() * KV_HEADS * mean) as u32;
        all.div_ceil(engine.device().fingerprint().units).next_power_of_two()
    };
    assert_eq!((plain.plan.bucket().kv_len, hinted.plan.bucket().kv_len), (keys(MAX_KV), keys(10)));
    memory.check(Mask::Causal, None);
    let said = hinted.explain();
    assert_eq!((said.shape.as_str(), said.family.as_str()), ("b6 h4/2 12x104 causal", "forward/cpu_ragged"));
    assert!(said.problem.ends_with("-raggedvt") && said.notes.iter().any(|n| n.contains("bounds")), "{said}");
}

/// Kernels are kept by what they are specialised to, and by nothing else: whatever one attribute changes is another
/// problem, or another argument.
#[test]
fn one_attribute_changed_is_another_problem_or_argument() {
    let mut memory = Memory::new(Kind::Nhd, DType::F16);
    let base = memory.batch();
    let of = |batch: &RaggedBatch, mask| ragged_call(batch, mask, Some(0.25)).unwrap();
    let first = of(&base, Mask::Causal);
    let scales = memory.lse.as_ptr() as u64;
    let element = |element, scales| {
        let quantised = |rows: StoreRows| StoreRows { element, scales, ..rows };
        let Store { k, v, .. } = base.store;
        RaggedBatch { store: Store { k: quantised(k), v: quantised(v), ..base.store }, ..base }
    };
    let (per_head, per_token) = (
        Scales::PerHead { address: scales, strides: [0, 1] },
        Scales::PerToken { address: scales, strides: [0, 1, 0] },
    );
    let columns = StoreRows { inner: Some(PAGE as i64), strides: [2048, 1, 256], ..base.store.v };
    let kernels = [
        of(&base, Mask::Full),
        of(&base, Mask::Window { left: Some(9), right: Some(0) }),
        of(&RaggedBatch { queries: Queries { head_dim: 24, ..base.queries }, ..base }, Mask::Causal),
        of(&RaggedBatch { store: Store { head_dim_v: 24, ..base.store }, ..base }, Mask::Causal),
        of(&RaggedBatch { store: Store { v: columns, ..base.store }, ..base }, Mask::Causal),
        of(&element(StoreType::E4m3, per_head), Mask::Causal),
        of(&element(StoreType::E5m2, per_head), Mask::Causal),
        of(&element(StoreType::Int8, per_head), Mask::Causal),
        of(&element(StoreType::Int8, per_token), Mask::Causal),
    ];
    for (i, call) in kernels.iter().enumerate() {
        assert_ne!(call.problem, first.problem, "number {i}");
        assert!(kernels[..i].iter().all(|other| other.problem != call.problem), "number {i} is as one before");
    }
    let lse = base.output.lse.unwrap();
    let output = |lse| RaggedBatch { output: Output { lse: Some(lse), ..base.output }, ..base };
    let arguments = [
        ragged_call(&base, Mask::Causal, Some(0.5)).unwrap(),
        of(&RaggedBatch { store: Store { page_tokens: 2 * PAGE as u64, ..base.store }, ..base }, Mask::Causal),
        of(&RaggedBatch { store: Store { pages: base.store.pages - 1, ..base.store }, ..base }, Mask::Causal),
        of(&RaggedBatch { bounds: Bounds { max_kv: 50, ..base.bounds }, ..base }, Mask::Causal),
        of(&RaggedBatch { bounds: Bounds { max_q: 5, ..base.bounds }, ..base }, Mask::Causal),
        of(&output(Lse { base: LogBase::Two, ..lse }), Mask::Causal),
        of(&output(Lse { empty: f32::INFINITY, ..lse }), Mask::Causal),
        of(&RaggedBatch { queries: Queries { strides: [0, 64, 256], ..base.queries }, ..base }, Mask::Causal),
    ];
    for (i, call) in arguments.iter().enumerate() {
        assert_eq!(call.problem, first.problem, "number {i}");
        assert_ne!(call.args, first.args, "number {i}");
        assert!(arguments[..i].iter().all(|other| other.args != call.args), "number {i} is as one before");
    }
}

#[test]
fn nothing_is_launched_for_batches_without_rows() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let mut memory = Memory::new(Kind::Packed, DType::F32);
    let batch = memory.batch();
    for bounds in [Bounds { batch: 0, ..batch.bounds }, Bounds { total_q: 0, ..batch.bounds }] {
        let call = call(RaggedBatch { bounds, ..batch }, Mask::Full);
        // SAFETY: nothing is read.
        assert!(unsafe { engine.forward_ragged(&call, Stream(0)) }.unwrap().is_none());
        assert!(engine.prepare_ragged(&call).unwrap().is_none());
    }
    assert_eq!(device.compiles.load(Ordering::SeqCst), 0);
    let tree = RaggedBatch { queries: Queries { tree: Some(0x1000), ..batch.queries }, ..batch };
    let e = engine.prepare_ragged(&call(tree, Mask::Full)).unwrap_err().to_string();
    assert!(e.contains("tree") && e.contains("score program"), "{e}");
}
