//! What is refused, and how it travels inside of candle's error.

/// Why a call was not computed.
#[derive(thiserror::Error)]
pub enum Error {
    /// A tensor is not what the function takes.
    #[error("tensor {tensor}: {field} is {found}, but {expected}; {remedy}")]
    Tensor {
        /// Its name among the function's arguments.
        tensor: String,
        /// What is wrong with it.
        field: &'static str,
        /// The value found.
        found: String,
        /// What it must be, and why.
        expected: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A number is not what the function takes.
    #[error("{argument} is {found}, but {expected}; {remedy}")]
    Argument {
        /// Its name among the function's arguments.
        argument: &'static str,
        /// The value found.
        found: String,
        /// What it must be, and why.
        expected: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A gradient was asked for that nothing computes.
    #[error("there is no gradient {of}; {remedy}")]
    Gradient {
        /// By what, or through what.
        of: String,
        /// What to do.
        remedy: &'static str,
    },
    /// What the engine, its device or its compiler says.
    #[error(transparent)]
    Engine(#[from] flashtune::Error),
}

// candle prints what it wraps by `Debug`.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Result inside of this crate.
pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn tensor(
        tensor: impl Into<String>,
        field: &'static str,
        found: impl std::fmt::Debug,
        expected: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self::Tensor { tensor: tensor.into(), field, found: format!("{found:?}"), expected: expected.into(), remedy }
    }

    pub(crate) fn argument(
        argument: &'static str,
        found: impl std::fmt::Debug,
        expected: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self::Argument { argument, found: format!("{found:?}"), expected: expected.into(), remedy }
    }
}

impl From<Error> for candle_core::Error {
    fn from(e: Error) -> Self {
        // The one variant that keeps a foreign error as a value: `error_of` finds it.
        candle_core::Error::WrappedContext { wrapped: Box::new(e), context: "flashtune-candle".to_owned() }.bt()
    }
}

/// This crate's error inside of candle's, if it is one.
pub fn error_of(error: &candle_core::Error) -> Option<&Error> {
    use candle_core::Error as Candle;
    match error {
        Candle::WrappedContext { wrapped, .. } => wrapped.downcast_ref(),
        Candle::Context { inner, .. } | Candle::WithPath { inner, .. } | Candle::WithBacktrace { inner, .. } => {
            error_of(inner)
        }
        _ => None,
    }
}
