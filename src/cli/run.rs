//! `flashtune run`: attention over the tensors of a file.

use super::context::Context;
use super::exit::usage;
use super::files;
use super::tensors::{self, File, FileLayout, Output};
use anyhow::Result;
use flashtune::{DType, Mask};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Options of `run`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A safetensors file with the tensors q, k and v, each [batch, heads, rows, dim]
    input: PathBuf,
    /// Where to write o (like q, with v's dim) and lse (fp32, [batch, heads, rows])
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// full, causal, or window:LEFT,RIGHT with - for an unbounded side
    #[arg(long, default_value = "full", value_name = "MASK")]
    mask: Mask,
    /// Softmax scale; 1/sqrt(head dim) when absent
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    scale: Option<f32>,
    /// Order of the dimensions in the files
    #[arg(long, value_enum, default_value_t)]
    layout: FileLayout,
    /// Also write the attention weights (fp32, [batch, heads, q rows, kv rows]); CUDA only
    #[arg(long)]
    weights: bool,
}

pub fn run(cx: &mut Context, args: Args) -> Result<()> {
    if args.scale.is_some_and(|s| !s.is_finite()) {
        return Err(usage("--scale must be a finite number"));
    }
    files::check_folder(&args.output)?;
    let layout = args.layout;
    let (q, k, v) = {
        let file = File::read(&args.input)?;
        (file.tensor("q", layout)?, file.tensor("k", layout)?, file.tensor("v", layout)?)
    };
    let engine = cx.engine()?;
    let out = engine.forward_host_with(&q, &k, &v, layout.layout(), args.mask, args.scale, args.weights)?;

    let floats = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_le_bytes()).collect() };
    let [batch, heads, q_len, _] = q.shape();
    let kv_len = k.shape()[2];
    let lse = floats(&out.lse);
    let weights = out.weights.as_deref().map(floats);
    let mut outputs: Vec<Output<'_>> = vec![
        ("o", out.o.dtype(), layout.order(out.o.shape()).to_vec(), out.o.bytes()),
        ("lse", DType::F32, vec![batch, heads, q_len], &lse),
    ];
    if let Some(weights) = &weights {
        outputs.push(("weights", DType::F32, vec![batch, heads, q_len, kv_len], weights));
    }
    tensors::write(&args.output, &outputs)?;

    let explanation = out.plan.as_ref().map(|p| p.explain());
    if cx.json() {
        return cx.print_json(&json!({ "output": args.output.display().to_string(), "plan": explanation }));
    }
    let written: Vec<_> = outputs.iter().map(|(name, _, shape, _)| format!("{name} {shape:?}")).collect();
    writeln!(cx.out, "wrote {} to {}", written.join(", "), args.output.display())?;
    if let Some(explanation) = explanation {
        write!(cx.out, "{explanation}")?;
    }
    Ok(())
}
