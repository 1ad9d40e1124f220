//! Every distinct call of a host as a line that `flashtune bench` takes: `FLASHTUNE_LOG_CALLS`.
//!
//! A line has what a kernel is chosen by, as options, and behind a `#`, which a shell does not read, what else belongs
//! to the call: strides, what is written beside O, how K and V are kept. What `bench` cannot time yet is a line that
//! begins with `#`. Threads and processes may share a file: a line is looked for and appended under a lock on the file,
//! in one write.

use crate::{Engine, Forward, Launches};
use flashtune_codegen::score::ProgramRef;
use flashtune_codegen::{Arch, DType, KvElement, KvKind, Op, PageClass, Problem, ScaleUnits, Shape};
use flashtune_runtime::ragged::RaggedCall;
use flashtune_runtime::{AppendCall, BackwardCall, ForwardCall, TensorView};
use rustix::fs::{FlockOperation, flock};
use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::fs::OpenOptions;
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Calls that one engine tells apart. A host with more of them has sizes that never return, and the file would only
/// grow.
const MOST: usize = 10_000;
/// Tokens of a page where the host's cache has none: bench has pages always.
const USUAL_PAGE: u32 = 16;

/// The file, and the calls that are in it.
pub(crate) struct CallLog {
    path: PathBuf,
    /// Hashes of what distinguishes calls; none any more once the file could not be written.
    seen: Mutex<Option<HashSet<u64>>>,
}

impl CallLog {
    /// That of the variable, if it names a file.
    pub(crate) fn from_env() -> Option<Self> {
        let path = std::env::var_os(crate::LOG_CALLS_VARIABLE).filter(|v| !v.is_empty())?;
        Some(Self { path: path.into(), seen: Mutex::new(Some(HashSet::new())) })
    }

    /// Adds a line, unless the call was seen before.
    fn add(&self, call: impl Hash, line: impl FnOnce() -> String) {
        let mut hasher = DefaultHasher::new();
        call.hash(&mut hasher);
        let mut all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(seen) = all.as_mut() else { return };
        if seen.len() >= MOST || !seen.insert(hasher.finish()) {
            return;
        }
        if seen.len() == MOST {
            tracing::warn!("{MOST} distinct calls are logged; no more are");
        }
        if let Err(e) = self.append(&line()) {
            let path = self.path.display();
            tracing::warn!(
                "calls are not logged any longer: cannot write {path}: {e}; name another file by FLASHTUNE_LOG_CALLS"
            );
            *all = None;
        }
    }

    /// Appends a line that the file has not.
    fn append(&self, line: &str) -> io::Result<()> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&self.path)?;
        // Where there are no locks, lines are whole all the same, and some perhaps twice.
        let _ = flock(&file, FlockOperation::LockExclusive);
        let mut before = Vec::new();
        file.read_to_end(&mut before)?;
        if before.split(|byte| *byte == b'\n').any(|known| known == line.as_bytes()) {
            return Ok(());
        }
        // What a full disk left half written ends here.
        let torn = before.last().is_some_and(|byte| *byte != b'\n');
        let text = format!("{}{line}\n", if torn { "\n" } else { "" });
        file.write_all(text.as_bytes())
    }
}

/// The beginning of a line: the command, where it runs, and what all operations have.
fn command(arch: Arch, problem: &Problem, shape: &Shape) -> String {
    let device = match arch {
        Arch::Cpu(_) => "cpu",
        Arch::Sm(_) => "cuda",
    };
    let Problem { dtype, head_dim_qk, head_dim_v, program, .. } = problem;
    let mut line = format!("flashtune bench --device {device} --dtype {dtype} --head-dim {head_dim_qk}");
    if head_dim_v != head_dim_qk {
        line.push_str(&format!(" --head-dim-v {head_dim_v}"));
    }
    if problem.precision != problem.in_default_precision(arch).precision {
        line.push_str(&format!(" --precision {}", problem.precision));
    }
    if problem.scales != ScaleUnits::default() {
        line.push_str(&format!(" --scales {}", problem.scales));
    }
    let output = problem.output_dtype();
    if *dtype == DType::E4m3 && output != DType::Bf16 {
        line.push_str(&format!(" --o-dtype {output}"));
    }
    if problem.residual {
        line.push_str(" --precise");
    }
    if problem.dropout {
        line.push_str(" --dropout");
    }
    line.push_str(&format!(" --mask {} --heads {} --kv-heads {}", shape.mask, shape.heads, shape.kv_heads));
    if let Some(program) = program {
        line.push_str(&format!(" --score {}", quoted(program)));
    }
    line
}

