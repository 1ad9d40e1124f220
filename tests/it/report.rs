//! `flashtune bench` with its report files, and `flashtune report` on what others wrote.

use crate::common::{Place, ROOT, fails, json};
use serde_json::Value;
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are text")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Runs `bench` with all report files; gives the report and the texts of the Markdown, HTML and SVG files.
fn bench(place: &Place, args: &[&str]) -> (Value, [String; 3]) {
    let paths = ["r.json", "r.md", "r.html", "r.svg"].map(|name| place.path(name));
    let [report, markdown, html, svg] = paths.each_ref().map(|p| text(p));
    let files = ["--report", report, "--markdown", markdown, "--html", html, "--svg", svg];
    let mut printed =
        place.json(&[&["bench", "--rounds", "3", "--dtype", "f32", "--heads", "2"], args, &files].concat());
    assert_eq!(printed.as_object_mut().unwrap().remove("schema"), Some(1.into()));
    assert_eq!(serde_json::from_str::<Value>(&read(&paths[0])).unwrap(), printed);
    (printed, [1, 2, 3].map(|i| read(&paths[i])))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn a_grid_in_all_formats_says_the_same_everywhere() {
    let place = Place::new();
    let (report, [markdown, html, svg]) =
        bench(&place, &["--head-dims", "32,64", "--masks", "full,causal", "--seq-lens", "65..128"]);
    let points = report["points"].as_array().unwrap();
    assert_eq!(points.len(), 2 * 2 * 2);

    let matmul = number(&report["ceilings"]["matmul"][0]["tflops"]);
    let copy = number(&report["ceilings"]["copy"]["gbytes_per_s"]);
    for point in points {
        let case = &point["case"];
        let [len, dim] = ["kv_len", "head_dim_qk"].map(|name| number(&case[name]));
        let pairs = if case["mask"] == "causal" { len * (len + 1.0) / 2.0 } else { len * len };
        assert_eq!(number(&point["flops"]), 2.0 * 4.0 * pairs * dim);
        assert_eq!(number(&point["ideal_bytes"]), 2.0 * 4.0 * len * dim * 4.0);
        assert_eq!(number(&point["scores_bytes"]), 2.0 * len * len * 4.0);
        let chosen = &point["results"][0];
        let (us, derived) = (number(&chosen["latency_us"]["median"]), &chosen["derived"]);
        let near = |name: &str, expected: f64| {
            assert!((number(&derived[name]) / expected - 1.0).abs() < 1e-9, "{name} of {point}");
        };
        near("tflops", number(&point["flops"]) / us / 1e6);
        near("gbytes_per_s", number(&point["ideal_bytes"]) / us / 1e3);
        near("matmul_share", number(&derived["tflops"]) / matmul);
        near("copy_share", number(&derived["gbytes_per_s"]) / copy);
        // K and V are loaded once per query tile, and tiles have 16 rows at least.
        let loaded = number(&chosen["tile_bytes"]) / number(&point["ideal_bytes"]);
        assert!((1.0..=0.5 + 0.5 * len / 16.0).contains(&loaded) || case["mask"] == "causal", "{loaded} at {point}");
        // In a page or a table, the same time stands again.
        let shown = if us < 1000.0 { format!("{us:.1}") } else { format!("{us:.0}") };
        assert!(us < 10.0 || markdown.contains(&format!("| {shown} |")), "{shown} is not in {markdown}");
        assert!(us < 10.0 || html.contains(&format!("<td>{shown}</td>")));
    }
    for (title, times) in [("f32, head dim 32, full", 1), ("f32, head dim 64, causal", 1)] {
        assert_eq!(svg.matches(title).count(), times, "{title}");
    }
    for words in ["GFLOP/s", "sequence length", "roofline of the measured ceilings", "chosen", "unfused"] {
        assert!(svg.contains(words), "{words}");
    }
    assert!(html.contains("<svg") && markdown.contains("## forward, GFLOP/s"));
    assert_eq!(report["checks"].as_array().unwrap().iter().filter(|c| c["passed"] == true).count(), points.len());
}

#[test]
fn a_tuned_choice_is_raced_against_the_default_and_lengths_give_percentiles() {
    let place = Place::new();
    let file = place.path("lengths.jsonl");
    let lines: String = (101..=128).map(|i| format!("{{\"num_tokens\": {i}}}\n")).collect();
    std::fs::write(&file, lines).unwrap();
    let args = ["--head-dim", "32", "--lengths", text(&file), "--length-points", "4", "--no-ceilings"];
    let (report, [markdown, _, svg]) = bench(&place, &args);
    let lengths = &report["lengths"];
    assert_eq!((&lengths["count"], &lengths["mean"]), (&Value::from(28), &Value::from(114.5)));
    let at = |of: &Value, p: f64| {
        let found = of.as_array().unwrap().iter().find(|q| q["p"] == p);
        number(&found.unwrap_or_else(|| panic!("no share {p} in {of}"))["value"])
    };
    assert_eq!((at(&lengths["quantiles"], 0.0), at(&lengths["quantiles"], 1.0)), (101.0, 128.0));
    assert!((126.0..=127.0).contains(&at(&lengths["quantiles"], 0.95)));
    let chosen = &lengths["curves"][0];
    assert_eq!(chosen["contender"], "chosen");
    let values: Vec<f64> = chosen["quantiles_us"].as_array().unwrap().iter().map(|q| number(&q["value"])).collect();
    assert!(values.is_sorted() && values[0] > 0.0, "{values:?}");
    // Every latency lies between the ones that were timed.
    let medians = report["points"].as_array().unwrap().iter().map(|p| number(&p["results"][0]["latency_us"]["median"]));
    let medians: Vec<f64> = medians.collect();
    assert!((6..=8).contains(&medians.len()), "{medians:?}");
    let (least, most) = (medians.iter().copied().fold(f64::MAX, f64::min), medians.iter().copied().fold(0.0, f64::max));
    assert!(values[0] >= least && values[values.len() - 1] <= most, "{values:?} {medians:?}");
    assert!((least..=most).contains(&number(&chosen["mean_us"])));
    assert!(markdown.contains("28 sequences of lengths.jsonl") && markdown.contains("| P95 |"), "{markdown}");
    assert!(svg.contains("share of sequences (%)"));
    // Without ceilings, no share is claimed.
    assert!(report["points"][0]["results"][0]["derived"]["matmul_share"].is_null() && !svg.contains("roofline"));

    std::fs::write(&file, "12\n13\ntwelve\n").unwrap();
    fails(&mut place.flashtune(&["bench", "--lengths", text(&file)]), 2, &["lengths.jsonl", "line 3", "twelve"]);
}

#[test]
fn a_report_of_another_program_is_rendered() {
    let sample = Path::new(ROOT).join("tests/data/reports/peers.json");
    let place = Place::new();
    let paths = ["p.md", "p.html", "p.svg"].map(|name| place.path(name));
    let [markdown, html, svg] = paths.each_ref().map(|p| text(p));
    let args = ["report", text(&sample), "--markdown", markdown, "--html", html, "--svg", svg];
    let report = json(place.flashtune(&args).arg("--json"));
    // Half of the ceiling of 800, at three quarters of the best peer's speed.
    let ours = &report["points"][1]["results"][0]["derived"];
    assert_eq!((number(&ours["tflops"]), number(&ours["matmul_share"])), (400.0, 0.5));
    assert!((number(&ours["of_best"]) - 0.75).abs() < 1e-9);
    let [markdown, html, svg] = paths.each_ref().map(|p| read(p));
    for words in
        ["flashtune / best other", "| 0.75x |", "1700 MHz, 690 W, 61 C, power cap", "Without fa4", "## decode, GB/s"]
    {
        assert!(markdown.contains(words), "{words} is not in {markdown}");
    }
    assert!(html.contains("power cap") && svg.contains("share of the measured copy bandwidth (%)"));
    // Without a file to write, the tables are what is printed.
    let printed = place.flashtune(&["report", text(&sample)]).output().unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), markdown);
}

