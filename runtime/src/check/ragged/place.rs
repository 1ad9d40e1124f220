//! Where the keys of a batch are in its store: the arrays that a kernel finds them by, and the pages that they are in.

use super::batch::{Index, LengthsBy, RaggedBatch};
use super::{Part, Parts};
use flashtune_codegen::abi::RaggedArgs;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// The tokens of one sequence.
pub(super) struct Row {
    /// Place of the first key in the row.
    first: u32,
    /// Which page of K and of V each page of the row is, and whether a kernel is told of both.
    pages: Vec<Page>,
}

#[derive(Clone, Copy)]
struct Page {
    k: u32,
    v: u32,
    there: bool,
}

/// Where a key is.
pub(super) struct Place {
    pub(super) k_page: u32,
    pub(super) v_page: u32,
    pub(super) token: u32,
    /// Kernels are told of it.
    pub(super) there: bool,
}

/// The store of a batch, as far as it is the same for all element types.
pub(super) struct Places {
    pub(super) rows: Vec<Row>,
    pub(super) pages: u32,
    pub(super) page_tokens: u32,
    /// The bound of the lengths.
    pub(super) most: u32,
}

impl Places {
    /// Where key `t` of a sequence is.
    pub(super) fn of(&self, sequence: usize, t: u32) -> Place {
        let row = &self.rows[sequence];
        let place = row.first + t;
        let page = row.pages[(place / self.page_tokens) as usize];
        Place { k_page: page.k, v_page: page.v, token: place % self.page_tokens, there: page.there }
    }

    /// Draws what the batch leaves open, and writes the arrays.
    pub(super) fn draw(batch: &RaggedBatch, args: &mut RaggedArgs, parts: &mut Parts, rng: &mut StdRng) -> Self {
        let count = batch.lengths.len();
        let by_index = batch.index_says_lengths();
        let pads: Vec<u32> = (0..count).map(|_| if batch.left_pad { rng.random_range(0..=9) } else { 0 }).collect();
        // A sequence without keys may be nothing but padding, and less of it than is said.
        let lengths = batch.lengths.iter().zip(&pads);
        let totals: Vec<u32> =
            lengths.map(|([_, keys], pad)| if *keys == 0 { rng.random_range(0..=*pad) } else { keys + pad }).collect();
        let longest = totals.iter().copied().max().unwrap_or(0);
        let fixed = by_index && batch.index == Index::Slots;
        let spare = if batch.spare && !fixed { rng.random_range(1..=70) } else { 0 };
        args.table_words = if batch.wide[0] { 2 } else { 1 };
        args.length_words = if batch.wide[1] { 2 } else { 1 };
        let words = |numbers: &[i64], wide: bool| encode(numbers, wide);
        let ints = |numbers: &[u32]| words(&numbers.iter().map(|n| i64::from(*n)).collect::<Vec<_>>(), batch.wide[1]);

        if batch.left_pad {
            parts.insert(Part::LeftPad, ints(&pads));
        }
        if !by_index {
            let gained: Vec<u32> = match batch.lengths_by {
                LengthsBy::Added => vec![totals.iter().copied().min().unwrap_or(0).min(5); count],
                LengthsBy::AddedEach => totals.iter().map(|n| rng.random_range(0..=(*n).min(7))).collect(),
                LengthsBy::Array | LengthsBy::Index => vec![0; count],
            };
            match batch.lengths_by {
                LengthsBy::Added => args.kv_added = gained.first().map_or(0, |n| *n as i32),
                LengthsBy::AddedEach => drop(parts.insert(Part::KvAddedBegin, ints(&sums(&gained)))),
                LengthsBy::Array | LengthsBy::Index => {}
            }
            let before: Vec<u32> = totals.iter().zip(&gained).map(|(n, gained)| n - gained).collect();
            parts.insert(Part::KvLengths, ints(&before));
        }
        let page = |k, v| Page { k, v, there: true };
        let mut places = match batch.index {
            Index::Packed => {
                let gap = |rng: &mut StdRng| if by_index { 0 } else { rng.random_range(0..=4) };
                let spans: Vec<u32> = totals.iter().map(|n| n + gap(rng)).collect();
                let begins = sums(&spans);
                parts.insert(Part::KvBegin, ints(&begins));
                let rows = begins[..count].iter().map(|first| Row { first: *first, pages: vec![page(0, 0)] }).collect();
                let page_tokens = (begins[count] + rng.random_range(0..3)).max(1);
                Self { rows, pages: 1, page_tokens, most: longest + spare }
            }
            Index::Slots => {
                let pages = if batch.shuffled { count + 2 } else { count };
                let mut slots: Vec<u32> = (0..pages as u32).collect();
                if batch.shuffled {
                    slots.shuffle(rng);
                }
                let rows = slots[..count].iter().map(|slot| Row { first: 0, pages: vec![page(*slot, *slot)] });
                let page_tokens = (longest + rng.random_range(0..5)).max(1);
                Self { rows: rows.collect(), pages: pages as u32, page_tokens, most: longest + spare }
            }
            Index::Table | Index::Csr => {
                let needed: Vec<u32> = totals.iter().map(|n| n.div_ceil(batch.page_tokens)).collect();
                let pages = needed.iter().sum::<u32>() + 2;
                let ids = |rng: &mut StdRng| {
                    let mut ids: Vec<u32> = (0..pages).collect();
                    if batch.shuffled {
                        ids.shuffle(rng);
                    }
                    ids
                };
                let k = ids(rng);
                let v = if batch.own_v_table { ids(rng) } else { k.clone() };
                let mut all = k.into_iter().zip(v).map(|(k, v)| page(k, v));
                let rows = needed.iter().map(|n| Row { first: 0, pages: all.by_ref().take(*n as usize).collect() });
                Self { rows: rows.collect(), pages, page_tokens: batch.page_tokens, most: longest + spare }
            }
        };
        if batch.index == Index::Csr && by_index {
            let last = |n: &u32| if *n == 0 { 0 } else { (n - 1) % batch.page_tokens + 1 };
            let lasts: Vec<u32> = totals.iter().map(last).collect();
            // Left out where all pages are full.
            if lasts.iter().zip(&totals).any(|(last, n)| *last != batch.page_tokens && *n > 0) {
                parts.insert(Part::LastPage, ints(&lasts));
            }
        }
        places.write_tables(batch, args, parts, rng);
        for (row, pad) in places.rows.iter_mut().zip(&pads) {
            row.first += pad;
        }
        args.pages = places.pages.into();
        args.page_tokens = places.page_tokens as i32;
        places
    }

