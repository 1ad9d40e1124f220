//! Typed access to the fields of a configuration.
//!
//! A field that is null counts as absent. One that is there must have its type and lie in its range, whether or not
//! its value matters in the end.

use super::Error;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::ops::RangeInclusive;

type Result<T> = std::result::Result<T, Error>;

/// What fields mean when a file leaves them out, by model type: files of multimodal models hold only what differs from
/// the defaults of their type.
const DEFAULTS: &[(&str, &[(&str, u32)])] = &[
    ("gemma", &[("head_dim", 256)]),
    ("gemma2", &[("head_dim", 256), ("sliding_window", 4096)]),
    (
        "gemma3_text",
        &[
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("num_hidden_layers", 26),
            ("max_position_embeddings", 131_072),
            ("sliding_window", 4096),
            ("sliding_window_pattern", 6),
        ],
    ),
    (
        "llama4_text",
        &[
            ("num_attention_heads", 40),
            ("num_key_value_heads", 8),
            ("head_dim", 128),
            ("num_hidden_layers", 48),
            ("max_position_embeddings", 131_072),
            ("attention_chunk_size", 8192),
            ("no_rope_layer_interval", 4),
        ],
    ),
    ("cohere2", &[("sliding_window", 4096), ("sliding_window_pattern", 4)]),
    ("gpt_oss", &[("head_dim", 64), ("sliding_window", 128)]),
    ("qwen2", &[("max_window_layers", 28)]),
    ("qwen3", &[("head_dim", 128), ("max_window_layers", 28)]),
];

/// The fields of one JSON object.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Where the object lies, e.g. `text_config.`.
    prefix: String,
    defaults: &'static [(&'static str, u32)],
    /// Defaults that were used, in words.
    assumed: RefCell<Vec<String>>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>, prefix: impl Into<String>) -> Self {
        let model_type = map.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let defaults = DEFAULTS.iter().find(|(name, _)| *name == model_type).map_or(&[][..], |(_, fields)| *fields);
        Self { map, prefix: prefix.into(), defaults, assumed: RefCell::default() }
    }

    /// Where a field lies, for messages.
    pub(crate) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }

    /// What had to be assumed so far.
    pub(crate) fn assumed(&self) -> Vec<String> {
        self.assumed.borrow().clone()
    }

    /// The value, unless it is absent or null.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    /// Whether the field is there, be it null.
    pub(crate) fn states(&self, field: &str) -> bool {
        self.map.contains_key(field)
    }

    /// A whole number; of absent fields the default of the model type, if it has one.
    pub(crate) fn number(&self, field: &str, range: RangeInclusive<u32>) -> Result<Option<u32>> {
        let Some(value) = self.get(field) else {
            // An explicit null says that there is none.
            let default = self.defaults.iter().find(|(name, _)| *name == field).map(|(_, value)| *value);
            let default = default.filter(|_| !self.states(field));
            if let Some(value) = default {
                let note = format!("{} is not in the file: {value}, the default of its model type", self.name(field));
                if !self.assumed.borrow().contains(&note) {
                    self.assumed.borrow_mut().push(note);
                }
            }
            return Ok(default);
        };
        let expected = || format!("a whole number from {} to {}", range.start(), range.end());
        let number = value.as_u64().ok_or_else(|| self.wrong(field, value, &expected()))?;
        match u32::try_from(number) {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(self.wrong(field, value, &expected())),
        }
    }

    /// A whole number that must be there.
    pub(crate) fn required(&self, field: &str, range: RangeInclusive<u32>) -> Result<u32> {
        self.number(field, range)?.ok_or_else(|| self.missing(field))
    }

    /// A number above zero.
    pub(crate) fn positive(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number > 0.0 && number.is_finite() => Ok(Some(number)),
            _ => Err(self.wrong(field, value, "a number above 0")),
        }
    }

    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(field, value, "true or false"))
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(field, value, "a text"))
    }

    pub(crate) fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.wrong(field, value, "an object"))
    }

    /// A list with one entry for each layer; `expected` says what an entry must be.
    pub(crate) fn per_layer<T>(
        &self,
        field: &str,
        layers: u32,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let list = value
            .as_array()
            .ok_or_else(|| self.wrong(field, value, &format!("a list with {expected} for each layer")))?;
        if list.len() != layers as usize {
            return Err(Error::field(
                self.name(field),
                format!("has {} entries for {layers} layers", list.len()),
                "give one for each of num_hidden_layers",
            ));
        }
        let entry = |(i, v)| read(v).ok_or_else(|| self.wrong(&format!("{field}[{i}]"), v, expected));
        list.iter().enumerate().map(entry).collect::<Result<Vec<T>>>().map(Some)
    }

    /// A field that cannot be done without is absent.
    pub(crate) fn missing(&self, field: &str) -> Error {
        let problem = "is missing";
        Error::field(self.name(field), problem, "name the config.json of a decoder model with the usual field names")
    }

    /// A field has a value that it cannot have.
    pub(crate) fn wrong(&self, field: &str, value: &Value, expected: &str) -> Error {
        let mut shown = value.to_string();
        if let Some((end, _)) = shown.char_indices().nth(60) {
            shown.truncate(end);
            shown.push_str("...");
        }
        Error::field(self.name(field), format!("is {shown}"), format!("it must be {expected}"))
    }
}
