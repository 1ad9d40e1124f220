//! Known names near one that is not known.

/// The known name that differs from this one in a letter or two; of several the nearest, and of those the first in the
/// alphabet.
pub fn nearest_name<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let (distance, near) = known.into_iter().map(|known| (distance(name, known), known)).min()?;
    // Any letter is near to any other.
    let limit = match name.len() {
        0 | 1 => 0,
        2 | 3 => 1,
        _ => 2,
    };
    (distance <= limit).then_some(near)
}

/// Letters to change, add or take away between two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(corner + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_letter_or_two_make_a_name_near() {
        let known = ["document", "document_causal", "causal", "q"];
        for (name, near) in [
            ("documnt", Some("document")),
            ("casual", Some("causal")),
            ("document_casual", Some("document_causal")),
            ("dcmnt", None),
            ("k", None),
            ("", None),
        ] {
            assert_eq!(nearest_name(name, known), near, "{name}");
        }
        assert_eq!(nearest_name("a", []), None);
    }
}
