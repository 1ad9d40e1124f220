//! Random mixes of lengths through calls that are made once: between launches only what lies on the device changes, as
//! when a captured graph is replayed. Everything that no sequence has is NaN, entries behind a sequence's pages name
//! none, and outputs are poisoned; every row is held against fp64, and a launch that does not end is told with its
//! lengths.
//!
//! `FLASHTUNE_MIXES` is how many mixes are tried (1,000 on CI; 10,000 take half a minute).

use super::ragged_tests::small;
use super::*;
use crate::compile::memory::compile_or_plant;
use bytemuck::Zeroable;
use flashtune_codegen::abi::RaggedArgs;
use flashtune_codegen::{
    CpuIsa, CpuRaggedSchedule, DType, Kernel, KvKind, KvStore, LaunchPlan, Mask, MaskKind, Problem, Schedule, Shape,
    ShapeBucket, TemplateSet,
};
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

const DIM: usize = 16;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
/// What a row without keys gets, so that it can be told from everything else.
const LSE_EMPTY: f32 = 77.0;
/// Mixes of one call.
const REPLAYS: usize = 20;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Packed,
    Slots,
    Table,
    Csr,
}

/// A call: bounds, strides and the places of arrays stay, what lies there changes from mix to mix.
struct Call {
    place: Place,
    mask: Mask,
    batch: usize,
    most: [usize; 2],
    page: usize,
    pages: usize,
    width: usize,
    packed_q: bool,
    wide: bool,
    q: Vec<f32>,
    /// What tokens have where a sequence uses them.
    pool: [Vec<f32>; 2],
    store: [Vec<f32>; 2],
    o: Vec<f32>,
    lse: Vec<f32>,
    arrays: BTreeMap<&'static str, Vec<u8>>,
    args: RaggedArgs,
}

/// What the device reads of one mix, and where keys lie by it.
struct Mix {
    lengths: Vec<[usize; 2]>,
    /// First row of each sequence.
    rows: Vec<usize>,
    /// Page and token of each key, none where its page is none of the store's.
    keys: Vec<Vec<Option<(usize, usize)>>>,
    /// A key whose V is infinite: rows that do not attend to it hear nothing of that.
    infinite: Option<(usize, usize)>,
}

fn kernel(kind: MaskKind, isa: CpuIsa) -> Kernel {
    let problem = Problem::forward_qk_v(DType::F32, DIM as u32, DIM as u32, kind).unwrap();
    let problem = problem.with_kv(KvKind::Ragged(KvStore::default()));
    let bucket = ShapeBucket { parallel: 16, group: 2, q_len: 1, kv_len: 64, ..Default::default() };
    let schedule = small(CpuRaggedSchedule::default_for(&problem, isa, &bucket));
    Kernel { problem, schedule: Schedule::CpuRagged(schedule), arch: Arch::Cpu(isa) }
}

/// The kernel, or of other templates one with a fault.
fn module(device: &CpuDevice, kernel: &Kernel, templates: &TemplateSet) -> Arc<dyn Module> {
    device.load(&compile_or_plant(kernel, templates).unwrap()).unwrap()
}

impl Call {
    fn random(rng: &mut StdRng, kind: MaskKind) -> Self {
        let place = *[Place::Packed, Place::Slots, Place::Table, Place::Csr].choose(rng).unwrap();
        // Few rows, and so many with those of the other head that they are packed into panels.
        let most = [*[1, 3, 12].choose(rng).unwrap(), *[40, 130].choose(rng).unwrap()];
        let batch = *[1, 2, 5, 9].choose(rng).unwrap();
        Self::new(rng, kind, place, batch, most)
    }