    /// The table, the array of pages or that of slots, with pages that are none.
    fn write_tables(&mut self, batch: &RaggedBatch, args: &mut RaggedArgs, parts: &mut Parts, rng: &mut StdRng) {
        let wide = batch.wide[0];
        let pages = i64::from(self.pages);
        let none = |rng: &mut StdRng| {
            let of_any = [-1, pages, i64::from(i32::MAX), i64::from(i32::MIN)];
            // The lower word of some is that of a page.
            let of_wide = [1 << 32, i64::MIN, (1 << 32) + pages - 1];
            let kinds = of_any.len() + if wide { of_wide.len() } else { 0 };
            let nth = rng.random_range(0..kinds);
            of_any.into_iter().chain(of_wide).nth(nth).expect("one of them")
        };
        if batch.index == Index::Packed || batch.index == Index::Slots && !batch.shuffled {
            return;
        }
        let (mut k, mut v): (Vec<Vec<i64>>, Vec<Vec<i64>>) = (Vec::new(), Vec::new());
        for row in &mut self.rows {
            let (mut k_row, mut v_row) = (Vec::new(), Vec::new());
            for page in &mut row.pages {
                let mut ids = [i64::from(page.k), i64::from(page.v)];
                if batch.holes && rng.random_bool(0.25) {
                    page.there = false;
                    match (batch.own_v_table && batch.index != Index::Slots, rng.random_range(0..3)) {
                        (false, _) => ids = [none(rng); 2],
                        (true, 0) => ids[0] = none(rng),
                        (true, 1) => ids[1] = none(rng),
                        (true, _) => ids = [none(rng), none(rng)],
                    }
                }
                k_row.push(ids[0]);
                v_row.push(ids[1]);
            }
            k.push(k_row);
            v.push(v_row);
        }
        match batch.index {
            Index::Packed => {}
            Index::Slots => drop(parts.insert(Part::Slots, encode(&k.concat(), wide))),
            Index::Csr => {
                let counts: Vec<u32> = k.iter().map(|row| row.len() as u32).collect();
                let begins: Vec<i64> = sums(&counts).into_iter().map(i64::from).collect();
                parts.insert(Part::PagesBegin, encode(&begins, batch.wide[1]));
                parts.insert(Part::KTable, encode(&k.concat(), wide));
                if batch.own_v_table {
                    parts.insert(Part::VTable, encode(&v.concat(), wide));
                }
            }
            Index::Table => {
                let longest = k.iter().map(Vec::len).max().unwrap_or(0);
                let stride = (longest + rng.random_range(0..3)).max(1);
                args.table_stride = stride as i64;
                let last = k.len().saturating_sub(1);
                let mut padded = |rows: &[Vec<i64>]| {
                    let mut all = Vec::new();
                    for (nth, row) in rows.iter().enumerate() {
                        all.extend(row);
                        // Behind the last sequence's pages the table may end.
                        let more = if nth == last { 0 } else { stride - row.len() };
                        all.extend(
                            (0..more).map(|_| if rng.random() { none(rng) } else { rng.random_range(0..pages) }),
                        );
                    }
                    encode(&all, wide)
                };
                parts.insert(Part::KTable, padded(&k));
                if batch.own_v_table {
                    parts.insert(Part::VTable, padded(&v));
                }
            }
        }
    }
}

/// Integers of 32 or 64 bits.
pub(super) fn encode(numbers: &[i64], wide: bool) -> Vec<u8> {
    match wide {
        true => numbers.iter().flat_map(|n| n.to_ne_bytes()).collect(),
        false => numbers.iter().flat_map(|n| (*n as i32).to_ne_bytes()).collect(),
    }
}

/// 0 and the sums of the first, the first two, and so on.
pub(super) fn sums(numbers: &[u32]) -> Vec<u32> {
    let mut sum = 0;
    let sums = numbers.iter().map(|n| {
        sum += n;
        sum
    });
    std::iter::once(0).chain(sums).collect()
}
