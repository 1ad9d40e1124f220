"""FlexAttention's functions: ``score_mod`` and ``mask_mod``, traced into score programs and compiled into the kernel.

    from flashtune.flex import create_block_mask, flex_attention

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    block_mask = create_block_mask(causal, B=None, H=None, Q_LEN=4096, KV_LEN=4096)
    out = flex_attention(query, key, value, block_mask=block_mask)

The arguments are those of ``torch.nn.attention.flex_attention``; ``docs/integrations.md`` has what the functions may
do.
"""

import sys
import weakref

from .. import functional as _functional
from .._tensors import adapter
from ..block_mask import BlockMask
from ..errors import InvalidArgument, InvalidTensor, Unsupported
from . import _words  # noqa: F401  (gives traced values their operators)
from ._kept import trace
from ._trace import Traced

__all__ = [
    "Traced",
    "and_masks",
    "create_block_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
    "trace_mask",
    "trace_score",
]


def flex_attention(
    query,
    key,
    value,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel_options=None,
    *,
    return_aux=None,
):
    """Attention as ``torch.nn.attention.flex_attention.flex_attention`` defines it, without ``torch.compile``.

    query: ``[batch, heads, q_len, head_dim]``; key: ``[batch, kv_heads, kv_len, head_dim]``; value: ``[batch, kv_heads,
    kv_len, head_dim_v]``; with ``enable_gqa`` heads is a multiple of kv_heads, else they are equal. Gives ``[batch,
    heads, q_len, head_dim_v]``. Gradients come by autograd. Arrays of NumPy are taken, too.
    score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` gives what goes into the softmax in place of ``score``, which
        is scaled. It is traced, and the trace is kept while what it has captured is alike: numbers of Python that it
        uses are part of the kernel, so another number is another kernel; tensors are read at run time, those without
        axes too, and get gradients where they ask for them.
    block_mask: what :func:`create_block_mask` gives; or a ``BlockMask`` of PyTorch, whose ``mask_mod`` is traced as
        ``score_mod`` is (of one without, as ``BlockMask.from_kv_blocks`` makes it, the blocks are the mask); or what
        :func:`trace_mask` gives, of which nothing is kept between calls: its tensors may change.
    scale: ``1 / sqrt(head_dim)`` when not given.
    return_lse: gives ``(out, lse)`` with the log-sum-exp of the scores, float32 ``[batch, heads, q_len]``;
        ``return_aux`` gives ``(out, AuxOutput(lse))``, and has no ``max_scores``.
    kernel_options: those of PyTorch's kernels; nothing here reads them.

    Raises :class:`Unsupported` for what a function does that has no words in score programs, with the operation and its
    line.
    """
    del kernel_options
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        # Compilers cannot look into a trace: the call runs between two graphs.
        outside = torch.compiler.disable(flex_attention)
        return outside(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux=return_aux)
    if return_lse and return_aux is not None:
        raise InvalidArgument("return_lse and return_aux are both given; leave out return_lse")
    wants_lse = bool(return_lse) or bool(getattr(return_aux, "lse", False))
    if getattr(return_aux, "max_scores", False):
        raise Unsupported("return_aux asks for max_scores, which no kernel keeps; ask for lse alone")
    device, sizes = _call_of(query, key)
    score, tensors = None, {}
    if score_mod is not None:
        traced = trace(score_mod, "score_mod", "s_", device, sizes)
        score, tensors = traced.text, dict(traced.tensors)
        score = None if score == "score" else score
    mask, prepared = None, None
    if isinstance(block_mask, BlockMask):
        prepared = block_mask
    elif block_mask is not None:
        traced = block_mask if isinstance(block_mask, Traced) else _of_torch(block_mask, device, sizes)
        if traced.text != "true":
            mask = traced.text
            tensors.update(traced.tensors)
    found = _functional.attention(
        query,
        key,
        value,
        mask=mask,
        score=score,
        tensors=tensors or None,
        scale=scale,
        enable_gqa=enable_gqa,
        return_lse=wants_lse,
        block_mask=prepared,
    )
    if return_aux is None:
        return found
    aux = sys.modules["torch.nn.attention.flex_attention"].AuxOutput
    return (found[0], aux(lse=found[1])) if wants_lse else (found, aux())


