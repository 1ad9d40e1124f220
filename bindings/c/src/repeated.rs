//! Calls of Python's package that are like one before: their tensors are read through their library's DLPack exchange
//! API, known by their forms, and only their addresses are filled in.
//!
//! Asked of the tensors one by one by Python, and packed there, that is half of what such a call costs the host.

use crate::dlpack::DlTensor;
use crate::engine_handle::ENGINES;
use crate::error::{Failure, Result, guard};
use crate::forward::{Places, forward};
use crate::ragged::forward_ragged;
use crate::types::{EngineHandle, ForwardArgs, Status};
use foldhash::HashMap;
use std::ffi::{c_int, c_long, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The most tensors of a call.
const MOST_TENSORS: usize = 12;
/// Of a tensor.
const MOST_AXES: usize = 8;
/// Words of a tensor's form: its number of axes and its device's type, the device's number, the dtype, and the length
/// and stride of each axis.
const MOST_WORDS: usize = 3 + 2 * MOST_AXES;
/// Calls of an engine that are known, of both functions: as many as the package of Python knows of each. A decode
/// without a cache meets a new one in each step, and starts over.
const MOST_CALLS: usize = 512;
/// The largest struct of arguments.
const MOST_BYTES: usize = 1024;
/// `flashtune_repeat_call` gives this for a call that is not known.
pub const CALL_IS_NOT_KNOWN: i32 = -1;

/// `dltensor_from_py_object_no_sync` of a package's DLPackExchangeAPI: 0, or -1 with a Python exception set.
pub type PythonRead = unsafe extern "C" fn(object: *mut c_void, tensor: *mut DlTensor) -> c_int;

/// What is called of the interpreter.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PythonFunctions {
    /// PyLong_AsUnsignedLongLong.
    pub as_number: unsafe extern "C" fn(object: *mut c_void) -> u64,
    /// PyLong_FromLong.
    pub from_number: unsafe extern "C" fn(number: c_long) -> *mut c_void,
    /// PyErr_Clear.
    pub clear_error: unsafe extern "C" fn(),
    /// PyEval_SaveThread.
    pub release: unsafe extern "C" fn() -> *mut c_void,
    /// PyEval_RestoreThread, which may end the thread where the interpreter has ended.
    pub acquire: unsafe extern "C-unwind" fn(state: *mut c_void),
}

/// The word of [`ForwardArgs`] that has the stream, which `flashtune_forward_ragged` takes beside its struct.
const STREAM_AT: usize = std::mem::offset_of!(ForwardArgs, stream) / 8;

/// Those of the process's interpreter.
static PYTHON: OnceLock<PythonFunctions> = OnceLock::new();

/// Of the numbers that come before the tensors: engine, number, stream, and the address of [`PythonRead`].
const NUMBERS: usize = 4;

/// Arguments with places for addresses.
#[derive(Debug)]
struct Known {
    ragged: bool,
    words: Vec<u64>,
    /// Words of the tensors' addresses.
    places: Vec<usize>,
}

/// The calls of an engine, by the host's number for everything but tensors, and the tensors' forms.
#[derive(Debug, Default)]
pub(crate) struct Calls(Mutex<HashMap<Box<[i64]>, Arc<Known>>>);

impl Calls {
    fn find(&self, key: &[i64]) -> Option<Arc<Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }
    fn insert(&self, key: &[i64], known: Known) {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if calls.len() >= MOST_CALLS {
            calls.clear();
        }
        calls.insert(key.into(), Arc::new(known));
    }
}

/// A number, and what tensors are like; their addresses apart.
struct Seen {
    key: [i64; 1 + MOST_TENSORS * MOST_WORDS],
    words: usize,
    addresses: [u64; MOST_TENSORS],
}

impl Seen {
    fn key(&self) -> &[i64] {
        &self.key[..self.words]
    }

