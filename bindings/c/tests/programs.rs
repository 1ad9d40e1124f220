//! C programs against the header and the shared library, compiled by the system's C compiler.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// The folder with `libflashtune.so`, built now: a library that only offers a C ABI is not built with its tests.
static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| {
    // The test is target/PROFILE/deps/programs-HASH.
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.ancestors().nth(2).expect("a profile's folder").to_owned();
    let profile = match folder.file_name().and_then(|n| n.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let mut cargo = Command::new(env!("CARGO"));
    // The `CC` that everything was built with, or build scripts run again (xtask/src/cc.rs).
    match std::env::var_os("CC_BEFORE_TESTS") {
        Some(cc) if cc.is_empty() => drop(cargo.env_remove("CC")),
        Some(cc) => drop(cargo.env("CC", cc)),
        None => {}
    }
    // The whole workspace, as in a test of it: with the same features nothing is compiled twice. Those that its tests
    // alone need come with the target of a test, which is this one and was built.
    cargo.args(["build", "--quiet", "--workspace", "--lib", "--test", "programs"]);
    cargo.args(["--profile", profile, "--target-dir"]);
    cargo.arg(folder.parent().expect("the target folder")).current_dir(env!("CARGO_MANIFEST_DIR"));
    succeeds(&mut cargo);
    folder
});

fn succeeds(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Compiles a program with warnings as errors and runs it with a cache of its own; gives what it printed.
fn run(source: &str) -> String {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = tempfile::tempdir().unwrap();
    let program = place.path().join("program");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut words = compiler.split_whitespace();
    let mut cc = Command::new(words.next().expect("a compiler"));
    cc.args(words).args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread", "-I"]);
    cc.arg(here.join("include")).arg(here.join(source)).arg("-o").arg(&program);
    cc.arg("-L").arg(&*LIBRARY).args(["-lflashtune", "-lm"]);
    succeeds(&mut cc);
    let mut command = Command::new(program);
    for name in ["FLASHTUNE_TEMPLATES", "FLASHTUNE_BUNDLES", "FLASHTUNE_LOG"] {
        command.env_remove(name);
    }
    command.env("FLASHTUNE_CACHE", place.path().join("cache")).env("LD_LIBRARY_PATH", &*LIBRARY);
    if flashtune_gpu() {
        command.env("HAS_GPU", "1");
    }
    String::from_utf8(succeeds(&mut command).stdout).unwrap()
}

fn flashtune_gpu() -> bool {
    engine::device::driver_present()
}

#[test]
fn the_example_computes_and_explains() {
    let printed = run("examples/forward.c");
    assert!(printed.contains("forward-f32-d64-causal") && printed.contains("largest error"), "{printed}");
}

#[test]
fn bad_input_is_an_error_with_a_text_and_no_crash() {
    print!("{}", run("tests/bad_input.c"));
}

#[test]
fn score_programs_compute_what_plain_loops_do() {
    run("tests/programs.c");
}

#[test]
fn ragged_batches_and_appends_compute_or_say_why_not() {
    print!("{}", run("tests/ragged.c"));
}

#[test]
fn quantised_operands_compute_or_say_why_not() {
    print!("{}", run("tests/quantise.c"));
}

#[test]
fn tensors_of_dlpack_compute_or_say_why_not() {
    print!("{}", run("tests/dlpack.c"));
}

#[test]
fn threads_share_open_and_close_engines() {
    print!("{}", run("tests/threads.c"));
}

#[test]
fn the_header_serves_cxx() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let mut cxx = Command::new("c++");
    cxx.args(["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-x", "c++", "-include"]);
    cxx.arg(header.join("flashtune.h")).arg("/dev/null");
    match Command::new("c++").arg("--version").output() {
        Ok(_) => drop(succeeds(&mut cxx)),
        Err(e) => println!("skipped: no C++ compiler ({e})"),
    }
}
