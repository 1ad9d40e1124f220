//! The command itself: its help, version, completions and manual pages.

use crate::common::{Place, fails};
use flashtune::cache::BUNDLE_FORMAT;
use flashtune::codegen::abi::ABI_VERSION;
use flashtune::codegen::{Family, TemplateSet};

/// What the bare command prints, without a cache and a device.
fn printed(args: &[&str]) -> String {
    let output = assert_cmd::Command::cargo_bin("flashtune").unwrap().args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Every command that the help lists, by what `bash` completes.
const COMMANDS: [&str; 16] = [
    "tune",
    "run",
    "check",
    "bench",
    "report",
    "explain",
    "emit",
    "build",
    "list",
    "export",
    "import",
    "merge",
    "keygen",
    "sign",
    "doctor",
    "completions",
];

#[test]
fn version_tells_what_stored_results_are_held_to() {
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(printed(&["-V"]), format!("flashtune {version}\n"));
    let long = printed(&["--version"]);
    let first = long.lines().next().unwrap();
    let commit = first.strip_prefix(&format!("flashtune {version} (")).and_then(|rest| rest.strip_suffix(')'));
    assert!(commit.is_some_and(|commit| !commit.is_empty()), "{long}");
    let templates = TemplateSet::embedded();
    let of_families = Family::ALL.map(|f| format!("{} {}", f.name(), templates.hash_of(f)));
    let told: Vec<String> = long.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let facts = [
        format!("kernel ABI {ABI_VERSION}"),
        format!("bundle format {BUNDLE_FORMAT}"),
        format!("templates {}", templates.hash()),
    ];
    for line in facts.iter().chain(&of_families) {
        assert!(told.contains(line), "{line}: {long}");
    }
    // Of a command it is the program's.
    assert!(printed(&["tune", "--version"]).contains(&facts[0]));
}

#[test]
fn help_fits_on_a_page_and_tells_options_of_all_apart() {
    let help = printed(&["--help"]);
    assert!(help.lines().count() < 60, "{} lines\n{help}", help.lines().count());
    let (commands, options) = help.split_once("Options of every command:").unwrap();
    for command in COMMANDS {
        let line = commands.lines().find(|l| l.starts_with(&format!("  {command} ")));
        assert!(line.is_some_and(|l| l.len() > 20), "{command}: {help}");
    }
    assert!(options.contains("--allow-unsigned") && !commands.contains("worker") && !commands.contains("  man "));
    // A command's own options come first, under a heading of their own.
    let of_tune = printed(&["tune", "--help"]);
    let (own, of_all) = of_tune.split_once("Options of every command:").unwrap();
    assert!(own.contains("--trials") && !own.contains("--allow-unsigned"), "{of_tune}");
    assert!(of_all.contains("--allow-unsigned") && !of_all.contains("--trials"), "{of_tune}");
}

#[test]
fn quiet_leaves_out_warnings_and_no_errors() {
    let place = Place::new();
    // Something to warn of: a file where the cache should be.
    std::fs::write(place.cache(), "a file").unwrap();
    let said = |more: &[&str]| {
        let args = [&["list"], more].concat();
        let output = place.flashtune(&args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(said(&[]).contains("WARN"));
    assert_eq!(said(&["-q"]), "");
    assert_eq!(said(&["--quiet"]), "");
    fails(&mut place.flashtune(&["-q", "explain", "--head-dim", "63"]), 2, &["head_dim_qk"]);
    fails(&mut place.flashtune(&["-q", "-v", "list"]), 2, &["--quiet", "--verbose"]);
}

#[test]
fn completions_name_every_command_in_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&["completions", shell]);
        for command in COMMANDS {
            assert!(script.contains(command), "{shell}: no {command}");
        }
        assert!(script.contains("allow-unsigned"), "{shell}");
    }
    // A shell reads the script.
    let script = printed(&["completions", "bash"]);
    let read = assert_cmd::Command::new("bash").arg("-n").write_stdin(script).output().unwrap();
    assert!(read.status.success() && read.stderr.is_empty(), "{}", String::from_utf8_lossy(&read.stderr));
    fails(&mut Place::new().flashtune(&["completions", "cmd"]), 2, &["cmd", "zsh"]);
}

#[test]
fn manual_pages_are_of_every_command() {
    let place = Place::new();
    let folder = place.path("new/man");
    place.flashtune(&["man", folder.to_str().unwrap()]).assert().success();
    let page = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let own = page("flashtune.1");
    assert!(own.contains(".TH") && own.contains("FLASHTUNE_LOG"), "{own}");
    for command in COMMANDS {
        assert!(page(&format!("flashtune-{command}.1")).contains(".TH"), "{command}");
    }
    assert!(page("flashtune-tune.1").contains("trials"));
    // What is hidden has none.
    assert!(!folder.join("flashtune-worker.1").exists() && !folder.join("flashtune-man.1").exists());
    std::fs::write(place.path("file"), "").unwrap();
    let file = place.path("file");
    fails(&mut place.flashtune(&["man", file.to_str().unwrap()]), 1, &["manual pages", "file"]);
}
