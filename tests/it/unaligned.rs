//! Tensors whose rows start anywhere: on the device that is there, so on a GPU where one is.

use crate::common::Place;
use flashtune::{DType, Distribution, Engine, Forward, HostTensor, Layout, Mask, Shape, TensorView};
use flashtune_runtime::reference::{all_rows, compare, oracle, unfused_rows};

#[test]
fn rows_off_the_16_byte_grid_give_the_same_result() {
    let place = Place::new();
    let engine = Engine::builder().cache_dir(place.cache()).build().expect("a device");
    let device = engine.device();
    let (shape, mask) = ([2, 4, 77, 40], Mask::Window { left: Some(30), right: Some(5) });
    for dtype in DType::ALL {
        let size = dtype.bytes();
        let random = |seed| HostTensor::random(dtype, shape, Layout::Bhsd, seed, Distribution::Normal);
        let (q, k, v) = (random(1), random(2), random(3));
        let mut o = HostTensor::poisoned(dtype, shape, Layout::Bhsd);
        // One element before the tensor puts every row off the grid.
        let mut buffers = Vec::new();
        let mut shifted = |t: &HostTensor| -> TensorView {
            let bytes = [&vec![0xff; size], t.bytes()].concat();
            let buffer = device.alloc(bytes.len()).expect("memory");
            device.upload(&*buffer, &bytes).expect("a copy");
            let view = t.view_at(buffer.address() + size as u64);
            buffers.push(buffer);
            view
        };
        let mut call = Forward::new(shifted(&q), shifted(&k), shifted(&v), shifted(&o));
        call.mask = mask;
        let stream = device.stream();
        // SAFETY: the views lie inside of buffers that live until the download below has waited.
        unsafe { engine.forward(&call, stream) }.expect("unaligned tensors are legal");
        let mut bytes = vec![0; size + o.bytes().len()];
        device.download(&*buffers[3], &mut bytes, stream).expect("a copy");
        assert!(bytes[..size].iter().all(|&b| b == 0xff), "the element before O was written");
        o.bytes_mut().copy_from_slice(&bytes[size..]);

        let sizes = Shape { batch: 2, heads: 4, kv_heads: 4, q_len: 77, kv_len: 77, mask };
        let (rows, scale) = (all_rows(&sizes), 1.0 / 40f32.sqrt());
        let exact = oracle(&q, &k, &v, mask, scale, &rows);
        let verdict = compare(&o, None, &exact, &unfused_rows(&q, &k, &v, mask, scale, &rows));
        assert!(verdict.passed(), "{dtype}: {verdict}");
    }
}
