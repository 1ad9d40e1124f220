//! The check of quantisations: random calls, whose scales and codes are compared with what fp64 makes of the elements.

use crate::guarded::{Guarded, UNWRITTEN_CODE as BEFORE};
use crate::ragged::{IntKind, Ints};
use crate::reference::e4m3;
use crate::{
    Descale, Device, KeyMean, Module, Quantise, QuantiseOperand, QuantiseRotary, Result, RowPositions, ScaleKind,
    TensorView, quantise_call,
};
use flashtune_codegen::{DType, Problem};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Rows of a head: around those of a step and of a tile.
const ROWS: [u64; 11] = [0, 1, 2, 31, 33, 63, 64, 65, 127, 129, 150];
/// The least scale, a normal number.
const LEAST: f64 = f32::MIN_POSITIVE as f64;

/// A number, and how far a kernel may be from it before it rounds it to a code.
#[derive(Clone, Copy)]
struct Near {
    value: f64,
    eps: f64,
}

/// One tensor of a call, with its elements and what they become.
struct Drawn {
    /// Sizes: batch, heads, rows, dim.
    sizes: [usize; 4],
    source: Guarded,
    from: TensorView,
    target: Guarded,
    to: TensorView,
    scales: Guarded,
    scale: Descale,
    /// Row after row of `[batch, heads, rows]`.
    rows: Vec<Vec<Near>>,
}

/// A rotary embedding with what it reads.
struct Turn {
    dim: usize,
    interleaved: bool,
    table_rows: usize,
    cos: Vec<f64>,
    sin: Vec<f64>,
    /// Of Q and K, by sequence and row.
    positions: [Vec<i64>; 2],
    call: QuantiseRotary,
    _memory: Vec<Guarded>,
}

fn write_element(dtype: DType, to: &mut [u8], x: f64) -> f64 {
    match dtype {
        DType::F16 => {
            let x = f16::from_f64(x);
            to.copy_from_slice(&x.to_ne_bytes());
            x.to_f64()
        }
        DType::Bf16 => {
            let x = bf16::from_f64(x);
            to.copy_from_slice(&x.to_ne_bytes());
            x.to_f64()
        }
        DType::F32 | DType::E4m3 => {
            to.copy_from_slice(&(x as f32).to_ne_bytes());
            f64::from(x as f32)
        }
    }
}

/// Room for a tensor whose rows begin at any element: bytes in all, and the view with its address counted from there.
fn place(rng: &mut StdRng, dtype: DType, sizes: [usize; 4]) -> (usize, TensorView) {
    let [b, h, s, d] = sizes.map(|n| n as i64);
    let apart = d + *[0, 0, 0, 8, 5].choose(rng).expect("not empty");
    let strides = match rng.random_range(0..3) {
        0 => [h * s * apart, s * apart, apart, 1],
        1 => [s * h * apart, apart, h * apart, 1],
        _ => [apart, b * s * apart, b * apart, 1],
    };
    let first = if rng.random_bool(0.7) { 0 } else { rng.random_range(0..9) } * dtype.bytes();
    let bytes = first + (b * h * s * apart) as usize * dtype.bytes();
    (bytes, TensorView { address: first as u64, dtype, shape: sizes.map(|n| n as u64), strides })
}

/// Where an element of a view lies, in bytes.
fn offset(view: &TensorView, [b, h, r, i]: [usize; 4]) -> usize {
    let elements = [b, h, r, i].into_iter().zip(view.strides).map(|(n, stride)| n as i64 * stride).sum::<i64>();
    view.address as usize + elements as usize * view.dtype.bytes()
}

