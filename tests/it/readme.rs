//! What the README and the pages beside it say is what there is.

use crate::common::ROOT;
use std::fs::read_to_string;

/// Pages whose commands are tried: the README, and those of the folder `docs` itself.
fn pages() -> Vec<(String, String)> {
    let docs = std::fs::read_dir(format!("{ROOT}/docs")).unwrap().map(|e| e.unwrap().path());
    let readme = format!("{ROOT}/README.md").into();
    let pages = docs.filter(|p| p.extension().is_some_and(|e| e == "md")).chain([readme]);
    pages.map(|p| (p.display().to_string(), read_to_string(p).unwrap())).collect()
}

/// The words of a line as a shell has them, up to a comment or to what is done with the output.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, '|' | '>' | '&' | ';') => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// A line with its variables set: numbers of tasks are 0, of how many 8.
fn with_variables(line: &str) -> String {
    let mut parts = line.split('$');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |line, rest| {
        let rest = rest.trim_start_matches('{');
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let value = if ["_ID", "INDEX", "RANK"].iter().any(|part| rest[..end].ends_with(part)) { "0" } else { "8" };
        line + value + rest[end..].trim_start_matches('}')
    })
}

/// Lines of shell blocks are read to their end before help is given: an option or a value that is not there is an
/// error.
#[test]
fn commands_of_the_pages_are_taken() {
    let (mut tried, mut refused) = (0, String::new());
    for (page, text) in pages() {
        let blocks = text.split("```").skip(1).step_by(2).filter(|block| block.starts_with("sh\n"));
        let joined = blocks.map(|block| block.replace("\\\n", " ")).collect::<Vec<_>>().concat();
        let parts = joined.lines().flat_map(|line| line.split(" && ")).map(str::trim);
        for line in parts.filter(|line| line.starts_with("flashtune ")) {
            let words = words(&with_variables(line));
            let mut command = crate::common::command();
            let done = command.args(&words[1..]).arg("--help").output().unwrap();
            let told = String::from_utf8_lossy(&done.stderr);
            if !done.status.success() || !told.is_empty() {
                refused += &format!("{page}: {line}\n{told}");
            }
            tried += 1;
        }
    }
    assert!(tried > 30 && refused.is_empty(), "of {tried} commands:\n{refused}");
}

/// The same of Kubernetes' manifests: commands as lists, and lines of shell in them.
#[test]
fn commands_in_manifests_are_taken() {
    let fleet = read_to_string(format!("{ROOT}/docs/fleet.md")).unwrap();
    let blocks = fleet.split("```").skip(1).step_by(2).filter(|block| block.starts_with("yaml\n"));
    let mut tried = 0;
    for line in blocks.flat_map(str::lines) {
        let words = match line.split_once("command: [\"flashtune\", ") {
            Some((_, rest)) => serde_json::from_str::<Vec<String>>(&format!("[{rest}")).unwrap(),
            None if line.trim().starts_with("flashtune ") => words(&with_variables(line)).split_off(1),
            None => continue,
        };
        let done = crate::common::command().args(&words).arg("--help").output().unwrap();
        assert!(done.status.success(), "{line}\n{}", String::from_utf8_lossy(&done.stderr));
        tried += 1;
    }
    assert_eq!(tried, 3);
    for command in ["tune", "export", "merge", "keygen", "sign", "push", "pull"] {
        let named = fleet.match_indices(&format!("{command} ")).count();
        assert!(named > 0, "{command} is not on the page of fleets");
    }
}

/// Links between pages lead to files.
#[test]
fn links_of_the_pages_lead_somewhere() {
    let mut seen = 0;
    for (page, text) in pages() {
        let folder = std::path::Path::new(&page).parent().unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            assert!(folder.join(file).exists(), "{page}: {link}");
            seen += 1;
        }
    }
    assert!(seen > 50, "{seen}");
}

#[test]
fn the_host_program_is_the_example_that_is_compiled() {
    let (readme, example) = (
        read_to_string(format!("{ROOT}/README.md")).unwrap(),
        read_to_string(format!("{ROOT}/examples/host.rs")).unwrap(),
    );
    assert!(readme.contains(&example), "README.md and examples/host.rs differ");
    assert!(example.lines().count() <= 20);
}

#[test]
fn ci_runs_the_second_command() {
    let (readme, ci) =
        (read_to_string(format!("{ROOT}/README.md")).unwrap(), read_to_string(format!("{ROOT}/.ci/run")).unwrap());
    let commands: Vec<_> = readme.lines().filter(|l| l.starts_with("cargo ")).collect();
    let second = commands[1].split('#').next().unwrap().trim();
    assert!(ci.lines().any(|l| l == second), "{second} is not in .ci/run");
}

#[test]
fn every_command_and_variable_of_the_help_is_described() {
    let help = crate::common::command().arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let reference = read_to_string(format!("{ROOT}/docs/reference.md")).unwrap();
    let (commands, rest) = help.split_once("Options of every command:").unwrap_or_else(|| panic!("{help}"));
    let (options, variables) = rest.split_once("Environment (").unwrap_or_else(|| panic!("{help}"));
    let listed = commands.lines().chain(variables.lines()).filter_map(|line| line.strip_prefix("  "));
    let listed = listed.filter_map(|line| line.split_whitespace().next());
    // `[env: NAME]`, `[env: NAME=1]`, `[env: NAME, ...]`
    let named = options.split("[env: ").skip(1).filter_map(|rest| rest.split([']', '=', ',']).next());
    let mut words = 0;
    for word in listed.chain(named) {
        assert!(
            word == "help" || reference.contains(&format!("`{word}`")),
            "docs/reference.md does not describe {word}"
        );
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
    let root = std::path::Path::new(ROOT);
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
    let is_family = |w: &str| {
        ["forward/", "backward/", "gradient/", "append/", "pad/", "quantise/"].iter().any(|op| w.starts_with(op))
    };
    let is_file = |w: &&&str| w.contains('/') && !w.contains(' ') && !is_family(w);
    let gone: Vec<_> = words.iter().filter(is_file).filter(|w| !root.join(w).exists()).collect();
    assert!(gone.is_empty(), "no such files: {gone:?}");
    assert!(words.iter().filter(is_test).count() > 20);
}
