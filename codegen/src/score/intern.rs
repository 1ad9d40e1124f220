//! Programs as values that are as cheap to pass as a number.

use super::program::Program;
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

/// A program, and what is left of it without a mask that is a window.
struct Kept {
    program: Program,
    unmasked: Option<ProgramRef>,
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
        let hash = *program.hash();
        Self(programs().entry(hash).or_insert_with(|| Box::leak(Box::new(Kept { program, unmasked }))))
    }

    /// [`Program::unmasked`] of it, kept as well.
    pub fn unmasked(self) -> Option<ProgramRef> {
        self.0.unmasked
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
