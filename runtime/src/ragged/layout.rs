//! What calls over a KV store check alike, attention and appends: numbers that kernels count, where rows of a store
//! lie, and the memory that they span.

use super::{Index, IntKind, Ints, Scales, Store, StoreRows, StoreType};
use crate::tensor::error;
use crate::{Error, Result};
use flashtune_codegen::{DType, Error as CodegenError, KvElement};

/// What kernels read in one step, and what rows of K in pieces are made of, in bytes.
pub(crate) const PIECE: u64 = 16;
/// Rows and keys of a sequence: kernels count them in 32 bits and add a block to the last.
pub(crate) const LONGEST: u64 = 1 << 30;
/// Rows of a pack, pages, tokens of a page, entries: what kernels count in 32 bits with a sign.
pub(crate) const MOST: u64 = i32::MAX as u64;

/// A dimension: its length, its stride in elements, and what the stride is called.
pub(crate) type Dim = (u64, i64, &'static str);

/// What is told of a range of memory: its name, address and size in bytes.
pub(crate) type EachRange<'a> = dyn FnMut(&'static str, u64, u64) -> Result<()> + 'a;

#[cold]
pub(crate) fn unsupported<T>(
    field: &'static str,
    value: impl ToString,
    limit: impl Into<String>,
    remedy: &str,
) -> Result<T> {
    Err(Error::Codegen(CodegenError::unsupported(field, value, limit, remedy)))
}

pub(crate) fn number(field: &'static str, n: u64, most: u64, remedy: &str) -> Result<u32> {
    if n > most {
        return unsupported(field, n, format!("it is at most {most}"), remedy);
    }
    Ok(n as u32)
}

