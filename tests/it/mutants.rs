//! Kernels with a planted fault: none of them gets past the checks that stand between a candidate and the race.

use crate::common::Place;
use flashtune::{DType, DeviceSpec, Mask, Problem, Shape};
use flashtune_cache::{CacheDir, Store};
use flashtune_codegen::TemplateSet;
use flashtune_tuner::{Error, Job, Runner, WorkerCommand, tune};
use std::time::Duration;

/// A fault: its name, the template, what is replaced there by what, and a word of the verdict.
struct Mutant(&'static str, &'static str, &'static str, &'static str, &'static str);

const CAUSAL: &[Mutant] = &[
    Mutant(
        "one key too many is visible",
        "lib/cpu/mask.h",
        "args->window_right + 1)",
        "args->window_right + 2)",
        "oracle",
    ),
    Mutant("the diagonal is masked", "lib/cpu/mask.h", "lane >= vi_set1(", "lane > vi_set1(", "oracle"),
    Mutant("aligned to the top left", "lib/cpu/mask.h", "(int64_t)args->kv_len - args->q_len;", "0;", "oracle"),
    Mutant(
        "O is not rescaled",
        "lib/cpu/softmax.h",
        "vf_store(alpha + x * LANES, exp2_of(before - top[x]));",
        "vf_store(alpha + x * LANES, vf_set1(1));",
        "oracle",
    ),
    Mutant(
        "the sum is not rescaled",
        "lib/cpu/softmax.h",
        "vf_fma(vf_load(at), vf_load(alpha + x * LANES), total[x])",
        "(vf_load(at) + total[x])",
        "oracle",
    ),
    Mutant(
        "the sum leaves out a key of each block",
        "lib/cpu/softmax.h",
        "some[x] += weight;",
        "if (j) some[x] += weight;",
        "oracle",
    ),
    Mutant(
        "the last row is not computed",
        "forward/cpu.c",
        "min64(query + BLOCK_Q, args->q_len)",
        "min64(query + BLOCK_Q, args->q_len - 1)",
        "row 150] is NaN",
    ),
    Mutant(
        "the last key of a block is left out",
        "forward/cpu.c",
        "key_end = min64(key + BLOCK_KV, range.end);",
        "key_end = max64(min64(key + BLOCK_KV, range.end) - 1, key + 1);",
        "oracle",
    ),
    Mutant(
        "whole vectors of rows are written",
        "lib/cpu/pack.h",
        "i < (rows < LANES ? rows : LANES); i++) narrow_row",
        "i < LANES; i++) narrow_row",
        "written",
    ),
    Mutant(
        "a key is overwritten",
        "forward/cpu.c",
        "#if AMX\n    configure_tiles();",
        "((element *)tile.k)[0] = 0;\n#if AMX\n    configure_tiles();",
        "k was written",
    ),
    Mutant(
        "maximum and sum are not initialised",
        "forward/cpu.c",
        "scratch->maximum[i] = -INF, scratch->sum[i] = 0;",
        ";",
        "launches",
    ),
    Mutant(
        "the output depends on earlier calls",
        "forward/cpu.c",
        "inverse[i] = empty ? 0 : 1 / sum;",
        "static int calls; inverse[i] = empty ? 0 : (1 + 1e-7f * (calls++ % 7)) / sum;",
        "launches",
    ),
    Mutant(
        "masked infinities leak",
        "lib/cpu/convert.h",
        "return (u & 0x7f800000) == 0x7f800000;",
        "return (u & 0x7fffffff) > 0x7f800000;",
        "333x151",
    ),
    Mutant(
        "scores of -infinity take part",
        "forward/cpu.c",
        "int special = 0;",
        "for (int i = 0; i < n * vectors * LANES; i++) {\n\
         float *at = s + i / (vectors * LANES) * PANEL + i % (vectors * LANES);\n\
         if (*at < -1e30f) *at = -1;\n\
         }\n\
         int special = 0;",
        "oracle",
    ),
    Mutant("masked NaN leaks", "forward/cpu.c", "if (special)", "if (0 && special)", "oracle"),
    Mutant(
        "empty rows are not zero",
        "forward/cpu.c",
        "inverse[i] = empty ? 0 : 1 / sum;",
        "inverse[i] = 1 / sum;",
        "O[",
    ),
    Mutant(
        "the scale is one percent off",
        "forward/cpu.c",
        "args->scale * LOG2E",
        "1.01f * args->scale * LOG2E",
        "oracle",
    ),
    Mutant("the LSE is in other units", "forward/cpu.c", "maximum * MAXIMUM_LN", "maximum * 0.6931", "LSE"),
    Mutant(
        "heads take turns at KV heads",
        "forward/cpu.c",
        "head / (args->heads / args->kv_heads)",
        "head % args->kv_heads",
        "oracle",
    ),
    Mutant(
        "right when small, wrong when large",
        "forward/cpu.c",
        "args->scale * LOG2E",
        "(args->q_len > 350 ? 1.01f : 1) * args->scale * LOG2E",
        "500x500",
    ),
    Mutant("an endless loop", "forward/cpu.c", "key += BLOCK_KV) {", "key += 0) {", "did not come back"),
    Mutant(
        "an illegal address",
        "forward/cpu.c",
        "pack_queries(scratch->q[i / PANEL] + i % PANEL, tile.q",
        "pack_queries(scratch->q[i / PANEL] + i % PANEL, tile.q + (1ll << 44)",
        "SIGSEGV",
    ),
];

const WINDOW: &[Mutant] = &[
    Mutant(
        "a key before the window is visible",
        "lib/cpu/mask.h",
        "lane <= vi_set1(",
        "lane - 1 <= vi_set1(",
        "oracle",
    ),
    Mutant(
        "the window ends a key early",
        "lib/cpu/mask.h",
        "+ args->window_left - query;",
        "+ args->window_left - 1 - query;",
        "oracle",
    ),
];

/// What becomes of a job whose only kernel has the fault.
fn verdict(runner: &mut Runner, mask: Mask, Mutant(name, file, from, to, _): &Mutant) -> String {
    let own = TemplateSet::embedded();
    let (_, text) = own.files().find(|(path, _)| path == file).expect("a template of this name");
    assert!(text.contains(from), "{name}: {file} has no `{from}`: plant the fault elsewhere");
    let templates = TemplateSet::overlaid([((*file).to_owned(), text.replace(from, to))].into()).unwrap();
    let place = Place::new();
    let dir = CacheDir::at(place.cache());
    let problem = Problem::forward(DType::F32, 32, mask.kind()).unwrap();
    let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 500, kv_len: 500, mask };
    let job = Job { max_trials: 1, budget: Duration::from_secs(60), ..Job::new(problem, shape) };
    match tune(runner, &templates, &dir, &job, &()) {
        Ok(outcome) => format!(" it won: {:?}", outcome.record.schedule),
        Err(Error::NothingWorks { reasons, .. }) => {
            // A process that another test is about to start holds the journal's lock until it has begun.
            let store = Store::open_within(&dir, Duration::from_secs(10)).unwrap();
            assert!(store.records().unwrap().is_empty());
            reasons
        }
        Err(e) => panic!("{name}: {e}"),
    }
}

fn all_are_caught(mask: Mask, mutants: &[Mutant]) {
    let command = WorkerCommand::flashtune(assert_cmd::cargo::cargo_bin("flashtune"));
    let mut runner = Runner::worker(command, DeviceSpec::Cpu).unwrap();
    let mut missed = Vec::new();
    for mutant in mutants {
        let reasons = verdict(&mut runner, mask, mutant);
        if !(reasons.contains("(check)") && reasons.contains(mutant.4)) {
            missed.push(format!("{} (expected `{}`):{reasons}", mutant.0, mutant.4));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn faults_of_the_causal_kernel_are_caught() {
    all_are_caught(Mask::Causal, CAUSAL);
}

#[test]
fn faults_of_the_window_are_caught() {
    all_are_caught(Mask::Window { left: Some(40), right: Some(3) }, WINDOW);
}
