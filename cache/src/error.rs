//! Errors of stores and bundles. A damaged or foreign cache is never a wrong answer: it is a miss or one of these.

use std::path::PathBuf;

/// What can go wrong with stored results.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("{action} {}: {source}; {remedy}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// No folder for results can be named.
    #[error("no folder for results: neither FLASHTUNE_CACHE, XDG_CACHE_HOME nor HOME is set; set FLASHTUNE_CACHE")]
    NoFolder,
    /// Others could have put code into the cache folder, which would run as this user.
    #[error(
        "the cache folder {} {problem}, so that others could put code there that runs as you; {remedy}, or set \
         FLASHTUNE_CACHE to a folder of your own",
        path.display()
    )]
    Exposed {
        /// The folder.
        path: PathBuf,
        /// Who has access.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// A link lies where this program keeps a folder or a file of its own. It is not followed.
    #[error(
        "{} is a link, and the cache is kept in real folders and files alone; remove the link (what it leads to was \
         not touched), or set FLASHTUNE_CACHE to another folder",
        path.display()
    )]
    Link {
        /// The link.
        path: PathBuf,
    },
    /// Another process holds the tuner's journal.
    #[error(
        "the store {} is in use by another tuner; wait for it or set FLASHTUNE_CACHE to another folder",
        path.display()
    )]
    Locked {
        /// The store.
        path: PathBuf,
    },
    /// The journal cannot be opened or written.
    #[error("the store {}: {message}", path.display())]
    Store {
        /// The store.
        path: PathBuf,
        /// sled's answer.
        message: String,
    },
    /// An export found no record to write.
    #[error(
        "nothing to export to {}: no record matches the filter{}; run `flashtune list` to see what is tuned",
        path.display(),
        if *skipped > 0 { format!(" and still has its kernel ({skipped} lost theirs)") } else { String::new() }
    )]
    Empty {
        /// The bundle that was to be written.
        path: PathBuf,
        /// Records that matched but whose kernels are lost.
        skipped: usize,
    },
    /// A bundle's bytes are not a bundle of this format, or were damaged.
    #[error("bundle {name}: {message}; export it again")]
    Damaged {
        /// File name or other origin.
        name: String,
        /// Which check failed.
        message: String,
    },
    /// An entry of a bundle is whole, but only another build of flashtune, a newer one perhaps, knows what it means.
    #[error("bundle {name}: {message}; use it with the build that made it, or tune again with this one")]
    Foreign {
        /// File name or other origin.
        name: String,
        /// Which entry, and what is not known.
        message: String,
    },
    /// A bundle is whole, but nobody who is trusted vouches for it.
    #[error(
        "bundle {name}: {problem}, and it holds machine code; trust its key (--trust, FLASHTUNE_TRUSTED_KEYS) or allow \
         such bundles (--allow-unsigned, FLASHTUNE_ALLOW_UNSIGNED=1)"
    )]
    Untrusted {
        /// File name or other origin.
        name: String,
        /// What is missing.
        problem: String,
    },
    /// A text or file that is no key.
    #[error("`{text}` is no key; a key is written as 64 hexadecimal digits, `flashtune keygen` makes one")]
    Key {
        /// The text, or the file's name.
        text: String,
    },
    /// A bundle or entry is intact but made for something else.
    #[error("bundle {name}: {field} is {found}, but {expected} is needed here; {remedy}")]
    Mismatch {
        /// File name or other origin.
        name: String,
        /// The validity field that differs.
        field: &'static str,
        /// Its value in the bundle.
        found: String,
        /// The value needed.
        expected: String,
        /// What to do.
        remedy: &'static str,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Whether there is nothing of that name.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }

    /// Whether a file lies where a folder is needed: nothing can be read or kept there until somebody removes it.
    pub(crate) fn is_no_folder(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotADirectory)
    }

    /// Whether something else than a file of this user's alone is in the place of one.
    pub(crate) fn is_no_file(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::InvalidData)
    }

    /// What is wrong, without the remedy: for places where another remedy applies.
    pub(crate) fn cause(&self) -> String {
        match self {
            Error::Io { action, path, source, .. } => format!("{action} {}: {source}", path.display()),
            Error::Damaged { name, message } | Error::Foreign { name, message } => format!("{name}: {message}"),
            Error::Mismatch { name, field, found, expected, .. } => {
                format!("{name}: {field} is {found}, but {expected} is needed here")
            }
            other => other.to_string(),
        }
    }
}
