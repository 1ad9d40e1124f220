//! Does a compiled kernel compute the gradient of what a score program reads? As [`super::BackwardCase`] asks of dQ, dK
//! and dV.

use super::{BackwardCase, CheckInputs, CheckReport};
use crate::guarded::{Guarded, written};
use crate::reference::{Attention, GradientInputs, Rows, compare_gradient_by, oracle_gradient_by, unfused_gradient_by};
use crate::{Device, Error, GradientCall, HostTensor, Module, Result, SideView, gradient_of, typical_side};
use flashtune_codegen::abi::GradientArgs;
use flashtune_codegen::score::{SideData, Storage};
use flashtune_codegen::{DType, Op, Problem, Shape};
use half::{bf16, f16};
use std::sync::Arc;

/// One gradient problem, shape and input set on a device, with the expected gradient.
pub struct GradientCase {
    backward: BackwardCase,
    name: String,
    stored: Storage,
    gradient: GradientCall,
    output: Guarded,
    elements: usize,
    oracle: Rows,
    unfused: Rows,
}

impl GradientCase {
    /// Makes inputs, with [`typical_side`] for what the problem's score program reads, computes the expected gradient
    /// and uploads. The gradient is written as `stored`.
    ///
    /// # Errors
    /// A problem that is none of a gradient, and as [`BackwardCase::new`].
    pub fn new(
        device: Arc<dyn Device>,
        problem: &Problem,
        shape: &Shape,
        inputs: &CheckInputs,
        stored: Storage,
    ) -> Result<Self> {
        let data = problem.program.map_or(SideData::default(), |p| typical_side(&p, shape, inputs.seed));
        Self::with_side(device, problem, shape, inputs, stored, &data)
    }

    /// [`GradientCase::new`] with the scalars and tensors that the problem's score program reads.
    ///
    /// # Errors
    /// As [`GradientCase::new`], and data that does not fit the program.
    pub fn with_side(
        device: Arc<dyn Device>,
        problem: &Problem,
        shape: &Shape,
        inputs: &CheckInputs,
        stored: Storage,
        data: &SideData,
    ) -> Result<Self> {
        let (Some(program), Some(by), Some(at)) = (problem.program, problem.derives_by(), problem.by) else {
            let limit = "the gradient of a tensor or scalar of its score program";
            let remedy = "use `Problem::gradient_by`";
            return Err(flashtune_codegen::Error::unsupported("op", problem.op, limit, remedy).into());
        };
        let of_backward = Problem { op: Op::Backward, by: None, ..*problem };
        let backward = BackwardCase::with_side(device, &of_backward, shape, inputs, data)?;
        let d = &*backward.device;
        let lengths: Vec<u64> =
            data.tensors.get(&by.name).map_or(Vec::new(), |t| t.shape.iter().map(|n| *n as u64).collect());
        let elements: u64 = lengths.iter().product();
        let output = Guarded::new(d, "gradient", &vec![0; elements as usize * stored.bytes()])?;
        let read = SideView::contiguous(0, by.storage, &lengths);
        let out = SideView::contiguous(output.address(), stored, &lengths);
        let mut gradient = gradient_of(&backward.call, *problem, by.axes.as_ref().map(|_| &read), &out)?;
        gradient.args.backward.side = backward.args().side;

        let host = |name: &str| backward.inputs.iter().find(|i| i.name == name).map(|i| &i.host);
        let input = |name: &str| host(name).expect("every backward pass has it");
        let dlse = host("dlse").map(HostTensor::values);
        let given =
            GradientInputs { q: input("q"), k: input("k"), v: input("v"), dout: input("dout"), dlse: dlse.as_deref() };
        let scale = gradient.args.backward.scale;
        let attention =
            Attention { mask: shape.mask, scale, program: Some((program.kept(), data)), sequence: 0, dropout: None };
        let oracle = oracle_gradient_by(&given, &attention, at.into());
        let unfused = unfused_gradient_by(&given, &attention, at.into(), dtype_of(stored));
        let (name, elements) = (by.name.clone(), elements as usize);
        Ok(Self { backward, name, stored, gradient, output, elements, oracle, unfused })
    }

    /// The arguments of the case's launch: valid as long as the case lives. The gradient may be overwritten at will.
    pub fn args(&self) -> &GradientArgs {
        &self.gradient.args
    }

    /// What the case's launch comes down to, but for what the program reads.
    pub fn call(&self) -> &GradientCall {
        &self.gradient
    }

    /// Launches a kernel twice into poisoned memory and compares.
    ///
    /// # Errors
    /// When the kernel is for another problem or a device call fails; a wrong result is not an error but a report.
    pub fn check(&self, module: &dyn Module) -> Result<CheckReport> {
        let ((first, mut stray), (again, also)) = (self.run(module)?, self.run(module)?);
        stray = stray.or(also);
        let device = &*self.backward.device;
        for input in &self.backward.inputs {
            stray = stray.or(input.memory.changed(device, input.host.bytes(), device.stream())?);
        }
        let values: Vec<f32> = first.chunks_exact(self.stored.bytes()).map(|b| self.value(b)).collect();
        let poisoned = written(&first).is_none() && self.elements > 0;
        stray = stray.or_else(|| poisoned.then(|| format!("d{} was not written", self.name)));
        let coarser = |a: DType, b: DType| if a.epsilon() > b.epsilon() { a } else { b };
        let dtype = coarser(self.gradient.problem.dtype, dtype_of(self.stored));
        let verdict = compare_gradient_by(&self.name, &values, dtype, &self.oracle, &self.unfused);
        Ok(CheckReport { verdict, repeatable: first == again, stray })
    }

    fn value(&self, bytes: &[u8]) -> f32 {
        match (self.stored, bytes) {
            (Storage::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f32(),
            (Storage::Bf16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f32(),
            (_, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
            _ => unreachable!("gradients have 2 or 4 bytes an element"),
        }
    }

    /// One launch into poisoned memory: its bytes, and what was written around it.
    fn run(&self, module: &dyn Module) -> Result<(Vec<u8>, Option<String>)> {
        let (device, kernel) = (&*self.backward.device, module.kernel());
        if kernel.problem != self.gradient.problem {
            return Err(Error::Device {
                call: "check",
                device: device.fingerprint().to_string(),
                message: format!(
                    "the kernel computes {}, the inputs are for {}",
                    kernel.problem, self.gradient.problem
                ),
                remedy: "check a kernel with inputs of its own problem",
            });
        }
        let stream = device.stream();
        self.output.poison(device)?;
        if self.elements > 0 {
            let plan = self.gradient.plan(kernel)?;
            // SAFETY: the arguments were made by `gradient_call` from views of buffers that `self` owns.
            unsafe { device.launch(module, &plan, (&self.gradient.args).into(), stream)? };
        }
        device.synchronize(stream)?;
        self.output.download(device, stream)
    }
}

/// The dtype of a float storage.
fn dtype_of(storage: Storage) -> DType {
    match storage {
        Storage::F16 => DType::F16,
        Storage::Bf16 => DType::Bf16,
        _ => DType::F32,
    }
}
