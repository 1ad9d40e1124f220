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
    let (commands, rest) = help.split_once("Options of every command:").unwrap_or_else(|| panic!("{help}"));
    let (options, variables) = rest.split_once("Environment:").unwrap_or_else(|| panic!("{help}"));
    let listed = commands.lines().chain(variables.lines()).filter_map(|line| line.strip_prefix("  "));
    let listed = listed.filter_map(|line| line.split_whitespace().next());
    // `[env: NAME]`, `[env: NAME=1]`, `[env: NAME, ...]`
    let named = options.split("[env: ").skip(1).filter_map(|rest| rest.split([']', '=', ',']).next());
    let mut words = 0;
    for word in listed.chain(named) {
        assert!(word == "help" || readme.contains(&format!("`{word}`")), "README.md does not describe {word}");
        words += 1;
    }
    assert!(words > 30, "{words}");
}

/// Every Rust file below a folder.
fn sources(folder: &std::path::Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap().to_owned();
        if entry.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&entry, text);
        } else if name.ends_with(".rs") {
            text.push_str(&std::fs::read_to_string(&entry).unwrap());
        }
    }
}

#[test]
fn the_tests_and_files_that_pages_of_promises_name_exist() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = ["docs/trust.md", "docs/serving-tests.md"];
    let page = pages.map(|page| std::fs::read_to_string(root.join(page)).unwrap()).concat();
    let mut text = String::new();
    sources(root, &mut text);
    // What stands between two marks is every other piece.
    let words: Vec<&str> = page.split('`').skip(1).step_by(2).collect();
    let is_test = |w: &&&str| {
        w.matches('_').count() > 2 && w.chars().all(|c| c.is_ascii_lowercase() || "_0123456789".contains(c))
    };
    let missing: Vec<_> = words.iter().filter(is_test).filter(|w| !text.contains(&format!("fn {w}("))).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
    let is_family = |w: &str| ["forward/", "backward/", "append/"].iter().any(|op| w.starts_with(op));
    let is_file = |w: &&&str| w.contains('/') && !w.contains(' ') && !is_family(w);
    let gone: Vec<_> = words.iter().filter(is_file).filter(|w| !root.join(w).exists()).collect();
    assert!(gone.is_empty(), "no such files: {gone:?}");
    assert!(words.iter().filter(is_test).count() > 20);
}