def create_block_mask(
    mask_mod,
    B,
    H,
    Q_LEN,
    KV_LEN,
    device=None,
    BLOCK_SIZE=128,
    _compile=False,
    *,
    tensors=None,
    H_KV=None,
):
    """A mask for calls of :func:`flex_attention` and :func:`flashtune.attention`, made once, such as for all layers.

    mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` gives whether a query sees a key; or the text of a mask, with
        ``tensors`` and ``H_KV`` as :func:`flashtune.create_block_mask` takes them.
    B, H: sequences and query heads, None where they do not matter. They are looked at only where the function reads
        ``b`` or ``h``.
    Q_LEN, KV_LEN: rows of query and of key.
    device: where the calls compute; that of the function's tensors when not given, else the current GPU, if there is
        one.
    BLOCK_SIZE: not needed: kernels have blocks of their own. ``_compile`` neither.

    The function is called here and not again: a number that it has taken from elsewhere stays; tensors are read by the
    calls, and must stay as they are for as long as the block mask is used.
    """
    del BLOCK_SIZE, _compile
    if isinstance(mask_mod, str) or mask_mod is None:
        return _functional.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, tensors=tensors, H_KV=H_KV)
    if tensors is not None:
        raise InvalidArgument("tensors is given beside a function; what the function reads is found in it")
    traced = trace_mask(mask_mod, B, H, Q_LEN, KV_LEN, device)
    for name, given, read in (("B", B, "b"), ("H", H, "h")):
        if given is None and read in traced.coordinates:
            what = "sequences" if read == "b" else "heads"
            raise InvalidArgument(f"{name} is None, and mask_mod reads {read}; pass the number of {what}")
    b, h = (n if read in traced.coordinates else None for n, read in ((B, "b"), (H, "h")))
    return _functional.create_block_mask(traced.text, b, h, Q_LEN, KV_LEN, device, tensors=traced.tensors, H_KV=H_KV)


def trace_score(score_mod, query, key):
    """What ``score_mod`` is as a score program, for calls with tensors like these: :class:`Traced`, for ``score=`` and
    ``tensors=`` of :func:`flashtune.attention`."""
    return trace(score_mod, "score_mod", "s_", *_call_of(query, key))


def trace_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=None):
    """What ``mask_mod`` is as a score program, for calls of these sizes: :class:`Traced`, for ``mask=`` and
    ``tensors=`` of :func:`flashtune.attention`."""
    sizes = {"b": B, "h": H, "q": Q_LEN, "kv": KV_LEN}
    return trace(mask_mod, "mask_mod", "m_", _device(device), sizes)


def noop_mask(batch, head, token_q, token_kv):
    """A mask_mod that lets every query see every key."""
    return True


def and_masks(*mask_mods):
    """A mask_mod of what all of these let a query see."""
    return _joined(mask_mods, "and_masks", lambda a, b: a & b)


def or_masks(*mask_mods):
    """A mask_mod of what any of these lets a query see."""
    return _joined(mask_mods, "or_masks", lambda a, b: a | b)


def _joined(mask_mods, name, join):
    if not mask_mods or not all(callable(m) for m in mask_mods):
        raise InvalidArgument(f"{name} was given {mask_mods!r}; pass functions of (b, h, q_idx, kv_idx)")

    def joined(b, h, q_idx, kv_idx):
        found = mask_mods[0](b, h, q_idx, kv_idx)
        for mask_mod in mask_mods[1:]:
            found = join(found, mask_mod(b, h, q_idx, kv_idx))
        return found

    return joined


def _call_of(query, key):
    """The device of a call, and what its coordinates go to."""
    adapter(query)
    for name, t in (("query", query), ("key", key)):
        shape = tuple(getattr(t, "shape", ()))
        if len(shape) != 4:
            raise InvalidTensor(f"{name} has the shape {shape}; it is [batch, heads, rows, head_dim]")
    b, h, q_len, _ = query.shape
    return str(getattr(query, "device", "cpu")), {"b": b, "h": h, "q": q_len, "kv": key.shape[2]}


def _device(device):
    return str(_functional._anywhere() if device is None else device)


# What a BlockMask of PyTorch without a function is: a table of its blocks, kept as long as it is.
_tables = weakref.WeakKeyDictionary()


def _of_torch(block_mask, device, sizes):
    """The mask of a BlockMask of PyTorch."""
    mask_mod = getattr(block_mask, "mask_mod", None)
    if mask_mod is None:
        raise InvalidArgument(
            f"block_mask is a {type(block_mask).__name__}; pass what flashtune.flex.create_block_mask gives, or a "
            "BlockMask of PyTorch"
        )
    flex = sys.modules["torch.nn.attention.flex_attention"]
    mask_mod = getattr(mask_mod, "fn", mask_mod)
    q_len, kv_len = block_mask.seq_lengths
    if (q_len, kv_len) != (sizes["q"], sizes["kv"]):
        raise InvalidArgument(
            f"block_mask is made for {q_len} queries and {kv_len} keys, the call has {sizes['q']} and {sizes['kv']}; "
            "make another"
        )
    if mask_mod is not flex.noop_mask:
        return trace(mask_mod, "mask_mod", "m_", device, sizes)
    live = _tables.get(block_mask)
    if live is None:
        # Of [batch, heads, blocks of queries, blocks of keys].
        live = _tables[block_mask] = block_mask.to_dense().bool().contiguous()
    of_queries, of_keys = block_mask.BLOCK_SIZE
    of_heads = ["b" if live.shape[0] > 1 else "0", "h" if live.shape[1] > 1 else "0"]
    index = [*of_heads, f"q // {of_queries}", f"kv // {of_keys}"]
    return Traced(f"m_live[{', '.join(index)}]", {"m_live": live}, {"b", "h", "q", "kv"})
