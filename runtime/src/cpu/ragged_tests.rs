//! `forward/cpu_ragged` against the oracle, sequence by sequence: every store, masks, quantised elements, threads.

use super::*;
use crate::compile::memory::compile_quickly_once;
use crate::reference::{Attention, all_rows, compare, oracle_of, unfused_rows_of};
use crate::{Distribution, HostTensor, Layout, SideBuffers, typical_side};
use bytemuck::Zeroable;
use flashtune_codegen::abi::RaggedArgs;
use flashtune_codegen::score::{Program, SideData};
use flashtune_codegen::{
    CpuIsa, CpuRaggedSchedule, DType, Kernel, KvElement, KvKind, KvScales, KvStore, Mask, Problem, Schedule, Shape,
    ShapeBucket,
};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Where the keys of the sequences lie.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Packed,
    Slots,
    Table,
    Csr,
}

#[derive(Debug, Clone)]
struct Batch {
    dtype: DType,
    dims: [usize; 2],
    heads: [usize; 2],
    lengths: Vec<[usize; 2]>,
    place: Place,
    page: usize,
    store: KvStore,
    /// K as `[page, head, dim / x, token, x]`.
    chunked: bool,
    heads_first: bool,
    mask: Mask,
    program: Option<&'static str>,
    packed_q: bool,
    words: usize,
    base2: bool,
    seed: u64,
}

impl Batch {
    fn new(dtype: DType, lengths: &[[usize; 2]]) -> Self {
        Self {
            dtype,
            dims: [64, 64],
            heads: [4, 2],
            lengths: lengths.to_vec(),
            place: Place::Table,
            page: 16,
            store: KvStore::default(),
            chunked: false,
            heads_first: false,
            mask: Mask::Full,
            program: None,
            packed_q: true,
            words: 1,
            base2: false,
            seed: 1,
        }
    }

    fn problem(&self) -> Problem {
        let [dqk, dv] = self.dims.map(|d| d as u32);
        let problem = Problem::forward_qk_v(self.dtype, dqk, dv, self.mask.kind()).unwrap();
        let problem = problem.with_kv(KvKind::Ragged(self.store));
        match self.program {
            Some(text) => problem.with_program(Program::parse(text).unwrap()),
            None => problem,
        }
    }

    fn shape(&self, q_len: usize, kv_len: usize) -> Shape {
        let [heads, kv_heads] = self.heads.map(|h| h as u32);
        let batch = self.lengths.len() as u32;
        Shape { batch, heads, kv_heads, q_len: q_len as u32, kv_len: kv_len as u32, mask: self.mask }
    }

    fn bounds(&self) -> Shape {
        let longest = |i: usize| self.lengths.iter().map(|l| l[i]).max().unwrap_or(0);
        self.shape(longest(0), longest(1))
    }

    fn schedule(&self, isa: CpuIsa) -> CpuRaggedSchedule {
        CpuRaggedSchedule::default_for(&self.problem(), isa, &ShapeBucket::of(&self.bounds()))
    }
}

/// Bytes of an element of the store, and its value.
fn encode(element: KvElement, dtype: DType, x: f32) -> (Vec<u8>, f32) {
    match (element, dtype) {
        (KvElement::Same, DType::F32) => (x.to_ne_bytes().to_vec(), x),
        (KvElement::Same, DType::F16) => {
            let x = half::f16::from_f32(x);
            (x.to_ne_bytes().to_vec(), x.to_f32())
        }
        (KvElement::Same, DType::Bf16) => {
            let x = half::bf16::from_f32(x);
            (x.to_ne_bytes().to_vec(), x.to_f32())
        }
        (KvElement::Int8, _) => {
            let n = (x * 30.0).round().clamp(-128.0, 127.0) as i8;
            (vec![n as u8], f32::from(n))
        }
        (KvElement::E5m2, _) => {
            let bits = (half::f16::from_f32(x).to_bits() >> 8) as u8;
            (vec![bits], half::f16::from_bits(u16::from(bits) << 8).to_f32())
        }
        (KvElement::E4m3, _) | (KvElement::Same, DType::E4m3) => {
            // By the definition, the nearest of all of them.
            let value = |bits: u8| {
                let (e, m) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
                let magnitude = if e == 0 { m * 2f32.powi(-9) } else { (1.0 + m / 8.0) * 2f32.powi(e - 7) };
                if bits & 0x80 != 0 { -magnitude } else { magnitude }
            };
            let all = (0..=255u8).filter(|bits| bits & 0x7f != 0x7f);
            let bits = all.min_by(|a, b| (value(*a) - x).abs().total_cmp(&(value(*b) - x).abs())).unwrap();
            (vec![bits], value(bits))
        }
    }
}

