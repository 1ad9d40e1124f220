//! `flashtune bench --trace` and `--kv-lens`: a small trace and ragged batches, really served by the cpu.

use crate::common::{Place, ROOT, fails};
use serde_json::Value;

/// Prompts of one to many chunks, and outputs of one token to many.
const TRACE: &str = "# prompt, output, arrival in seconds\n150 9 0\n1,1,0\n40 30 0.0\n17 5 0.05\n90 2 0.3\n33 12 9\n";
const ARGS: [&str; 15] = [
    "bench",
    "--dtype",
    "f32",
    "--head-dim",
    "32",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--layers",
    "2",
    "--pages",
    "8",
    "--token-budget",
    "32",
];

fn trace(place: &Place, text: &str) -> String {
    let path = place.path("day.txt");
    std::fs::write(&path, text).unwrap();
    path.to_str().expect("test paths are text").to_owned()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// A folder with the kernel for ragged batches, whose scale is a percent too large.
fn spoilt_kernel(place: &Place) -> String {
    let path = place.path("spoilt/forward/cpu_ragged.c");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let template = std::fs::read_to_string(format!("{ROOT}/templates/forward/cpu_ragged.c")).unwrap();
    assert!(template.contains("args->scale"), "plant the fault elsewhere");
    std::fs::write(&path, template.replace("args->scale", "(1.01f * args->scale)")).unwrap();
    place.path("spoilt").to_str().expect("test paths are text").to_owned()
}

fn text_of(args: &[&str]) -> Vec<String> {
    args.iter().map(|a| (*a).to_owned()).collect()
}

#[test]
fn a_small_trace_is_served_and_its_steps_are_counted() {
    let place = Place::new();
    let file = trace(&place, TRACE);
    let markdown = place.path("day.md");
    let more = ["--trace", &file, "--max-sequences", "4", "--markdown", markdown.to_str().unwrap()];
    let report = place.json(&[&ARGS[..], &more].concat());
    let served = &report["served"];
    assert_eq!((number(&served["requests"]), number(&served["generated"])), (6.0, 59.0), "{report}");
    // The last token of each request is never computed on.
    assert_eq!(number(&served["tokens"]), (331 + 59 - 6) as f64);
    let steps = served["steps"].as_array().unwrap();
    let kinds: Vec<&str> = steps.iter().map(|s| s["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["all", "prefill", "decode", "mixed"]);
    let sum = |field: &str| steps[1..].iter().map(|s| number(&s[field])).sum::<f64>();
    for field in ["steps", "tokens"] {
        assert_eq!(number(&steps[0][field]), sum(field), "{field}");
    }
    for step in steps {
        let at = |p: f64| {
            let quantiles = step["quantiles_us"].as_array().unwrap();
            number(&quantiles.iter().find(|q| number(&q["p"]) == p).unwrap()["value"])
        };
        assert!(0.0 < at(0.5) && at(0.5) <= at(0.95) && at(0.95) <= at(1.0), "{step}");
    }
    // An append and an attention for each layer of each step.
    let launches: f64 = served["kernels"].as_object().unwrap().values().map(number).sum();
    assert_eq!(launches, 2.0 * 2.0 * number(&steps[0]["steps"]));
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.len() >= 4 && checks.iter().all(|c| c["passed"] == true), "{report}");
    let markdown = std::fs::read_to_string(markdown).unwrap();
    assert!(
        markdown.contains("## Steps of a served trace") && markdown.contains("6 requests of day.txt"),
        "{markdown}"
    );
    assert!(markdown.contains(served["schedule"].as_str().unwrap()));
}

#[test]
fn the_script_of_traces_writes_what_is_read() {
    let place = Place::new();
    let written = |seed: &str| {
        let mut python = std::process::Command::new("python3");
        python.current_dir(ROOT).args(["-B", "benches/traces.py", "--count", "12", "--seed", seed]);
        match python.args(["--prompt", "60", "--output", "5", "--longest", "200"]).output() {
            Ok(output) if output.status.success() => Some(String::from_utf8(output.stdout).unwrap()),
            Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
            Err(e) if std::env::var("CI").is_ok_and(|v| v == "true") => panic!("CI has python3: {e}"),
            Err(_) => None,
        }
    };
    let Some(text) = written("1") else { return println!("skipped: there is no python3") };
    assert_eq!(written("1").as_ref(), Some(&text));
    assert_ne!(written("2").as_ref(), Some(&text));
    let file = trace(&place, &text);
    let report = place.json(&[&ARGS[..], &["--trace", &file, "--max-sequences", "8"]].concat());
    assert_eq!(number(&report["served"]["requests"]), 12.0);
}

#[test]
fn a_schedule_is_that_of_its_seed_whatever_the_cache_holds() {
    let place = Place::new();
    let file = trace(&place, TRACE);
    let schedule = |more: &[&str]| {
        let args = [&ARGS[..], &["--trace", &file, "--requests", "9", "--max-sequences", "3"], more].concat();
        place.json(&args)["served"]["schedule"].clone()
    };
    let one = schedule(&["--seed", "1"]);
    assert_eq!(schedule(&["--seed", "1"]), one);
    assert_ne!(schedule(&["--seed", "2"]), one);
    // Another kernel over another cache: the same steps.
    let mut quantised = text_of(&ARGS);
    quantised[2] = "bf16".into();
    quantised.extend(text_of(&["--trace", &file, "--requests", "9", "--max-sequences", "3", "--kv-dtype", "int8"]));
    let quantised: Vec<&str> = quantised.iter().map(String::as_str).collect();
    let report = place.json(&quantised);
    assert_eq!(report["served"]["schedule"], one);
    assert!(report["served"]["model"].as_str().unwrap().contains("int8 cache"), "{report}");
}

#[test]
fn a_trace_of_wrong_answers_fails_after_it_told_all() {
    let place = Place::new();
    let file = trace(&place, TRACE);
    let spoilt = spoilt_kernel(&place);
    let args = [&ARGS[..], &["--trace", &file, "--max-sequences", "4", "--json", "--templates", &spoilt]].concat();
    let output = place.flashtune(&args).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["checks"].as_array().unwrap().iter().any(|c| c["passed"] == false), "{report}");
    assert!(number(&report["served"]["seconds"]) > 0.0);
}

#[test]
fn traces_and_limits_that_cannot_be_are_usage_errors() {
    let place = Place::new();
    let bad = trace(&place, "5 5\n7 x\n");
    fails(
        &mut place.flashtune(&["bench", "--trace", &bad]),
        2,
        &["day.txt", "line 2", "the output is `x`", "from 1 to"],
    );
    let good = trace(&place, TRACE);
    for (more, words) in [
        (&["--cache-pages", "3"][..], &["--cache-pages is 3", "150 and 9 tokens", "at least 10"][..]),
        (&["--token-budget", "3"], &["--token-budget is 3", "at least 64"]),
        (&["--pages", "0"], &["--pages is 0"]),
        (&["--layers", "0"], &["--layers is 0"]),
        (&["--step-ms", "0"], &["--step-ms is 0"]),
        (&["--kv-dtype", "e4m3", "--dtype", "f32"], &["--kv-dtype e4m3", "--dtype"]),
        (&["--kv-dtype", "e3m4"], &["same", "e5m2"]),
        (&["--score", "alibi"], &["--score"]),
        (&["--q-len", "5"], &["--q-len"]),
        (&["--cache-pages", "4000000000"], &["--cache-pages is 4000000000", "memory holds"]),
    ] {
        let args = [&["bench", "--trace", &good][..], more].concat();
        fails(&mut place.flashtune(&args), 2, words);
    }
    fails(&mut place.flashtune(&["bench", "--cache-pages", "5"]), 2, &["--trace"]);
    fails(&mut place.flashtune(&["bench", "--trace", "/nonexistent/day"]), 2, &["cannot read", "one request per line"]);
}

const RAGGED: [&str; 14] = [
    "bench",
    "--no-ceilings",
    "--rounds",
    "3",
    "--layers",
    "3",
    "--dtype",
    "f32",
    "--head-dim",
    "32",
    "--heads",
    "4",
    "--kv-heads",
    "2",
];

#[test]
fn ragged_batches_are_timed_with_their_own_bytes_and_work() {
    let place = Place::new();
    let markdown = place.path("r.md");
    let more =
        ["--kv-lens", "100,2x40,7", "--kv-lens", "3x64", "--pages", "8", "--markdown", markdown.to_str().unwrap()];
    let report = place.json(&[&RAGGED[..], &more].concat());
    let points = report["points"].as_array().unwrap();
    assert_eq!(points.len(), 2);
    for (point, keys, batch) in [(&points[0], 187.0, 4.0), (&points[1], 192.0, 3.0)] {
        // Two products of 32 for each key and query head; rows of K and V of 2 heads, Q and O of 4.
        assert_eq!(number(&point["flops"]), 4.0 * 4.0 * 32.0 * keys);
        assert_eq!(number(&point["ideal_bytes"]), 4.0 * 32.0 * (2.0 * 2.0 * keys + 2.0 * 4.0 * batch));
        assert_eq!((number(&point["case"]["batch"]), &point["case"]["store"]), (batch, &Value::from("pages of 8")));
        let chosen = &point["results"][0];
        assert!(chosen["schedule"].as_str().unwrap().starts_with("forward/cpu_ragged"), "{point}");
        for field in ["latency_us", "single_us"] {
            assert_eq!(number(&chosen[field]["samples"]), 3.0);
            assert!(number(&chosen[field]["median"]) > 0.0);
        }
        let us = number(&chosen["latency_us"]["median"]);
        let rate = number(&chosen["derived"]["gbytes_per_s"]);
        assert!((rate * us * 1e3 / number(&point["ideal_bytes"]) - 1.0).abs() < 1e-9, "{point}");
    }
    assert!(report["checks"].as_array().unwrap().iter().all(|c| c["passed"] == true), "{report}");
    let markdown = std::fs::read_to_string(markdown).unwrap();
    assert!(markdown.contains("| 1 | 100,2x40,7 |") && markdown.contains("pages of 8"), "{markdown}");
}

#[test]
fn schedules_bounds_and_quantised_caches_of_ragged_batches() {
    let place = Place::new();
    let mut args = text_of(&RAGGED);
    args[7] = "bf16".into();
    args.extend(text_of(&["--kv-lens", "50,300", "--kv-dtype", "int8", "--q-len", "3", "--mask", "window:63,0"]));
    let run = |more: &[&str]| {
        let all: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
        place.json(&all)
    };
    let report = run(&["--kv-bound", "4k"]);
    let point = &report["points"][0];
    assert_eq!(point["case"]["name"], "50,300, bound 4096");
    assert_eq!(point["case"]["store"], "pages of 16, int8");
    // Three rows see 66 keys; elements of a byte, and two of Q and O.
    assert_eq!(number(&point["ideal_bytes"]), 32.0 * (2.0 * 2.0 * (50.0 + 66.0) + 2.0 * 2.0 * 4.0 * 2.0 * 3.0));
    let chosen = point["results"][0]["schedule"].as_str().unwrap().split(' ').nth(1).unwrap();
    let both = run(&["--schedule", chosen]);
    let results = both["points"][0]["results"].as_array().unwrap();
    assert_eq!((results.len(), results[1]["contender"].as_str()), (2, Some(chosen)), "{both}");
    assert_eq!(both["checks"].as_array().unwrap().len(), 2);
}

#[test]
fn a_ragged_kernel_with_a_fault_is_not_timed() {
    let place = Place::new();
    let spoilt = spoilt_kernel(&place);
    let args = [&RAGGED[..], &["--kv-lens", "64,9", "--json", "--templates", &spoilt]].concat();
    let output = place.flashtune(&args).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let chosen = &report["points"][0]["results"][0];
    assert!(
        chosen["absent"].as_str().unwrap().contains("wrong answer: sequence") && chosen.get("latency_us").is_none()
    );
}

#[test]
fn ragged_options_that_cannot_be_are_usage_errors() {
    let place = Place::new();
    for (args, words) in [
        (&["--kv-lens", "4y"][..], &["`4y` is no length"][..]),
        (&["--kv-lens", "2x0"], &["out of range"]),
        (&["--kv-lens", "64", "--kv-bound", "9"], &["--kv-bound is below 64"]),
        (&["--kv-lens", "64", "--schedule", "r1"], &["no schedule `r1`"]),
        (&["--kv-lens", "64", "--q-len", "0"], &["--q-len is 0"]),
        (&["--kv-lens", "64", "--pages", "0"], &["--pages is 0"]),
        (&["--kv-lens", "64", "--kv-len", "5"], &["--kv-len"]),
        (&["--kv-lens", "60000x1000M"], &["GiB", "fewer or shorter"]),
        (&["--kv-bound", "64"], &["--kv-lens"]),
    ] {
        fails(&mut place.flashtune(&[&["bench"], args].concat()), 2, words);
    }
}
