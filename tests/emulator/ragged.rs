//! Kernels of ragged batches on the emulated machine: every array ends where readable memory ends, NaN lies wherever
//! there is no key, and thread blocks come in any order.

use crate::cases::address;
use crate::faults::replaced;
use crate::machine::{self, Buffer, Emulated, Launch, map_bytes};
use crate::side::Side;
use crate::{DTYPES, PROGRAMS, search_with, setting, templates, try_recorded};
use flashtune::{DType, Distribution, Program};
use flashtune_codegen::{
    Arch, Constraint, Constraints, Family, Kernel, KvElement, KvKind, KvScales, KvStore, MaskKind, Problem, Purpose,
    SPLIT_COUNTER_BYTES, Schedule, ShapeBucket, Sm80RaggedSchedule, Sm90RaggedSchedule, TemplateSet, Tiling,
    abi::{ArgsLayout, RaggedArgs},
    ragged_unaddressable,
};
use flashtune_runtime::check::{Index, Most, Part, RaggedBatch, RaggedData, StoreLayout};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

/// The families, each with an arch for every path that its code has.
const FAMILIES: [(Family, &[&str]); 4] = [
    (Family::ForwardNaiveRagged, &["sm_75"]),
    (Family::ForwardSm80Ragged, &["sm_80", "sm_90a"]),
    (Family::ForwardSm90Ragged, &["sm_90a"]),
    (Family::ForwardSm90Fp8Ragged, &["sm_90a"]),
];

/// What a machine of two cores gets through.
pub const MOST: Most = Most { sequences: 4, rows: 40, keys: 300, heads: 8 };

/// A kernel of a family, of any legal problem: dims, store, mask, and a program if one is given.
fn random_kernel(rng: &mut StdRng, family: Family, arch: &str, program: Option<&str>) -> Kernel {
    const DIMS: [u32; 9] = [16, 40, 64, 72, 96, 128, 136, 192, 256];
    const ELEMENTS: [KvElement; 6] =
        [KvElement::Same, KvElement::Same, KvElement::Same, KvElement::E4m3, KvElement::E5m2, KvElement::Int8];
    let arch = arch.parse().expect("an arch");
    loop {
        let dim_qk = *DIMS.choose(rng).expect("not empty");
        let dim_v = if rng.random_bool(0.7) { dim_qk } else { *DIMS.choose(rng).expect("not empty") };
        let mask = *MaskKind::ALL.choose(rng).expect("not empty");
        let dtype = match rng.random_range(0..10) {
            0 => DType::F32,
            1 | 2 => DType::E4m3,
            _ => *DTYPES.choose(rng).expect("not empty"),
        };
        let element = *ELEMENTS.choose(rng).expect("not empty");
        let output = match dtype {
            DType::E4m3 if element == KvElement::Same => continue,
            DType::E4m3 => *DType::OUTPUTS_OF_E4M3.choose(rng).expect("not empty"),
            _ => dtype,
        };
        let per_token = element != KvElement::Same && rng.random();
        let store = KvStore {
            element,
            scales: if per_token { KvScales::PerToken } else { KvScales::PerHead },
            v_columns: rng.random_bool(0.15),
        };
        let mut problem = Problem::forward_qk_v(dtype, dim_qk, dim_v, mask).expect("a legal problem");
        problem = problem.with_output(output).with_kv(KvKind::Ragged(store));
        if let Some(text) = program {
            problem = problem.with_program(Program::parse(text).expect("a program"));
        }
        let step = ShapeBucket { parallel: 16, group: 4, q_len: 1, kv_len: 512, ..Default::default() };
        let bucket = match family.prefers(&problem, &step) {
            true => step,
            false => ShapeBucket { q_len: if rng.random() { 8 } else { 512 }, ..step },
        };
        let Ok(default) = Schedule::default_for(family, &problem, arch, &bucket) else { continue };
        let space = Schedule::space(family, &problem, arch);
        let schedule = if rng.random_bool(0.3) { default } else { *space.choose(rng).unwrap_or(&default) };
        let kernel = Kernel { problem, schedule, arch };
        if kernel.check().is_ok() {
            return kernel;
        }
    }
}

