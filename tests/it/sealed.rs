//! Tune, cache, and dispatch in new processes that may not compile.

use crate::common::{NOWHERE, Place, SMALL, fails, json};
use flashtune::DType;
use safetensors::SafeTensors;

#[test]
fn a_new_process_dispatches_what_was_tuned_without_a_compiler() {
    let place = Place::new();
    let tuned = place.tune_small();
    let tuned = &tuned["tuned"][0];
    assert_eq!(tuned["problem"], "forward-f32-d32-causal");
    assert_eq!(tuned["cached"], false);
    assert!(tuned["gain_over_default"].as_f64().unwrap() > 0.5, "{tuned}");
    assert!(tuned["gain_over_unfused"].as_f64().unwrap() > 0.0, "{tuned}");

    // The same sizes, under the sealed policy, where no compiler exists.
    let (input, _) = place.inputs("in.safetensors", DType::F32, [1, 2, 128, 32], [1, 2, 128, 32]);
    let output = place.path("out.safetensors");
    let run = ["run", input.to_str().unwrap(), "-o", output.to_str().unwrap(), "--mask", "causal", "--json"];
    let sealed = json(place.flashtune(&run).args(["--policy", "sealed"]).env("CC", NOWHERE));
    let plan = &sealed["plan"];
    assert_eq!(plan["status"]["kind"], "tuned", "{plan}");
    assert_eq!(plan["layer"], "snapshot", "{plan}");
    assert_eq!(plan["schedule"], tuned["schedule"]);
    let sealed_out = std::fs::read(&output).unwrap();
    let file = SafeTensors::deserialize(&sealed_out).unwrap();
    assert_eq!(file.tensor("o").unwrap().shape(), [1, 2, 128, 32]);
    assert_eq!(file.tensor("lse").unwrap().shape(), [1, 2, 128]);

    // The same kernel gives the same bytes where a compiler may run.
    json(&mut place.flashtune(&run));
    assert_eq!(std::fs::read(&output).unwrap(), sealed_out);
}

#[test]
fn a_second_tune_is_answered_from_the_cache() {
    let place = Place::new();
    place.tune_small();
    let mut again = serde_json::Value::Null;
    // A process that has to wait for a core says nothing; one that measures again takes seconds each time.
    let times = [(); 4].map(|()| {
        let start = std::time::Instant::now();
        again = place.tune_small();
        assert_eq!(again["tuned"][0]["cached"], true);
        start.elapsed().as_secs_f64()
    });
    assert!(times.iter().any(|seconds| *seconds < 1.0), "{times:?}");
    let listed = place.json(&["list"]);
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(listed[0]["schedule"], again["tuned"][0]["schedule"]);
    // --force measures again.
    let args = [&["tune"], SMALL, &["--trials", "2", "--budget-s", "5", "--force"]].concat();
    assert_eq!(place.json(&args)["tuned"][0]["cached"], false);
}

#[test]
fn sealed_takes_the_nearest_shape_and_says_so() {
    let place = Place::new();
    place.tune_small();
    let near = [&["explain"], SMALL, &["--kv-len", "700", "--policy", "sealed"]].concat();
    let plan = json(place.flashtune(&near).arg("--json").env("CC", NOWHERE));
    assert_eq!(plan[0]["status"]["kind"], "nearest_shape", "{plan}");
    assert!(plan[0]["because"].as_str().unwrap().contains("doublings"), "{plan}");
}

#[test]
fn sealed_without_a_record_is_an_error_that_tells_reason_and_remedy() {
    let place = Place::new();
    let args = ["explain", "--dtype", "bf16", "--head-dim", "64", "--policy", "sealed"];
    fails(place.flashtune(&args).env("CC", NOWHERE), 3, &["sealed", "forward-bf16-d64-causal", "record", "import"]);
    // A record of another problem does not help, and is not taken.
    place.tune_small();
    fails(place.flashtune(&args).env("CC", NOWHERE), 3, &["sealed"]);
}

