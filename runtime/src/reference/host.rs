//! Tensors in host memory, with any layout, and the values they are filled with.

use super::e4m3;
use crate::TensorView;
use crate::guarded::POISON;
use flashtune_codegen::{DType, Error, Result};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;
use std::str::FromStr;

/// Where the elements of a `[batch, heads, rows, dim]` tensor lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Layout {
    /// Contiguous `[batch, heads, rows, dim]`.
    #[default]
    Bhsd,
    /// Contiguous `[batch, rows, heads, dim]`, as most models produce it.
    Bshd,
    /// `[batch, heads, rows, dim]` with a gap of 8 elements after every row and of 3 rows after every head.
    Padded,
}

/// How values are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Distribution {
    /// Standard normal.
    #[default]
    Normal,
    /// Normal with the statistics of real model activations: a few channels per head carry a large constant offset
    /// and a spread 20 to 100 times that of the others, which makes softmax rows peaked.
    NormalWithOutliers,
    /// Uniform in [-1, 1).
    Uniform,
    /// One value everywhere.
    Constant(f32),
}

/// A tensor in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    dtype: DType,
    shape: [usize; 4],
    strides: [usize; 4],
    data: Vec<u8>,
}

/// Values that [`HostTensor::repeated`] draws, about.
const PATTERN: usize = 1_000_003;

impl Layout {
    /// Every layout.
    pub const ALL: [Layout; 3] = [Layout::Bhsd, Layout::Bshd, Layout::Padded];

    /// Strides in elements of batch, head, row and element, and the bytes that the tensor spans; `None` when memory
    /// cannot be that large. Unchecked products would wrap, and a tensor could claim more than it has.
    fn place(self, dtype: DType, [b, h, s, d]: [usize; 4]) -> Option<([usize; 4], usize)> {
        let product = |factors: [usize; 3]| factors.into_iter().try_fold(1usize, usize::checked_mul);
        let (strides, batch) = match self {
            Layout::Bhsd => ([product([h, s, d])?, product([s, d, 1])?, d, 1], product([h, s, d])?),
            Layout::Bshd => ([product([h, s, d])?, d, product([h, d, 1])?, 1], product([h, s, d])?),
            Layout::Padded => {
                // Rows stay whole 16-byte vectors apart.
                let row = d.checked_add(if dtype.bytes() == 1 { 16 } else { 8 })?;
                let head = product([s.checked_add(3)?, row, 1])?;
                ([product([h, head, 1])?, head, row, 1], product([h, head, 1])?)
            }
        };
        let bytes = product([b, batch, dtype.bytes()])?;
        isize::try_from(bytes).is_ok().then_some((strides, bytes))
    }

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Bhsd => "bhsd",
            Layout::Bshd => "bshd",
            Layout::Padded => "padded",
        }
    }
}

impl FromStr for Layout {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        Layout::ALL.into_iter().find(|l| l.name() == s).ok_or_else(|| Error::parse("layout", s, "bhsd, bshd or padded"))
    }
}

impl FromStr for Distribution {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "normal" => Ok(Distribution::Normal),
            "outliers" => Ok(Distribution::NormalWithOutliers),
            "uniform" => Ok(Distribution::Uniform),
            _ => match s.parse::<f32>() {
                Ok(x) if x.is_finite() => Ok(Distribution::Constant(x)),
                _ => Err(Error::parse("distribution", s, "normal, outliers, uniform, or a finite number")),
            },
        }
    }
}

impl HostTensor {
    /// A tensor of one byte everywhere.
    fn filled(dtype: DType, shape: [usize; 4], layout: Layout, byte: u8) -> Self {
        // As a vector of that length would.
        let (strides, bytes) = layout.place(dtype, shape).expect("a tensor's capacity overflows");
        Self { dtype, shape, strides, data: vec![byte; bytes] }
    }

    /// A tensor of zeros; bytes between elements are 0xFF.
    ///
    /// # Panics
    /// When memory cannot be that large, as vectors do. So do the others that make a tensor of a shape.
    pub fn zeros(dtype: DType, shape: [usize; 4], layout: Layout) -> Self {
        let mut t = Self::filled(dtype, shape, layout, if layout == Layout::Padded { POISON } else { 0 });
        if layout == Layout::Padded {
            t.fill_rows(|_, row| row.fill(0.0));
        }
        t
    }

    /// A tensor whose memory is all 0xFF (NaN), to be written by a kernel.
    pub fn poisoned(dtype: DType, shape: [usize; 4], layout: Layout) -> Self {
        Self::filled(dtype, shape, layout, POISON)
    }

