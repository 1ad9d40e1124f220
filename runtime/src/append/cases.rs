//! Random appends with what they must leave: every byte of one piece of memory, in which the call's tensors lie between
//! guards.

mod memory;
mod numbers;

use super::{Append, AppendQueries, Positions, Rotary, RowCount, Rows, Target, append_call};
use crate::guarded::{GUARD, UNWRITTEN_CODE};
use crate::ragged::{Added, Index, IntKind, KeyLengths, Scales, Store, StoreRows, StoreType};
use crate::{Device, Module, Result};
use flashtune_codegen::{Arch, DType, Kernel, KvElement, KvScales, Problem, Schedule, ShapeBucket};
use memory::{Layout, StoreSide};
use numbers::{elements, rounded};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// What a place in memory must hold after the call.
enum Want {
    /// These bytes.
    Bits(Vec<u8>),
    /// A number of a format: the rounding of what is no farther than `eps` from `value`, divided by the fp32 scale that
    /// lies at `scale` after the call.
    Near { format: StoreType, value: f64, eps: f64, scale: Option<usize> },
}

/// One call, with memory before it and what is expected after it.
pub struct AppendCase {
    /// The call, at the address that the case was made for.
    pub append: Append,
    /// The memory before the call.
    pub memory: Vec<u8>,
    wants: Vec<(usize, Want)>,
}

impl AppendCase {
    /// The `seed`-th call, in memory that begins at `base`, a multiple of 64.
    pub fn random(seed: u64, base: u64) -> Self {
        Self::draw(seed, base, None)
    }

    /// The `seed`-th call for kernels of a problem.
    pub fn random_of(problem: &Problem, seed: u64, base: u64) -> Self {
        Self::draw(seed, base, Some(problem))
    }