fn draw(
    device: &dyn Device,
    rng: &mut StdRng,
    name: &'static str,
    dtype: DType,
    sizes: [usize; 4],
    kv_heads: usize,
    kinds: &[&str],
) -> Result<Drawn> {
    let [batch, heads, count, dim] = sizes;
    let (bytes, mut from) = place(rng, dtype, sizes);
    let mut source = vec![0x3c; bytes];
    let mut rows = Vec::new();
    let kind = *kinds.choose(rng).expect("not empty");
    let loud: Vec<usize> = (0..3).map(|_| rng.random_range(0..dim)).collect();
    for b in 0..batch {
        for h in 0..heads {
            // Some heads have nothing, so that those of their unit alone decide.
            let silent = kind == "zeros" && rng.random_bool(0.7);
            for r in 0..count {
                let row = (0..dim).map(|i| {
                    let normal: f64 = rng.random_range(-2.0..2.0);
                    let x = match kind {
                        _ if silent => 0.0,
                        "biased" if loud.contains(&i) => 20.0 + normal,
                        "outliers" if rng.random_bool(0.01) => 60.0 * normal,
                        "odd" if rng.random_bool(0.004) => {
                            *[f64::NAN, f64::INFINITY, f64::NEG_INFINITY].choose(rng).expect("not empty")
                        }
                        "tiny" => normal * 1e-38,
                        "huge" => 3e38,
                        _ => normal * (1.0 + (b * heads + h) as f64),
                    };
                    let at = offset(&from, [b, h, r, i]);
                    Near { value: write_element(dtype, &mut source[at..at + dtype.bytes()], x), eps: 0.0 }
                });
                rows.push(row.collect());
            }
        }
    }
    let source = Guarded::new(device, name, &source)?;
    from.address += source.address();
    let (bytes, mut to) = place(rng, DType::E4m3, sizes);
    let target = Guarded::new(device, name, &vec![BEFORE; bytes])?;
    to.address += target.address();
    let kind = match (rng.random_range(0..10), name) {
        (0..3, _) => ScaleKind::Head,
        (3..5, _) => ScaleKind::Tensor,
        (_, "v") => ScaleKind::Channel,
        (5..7, _) => ScaleKind::Block(1 << rng.random_range(1..=7)),
        _ => ScaleKind::Token,
    };
    let shape = kind.sizes(sizes.map(|n| n as u64), kv_heads as u64);
    let [b, h, u] = shape.map(|n| n as i64);
    let strides = match rng.random_range(0..3) {
        0 if kind == ScaleKind::Tensor => [0, 0, 0],
        1 => [u, u * b, 1],
        2 => [1, b * (u + 1), b],
        _ => [(h + 1) * (u + 2), u + 2, 1],
    };
    let words = (b * (h + 1) * (u + 2)) as usize + 1;
    let scales = Guarded::new(device, "scales", &vec![BEFORE; 4 * words])?;
    let scale = Descale { address: scales.address(), kind, shape, strides };
    Ok(Drawn { sizes, source, from, target, to, scales, scale, rows })
}

