//! `flashtune keygen` and `flashtune sign`: who vouches for a bundle.

use super::context::Context;
use anyhow::Result;
use flashtune_cache::{SecretKey, sign_bundle};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Options of `keygen`.
#[derive(clap::Args, Debug)]
pub(crate) struct KeygenArgs {
    /// The file for the secret key; must not be there yet. The public key is printed
    file: PathBuf,
}

/// Options of `sign`.
#[derive(clap::Args, Debug)]
pub(crate) struct SignArgs {
    /// The bundle file; an earlier signature is replaced
    file: PathBuf,
    /// The file with the secret key
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
}

pub(crate) fn keygen(cx: &mut Context, args: KeygenArgs) -> Result<()> {
    let key = SecretKey::generate()?;
    key.write_new(&args.file)?;
    let public = key.public().to_string();
    if cx.json() {
        return cx.print_json(&json!({ "file": args.file.display().to_string(), "public": public }));
    }
    writeln!(cx.out, "{public}")?;
    Ok(())
}

pub(crate) fn sign(cx: &mut Context, args: SignArgs) -> Result<()> {
    let key = SecretKey::read(&args.key)?;
    let root = sign_bundle(&args.file, &key)?;
    let (file, public) = (args.file.display().to_string(), key.public().to_string());
    if cx.json() {
        return cx.print_json(&json!({ "file": file, "signer": public, "root": root.hex() }));
    }
    writeln!(cx.out, "{file}: content {root}, signed by {public}")?;
    Ok(())
}
