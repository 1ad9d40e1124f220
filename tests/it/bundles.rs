//! Bundles: out of one cache, into another, and every way of being refused.

use crate::common::{self, NOWHERE, Place, ROOT, SMALL, fails, json, other_cpu_arch};
use flashtune_cache::{Bundle, BundleContents};
use flashtune_codegen::{Family, Schedule};

fn text(path: &std::path::Path) -> &str {
    path.to_str().expect("test paths are text")
}

/// A place with one tuned problem, and its bundle.
fn exported() -> (Place, std::path::PathBuf) {
    let place = Place::new();
    place.tune_small();
    let bundle = place.path("mine.ftb");
    let summary = place.json(&["export", text(&bundle)]);
    assert_eq!(summary["records"], 1, "{summary}");
    assert!(summary["artifacts"].as_u64().unwrap() >= 1, "{summary}");
    (place, bundle)
}

#[test]
fn an_exported_bundle_serves_an_empty_cache_sealed() {
    let (_place, bundle) = exported();
    let fresh = Place::new();
    let explain = [&["explain"], SMALL, &["--policy", "sealed"]].concat();
    fails(fresh.flashtune(&explain).env("CC", NOWHERE), 3, &["sealed"]);

    // Named on the command line, without importing.
    let named = json(fresh.flashtune(&explain).args(["--json", "--bundle", text(&bundle)]).env("CC", NOWHERE));
    assert_eq!(named[0]["status"]["kind"], "tuned", "{named}");
    assert!(named[0]["layer"].as_str().unwrap().contains("mine.ftb"), "{named}");

    // Without any folder to name a cache in.
    let homeless = |args: &[&str]| {
        let mut command = crate::common::command();
        for name in ["HOME", "XDG_CACHE_HOME", "FLASHTUNE_CACHE", "FLASHTUNE_BUNDLES"] {
            command.env_remove(name);
        }
        command.args(["--device", "cpu", "--allow-unsigned"]).args(args);
        command
    };
    let listed = json(&mut homeless(&["list", "--json", "--bundle", text(&bundle)]));
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    let copy = fresh.path("copy.ftb");
    json(&mut homeless(&["export", text(&copy), "--json", "--bundle", text(&bundle)]));
    assert!(copy.is_file());
    fails(&mut homeless(&["list"]), 2, &["FLASHTUNE_CACHE"]);

    // Through the environment.
    let mut env = fresh.flashtune(&explain);
    let env = json(env.arg("--json").env("FLASHTUNE_BUNDLES", &bundle).env("CC", NOWHERE));
    assert_eq!(env[0]["status"]["kind"], "tuned", "{env}");

    // Imported.
    let summary = fresh.json(&["import", text(&bundle)]);
    assert_eq!(summary["records"], 1, "{summary}");
    let imported = json(fresh.flashtune(&explain).arg("--json").env("CC", NOWHERE));
    assert_eq!(imported[0]["layer"], "snapshot", "{imported}");
    assert_eq!(imported[0]["schedule"], named[0]["schedule"]);
}

#[test]
fn a_bundle_for_another_arch_is_refused_by_name_of_the_field() {
    let place = Place::new();
    let bundle = place.path("foreign.ftb");
    let arch = other_cpu_arch().to_string();
    let args = [&["build"], SMALL, &["--arch", &arch, "--out", text(&bundle)]].concat();
    assert_eq!(place.json(&args)["records"], 1);
    fails(&mut place.flashtune(&["import", text(&bundle)]), 2, &["arch", &arch, "foreign.ftb"]);
    assert!(!place.path("cache/v7/snapshot.ftb").exists(), "a refused import leaves the cache alone");

    // Named as a layer it is not an error, but it is not used, and the account says why.
    let explain = [&["explain"], SMALL, &["--bundle", text(&bundle)]].concat();
    let plan = place.json(&explain);
    assert_eq!(plan[0]["status"]["kind"], "default", "{plan}");
    let refusals = plan[0]["refusals"].to_string();
    assert!(refusals.contains("foreign.ftb") && refusals.contains("arch is"), "{refusals}");
}

