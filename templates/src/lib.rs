//! The templates of flashtune's kernels: CUDA C++ and C with values that
//! `flashtune-codegen` renders, as texts inside the library.
//!
//! ```
//! let (_, text) = flashtune_templates::FILES.iter().find(|(path, _)| *path == "forward/cpu.c").unwrap();
//! assert!(text.contains("@{ header }@"));
//! ```
//!
//! They are a package of their own because a package holds no file from outside its folder, and the folder lies at the
//! top of the tree, where people who work on kernels look for it. Blocks of the template language are `<% %>`, values
//! `@{ }@`, comments `<# #>`. The folder can be named to a host at run time, which then takes the files from there:
//! `FLASHTUNE_TEMPLATES`, or `--templates` of the command.

macro_rules! files {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_str!(concat!("../", $path)))),*]
    };
}

/// Every template: its path inside the folder, which is its name, and its text; sorted by path.
pub const FILES: &[(&str, &str)] = files![
    "append/cpu.c",
    "append/cuda.cu",
    "backward/cpu.c",
    "backward/naive.cu",
    "backward/sm80.cu",
    "backward/sm80/keys.cuh",
    "backward/sm80/layout.cuh",
    "backward/sm80/products.cuh",
    "backward/sm80/queries.cuh",
    "backward/sm80/statistics.cuh",
    "backward/sm80/walk.cuh",
    "backward/sm80/weights.cuh",
    "backward/sm90.cu",
    "backward/sm90/joint.cuh",
    "backward/sm90/key_blocks.cuh",
    "backward/sm90/key_loader.cuh",
    "backward/sm90/key_steps.cuh",
    "backward/sm90/keys.cuh",
    "backward/sm90/layout.cuh",
    "backward/sm90/listed.cuh",
    "backward/sm90/queries.cuh",
    "backward/sm90/sequences.cuh",
    "backward/sm90/statistics.cuh",
    "backward/sm90/store.cuh",
    "backward/sm90/sums.cuh",
    "backward/sm90/tickets.cuh",
    "backward/sm90/tiles.cuh",
    "backward/sm90/turns.cuh",
    "backward/sm90/walks.cuh",
    "forward/cpu.c",
    "forward/cpu_e4m3.c",
    "forward/cpu_ragged.c",
    "forward/naive.cu",
    "forward/naive_ragged.cu",
    "forward/sm80.cu",
    "forward/sm80/instructions.cuh",
    "forward/sm80_f32.cu",
    "forward/sm80_ragged.cu",
    "forward/sm80_ragged/copies.cuh",
    "forward/sm80_ragged/elements.cuh",
    "forward/sm80_ragged/layout.cuh",
    "forward/sm80_ragged/merge.cuh",
    "forward/sm80_ragged/products.cuh",
    "forward/sm80_ragged/range.cuh",
    "forward/sm80_ragged/rows.cuh",
    "forward/sm80_ragged/work.cuh",
    "forward/sm89_fp8.cu",
    "forward/sm89_fp8/products.cuh",
    "forward/sm89_fp8/rows.cuh",
    "forward/sm89_fp8/softmax.cuh",
    "forward/sm90.cu",
    "forward/sm90/addresses.cuh",
    "forward/sm90/arrivals.cuh",
    "forward/sm90/bias.cuh",
    "forward/sm90/consumer.cuh",
    "forward/sm90/dense_mask.cuh",
    "forward/sm90/drawer.cuh",
    "forward/sm90/epilogue.cuh",
    "forward/sm90/layout.cuh",
    "forward/sm90/lists.cuh",
    "forward/sm90/mask_units.cuh",
    "forward/sm90/masks.cuh",
    "forward/sm90/producer.cuh",
    "forward/sm90/ranges.cuh",
    "forward/sm90/recompute.cuh",
    "forward/sm90/rings.cuh",
    "forward/sm90/scheduler.cuh",
    "forward/sm90/softmax.cuh",
    "forward/sm90/steps.cuh",
    "forward/sm90/tiles.cuh",
    "forward/sm90_fp8.cu",
    "forward/sm90_fp8/barriers.cuh",
    "forward/sm90_fp8/constants.cuh",
    "forward/sm90_fp8/consumer.cuh",
    "forward/sm90_fp8/layout.cuh",
    "forward/sm90_fp8/loader.cuh",
    "forward/sm90_fp8/operands.cuh",
    "forward/sm90_fp8/scheduler.cuh",
    "forward/sm90_fp8/softmax.cuh",
    "forward/sm90_fp8/transpose.cuh",
    "forward/sm90_fp8_ragged.cu",
    "forward/sm90_fp8_ragged/loader.cuh",
    "forward/sm90_fp8_ragged/merged.cuh",
    "forward/sm90_fp8_ragged/operands.cuh",
    "forward/sm90_fp8_ragged/scheduler.cuh",
    "forward/sm90_ragged.cu",
    "forward/sm90_ragged/barriers.cuh",
    "forward/sm90_ragged/constants.cuh",
    "forward/sm90_ragged/consumer.cuh",
    "forward/sm90_ragged/epilogue.cuh",
    "forward/sm90_ragged/layout.cuh",
    "forward/sm90_ragged/masks.cuh",
    "forward/sm90_ragged/no_biases.cuh",
    "forward/sm90_ragged/operands.cuh",
    "forward/sm90_ragged/pages.cuh",
    "forward/sm90_ragged/pieces.cuh",
    "forward/sm90_ragged/producer.cuh",
    "forward/sm90_ragged/roles.cuh",
    "forward/sm90_ragged/scheduler.cuh",
    "forward/sm90_ragged/shares.cuh",
    "forward/sm90_ragged/table.cuh",
    "forward/sm90_ragged/tiles.cuh",
    "forward/sm90_ragged/visits.cuh",
    "gradient/cpu.c",
    "gradient/naive.cu",
    "gradient/places.cuh",
    "lib/cpu/abi.h",
    "lib/cpu/amx.h",
    "lib/cpu/codes.h",
    "lib/cpu/convert.h",
    "lib/cpu/dropout.h",
    "lib/cpu/exact.h",
    "lib/cpu/exp2.h",
    "lib/cpu/few_products.h",
    "lib/cpu/few_rows.h",
    "lib/cpu/gather.h",
    "lib/cpu/lengths.h",
    "lib/cpu/mask.h",
    "lib/cpu/matmul.h",
    "lib/cpu/narrow_8.h",
    "lib/cpu/pack.h",
    "lib/cpu/panels.h",
    "lib/cpu/program.h",
    "lib/cpu/program_gradient.h",
    "lib/cpu/quantise.h",
    "lib/cpu/ragged.h",
    "lib/cpu/ragged_program.h",
    "lib/cpu/ranges.h",
    "lib/cpu/residual.h",
    "lib/cpu/rotary.h",
    "lib/cpu/row_keys.h",
    "lib/cpu/score.h",
    "lib/cpu/softmax.h",
    "lib/cpu/store.h",
    "lib/cpu/vec.h",
    "lib/cuda/attention/abi.cuh",
    "lib/cuda/attention/descale.cuh",
    "lib/cuda/attention/divisor.cuh",
    "lib/cuda/attention/dropout.cuh",
    "lib/cuda/attention/e4m3_scales.cuh",
    "lib/cuda/attention/elements.cuh",
    "lib/cuda/attention/far.cuh",
    "lib/cuda/attention/far_rows.cuh",
    "lib/cuda/attention/kv_elements.cuh",
    "lib/cuda/attention/lengths.cuh",
    "lib/cuda/attention/non_finite.cuh",
    "lib/cuda/attention/non_finite_elements.cuh",
    "lib/cuda/attention/output_fp8.cuh",
    "lib/cuda/attention/packed.cuh",
    "lib/cuda/attention/packed_rows.cuh",
    "lib/cuda/attention/quantise.cuh",
    "lib/cuda/attention/ragged.cuh",
    "lib/cuda/attention/residual.cuh",
    "lib/cuda/attention/rotary.cuh",
    "lib/cuda/attention/row_tile.cuh",
    "lib/cuda/attention/softmax.cuh",
    "lib/cuda/attention/tile.cuh",
    "lib/cuda/attention/types.cuh",
    "lib/cuda/ptx/add_halves.cuh",
    "lib/cuda/ptx/approx.cuh",
    "lib/cuda/ptx/convert_fp8.cuh",
    "lib/cuda/ptx/cp_async.cuh",
    "lib/cuda/ptx/dependent_launch.cuh",
    "lib/cuda/ptx/global_counter.cuh",
    "lib/cuda/ptx/global_memory.cuh",
    "lib/cuda/ptx/ldmatrix.cuh",
    "lib/cuda/ptx/mbarrier.cuh",
    "lib/cuda/ptx/mma.cuh",
    "lib/cuda/ptx/mma_e4m3.cuh",
    "lib/cuda/ptx/mma_k8.cuh",
    "lib/cuda/ptx/mma_tf32.cuh",
    "lib/cuda/ptx/named_barrier.cuh",
    "lib/cuda/ptx/permute.cuh",
    "lib/cuda/ptx/pipeline.cuh",
    "lib/cuda/ptx/registers.cuh",
    "lib/cuda/ptx/shared_memory.cuh",
    "lib/cuda/ptx/tma.cuh",
    "lib/cuda/ptx/warp.cuh",
    "lib/cuda/ptx/wgmma.cuh",
    "lib/cuda/score/box.cuh",
    "lib/cuda/score/gradient.cuh",
    "lib/cuda/score/program.cuh",
    "lib/cuda/score/program_blocks.cuh",
    "lib/cuda/score/score.cuh",
    "lib/cuda/score/search.cuh",
    "lib/cuda/score/sink.cuh",
    "lib/cuda/score/terms.cuh",
    "pad/cuda.cu",
    "quantise/cpu.c",
    "quantise/cuda.cu",
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// What is a template by the end of its name: what a folder of overrides is read for, too.
    fn is_template(name: &str) -> bool {
        let end = Path::new(name).extension().and_then(|e| e.to_str());
        end.is_some_and(|end| ["c", "h", "cu", "cuh", "inc", "ptx"].contains(&end))
    }

    #[test]
    fn every_file_of_the_folder_is_listed_and_sorted() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut folders = vec![root.to_owned()];
        let mut found = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
                match entry.file_type().unwrap().is_dir() {
                    true => folders.push(entry.path()),
                    false => found.push(entry.path().strip_prefix(root).unwrap().to_str().unwrap().to_owned()),
                }
            }
        }
        found.sort();
        let (templates, others): (Vec<_>, Vec<_>) = found.into_iter().partition(|name| is_template(name));
        assert_eq!(templates, FILES.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>());
        // A template whose name ends in another way would be left out in silence. What cargo adds to a package is not
        // meant.
        let others = others.into_iter().filter(|name| !name.starts_with("Cargo.") && !name.starts_with('.'));
        assert_eq!(others.collect::<Vec<_>>(), ["LICENSE", "README.md", "src/lib.rs"]);
    }

    #[test]
    fn shared_cuda_names_no_skeleton() {
        let shared = FILES.iter().filter(|(name, _)| name.starts_with("lib/cuda/"));
        for (name, text) in shared {
            for own in ["forward/", "Layout::", "Sm90", "kConsumers", "kThreads)"] {
                assert!(!text.contains(own), "{name} has `{own}`, which is a skeleton's");
            }
        }
    }
}
