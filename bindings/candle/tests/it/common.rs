//! The device, tensors of noise, and attention as candle computes it.

use candle_core::{D, DType, Device, Result, Tensor};
use std::sync::{Arc, OnceLock};

/// The device of the tests, with an engine whose kernels lie in a folder of this run.
pub fn device() -> Device {
    static DEVICE: OnceLock<(Device, tempfile::TempDir)> = OnceLock::new();
    let open = || {
        let device = match std::env::var("FLASHTUNE_CANDLE_DEVICE").as_deref() {
            Ok("cuda") => Device::new_cuda(0).unwrap(),
            _ => Device::Cpu,
        };
        let cache = tempfile::tempdir().unwrap();
        let engine = flashtune_candle::engine_builder(&device).unwrap().cache_dir(cache.path()).build().unwrap();
        assert!(flashtune_candle::set_engine(&device, Arc::new(engine)).unwrap().is_none(), "no test came before");
        (device, cache)
    };
    DEVICE.get_or_init(open).0.clone()
}

/// Numbers from -1 to 1 that look like chance.
pub fn noise(seed: u64, shape: &[usize]) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(data, shape, &device()).unwrap()
}

/// What changes the scores.
#[derive(Default)]
pub struct Changes<'a> {
    pub cap: Option<f32>,
    /// What is added to scores `[.., heads, q_len, kv_len]`.
    pub bias: Option<&'a Tensor>,
}

/// O `[batch, q_len, heads, dim_v]` and the log-sum-exp `[batch, heads, q_len]` in f32, by operations that candle
/// derives; a query `q` sees a key `kv` where `visible(q, kv)`.
pub fn unfused(
    [q, k, v]: [&Tensor; 3],
    scale: f32,
    changes: &Changes<'_>,
    visible: impl Fn(i64, i64) -> bool,
) -> Result<(Tensor, Tensor)> {
    let heads_first = |t: &Tensor| t.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
    let (q, k, v) = (heads_first(q)?, heads_first(k)?, heads_first(v)?);
    let (batch, heads, rows, _) = q.dims4()?;
    let keys = k.dim(2)?;
    let repeated = |t: &Tensor| -> Result<Tensor> {
        let (b, kv_heads, n, dim) = t.dims4()?;
        let group = heads / kv_heads;
        t.unsqueeze(2)?.broadcast_as((b, kv_heads, group, n, dim))?.reshape((b, heads, n, dim))
    };
    let (k, v) = (repeated(&k)?, repeated(&v)?);
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * f64::from(scale))?;
    if let Some(cap) = changes.cap {
        scores = ((scores / f64::from(cap))?.tanh()? * f64::from(cap))?;
    }
    if let Some(bias) = changes.bias {
        scores = scores.broadcast_add(bias)?;
    }
    let seen: Vec<f32> = (0..rows as i64)
        .flat_map(|q| (0..keys as i64).map(move |kv| (q, kv)))
        .map(|(q, kv)| if visible(q, kv) { 1.0 } else { 0.0 })
        .collect();
    let seen = Tensor::from_vec(seen, (1, 1, rows, keys), q.device())?.broadcast_as((batch, heads, rows, keys))?;
    // Far below every score, but finite: rows without keys stay numbers.
    let scores = (scores.mul(&seen)? + ((&seen - 1.0)? * 1e9)?)?;
    let most = scores.detach().max_keepdim(D::Minus1)?;
    let exps = scores.broadcast_sub(&most)?.exp()?.mul(&seen)?;
    let sum = exps.sum_keepdim(D::Minus1)?;
    let none = sum.detach().eq(0f32)?.to_dtype(DType::F32)?;
    let o = exps.broadcast_div(&(&sum + none)?)?.matmul(&v)?.transpose(1, 2)?.contiguous()?;
    let lse = (sum.log()? + most)?.squeeze(D::Minus1)?;
    Ok((o, lse))
}

/// Whether a query sees a key through a window whose last query stands at the last key.
pub fn in_window(
    left: Option<i64>,
    right: Option<i64>,
    q_len: usize,
    kv_len: usize,
) -> impl Fn(i64, i64) -> bool + Copy {
    move |q, kv| {
        let at = q + kv_len as i64 - q_len as i64;
        left.is_none_or(|left| kv >= at - left) && right.is_none_or(|right| kv <= at + right)
    }
}

/// `-slope * |distance|`, `[heads, q_len, kv_len]`.
pub fn alibi(slopes: &[f32], q_len: usize, kv_len: usize) -> Tensor {
    let (q_len, kv_len) = (q_len as i64, kv_len as i64);
    let mut data = Vec::new();
    for slope in slopes {
        for q in 0..q_len {
            data.extend((0..kv_len).map(|kv| -slope * (q + kv_len - q_len - kv).abs() as f32));
        }
    }
    Tensor::from_vec(data, (slopes.len(), q_len as usize, kv_len as usize), &device()).unwrap()
}

pub fn numbers(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Rounding of results of size 1 in a type, with some room.
pub fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    }
}

/// The same shape, and numbers that differ by no more than `most`; infinities are equal.
#[track_caller]
pub fn assert_close(what: &str, found: &Tensor, wanted: &Tensor, most: f32) {
    assert_eq!(found.dims(), wanted.dims(), "{what}");
    let (found, wanted) = (numbers(found), numbers(wanted));
    for (i, (f, w)) in found.iter().zip(&wanted).enumerate() {
        assert!(f == w || (f - w).abs() <= most, "{what}: element {i} is {f}, expected {w} within {most}");
    }
}
