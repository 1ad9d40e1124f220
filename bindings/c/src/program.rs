//! The score program of a call, and what it reads.

use crate::backward::BackwardArgs;
use crate::error::{Failure, Result};
use crate::input;
use crate::prepared::Prepared;
use crate::ragged::RaggedArgs;
use crate::types::{ForwardArgs, Input, Storage};
use engine::score::{Declaration, MAX_INPUTS, MAX_RANK, Storage as Stored, Texts};
use engine::{ProgramRef, Scalar, SideInputs, SideView};
use std::collections::HashMap;
use std::ffi::c_char;
use std::fmt::Write;
use std::sync::{LazyLock, PoisonError, RwLock};

/// More than both kinds that a program may read is a length that was never set.
const MOST: u64 = 4 * MAX_INPUTS as u64;

/// Scalars and tensors of a call by name, good for as long as the caller's strings are.
#[derive(Default)]
pub(crate) struct Inputs<'a> {
    scalars: Vec<(&'a str, Scalar)>,
    tensors: Vec<(&'a str, SideView)>,
}

impl Inputs<'_> {
    pub fn side(&self) -> SideInputs<'_> {
        SideInputs { scalars: &self.scalars, tensors: &self.tensors }
    }

    fn has(&self, name: &str) -> bool {
        self.scalars.iter().any(|(n, _)| *n == name) || self.tensors.iter().any(|(n, _)| *n == name)
    }
}

/// The fields of a call that its program is in.
pub(crate) struct Fields {
    mask_program: *const c_char,
    score_program: *const c_char,
    sink_program: *const c_char,
    inputs: *const Input,
    inputs_len: u64,
    input_size: u64,
}

impl From<&ForwardArgs> for Fields {
    fn from(args: &ForwardArgs) -> Self {
        let ForwardArgs { mask_program, score_program, sink_program, inputs, inputs_len, input_size, .. } = *args;
        Self { mask_program, score_program, sink_program, inputs, inputs_len, input_size }
    }
}

impl From<&BackwardArgs> for Fields {
    fn from(args: &BackwardArgs) -> Self {
        let BackwardArgs { mask_program, score_program, sink_program, inputs, inputs_len, input_size, .. } = *args;
        Self { mask_program, score_program, sink_program, inputs, inputs_len, input_size }
    }
}

impl From<&RaggedArgs> for Fields {
    fn from(args: &RaggedArgs) -> Self {
        let RaggedArgs { mask_program, score_program, sink_program, inputs, inputs_len, input_size, .. } = *args;
        Self { mask_program, score_program, sink_program, inputs, inputs_len, input_size }
    }
}

/// The program of a call, if it has one: that of a prepared mask has it, too.
///
/// # Safety
/// Strings and inputs of `args` are null or valid, and stay as they are for `'a`.
pub(crate) unsafe fn of_call<'a>(
    args: impl Into<Fields>,
    prepared: Option<&'a Prepared>,
) -> Result<Option<(ProgramRef, Inputs<'a>)>> {
    let args = args.into();
    // SAFETY: by this function's contract.
    let mut texts: Texts<'a> = unsafe {
        Texts {
            mask: input::text(args.mask_program, "mask_program")?,
            score: input::text(args.score_program, "score_program")?,
            sink: input::text(args.sink_program, "sink_program")?,
        }
    };
    if texts == Texts::default() {
        return Ok(None);
    }
    if let (None, Some(prepared)) = (texts.mask, prepared) {
        texts.mask = Some(&prepared.text);
    }
    // SAFETY: as above.
    let inputs = unsafe { inputs(args.inputs, args.inputs_len, args.input_size)? };
    Ok(Some((program(&texts, &inputs, prepared.map(|p| p.block_mask.program()))?, inputs)))
}

/// The programs of this process by their texts and the kinds of their inputs, so that a text is read once.
static PROGRAMS: LazyLock<RwLock<HashMap<String, ProgramRef>>> = LazyLock::new(RwLock::default);

/// What texts say. What a prepared mask reads is declared as there.
pub(crate) fn program(texts: &Texts<'_>, inputs: &Inputs<'_>, mask: Option<ProgramRef>) -> Result<ProgramRef> {
    let mut key = mask.map_or_else(String::new, |mask| mask.name());
    for text in [texts.mask, texts.score, texts.sink] {
        // A C string holds no zero byte, so texts cannot run into each other; no text is other than any text.
        key.push(if text.is_some() { '+' } else { '-' });
        key.push_str(text.unwrap_or_default());
        key.push('\0');
    }
    for (name, scalar) in &inputs.scalars {
        let _ = write!(key, "{name}\0{}\0", matches!(scalar, Scalar::Float(_)));
    }
    for (name, view) in &inputs.tensors {
        let _ = write!(key, "{name}\0{}\0{}\0", view.storage.name(), view.rank);
    }
    if let Some(known) = PROGRAMS.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
        return Ok(*known);
    }
    let scalar = |(name, value): &(&str, Scalar)| {
        Declaration::scalar(*name, if matches!(value, Scalar::Int(_)) { Stored::I32 } else { Stored::F32 })
    };
    let known = mask.map_or(&[][..], |mask| mask.kept().declarations());
    let brought = inputs.scalars.iter().map(scalar).chain(inputs.tensors.iter().map(|(n, view)| view.declaration(n)));
    let brought = brought.filter(|d| known.iter().all(|k| k.name != d.name));
    let given: Vec<Declaration> = known.iter().cloned().chain(brought).collect();
    let program = texts.program(&given).map_err(engine::Error::from)?;
    let program = ProgramRef::new(program);
    PROGRAMS.write().unwrap_or_else(PoisonError::into_inner).insert(key, program);
    Ok(program)
}

