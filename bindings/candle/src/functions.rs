//! The functions of candle-flash-attn, with its names, arguments and layouts, and a twin of each that gives the
//! log-sum-exp, too.

use crate::dense::{self, Settings};
use crate::ragged::{self, Lengths, Pages};
use crate::side::{Changes, Side};
use crate::windows::{self, both, of_causal};
use candle_core::{Result, Tensor};

/// O and the log-sum-exp, if it is wanted.
type Outputs = Result<(Tensor, Option<Tensor>)>;
type Window = [Option<usize>; 2];

fn fixed(qkv: [&Tensor; 3], scale: f32, [left, right]: Window, changes: &Changes<'_>, lse: bool) -> Outputs {
    // Beyond the keys a reach is no bound, as in candle-flash-attn.
    let keys = qkv[1].dims().get(1).copied().unwrap_or(0);
    let mask = windows::mask(left, right, keys);
    dense::forward(qkv, Settings { mask, scale: Some(scale), side: Side::of(changes)? }, lse)
}

fn packed(
    qkv: [&Tensor; 3],
    lengths: &Lengths<'_>,
    scale: f32,
    [left, right]: Window,
    changes: &Changes<'_>,
    lse: bool,
) -> Outputs {
    let mask = windows::mask(left, right, lengths.max_k);
    ragged::forward(qkv, lengths, None, Settings { mask, scale: Some(scale), side: Side::of(changes)? }, lse)
}

fn paged(
    qkv: [&Tensor; 3],
    lengths: &Lengths<'_>,
    pages: &Pages<'_>,
    scale: f32,
    [left, right]: Window,
    softcap: Option<f32>,
    lse: bool,
) -> Outputs {
    let mut mask = windows::mask(left, right, lengths.max_k);
    let mut changes = Changes { softcap, ..Changes::default() };
    if let Some(ranges) = pages.ranges
        && mask != flashtune::Mask::Full
    {
        // The window is part of the program: ranges see more than it.
        let (left, right) = mask.window();
        let reach = |side: Option<u32>| side.unwrap_or(1 << 30).min(1 << 30);
        changes.ranges = Some((ranges, [reach(left), reach(right)]));
        mask = flashtune::Mask::Full;
    }
    ragged::forward(qkv, lengths, Some(pages), Settings { mask, scale: Some(scale), side: Side::of(&changes)? }, lse)
}

/// Declares functions, each with its twin: `$lse` in the body is whether the log-sum-exp is wanted.
macro_rules! functions {
    ($($(#[$doc:meta])* fn $name:ident, $twin:ident($($arg:ident: $ty:ty),* $(,)?), |$lse:ident| $body:expr;)*) => {$(
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "candle-flash-attn's")]
        pub fn $name($($arg: $ty),*) -> Result<Tensor> {
            let $lse = false;
            Ok($body?.0)
        }

        #[doc = concat!(
            "[`", stringify!($name), "`] and the log-sum-exp of the scores: natural, f32, `[batch, heads, rows]`, of"
        )]
        #[doc = "packed sequences `[heads, total]`; `-inf` where a row sees no key. Gradients go through O alone."]
        #[doc = ""]
        #[doc = "# Errors"]
        #[doc = concat!("As [`", stringify!($name), "`].")]
        #[allow(clippy::too_many_arguments, reason = "candle-flash-attn's")]
        pub fn $twin($($arg: $ty),*) -> Result<(Tensor, Tensor)> {
            let $lse = true;
            both($body?)
        }
    )*};
}