/// A batch in memory, with what is expected of it.
struct Case {
    batch: Batch,
    args: RaggedArgs,
    q: Vec<HostTensor>,
    dense: Vec<[HostTensor; 2]>,
    side: Option<(SideBuffers, SideData)>,
    o: Vec<u8>,
    lse: Vec<f32>,
    rows: Vec<usize>,
    _memory: Vec<Vec<u8>>,
}

const LSE_EMPTY: f32 = 77.0;

impl Case {
    fn new(device: &CpuDevice, batch: &Batch) -> Case {
        let mut rng = StdRng::seed_from_u64(batch.seed);
        let [heads, kv_heads] = batch.heads;
        let [dqk, dv] = batch.dims;
        let bounds = batch.bounds();
        let n = batch.lengths.len();
        let mut memory: Vec<Vec<u8>> = Vec::new();
        let mut keep = |bytes: Vec<u8>| -> u64 {
            memory.push(bytes);
            memory.last().unwrap().as_ptr() as u64
        };
        let ints = |values: &[i64]| -> Vec<u8> {
            match batch.words {
                1 => values.iter().flat_map(|x| (*x as i32).to_ne_bytes()).collect(),
                _ => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            }
        };
        let sums = |of: &dyn Fn(usize) -> usize| -> Vec<i64> {
            (0..=n).map(|i| (0..i).map(of).sum::<usize>() as i64).collect()
        };

        // Queries: packed, or in rows of the bound.
        let q_max = bounds.q_len as usize;
        let rows: Vec<usize> = (0..=n)
            .map(|i| if batch.packed_q { sums(&|i| batch.lengths[i][0])[i] as usize } else { i * q_max })
            .collect();
        let bytes = batch.dtype.bytes();
        let mut q_bytes = vec![0xffu8; (rows[n].max(1)) * heads * dqk * bytes];
        let mut q = Vec::new();
        for (i, &[q_len, _]) in batch.lengths.iter().enumerate() {
            let shape = [1, heads, q_len, dqk];
            let t =
                HostTensor::random(batch.dtype, shape, Layout::Bshd, batch.seed * 100 + i as u64, Distribution::Normal);
            let at = rows[i] * heads * dqk * bytes;
            q_bytes[at..at + t.bytes().len()].copy_from_slice(t.bytes());
            q.push(t);
        }

        // The store: more pages than there are in use, all NaN but what is written.
        let page = match batch.place {
            Place::Packed => sums(&|i| batch.lengths[i][1])[n] as usize + 3,
            Place::Slots => bounds.kv_len as usize + 5,
            _ => batch.page,
        };
        let pad = |i: usize| if batch.place == Place::Slots { i % 4 } else { 0 };
        let per = |i: usize| batch.lengths[i][1].div_ceil(page);
        let pages = match batch.place {
            Place::Packed => 1,
            Place::Slots => n + 2,
            _ => (0..n).map(per).sum::<usize>() + 3,
        };
        let mut order: Vec<usize> = (0..pages).collect();
        order.shuffle(&mut rng);
        let element = batch.store.element.bytes(batch.dtype);
        let x = 16 / element;
        let (k_stride, v_stride) = {
            let (p, h) = (page as i64, kv_heads as i64);
            let of = |d: i64| if batch.heads_first { [p * h * d, d, p * d] } else { [p * h * d, h * d, d] };
            let k = of(dqk as i64);
            let (x, d) = (x as i64, dv as i64);
            let k = if batch.chunked { [k[0], x, p * dqk as i64, p * x] } else { [k[0], k[1], k[2], x] };
            let v = of(d);
            (k, if batch.store.v_columns { [v[0], 1, p * d, p] } else { [v[0], v[1], v[2], 1] })
        };
        let mut k_bytes = vec![0xffu8; pages * page * kv_heads * dqk * element];
        let mut v_bytes = vec![0xffu8; pages * page * kv_heads * dv * element];
        if batch.store.element == KvElement::Int8 {
            // No NaN: what does not belong there is large.
            k_bytes.fill(0x7f);
            v_bytes.fill(0x7f);
        }
        let quantised = batch.store.element != KvElement::Same;
        let per_token = quantised && batch.store.scales == KvScales::PerToken;
        let scales = if per_token { pages * kv_heads * page } else { n * kv_heads };
        let mut k_scale = vec![f32::NAN; scales];
        let mut v_scale = vec![f32::NAN; scales];
        let (mut table, mut begins, mut last, mut dense) = (Vec::new(), vec![0i64], Vec::new(), Vec::new());
        let width = (0..n).map(per).max().unwrap_or(0) + 2;
        let mut next = 0;
        for (i, &[_, kv_len]) in batch.lengths.iter().enumerate() {
            let mut tensors = [dqk, dv].map(|d| HostTensor::zeros(DType::F32, [1, kv_heads, kv_len, d], Layout::Bhsd));
            let first = if batch.place == Place::Packed { sums(&|i| batch.lengths[i][1])[i] as usize } else { pad(i) };
            let ids: Vec<usize> = match batch.place {
                Place::Packed => vec![0],
                Place::Slots => vec![order[i]],
                _ => order[next..next + per(i)].to_vec(),
            };
            next += if matches!(batch.place, Place::Packed) { 0 } else { ids.len() };
            for h in 0..kv_heads {
                let scale = |rng: &mut StdRng| if quantised { rng.random_range(0.05..0.2f32) } else { 1.0 };
                let head = [scale(&mut rng), scale(&mut rng)];
                if !per_token {
                    (k_scale[i * kv_heads + h], v_scale[i * kv_heads + h]) = (head[0], head[1]);
                }
                for t in 0..kv_len {
                    let place = first + t;
                    let (id, token) = (ids[place / page], place % page);
                    let mut by = head;
                    if per_token {
                        by = [scale(&mut rng), scale(&mut rng)];
                        let at = (id * kv_heads + h) * page + token;
                        (k_scale[at], v_scale[at]) = (by[0], by[1]);
                    }
                    for (which, d) in [dqk, dv].into_iter().enumerate() {
                        for c in 0..d {
                            let mean = if which == 1 { 0.5 } else { 0.0 };
                            let value = rng.random_range(-1.7..1.7f32) + mean;
                            let (bytes, value) =
                                encode(batch.store.element, batch.dtype, if quantised { value * 2.0 } else { value });
                            tensors[which].set([0, h, t, c], value * by[which]);
                            let (s, to) =
                                if which == 0 { (&k_stride, &mut k_bytes) } else { (&v_stride, &mut v_bytes) };
                            let column =
                                if which == 0 { (c / x) as i64 * s[3] + (c % x) as i64 } else { c as i64 * s[3] };
                            let at = id as i64 * s[0] + token as i64 * s[1] + h as i64 * s[2] + column;
                            let at = at as usize * element;
                            to[at..at + element].copy_from_slice(&bytes);
                        }
                    }
                }
            }
            dense.push(tensors);
            match batch.place {
                // Behind a sequence's length stand identifiers that would crash.
                Place::Table => {
                    let mut row: Vec<i64> = ids.iter().map(|id| *id as i64).collect();
                    row.resize(width, i64::from(i32::MAX));
                    table.extend(row);
                }
                Place::Csr => {
                    table.extend(ids.iter().map(|id| *id as i64));
                    begins.push(table.len() as i64);
                    last.push(if kv_len == 0 { 0 } else { ((kv_len - 1) % page + 1) as i64 });
                }
                _ => (),
            }
        }

        let o_rows = rows[n].max(1) * heads;
        let mut args = RaggedArgs {
            q: keep(q_bytes),
            k: keep(k_bytes),
            v: keep(v_bytes),
            q_stride: [(q_max * heads * dqk) as i64, dqk as i64, (heads * dqk) as i64],
            o_stride: [(q_max * heads * dv) as i64, dv as i64, (heads * dv) as i64],
            lse_stride: [(q_max * heads) as i64, 1, heads as i64],
            k_stride,
            v_stride,
            table_stride: width as i64,
            pages: pages as i64,
            batch: n as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            q_len: bounds.q_len as i32,
            kv_len: bounds.kv_len as i32,
            page_tokens: page as i32,
            table_words: batch.words as i32,
            length_words: batch.words as i32,
            scale: 1.0 / (dqk as f32).sqrt(),
            lse_unit: if batch.base2 { std::f32::consts::LOG2_E } else { 1.0 },
            lse_empty: LSE_EMPTY,
            ..RaggedArgs::zeroed()
        };
        if let Mask::Window { left, right } = batch.mask {
            (args.window_left, args.window_right) = (left.unwrap_or(0) as i32, right.unwrap_or(0) as i32);
        }
        if batch.packed_q {
            args.q_begin = keep(ints(&rows.iter().map(|r| *r as i64).collect::<Vec<_>>()));
        } else {
            args.q_lengths = keep(ints(&batch.lengths.iter().map(|l| l[0] as i64).collect::<Vec<_>>()));
        }
        let kv_lengths = |extra: &dyn Fn(usize) -> usize| -> Vec<i64> {
            (0..n).map(|i| (batch.lengths[i][1] + extra(i)) as i64).collect()
        };
        match batch.place {
            Place::Packed => args.kv_begin = keep(ints(&sums(&|i| batch.lengths[i][1]))),
            Place::Slots => {
                args.slots = keep(ints(&order[..n].iter().map(|id| *id as i64).collect::<Vec<_>>()));
                args.left_pad = keep(ints(&(0..n).map(|i| pad(i) as i64).collect::<Vec<_>>()));
                // Before the append of one row.
                args.kv_added = 1;
                args.kv_len += 4;
                args.kv_lengths = keep(ints(&kv_lengths(&pad).iter().map(|x| x - 1).collect::<Vec<_>>()));
            }
            Place::Table => {
                args.k_table = keep(ints(&table));
                args.v_table = args.k_table;
                args.kv_lengths = keep(ints(&kv_lengths(&|_| 0)));
            }
            Place::Csr => {
                args.k_table = keep(ints(&table));
                args.v_table = args.k_table;
                args.pages_begin = keep(ints(&begins));
                args.last_page = keep(ints(&last));
            }
        }
        if quantised {
            let strides = if per_token { [(kv_heads * page) as i64, page as i64, 1] } else { [kv_heads as i64, 1, 0] };
            (args.k_scale_stride, args.v_scale_stride) = (strides, strides);
            args.k_scale = keep(bytemuck::cast_slice(&k_scale).to_vec());
            args.v_scale = keep(bytemuck::cast_slice(&v_scale).to_vec());
        }
        let side = batch.problem().program.map(|p| {
            let data = typical_side(&p, &bounds, 5);
            (SideBuffers::new(device, &p, &bounds, &data).unwrap(), data)
        });
        args.side = side.as_ref().map_or(0, |(side, _)| side.address());
        let o = vec![0xffu8; o_rows * dv * bytes];
        let (batch, lse) = (batch.clone(), vec![f32::NAN; o_rows]);
        Case { batch, args, q, dense, side, o, lse, rows, _memory: memory }
    }

