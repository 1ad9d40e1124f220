//! What a call over a ragged batch comes down to, and what every refusal names.

use super::*;
use crate::Error;
use flashtune_codegen::score::Program;
use flashtune_codegen::{KvKind, KvScales, KvStore};

const Q: u64 = 0x10_0000;
const K: u64 = 0x20_0000;
const V: u64 = 0x30_0000;
const O: u64 = 0x40_0000;

/// Four tokens for 3 sequences beside pages of 16 tokens in `[pages, page_tokens, kv_heads, head_dim]`.
fn paged() -> RaggedBatch {
    let (heads, kv_heads, dim) = (8, 2, 64i64);
    let rows = |address| StoreRows::new(address, StoreType::Float(DType::Bf16), [16 * 2 * dim, 2 * dim, dim]);
    RaggedBatch {
        queries: Queries {
            address: Q,
            dtype: DType::Bf16,
            heads,
            head_dim: 64,
            strides: [0, dim, 8 * dim],
            rows: QueryRows::Packed { begin: Ints::i32(0x1000) },
            used: None,
            tree: None,
        },
        store: Store { k: rows(K), v: rows(V), head_dim_v: 64, kv_heads, pages: 40, page_tokens: 16 },
        index: Index::Table { k: Ints::i32(0x2000), v: None, stride: 12, capacity: 10 },
        keys: KeyLengths::Each { lengths: Ints::i32(0x3000), added: Added::Nothing },
        left_pad: None,
        output: Output {
            address: O,
            dtype: DType::Bf16,
            strides: [0, dim, 8 * dim],
            lse: Some(Lse { address: 0x5000, strides: [0, 4, 1], base: LogBase::E, empty: f32::NEG_INFINITY }),
        },
        bounds: Bounds { batch: 3, total_q: 4, max_q: 2, max_kv: 160 },
        expected: Expected::default(),
    }
}

/// A cache of 5 sequences without a table, 2 of which have one row each.
fn dense() -> RaggedBatch {
    let good = paged();
    RaggedBatch {
        queries: Queries { rows: QueryRows::Uniform, strides: [2048, 64, 512], ..good.queries },
        store: Store { pages: 5, page_tokens: 160, ..good.store },
        index: Index::Dense { slots: Some(Ints::i32(0x2000)) },
        output: Output { strides: [2048, 64, 512], lse: None, ..good.output },
        bounds: Bounds { batch: 2, total_q: 0, max_q: 1, max_kv: 160 },
        ..good
    }
}

fn call(batch: &RaggedBatch) -> Result<RaggedCall> {
    ragged_call(batch, Mask::Causal, None)
}

/// Changes a good call and says what the error blames: tensor and field, or the field of what is not supported.
fn blamed(good: RaggedBatch, change: impl FnOnce(&mut RaggedBatch)) -> (&'static str, &'static str) {
    let mut batch = good;
    change(&mut batch);
    let error = call(&batch).expect_err("it is refused");
    assert!(error.to_string().contains("; "), "it names a remedy: {error}");
    match error {
        Error::Tensor { tensor, field, .. } => (tensor, field),
        Error::Codegen(flashtune_codegen::Error::Unsupported { field, .. }) => ("", field),
        e => panic!("{e}"),
    }
}

fn accepted(good: RaggedBatch, change: impl FnOnce(&mut RaggedBatch)) -> RaggedCall {
    let mut batch = good;
    change(&mut batch);
    call(&batch).expect("it is legal")
}

