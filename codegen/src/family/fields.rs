//! The fields of a schedule, declared once: from one line a field has its place in the schedule's name, its constant in
//! the template, its coordinate in the search, and its stored form.
//!
//! ```text
//! schedule! {
//!     pub struct Example {
//!         /// Keys of one step.
//!         pub block_kv: u32 => code, number("kv");       // -kv128, `@{ block_kv }@`
//!         /// Consumers take turns.
//!         pub take_turns: bool => code, flag("turns");   // -turns where it is set
//!         /// MiB that are walked together.
//!         pub section: u32 => launch, number("l2x");     // no constant: the machine code does not depend on it
//!     }
//! }
//! ```
//!
//! `code` fields are constants of the template, `derived` ones reach it by way of other constants, `launch` ones not at
//! all.
//!
//! A field at the default of its type (0, false, the first word) is left out of the stored form, so that a new field
//! leaves the keys of old records as they are; an unknown field is refused, since a kernel must not run without it. A
//! field that goes was at its type's default in what is left, and is deleted, or becomes [`Retired`].

use std::collections::BTreeMap;
use std::fmt;

/// What a template may paste, by name.
pub(crate) type Constants = BTreeMap<&'static str, String>;

/// Where a field's value lies among those of other schedules, for the search.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Values have an order: the next larger block is one step away.
    Number(i64),
    /// Values have none: all are one step apart.
    Word(&'static str),
}

/// A value that a field of a schedule may have.
pub(crate) trait FieldValue: Copy + Default + PartialEq {
    /// Its coordinate.
    fn place(&self) -> Place;
    /// Its constants in the template: the one of the field's name, unless the template asks something else of it.
    fn render(&self, name: &'static str, constants: &mut Constants);
    /// Whether the stored form leaves it out.
    fn is_omitted(&self) -> bool {
        *self == Self::default()
    }
}

impl FieldValue for u32 {
    fn place(&self) -> Place {
        Place::Number((*self).into())
    }
    fn render(&self, name: &'static str, constants: &mut Constants) {
        constants.insert(name, self.to_string());
    }
}

impl FieldValue for bool {
    fn place(&self) -> Place {
        Place::Number((*self).into())
    }
    fn render(&self, name: &'static str, constants: &mut Constants) {
        constants.insert(name, self.to_string());
    }
}

/// A field that schedules have no more, at the value that all that are left had: the stored form goes on to say it, so
/// that the keys of old records stay as they are, and a record with another value is refused by the field's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Retired<Field>(std::marker::PhantomData<Field>);

/// What is known of a [`Retired`] field.
pub(crate) trait RetiredField: Copy + Default + Ord {
    /// Its name in the stored form.
    const NAME: &'static str;
    /// The value that all that are left had.
    const KEPT: u32;
}

impl<Field: RetiredField> FieldValue for Retired<Field> {
    fn place(&self) -> Place {
        Place::Number(Field::KEPT.into())
    }
    fn render(&self, _: &'static str, _: &mut Constants) {}
    fn is_omitted(&self) -> bool {
        false
    }
}

impl<Field: RetiredField> serde::Serialize for Retired<Field> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(Field::KEPT)
    }
}

impl<'de, Field: RetiredField> serde::Deserialize<'de> for Retired<Field> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = u32::deserialize(deserializer)?;
        if value == Field::KEPT {
            return Ok(Self(std::marker::PhantomData));
        }
        let (name, kept) = (Field::NAME, Field::KEPT);
        Err(serde::de::Error::custom(format!("{name} is {value}: kernels have {kept} alone by now; tune again")))
    }
}

/// What [`schedule!`] derives from the declaration.
pub(crate) trait Fields: fmt::Display + Copy + Default + Ord {
    /// Name and place of every field.
    fn places(&self) -> Vec<(&'static str, Place)>;
    /// The places of the fields that the machine code does not depend on.
    fn launch_places(&self) -> Vec<Place>;
    /// The constants of the fields that it depends on.
    fn render(&self, constants: &mut Constants);
}

/// How a field stands in the schedule's name: parts that are empty are left out, the others are joined by `-`.
pub(crate) mod form {
    use std::fmt::Display;

