"""Arguments of the builds of flash-attention that mean nothing here, or what no kernel computes."""

import numbers

from .errors import InvalidArgument, Unsupported

# Arguments of the builds of flash-attention that are taken at the value that means "not used", and why no other is.
_NEUTRAL = {
    "qv": (None, "queries for latent values are not computed; expand V to heads (a head dim of at most 256)"),
    "q_v": (None, "queries for latent values are not computed; expand V to heads (a head dim of at most 256)"),
    "dropout_p": (0, "decoding drops nothing; pass 0.0"),
    "sm_margin": (0, "kernels run on all multiprocessors; pass 0"),
    "return_attn_probs": (
        False, "probabilities are never stored; ask for the log-sum-exp (return_softmax_lse, return_lse)"
    ),
    "cp_world_size": (1, "context parallelism is the caller's: merge the outputs of ranks by their log-sum-exps"),
    "cp_rank": (0, "context parallelism is the caller's: merge the outputs of ranks by their log-sum-exps"),
    "cp_tot_seqused_k": (None, "context parallelism is the caller's: merge the outputs of ranks by their log-sum-exps"),
    "score_mod": (None, "functions are not compiled; use flashtune.attention with the text of a score program"),
    "mask_mod": (None, "functions are not compiled; use flashtune.attention with the text of a mask program"),
    "aux_tensors": (None, "they belong to score_mod and mask_mod; use flashtune.attention with tensors="),
    "block_sparse_tensors": (None, "use flashtune.attention with a mask program or create_block_mask"),
    "gather_kv_indices": (None, "give the places of keys as a block_table with pages of one token"),
    "seqlen_k_per_split": (None, "a kernel's schedule says how keys are split; leave it out"),
    "min_seqlen_k": (None, "a kernel's schedule says how keys are split; leave it out"),
}
# What changes no result here: all results are deterministic, packing of heads and versions are the kernel's choice.
_IGNORED = {"deterministic", "pack_gqa", "fa_version"}


def refuse_others(num_splits, others):
    """Refuses arguments of other builds that mean something."""
    for argument, value in others.items():
        if argument in _IGNORED:
            continue
        if argument not in _NEUTRAL:
            raise TypeError(f"{argument!r} is no argument of this function")
        neutral, remedy = _NEUTRAL[argument]
        if value is not None and (neutral is None or hasattr(value, "shape") or value != neutral):
            raise Unsupported(f"{argument} is {short(value)}; {remedy}")
    # How many pieces the keys are cut into is the schedule's, and changes no more than the last bits.
    if num_splits is not None and (not isinstance(num_splits, numbers.Integral) or num_splits < 0):
        raise InvalidArgument(
            f"num_splits is {short(num_splits)}; pass a whole number, or 0: a kernel's schedule says how keys are split"
        )


def short(value):
    return f"a {type(value).__name__}" if hasattr(value, "shape") and value.shape else repr(value)
