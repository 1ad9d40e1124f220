//! A mask prepared once and used by many calls: by all layers of a model, say.
//!
//! It holds nothing but what the kernels before an attention kernel find of the mask, made by the first call of each
//! geometry of kernels, and what that depends on: the program, sizes, scalars, and where the tensors are.

use crate::{Device, Error, Findings, Result, SideInputs, SideTable, SideView};
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::score::{Node, ProgramRef, Scalar, Var};
use flashtune_codegen::{Error as CodegenError, Mask, Shape};
use std::fmt;
use std::sync::{PoisonError, RwLock};

/// The sizes that a block mask is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskSizes {
    /// Sequences; `None` for any number of them, where the mask is the same for all.
    pub batch: Option<u32>,
    /// Query heads; `None` as above.
    pub heads: Option<u32>,
    /// KV heads; `None` as above.
    pub kv_heads: Option<u32>,
    /// Rows of Q per head.
    pub q_len: u32,
    /// Rows of K and V per head.
    pub kv_len: u32,
}

impl MaskSizes {
    /// The sizes of a call, one for what may be any number.
    fn shape(&self) -> Shape {
        let heads = self.heads.or(self.kv_heads).unwrap_or(1);
        let kv_heads = self.kv_heads.unwrap_or(heads);
        let batch = self.batch.unwrap_or(1);
        Shape { batch, heads, kv_heads, q_len: self.q_len, kv_len: self.kv_len, mask: Mask::Full }
    }
}