#[test]
fn arguments_follow_a_paged_call() {
    let c = call(&paged()).unwrap();
    assert_eq!(c.problem.to_string(), "forward-bf16-d64-causal-ragged");
    assert_eq!((c.shape.to_string().as_str(), c.aligned), ("b3 h8/2 2x160 causal", true));
    let a = c.args;
    assert_eq!((a.q, a.k, a.v, a.o, a.lse), (Q, K, V, O, 0x5000));
    assert_eq!((a.k_table, a.v_table, a.table_stride, a.pages, a.page_tokens), (0x2000, 0x2000, 12, 40, 16));
    assert_eq!((a.q_begin, a.kv_lengths, a.kv_begin, a.slots, a.pages_begin), (0x1000, 0x3000, 0, 0, 0));
    assert_eq!((a.q_stride, a.lse_stride), ([0, 64, 512], [0, 4, 1]));
    assert_eq!((a.k_stride, a.v_stride), ([2048, 128, 64, 8], [2048, 128, 64, 1]));
    assert_eq!((a.batch, a.heads, a.kv_heads, a.q_len, a.kv_len), (3, 8, 2, 2, 160));
    assert_eq!((a.table_words, a.length_words, a.window_left, a.window_right), (1, 1, i32::MAX, 0));
    assert_eq!((a.scale, a.lse_unit, a.lse_empty, a.side), (0.125, 1.0, f32::NEG_INFINITY, 0));
}

#[test]
fn every_index_and_kind_of_lengths_has_its_arguments() {
    let table = Index::Table { k: Ints::i64(0x2000), v: Some(0x2800), stride: 12, capacity: 10 };
    let a = accepted(paged(), |b| b.index = table).args;
    assert_eq!((a.k_table, a.v_table, a.table_words), (0x2000, 0x2800, 2));

    let unsigned = Ints { address: 0x2000, kind: IntKind::U32 };
    let csr = |v| Index::Csr { begin: Ints::i32(0x6000), k: unsigned, v };
    let last_page = KeyLengths::LastPage { tokens: Ints::i32(0x7000) };
    let a = accepted(paged(), |b| (b.index, b.keys) = (csr(Some(0x2400)), last_page)).args;
    assert_eq!((a.pages_begin, a.k_table, a.v_table, a.last_page), (0x6000, 0x2000, 0x2400, 0x7000));
    assert_eq!((a.kv_lengths, a.table_words, a.length_words), (0, 1, 1));

    let added = |added| KeyLengths::Each { lengths: Ints::i32(0x3000), added };
    assert_eq!(accepted(paged(), |b| b.keys = added(Added::Rows(2))).args.kv_added, 2);
    let packed = Added::Packed { begin: Ints::i32(0x1000) };
    let a = accepted(paged(), |b| b.keys = added(packed)).args;
    assert_eq!((a.kv_lengths, a.kv_added_begin, a.kv_added), (0x3000, 0x1000, 0));
    let a = accepted(paged(), |b| b.keys = KeyLengths::Cumulative { sums: Ints::i32(0x3000) }).args;
    assert_eq!((a.kv_lengths, a.kv_added_begin), (0, 0x3000));

    let a = accepted(dense(), |b| b.left_pad = Some(Ints::i32(0x8000))).args;
    assert_eq!((a.slots, a.k_table, a.pages, a.page_tokens, a.left_pad), (0x2000, 0, 5, 160, 0x8000));
    assert_eq!((a.q_stride, a.q_begin), ([2048, 64, 0], 0));

    let pack = |b: &mut RaggedBatch| {
        b.store = Store { pages: 1, page_tokens: 300, ..b.store };
        (b.index, b.keys) = (Index::Packed { begin: Ints::i32(0x9000) }, KeyLengths::OfIndex);
        b.queries.used = Some(Ints::i32(0x9100));
    };
    let a = accepted(paged(), pack).args;
    assert_eq!((a.kv_begin, a.kv_lengths, a.q_lengths, a.pages, a.page_tokens), (0x9000, 0, 0x9100, 1, 300));
    assert_eq!(a.k_stride, [0, 128, 64, 8]);
}

