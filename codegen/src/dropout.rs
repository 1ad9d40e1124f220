//! Dropout: which scores of a softmax are dropped, as every kernel, the reference and every host have it.
//!
//! A score is kept or dropped by its place alone, so that no schedule, device, launch or order changes which are:
//!
//! ```text
//! key      = seed + (offset >> 32 << 32)                    two words, low and high
//! counter  = (key index / 8, query, sequence * heads + head, offset as 32 bits)
//! words    = Philox 4x32-10 (counter, key)
//! lane     = 16 bits of the words: word key index / 2 % 4, its low half for even key indexes
//! kept     = lane < round((1 - p) * 65536)
//! ```
//!
//! Philox is that of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.
//! Queries and keys are counted inside of their sequence, heads are query heads. Kept weights are multiplied by
//! 1 / (1 - p) behind the softmax, whose normaliser and log-sum-exp are those without dropout.

use crate::{Error, Result};

/// What a call drops.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Dropout {
    /// The probability that a score is dropped, from 0 to below 1; 0 drops none.
    pub p: f64,
    /// The seed.
    pub seed: u64,
    /// The offset: another one drops other scores.
    pub offset: u64,
    /// Device address of 64 bits that are added to the seed when the kernel runs, a multiple of 8; or 0. What a graph
    /// reads there may change from one replay to the next.
    pub seed_at: u64,
    /// The same for the offset.
    pub offset_at: u64,
}

impl Dropout {
    /// Dropout of a probability by a seed and an offset of the host.
    pub fn new(p: f64, seed: u64, offset: u64) -> Self {
        Self { p, seed, offset, seed_at: 0, offset_at: 0 }
    }

    /// Below this 16-bit number a lane keeps its score: `round((1 - p) * 65536)`, from 1 to 65536.
    pub fn threshold(&self) -> u32 {
        ((1.0 - self.p) * 65536.0).round() as u32
    }

    /// What kept weights are multiplied by: `1 / (1 - p)`.
    pub fn scale(&self) -> f32 {
        (1.0 / (1.0 - self.p)) as f32
    }

    /// Checks the probability and the addresses.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a probability that is not from 0 to below 1, or rounds to 1; addresses that are no
    /// multiples of 8.
    pub fn check(&self) -> Result<()> {
        if !(0.0..1.0).contains(&self.p) || self.threshold() == 0 {
            let limit = "a probability from 0 to below 1, of which 65536 parts are told apart";
            return Err(Error::unsupported("dropout.p", self.p, limit, "pass 0 to 0.9999"));
        }
        for (field, at) in [("dropout.seed_at", self.seed_at), ("dropout.offset_at", self.offset_at)] {
            if !at.is_multiple_of(8) {
                let limit = "64 bits on the device lie at a multiple of 8 bytes";
                return Err(Error::unsupported(field, format!("{at:#x}"), limit, "pass an aligned address, or 0"));
            }
        }
        Ok(())
    }

    /// The mask of a call whose seed and offset are the host's alone, or for what lies on the device.
    ///
    /// `on_device` is what the two addresses hold, 0 for one that is not given.
    pub fn mask(&self, on_device: [u64; 2]) -> DropoutMask {
        let [seed, offset] = [self.seed.wrapping_add(on_device[0]), self.offset.wrapping_add(on_device[1])];
        DropoutMask {
            key: [seed as u32, ((seed >> 32) as u32).wrapping_add((offset >> 32) as u32)],
            offset: offset as u32,
            threshold: self.threshold(),
            scale: self.scale(),
        }
    }
}

/// Which scores are kept, and what becomes of them: a pure function of their places.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutMask {
    key: [u32; 2],
    offset: u32,
    threshold: u32,
    /// What kept weights are multiplied by.
    pub scale: f32,
}

impl DropoutMask {
    /// The words that decide about eight neighbouring keys of a row, from key `8 * group` on. `pair` is
    /// `sequence * heads + head`.
    pub fn words(&self, pair: u32, query: u32, group: u32) -> [u32; 4] {
        philox([group, query, pair, self.offset], self.key)
    }

    /// Whether the score of a query and a key is kept.
    pub fn keeps(&self, pair: u32, query: u32, key: u32) -> bool {
        let word = self.words(pair, query, key / 8)[(key / 2 % 4) as usize];
        word >> (key % 2 * 16) & 0xffff < self.threshold
    }

    /// What a weight is multiplied by: [`DropoutMask::scale`], or 0.
    pub fn factor(&self, pair: u32, query: u32, key: u32) -> f64 {
        if self.keeps(pair, query, key) { self.scale.into() } else { 0.0 }
    }
}

/// Philox 4x32-10.
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        let [a, b] = [u64::from(counter[0]) * 0xD251_1F53, u64::from(counter[2]) * 0xCD9E_8D57];
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that come with the reference implementation (Random123, `kat_vectors`).
    #[test]
    fn philox_gives_the_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let counter = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        assert_eq!(philox(counter, [0xa4093822, 0x299f31d0]), [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
    }

    #[test]
    fn probabilities_are_checked_and_rounded() {
        for (p, threshold) in [(0.0, 65536), (0.1, 58982), (0.5, 32768), (1e-7, 65536), (0.99999, 1)] {
            let dropout = Dropout::new(p, 1, 2);
            dropout.check().unwrap();
            assert_eq!(dropout.threshold(), threshold);
        }
        for p in [-0.1, 1.0, 2.0, f64::NAN, 0.999_999] {
            let e = Dropout::new(p, 1, 2).check().unwrap_err().to_string();
            assert!(e.contains("dropout.p") && e.contains("below 1"), "{e}");
        }
        let e = Dropout { offset_at: 12, ..Dropout::default() }.check().unwrap_err().to_string();
        assert!(e.contains("offset_at"), "{e}");
    }

    #[test]
    fn the_offset_has_64_bits_and_what_lies_on_the_device_is_added() {
        let of = |seed, offset| Dropout::new(0.5, seed, offset).mask([0; 2]);
        assert_eq!(of(7 << 32 | 5, 3 << 32 | 9), of(10 << 32 | 5, 9));
        assert_eq!(of(u64::MAX, 1 << 32), of(u64::from(u32::MAX), 0));
        assert_eq!(Dropout::new(0.5, 5, u64::MAX).mask([6, 3]), of(11, 2));
        assert_ne!(of(5, 0), of(5, 1));
    }
}
