//! A dispatcher's numbers as the text that Prometheus scrapes, or that node_exporter reads from a file.

use super::dispatcher::Dispatcher;
use super::tally::{Calls, Counters};
use flashtune_cache::Key;
use flashtune_codegen::Problem;
use flashtune_codegen::abi::ABI_VERSION;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The upper bounds of the histogram of compilations, in seconds: a C compiler takes a tenth to one, NVRTC one to ten
/// of a large kernel, and what takes more is a machine in trouble.
pub const COMPILE_BOUNDS: [f64; 9] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// How long compilations took, while it is being counted.
#[derive(Debug, Default)]
pub(super) struct CompileTimes {
    /// By bound, and what took longer than all of them.
    counts: [AtomicU64; COMPILE_BOUNDS.len() + 1],
}

impl CompileTimes {
    pub(crate) fn add(&self, took: Duration) {
        let bound = COMPILE_BOUNDS.iter().position(|b| took.as_secs_f64() <= *b).unwrap_or(COMPILE_BOUNDS.len());
        self.counts[bound].fetch_add(1, Relaxed);
    }
}

/// All that is told to whoever watches a process.
#[derive(Debug, Clone, PartialEq)]
pub struct Metrics {
    /// What is counted over all problems.
    pub counters: Counters,
    /// Calls by problem and by what they ran on.
    pub problems: BTreeMap<Problem, Calls>,
    /// Compilations that took no longer than each of [`COMPILE_BOUNDS`] and longer than the one before, then the rest.
    pub compile_times: [u64; COMPILE_BOUNDS.len() + 1],
    /// Digest of what was sealed, if anything was.
    pub seal: Option<Key>,
    /// Hash of the templates in force.
    pub templates: String,
}

impl Dispatcher {
    /// The numbers so far.
    pub fn metrics(&self) -> Metrics {
        let mut problems = BTreeMap::new();
        for tally in self.tallies.read().unwrap_or_else(PoisonError::into_inner).values() {
            tally.add_calls(problems.entry(tally.problem()).or_default());
        }
        Metrics {
            counters: self.counters(),
            problems,
            compile_times: self.binaries.work.compile_times.counts.each_ref().map(|n| n.load(Relaxed)),
            seal: self.sealed().map(|seal| seal.digest),
            templates: self.binaries.templates.hash().to_owned(),
        }
    }
}

impl Metrics {
    /// The text, each line with these labels beside its own.
    pub fn prometheus(&self, labels: &[(&str, &str)]) -> String {
        let labels = join(labels);
        let mut text = self.counters.text(&labels);
        let mut head = |name: &str, kind: &str, help: &str| {
            let _ = writeln!(text, "# HELP flashtune_{name} {help}\n# TYPE flashtune_{name} {kind}");
        };
        head("build_info", "gauge", "The build: always 1.");
        let build = join(&[
            ("version", env!("CARGO_PKG_VERSION")),
            ("abi", &ABI_VERSION.to_string()),
            ("bundle_format", &flashtune_cache::BUNDLE_FORMAT.to_string()),
            ("templates", &self.templates),
        ]);
        let _ = writeln!(text, "flashtune_build_info{{{labels},{build}}} 1");
        if let Some(digest) = self.seal {
            let (name, help) = ("seal_info", "Digest of what was sealed: processes with equal ones run equal kernels.");
            let _ = writeln!(text, "# HELP flashtune_{name} {help}\n# TYPE flashtune_{name} gauge");
            let _ = writeln!(text, "flashtune_{name}{{{labels},digest=\"{digest}\"}} 1");
        }
        self.write_problems(&mut text, &labels);
        self.write_compile_times(&mut text, &labels);
        text
    }

    /// Only what was called: problems times ways to answer are many lines of zeros.
    fn write_problems(&self, text: &mut String, labels: &str) {
        let name = "flashtune_problem_calls_total";
        let _ = writeln!(text, "# HELP {name} Calls by problem and by what they ran on.\n# TYPE {name} counter");
        for (problem, calls) in &self.problems {
            let problem = join(&[("problem", &problem.to_string())]);
            for (status, n) in calls.named().into_iter().filter(|(_, n)| *n > 0) {
                let _ = writeln!(text, "{name}{{{labels},{problem},status=\"{status}\"}} {n}");
            }
        }
    }