fn draw_turn(device: &dyn Device, rng: &mut StdRng, dtype: DType, sizes: [usize; 3], dim: usize) -> Result<Turn> {
    let [batch, q_len, kv_len] = sizes;
    let most = dim / 2 * 2;
    let turned = if rng.random_bool(0.6) { most } else { 2 * rng.random_range(1..=dim / 2) };
    let half = turned / 2;
    let angles = if rng.random_bool(0.5) { DType::F32 } else { dtype };
    let stride = half + *[0, 0, 3, 8].choose(rng).expect("not empty");
    let kind = *[IntKind::I32, IntKind::I64].choose(rng).expect("not empty");
    let longest = q_len.max(kv_len) + 10;
    // Sometimes rows are behind the tables.
    let table_rows = if rng.random_bool(0.15) { longest / 2 } else { longest + 30 };
    let mut memory = Vec::new();
    let mut table = || -> Result<(u64, Vec<f64>)> {
        let mut bytes = vec![0; (table_rows * stride).max(1) * angles.bytes()];
        let values = bytes.chunks_exact_mut(angles.bytes()).map(|to| {
            let angle = rng.random_range(-1.0..1.0f64);
            write_element(angles, to, angle)
        });
        let values = values.collect();
        let table = Guarded::new(device, "angles", &bytes)?;
        let address = table.address();
        memory.push(table);
        Ok((address, values))
    };
    let ((cos_at, cos), (sin_at, sin)) = (table()?, table()?);
    let mut positions_of = |count: usize| -> Result<(RowPositions, Vec<i64>)> {
        if rng.random_bool(0.5) || batch * count == 0 {
            let first = rng.random_range(0..20u64);
            let row = |n: usize| (n % count.max(1)) as i64 + first as i64;
            return Ok((RowPositions::From(first), (0..batch * count).map(row).collect()));
        }
        let each = rng.random_bool(0.5);
        let stored: Vec<i64> =
            (0..if each { batch * count } else { count }).map(|_| rng.random_range(0..longest as i64 + 20)).collect();
        let bytes: Vec<u8> = stored.iter().flat_map(|n| n.to_ne_bytes()[..kind.bytes() as usize].to_vec()).collect();
        let stored_at = Guarded::new(device, "positions", &bytes)?;
        let positions = Ints { address: stored_at.address(), kind };
        memory.push(stored_at);
        let stride = if each { count as i64 } else { 0 };
        let all = (0..batch * count).map(|n| if each { stored[n] } else { stored[n % count] }).collect();
        Ok((RowPositions::Each { positions, stride }, all))
    };
    let ((q, of_q), (k, of_k)) = (positions_of(q_len)?, positions_of(kv_len)?);
    let interleaved = rng.random_bool(0.5);
    let call = QuantiseRotary {
        cos: cos_at,
        sin: sin_at,
        dtype: angles,
        stride: stride as i64,
        rows: table_rows as u64,
        dim: turned as u64,
        interleaved,
        q,
        k,
    };
    Ok(Turn { dim: turned, interleaved, table_rows, cos, sin, positions: [of_q, of_k], call, _memory: memory })
}

impl Turn {
    fn rotate(&self, row: &mut [Near], position: i64) {
        let (half, stride) = (self.dim / 2, self.call.stride as usize);
        if !(0..self.table_rows as i64).contains(&position) {
            row[..self.dim].fill(Near { value: f64::NAN, eps: 0.0 });
            return;
        }
        for i in 0..half {
            let at = position as usize * stride + i;
            let (a, b) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (x, y, cos, sin) = (row[a].value, row[b].value, self.cos[at], self.sin[at]);
            let eps = 4e-7 * ((x * cos).abs() + (y * sin).abs());
            row[a] = Near { value: x * cos - y * sin, eps };
            let eps = 4e-7 * ((y * cos).abs() + (x * sin).abs());
            row[b] = Near { value: y * cos + x * sin, eps };
        }
    }
}

/// Takes the mean of each head's rows from them; gives the means.
fn subtract_means(k: &mut Drawn) -> Vec<Vec<Near>> {
    let [_, _, count, dim] = k.sizes;
    let of_head = |rows: &mut [Vec<Near>]| {
        let mut means = Vec::new();
        for i in 0..dim {
            let (mut sum, mut magnitude, mut eps) = (0.0, 0.0, 0.0);
            for near in rows.iter().map(|row| row[i]).filter(|near| near.value.is_finite()) {
                (sum, magnitude, eps) = (sum + near.value, magnitude + near.value.abs(), eps + near.eps);
            }
            let n = rows.len() as f64;
            let beyond = sum.abs() > f64::from(f32::MAX);
            let value = if beyond { 0.0 } else { sum / n };
            // Sums of numbers below normal ones lose nothing but their last place.
            let eps = if beyond { 0.0 } else { (eps + 2e-6 * magnitude) / n + 1e-44 };
            means.push(Near { value, eps });
            for row in rows.iter_mut() {
                let value = row[i].value - means[i].value;
                row[i] = Near { value, eps: row[i].eps + means[i].eps + 1.2e-7 * value.abs() };
            }
        }
        means
    };
    if count == 0 { Vec::new() } else { k.rows.chunks_mut(count).map(of_head).collect() }
}

