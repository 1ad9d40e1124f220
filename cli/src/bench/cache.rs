//! A KV cache on the device: pages of several layers, what is written into them, and whether attention over it is
//! right.

use super::super::cases::Case;
use super::super::exit::usage;
use anyhow::Result;
use flashtune::append::{Append, RowCount, Rows, Target};
use flashtune::ragged::{Ints, Scales, Store, StoreRows, StoreType};
use flashtune::{DType, Distribution, Engine, HostTensor, Layout, Stream};
use flashtune_codegen::{KvElement, Mask, Shape};
use flashtune_runtime::reference::{Attention, compare, e4m3, oracle_of, sample_rows, unfused_rows_of};
use flashtune_runtime::{Buffer, Device, Verdict};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::str::FromStr;

/// What elements of an int8 cache are multiplied by.
const INT8_SCALE: f32 = 0.125;
/// Rows of a sequence's head that are compared with fp64.
const CHECKED_ROWS: usize = 16;

/// Elements of a cache, as options name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Element(pub KvElement);

impl FromStr for Element {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let all = [KvElement::E4m3, KvElement::E5m2, KvElement::Int8];
        let found = all.into_iter().find(|e| e.name() == s).or((s == "same").then_some(KvElement::Same));
        found.map(Element).ok_or_else(|| "elements are same (those of the queries), e4m3, e5m2 and int8".to_owned())
    }
}

/// The heads, dims, elements and mask that a case names, whose sizes are not used.
pub(crate) fn model_of(case: &Case, Element(element): Element) -> Result<Model> {
    let Case { problem, shape, .. } = case;
    if problem.program.is_some() {
        return Err(usage(
            "ragged batches are timed with windows, not with score programs; leave --score and programs out",
        ));
    }
    if problem.dropout {
        return Err(usage("--dropout: decoding drops nothing; leave it out, or time --op forward or backward"));
    }
    if problem.head_dim_qk != problem.head_dim_v {
        return Err(usage("ragged batches are timed with one head dim; leave --head-dim-v out"));
    }
    let (dtype, heads, kv_heads) = (problem.dtype, shape.heads, shape.kv_heads);
    if element != KvElement::Same && dtype == DType::F32 {
        return Err(usage(format!(
            "--kv-dtype {} is read beside f16, bf16 and e4m3 queries alone; name one of them by --dtype",
            element.name()
        )));
    }
    let (output, element) = (problem.output_dtype(), element.beside(dtype));
    Ok(Model { dtype, output, element, heads, kv_heads, head_dim: problem.head_dim_qk, mask: shape.mask })
}

/// Heads, dims and elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model {
    /// Of Q.
    pub dtype: DType,
    /// Of O.
    pub output: DType,
    pub element: KvElement,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub mask: Mask,
}

impl Model {
    fn store_type(&self) -> StoreType {
        match self.element {
            KvElement::Same => StoreType::Float(self.dtype),
            KvElement::E4m3 => StoreType::E4m3,
            KvElement::E5m2 => StoreType::E5m2,
            KvElement::Int8 => StoreType::Int8,
        }
    }

    /// Elements of rows of K and V before they are appended.
    fn rows_dtype(&self) -> DType {
        if self.dtype == DType::E4m3 { DType::Bf16 } else { self.dtype }
    }

    /// Bytes of a token in a layer's K and V.
    pub(crate) fn token_bytes(&self) -> u64 {
        2 * u64::from(self.kv_heads) * u64::from(self.head_dim) * self.element.bytes(self.dtype) as u64
    }

    /// E.g. `bf16, 32/8 heads of 128, causal, e4m3 cache`.
    pub(crate) fn told(&self) -> String {
        let Self { dtype, heads, kv_heads, head_dim, mask, .. } = self;
        let same = [KvElement::Same, KvElement::Same.beside(self.dtype)].contains(&self.element);
        let cache = if same { String::new() } else { format!(", {} cache", self.element.name()) };
        format!("{dtype}, {heads}/{kv_heads} heads of {head_dim}, {mask}{cache}")
    }
}

/// Rows of Q, and of K and V as they are appended, in host memory and on the device.
pub(crate) struct Inputs {
    model: Model,
    q: HostTensor,
    k: HostTensor,
    v: HostTensor,
    on_device: [Box<dyn Buffer>; 3],
    o: Box<dyn Buffer>,
    scale: Box<dyn Buffer>,
}

