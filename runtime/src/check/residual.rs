//! What O loses by rounding, on both sides: whether a forward pass wrote it, and whether a backward pass read it.
//!
//! Where a row attends mostly to one key, dP - D is a small difference of large numbers, and D = rowsum(dO O) has the
//! rounding of O in it. Such rows are made here, of known weights: by their gradients it shows that the residual was
//! read.

use crate::HostTensor;
use crate::reference::Rows;
use flashtune_codegen::{DType, Shape};

/// The weights of the one key of a row that stands out; rows take turns, every fourth is left as it is.
pub(super) const WEIGHTS: [f64; 3] = [0.8, 0.95, 0.99];
/// The error of dQ of such rows with the residual, beside the gradient: two roundings of bf16 make 0.236 %.
const MOST: f64 = 0.003;
/// Rows below which a mean says little.
const FEW: usize = 12;

/// Makes rows of Q attend to one key with one of [`WEIGHTS`]; says which, by rows in `[batch, heads, rows]` order.
pub(super) fn peak(q: &mut HostTensor, k: &HostTensor, shape: &Shape, scale: f64) -> Vec<Option<usize>> {
    let (dim, group) = (k.shape()[3], shape.group() as usize);
    let mut of_rows = Vec::new();
    for (b, h) in (0..shape.batch as usize).flat_map(|b| (0..shape.heads as usize).map(move |h| (b, h))) {
        let key = |j: usize| {
            let mut row = vec![0.0; dim];
            k.read_row([b, h / group, j], &mut row);
            row.into_iter().map(f64::from).collect::<Vec<f64>>()
        };
        let keys: Vec<Vec<f64>> = (0..shape.kv_len as usize).map(key).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for i in 0..shape.q_len as usize {
            let nth = (b + h + i) % 4;
            let live = shape.mask.live(i as u64, shape.q_len.into(), shape.kv_len.into());
            let live = &keys[live.start as usize..live.end.max(live.start) as usize];
            let longest = live.iter().max_by(|a, b| dot(a, a).total_cmp(&dot(b, b)));
            let Some(longest) = longest.filter(|_| nth < WEIGHTS.len() && live.len() >= 4 && scale != 0.0) else {
                of_rows.push(None);
                continue;
            };
            // By the factor the score of the longest key, of which all others are smaller.
            let direction: Vec<f64> = longest.iter().map(|x| x / (dot(longest, longest) * scale)).collect();
            let scores: Vec<f64> = live.iter().map(|key| dot(key, &direction) * scale).collect();
            let weight = |t: f64| 1.0 / scores.iter().map(|s| ((s - 1.0) * t).exp()).sum::<f64>();
            let (mut low, mut high) = (0.0, 60.0);
            // Around the weight, since P of one weight is rounded one way.
            let turn = (of_rows.len() as f64 * 0.618).fract() - 0.5;
            let wanted = 1.0 - (1.0 - WEIGHTS[nth]) * (1.0 + 0.4 * turn);
            let possible = scores.iter().all(|s| s.is_finite()) && weight(high) > wanted;
            if !possible {
                of_rows.push(None);
                continue;
            }
            for _ in 0..60 {
                let middle = (low + high) / 2.0;
                if weight(middle) < wanted { low = middle } else { high = middle }
            }
            let row: Vec<f32> = direction.iter().map(|x| (x * low) as f32).collect();
            q.write_row([b, h, i], &row);
            of_rows.push(Some(nth));
        }
    }
    of_rows
}

/// What O loses by rounding, as a forward pass writes it, from O in fp64.
pub(super) fn of(rounded: &HostTensor, exact: &[f64]) -> HostTensor {
    let [_, heads, rows, dim] = rounded.shape();
    let mut residual = HostTensor::poisoned(DType::Bf16, rounded.shape(), crate::Layout::Bshd);
    let (mut row, mut lost) = (vec![0.0; dim], vec![0.0; dim]);
    for (i, exact) in exact.chunks_exact(dim.max(1)).enumerate() {
        let at = [i / rows / heads, i / rows % heads, i % rows];
        rounded.read_row(at, &mut row);
        for ((lost, x), y) in lost.iter_mut().zip(&row).zip(exact) {
            *lost = if x.is_finite() { (y - f64::from(*x)) as f32 } else { 0.0 };
        }
        residual.write_row(at, &lost);
    }
    residual
}

