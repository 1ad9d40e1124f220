//! What a call accepts, and which tensor an error blames.

use super::*;

fn tensors(dtype: DType) -> ForwardTensors {
    ForwardTensors {
        q: TensorView::bhsd(0x1000, dtype, [2, 8, 5, 64]),
        k: TensorView::bshd(0x10000, dtype, [2, 7, 4, 64]),
        v: TensorView::bhsd(0x20000, dtype, [2, 4, 7, 32]),
        o: TensorView::bshd(0x30000, dtype, [2, 5, 8, 32]),
        lse: Some(TensorView::rows(0x40000, [2, 8, 5])),
    }
}

fn call(t: &ForwardTensors) -> Result<ForwardCall> {
    forward_call(t, Mask::Causal, None)
}

/// The tensor and field that an error names.
fn blamed(t: &ForwardTensors) -> (&'static str, &'static str) {
    match call(t).unwrap_err() {
        Error::Tensor { tensor, field, .. } => (tensor, field),
        e => panic!("{e}"),
    }
}

#[test]
fn arguments_follow_the_tensors() {
    let c = call(&tensors(DType::Bf16)).unwrap();
    assert_eq!(c.problem.to_string(), "forward-bf16-d64v32-causal");
    assert_eq!(c.shape.to_string(), "b2 h8/4 5x7 causal");
    assert_eq!(c.args.q_stride, [8 * 5 * 64, 5 * 64, 64]);
    assert_eq!(c.args.k_stride, [7 * 4 * 64, 64, 4 * 64]);
    assert_eq!(c.args.o_stride, [5 * 8 * 32, 32, 8 * 32]);
    assert_eq!((c.args.window_left, c.args.window_right), (i32::MAX, 0));
    assert_eq!((c.args.scale, c.args.lse), (0.125, 0x40000));
}

#[test]
fn window_reaches_are_clamped_to_the_lengths() {
    let mask = Mask::Window { left: Some(u32::MAX), right: Some(3) };
    let c = forward_call(&tensors(DType::F16), mask, Some(2.0)).unwrap();
    assert_eq!((c.args.window_left, c.args.window_right, c.args.scale), (7, 3, 2.0));
    for i in 0..5 {
        assert_eq!(mask.live(i, 5, 7), Mask::Window { left: Some(7), right: Some(3) }.live(i, 5, 7));
    }
}

#[test]
fn a_mismatch_names_the_tensor_and_the_field() {
    let good = tensors(DType::F16);
    let mut t = good;
    t.k.dtype = DType::Bf16;
    assert_eq!(blamed(&t), ("k", "dtype"));
    let mut t = good;
    t.v.shape[2] = 8;
    assert_eq!(blamed(&t), ("v", "shape"));
    let mut t = good;
    t.k.shape[3] = 56;
    assert_eq!(blamed(&t), ("k", "shape"));
    let mut t = good;
    t.o.shape[1] = 4;
    assert_eq!(blamed(&t), ("o", "shape"));
    let mut t = good;
    t.lse = Some(TensorView::rows(0x40000, [2, 8, 4]));
    assert_eq!(blamed(&t), ("lse", "shape"));
    t.lse = Some(TensorView { dtype: DType::F16, ..good.lse.unwrap() });
    assert_eq!(blamed(&t), ("lse", "dtype"));
    t.lse = Some(good.lse.unwrap().with_strides([80, 10, 2, 1]));
    assert_eq!(blamed(&t), ("lse", "strides"));
}

#[test]
fn layouts_that_a_kernel_cannot_read_name_the_stride() {
    let good = tensors(DType::F16);
    let mut t = good;
    t.q.address += 1;
    assert_eq!(blamed(&t), ("q", "address"));
    t.q.address = 0;
    assert_eq!(blamed(&t), ("q", "address"));
    let mut t = good;
    t.k.strides[3] = 2;
    assert_eq!(blamed(&t), ("k", "stride of the last dim"));
    let mut t = good;
    t.v.strides[0] = -8;
    assert_eq!(blamed(&t), ("v", "batch stride"));
    let mut t = good;
    t.q.strides[0] = i64::MAX - 7;
    assert_eq!(blamed(&t), ("q", "extent"));
}