    fn run(&mut self, device: &CpuDevice, module: &dyn Module) {
        self.o.fill(0xff);
        self.lse.fill(f32::NAN);
        let args = RaggedArgs { o: self.o.as_ptr() as u64, lse: self.lse.as_ptr() as u64, ..self.args };
        let plan = module.kernel().plan(&self.batch.bounds()).unwrap();
        // SAFETY: the arguments name memory of this case, of the sizes that they say.
        unsafe { device.launch(module, &plan, Args::Ragged(&args), Stream(0)).unwrap() }
    }

    /// Compares every sequence with the oracle, and sees that nothing else was written.
    fn check(&self, what: &str) {
        let batch = &self.batch;
        let ([heads, _], [_, dv]) = (batch.heads, batch.dims);
        let bytes = batch.dtype.bytes();
        let mut written = vec![false; self.lse.len()];
        for (i, &[q_len, kv_len]) in batch.lengths.iter().enumerate() {
            let shape = Shape { batch: 1, ..batch.shape(q_len, kv_len) };
            let program = batch.problem().program;
            let data = self.side.as_ref().map(|(_, data)| data);
            let program = program.as_ref().map(|p| (&**p, data.unwrap()));
            let attention =
                Attention { mask: batch.mask, scale: self.args.scale, program, sequence: i as u32, dropout: None };
            let [k, v] = &self.dense[i];
            let ids = all_rows(&shape);
            let mut oracle = oracle_of(&self.q[i], k, v, &attention, &ids);
            let unfused = unfused_rows_of(&self.q[i], k, v, &attention, &ids);
            let at = self.rows[i] * heads;
            let o = self.o[at * dv * bytes..(at + q_len * heads) * dv * bytes].to_vec();
            let o = HostTensor::from_bytes(batch.dtype, [1, heads, q_len, dv], Layout::Bshd, o).unwrap();
            let unit = f64::from(self.args.lse_unit);
            let mut lse = vec![0f32; q_len * heads];
            for (j, lse) in lse.iter_mut().enumerate() {
                let (h, row) = (j / q_len.max(1), j % q_len.max(1));
                written[at + row * heads + h] = true;
                *lse = (f64::from(self.lse[at + row * heads + h]) / unit) as f32;
            }
            for lse in &mut oracle.lse {
                if *lse == f64::NEG_INFINITY {
                    *lse = (f64::from(LSE_EMPTY) / unit) as f32 as f64;
                }
            }
            let verdict = compare(&o, Some(&lse), &oracle, &unfused);
            assert!(verdict.passed(), "{what}, sequence {i} of {batch:?}: {verdict}");
        }
        let stray = (0..written.len()).find(|&r| !written[r] && !self.lse[r].is_nan());
        assert_eq!(stray, None, "{what}: a row that is no sequence's was written");
    }
}

