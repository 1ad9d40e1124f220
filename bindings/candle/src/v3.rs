//! The functions of candle-flash-attn-v3. `use_gqa_packing` changes nothing: kernels are chosen by what was measured.

use candle_core::{Result, Tensor};

/// Declares functions as those of the crate's root, with the one argument more.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)*) => {$(
        #[doc = concat!("[`crate::", stringify!($name), "`]; `use_gqa_packing` changes nothing.")]
        #[doc = ""]
        #[doc = "# Errors"]
        #[doc = concat!("As [`crate::", stringify!($name), "`].")]
        #[allow(clippy::too_many_arguments, reason = "candle-flash-attn-v3's")]
        pub fn $name($($arg: $ty),*, use_gqa_packing: bool) -> Result<Tensor> {
            let _ = use_gqa_packing;
            crate::$name($($arg),*)
        }
    )*};
}

functions! {
    fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool);
    fn flash_attn_windowed(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    );
    fn flash_attn_alibi(q: &Tensor, k: &Tensor, v: &Tensor, alibi_slopes: &Tensor, softmax_scale: f32, causal: bool);
    fn flash_attn_alibi_windowed(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        alibi_slopes: &Tensor,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    );
    fn flash_attn_varlen(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        causal: bool,
    );
    fn flash_attn_varlen_windowed(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    );
    fn flash_attn_varlen_alibi(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        alibi_slopes: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        causal: bool,
    );
    fn flash_attn_varlen_alibi_windowed(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        alibi_slopes: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    );
}