#[test]
fn packed_pieces_of_k_and_columns_of_v_have_strides() {
    // [pages, kv_heads, head_dim / 8, page_tokens, 8] beside [pages, kv_heads, head_dim, page_tokens].
    let pieces = |b: &mut RaggedBatch| {
        b.store.k = StoreRows { strides: [2048, 8, 1024], inner: Some(128), ..b.store.k };
        b.store.v = StoreRows { strides: [2048, 1, 1024], inner: Some(16), ..b.store.v };
    };
    let c = accepted(paged(), pieces);
    assert_eq!((c.args.k_stride, c.args.v_stride, c.aligned), ([2048, 8, 1024, 128], [2048, 1, 1024, 16], true));
    assert_eq!(c.problem.kv, KvKind::Ragged(KvStore { v_columns: true, ..KvStore::default() }));
    let wrong = |b: &mut RaggedBatch| {
        pieces(b);
        b.store.v.strides[1] = 2;
    };
    assert_eq!(blamed(paged(), wrong), ("v", "token stride"));
    let half = |b: &mut RaggedBatch| {
        pieces(b);
        b.store.k.element = StoreType::E4m3;
        b.store.v.element = StoreType::E4m3;
        b.queries.head_dim = 72;
    };
    assert_eq!(blamed(paged(), half), ("k", "inner stride"));
    // A stride of 1 between columns says that rows are contiguous.
    assert_eq!(accepted(paged(), |b| b.store.v.inner = Some(1)).problem.kv, KvKind::RAGGED);
}

#[test]
fn quantised_stores_have_scales_of_five_shapes() {
    let quantised = |k, v| {
        move |b: &mut RaggedBatch| {
            for rows in [&mut b.store.k, &mut b.store.v] {
                rows.element = StoreType::E4m3;
            }
            (b.store.k.scales, b.store.v.scales) = (k, v);
        }
    };
    let per_head = |strides| Scales::PerHead { address: 0xa000, strides };
    let per_token = |strides| Scales::PerToken { address: 0xb000, strides };
    let kind = |scales| KvKind::Ragged(KvStore { element: KvElement::E4m3, scales, v_columns: false });
    for strides in [[0, 0], [0, 1], [2, 1]] {
        let c = accepted(paged(), quantised(per_head(strides), Scales::One));
        assert_eq!((c.problem.kv, c.args.k_scale, c.args.v_scale), (kind(KvScales::PerHead), 0xa000, 0));
        assert_eq!(c.args.k_scale_stride, [strides[0], strides[1], 0]);
    }
    let c = accepted(paged(), quantised(per_token([32, 16, 1]), per_head([0, 1])));
    assert_eq!((c.problem.kv, c.args.v_scale_stride), (kind(KvScales::PerToken), [0, 1, 0]));
    let mixed = quantised(per_token([32, 16, 1]), per_head([2, 1]));
    assert_eq!(blamed(paged(), mixed), ("v_scale", "sequence stride"));
    assert_eq!(blamed(paged(), quantised(per_head([-1, 1]), Scales::One)), ("k_scale", "sequence stride"));
    assert_eq!(blamed(paged(), |b| b.store.k.scales = per_head([0, 0])), ("k_scale", "address"));
    assert_eq!(blamed(paged(), quantised(Scales::PerHead { address: 0, strides: [0; 2] }, Scales::One)).1, "address");
}