    /// A tensor of random values, the same for the same seed on every machine.
    pub fn random(dtype: DType, shape: [usize; 4], layout: Layout, seed: u64, distribution: Distribution) -> Self {
        let mut t = Self::zeros(dtype, shape, layout);
        let mut rng = StdRng::seed_from_u64(seed);
        // Per head and channel: offset and spread.
        let (heads, dim) = (shape[1], shape[3]);
        let mut channels = vec![(0.0f32, 1.0f32); heads * dim];
        if distribution == Distribution::NormalWithOutliers && dim > 0 {
            for head in channels.chunks_exact_mut(dim) {
                for _ in 0..(dim / 48).max(1) {
                    let c = rng.random_range(0..dim);
                    let spread = rng.random_range(20.0..100.0f32);
                    let sign = if rng.random() { 1.0 } else { -1.0 };
                    head[c] = (sign * spread * 0.5, spread * 0.1);
                }
            }
        }
        t.fill_rows(|[_, h, _], row| {
            for (x, &(offset, spread)) in row.iter_mut().zip(&channels[h * dim..]) {
                *x = match distribution {
                    Distribution::Normal | Distribution::NormalWithOutliers => {
                        offset + spread * rng.sample::<f32, _>(StandardNormal)
                    }
                    Distribution::Uniform => rng.random_range(-1.0..1.0),
                    Distribution::Constant(c) => c,
                };
            }
        });
        t
    }

    /// A contiguous tensor of random values of which about a million are drawn and then repeated: drawing hundreds of
    /// millions takes longer than what they are drawn for. A small one is [`HostTensor::random`]'s.
    pub fn repeated(dtype: DType, shape: [usize; 4], seed: u64, distribution: Distribution) -> Self {
        let elements: usize = shape.iter().product();
        if elements <= PATTERN {
            return Self::random(dtype, shape, Layout::Bhsd, seed, distribution);
        }
        // Channels are drawn for a head, so a row of the pattern is one.
        let dim = shape[3];
        let rows = (PATTERN / dim) | 1;
        let drawn = Self::random(dtype, [1, 1, rows, dim], Layout::Bhsd, seed, distribution);
        let mut t = Self::filled(dtype, shape, Layout::Bhsd, 0);
        for part in t.data.chunks_mut(drawn.data.len()) {
            part.copy_from_slice(&drawn.data[..part.len()]);
        }
        t
    }

    /// A tensor from values in `[batch, heads, rows, dim]` order, rounded to the dtype; `None` when their number is not
    /// that of the shape.
    pub fn from_values(dtype: DType, shape: [usize; 4], layout: Layout, values: &[f32]) -> Option<Self> {
        let (_, bytes) = Layout::Bhsd.place(dtype, shape)?;
        if values.len() != bytes / dtype.bytes() {
            return None;
        }
        let mut t = Self::zeros(dtype, shape, layout);
        let mut rest = values;
        t.fill_rows(|_, row| {
            let (now, later) = rest.split_at(row.len());
            row.copy_from_slice(now);
            rest = later;
        });
        Some(t)
    }

    /// A tensor over bytes that lie in a given layout (native endianness); `None` when their number does not fit.
    pub fn from_bytes(dtype: DType, shape: [usize; 4], layout: Layout, data: Vec<u8>) -> Option<Self> {
        let (strides, bytes) = layout.place(dtype, shape)?;
        (data.len() == bytes).then_some(Self { dtype, shape, strides, data })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Batch, heads, rows, dim.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The memory, gaps included.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// The memory, gaps included.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.data
    }

    /// The view of this tensor's layout at a device address.
    pub fn view_at(&self, address: u64) -> TensorView {
        TensorView {
            address,
            dtype: self.dtype,
            shape: self.shape.map(|n| n as u64),
            strides: self.strides.map(|n| n as i64),
        }
    }

    /// The view of this tensor in host memory, for the `cpu` device.
    pub fn view(&self) -> TensorView {
        self.view_at(self.data.as_ptr() as u64)
    }

    /// One element.
    ///
    /// # Panics
    /// When an index is out of range, as slices do.
    pub fn get(&self, at: [usize; 4]) -> f32 {
        let mut x = [0.0];
        let i = self.offset(at);
        decode(self.dtype, &self.data[i..i + self.dtype.bytes()], &mut x);
        x[0]
    }

    /// Sets one element, rounded to the dtype.
    ///
    /// # Panics
    /// When an index is out of range, as slices do.
    pub fn set(&mut self, at: [usize; 4], x: f32) {
        let i = self.offset(at);
        let n = self.dtype.bytes();
        encode(self.dtype, &[x], &mut self.data[i..i + n]);
    }