/// The program with a number, or the next one that the family takes.
fn program_for(family: Family, arch: &str, number: usize) -> &'static str {
    let takes = |text: &&str| {
        let e4m3 = KvKind::Ragged(KvStore { element: KvElement::E4m3, ..KvStore::default() });
        [(DType::Bf16, KvKind::RAGGED), (DType::E4m3, e4m3)].into_iter().any(|(dtype, kv)| {
            let plain = Problem::forward(dtype, 64, MaskKind::FULL).expect("a legal problem").with_kv(kv);
            let problem = plain.with_program(Program::parse(text).expect("a program"));
            family.supports(&problem, arch.parse().expect("an arch")).is_ok()
        })
    };
    let mut programs = (0..PROGRAMS.len()).map(|i| PROGRAMS[(number + i) % PROGRAMS.len()]);
    programs.find(takes).expect("the family takes some program")
}

/// The templates with pieces of tiles that cost `forward/sm90_ragged` nothing: it splits the machine's short sequences,
/// too.
pub fn free_pieces(templates: &TemplateSet) -> TemplateSet {
    const TABLE: &str = "forward/sm90_ragged/table.cuh";
    let set = replaced(templates, TABLE, "float(@{ piece_keys }@)", "0.0f * float(@{ piece_keys }@)");
    replaced(&set, TABLE, "float(@{ merged_keys }@)", "0.0f * float(@{ merged_keys }@)")
}

/// Batches that a kernel has computed, by what they had.
#[derive(Debug, Default, Clone)]
pub struct Reached {
    /// Pieces of tiles, or of the keys of a batch, were left in scratch memory.
    pub split: u64,
    /// Keys in pages.
    pub in_pages: u64,
    /// Last pages in part filled.
    pub part_of_page: u64,
    /// Keys of no page.
    pub holes: u64,
    /// Tokens of their pages.
    pub page_tokens: BTreeSet<u32>,
}

impl Reached {
    fn count(&mut self, batch: &RaggedBatch, split: bool) {
        self.split += u64::from(split);
        if !matches!(batch.index, Index::Table | Index::Csr) {
            return;
        }
        let seen = || batch.lengths.iter().filter(|[rows, keys]| *rows > 0 && *keys > 0);
        if seen().count() == 0 {
            return;
        }
        self.in_pages += 1;
        self.holes += u64::from(batch.holes);
        self.part_of_page += u64::from(seen().any(|[_, keys]| keys % batch.page_tokens != 0));
        self.page_tokens.insert(batch.page_tokens);
    }
}

/// Runs batches on a kernel. What goes wrong comes back with what is needed to see it again.
pub fn try_ragged(
    kernel: &Kernel,
    templates: &TemplateSet,
    batches: u64,
    seed: u64,
    batch: impl Fn(&mut StdRng) -> RaggedBatch,
) -> Result<Reached, String> {
    let mut reached = Reached::default();
    let mut emulated = Emulated::build(kernel, templates).map_err(|e| format!("{}: {e}", kernel.name()))?;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut tried = 0;
    while tried < batches {
        let batch = batch(&mut rng);
        let data = RaggedData::new(&kernel.problem, &batch).map_err(|e| format!("{batch}: {e}"))?;
        if kernel.schedule.family().purpose() == Purpose::Fast && !data.is_aligned() {
            continue;
        }
        // TMA takes packs, slots, and pages of a multiple of 16 tokens.
        let strided = ragged_unaddressable(&kernel.problem, &data.args(|_| 1 << 32)).is_some();
        if kernel.schedule.family().unmet(Constraints::NONE.with_if(Constraint::Strided, strided)).is_some() {
            continue;
        }
        tried += 1;
        // Shares of the keys follow from the number of multiprocessors, and bits from the shares.
        let units = rng.random_range(1..=5);
        let mut first = None;
        for late in [false, true] {
            let seed = rng.random();
            let (written, split) = run(&data, kernel, &mut emulated, seed, units, late)
                .map_err(|e| format!("{} on {units} units, seed {seed}, {{{batch}}}: {e}", kernel.name()))?;
            if first.as_ref().is_some_and(|(first, _)| *first != written) && data.is_finite() {
                return Err(format!("{} {{{batch}}}: not the same bits in two runs", kernel.name()));
            }
            first = Some((written, split));
        }
        reached.count(&batch, first.is_some_and(|(_, split)| split));
    }
    Ok(reached)
}