#[test]
fn queries_of_e4m3_stand_beside_stores_of_8_bits_and_have_a_scale() {
    let narrow = |store: StoreType, output| {
        move |b: &mut RaggedBatch| {
            (b.queries.dtype, b.output.dtype) = (DType::E4m3, output);
            for rows in [&mut b.store.k, &mut b.store.v] {
                rows.element = store;
            }
        }
    };
    for store in [StoreType::E4m3, StoreType::Float(DType::E4m3), StoreType::E5m2, StoreType::Int8] {
        for output in DType::OUTPUTS_OF_E4M3 {
            let c = accepted(paged(), narrow(store, output));
            assert_eq!((c.problem.dtype, c.problem.output_dtype()), (DType::E4m3, output));
            assert_eq!(c.problem.kv.store().unwrap().element, store.element());
        }
    }
    assert_eq!(blamed(paged(), narrow(StoreType::Float(DType::Bf16), DType::Bf16)), ("k", "dtype"));
    let c = accepted(paged(), narrow(StoreType::E4m3, DType::E4m3));
    let heads = |address, strides| Scales::PerHead { address, strides };
    let scaled = c.with_query_scale(heads(0xc000, [2, 1])).unwrap().with_output_scale(0xd000).unwrap();
    assert_eq!((scaled.args.q_scale, scaled.args.q_scale_stride, scaled.args.o_scale), (0xc000, [2, 1], 0xd000));
    assert_eq!(c.with_query_scale(Scales::One).unwrap(), c);
    let wide = accepted(paged(), |_| ());
    let tokens = Scales::PerToken { address: 0xc000, strides: [0; 3] };
    for (call, scale, word) in [
        (wide, heads(0xc000, [0, 0]), "dtype of Q"),
        (c, heads(0, [0, 0]), "not null"),
        (c, heads(0xc002, [0, 0]), "a multiple of 4 bytes"),
        (c, heads(0xc000, [-1, 0]), "not negative"),
        (c, tokens, "by token"),
    ] {
        let e = call.with_query_scale(scale).unwrap_err().to_string();
        assert!(e.contains("q_scale") && e.contains(word), "{word}: {e}");
    }
    let e = accepted(paged(), narrow(StoreType::E4m3, DType::Bf16)).with_output_scale(0xd000).unwrap_err().to_string();
    assert!(e.contains("o_scale") && e.contains("bf16"), "{e}");
}

#[test]
fn types_that_do_not_go_together_are_refused() {
    let float = StoreType::Float;
    assert_eq!(blamed(paged(), |b| b.store.k.element = float(DType::F16)), ("k", "dtype"));
    assert_eq!(blamed(paged(), |b| b.store.v.element = float(DType::F16)), ("v", "dtype"));
    assert_eq!(blamed(paged(), |b| b.store.v.element = StoreType::Int8), ("v", "dtype"));
    assert_eq!(blamed(paged(), |b| b.output.dtype = DType::F16), ("o", "dtype"));
    let exact = |b: &mut RaggedBatch| {
        (b.queries.dtype, b.output.dtype) = (DType::F32, DType::F32);
        (b.store.k.element, b.store.v.element) = (StoreType::E5m2, StoreType::E5m2);
    };
    assert_eq!(blamed(paged(), exact), ("q", "dtype"));
    // Sizes of integers: one for lengths and first rows, one for tables.
    assert_eq!(blamed(paged(), |b| b.left_pad = Some(Ints::i64(0x8000))), ("left_pad", "dtype"));
    assert_eq!(blamed(paged(), |b| b.queries.used = Some(Ints::i64(0x8000))), ("q_lengths", "dtype"));
    let unsigned = Some(Ints { address: 0x8000, kind: IntKind::U32 });
    assert_eq!(accepted(paged(), |b| b.left_pad = unsigned).args.length_words, 1);
    let wide = |b: &mut RaggedBatch| {
        b.queries.rows = QueryRows::Packed { begin: Ints::i64(0x1000) };
        b.keys = KeyLengths::Each { lengths: Ints::i64(0x3000), added: Added::Rows(1) };
    };
    assert_eq!(accepted(paged(), wide).args.length_words, 2);
}