    /// Reads a row `[b, h, s]` into `out`, whose length is the tensor's dim.
    ///
    /// # Panics
    /// When an index is out of range, as slices do.
    pub fn read_row(&self, [b, h, s]: [usize; 3], out: &mut [f32]) {
        if self.shape[3] == 0 {
            return;
        }
        let i = self.offset([b, h, s, 0]);
        decode(self.dtype, &self.data[i..i + self.shape[3] * self.dtype.bytes()], out);
    }

    /// Writes a row `[b, h, s]`, rounded to the dtype.
    ///
    /// # Panics
    /// When an index is out of range, as slices do.
    pub fn write_row(&mut self, [b, h, s]: [usize; 3], row: &[f32]) {
        if self.shape[3] == 0 {
            return;
        }
        let i = self.offset([b, h, s, 0]);
        let n = self.shape[3] * self.dtype.bytes();
        encode(self.dtype, row, &mut self.data[i..i + n]);
    }

    /// All values in `[batch, heads, rows, dim]` order.
    pub fn values(&self) -> Vec<f32> {
        let [b, h, s, d] = self.shape;
        let mut out = vec![0.0; b * h * s * d];
        if d == 0 {
            return out;
        }
        for (i, row) in out.chunks_exact_mut(d).enumerate() {
            self.read_row([i / (h * s), i / s % h, i % s], row);
        }
        out
    }

    /// The byte ranges that hold no element, in order.
    pub(crate) fn gaps(&self) -> Vec<std::ops::Range<usize>> {
        let [b, h, s, d] = self.shape;
        let row = d * self.dtype.bytes();
        let mut starts = Vec::with_capacity(b * h * s);
        if row > 0 {
            for b in 0..b {
                for h in 0..h {
                    starts.extend((0..s).map(|s| self.offset([b, h, s, 0])));
                }
            }
        }
        starts.sort_unstable();
        let mut gaps = Vec::new();
        let mut end = 0;
        for start in starts {
            if start > end {
                gaps.push(end..start);
            }
            end = start + row;
        }
        if end < self.data.len() {
            gaps.push(end..self.data.len());
        }
        gaps
    }

    /// Fills every row in `[batch, heads, rows]` order.
    fn fill_rows(&mut self, mut fill: impl FnMut([usize; 3], &mut [f32])) {
        let [b, h, s, d] = self.shape;
        let mut row = vec![0.0; d];
        for b in 0..b {
            for h in 0..h {
                for s in 0..s {
                    fill([b, h, s], &mut row);
                    self.write_row([b, h, s], &row);
                }
            }
        }
    }

    /// Where an element begins, in bytes.
    pub(crate) fn offset(&self, at: [usize; 4]) -> usize {
        for (i, n) in at.iter().zip(self.shape) {
            assert!(*i < n, "index {at:?} is outside of the shape {:?}", self.shape);
        }
        at.iter().zip(self.strides).map(|(i, s)| i * s).sum::<usize>() * self.dtype.bytes()
    }
}

/// Elements from bytes.
pub(crate) fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F16 => {
            for (x, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *x = f16::from_ne_bytes([b[0], b[1]]).to_f32();
            }
        }
        DType::Bf16 => {
            for (x, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *x = bf16::from_ne_bytes([b[0], b[1]]).to_f32();
            }
        }
        DType::E4m3 => out.iter_mut().zip(bytes).for_each(|(x, b)| *x = e4m3::value(*b)),
        DType::F32 => {
            for (x, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *x = f32::from_ne_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
    }
}

/// Bytes from elements, rounded to nearest even.
pub(crate) fn encode(dtype: DType, values: &[f32], out: &mut [u8]) {
    match dtype {
        DType::F16 => {
            for (b, x) in out.chunks_exact_mut(2).zip(values) {
                b.copy_from_slice(&f16::from_f32(*x).to_ne_bytes());
            }
        }
        DType::Bf16 => {
            for (b, x) in out.chunks_exact_mut(2).zip(values) {
                b.copy_from_slice(&bf16::from_f32(*x).to_ne_bytes());
            }
        }
        DType::E4m3 => out.iter_mut().zip(values).for_each(|(b, x)| *b = e4m3::code(*x)),
        DType::F32 => {
            for (b, x) in out.chunks_exact_mut(4).zip(values) {
                b.copy_from_slice(&x.to_ne_bytes());
            }
        }
    }
}

