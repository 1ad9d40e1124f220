//! Whether an image is a whole ELF file. Drivers and loaders are given an address and no length, and trust its headers: one that
//! points beyond the end would have them read what is not theirs. The hash of an image says that nobody changed it, not that
//! whoever made it made sense.

/// Bytes of a header, a segment's entry and a section's.
const HEADER: usize = 64;
const SEGMENT: usize = 56;
const SECTION: usize = 64;

/// Kinds of sections.
const UNUSED: u32 = 0;
const SYMBOLS: u32 = 2;
const STRINGS: u32 = 3;
/// Takes memory and no bytes of the file.
const NO_BITS: u32 = 8;

struct Image<'a>(&'a [u8]);

impl Image<'_> {
    fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    fn u16(&self, at: usize) -> Option<usize> {
        self.array(at).map(|b| u16::from_le_bytes(b) as usize)
    }

    fn u32(&self, at: usize) -> Option<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: usize) -> Option<usize> {
        self.array(at).and_then(|b| usize::try_from(u64::from_le_bytes(b)).ok())
    }

    /// Whether so many bytes lie there.
    fn holds(&self, offset: usize, bytes: usize) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.0.len())
    }
}

/// Refuses what is no little-endian 64-bit ELF file whose tables, segments, sections and names lie within its bytes.
///
/// # Errors
/// What points beyond the end, in words.
pub fn check(bytes: &[u8]) -> Result<(), &'static str> {
    let image = Image(bytes);
    if bytes.len() < HEADER || !bytes.starts_with(b"\x7fELF\x02\x01") {
        return Err("it is no 64-bit ELF image");
    }
    segments(&image)?;
    sections(&image)
}

fn segments(image: &Image) -> Result<(), &'static str> {
    const CUT: &str = "its table of segments lies beyond its end";
    let (table, entry, count) = (image.u64(32).ok_or(CUT)?, image.u16(54).ok_or(CUT)?, image.u16(56).ok_or(CUT)?);
    if count > 0 && entry != SEGMENT || !image.holds(table, count * SEGMENT) {
        return Err(CUT);
    }
    for at in (0..count).map(|i| table + i * SEGMENT) {
        let (offset, bytes) = (image.u64(at + 8).ok_or(CUT)?, image.u64(at + 32).ok_or(CUT)?);
        if !image.holds(offset, bytes) {
            return Err("a segment lies beyond its end");
        }
    }
    Ok(())
}

fn sections(image: &Image) -> Result<(), &'static str> {
    const CUT: &str = "its table of sections lies beyond its end";
    const NAMES: &str = "a name lies beyond its table of names";
    let (table, entry, count) = (image.u64(40).ok_or(CUT)?, image.u16(58).ok_or(CUT)?, image.u16(60).ok_or(CUT)?);
    if count > 0 && entry != SECTION || !image.holds(table, count * SECTION) {
        return Err(CUT);
    }
    let section = |i: usize| table + i * SECTION;
    let kind = |i: usize| image.u32(section(i) + 4);
    let place = |i: usize| Some((image.u64(section(i) + 24)?, image.u64(section(i) + 32)?));
    for i in 0..count {
        let (kind, (offset, bytes)) = kind(i).zip(place(i)).ok_or(CUT)?;
        if ![UNUSED, NO_BITS].contains(&kind) && !image.holds(offset, bytes) {
            return Err("a section lies beyond its end");
        }
    }
    // From here on every place of a section that has bytes is within them. The length of a table of names, which ends its last one.
    let strings = |i: usize| -> Option<usize> {
        let (offset, bytes) = place(i).filter(|_| i < count && kind(i) == Some(STRINGS))?;
        (bytes == 0 || image.0[offset + bytes - 1] == 0).then_some(bytes)
    };
    let names = if count > 0 { strings(image.u16(62).ok_or(CUT)?).ok_or(NAMES)? } else { 0 };
    for i in 0..count {
        if image.u32(section(i)).ok_or(CUT)? as usize >= names.max(1) {
            return Err(NAMES);
        }
        if kind(i) != Some(SYMBOLS) {
            continue;
        }
        let ((offset, bytes), link) = place(i).zip(image.u32(section(i) + 40)).ok_or(CUT)?;
        let names = strings(link as usize).ok_or(NAMES)?;
        for at in (offset..offset + bytes / 24 * 24).step_by(24) {
            if image.u32(at).ok_or(CUT)? as usize >= names.max(1) {
                return Err(NAMES);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
            (of_kind(STRINGS) + 24, "a section"),
            (of_kind(SYMBOLS) + 32, "a section"),
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
        assert_eq!(set(of_kind(STRINGS), &[0xff; 4]), Some("a name lies beyond its table of names"));
        assert_eq!(set(of_kind(SYMBOLS) + 40, &[0xff; 4]), Some("a name lies beyond its table of names"));
        // What takes no bytes may be as large as it likes.
        assert_eq!(set(of_kind(NO_BITS) + 32, &[0x7f; 8]), None);
        // Whatever the bytes of headers and tables are.
        let tables = (0..HEADER).chain(segments..segments + 4 * SEGMENT).chain(sections..whole.len());
        for at in tables {
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let _ = said(&|image| image[at] = byte);
            }
        }
    }
}
