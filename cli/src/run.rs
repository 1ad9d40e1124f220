//! `flashtune run`: attention over the tensors of a file.

use super::context::Context;
use super::exit::usage;
use super::files;
use super::lists::is_program;
use super::side;
use super::tensors::{self, File, FileLayout, Output};
use anyhow::Result;
use flashtune::{DType, HostForward, Mask, ProgramRef, SideData};
use flashtune_codegen::Error;
use flashtune_codegen::score::Texts;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Options of `run`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// A safetensors file with the tensors q, k and v, each [batch, heads, rows, dim]
    input: PathBuf,
    /// Where to write o (like q, with v's dim) and lse (fp32, [batch, heads, rows])
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// full, causal, window:LEFT,RIGHT with - for an unbounded side; or a score program: the name of a built-in one
    /// (document, ...) or its text ("kv <= q and q - kv < 1024")
    #[arg(long, default_value = "full", value_name = "MASK")]
    mask: String,
    /// What goes into the softmax in place of the score: the name of a built-in program (alibi, ...) or a text. Tensors
    /// that programs read come from the input file, by name
    #[arg(long, value_name = "PROGRAM")]
    score: Option<String>,
    /// The logit of one more key without a value, as a text ("sinks[h]")
    #[arg(long, value_name = "PROGRAM")]
    sink: Option<String>,
    /// A scalar of the score programs, as NAME=NUMBER; may be repeated
    #[arg(long, value_name = "NAME=NUMBER")]
    set: Vec<String>,
    /// Softmax scale; 1/sqrt(head dim) when absent
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    scale: Option<f32>,
    /// Order of the dimensions in the files
    #[arg(long, value_enum, default_value_t)]
    layout: FileLayout,
    /// Also write the attention weights (fp32, [batch, heads, q rows, kv rows])
    #[arg(long)]
    weights: bool,
}

/// The mask of the window kind, and the score program with what it reads.
fn programs(args: &Args, file: &File) -> Result<(Mask, Option<(ProgramRef, SideData)>)> {
    let (mask, text) = match args.mask.parse::<Mask>() {
        Ok(mask) => (mask, None),
        Err(_) if is_program(&args.mask) => (Mask::Full, Some(args.mask.as_str())),
        Err(e) => return Err(e.into()),
    };
    let texts = Texts { mask: text, score: args.score.as_deref(), sink: args.sink.as_deref() };
    let program = texts.program(&side::given(&args.set, file)?).map_err(Error::from)?;
    if program.is_plain() {
        return Ok((mask, None));
    }
    let data = side::data(&program, &args.set, Some(file))?;
    Ok((mask, Some((ProgramRef::new(program), data))))
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    if args.scale.is_some_and(|s| !s.is_finite()) {
        return Err(usage("--scale must be a finite number"));
    }
    files::check_folder(&args.output)?;
    if let (Ok(input), Ok(output)) = (args.input.canonicalize(), args.output.canonicalize())
        && input == output
    {
        return Err(usage(format!(
            "--output {} is the input, which would be lost; name another file",
            output.display()
        )));
    }
    let layout = args.layout;
    let (q, k, v, mask, program) = {
        let file = File::read(&args.input)?;
        let (mask, program) = programs(&args, &file)?;
        (file.tensor("q", layout)?, file.tensor("k", layout)?, file.tensor("v", layout)?, mask, program)
    };
    let engine = cx.engine()?;
    let out = engine.forward_host_call(&HostForward {
        layout: layout.layout(),
        mask,
        scale: args.scale,
        weights: args.weights,
        program: program.as_ref().map(|(program, data)| (*program, data)),
        ..HostForward::new(&q, &k, &v)
    })?;

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
