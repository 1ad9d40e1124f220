//! Values of list options: sizes with ranges, and masks.

use flashtune::Mask;
use flashtune_codegen::Error;
use flashtune_codegen::score::{BUILTINS, Program, ProgramBuilder, ProgramRef, builtin, nearest_name};
use std::str::FromStr;

/// Sizes that one item of a list names: `512`, `16k`, or `512..16k` for every doubling from the first to the last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sizes(pub Vec<u32>);

impl FromStr for Sizes {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self, Error> {
        let bad = || Error::parse("size", s, "a number such as 512 or 16k, or FROM..TO for every doubling between");
        let Some((from, to)) = s.split_once("..") else { return Ok(Sizes(vec![size(s).ok_or_else(bad)?])) };
        let (from, to) = (size(from).ok_or_else(bad)?, size(to).ok_or_else(bad)?);
        if from == 0 || from > to {
            return Err(bad());
        }
        let mut sizes: Vec<u32> =
            std::iter::successors(Some(from), |n| n.checked_mul(2)).take_while(|n| *n < to).collect();
        sizes.push(to);
        Ok(Sizes(sizes))
    }
}

/// A whole number of a list, without a sign.
pub(crate) fn whole(s: &str) -> Result<u32, Error> {
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse().ok())?;
    digits(s.trim())
        .ok_or_else(|| Error::parse("number", s, "a whole number such as 64, or several with commas between"))
}

/// `512`, `16k`, `1M`.
fn size(text: &str) -> Option<u32> {
    let (digits, unit) = match text.trim().as_bytes() {
        [.., b'k' | b'K'] => (&text.trim()[..text.trim().len() - 1], 1 << 10),
        [.., b'M'] => (&text.trim()[..text.trim().len() - 1], 1 << 20),
        _ => (text.trim(), 1),
    };
    // `parse` would also take a sign.
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse::<u32>().ok()?.checked_mul(unit))?
}

/// A mask: of the built-in window kind, or a score program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MaskChoice {
    /// full, causal or a window.
    Window(Mask),
    /// Anything else.
    Program(ProgramRef),
}

/// What a mask may be.
const MASKS: &str = "full, causal, window:LEFT,RIGHT with a number or - for an unbounded side, the name of a built-in \
                     program (chunked, document, ...), or the text of one";

/// Masks that one option names: `causal`, several as in `full,causal,window:512,0`, the name of a built-in program, or
/// the text of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Masks(pub Vec<MaskChoice>);

impl FromStr for Masks {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self, Error> {
        let mut items = s.split(',');
        let mut texts = Vec::new();
        while let Some(item) = items.next() {
            // The comma between the sides of a window is no separator.
            let right = item.starts_with("window:").then(|| items.next()).flatten();
            texts.push(right.map_or_else(|| item.to_owned(), |right| format!("{item},{right}")));
        }
        let masks: Result<Vec<Mask>, Error> = texts.iter().map(|text| text.parse()).collect();
        match masks {
            Ok(masks) => Ok(Masks(masks.into_iter().map(MaskChoice::Window).collect())),
            Err(e) if s.starts_with("window") => Err(e),
            Err(_) => {
                // A single word is a text only if it is a good one, such as `false`: else it is a name that nobody
                // knows.
                let word = texts.iter().find(|text| text.parse::<Mask>().is_err()).map_or(s, |text| text);
                let unknown = |_| Error::parse("mask", word, masks_near(word, texts.len() == 1));
                let program = program_text(s, "mask").unwrap_or_else(|| Program::mask_of(s).map_err(unknown))?;
                Ok(Masks(vec![MaskChoice::Program(ProgramRef::new(program))]))
            }
        }
    }
}

/// What a mask may be, and which was meant. Programs do not stand in lists.
fn masks_near(word: &str, alone: bool) -> String {
    let programs = BUILTINS.iter().map(|b| b.name).filter(|_| alone);
    match nearest_name(word, ["full", "causal"].into_iter().chain(programs)) {
        Some(near) => format!("{MASKS}; did you mean `{near}`?"),
        None => MASKS.to_owned(),
    }
}

/// A change of the score: the name of a built-in program, or the text of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScoreChange(pub ProgramRef);

