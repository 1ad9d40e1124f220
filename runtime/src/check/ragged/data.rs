//! A ragged batch in host memory: every array that a kernel is given, and what it must compute from them.

use super::batch::{Queries, RaggedBatch, ScaleForm, StoreLayout, per_token};
use super::elements::Codes;
use super::expected::{Expected, SequenceInputs};
use super::place::{Places, encode, sums};
use crate::reference::{HostTensor, Layout};
use crate::tensor::windows;
use crate::{Result, Verdict, typical_side};
use bytemuck::Zeroable;
use flashtune_codegen::abi::RaggedArgs;
use flashtune_codegen::score::SideData;
use flashtune_codegen::{DType, KvElement, Problem, Shape};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;

/// The arrays of a ragged call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "named as the fields of RaggedArgs")]
pub enum Part {
    Q,
    K,
    V,
    O,
    Lse,
    KTable,
    VTable,
    PagesBegin,
    Slots,
    KvBegin,
    KvLengths,
    LastPage,
    LeftPad,
    KvAddedBegin,
    QBegin,
    QLengths,
    KScale,
    VScale,
    QScale,
    OScale,
}

/// Their bytes.
pub(super) type Parts = BTreeMap<Part, Vec<u8>>;

impl Part {
    /// The field of [`RaggedArgs`].
    pub const fn name(self) -> &'static str {
        match self {
            Part::Q => "q",
            Part::K => "k",
            Part::V => "v",
            Part::O => "o",
            Part::Lse => "lse",
            Part::KTable => "k_table",
            Part::VTable => "v_table",
            Part::PagesBegin => "pages_begin",
            Part::Slots => "slots",
            Part::KvBegin => "kv_begin",
            Part::KvLengths => "kv_lengths",
            Part::LastPage => "last_page",
            Part::LeftPad => "left_pad",
            Part::KvAddedBegin => "kv_added_begin",
            Part::QBegin => "q_begin",
            Part::QLengths => "q_lengths",
            Part::KScale => "k_scale",
            Part::VScale => "v_scale",
            Part::QScale => "q_scale",
            Part::OScale => "o_scale",
        }
    }

    /// Whether kernels write it.
    pub const fn is_written(self) -> bool {
        matches!(self, Part::O | Part::Lse)
    }
}

/// Inputs of a batch, and what a kernel must make of them.
pub struct RaggedData {
    pub(super) problem: Problem,
    pub(super) shape: Shape,
    /// Without addresses.
    args: RaggedArgs,
    parts: Parts,
    side: SideData,
    expected: Expected,
}

/// Rows of Q and O: of all sequences, the first of each and how many are used.
pub(super) struct QueryRows {
    /// First row of each sequence, where they are packed.
    pub(super) begins: Option<Vec<u32>>,
    /// Rows in memory, of each sequence or of the pack.
    pub(super) rows: u32,
}

impl RaggedData {
    /// Draws the inputs and computes what they give.
    ///
    /// # Errors
    /// Sizes that no kernel takes, or that are not of the problem's kind.
    pub fn new(problem: &Problem, batch: &RaggedBatch) -> Result<Self> {
        Self::of_sampled(problem, batch, f64::INFINITY)
    }