/// Rounds values to a dtype and back.
pub(crate) fn round_to(dtype: DType, values: &mut [f32]) {
    match dtype {
        DType::F16 => values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        DType::Bf16 => values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        DType::E4m3 => values.iter_mut().for_each(|x| *x = e4m3::value(e4m3::code(*x))),
        DType::F32 => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: [usize; 4] = [2, 3, 5, 16];

    #[test]
    fn a_size_that_wraps_around_is_not_that_of_an_empty_tensor() {
        for layout in Layout::ALL {
            let wraps = [1 << 13, 1 << 13, 1 << 30, 1 << 8]; // 2^64 elements
            assert!(HostTensor::from_bytes(DType::F32, wraps, layout, Vec::new()).is_none());
            assert!(HostTensor::from_values(DType::F32, wraps, layout, &[]).is_none());
            assert!(
                HostTensor::from_bytes(DType::F32, [1, 2, 0, 64], layout, Vec::new()).is_some()
                    || layout == Layout::Padded
            );
        }
    }

    #[test]
    fn repeated_values_differ_from_head_to_head() {
        let of = |shape, seed| HostTensor::repeated(DType::F32, shape, seed, Distribution::Normal);
        let t = of([1, 9, 1024, 128], 5);
        let (mut a, mut b) = (vec![0.0; 128], vec![0.0; 128]);
        t.read_row([0, 0, 3], &mut a);
        t.read_row([0, 8, 3], &mut b);
        assert_ne!(a, b);
        assert_eq!(t, of([1, 9, 1024, 128], 5));
        assert_ne!(t, of([1, 9, 1024, 128], 6));
        assert_eq!(of(SHAPE, 5), HostTensor::random(DType::F32, SHAPE, Layout::Bhsd, 5, Distribution::Normal));
    }

    #[test]
    fn values_do_not_depend_on_the_layout_and_survive_it() {
        for dtype in DType::ALL {
            let random = |layout| HostTensor::random(dtype, SHAPE, layout, 7, Distribution::Normal);
            let values = random(Layout::Bhsd).values();
            for layout in Layout::ALL {
                let t = random(layout);
                assert_eq!(t.values(), values, "{layout:?}");
                assert_eq!(HostTensor::from_values(dtype, SHAPE, layout, &values).unwrap(), t);
                assert_eq!(HostTensor::from_bytes(dtype, SHAPE, layout, t.bytes().to_vec()).unwrap(), t);
                assert_eq!(t.get([1, 2, 4, 15]), values[values.len() - 1]);
                assert!(t.view_at(64).extent_bytes().unwrap() <= t.bytes().len() as u64);
            }
        }
        assert!(HostTensor::from_values(DType::F32, SHAPE, Layout::Bhsd, &[0.0; 3]).is_none());
        assert!(HostTensor::from_bytes(DType::F32, SHAPE, Layout::Bhsd, vec![0; 3]).is_none());
    }

    #[test]
    fn gaps_and_elements_make_up_all_bytes() {
        for layout in Layout::ALL {
            let mut t = HostTensor::poisoned(DType::Bf16, SHAPE, layout);
            let gaps: usize = t.gaps().iter().map(|g| g.len()).sum();
            assert_eq!(gaps + 2 * SHAPE.iter().product::<usize>(), t.bytes().len(), "{layout:?}");
            t.fill_rows(|_, row| row.fill(1.0));
            for gap in t.gaps() {
                assert!(t.bytes()[gap].iter().all(|b| *b == POISON), "{layout:?}");
            }
            let ones = t.bytes().chunks_exact(2).filter(|b| *b == bf16::ONE.to_ne_bytes()).count();
            assert_eq!(ones, SHAPE.iter().product::<usize>());
        }
    }

    #[test]
    fn outliers_sit_in_few_channels_and_seeds_repeat() {
        let make = |seed| {
            HostTensor::random(DType::F32, [1, 2, 200, 64], Layout::Bhsd, seed, Distribution::NormalWithOutliers)
        };
        assert_eq!(make(3), make(3));
        assert_ne!(make(3), make(4));
        let t = make(3);
        for h in 0..2 {
            let mean = |c| (0..200).map(|s| t.get([0, h, s, c])).sum::<f32>() / 200.0;
            let large = (0..64).filter(|c| mean(*c).abs() > 5.0).count();
            assert!((1..=2).contains(&large), "{large} channels");
        }
    }

    #[test]
    fn names_are_read_and_bad_ones_refused() {
        assert_eq!("bshd".parse::<Layout>().unwrap(), Layout::Bshd);
        assert_eq!("outliers".parse::<Distribution>().unwrap(), Distribution::NormalWithOutliers);
        assert_eq!("2.5".parse::<Distribution>().unwrap(), Distribution::Constant(2.5));
        assert!("sbhd".parse::<Layout>().is_err());
        for bad in ["nan", "inf", "gauss"] {
            assert!(bad.parse::<Distribution>().is_err(), "{bad}");
        }
    }
}
