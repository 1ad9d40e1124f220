//! Faults that are planted in the templates, each of which the machine or the comparison with the oracle must see, and
//! see as what it is. A fault whose text is not in the templates any more fails the test: it has to be planted anew.

mod backward_sm90;
mod programs;
mod quantise;
mod ragged;
mod sm75;
mod sm80;
pub mod sm80_f32;
mod sm89_fp8;
mod sm90;
mod sm90_fp8;
mod sm90_fp8_ragged;
mod sm90_ragged;

use crate::cases::Case;
use crate::pads::try_pads;
use crate::{machine, planted, templates, try_each, try_kernel};
use flashtune::{DType, Distribution, Layout, Mask};
use flashtune_codegen::score::{Program, ProgramRef};
use flashtune_codegen::{
    Family, Kernel, MaskKind, Precision, Problem, Schedule, Sm80Instructions, Sm80Schedule, Sm90Schedule,
    Sm90Scheduler, Swizzle, TemplateSet, TileOrder,
};
use programs::{ANYWHERE, BESIDE, BIAS, BIASES, DENSE, DENSE_MASK, DOCUMENTS, LISTS, RAMP, RAMPS, RUNS};
use rand::Rng;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What is wrong, the file of the templates, the text in it, what is put in its place, and
/// words of which the verdict has one.
type Fault = [&'static str; 5];

/// Several tiles per thread block, masked blocks on both sides, rows without any key, non-finite values.
const CASE: Case = Case {
    sizes: [1, 4, 2, 130, 200],
    mask: Mask::Window { left: Some(60), right: Some(20) },
    layout: Layout::Bhsd,
    values: Distribution::Normal,
    scale: None,
    lse: true,
    bad: [0, 6, 0],
    below: 0.0,
    seed: 0,
};
/// More queries than keys: the first ones see none.
const EMPTY_ROWS: Case = Case { sizes: [1, 4, 2, 200, 90], ..CASE };

/// Blocks that all rows see, with scores of which the exponential is nothing.
const FAR_BELOW_ZERO: Case =
    Case { sizes: [1, 4, 2, 130, 300], mask: Mask::Window { left: Some(1000), right: Some(20) }, below: 40.0, ..CASE };

/// O takes the place of V where it fits.
fn sm90_schedule(family: &str, what: &str) -> Schedule {
    Schedule::Sm90(Sm90Schedule {
        consumers: 2,
        block_kv: match family {
            "dense" => 128,
            _ if what.contains("place of V") || family == "bias" => 64,
            _ => 32,
        },
        stages: 2,
        overlap: true,
        take_turns: true,
        masked_loop: true,
        pack_group: family == "sm90",
        trim: what.contains("trimmed"),
        scheduler: Sm90Scheduler::Stride,
        chain: what.contains("chained"),
        output_apart: what.contains(", apart"),
        bias_stages: if family == "bias" { 2 } else { 0 },
        blocks_per_sm: 1,
        section_mib: 0,
        ..Sm90Schedule::default()
    })
}

fn sm80_schedule(what: &str) -> Schedule {
    Schedule::Sm80(Sm80Schedule {
        warps: 2,
        rows_per_warp: 16,
        block_kv: 32,
        stages: if what.contains("one buffer") { 1 } else { 2 },
        q_in_registers: what.contains("Q in registers"),
        swizzle: Swizzle::Xor,
        blocks_per_sm: 1,
        lazy_rescale: false,
        masked_loop: true,
        order: TileOrder::HeadMajor,
        instructions: Sm80Instructions::Ampere,
    })
}

/// The templates with a text in one of them replaced, which it must have.
pub fn replaced(templates: &TemplateSet, file: &str, from: &str, to: &str) -> TemplateSet {
    let files: BTreeMap<&str, &str> = templates.files().collect();
    let text = files[file];
    assert!(text.contains(from), "{file} has no `{from}` any more: say what stands for it now");
    let changed = BTreeMap::from([(file.to_owned(), text.replace(from, to))]);
    let others = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
    TemplateSet::from_files(others.chain(changed).collect()).expect("templates that parse")
}

/// By its name (FNV-1a), so that a fault that is added changes no other's cases.
fn seed_of(what: &str) -> u64 {
    what.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The family whose kernels a list of faults is planted in.
fn family_of(list: &str) -> Family {
    match list {
        "backward_sm90" => Family::BackwardSm90,
        "append" => Family::AppendCuda,
        "pad" => Family::PadCuda,
        "quantise" => Family::QuantiseCuda,
        "lists" | "dense" | "runs" | "bias" | "ramp" => Family::ForwardSm90,
        "sm75" => Family::ForwardSm80,
        _ => Family::by_name(&format!("forward/{list}")).expect("a list has a family's name or one of those above"),
    }
}

/// What is said of a kernel with the fault in its templates; an empty text when nothing is.
fn verdict(set: &TemplateSet, family: &str, what: &str) -> String {
    let seed = seed_of(what);
    if family == "backward_sm90" {
        return crate::backward::verdict(set, seed, what);
    }
    if family == "sm90_ragged" {
        return sm90_ragged::verdict(set, seed, what);
    }
    if family == "sm90_fp8_ragged" {
        return sm90_fp8_ragged::verdict(set, seed, what);
    }
    if let "naive_ragged" | "sm80_ragged" | "append" = family {
        return ragged::verdict(family, set, seed, what);
    }
    if family == "quantise" {
        return quantise::verdict(set, seed, what);
    }
    if family == "pad" {
        return try_pads(&crate::pads::kernel(), set, 40, seed).err().unwrap_or_default();
    }
    let program = match family {
        "lists" => Some(ANYWHERE),
        "dense" => Some(if what.contains("beside") { BESIDE } else { DENSE_MASK }),
        "runs" => Some(DOCUMENTS),
        "bias" => Some(BIAS),
        "ramp" => Some(RAMP),
        _ => None,
    };
    let kind = match family {
        "lists" | "dense" | "runs" => MaskKind::FULL,
        _ => MaskKind { left: true, right: true },
    };
    let mut problem = Problem::forward_qk_v(DType::Bf16, 72, 72, kind).expect("legal");
    problem.program = program.map(|text| ProgramRef::new(Program::parse(text).expect("a program")));
    if family == "sm75" {
        problem.dtype = DType::F16;
    }
    if family == "sm89_fp8" || family == "sm90_fp8" {
        problem = sm90_fp8::problem(what);
    }
    if family == "sm80_f32" {
        (problem.dtype, problem.precision) = (DType::F32, Precision::Tf32x3);
    }
    let (schedule, arch) = match family {
        "sm80_f32" => (sm80_f32::schedule(what), "sm_80"),
        "sm90_fp8" => (sm90_fp8::schedule(what), "sm_90a"),
        "sm89_fp8" => (sm89_fp8::schedule(what), "sm_89"),
        "sm75" => (sm75::schedule(what), "sm_75"),
        "sm80" => (sm80_schedule(what), "sm_80"),
        _ => (sm90_schedule(family, what), "sm_90a"),
    };
    let kernel = Kernel { problem, schedule, arch: arch.parse().expect("an arch") };
    let base = match family {
        _ if what.contains("empty row") => EMPTY_ROWS,
        _ if family == "sm80_f32" => sm80_f32::case(what),
        _ if family == "sm90_fp8" || family == "sm89_fp8" => sm90_fp8::case(what),
        _ if what.contains("below zero") => FAR_BELOW_ZERO,
        // A row of biases is no multiple of 16 bytes.
        "bias" if what.contains("copied by threads") => Case { sizes: [1, 4, 2, 130, 199], ..CASE },
        // Rows of bools that begin anywhere, and on the grid of 16 bytes.
        "dense" if !what.contains("aligned") => Case { sizes: [1, 4, 2, 130, 299], mask: Mask::Full, ..CASE },
        "dense" => Case { sizes: [1, 4, 2, 130, 304], mask: Mask::Full, ..CASE },
        "lists" | "runs" => Case { mask: Mask::Full, ..CASE },
        _ => CASE,
    };
    let case = |rng: &mut rand::rngs::StdRng| Case { seed: rng.random(), ..base };
    let seen = try_kernel(&kernel, set, 40, seed, case).err().unwrap_or_default();
    seen.rsplit("}: ").next().unwrap_or_default().to_owned()
}

/// The machine is no judge if it lets these pass, nor if it sees them for something else. `EMULATE_FAMILY` is the only
/// list that is tried, by the name that it has here.
#[test]
fn planted_faults_are_seen_as_what_they_are() {
    if !machine::has_compiler() {
        return;
    }
    let templates = templates();
    let families = [
        ("sm90", sm90::SM90),
        ("lists", LISTS),
        ("dense", DENSE),
        ("runs", RUNS),
        ("bias", BIASES),
        ("ramp", RAMPS),
        ("sm80", sm80::SM80),
        ("sm75", sm75::SM75),
        ("sm80_f32", sm80_f32::SM80_F32),
        ("sm89_fp8", sm89_fp8::SM89_FP8),
        ("sm89_fp8", sm90_fp8::OUTPUT_FP8),
        ("sm90_fp8", sm90_fp8::SM90_FP8),
        ("sm90_fp8", sm90_fp8::OUTPUT_FP8),
        ("sm90_fp8_ragged", sm90_fp8_ragged::SM90_FP8_RAGGED),
        ("naive_ragged", ragged::NAIVE),
        ("sm80_ragged", ragged::SM80),
        ("sm90_ragged", sm90_ragged::SM90_RAGGED),
        ("append", ragged::APPENDS),
        ("pad", ragged::PADS),
        ("quantise", quantise::QUANTISE),
        ("backward_sm90", backward_sm90::BACKWARD_SM90),
    ];
    let only = std::env::var("EMULATE_FAMILY").ok();
    let all: Vec<(&str, &Fault)> = families
        .into_iter()
        .filter(|(family, _)| only.as_ref().is_none_or(|only| only == family))
        .flat_map(|(family, faults)| faults.iter().map(move |fault| (family, fault)))
        .collect();
    assert!(!all.is_empty(), "EMULATE_FAMILY is none of {:?}", families.map(|(family, _)| family));
    // Of all of them first: a text that an edit took away costs a second to learn, not the run.
    let files: BTreeMap<&str, &str> = templates.files().collect();
    let stale: Vec<String> = all
        .iter()
        .filter(|(_, [_, file, from, ..])| !files.get(file).is_some_and(|text| text.contains(from)))
        .map(|(family, [what, file, from, ..])| format!("{family}, {what}: {file} has no `{from}` any more"))
        .collect();
    assert!(stale.is_empty(), "say what stands for these now:\n{}", stale.join("\n"));
    try_each(0..all.len() as u64, Duration::MAX, |number| {
        let (family, fault) = all[number as usize];
        let [what, file, from, to, words] = *fault;
        let faulted = replaced(&templates, file, from, to);
        planted::unless_seen(family_of(family), &format!("{family}, {what}"), &faulted, || {
            let start = Instant::now();
            let seen = verdict(&faulted, family, what);
            let first = seen.lines().next().unwrap_or("NOT SEEN");
            println!("{:.1}s {family}, {what}: {first}", start.elapsed().as_secs_f32());
            // The machine's own breakdown is an answer only where it is the expected one.
            if !words.split('|').any(|words| seen.contains(words)) || seen.contains("error:") {
                return Err(format!("{family}, {what} is not seen as what it is: `{seen}`"));
            }
            Ok(())
        })
    });
}