impl FromStr for ScoreChange {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self, Error> {
        let program = program_text(s, "score").unwrap_or_else(|| Ok(Program::score_of(s)?));
        Ok(Self(ProgramRef::new(program?)))
    }
}

/// The program of a built-in's name, or of a text that is no single word.
fn program_text(s: &str, result: &str) -> Option<Result<Program, Error>> {
    if let Some(b) = builtin(s.trim()) {
        return Some(Ok(Program::parse(b.text).expect("the built-in programs are tested")));
    }
    // A whole one, as logs have it: with declarations, mask, score and sink.
    if let Ok(whole) = Program::parse(s)
        && !whole.is_plain()
    {
        return Some(Ok(whole));
    }
    let parse = || Ok(if result == "mask" { Program::mask_of(s)? } else { Program::score_of(s)? });
    is_program(s).then(parse)
}

/// Whether this names a built-in program or is a text, which is no single word.
pub(crate) fn is_program(s: &str) -> bool {
    builtin(s.trim()).is_some() || s.contains(['<', '>', '=', '[', '(', ';', ' '])
}

/// Several programs as one: their masks all hold, their changes of the score follow each other.
pub(crate) fn joined(programs: &[ProgramRef]) -> Result<Program, Error> {
    let mut builder = ProgramBuilder::new();
    for program in programs {
        builder = builder.text(program.text())?;
    }
    Ok(builder.build()?)
}

/// All sizes of a list.
pub(crate) fn sizes(list: &[Sizes]) -> Vec<u32> {
    list.iter().flat_map(|s| s.0.iter().copied()).collect()
}

/// All masks of a list.
pub(crate) fn masks(list: &[Masks]) -> Vec<MaskChoice> {
    list.iter().flat_map(|m| m.0.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_double_and_end_where_they_say() {
        let parse = |s: &str| s.parse::<Sizes>().map(|s| s.0);
        assert_eq!(parse("512").unwrap(), [512]);
        assert_eq!(parse("16k").unwrap(), [16384]);
        assert_eq!(parse("0").unwrap(), [0]);
        assert_eq!(parse("512..4k").unwrap(), [512, 1024, 2048, 4096]);
        assert_eq!(parse("1000..3000").unwrap(), [1000, 2000, 3000]);
        assert_eq!(parse("7..7").unwrap(), [7]);
        assert_eq!(parse("1..4294967295").unwrap().len(), 33);
        for bad in ["", "k", "-1", "+1", "1.5k", "4k..512", "0..8", "1..", "..", "5000M", "1k k", "8é"] {
            let e = parse(bad).unwrap_err().to_string();
            assert!(e.contains("FROM..TO"), "{bad}: {e}");
        }
    }

    #[test]
    fn masks_are_listed_with_windows_among_them() {
        let parse = |s: &str| s.parse::<Masks>().map(|m| m.0);
        let window = |left, right| Mask::Window { left, right };
        assert_eq!(
            parse("full,causal,window:512,0,full").unwrap(),
            [Mask::Full, Mask::Causal, window(Some(512), Some(0)), Mask::Full].map(MaskChoice::Window)
        );
        assert_eq!(parse("window:-,3").unwrap(), [MaskChoice::Window(window(None, Some(3)))]);
        let texts = ["kv <= min(q, 7)", "min(q, 7) >= kv"].map(|text| parse(text).unwrap());
        assert!(texts[0] == texts[1] && matches!(texts[0][..], [MaskChoice::Program(_)]));
        assert!(matches!(parse("chunked").unwrap()[..], [MaskChoice::Program(_)]));
        assert!(parse("kv <= qq").unwrap_err().to_string().contains("did you mean `q`?"));
        assert!("soft_cap".parse::<ScoreChange>().is_ok() && "score * 2".parse::<ScoreChange>().is_ok());
        for bad in ["", "full,", "window:5", "causal,x"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        for (bad, near) in [("documnt", "document"), ("ful", "full"), ("full,casual", "causal")] {
            let e = parse(bad).unwrap_err().to_string();
            assert!(e.contains(&format!("did you mean `{near}`?")) && e.contains("window:LEFT"), "{bad}: {e}");
        }
        assert!(!parse("full,documnt").unwrap_err().to_string().contains("did you mean"));
        assert!("soft_cup".parse::<ScoreChange>().unwrap_err().to_string().contains("did you mean `soft_cap`?"));
    }
}