    /// The same, comparing of each sequence no more rows than take so many multiplications and additions of the whole
    /// batch's.
    pub(super) fn of_sampled(problem: &Problem, batch: &RaggedBatch, most: f64) -> Result<Self> {
        let rng = &mut StdRng::seed_from_u64(batch.seed);
        let mut args = RaggedArgs::zeroed();
        let mut parts = Parts::new();
        let places = Places::draw(batch, &mut args, &mut parts, rng);
        let longest = batch.lengths.iter().map(|[rows, _]| *rows).max().unwrap_or(0);
        let spare = if batch.spare { rng.random_range(1..=20) } else { 0 };
        let shape = Shape {
            batch: batch.lengths.len() as u32,
            heads: batch.heads,
            kv_heads: batch.kv_heads,
            q_len: longest + spare,
            kv_len: places.most,
            mask: batch.mask,
        };
        shape.validate()?;
        if shape.mask.kind() != problem.mask {
            return Err(flashtune_codegen::Error::unsupported(
                "mask",
                shape.mask,
                format!("the problem is specialised to the kind `{}`", problem.mask),
                "use a batch whose mask bounds the same sides",
            )
            .into());
        }
        let [window_left, window_right] = windows(&shape);
        let args = RaggedArgs {
            batch: shape.batch as i32,
            heads: shape.heads as i32,
            kv_heads: shape.kv_heads as i32,
            q_len: shape.q_len as i32,
            kv_len: shape.kv_len as i32,
            window_left,
            window_right,
            scale: batch.scale.unwrap_or_else(|| problem.default_scale()),
            ..args
        };
        let dropout = crate::check::dropout::of_host(problem, batch.seed);
        let args = dropout.map_or(args, |dropout| crate::dropout::of_ragged(args, &dropout));
        let side = problem.program.map_or(SideData::default(), |p| typical_side(&p, &shape, batch.seed));
        let mut data = Self { problem: *problem, shape, args, parts, side, expected: Expected::default() };
        let queries = data.place_queries(batch, rng);
        let inputs = data.fill(batch, &places, &queries, rng);
        data.expected = Expected::of(problem, batch, &data.shape, &data.args, &data.side, &queries, inputs, most);
        Ok(data)
    }

    /// The bounds of a launch.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The arrays; O and the log-sum-exp hold 0xff.
    pub fn parts(&self) -> &BTreeMap<Part, Vec<u8>> {
        &self.parts
    }

    /// What the problem's score program reads.
    pub fn side(&self) -> &SideData {
        &self.side
    }

    /// Rows that are compared.
    pub fn rows(&self) -> usize {
        self.expected.rows()
    }

    /// Whether all that is expected are numbers: NaN have many bits.
    pub fn is_finite(&self) -> bool {
        self.expected.is_finite()
    }

    /// Whether Q, O and all rows of the store, or columns of V, are whole vectors of 16 bytes.
    pub fn is_aligned(&self) -> bool {
        let (size, element) = (self.problem.dtype.bytes() as i64, self.element_bytes() as i64);
        let of_o = self.problem.output_dtype().bytes() as i64;
        let whole = |strides: &[i64], size: i64| strides.iter().all(|s| s * size % 16 == 0);
        let RaggedArgs { q_stride, o_stride, k_stride, v_stride, .. } = &self.args;
        let columns = self.problem.kv.store().is_some_and(|store| store.v_columns);
        let v = if columns { [v_stride[0], v_stride[2], v_stride[3]] } else { [v_stride[0], v_stride[1], v_stride[2]] };
        whole(q_stride, size) && whole(o_stride, of_o) && whole(&k_stride[..3], element) && whole(&v, element)
    }

    fn element_bytes(&self) -> usize {
        self.problem.kv.store().map_or(self.problem.dtype.bytes(), |store| store.element.bytes(self.problem.dtype))
    }

    /// The arguments of a launch, with what is at which address.
    pub fn args(&self, mut address: impl FnMut(Part) -> u64) -> RaggedArgs {
        let mut at = |part| if self.parts.contains_key(&part) { address(part) } else { 0 };
        let k_table = at(Part::KTable);
        let v_table = if self.parts.contains_key(&Part::VTable) { at(Part::VTable) } else { k_table };
        // Of a pack, as many rows as its memory holds.
        let [_, head, row] = self.args.q_stride;
        let elements = self.parts.get(&Part::Q).map_or(0, |q| q.len() / self.problem.dtype.bytes()) as i64;
        let last = elements - i64::from(self.problem.head_dim_qk) - i64::from(self.args.heads - 1) * head;
        let packed = self.parts.contains_key(&Part::QBegin);
        let held = if last < 0 { 0 } else { last / row.max(1) + 1 };
        let q_rows = if packed { held } else { i64::from(self.args.q_len) };
        RaggedArgs {
            q_rows,
            q: at(Part::Q),
            k: at(Part::K),
            v: at(Part::V),
            o: at(Part::O),
            lse: at(Part::Lse),
            k_table,
            v_table,
            pages_begin: at(Part::PagesBegin),
            slots: at(Part::Slots),
            kv_begin: at(Part::KvBegin),
            kv_lengths: at(Part::KvLengths),
            last_page: at(Part::LastPage),
            left_pad: at(Part::LeftPad),
            kv_added_begin: at(Part::KvAddedBegin),
            q_begin: at(Part::QBegin),
            q_lengths: at(Part::QLengths),
            k_scale: at(Part::KScale),
            v_scale: at(Part::VScale),
            q_scale: at(Part::QScale),
            o_scale: at(Part::OScale),
            ..self.args
        }
    }

