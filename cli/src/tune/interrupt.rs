//! Ctrl-C: one line on what is kept, and the end that a shell expects.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::io::Write;

/// From now on SIGINT and SIGTERM print what `told` says, if anything, before they end this process. A signal that
/// whoever started it has it ignore stays ignored.
///
/// # Errors
/// When the system has no thread for it.
pub(crate) fn watch(told: impl Fn() -> Option<String> + Send + 'static) -> Result<()> {
    let ignored = ignored();
    let caught: Vec<i32> = [SIGINT, SIGTERM].into_iter().filter(|n| ignored & (1 << (n - 1)) == 0).collect();
    if caught.is_empty() {
        return Ok(());
    }
    let mut signals = Signals::new(caught).context("signals cannot be caught")?;
    let wait = move || {
        for signal in signals.forever() {
            if let Some(told) = told() {
                let _ = writeln!(std::io::stderr(), "{told}");
            }
            // Ended by the signal itself, so that a shell sees 130 or 143 and ends its loops.
            let _ = emulate_default_handler(signal);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait).context("no thread for signals")?;
    Ok(())
}

/// The signals that this process ignores, one bit each.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