#[test]
fn what_no_kernel_computes_is_refused_by_name() {
    assert_eq!(blamed(paged(), |b| b.queries.tree = Some(0x8000)), ("", "tree"));
    for dim in [0, 257, 260, 576] {
        assert_eq!(blamed(paged(), |b| b.queries.head_dim = dim), ("", "head_dim_qk"), "{dim}");
    }
    // Latent rows whose first part is V.
    let latent = |b: &mut RaggedBatch| {
        (b.queries.head_dim, b.store.head_dim_v, b.store.v.address) = (576, 512, K);
    };
    assert_eq!(blamed(paged(), latent), ("", "head_dim_qk"));
    assert_eq!(blamed(paged(), |b| b.store.head_dim_v = 512), ("", "head_dim_v"));
    assert_eq!(blamed(paged(), |b| b.store.kv_heads = 3), ("", "heads"));
    assert_eq!(blamed(paged(), |b| b.bounds.max_q = (1 << 30) + 1), ("", "max_q"));
    assert_eq!(blamed(paged(), |b| b.bounds.max_kv = (1 << 30) + 1), ("", "max_kv"));
    assert_eq!(blamed(paged(), |b| b.bounds.batch = 1 << 31), ("", "batch"));
    assert_eq!(blamed(paged(), |b| b.bounds.total_q = 1 << 31), ("", "total_q"));
    assert_eq!(blamed(paged(), |b| b.store.pages = 1 << 31), ("", "pages"));
    assert_eq!(blamed(paged(), |b| b.store.page_tokens = 1 << 31), ("", "page_tokens"));
    let added = KeyLengths::Each { lengths: Ints::i32(0x3000), added: Added::Rows(1 << 31) };
    assert_eq!(blamed(paged(), |b| b.keys = added), ("", "kv_added"));
    for scale in [f32::NAN, f32::INFINITY] {
        assert!(ragged_call(&paged(), Mask::Full, Some(scale)).unwrap_err().to_string().contains("scale"));
    }
}

#[test]
fn an_index_without_room_for_the_bounds_is_refused() {
    assert_eq!(blamed(paged(), |b| b.bounds.max_kv = 161), ("", "max_kv"));
    assert_eq!(blamed(dense(), |b| b.bounds.max_kv = 161), ("", "max_kv"));
    assert_eq!(blamed(paged(), |b| b.store.page_tokens = 0), ("", "page_tokens"));
    let own = Index::Dense { slots: None };
    assert_eq!(blamed(dense(), |b| (b.index, b.bounds.batch) = (own, 6)), ("", "pages"));
    assert_eq!(accepted(dense(), |b| (b.index, b.bounds.batch) = (own, 5)).args.slots, 0);
    let packed = Index::Packed { begin: Ints::i32(0x9000) };
    assert_eq!(blamed(paged(), |b| (b.index, b.keys) = (packed, KeyLengths::OfIndex)), ("", "pages"));
    assert_eq!(blamed(paged(), |b| b.keys = KeyLengths::LastPage { tokens: Ints::i32(0x7000) }), ("", "last_page"));
    let back = Index::Table { k: Ints::i32(0x2000), v: None, stride: -10, capacity: 10 };
    assert_eq!(blamed(paged(), |b| b.index = back), ("k_table", "stride"));
}

#[test]
fn layouts_that_kernels_cannot_read_name_tensor_and_stride() {
    assert_eq!(blamed(paged(), |b| b.queries.address = 0), ("q", "address"));
    assert_eq!(blamed(paged(), |b| b.store.k.address = 0), ("k", "address"));
    assert_eq!(blamed(paged(), |b| b.output.address += 1), ("o", "address"));
    assert_eq!(blamed(paged(), |b| b.output.lse.as_mut().unwrap().address = 2), ("lse", "address"));
    assert_eq!(blamed(paged(), |b| b.queries.strides[2] = -512), ("q", "row stride"));
    assert_eq!(blamed(paged(), |b| b.store.k.strides[0] = -8), ("k", "page stride"));
    assert_eq!(blamed(paged(), |b| b.store.v.strides[1] = -8), ("v", "token stride"));
    assert_eq!(blamed(paged(), |b| b.store.v.strides[2] = i64::MAX / 2), ("v", "extent"));
    assert_eq!(blamed(paged(), |b| b.store.k.strides[0] = i64::MAX - 7), ("k", "extent"));
    assert_eq!(blamed(paged(), |b| b.store.k.address = u64::MAX - 15), ("k", "extent"));
    let table = |address, stride| Index::Table { k: Ints::i32(address), v: None, stride, capacity: 10 };
    assert_eq!(blamed(paged(), |b| b.index = table(0, 12)), ("k_table", "address"));
    assert_eq!(blamed(paged(), |b| b.index = table(0x2002, 12)), ("k_table", "address"));
    assert_eq!(blamed(paged(), |b| b.index = table(0x2000, i64::MAX / 4)), ("k_table", "extent"));
    let v = Index::Table { k: Ints::i32(0x2000), v: Some(0), stride: 12, capacity: 10 };
    assert_eq!(blamed(paged(), |b| b.index = v), ("v_table", "address"));
    assert_eq!(blamed(dense(), |b| b.index = Index::Dense { slots: Some(Ints::i32(0)) }), ("slots", "address"));
    assert_eq!(blamed(paged(), |b| b.keys = KeyLengths::Cumulative { sums: Ints::i32(1) }), ("kv_sums", "address"));
    // A pool of many layers: 8 GiB from page to page.
    assert_eq!(accepted(paged(), |b| b.store.k.strides[0] = 1 << 32).args.k_stride[0], 1 << 32);
}