    fn write_compile_times(&self, text: &mut String, labels: &str) {
        let name = "flashtune_kernel_compile_seconds";
        let _ = writeln!(text, "# HELP {name} Time to compile one kernel.\n# TYPE {name} histogram");
        let mut sum = 0;
        for (i, n) in self.compile_times.iter().enumerate() {
            sum += n;
            let bound = COMPILE_BOUNDS.get(i).map_or("+Inf".to_owned(), f64::to_string);
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {sum}");
        }
        let _ = writeln!(text, "{name}_sum{{{labels}}} {}", self.counters.compile_ms / 1e3);
        let _ = writeln!(text, "{name}_count{{{labels}}} {sum}");
    }
}

/// Labels as they stand between braces.
pub(super) fn join(labels: &[(&str, &str)]) -> String {
    let quoted = |v: &str| v.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    labels.iter().map(|(name, value)| format!("{name}=\"{}\"", quoted(value))).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{DType, MaskKind};

    #[test]
    fn the_text_tells_build_seal_problems_and_times() {
        let times = CompileTimes::default();
        for ms in [40, 100, 101, 4_000, 90_000] {
            times.add(Duration::from_millis(ms));
        }
        let problem = Problem::forward(DType::F16, 64, MaskKind::CAUSAL).unwrap();
        let metrics = Metrics {
            counters: Counters { compiled: 5, compile_ms: 94_241.0, ..Default::default() },
            problems: [(problem, Calls { tuned: 7, quick: 2, ..Default::default() })].into(),
            compile_times: times.counts.map(AtomicU64::into_inner),
            seal: Some(Key([0xab; 32])),
            templates: "cafe".to_owned(),
        };
        let text = metrics.prometheus(&[("device", "d"), ("process", "rank \"0\"")]);
        let both = "device=\"d\",process=\"rank \\\"0\\\"\"";
        for line in [
            format!("flashtune_seal_info{{{both},digest=\"{}\"}} 1", "ab".repeat(32)),
            format!("flashtune_problem_calls_total{{{both},problem=\"{problem}\",status=\"tuned\"}} 7"),
            format!("flashtune_problem_calls_total{{{both},problem=\"{problem}\",status=\"quick\"}} 2"),
            format!("flashtune_kernel_compile_seconds_bucket{{{both},le=\"0.1\"}} 2"),
            format!("flashtune_kernel_compile_seconds_bucket{{{both},le=\"0.25\"}} 3"),
            format!("flashtune_kernel_compile_seconds_bucket{{{both},le=\"5\"}} 4"),
            format!("flashtune_kernel_compile_seconds_bucket{{{both},le=\"60\"}} 4"),
            format!("flashtune_kernel_compile_seconds_bucket{{{both},le=\"+Inf\"}} 5"),
            format!("flashtune_kernel_compile_seconds_sum{{{both}}} 94.241"),
            format!("flashtune_kernel_compile_seconds_count{{{both}}} 5"),
            format!("flashtune_compiled_total{{{both}}} 5"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert_eq!(text.matches("flashtune_problem_calls_total{").count(), 2);
        let build = text.lines().find(|l| l.starts_with("flashtune_build_info{")).unwrap();
        assert!(build.contains("templates=\"cafe\"") && build.contains(env!("CARGO_PKG_VERSION")), "{build}");
        // No family is declared twice, and each line belongs to the last one that was.
        let mut seen = Vec::new();
        for line in text.lines() {
            match line.strip_prefix("# TYPE ").and_then(|l| l.split(' ').next()) {
                Some(name) => {
                    assert!(!seen.contains(&name), "{name} twice");
                    seen.push(name);
                }
                None if line.starts_with('#') => {}
                None => {
                    let name = line.split('{').next().unwrap();
                    let family = seen.last().unwrap();
                    let rest = name.strip_prefix(family).unwrap_or_else(|| panic!("{line} after {family}"));
                    assert!(["", "_bucket", "_sum", "_count"].contains(&rest), "{line}");
                }
            }
        }
        let unsealed = Metrics { seal: None, ..metrics };
        assert!(!unsealed.prometheus(&[("device", "d")]).contains("seal_info"));
    }
}