/// A program's text on one line, as a word of a shell.
fn quoted(program: &ProgramRef) -> String {
    format!("'{}'", one_line(program))
}

/// Programs have no quotes, and their line ends are blanks like others.
fn one_line(program: &ProgramRef) -> String {
    program.text().split_whitespace().collect::<Vec<_>>().join(" ")
}

fn sizes(shape: &Shape) -> String {
    format!(" --batch {} --q-len {} --kv-len {}", shape.batch, shape.q_len, shape.kv_len)
}

/// Strides of batch, head and row, in elements.
fn strides(views: &[(&str, &TensorView)]) -> String {
    let one = |(name, view): &(&str, &TensorView)| {
        let [batch, head, row, _] = view.strides;
        format!("{name} {batch},{head},{row}")
    };
    format!("strides {}", views.iter().map(one).collect::<Vec<_>>().join(" "))
}

impl Engine {
    /// Notes a forward pass.
    #[cold]
    pub(crate) fn log_forward(&self, log: &CallLog, call: &Forward<'_>, resolved: &ForwardCall) {
        let ForwardCall { problem, shape, .. } = resolved;
        if shape.is_empty() || shape.kv_len == 0 {
            return;
        }
        let views = [("q", &call.q), ("k", &call.k), ("v", &call.v), ("o", &call.o)];
        let flags = [call.lse.is_some(), call.weights.is_some(), call.block_mask.is_some()];
        let key = (0, problem, shape, views.map(|(_, view)| view.strides), flags);
        log.add(key, || {
            let mut line = command(self.device().arch(), problem, shape) + &sizes(shape);
            if self.launches() == Launches::Graph {
                line.push_str(" --graph");
            }
            line.push_str(&format!("  # forward, {}", strides(&views)));
            for (name, is_there) in ["lse", "weights", "block mask"].into_iter().zip(flags) {
                line.push_str(&if is_there { format!(", {name}") } else { String::new() });
            }
            line
        });
    }

    /// Notes a ragged batch: by its bounds, and by a usual sequence as far as the host says.
    #[cold]
    pub(crate) fn log_ragged(&self, log: &CallLog, resolved: &RaggedCall, store: [u64; 2]) {
        let RaggedCall { problem, shape, usual, pages, .. } = resolved;
        if resolved.is_empty() || usual.q_len == 0 || usual.kv_len == 0 {
            return;
        }
        log.add((1, problem, shape, usual, store), || {
            let [blocks, tokens] = store;
            let kept = match pages {
                PageClass::Tokens(_) => format!("pages of {tokens}"),
                _ => format!("{blocks} pieces of {tokens}"),
            };
            let about = format!(
                "  # ragged, {} sequences, at most {}x{} rows and keys, {kept}, {problem}",
                shape.batch, shape.q_len, shape.kv_len
            );
            let KvKind::Ragged(kv) = problem.kv else { return about };
            let why = match problem {
                p if p.program.is_some() => Some("score programs"),
                p if p.dropout => Some("dropout"),
                p if p.head_dim_qk != p.head_dim_v => Some("a head dim of V's own"),
                p if p.dtype == DType::F32 && kv.element != KvElement::Same => Some("quantised keys beside f32"),
                _ => None,
            };
            if let Some(why) = why {
                return format!("# bench has no ragged batches with {why}:{}", about.replace("  #", ""));
            }
            let page = match pages {
                PageClass::Tokens(_) => tokens.clamp(1, u64::from(u32::MAX)) as u32,
                _ => USUAL_PAGE,
            };
            let mut line = command(self.device().arch(), problem, shape);
            line.push_str(&format!(" --q-len {} --kv-lens {}x{}", usual.q_len, shape.batch, usual.kv_len));
            if shape.kv_len > usual.kv_len {
                line.push_str(&format!(" --kv-bound {}", shape.kv_len));
            }
            line + &format!(" --pages {page} --kv-dtype {}", kv.element.name()) + &about
        });
    }