/// Some hundred kernels of two seconds each; those of `ragged_mixes.rs` are compiled as users get them.
fn load(device: &CpuDevice, problem: &Problem, schedule: CpuRaggedSchedule, isa: CpuIsa) -> Arc<dyn Module> {
    let kernel = Kernel { problem: *problem, schedule: Schedule::CpuRagged(schedule), arch: Arch::Cpu(isa) };
    device.load(&compile_quickly_once(&kernel).unwrap()).unwrap()
}

/// The host's, and one of the others that it can run, which take turns: compiling every kernel for all takes minutes.
/// Tests count their batches, so that each of them with three or more reaches all instruction sets.
fn isas(turn: usize) -> impl Iterator<Item = CpuIsa> {
    let others: Vec<CpuIsa> = CpuIsa::ALL.into_iter().filter(|isa| *isa < isa::host()).collect();
    let other = (!others.is_empty()).then(|| others[turn % others.len()]);
    std::iter::once(isa::host()).chain(other)
}

/// Small blocks and ranges, so that short sequences have many.
pub(super) fn small(s: CpuRaggedSchedule) -> CpuRaggedSchedule {
    CpuRaggedSchedule { few_block: 16, split_kv: 48, split_tiles: 64, ..s }
}

/// As [`small`], but so few ranges that each has keys enough for several heads.
fn together(s: CpuRaggedSchedule) -> CpuRaggedSchedule {
    CpuRaggedSchedule { few_block: 64, split_kv: 16, split_tiles: 3, ..s }
}