#[test]
fn sealed_skips_a_record_whose_kernel_is_gone_and_default_compiles_it_again() {
    let place = Place::new();
    place.tune_small();
    let bundle = place.path("records-only.ftb");
    strip_artifacts(&place, &bundle);

    let fresh = Place::new();
    let named = [&["explain"], SMALL, &["--bundle", bundle.to_str().unwrap()]].concat();
    let mut sealed = fresh.flashtune(&named);
    fails(sealed.args(["--policy", "sealed"]).env("CC", NOWHERE), 3, &["binary", "sealed"]);
    let plan = json(fresh.flashtune(&named).arg("--json"));
    assert_eq!(plan[0]["status"]["kind"], "tuned", "{plan}");
    assert!(plan[0]["binary"].as_str().unwrap().contains("compiled now"), "{plan}");
}

/// Writes a bundle with the place's records and none of its kernels.
fn strip_artifacts(place: &Place, to: &std::path::Path) {
    use flashtune_cache::{BundleContents, CacheDir, Layers};
    let layers = Layers::open(&CacheDir::at(place.cache()), &[], None).unwrap();
    let records = layers.records().into_iter().map(|(_, r, _)| (*r).clone()).collect();
    let contents = BundleContents { records, artifacts: Vec::new(), load: &mut |_| None, created: 0 };
    contents.write(to).unwrap();
}

#[test]
fn the_tune_policy_tunes_on_a_miss_and_then_dispatches() {
    let place = Place::new();
    let engine = flashtune::Engine::builder()
        .device(flashtune::DeviceSpec::Cpu)
        .cache_dir(place.cache())
        .policy(flashtune::Policy::Tune)
        .build()
        .unwrap();
    let mask = flashtune::Mask::Full;
    let problem = flashtune::Problem::forward(DType::F32, 16, mask.kind()).unwrap();
    let shape = flashtune::Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 32, kv_len: 32, mask };
    let plan = engine.plan(&problem, &shape).unwrap();
    assert_eq!(plan.status(), flashtune::Status::Tuned, "{}", plan.explain());
    assert!(plan.record().is_some_and(|r| !r.finalists.is_empty()));
}

#[test]
fn the_tune_policy_without_a_place_for_results_computes_all_the_same() {
    let place = Place::new();
    std::fs::write(place.cache(), "a file where the cache should be").unwrap();
    let engine = flashtune::Engine::builder()
        .device(flashtune::DeviceSpec::Cpu)
        .cache_dir(place.cache())
        .policy(flashtune::Policy::Tune)
        .build()
        .unwrap();
    let mask = flashtune::Mask::Full;
    let problem = flashtune::Problem::forward(DType::F32, 16, mask.kind()).unwrap();
    let shape = flashtune::Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 32, kv_len: 32, mask };
    let plan = engine.plan(&problem, &shape).unwrap();
    assert_eq!(plan.status(), flashtune::Status::Default, "{}", plan.explain());
    // Asking for a tuning by name is another matter.
    assert!(engine.tune(&problem, &shape).unwrap_err().to_string().contains("FLASHTUNE_CACHE"));
}

