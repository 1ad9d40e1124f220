//! Elements of a store by their definitions: what they are worth, and what numbers become.

use crate::ragged::StoreType;
use flashtune_codegen::DType;
use half::{bf16, f16};

pub(super) fn elements(format: StoreType, bits: &[u8]) -> f64 {
    match format {
        StoreType::Float(DType::F32) => f32::from_ne_bytes([bits[0], bits[1], bits[2], bits[3]]).into(),
        StoreType::Float(DType::F16) => f16::from_ne_bytes([bits[0], bits[1]]).to_f64(),
        StoreType::Float(DType::Bf16) => bf16::from_ne_bytes([bits[0], bits[1]]).to_f64(),
        StoreType::Int8 => f64::from(bits[0] as i8),
        StoreType::E4m3 | StoreType::Float(DType::E4m3) if bits[0] & 0x7f == 0x7f => f64::NAN,
        StoreType::E4m3 | StoreType::Float(DType::E4m3) => small_float(bits[0], 4),
        StoreType::E5m2 => small_float(bits[0], 5),
    }
}

/// An 8-bit float by its definition.
fn small_float(bits: u8, exponent_bits: i32) -> f64 {
    let mantissa_bits = 7 - exponent_bits;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = i32::from(bits & 0x7f) >> mantissa_bits;
    let mantissa = f64::from(i32::from(bits) & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(1 - bias),
        31 if exponent_bits == 5 && mantissa == 0.0 => f64::INFINITY,
        31 if exponent_bits == 5 => f64::NAN,
        _ => (1.0 + mantissa) * 2f64.powi(exponent - bias),
    };
    if bits & 0x80 != 0 { -magnitude } else { magnitude }
}

/// The element that is nearest to a number, of two the one with an even code, by looking at all.
pub(super) fn rounded(format: StoreType, value: f64) -> Vec<u8> {
    match format {
        StoreType::Float(DType::F32) => (value as f32).to_ne_bytes().to_vec(),
        StoreType::Float(DType::F16) => f16::from_f64(value).to_ne_bytes().to_vec(),
        StoreType::Float(DType::Bf16) => bf16::from_f64(value).to_ne_bytes().to_vec(),
        StoreType::Int8 if value.is_nan() => vec![0],
        _ if value.is_nan() => vec![0x7f],
        _ => {
            let finite = |code: &u8| elements(format, &[*code]).is_finite();
            let sign = |code: u8| format == StoreType::Int8 || (code & 0x80 != 0) == value.is_sign_negative();
            let far = |code: u8| (elements(format, &[code]) - value.clamp(-1e9, 1e9)).abs();
            let order = |a: &u8, b: &u8| far(*a).total_cmp(&far(*b)).then((a & 1).cmp(&(b & 1)));
            vec![(0..=255u8).filter(finite).filter(|c| sign(*c)).min_by(order).expect("an element")]
        }
    }
}