fn check(turn: usize, batch: &Batch) {
    check_with(turn, batch, small);
}

fn check_with(turn: usize, batch: &Batch, change: fn(CpuRaggedSchedule) -> CpuRaggedSchedule) {
    let device = CpuDevice::open().unwrap();
    let mut case = Case::new(&device, batch);
    for isa in isas(turn) {
        let schedule = change(batch.schedule(isa));
        let module = load(&device, &batch.problem(), schedule, isa);
        case.run(&device, &*module);
        case.check(&module.kernel().name());
        let first = (case.o.clone(), case.lse.clone());
        case.run(&device, &*module);
        let same = first.1.iter().zip(&case.lse).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(first.0 == case.o && same, "{isa:?}: two launches gave different bytes");
    }
}

const MIXED: &[[usize; 2]] = &[[1, 300], [0, 17], [3, 0], [5, 5], [40, 130], [1, 1], [2, 77]];

#[test]
fn every_place_of_keys_gives_what_the_oracle_says() {
    for (turn, place) in [Place::Packed, Place::Slots, Place::Table, Place::Csr].into_iter().enumerate() {
        for (words, packed_q) in [(1, true), (2, false)] {
            let batch = Batch { place, words, packed_q, ..Batch::new(DType::F32, MIXED) };
            // A slot's length of before an append of one row is none of an empty sequence.
            let lengths = MIXED.iter().map(|&[q, kv]| [q, kv.max(usize::from(place == Place::Slots))]);
            check(turn + words, &Batch { lengths: lengths.collect(), ..batch });
        }
    }
}