/// The elements of the rows that an oracle has, in its order.
pub(super) fn rows_of(tensor: &HostTensor, oracle: &Rows) -> Vec<f64> {
    let mut row = vec![0.0; oracle.dim];
    let mut all = Vec::with_capacity(oracle.o.len());
    for id in &oracle.ids {
        tensor.read_row([id.batch as usize, id.head as usize, id.row as usize], &mut row);
        all.extend(row.iter().map(|x| f64::from(*x)));
    }
    all
}

/// Of the rows of each weight that have gradients: how many there are, and the error of their dQ beside it.
pub(super) fn errors(dq: &[f64], oracle: &Rows, peaked: &[Option<usize>]) -> [(usize, f64); 3] {
    let mut sums = [(0usize, 0.0, 0.0); WEIGHTS.len()];
    for (i, got) in dq.chunks_exact(oracle.dim.max(1)).enumerate() {
        let (Some(Some(nth)), want) = (peaked.get(i), oracle.row(i)) else { continue };
        if want.iter().any(|x| !x.is_finite()) {
            continue;
        }
        let (rows, error, size) = &mut sums[*nth];
        *rows += 1;
        *error += got.iter().zip(want).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
        *size += want.iter().map(|y| y * y).sum::<f64>();
    }
    sums.map(|(rows, error, size)| (rows, (error / size).sqrt()))
}

/// How far dQ of the rows that stand out may be from fp64, each weight by itself; says what is further.
pub(super) fn gradients_fail(dq: &HostTensor, oracle: &Rows, peaked: &[Option<usize>]) -> Option<String> {
    let errors = errors(&rows_of(dq, oracle), oracle, peaked);
    errors.into_iter().zip(WEIGHTS).find_map(|((rows, off), weight)| {
        // NaN is as far as can be.
        (rows >= FEW && (off.is_nan() || off > MOST)).then(|| {
            let off = off * 100.0;
            format!("dQ of {rows} rows with a weight of {weight} is {off:.3} % off, with a residual 0.3 % at most")
        })
    })
}

/// Whether what was written beside O is what it lost: it is no more than half of a unit in the last place, and what O
/// and fp64 differ by has it in it, once. Says what is wrong.
pub fn forward_fails(o: &HostTensor, residual: &HostTensor, oracle: &Rows) -> Option<String> {
    let dim = oracle.dim;
    let (mut row, mut lost) = (vec![0.0; dim], vec![0.0; dim]);
    let unit = |x: f32| {
        let least = if o.dtype() == DType::F16 { 2f64.powi(-14) } else { 2f64.powi(-126) };
        2f64.powf(f64::from(x.abs()).max(least).log2().floor()) * o.dtype().epsilon()
    };
    let (mut number, mut both, mut own) = (0, 0.0, 0.0);
    for (i, id) in oracle.ids.iter().enumerate() {
        let at = [id.batch as usize, id.head as usize, id.row as usize];
        o.read_row(at, &mut row);
        residual.read_row(at, &mut lost);
        for (column, ((x, lost), y)) in row.iter().zip(&lost).zip(oracle.row(i)).enumerate() {
            if !x.is_finite() || !y.is_finite() {
                continue;
            }
            let (unit, lost) = (unit(*x), f64::from(*lost));
            if lost.is_nan() || lost.abs() > 0.502 * unit {
                let place = format!("[{}, {}, {}, {column}]", at[0], at[1], at[2]);
                return Some(format!(
                    "the residual at {place} is {lost:e}, but O is {x:e}, which loses less than that"
                ));
            }
            let (lost, off) = (lost / unit, (y - f64::from(*x)) / unit);
            // Where O is far off by what is summed before, it says nothing.
            if off.abs() < 2.0 {
                (number, both, own) = (number + 1, both + lost * off, own + lost * lost);
            }
        }
    }
    let share = both / own;
    let right = number < 400 || (0.6..1.4).contains(&share);
    // O that is exact has no residual: of one key, or of none.
    (!right && oracle_is_rounded(o, oracle))
        .then(|| format!("O lost {share:.2} of what the residual says that it lost"))
}

/// Whether O in fp64 has digits that the dtype has not.
fn oracle_is_rounded(o: &HostTensor, oracle: &Rows) -> bool {
    let mut row = vec![0.0; oracle.dim];
    (0..oracle.ids.len()).any(|i| {
        let id = oracle.ids[i];
        o.read_row([id.batch as usize, id.head as usize, id.row as usize], &mut row);
        row.iter().zip(oracle.row(i)).any(|(x, y)| x.is_finite() && f64::from(*x) != *y)
    })
}
