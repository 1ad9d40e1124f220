//! The backward pass through the engine, on the CPU: after a forward pass of the same engine, and without allocating.

use crate::common::Place;
use crate::common::counted::{ALLOCATIONS, counted, engine};
use flashtune::runtime::Error as RuntimeError;
use flashtune::runtime::reference::{
    Attention, GradientInputs, compare_gradients, oracle_gradients, unfused_gradients,
};
use flashtune::{
    Backward, DType, Distribution, Error, Forward, HostTensor, Layout, Mask, Program, ProgramRef, SideInputs,
};
use flashtune::{Policy, Scalar, SideData, Stream};
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
            dq,
            dk,
            dv,
            mask: Mask::Causal,
            scale: None,
            program: None,
            side: SideInputs::default(),
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
    let attention = Attention { mask: Mask::Causal, scale, program: Some((&program, &data)), sequence: 0 };
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
