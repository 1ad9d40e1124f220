//! Signatures of bundles: who vouches for the machine code inside.
//!
//! A signed bundle is a bundle with a trailer, so signing changes no byte of the content:
//!
//! ```text
//! 0   magic "FTSIGNED"   8
//! 8   public key        32
//! 40  ed25519 signature 64   of a fixed prefix and the root hash, which names the whole content
//! ```

use crate::{Error, Result};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use std::fmt;
use std::io::Write;
use std::path::Path;
use std::str::FromStr;

const MAGIC: &[u8; 8] = b"FTSIGNED";
/// Size of the trailer in bytes.
pub(super) const TRAILER: usize = 104;
/// Sets these signatures apart from those that the same key makes elsewhere.
const DOMAIN: &[u8] = b"flashtune bundle signature 1\n";

/// A key that signatures are checked with. Written as 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicKey([u8; 32]);

/// A key that signs. Its text form is the seed, 64 hexadecimal digits; it is never printed by `Debug`.
pub struct SecretKey(SigningKey);

impl SecretKey {
    /// A new key from the system's random numbers.
    ///
    /// # Errors
    /// The system's, when it has none to give.
    pub fn generate() -> std::io::Result<Self> {
        let mut seed = [0; 32];
        let mut filled = 0;
        while filled < seed.len() {
            filled += rustix::rand::getrandom(&mut seed[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Self(SigningKey::from_bytes(&seed)))
    }

    /// Writes the key to a new file that its owner alone may read.
    ///
    /// # Errors
    /// [`Error::Io`], also when the file is there already: a key that is gone cannot be had again.
    pub fn write_new(&self, path: &Path) -> Result<()> {
        use std::os::unix::fs::OpenOptionsExt;
        let io = |source| Error::Io {
            action: "write the key",
            path: path.to_path_buf(),
            source,
            remedy: "name a file that is not there yet, in a folder that can be written",
        };
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(path).map_err(io)?;
        writeln!(file, "{}", hex(&self.0.to_bytes())).and_then(|()| file.sync_all()).map_err(io)
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Key`] when it holds no key.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
            action: "read the key",
            path: path.to_path_buf(),
            source,
            remedy: "name the file that `flashtune keygen` wrote",
        })?;
        let seed = parse_hex(text.trim()).ok_or_else(|| Error::Key { text: path.display().to_string() })?;
        Ok(Self(SigningKey::from_bytes(&seed)))
    }

    /// The key that its signatures are checked with.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key().to_bytes())
    }

    /// The trailer of a bundle with this root hash.
    pub(super) fn trailer(&self, root: &[u8; 32]) -> [u8; TRAILER] {
        let mut trailer = [0; TRAILER];
        trailer[..8].copy_from_slice(MAGIC);
        trailer[8..40].copy_from_slice(&self.public().0);
        trailer[40..].copy_from_slice(&self.0.sign(&message(root)).to_bytes());
        trailer
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey(of {})", self.public())
    }
}

/// The key of a trailer whose signature is right; otherwise what is wrong with it.
pub(super) fn verify(trailer: &[u8; TRAILER], root: &[u8; 32]) -> Result<PublicKey, &'static str> {
    if &trailer[..8] != MAGIC {
        return Err("what follows it is no signature");
    }
    let key: [u8; 32] = trailer[8..40].try_into().expect("32 bytes");
    let signature: [u8; 64] = trailer[40..].try_into().expect("64 bytes");
    let checked = VerifyingKey::from_bytes(&key)
        .and_then(|key| key.verify_strict(&message(root), &Signature::from_bytes(&signature)));
    checked.map(|()| PublicKey(key)).map_err(|_| "its signature is wrong")
}

fn message(root: &[u8; 32]) -> Vec<u8> {
    [DOMAIN, root].concat()
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl FromStr for PublicKey {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::Key { text: text.to_owned() };
        let bytes = parse_hex(text).ok_or_else(bad)?;
        // Not every number is a point of the curve.
        VerifyingKey::from_bytes(&bytes).map_err(|_| bad())?;
        Ok(Self(bytes))
    }
}

fn hex(bytes: &[u8; 32]) -> String {
    blake3::Hash::from(*bytes).to_hex().to_string()
}

fn parse_hex(text: &str) -> Option<[u8; 32]> {
    blake3::Hash::from_hex(text).ok().map(|h| *h.as_bytes())
}