/// An array of inputs, whose elements have `size` bytes.
///
/// # Safety
/// The array is null or valid, and it and its strings stay as they are for `'a`.
pub(crate) unsafe fn inputs<'a>(array: *const Input, len: u64, size: u64) -> Result<Inputs<'a>> {
    let mut found = Inputs::default();
    // SAFETY: by this function's contract.
    unsafe {
        each("inputs", array, len, size, |i, name, item| {
            if found.has(name) {
                let message = format!("inputs[{i}] is named `{name}`, as one before it is; give each name once");
                return Err(Failure::argument(message));
            }
            match item.rank {
                0 => found.scalars.push((name, scalar(name, &item, storage(name, item.storage)?)?)),
                _ => found.tensors.push((name, tensor(name, &item)?)),
            }
            Ok(())
        })?;
    }
    Ok(found)
}

/// Memory for gradients by name, as [`inputs`]; that of a scalar has no axis.
///
/// # Safety
/// As [`inputs`].
pub(crate) unsafe fn gradients<'a>(array: *const Input, len: u64, size: u64) -> Result<Vec<(&'a str, SideView)>> {
    let mut found: Vec<(&str, SideView)> = Vec::new();
    // SAFETY: by this function's contract.
    unsafe {
        each("gradients", array, len, size, |i, name, item| {
            if found.iter().any(|(n, _)| *n == name) {
                let message = format!("gradients[{i}] is named `{name}`, as one before it is; give each name once");
                return Err(Failure::argument(message));
            }
            found.push((name, tensor(name, &item)?));
            Ok(())
        })?;
    }
    Ok(found)
}

/// Calls `f` with the number, the name and the rest of each element of an array.
///
/// # Safety
/// As [`inputs`].
unsafe fn each<'a>(
    field: &str,
    array: *const Input,
    len: u64,
    size: u64,
    mut f: impl FnMut(usize, &'a str, Input) -> Result<()>,
) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    if array.is_null() || len > MOST {
        let message = format!("{field}_len is {len}, but {field} is null or the number is above {MOST}");
        return Err(Failure::argument(message));
    }
    if size != size_of::<Input>() as u64 {
        return Err(Failure::argument(format!(
            "input_size is {size}, but this library knows inputs of {} bytes; set it to sizeof(flashtune_input)",
            size_of::<Input>()
        )));
    }
    for i in 0..len as usize {
        // SAFETY: inside of the array by the caller's word.
        let item = unsafe { array.add(i).read_unaligned() };
        // SAFETY: by this function's contract.
        let name = unsafe { input::text(item.name, "the name of an input")? };
        f(i, name.ok_or_else(|| Failure::argument(format!("the name of {field}[{i}] is null")))?, item)?;
    }
    Ok(())
}

/// Where a tensor lies.
fn tensor(name: &str, item: &Input) -> Result<SideView> {
    let storage = storage(name, item.storage)?;
    let rank = usize::try_from(item.rank).ok().filter(|rank| *rank <= MAX_RANK).ok_or_else(|| {
        let rank = item.rank;
        Failure::argument(format!("the rank of the input `{name}` is {rank}, but it is 0 (a scalar) to {MAX_RANK}"))
    })?;
    if item.shape[..rank].iter().any(|n| *n < 0) {
        let shape = &item.shape[..rank];
        let message = format!("the shape of the input `{name}` is {shape:?}, but sizes are not negative");
        return Err(Failure::argument(message));
    }
    // Beyond the rank whatever was in the caller's memory is legal, and unused.
    let kept = |i: usize, n: i64, none: i64| if i < rank { n } else { none };
    let shape = std::array::from_fn(|i| u64::try_from(kept(i, item.shape[i], 1)).unwrap_or(0));
    let strides = std::array::from_fn(|i| kept(i, item.strides[i], 0));
    Ok(SideView { address: item.data as usize as u64, storage, rank, shape, strides })
}

fn scalar(name: &str, item: &Input, storage: Stored) -> Result<Scalar> {
    match storage {
        Stored::I32 | Stored::I64 => Ok(Scalar::Int(item.int_value)),
        Stored::F32 => Ok(Scalar::Float(item.float_value as f32)),
        _ => Err(Failure::argument(format!(
            "the scalar `{name}` is of {}, but run-time scalars are I32, I64 or F32",
            storage.name()
        ))),
    }
}

fn storage(name: &str, number: i32) -> Result<Stored> {
    const F32: i32 = Storage::F32 as i32;
    const F16: i32 = Storage::F16 as i32;
    const BF16: i32 = Storage::Bf16 as i32;
    const I32: i32 = Storage::I32 as i32;
    const I64: i32 = Storage::I64 as i32;
    const BOOL: i32 = Storage::Bool as i32;
    Ok(match number {
        F32 => Stored::F32,
        F16 => Stored::F16,
        BF16 => Stored::Bf16,
        I32 => Stored::I32,
        I64 => Stored::I64,
        BOOL => Stored::Bool,
        n => {
            let message = format!("the storage of the input `{name}` is {n}, but a flashtune_storage is 1 to 6");
            return Err(Failure::argument(message));
        }
    })
}