    fn draw(seed: u64, base: u64, problem: Option<&Problem>) -> Self {
        let mut l = Layout { rng: StdRng::seed_from_u64(seed), base, memory: vec![UNWRITTEN_CODE; GUARD] };
        let dtype = l.draw(&DType::ALL);
        let dtype = problem.map_or(dtype, |p| p.dtype);
        let element = match problem.and_then(|p| p.kv.store()).map(|store| store.element) {
            None => l.draw(&[StoreType::Float(dtype), StoreType::E4m3, StoreType::E5m2, StoreType::Int8]),
            Some(KvElement::Same) => StoreType::Float(dtype),
            Some(KvElement::E4m3) => StoreType::E4m3,
            Some(KvElement::E5m2) => StoreType::E5m2,
            Some(KvElement::Int8) => StoreType::Int8,
        };
        // Columns of V are told from rows by pages of more than one token.
        let store = problem.map(|p| p.kv.store().unwrap_or_default());
        let page_tokens: i64 = match store {
            None => l.draw(&[1, 5, 16, 256]),
            Some(store) if store.v_columns => l.draw(&[5, 16]),
            Some(_) => l.draw(&[1, 5, 16]),
        };
        let dims: &[usize] =
            if page_tokens == 256 { &[16, 24] } else { &[1, 16, 24, 40, 59, 64, 80, 111, 128, 192, 256] };
        let (dim, dim_v) = (l.draw(dims), l.draw(dims));
        let dim_v = if l.chance(0.6) { dim } else { dim_v };
        let (dim, dim_v) = problem.map_or((dim, dim_v), |p| (p.head_dim_qk as usize, p.head_dim_v as usize));
        let heads = l.draw(&[1, 2, 3]);
        let mode = l.draw(&["slots", "slots", "table", "csr", "dense"]);
        let slots = mode == "slots";
        let kinds = [IntKind::I32, IntKind::I64];
        let [length_kind, table_kind, slot_kind, position_kind] = [(); 4].map(|()| l.draw(&kinds));

        // New rows, and lengths before.
        let batch: usize = if slots { 1 } else { l.draw(&[1, 2, 4]) };
        let packed = !slots && l.chance(0.5);
        let each = if slots { l.rng.random_range(0..12) } else { l.rng.random_range(0..5) };
        let new: Vec<i64> = (0..batch).map(|_| if packed { l.rng.random_range(0..6) } else { each }).collect();
        let sums = |of: &[i64], first: i64| {
            let mut sums = vec![first];
            of.iter().for_each(|n| sums.push(sums[sums.len() - 1] + n));
            sums
        };
        let behind = |l: &mut Layout| if l.chance(0.5) { l.rng.random_range(0..3) } else { 0 };
        let (lead, tail) = if packed { (behind(&mut l), behind(&mut l)) } else { (0, 0) };
        let new_sums = sums(&new, lead);
        let total = new_sums[batch] + tail;
        let capacity: i64 = if mode == "dense" { 1 } else { l.rng.random_range(1..=3) };
        let way = match mode {
            "csr" => l.draw(&["before", "after", "last", "full"]),
            _ => l.draw(&["before", "before", "after", "sums"]),
        };
        let max_kv =
            if way == "full" { capacity * page_tokens + 99 } else { l.rng.random_range(1..=capacity * page_tokens) };
        let before: Vec<i64> = (new.iter())
            .map(|n| match way {
                "full" => (n + page_tokens - 1) / page_tokens * page_tokens - n,
                _ if l.chance(0.3) => (max_kv - n).max(0),
                _ => l.rng.random_range(0..=max_kv),
            })
            .collect();
        let after: Vec<i64> = before.iter().zip(&new).map(|(b, n)| b + n).collect();

        // The pages of each sequence.
        let used: Vec<i64> = match mode {
            "csr" => after.iter().map(|n| (n + page_tokens - 1) / page_tokens).collect(),
            _ => vec![capacity; batch],
        };
        let pages = used.iter().sum::<i64>() + l.rng.random_range(1..3);
        let mut tables = [(); 2].map(|()| {
            let mut ids: Vec<i64> = (0..pages).collect();
            ids.shuffle(&mut l.rng);
            ids
        });
        let own_v = matches!(mode, "table" | "csr") && l.chance(0.5);
        let no_page = [-1, pages, i64::from(i32::MAX)];
        if !matches!(mode, "slots" | "dense") && l.chance(0.4) {
            for table in &mut tables {
                let at = l.rng.random_range(0..table.len());
                table[at] = l.draw(&no_page);
            }
        }
        if !own_v {
            tables[1] = tables[0].clone();
        }
        let firsts = sums(&used, 0);
        let own_slots = mode == "dense" && l.chance(0.6);
        // A token of the store for a row of a sequence, of K's table or V's.
        let mut mapping: Vec<i64> = (0..pages * page_tokens).collect();
        mapping.shuffle(&mut l.rng);
        mapping.resize(total as usize, -1);
        for slot in &mut mapping {
            if l.chance(0.15) {
                *slot = l.draw(&[-1, -77, pages * page_tokens, pages * page_tokens + 5]);
            }
        }
        let place = |which: usize, nth: i64, b: usize, row: i64| {
            let (page, token) = if slots {
                let slot = mapping[nth as usize];
                (slot.div_euclid(page_tokens), slot.rem_euclid(page_tokens))
            } else {
                let p = before[b] + row;
                if p >= max_kv {
                    return None;
                }
                let n = p / page_tokens;
                let page = match mode {
                    "dense" if own_slots => tables[0][b],
                    "dense" => b as i64,
                    _ => tables[which][(firsts[b] + n) as usize],
                };
                (page, p % page_tokens)
            };
            (0..pages).contains(&page).then_some((page, token))
        };

        // The store.
        let kind = match store.map(|store| store.scales) {
            _ if matches!(element, StoreType::Float(_)) => "one",
            None => l.draw(&["one", "head", "token", "found"]),
            Some(KvScales::PerHead) => l.draw(&["one", "head"]),
            Some(KvScales::PerToken) => l.draw(&["token", "found"]),
        };
        let side = |l: &mut Layout, is_k: bool| {
            let dim = if is_k { dim } else { dim_v };
            let piece = if is_k { 16 / element.bytes() } else { 1 };
            let (n, h, d) = (page_tokens, heads as i64, dim as i64);
            let padded = d + l.draw(&[0, 0, 8, 5]);
            let apart = dim.is_multiple_of(piece) && l.chance(0.3);
            let apart = if is_k { apart } else { store.map_or(apart, |store| store.v_columns) };
            let (strides, inner, page) = if apart {
                let x = piece as i64;
                ([x, d * n], Some(n * x), h * d * n)
            } else if l.chance(0.5) {
                ([h * padded, padded], None, n * h * padded)
            } else {
                ([padded, n * padded], None, n * h * padded)
            };
            let page = page + l.draw(&[0, 0, 16, 7]);
            let at = l.room((pages * page) as usize * element.bytes(), element.bytes());
            let mut scale = None;
            let mut values = |l: &mut Layout, count: i64, p: f64| {
                let values: Vec<f32> =
                    (0..count).map(|_| if l.chance(p) { 0.0 } else { l.rng.random_range(0.001..0.1) }).collect();
                let at = l.floats(&values);
                scale = Some(at);
                l.address(at)
            };
            let scales = match kind {
                "one" => Scales::One,
                "head" => {
                    let strides = l.draw(&[[0, 0], [0, 1], if slots { [0, 1] } else { [h, 1] }]);
                    Scales::PerHead { address: values(l, batch as i64 * h, 0.15), strides }
                }
                _ => Scales::PerToken { address: values(l, pages * h * n, 0.1), strides: [h * n, n, 1] },
            };
            let rows =
                StoreRows { address: l.address(at), element, strides: [page, strides[0], strides[1]], inner, scales };
            StoreSide { at, rows, piece: piece as i64, inner: inner.unwrap_or(piece as i64), scale }
        };
        let sides = [side(&mut l, true), side(&mut l, false)];

        // Tensors.
        let shape = |n: usize, heads, dim| [if packed { 1 } else { batch }, n, heads, dim];
        let rows_each = if packed { total as usize } else { each as usize };
        let (k_at, k_strides) = l.rows(dtype, shape(rows_each, heads, dim));
        let (v_at, v_strides) = l.rows(dtype, shape(rows_each, heads, dim_v));
        let rotary_dim = if dim < 2 || l.chance(0.3) { 0 } else { 2 * l.rng.random_range(1..=dim / 2) };
        let rotary_dim = if rotary_dim > 0 && l.chance(0.5) { dim / 2 * 2 } else { rotary_dim };
        let interleaved = l.chance(0.5);
        let angles = if l.chance(0.5) { DType::F32 } else { dtype };
        let positions_of = if slots { "each" } else { l.draw(&["places", "from", "each"]) };
        let first: Vec<i64> = (0..batch).map(|_| l.rng.random_range(0..30)).collect();
        let most = before.iter().chain(&first).max().map_or(0, |n| n + 12);
        let table_rows = if l.chance(0.1) { most / 2 } else { most.max(1) };
        let k_positions: Vec<i64> = (0..total).map(|_| l.rng.random_range(0..most)).collect();
        // Cosines and sines side by side, or each on its own.
        let half = rotary_dim / 2;
        let joined = l.chance(0.5);
        let stride = if joined { rotary_dim } else { half + l.draw(&[0, 3, 8]) };
        let angle_table = |l: &mut Layout, count: usize| {
            let at = l.room(count * angles.bytes(), angles.bytes());
            for i in 0..count {
                let bits = rounded(StoreType::Float(angles), l.rng.random_range(-1.0..1.0));
                l.memory[at + i * angles.bytes()..][..angles.bytes()].copy_from_slice(&bits);
            }
            at
        };
        let cos_at = angle_table(&mut l, stride * table_rows as usize);
        let sin_at =
            if joined { cos_at + half * angles.bytes() } else { angle_table(&mut l, stride * table_rows as usize) };

        // Q.
        let q_heads = heads * l.draw(&[1, 2]);
        let has_q = rotary_dim > 0 && l.chance(0.6);
        let (in_place, advance) = (l.chance(0.5), l.chance(0.7));
        let (q_at, q_strides) = l.rows(dtype, shape(rows_each, q_heads, dim));
        let (to_at, to_strides) =
            if in_place { (q_at, q_strides) } else { l.rows(dtype, shape(rows_each, q_heads, dim)) };

        // The call.
        let new_begin = packed.then(|| l.ints(length_kind, &new_sums));
        let rows = match new_begin {
            Some(begin) => RowCount::Packed { begin, total: total as u64 },
            None => RowCount::Each(each as u64),
        };
        let target = if slots {
            Target::Slots { mapping: l.ints(slot_kind, &mapping) }
        } else {
            let keys = match way {
                "before" => {
                    let added = new_begin.map_or(Added::Rows(each as u64), |begin| Added::Packed { begin });
                    KeyLengths::Each { lengths: l.ints(length_kind, &before), added }
                }
                "after" => KeyLengths::Each { lengths: l.ints(length_kind, &after), added: Added::Nothing },
                "sums" => KeyLengths::Cumulative { sums: l.ints(length_kind, &sums(&after, 3)) },
                "last" => {
                    let last: Vec<i64> =
                        after.iter().zip(&used).map(|(n, pages)| n - (pages - 1).max(0) * page_tokens).collect();
                    KeyLengths::LastPage { tokens: l.ints(length_kind, &last) }
                }
                _ => KeyLengths::OfIndex,
            };
            let index = match mode {
                "dense" => Index::Dense { slots: own_slots.then(|| l.ints(table_kind, &tables[0][..batch])) },
                "csr" => {
                    let (k, v) = (l.ints(table_kind, &tables[0]), l.ints(table_kind, &tables[1]));
                    Index::Csr { begin: l.ints(length_kind, &firsts), k, v: own_v.then_some(v.address) }
                }
                _ => {
                    let (k, v) = (l.ints(table_kind, &tables[0]), l.ints(table_kind, &tables[1]));
                    Index::Table { k, v: own_v.then_some(v.address), stride: capacity, capacity: capacity as u64 }
                }
            };
            Target::Lengths { batch: batch as u64, index, keys, max_kv: max_kv as u64 }
        };
        let positions = match positions_of {
            "places" => Positions::OfPlaces,
            "from" => Positions::From { first: l.ints(length_kind, &first) },
            _ => Positions::Each { k: l.ints(position_kind, &k_positions), q: None },
        };
        let rotary = (rotary_dim > 0).then(|| Rotary {
            cos: l.address(cos_at),
            sin: l.address(sin_at),
            dtype: angles,
            stride: stride as i64,
            rows: table_rows as u64,
            dim: rotary_dim as u64,
            interleaved,
            positions,
        });
        let queries = has_q.then(|| AppendQueries {
            from: Rows { address: l.address(q_at), strides: q_strides },
            to: Rows { address: l.address(to_at), strides: to_strides },
            heads: q_heads as u64,
            rows,
            advance,
        });
        let append = Append {
            dtype,
            head_dim: dim as u64,
            k: Rows { address: l.address(k_at), strides: k_strides },
            v: Rows { address: l.address(v_at), strides: v_strides },
            rows,
            store: Store {
                k: sides[0].rows,
                v: sides[1].rows,
                head_dim_v: dim_v as u64,
                kv_heads: heads as u64,
                pages: pages as u64,
                page_tokens: page_tokens as u64,
            },
            target,
            queries,
            rotary,
            finds_scales: kind == "found",
        };

        // What must be there afterwards.
        let (memory, own) = (l.memory, StoreType::Float(dtype));
        let read = |at: usize, strides: [i64; 3], [b, h, r, i]: [usize; 4]| {
            let n = b as i64 * strides[0] + h as i64 * strides[1] + r as i64 * strides[2] + i as i64;
            let from = at + n as usize * dtype.bytes();
            memory[from..from + dtype.bytes()].to_vec()
        };
        let angle = |at: usize, n: usize| {
            elements(StoreType::Float(angles), &memory[at + n * angles.bytes()..][..angles.bytes()])
        };
        // An element of a row after its rotation, and how much its terms are worth; none where nothing turns.
        let turned = |row: &dyn Fn(usize) -> f64, position: i64, i: usize| {
            if i >= rotary_dim {
                return None;
            }
            if !(0..table_rows).contains(&position) {
                return Some((f64::NAN, 0.0));
            }
            let (pair, other, second) = match interleaved {
                true => (i / 2, i ^ 1, i % 2 == 1),
                false => (i % half, (i + half) % rotary_dim, i >= half),
            };
            let at = position as usize * stride + pair;
            let (a, b) = (row(i) * angle(cos_at, at), row(other) * angle(sin_at, at));
            Some((if second { a + b } else { a - b }, 4e-7 * (a.abs() + b.abs())))
        };
        let mut wants = Vec::new();
        for nth in 0..total {
            let (b, row) = if packed {
                let b = (0..batch).find(|&b| (new_sums[b]..new_sums[b + 1]).contains(&nth));
                let Some(b) = b else { continue };
                (b, nth - new_sums[b])
            } else {
                ((nth / each) as usize, nth % each)
            };
            let from = |h: usize, i: usize| if packed { [0, h, nth as usize, i] } else { [b, h, row as usize, i] };
            let position = |advance: bool| match positions_of {
                "places" => before[b] + if advance { row } else { 0 },
                "from" => first[b] + if advance { row } else { 0 },
                _ => k_positions[nth as usize],
            };
            for (which, side) in sides.iter().enumerate() {
                let Some((page, token)) = place(which, nth, b, row) else { continue };
                let (at, strides, dim) = if which == 0 { (k_at, k_strides, dim) } else { (v_at, v_strides, dim_v) };
                for h in 0..heads {
                    let bits = |i: usize| read(at, strides, from(h, i));
                    let row_of = |i: usize| elements(own, &bits(i));
                    let values: Vec<(f64, f64, bool)> = (0..dim)
                        .map(|i| match turned(&row_of, position(true), i).filter(|_| which == 0) {
                            Some((value, eps)) => (value, eps, true),
                            None => (row_of(i), 0.0, false),
                        })
                        .collect();
                    let scale = side.scale_at(b as i64, page, token, h as i64);
                    if let Some(scale) = scale.filter(|_| kind == "found") {
                        let finite = values.iter().filter(|v| v.0.is_finite());
                        let (most, eps) = finite.fold((0.0f64, 0.0f64), |m, v| (m.0.max(v.0.abs()), m.1.max(v.1)));
                        let largest = match element {
                            StoreType::E4m3 => 448.0,
                            StoreType::E5m2 => 57344.0,
                            _ => 127.0,
                        };
                        let (value, eps) = (most / largest, eps / largest + 1e-7 * most / largest);
                        let format = StoreType::Float(DType::F32);
                        wants.push((scale, Want::Near { format, value, eps, scale: None }));
                    }
                    for (i, (value, eps, turns)) in values.into_iter().enumerate() {
                        let to = side.element(page, token, h as i64, i as i64);
                        let want = match element {
                            StoreType::Float(_) if !turns => Want::Bits(bits(i)),
                            _ => Want::Near { format: element, value, eps, scale },
                        };
                        wants.push((to, want));
                    }
                }
            }
            for h in 0..if has_q { q_heads } else { 0 } {
                let row_of = |i: usize| elements(own, &read(q_at, q_strides, from(h, i)));
                for i in 0..dim {
                    let [b, h, r, i] = from(h, i);
                    let n = b as i64 * to_strides[0] + h as i64 * to_strides[1] + r as i64 * to_strides[2] + i as i64;
                    let want = match turned(&row_of, position(advance), i) {
                        Some((value, eps)) => Want::Near { format: own, value, eps, scale: None },
                        None => Want::Bits(read(q_at, q_strides, [b, h, r, i])),
                    };
                    wants.push((to_at + n as usize * dtype.bytes(), want));
                }
            }
        }
        Self { append, memory, wants }
    }