/// What was found of a mask, for the calls that bring it along. May be used from several threads and on several
/// streams.
pub struct BlockMask {
    /// The mask alone.
    program: ProgramRef,
    sizes: MaskSizes,
    scalars: Vec<(&'static str, Scalar)>,
    tensors: Vec<(&'static str, SideView)>,
    device: DeviceFingerprint,
    findings: Option<Box<dyn Findings>>,
    /// Programs of calls, and those that they are with this mask.
    known: RwLock<Vec<(ProgramRef, ProgramRef)>>,
}

impl BlockMask {
    /// A mask and what it reads. Nothing is found yet: the calls do that.
    ///
    /// # Errors
    /// [`Error::BlockMask`] for a program that changes scores, and for a number that the mask needs and that `sizes`
    /// leaves open; scalars and tensors that are missing or do not fit, by name.
    pub fn new(device: &dyn Device, program: ProgramRef, side: &SideInputs<'_>, sizes: MaskSizes) -> Result<Self> {
        if program.score().is_some() || program.sink().is_some() {
            let found = if program.score().is_some() { "one that changes the score" } else { "one with a sink" };
            let remedy = "leave score and sink out, and bring them with the calls";
            return Err(wrong("the program", found, "a block mask is of a mask alone", remedy));
        }
        let program = program.admitting(|name| side.scalar(name));
        let reads = |var: Var| program.graph().nodes().contains(&Node::Var(var));
        // The number of KV heads decides which of them a query head reads.
        let open = [
            ("batch", "`b`", sizes.batch, reads(Var::B)),
            ("heads", "`h`", sizes.heads, reads(Var::H)),
            ("kv_heads", "`h_kv`", sizes.kv_heads, reads(Var::HKv)),
        ];
        for (field, name, given, needed) in open {
            if needed && given.is_none() {
                let expected = format!("the mask reads {name}, so that it is not the same for all");
                return Err(wrong(field, "left open", &expected, "name their number"));
            }
        }
        let shape = sizes.shape();
        shape.validate()?;
        SideTable::new(&program, &shape, side).map_err(CodegenError::from)?;
        let (mut scalars, mut tensors) = (Vec::new(), Vec::new());
        for d in program.kept().declarations() {
            let name = d.name.as_str();
            let scalar = side.scalars.iter().find(|(n, _)| *n == name && d.axes.is_none());
            let tensor = side.tensors.iter().find(|(n, _)| *n == name && d.axes.is_some());
            scalars.extend(scalar.map(|(_, x)| (name, *x)));
            tensors.extend(tensor.map(|(_, x)| (name, *x)));
        }
        let (device, findings) = (device.fingerprint().clone(), device.findings());
        Ok(Self { program, sizes, scalars, tensors, device, findings, known: RwLock::default() })
    }

    /// The mask.
    pub fn program(&self) -> ProgramRef {
        self.program
    }

    /// The sizes that it was made for.
    pub fn sizes(&self) -> &MaskSizes {
        &self.sizes
    }

    /// What the mask reads.
    pub fn side(&self) -> SideInputs<'_> {
        SideInputs { scalars: &self.scalars, tensors: &self.tensors }
    }

    /// Bytes of device memory that it holds now.
    pub fn bytes(&self) -> u64 {
        self.findings().map_or(0, Findings::bytes)
    }

    /// How many times the mask was looked through: once for each geometry of kernels that was launched with it, and
    /// never where kernels know the mask by arithmetic.
    pub fn found(&self) -> usize {
        self.findings().map_or(0, Findings::count)
    }

    /// What launches go by.
    pub fn findings(&self) -> Option<&dyn Findings> {
        self.findings.as_deref()
    }

    /// The program of a call that brings this mask along: the call's own, which has the same mask or none.
    ///
    /// # Errors
    /// [`Error::BlockMask`] when it has another one, and names that mean one thing in the mask and another in the
    /// call's program.
    pub fn program_of(&self, called: Option<ProgramRef>) -> Result<ProgramRef> {
        let Some(called) = called.filter(|p| !p.is_plain() && *p != self.program) else { return Ok(self.program) };
        let known = |list: &[(ProgramRef, ProgramRef)]| list.iter().find(|(p, _)| *p == called).map(|(_, with)| *with);
        if let Some(with) = known(&self.known.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(with);
        }
        let joined = match called.mask() {
            Some(_) if called.mask_only().map_err(CodegenError::from)? == *self.program => called,
            Some(_) => {
                let expected = format!("the block mask is of\n{}", self.program.text());
                let remedy = "leave the mask out of the call, or make a block mask of it";
                return Err(wrong("the call's mask", "another", &expected, remedy));
            }
            None if self.program.is_plain() => called,
            None => ProgramRef::new(called.with_mask_of(&self.program).map_err(CodegenError::from)?),
        };
        self.known.write().unwrap_or_else(PoisonError::into_inner).push((called, joined));
        Ok(joined)
    }

    /// Whether it serves a call: what is not checked is that the elements of the mask's tensors are what they were.
    ///
    /// # Errors
    /// [`Error::BlockMask`] with what differs.
    pub fn admit(&self, device: &DeviceFingerprint, shape: &Shape, side: &SideInputs<'_>) -> Result<()> {
        if *device != self.device {
            let expected = format!("it was made for {}", self.device);
            return Err(wrong("the device", device, &expected, "make one for each device"));
        }
        let MaskSizes { batch, heads, kv_heads, q_len, kv_len } = self.sizes;
        let sizes = [
            ("batch", batch, shape.batch),
            ("heads", heads, shape.heads),
            ("kv_heads", kv_heads, shape.kv_heads),
            ("q_len", Some(q_len), shape.q_len),
            ("kv_len", Some(kv_len), shape.kv_len),
        ];
        for (field, made, called) in sizes {
            if let Some(made) = made.filter(|n| *n != called) {
                let expected = format!("it was made for {made}");
                return Err(wrong(field, called, &expected, "make a block mask for these sizes"));
            }
        }
        let remedy = "leave it out of the call, or make a block mask with it";
        for (name, bound) in &self.scalars {
            if let Some((_, given)) = side.scalars.iter().find(|(n, x)| n == name && x != bound) {
                let expected = format!("it was made with {bound:?}");
                return Err(wrong(&format!("the scalar `{name}`"), format!("{given:?}"), &expected, remedy));
            }
        }
        for (name, bound) in &self.tensors {
            if let Some((_, given)) = side.tensors.iter().find(|(n, view)| n == name && view != bound) {
                let (field, found, made) = difference(given, bound);
                let field = format!("{field} of the tensor `{name}`");
                return Err(wrong(&field, found, &format!("it was made with {made}"), remedy));
            }
        }
        Ok(())
    }
}

/// The first thing in which two tensors differ.
fn difference(a: &SideView, b: &SideView) -> (&'static str, String, String) {
    let views = [a, b];
    let of = |f: &dyn Fn(&SideView) -> String| views.map(f);
    for (field, [found, made]) in [
        ("the storage", of(&|v| v.storage.name().to_owned())),
        ("the shape", of(&|v| format!("{:?}", &v.shape[..v.rank.min(v.shape.len())]))),
        ("the address", of(&|v| format!("{:#x}", v.address))),
    ] {
        if found != made {
            return (field, found, made);
        }
    }
    let [found, made] = of(&|v| format!("{:?}", v.strides));
    ("the strides", found, made)
}

fn wrong(field: &str, found: impl ToString, expected: &str, remedy: &'static str) -> Error {
    Error::BlockMask { field: field.to_owned(), found: found.to_string(), expected: expected.to_owned(), remedy }
}

impl fmt::Debug for BlockMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("BlockMask");
        out.field("program", &self.program.text()).field("sizes", &self.sizes).field("bytes", &self.bytes());
        out.finish_non_exhaustive()
    }
}

/// Two are equal when they are the same.
impl PartialEq for BlockMask {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

// Layers on several threads share one.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<BlockMask>();
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuDevice;
    use flashtune_codegen::score::{Program, Storage};

    const SIZES: MaskSizes = MaskSizes { batch: Some(2), heads: None, kv_heads: None, q_len: 8, kv_len: 16 };