#[test]
fn a_record_tells_its_whole_story() {
    let place = Place::new();
    let tuned = &place.tune_small()["tuned"][0];
    let explain = [&["explain"], SMALL, &["--story"]].concat();
    let told = &place.json(&explain)[0];
    let story = &told["story"];
    assert_eq!(told["status"]["kind"], "tuned", "{told}");
    assert_eq!(story["candidates"].as_array().unwrap().len(), tuned["trials"].as_array().unwrap().len());
    // The evidence itself: every finalist's times, round by round.
    let finalists = |i: usize| &story["finalists"][i];
    for finalist in story["finalists"].as_array().unwrap() {
        let rounds = finalist["rounds_ns"].as_array().unwrap();
        // How many there are is a matter of the time that was left.
        assert_eq!(rounds.len(), finalists(0)["rounds_ns"].as_array().unwrap().len(), "{finalist}");
        assert!(rounds.iter().all(|ns| ns.as_u64().unwrap() > 0), "{finalist}");
    }
    let seconds = |name: &str| story[name].as_f64().unwrap();
    assert!(seconds("device_seconds") + seconds("waited_seconds") <= seconds("seconds"), "{story}");
    // Those who left the race before it have the times by which they left.
    let candidates = story["candidates"].as_array().unwrap();
    let timed: Vec<_> = candidates.iter().filter(|c| c["median_us"].is_f64()).collect();
    let times = |c: &serde_json::Value| -> Vec<u64> {
        c["race_ns"].as_array().unwrap().iter().map(|ns| ns.as_u64().unwrap()).collect()
    };
    // 24 times on a calm machine; noise asks for up to 40 times as many (tuner/src/race.rs).
    assert!(timed.len() > 1 && timed.iter().all(|c| (1..=24 * 40).contains(&times(c).len())), "{story}");
    for candidate in &timed {
        let rounds = story["finalists"].as_array().unwrap().iter().find(|f| f["schedule"] == candidate["schedule"]);
        let rounds = rounds.map_or(0, |f| f["rounds_ns"].as_array().unwrap().len());
        assert_eq!(times(candidate).len() + rounds, candidate["samples"].as_u64().unwrap() as usize, "{candidate}");
    }
    for candidate in candidates {
        assert!(candidate["median_us"].is_f64() || !candidate["reason"].as_str().unwrap().is_empty(), "{candidate}");
    }
    let finalists = story["finalists"].as_array().unwrap();
    assert!(finalists.iter().any(|f| f["is_winner"] == true && f["over_winner"] == 1.0), "{story}");
    assert!(story["age_s"].as_u64().unwrap() < 600 && story["space"].as_u64().unwrap() > 4, "{story}");
    let text = String::from_utf8(place.flashtune(&explain).output().unwrap().stdout).unwrap();
    for word in ["search", "margin", "conditions", "winner", "candidate", "out at", "ago"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    // What ran when: as a chart, as data, as a trace.
    let trace = place.path("trace.json");
    let timeline = [&explain[..], &["--timeline", "--trace", trace.to_str().unwrap()]].concat();
    let spans = place.json(&timeline)[0]["timeline"]["spans"].as_array().unwrap().clone();
    let of = |activity: &str| spans.iter().filter(|s| s["activity"] == activity).count();
    assert_eq!(of("compile"), story["compiled"].as_u64().unwrap() as usize);
    // Last of all the winner has to repeat its answer.
    assert!(spans.last().unwrap()["activity"] == "check_full", "{spans:?}");
    assert!(of("check_small") + 1 >= of("check_full") && of("check_full") > 1 && of("race") > 0, "{spans:?}");
    assert!(spans.iter().all(|s| s["lane"] == "device" || s["activity"] == "compile"), "{spans:?}");
    let events: serde_json::Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let events = events["traceEvents"].as_array().unwrap();
    assert_eq!(events.iter().filter(|e| e["ph"] == "X").count(), spans.len());
    let text = String::from_utf8(place.flashtune(&timeline).output().unwrap().stdout).unwrap();
    assert!(text.contains("device |") && text.contains("compiler 1 |") && text.contains("probe and check"), "{text}");
    // Elsewhere the record has its finalists, and says that the rest stayed behind.
    let bundle = place.path("out.ftb");
    place.json(&["export", bundle.to_str().unwrap()]);
    let elsewhere = Place::new().json(&[&explain[..], &["--bundle", bundle.to_str().unwrap()]].concat());
    let story = &elsewhere[0]["story"];
    assert!(story["candidates"].is_null() && story["journal"].as_str().unwrap().contains("elsewhere"), "{story}");
    assert_eq!(story["finalists"].as_array().unwrap(), finalists);
    // Without a record there is none.
    let none = Place::new().json(&explain);
    assert!(none[0].get("story").is_none());
}
