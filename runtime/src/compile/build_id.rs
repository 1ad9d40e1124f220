//! Which build a library file is, where its version does not tell.

use flashtune_cache::Key;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// A short name of the very build: the linker's build id, or when there is none, a hash over the size and samples of
/// the file (all of it would be 140 MB).
pub(super) fn build_id(path: &Path) -> io::Result<String> {
    const SAMPLES: u64 = 64;
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut head = vec![0; size.min(1 << 16) as usize];
    file.read_exact(&mut head)?;
    if let Some(id) = elf_build_id(&head) {
        return Ok(id.iter().take(4).map(|b| format!("{b:02x}")).collect());
    }
    let mut sampled = size.to_le_bytes().to_vec();
    sampled.extend(&head);
    for i in 1..SAMPLES {
        file.seek(SeekFrom::Start(size / SAMPLES * i))?;
        (&mut file).take(4096).read_to_end(&mut sampled)?;
    }
    Ok(Key::of(&sampled).hex()[..8].to_owned())
}

/// The descriptor of the note NT_GNU_BUILD_ID in the notes at the start of a little-endian 64-bit ELF file.
fn elf_build_id(head: &[u8]) -> Option<&[u8]> {
    const PT_NOTE: u32 = 4;
    const NT_GNU_BUILD_ID: u32 = 3;
    let u16_at = |i: usize| Some(u16::from_le_bytes(head.get(i..i + 2)?.try_into().ok()?) as usize);
    let u32_at = |i: usize| Some(u32::from_le_bytes(head.get(i..i + 4)?.try_into().ok()?));
    let u64_at = |i: usize| usize::try_from(u64::from_le_bytes(head.get(i..i + 8)?.try_into().ok()?)).ok();
    if head.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, entry, count) = (u64_at(32)?, u16_at(54)?, u16_at(56)?);
    for i in 0..count {
        let header = table.checked_add(i * entry)?;
        if u32_at(header)? != PT_NOTE {
            continue;
        }
        let (mut at, size) = (u64_at(header + 8)?, u64_at(header + 32)?);
        let end = at.checked_add(size)?;
        while at + 12 <= end {
            let (name, data) = (u32_at(at)? as usize, u32_at(at + 4)? as usize);
            let start = at + 12 + name.next_multiple_of(4);
            if u32_at(at + 8)? == NT_GNU_BUILD_ID && head.get(at + 12..at + 16)? == b"GNU\0" {
                return head.get(start..start.checked_add(data)?);
            }
            at = start.checked_add(data.next_multiple_of(4))?;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_ids_are_read_from_elf_files_and_hashed_without_one() {
        // Compilers put a build id into this very program or not; both ways give a stable name.
        let me = std::env::current_exe().unwrap();
        assert_eq!(build_id(&me).unwrap(), build_id(&me).unwrap());
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, vec![1; 300_000]).unwrap();
        std::fs::write(&b, vec![1; 300_001]).unwrap();
        assert_ne!(build_id(&a).unwrap(), build_id(&b).unwrap());
        let mut elf = vec![0u8; 200];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[32] = 64; // program headers
        elf[54] = 56;
        elf[56] = 1;
        elf[64] = 4; // PT_NOTE at 128, 20 bytes
        elf[64 + 8] = 128;
        elf[64 + 32] = 20;
        elf[128..148].copy_from_slice(b"\x04\0\0\0\x04\0\0\0\x03\0\0\0GNU\0\xde\xad\xbe\xef");
        assert_eq!(elf_build_id(&elf), Some(&b"\xde\xad\xbe\xef"[..]));
        elf[136] = 1; // another type of note
        assert_eq!(elf_build_id(&elf), None);
    }
}
