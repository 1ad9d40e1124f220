//! Tensor maps: what the copy engine of Hopper is told about Q, K, V and O, encoded by the driver.

use super::context::Context;
use crate::{Error, Result};
use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};
use flashtune_codegen::abi::{ForwardArgs, Sm90Args, TensorMap};
use flashtune_codegen::{DType, Kernel, TensorMapSpec, Tiling, unaddressable};

/// The argument struct of a launch of `forward/sm90`. Host arithmetic only: nothing of the device is touched.
pub(super) fn sm90_args(
    context: &Context,
    kernel: &Kernel,
    tiling: Tiling,
    forward: &ForwardArgs,
    queue: i32,
) -> Result<Sm90Args> {
    let refused = |message: String| Error::Device {
        call: "cuTensorMapEncodeTiled",
        device: context.name.clone(),
        message,
        remedy: "launch through a plan, which leaves such tensors to another kernel",
    };
    if let Some(why) = unaddressable(forward) {
        return Err(refused(why));
    }
    let specs = kernel
        .tensor_maps(&tiling, forward)
        .ok_or_else(|| refused(format!("{} takes no tensor maps", kernel.schedule.family())))?;
    let mut maps = [TensorMap::default(); 4];
    for (map, spec) in maps.iter_mut().zip(&specs) {
        *map = encode(context, spec)?;
    }
    Ok(Sm90Args { maps, forward: *forward, tiling, queue })
}

fn encode(context: &Context, spec: &TensorMapSpec) -> Result<TensorMap> {
    let dtype = match spec.dtype {
        DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    };
    let mut map = TensorMap::default();
    let element_strides = [1u32; 5];
    // SAFETY: the map is 128 bytes at a multiple of 64, the arrays hold `rank` numbers (strides one fewer), and the
    // driver only reads them; the address is written into the map and not followed.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            std::ptr::from_mut(&mut map).cast::<CUtensorMap>(),
            dtype,
            spec.rank as u32,
            spec.address as usize as *mut std::ffi::c_void,
            spec.dims.as_ptr(),
            spec.strides.as_ptr(),
            spec.tile.as_ptr(),
            element_strides.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|e| context.failed("cuTensorMapEncodeTiled", e))?;
    Ok(map)
}

const _: () = assert!(size_of::<TensorMap>() == size_of::<CUtensorMap>() && align_of::<TensorMap>() == 64);