    /// None where a tensor cannot be read, has no memory, more than 8 axes or no strides.
    ///
    /// # Safety
    /// `objects` are tensors that `read` is for, and this thread holds the interpreter's lock.
    unsafe fn of(read: PythonRead, number: u64, objects: &[*mut c_void]) -> Option<Self> {
        let mut seen = Self { key: [0; 1 + MOST_TENSORS * MOST_WORDS], words: 1, addresses: [0; MOST_TENSORS] };
        seen.key[0] = number as i64;
        for (object, address) in objects.iter().zip(&mut seen.addresses) {
            // SAFETY: all zeros is a tensor without axes.
            let mut t: DlTensor = unsafe { std::mem::zeroed() };
            // SAFETY: by this function's contract.
            if unsafe { read(*object, &mut t) } != 0 {
                if let Some(python) = PYTHON.get() {
                    // SAFETY: as above.
                    unsafe { (python.clear_error)() };
                }
                return None;
            }
            let axes = usize::try_from(t.ndim).ok().filter(|n| *n <= MOST_AXES)?;
            // Tensors that stand for others, as tracers have them, have no memory.
            if t.data.is_null() || axes != 0 && (t.shape.is_null() || t.strides.is_null()) {
                return None;
            }
            *address = (t.data as u64).wrapping_add(t.byte_offset);
            let dtype = i64::from(t.code) | i64::from(t.bits) << 8 | i64::from(t.lanes) << 16;
            let form = [i64::from(t.ndim) | i64::from(t.device_type) << 32, i64::from(t.device_id), dtype];
            seen.key[seen.words..][..3].copy_from_slice(&form);
            seen.words += 3;
            for list in [t.shape, t.strides] {
                for axis in 0..axes {
                    // SAFETY: DLPack's lists have a number for each axis, and are there as long as the tensor.
                    seen.key[seen.words] = unsafe { list.add(axis).read() };
                    seen.words += 1;
                }
            }
        }
        Some(seen)
    }
}

/// For Python alone, by a package of this version, before the others: what is called of the interpreter. The first call
/// counts.
///
/// # Safety
/// `functions` is NULL or valid, and its functions are what they are called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_python_functions(functions: *const PythonFunctions) -> Status {
    guard(|| {
        // SAFETY: by this function's contract.
        let functions = unsafe { functions.as_ref() }.ok_or_else(|| Failure::argument("functions is null"))?;
        PYTHON.get_or_init(|| *functions);
        Ok(())
    })
}

/// For Python alone, by a thread that holds the interpreter's lock: remembers a call that succeeded, for
/// `flashtune_repeat_call` with tensors of the same forms and the same `number`, which the host has for everything else
/// that the call was given.
///
/// `read`: what reads the tensors. `ragged`: 0 for `flashtune_forward`, 1 for `flashtune_forward_ragged`. `args`: the
/// call's arguments, of which nothing but the struct itself is kept; `places`: where in it the address of each tensor
/// stands, in bytes. `objects`: the tensors. A call of tensors that cannot be read is not remembered.
///
/// Fails with INVALID_ARGUMENT for more than 12 tensors, for arguments of more than 1024 bytes or no whole words, and
/// for places that are none; INVALID_HANDLE.
///
/// # Safety
/// The pointers are valid, with as many places and objects as `count` says, the objects such that `read` is for.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn flashtune_remember_call(
    engine: EngineHandle,
    number: u64,
    read: PythonRead,
    ragged: i32,
    args: *const u64,
    size: u64,
    places: *const u64,
    objects: *const *mut c_void,
    count: u64,
) -> Status {
    guard(|| {
        let (size, count) = (size as usize, count as usize);
        if count > MOST_TENSORS || size > MOST_BYTES || size % 8 != 0 {
            return Err(Failure::argument(format!(
                "{count} tensors and {size} bytes of arguments; at most {MOST_TENSORS}, and {MOST_BYTES} in whole words"
            )));
        }
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract, here and below.
        let words = (0..size / 8).map(|i| unsafe { args.add(i).read_unaligned() }).collect();
        let word = |at: u64| match at as usize {
            at if at % 8 == 0 && at < size => Ok(at / 8),
            at => Err(Failure::argument(format!("a place at {at} of {size} bytes, but it is a whole word of these"))),
        };
        // SAFETY: as above.
        let places = (0..count).map(|i| word(unsafe { places.add(i).read() })).collect::<Result<Vec<_>>>()?;
        // SAFETY: as above.
        let objects: Vec<_> = (0..count).map(|i| unsafe { objects.add(i).read() }).collect();
        // SAFETY: as above.
        if let Some(seen) = unsafe { Seen::of(read, number, &objects) } {
            opened.calls.insert(seen.key(), Known { ragged: ragged != 0, words, places });
        }
        Ok(())
    })
}