/// One launch on so many multiprocessors, of inputs that the launch before still writes if they are `late`; returns O
/// and the log-sum-exp, and whether scratch memory was left partial results.
fn run(
    data: &RaggedData,
    kernel: &Kernel,
    emulated: &mut Emulated,
    seed: u64,
    units: u32,
    late: bool,
) -> Result<(Vec<u8>, bool), String> {
    let shape = data.shape();
    if shape.is_empty() {
        return Ok((Vec::new(), false));
    }
    let parts: Vec<Part> = data.parts().keys().copied().collect();
    let mut memory: Vec<Vec<u8>> = data.parts().values().cloned().collect();
    let number = |part| parts.iter().position(|p| *p == part).expect("it is there");
    let args = data.args(|part| address(number(part) as u64, memory[number(part)].len()));
    let mut side = Side::default();
    if let Some(program) = kernel.problem.program {
        side = Side::new(&program, shape, data.side(), parts.len() as u64)?;
    }
    let plan = kernel.plan(shape).map_err(|e| e.to_string())?;
    let main = *plan.main().ok_or("nothing to launch")?;
    let blocks = main.blocks(units);
    // Counters of zero, and behind them what nobody may rely on.
    let bytes = plan.split_keys(units).unwrap_or(0) as usize;
    let counters = bytes.min(SPLIT_COUNTER_BYTES as usize);
    let mut scratch = vec![0u8; counters];
    scratch.resize(bytes, 0xff);
    let scratch_at = address((parts.len() + side.tensors.len()) as u64, scratch.len());
    let args = RaggedArgs { scratch: if scratch.is_empty() { 0 } else { scratch_at }, ..args };
    // Without dropout they end before its fields.
    let known = &bytemuck::bytes_of(&args)[..ArgsLayout::of(kernel).forward as usize];
    let mapped = plan.tiling.map(|tiling| -> Result<Vec<u8>, String> {
        let (maps, box_keys) = kernel.ragged_tensor_maps(&tiling, &args).ok_or("no tensor maps")?;
        let mut bytes: Vec<u8> = maps.iter().flat_map(map_bytes).collect();
        bytes.extend_from_slice(known);
        let Tiling { group_shift, unit_heads, blocks, leading, section, tiles } = tiling;
        let numbers = [group_shift, unit_heads, blocks, leading, section, tiles, (seed % 3) as i32 - 1, box_keys];
        bytes.extend(numbers.into_iter().flat_map(i32::to_ne_bytes));
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        Ok(bytes)
    });
    let mut table = std::mem::take(&mut side.table);
    if mapped.is_some() {
        table.resize(table.len().next_multiple_of(64), 0);
    }
    let launch = Launch {
        seed,
        stage: 0,
        prelude: ([0; 2], [0; 2]),
        grid: blocks,
        threads: main.threads,
        smem_bytes: main.smem_bytes,
        args: mapped.transpose()?.unwrap_or_else(|| known.to_vec()),
        any_order: true,
        late: late && main.starts_early && matches!(kernel.arch, Arch::Sm(sm) if sm.number >= 90),
        hopper: None,
        side: table,
    };
    let own = memory.iter_mut().zip(&parts).map(|(bytes, part)| (&mut bytes[..], part.is_written()));
    let tables = side.tensors.iter_mut().map(|bytes| (&mut bytes[..], false));
    let mut buffers: Vec<Buffer> = (own.chain(tables).chain([(&mut scratch[..], true)]).enumerate())
        .map(|(i, (bytes, written))| Buffer { address: address(i as u64, bytes.len()), bytes, written })
        .collect();
    emulated.run(&launch, &mut buffers)?;
    if let Some(left) = scratch[..counters].iter().position(|x| *x != 0) {
        return Err(format!("byte {left} of the scratch memory's counters is left at {}", scratch[left]));
    }
    let lse = parts.contains(&Part::Lse).then(|| &memory[number(Part::Lse)][..]);
    let o = &memory[number(Part::O)];
    let (verdict, stray) = data.compare(o, lse);
    match stray {
        _ if !verdict.passed() => Err(verdict.to_string()),
        Some(stray) => Err(stray),
        None => Ok(([&o[..], lse.unwrap_or_default()].concat(), scratch[counters..].iter().any(|x| *x != 0xff))),
    }
}