    /// Compares memory after the call with what must be there, to the byte where nothing was computed.
    ///
    /// # Errors
    /// The first place that differs.
    pub fn compare(&self, after: &[u8]) -> Result<(), String> {
        let mut expected = self.memory.clone();
        for (at, want) in &self.wants {
            match want {
                Want::Bits(bits) => expected[*at..at + bits.len()].copy_from_slice(bits),
                Want::Near { format, value, eps, scale } => {
                    let got = &after[*at..at + format.bytes()];
                    let scale = scale.map_or(1.0, |at| elements(StoreType::Float(DType::F32), &after[at..at + 4]));
                    let divided = |x: f64| match scale {
                        0.0 if !x.is_nan() => 0.0,
                        // One rounding to fp32, as IEEE has it, where the number is one.
                        _ if *eps == 0.0 => f64::from(x as f32 / scale as f32),
                        _ => x / scale,
                    };
                    // A division rounds once more: its last place may decide between two elements.
                    let slack = if *eps == 0.0 { 0.0 } else { 2e-7 * value.abs() };
                    let bound = |x: f64| elements(*format, &rounded(*format, divided(x)));
                    let (low, high, found) =
                        (bound(value - eps - slack), bound(value + eps + slack), elements(*format, got));
                    let right = (low.min(high)..=low.max(high)).contains(&found) || found.is_nan() && low.is_nan();
                    if !right {
                        return Err(format!(
                            "{found:e} at byte {at} is not from {low:e} to {high:e}: {value:e} by {scale:e} in {}",
                            format.name()
                        ));
                    }
                    expected[*at..at + got.len()].copy_from_slice(got);
                }
            }
        }
        match (0..expected.len()).find(|&i| expected[i] != after[i]) {
            None => Ok(()),
            Some(i) => {
                let meant =
                    self.wants.iter().any(|(at, w)| matches!(w, Want::Bits(b) if (*at..at + b.len()).contains(&i)));
                let what = if meant { "was to be copied there" } else { "nothing was to be written there" };
                Err(format!("byte {i} is {:#x}, not {:#x}: {what}", after[i], expected[i]))
            }
        }
    }

