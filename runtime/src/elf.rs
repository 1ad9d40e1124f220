//! Whether an image is a whole ELF file. Drivers and loaders are given an address and no length, and trust its headers:
//! one that points beyond the end would have them read what is not theirs. The hash of an image says that nobody
//! changed it, not that whoever made it made sense.

use object::LittleEndian;
use object::elf::{FileHeader64, PN_XNUM, SHT_DYNSYM, SHT_NULL, SHT_SYMTAB};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, SectionTable, Sym, SymbolTable};

/// Refuses what is no little-endian 64-bit ELF file whose tables, segments, sections and names lie within its bytes.
///
/// # Errors
/// What points beyond the end, in words.
pub fn check(bytes: &[u8]) -> Result<(), &'static str> {
    const NAMES: &str = "a name lies beyond its table of names";
    let header = FileHeader64::<LittleEndian>::parse(bytes).map_err(|_| "it is no 64-bit ELF image")?;
    let endian = LittleEndian;
    const SEGMENTS: &str = "its table of segments lies beyond its end";
    // Loaders take this number for what it says, not for a sign that the number is elsewhere.
    if header.e_phnum(endian) == PN_XNUM {
        return Err(SEGMENTS);
    }
    for segment in header.program_headers(endian, bytes).map_err(|_| SEGMENTS)? {
        segment.data(endian, bytes).map_err(|()| "a segment lies beyond its end")?;
    }
    let sections = header.section_headers(endian, bytes).map_err(|_| "its table of sections lies beyond its end")?;
    for section in sections.iter().filter(|s| s.sh_type(endian) != SHT_NULL) {
        section.data(endian, bytes).map_err(|_| "a section lies beyond its end")?;
    }
    let names = header.section_strings(endian, bytes, sections).map_err(|_| NAMES)?;
    let sections = SectionTable::<FileHeader64<LittleEndian>>::new(sections, names);
    for (index, section) in sections.enumerate() {
        sections.section_name(endian, section).map_err(|_| NAMES)?;
        if [SHT_SYMTAB, SHT_DYNSYM].contains(&section.sh_type(endian)) {
            let symbols = SymbolTable::parse(endian, bytes, &sections, index, section).map_err(|_| NAMES)?;
            for symbol in symbols.iter() {
                symbol.name(endian, symbols.strings()).map_err(|_| NAMES)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::elf::{SHT_NOBITS, SHT_STRTAB};

    /// Bytes of a header, a segment's entry and a section's.
    const HEADER: usize = 64;
    const SEGMENT: usize = 56;
    const SECTION: usize = 64;

    /// An image that a compiler of the host made.
    fn image() -> Vec<u8> {
        let tmp = tempfile::tempdir().unwrap();
        let [source, object] = ["x.c", "x.so"].map(|name| tmp.path().join(name));
        std::fs::write(&source, "int answer(void) { return 42; }\nstatic int zeros[999];\nint *const keep = zeros;\n")
            .unwrap();
        let cc = std::env::var("CC").ok().filter(|cc| !cc.is_empty()).unwrap_or_else(|| "cc".into());
        let done = std::process::Command::new(cc).args(["-shared", "-fPIC", "-o"]).arg(&object).arg(&source).status();
        assert!(done.unwrap().success());
        std::fs::read(object).unwrap()
    }

    #[test]
    fn a_whole_image_passes_and_none_that_is_cut() {
        let whole = image();
        check(&whole).unwrap();
        for length in 0..whole.len() {
            // Its tables are at the end.
            assert!(check(&whole[..length]).is_err(), "{length} of {} bytes", whole.len());
        }
        assert!(check(b"not an image at all, but text that is longer than the header of one").is_err());
    }

    #[test]
    fn nothing_that_points_beyond_the_end_passes_and_nothing_panics() {
        let whole = image();
        let said = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut image = whole.clone();
            change(&mut image);
            check(&image).err()
        };
        let at = |at: usize| u64::from_le_bytes(whole[at..at + 8].try_into().unwrap()) as usize;
        let (segments, sections) = (at(32), at(40));
        let count = u16::from_le_bytes(whole[60..62].try_into().unwrap()) as usize;
        let of_kind = |kind: u32| {
            let of = |i: &usize| whole[sections + i * SECTION + 4..][..4] == kind.to_le_bytes();
            sections + (0..count).find(of).expect("one of this kind") * SECTION
        };
        let huge = (whole.len() as u64 + 1).to_le_bytes();
        let set =
            |at: usize, to: &'static [u8]| said(&|image: &mut Vec<u8>| image[at..at + to.len()].copy_from_slice(to));
        let huge: &'static [u8] = Box::leak(Box::new(huge));
        let places = [
            (32, "segments"),
            (40, "sections"),
            (segments + 8, "a segment"),
            (segments + 32, "a segment"),
            (of_kind(SHT_STRTAB) + 24, "a section"),
            (of_kind(SHT_SYMTAB) + 32, "a section"),
        ];
        for (at, word) in places {
            for to in [huge, &[0xff; 8]] {
                let said = set(at, to);
                assert!(said.is_some_and(|s| s.contains(word)), "{at}: {said:?}");
            }
        }
        for (at, word) in [(54, "segments"), (56, "segments"), (58, "sections"), (60, "sections"), (62, "name")] {
            let said = set(at, &[0xff; 2]);
            assert!(said.is_some_and(|s| s.contains(word)), "{at}: {said:?}");
        }
        assert_eq!(set(of_kind(SHT_STRTAB), &[0xff; 4]), Some("a name lies beyond its table of names"));
        assert_eq!(set(of_kind(SHT_SYMTAB) + 40, &[0xff; 4]), Some("a name lies beyond its table of names"));
        // What takes no bytes may be as large as it likes.
        assert_eq!(set(of_kind(SHT_NOBITS) + 32, &[0x7f; 8]), None);
        // Whatever the bytes of headers and tables are.
        let tables = (0..HEADER).chain(segments..segments + 4 * SEGMENT).chain(sections..whole.len());
        for at in tables {
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let _ = said(&|image| image[at] = byte);
            }
        }
    }
}