#[test]
fn a_bundle_of_other_templates_is_refused_by_name_of_the_field() {
    let place = Place::new();
    // The real template with one line more is another one.
    let folder = place.path("templates");
    std::fs::create_dir_all(folder.join("forward")).unwrap();
    let own = std::fs::read_to_string(format!("{ROOT}/templates/forward/cpu.c")).unwrap();
    std::fs::write(folder.join("forward/cpu.c"), format!("{own}\n#define EDITED 1\n")).unwrap();
    let bundle = place.path("edited.ftb");
    let args = [&["tune"], SMALL, &["--trials", "1", "--budget-s", "5", "--templates", text(&folder)]].concat();
    place.json(&args);
    place.json(&["export", text(&bundle), "--templates", text(&folder)]);

    let fresh = Place::new();
    fails(&mut fresh.flashtune(&["import", text(&bundle)]), 2, &["templates", "edited.ftb"]);
    let explain = [&["explain"], SMALL, &["--bundle", text(&bundle), "--policy", "sealed"]].concat();
    fails(fresh.flashtune(&explain).env("CC", NOWHERE), 3, &["templates is"]);
    // With the templates that it was made from, it serves.
    let with = [&["explain"], SMALL, &["--bundle", text(&bundle), "--templates", text(&folder)]].concat();
    assert_eq!(fresh.json(&with)[0]["status"]["kind"], "tuned");
}

#[test]
fn a_bundle_that_was_built_ahead_of_time_serves_sealed_as_untuned() {
    let place = Place::new();
    let bundle = place.path("no/such/folder/ahead.ftb");
    let arch = common::host_arch().to_string();
    let args = [&["build"], SMALL, &["--arch", &arch, "--out", text(&bundle)]].concat();
    place.json(&args);
    let explain = [&["explain"], SMALL, &["--bundle", text(&bundle), "--policy", "sealed"]].concat();
    let plan = json(place.flashtune(&explain).arg("--json").env("CC", NOWHERE));
    assert_eq!(plan[0]["status"]["kind"], "untuned", "{plan}");
    // A folder works as well, as a cache.
    let folder = place.path("built");
    let args = [&["build"], SMALL, &["--arch", &arch, "--out", text(&folder)]].concat();
    place.json(&args);
    let explain = [&["explain"], SMALL, &["--policy", "sealed", "--cache", text(&folder)]].concat();
    let mut command = crate::common::command();
    let plan = json(command.args(["--device", "cpu", "--json"]).args(&explain).env("CC", NOWHERE));
    assert_eq!(plan[0]["status"]["kind"], "untuned", "{plan}");
}

#[test]
fn the_same_build_gives_the_same_bytes() {
    let place = Place::new();
    let arch = common::host_arch().to_string();
    let build = |name: &str, when: &str| {
        let path = place.path(name);
        let args = [&["build"], SMALL, &["--arch", &arch, "--out", text(&path)]].concat();
        json(place.flashtune(&args).arg("--json").env("SOURCE_DATE_EPOCH", when));
        std::fs::read(path).unwrap()
    };
    let first = build("first.ftb", "1700000000");
    assert!(first == build("second.ftb", "1700000000"), "how long a compilation took is no part of it");
    assert!(first != build("later.ftb", "1700000001"));
    let args = [&["build"], SMALL, &["--arch", &arch, "--out", "never.ftb"]].concat();
    fails(place.flashtune(&args).env("SOURCE_DATE_EPOCH", "today"), 2, &["SOURCE_DATE_EPOCH", "`today`"]);
}

#[test]
fn a_bundle_for_another_arch_or_template_set_is_rebuilt_from_its_recipes() {
    let place = Place::new();
    let (foreign, ours) = (place.path("foreign.ftb"), place.path("ours.ftb"));
    let (there, here) = (other_cpu_arch().to_string(), common::host_arch().to_string());
    // Made elsewhere, with other templates.
    let folder = place.path("templates");
    std::fs::create_dir_all(folder.join("forward")).unwrap();
    let own = std::fs::read_to_string(format!("{ROOT}/templates/forward/cpu.c")).unwrap();
    std::fs::write(folder.join("forward/cpu.c"), format!("{own}\n#define EDITED 1\n")).unwrap();
    let build =
        [&["build"], SMALL, &["--arch", &there, "--out", text(&foreign), "--templates", text(&folder)]].concat();
    place.json(&build);
    let sealed = [&["explain"], SMALL, &["--policy", "sealed", "--bundle"]].concat();
    fails(&mut place.flashtune(&[&sealed[..], &[text(&foreign)]].concat()), 3, &["--relink"]);

    let relinked = place.json(&["build", "--relink", text(&foreign), "--arch", &here, "--out", text(&ours)]);
    let summary = &relinked["relinked"];
    assert_eq!((relinked["records"].as_u64(), summary["left_out"].as_array().map(Vec::len)), (Some(1), Some(0)));
    assert_eq!(summary["carried"].as_u64().unwrap() + summary["replaced"].as_u64().unwrap(), 1, "{relinked}");
    let plan = json(place.flashtune(&[&sealed[..], &[text(&ours), "--json"]].concat()).env("CC", NOWHERE));
    assert_eq!(plan[0]["status"]["kind"], "untuned", "{plan}");

    // Measurements do not carry over, not even on the same arch; schedules do.
    place.tune_small();
    let (tuned, again) = (place.path("tuned.ftb"), place.path("again.ftb"));
    place.json(&["export", text(&tuned)]);
    let relinked = place.json(&["build", "--relink", text(&tuned), "--arch", &here, "--out", text(&again)]);
    assert_eq!(relinked["relinked"]["carried"], 1, "{relinked}");
    let list = place.json(&["list", "--bundle", text(&again)]);
    let of =
        |layer: &str| list.as_array().unwrap().iter().find(|r| r["layer"].as_str().unwrap().ends_with(layer)).cloned();
    let (new, old) = (of("again.ftb").unwrap(), of("snapshot").unwrap());
    assert_eq!((&new["schedule"], new["median_us"].is_null()), (&old["schedule"], true), "{list}");
    fails(&mut place.flashtune(&["build", "--relink", NOWHERE, "--arch", &here, "--out", text(&ours)]), 2, &[NOWHERE]);
}

