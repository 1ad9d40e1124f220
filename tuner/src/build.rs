//! From schedules to compiled, loadable kernels: in parallel, reusing what the cache has, dropping what is unfit.

use crate::candidate::Candidate;
use crate::{Event, Observer};
use flashtune_cache::{Artifact, ArtifactFiles, Origin, Stage};
use flashtune_codegen::{Arch, Kernel, Schedule, TemplateSet};
use flashtune_runtime::Compiler;
use flashtune_runtime::compile::{compile_with, recipe};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// What compilation needs.
pub(crate) struct Builder<'a> {
    pub compiler: &'a dyn Compiler,
    pub templates: &'a TemplateSet,
    pub files: &'a ArtifactFiles,
    pub observer: &'a dyn Observer,
    /// No compilation starts after this, except the default's.
    pub deadline: Instant,
}

impl Builder<'_> {
    /// Compiles all candidates, first ones first, on all cores. Failures are noted in the candidates.
    pub fn build(&self, candidates: &mut [Candidate]) {
        let total = candidates.len();
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(total.max(1));
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let slots: Vec<Mutex<&mut Candidate>> = candidates.iter_mut().map(Mutex::new).collect();
        // Workers take the candidates in their order, so that the best guesses are ready when the time is up; a
        // parallel iterator would split the list in halves instead.
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(slot) = slots.get(i) else { break };
                let mut candidate = slot.lock().unwrap_or_else(|e| e.into_inner());
                if !candidate.is_live() {
                    continue;
                }
                if !candidate.is_default && Instant::now() >= self.deadline {
                    candidate.fail(Stage::Budget, "the time for compiling ran out".into(), self.observer);
                    continue;
                }
                self.build_one(&mut candidate);
                let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                if candidate.is_live() {
                    self.observer.event(&Event::Compiled { schedule: &candidate.kernel.schedule, done, total });
                }
            }
        };
        rayon::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|_| work());
            }
        });
    }

    fn build_one(&self, candidate: &mut Candidate) {
        let key = recipe(&candidate.kernel, self.templates, self.compiler.id()).key();
        let make = || compile_with(self.compiler, &candidate.kernel, self.templates);
        match self.files.get_or_make(&key, make) {
            Ok((artifact, origin)) => {
                // Losing the file costs a compilation later, not this job.
                if let Origin::Unkept(e) = origin {
                    tracing::warn!(error = %e, "a compiled kernel could not be stored");
                }
                candidate.artifact = Some(artifact);
            }
            Err(e @ flashtune_runtime::Error::Codegen(_)) => {
                candidate.fail(Stage::Render, e.to_string(), self.observer);
            }
            Err(e) => candidate.fail(Stage::Compile, e.to_string(), self.observer),
        }
    }
}

/// Bytes of spill stores and loads that a kernel may have: a few values parked around the main loop cost nothing (on an
/// H200 the fastest schedule of head dim 128 spills 16), many mean traffic inside of it.
const SPILLS_ALLOWED: u32 = 64;

/// What the batches of a job have compiled so far.
#[derive(Debug, Default)]
pub(crate) struct Compiled {
    /// Candidates by their code.
    codes: HashMap<([u8; 32], u32), usize>,
    /// Whether some candidate is fit.
    some_are_fit: bool,
}

impl Compiled {
    /// Of the candidates from `from` on, drops kernels that spill registers in earnest or that the compiler calls unfit
    /// (unless no other is left; the default always stays), and those whose binary equals an earlier candidate's.
    pub fn prune(&mut self, candidates: &mut [Candidate], from: usize, observer: &dyn Observer) {
        let unfit = |c: &Candidate| c.artifact.as_ref().and_then(|a| unfit(c.kernel.arch, a));
        self.some_are_fit |= candidates[from..].iter().any(|c| c.is_live() && unfit(c).is_none());
        for i in from..candidates.len() {
            let candidate = &candidates[i];
            if !candidate.is_live() {
                continue;
            }
            let Some(artifact) = &candidate.artifact else { continue };
            let hash = (code_hash(artifact), beside_the_code(&candidate.kernel));
            if let Some(reason) = unfit(candidate).filter(|_| self.some_are_fit && !candidate.is_default) {
                candidates[i].fail(Stage::Prune, reason, observer);
            } else if let Some(&first) = self.codes.get(&hash) {
                let reason = format!("compiles to the same code as {}", candidates[first].kernel.schedule);
                candidates[i].twin = Some(first);
                candidates[i].fail(Stage::Prune, reason, observer);
            } else {
                self.codes.insert(hash, i);
            }
        }
    }
}

