//! Compiled kernels that are not worth a launch: what the compiler's facts make unfit, and what is the same code again.

use crate::Observer;
use crate::candidate::Candidate;
use flashtune_cache::{Artifact, Stage};
use flashtune_codegen::{Arch, Place};
use std::collections::HashMap;

/// Bytes of spill stores and loads that a kernel may have: a few values parked around the main loop cost nothing (on an
/// H200 the fastest schedule of head dim 128 spills 16), many mean traffic inside of it.
const SPILLS_ALLOWED: u32 = 64;

/// What a job has compiled so far.
#[derive(Debug, Default)]
pub(crate) struct Compiled {
    /// Candidates by their code, and by the part of the schedule that is not in it.
    codes: HashMap<([u8; 32], Vec<Place>), usize>,
    /// Whether some candidate is fit.
    some_are_fit: bool,
}

impl Compiled {
    /// Of the `new` candidates, drops kernels that spill registers in earnest or that the compiler calls unfit (unless
    /// no other is left; the default always stays), and those whose binary equals an earlier candidate's.
    pub(crate) fn prune(&mut self, candidates: &mut [Candidate], new: &[usize], observer: &dyn Observer) {
        let unfit = |c: &Candidate| c.artifact.as_ref().and_then(|a| unfit(c.kernel.arch, a));
        self.some_are_fit |= new.iter().any(|&i| candidates[i].is_live() && unfit(&candidates[i]).is_none());
        for &i in new {
            let candidate = &candidates[i];
            if !candidate.is_live() {
                continue;
            }
            let Some(artifact) = &candidate.artifact else { continue };
            let hash = (code_hash(artifact), candidate.kernel.schedule.launch_places());
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
        let all: Vec<usize> = (0..candidates.len()).collect();
        Compiled::default().prune(candidates, &all, &());
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
        (0..3).for_each(|n| compiled.prune(&mut all, &[n], &()));
        assert_eq!(all.iter().map(|c| c.twin).collect::<Vec<_>>(), [None, Some(0), None]);
    }
}
