//! Head dims that are no whole 16-byte vectors: on the device that is there, so through padded copies on a GPU where
//! one is, and as they are on the CPU; and what is launched for them, on a GPU that exists on paper.

use crate::common::Place;
use crate::common::paper::{Instant, Paper};
use flashtune::ragged::{
    Bounds, Expected, Index, Ints, KeyLengths, Output, Queries, QueryRows, RaggedBatch, Store, StoreRows, StoreType,
};
use flashtune::{
    Backward, DType, Distribution, Engine, Forward, HostTensor, Layout, Mask, Precision, Problem, Ragged, Shape,
    SideInputs, Stream, TensorView,
};
use flashtune_codegen::Family;
use flashtune_runtime::reference::{
    Attention, GradientInputs, all_rows, compare, compare_gradients, oracle, oracle_gradients, unfused_gradients,
    unfused_rows,
};
use flashtune_runtime::{Buffer, Device};

/// Head dims of Q and K, and of V: flash-attention's own grid has 59 and 111.
const DIMS: [(usize, usize); 5] = [(59, 59), (111, 64), (64, 33), (1, 7), (250, 255)];

/// A tensor in memory of the device.
fn on_device(device: &dyn Device, t: &HostTensor) -> (Box<dyn Buffer>, TensorView) {
    let buffer = device.alloc(t.bytes().len()).expect("memory");
    device.upload(&*buffer, t.bytes()).expect("a copy");
    let view = t.view_at(buffer.address());
    (buffer, view)
}

#[test]
fn any_head_dim_gives_attention_and_its_gradients() {
    let place = Place::new();
    let engine = Engine::builder().cache_dir(place.cache()).build().expect("a device");
    let device = engine.device();
    let ([batch, heads, kv_heads, q_len, kv_len], mask) = ([2, 4, 2, 37, 45], Mask::Causal);
    for (i, (qk, v)) in DIMS.into_iter().enumerate() {
        let dtype = DType::ALL[i % 3];
        let layout = Layout::ALL[i % 3];
        let make = |shape, seed| HostTensor::random(dtype, shape, layout, seed, Distribution::Normal);
        let read = [
            make([batch, heads, q_len, qk], 1),
            make([batch, kv_heads, kv_len, qk], 2),
            make([batch, kv_heads, kv_len, v], 3),
            make([batch, heads, q_len, v], 4),
        ];
        let empty = |t: &HostTensor| HostTensor::poisoned(dtype, t.shape(), layout);
        let mut o = empty(&read[3]);
        let mut written = [empty(&read[0]), empty(&read[1]), empty(&read[2])];
        let inputs = read.each_ref().map(|t| on_device(&**device, t));
        let (o_buffer, o_view) = on_device(&**device, &o);
        let outputs = written.each_ref().map(|t| on_device(&**device, t));
        let lse_buffer = device.alloc(4 * batch * heads * q_len).expect("memory");
        let stream = device.stream();
        let [q, k, v_view, dout] = inputs.each_ref().map(|(_, view)| *view);
        let [dq, dk, dv] = outputs.each_ref().map(|(_, view)| *view);
        let forward = Forward { lse: Some(lse_buffer.address()), mask, ..Forward::new(q, k, v_view, o_view) };
        let backward = Backward {
            dout,
            q,
            k,
            v: v_view,
            o: o_view,
            lse: lse_buffer.address(),
            dlse: None,
            residual: None,
            dropout: Default::default(),
            dq,
            dk,
            dv,
            mask,
            scale: None,
            program: None,
            side: SideInputs::default(),
            gradients: &[],
            packed: None,
        };
        // SAFETY: the views are those of the buffers above, which live until the downloads have waited.
        unsafe {
            engine.forward(&forward, stream).expect("any head dim");
            engine.backward(&backward, stream).expect("any head dim");
        }
        let mut lse = vec![0; 4 * batch * heads * q_len];
        device.download(&*o_buffer, o.bytes_mut(), stream).expect("a copy");
        device.download(&*lse_buffer, &mut lse, stream).expect("a copy");
        for (t, (buffer, _)) in written.iter_mut().zip(&outputs) {
            device.download(&**buffer, t.bytes_mut(), stream).expect("a copy");
        }
        let lse: Vec<f32> = lse.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect();
        let sizes = [batch, heads, kv_heads, q_len, kv_len].map(|n| n as u32);
        let [batch, heads, kv_heads, q_len, kv_len] = sizes;
        let shape = Shape { batch, heads, kv_heads, q_len, kv_len, mask };
        let (rows, scale) = (all_rows(&shape), 1.0 / (qk as f32).sqrt());
        let exact = oracle(&read[0], &read[1], &read[2], mask, scale, &rows);
        let unfused = unfused_rows(&read[0], &read[1], &read[2], mask, scale, &rows);
        let verdict = compare(&o, Some(&lse), &exact, &unfused);
        assert!(verdict.passed(), "{dtype} {qk} and {v}: {verdict}");
        let attention = Attention { mask, scale, program: None, sequence: 0, dropout: None };
        let inputs = GradientInputs { q: &read[0], k: &read[1], v: &read[2], dout: &read[3], dlse: None };
        let exact = oracle_gradients(&inputs, &attention);
        let verdict = compare_gradients(written.each_ref(), &exact, &unfused_gradients(&inputs, &attention));
        assert!(verdict.passed(), "gradients, {dtype} {qk} and {v}: {verdict}");
    }
}

