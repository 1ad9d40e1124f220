//! Device memory between zones that nobody may write.

use super::{GUARD, POISON};
use crate::{Buffer, Device, Result, Stream};

/// Bytes on the device between guard zones.
pub(super) struct Guarded {
    name: &'static str,
    bytes: usize,
    buffer: Box<dyn Buffer>,
}

impl Guarded {
    pub(super) fn new(device: &dyn Device, name: &'static str, bytes: &[u8]) -> Result<Self> {
        let this = Self { name, bytes: bytes.len(), buffer: device.alloc(bytes.len() + 2 * GUARD)? };
        this.upload(device, bytes)?;
        Ok(this)
    }

    /// Guard zones and the bytes between them.
    pub(super) fn upload(&self, device: &dyn Device, bytes: &[u8]) -> Result<()> {
        let mut all = vec![POISON; self.buffer.len()];
        all[GUARD..GUARD + bytes.len()].copy_from_slice(bytes);
        device.upload(&*self.buffer, &all)
    }

    /// How many bytes lie between the zones.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Where the bytes between the zones begin.
    pub(super) fn address(&self) -> u64 {
        self.buffer.address() + GUARD as u64
    }

    /// Poison everywhere.
    pub(super) fn poison(&self, device: &dyn Device) -> Result<()> {
        device.fill(&*self.buffer, POISON)
    }

    /// The bytes, and what is wrong with the zones around them.
    pub(super) fn download(&self, device: &dyn Device, stream: Stream) -> Result<(Vec<u8>, Option<String>)> {
        let mut bytes = vec![0; self.buffer.len()];
        device.download(&*self.buffer, &mut bytes, stream)?;
        let end = GUARD + self.bytes;
        let stray = written(&bytes[..GUARD])
            .map(|i| format!("{} bytes before {} were written", GUARD - i, self.name))
            .or_else(|| written(&bytes[end..]).map(|i| format!("{i} bytes after {} were written", self.name)));
        bytes.truncate(end);
        bytes.drain(..GUARD);
        Ok((bytes, stray))
    }
}

/// The first byte that is not poison any more.
pub(super) fn written(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|b| *b != POISON)
}