#[test]
fn pages_of_all_sizes_and_both_orders_of_heads() {
    for (i, page) in [1, 5, 16, 64].into_iter().enumerate() {
        let base = Batch::new(DType::Bf16, MIXED);
        check(i, &Batch { page, heads_first: i % 2 == 0, seed: i as u64 + 2, ..base });
    }
}

#[test]
fn dtypes_head_dims_and_groups() {
    let dtypes = [DType::F32, DType::F16, DType::Bf16];
    for (i, (dims, heads)) in
        [([16, 16], [8, 1]), ([40, 24], [3, 3]), ([128, 128], [6, 2]), ([256, 256], [5, 1]), ([192, 128], [8, 4])]
            .into_iter()
            .enumerate()
    {
        let base = Batch::new(dtypes[i % 3], &[[1, 90], [2, 33], [7, 64], [1, 0]]);
        check(i, &Batch { dims, heads, base2: i % 2 == 1, ..base });
    }
}

#[test]
fn masks_are_aligned_at_the_bottom_right_of_each_sequence() {
    let masks =
        [Mask::Causal, Mask::Window { left: Some(20), right: Some(0) }, Mask::Window { left: Some(3), right: None }];
    for (i, mask) in masks.into_iter().enumerate() {
        for (j, dtype) in [DType::F32, DType::Bf16].into_iter().enumerate() {
            let lengths = [[1, 300], [9, 4], [40, 130], [3, 64], [4, 0], [70, 70]];
            check(i + 2 * j, &Batch { mask, ..Batch::new(dtype, &lengths) });
        }
    }
}

#[test]
fn quantised_stores_with_scales_of_heads_and_of_tokens() {
    let elements = [KvElement::E4m3, KvElement::E5m2, KvElement::Int8];
    for (i, element) in elements.into_iter().enumerate() {
        for (j, scales) in [KvScales::PerHead, KvScales::PerToken].into_iter().enumerate() {
            let store = KvStore { element, scales, v_columns: false };
            let place = if scales == KvScales::PerToken { Place::Table } else { Place::Csr };
            let base = Batch::new(DType::F16, &[[1, 200], [30, 61], [3, 7]]);
            check(i + 2 * j, &Batch { store, place, mask: Mask::Causal, dims: [72, 64], seed: i as u64, ..base });
        }
    }
}

#[test]
fn keys_in_chunks_of_16_bytes_beside_values_by_columns() {
    for (turn, element) in [KvElement::Same, KvElement::E4m3].into_iter().enumerate() {
        let store = KvStore { element, v_columns: true, ..KvStore::default() };
        let base = Batch::new(DType::F16, MIXED);
        check(turn, &Batch { store, chunked: true, heads_first: true, mask: Mask::Causal, ..base });
    }
}

#[test]
fn programs_see_the_heads_and_rows_of_their_sequence() {
    let programs = [
        "sinks: f32[heads]; sink = sinks[h];",
        "score = score + 0.05 * float(kv - q) * float(h + 1);",
        "mask = kv <= q + kv_len - q_len and (kv + h) % 3 != 1;",
    ];
    for (i, program) in programs.into_iter().enumerate() {
        for (j, dtype) in [DType::F32, DType::Bf16].into_iter().enumerate() {
            let lengths = [[1, 200], [40, 130], [2, 9], [3, 0]];
            check(i + 2 * j, &Batch { program: Some(program), ..Batch::new(dtype, &lengths) });
        }
    }
}

/// No finite score is a mask, however far below zero; and caps of large ones are merged as all else is.
#[test]
fn scores_far_from_zero_are_scores_as_others() {
    let programs = ["score = score - 60000.0;", "score = 50.0 * tanh(score * 20.0);"];
    for (turn, program) in programs.into_iter().enumerate() {
        let lengths = [[1, 300], [9, 130], [2, 0], [3, 1]];
        check(turn, &Batch { program: Some(program), mask: Mask::Causal, ..Batch::new(DType::Bf16, &lengths) });
    }
}