/// For Python alone, as a function of METH_FASTCALL, which costs a tenth of what ctypes does: a call that
/// `flashtune_remember_call` knows, over other tensors of the same forms. Its arguments are the engine, the number, the
/// stream and the address of what reads tensors, and up to 12 tensors. The interpreter's lock is given away while the
/// call is made. Addresses are not looked up, since the tensors are on the devices of those that were. Gives a number:
/// FLASHTUNE_CALL_IS_NOT_KNOWN where none such is known, a tensor cannot be read, or the arguments are others; else a
/// flashtune_status.
///
/// # Safety
/// `args` has `count` objects of Python, the tensors being such that the fourth reads; the call itself as
/// `flashtune_forward` or `flashtune_forward_ragged`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn flashtune_repeat_call(
    _: *mut c_void,
    args: *const *mut c_void,
    count: isize,
) -> *mut c_void {
    let Some(python) = PYTHON.get() else { return std::ptr::null_mut() };
    // SAFETY: by this function's contract.
    let status = unsafe { repeat(python, args, count as usize) };
    // SAFETY: as above.
    unsafe { (python.from_number)(status.into()) }
}

/// # Safety
/// As [`flashtune_repeat_call`].
unsafe fn repeat(python: &PythonFunctions, args: *const *mut c_void, count: usize) -> i32 {
    if !(NUMBERS..=NUMBERS + MOST_TENSORS).contains(&count) {
        return CALL_IS_NOT_KNOWN;
    }
    // SAFETY: by the caller's contract, here and below.
    let args = unsafe { std::slice::from_raw_parts(args, count) };
    // SAFETY: as above.
    let [engine, number, stream, read] = std::array::from_fn(|i| unsafe { (python.as_number)(args[i]) });
    if [engine, number, stream, read].contains(&u64::MAX) || read == 0 {
        // SAFETY: as above.
        unsafe { (python.clear_error)() };
        return CALL_IS_NOT_KNOWN;
    }
    // SAFETY: as above: it is the address of such a function.
    let read = unsafe { std::mem::transmute::<usize, PythonRead>(read as usize) };
    let stream = stream as usize as *mut c_void;
    let mut found = None;
    let status = guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: as above.
        if let Some(seen) = unsafe { Seen::of(read, number, &args[NUMBERS..]) } {
            found = opened.calls.find(seen.key()).map(|known| (known, seen.addresses));
        }
        Ok(())
    });
    if status as i32 != Status::Ok as i32 {
        return status as i32;
    }
    let Some((known, addresses)) = found else { return CALL_IS_NOT_KNOWN };
    let mut args = [0u64; MOST_BYTES / 8];
    args[..known.words.len()].copy_from_slice(&known.words);
    for (place, address) in known.places.iter().zip(addresses) {
        args[*place] = address;
    }
    let ragged = known.ragged;
    if !ragged {
        args[STREAM_AT] = stream as u64;
    }
    // Nothing is left to drop where the thread ends below.
    drop(known);
    // The call that is remembered had tensors of the same devices, and was looked at.
    // SAFETY: as above; a struct of this form has been taken before.
    unsafe {
        let state = (python.release)();
        let status = if ragged {
            forward_ragged(engine, args.as_ptr().cast(), stream, Places::Known)
        } else {
            forward(engine, args.as_ptr().cast(), Places::Known)
        };
        (python.acquire)(state);
        status as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An object is the address of a tensor here.
    unsafe extern "C" fn read(object: *mut c_void, tensor: *mut DlTensor) -> c_int {
        if object.is_null() {
            return -1;
        }
        // SAFETY: of this module's own.
        unsafe { *tensor = *object.cast::<DlTensor>() };
        0
    }

    fn seen(number: u64, tensors: &[Option<&DlTensor>]) -> Option<Seen> {
        let object =
            |t: &Option<&DlTensor>| t.map_or(std::ptr::null_mut(), |t| std::ptr::from_ref(t).cast_mut().cast());
        let objects: Vec<*mut c_void> = tensors.iter().map(object).collect();
        // SAFETY: tensors of this module's own.
        unsafe { Seen::of(read, number, &objects) }
    }

    fn tensor(shape: &[i64], strides: &[i64]) -> DlTensor {
        DlTensor {
            data: 0x1000 as *mut c_void,
            device_type: 2,
            device_id: 1,
            ndim: shape.len() as i32,
            code: 4,
            bits: 16,
            lanes: 1,
            shape: shape.as_ptr(),
            strides: strides.as_ptr(),
            byte_offset: 32,
        }
    }

    #[test]
    fn forms_are_all_but_the_address() {
        let (shape, strides, other) = ([2, 3], [10, 1], [2, 4]);
        let one = tensor(&shape, &strides);
        let scalar = DlTensor { ndim: 0, shape: std::ptr::null(), strides: std::ptr::null(), ..one };
        let both = seen(7, &[Some(&one), Some(&scalar)]).expect("both can be read");
        let (kind, dtype) = (2i64 << 32, 4 | 16 << 8 | 1 << 16);
        assert_eq!(both.key(), [7, kind | 2, 1, dtype, 2, 3, 10, 1, kind, 1, dtype]);
        assert_eq!(both.addresses[..2], [0x1020, 0x1020]);
        let key = |t: &DlTensor| seen(7, &[Some(t)]).expect("it can be read").key().to_vec();
        assert_eq!(key(&DlTensor { data: 0x2000 as *mut c_void, ..one }), key(&one));
        for other in [
            DlTensor { shape: other.as_ptr(), ..one },
            DlTensor { strides: other.as_ptr(), ..one },
            DlTensor { device_type: 1, ..one },
            DlTensor { device_id: 0, ..one },
            DlTensor { code: 2, ..one },
            DlTensor { bits: 32, ..one },
            DlTensor { lanes: 2, ..one },
            DlTensor { ndim: 1, ..one },
        ] {
            assert_ne!(key(&other), key(&one));
        }
    }

    #[test]
    fn what_cannot_be_read_is_not_known() {
        let axes = [1; 9];
        let (good, long) = (tensor(&axes[..8], &axes[..8]), tensor(&axes, &axes));
        assert_eq!(seen(0, &[Some(&good); 12]).map(|seen| seen.words), Some(1 + 12 * MOST_WORDS));
        assert!(seen(0, &[Some(&good), None]).is_none());
        assert!(seen(0, &[Some(&long)]).is_none());
        assert!(seen(0, &[Some(&DlTensor { ndim: -1, ..good })]).is_none());
        assert!(seen(0, &[Some(&DlTensor { strides: std::ptr::null(), ..good })]).is_none());
    }

    #[test]
    fn known_calls_are_bounded() {
        let calls = Calls::default();
        let known = || Known { ragged: false, words: vec![1], places: vec![0] };
        for i in 0..MOST_CALLS as i64 {
            calls.insert(&[i, 0], known());
        }
        assert!(calls.find(&[0, 0]).is_some() && calls.find(&[0, 1]).is_none() && calls.find(&[0]).is_none());
        calls.insert(&[-1], known());
        assert!(calls.find(&[0, 0]).is_none() && calls.find(&[-1]).is_some());
    }

    #[test]
    fn arguments_that_are_none_are_refused() {
        let (args, places) = ([0u64; 4], [0u64, 24]);
        let one = tensor(&[], &[]);
        let objects = [std::ptr::from_ref(&one).cast_mut().cast::<c_void>(); 2];
        let remember = |engine, size, places: &[u64; 2], count| {
            let (args, places) = (args.as_ptr(), places.as_ptr());
            // SAFETY: all are this module's own; nothing is read where there are more than are there.
            unsafe { flashtune_remember_call(engine, 0, read, 0, args, size, places, objects.as_ptr(), count) }
        };
        // SAFETY: zeros are what a struct begins with.
        let mut options: crate::Options = unsafe { std::mem::zeroed() };
        (options.struct_size, options.device) = (size_of::<crate::Options>() as u32, c"cpu".as_ptr());
        let mut engine = 0;
        // SAFETY: a struct of this module's own.
        let opened = unsafe { crate::flashtune_engine_open(&options, &mut engine) };
        assert_eq!(opened as i32, 0);
        let refused = Status::InvalidArgument as i32;
        assert_eq!(remember(engine, 32, &places, 2) as i32, 0);
        assert_eq!(remember(engine, 32, &places, 13) as i32, refused);
        assert_eq!(remember(engine, 1032, &places, 2) as i32, refused);
        assert_eq!(remember(engine, 28, &places, 2) as i32, refused);
        assert_eq!(remember(engine, 24, &places, 2) as i32, refused);
        assert_eq!(remember(engine, 32, &[0, 4], 2) as i32, refused);
        assert_eq!(crate::flashtune_engine_close(engine) as i32, 0);
        assert_eq!(remember(engine, 32, &places, 2) as i32, Status::InvalidHandle as i32);
    }
}