#[test]
fn broadcast_inputs_are_legal_and_overlapping_outputs_are_not() {
    let good = tensors(DType::F16);
    let mut t = good;
    t.k.strides[0] = 0;
    t.v.strides[1] = 0;
    assert!(call(&t).is_ok());
    let mut t = good;
    t.o.strides[0] = 0;
    assert_eq!(blamed(&t), ("o", "batch stride"));
    let mut t = good;
    t.o.strides[1] = 16;
    assert_eq!(blamed(&t), ("o", "head stride"));
    // Heads inside of rows that are too short for all of them.
    let mut t = good;
    t.o.strides[2] = 7 * 32;
    assert_eq!(blamed(&t), ("o", "row stride"));
}

#[test]
fn overlaps_are_told_where_addresses_show_them() {
    let at = |address| TensorView::bhsd(address, DType::F32, [2, 3, 4, 16]);
    let (first, bytes) = (at(0x10000), 2 * 3 * 4 * 16 * 4);
    let both = |a: &TensorView, b: &TensorView| {
        assert_eq!(certainly_overlap(a, b), certainly_overlap(b, a));
        certainly_overlap(a, b)
    };
    assert!(both(&first, &first) && both(&first, &at(0x10000 + bytes - 4)) && !both(&first, &at(0x10000 + bytes)));
    // Every second row: an interleaved one shares the range alone, one that begins within dense memory an element.
    let apart = |address| TensorView { strides: [384, 128, 32, 1], ..at(address) };
    assert!(!both(&apart(0x10000), &apart(0x10000 + 64)) && both(&apart(0x10000), &apart(0x10000)));
    assert!(both(&first, &apart(0x10000 + 64)) && !both(&first, &apart(0x10000 + bytes)));
    // No element, no address, and ranges beyond the address space.
    assert!(!both(&first, &TensorView { shape: [2, 0, 4, 16], ..first }) && !both(&first, &at(0)));
    assert!(both(&at(u64::MAX - 8), &at(u64::MAX - 8)));
}

#[test]
fn empty_tensors_are_legal_without_memory() {
    for (b, h, q, kv) in [(0, 8, 5, 7), (2, 0, 5, 7), (2, 8, 0, 7), (2, 8, 5, 0)] {
        let view = |h, s| TensorView::bhsd(0, DType::F16, [b, h, s, 64]);
        let address = if b * h * q == 0 { 0 } else { 0x1000 };
        let at = |t: TensorView| TensorView { address, ..t };
        let t = ForwardTensors { q: at(view(h, q)), k: view(h, kv), v: view(h, kv), o: at(view(h, q)), lse: None };
        assert!(call(&t).is_ok(), "{b} {h} {q} {kv}");
    }
}

#[test]
fn strides_of_dims_without_a_second_element_do_not_matter() {
    let mut t = tensors(DType::F16);
    t.q = TensorView { shape: [1, 8, 5, 64], strides: [-3, 320, 64, 1], ..t.q };
    t.k.shape[0] = 1;
    t.v.shape[0] = 1;
    t.o.shape[0] = 1;
    t.lse = None;
    assert_eq!(call(&t).unwrap().args.q_stride, [0, 320, 64]);
}

#[test]
fn scales_and_sizes_that_make_no_sense_are_refused() {
    let t = tensors(DType::F16);
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert!(forward_call(&t, Mask::Full, Some(scale)).is_err(), "{scale}");
    }
    assert!(forward_call(&t, Mask::Full, Some(-1.0)).is_ok());
    let mut gqa = t;
    gqa.k.shape[1] = 3;
    gqa.v.shape[1] = 3;
    assert!(call(&gqa).unwrap_err().to_string().contains("multiple of the 3 KV heads"));
    let mut huge = t;
    for view in [&mut huge.q, &mut huge.k, &mut huge.v, &mut huge.o] {
        view.shape[0] = 1 << 31;
        view.strides[0] = 0;
    }
    huge.lse = None;
    assert_eq!(blamed(&huge), ("q", "batch"));
    assert_eq!(TensorView::bhsd(0, DType::F16, [1 << 40, 1 << 40, 1 << 40, 64]).extent_bytes(), None);
}

#[test]
fn rows_off_the_16_byte_grid_are_legal_and_told() {
    let good = tensors(DType::F16);
    assert!(call(&good).unwrap().aligned);
    let mut t = good;
    t.q.address += 8;
    assert!(!call(&t).unwrap().aligned);
    let mut t = good;
    t.v.strides[2] = 36;
    assert!(!call(&t).unwrap().aligned);
    // A stride that is never taken does not count.
    let mut t = tensors(DType::F32);
    for tensor in [&mut t.q, &mut t.k, &mut t.v, &mut t.o] {
        tensor.shape[0] = 1;
        tensor.strides[0] = 7;
    }
    t.lse = None;
    assert!(call(&t).unwrap().aligned);
}
