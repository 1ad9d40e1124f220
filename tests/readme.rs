//! What the README says is what there is.

use std::fs::read_to_string;

#[test]
fn the_host_program_is_the_example_that_is_compiled() {
    let (readme, example) = (read_to_string("README.md").unwrap(), read_to_string("examples/host.rs").unwrap());
    assert!(readme.contains(&example), "README.md and examples/host.rs differ");
    assert!(example.lines().count() <= 20);
}

#[test]
fn ci_runs_the_second_command() {
    let (readme, ci) = (read_to_string("README.md").unwrap(), read_to_string(".ci/run").unwrap());
    let commands: Vec<_> = readme.lines().filter(|l| l.starts_with("cargo ")).collect();
    let second = commands[1].split('#').next().unwrap().trim();
    assert!(ci.lines().any(|l| l == second), "{second} is not in .ci/run");
}

#[test]
fn every_command_and_variable_of_the_help_is_described() {
    let help = assert_cmd::Command::cargo_bin("flashtune").unwrap().arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let readme = read_to_string("README.md").unwrap();
    let section = |from: &str| help.split(from).nth(1).unwrap_or_else(|| panic!("no {from} in {help}")).lines().skip(1);
    let mut words = 0;
    for line in section("Commands:").take_while(|l| !l.is_empty()).chain(section("Environment:")) {
        let word = line.split_whitespace().next().unwrap_or("help");
        assert!(word == "help" || readme.contains(&format!("`{word}`")), "README.md does not describe {word}");
        words += 1;
    }
    assert!(words > 15, "{words}");
}
