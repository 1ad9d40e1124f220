//! What the stored form of a struct leaves out: fields at their default (`serde(default, skip_serializing_if)`). Keys
//! are hashes of that form, so that a field which is added changes the key of nothing that is at its default.

/// Whether a field is at its type's default.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The default of counts of which there is one unless said otherwise.
pub fn one() -> u32 {
    1
}

/// Whether such a count is one.
pub fn is_one(value: &u32) -> bool {
    *value == 1
}
