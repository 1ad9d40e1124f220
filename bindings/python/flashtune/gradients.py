"""Gradients of attention, from what a forward pass read and wrote, for hosts that call the backward pass themselves.
Within autograd the functions of the forward pass have them already.

The same call gives the same bytes.
"""

from . import _library as abi
from ._programs import Program
from ._tensors import adapter
from .engine import mask_of
from .errors import Unsupported
from .functional import _changed, _default, check_deterministic


def flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=True,
    dlse=None,
    into=None,
):
    """dQ, dK and dV of :func:`flash_attn_func`.

    dout: the loss's gradient by out, of its shape and dtype.
    q, k, v, out, softmax_lse: what the forward pass read, and what it gave with ``return_lse``: float32 ``[batch, heads,
    q_len]``, contiguous.
    softmax_scale, causal, window_size, softcap, alibi_slopes: as in the forward pass.
    deterministic: every kernel there is gives the same bytes in every run, whatever this says.
    dlse: the loss's gradient by softmax_lse, where it depends on that, as when parts of attention are merged by it.
    into: memory for the three gradients, of the shapes of q, k and v and of their dtype; new tensors when not given.
    Gives ``(dq, dk, dv)``. With fewer heads than q, k and v get the sums over the query heads that share them. Queries
    that see no key, and keys that no query sees, get zeros.
    """
    check_deterministic(deterministic)
    program = _changed(softcap, alibi_slopes)
    tensors = adapter(q)
    kind, left, right = mask_of(causal, window_size)
    engine = _default(tensors, q)
    return engine._gradients(
        tensors, dout, q, k, v, out, softmax_lse, dlse, True, kind, left, right, softmax_scale, into, program
    )


def attention_backward(
    dout,
    query,
    key,
    value,
    out,
    lse,
    mask=None,
    score=None,
    sink=None,
    tensors=None,
    scale=None,
    needs=(),
    dlse=None,
    into=None,
):
    """dQ, dK and dV of :func:`attention`, whose derivatives by the score are taken of any program. At a kink they are
    PyTorch's: 0 for ``abs`` at 0, half to each of equals in ``min`` and ``max``, all to what ``clamp`` bounds.

    dout, out: ``[batch, heads, q_len, head_dim_v]``; lse: float32 ``[batch, heads, q_len]`` of the forward pass.
    mask, score, sink, tensors, scale: as in the forward pass.
    needs: names of tensors whose gradients are wanted too. There are none yet: a name raises :class:`Unsupported`.
    dlse, into: as in :func:`flash_attn_backward`.
    """
    if isinstance(needs, str) or (needs := list(needs)):
        raise Unsupported(f"needs is {needs!r}; gradients of what a score program reads are not computed yet, leave it out")
    program = Program(mask, score, sink, tensors)
    if all(text is None for text in program.texts):
        program = None
    adapted = adapter(query)
    engine = _default(adapted, query)
    return engine._gradients(
        adapted, dout, query, key, value, out, lse, dlse, False, abi.FULL, 0, 0, scale, into, program
    )
