//! Quantised elements of a KV store: their codes and what those mean.

use crate::reference::e4m3;
use flashtune_codegen::KvElement;
use half::f16;
use rand::Rng;
use rand::rngs::StdRng;

/// Codes that are drawn at most of one tensor: a prime, so that repeated heads and rows differ.
const DRAWN: usize = 1_000_003;

/// The codes of an element, in the order of their values.
pub(super) struct Codes {
    values: [f32; 256],
    sorted: Vec<(f32, u8)>,
    /// What a value is multiplied by before it is rounded: its usual size is then among the finely spaced codes.
    unit: f32,
}

/// What a code means; NaN for those that mean no number.
pub(super) fn value_of(element: KvElement, code: u8) -> f32 {
    match element {
        KvElement::Same => unreachable!("elements of the queries' dtype are no codes"),
        KvElement::E4m3 => e4m3::value(code),
        KvElement::E5m2 => f16::from_bits(u16::from(code) << 8).to_f32(),
        KvElement::Int8 => f32::from(code.cast_signed()),
    }
}

impl Codes {
    pub(super) fn of(element: KvElement) -> Self {
        let values = std::array::from_fn(|code| value_of(element, code as u8));
        let all = values.into_iter().zip(0..=u8::MAX);
        let mut sorted: Vec<(f32, u8)> = all.filter(|(value, _)| value.is_finite()).collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self { values, sorted, unit: if element == KvElement::Int8 { 32.0 } else { 16.0 } }
    }

    /// What a code means.
    pub(super) fn value(&self, code: u8) -> f32 {
        self.values[code as usize]
    }

    /// What the scale of elements is about, for values of about 1.
    pub(super) fn scale(&self) -> f32 {
        1.0 / self.unit
    }

    /// Codes for values; of many the first million's, repeated.
    pub(super) fn draw_all(&self, values: &[f32], rng: &mut StdRng) -> Vec<u8> {
        let mut codes: Vec<u8> = values.iter().take(DRAWN).map(|x| self.draw(*x, rng)).collect();
        while !codes.is_empty() && codes.len() < values.len() {
            let more = (values.len() - codes.len()).min(codes.len());
            codes.extend_from_within(..more);
        }
        codes
    }

    /// The code next to a value; now and then any other, so that the ends of the range and subnormal numbers occur.
    pub(super) fn draw(&self, value: f32, rng: &mut StdRng) -> u8 {
        if rng.random_bool(1.0 / 128.0) {
            return self.sorted[rng.random_range(0..self.sorted.len())].1;
        }
        let wanted = value * self.unit;
        let above = self.sorted.partition_point(|(x, _)| *x < wanted).min(self.sorted.len() - 1);
        let below = above.saturating_sub(1);
        let nearer =
            if (self.sorted[above].0 - wanted).abs() < (wanted - self.sorted[below].0).abs() { above } else { below };
        self.sorted[nearer].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_mean_what_their_standards_say() {
        let e4m3 = |code| value_of(KvElement::E4m3, code);
        assert_eq!([0x7e, 0xfe, 0x08, 0x01, 0x38, 0x80].map(e4m3), [448.0, -448.0, 0.015625, 0.001953125, 1.0, 0.0]);
        assert!([0x7f, 0xff].map(e4m3).iter().all(|x| x.is_nan()));
        let e5m2 = |code| value_of(KvElement::E5m2, code);
        assert_eq!([0x7b, 0x7c, 0x01, 0x3c, 0xbc].map(e5m2), [57344.0, f32::INFINITY, 2f32.powi(-16), 1.0, -1.0]);
        assert_eq!([0x80, 0xff, 0x7f].map(|code| value_of(KvElement::Int8, code)), [-128.0, -1.0, 127.0]);
    }
}