/// Why the compiler's facts make a kernel unfit.
fn unfit(arch: Arch, artifact: &Artifact) -> Option<String> {
    let facts = &artifact.facts;
    match arch {
        Arch::Sm(_) if facts.spill_bytes > SPILLS_ALLOWED => {
            Some(format!("spills {} bytes of registers at {} registers", facts.spill_bytes, facts.registers))
        }
        _ => facts.warnings.first().cloned(),
    }
}

/// The part of a schedule that is not in the binary: how many workers run it, or in which order tiles are taken.
fn beside_the_code(kernel: &Kernel) -> u32 {
    match kernel.schedule {
        Schedule::Cpu(s) => s.threads,
        Schedule::Sm90(s) => s.section_mib,
        _ => 0,
    }
}

/// Hash of the binary without the kernel's names in it, which differ between schedules that give the same code.
fn code_hash(artifact: &Artifact) -> [u8; 32] {
    let names = [artifact.entry.as_bytes(), &artifact.recipe.kernel.name().into_bytes()]
        .map(<[u8]>::to_vec)
        .into_iter()
        .filter(|n| n.len() > 8);
    let mut bytes = artifact.bytes.clone();
    for name in names {
        bytes = without(&bytes, &name);
    }
    *blake3::hash(&bytes).as_bytes()
}

/// The bytes without the occurrences of `name`.
fn without(bytes: &[u8], name: &[u8]) -> Vec<u8> {
    let mut rest = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == name[0] && bytes[at..].starts_with(name) {
            at += name.len();
        } else {
            rest.push(bytes[at]);
            at += 1;
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{artifact, candidates};

    fn prune(candidates: &mut [Candidate]) {
        Compiled::default().prune(candidates, 0, &());
    }

    #[test]
    fn spilling_kernels_are_dropped_while_others_are_left() {
        let mut all = candidates(4);
        for (i, c) in all.iter_mut().enumerate() {
            let mut a = artifact(&c.kernel, i as u8);
            a.facts.spill_bytes = [80, 96, SPILLS_ALLOWED, 240][i];
            c.artifact = Some(a);
        }
        let all_spill =
            |all: &mut [Candidate]| all.iter_mut().for_each(|c| c.artifact.as_mut().unwrap().facts.spill_bytes = 400);
        let mut hopeless = all.clone();
        prune(&mut all);
        // The default stays although it spills; so does the one that spills next to nothing.
        assert_eq!(all.iter().map(Candidate::is_live).collect::<Vec<_>>(), [true, false, true, false]);
        let (stage, reason) = all[1].failure.clone().unwrap();
        assert!(stage == Stage::Prune && reason.contains("96 bytes"), "{reason}");
        all_spill(&mut hopeless);
        prune(&mut hopeless);
        assert!(hopeless.iter().all(Candidate::is_live));
    }

    #[test]
    fn equal_code_under_different_names_is_timed_once() {
        let mut all = candidates(3);
        for (c, (name, body)) in all.iter_mut().zip([("kernel_one", 1), ("kernel_number_two", 1), ("kernel_three", 2)])
        {
            let mut a = artifact(&c.kernel, 0);
            a.entry = name.to_owned();
            a.bytes = [b"elf", name.as_bytes(), &[body; 40], name.as_bytes()].concat();
            c.artifact = Some(a);
        }
        prune(&mut all);
        assert_eq!(all.iter().map(Candidate::is_live).collect::<Vec<_>>(), [true, false, true]);
        assert!(all[1].failure.as_ref().unwrap().1.contains(&all[0].kernel.schedule.to_string()));
        assert_eq!(all.iter().map(|c| c.twin).collect::<Vec<_>>(), [None, Some(0), None]);
        // The same when they come one after the other.
        all.iter_mut().for_each(|c| (c.twin, c.failure) = (None, None));
        let mut compiled = Compiled::default();
        (1..=3).for_each(|n| compiled.prune(&mut all[..n], n - 1, &()));
        assert_eq!(all.iter().map(|c| c.twin).collect::<Vec<_>>(), [None, Some(0), None]);
    }
}