#[test]
fn heads_that_lie_side_by_side_share_a_tile() {
    let lengths = &[[1, 300], [2, 77], [3, 0], [5, 205], [1, 16], [1, 1]];
    let base = |dtype| Batch { heads: [9, 3], mask: Mask::Causal, ..Batch::new(dtype, lengths) };
    // Rows of one line, of several, and with columns behind the last whole vector; heads of a token, and of a page.
    check_with(0, &Batch { dims: [128, 72], place: Place::Packed, ..base(DType::Bf16) }, together);
    check_with(1, &Batch { dims: [24, 40], heads: [16, 16], heads_first: true, ..base(DType::Bf16) }, together);
    check_with(
        2,
        &Batch { heads: [7, 7], place: Place::Slots, lengths: lengths[..2].to_vec(), ..base(DType::F32) },
        together,
    );
    let program = Some("sinks: f32[heads]; sink = sinks[h];");
    check_with(3, &Batch { program, mask: Mask::Full, page: 5, ..base(DType::F16) }, together);
    let store = KvStore { element: KvElement::E4m3, scales: KvScales::PerToken, v_columns: false };
    check_with(4, &Batch { store, ..base(DType::F16) }, together);
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    let host = CpuDevice::open().unwrap();
    let batch = Batch::new(DType::Bf16, &[[1, 900], [50, 400], [2, 33]]);
    let mut case = Case::new(&host, &batch);
    let isa = isa::host();
    for change in [small, together] {
        let module = load(&host, &batch.problem(), change(batch.schedule(isa)), isa);
        let mut first = None;
        for threads in [1, 2, 16] {
            let pool = Box::leak(Box::new(rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()));
            let device = CpuDevice {
                fingerprint: host.fingerprint.clone(),
                threads: Arc::new(super::threads::Own { pool }),
                pool,
            };
            for _ in 0..20 {
                case.run(&device, &*module);
                let got = (case.o.clone(), case.lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
                assert!(*first.get_or_insert_with(|| got.clone()) == got, "{threads} threads");
            }
        }
        case.check("the last of them");
    }
}

#[test]
fn keys_of_pages_that_are_not_there_are_masked() {
    let device = CpuDevice::open().unwrap();
    let batch = Batch { page: 16, ..Batch::new(DType::F32, &[[1, 16], [1, 48]]) };
    let changes = [small, together];
    for (isa, change) in isas(0).flat_map(|isa| changes.map(|change| (isa, change))) {
        let mut case = Case::new(&device, &batch);
        let module = load(&device, &batch.problem(), change(batch.schedule(isa)), isa);
        // SAFETY: the table is memory of the case, and has an entry for each page.
        let table = unsafe { std::slice::from_raw_parts_mut(case.args.k_table as *mut i32, 8) };
        // All keys of the first sequence, and the last page of the second.
        table[0] = -1;
        table[case.args.table_stride as usize + 2] = case.args.pages as i32;
        case.run(&device, &*module);
        assert!(
            case.o[..4 * 64 * 4].iter().all(|b| *b == 0) && case.lse[..4].iter().all(|x| *x == LSE_EMPTY),
            "{isa:?}"
        );
        let all = case.dense[1].clone();
        for tensor in &mut case.dense[1] {
            let [_, heads, _, dim] = tensor.shape();
            let mut short = HostTensor::zeros(DType::F32, [1, heads, 32, dim], Layout::Bhsd);
            let mut row = vec![0.0; dim];
            for (h, t) in (0..heads).flat_map(|h| (0..32).map(move |t| (h, t))) {
                tensor.read_row([0, h, t], &mut row);
                short.write_row([0, h, t], &row);
            }
            *tensor = short;
        }
        assert_eq!(all[0].shape()[2], 48);
        for tensor in &mut case.dense[0] {
            let [_, heads, _, dim] = tensor.shape();
            *tensor = HostTensor::zeros(DType::F32, [1, heads, 0, dim], Layout::Bhsd);
        }
        case.batch.lengths = vec![[1, 0], [1, 32]];
        case.check(&format!("{isa:?}"));
    }
}
