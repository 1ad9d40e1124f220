//! Tuning spread over processes, hosts and devices, and brought together again.

use crate::common::{NOWHERE, Place, fails, json};
use flashtune_cache::{BundleContents, CacheDir, Finalist, Layers, Record};
use flashtune_codegen::{Family, Kernel, Schedule};
use std::collections::BTreeSet;

/// Three small problems.
const CASES: &[&str] =
    &["--dtype", "f32", "--head-dim", "16,24,32", "--mask", "causal", "--heads", "2", "--q-len", "64"];
const QUICK: &[&str] = &["--trials", "3", "--budget-s", "12"];

fn tune(place: &Place, more: &[&str]) -> serde_json::Value {
    place.tune(&[CASES, QUICK, more].concat())
}

fn problems(report: &serde_json::Value) -> Vec<String> {
    report["tuned"].as_array().unwrap().iter().map(|t| t["problem"].as_str().unwrap().to_owned()).collect()
}

fn text(path: &std::path::Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn shards_that_are_tuned_apart_and_merged_are_the_whole() {
    let together = Place::new();
    let mut all = BTreeSet::new();
    let mut files = Vec::new();
    for shard in ["0/2", "1/2"] {
        // Hosts that share nothing.
        let host = Place::new();
        let report = tune(&host, &["--shard", shard]);
        for problem in problems(&report) {
            assert!(all.insert(problem), "two shards did the same");
        }
        let file = together.path(&format!("shard-{}.ftb", &shard[..1]));
        host.json(&["export", text(&file)]);
        files.push(file);
    }
    assert_eq!(all.len(), 3);
    // More shards than work: that is no error.
    let idle = tune(&Place::new(), &["--shard", "7/8"]);
    assert!(problems(&idle).is_empty());

    let (one, other) = (together.path("one.ftb"), together.path("other.ftb"));
    let merged = together.json(&["merge", text(&files[0]), text(&files[1]), "--out", text(&one)]);
    assert_eq!((merged["records"].as_u64(), merged["contested"].as_array().map(Vec::len)), (Some(3), Some(0)));
    together.json(&["merge", text(&files[1]), text(&files[0]), text(&one), "--out", text(&other)]);
    assert!(std::fs::read(&one).unwrap() == std::fs::read(&other).unwrap());
    let explain = [&["explain"], CASES, &["--policy", "sealed", "--bundle", text(&one), "--json"]].concat();
    let plans = json(Place::new().flashtune(&explain).env("CC", NOWHERE));
    assert!(plans.as_array().unwrap().iter().all(|p| p["status"]["kind"] == "tuned"), "{plans}");
}

#[test]
fn what_hosts_disagree_about_is_raced_again() {
    let place = Place::new();
    let case = ["--dtype", "f32", "--head-dim", "32", "--mask", "causal", "--heads", "2", "--q-len", "128"];
    place.tune(&[&case[..], QUICK].concat());
    let layers = Layers::open(&CacheDir::at(place.cache()), &[], None).unwrap();
    let record = layers.records()[0].1.clone();
    // Another host saw another schedule win, and ours not at all.
    let (problem, arch) = (record.key.problem, record.key.device.arch);
    let fits = |s: &Schedule| *s != record.schedule && Kernel { problem, schedule: *s, arch }.check().is_ok();
    let other = Schedule::space(Family::ForwardCpu, &problem, arch).into_iter().find(fits).unwrap();
    let mut theirs = Record { schedule: other, ..Record::clone(&record) };
    theirs.finalists = vec![Finalist { schedule: other, median_us: 1.0, ..record.finalists[0].clone() }];
    theirs.provenance.unix_time -= 100;
    let mut ours = Record::clone(&record);
    ours.finalists.retain(|f| f.schedule == record.schedule);
    let file = |name: &str, record: &Record| {
        let mut load = |key: &_| layers.artifact(key).map(|(a, _)| a);
        let path = place.path(name);
        let records = vec![record.clone()];
        BundleContents { records, artifacts: Vec::new(), load: &mut load, created: 1 }.write(&path).unwrap();
        path
    };
    let (a, b, both) = (file("a.ftb", &ours), file("b.ftb", &theirs), place.path("both.ftb"));
    let merged = place.json(&["merge", text(&a), text(&b), "--out", text(&both)]);
    let contested = merged["contested"][0].as_str().unwrap();
    assert!(contested.contains(&ours.schedule.to_string()) && contested.contains(&theirs.schedule.to_string()));

    let judge = Place::new();
    judge.json(&["import", text(&both)]);
    let raced = judge.tune(&["--contested", "--budget-s", "12"]);
    let trials = raced["tuned"][0]["trials"].as_array().unwrap();
    let tried: BTreeSet<&str> = trials.iter().map(|t| t["schedule"].as_str().unwrap()).collect();
    for one in [&ours, &theirs] {
        assert!(tried.contains(one.schedule.to_string().as_str()), "{tried:?}");
    }
    // It is settled, and whoever still brings the old findings changes nothing.
    assert!(problems(&judge.json(&["tune", "--contested"])).is_empty());
    let (settled, again) = (judge.path("settled.ftb"), judge.path("again.ftb"));
    judge.json(&["export", text(&settled)]);
    let merged = judge.json(&["merge", text(&settled), text(&a), text(&b), text(&both), "--out", text(&again)]);
    assert_eq!(merged["contested"].as_array().map(Vec::len), Some(0));
    let listed = json(&mut Place::new().flashtune(&["list", "--bundle", text(&again), "--json"]));
    assert_eq!(listed[0]["schedule"], raced["tuned"][0]["schedule"]);
}

#[test]
fn several_workers_share_the_work() {
    // Two workers of one processor take turns at measuring; on a host with GPUs each has its own.
    let place = Place::new();
    let report = tune(&place, &["--devices", "cpu,cpu"]);
    assert_eq!(problems(&report).len(), 3, "{report}");
    assert_eq!(place.json(&["list"]).as_array().unwrap().len(), 3);
    fails(&mut place.flashtune(&["tune", "--devices", "cpu,gpu"]), 2, &["gpu", "cuda:N"]);
    fails(&mut place.flashtune(&["tune", "--shard", "2/2"]), 2, &["I/N"]);
}

#[test]
fn sizes_tuned_together_share_few_kernels() {
    let place = Place::new();
    let case = ["--dtype", "f32", "--head-dim", "32", "--mask", "causal", "--heads", "2", "--q-len", "64,128,256"];
    let report = place.tune(&[&["--together"], &case[..], &["--trials", "4", "--budget-s", "24"]].concat());
    let tuned = report["tuned"].as_array().unwrap();
    let winners: BTreeSet<&str> = tuned.iter().map(|t| t["schedule"].as_str().unwrap()).collect();
    assert!(tuned.len() == 3 && winners.len() <= 3, "{winners:?}");
    for class in tuned {
        // Of those that reached the final: medians of who left the race before are of few rounds.
        let finalists = class["record"]["finalists"].as_array().unwrap().iter();
        let best = finalists.filter_map(|f| f["median_us"].as_f64()).fold(f64::INFINITY, f64::min);
        let won = class["median_us"].as_f64().unwrap();
        // 3 % is the promise; the record's own figure comes of more samples.
        assert!(won <= best * 1.06, "{won} of {best}: {class}");
    }
    assert_eq!(place.json(&["list"]).as_array().unwrap().len(), 3);
    // The option's older name.
    let again = place.json(&[&["tune", "--family"], &case[..]].concat());
    assert!(again["tuned"].as_array().unwrap().iter().all(|t| t["cached"] == true));
}