#[test]
fn rows_of_outputs_do_not_overlap() {
    assert_eq!(blamed(paged(), |b| b.output.strides[2] = 64), ("o", "row stride"));
    assert_eq!(blamed(paged(), |b| b.output.strides[1] = 0), ("o", "head stride"));
    let lse = |strides, empty| Some(Lse { address: 0x5000, strides, base: LogBase::Two, empty });
    assert_eq!(blamed(paged(), |b| b.output.lse = lse([0, 3, 1], f32::INFINITY)), ("lse", "head stride"));
    assert_eq!(blamed(paged(), |b| b.output.lse = lse([0, 4, 1], 0.0)), ("lse", "mark of empty rows"));
    let a = accepted(paged(), |b| b.output.lse = lse([0, 1, 8], f32::INFINITY)).args;
    assert_eq!((a.lse_stride, a.lse_unit, a.lse_empty), ([0, 1, 8], std::f32::consts::LOG2_E, f32::INFINITY));
    // All sequences read one K; that is not an output.
    assert_eq!(accepted(paged(), |b| b.store.k.strides[0] = 0).args.k_stride[0], 0);
}

#[test]
fn rows_off_the_16_byte_grid_are_legal_and_told() {
    assert!(!accepted(paged(), |b| b.queries.address += 8).aligned);
    assert!(!accepted(paged(), |b| b.store.v.strides[1] = 132).aligned);
    assert!(!accepted(paged(), |b| b.store.k.strides[0] += 4).aligned);
    assert!(!accepted(paged(), |b| b.output.strides[2] += 4).aligned);
    // A stride that is never taken does not count.
    assert!(accepted(paged(), |b| b.queries.strides[0] = 3).aligned);
    // 72 bytes are no whole pieces, wherever rows begin.
    let short = |b: &mut RaggedBatch| {
        b.queries.head_dim = 72;
        b.queries.strides = [0, 80, 640];
        for rows in [&mut b.store.k, &mut b.store.v] {
            (rows.element, rows.strides) = (StoreType::Int8, [2560, 160, 80]);
        }
    };
    assert!(!accepted(paged(), short).aligned);
    let columns = |stride| {
        move |b: &mut RaggedBatch| {
            b.store.v = StoreRows { strides: [2048, 1, 1024], inner: Some(stride), ..b.store.v };
        }
    };
    assert!(accepted(paged(), columns(16)).aligned && !accepted(paged(), columns(17)).aligned);
}

#[test]
fn empty_batches_and_stores_are_legal_without_memory() {
    let bare = |b: &mut RaggedBatch| {
        for address in [&mut b.queries.address, &mut b.store.k.address, &mut b.store.v.address, &mut b.output.address] {
            *address = 0;
        }
    };
    let empties: [fn(&mut Bounds); 3] = [|b| b.batch = 0, |b| b.total_q = 0, |b| b.max_q = 0];
    for empty in empties {
        let c = accepted(paged(), |b| {
            bare(b);
            empty(&mut b.bounds);
        });
        assert!(c.is_empty(), "{}", c.shape);
    }
    // Rows without keys are written.
    let c = accepted(paged(), |b| {
        (b.store.k.address, b.store.v.address, b.store.pages, b.bounds.max_kv) = (0, 0, 0, 0);
    });
    assert!(!c.is_empty() && c.args.kv_len == 0);
    let nothing = |b: &mut RaggedBatch| {
        b.store = Store { pages: 1, page_tokens: 0, ..b.store };
        (b.index, b.keys) = (Index::Packed { begin: Ints::i32(0x9000) }, KeyLengths::OfIndex);
    };
    let a = accepted(paged(), nothing).args;
    assert_eq!((a.pages, a.page_tokens), (0, 1));
}

