"""The operators ``flashtune::attend_varlen`` and ``flashtune::attend_varlen_backward``: packed sequences, with
gradients of q, k and v."""

import torch

from ..errors import InvalidArgument, InvalidTensor, Unsupported
from .._dropout import Dropout
from .._tensors import no_gradient_of
from ._operators import _LIBRARY, _TAGS, asks_for_gradient, is_eager, is_last, of_transform, state_tensor

_SEQUENCES = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, float? scale, bool causal, SymInt left, SymInt right, SymInt chunk, float softcap, "
    "Tensor? alibi_slopes, Tensor? s_aux"
)
_LIBRARY.define(f"attend_varlen(Tensor q, Tensor k, Tensor v, {_SEQUENCES}) -> (Tensor, Tensor)", tags=_TAGS)
_LIBRARY.define(
    "attend_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    f"{_SEQUENCES}, Tensor? rng_state=None, float dropout_p=0.0) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
# With scores dropped, by a state on the device.
_LIBRARY.define(
    f"attend_varlen_dropout(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, Tensor rng_state, float dropout_p) -> "
    "(Tensor, Tensor)",
    tags=_TAGS,
)
attend_varlen_op = torch.ops.flashtune.attend_varlen.default
attend_varlen_dropout_op = torch.ops.flashtune.attend_varlen_dropout.default
attend_varlen_backward_op = torch.ops.flashtune.attend_varlen_backward.default


def attend(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, used_q, used_k, scale, causal, window, softcap, slopes, sinks,
    want_lse, dropout=None, chunk=0,
):  # fmt: skip
    """One call by way of the operator: O, and with ``want_lse`` the log-sum-exp."""
    eager = is_eager(q, k, v)
    if not eager and not torch.compiler.is_compiling() and (error := of_transform()) is not None:
        raise error
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if t is None:
            raise InvalidArgument(f"{name} is None, but rows are packed; pass [batch + 1] first rows")
    tensors = dict(k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    given = dict(seqused_q=used_q, seqused_k=used_k, alibi_slopes=slopes, s_aux=sinks)
    tensors.update((name, t) for name, t in given.items() if t is not None)
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise InvalidTensor(f"{name} is a {type(t).__name__}; pass a torch.Tensor as q is")
    for name in ("alibi_slopes", "s_aux"):
        if torch.is_grad_enabled() and given[name] is not None and asks_for_gradient(given[name]):
            raise no_gradient_of(name)
    try:
        left, right = window
    except (TypeError, ValueError):
        raise InvalidArgument(f"window_size is {window!r}; it is (left, right), -1 for all") from None
    scale = None if scale is None else float(scale)
    run = _AttendVarlen.apply if eager else attend_varlen_op
    more = ()
    if dropout is not None:
        run, more = attend_varlen_dropout_op, (state_tensor(dropout, q), dropout.p)
    out, lse = run(
        q, k, v, cu_seqlens_q, cu_seqlens_k, used_q, used_k, max_q, max_k, scale, bool(causal), left, right,
        chunk, float(softcap or 0.0), slopes, sinks, *more,
    )  # fmt: skip
    return (out, lse) if want_lse else out


class _AttendVarlen(torch.autograd.Function):
    """``attend_varlen`` and its gradients, for calls that no compiler sees."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _attend(*inputs)
        _setup(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse, True)


def _attend(q, k, v, *args):
    """The kernel of ``attend_varlen``."""
    from .. import serving

    cu_q, cu_k, used_q, used_k, max_q, max_k, scale, causal, left, right, chunk, softcap, slopes, sinks, *dropped = args
    return serving.varlen(
        q, k, v, cu_q, cu_k, max_q, max_k, used_q, used_k, scale, causal, (left, right), softcap, slopes, sinks,
        True, dropout=Dropout(dropped[1], dropped[0]) if dropped else None, chunk=chunk,
    )  # fmt: skip


def _backward(dout, q, k, v, out, lse, dlse, *args):
    """The kernel of ``attend_varlen_backward``."""
    from ..gradients import flash_attn_varlen_backward

    # Sums and slices leave gradients with any strides.
    dout = dout if dout.stride(-1) == 1 or dout.numel() == 0 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    cu_q, cu_k, used_q, used_k, max_q, max_k, scale, causal, left, right, chunk, softcap, slopes, sinks, *dropped = args
    state, p = dropped if len(dropped) == 2 else (None, 0.0)
    return flash_attn_varlen_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal, (left, right), softcap, slopes,
        dlse=dlse, seqused_q=used_q, seqused_k=used_k, s_aux=sinks, dropout_p=p, rng_state=state,
        attention_chunk=chunk,
    )  # fmt: skip


def _attend_fake(q, k, v, *args):
    if q.dim() != 3 or v.dim() != 3:
        shapes = tuple(q.shape), tuple(v.shape)
        raise InvalidTensor(f"q has the shape {shapes[0]} and v {shapes[1]}; packed rows have three dimensions")
    rows, heads = q.shape[:2]
    narrow = q.dtype == getattr(torch, "float8_e4m3fn", None)
    out = q.new_empty((rows, heads, v.shape[2]), dtype=torch.bfloat16 if narrow else q.dtype)
    return out, q.new_empty((heads, rows), dtype=torch.float32)


def _backward_fake(dout, q, k, v, *args):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("attend_varlen", _attend, _device)
    _LIBRARY.impl("attend_varlen_dropout", _attend, _device)
    _LIBRARY.impl("attend_varlen_backward", _backward, _device)
torch.library.register_fake("flashtune::attend_varlen", _attend_fake, lib=_LIBRARY)
torch.library.register_fake("flashtune::attend_varlen_dropout", _attend_fake, lib=_LIBRARY)
torch.library.register_fake("flashtune::attend_varlen_backward", _backward_fake, lib=_LIBRARY)


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    inputs, dropped = inputs[:17], inputs[17:]
    *tensors, cu_q, cu_k, used_q, used_k, max_q, max_k, scale, causal, left, right = inputs[:13]
    chunk, softcap, slopes, sinks = inputs[13:]
    ctx.save_for_backward(*tensors, *output, cu_q, cu_k, used_q, used_k, slopes, sinks, *dropped[:1])
    ctx.numbers, ctx.dropout = (max_q, max_k, scale, causal, left, right, chunk, softcap), dropped[1:]


def _gradients(ctx, dout, dlse, eager=False):
    q, k, v, out, lse, cu_q, cu_k, used_q, used_k, slopes, sinks, *state = ctx.saved_tensors
    none = (None,) * (14 + 2 * len(state))
    if dout is None and dlse is None:
        return None, None, None, *none
    if dout is None:
        dout = torch.zeros_like(out)
    run = _backward if eager and is_last(dout, dlse) else attend_varlen_backward_op
    gradients = run(
        dout, q, k, v, out, lse, dlse, cu_q, cu_k, used_q, used_k, *ctx.numbers, slopes, sinks, *state, *ctx.dropout
    )
    return *gradients, *none


def _no_second(ctx, *_):
    raise Unsupported(
        "a gradient of a gradient of attention would be needed, and is not computed; leave out create_graph"
    )


torch.library.register_autograd("flashtune::attend_varlen", _gradients, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd("flashtune::attend_varlen_dropout", _gradients, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd("flashtune::attend_varlen_backward", _no_second, lib=_LIBRARY)
