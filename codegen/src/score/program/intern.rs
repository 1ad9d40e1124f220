//! Programs as values that are as cheap to pass as a number.

use super::Program;
use crate::score::syntax::words::{Declaration, Scalar};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::{LazyLock, Mutex, PoisonError};

/// A program that is kept for as long as the process runs, once for each canonical text. It is what makes a
/// [`crate::Problem`] that has a program still one that can be copied.
///
/// The memory of a program is never given back: a few kilobytes for each different one, beside the kernel that is
/// compiled for it. Run-time scalars and tensors are no part of it, so a host needs as many as it has kinds of masks.
#[derive(Clone, Copy)]
pub struct ProgramRef(&'static Kept);

/// A program, what is left of it without a mask that is a window, and what it is without ranges that are no promises.
struct Kept {
    program: Program,
    unmasked: Option<ProgramRef>,
    widened: Option<ProgramRef>,
}

static PROGRAMS: LazyLock<Mutex<HashMap<[u8; 32], &'static Kept>>> = LazyLock::new(Mutex::default);

impl ProgramRef {
    /// The kept program that is equal to this one.
    pub fn new(program: Program) -> Self {
        let programs = || PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = programs().get(program.hash()) {
            return Self(kept);
        }
        let unmasked = program.unmasked().cloned().map(Self::new);
        let widened = program.widened().map(Self::new);
        let hash = *program.hash();
        Self(programs().entry(hash).or_insert_with(|| Box::leak(Box::new(Kept { program, unmasked, widened }))))
    }

    /// [`Program::unmasked`] of it, kept as well.
    pub fn unmasked(self) -> Option<ProgramRef> {
        self.0.unmasked
    }

    /// The program for a call with these scalars: [`Program::widened`] if one lies outside of its usual range.
    pub fn admitting(self, scalar: impl Fn(&str) -> Option<Scalar>) -> ProgramRef {
        let Some(widened) = self.0.widened else { return self };
        let lies = |d: &Declaration| match scalar(&d.name) {
            Some(Scalar::Float(x)) => d.allows(x),
            Some(Scalar::Int(x)) => d.allows(x as f32),
            None => true,
        };
        if self.declarations().iter().filter(|d| d.usually).all(lies) { self } else { widened }
    }

    /// The program, for as long as the process runs.
    pub fn kept(self) -> &'static Program {
        &self.0.program
    }
}

impl Deref for ProgramRef {
    type Target = Program;
    fn deref(&self) -> &Program {
        &self.0.program
    }
}

impl PartialEq for ProgramRef {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for ProgramRef {}

impl Hash for ProgramRef {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.program.hash().hash(state);
    }
}

impl PartialOrd for ProgramRef {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ProgramRef {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.program.hash().cmp(other.0.program.hash())
    }
}

impl fmt::Debug for ProgramRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProgramRef({:?})", self.text())
    }
}

impl Serialize for ProgramRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.text())
    }
}

impl<'de> Deserialize<'de> for ProgramRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Program::parse(&text).map(Self::new).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::{ProgramBuilder, Storage};

    #[test]
    fn calls_outside_of_a_usual_range_get_a_program_without_it() {
        let text =
            |range: &str| format!("cap: float{range}; score = cap * tanh(score / cap) + near; near: float in -1..1;");
        let [usual, wide] = [" usually in 0..50", ""].map(|r| ProgramRef::new(Program::parse(&text(r)).unwrap()));
        assert_ne!(usual, wide);
        assert_eq!(Program::parse(usual.text()).unwrap(), *usual);
        for (cap, widened) in [(0.0, false), (50.0, false), (50.1, true), (-1.0, true), (f32::NAN, true)] {
            // What is promised stays so.
            let found = usual.admitting(|name| Some(Scalar::Float(if name == "cap" { cap } else { 9.0 })));
            assert_eq!(found, if widened { wide } else { usual }, "{cap}");
        }
        assert_eq!(usual.admitting(|_| Some(Scalar::Int(51))), wide);
        assert_eq!(usual.admitting(|_| None), usual);
        assert_eq!(wide.admitting(|_| Some(Scalar::Float(1e9))), wide);
        let int = Declaration::scalar("n", Storage::I32).usually_within(0, 5);
        let e = ProgramBuilder::new().declare(int).unwrap_err().to_string();
        assert!(e.contains("`n: i32 usually in 0..5` has a usual range"), "{e}");
    }

    #[test]
    fn debug_of_a_program_is_one_line() {
        let program = Program::parse("doc: i32[batch, kv_len]; mask = doc[b, kv] == 1; score = score * 2.0;").unwrap();
        assert!(program.text().contains('\n'), "the text itself has several: {program}");
        for debug in [format!("{program:?}"), format!("{program:#?}"), format!("{:#?}", ProgramRef::new(program))] {
            assert!(!debug.contains('\n') && debug.contains("doc: i32") && debug.len() < 200, "{debug}");
        }
    }

    #[test]
    fn equal_programs_are_one_and_survive_being_stored() {
        let a = ProgramRef::new(Program::mask_of("kv <= q").unwrap());
        let b = ProgramRef::new(Program::mask_of("q >= kv").unwrap());
        assert_eq!(a, b);
        let json = serde_json::to_string(&a).unwrap();
        assert_eq!(serde_json::from_str::<ProgramRef>(&json).unwrap(), a);
        assert!(serde_json::from_str::<ProgramRef>("\"mask = kv <= qq\"").unwrap_err().to_string().contains("`qq`"));
    }
}