    /// Compares what a kernel wrote, and tells what it wrote besides.
    pub fn compare(&self, o: &[u8], lse: Option<&[u8]>) -> (Verdict, Option<String>) {
        self.expected.compare(&self.problem, &self.args, o, lse)
    }

    /// Where rows of Q, O and the log-sum-exp lie.
    fn place_queries(&mut self, batch: &RaggedBatch, rng: &mut StdRng) -> QueryRows {
        let used: Vec<u32> = batch.lengths.iter().map(|[rows, _]| *rows).collect();
        let wide = batch.wide[1];
        let ints = |numbers: &[u32]| encode(&numbers.iter().map(|n| i64::from(*n)).collect::<Vec<_>>(), wide);
        let queries = match batch.queries {
            Queries::Uniform => QueryRows { begins: None, rows: self.shape.q_len },
            _ => {
                let apart = batch.queries == Queries::PackedApart;
                let gap = |rng: &mut StdRng| if apart { rng.random_range(0..=3) } else { 0 };
                let spans: Vec<u32> = used.iter().map(|n| n + gap(rng)).collect();
                let mut begins = sums(&spans);
                self.parts.insert(Part::QBegin, ints(&begins));
                let rows = begins.pop().unwrap_or(0) + gap(rng);
                QueryRows { begins: Some(begins), rows }
            }
        };
        let uneven = queries.begins.is_none() && used.iter().any(|n| *n != self.shape.q_len);
        if uneven || batch.queries == Queries::PackedApart {
            self.parts.insert(Part::QLengths, ints(&used));
        }
        let (heads, rows) = (i64::from(batch.heads), i64::from(queries.rows));
        let strides = |dim: i64, head_major: bool| match head_major {
            true => [heads * rows * dim, rows * dim, dim],
            false => [heads * rows * dim, dim, heads * dim],
        };
        self.args.q_stride = strides(self.problem.head_dim_qk.into(), batch.head_major);
        self.args.o_stride = strides(self.problem.head_dim_v.into(), batch.head_major);
        let sequences = if queries.begins.is_some() { 1 } else { u64::from(self.shape.batch) };
        let all = (sequences * u64::from(batch.heads) * u64::from(queries.rows)) as usize;
        let [size, of_o] = self.problem.element_bytes();
        let vectors = |bytes: usize| vec![0xff; bytes.next_multiple_of(16)];
        self.parts.insert(Part::Q, vectors(all * self.problem.head_dim_qk as usize * size));
        self.parts.insert(Part::O, vectors(all * self.problem.head_dim_v as usize * of_o));
        if let Some(form) = batch.lse {
            self.args.lse_stride = strides(1, !form.by_rows);
            self.args.lse_unit = if form.base_2 { std::f32::consts::LOG2_E } else { 1.0 };
            self.args.lse_empty = form.empty;
            self.parts.insert(Part::Lse, vec![0xff; all * 4]);
        }
        queries
    }