/// Every second kernel of a family with a score program, and some with pieces of tiles that cost nothing.
/// `EMULATE_FAMILY` is the only family that is tried, by its name.
#[test]
fn ragged_batches() {
    let only = std::env::var("EMULATE_FAMILY").ok();
    let families = FAMILIES.iter().filter(|(family, _)| only.as_ref().is_none_or(|name| family.name() == name));
    let paths: Vec<(Family, &str)> = families.flat_map(|(f, archs)| archs.iter().map(|arch| (*f, *arch))).collect();
    assert!(!paths.is_empty(), "EMULATE_FAMILY is none of {FAMILIES:?}");
    let templates = templates();
    let free = free_pieces(&templates);
    search_with(4 * paths.len() as u64, |number| {
        let mut rng = StdRng::seed_from_u64(5000 + number);
        let (family, arch) = paths[number as usize % paths.len()];
        let turn = number / paths.len() as u64;
        let program = turn.is_multiple_of(2).then(|| program_for(family, arch, number as usize * 11));
        let kernel = random_kernel(&mut rng, family, arch, program);
        let batches = setting("EMULATE_CASES").unwrap_or(6);
        let set = if turn % 4 < 2 { &templates } else { &free };
        let random = |rng: &mut StdRng| {
            let mut batch = RaggedBatch::random(&kernel.problem, MOST, rng.random());
            if rng.random_bool(0.3) {
                let [q_len, kv_len] = batch.lengths[0];
                batch.lengths.fill([q_len, kv_len]);
            }
            batch
        };
        try_ragged(&kernel, set, batches, number, random).map(drop)
    });
}

/// Thread blocks find their ranges where a thread has several sequences to sum up, which wait for the launch before,
/// and where it has one, which do not.
#[test]
fn sequences_are_more_than_threads() {
    if !machine::has_compiler() {
        return;
    }
    let arch = "sm_90a".parse().expect("an arch");
    try_recorded(0..1, Duration::MAX, |number| {
        let problem = Problem::forward(DType::Bf16, 64, MaskKind::CAUSAL).expect("legal").with_kv(KvKind::RAGGED);
        // 32 threads.
        let schedule = Schedule::Sm80Ragged(Sm80RaggedSchedule {
            rows_per_warp: 16,
            row_warps: 1,
            key_warps: 1,
            block_kv: 16,
            stages: 2,
            blocks_per_sm: 4,
        });
        let kernel = Kernel { problem, schedule, arch };
        let many = |rng: &mut StdRng| {
            let most = Most { sequences: 100, rows: 2, keys: 40, heads: 4 };
            let mut batch = RaggedBatch::random(&problem, most, rng.random());
            let sequences = rng.random_range(20..=100);
            let lengths = batch.lengths.clone();
            batch.lengths = lengths.into_iter().cycle().take(sequences).collect();
            batch
        };
        try_ragged(&kernel, &templates(), 8, 500 + number, many).map(drop)
    });
}

