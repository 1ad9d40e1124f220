//! What a score program reads, on the command line: scalars by `--set`, tensors from a safetensors file.

use super::exit::usage;
use super::tensors::File;
use anyhow::Result;
use flashtune_codegen::score::{Declaration, Program, Scalar, SideData, Storage, Type};

/// The values of a program's scalars and tensors. What it does not declare is left alone.
pub(crate) fn data(program: &Program, set: &[String], tensors: Option<&File>) -> Result<SideData> {
    let mut data = SideData::default();
    for item in set {
        let (name, number) = split(item)?;
        let declared = program.declarations().iter().find(|d| d.name == name && d.axes.is_none());
        let Some(declared) = declared else { continue };
        let scalar = match declared.storage.ty() {
            Type::Float => number.parse().ok().map(Scalar::Float),
            _ => number.parse().ok().map(Scalar::Int),
        };
        let bad = || usage(format!("--set {item}: it is no {}", declared.storage.ty()));
        data = data.scalar(name, scalar.ok_or_else(bad)?);
    }
    if let Some(file) = tensors {
        for d in program.declarations().iter().filter(|d| d.axes.is_some()) {
            data.tensors.insert(d.name.clone(), file.side_tensor(&d.name)?);
        }
    }
    Ok(data)
}

/// What the values say of their names, for programs that do not declare them.
pub(crate) fn given(set: &[String], tensors: &File) -> Result<Vec<Declaration>> {
    let mut given = tensors.side_declarations()?;
    for item in set {
        let (name, number) = split(item)?;
        let storage = if number.parse::<i64>().is_ok() { Storage::I32 } else { Storage::F32 };
        given.push(Declaration::scalar(name, storage));
    }
    Ok(given)
}

fn split(item: &str) -> Result<(&str, &str)> {
    item.split_once('=').ok_or_else(|| usage(format!("--set {item}: write it as NAME=NUMBER")))
}