    /// A call of so many sequences, of so many rows and keys at most.
    fn new(rng: &mut StdRng, kind: MaskKind, place: Place, batch: usize, most: [usize; 2]) -> Self {
        let mask = match kind.left {
            false => Mask::Causal,
            true => Mask::Window { left: Some(rng.random_range(0..40)), right: Some(rng.random_range(0..9)) },
        };
        let page = match place {
            Place::Packed => batch * most[1] + 3,
            Place::Slots => most[1] + 4,
            _ => *[1, 5, 16, 64].choose(rng).unwrap(),
        };
        let width = most[1].div_ceil(page) + 1;
        let pages = match place {
            Place::Packed => 1,
            Place::Slots => batch + 2,
            _ => batch * width,
        };
        let mut random = |n: usize| (0..n).map(|_| rng.random_range(-1.0..1.0f32)).collect::<Vec<f32>>();
        let rows = batch * most[0];
        let tokens = pages * page * KV_HEADS * DIM;
        let (q, pool) = (random(rows * HEADS * DIM), [random(tokens), random(tokens)]);
        let (packed_q, wide) = (rng.random(), rng.random());
        let mut call = Self {
            place,
            mask,
            batch,
            most,
            page,
            pages,
            width,
            packed_q,
            wide,
            q,
            store: pool.clone(),
            pool,
            o: vec![0.0; rows * HEADS * DIM],
            lse: vec![0.0; rows * HEADS],
            arrays: BTreeMap::new(),
            args: RaggedArgs::zeroed(),
        };
        call.draw(rng);
        let at = |name: &str| call.arrays.get(name).map_or(0, |bytes| bytes.as_ptr() as u64);
        let row = (HEADS * DIM) as i64;
        let heads = [(page * KV_HEADS * DIM) as i64, (KV_HEADS * DIM) as i64, DIM as i64];
        let [window_left, window_right] = match mask {
            Mask::Window { left, right } => [left.unwrap() as i32, right.unwrap() as i32],
            _ => [0; 2],
        };
        call.args = RaggedArgs {
            q: call.q.as_ptr() as u64,
            k: call.store[0].as_ptr() as u64,
            v: call.store[1].as_ptr() as u64,
            o: call.o.as_ptr() as u64,
            lse: call.lse.as_ptr() as u64,
            k_table: at("table"),
            v_table: at("table"),
            pages_begin: at("pages_begin"),
            slots: at("slots"),
            kv_begin: at("kv_begin"),
            kv_lengths: at("kv_lengths"),
            last_page: at("last_page"),
            left_pad: at("left_pad"),
            q_begin: at("q_begin"),
            q_lengths: at("q_lengths"),
            q_stride: [most[0] as i64 * row, DIM as i64, row],
            o_stride: [most[0] as i64 * row, DIM as i64, row],
            lse_stride: [(most[0] * HEADS) as i64, 1, HEADS as i64],
            k_stride: [heads[0], heads[1], heads[2], 4],
            v_stride: [heads[0], heads[1], heads[2], 1],
            table_stride: width as i64,
            pages: pages as i64,
            batch: batch as i32,
            heads: HEADS as i32,
            kv_heads: KV_HEADS as i32,
            q_len: most[0] as i32,
            kv_len: call.bound() as i32,
            page_tokens: page as i32,
            table_words: if wide { 2 } else { 1 },
            length_words: if wide { 2 } else { 1 },
            window_left,
            window_right,
            scale: 0.3,
            lse_unit: 1.0,
            lse_empty: LSE_EMPTY,
            ..RaggedArgs::zeroed()
        };
        call
    }

    /// Tokens that a sequence has at most, padding included.
    fn bound(&self) -> usize {
        if self.place == Place::Slots { self.page } else { self.most[1] }
    }

    fn shape(&self) -> Shape {
        Shape {
            batch: self.batch as u32,
            heads: HEADS as u32,
            kv_heads: KV_HEADS as u32,
            q_len: self.most[0] as u32,
            kv_len: self.bound() as u32,
            mask: self.mask,
        }
    }

    /// Writes integers where the call has that array; their number is always the same.
    fn put(&mut self, name: &'static str, values: &[i64]) {
        let wide = self.wide;
        let bytes = values.iter().flat_map(|x| match wide {
            true => x.to_ne_bytes().to_vec(),
            false => (*x as i32).to_ne_bytes().to_vec(),
        });
        let bytes: Vec<u8> = bytes.collect();
        match self.arrays.get_mut(name) {
            Some(there) => there.copy_from_slice(&bytes),
            None => drop(self.arrays.insert(name, bytes)),
        }
    }