    /// Draws Q, K, V and scales and puts them where they belong; everything else stays NaN.
    fn fill(
        &mut self,
        batch: &RaggedBatch,
        places: &Places,
        queries: &QueryRows,
        rng: &mut StdRng,
    ) -> Vec<SequenceInputs> {
        let Problem { dtype, head_dim_qk, head_dim_v, .. } = self.problem;
        let store = self.problem.kv.store().unwrap_or_default();
        let size = self.element_bytes();
        let k_bytes = self.lay_out_store(batch, places, size);
        // -128 in every element, which is nothing to do without.
        let unused = if store.element == KvElement::Int8 { 0x80 } else { 0xff };
        let mut memory = [vec![unused; k_bytes[0]], vec![unused; k_bytes[1]]];
        let scales = Scales::draw(self, batch, places, rng);
        let ends = (dtype == DType::E4m3).then(|| Ends::draw(self, batch, rng));
        let codes = (store.element != KvElement::Same).then(|| Codes::of(store.element));
        let mut inputs = Vec::new();
        for (b, &[rows, keys]) in batch.lengths.iter().enumerate() {
            let seed = batch.seed.wrapping_mul(64).wrapping_add(4 * b as u64);
            let random = |dtype, heads: u32, rows: u32, dim: u32, salt| {
                let shape = [1, heads as usize, rows as usize, dim as usize];
                HostTensor::repeated(dtype, shape, seed + salt, batch.values)
            };
            let q = random(dtype, batch.heads, rows, head_dim_qk, 0);
            self.write_queries(&q, b, queries);
            let of_store = if codes.is_some() { DType::F32 } else { dtype };
            let mut k = random(of_store, batch.kv_heads, keys, head_dim_qk, 1);
            let mut v = random(of_store, batch.kv_heads, keys, head_dim_v, 2);
            let mut coded = codes.as_ref().map(|codes| [&k, &v].map(|tensor| codes.draw_all(&tensor.values(), rng)));
            let mut there = vec![true; keys as usize];
            let seen = seen_keys(batch, rows, keys);
            for t in 0..keys {
                let place = places.of(b, t);
                there[t as usize] = place.there;
                for h in 0..batch.kv_heads {
                    for (nth, (tensor, page)) in
                        [(&mut k, place.k_page), (&mut v, place.v_page)].into_iter().enumerate()
                    {
                        let at = [0, h as usize, t as usize];
                        let first = (h as usize * keys as usize + t as usize) * tensor.shape()[3];
                        let bytes: &mut [u8] = match &mut coded {
                            Some(coded) => &mut coded[nth][first..first + tensor.shape()[3]],
                            None => row_bytes_mut(tensor, at),
                        };
                        let unseen = !seen.contains(&t);
                        if batch.nan && unseen {
                            bytes.fill(0xff);
                        } else if batch.nan && nth == 1 && t + 1 == seen.end && h + 1 == batch.kv_heads {
                            bytes[..size].fill(0xff);
                        }
                        let stride = if nth == 0 { self.args.k_stride } else { self.args.v_stride };
                        let base =
                            i64::from(page) * stride[0] + i64::from(place.token) * stride[1] + i64::from(h) * stride[2];
                        let chunk = if nth == 1 && store.v_columns { 1 } else { (16 / size) as i64 };
                        let column = if nth == 1 && !store.v_columns { chunk } else { stride[3] };
                        if column == chunk {
                            memory[nth][base as usize * size..][..bytes.len()].copy_from_slice(bytes);
                        } else {
                            for (d, element) in bytes.chunks_exact(size).enumerate() {
                                let at = (base + d as i64 / chunk * column + d as i64 % chunk) as usize * size;
                                memory[nth][at..at + size].copy_from_slice(element);
                            }
                        }
                        if let (Some(codes), Some(coded)) = (&codes, &coded) {
                            let scale = scales.of(nth, b, h, page, place.token);
                            let bytes = &coded[nth][first..first + tensor.shape()[3]];
                            let row: Vec<f32> = bytes.iter().map(|code| codes.value(*code) * scale).collect();
                            tensor.write_row(at, &row);
                        }
                    }
                }
            }
            let (q, v) = match &ends {
                Some(ends) => (ends.scaled_q(&q, b), ends.scaled_v(&v)),
                None => (q, v),
            };
            inputs.push(SequenceInputs { q, k, v, there });
        }
        let [k, v] = memory;
        self.parts.insert(Part::K, k);
        self.parts.insert(Part::V, v);
        inputs
    }

