//! Dropout: kernels drop the scores that the definition says, by any schedule, and faults in it are seen.

use crate::backward::{Loaded, Machine, try_backward};
use crate::cases::Case;
use crate::faults::replaced;
use crate::{
    DTYPES, PROGRAMS, machine, planted, random_sm80, random_sm90, search_with, setting, templates, try_each, try_kernel,
};
use flashtune::{DType, Distribution, Layout, Mask, MaskKind, Problem, Shape};
use flashtune_codegen::{Arch, Family, Kernel, KvKind, Precision, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::check::{PackedBatch, Poison, RaggedBatch};
use flashtune_runtime::{BackwardCase, CheckInputs};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::time::Duration;

fn default_of(family: Family, problem: Problem, arch: &str) -> Kernel {
    let arch: Arch = arch.parse().expect("an arch");
    let bucket = ShapeBucket { parallel: 4, group: 2, q_len: 256, kv_len: 256, ..Default::default() };
    Kernel { problem, schedule: Schedule::default_for(family, &problem, arch, &bucket).expect("supported"), arch }
}

/// Kernels of the four families in turn, every third with a score program.
fn random_forward(number: u64) -> Kernel {
    let rng = &mut StdRng::seed_from_u64(number);
    let program = number.is_multiple_of(3).then(|| *PROGRAMS.choose(rng).expect("not empty"));
    let of = |dtype| Problem::forward_qk_v(dtype, 24, 40, MaskKind::ALL[number as usize / 5 % 4]).expect("legal");
    let kernel = match number % 5 {
        0 | 1 => random_sm90(rng, program),
        2 => random_sm80(rng, program),
        3 => default_of(Family::ForwardNaive, of(DTYPES[number as usize / 2 % 2]), "sm_80"),
        _ => {
            let problem = Problem { precision: Precision::Tf32x3, ..of(DType::F32) };
            default_of(Family::ForwardSm80F32, problem, "sm_80")
        }
    };
    let kernel = Kernel { problem: kernel.problem.with_dropout(true), ..kernel };
    if number % 5 == 1 { drawn(rng, kernel) } else { kernel }
}

/// The same problem by a schedule of the space that has warpgroups which draw.
fn drawn(rng: &mut StdRng, kernel: Kernel) -> Kernel {
    drawn_where(rng, kernel, |name| name.contains("draw"))
}

/// One whose name is so.
fn drawn_where(rng: &mut StdRng, kernel: Kernel, is_so: impl Fn(&str) -> bool) -> Kernel {
    let space = Schedule::space(Family::ForwardSm90, &kernel.problem, kernel.arch).into_iter();
    let of = |schedule| Kernel { schedule, ..kernel };
    let drawn: Vec<Kernel> = space.filter(|s| is_so(&s.to_string())).map(of).filter(|k| k.check().is_ok()).collect();
    *drawn.choose(rng).expect("not empty")
}

/// Two drawers of a problem, with blocks of so many keys.
fn two_drawers(rng: &mut StdRng, problem: Problem, block_kv: u32) -> Kernel {
    let kernel = default_of(Family::ForwardSm90, problem, "sm_90a");
    let keys = format!("-kv{block_kv}-");
    drawn_where(rng, kernel, |name| name.contains("draw2") && name.contains(&keys) && !name.contains("pack"))
}

fn case_of(sizes: [usize; 5], mask: Mask, seed: u64) -> Case {
    let (layout, values) = (Layout::Bhsd, Distribution::Normal);
    Case { sizes, mask, layout, values, scale: None, lse: true, bad: [0; 3], below: 0.0, seed }
}

#[test]
fn drawers_compute_what_blocks_have_in_common_at_once() {
    let templates = templates();
    search_with(6, |number| {
        let rng = &mut StdRng::seed_from_u64(number);
        let causal = number % 2 == 1;
        let mask = if causal { MaskKind::CAUSAL } else { MaskKind::FULL };
        let problem = Problem::forward(DTYPES[1], 64, mask).expect("legal").with_dropout(true);
        // Four, two and two blocks at once, of which a tile's last are fewer.
        let kernel = two_drawers(rng, problem, [64, 96, 128][number as usize / 2 % 3]);
        let mask = if causal { Mask::Causal } else { Mask::Full };
        try_kernel(&kernel, &templates, 1, number, |rng| case_of([1, 2, 2, 130, 330], mask, rng.random()))
    });
}

#[test]
fn forward_kernels_that_drop_scores() {
    let templates = templates();
    search_with(5, |number| {
        let kernel = random_forward(number);
        let cases = setting("EMULATE_CASES").unwrap_or(2);
        try_kernel(&kernel, &templates, cases, number, |rng| Case::random(&kernel, rng))
    });
}

/// Kernels of the three families in turn, dense and packed.
fn random_backward(number: u64) -> Kernel {
    let n = number as usize;
    let (family, arch) =
        [(Family::BackwardSm90, "sm_90a"), (Family::BackwardSm80, "sm_80"), (Family::BackwardNaive, "sm_75")][n % 3];
    let (qk, v) = [(64, 64), (24, 40), (136, 72), (128, 128)][n / 3 % 4];
    let problem = Problem::forward_qk_v(DTYPES[n / 2 % 2], qk, v, MaskKind::ALL[n / 3 % 4]).expect("legal").backward();
    let problem = if n % 2 == 1 { problem.with_kv(KvKind::RAGGED) } else { problem };
    default_of(family, problem.with_dropout(true), arch)
}

#[test]
fn gradients_of_what_was_dropped() {
    let templates = templates();
    search_with(6, |number| {
        try_backward(&random_backward(number), &templates, setting("EMULATE_CASES").unwrap_or(2), number)
    });
}

/// Packs by the two families that find sequences on the device.
#[test]
fn packed_forward_passes_drop_scores() {
    let templates = crate::ragged::free_pieces(&templates());
    search_with(3, |number| {
        let (family, arch) =
            [(Family::ForwardSm90Ragged, "sm_90a"), (Family::ForwardNaiveRagged, "sm_75")][number as usize % 3 / 2];
        let mask = MaskKind::ALL[number as usize % 4];
        let problem = Problem::forward(DTYPES[1], 64, mask).expect("legal").with_kv(KvKind::RAGGED).with_dropout(true);
        let kernel = default_of(family, problem, arch);
        crate::ragged::try_ragged(&kernel, &templates, 2, number, |rng| {
            RaggedBatch::random(&problem, crate::ragged::MOST, rng.random())
        })
        .map(|_| ())
    });
}

/// What is wrong, the family, the file, the text in it, and what is put in its place.
type Fault = [&'static str; 5];

const LIB: &str = "lib/cuda/attention/dropout.cuh";
const DRAWER: &str = "forward/sm90/drawer.cuh";
const CONSUMER: &str = "forward/sm90/consumer.cuh";
const STEPS: &str = "backward/sm90/key_steps.cuh";
const FAULTS: &[Fault] = &[
    ["by the other half of a word", "forward/sm80", LIB, "e == 0 ? word << 16 : word", "e != 0 ? word << 16 : word"],
    ["by another lane's words", "forward/sm80", LIB, "exchange_words(w.y, w.w, t & 2, 2);", ""],
    ["of another head", "forward/sm90", DRAWER, "tile.batch, head);", "tile.batch, head ^ 1);"],
    ["of the keys behind", "forward/sm90", DRAWER, "group + 4 * word", "group + 4 * word + 1"],
    ["of a block before its bits are drawn", "forward/sm90", CONSUMER, "        bits.wait(smem);\n", ""],
    ["of a block whose bits are not read yet", "forward/sm90", DRAWER, "            bits.acquire(smem);\n", ""],
    ["by words that are rounded up", "forward/sm90", LIB, "__fma_rz(word, scale, rest)", "word * scale + rest"],
    ["by a word's other multiplier", "backward/sm90", LIB, "of_z{0xcd9e8d57}", "of_z{0xd2511f53}"],
    ["by another call's bits", "forward/sm90", LIB, "c % 2 == 0 ? 0xbb99 : 0xaa88", "c % 2 != 0 ? 0xbb99 : 0xaa88"],
    ["what is dropped, kept", "forward/sm90", LIB, "return (~word | last)", "return ~(~word | last)"],
    ["of one block for two blocks", "forward/sm90", DRAWER, "max(n - of, blocks.begin)", "n"],
    ["one row without the scale", "forward/sm90", CONSUMER, ", rows.inverse[1] *= args.forward.dropout_scale", ""],
    [
        "in the sum, too",
        "forward/sm80",
        "forward/sm80.cu",
        "        softmax.step(s, o, c);\n#if FT_DROPOUT",
        "#if FT_DROPOUT\n        softmax.l[0][0] *= 0.9f;\n#endif\n        softmax.step(s, o, c);\n#if FT_DROPOUT",
    ],
    ["the offset's high half left out", "forward/sm80", LIB, " + u32(offset >> 32)", ""],
    ["a round less", "forward/naive", LIB, "round < 10", "round < 9"],
    ["by another offset", "backward/sm90", LIB, "offset += *(const u64*)a.dropout_offset_at", "offset += 1"],
    ["dP not scaled", "backward/sm90", STEPS, "fmaf(left * args.backward.dropout_scale,", "fmaf(left,"],
    ["dV by all weights", "backward/sm90", STEPS, "                x = left;\n", ""],
    ["by the bits of the keys before", "backward/sm90", LIB, "- (h ? 0x1111 : 0)", ""],
    ["by the bits of the query before", "backward/sm90", LIB, "(e ? 0xbbbb : 0x9999)", "0x9999"],
    ["of the first 64 queries", "backward/sm90", LIB, "words[j / 8], j % 8", "words[0], j % 8"],
    ["the second head of a group as the first", "backward/sm90", STEPS, "member = first_member;", "member = 0;"],
    [
        "all of infinite rows",
        "backward/sm90",
        "backward/sm90/sums.cuh",
        "? a.dropout_scale : 0.0f;",
        "? a.dropout_scale : a.dropout_scale;",
    ],
    ["by another row's words", "backward/sm80", LIB, "exchange_halves(w.z, w.w);", ""],
    ["dV without the scale", "backward/sm80", "backward/sm80/keys.cuh", "to.part, args.dropout_scale", "to.part, 1.0f"],
    [
        "packed: of the first sequence",
        "backward/sm80",
        "backward/sm80/keys.cuh",
        "dropout_pair(args, batch,",
        "dropout_pair(args, 0,",
    ],
    ["in dQ alone", "backward/naive", "backward/naive.cu", "masked ? kMasked : p * kept", "masked ? kMasked : p"],
];

/// What is said of a kernel of a family with other templates; an empty text where nothing is.
fn verdict(family: &str, what: &str, templates: &TemplateSet) -> String {
    let family = Family::by_name(family).expect("a family");
    let arch = if family.name().ends_with("sm90") { "sm_90a" } else { "sm_80" };
    let problem = Problem::forward(DTYPES[1], 64, MaskKind::FULL).expect("legal").with_dropout(true);
    if family.op().name() == "forward" {
        let kernel = match what.contains("blocks") {
            true => two_drawers(&mut StdRng::seed_from_u64(1), problem, 128),
            false => default_of(family, problem, arch),
        };
        let case = |rng: &mut StdRng| case_of([2, 4, 2, 130, 200], Mask::Full, rng.random());
        return try_kernel(&kernel, templates, 1, 1, case).err().unwrap_or_default();
    }
    let problem = problem.backward();
    let problem = if what.starts_with("packed") { problem.with_kv(KvKind::RAGGED) } else { problem };
    let kernel = default_of(family, problem, arch);
    let found = || -> Result<String, String> {
        let device = Machine::open(&kernel, templates, 1)?;
        let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 70, kv_len: 90, mask: Mask::Full };
        let poison = if what.contains("infinite") { Poison::Infinite } else { Poison::None };
        let inputs = CheckInputs { poison, ..CheckInputs::default() };
        let case = if problem.kv.is_dense() {
            BackwardCase::new(device, &problem, &shape, &inputs)
        } else {
            let lengths = vec![[70, 33], [20, 90]];
            let (mask, wide) = (Mask::Full, [false, true]);
            let batch = PackedBatch { heads: 4, kv_heads: 2, mask, lengths, unused: 2, spare: 40, wide };
            BackwardCase::packed(device, &problem, &batch, &inputs)
        };
        let report = case.map_err(|e| e.to_string())?.check(&Loaded(kernel)).map_err(|e| e.to_string())?;
        Ok(if report.passed() { String::new() } else { report.to_string() })
    };
    found().unwrap_or_else(|e| e)
}

#[test]
fn faults_planted_in_what_is_dropped_are_seen() {
    if !machine::has_compiler() {
        return;
    }
    let templates = templates();
    // dQ of rows that meet an infinity is summed once more.
    assert_eq!(verdict("backward/sm90", "infinite rows", &templates), "");
    try_each(0..FAULTS.len() as u64, Duration::MAX, |number| {
        let [what, family, file, from, to] = FAULTS[number as usize];
        let faulted = replaced(&templates, file, from, to);
        let of = Family::by_name(family).expect("a family");
        planted::unless_seen(of, &format!("dropout, {family}, {what}"), &faulted, || {
            let said = verdict(family, what, &faulted);
            println!("{family}, {what}: {}", said.lines().next().unwrap_or("nothing"));
            if said.is_empty() || said.contains("error:") {
                return Err(format!("{family}, {what} is not seen as what it is: `{said}`"));
            }
            Ok(())
        })
    });
}
