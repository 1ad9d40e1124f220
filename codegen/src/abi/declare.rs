//! Argument structs as C and CUDA C++ declare them: one declaration in Rust is the struct and the text that templates
//! paste. Each text asserts its size, in C also the offset of every member, so that every compilation of a kernel
//! checks the layout.

use super::Cut;
use crate::Language;
use std::fmt::Write;

/// How the languages spell a type.
pub trait Spelt {
    /// In C.
    const C: &'static str;
    /// In CUDA C++.
    const CUDA: &'static str;
    /// Elements of an array.
    const LENGTH: Option<usize> = None;
}

macro_rules! spelt {
    ($($rust:ty: $c:literal, $cuda:literal;)*) => {
        $(impl Spelt for $rust {
            const C: &'static str = $c;
            const CUDA: &'static str = $cuda;
        })*
    };
}

spelt! {
    i32: "int32_t", "int";
    i64: "int64_t", "i64";
    u32: "uint32_t", "u32";
    u64: "uint64_t", "u64";
    f32: "float", "float";
}

impl<T: Spelt, const N: usize> Spelt for [T; N] {
    const C: &'static str = T::C;
    const CUDA: &'static str = T::CUDA;
    const LENGTH: Option<usize> = Some(N);
}

/// A field of an argument struct.
#[derive(Debug)]
pub struct Field {
    /// Members that it is in a kernel: its own name, or one for each element of the array that it is here.
    pub members: &'static [&'static str],
    /// Spelling in C and in CUDA C++.
    pub spelling: [&'static str; 2],
    /// Elements of an array.
    pub length: Option<usize>,
    /// From the start of the struct, in bytes.
    pub offset: usize,
    /// Bytes of the field.
    pub size: usize,
    /// What it says of itself.
    pub doc: &'static str,
}

/// A struct that kernels take.
pub trait Declared {
    /// Its name in C and CUDA C++.
    const NAME: &'static str;
    /// What it says of itself.
    const DOC: &'static str;
    /// Bytes of the struct.
    const SIZE: usize;
    /// Its fields in their order.
    const FIELDS: &'static [Field];
}

/// Declares a struct for Rust and for kernels. `field: u64 as "const void*"` is a pointer there; `field: [T; 2] { a, b
/// }` is two members.
macro_rules! arguments {
    (
        $(#[doc = $doc:literal])*
        #[repr(C)]
        #[derive($($derive:ident),*)]
        pub struct $name:ident as $kernel:literal {
            $(
                $(#[doc = $field_doc:literal])*
                pub $field:ident: $ty:ty $(as $spelling:literal)? $({ $($member:ident),* })?,
            )*
        }
    ) => {
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive($($derive),*)]
        pub struct $name {
            $($(#[doc = $field_doc])* pub $field: $ty,)*
        }

        impl $crate::abi::declare::Spelt for $name {
            const C: &'static str = $kernel;
            const CUDA: &'static str = $kernel;
        }

        impl $crate::abi::declare::Declared for $name {
            const NAME: &'static str = $kernel;
            const DOC: &'static str = concat!($($doc),*);
            const SIZE: usize = size_of::<$name>();
            const FIELDS: &'static [$crate::abi::declare::Field] = &[$({
                use $crate::abi::declare::{Field, Spelt};
                let members: &[&str] = &[stringify!($field)];
                $(let members: &[&str] = { let _ = members; &[$(stringify!($member)),*] };)?
                let spelling = [<$ty as Spelt>::C, <$ty as Spelt>::CUDA];
                $(let spelling = { let _ = spelling; [$spelling, $spelling] };)?
                Field {
                    members,
                    spelling,
                    length: <$ty as Spelt>::LENGTH,
                    offset: std::mem::offset_of!($name, $field),
                    size: size_of::<$ty>(),
                    doc: concat!($($field_doc),*),
                }
            }),*];
        }
    };
}
pub(crate) use arguments;

/// The declaration of a struct, with its comments and the assertions of its layout: of its size, and in C of the offset
/// of every member.
pub fn declaration<T: Declared>(language: Language) -> String {
    declaration_without::<T>(language, Cut::NONE)
}

/// The same where kernels do not know the last bytes of a struct that has a [`Cut`]: the fields there are left out, and
/// what lies behind such a struct in another lies before by as many bytes.
pub(super) fn declaration_without<T: Declared>(language: Language, cut: Cut) -> String {
    let known = if Cut::is_of(T::NAME) { T::SIZE - cut.bytes } else { T::SIZE };
    let is_known = |field: &&Field| field.offset < known;
    let end = T::FIELDS.iter().map(|field| field.offset + field.size).max().unwrap_or(0);
    let size = (end - cut.bytes).next_multiple_of(align_of::<T>());
    let plain = |doc: &str| doc.trim().replace("[`", "").replace("`]", "").replace('`', "");
    let name = T::NAME;
    let mut text = String::new();
    let comment = |text: &mut String, indent: &str, doc: &str| match language {
        Language::C => writeln!(text, "{indent}/* {} */", plain(doc)),
        Language::Cuda => writeln!(text, "{indent}// {}", plain(doc)),
    };
    let (open, close, assert, spelling) = match language {
        Language::C => ("typedef struct {".to_owned(), format!("}} {name};"), "_Static_assert", 0),
        Language::Cuda => (format!("struct {name} {{"), "};".to_owned(), "static_assert", 1),
    };
    let written = (|| {
        comment(&mut text, "", T::DOC)?;
        writeln!(text, "{open}")?;
        for field in T::FIELDS.iter().filter(is_known) {
            comment(&mut text, "    ", field.doc)?;
            // Members that are elements here are no arrays there.
            let array = field.length.filter(|_| field.members.len() == 1).map_or(String::new(), |n| format!("[{n}]"));
            writeln!(text, "    {} {}{array};", field.spelling[spelling], field.members.join(", "))?;
        }
        writeln!(text, "{close}")?;
        writeln!(text, "{assert}(sizeof({name}) == {size}, \"{name} has the size that the host passes\");")?;
        // NVRTC has no `__builtin_offsetof` before 13.5, and includes nothing that would define `offsetof`: there the
        // size speaks for the members, which lie in order. What C compiles checks each of them.
        let checked = match language {
            Language::C => T::FIELDS,
            Language::Cuda => &[],
        };
        let mut behind = 0;
        for field in checked.iter().filter(is_known) {
            for (i, member) in field.members.iter().enumerate() {
                let offset = field.offset - behind + i * field.size / field.members.len();
                let offset = format!("__builtin_offsetof({name}, {member}) == {offset}");
                writeln!(text, "{assert}({offset}, \"{name}.{member} lies where the host puts it\");")?;
            }
            if field.spelling.iter().any(|of| Cut::is_of(of)) {
                behind = cut.bytes;
            }
        }
        Ok::<(), std::fmt::Error>(())
    })();
    written.expect("a string takes all that is written to it");
    text
}
