//! The backward pass through the engine, on the CPU: after a forward pass of the same engine, and without allocating.

use crate::common::Place;
use crate::common::counted::{ALLOCATIONS, counted, engine};
use flashtune::ragged::Ints;
use flashtune::{
    Backward, DType, Distribution, Error, Forward, HostTensor, Layout, Mask, Packed, Program, ProgramRef, SideInputs,
    SideView,
};
use flashtune::{Policy, Scalar, SideData, Stream};
use flashtune_codegen::score::{Elements, Storage};
use flashtune_runtime::Error as RuntimeError;
use flashtune_runtime::reference::{
    Attention, GradientInputs, compare_gradient_by, compare_gradients, oracle_gradient_by, oracle_gradients,
    unfused_gradient_by, unfused_gradients,
};
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Q, K, V and dO, O with its log-sum-exp, and dQ, dK and dV.
struct Tensors {
    read: [HostTensor; 4],
    o: HostTensor,
    lse: Vec<f32>,
    written: [HostTensor; 3],
}

impl Tensors {
    fn new() -> Self {
        let make = |heads, rows, dim, seed| {
            HostTensor::random(DType::F32, [1, heads, rows, dim], Layout::Bshd, seed, Distribution::Normal)
        };
        let empty = |t: &HostTensor| HostTensor::poisoned(DType::F32, t.shape(), Layout::Bhsd);
        let read = [make(4, 37, 32, 1), make(2, 45, 32, 2), make(2, 45, 24, 3), make(4, 37, 24, 4)];
        let written = [empty(&read[0]), empty(&read[1]), empty(&read[2])];
        Self { o: empty(&read[3]), lse: vec![f32::NAN; 4 * 37], written, read }
    }

    fn forward(&self) -> Forward<'static> {
        let [q, k, v, _] = self.read.each_ref().map(HostTensor::view);
        let lse = Some(self.lse.as_ptr() as u64);
        Forward { lse, mask: Mask::Causal, ..Forward::new(q, k, v, self.o.view()) }
    }

    fn backward(&self) -> Backward<'static> {
        let [q, k, v, dout] = self.read.each_ref().map(HostTensor::view);
        let [dq, dk, dv] = self.written.each_ref().map(HostTensor::view);
        Backward {
            dout,
            q,
            k,
            v,
            o: self.o.view(),
            lse: self.lse.as_ptr() as u64,
            dlse: None,
            residual: None,
            dropout: Default::default(),
            dq,
            dk,
            dv,
            mask: Mask::Causal,
            scale: None,
            program: None,
            side: SideInputs::default(),
            packed: None,
            gradients: &[],
        }
    }
}

#[test]
fn gradients_follow_a_forward_pass_of_the_same_engine() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let tensors = Tensors::new();
    let program = ProgramRef::new(Program::parse("cap: float; score = cap * tanh(score / cap);").unwrap());
    let scalars = [("cap", Scalar::Float(2.0))];
    let side = SideInputs { scalars: &scalars, tensors: &[] };
    let (forward, backward) =
        (tensors.forward().with_program(program, side), tensors.backward().with_program(program, side));
    // SAFETY: the tensors live until the calls return, and outputs overlap nothing.
    let ran = unsafe {
        engine.forward(&forward, Stream(0)).unwrap();
        engine.backward(&backward, Stream(0)).unwrap().expect("there is something to compute")
    };
    assert!(ran.explain().to_string().contains("backward/cpu"), "{}", ran.explain());
    let data = SideData::default().scalar("cap", scalars[0].1);
    let scale = 1.0 / 32f32.sqrt();
    let attention =
        Attention { mask: Mask::Causal, scale, program: Some((&program, &data)), sequence: 0, dropout: None };
    let [q, k, v, dout] = &tensors.read;
    let inputs = GradientInputs { q, k, v, dout, dlse: None };
    let (want, unfused) = (oracle_gradients(&inputs, &attention), unfused_gradients(&inputs, &attention));
    let verdict = compare_gradients(tensors.written.each_ref(), &want, &unfused);
    assert!(verdict.passed(), "{verdict}");

    let (compiles, before) = (device.compiles.load(Ordering::SeqCst), ALLOCATIONS.with(Cell::get));
    for _ in 0..1000 {
        std::hint::black_box(engine.prepare_backward(&backward).unwrap());
    }
    assert_eq!(ALLOCATIONS.with(Cell::get), before, "a warm call allocates");
    assert_eq!(device.compiles.load(Ordering::SeqCst), compiles);
}