    /// Lengths of a kind: all equal, one giant, nothing at all, few, or anything.
    fn lengths(&self, rng: &mut StdRng) -> Vec<[usize; 2]> {
        let [rows, keys] = self.most;
        let (kind, giant) = (rng.random_range(0..6), rng.random_range(0..self.batch));
        let equal = [rng.random_range(0..=rows), rng.random_range(0..=keys)];
        let one = |b: usize, rng: &mut StdRng| match kind {
            0 => equal,
            1 if b == giant => [rows, keys],
            1 => [rng.random_range(0..=1), rng.random_range(0..=2)],
            2 => [rng.random_range(0..=rows), 0],
            3 => [0, rng.random_range(0..=keys)],
            _ => [rng.random_range(0..=rows), rng.random_range(0..=keys)],
        };
        (0..self.batch).map(|b| one(b, rng)).collect()
    }

    /// Draws a mix and writes its lengths, tables and keys; poisons everything else.
    fn draw(&mut self, rng: &mut StdRng) -> Mix {
        let (n, lengths) = (self.batch, self.lengths(rng));
        let sums = |first: usize, of: &dyn Fn(usize) -> usize| -> Vec<i64> {
            (0..=n).map(|i| (first + (0..i).map(of).sum::<usize>()) as i64).collect()
        };
        let rows: Vec<i64> = match self.packed_q {
            true => sums(0, &|b| lengths[b][0]),
            false => (0..n).map(|b| (b * self.most[0]) as i64).collect(),
        };
        match self.packed_q {
            true => self.put("q_begin", &rows),
            false => self.put("q_lengths", &lengths.iter().map(|l| l[0] as i64).collect::<Vec<_>>()),
        }
        let keys_of: Vec<i64> = lengths.iter().map(|l| l[1] as i64).collect();
        let used = |b: usize| lengths[b][1].div_ceil(self.page);
        let (page, width) = (self.page, self.width);
        let mut order: Vec<usize> = (0..self.pages).collect();
        order.shuffle(rng);
        let nobody = [-1, i64::from(i32::MIN), i64::from(i32::MAX), self.pages as i64];
        // Identifiers of each sequence's pages; now and then one of no page.
        let holes = rng.random_bool(0.2);
        let ids: Vec<Vec<i64>> = (0..n)
            .map(|b| {
                let own = order.iter().skip(b * width).take(used(b)).map(|id| *id as i64);
                own.map(|id| if holes && rng.random_bool(0.1) { *nobody.choose(rng).unwrap() } else { id }).collect()
            })
            .collect();
        let shared = self.place == Place::Slots && rng.random_bool(0.2);
        let there = |id: i64, token: usize| (0..self.pages as i64).contains(&id).then_some((id as usize, token));
        let keys: Vec<Vec<Option<(usize, usize)>>> = match self.place {
            Place::Packed => {
                let begins = sums(rng.random_range(0..=3), &|b| lengths[b][1]);
                let keys = (0..n).map(|b| (0..lengths[b][1]).map(|t| Some((0, begins[b] as usize + t))).collect());
                let keys = keys.collect();
                self.put("kv_begin", &begins);
                keys
            }
            Place::Slots => {
                let pads: Vec<usize> = (0..n).map(|_| rng.random_range(0..=4)).collect();
                // Each its own, or the same for all.
                let slots: Vec<i64> = (0..n).map(|b| order[if shared { 0 } else { b }] as i64).collect();
                let of = |b: usize| (0..lengths[b][1]).map(|t| there(slots[b], pads[b] + t)).collect();
                let keys = (0..n).map(of).collect();
                self.put("slots", &slots);
                self.put("left_pad", &pads.iter().map(|p| *p as i64).collect::<Vec<_>>());
                // Of a sequence without keys there may be less than its padding.
                let length = |b: usize, rng: &mut StdRng| match keys_of[b] {
                    0 => rng.random_range(0..=pads[b] as i64),
                    keys => pads[b] as i64 + keys,
                };
                let lengths: Vec<i64> = (0..n).map(|b| length(b, rng)).collect();
                self.put("kv_lengths", &lengths);
                keys
            }
            Place::Table | Place::Csr => {
                let of = |b: usize| (0..lengths[b][1]).map(|t| there(ids[b][t / page], t % page)).collect();
                let keys = (0..n).map(of).collect();
                let mut table = Vec::new();
                if self.place == Place::Table {
                    for row in &ids {
                        table.extend(row);
                        table.extend((row.len()..width).map(|_| *nobody.choose(rng).unwrap()));
                    }
                    self.put("kv_lengths", &keys_of);
                } else {
                    let first = rng.random_range(0..=n.min(3));
                    table.extend((0..first).map(|_| *nobody.choose(rng).unwrap()));
                    ids.iter().for_each(|row| table.extend(row));
                    let begins = sums(first, &used);
                    let last = |b: usize| if keys_of[b] == 0 { 0 } else { (keys_of[b] - 1) % page as i64 + 1 };
                    let last: Vec<i64> = (0..n).map(last).collect();
                    self.put("pages_begin", &begins);
                    self.put("last_page", &last);
                }
                table.resize(n * width + 3, *nobody.choose(rng).unwrap());
                self.put("table", &table);
                keys
            }
        };
        let b = rng.random_range(0..n);
        let infinite =
            (!shared && lengths[b][1] > 0 && rng.random_bool(0.2)).then(|| (b, rng.random_range(0..lengths[b][1])));
        let mix = Mix { rows: rows.iter().take(n).map(|r| *r as usize).collect(), lengths, keys, infinite };
        self.fill(&mix);
        mix
    }