    /// A prefix and the number.
    pub(crate) fn number<S>(_: &S, value: &impl Display, prefix: &str) -> String {
        format!("{prefix}{value}")
    }
    /// A prefix and the number, unless it is that of most schedules.
    pub(crate) fn number_unless<S>(_: &S, value: &u32, usual: u32, prefix: &str) -> String {
        if *value == usual { String::new() } else { format!("{prefix}{value}") }
    }
    /// A word where it is set.
    pub(crate) fn flag<S>(_: &S, value: &bool, word: &str) -> String {
        if *value { word.to_owned() } else { String::new() }
    }
    /// One of two words: where it is set, and where not.
    pub(crate) fn either<S>(_: &S, value: &bool, set: &str, unset: &str) -> String {
        if *value { set } else { unset }.to_owned()
    }
    /// The value's own word, which may be empty.
    pub(crate) fn word<S>(_: &S, value: &impl Display) -> String {
        value.to_string()
    }
    /// What a function of the whole schedule says.
    pub(crate) fn with<S, T>(schedule: &S, _: &T, say: impl Fn(&S) -> String) -> String {
        say(schedule)
    }
    /// Nothing: another field's part says it.
    pub(crate) fn silent<S, T>(_: &S, _: &T) -> String {
        String::new()
    }
}

/// Declares the schedule of a family; see the module.
macro_rules! schedule {
    (
        $(#[$meta:meta])*
        pub struct $Schedule:ident {
            $(
                $(#[$doc:meta])*
                pub $field:ident : $type:ty => $part:ident, $form:ident $(($($arg:expr),* $(,)?))? ;
            )*
        }
    ) => {
        $(#[$meta])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize,
        )]
        #[serde(deny_unknown_fields)]
        pub struct $Schedule {
            $(
                $(#[$doc])*
                #[serde(default, skip_serializing_if = "crate::family::fields::FieldValue::is_omitted")]
                pub $field: $type,
            )*
        }

        impl $crate::family::fields::Fields for $Schedule {
            fn places(&self) -> Vec<(&'static str, $crate::family::Place)> {
                use $crate::family::fields::FieldValue;
                vec![$((stringify!($field), self.$field.place())),*]
            }
            fn launch_places(&self) -> Vec<$crate::family::Place> {
                [$($crate::family::fields::schedule!(@launch $part, self.$field)),*].into_iter().flatten().collect()
            }
            fn render(&self, constants: &mut $crate::family::fields::Constants) {
                $($crate::family::fields::schedule!(@code $part, self.$field, stringify!($field), constants);)*
            }
        }

        impl std::fmt::Display for $Schedule {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                use $crate::family::fields::form;
                let parts = [$(form::$form(self, &self.$field $(, $($arg),*)?)),*];
                let said: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
                f.write_str(&said.join("-"))
            }
        }
    };
    (@launch launch, $value:expr) => {
        Some($crate::family::fields::FieldValue::place(&$value))
    };
    (@launch $other:ident, $value:expr) => {
        None
    };
    (@code code, $value:expr, $name:expr, $constants:ident) => {
        $crate::family::fields::FieldValue::render(&$value, $name, $constants)
    };
    (@code launch, $value:expr, $name:expr, $constants:ident) => {};
    (@code derived, $value:expr, $name:expr, $constants:ident) => {};
}

pub(crate) use schedule;

// What the macro declares is `pub`, as every schedule is.
#[cfg(test)]
#[allow(unreachable_pub)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
    pub struct Warps;

    impl RetiredField for Warps {
        const NAME: &'static str = "warps";
        const KEPT: u32 = 4;
    }

    schedule! {
        /// One of each form.
        pub struct Example {
            /// Keys.
            pub block_kv: u32 => code, number("kv");
            /// Set or not.
            pub turns: bool => code, flag("turns");
            /// One or the other.
            pub overlap: bool => code, either("overlap", "serial");
            /// Rarely more than one.
            pub cluster: u32 => code, number_unless(1, "cl");
            /// Once there were others.
            pub warps: Retired<Warps> => derived, silent;
            /// Not in the code.
            pub section: u32 => launch, with(|s: &Self| format!("{}x{}", s.section, s.block_kv));
            /// Said by the one before.
            pub ending: bool => launch, silent;
        }
    }

    const BASE: Example = Example {
        block_kv: 64,
        turns: true,
        overlap: false,
        cluster: 1,
        warps: Retired(std::marker::PhantomData),
        section: 3,
        ending: false,
    };

    #[test]
    fn name_constants_and_coordinates_follow_from_the_declaration() {
        assert_eq!(BASE.to_string(), "kv64-turns-serial-3x64");
        assert_eq!(Example { cluster: 2, turns: false, ..BASE }.to_string(), "kv64-serial-cl2-3x64");
        let mut constants = Constants::new();
        BASE.render(&mut constants);
        let rendered: Vec<(&str, &str)> = constants.iter().map(|(k, v)| (*k, v.as_str())).collect();
        assert_eq!(rendered, [("block_kv", "64"), ("cluster", "1"), ("overlap", "false"), ("turns", "true")]);
        assert_eq!(BASE.launch_places(), [Place::Number(3), Place::Number(0)]);
        assert_eq!(BASE.places().len(), 7);
        assert_eq!(BASE.places()[1], ("turns", Place::Number(1)));
    }

    const STORED: &str = r#"{"block_kv":64,"turns":true,"cluster":1,"warps":4,"section":3}"#;

    #[test]
    fn a_default_is_not_stored_and_an_unknown_field_is_refused() {
        assert_eq!(serde_json::to_string(&BASE).unwrap(), STORED);
        let old: Example = serde_json::from_str(r#"{"block_kv":64,"turns":true,"cluster":1,"section":3}"#).unwrap();
        assert_eq!(old, BASE);
        let other = serde_json::from_str::<Example>(r#"{"block_kv":64,"warps":8}"#);
        assert!(other.unwrap_err().to_string().contains("warps is 8: kernels have 4 alone"));
        let newer = serde_json::from_str::<Example>(r#"{"block_kv":64,"two_ctas":true}"#);
        assert!(newer.unwrap_err().to_string().contains("two_ctas"));
    }
}
