//! The mapping of scores to random bits: frozen, and random.

use flashtune_codegen::{Dropout, DropoutMask};

/// Bits of keys 0 to 63 of a row, the first in the lowest.
fn row(mask: &DropoutMask, pair: u32, query: u32, first: u32) -> u64 {
    (0..64).filter(|i| mask.keeps(pair, query, first + i)).fold(0, |bits, i| bits | 1 << i)
}

const GOLDEN_WORDS: [u32; 4] = [0x0361115d, 0x3a5baf0f, 0x3713c597, 0x8a88768d];
const GOLDEN_ROWS: [u64; 4] = [0x53f4fbaefbeb521d, 0x34aecdbd324c0cb3, 0xfffffffffffffdfe, 0x7fefe75f7ffffdff];

/// What is written here is what models have been trained with: a change of it is a change of what they compute.
#[test]
fn golden_masks_do_not_change() {
    let half = Dropout::new(0.5, 0x0123_4567_89ab_cdef, 0x0000_0003_0000_0007).mask([0; 2]);
    let tenth = Dropout::new(0.1, 42, 0).mask([0; 2]);
    assert_eq!(half.words(5, 17, 2), GOLDEN_WORDS);
    let rows = [row(&half, 0, 0, 0), row(&half, 3, 1000, 4096), row(&tenth, 0, 0, 0), row(&tenth, 31, 8191, 8128)];
    assert_eq!(rows, GOLDEN_ROWS, "{rows:#018x?}");
}

/// Chi-square of counts that are expected to be equal, less its mean, in its standard deviations.
fn surprise(counts: &[u64]) -> f64 {
    let mean = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
    let sum: f64 = counts.iter().map(|n| (*n as f64 - mean).powi(2) / mean).sum();
    let freedom = (counts.len() - 1) as f64;
    (sum - freedom) / (2.0 * freedom).sqrt()
}

/// Kept shares, and pairs of neighbouring keys, queries, heads, offsets and seeds, over so many draws.
fn check_draws(rows: u32) {
    const KEYS: u32 = 1024;
    for (p, seed) in [(0.1, 1), (0.5, 2), (0.8, 3)] {
        let dropout = Dropout::new(p, seed, 5);
        let mask = dropout.mask([0; 2]);
        let next = [Dropout { offset: 6, ..dropout }, Dropout { seed: seed + 1, ..dropout }].map(|d| d.mask([0; 2]));
        let share = f64::from(dropout.threshold()) / 65536.0;
        let (mut kept, mut lanes) = (0u64, vec![0u64; 256]);
        // Both kept, with each neighbour: the next key, query, head, offset and seed, and the key of the next group.
        let mut both = [0u64; 6];
        for query in 0..rows {
            for key in 0..KEYS {
                let at = |mask: &DropoutMask, pair, query, key| mask.keeps(pair, query, key);
                let word = mask.words(3, query, key / 8)[(key / 2 % 4) as usize];
                lanes[(word >> (key % 2 * 16 + 8) & 0xff) as usize] += 1;
                if !at(&mask, 3, query, key) {
                    continue;
                }
                kept += 1;
                let others = [
                    at(&mask, 3, query, key + 1),
                    at(&mask, 3, query + 1, key),
                    at(&mask, 4, query, key),
                    at(&next[0], 3, query, key),
                    at(&next[1], 3, query, key),
                    at(&mask, 3, query, key + 8),
                ];
                both.iter_mut().zip(others).for_each(|(n, other)| *n += u64::from(other));
            }
        }
        let draws = f64::from(rows) * f64::from(KEYS);
        let off = |n: u64, share: f64| (n as f64 - draws * share) / (draws * share * (1.0 - share)).sqrt();
        // Five standard deviations of a binomial count: one in two million.
        assert!(off(kept, share).abs() < 5.0, "p {p}: {kept} of {draws} are kept");
        // A score is in two pairs, so that their count varies by more than a binomial one.
        let wide = (draws * (share.powi(2) * (1.0 - share.powi(2)) + 2.0 * share.powi(3) * (1.0 - share))).sqrt();
        let pairs = both.map(|n| (n as f64 - draws * share * share) / wide);
        for (off, of) in pairs.into_iter().zip(["key", "query", "head", "offset", "seed", "group"]) {
            assert!(off.abs() < 5.0, "p {p}, next {of}: {off} standard deviations");
        }
        assert!(surprise(&lanes).abs() < 5.0, "p {p}: lanes {}", surprise(&lanes));
        println!(
            "p {p}: {draws} draws, kept {:+.2} sigma, lanes {:+.2}, pairs {pairs:+.2?}",
            off(kept, share),
            surprise(&lanes)
        );
    }
}

#[test]
fn what_is_kept_is_random() {
    check_draws(1000);
}

/// 10^8 draws for each probability: minutes.
#[test]
#[ignore = "minutes; run with --release --ignored"]
fn what_is_kept_of_1e8_draws_is_random() {
    check_draws(97_657);
}