#[test]
fn a_report_that_cannot_be_is_refused_with_the_field() {
    let sample = read(&Path::new(ROOT).join("tests/data/reports/peers.json"));
    let place = Place::new();
    let path = place.path("bad.json");
    for (from, to, words) in [
        ("\"format\": 1", "\"format\": 9", "its format is 9"),
        ("\"flops\": 4e9", "\"flops\": -4e9", "points[0].flops"),
        ("\"mask\": \"full\"", "\"masc\": \"full\"", "mask"),
        ("{", "", "is no report"),
    ] {
        let bad = sample.replacen(from, to, 1);
        assert_ne!(bad, sample);
        std::fs::write(&path, bad).unwrap();
        fails(&mut place.flashtune(&["report", text(&path)]), 2, &["bad.json", words]);
    }
}

/// What `benches/peers.py` would measure, without PyTorch; `None` where there is no Python outside of CI.
fn listed_by_the_peers_script(device: &str, suites: &str) -> Option<Vec<Value>> {
    let mut python = std::process::Command::new("python3");
    python.current_dir(ROOT).args(["-B", "benches/peers.py", "unused", "--dry-run"]);
    let output = match python.args(["--device", device, "--suites", suites]).output() {
        Ok(output) => output,
        Err(e) if std::env::var("CI").is_ok_and(|v| v == "true") => panic!("CI has python3: {e}"),
        Err(e) => {
            println!("skipped: python3: {e}");
            return None;
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// The script counts operations and bytes without PyTorch, and must count as this library does.
#[test]
fn the_peers_script_counts_work_as_the_library_does() {
    use flashtune::{DType, Mask, Shape};
    for device in ["cuda", "cpu"] {
        let suites = "forward,heads,gqa,window,dense-decode";
        let Some(cases) = listed_by_the_peers_script(device, suites) else { return };
        assert!(cases.len() > 15);
        for case in cases {
            let size = |name: &str| number(&case[name]) as u32;
            let mask: Mask = case["mask"].as_str().unwrap().parse().unwrap();
            let (batch, heads, kv_heads) = (size("batch"), size("heads"), size("kv_heads"));
            let shape = Shape { batch, heads, kv_heads, q_len: size("q_len"), kv_len: size("kv_len"), mask };
            let dtype: DType = case["dtype"].as_str().unwrap().parse().unwrap();
            let (qk, v) = (size("head_dim_qk"), size("head_dim_v"));
            assert_eq!(number(&case["flops"]), shape.forward_flops(qk, v), "{case}");
            assert_eq!(number(&case["ideal_bytes"]), shape.forward_bytes(qk, v, [dtype.bytes(); 2]), "{case}");
        }
    }
}

/// The cases of serving have names; of those whose sequences are alike, this library counts the same operations.
#[test]
fn the_peers_script_lists_serving_with_its_bytes() {
    use flashtune::{Mask, Shape};
    let Some(cases) = listed_by_the_peers_script("cuda", "decode,chunk,varlen,paged,quantised,skewed") else { return };
    let of = |suite: &str| cases.iter().filter(|c| c["suite"] == suite).count();
    assert_eq!(["decode", "chunk", "varlen", "paged", "quantised", "skewed"].map(of), [16, 13, 5, 15, 6, 2]);
    let mut alike = 0;
    for case in &cases {
        let size = |name: &str| number(&case[name]) as u32;
        let (batch, q_len, kv_len) = (size("batch"), size("q_len"), size("kv_len"));
        // Read cold: more than any cache holds lies between two reads of the same bytes.
        let (nodes, stores) = (number(&case["nodes"]), number(&case["stores"]));
        assert!(nodes * number(&case["kv_bytes"]) >= 256e6, "{case}");
        assert!(stores * number(&case["store_bytes"]) >= 256e6, "{case}");
        assert!(number(&case["kv_bytes"]) <= number(&case["store_bytes"]), "{case}");
        if size("total_q") != batch * q_len || !["decode", "chunk", "paged"].contains(&case["suite"].as_str().unwrap())
        {
            continue;
        }
        let mask: Mask = case["mask"].as_str().unwrap().parse().unwrap();
        let shape = Shape { batch, heads: size("heads"), kv_heads: size("kv_heads"), q_len, kv_len, mask };
        // Of sequences of several lengths the longest stands there.
        if case["name"].as_str().unwrap().starts_with("128 of") {
            assert!(number(&case["flops"]) < shape.forward_flops(size("head_dim_qk"), size("head_dim_v")), "{case}");
            continue;
        }
        assert_eq!(number(&case["flops"]), shape.forward_flops(size("head_dim_qk"), size("head_dim_v")), "{case}");
        alike += 1;
    }
    assert_eq!(alike, 16 - 1 + 13 + 15);
}

/// A report with times about a number of microseconds, whatever was measured: nine of a loaded machine may differ by
/// more than any factor shows.
fn times(report: &Value, us: f64) -> Value {
    let mut report = report.clone();
    for point in report["points"].as_array_mut().unwrap() {
        for result in point["results"].as_array_mut().unwrap().iter_mut().filter(|r| r["latency_us"].is_object()) {
            let latency = &mut result["latency_us"];
            for (name, part) in [("median", 1.0), ("p10", 0.96), ("p90", 1.04)] {
                latency[name] = (part * us).into();
            }
            let count = latency["times"].as_array().unwrap().len();
            latency["times"] = (0..count).map(|i| us * (1.0 + 0.01 * (i as f64 - (count / 2) as f64))).collect();
        }
    }
    report
}

#[test]
fn what_became_slower_fails_and_what_became_faster_does_not() {
    let place = Place::new();
    let [now, fast, slow] = ["now.json", "fast.json", "slow.json"].map(|name| place.path(name));
    let case = ["--rounds", "9", "--dtype", "f32", "--heads", "2", "--q-len", "96", "--no-ceilings"];
    let report = place.json(&[&["bench"], &case[..], &["--report", text(&now)]].concat());
    assert_eq!(report["points"][0]["results"][0]["latency_us"]["times"].as_array().unwrap().len(), 9);
    // Runs of the case are compared with the outer two, too: no machine takes so little or so much.
    for (path, us) in [(&now, 1e3), (&fast, 1e-3), (&slow, 1e9)] {
        std::fs::write(path, times(&report, us).to_string()).unwrap();
    }

    let compare = |args: &[&str]| place.flashtune(&[&["report"], args].concat());
    fails(&mut compare(&[text(&fast), text(&now), "--fail-over", "3%"]), 1, &["1 of 1 cases", "1000000.000x", "99 %"]);
    compare(&[text(&fast), text(&now)]).assert().success();
    compare(&[text(&slow), text(&now), "--fail-over", "3%"]).assert().success();
    compare(&[text(&now), text(&now), "--fail-over", "0%"]).assert().success();
    let found = place.json(&["report", text(&slow), text(&now)]);
    assert_eq!(
        (&found["schema"], &found["format"], &found["cases"][0]["verdict"]),
        (&1.into(), &1.into(), &"faster".into())
    );
    assert!((number(&found["mean_ratio"]) - 1e-6).abs() < 1e-12, "{found}");

    let bench = |args: &[&str]| place.flashtune(&[&["bench"], &case[..], args].concat());
    fails(
        &mut bench(&["--baseline", text(&fast), "--fail-over", "3%"]),
        1,
        &["1 of 1 cases", "slower by more than 3%"],
    );
    bench(&["--baseline", text(&slow), "--fail-over", "3%"]).assert().success();
    let beside = place.json(&[&["bench"], &case[..], &["--baseline", text(&fast)]].concat());
    assert_eq!(beside["comparison"]["cases"][0]["verdict"], "slower");
    assert!(beside["points"].is_array());

    let other = ["bench", "--baseline", text(&now), "--fail-over", "3%", "--dtype", "f32", "--q-len", "64"];
    fails(&mut place.flashtune(&other), 2, &["no case is in both", "96x96", "64x64"]);
    fails(&mut place.flashtune(&["bench", "--baseline", "/nonexistent/r.json"]), 2, &["/nonexistent/r.json"]);
    fails(&mut bench(&["--baseline", text(&now), "--fail-over", "3"]), 2, &["3%"]);
    fails(&mut bench(&["--fail-over", "3%"]), 2, &["--baseline"]);
}

#[test]
fn caches_and_bundles_are_compared_by_their_records() {
    let place = Place::new();
    let tuned = place.tune_small();
    let record = &tuned["tuned"][0]["record"];
    // Hashes are told as people write them.
    let artifact = record["artifact"].as_str().unwrap();
    assert!(artifact.len() == 64 && artifact.chars().all(|c| c.is_ascii_hexdigit()), "{artifact}");
    let (cache, bundle) = (place.cache(), place.path("b.ftb"));
    place.json(&["export", text(&bundle)]);
    let found = place.json(&["report", text(&cache), text(&bundle)]);
    let winner = found["cases"].as_array().unwrap().iter().find(|c| c["contender"] == "winner").unwrap();
    assert_eq!((&winner["ratio"], &winner["is_first"]), (&1.0.into(), &true.into()));
    assert!(winner["case"].as_str().unwrap().contains("forward-f32-d32-causal"), "{winner}");
    assert!(number(&winner["samples"][0]) > 0.0, "{winner}");

    let report = place.path("r.json");
    place.json(&["bench", "--rounds", "1", "--q-len", "16", "--no-ceilings", "--report", text(&report)]);
    fails(&mut place.flashtune(&["report", text(&cache), text(&report)]), 2, &["two of a kind"]);
    fails(&mut place.flashtune(&["report", text(&report), "/nonexistent/c"]), 2, &["/nonexistent/c"]);
}

#[test]
fn a_cache_is_one_page_that_links_its_records() {
    let place = Place::new();
    place.tune_small();
    let (cache, page, bundle) = (place.cache(), place.path("c.html"), place.path("b.ftb"));
    let untuned = place.path("untuned.jsonl");
    let entry = r#"{"problem":PROBLEM,"shape":SHAPE,"calls":7}"#;
    let listed = place.json(&["list"]);
    let record = &listed[0]["record"];
    let line = entry.replace("PROBLEM", &record["key"]["problem"].to_string());
    std::fs::write(&untuned, line.replace("SHAPE", &record["provenance"]["shape"].to_string())).unwrap();
    let told = place.json(&["report", text(&cache), "--untuned", text(&untuned), "--html", text(&page)]);
    assert_eq!((told["records"].as_array().unwrap().len(), &told["untuned"][0]["calls"]), (1, &7.into()));
    assert_eq!(told["records"][0]["stale"], serde_json::json!([]));
    let id = told["records"][0]["id"].as_str().unwrap();
    let finalists = told["records"][0]["finalists"].as_array().unwrap();
    assert_eq!(finalists.len(), record["finalists"].as_array().unwrap().len());
    assert_eq!(finalists.iter().filter(|f| f["is_winner"] == true).count(), 1, "{told}");
    let html = read(&page);
    assert!(finalists.iter().all(|f| html.contains(&format!("<li>{}: ", f["schedule"].as_str().unwrap()))), "{html}");
    assert!(html.contains(&format!("<tr id=\"r-{id}\">")) && html.contains(&format!("href=\"#r-{id}\"")), "{html}");
    assert!(html.contains("Content-Security-Policy") && !html.contains("http:"), "{html}");

    // A bundle has the same record; other templates make it stale.
    place.json(&["export", text(&bundle)]);
    let of_bundle = place.json(&["report", text(&bundle)]);
    assert_eq!(of_bundle["records"][0]["problem"], told["records"][0]["problem"]);
    let templates = place.path("templates");
    let family = Path::new(ROOT).join("templates/forward/cpu.c");
    std::fs::create_dir_all(templates.join("forward")).unwrap();
    let changed = read(&family) + "\nstatic int another;\n";
    std::fs::write(templates.join("forward/cpu.c"), changed).unwrap();
    let stale = place.json(&["report", text(&cache), "--templates", text(&templates)]);
    assert!(stale["records"][0]["stale"][0].as_str().unwrap().contains("templates"), "{stale}");

    let empty = place.path("empty");
    std::fs::create_dir(&empty).unwrap();
    assert_eq!(place.json(&["report", text(&empty)])["records"], serde_json::json!([]));
    fails(&mut place.flashtune(&["report", text(&cache), "--svg", text(&page)]), 2, &["--html"]);
    let damaged = place.path("damaged.ftb");
    std::fs::write(&damaged, "no bundle").unwrap();
    fails(&mut place.flashtune(&["report", text(&damaged)]), 2, &["bundle", "damaged.ftb", "export it again"]);
    fails(&mut place.flashtune(&["report", "/nonexistent/b.ftb"]), 2, &["/nonexistent/b.ftb"]);

    // The cases of a model, each with the record that is its own.
    let config = place.path("config.json");
    let model = r#"{"model_type":"llama","num_attention_heads":2,"num_key_value_heads":2,"head_dim":32,
        "num_hidden_layers":3,"max_position_embeddings":128,"torch_dtype":"float32"}"#;
    std::fs::write(&config, model).unwrap();
    let told = place.json(&["report", text(&cache), "--model", text(&config)]);
    let cases = told["models"].as_array().unwrap();
    let tuned = cases.iter().filter(|case| case["record"] == id).count();
    assert!(tuned == 1 && cases.len() > 1, "{told}");
    // They are those that `tune` would tune, with the same options.
    let options = ["--model", text(&config), "--pages", "16,packed", "--batch", "1,4", "--max-len", "64"];
    for more in [&[][..], &["--tp", "2"]] {
        let listed = place.json(&[&["tune", "--dry-run"], &options[..], more].concat());
        let told = place.json(&[&["report", text(&cache)], &options[..], more].concat());
        let listed: Vec<_> = listed["cases"].as_array().unwrap().iter().map(|c| [&c["problem"], &c["shape"]]).collect();
        let told: Vec<_> = told["models"].as_array().unwrap().iter().map(|c| [&c["problem"], &c["shape"]]).collect();
        assert_eq!(told, listed);
    }
}