    /// NaN wherever there is no key, and in keys that no row attends to.
    fn fill(&mut self, mix: &Mix) {
        let token = KV_HEADS * DIM;
        for (store, pool) in self.store.iter_mut().zip(&self.pool) {
            store.fill(f32::NAN);
            for (b, keys) in mix.keys.iter().enumerate() {
                let [rows, kv_len] = mix.lengths[b].map(|n| n as u64);
                let seen = (0..rows).map(|i| self.mask.live(i, rows, kv_len)).filter(|live| !live.is_empty());
                let seen = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
                for (page, t) in keys[seen.start as usize..seen.end as usize].iter().flatten() {
                    let at = (page * self.page + t) * token;
                    store[at..at + token].copy_from_slice(&pool[at..at + token]);
                }
            }
        }
        if let Some((b, t)) = mix.infinite
            && let Some((page, t)) = mix.keys[b][t]
        {
            self.store[1][(page * self.page + t) * token..][..token].fill(f32::INFINITY);
        }
        for out in [&mut self.o, &mut self.lse] {
            out.fill(f32::from_bits(u32::MAX));
        }
    }

    fn launch(&self, device: &CpuDevice, module: &dyn Module, plan: &LaunchPlan) {
        // SAFETY: the arguments name memory of this call, of the sizes that they say.
        unsafe { device.launch(module, plan, Args::Ragged(&self.args), Stream(0)).unwrap() }
    }

    /// Every row against fp64, and that no other was written.
    fn compare(&self, mix: &Mix) -> Result<(), String> {
        let mut written = vec![false; self.lse.len()];
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
        for (b, &[rows, kv_len]) in mix.lengths.iter().enumerate() {
            for (i, h) in (0..rows).flat_map(|i| (0..HEADS).map(move |h| (i, h))) {
                let at = (mix.rows[b] + i) * HEADS + h;
                written[at] = true;
                let live = self.mask.live(i as u64, rows as u64, kv_len as u64);
                let head = h / (HEADS / KV_HEADS);
                let mut o = [0.0; DIM];
                let mut sum = 0.0;
                for (page, token) in mix.keys[b][live.start as usize..live.end as usize].iter().flatten() {
                    let key = ((page * self.page + token) * KV_HEADS + head) * DIM;
                    let score = dot(&self.q[at * DIM..][..DIM], &self.pool[0][key..][..DIM]);
                    let weight = (score * f64::from(self.args.scale)).exp();
                    sum += weight;
                    o.iter_mut().zip(&self.pool[1][key..]).for_each(|(o, v)| *o += weight * f64::from(*v));
                }
                let (want, lse) = match sum {
                    0.0 => (o, f64::from(LSE_EMPTY)),
                    _ => (o.map(|x| x / sum), sum.ln()),
                };
                let found = &self.o[at * DIM..][..DIM];
                let sees = |(of, t): (usize, usize)| of == b && (live.start..live.end).contains(&(t as u64));
                let infinite = mix.infinite.is_some_and(|(of, t)| sees((of, t)) && mix.keys[b][t].is_some());
                let far = |found: f32, want: f64| !matches!((f64::from(found) - want).abs(), 0.0..2e-5);
                if infinite && found.iter().any(|x| x.is_finite()) {
                    return Err(format!("sequence {b}, row {i}, head {h}: O is {found:?} beside an infinite V"));
                }
                if let Some(d) = (0..DIM).find(|&d| !infinite && far(found[d], want[d])) {
                    return Err(format!("sequence {b}, row {i}, head {h}: O[{d}] is {}, not {}", found[d], want[d]));
                }
                if far(self.lse[at], lse) {
                    return Err(format!("sequence {b}, row {i}, head {h}: LSE is {}, not {lse}", self.lse[at]));
                }
            }
        }
        match (0..written.len()).find(|&r| !written[r] && self.lse[r].to_bits() != u32::MAX) {
            None => Ok(()),
            Some(row) => Err(format!("row {} of no sequence was written", row / HEADS)),
        }
    }
}