#[test]
fn hints_choose_the_class_and_leave_the_arguments() {
    let usual = |expected, change: fn(&mut RaggedBatch)| {
        let c = accepted(paged(), |b| {
            b.expected = expected;
            change(b);
        });
        (c.usual.q_len, c.usual.kv_len, c.args)
    };
    let none: fn(&mut RaggedBatch) = |_| {};
    let (q, kv, args) = usual(Expected::default(), none);
    // Four rows for three sequences.
    assert_eq!((q, kv), (2, 160));
    for (total_keys, longest, wanted) in [(90, 0, 30), (91, 0, 31), (4800, 0, 160), (0, 50, 50), (300, 60, 60)] {
        let (_, kv, hinted) = usual(Expected { total_keys, longest }, none);
        assert_eq!((kv, hinted), (wanted, args), "{total_keys} {longest}");
    }
    assert_eq!(usual(Expected::default(), |b| b.bounds.total_q = 3).0, 1);
    let pack = |b: &mut RaggedBatch| {
        b.store = Store { pages: 1, page_tokens: 300, ..b.store };
        (b.index, b.keys) = (Index::Packed { begin: Ints::i32(0x9000) }, KeyLengths::OfIndex);
    };
    assert_eq!(usual(Expected::default(), pack).1, 100);
}

#[test]
fn windows_of_programs_are_taken_where_lengths_do_not_matter() {
    let program = |text: &str| ProgramRef::new(Program::mask_of(text).unwrap());
    let full = |b: &RaggedBatch| ragged_call(b, Mask::Full, None).unwrap();
    let ends = full(&paged()).with_program(program("kv <= q + kv_len - q_len and q + kv_len - q_len - kv < 9"));
    assert_eq!((ends.problem.program, ends.shape.mask), (None, Mask::Window { left: Some(8), right: Some(0) }));
    assert_eq!((ends.args.window_left, ends.args.window_right, ends.usual.mask), (8, 0, ends.shape.mask));
    let beginnings = full(&paged()).with_program(program("kv <= q"));
    assert!(beginnings.problem.program.is_some() && beginnings.shape.mask == Mask::Full);
    // Reaches beyond the bounds are those of the bounds.
    let wide = ragged_call(&paged(), Mask::Window { left: Some(5000), right: Some(5000) }, Some(2.0)).unwrap();
    assert_eq!((wide.args.window_left, wide.args.window_right, wide.args.scale), (160, 2, 2.0));
}

#[test]
fn ranges_name_all_memory_of_a_call() {
    let mut found = Vec::new();
    let mut note = |name: &'static str, address: u64, bytes: u64| -> Result<()> {
        found.push((name, address, bytes));
        Ok(())
    };
    paged().each_range(&mut note).unwrap();
    let pool = 40 * 16 * 2 * 64 * 2;
    let rows = 4 * 8 * 64 * 2;
    let wanted = [
        ("q", Q, rows),
        ("k", K, pool),
        ("v", V, pool),
        ("o", O, rows),
        ("lse", 0x5000, 8 * 4 * 4),
        ("q_begin", 0x1000, 16),
        ("kv_lengths", 0x3000, 12),
        ("k_table", 0x2000, (2 * 12 + 10) * 4),
        ("v_table", 0x2000, (2 * 12 + 10) * 4),
    ];
    assert_eq!(found, wanted);
}
