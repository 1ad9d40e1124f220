//! The command itself: its help, version, completions and manual pages.

use crate::common::{Place, SMALL, fails, write_program};
use flashtune_cache::BUNDLE_FORMAT;
use flashtune_codegen::abi::ABI_VERSION;
use flashtune_codegen::{Family, TemplateSet};
use flashtune_runtime::compile::Nvrtc;

/// What the bare command prints, without a cache and a device.
fn printed(args: &[&str]) -> String {
    let output = crate::common::command().args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Every command that the help lists, by what `bash` completes.
const COMMANDS: [&str; 18] = [
    "tune",
    "run",
    "check",
    "bench",
    "report",
    "explain",
    "emit",
    "debug",
    "build",
    "list",
    "cache",
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
fn help_of_every_command_fits_on_a_page_in_both_forms() {
    for command in COMMANDS.iter().chain(&["push", "pull"]) {
        let [short, long] = ["-h", "--help"].map(|flag| printed(&[command, flag]));
        assert!(long.lines().count() < 60, "{command}: {} lines\n{long}", long.lines().count());
        assert_eq!(short, long, "{command}");
    }
    assert_eq!([printed(&["help", "--help"]), printed(&["help"])], [printed(&["--help"]), printed(&["--help"])]);
    // What the choices mean is told where there is room.
    let long = printed(&["help", "run"]);
    assert!(long.contains("bshd: [batch, rows, heads, dim]"), "{long}");
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
    fails(&mut place.flashtune(&["-q", "explain", "--head-dim", "264"]), 2, &["head_dim_qk"]);
    fails(&mut place.flashtune(&["-q", "-v", "list"]), 2, &["--quiet", "--verbose"]);
}

#[test]
fn emit_shows_what_becomes_of_a_cpu_kernel() {
    let place = Place::new();
    let emit = |what: &'static str| [&["emit"], SMALL, &[what]].concat();
    let taken = place.json(&emit("--resources"));
    assert!(taken["binary_bytes"].as_u64().unwrap() > 1000 && taken["compile_ms"].as_f64().unwrap() > 0.0, "{taken}");
    // A disassembler of the test's own: that it is given the kernel is what can be told everywhere.
    let bin = place.path("bin");
    std::fs::create_dir(&bin).unwrap();
    write_program(&bin.join("objdump"), "#!/bin/sh\nfor file; do :; done\nhead -c 4 \"$file\" | tail -c 3\n");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut listing = place.flashtune(&emit("--sass"));
    let output = listing.env("PATH", path).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ELF", "{output:?}");
    fails(&mut place.flashtune(&emit("--ptx")), 2, &["--ptx", "--arch"]);
    fails(&mut place.flashtune(&[&emit("--ptx")[..], &["--sass"]].concat()), 2, &["--ptx", "--sass"]);
}

#[test]
fn emit_shows_what_becomes_of_a_gpu_kernel() {
    let Ok(nvrtc) = Nvrtc::find() else {
        assert!(std::env::var_os("CI").is_none(), "CI has NVRTC");
        return;
    };
    let place = Place::new();
    let emit = |what: &str| place.flashtune(&["emit", "--arch", "sm_90a", "--head-dim", "64", what]);
    let text = |command: &mut assert_cmd::Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let ptx = text(&mut emit("--ptx"));
    assert!(ptx.contains(".target sm_90a") && ptx.contains("wgmma"), "{ptx}");
    let taken = text(&mut emit("--resources"));
    assert!(
        taken.contains("registers of a thread") && taken.contains(&format!("{:<22} 0 bytes", "spilled")),
        "{taken}"
    );
    // No toolkit, and the way to one.
    let bare = place.path("bare");
    std::fs::create_dir(&bare).unwrap();
    fails(emit("--sass").env("PATH", &bare).env_remove("CUDA_HOME"), 3, &["nvdisasm", "CUDA_HOME", "pip install"]);
    // What pip installs beside NVRTC is found there.
    let (lib, bin) = (place.path("cu13/lib"), place.path("cu13/bin"));
    for folder in [&lib, &bin] {
        std::fs::create_dir_all(folder).unwrap();
    }
    for file in std::fs::read_dir(nvrtc.path().parent().unwrap()).unwrap().map(|e| e.unwrap()) {
        std::os::unix::fs::symlink(file.path(), lib.join(file.file_name())).unwrap();
    }
    let first_letters = "#!/bin/sh\nPATH=/usr/bin:/bin\nfor file; do :; done\nhead -c 4 \"$file\" | tail -c 3\n";
    write_program(&bin.join("nvdisasm"), first_letters);
    let mut listing = emit("--sass");
    let listing = listing
        .env("PATH", &bare)
        .env_remove("CUDA_HOME")
        .env("FLASHTUNE_NVRTC", lib.join(nvrtc.path().file_name().unwrap()));
    assert_eq!(text(listing), "ELF");
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
