//! The first page of the help: commands by what they are for, then what all of them take.

use std::collections::BTreeSet;
use std::fmt::Write;

/// Commands in groups; every visible one stands in one of them.
pub(crate) const GROUPS: [(&str, &[&str]); 4] = [
    ("Compute and look", &["run", "explain", "emit", "debug", "list", "cache", "doctor"]),
    ("Tune and measure", &["tune", "check", "bench", "report"]),
    ("Build and share", SHARE),
    ("This command", &["completions", "help"]),
];

#[cfg(feature = "registry")]
const SHARE: &[&str] = &["build", "export", "import", "merge", "keygen", "sign", "push", "pull"];
#[cfg(not(feature = "registry"))]
const SHARE: &[&str] = &["build", "export", "import", "merge", "keygen", "sign"];

/// What comes after the options.
pub(crate) const AFTER: &str = "\
Exit codes: 0 done; 1 a check or a computation failed; 2 bad input or usage; 3 something needed is not on this machine

Environment (all of it: docs/reference.md):
  FLASHTUNE_CACHE_LIMIT_MIB  most that compiled kernels may take in the cache, 2048 when not set
  FLASHTUNE_NVRTC            folder with libnvrtc.so, or the library itself
  FLASHTUNE_UNTUNED          file to which shapes that were met untuned are appended; `tune --from` takes it
  FLASHTUNE_WORKER           the flashtune program that runs candidates for hosts that tune; the command is its own
  FLASHTUNE_LAUNCHES         how hosts launch: eager, or graph, for which `tune --graph` measures
  FLASHTUNE_LOG              what to log to stderr, e.g. debug or flashtune_runtime=trace
  CC                         the C compiler for kernels of the cpu device
  NO_COLOR                   anything: no colours";

/// The variables of this program, those of hosts and of its packages in other languages included.
pub(crate) fn variables() -> BTreeSet<&'static str> {
    let of_options = [
        "FLASHTUNE_ALLOW_PATHS",
        "FLASHTUNE_ALLOW_UNSIGNED",
        "FLASHTUNE_BUNDLES",
        "FLASHTUNE_CACHE",
        "FLASHTUNE_LIBRARY",
        "FLASHTUNE_LOG_CALLS",
        "FLASHTUNE_QUICK_FIRST",
        "FLASHTUNE_TEMPLATES",
        "FLASHTUNE_TRUSTED_KEYS",
    ];
    AFTER.split_whitespace().filter(|word| word.starts_with("FLASHTUNE_")).chain(of_options).collect()
}

/// `-h` and `--help` of a command are the same page of one line an option: with what each choice means they had 83 and
/// 190 lines, which `flashtune help COMMAND` and the manual pages keep.
fn short(command: clap::Command) -> clap::Command {
    let help = clap::Arg::new("help").short('h').long("help").action(clap::ArgAction::HelpShort);
    command.disable_help_flag(true).arg(help.help("Print this page; `flashtune help` and the command: every choice"))
}

/// Puts the groups into the page. Those of single commands stay as clap makes them.
pub(crate) fn grouped(command: clap::Command) -> clap::Command {
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    let command = names.iter().fold(command, |command, name| command.mut_subcommand(name, short));
    let mut commands = String::new();
    for (heading, names) in GROUPS {
        let _ = writeln!(commands, "{heading}:");
        for name in names {
            let about = command.find_subcommand(name).and_then(|c| c.get_about()).map(ToString::to_string);
            // Clap brings in `help` itself, and later.
            let about = about.unwrap_or_else(|| "Print this page, or that of a command".to_owned());
            let _ = writeln!(commands, "  {name:<12} {about}");
        }
        commands.push('\n');
    }
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{commands}Options of every command:\n\
         {{options}}{{after-help}}"
    ))
}

#[cfg(test)]
mod tests {
    use super::super::command;
    use super::*;

    #[test]
    fn every_visible_command_is_in_one_group() {
        let mut whole = command();
        whole.build();
        let visible: BTreeSet<_> = whole.get_subcommands().filter(|c| !c.is_hide_set()).map(|c| c.get_name()).collect();
        let grouped: Vec<_> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        assert_eq!(grouped.len(), visible.len());
        assert_eq!(grouped.into_iter().collect::<BTreeSet<_>>(), visible);
    }
}