    /// What the call asks of a kernel.
    ///
    /// # Errors
    /// As [`append_call`].
    pub fn problem(&self) -> Result<Problem> {
        Ok(append_call(&self.append)?.problem)
    }

    /// The kernel that serves it on a device.
    ///
    /// # Errors
    /// As [`append_call`], and where no family serves it.
    pub fn kernel(&self, device: &dyn Device) -> Result<Kernel> {
        self.kernel_for(device.fingerprint().arch)
    }

    /// The same for an arch.
    ///
    /// # Errors
    /// As [`AppendCase::kernel`].
    pub fn kernel_for(&self, arch: Arch) -> Result<Kernel> {
        let call = append_call(&self.append)?;
        let family = flashtune_codegen::Family::candidates(&call.problem, arch)[0];
        let schedule = Schedule::default_for(family, &call.problem, arch, &ShapeBucket::of(&call.shape))?;
        Ok(Kernel { problem: call.problem, schedule, arch })
    }
}

/// Runs the `seed`-th case on a device, by the module that `load` has for its kernel, and compares.
///
/// # Errors
/// What `load` and the device say; a wrong result is the text of the inner one.
pub fn check_append(
    device: &dyn Device,
    seed: u64,
    load: impl FnOnce(&Kernel) -> Result<std::sync::Arc<dyn Module>>,
) -> Result<Result<(), String>> {
    // Its size does not depend on where it lies.
    let bytes = AppendCase::random(seed, 1 << 20).memory.len();
    let buffer = device.alloc(bytes + 256)?;
    let base = buffer.address().next_multiple_of(256);
    let skipped = (base - buffer.address()) as usize;
    let case = AppendCase::random(seed, base);
    let module = load(&case.kernel(device)?)?;
    let call = append_call(&case.append)?;
    let plan = module.kernel().plan(&call.shape)?;
    let mut memory = vec![UNWRITTEN_CODE; skipped];
    memory.extend_from_slice(&case.memory);
    device.upload(&*buffer, &memory)?;
    // SAFETY: every address lies in the buffer, which lives until the launch is done, and sizes were checked.
    unsafe { device.launch(&*module, &plan, (&call.args).into(), device.stream())? };
    device.download(&*buffer, &mut memory, device.stream())?;
    Ok(case.compare(&memory[skipped..]))
}