#[test]
fn what_a_named_bundle_serves_is_tried_before_a_result_of_ones_own_goes_first() {
    // Their winner is one that two trials of ours would not come to: the last of the schedules that were timed.
    let (place, bundle) = exported();
    let timed = place.json(&[&["explain", "--story"], SMALL].concat());
    let candidates = timed[0]["story"]["candidates"].as_array().unwrap();
    let slowest = candidates.iter().rfind(|c| c["median_us"].is_number()).unwrap()["schedule"].clone();
    let theirs = place.path("theirs.ftb");
    crown(&bundle, &theirs, slowest.as_str().unwrap());
    let fresh = Place::new();
    let tune = [&["--bundle", text(&theirs), "tune", "--trials", "2", "--budget-s", "10"], SMALL].concat();
    let tuned = &fresh.json(&tune)["tuned"][0];
    let tried: Vec<_> = tuned["trials"].as_array().unwrap().iter().map(|t| &t["schedule"]).collect();
    assert!(tried.len() <= 2 && tried.contains(&&slowest), "{slowest} is not among {tried:?}");
}

/// A bundle with the same record but another winner, one of those that were compiled.
fn crown(from: &std::path::Path, to: &std::path::Path, schedule: &str) {
    let bundle = Bundle::map(from).unwrap();
    let (mut record, _) = bundle.records().next().unwrap().unwrap();
    let arch = record.key.device.arch;
    let space = Schedule::space(Family::ForwardCpu, &record.key.problem, arch);
    let named =
        space.into_iter().chain(record.finalists.iter().map(|f| f.schedule)).find(|s| s.to_string() == schedule);
    record.schedule = named.expect("it is of the space");
    record.finalists[0].schedule = record.schedule;
    let mut load = |key: &_| bundle.artifact(key).unwrap();
    BundleContents { records: vec![record], artifacts: Vec::new(), load: &mut load, created: 1 }.write(to).unwrap();
}

#[test]
fn a_damaged_bundle_is_an_error_and_a_damaged_snapshot_a_miss() {
    let (place, bundle) = exported();
    let mut bytes = std::fs::read(&bundle).unwrap();
    let cut = place.path("cut.ftb");
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    fails(&mut place.flashtune(&["import", text(&cut)]), 2, &["cut.ftb"]);
    fails(&mut place.flashtune(&["list", "--bundle", text(&cut)]), 2, &["cut.ftb"]);
    let foreign = place.path("foreign.ftb");
    std::fs::write(&foreign, "not a bundle at all, but long enough to have a header of some hundred bytes ".repeat(9))
        .unwrap();
    fails(&mut place.flashtune(&["import", text(&foreign)]), 2, &["foreign.ftb"]);
    fails(&mut place.flashtune(&["import", text(&place.path("absent.ftb"))]), 2, &["absent.ftb"]);

    // The snapshot is nobody's wish: what is wrong with it costs a warning and the records in it.
    let snapshot = place.path("cache/v7/snapshot.ftb");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    std::fs::write(&snapshot, &bytes[..middle]).unwrap();
    let plan = place.json(&[&["explain"], SMALL].concat());
    assert_eq!(plan[0]["status"]["kind"], "default", "{plan}");
}

#[test]
fn exporting_nothing_is_an_error_and_keeps_the_old_file() {
    let place = Place::new();
    let file = place.path("old.ftb");
    std::fs::write(&file, "something of value").unwrap();
    fails(&mut place.flashtune(&["export", text(&file)]), 2, &["no record", "tune"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "something of value");
}