impl Inputs {
    /// So many rows of Q, O and of K and V. Those of a quantised cache are numbers that it holds exactly, so that a
    /// reference need not round as it does.
    pub(crate) fn new(device: &dyn Device, model: Model, q_rows: u32, kv_rows: u32, seed: u64) -> Result<Self> {
        let dim = model.head_dim as usize;
        let shape = |heads: u32, rows: u32| [1, heads as usize, rows as usize, dim];
        let q = HostTensor::random(model.dtype, shape(model.heads, q_rows), Layout::Bshd, seed, Distribution::Normal);
        let of_cache = |seed: u64| match model.element {
            KvElement::Same => {
                let shape = shape(model.kv_heads, kv_rows);
                HostTensor::random(model.dtype, shape, Layout::Bshd, seed, Distribution::Normal)
            }
            _ => eighths(model.rows_dtype(), shape(model.kv_heads, kv_rows), seed),
        };
        let (k, v) = (of_cache(seed + 1), of_cache(seed + 2));
        let buffer = |bytes: &[u8]| {
            let buffer = device.alloc(bytes.len())?;
            device.upload(&*buffer, bytes)?;
            Ok::<_, flashtune_runtime::Error>(buffer)
        };
        let on_device = [buffer(q.bytes())?, buffer(k.bytes())?, buffer(v.bytes())?];
        let o = device.alloc(q.bytes().len() / model.dtype.bytes() * model.output.bytes())?;
        let scale = buffer(&INT8_SCALE.to_ne_bytes())?;
        Ok(Self { model, q, k, v, on_device, o, scale })
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// Rows of K and V that there are.
    pub(crate) fn kv_rows(&self) -> u32 {
        self.k.shape()[2] as u32
    }

    pub(crate) fn q_address(&self) -> u64 {
        self.on_device[0].address()
    }

    pub(crate) fn o(&self) -> &dyn Buffer {
        &*self.o
    }

    /// Strides of batch, head and row of Q and O.
    pub(crate) fn q_strides(&self, rows_of_a_sequence: u32) -> [i64; 3] {
        let (h, d) = (i64::from(self.model.heads), i64::from(self.model.head_dim));
        [i64::from(rows_of_a_sequence) * h * d, d, h * d]
    }

    /// O, which holds NaN where nothing was written since.
    pub(crate) fn output(&self, device: &dyn Device, stream: Stream) -> Result<HostTensor> {
        let mut bytes = vec![0; self.o.len()];
        device.download(&*self.o, &mut bytes, stream)?;
        Ok(HostTensor::from_bytes(self.model.output, self.q.shape(), Layout::Bshd, bytes).expect("O is as large as Q"))
    }

    /// Attention of `rows` rows of O from `first` on, over keys that were appended from the rows `sources` of K and V,
    /// for one KV head.
    pub(crate) fn check(&self, o: &HostTensor, [first, rows]: [u32; 2], sources: &[u32], kv_head: u32) -> Verdict {
        let Model { dtype, output, heads, kv_heads, head_dim, mask, .. } = self.model;
        let (group, dim) = ((heads / kv_heads) as usize, head_dim as usize);
        let of_rows = |from: &HostTensor| {
            let mut part = HostTensor::zeros(from.dtype(), [1, group, rows as usize, dim], Layout::Bhsd);
            let mut row = vec![0.0; dim];
            for g in 0..group {
                for i in 0..rows as usize {
                    from.read_row([0, kv_head as usize * group + g, first as usize + i], &mut row);
                    part.write_row([0, g, i], &row);
                }
            }
            part
        };
        let of_keys = |from: &HostTensor| {
            let mut part = HostTensor::zeros(from.dtype(), [1, 1, sources.len(), dim], Layout::Bhsd);
            let mut row = vec![0.0; dim];
            for (i, source) in sources.iter().enumerate() {
                from.read_row([0, kv_head as usize, *source as usize], &mut row);
                part.write_row([0, 0, i], &row);
            }
            part
        };
        let (q, o, k, v) = (of_rows(&self.q), of_rows(o), of_keys(&self.k), of_keys(&self.v));
        let shape =
            Shape { batch: 1, heads: group as u32, kv_heads: 1, q_len: rows, kv_len: sources.len() as u32, mask };
        let ids = sample_rows(&shape, CHECKED_ROWS, 1);
        let attention =
            Attention { mask, scale: 1.0 / (head_dim as f32).sqrt(), program: None, sequence: 0, dropout: None };
        let exact = oracle_of(&q, &k, &v, &attention, &ids);
        if dtype == DType::E4m3 {
            let emulated = e4m3::emulated([&q, &k, &v], &attention, output, &exact);
            return e4m3::compare(&o, None, &exact, &emulated);
        }
        compare(&o, None, &exact, &unfused_rows_of(&q, &k, &v, &attention, &ids))
    }
}

/// Multiples of an eighth from -1 to 1, which every quantised element holds (int8 with a scale of an eighth).
fn eighths(dtype: DType, shape: [usize; 4], seed: u64) -> HostTensor {
    let rng = &mut StdRng::seed_from_u64(seed);
    let mut t = HostTensor::zeros(dtype, shape, Layout::Bshd);
    let mut row = vec![0.0; shape[3]];
    for head in 0..shape[1] {
        for i in 0..shape[2] {
            row.fill_with(|| rng.random_range(-8..=8) as f32 * INT8_SCALE);
            t.write_row([0, head, i], &row);
        }
    }
    t
}

/// The pages of some layers.
pub(crate) struct Cache {
    layers: Vec<[Box<dyn Buffer>; 2]>,
    pub pages: u32,
    pub page_tokens: u32,
}

impl Cache {
    /// Pages that hold nothing yet: NaN, where elements have one.
    pub(crate) fn new(device: &dyn Device, model: &Model, layers: u32, pages: u32, page_tokens: u32) -> Result<Self> {
        let bytes = u64::from(pages) * u64::from(page_tokens) * model.token_bytes() / 2;
        let buffer = || {
            let buffer = device.alloc(bytes as usize)?;
            device.fill(&*buffer, 0xff)?;
            Ok::<_, flashtune_runtime::Error>(buffer)
        };
        let layers = (0..layers).map(|_| Ok([buffer()?, buffer()?])).collect::<Result<_>>()?;
        Ok(Self { layers, pages, page_tokens })
    }