/// Runs mixes until one is wrong; `beat` hears of each before it is launched, and says whether anybody listens still.
fn mixes(
    count: usize,
    seed: u64,
    isa: CpuIsa,
    kind: MaskKind,
    templates: &TemplateSet,
    beat: &dyn Fn(String) -> bool,
) -> Result<(), String> {
    let device = CpuDevice::open().unwrap();
    let module = module(&device, &kernel(kind, isa), templates);
    let mut rng = StdRng::seed_from_u64(seed);
    for first in (0..count).step_by(REPLAYS) {
        let mut call = Call::random(&mut rng, kind);
        let plan = module.kernel().plan(&call.shape()).unwrap();
        let (place, mask) = (call.place, call.mask);
        for number in first..count.min(first + REPLAYS) {
            let mix = call.draw(&mut rng);
            let said = || format!("mix {number}, {:?}, {}, {:?}", place, mask, mix.lengths);
            if !beat(said()) {
                return Err(format!("{}: nobody waits for it", said()));
            }
            call.launch(&device, &*module, &plan);
            call.compare(&mix).map_err(|e| format!("{}: {e}", said()))?;
            if number % 10 == 0 {
                let bits = |call: &Call| call.o.iter().chain(&call.lse).map(|x| x.to_bits()).collect::<Vec<_>>();
                let before = bits(&call);
                call.fill(&mix);
                call.launch(&device, &*module, &plan);
                if bits(&call) != before {
                    return Err(format!("{}: not the same bytes in two launches", said()));
                }
            }
        }
    }
    Ok(())
}

/// The same beside a clock: a launch that takes longer than the limit is told, and left behind with its thread, which
/// launches no other: those would take the cores from all tests that follow.
fn watched(
    limit: Duration,
    count: usize,
    seed: u64,
    isa: CpuIsa,
    kind: MaskKind,
    templates: &TemplateSet,
) -> Result<(), String> {
    let (send, receive) = mpsc::channel();
    let (heard, templates) = (send.clone(), templates.clone());
    std::thread::spawn(move || {
        let outcome = mixes(count, seed, isa, kind, &templates, &|at| heard.send(Ok(at)).is_ok());
        drop(send.send(Err(outcome)));
    });
    let mut last = "compiling".to_owned();
    loop {
        // Compiling is no launch.
        let limit = if last == "compiling" { limit + Duration::from_secs(300) } else { limit };
        match receive.recv_timeout(limit) {
            Ok(Ok(at)) => last = at,
            Ok(Err(outcome)) => return outcome,
            Err(RecvTimeoutError::Timeout) => return Err(format!("{last}: no end after {limit:?}")),
            Err(RecvTimeoutError::Disconnected) => return Err(format!("{last}: a panic")),
        }
    }
}

const KINDS: [MaskKind; 2] = [MaskKind { left: false, right: true }, MaskKind { left: true, right: true }];

#[test]
fn random_mixes_through_calls_that_are_made_once() {
    let count = std::env::var("FLASHTUNE_MIXES").map_or(1000, |n| n.parse().expect("a number of mixes"));
    for (n, kind) in KINDS.into_iter().enumerate() {
        let others: Vec<CpuIsa> = CpuIsa::ALL.into_iter().filter(|isa| *isa <= isa::host()).rev().collect();
        let isa = others[n % others.len()];
        let outcome = watched(Duration::from_secs(60), count / 2, 7 + n as u64, isa, kind, &TemplateSet::embedded());
        assert_eq!(outcome, Ok(()), "{isa:?}");
    }
}

