//! The examples do what their first lines say, in a process and a cache folder of their own.

use std::path::Path;
use std::process::Command;

/// What an example prints.
fn printed(name: &str) -> String {
    // Tests of the workspace have built it, beside the command.
    let program = Path::new(env!("CARGO_BIN_EXE_flashtune")).with_file_name("examples").join(name);
    if !program.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        // The `CC` that everything was built with (xtask/src/cc.rs).
        match std::env::var_os("CC_BEFORE_TESTS") {
            Some(cc) if cc.is_empty() => drop(cargo.env_remove("CC")),
            Some(cc) => drop(cargo.env("CC", cc)),
            None => {}
        }
        let built = cargo.args(["build", "--quiet", "-p", "flashtune", "--example", name]).status();
        assert!(built.unwrap().success(), "{name}");
    }
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(program).env("FLASHTUNE_CACHE", folder.path().join("cache")).output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_program_is_compiled_once_for_all_its_documents() {
    let said = printed("score_program");
    assert!(said.contains("documents of 100: o[1, 2, 200, 0] = ") && said.contains("documents of 40: "), "{said}");
    let of = |part: &str| said.lines().filter(|l| l.starts_with(part)).collect::<Vec<_>>();
    assert!(of("problem").len() == 2 && of("problem")[0] == of("problem")[1], "{said}");
}

#[test]
fn a_sealed_server_serves_what_it_did_not_foresee() {
    let said = printed("sealed_server");
    assert!(said.starts_with("sealed 3 classes; digest ") && said.contains("\n700 rows: "), "{said}");
}

#[test]
fn a_shipped_bundle_serves_where_no_compiler_runs() {
    let said = printed("ship_bundle");
    for part in ["exported 1 records and 1 kernels", "policy     sealed", "status     tuned", "kernels.ftb"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}
