//! `flashtune cache hits`: what hosts' calls ran on, from the metrics that they wrote.

use super::context::Context;
use super::exit::usage;
use super::files;
use super::table::table;
use anyhow::Result;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

/// Calls by what they ran on, as metrics name it.
type Calls = BTreeMap<String, f64>;

/// What the files add up to.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Hits {
    /// Files, each of a process.
    processes: usize,
    calls: Calls,
    problems: BTreeMap<String, Calls>,
    /// Calls that nothing stored serves.
    refused: f64,
    /// Kernels that were loaded, and those of them that had to be compiled.
    loaded: f64,
    compiled: f64,
}

pub(crate) fn run(cx: &mut Context, paths: &[PathBuf]) -> Result<()> {
    let mut hits = Hits::default();
    for path in paths {
        let text = files::read_text(path)?;
        if !hits.add(&text) {
            return Err(usage(format!(
                "{} holds no metrics of flashtune; `Engine::write_metrics` and `Engine::prometheus` make them",
                path.display()
            )));
        }
    }
    if cx.json() {
        return cx.print_json(&hits);
    }
    let all: f64 = hits.calls.values().sum();
    let mut rows = table(&["problem", "calls", "tuned", "otherwise"]);
    for (problem, calls) in &hits.problems {
        rows.add_row(row(problem, calls));
    }
    rows.add_row(row("all", &hits.calls));
    writeln!(cx.out, "{rows}")?;
    let found = share(hits.loaded - hits.compiled, hits.loaded);
    let (processes, loaded, refused) = (hits.processes, hits.loaded, hits.refused);
    writeln!(
        cx.out,
        "{processes} processes, {all} calls and {refused} refused; of {loaded} kernels {found} were there, {} compiled",
        hits.compiled
    )?;
    Ok(())
}

fn row(name: &str, calls: &Calls) -> [String; 4] {
    let all: f64 = calls.values().sum();
    let tuned = calls.get("tuned").copied().unwrap_or_default();
    let mut others: Vec<_> = calls.iter().filter(|(status, n)| *status != "tuned" && **n > 0.0).collect();
    others.sort_by(|a, b| b.1.total_cmp(a.1));
    let others: Vec<_> = others.iter().map(|(status, n)| format!("{status} {}", share(**n, all))).collect();
    [name.to_owned(), all.to_string(), share(tuned, all), others.join(", ")]
}

fn share(part: f64, all: f64) -> String {
    if all > 0.0 { format!("{:.1} %", part / all * 100.0) } else { "-".to_owned() }
}

impl Hits {
    /// Adds a process. False where its text has none of the metrics.
    fn add(&mut self, text: &str) -> bool {
        let mut known = false;
        for (name, labels, value) in text.lines().filter_map(line) {
            let status = labels.get("status").cloned().unwrap_or_default();
            let to = match name {
                "flashtune_calls_total" => self.calls.entry(status).or_default(),
                "flashtune_problem_calls_total" => {
                    let problem = labels.get("problem").cloned().unwrap_or_default();
                    self.problems.entry(problem).or_default().entry(status).or_default()
                }
                "flashtune_refused_total" => &mut self.refused,
                "flashtune_loaded_total" => &mut self.loaded,
                "flashtune_compiled_total" => &mut self.compiled,
                _ => continue,
            };
            known = true;
            *to += value;
        }
        self.processes += usize::from(known);
        known
    }
}

/// Name, labels and number of a line of the text format, none of a comment.
fn line(text: &str) -> Option<(&str, BTreeMap<&str, String>, f64)> {
    let (name, rest) = text.split_once('{')?;
    let mut labels = BTreeMap::new();
    let mut rest = rest;
    while !rest.starts_with('}') {
        let (label, quoted) = rest.trim_start_matches(',').split_once("=\"")?;
        let mut value = String::new();
        let mut letters = quoted.char_indices();
        let end = loop {
            match letters.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match letters.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, letter) => value.push(letter),
            }
        };
        labels.insert(label, value);
        rest = &quoted[end + 1..];
    }
    // Behind the number a time may stand.
    let value = rest[1..].split_whitespace().next()?.parse().ok()?;
    Some((name, labels, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_add_up_and_labels_may_hold_anything() {
        let text = |tuned: u32| {
            format!(
                "# HELP flashtune_calls_total Calls by what they ran on.\n\
                 flashtune_calls_total{{device=\"a \\\"b\\\" \\\\ {{x}}\",status=\"tuned\"}} {tuned}\n\
                 flashtune_calls_total{{device=\"d\",process=\"r,=0\",status=\"default\"}} 1 1700000000\n\
                 flashtune_problem_calls_total{{device=\"d\",problem=\"p\",status=\"tuned\"}} {tuned}\n\
                 flashtune_loaded_total{{device=\"d\"}} 4\nflashtune_compiled_total{{device=\"d\"}} 1\n\
                 flashtune_refused_total{{device=\"d\"}} 0\nother_total{{a=\"b\"}} 7\n"
            )
        };
        let mut hits = Hits::default();
        assert!(hits.add(&text(3)) && hits.add(&text(5)));
        assert_eq!(hits.calls, [("default".to_owned(), 2.0), ("tuned".to_owned(), 8.0)].into());
        assert_eq!((hits.processes, hits.loaded, hits.compiled, hits.problems["p"]["tuned"]), (2, 8.0, 2.0, 8.0));
        assert_eq!(row("all", &hits.calls), ["all", "10", "80.0 %", "default 20.0 %"].map(str::to_owned));
        for not in ["", "no text", "flashtune_calls_total{a=\"b", "flashtune_calls_total{a=\"b\"} x", "up{a=\"b\"} 1"] {
            assert!(!hits.add(not), "{not}");
        }
        assert_eq!(hits.processes, 2);
    }
}