#[test]
fn any_head_dim_of_packed_sequences_gives_attention() {
    let place = Place::new();
    let engine = Engine::builder().cache_dir(place.cache()).build().expect("a device");
    let device = engine.device();
    let (dtype, heads, kv_heads, qk, v, mask) = (DType::Bf16, 4usize, 2usize, 59usize, 33usize, Mask::Causal);
    let lengths = [(9usize, 20usize), (5, 31), (40, 40)];
    // Rows of all heads of a token lie side by side: sequences are packed by putting them one after the other.
    let make = |n, (q_len, kv_len), part| {
        let shape = [[1, heads, q_len, qk], [1, kv_heads, kv_len, qk], [1, kv_heads, kv_len, v]][part];
        HostTensor::random(dtype, shape, Layout::Bshd, 10 * n as u64 + part as u64, Distribution::Normal)
    };
    let sequences: Vec<[HostTensor; 3]> =
        lengths.iter().enumerate().map(|(n, l)| [0, 1, 2].map(|part| make(n, *l, part))).collect();
    let upload = |bytes: &[u8]| {
        let buffer = device.alloc(bytes.len()).expect("memory");
        device.upload(&*buffer, bytes).expect("a copy");
        buffer
    };
    let packed =
        [0, 1, 2].map(|part| upload(&sequences.iter().flat_map(|s| s[part].bytes()).copied().collect::<Vec<_>>()));
    let sums = |of: fn(&(usize, usize)) -> usize| {
        let ends = lengths.iter().scan(0, |sum, l| {
            Some({
                *sum += of(l);
                *sum as i32
            })
        });
        upload(&std::iter::once(0).chain(ends).flat_map(i32::to_ne_bytes).collect::<Vec<u8>>())
    };
    let (q_begin, k_begin) = (sums(|l| l.0), sums(|l| l.1));
    let (total_q, total_k) = (54u64, 91u64);
    // A row behind the last sequence's: nobody's, so it stays as it is.
    let o = upload(&vec![0xee; (total_q as usize + 1) * heads * v * 2]);
    let strides = |heads: usize, dim: usize| [0, dim as i64, (heads * dim) as i64];
    let rows = |b: &dyn Buffer, dim| {
        let [_, head, token] = strides(kv_heads, dim);
        StoreRows::new(b.address(), StoreType::Float(dtype), [total_k as i64 * token, token, head])
    };
    let batch = RaggedBatch {
        queries: Queries {
            address: packed[0].address(),
            dtype,
            heads: heads as u64,
            head_dim: qk as u64,
            strides: strides(heads, qk),
            rows: QueryRows::Packed { begin: Ints::i32(q_begin.address()) },
            used: None,
            tree: None,
        },
        store: Store {
            k: rows(&*packed[1], qk),
            v: rows(&*packed[2], v),
            head_dim_v: v as u64,
            kv_heads: kv_heads as u64,
            pages: 1,
            page_tokens: total_k,
        },
        index: Index::Packed { begin: Ints::i32(k_begin.address()) },
        keys: KeyLengths::OfIndex,
        left_pad: None,
        output: Output { address: o.address(), dtype, strides: strides(heads, v), lse: None },
        bounds: Bounds { batch: 3, total_q, max_q: 40, max_kv: 40 },
        expected: Expected::default(),
    };
    let stream = device.stream();
    // SAFETY: the addresses are those of the buffers above, which live until the download has waited.
    unsafe { engine.forward_ragged(&Ragged { mask, ..Ragged::new(batch) }, stream) }.expect("any head dim");
    let mut bytes = vec![0; o.len()];
    device.download(&*o, &mut bytes, stream).expect("a copy");
    let mut at = 0;
    for (n, (q_len, kv_len)) in lengths.into_iter().enumerate() {
        let mut own = HostTensor::poisoned(dtype, [1, heads, q_len, v], Layout::Bshd);
        let size = own.bytes().len();
        own.bytes_mut().copy_from_slice(&bytes[at..at + size]);
        at += size;
        let [q, k, values] = &sequences[n];
        let [heads, kv_heads, q_len, kv_len] = [heads, kv_heads, q_len, kv_len].map(|n| n as u32);
        let rows = all_rows(&Shape { batch: 1, heads, kv_heads, q_len, kv_len, mask });
        let scale = 1.0 / (qk as f32).sqrt();
        let exact = oracle(q, k, values, mask, scale, &rows);
        let verdict = compare(&own, None, &exact, &unfused_rows(q, k, values, mask, scale, &rows));
        assert!(verdict.passed(), "sequence {n}: {verdict}");
    }
    assert!(bytes[at..].iter().all(|b| *b == 0xee), "a row of no sequence was written");
}