functions! {
    /// `softmax(softmax_scale * Q K^T) V` for q `[batch, q_len, heads, dim]`, k and v `[batch, kv_len, kv_heads, dim]`:
    /// f16, bf16 or f32, on the CPU or on CUDA, contiguous or not. `heads` is a multiple of `kv_heads`, `dim` at most
    /// 256. With `causal` a query sees keys up to its own position, where the last query stands at the last key. Gives
    /// `[batch, q_len, heads, dim]`; rows that see no key are 0. Gradients of q, k and v go through it.
    ///
    /// # Errors
    /// [`crate::Error`] inside of candle's, which [`crate::error_of`] finds: tensors that do not fit each other, types
    /// and head dims that no kernel takes, and what the engine says.
    fn flash_attn, flash_attn_with_lse(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool),
        |lse| fixed([q, k, v], softmax_scale, of_causal(causal), &Changes::default(), lse);

    /// [`flash_attn`] with a window: a query sees so many keys before and behind its position. `None`, and reaches
    /// beyond the keys, are no bound.
    ///
    /// # Errors
    /// As [`flash_attn`].
    fn flash_attn_windowed, flash_attn_windowed_with_lse(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    ), |lse| fixed([q, k, v], softmax_scale, [window_size_left, window_size_right], &Changes::default(), lse);

    /// [`flash_attn`] with ALiBi: the slope of a head times the distance of query and key is taken from the score.
    /// `alibi_slopes` is f32, `[heads]` or `[batch, heads]`; there is no gradient by it.
    ///
    /// # Errors
    /// As [`flash_attn`].
    fn flash_attn_alibi, flash_attn_alibi_with_lse(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        alibi_slopes: &Tensor,
        softmax_scale: f32,
        causal: bool,
    ), |lse| {
        let changes = Changes { slopes: Some(alibi_slopes), ..Changes::default() };
        fixed([q, k, v], softmax_scale, of_causal(causal), &changes, lse)
    };

    /// [`flash_attn_alibi`] with a window, as [`flash_attn_windowed`].
    ///
    /// # Errors
    /// As [`flash_attn`].
    fn flash_attn_alibi_windowed, flash_attn_alibi_windowed_with_lse(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        alibi_slopes: &Tensor,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    ), |lse| {
        let changes = Changes { slopes: Some(alibi_slopes), ..Changes::default() };
        fixed([q, k, v], softmax_scale, [window_size_left, window_size_right], &changes, lse)
    };

    /// [`flash_attn_windowed`] with scores bent to stay within `softcap` (`softcap * tanh(score / softcap)`, none with
    /// 0), before slopes change them.
    ///
    /// # Errors
    /// As [`flash_attn`].
    fn flash_attn_alibi_windowed_softcap, flash_attn_alibi_windowed_softcap_with_lse(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        alibi_slopes: Option<&Tensor>,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        softcap: f32,
    ), |lse| {
        let changes = Changes { slopes: alibi_slopes, softcap: Some(softcap), ..Changes::default() };
        fixed([q, k, v], softmax_scale, [window_size_left, window_size_right], &changes, lse)
    };

    /// [`flash_attn`] over sequences of different lengths, one after the other: q `[total_q, heads, dim]`, k and v
    /// `[total_k, kv_heads, dim]`. `seqlens_q` and `seqlens_k` are the sums of the lengths, `[batch + 1]` from 0 on, of
    /// u32 (or i32, or i64); `max_seqlen_q` and `max_seqlen_k` the longest that occur. Sequences may be empty. Gives
    /// `[total_q, heads, dim]`.
    ///
    /// With gradients it is one dense call for each sequence, and waits for the lengths on the host.
    ///
    /// On the CPU the sums are checked. On CUDA, as in candle-flash-attn, nobody looks at them: they must not decrease,
    /// nor go beyond the rows that there are.
    ///
    /// # Errors
    /// As [`flash_attn`]; lengths that do not fit, on the CPU.
    fn flash_attn_varlen, flash_attn_varlen_with_lse(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        causal: bool,
    ), |lse| {
        let lengths = Lengths { q: seqlens_q, k: seqlens_k, max_q: max_seqlen_q, max_k: max_seqlen_k };
        packed([q, k, v], &lengths, softmax_scale, of_causal(causal), &Changes::default(), lse)
    };

    /// [`flash_attn_varlen`] with a window, as [`flash_attn_windowed`].
    ///
    /// # Errors
    /// As [`flash_attn_varlen`].
    fn flash_attn_varlen_windowed, flash_attn_varlen_windowed_with_lse(
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
    ), |lse| {
        let lengths = Lengths { q: seqlens_q, k: seqlens_k, max_q: max_seqlen_q, max_k: max_seqlen_k };
        packed([q, k, v], &lengths, softmax_scale, [window_size_left, window_size_right], &Changes::default(), lse)
    };

    /// [`flash_attn_varlen_windowed`] beside a paged KV cache: k and v are `[pages, page_block_size, kv_heads, dim]`,
    /// `block_table` has the pages of each sequence, `[batch, pages]` of u32 (or i32, or i64), `seqlens_k` the sums of
    /// the lengths. Keys of a range of `mm_prefix_ranges`, i32 `[batch, ranges, 2]` (begin and end), see each other
    /// whatever the window says; there are at most 16 for a sequence. Pages may be of any size. No gradients.
    ///
    /// # Errors
    /// As [`flash_attn_varlen`]; head dims that are no multiple of 8.
    fn flash_attn_varlen_paged_windowed, flash_attn_varlen_paged_windowed_with_lse(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        block_table: &Tensor,
        mm_prefix_ranges: Option<&Tensor>,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        page_block_size: usize,
        softcap: Option<f32>,
    ), |lse| {
        let lengths = Lengths { q: seqlens_q, k: seqlens_k, max_q: max_seqlen_q, max_k: max_seqlen_k };
        let pages = Pages { table: block_table, tokens: page_block_size, ranges: mm_prefix_ranges };
        let window = [window_size_left, window_size_right];
        paged([q, k, v], &lengths, &pages, softmax_scale, window, softcap, lse)
    };

    /// [`flash_attn_varlen`] with ALiBi, as [`flash_attn_alibi`].
    ///
    /// # Errors
    /// As [`flash_attn_varlen`].
    fn flash_attn_varlen_alibi, flash_attn_varlen_alibi_with_lse(
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
    ), |lse| {
        let lengths = Lengths { q: seqlens_q, k: seqlens_k, max_q: max_seqlen_q, max_k: max_seqlen_k };
        let changes = Changes { slopes: Some(alibi_slopes), ..Changes::default() };
        packed([q, k, v], &lengths, softmax_scale, of_causal(causal), &changes, lse)
    };

    /// [`flash_attn_varlen_alibi`] with a window, as [`flash_attn_windowed`].
    ///
    /// # Errors
    /// As [`flash_attn_varlen`].
    fn flash_attn_varlen_alibi_windowed, flash_attn_varlen_alibi_windowed_with_lse(
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
    ), |lse| {
        let lengths = Lengths { q: seqlens_q, k: seqlens_k, max_q: max_seqlen_q, max_k: max_seqlen_k };
        let changes = Changes { slopes: Some(alibi_slopes), ..Changes::default() };
        packed([q, k, v], &lengths, softmax_scale, [window_size_left, window_size_right], &changes, lse)
    };

    /// [`flash_attn_varlen_windowed`] with slopes and a cap, as [`flash_attn_alibi_windowed_softcap`].
    ///
    /// # Errors
    /// As [`flash_attn_varlen`].
    fn flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_alibi_windowed_softcap_with_lse(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        alibi_slopes: Option<&Tensor>,
        seqlens_q: &Tensor,
        seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
        softmax_scale: f32,
        window_size_left: Option<usize>,
        window_size_right: Option<usize>,
        softcap: f32,
    ), |lse| {
        let lengths = Lengths { q: seqlens_q, k: seqlens_k, max_q: max_seqlen_q, max_k: max_seqlen_k };
        let changes = Changes { slopes: alibi_slopes, softcap: Some(softcap), ..Changes::default() };
        packed([q, k, v], &lengths, softmax_scale, [window_size_left, window_size_right], &changes, lse)
    };
}