    fn program(text: &str) -> ProgramRef {
        ProgramRef::new(Program::parse(text).unwrap())
    }

    /// Documents by a table at an address, and a reach.
    fn made(address: u64) -> BlockMask {
        let device = CpuDevice::open().unwrap();
        let mask = program("d: i32[batch, q_len]; n: int; mask = d[b, q] == kv // 4 and kv < n;");
        let tensors = [("unread", view(3 << 12)), ("d", view(address))];
        let side = SideInputs { scalars: &[("n", Scalar::Int(9))], tensors: &tensors };
        BlockMask::new(&*device, mask, &side, SIZES).unwrap()
    }

    fn view(address: u64) -> SideView {
        SideView::contiguous(address, Storage::I32, &[2, 8])
    }

    #[test]
    fn calls_are_held_against_what_it_was_made_for() {
        let (made, device) = (made(1 << 12), CpuDevice::open().unwrap().fingerprint().clone());
        let shape = Shape { batch: 2, heads: 6, kv_heads: 3, q_len: 8, kv_len: 16, mask: Mask::Causal };
        let admit = |shape: Shape, scalars: &[(&str, Scalar)], tensors: &[(&str, SideView)]| {
            made.admit(&device, &shape, &SideInputs { scalars, tensors }).map_err(|e| e.to_string())
        };
        assert_eq!(admit(shape, &[], &[]), Ok(()));
        assert_eq!(
            admit(Shape { heads: 1, kv_heads: 1, ..shape }, &[("n", Scalar::Int(9))], &[("d", view(1 << 12))]),
            Ok(())
        );
        // What the mask does not read is the call's own.
        assert_eq!(admit(shape, &[("scale", Scalar::Int(1))], &[("unread", view(7 << 12))]), Ok(()));
        let refused = |found: Result<(), String>, words: &str| {
            let e = found.unwrap_err();
            assert!(e.starts_with("block mask: ") && e.contains(words), "{e}");
        };
        refused(admit(Shape { batch: 3, ..shape }, &[], &[]), "batch is 3, but it was made for 2");
        refused(admit(Shape { q_len: 7, ..shape }, &[], &[]), "q_len is 7");
        refused(admit(Shape { kv_len: 17, ..shape }, &[], &[]), "kv_len is 17");
        refused(admit(shape, &[("n", Scalar::Int(8))], &[]), "the scalar `n` is Int(8)");
        refused(admit(shape, &[], &[("d", view(2 << 12))]), "the address of the tensor `d` is 0x2000");
        let strided = SideView { strides: [16, 1, 0, 0], ..view(1 << 12) };
        refused(admit(shape, &[], &[("d", strided)]), "the strides of the tensor `d`");
        let wider = SideView::contiguous(1 << 12, Storage::I64, &[2, 8]);
        refused(admit(shape, &[], &[("d", wider)]), "the storage of the tensor `d` is i64");
        let other = DeviceFingerprint { units: device.units + 1, ..device.clone() };
        refused(made.admit(&other, &shape, &SideInputs::default()).map_err(|e| e.to_string()), "for each device");
    }

    #[test]
    fn a_call_has_the_same_mask_or_none() {
        let made = made(1 << 12);
        assert_eq!(made.program_of(None).unwrap(), made.program());
        assert_eq!(made.program_of(Some(program(""))).unwrap(), made.program());
        let score = program("s: f32[heads]; score = score * s[h];");
        let joined = made.program_of(Some(score)).unwrap();
        assert_eq!((joined.mask_only().unwrap(), joined.score().is_some()), ((*made.program()).clone(), true));
        assert_eq!(made.program_of(Some(score)).unwrap(), joined);
        assert_eq!(made.program_of(Some(joined)).unwrap(), joined, "which has the same mask");
        let e = made.program_of(Some(program("mask = kv < 3;"))).unwrap_err().to_string();
        assert!(e.contains("the call's mask is another") && e.contains("kv // 4"), "{e}");
    }

    #[test]
    fn what_is_no_mask_or_not_the_same_for_all_is_refused() {
        let device = CpuDevice::open().unwrap();
        let refused = |text: &str, words: &str| {
            let e = BlockMask::new(&*device, program(text), &SideInputs::default(), SIZES).unwrap_err();
            assert!(matches!(e, Error::BlockMask { .. }) && e.to_string().contains(words), "{e}");
        };
        refused("score = score * 2.0;", "changes the score");
        refused("mask = kv < 3; sink = 1.0;", "with a sink");
        refused("mask = kv < h;", "heads is left open");
        refused("mask = kv < h_kv;", "kv_heads is left open");
        let sizes = MaskSizes { q_len: 1 << 31, ..SIZES };
        let e = BlockMask::new(&*device, program("mask = kv < 3;"), &SideInputs::default(), sizes).unwrap_err();
        assert!(e.to_string().contains("q_len"), "{e}");
    }
}