    /// K and V of a layer.
    pub(crate) fn store(&self, inputs: &Inputs, layer: usize) -> Store {
        let model = inputs.model();
        let (heads, dim) = (i64::from(model.kv_heads), i64::from(model.head_dim));
        let strides = [i64::from(self.page_tokens) * heads * dim, heads * dim, dim];
        let scales = match model.element {
            KvElement::Int8 => Scales::PerHead { address: inputs.scale.address(), strides: [0, 0] },
            _ => Scales::One,
        };
        let [k, v] = &self.layers[layer];
        let rows =
            |buffer: &dyn Buffer| StoreRows::new(buffer.address(), model.store_type(), strides).with_scales(scales);
        Store {
            k: rows(&**k),
            v: rows(&**v),
            head_dim_v: model.head_dim.into(),
            kv_heads: model.kv_heads.into(),
            pages: self.pages.into(),
            page_tokens: self.page_tokens.into(),
        }
    }

    /// The first `rows` rows of the inputs' K and V to a token of a layer's cache each, as `slots` (64-bit) says.
    pub(crate) fn append(&self, inputs: &Inputs, layer: usize, rows: u32, slots: u64) -> Append {
        let model = inputs.model();
        let (heads, dim) = (i64::from(model.kv_heads), i64::from(model.head_dim));
        let of = |buffer: &dyn Buffer| Rows { address: buffer.address(), strides: [0, dim, heads * dim] };
        Append {
            dtype: model.rows_dtype(),
            head_dim: model.head_dim.into(),
            k: of(&*inputs.on_device[1]),
            v: of(&*inputs.on_device[2]),
            rows: RowCount::Each(rows.into()),
            store: self.store(inputs, layer),
            target: Target::Slots { mapping: Ints::i64(slots) },
            queries: None,
            rotary: None,
            finds_scales: false,
        }
    }

    /// Fills a layer: token `i` of those that `slots` names gets row `i` of K and V, round and round.
    pub(crate) fn fill(
        &self,
        engine: &Engine,
        inputs: &Inputs,
        layer: usize,
        slots: &[i64],
        stream: Stream,
    ) -> Result<()> {
        let device = engine.device();
        let at_once = inputs.kv_rows() as usize;
        let buffer = device.alloc(at_once * size_of::<i64>())?;
        for part in slots.chunks(at_once) {
            let bytes: Vec<u8> = part.iter().flat_map(|slot| slot.to_ne_bytes()).collect();
            device.upload(&*buffer, &bytes)?;
            let append = self.append(inputs, layer, part.len() as u32, buffer.address());
            // SAFETY: the addresses are those of buffers that live until the stream has been waited for, of the sizes
            // that the call says; slots are those of the cache.
            unsafe { engine.append(&append, stream)? };
            device.synchronize(stream)?;
        }
        Ok(())
    }
}
