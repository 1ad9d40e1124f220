//! One engine under many threads.

use crate::common::{Place, SMALL};
use flashtune::{DType, DeviceSpec, Engine, HostTensor, Layout, Mask, Policy, Status};

/// Sizes of one call: query heads, KV heads, rows of Q, rows of K.
type Sizes = (usize, usize, usize, usize);

const SIZES: [Sizes; 7] =
    [(2, 2, 128, 128), (4, 2, 1, 300), (2, 1, 77, 19), (8, 8, 33, 33), (1, 1, 0, 5), (3, 1, 9, 0), (2, 2, 200, 130)];

fn engine(place: &Place, policy: Policy) -> Engine {
    Engine::builder().device(DeviceSpec::Cpu).cache_dir(place.cache()).policy(policy).build().unwrap()
}

/// O and LSE as bits: two runs of one call must agree in all of them.
fn bits(engine: &Engine, (heads, kv_heads, q_len, kv_len): Sizes) -> (Vec<u8>, Vec<u32>) {
    let tensor = |heads, rows, seed| {
        HostTensor::random(DType::F32, [2, heads, rows, 32], Layout::Bhsd, seed, Default::default())
    };
    let (q, k, v) = (tensor(heads, q_len, 1), tensor(kv_heads, kv_len, 2), tensor(kv_heads, kv_len, 3));
    let out = engine.forward_host(&q, &k, &v, Mask::Causal, None).unwrap();
    (out.o.bytes().to_vec(), out.lse.iter().map(|x| x.to_bits()).collect())
}

/// Every thread goes through all sizes, each from another start, and must get what one thread alone gets.
fn threads_agree_with_one(place: &Place, policy: Policy) {
    let alone = engine(place, policy);
    let expected = SIZES.map(|s| bits(&alone, s));
    let shared = engine(place, policy);
    std::thread::scope(|scope| {
        for start in 0..12 {
            let (shared, expected) = (&shared, &expected);
            scope.spawn(move || {
                for n in 0..3 * SIZES.len() {
                    let i = (start + n) % SIZES.len();
                    assert!(bits(shared, SIZES[i]) == expected[i], "{:?} in thread {start}", SIZES[i]);
                }
            });
        }
    });
}

#[test]
fn threads_with_mixed_sizes_do_not_disturb_each_other() {
    threads_agree_with_one(&Place::new(), Policy::Default);
}

#[test]
fn sealed_threads_share_one_record() {
    let place = Place::new();
    place.tune_small();
    threads_agree_with_one(&place, Policy::Sealed);
}

#[test]
fn a_plan_outlives_its_engine() {
    let place = Place::new();
    place.json(&[&["explain"], SMALL].concat());
    let engine = engine(&place, Policy::Default);
    let tensor = |seed| HostTensor::random(DType::F32, [1, 2, 128, 32], Layout::Bhsd, seed, Default::default());
    let (q, k, v) = (tensor(1), tensor(2), tensor(3));
    let out = engine.forward_host(&q, &k, &v, Mask::Causal, None).unwrap();
    let (device, plan) = (engine.device().clone(), out.plan.unwrap());
    drop(engine);

    let upload = |t: &HostTensor| {
        let buffer = device.alloc(t.bytes().len()).unwrap();
        device.upload(&*buffer, t.bytes()).unwrap();
        (t.view_at(buffer.address()), buffer)
    };
    let inputs = [&q, &k, &v].map(upload);
    let mut o = HostTensor::poisoned(DType::F32, [1, 2, 128, 32], Layout::Bhsd);
    let (o_view, o_buffer) = upload(&o);
    let tensors =
        flashtune_runtime::ForwardTensors { q: inputs[0].0, k: inputs[1].0, v: inputs[2].0, o: o_view, lse: None };
    let call = flashtune_runtime::forward_call(&tensors, Mask::Causal, None).unwrap();
    // SAFETY: the views are those of live buffers of these sizes.
    unsafe { device.launch_shape(plan.module(), &call.shape, &call.args, device.stream()).unwrap() };
    device.download(&*o_buffer, o.bytes_mut(), device.stream()).unwrap();
    assert_eq!(o.bytes(), out.o.bytes());
    assert_eq!(plan.explain().status, Status::Default);
}