/// Tiles are found from all lengths: nothing of that may grow as their square.
#[test]
fn time_grows_with_the_number_of_short_sequences() {
    let (device, rng) = (CpuDevice::open().unwrap(), &mut StdRng::seed_from_u64(38));
    let module = module(&device, &kernel(KINDS[0], isa::host()), &TemplateSet::embedded());
    let mut time = |batch| {
        let mut call = Call::new(rng, KINDS[0], Place::Table, batch, [1, 40]);
        let plan = module.kernel().plan(&call.shape()).unwrap();
        let mix = call.draw(rng);
        let once = |call: &Call| {
            let start = std::time::Instant::now();
            call.launch(&device, &*module, &plan);
            start.elapsed()
        };
        let best = (0..10).map(|_| once(&call)).min().unwrap();
        call.compare(&mix).unwrap();
        best
    };
    let (few, many) = (time(512), time(8192));
    // 16 times as many: their square would be 256 times as much.
    assert!(many < 64 * few, "512 sequences in {few:?}, 8192 in {many:?}");
}

/// What is wrong, the file of the templates, the text in it, what is put in its place, and words of the verdict.
type Fault = [&'static str; 5];

const FAULTS: &[Fault] = &[
    ["one key too many", "lib/cpu/ragged.h", "args->window_right + 1)", "args->window_right + 2)", " is "],
    [
        "one key before the window",
        "lib/cpu/ragged.h",
        "s->q_len - args->window_left)",
        "s->q_len - 1 - args->window_left)",
        " is ",
    ],
    [
        "keys of no page are those of the first",
        "lib/cpu/ragged.h",
        "id < args->pages ? id : -1;",
        "id < args->pages ? id : 0;",
        " is ",
    ],
    [
        "rows behind the used ones",
        "lib/cpu/ragged.h",
        "if (args->q_lengths) s.q_len =",
        "if (0) s.q_len =",
        "was written",
    ],
    ["padding is read", "lib/cpu/ragged.h", "if (args->left_pad) {", "if (0) {", " is "],
    ["full last pages", "lib/cpu/ragged.h", "args->last_page ?", "0 ?", " is "],
    [
        "64 bits read as 32",
        "lib/cpu/lengths.h",
        "if (words == 1) return array[i];",
        "return array[i];",
        " is |was written",
    ],
    ["ranges weigh the same", "lib/cpu/ranges.h", "exp2_of(second - reference)};", "vf_set1(1)};", " is "],
    [
        "the last range is left out",
        "lib/cpu/ranges.h",
        "max64((keys + chunk - 1) / chunk, 1)",
        "max64(keys / chunk, 1)",
        " is ",
    ],
    [
        "NaN of keys that are masked",
        "lib/cpu/ragged.h",
        "if (stored_special(keys->v[j]",
        "if (0 && stored_special(keys->v[j]",
        " is ",
    ],
    [
        "a launch that does not end",
        "forward/cpu_ragged.c",
        "    Scratch *scratch = memory;\n",
        "    Scratch *scratch = memory;\n    for (volatile uint64_t i = 0; range == 0 && i < 1ull << 33; i++);\n",
        "no end after",
    ],
];

/// Mixes that let these pass, or see something else in them, are no judge.
#[test]
fn planted_faults_are_seen_by_random_mixes() {
    let templates = TemplateSet::embedded();
    let files: BTreeMap<&str, &str> = templates.files().collect();
    let mut missed = Vec::new();
    for (number, [what, file, from, to, words]) in FAULTS.iter().enumerate() {
        let text = files[file];
        assert!(text.contains(from), "{what}: {file} has no `{from}` any more: say how to break it now");
        let broken = [((*file).to_owned(), text.replace(from, to))];
        let all = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).chain(broken);
        let set = TemplateSet::from_files(all.collect()).expect("templates that parse");
        // Windows leave few keys, which are not split.
        let kind = KINDS[usize::from(what.contains("window"))];
        let seen = watched(Duration::from_secs(1), 800, number as u64, isa::host(), kind, &set);
        let seen = seen.err().unwrap_or_default();
        println!("{what}: {seen}");
        if !words.split('|').any(|words| seen.contains(words)) {
            missed.push(format!("{what}: `{seen}`"));
        }
    }
    assert!(missed.is_empty(), "not seen as what they are:\n{}", missed.join("\n"));
}
