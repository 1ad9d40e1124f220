//! `flashtune check` and `flashtune bench` themselves: a check that cannot fail would be no check.

use crate::common::{self, Place, ROOT, SMALL, fails};
use flashtune_codegen::{Arch, CpuIsa};

/// A folder with the cpu templates, one text of one file replaced.
fn spoilt(place: &Place, file: &str, from: &str, to: &str) -> String {
    let text = std::fs::read_to_string(format!("{ROOT}/templates/{file}")).unwrap();
    assert!(text.contains(from), "{file} has no `{from}`: plant the fault elsewhere");
    let path = place.path("spoilt").join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, text.replace(from, to)).unwrap();
    place.path("spoilt").to_str().unwrap().to_owned()
}

#[test]
fn the_quick_check_of_one_problem_passes_on_every_instruction_set_of_the_host() {
    let Arch::Cpu(highest) = common::host_arch() else { panic!("the cpu device has a cpu arch") };
    for isa in CpuIsa::ALL.into_iter().filter(|isa| *isa <= highest) {
        let place = Place::new();
        // The variants of a problem (residual, dropout) and gradients are written for every instruction set alike, and
        // the tests of their checks compile them too: all of them take five minutes. Other schedules than the default
        // ones are those of tests of tuning and of mixed batches.
        let problem = if isa == highest { "d40v72" } else { "f16-d40v72" };
        let mut check = place.flashtune(&["check", "--problem", problem, "--schedules", "0", "--json"]);
        check.args(["--kernel", "forward-"]);
        check.env("FLASHTUNE_CPU_ISA", isa.name());
        // Ragged kernels without vector instructions take the optimiser 6 s each, and run for 42 s without it: 29 s in
        // all with a little of it, 48 with none.
        check.env("KERNELS_OPTIMISED", if isa == highest { "1" } else { "little" });
        let report = common::json(&mut check);
        assert!(report["device"].as_str().unwrap().contains(isa.name()), "{report}");
        assert!(report["kernels"].as_u64().unwrap() >= 6 && report["checks"].as_u64().unwrap() >= 60, "{report}");
        let worst = report["worst"]["error_over_bound"].as_f64().unwrap();
        assert!(worst > 0.0 && worst <= 1.0, "{report}");
    }
}

#[test]
fn a_kernel_with_a_fault_fails_the_check_with_its_name_and_exit_code_1() {
    let place = Place::new();
    // One percent too much of the scale: the kind of error that a loose bound would let through.
    let folder = spoilt(&place, "forward/cpu.c", "args->scale", "(1.01f * args->scale)");
    let args = ["check", "--problem", "f32-d64-full", "--kernel", ".cpu.", "--templates", &folder];
    let args_json = [&args[..], &["--json"]].concat();
    fails(&mut place.flashtune(&args), 1, &["checks failed"]);
    let output = place.flashtune(&args_json).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let failures = report["failures"].as_array().unwrap();
    assert!(failures.len() > 3, "{report}");
    assert!(failures.iter().all(|f| f["kernel"].as_str().unwrap().starts_with("forward-f32-d64-full.cpu")), "{report}");
    assert!(report["worst"]["error_over_bound"].as_f64().unwrap() > 1.0);
}

#[test]
fn a_check_of_nothing_is_an_error() {
    let place = Place::new();
    fails(&mut place.flashtune(&["check", "--problem", "f64"]), 2, &["no kernel", "forward-f32-d64-full"]);
}

#[test]
fn a_bench_times_the_choice_the_default_and_unfused_attention() {
    let place = Place::new();
    let args = ["bench", "--dtype", "f32", "--head-dim", "64", "--q-len", "96", "--heads", "2", "--rounds", "3"];
    let report = place.json(&args);
    let point = &report["points"][0];
    let results = point["results"].as_array().unwrap();
    let told: Vec<_> =
        results.iter().map(|r| (r["contender"].as_str().unwrap(), r["latency_us"].is_object())).collect();
    // With nothing tuned, the choice is the default.
    assert_eq!(told, [("chosen", true), ("default", false), ("unfused", true)]);
    assert!(results[1]["absent"].as_str().unwrap().contains("chose the default"));
    // 96 queries see 96 * 97 / 2 keys in each of two heads; two products of 64.
    let flops = 2.0 * 2.0 * (96.0 * 97.0 / 2.0) * 128.0;
    assert_eq!(point["flops"].as_f64(), Some(flops));
    for result in [&results[0], &results[2]] {
        let us = |name: &str| result["latency_us"][name].as_f64().unwrap();
        let tflops = result["derived"]["tflops"].as_f64().unwrap();
        assert!((tflops * us("median") * 1e6 / flops - 1.0).abs() < 1e-6, "{result}");
        assert!(us("p10") <= us("median") && us("median") <= us("p90"), "{result}");
        assert_eq!(us("samples"), 3.0);
    }
    assert_eq!(report["checks"][0]["passed"], true);
}

#[test]
fn a_budget_beyond_the_clock_is_no_overflow() {
    let place = Place::new();
    let tuned = place.json(&[&["tune"], SMALL, &["--trials", "1", "--budget-s", "1e18"]].concat());
    assert_eq!(tuned["tuned"].as_array().unwrap().len(), 1);
}