/// What `forward/sm90_ragged` has beside dense tensors is there in what the machine runs: tiles in pieces, pages of
/// several sizes with a last one in part filled, keys of no page, and few rows, for which one warpgroup is enough.
#[test]
fn hopper_tiles_are_split_and_pages_end_anywhere() {
    if !machine::has_compiler() {
        return;
    }
    let (free, arch) = (free_pieces(&templates()), "sm_90a".parse().expect("an arch"));
    let all = Mutex::new(Vec::new());
    // Defaults for the drafts of a decoder, and for chunks of a prompt.
    let kernels = [(64, 8, 12, 1), (128, 512, 40, 2)];
    try_recorded(0..2, Duration::MAX, |number| {
        let (dim, q_len, rows, consumers) = kernels[number as usize];
        let problem = Problem::forward(DType::Bf16, dim, MaskKind::FULL).expect("legal").with_kv(KvKind::RAGGED);
        let bucket = ShapeBucket { parallel: 16, group: 4, q_len, kv_len: 512, ..Default::default() };
        let schedule = Schedule::default_for(Family::ForwardSm90Ragged, &problem, arch, &bucket).expect("supported");
        let Schedule::Sm90Ragged(Sm90RaggedSchedule(sm90)) = schedule else { panic!("{schedule}") };
        assert_eq!((sm90.consumers, sm90.chain), (consumers, false), "{schedule}");
        let kernel = Kernel { problem, schedule, arch };
        let paged = |rng: &mut StdRng| {
            let most = Most { sequences: 2, rows, heads: 4, ..MOST };
            let mut batch = RaggedBatch::random(&problem, most, rng.random());
            // One sequence of several key blocks at least.
            batch.lengths[0] = [batch.lengths[0][0].max(1), rng.random_range(257..=300)];
            let page_tokens = *[16, 48, 64, 256].choose(rng).expect("not empty");
            let holes = rng.random_bool(0.3);
            RaggedBatch { index: Index::Table, layout: StoreLayout::Hnd, left_pad: false, page_tokens, holes, ..batch }
        };
        let reached = try_ragged(&kernel, &free, 7, 300 + number, paged)?;
        all.lock().expect("no panic").push(reached);
        Ok(())
    });
    for reached in all.into_inner().expect("no panic") {
        let Reached { split, in_pages, part_of_page, holes, page_tokens } = &reached;
        assert!(*split >= 2 && *in_pages == 7 && *part_of_page >= 4 && *holes >= 1, "{reached:?}");
        assert!(page_tokens.len() >= 3, "{reached:?}");
    }
}

/// Small scores under a large cap: what a tanh is wrong by is multiplied with the cap, and in a row of one key nothing
/// hides it from the log-sum-exp.
#[test]
fn small_scores_under_a_large_cap_keep_their_digits() {
    let text = "score = 60.0 * tanh(score * (1.0 / 60.0));";
    let plain = Problem::forward(DType::F32, 16, MaskKind::FULL).expect("legal").with_kv(KvKind::RAGGED);
    let problem = plain.with_program(Program::parse(text).expect("a program"));
    let arch = "sm_75".parse().expect("an arch");
    let schedule = Schedule::default_for(Family::ForwardNaiveRagged, &problem, arch, &ShapeBucket::default());
    let kernel = Kernel { problem, schedule: schedule.expect("supported"), arch };
    let one_key = |rng: &mut StdRng| {
        let batch = RaggedBatch::random(&problem, MOST, rng.random());
        RaggedBatch { lengths: vec![[1, 1]; 4], values: Distribution::Normal, scale: Some(0.1), ..batch }
    };
    try_recorded(0..1, Duration::MAX, |_| try_ragged(&kernel, &templates(), 12, 77, one_key).map(drop));
}
