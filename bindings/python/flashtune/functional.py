"""Attention under the names and with the arguments that flash-attention and PyTorch have given it. Forward only.

What is not supported raises :class:`Unsupported`; nothing falls back to anything in silence.
"""

from . import _library as abi
from . import engine as _engine
from ._tensors import adapter
from .engine import default_engine, mask_of
from .errors import Unsupported


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    return_lse=False,
):
    """Attention in flash-attention's layout.

    q: ``[batch, q_len, heads, head_dim]``; k: ``[batch, kv_len, kv_heads, head_dim]``; v: ``[batch, kv_len, kv_heads,
    head_dim_v]``; heads is a multiple of kv_heads. float16, bfloat16 or float32, any strides with a contiguous last
    dimension; head dims are multiples of 8 from 16 to 256.
    softmax_scale: ``1 / sqrt(head_dim)`` when not given.
    causal: query ``i`` sees keys up to ``i + kv_len - q_len``.
    window_size: keys to the left and to the right of that position that a query sees; -1 is all.
    Gives ``[batch, q_len, heads, head_dim_v]`` of q's dtype, and with ``return_lse`` the log-sum-exp of the scaled
    scores, float32 ``[batch, heads, q_len]``. A query that sees no key gives 0 and -inf.
    """
    if softcap:
        raise Unsupported(f"softcap is {softcap}; scores cannot be capped yet, leave it 0.0")
    if alibi_slopes is not None:
        raise Unsupported("alibi_slopes is given; ALiBi is not supported yet, leave it None")
    tensors = adapter(q)
    mask, left, right = mask_of(causal, window_size)
    return _default(tensors, q)._attend(tensors, q, k, v, True, mask, left, right, softmax_scale, return_lse)


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """Attention as ``torch.nn.functional.scaled_dot_product_attention`` defines it.

    query: ``[batch, heads, q_len, head_dim]``; key: ``[batch, heads, kv_len, head_dim]``; value: ``[batch, heads,
    kv_len, head_dim_v]``; with ``enable_gqa`` key and value may have fewer heads. Gives ``[batch, heads, q_len,
    head_dim_v]``.
    is_causal: as PyTorch has it, query ``i`` sees keys 0 to ``i``, also where q_len and kv_len differ
    (:func:`flash_attn_func` aligns the last query with the last key instead).
    """
    if attn_mask is not None:
        raise Unsupported(
            "attn_mask is given; mask tensors are not supported yet, use is_causal or flash_attn_func's window_size"
        )
    if dropout_p:
        raise Unsupported(f"dropout_p is {dropout_p}; there is no dropout, pass 0.0")
    tensors = adapter(query)
    engine = _default(tensors, query)
    top_left, grouped = bool(is_causal), bool(enable_gqa)
    return engine._attend(
        tensors, query, key, value, False, abi.FULL, 0, 0, scale, False, top_left=top_left, grouped=grouped
    )


def _default(tensors, q):
    """The default engine of a tensor's device."""
    name = tensors.name(getattr(q, "device", "cpu"))
    engine = _engine._engines.get(name)
    return default_engine(name) if engine is None or engine.closed else engine
