//! Calls that a host made, as lines of `flashtune bench` that run as they stand (`FLASHTUNE_LOG_CALLS`).

use crate::common::Place;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs `bench` with a log, and gives the log's lines.
fn logged(place: &Place, log: &Path, args: &[&str]) -> Vec<String> {
    let brief = ["bench", "--no-ceilings", "--rounds", "1"];
    place.flashtune(&[&brief[..], args].concat()).env("FLASHTUNE_LOG_CALLS", log).assert().success();
    lines(log)
}

fn lines(log: &Path) -> Vec<String> {
    std::fs::read_to_string(log).unwrap().lines().map(str::to_owned).collect()
}

/// Runs a line in a shell, with a log of its own, whose lines it gives.
fn replayed(place: &Place, line: &str, log: PathBuf) -> Vec<String> {
    let program = assert_cmd::cargo::cargo_bin("flashtune");
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).env("PATH", path).env("FLASHTUNE_CACHE", place.cache());
    shell.env("FLASHTUNE_LOG_CALLS", &log);
    let output = shell.output().unwrap();
    assert!(output.status.success(), "{line}\n{}", String::from_utf8_lossy(&output.stderr));
    lines(&log)
}

#[test]
fn gradients_are_logged_with_their_program_and_replay_to_the_same_lines() {
    let place = Place::new();
    let log = place.path("calls");
    let case = ["--op", "backward", "--dtype", "f32", "--head-dim", "16", "--head-dim-v", "24", "--heads", "4"];
    let sizes = ["--kv-heads", "2", "--q-len", "33", "--kv-len", "40", "--mask", "causal"];
    // It reads a tensor, which is declared in its text.
    let score = ["--score", "alibi"];
    let told = logged(&place, &log, &[&case[..], &sizes, &score].concat());
    assert_eq!(told.len(), 2, "{told:#?}");
    let forward =
        "flashtune bench --device cpu --dtype f32 --head-dim 16 --head-dim-v 24 --mask causal --heads 4 --kv-heads 2";
    assert!(told[0].starts_with(forward) && told[0].contains(" --score '") && told[0].contains(", lse"), "{}", told[0]);
    assert!(
        told[1].starts_with("flashtune bench --op backward --device cpu ")
            && told[1].contains("# backward, strides dout ")
    );
    // The same again is no new line.
    assert_eq!(logged(&place, &log, &[&case[..], &sizes, &score].concat()), told);
    // As it stands, and once more what it logs is what was logged.
    assert_eq!(replayed(&place, &told[1], place.path("again")), told);
    replayed_forward(&place, &told[0]);
}

/// Of forward passes the kernels are timed by themselves, so nothing is logged.
fn replayed_forward(place: &Place, line: &str) {
    let brief = line.replacen("bench", "bench --no-ceilings --rounds 1", 1);
    std::fs::write(place.path("none"), "").unwrap();
    assert_eq!(replayed(place, &brief, place.path("none")), Vec::<String>::new());
}

#[test]
fn ragged_batches_and_appends_replay_to_the_same_lines() {
    let place = Place::new();
    let log = place.path("calls");
    let model = ["--dtype", "bf16", "--head-dim", "16", "--heads", "4", "--kv-heads", "2", "--kv-dtype", "e4m3"];
    let batch = ["--kv-lens", "3x70", "--q-len", "2", "--pages", "32", "--layers", "1", "--mask", "causal"];
    let told = logged(&place, &log, &[&model[..], &batch].concat());
    let of = |op: &str| told.iter().find(|line| line.contains(op)).unwrap_or_else(|| panic!("{op}: {told:#?}")).clone();
    let append = of("# append");
    assert!(
        append.starts_with("flashtune bench --op append --device cpu --dtype bf16 --head-dim 16 --heads 2"),
        "{append}"
    );
    let brief = |line: &str| line.replacen("bench", "bench --no-ceilings --rounds 1", 1);
    assert_eq!(replayed(&place, &brief(&append), place.path("appends")), [append]);
    // A served day makes its calls through the engine.
    let (day, log) = (place.path("day.txt"), place.path("day"));
    std::fs::write(&day, "70 2\n40 3\n").unwrap();
    let day = ["--trace", day.to_str().unwrap(), "--layers", "1", "--pages", "32"];
    let told = logged(&place, &log, &[&model[..], &day].concat());
    let ragged: Vec<_> = told.iter().filter(|line| line.contains("# ragged")).collect();
    assert!(!ragged.is_empty(), "{told:#?}");
    for line in ragged {
        let words = [" --kv-lens ", " --q-len ", " --pages 32 --kv-dtype e4m3  # ragged, ", "pages of 32"];
        assert!(line.starts_with("flashtune bench ") && words.iter().all(|w| line.contains(w)), "{line}");
        std::fs::write(place.path("ragged"), "").unwrap();
        replayed(&place, &brief(line), place.path("ragged"));
    }
}
