//! Tensor maps: what the copy engine of Hopper is told about Q, K, V, O and biases, encoded by the driver.

use super::context::Context;
use crate::{Error, Result};
use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};
use flashtune_codegen::abi::{BackwardMappedArgs, MappedArgs, RaggedMappedArgs, SideTensorArg, TensorMap};
use flashtune_codegen::{DType, Kernel, TensorMapSpec, backward_unaddressable, ragged_unaddressable, unaddressable};
use std::cell::RefCell;

/// Maps that a thread keeps: those of the last calls, since calls come again with the same tensors.
const KEPT: usize = 64;

thread_local! {
    static LATELY: RefCell<[Option<(TensorMapSpec, TensorMap)>; KEPT]> = const { RefCell::new([None; KEPT]) };
}

/// Puts the maps of Q, K, V and O, and of biases among the tensors of a score program, into the arguments of a launch
/// of
/// `forward/sm90` or `forward/sm90_fp8`. Host arithmetic only: nothing of the device is touched.
pub(super) fn encode_all(
    context: &Context,
    kernel: &Kernel,
    args: &mut MappedArgs,
    tensors: &[SideTensorArg],
) -> Result<()> {
    let refused = |message| refused(context, message);
    if let Some(why) = unaddressable(&args.forward) {
        return Err(refused(why));
    }
    let specs = kernel
        .tensor_maps(&args.tiling, &args.forward)
        .ok_or_else(|| refused(format!("{} takes no tensor maps", kernel.schedule.family())))?;
    LATELY.with_borrow_mut(|lately| {
        for (map, spec) in args.maps.iter_mut().zip(&specs) {
            *map = kept(lately, spec, || encode(context, spec))?;
        }
        for (nth, spec) in kernel.bias_maps(&args.forward, tensors).iter().enumerate() {
            let Some(spec) = spec else { continue };
            args.biases[nth] = kept(lately, spec, || encode(context, spec))?;
            args.biases_mapped |= 1 << nth;
        }
        Ok(())
    })
}

/// The same for a launch over a ragged batch.
pub(super) fn encode_ragged(context: &Context, kernel: &Kernel, args: &mut RaggedMappedArgs) -> Result<()> {
    if let Some(why) = ragged_unaddressable(&kernel.problem, &args.forward) {
        return Err(refused(context, why.to_string()));
    }
    let (specs, box_keys) = kernel
        .ragged_tensor_maps(&args.tiling, &args.forward)
        .ok_or_else(|| refused(context, format!("{} takes no tensor maps", kernel.schedule.family())))?;
    args.box_keys = box_keys;
    LATELY.with_borrow_mut(|lately| {
        for (map, spec) in args.maps.iter_mut().zip(&specs) {
            *map = kept(lately, spec, || encode(context, spec))?;
        }
        Ok(())
    })
}

/// The same for a launch of `backward/sm90`.
pub(super) fn encode_backward(context: &Context, kernel: &Kernel, args: &mut BackwardMappedArgs) -> Result<()> {
    if let Some(why) = backward_unaddressable(&args.backward) {
        return Err(refused(context, why));
    }
    let specs = kernel
        .backward_tensor_maps(&args.backward)
        .ok_or_else(|| refused(context, format!("{} takes no tensor maps", kernel.schedule.family())))?;
    LATELY.with_borrow_mut(|lately| {
        for (map, spec) in args.maps.iter_mut().zip(&specs) {
            *map = kept(lately, spec, || encode(context, spec))?;
        }
        Ok(())
    })
}

fn refused(context: &Context, message: String) -> Error {
    Error::Device {
        call: "cuTensorMapEncodeTiled",
        device: context.name.clone(),
        message,
        remedy: "launch through a plan, which leaves such tensors to another kernel",
    }
}

/// A map out of those that are kept, or made and kept in the place of another.
fn kept(
    lately: &mut [Option<(TensorMapSpec, TensorMap)>; KEPT],
    spec: &TensorMapSpec,
    make: impl FnOnce() -> Result<TensorMap>,
) -> Result<TensorMap> {
    let words = spec.dims.iter().chain(&spec.strides).fold(spec.address >> 4, |sum, word| sum.rotate_left(7) ^ word);
    let place = &mut lately[(words.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize];
    match place {
        Some((of, map)) if of == spec => Ok(*map),
        _ => {
            let map = make()?;
            *place = Some((*spec, map));
            Ok(map)
        }
    }
}

fn encode(context: &Context, spec: &TensorMapSpec) -> Result<TensorMap> {
    let dtype = match spec.dtype {
        DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::E4m3 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_made_once_until_another_takes_its_place() {
        let spec = |address: u64, rows: u64| TensorMapSpec {
            dtype: DType::Bf16,
            address,
            rank: 4,
            dims: [64, rows, 2, 1, 1],
            strides: [128, 128 * rows, 256 * rows, 0],
            tile: [64, 64, 1, 1, 1],
        };
        let mut lately = [None; KEPT];
        let mut made = 0;
        let mut get = |spec: &TensorMapSpec| {
            let make = || {
                made += 1;
                Ok(TensorMap([spec.address ^ spec.dims[1]; 16]))
            };
            let map = kept(&mut lately, spec, make).unwrap();
            assert_eq!(map.0[15], spec.address ^ spec.dims[1]);
            made
        };
        assert_eq!([get(&spec(4096, 8)), get(&spec(4096, 8)), get(&spec(4096, 9)), get(&spec(8192, 8))], [1, 1, 2, 3]);
        // Tensors of 16 layers, one after the other: few share a place.
        let layers: Vec<_> = (0..16).flat_map(|n| [spec(n << 21, 512), spec((n << 21) + (1 << 20), 512)]).collect();
        let first = layers.iter().map(&mut get).last().unwrap();
        let second = layers.iter().map(&mut get).last().unwrap();
        assert!(second - first <= 20, "{} of {}", second - first, layers.len());
        let fails = || Err(Error::Device { call: "", device: String::new(), message: String::new(), remedy: "" });
        assert!(kept(&mut lately, &spec(1 << 40, 1), fails).is_err());
    }
}
