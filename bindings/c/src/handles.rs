//! Numbers that stand for open engines and block masks.
//!
//! A number is a slot of the table and the slot's generation. Closing raises the generation, so that an old number, a
//! made-up one, or one of another copy of the library finds nothing.

use crate::Status;
use crate::error::{Failure, Result};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, PoisonError, RwLock};

/// Values by number.
pub(crate) struct Table<T> {
    /// What they stand for, and the function that makes one.
    kind: &'static str,
    made_by: &'static str,
    slots: RwLock<Vec<Slot<T>>>,
}

struct Slot<T> {
    generation: u32,
    value: Option<Arc<T>>,
}

impl<T> Table<T> {
    pub const fn new(kind: &'static str, made_by: &'static str) -> Self {
        Self { kind, made_by, slots: RwLock::new(Vec::new()) }
    }

    /// Takes a value in and gives its number.
    pub fn insert(&self, value: T) -> u64 {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let free = slots.iter().position(|s| s.value.is_none());
        let index = free.unwrap_or_else(|| {
            // A first generation that other tables do not have, so that their numbers are strangers here.
            let index = slots.len();
            slots.push(Slot { generation: RandomState::new().hash_one(index) as u32, value: None });
            index
        });
        let slot = &mut slots[index];
        slot.generation = slot.generation.wrapping_add(1).max(1);
        slot.value = Some(Arc::new(value));
        (u64::from(slot.generation) << 32) | index as u64
    }

    /// The value of a number. Whoever has it keeps it, also when the number is closed meanwhile.
    ///
    /// # Errors
    /// [`Status::InvalidHandle`].
    pub fn get(&self, handle: u64) -> Result<Arc<T>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let (generation, index) = split(handle);
        let slot = slots.get(index).filter(|s| s.generation == generation);
        slot.and_then(|s| s.value.clone()).ok_or_else(|| self.unknown(handle))
    }

    /// Takes the value out; from now on the number is unknown.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub fn remove(&self, handle: u64) -> Result<Arc<T>> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let (generation, index) = split(handle);
        let slot = slots.get_mut(index).filter(|s| s.generation == generation);
        slot.and_then(|s| s.value.take()).ok_or_else(|| self.unknown(handle))
    }

    fn unknown(&self, handle: u64) -> Failure {
        let Self { kind, made_by, .. } = self;
        let message = match handle {
            0 => format!("the {kind} is 0, which is none; make one with {made_by}"),
            _ => format!("{handle:#x} is no {kind} of this library: it was closed, or never made here"),
        };
        Failure::new(Status::InvalidHandle, message)
    }
}

fn split(handle: u64) -> (u32, usize) {
    ((handle >> 32) as u32, handle as u32 as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_and_made_up_numbers_are_unknown() {
        let table = Table::new("number", "insert");
        let (a, b) = (table.insert("a"), table.insert("b"));
        assert_eq!((*table.get(a).unwrap(), *table.get(b).unwrap()), ("a", "b"));
        assert_eq!(*table.remove(a).unwrap(), "a");
        // The slot is used again, the number is not.
        let c = table.insert("c");
        assert_eq!(c as u32, a as u32);
        for unknown in [a, 0, 1, u64::MAX, b + 1, b ^ (1 << 40), c.wrapping_add(1 << 32)] {
            assert_eq!(table.get(unknown).unwrap_err().status, Status::InvalidHandle, "{unknown:#x}");
            assert_eq!(table.remove(unknown).unwrap_err().status, Status::InvalidHandle, "{unknown:#x}");
        }
        assert_eq!((*table.get(c).unwrap(), *table.get(b).unwrap()), ("c", "b"));
    }

    #[test]
    fn numbers_of_another_table_are_strangers() {
        let (ours, theirs) = (Table::new("number", "insert"), Table::new("number", "insert"));
        // 32 random bits agree once in four thousand million runs.
        assert!(ours.get(theirs.insert(1)).is_err());
        ours.insert(2);
        assert!(ours.get(theirs.insert(3)).is_err());
    }

    #[test]
    fn a_value_in_use_outlives_its_number() {
        let table = Table::new("number", "insert");
        let handle = table.insert(String::from("x"));
        let held = table.get(handle).unwrap();
        drop(table.remove(handle).unwrap());
        assert_eq!(*held, "x");
    }
}
