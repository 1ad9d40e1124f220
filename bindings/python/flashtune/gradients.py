"""Gradients of attention, from what a forward pass read and wrote, for hosts that call the backward pass themselves.
Within autograd the functions of the forward pass have them already.

The same call gives the same bytes.
"""

from . import _dense_call
from . import _library as abi
from ._dense_call import mask_of
from ._dropout import of_backward
from ._programs import Program
from ._repeated import is_plain
from ._serving_call import Call, window_of
from ._tensors import adapter
from .errors import InvalidArgument, Unsupported
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
    residual=None,
    dropout_p=0.0,
    rng_state=None,
    attention_chunk=0,
):
    """dQ, dK and dV of :func:`flash_attn_func`.

    dout: the loss's gradient by out, of its shape and dtype.
    q, k, v, out, softmax_lse: what the forward pass read, and what it gave with ``return_lse``: float32
    ``[batch, heads, q_len]``, contiguous.
    softmax_scale, causal, window_size, attention_chunk, softcap, alibi_slopes: as in the forward pass.
    deterministic: every kernel there is gives the same bytes in every run, whatever this says.
    dlse: the loss's gradient by softmax_lse, where it depends on that, as when parts of attention are merged by it.
    into: memory for the three gradients, of the shapes of q, k and v and of their dtype; new tensors when not given.
    residual: what out lost by rounding, as the forward pass gave it with ``return_residual``: rows that attend mostly
        to one key then have gradients with the digits of others.
    dropout_p, rng_state: those of the forward pass, which gives the state by ``return_rng_state``.
    Gives ``(dq, dk, dv)``. With fewer heads than q, k and v get the sums over the query heads that share them. Queries
    that see no key, and keys that no query sees, get zeros.
    """
    check_deterministic(deterministic)
    program = _changed(softcap, alibi_slopes, None, attention_chunk)
    tensors = adapter(q)
    kind, left, right = mask_of(causal, window_size)
    engine = _default(tensors, q)
    return _dense_call.gradients(
        engine, tensors, dout, q, k, v, out, softmax_lse, dlse, True, kind, left, right, softmax_scale, into, program,
        residual=residual, dropout=of_backward(dropout_p, rng_state),
    )  # fmt: skip


def flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=True,
    dlse=None,
    into=None,
    *,
    seqused_q=None,
    seqused_k=None,
    s_aux=None,
    residual=None,
    dropout_p=0.0,
    rng_state=None,
    attention_chunk=0,
):
    """dQ, dK and dV of :func:`flash_attn_varlen_func` over packed keys.

    dout: the loss's gradient by out, ``[total_q, heads, head_dim_v]``.
    q, k, v, out, softmax_lse: what the forward pass read, and what it gave with ``return_softmax_lse``: float32
        ``[heads, total_q]``, contiguous.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: as in the forward pass, read where the
        kernel runs. Rows behind a bound are cut: nothing is read or written beyond it.
    softmax_scale, causal, window_size, attention_chunk, softcap, alibi_slopes, s_aux: as there. The gradient of s_aux
        is not computed.
    deterministic: every kernel there is gives the same bytes in every run, whatever this says.
    dlse: the loss's gradient by softmax_lse, of its shape, where it depends on that.
    into: memory for the three gradients, of the shapes of q, k and v and of their dtype; new tensors when not given.
    residual: what out lost by rounding, bfloat16 of its shape, where a forward pass of the caller's wrote it.
    dropout_p, rng_state: those of the forward pass, which gives the state by ``return_rng_state``.
    Gives ``(dq, dk, dv)``. Queries that see no key, and keys that no query sees, get zeros. Rows of no sequence, and
    those that are not used, are 0 in new tensors and stay as they are in those of ``into``.
    """
    check_deterministic(deterministic)
    program = _changed(softcap, alibi_slopes, s_aux, attention_chunk)
    if cu_seqlens_q is None:
        raise InvalidArgument("cu_seqlens_q is None, but rows of q are packed; pass [batch + 1] first rows")
    key = None
    dropout = of_backward(dropout_p, rng_state)
    if into is None and program is None and residual is None and dropout is None:
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        given = q, k, v, dout, out, softmax_lse, dlse, *lengths
        numbers = max_seqlen_q, max_seqlen_k
        forms = adapter(q).forms_of(given) if is_plain(softmax_scale, causal, window_size, numbers) else None
        if forms is not None:
            key = forms, softmax_scale, causal, window_size, numbers
            found = _like_before(key, given, lengths)
            if found is not None:
                return found
    call = Call(q, k, v, None, 0, {})
    call.queries(q, cu_seqlens_q, max_seqlen_q, seqused_q)
    call.packed_keys(k, v, cu_seqlens_k, seqused_k, max_seqlen_k)
    kind, left, right = mask_of(causal, window_of(window_size))
    return _dense_call.gradients(
        call.engine, call.tensors, dout, q, k, v, out, softmax_lse, dlse, True, kind, left, right, softmax_scale, into,
        program, packed=call.of_gradients(), key=key, residual=residual, dropout=dropout,
    )  # fmt: skip


def _like_before(key, given, lengths):
    """Gradients of packed sequences of a call like one before; else None."""
    q, k, v, dout, out, lse, dlse, *_ = given
    tensors = adapter(q)
    engine = _default(tensors, q)
    known = engine._again_backward.get(key)
    if known is None:
        return None
    try:
        packed = [0 if t is None else tensors.address(t) for t in lengths]
    except RuntimeError:
        return None
    device = getattr(q, "device", "cpu")
    return _dense_call.gradients_again(engine, known, tensors, device, (dout, q, k, v, out), lse, dlse, packed)


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
    residual=None,
    dropout_p=0.0,
    rng_state=None,
):
    """dQ, dK and dV of :func:`attention`, whose derivatives by the score are taken of any program. At a kink they are
    PyTorch's: 0 for ``abs`` at 0, half to each of equals in ``min`` and ``max``, all to what ``clamp`` bounds.

    dout, out: ``[batch, heads, q_len, head_dim_v]``; lse: float32 ``[batch, heads, q_len]`` of the forward pass.
    mask, score, sink, tensors, scale: as in the forward pass.
    needs: names in ``tensors`` of float tensors, and of numbers that the program takes as floats, whose gradients are
    wanted too. Of a tensor that is broadcast each element gets the sum over all scores (or sinks) that read it.
    dlse, residual, dropout_p, rng_state: as in :func:`flash_attn_backward`; no dropout beside ``needs``.
    into: memory for ``(dq, dk, dv)``, and with ``needs`` as fourth a dict from names to memory of the tensors' shapes
    (of no axis for numbers), float16, bfloat16 or float32 whatever the tensor is. It must not overlap anything else.
    Gives ``(dq, dk, dv)``; with ``needs`` ``(dq, dk, dv, gradients)``, a dict from names to gradients, of the tensors'
    dtypes where there is no ``into``.
    """
    if isinstance(needs, str):
        raise InvalidArgument(f"needs is {needs!r}; pass a list of names")
    program = Program(mask, score, sink, tensors)
    if all(text is None for text in program.texts):
        program = None
    adapted = adapter(query)
    engine = _default(adapted, query)
    return _dense_call.gradients(
        engine, adapted, dout, query, key, value, out, lse, dlse, False, abi.FULL, 0, 0, scale, into, program,
        needs=list(needs), residual=residual, dropout=of_backward(dropout_p, rng_state),
    )  # fmt: skip
