//! Results for eager launches and for replayed graphs, from the command line: neither answers for the other.

use crate::common::{self, Place, fails};
use flashtune::Launches;
use flashtune_cache::{ArtifactFiles, CacheDir, Record, Store};
use std::path::Path;
use std::time::Duration;

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are text")
}

#[test]
fn graphs_are_refused_on_the_cpu_with_the_reason() {
    let place = Place::new();
    let words = ["launches = graph", "a launch on the CPU is a call", "name a CUDA device"];
    for command in ["tune", "explain", "bench"] {
        let args = [&[command], common::SMALL, &["--graph"]].concat();
        fails(&mut place.flashtune(&args), 2, &words);
    }
    let explain = [&["explain"], common::SMALL].concat();
    fails(place.flashtune(&explain).env("FLASHTUNE_LAUNCHES", "graph"), 2, &words);
    fails(place.flashtune(&explain).env("FLASHTUNE_LAUNCHES", "lazy"), 2, &["`lazy`", "eager or graph"]);
    assert!(!place.cache().exists(), "nothing was begun");
}

/// What the cache holds, as if it had been measured for this way of launching.
fn relabel(place: &Place, launches: Launches) -> Record {
    let dir = CacheDir::at(place.cache());
    let store = Store::open_within(&dir, Duration::from_secs(9)).unwrap();
    let mut record = store.records().unwrap().pop().expect("a record");
    record.key.launches = launches;
    store.put_record(&record).unwrap();
    store.publish(&ArtifactFiles::new(&dir)).unwrap();
    record
}

/// `launches` of every record that `list` shows, in order.
fn listed(place: &Place, more: &[&str]) -> Vec<String> {
    let list = place.json(&[&["list"], more].concat());
    let mut all: Vec<String> =
        list.as_array().unwrap().iter().map(|r| r["launches"].as_str().unwrap().to_owned()).collect();
    all.sort();
    all
}

#[test]
fn how_a_result_was_launched_is_kept_told_and_carried_along() {
    let measured = Place::new();
    measured.tune_small();
    // Elsewhere the same is known for graphs alone.
    let place = Place::new();
    let file = place.path("eager.ftb");
    measured.json(&["export", text(&file)]);
    let graphs = Place::new();
    graphs.json(&["import", text(&file)]);
    relabel(&graphs, Launches::Graph);
    assert_eq!(listed(&graphs, &[]), ["eager", "graph"]);
    let both = place.path("both.ftb");
    assert_eq!(graphs.json(&["export", text(&both)])["records"], 2);
    let merged = place.path("merged.ftb");
    let summary = place.json(&["merge", text(&file), text(&both), "--out", text(&merged)]);
    assert_eq!((summary["records"].as_u64(), summary["contested"].as_array().map(Vec::len)), (Some(2), Some(0)));
    place.json(&["import", text(&merged)]);
    assert_eq!(listed(&place, &[]), ["eager", "graph"]);
    let printed = place.flashtune(&["list"]).output().unwrap();
    let printed = String::from_utf8(printed.stdout).unwrap();
    assert!(printed.contains("launches") && printed.contains("graph"), "{printed}");
}

#[test]
fn a_result_for_graphs_serves_eager_calls_as_provisional_until_they_are_tuned_for() {
    let place = Place::new();
    place.tune_small();
    let dir = CacheDir::at(place.cache());
    let graph = relabel(&place, Launches::Graph);
    // Only that one is left, as after an import from a host that replays graphs.
    let only = place.path("graph.ftb");
    let artifacts = ArtifactFiles::new(&dir);
    let mut load = |key: &_| artifacts.get(key);
    let contents = flashtune_cache::BundleContents {
        records: vec![graph.clone()],
        artifacts: Vec::new(),
        load: &mut load,
        created: 1,
    };
    contents.write(&only).unwrap();
    let there = Place::new();
    there.json(&["import", text(&only)]);

    let explain = [&["explain", "--story"], common::SMALL].concat();
    let told = &there.json(&explain)[0];
    assert_eq!((told["status"]["kind"].as_str(), told["launches"].as_str()), (Some("provisional"), Some("graph")));
    assert_eq!(told["story"]["launches"], "graph");
    let because = told["because"].as_str().unwrap();
    assert!(because.contains("replays of a graph") && because.contains("eager"), "{because}");
    assert_eq!(told["schedule"].as_str(), Some(graph.schedule.to_string().as_str()), "it runs all the same");

    // It is no answer to a tuning for eager launches, which leaves it where it is.
    let tuned = there.tune_small();
    assert_eq!(
        (tuned["tuned"][0]["cached"].as_bool(), tuned["tuned"][0]["launches"].as_str()),
        (Some(false), Some("eager"))
    );
    assert_eq!(listed(&there, &[]), ["eager", "graph"]);
    let told = &there.json(&explain)[0];
    assert_eq!((told["status"]["kind"].as_str(), told["launches"].as_str()), (Some("tuned"), Some("eager")));
}
