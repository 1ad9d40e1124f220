//! Kernels that tests of this crate compile, each once for all of them: one for the host takes seconds of a processor,
//! and the same recipe gives the same bytes. Tests of compilers, and of what becomes of their output, call these
//! themselves.

use super::{abi, compile_with, compiler_for, recipe};
use crate::Result;
use flashtune_cache::{Artifact, Key, Recipe};
use flashtune_codegen::{Kernel, TemplateSet};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

type Slot = Arc<Mutex<Option<Arc<Artifact>>>>;

/// A kernel as [`compile_with`] gives it, compiled by the first who asks; others wait for that one.
pub(crate) fn compile_once(kernel: &Kernel, templates: &TemplateSet) -> Result<Arc<Artifact>> {
    let compiler = compiler_for(kernel.arch)?;
    once(recipe(kernel, templates, compiler.id()).key(), || compile_with(&*compiler, kernel, templates))
}

/// The same as it is written, in a tenth of the time: for tests of many kernels that say where things lie. What the
/// optimiser makes of such kernels is for tests of a few of them.
pub(crate) fn compile_quickly_once(kernel: &Kernel) -> Result<Arc<Artifact>> {
    let compiler = compiler_for(kernel.arch)?;
    let templates = TemplateSet::embedded();
    let mut recipe = recipe(kernel, &templates, compiler.id());
    quickly(&mut recipe.options);
    once(recipe.key(), || compile_quickly(kernel, &templates))
}

fn once(key: Key, compile: impl FnOnce() -> Result<Artifact>) -> Result<Arc<Artifact>> {
    static SLOTS: Mutex<Option<HashMap<Key, Slot>>> = Mutex::new(None);
    let mut slots = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = slots.get_or_insert_default().entry(key).or_default().clone();
    drop(slots);
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if slot.is_none() {
        *slot = Some(Arc::new(compile()?));
    }
    Ok(slot.clone().expect("just put there"))
}

/// A kernel of the embedded templates, or of others: one with a planted fault.
pub(crate) fn compile_or_plant(kernel: &Kernel, templates: &TemplateSet) -> Result<Arc<Artifact>> {
    match templates.hash() == TemplateSet::embedded().hash() {
        true => compile_once(kernel, templates),
        false => compile_quickly(kernel, templates).map(Arc::new),
    }
}

/// Neither optimised nor inlined: a ragged kernel takes 0.2 s of 2.9.
fn quickly(options: &mut Vec<String>) {
    if let Some(at) = options.iter().position(|option| option == "-O3") {
        options.splice(at..=at, ["-O0", "-Dalways_inline=unused"].map(str::to_owned));
    }
}

/// A kernel that is none of the product's, such as one with a planted fault, in a tenth of the time. Kept for nobody.
fn compile_quickly(kernel: &Kernel, templates: &TemplateSet) -> Result<Artifact> {
    let compiler = compiler_for(kernel.arch)?;
    let mut source = kernel.render(templates)?;
    quickly(&mut source.options);
    let (bytes, facts) = compiler.compile(&source)?;
    let recipe = Recipe { options: source.options, ..recipe(kernel, templates, compiler.id()) };
    Ok(Artifact { recipe, entry: source.entry, args: abi::ArgsLayout::of(kernel), facts, bytes })
}
