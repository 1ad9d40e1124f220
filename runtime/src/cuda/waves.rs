//! Launches whose stages run in waves ([`flashtune_codegen::Waves`]): memory for what the stages leave for each other,
//! taken and given back in the stream's order, and the same stages again for every wave.

use super::module::CudaModule;
use super::parameter::{Base, Parameter};
use super::scratch::Scratch;
use super::{CudaDevice, raw, tensor_map};
use crate::{Module, Result, Stream};
use flashtune_codegen::abi::{BackwardArgs, BackwardMappedArgs, SideArgs};
use flashtune_codegen::{LaunchPlan, Waves};

impl CudaDevice {
    /// Launches a backward pass in waves. The context is current.
    ///
    /// # Safety
    /// As [`crate::Device::launch`].
    pub(super) unsafe fn launch_waves(
        &self,
        module: &CudaModule,
        plan: &LaunchPlan,
        waves: &Waves,
        args: &BackwardArgs,
        stream: Stream,
    ) -> Result<()> {
        let program = module.kernel().problem.program;
        if program.is_some() && args.side == 0 {
            let message = "the kernel has a score program, but is given nothing to read";
            return Err(self.error("launch", message, "launch through the engine, or give the arguments' `side`"));
        }
        // SAFETY: it is the address of the program's tables by the caller's promise.
        let side = program.as_ref().map(|p| (p.kept(), unsafe { &*(args.side as usize as *const SideArgs) }));
        let waves = waves.of_rows([args.q_rows, args.kv_rows].map(|rows| rows.max(0) as u64));
        let scratch = Scratch::new(&self.context, self.context.pool()?, waves.bytes(), raw(stream))?;
        let [keys_section, queries_section] = waves.sections.map(|n| n as i32);
        let mut mapped = BackwardMappedArgs {
            maps: Default::default(),
            backward: BackwardArgs { scratch: scratch.address, ..*args },
            first_pair: 0,
            pairs: 0,
            keys_section,
            queries_section,
            ds_bytes: waves.shared_bytes() as i64,
            walks: waves.walks.into(),
        };
        tensor_map::encode_backward(&self.context, module.kernel(), &mut mapped)?;
        for (first, count) in waves.iter() {
            (mapped.first_pair, mapped.pairs) = (first as i32, count as i32);
            let base = Base::BackwardMapped(&mapped);
            let packed;
            // SAFETY: the tables are the program's by the caller's promise; the layout was checked when the module was
            // loaded.
            let own = unsafe {
                match (&module.shorter_args, side) {
                    (None, None) => None,
                    (Some(layout), side) => Some(Parameter::packed(layout, base, side)),
                    (None, Some((program, side))) => Some(Parameter::new(base, program, side)),
                }
            };
            let parameter = match own {
                None => base.address(),
                Some(own) => {
                    packed = own;
                    std::ptr::from_ref(&packed).cast()
                }
            };
            for stage in plan.stages() {
                // SAFETY: by this function's contract; the driver copies the parameter before it returns.
                unsafe { self.enqueue(module, &stage.of_parts(count, waves.parts), parameter, stream)? };
            }
        }
        Ok(())
    }
}