/// Multiplies by the Hadamard matrix over the root of its size.
fn mix(row: &mut [Near]) {
    let n = row.len();
    let root = (n as f64).sqrt();
    let finite = |near: &&Near| near.value.is_finite();
    let magnitude: f64 = row.iter().filter(finite).map(|near| near.value.abs()).sum();
    let eps: f64 = row.iter().filter(finite).map(|near| near.eps).sum();
    let eps = (eps + 1.3e-7 * (n.ilog2() + 1) as f64 * magnitude) / root + 1e-44;
    let values: Vec<f64> = row.iter().map(|near| near.value).collect();
    for (i, near) in row.iter_mut().enumerate() {
        let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        let sum: f64 = values.iter().enumerate().map(|(j, x)| sign(j) * x).sum();
        *near = Near { value: sum / root, eps };
    }
}

/// Where the scale of an element of a row is among those of its kind.
fn unit_of(kind: ScaleKind, sizes: [usize; 4], kv_heads: usize, row: usize, column: usize) -> [usize; 3] {
    let [_, heads, count, _] = sizes;
    let (batch, head) = (row / count / heads, row / count % heads);
    let kv_head = head / (heads / kv_heads);
    match kind {
        ScaleKind::Head | ScaleKind::Tensor => [batch, kv_head, 0],
        ScaleKind::Block(rows) => [batch, head, row % count / rows as usize],
        ScaleKind::Token => [batch, head, row % count],
        ScaleKind::Channel => [batch, kv_head, column],
    }
}

/// What is wrong with a tensor's codes and scales.
fn compare(device: &dyn Device, name: &str, drawn: &Drawn, kv_heads: usize) -> Result<Option<String>> {
    let stream = device.stream();
    let (codes, stray) = drawn.target.download(device, stream)?;
    let (scales, stray_scale) = drawn.scales.download(device, stream)?;
    let (_, stray_source) = drawn.source.download(device, stream)?;
    if let Some(stray) = stray.or(stray_scale).or(stray_source) {
        return Ok(Some(format!("{name}: {stray}")));
    }
    let kind = drawn.scale.kind;
    let at_scale = |unit: [usize; 3]| {
        let elements: i64 = unit.into_iter().zip(drawn.scale.strides).map(|(n, stride)| n as i64 * stride).sum();
        elements as usize
    };
    // Of what has one scale.
    let shared = |unit: [usize; 3]| if kind == ScaleKind::Tensor { [0; 3] } else { unit };
    let read = |at: usize| f32::from_ne_bytes(scales[4 * at..4 * at + 4].try_into().expect("four bytes"));
    let mut left = scales.clone();
    // The least and the most that the largest magnitude may be found to be.
    let mut largest = std::collections::BTreeMap::<[usize; 3], (f64, f64)>::new();
    for (n, row) in drawn.rows.iter().enumerate() {
        for (i, near) in row.iter().enumerate() {
            let most = largest.entry(shared(unit_of(kind, drawn.sizes, kv_heads, n, i))).or_insert((0.0, 0.0));
            if !near.value.is_finite() {
                continue;
            }
            let magnitude = near.value.abs();
            *most = (most.0.max(magnitude - near.eps), most.1.max(magnitude + near.eps));
        }
    }
    let (mut expected, mut written) = (codes.clone(), vec![false; codes.len()]);
    for (n, row) in drawn.rows.iter().enumerate() {
        let [_, heads, count, _] = drawn.sizes;
        for (i, near) in row.iter().enumerate() {
            let unit = unit_of(kind, drawn.sizes, kv_heads, n, i);
            let place = at_scale(unit);
            let scale = read(place);
            left[4 * place..4 * place + 4].fill(BEFORE);
            let (least, most) = largest[&shared(unit)];
            let range = (least / 448.0 * (1.0 - 2e-7)).max(LEAST)..=(most / 448.0 * (1.0 + 2e-7)).max(LEAST);
            let right = match (least > 0.0, most > 0.0) {
                (false, false) => scale == 1.0,
                (false, true) => scale == 1.0 || range.contains(&f64::from(scale)),
                _ => range.contains(&f64::from(scale)),
            };
            if !right {
                return Ok(Some(format!("{name}: the scale of {unit:?} is {scale:e}, not in {range:?}")));
            }
            let inverse = f64::from(1.0 / scale);
            let view = TensorView { address: drawn.to.address - drawn.target.address(), ..drawn.to };
            let at = offset(&view, [n / count / heads, n / count % heads, n % count, i]);
            let got = e4m3::value(codes[at]);
            let slack = near.eps + 3e-7 * near.value.abs() + 1e-44;
            let bound = |x: f64| e4m3::value(e4m3::code((x * inverse).clamp(-1e30, 1e30) as f32));
            let right = match near.value {
                x if x.is_nan() => got.is_nan(),
                x if x.is_infinite() => got == 448f32.copysign(x as f32),
                x => (bound(x - slack)..=bound(x + slack)).contains(&got),
            };
            if !right {
                let place = [n / count / heads, n / count % heads, n % count, i];
                let (value, eps) = (near.value, near.eps);
                return Ok(Some(format!("{name}{place:?} is {got} by {scale:e}, not {value:e} within {eps:.1e}")));
            }
            (expected[at], written[at]) = (codes[at], true);
        }
    }
    for (at, byte) in expected.iter_mut().enumerate().filter(|(at, _)| !written[*at]) {
        *byte = BEFORE;
        if codes[at] != BEFORE {
            return Ok(Some(format!("{name}: byte {at} was written, which is no row's")));
        }
    }
    let stray = left.iter().position(|byte| *byte != BEFORE);
    Ok(stray.map(|at| format!("{name}: byte {at} of the scales was written, which is no unit's")))
}