#[test]
fn a_backward_call_is_refused_by_the_name_of_what_is_wrong() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let tensors = Tensors::new();
    let good = tensors.backward();
    for (name, call) in [("dv", Backward { dv: good.dk, ..good }), ("lse", Backward { lse: 0, ..good })] {
        match engine.prepare_backward(&call) {
            Err(Error::Runtime(RuntimeError::Tensor { tensor, .. })) => assert_eq!(tensor, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    let program = ProgramRef::new(Program::parse("cap: float; score = cap * tanh(score / cap);").unwrap());
    let missing = engine.prepare_backward(&good.with_program(program, SideInputs::default()));
    assert!(missing.unwrap_err().to_string().contains("`cap` is missing"));
}

/// A pack of one sequence has the bytes of the dense call; of arrays the engine is told the addresses alone.
#[test]
fn packed_sequences_are_told_by_arrays_and_refused_by_their_names() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let tensors = Tensors::new();
    // SAFETY: the tensors live to the end of the test, and the CPU has no streams.
    let run = |call: &Backward<'_>| unsafe { engine.backward(call, Stream(0)) };
    // SAFETY: as above.
    unsafe { engine.forward(&tensors.forward(), Stream(0)) }.unwrap();
    let bytes = || tensors.written.each_ref().map(|t| t.bytes().to_vec());
    run(&tensors.backward()).unwrap();
    let dense = bytes();
    let (q_begin, kv_begin) = ([0i32, 37, 37], [0i64, 45, 45]);
    let packed = Packed {
        batch: 2,
        q_begin: Ints::i32(q_begin.as_ptr() as u64),
        kv_begin: Ints::i64(kv_begin.as_ptr() as u64),
        q_used: None,
        kv_used: None,
        max_q: 1000,
        max_kv: 45,
    };
    let call = |packed| Backward { packed: Some(packed), ..tensors.backward() };
    let dispatch = run(&call(packed)).unwrap().unwrap();
    assert_eq!(dispatch.plan.kernel().problem.to_string(), "backward-f32-d32v24-causal-ragged");
    assert_eq!((dispatch.shape.batch, dispatch.shape.q_len, dispatch.shape.kv_len), (2, 37, 45));
    assert!(bytes() == dense, "other bytes than the dense call's");
    assert!(run(&call(Packed { batch: 0, ..packed })).unwrap().is_none());
    for (name, packed) in [
        ("q_begin", Packed { q_begin: Ints::i32(0), ..packed }),
        ("kv_used", Packed { kv_used: Some(Ints::i32(64)), ..packed }),
    ] {
        match engine.prepare_backward(&call(packed)) {
            Err(Error::Runtime(RuntimeError::Tensor { tensor, .. })) => assert_eq!(tensor, name),
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// Gradients of what the program reads are kernels of their own, which a sealed or prepared engine has, too.
#[test]
fn gradients_of_what_a_program_reads_come_beside() {
    let (place, device) = (Place::new(), counted());
    let engine = engine(&place, &device, Policy::Default);
    let tensors = Tensors::new();
    let text = "t: f32[heads, kv_len]; mask = kv <= q + 8 and kv <= 40; score = score + t[h, kv]; sink = s[h];";
    let program = ProgramRef::new(Program::parse(&format!("s: f32[heads]; {text}")).unwrap());
    let values: Vec<f32> = (0..4 * 45).map(|i| (i % 17) as f32 / 16.0).collect();
    let sinks = [0.5f32, 0.25, 1.0, -1.0];
    let view = |data: &[f32], shape: &[u64]| SideView::contiguous(data.as_ptr() as u64, Storage::F32, shape);
    let read = [("t", view(&values, &[4, 45])), ("s", view(&sinks, &[4]))];
    let side = SideInputs { scalars: &[], tensors: &read };
    let (mut by_t, mut by_s) = (vec![f32::NAN; 4 * 45], [f32::NAN; 4]);
    let outs = [
        ("t", SideView { address: by_t.as_mut_ptr() as u64, ..read[0].1 }),
        ("s", SideView { address: by_s.as_mut_ptr() as u64, ..read[1].1 }),
    ];
    let call = tensors.backward().with_program(program, side);
    let wanted = call.with_gradients(&outs);
    engine.prepare_backward(&wanted).unwrap();
    // SAFETY: the tensors live until the calls return, and outputs overlap nothing.
    unsafe {
        engine.forward(&tensors.forward().with_program(program, side), Stream(0)).unwrap();
        engine.backward(&wanted, Stream(0)).unwrap().expect("there is something to compute");
    }
    let of = |values: &[f32], shape: &[usize]| (shape.to_vec(), Elements::Float(values.to_vec()));
    let data = [("t", of(&values, &[4, 45])), ("s", of(&sinks, &[4]))]
        .into_iter()
        .fold(SideData::default(), |data, (name, (shape, elements))| data.tensor(name, &shape, elements));
    let [q, k, v, dout] = &tensors.read;
    let attention = Attention {
        mask: Mask::Causal,
        scale: 1.0 / 32f32.sqrt(),
        program: Some((program.kept(), &data)),
        sequence: 0,
        dropout: None,
    };
    let inputs = GradientInputs { q, k, v, dout, dlse: None };
    for (at, got) in [(0, &by_s[..]), (1, &by_t[..])] {
        let name = &program.declarations()[at].name;
        let (oracle, unfused) =
            (oracle_gradient_by(&inputs, &attention, at), unfused_gradient_by(&inputs, &attention, at, DType::F32));
        let verdict = compare_gradient_by(name, got, DType::F32, &oracle, &unfused);
        assert!(verdict.passed() && oracle.o.iter().any(|x| x.abs() > 1e-3), "{name}: {verdict}");
    }
    // Without memory of their own, of the wrong shape, and of what is not read.
    let refused = |name: &str, view: SideView, what: &str| {
        let outs = [(name, view)];
        let e = engine.prepare_backward(&call.with_gradients(&outs)).unwrap_err().to_string();
        assert!(e.contains(what), "{e}");
    };
    refused("t", SideView { address: 0, ..outs[0].1 }, "address");
    refused("t", view(&by_s, &[4]), "[4, 45]");
    refused("t", SideView { strides: [0, 1, 0, 0], ..outs[0].1 }, "overlap");
    refused("u", outs[1].1, "`u`");
    let plain = tensors.backward();
    let e = engine.prepare_backward(&plain.with_gradients(&outs)).unwrap_err().to_string();
    assert!(e.contains("score program"), "{e}");
    let (q_begin, kv_begin) = ([0i32, 37], [0i32, 45]);
    let packed = Packed {
        batch: 1,
        q_begin: Ints::i32(q_begin.as_ptr() as u64),
        kv_begin: Ints::i32(kv_begin.as_ptr() as u64),
        q_used: None,
        kv_used: None,
        max_q: 37,
        max_kv: 45,
    };
    let e = engine.prepare_backward(&Backward { packed: Some(packed), ..wanted }).unwrap_err().to_string();
    assert!(e.contains("packed sequences"), "{e}");
}
