//! Device memory between zones that nobody may write, and outputs that begin as poison: how check and the tuner's gate
//! find what a kernel writes beside its outputs, and what it leaves out.
//!
//! ```text
//! | GUARD | part 0 | GUARD .. | part 1 | GUARD .. |      all poison, but for parts with contents
//! ```

use crate::{Buffer, Device, Result, Stream};
use std::ops::Range;

/// Bytes of poison before, between and behind the parts, at least.
pub const GUARD: usize = 4096;
/// The byte that guards, gaps and unwritten outputs hold: NaN in every float format.
pub const POISON: u8 = 0xff;

/// Parts of one piece of device memory, between guard zones.
pub struct Guarded {
    /// The name of each part, and where it lies in the memory.
    parts: Vec<(&'static str, Range<usize>)>,
    buffer: Box<dyn Buffer>,
}

impl Guarded {
    /// One part with contents.
    ///
    /// # Errors
    /// Those of the device, for want of memory for instance.
    pub fn new(device: &dyn Device, name: &'static str, bytes: &[u8]) -> Result<Self> {
        let this = Self::of_parts(device, [(name, bytes.len())])?;
        this.upload(device, bytes)?;
        Ok(this)
    }

    /// Outputs of so many bytes each, by their names; uninitialised until [`Guarded::poison`].
    ///
    /// # Errors
    /// Those of the device, for want of memory for instance.
    pub fn of_parts(device: &dyn Device, parts: impl IntoIterator<Item = (&'static str, usize)>) -> Result<Self> {
        let mut end = GUARD;
        let place = |(name, bytes): (&'static str, usize)| {
            let place = end..end + bytes;
            // The next one on a boundary that any tensor may need; the memory ends with its last guard.
            end = place.end.next_multiple_of(GUARD) + GUARD;
            (name, place)
        };
        let parts: Vec<_> = parts.into_iter().map(place).collect();
        let bytes = parts.last().map_or(0, |(_, place)| place.end) + GUARD;
        Ok(Self { parts, buffer: device.alloc(bytes)? })
    }

    /// Poison, but for the one part's contents.
    pub(crate) fn upload(&self, device: &dyn Device, bytes: &[u8]) -> Result<()> {
        let mut all = vec![POISON; self.buffer.len()];
        all[self.place(0)][..bytes.len()].copy_from_slice(bytes);
        device.upload(&*self.buffer, &all)
    }

    /// Poison everywhere.
    ///
    /// # Errors
    /// Those of the device.
    pub fn poison(&self, device: &dyn Device) -> Result<()> {
        device.fill(&*self.buffer, POISON)
    }

    /// Bytes of the memory, guards included.
    pub fn all_bytes(&self) -> usize {
        self.buffer.len()
    }

    /// Where the part of this number lies in the memory, from 0.
    pub fn place(&self, part: usize) -> Range<usize> {
        self.parts[part].1.clone()
    }

    /// The address of the part of this number.
    pub fn address_of(&self, part: usize) -> u64 {
        self.buffer.address() + self.place(part).start as u64
    }

    /// The address of the only part.
    pub(crate) fn address(&self) -> u64 {
        self.address_of(0)
    }

    /// Bytes of the only part.
    pub(crate) fn len(&self) -> usize {
        self.place(0).len()
    }

    /// The whole memory, guards included, to the beginning of `to`; and what was written beside the parts.
    ///
    /// # Errors
    /// Those of the device.
    pub fn download_all(&self, device: &dyn Device, to: &mut [u8], stream: Stream) -> Result<Option<String>> {
        let to = &mut to[..self.buffer.len()];
        device.download(&*self.buffer, to, stream)?;
        Ok(self.stray(to))
    }

    /// The only part's bytes, and what was written beside them.
    pub(crate) fn download(&self, device: &dyn Device, stream: Stream) -> Result<(Vec<u8>, Option<String>)> {
        let mut bytes = vec![0; self.buffer.len()];
        let stray = self.download_all(device, &mut bytes, stream)?;
        let place = self.place(0);
        bytes.truncate(place.end);
        bytes.drain(..place.start);
        Ok((bytes, stray))
    }

    /// What was written of the only part, which held these bytes, or beside it.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn changed(&self, device: &dyn Device, before: &[u8], stream: Stream) -> Result<Option<String>> {
        let (bytes, stray) = self.download(device, stream)?;
        Ok(stray.or_else(|| (bytes != before).then(|| format!("{} was written", self.parts[0].0))))
    }

    /// The first byte of a guard zone that is not poison any more, by the part that it lies next to.
    fn stray(&self, all: &[u8]) -> Option<String> {
        let behind = |i: usize| self.parts.get(i + 1).map_or(all.len(), |(_, next)| next.start);
        let mut zones = self.parts.iter().enumerate().map(|(i, (name, place))| (name, place.end..behind(i)));
        let (first, place) = self.parts.first()?;
        written(&all[..place.start])
            .map(|at| format!("{} bytes before {first} were written", place.start - at))
            .or_else(|| {
                zones.find_map(|(name, zone)| Some(format!("{} bytes after {name} were written", written(&all[zone])?)))
            })
    }
}

/// The byte of outputs whose codes may be all ones by right: those of quantised elements, and integers.
pub(crate) const UNWRITTEN_CODE: u8 = 0xa5;

/// The first byte that is not poison any more.
pub fn written(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|b| *b != POISON)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuDevice;

    #[test]
    fn bytes_beside_the_parts_are_told_by_the_part_that_they_lie_next_to() {
        let device = &*CpuDevice::open().unwrap();
        let memory = Guarded::of_parts(device, [("dq", 100), ("dk", 5000), ("dv", 0)]).unwrap();
        memory.poison(device).unwrap();
        let mut bytes = vec![0; memory.all_bytes()];
        assert_eq!(memory.download_all(device, &mut bytes, device.stream()).unwrap(), None);
        assert!(written(&bytes).is_none() && (0..3).all(|i| memory.address_of(i).is_multiple_of(16)));
        for i in 0..3 {
            let place = memory.place(i);
            assert!(place.start >= GUARD && bytes.len() - place.end >= GUARD);
            bytes[place].fill(0);
        }
        assert_eq!(memory.stray(&bytes), None);
        let [dq, dk, dv] = [0, 1, 2].map(|i| memory.place(i));
        for (at, said) in [
            (0, "4096 bytes before dq were written"),
            (dq.start - 1, "1 bytes before dq were written"),
            (dq.end, "0 bytes after dq were written"),
            (dk.start - 1, "after dq were written"),
            (dk.end + 7, "7 bytes after dk were written"),
            (dv.end, "0 bytes after dv were written"),
            (bytes.len() - 1, "after dv were written"),
        ] {
            let before = std::mem::replace(&mut bytes[at], 1);
            assert!(memory.stray(&bytes).unwrap().ends_with(said), "{at}");
            bytes[at] = before;
        }
    }
}
