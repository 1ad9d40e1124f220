//! `flashtune cache`: what the cache folder holds, whether it is whole, and keeping it small.

use super::context::Context;
use super::exit::{Failed, usage};
use super::hits;
use anyhow::Result;
use flashtune_cache::{Amount, CacheDir, Removed};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// How long `gc` waits for a tuner to let go of the journal, which it has for moments only.
const PATIENCE: Duration = Duration::from_secs(10);

/// Options of `cache`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Say what is in the folder and how large it is; what `flashtune cache` alone does
    Show,
    /// Say what calls of hosts ran on: tuned kernels, near ones, the default
    Hits {
        /// Metrics of processes, as `Engine::write_metrics` writes them
        #[arg(required = true)]
        file: Vec<PathBuf>,
    },
    /// Read and check every kernel and record; exit code 1 when one is damaged
    Verify,
    /// Remove damaged kernels, and then the longest unused ones above the limit
    Gc {
        /// MiB that kernels may take; FLASHTUNE_CACHE_LIMIT_MIB, or 2048, when not given
        #[arg(long, value_name = "N")]
        limit_mib: Option<u64>,
    },
    /// Remove all results of this user; files that this program did not make stay
    Clear {
        /// Do it. Without this, say what would go
        #[arg(long)]
        yes: bool,
    },
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    let what = args.what.unwrap_or(What::Show);
    if let What::Hits { file } = &what {
        return hits::run(cx, file);
    }
    let dir = cx.cache_dir()?;
    match what {
        What::Hits { .. } => unreachable!("done above"),
        What::Show => show(cx, &dir),
        What::Verify => verify(cx, &dir),
        What::Gc { limit_mib } => {
            let limit = limit_mib.map(|mib| mib.saturating_mul(1 << 20));
            let done = dir.collect(limit, PATIENCE)?;
            removed(cx, &dir, &done, "kernels stay")
        }
        What::Clear { yes: true } => {
            let done = dir.clear()?;
            removed(cx, &dir, &done, "files could not be removed")?;
            match done.kept.files {
                0 => Ok(()),
                n => Err(Failed(format!("{n} files of {} are still there", dir.base().display())).into()),
            }
        }
        What::Clear { yes: false } => {
            let held = dir.usage()?;
            let size = size(&[held.kernels, held.damaged, held.snapshot, held.journal, held.jobs, held.levels]);
            let records = held.records;
            Err(usage(format!(
                "`cache clear` removes {size} and {records} records in {}, for good; `export` keeps them in a bundle, \
                 `cache clear --yes` does it",
                dir.base().display()
            )))
        }
    }
}

fn show(cx: &mut Context, dir: &CacheDir) -> Result<()> {
    let held = dir.usage()?;
    if cx.json() {
        return cx.print_json(&json!({ "folder": dir.base(), "usage": held }));
    }
    writeln!(cx.out, "{}", dir.base().display())?;
    let limit = held.limit_bytes >> 20;
    let lines = [
        ("kernels", held.kernels, format!("at most {limit} MiB; {} named by records, which stay", size(&[held.named]))),
        ("damaged", held.damaged, "kernels that were set aside; `cache gc` removes them".to_owned()),
        ("snapshot", held.snapshot, format!("{} records, which processes read", held.records)),
        ("journal", held.journal, "of tuning: records, trials, timelines".to_owned()),
        ("jobs", held.jobs, "tunings that were cut short and go on there".to_owned()),
        ("levels", held.levels, "instructions that cards of yours have shown to run".to_owned()),
        ("claims", held.claims, "work that is under way".to_owned()),
    ];
    for (name, amount, what) in lines.iter().filter(|(_, amount, _)| amount.files > 0) {
        writeln!(cx.out, "  {name:<9} {:>24}  {what}", size(&[*amount]))?;
    }
    if lines.iter().all(|(_, amount, _)| amount.files == 0) {
        writeln!(cx.out, "  nothing yet; `flashtune tune` makes some")?;
    }
    if held.foreign > 0 {
        writeln!(cx.out, "  {} names that are not this program's, which nothing touches", held.foreign)?;
    }
    Ok(())
}

fn verify(cx: &mut Context, dir: &CacheDir) -> Result<()> {
    let found = dir.verify()?;
    if cx.json() {
        cx.print_json(&json!({ "folder": dir.base(), "verified": found }))?;
    } else {
        for bad in &found.bad {
            writeln!(cx.out, "damaged  {}: {}", bad.path.display(), bad.reason)?;
        }
        let other = match found.other_builds {
            0 => String::new(),
            n => format!(", {n} of another build of flashtune"),
        };
        writeln!(cx.out, "{} kernels and {} records are whole{other}", found.kernels, found.records)?;
    }
    match found.bad.len() {
        0 => Ok(()),
        n => Err(Failed(format!(
            "{n} damaged; kernels are compiled anew when they are needed, a snapshot is written anew by the next tuning"
        ))
        .into()),
    }
}

fn removed(cx: &mut Context, dir: &CacheDir, done: &Removed, kept: &str) -> Result<()> {
    if cx.json() {
        return cx.print_json(&json!({ "folder": dir.base(), "removed": done.removed, "kept": done.kept }));
    }
    writeln!(cx.out, "removed {}", size(&[done.removed]))?;
    if done.kept.files > 0 {
        writeln!(cx.out, "{kept}: {}", size(&[done.kept]))?;
    }
    Ok(())
}

/// Files and their size, for people.
fn size(amounts: &[Amount]) -> String {
    let files: usize = amounts.iter().map(|a| a.files).sum();
    let bytes: u64 = amounts.iter().map(|a| a.bytes).sum();
    let bytes = match bytes {
        0..1024 => format!("{bytes} bytes"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64),
    };
    format!("{files} files, {bytes}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_units_that_people_read() {
        let of = |bytes| size(&[Amount { files: 1, bytes }]);
        assert_eq!([of(0), of(1023), of(1536)], ["1 files, 0 bytes", "1 files, 1023 bytes", "1 files, 1.5 KiB"]);
        assert_eq!(size(&[Amount { files: 1, bytes: 3 << 20 }, Amount { files: 2, bytes: 0 }]), "3 files, 3.0 MiB");
    }
}
