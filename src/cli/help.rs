//! The first page of the help: commands by what they are for, then what all of them take.

use std::fmt::Write;

/// Commands in groups; every visible one stands in one of them.
pub const GROUPS: [(&str, &[&str]); 4] = [
    ("Compute and look", &["run", "explain", "emit", "list", "doctor"]),
    ("Tune and measure", &["tune", "check", "bench", "report"]),
    ("Build and share", &["build", "export", "import", "merge", "keygen", "sign"]),
    ("This command", &["completions", "help"]),
];

/// What comes after the options.
pub const AFTER: &str = "\
Exit codes: 0 done; 1 a check or a computation failed; 2 bad input or usage;
            3 a device, compiler, library or kernel that is needed is not there

Environment:
  FLASHTUNE_CACHE_LIMIT_MIB  most that compiled kernels may take in the cache, 2048 when not set
  FLASHTUNE_NVRTC            folder with libnvrtc.so, or the library itself
  FLASHTUNE_UNTUNED          file to which shapes that were met untuned are appended; `tune --from` takes it
  FLASHTUNE_WORKER           the flashtune program that runs candidates for hosts that tune; the command is its own
  FLASHTUNE_LAUNCHES         how hosts launch: eager, or graph, for which `tune --graph` measures
  FLASHTUNE_CPU_ISA          a lower instruction set than the processor has, e.g. avx2
  FLASHTUNE_LOG              what to log to stderr, e.g. debug or flashtune_runtime=trace
  CC                         the C compiler for kernels of the cpu device
  NO_COLOR                   anything: no colours
  SOURCE_DATE_EPOCH          when bundles say that they were made, in seconds: the same build gives the same bytes";

/// Puts the groups into the page. Those of single commands stay as clap makes them.
pub fn grouped(command: clap::Command) -> clap::Command {
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
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{commands}Options of every command:\n{{options}}{{after-help}}"
    ))
}

#[cfg(test)]
mod tests {
    use super::super::command;
    use super::*;
    use std::collections::BTreeSet;

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