    fn write_queries(&mut self, q: &HostTensor, sequence: usize, queries: &QueryRows) {
        let size = self.problem.dtype.bytes();
        let stride = self.args.q_stride;
        let [_, heads, rows, _] = q.shape();
        let memory = self.parts.get_mut(&Part::Q).expect("it was made");
        for (h, row) in (0..heads).flat_map(|h| (0..rows).map(move |row| (h, row))) {
            let at = queries.offset(&stride, sequence, h, row) * size;
            let bytes = row_bytes(q, [0, h, row]);
            memory[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Sets the strides of the store and returns how many bytes K and V take.
    fn lay_out_store(&mut self, batch: &RaggedBatch, places: &Places, size: usize) -> [usize; 2] {
        let (heads, tokens) = (i64::from(batch.kv_heads), i64::from(places.page_tokens));
        let chunk = (16 / size) as i64;
        let columns = self.problem.kv.store().is_some_and(|store| store.v_columns);
        let mut bytes = [0; 2];
        for (nth, dim) in [self.problem.head_dim_qk, self.problem.head_dim_v].into_iter().enumerate() {
            let dim = i64::from(dim);
            let (stride, page) = match batch.layout {
                _ if nth == 1 && columns => ([0, 1, dim * tokens, tokens], heads * dim * tokens),
                StoreLayout::Nhd => ([0, heads * dim, dim, chunk], tokens * heads * dim),
                StoreLayout::Chunks if nth == 0 => {
                    let whole = (dim + chunk - 1) / chunk * chunk;
                    ([0, chunk, whole * tokens, chunk * tokens], heads * whole * tokens)
                }
                _ => ([0, dim, tokens * dim, chunk], tokens * heads * dim),
            };
            // Pages begin at whole vectors wherever they lie apart.
            let apart = if batch.apart { (2 * page + 3 * chunk) / chunk * chunk } else { page };
            let stride = [apart, stride[1], stride[2], stride[3]];
            let elements = i64::from(places.pages - 1) * apart + page;
            bytes[nth] = (elements as usize * size).next_multiple_of(16);
            if nth == 0 { self.args.k_stride = stride } else { self.args.v_stride = stride }
        }
        bytes
    }
}

impl QueryRows {
    /// Element of a row of a head, for a tensor's strides.
    pub(super) fn offset(&self, stride: &[i64; 3], sequence: usize, head: usize, row: usize) -> usize {
        let first = match &self.begins {
            Some(begins) => i64::from(begins[sequence]) * stride[2],
            None => sequence as i64 * stride[0],
        };
        (first + head as i64 * stride[1] + row as i64 * stride[2]) as usize
    }
}

/// Keys that some row of a sequence attends to, by the mask.
fn seen_keys(batch: &RaggedBatch, rows: u32, keys: u32) -> std::ops::Range<u32> {
    let live = (0..rows).map(|i| batch.mask.live(i.into(), rows.into(), keys.into())).filter(|live| !live.is_empty());
    let seen = live.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
    seen.start as u32..seen.end as u32
}

fn row_range(t: &HostTensor, [_, h, s]: [usize; 3]) -> std::ops::Range<usize> {
    let [_, _, rows, dim] = t.shape();
    let bytes = dim * t.dtype().bytes();
    let at = (h * rows + s) * bytes;
    at..at + bytes
}

/// The bytes of a row of a contiguous tensor of one sequence.
fn row_bytes(t: &HostTensor, at: [usize; 3]) -> &[u8] {
    &t.bytes()[row_range(t, at)]
}

fn row_bytes_mut(t: &mut HostTensor, at: [usize; 3]) -> &mut [u8] {
    let range = row_range(t, at);
    &mut t.bytes_mut()[range]
}

/// What Q of e4m3 is multiplied by, and an O of e4m3 before it is rounded.
struct Ends {
    /// Of the KV heads of each sequence, by strides; nothing where all are 1.
    q: Vec<f32>,
    stride: [usize; 2],
    /// Query heads of a KV head.
    group: usize,
    o: f32,
}

impl Ends {
    fn draw(data: &mut RaggedData, batch: &RaggedBatch, rng: &mut StdRng) -> Self {
        let (heads, sequences) = (batch.kv_heads as usize, batch.lengths.len());
        let (count, stride) = match batch.scales {
            ScaleForm::One => (0, [0, 0]),
            ScaleForm::Tensor => (1, [0, 0]),
            ScaleForm::Head => (heads, [0, 1]),
            ScaleForm::SequenceHead => (sequences * heads, [heads, 1]),
        };
        let q: Vec<f32> = (0..count).map(|_| rng.random_range(0.5..2.0)).collect();
        if count > 0 {
            data.parts.insert(Part::QScale, bytemuck::cast_slice(&q).to_vec());
            data.args.q_scale_stride = stride.map(|s| s as i64);
        }
        let o = if data.problem.output_dtype() == DType::E4m3 { 2f32.powf(rng.random_range(2.0..8.0)) } else { 1.0 };
        if o != 1.0 {
            data.parts.insert(Part::OScale, o.to_ne_bytes().to_vec());
        }
        Self { q, stride, group: (batch.heads / batch.kv_heads.max(1)) as usize, o }
    }

    /// What the codes of a sequence's Q mean.
    fn scaled_q(&self, q: &HostTensor, sequence: usize) -> HostTensor {
        let [_, _, rows, dim] = q.shape();
        let of = |head: usize| sequence * self.stride[0] + head / self.group * self.stride[1];
        let mut values = q.values();
        for (head, values) in values.chunks_exact_mut((rows * dim).max(1)).enumerate() {
            let by = self.q.get(of(head)).copied().unwrap_or(1.0);
            values.iter_mut().for_each(|x| *x *= by);
        }
        HostTensor::from_values(DType::F32, q.shape(), Layout::Bhsd, &values).expect("as many as there were")
    }

    /// V times what O is multiplied by.
    fn scaled_v(&self, v: &HostTensor) -> HostTensor {
        let values: Vec<f32> = v.values().iter().map(|x| x * self.o).collect();
        HostTensor::from_values(DType::F32, v.shape(), Layout::Bhsd, &values).expect("as many as there were")
    }
}

/// The scales of K and of V.
struct Scales {
    /// Nothing where all are 1.
    values: [Vec<f32>; 2],
    stride: [usize; 3],
    tokens: bool,
}

impl Scales {
    /// Heads differ by a factor of up to 100, tokens by one of up to 4.
    fn draw(data: &mut RaggedData, batch: &RaggedBatch, places: &Places, rng: &mut StdRng) -> Self {
        let (heads, sequences) = (batch.kv_heads as usize, batch.lengths.len());
        let tokens = per_token(&data.problem);
        let element = data.problem.kv.store().unwrap_or_default().element;
        if element == KvElement::Same || batch.scales == ScaleForm::One && !tokens {
            return Self { values: [Vec::new(), Vec::new()], stride: [0; 3], tokens };
        }
        let (pages, page) = (places.pages as usize, places.page_tokens as usize);
        let (count, stride) = match (tokens, batch.scales) {
            // Heads of a token side by side, or tokens of a head.
            (true, _) if batch.layout == StoreLayout::Nhd => (pages * page * heads, [page * heads, 1, heads]),
            (true, _) => (pages * heads * page, [heads * page, page, 1]),
            (_, ScaleForm::One | ScaleForm::Tensor) => (1, [0, 0, 0]),
            (_, ScaleForm::Head) => (heads, [0, 1, 0]),
            (_, ScaleForm::SequenceHead) => (sequences * heads, [heads, 1, 0]),
        };
        let unit = Codes::of(element).scale();
        let head_of = |i: usize| i.checked_div(stride[1]).map_or(0, |nth| nth % heads);
        let mut all = |salt: usize| -> Vec<f32> {
            let factor = |i: usize| [1.0, 0.1, 10.0][(head_of(i) + salt) % 3];
            (0..count).map(|i| unit * factor(i) * rng.random_range(0.5..2.0)).collect()
        };
        let this = Self { values: [all(0), all(1)], stride, tokens };
        for (values, part) in this.values.iter().zip([Part::KScale, Part::VScale]) {
            data.parts.insert(part, values.iter().flat_map(|x| x.to_ne_bytes()).collect());
        }
        let strides = stride.map(|s| s as i64);
        (data.args.k_scale_stride, data.args.v_scale_stride) = (strides, strides);
        this
    }

    fn of(&self, nth: usize, sequence: usize, head: u32, page: u32, token: u32) -> f32 {
        let first = if self.tokens { page as usize } else { sequence };
        let at = first * self.stride[0] + head as usize * self.stride[1] + token as usize * self.stride[2];
        self.values[nth].get(at).copied().unwrap_or(1.0)
    }
}