/// Launches one random call of [`Quantise`] on a kernel of `Op::Quantise`, twice: what is wrong, if anything is.
///
/// # Errors
/// Those of the device.
pub fn check_quantise(device: &dyn Device, module: &dyn Module, seed: u64) -> Result<std::result::Result<(), String>> {
    let Problem { dtype, head_dim_qk, head_dim_v, .. } = module.kernel().problem;
    let (dim, dim_v) = (head_dim_qk as usize, head_dim_v as usize);
    let rng = &mut StdRng::seed_from_u64(seed);
    let (batch, kv_heads) = (*[0, 1, 1, 1, 2, 2].choose(rng).expect("not empty"), rng.random_range(1..=3usize));
    let heads = kv_heads * rng.random_range(1..=2usize);
    let [q_len, kv_len] = [(); 2].map(|()| *ROWS.choose(rng).expect("not empty") as usize);
    let mixes = dim.is_power_of_two() && rng.random_bool(0.5);
    let subtracts = rng.random_bool(0.5);
    let mut kinds = vec!["normal", "normal", "biased", "outliers", "zeros", "odd"];
    let turns = rng.random_bool(0.5);
    if dtype != DType::F16 {
        kinds.push("tiny");
        // Sums of others' signs would depend on their order.
        kinds.extend(if mixes || turns { [].as_slice() } else { ["huge"; 4].as_slice() });
    }
    // Rows of V and of Q and K of other lengths than these have a kernel of their own.
    let absent = |rng: &mut StdRng| dim == dim_v && rng.random_bool(0.15);
    let has = [!absent(rng), !absent(rng), !absent(rng)];
    let kv_len_of = if has[1] || has[2] { kv_len } else { 0 };
    let all = [
        ("q", [batch, heads, q_len, dim]),
        ("k", [batch, kv_heads, kv_len_of, dim]),
        ("v", [batch, kv_heads, kv_len_of, dim_v]),
    ];
    let mut drawn = Vec::new();
    for ((name, sizes), has) in all.into_iter().zip(has) {
        drawn.push(if has { Some(draw(device, rng, name, dtype, sizes, kv_heads, &kinds)?) } else { None });
    }
    let turn = match dim >= 2 && (has[0] || has[1]) && turns {
        true => Some(draw_turn(device, rng, dtype, [batch, q_len, kv_len_of], dim)?),
        false => None,
    };
    let mean_strides = if rng.random_bool(0.5) {
        [(kv_heads * dim) as i64, dim as i64]
    } else {
        [dim as i64 + 3, (batch.max(1) * (dim + 3)) as i64]
    };
    let wants_mean = subtracts && has[1] && rng.random_bool(0.7);
    let mean_bytes = vec![BEFORE; 4 * batch.max(1) * kv_heads * (dim + 3)];
    let means = Guarded::new(device, "k_mean", &mean_bytes)?;

    let operand =
        |drawn: &Option<Drawn>| drawn.as_ref().map(|d| QuantiseOperand { from: d.from, to: d.to, scale: d.scale });
    let quantise = Quantise {
        q: operand(&drawn[0]),
        k: operand(&drawn[1]),
        v: operand(&drawn[2]),
        rotary: turn.as_ref().map(|turn| turn.call),
        mean: (subtracts && has[1]).then(|| match wants_mean {
            true => KeyMean { address: means.address(), strides: mean_strides },
            false => KeyMean::UNSAID,
        }),
        hadamard: mixes,
    };
    if !has.contains(&true) {
        return Ok(quantise_call(&quantise).map(|_| "a call of nothing was taken".to_owned()).map_or(Ok(()), Err));
    }
    let call = quantise_call(&quantise)?;
    let told = |what: String| format!("{what}: {} {} {quantise:?}", call.shape, module.kernel().name());
    let mut first: Option<Vec<Vec<u8>>> = None;
    for _ in 0..2 {
        for d in drawn.iter().flatten() {
            d.target.upload(device, &vec![BEFORE; d.target.len()])?;
            d.scales.upload(device, &vec![BEFORE; d.scales.len()])?;
        }
        if !quantise.is_empty() {
            let plan = module.kernel().plan(&call.shape)?;
            // SAFETY: every address lies in the buffers, which live until the downloads have waited.
            unsafe { device.launch(module, &plan, (&call.args).into(), device.stream())? };
        }
        let mut bytes = Vec::new();
        for d in drawn.iter().flatten() {
            bytes.push(d.target.download(device, device.stream())?.0);
            bytes.push(d.scales.download(device, device.stream())?.0);
        }
        bytes.push(means.download(device, device.stream())?.0);
        if first.as_ref().is_some_and(|first| *first != bytes) {
            return Ok(Err(told("not the same bytes in two runs".to_owned())));
        }
        first = Some(bytes);
    }

    for (d, positions) in drawn.iter_mut().zip([Some(0), Some(1), None]) {
        let (Some(d), Some(turn), Some(which)) = (d, &turn, positions) else { continue };
        let [_, heads, count, _] = d.sizes;
        for (n, row) in d.rows.iter_mut().enumerate() {
            turn.rotate(row, turn.positions[which][n / count / heads * count + n % count]);
        }
    }
    let mut expected = Vec::new();
    if let (Some(k), true) = (&mut drawn[1], subtracts) {
        expected = subtract_means(k);
    }
    if mixes {
        drawn[..2].iter_mut().flatten().flat_map(|d| &mut d.rows).for_each(|row| mix(row));
    }
    for (d, name) in drawn.iter().zip(["q", "k", "v"]) {
        if let Some(wrong) = d.as_ref().map(|d| compare(device, name, d, kv_heads)).transpose()?.flatten() {
            return Ok(Err(told(wrong)));
        }
    }
    let (bytes, stray) = means.download(device, device.stream())?;
    if let Some(stray) = stray {
        return Ok(Err(told(stray)));
    }
    let mut left = bytes.clone();
    for (unit, means) in expected.iter().enumerate().filter(|_| wants_mean) {
        let first = (unit / kv_heads) as i64 * mean_strides[0] + (unit % kv_heads) as i64 * mean_strides[1];
        for (i, near) in means.iter().enumerate() {
            let at = 4 * (first as usize + i);
            let got = f64::from(f32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes")));
            left[at..at + 4].fill(BEFORE);
            if (got - near.value).abs() > near.eps + 1.2e-7 * near.value.abs() {
                return Ok(Err(told(format!("the mean of unit {unit} at {i} is {got:e}, not {:e}", near.value))));
            }
        }
    }
    match left.iter().position(|byte| *byte != BEFORE) {
        Some(at) => Ok(Err(told(format!("byte {at} of the means was written, which is no unit's")))),
        None => Ok(Ok(())),
    }
}
