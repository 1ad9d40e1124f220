//! Whose bundles are loaded.
//!
//! Bundles hold machine code. One that a host names must carry the signature of a trusted key, unless unsigned bundles
//! are allowed. The user's own snapshot lies in a private folder and an embedded bundle in the program itself: they are
//! as trustworthy as these.

use crate::{Bundle, Error, PublicKey, Result};
use std::collections::BTreeSet;
use std::path::Path;

/// The variable that lists trusted keys, as digits or files, separated as in `PATH`.
pub const TRUSTED_KEYS_VARIABLE: &str = "FLASHTUNE_TRUSTED_KEYS";
/// The variable that allows bundles without a trusted signature when it is 1.
pub const ALLOW_UNSIGNED_VARIABLE: &str = "FLASHTUNE_ALLOW_UNSIGNED";

/// Which bundles may be used. By default none that is not the user's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trust {
    keys: BTreeSet<PublicKey>,
    unsigned: bool,
}

impl Trust {
    /// What the environment says.
    ///
    /// # Errors
    /// [`Error::Key`] and [`Error::Io`] for keys that cannot be read.
    pub fn from_env() -> Result<Self> {
        let mut trust = Self::default();
        for item in std::env::split_paths(&std::env::var_os(TRUSTED_KEYS_VARIABLE).unwrap_or_default()) {
            match item.to_str() {
                Some("") => {}
                Some(text) => trust.add(text)?,
                None => trust.add_file(&item)?,
            }
        }
        trust.unsigned = std::env::var_os(ALLOW_UNSIGNED_VARIABLE).is_some_and(|v| v == "1" || v == "true");
        Ok(trust)
    }

    /// Allows bundles without a trusted signature.
    pub fn allow_unsigned(mut self, allowed: bool) -> Self {
        self.unsigned |= allowed;
        self
    }

    /// Trusts a key.
    pub fn trust(mut self, key: PublicKey) -> Self {
        self.keys.insert(key);
        self
    }

    /// Trusts a key that is written out, or the keys of a file.
    ///
    /// # Errors
    /// [`Error::Key`] and [`Error::Io`].
    pub fn add(&mut self, text: &str) -> Result<()> {
        match text.parse() {
            Ok(key) => {
                self.keys.insert(key);
                Ok(())
            }
            Err(e) if looks_like_a_key(text) => Err(e),
            Err(_) => self.add_file(Path::new(text)),
        }
    }

    /// Trusts the keys of a file: one in each line; empty lines and those that start with # do not count.
    fn add_file(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
            action: "read the trusted keys",
            path: path.to_path_buf(),
            source,
            remedy: "name a public key (64 hexadecimal digits) or a file of them",
        })?;
        let keys = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
        for key in keys {
            self.keys.insert(key.parse()?);
        }
        Ok(())
    }

    /// Whether bundles without a trusted signature are allowed.
    pub fn allows_unsigned(&self) -> bool {
        self.unsigned
    }

    /// The trusted keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &PublicKey> {
        self.keys.iter()
    }

    /// Whether a bundle may be used.
    ///
    /// # Errors
    /// [`Error::Untrusted`] says what is missing.
    pub fn check(&self, bundle: &Bundle) -> Result<()> {
        let problem = match bundle.signer() {
            _ if self.unsigned => return Ok(()),
            Some(key) if self.keys.contains(&key) => return Ok(()),
            Some(key) => format!("it is signed by {key}, which is not trusted"),
            None => "it is not signed".to_owned(),
        };
        Err(Error::Untrusted { name: bundle.name().to_owned(), problem })
    }
}

fn looks_like_a_key(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SecretKey;

    #[test]
    fn keys_are_written_out_or_lie_in_files() {
        let tmp = tempfile::tempdir().unwrap();
        let keys: Vec<_> = (0..3).map(|_| SecretKey::generate().unwrap().public()).collect();
        let file = tmp.path().join("keys");
        std::fs::write(&file, format!("# the build machine\n{}\n\n  {}  \n", keys[0], keys[1])).unwrap();
        let mut trust = Trust::default();
        trust.add(file.to_str().unwrap()).unwrap();
        trust.add(&keys[2].to_string()).unwrap();
        assert_eq!(trust, keys.iter().fold(Trust::default(), |t, k| t.trust(*k)));

        let e = trust.add("/nonexistent/keys").unwrap_err().to_string();
        assert!(e.contains("/nonexistent/keys") && e.contains("64"), "{e}");
        std::fs::write(&file, "not a key\n").unwrap();
        assert!(matches!(trust.add(file.to_str().unwrap()), Err(Error::Key { .. })));
        // A number that is no point of the curve.
        assert!(matches!(trust.add(&"02".repeat(32)), Err(Error::Key { .. })));
    }

    #[test]
    fn secret_keys_are_private_files_that_are_never_replaced() {
        use std::os::unix::fs::PermissionsExt;
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("key");
        let key = SecretKey::generate().unwrap();
        key.write_new(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(SecretKey::read(&path).unwrap().public(), key.public());
        assert!(matches!(SecretKey::generate().unwrap().write_new(&path), Err(Error::Io { .. })));
        assert_eq!(SecretKey::read(&path).unwrap().public(), key.public());
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!format!("{key:?}").contains(text.trim()));
        std::fs::write(&path, "short").unwrap();
        assert!(matches!(SecretKey::read(&path), Err(Error::Key { .. })));
    }
}
