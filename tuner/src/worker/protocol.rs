//! What tuner and worker say to each other.
//!
//! The worker speaks first: one line, [`greeting`], the same in all versions but for what follows its first two words.
//! After that come frames: length (u32, little endian), then a [`Request`] or [`Reply`] as
//! [`flashtune_cache::encoding`] has it. Every request has one reply; while the worker executes it, [`Reply::Launched`]
//! and [`Reply::Returned`] say when the candidate has the device.

use crate::Cause;
use crate::runner::{Inputs, Size};
use flashtune_cache::encoding::{decode, encode_to};
use flashtune_cache::{Artifact, CompilerId, DeviceFingerprint, Facts, Reading};
use flashtune_codegen::Source;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// Raised with every change of the messages or of a type inside them.
const PROTOCOL: u32 = 7;
/// The longest frame: no artifact comes near it, so a longer one is noise.
const MAX_FRAME: usize = 256 << 20;

/// Tuner to worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Open the device of this name.
    Open { device: String },
    /// Compile a source; needs no device.
    Compile(Source),
    /// A new job: what was loaded and prepared before is dropped.
    Start(Inputs),
    /// Make the inputs of one size.
    Prepare(Size),
    /// Load a candidate.
    Load { id: u32, artifact: Box<Artifact> },
    /// Check a loaded candidate on prepared inputs.
    Check { id: u32, size: Size },
    /// Launch a checked candidate several times at full size and compare all bytes.
    Confirm { id: u32 },
    /// Time one run of a loaded candidate on the prepared inputs of full size, launched in the job's way.
    Time { id: u32 },
    /// Time unfused attention, if a fused run of this long makes that affordable.
    Unfused { fused_us: f64 },
    /// Look at what goes on around the device.
    Read,
}

/// Worker to tuner.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// Code of a candidate has the device from now on.
    Launched,
    /// It has given it back.
    Returned,
    Opened(DeviceFingerprint),
    Compiled {
        compiler: CompilerId,
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
        facts: Facts,
    },
    Done,
    /// Error of a check, microseconds of a run.
    Value(f64),
    Read(Reading),
    /// There is no such value.
    Nothing,
    /// The candidate, or the source to compile, is at fault.
    Refused(String),
    /// The step itself cannot be done, whatever the candidate.
    Unable {
        cause: Cause,
        message: String,
    },
}

/// The worker's first words.
pub(crate) fn greeting() -> String {
    format!("flashtune worker {PROTOCOL} {}\n", env!("CARGO_PKG_VERSION"))
}

/// Reads the greeting; what came instead is the error.
pub(crate) fn read_greeting(from: &mut impl Read) -> io::Result<()> {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < 120 && line.last() != Some(&b'\n') && from.read(&mut byte)? == 1 {
        line.push(byte[0]);
    }
    if line == greeting().as_bytes() {
        return Ok(());
    }
    let (ours, theirs) = (greeting(), String::from_utf8_lossy(&line));
    Err(io::Error::new(
        io::ErrorKind::InvalidData,
        match theirs.trim_end() {
            "" => "it ended without a word".to_owned(),
            theirs => format!("it says `{theirs}` where `{}` is expected", ours.trim_end()),
        },
    ))
}

/// The bytes of one frame.
pub(crate) fn frame<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    encode_to(&mut bytes, message);
    let len = bytes.len() - 4;
    if len > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a message of {len} bytes is too long")));
    }
    bytes[..4].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(bytes)
}

/// Reads one frame.
pub(crate) fn read_frame<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {len} bytes")));
    }
    // Grown as the bytes come: a length that is noise must not cost its memory.
    let mut payload = Vec::new();
    if from.take(len as u64).read_to_end(&mut payload)? < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    decode(&payload).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))
}

/// Writes one frame.
pub(crate) fn write_frame<T: Serialize>(to: &mut impl Write, message: &T) -> io::Result<()> {
    to.write_all(&frame(message)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_follow_each_other_and_noise_is_an_error() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &Reply::Value(1.5)).unwrap();
        write_frame(&mut bytes, &Reply::Refused("why".into())).unwrap();
        let mut from = &bytes[..];
        assert!(matches!(read_frame(&mut from).unwrap(), Reply::Value(x) if x == 1.5));
        assert!(matches!(read_frame(&mut from).unwrap(), Reply::Refused(why) if why == "why"));
        assert_eq!(read_frame::<Reply>(&mut from).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        for cut in 0..9 {
            assert!(read_frame::<Reply>(&mut &bytes[..cut]).is_err(), "{cut}");
        }
        assert_eq!(read_frame::<Reply>(&mut &[0xff; 64][..]).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(read_frame::<Reply>(&mut &[1, 0, 0, 0, 99][..]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn another_version_and_another_program_are_told_by_their_first_line() {
        assert!(read_greeting(&mut greeting().as_bytes()).is_ok());
        let why = |line: &str| read_greeting(&mut line.as_bytes()).unwrap_err().to_string();
        assert!(why("flashtune worker 999 9.9\n").contains("999"));
        assert!(
            why("hello, this is another program, and it has much to say about itself".repeat(9).as_str())
                .contains("hello")
        );
        assert!(why("").contains("without a word"));
    }
}