/// 32-bit words of integers in arrays that kernels take in one size; 1 without any.
pub(crate) fn common_words<const N: usize>(arrays: [Option<(&'static str, Ints)>; N]) -> Result<i32> {
    let mut first: Option<(&str, IntKind)> = None;
    for (name, ints) in arrays.into_iter().flatten() {
        match first {
            None => first = Some((name, ints.kind)),
            Some((other, kind)) if kind.bytes() != ints.kind.bytes() => {
                let expected = format!("{other} is {}, and all lengths and first rows have one size", kind.name());
                return Err(error(name, "dtype", ints.kind.name(), expected, "convert one of them"));
            }
            Some(_) => {}
        }
    }
    Ok(first.map_or(1, |(_, kind)| (kind.bytes() / 4) as i32))
}

impl Ints {
    /// 32-bit words of one.
    pub(crate) const fn words(self) -> i32 {
        (self.kind.bytes() / 4) as i32
    }
}

impl Index {
    /// K's table and V's.
    pub(crate) fn tables(&self) -> Option<(Ints, Ints)> {
        match *self {
            Index::Table { k, v, .. } | Index::Csr { k, v, .. } => {
                Some((k, Ints { address: v.unwrap_or(k.address), ..k }))
            }
            Index::Dense { .. } | Index::Packed { .. } => None,
        }
    }

    pub(crate) fn slots(&self) -> Option<Ints> {
        match *self {
            Index::Dense { slots } => slots,
            _ => None,
        }
    }

    /// Refuses bounds that a cache or a row of a table has no room for.
    pub(crate) fn check_room(&self, store: &Store, batch: u64, max_kv: u64) -> Result<()> {
        let Store { pages, page_tokens, .. } = *store;
        match *self {
            Index::Dense { slots } => {
                if max_kv > page_tokens {
                    let limit = format!("a sequence of the cache has room for {page_tokens} tokens");
                    return unsupported("max_kv", max_kv, limit, "name a bound that the cache can hold");
                }
                if slots.is_none() && max_kv > 0 && pages < batch {
                    let limit = format!("there are {batch} sequences, each with a page of its own");
                    return unsupported("pages", pages, limit, "give `slots`, which say the page of each sequence");
                }
            }
            Index::Table { stride, capacity, .. } => {
                if u128::from(capacity) * u128::from(page_tokens) < u128::from(max_kv) {
                    let limit = format!("a row of the table has {capacity} pages of {page_tokens} tokens");
                    return unsupported("max_kv", max_kv, limit, "give a table with more entries, or a smaller bound");
                }
                if batch > 1 && stride < 0 {
                    let remedy = "make the table contiguous";
                    return Err(error("k_table", "stride", stride, "strides are not negative", remedy));
                }
            }
            Index::Packed { .. } | Index::Csr { .. } => {}
        }
        Ok(())
    }
}

impl StoreRows {
    /// Whether the tokens of V lie side by side.
    pub(crate) fn has_columns(&self) -> bool {
        self.inner.is_some_and(|stride| stride != 1)
    }
}

impl Store {
    /// Elements of K in 16 bytes.
    pub(crate) fn k_piece(&self) -> u64 {
        PIECE / self.k.element.bytes() as u64
    }

    /// Refuses K and V of different elements, and floats that are not `dtype`, which is that of `whose` rows.
    pub(crate) fn check_elements(&self, dtype: DType, whose: &str, remedy: &'static str) -> Result<()> {
        for (name, element) in [("k", self.k.element), ("v", self.v.element)] {
            if let StoreType::Float(stored) = element
                && stored != dtype
            {
                return Err(error(name, "dtype", stored, format!("{whose} {dtype}"), remedy));
            }
        }
        if self.v.element.name() != self.k.element.name() {
            let expected = format!("K is {}", self.k.element.name());
            return Err(error("v", "dtype", self.v.element.name(), expected, "keep K and V in one type"));
        }
        Ok(())
    }

    /// The dimensions of K but the last, which is contiguous, and the length of that.
    pub(crate) fn k_dims(&self, head_dim: u64) -> ([Dim; 4], u64) {
        self.dims(&self.k, head_dim, self.k_piece())
    }

    /// The same of V.
    pub(crate) fn v_dims(&self) -> ([Dim; 4], u64) {
        self.dims(&self.v, self.head_dim_v, 1)
    }

    fn dims(&self, which: &StoreRows, row: u64, piece: u64) -> ([Dim; 4], u64) {
        let [page, token, head] = which.strides;
        let (pieces, inner, last) = match which.inner {
            Some(stride) => (row / piece, stride, piece),
            None => (1, 0, row),
        };
        let dims = [
            (self.pages, page, "page stride"),
            (self.page_tokens, token, "token stride"),
            (self.kv_heads, head, "head stride"),
            (pieces, inner, "inner stride"),
        ];
        (dims, last)
    }

    /// Strides of K and V as kernels take them: 0 along what there is one of.
    pub(crate) fn taken_strides(&self) -> [[i64; 4]; 2] {
        let n = [self.pages, self.page_tokens, self.kv_heads];
        let taken = |which: &StoreRows, inner| {
            let [page, token, head] = std::array::from_fn(|i| if n[i] > 1 { which.strides[i] } else { 0 });
            [page, token, head, which.inner.unwrap_or(inner)]
        };
        [taken(&self.k, self.k_piece() as i64), taken(&self.v, 1)]
    }

    /// Pages and tokens of a page as kernels take them. A store without tokens has no page either: nothing is divided
    /// by 0, and every identifier is none.
    pub(crate) fn taken_pages(&self) -> (i64, i32) {
        (if self.page_tokens == 0 { 0 } else { self.pages as i64 }, self.page_tokens.max(1) as i32)
    }

    /// Refuses scales beside elements that have none.
    pub(crate) fn check_scale(&self, name: &'static str, scales: Scales) -> Result<()> {
        if scales != Scales::One && self.k.element.element() == KvElement::Same {
            let expected = format!("the elements of the store are {}", self.k.element.name());
            let remedy = "leave scales out: they belong to e4m3, e5m2 and int8";
            return Err(error(name, "address", "given", expected, remedy));
        }
        Ok(())
    }

    /// Calls with the memory of K, V and their scales for so many sequences, after checking its layout.
    pub(crate) fn ranges(&self, head_dim: u64, sequences: u64, f: &mut EachRange<'_>) -> Result<()> {
        if self.pages == 0 || self.page_tokens == 0 {
            return Ok(());
        }
        if self.k.inner.is_some() && !head_dim.is_multiple_of(self.k_piece()) {
            let expected = format!("rows of {head_dim} elements are not made of whole pieces of 16 bytes");
            return Err(error("k", "inner stride", "given", expected, "keep rows of K contiguous"));
        }
        for (name, which, (dims, last)) in [("k", &self.k, self.k_dims(head_dim)), ("v", &self.v, self.v_dims())] {
            f(name, which.address, span(name, which.address, &dims, last, which.element.bytes() as u64)?)?;
        }
        for (name, scales) in [("k_scale", self.k.scales), ("v_scale", self.v.scales)] {
            let heads = |stride| (self.kv_heads, stride, "head stride");
            let (address, bytes) = match scales {
                Scales::One => continue,
                Scales::PerHead { address, strides: [sequence, head] } => {
                    let dims = [(sequences, sequence, "sequence stride"), heads(head)];
                    (address, span(name, address, &dims, 1, 4)?)
                }
                Scales::PerToken { address, strides: [page, head, token] } => {
                    let pages = (self.pages, page, "page stride");
                    let dims = [pages, heads(head), (self.page_tokens, token, "token stride")];
                    (address, span(name, address, &dims, 1, 4)?)
                }
            };
            f(name, address, bytes)?;
        }
        Ok(())
    }
}

/// Bytes from the first element to the last one's end, of rows of so many contiguous elements.
pub(crate) fn span(name: &'static str, address: u64, dims: &[Dim], row: u64, element: u64) -> Result<u64> {
    if address == 0 {
        return Err(error(name, "address", "null", "what is read or written has memory", "allocate it first"));
    }
    if !address.is_multiple_of(element) {
        let expected = format!("elements of {element} bytes are read whole");
        let remedy = "slice the tensor at a whole element";
        return Err(error(name, "address", format!("{address:#x}"), expected, remedy));
    }
    let mut last = 0i128;
    for &(n, stride, field) in dims.iter().filter(|(n, ..)| *n > 1) {
        if stride < 0 {
            return Err(error(name, field, stride, "strides are not negative", "make the tensor contiguous"));
        }
        last += i128::from(n - 1) * i128::from(stride);
    }
    // Kernels count elements in 64 bits with a sign.
    let bytes = (last + i128::from(row)) * i128::from(element);
    if bytes > i128::from(i64::MAX) || bytes + i128::from(address) > i128::from(u64::MAX) {
        let found = format!(
            "{:?} by {:?}",
            dims.iter().map(|d| d.0).collect::<Vec<_>>(),
            dims.iter().map(|d| d.1).collect::<Vec<_>>()
        );
        let expected = "the tensor ends within 64-bit addresses";
        return Err(error(name, "extent", found, expected, "check sizes and strides"));
    }
    Ok(bytes as u64)
}