    /// Notes an append.
    #[cold]
    pub(crate) fn log_append(&self, log: &CallLog, call: &AppendCall, tokens: u64) {
        let AppendCall { problem, shape, .. } = call;
        log.add((2, problem, shape, tokens), || {
            let element = match problem.kv {
                KvKind::Ragged(kv) => kv.element,
                _ => KvElement::Same,
            };
            let about = format!("append, {} rows, {problem}", shape.q_len);
            if problem.head_dim_qk != problem.head_dim_v || (problem.dtype == DType::F32 && element != KvElement::Same)
            {
                return format!("# bench has no such append: {about}");
            }
            let Problem { dtype, head_dim_qk, .. } = problem;
            let device = if matches!(self.device().arch(), Arch::Cpu(_)) { "cpu" } else { "cuda" };
            let heads = shape.kv_heads;
            format!(
                "flashtune bench --op append --device {device} --dtype {dtype} --head-dim {head_dim_qk} --heads \
                 {heads} --q-len {} --pages {} --kv-dtype {}  # {about}",
                shape.q_len,
                tokens.clamp(1, u64::from(u32::MAX)),
                element.name()
            )
        });
    }

    /// Notes a backward pass.
    #[cold]
    pub(crate) fn log_backward(&self, log: &CallLog, views: &[(&str, &TensorView)], call: &BackwardCall, more: usize) {
        let BackwardCall { problem, shape, .. } = call;
        if shape.is_empty() || shape.kv_len == 0 {
            return;
        }
        let all: Vec<_> = views.iter().map(|(_, view)| view.strides).collect();
        log.add((3, problem, shape, all, more), || {
            debug_assert_eq!(problem.op, Op::Backward);
            let mut line =
                command(self.device().arch(), problem, shape).replacen(" bench ", " bench --op backward ", 1)
                    + &sizes(shape);
            line.push_str(&format!("  # backward, {}", strides(views)));
            if !problem.kv.is_dense() {
                line.push_str(", packed: sizes are bounds");
            }
            if more > 0 {
                line.push_str(&format!(", {more} gradients of what the program reads"));
            }
            line
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::Mask;

    fn log(path: &std::path::Path) -> CallLog {
        CallLog { path: path.to_owned(), seen: Mutex::new(Some(HashSet::new())) }
    }

    #[test]
    fn a_line_of_e4m3_names_finer_scales_and_another_o_than_the_commands_own() {
        let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 33, kv_len: 40, mask: Mask::Causal };
        let e4m3 = Problem::forward(DType::E4m3, 64, shape.mask.kind()).unwrap();
        let line = |problem: Problem| command("sm_90a".parse().unwrap(), &problem, &shape);
        let plain = "flashtune bench --device cuda --dtype e4m3 --head-dim 64 --mask causal --heads 4 --kv-heads 2";
        assert_eq!(line(e4m3), plain);
        let scales: ScaleUnits = "q_rows-v_channel".parse().unwrap();
        let named = plain.replace(" --mask", " --scales q_rows-v_channel --o-dtype e4m3 --mask");
        assert_eq!(line(e4m3.with_scales(scales).with_output(DType::E4m3)), named);
    }

    #[test]
    fn logs_of_one_file_have_every_line_once_and_whole() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("calls");
        std::fs::write(&path, "half a li").unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let path = &path;
                scope.spawn(move || {
                    // One of its own, as a process has.
                    let log = log(path);
                    for n in 0..100 {
                        let n = (n * 7 + thread) % 25;
                        log.add(n, || format!("line {n} {}", "x".repeat(300)));
                    }
                });
            }
        });
        let text = std::fs::read_to_string(&path).unwrap();
        let mut lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.remove(0), "half a li");
        assert_eq!(lines.len(), 25);
        assert!(lines.iter().all(|line| line.starts_with("line ") && line.ends_with(&"x".repeat(300))));
        assert_eq!(lines.iter().collect::<HashSet<_>>().len(), 25);
    }

    #[test]
    fn a_file_that_cannot_be_written_ends_the_log_and_no_call() {
        let log = log(std::path::Path::new("/nonexistent/calls"));
        log.add(1, || "one".to_owned());
        assert!(log.seen.lock().unwrap().is_none());
        log.add(2, || panic!("it is over"));
    }
}
