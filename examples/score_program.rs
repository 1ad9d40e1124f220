//! A mask and a change of the score that are compiled into the kernel: documents of a packed batch, with a soft cap.
//!
//!     cargo run --release --example score_program

use flashtune::{
    DType, Elements, Engine, HostForward, HostTensor, Layout, Program, ProgramRef, Result, Scalar, SideData,
};

/// What the kernel computes is fixed; documents and cap are brought by each call.
const TEXT: &str = "
    docs: i32[batch, *] nondecreasing;
    cap: float in 0..50;
    mask = docs[b, q] == docs[b, kv] and kv <= q;
    score = cap * tanh(score / cap);
";

/// Runs two calls of one kernel.
pub fn main() -> Result<()> {
    let engine = Engine::builder().build()?;
    let program = Program::parse(TEXT)?;
    let (batch, heads, rows) = (2, 4, 256);
    let random =
        |seed| HostTensor::random(DType::Bf16, [batch, heads, rows, 64], Layout::Bhsd, seed, Default::default());
    let (q, k, v) = (random(1), random(2), random(3));
    // Documents of 100 rows, and of 40: the second call needs no other kernel.
    for (length, cap) in [(100, 30.0), (40, 15.0)] {
        let docs = (0..batch * rows).map(|i| (i % rows / length) as i64).collect();
        let data =
            SideData::default().scalar("cap", Scalar::Float(cap)).tensor("docs", &[batch, rows], Elements::Int(docs));
        let out = engine.forward_host_call(&HostForward {
            program: Some((ProgramRef::new(program.clone()), &data)),
            ..HostForward::new(&q, &k, &v)
        })?;
        println!("documents of {length}: o[1, 2, 200, 0] = {}", out.o.get([1, 2, 200, 0]));
        if let Some(plan) = out.plan {
            println!("{}", plan.explain());
        }
    }
    Ok(())
}
