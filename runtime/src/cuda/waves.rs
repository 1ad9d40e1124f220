//! Launches whose stages run in waves ([`flashtune_codegen::Waves`]): memory for what the stages leave for each other,
//! taken and given back in the stream's order, and the same stages again for every wave.

use super::module::CudaModule;
use super::parameter::{Base, Parameter};
use super::scratch::Scratch;
use super::{CudaDevice, raw, tensor_map};
use crate::{Module, Result, Stream};
use flashtune_codegen::abi::{BackwardArgs, BackwardMappedArgs};
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
        let scratch = Scratch::new(&self.context, self.context.pool()?, waves.bytes(), raw(stream))?;
        let [keys_section, queries_section] = waves.sections.map(|n| n as i32);
        let mut mapped = BackwardMappedArgs {
            maps: Default::default(),
            backward: BackwardArgs { scratch: scratch.address, ..*args },
            first_pair: 0,
            pairs: 0,
            keys_section,
            queries_section,
        };
        tensor_map::encode_backward(&self.context, module.kernel(), &mut mapped)?;
        for (first, count) in waves.iter() {
            (mapped.first_pair, mapped.pairs) = (first as i32, count as i32);
            let base = Base::BackwardMapped(&mapped);
            let packed;
            let parameter = match &module.earlier_args {
                None => base.address(),
                Some(layout) => {
                    // SAFETY: the layout was checked when the module was loaded; there is no score program.
                    packed = unsafe { Parameter::packed(layout, base, None) };
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