#[test]
fn rows_are_copied_before_the_kernel_and_back_behind_it() {
    let place = Place::new();
    let paper = Paper::new(Instant::holding("nothing"));
    let engine = Engine::builder().on(paper.clone()).cache_dir(place.cache()).quick_first(false).build().unwrap();
    let view = |i: u64, dim| TensorView::bhsd(i << 32, DType::Bf16, [1, 16, 512, dim]);
    let call = |qk, v| Forward { mask: Mask::Causal, ..Forward::new(view(1, qk), view(2, qk), view(3, v), view(4, v)) };
    let launched = |call: &Forward<'_>| {
        paper.launched.lock().unwrap().clear();
        // SAFETY: nothing is read or written on paper.
        let ran = unsafe { engine.forward(call, Stream(0)) }.unwrap().expect("there is something to compute");
        (paper.launched.lock().unwrap().clone(), ran)
    };
    let pad = "pad-f16-d16-full.cuda.";
    let (names, ran) = launched(&call(59, 111));
    assert!(names.len() == 3 && names[0].starts_with(pad) && names[2].starts_with(pad), "{names:?}");
    assert!(names[1].starts_with("forward-bf16-d64v112-causal.sm90."), "{names:?}");
    let padding = ran.padding.expect("rows are padded");
    assert_eq!((padding.from, padding.to, padding.launches), ([59, 111], [64, 112], 2));
    assert_eq!(padding.scratch_bytes, 16 * 512 * 2 * (64 + 64 + 112 + 112));
    let account = ran.explain().to_string();
    assert!(account.contains("rows of 59 and 111 elements are padded to 64 and 112"), "{account}");
    // V alone: Q and K stay where they are.
    let (names, ran) = launched(&call(64, 33));
    assert_eq!((names.len(), ran.padding.unwrap().scratch_bytes), (3, 16 * 512 * 2 * 2 * 40));
    // Rows off the grid are copied too, and whole vectors on it are not.
    let off = |t: TensorView| TensorView { address: t.address + 2, ..t };
    let (names, ran) = launched(&Forward { q: off(view(1, 64)), ..call(64, 64) });
    let padding = ran.padding.unwrap();
    assert_eq!((names.len(), padding.launches, padding.scratch_bytes), (2, 1, 16 * 512 * 2 * 64));
    assert!(names[1].contains(".sm90."), "{names:?}");
    assert_eq!(launched(&call(64, 64)).0.len(), 1);
    // Rows of f32 that tensor cores multiply: four bytes to an element, and 16 to a whole vector.
    let view = |i: u64, dim| TensorView { dtype: DType::F32, ..view(i, dim) };
    let f32 = |qk, v| Forward { mask: Mask::Causal, ..Forward::new(view(1, qk), view(2, qk), view(3, v), view(4, v)) };
    let precisions = [(None, "tf32x3"), (Some(Precision::Tf32x3), "tf32x3"), (Some(Precision::Tf32), "tf32")];
    for (precision, name) in precisions {
        let (names, ran) = launched(&Forward { precision, ..f32(59, 111) });
        assert!(names.len() == 3 && names[0].starts_with(pad) && names[2].starts_with(pad), "{names:?}");
        assert!(names[1].starts_with(&format!("forward-f32-{name}-d64v112-causal.sm80_f32.")), "{names:?}");
        assert_eq!(ran.padding.unwrap().scratch_bytes, 16 * 512 * 4 * (64 + 64 + 112 + 112));
    }
    let (names, ran) = launched(&Forward { precision: Some(Precision::Exact), ..f32(59, 111) });
    assert!(names.len() == 1 && names[0].contains(".naive.") && ran.padding.is_none(), "{names:?}");
    let e = engine.prepare(&Forward { precision: Some(Precision::Tf32), ..call(64, 64) }).unwrap_err().to_string();
    assert!(e.contains("precision") && e.contains("`exact`"), "{e}");
    // The weights are written by the plain kernel, which takes any row.
    let (names, ran) = launched(&Forward { weights: Some(5 << 32), ..call(59, 59) });
    assert!(names.len() == 1 && names[0].contains("-d59-") && ran.padding.is_none(), "{names:?}");
    let problem = Problem::forward(DType::Bf16, 59, Mask::Causal.kind()).unwrap();
    let shape = Shape { batch: 1, heads: 16, kv_heads: 16, q_len: 512, kv_len: 512, mask: Mask::Causal };
    let account = engine.explain(&problem, &shape).unwrap();
    assert_eq!(account.family, Family::ForwardSm90.name());
    assert!(account.notes.iter().any(|note| note.contains("pad/cuda copies to 64 and 64")), "{account}");
}
